//! A graph under way, in the messages of `onnx.proto`, whose field numbers stand beside the names.
use super::proto::Message;
use crate::{Network, Result};
use std::collections::BTreeSet;

/// A value of an attribute.
pub enum Attribute<'a> {
    Int(i64),
    Float(f32),
    Ints(&'a [usize]),
}

/// A size of an input or output: fixed, or whatever it is called.
#[derive(Clone, Copy)]
pub enum Size {
    Fixed(usize),
    Free(&'static str),
}

/// TensorProto.DataType
pub const FLOAT: i64 = 1;
pub const INT64: i64 = 7;

pub struct Graph<'a> {
    network: &'a Network,
    nodes: Vec<Message>,
    initializers: Vec<Message>,
    inputs: Vec<Message>,
    outputs: Vec<Message>,
    known: BTreeSet<String>,
}

impl<'a> Graph<'a> {
    pub fn new(network: &'a Network) -> Self {
        let (nodes, initializers, inputs, outputs) = Default::default();
        Self { network, nodes, initializers, inputs, outputs, known: BTreeSet::new() }
    }

    /// NodeProto: input = 1, output = 2, name = 3, op_type = 4, attribute = 5. The first output has the node's name.
    pub fn nodes(
        &mut self,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
        outputs: &[&str],
    ) -> String {
        let node = Message::default()
            .each(inputs, |node, name| node.text(1, name))
            .each(outputs, |node, name| node.text(2, name))
            .text(3, outputs.first().copied().unwrap_or_default())
            .text(4, op)
            .each(attributes, |node, (name, value)| node.message(5, &attribute(name, value)));
        self.nodes.push(node);
        outputs.first().copied().unwrap_or_default().to_owned()
    }

    pub fn node(
        &mut self,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
        name: &str,
    ) -> String {
        self.nodes(op, inputs, attributes, &[name])
    }

    /// A parameter of the network; its name.
    pub fn weight(&mut self, name: &str) -> Result<String> {
        if self.known.insert(name.to_owned()) {
            let (shape, numbers) = (self.network.shape(name)?, self.network.numbers(name)?);
            self.constant(name, &shape, &numbers);
        }
        Ok(name.to_owned())
    }

    /// TensorProto: dims = 1, data_type = 2, name = 8, raw_data = 9.
    pub fn constant(&mut self, name: &str, shape: &[usize], numbers: &[f32]) {
        let raw: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.initializers.push(tensor(name, shape, FLOAT, &raw));
    }

    pub fn integers(&mut self, name: &str, numbers: &[i64]) -> String {
        let raw: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.initializers.push(tensor(name, &[numbers.len()], INT64, &raw));
        name.to_owned()
    }

    /// A single integer.
    pub fn scalar(&mut self, name: &str, number: i64) {
        self.initializers.push(tensor(name, &[], INT64, &number.to_le_bytes()));
    }

    pub fn input(&mut self, name: &str, kind: i64, shape: &[Size]) -> String {
        self.inputs.push(value(name, kind, shape));
        name.to_owned()
    }

    pub fn output(&mut self, name: &str, shape: &[Size]) {
        self.outputs.push(value(name, FLOAT, shape));
    }

    /// GraphProto: node = 1, name = 2, initializer = 5, input = 11, output = 12.
    pub fn finish(self, name: &str) -> Message {
        Message::default()
            .each(&self.nodes, |graph, node| graph.message(1, node))
            .text(2, name)
            .each(&self.initializers, |graph, tensor| graph.message(5, tensor))
            .each(&self.inputs, |graph, value| graph.message(11, value))
            .each(&self.outputs, |graph, value| graph.message(12, value))
    }
}

fn tensor(name: &str, shape: &[usize], kind: i64, raw: &[u8]) -> Message {
    let dims = Message::default().each(shape, |tensor, size| tensor.int(1, *size as i64));
    dims.int(2, kind).text(8, name).bytes(9, raw)
}

/// AttributeProto: name = 1, f = 2, i = 3, ints = 8, type = 20 (FLOAT 1, INT 2, INTS 7).
fn attribute(name: &str, value: &Attribute) -> Message {
    let attribute = Message::default().text(1, name);
    match value {
        Attribute::Float(value) => attribute.float(2, *value).int(20, 1),
        Attribute::Int(value) => attribute.int(3, *value).int(20, 2),
        Attribute::Ints(values) => {
            attribute.each(*values, |attribute, value| attribute.int(8, *value as i64)).int(20, 7)
        }
    }
}

/// ValueInfoProto: name = 1, type = 2; TypeProto: tensor_type = 1; its elem_type = 1, shape = 2; TensorShapeProto: dim = 1; a
/// dimension's dim_value = 1, dim_param = 2.
fn value(name: &str, kind: i64, shape: &[Size]) -> Message {
    let shape = Message::default().each(shape, |shape, size| {
        let dim = match size {
            Size::Fixed(size) => Message::default().int(1, *size as i64),
            Size::Free(name) => Message::default().text(2, name),
        };
        shape.message(1, &dim)
    });
    let tensor = Message::default().int(1, kind).message(2, &shape);
    Message::default().text(1, name).message(2, &Message::default().message(1, &tensor))
}

//! What a host build of the kernels is asked to do, as the bytes that its runner reads.
use taper_optim::rule::MAX_BUFFERS;

pub struct Row {
    pub elements: usize,
    pub x: Vec<u8>,
    /// Buffer after buffer.
    pub state: Vec<u8>,
}

#[derive(Clone)]
pub struct Step {
    pub scale: f64,
    pub limit: f64,
    pub max_norm: f64,
    /// What the device knows and the host does not: 1 a loss in f32, 2 one in f64, 4 the norm.
    pub given: u32,
    pub loss: f64,
    pub norm: f64,
    pub offset: f64,
    pub start: [f64; MAX_BUFFERS],
    pub starts: bool,
    /// By row.
    pub scalars: Vec<Vec<f64>>,
    /// By row.
    pub grads: Vec<Vec<u8>>,
}

pub struct Job {
    pub rows: Vec<Row>,
    pub steps: Vec<Step>,
}

impl Job {
    pub fn bytes(&self, only_reduce: bool, buffers: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in [u32::from(only_reduce), self.rows.len() as u32, self.steps.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        for row in &self.rows {
            bytes.extend((row.elements as u64).to_le_bytes());
            bytes.extend(&row.x);
            bytes.extend(&row.state);
        }
        for step in &self.steps {
            for number in [step.scale, step.limit, step.max_norm] {
                bytes.extend(number.to_le_bytes());
            }
            bytes.extend(step.given.to_le_bytes());
            bytes.extend(step.loss.to_le_bytes());
            bytes.extend(step.norm.to_le_bytes());
            for (grad, scalars) in step.grads.iter().zip(&step.scalars) {
                bytes.extend(step.offset.to_le_bytes());
                step.start[..buffers.max(1)].iter().for_each(|v| bytes.extend(v.to_le_bytes()));
                scalars.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
                bytes.extend(u32::from(step.starts).to_le_bytes());
                bytes.extend(grad);
            }
        }
        bytes
    }
}

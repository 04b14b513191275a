//! A multilayer perceptron: linear layers with ReLU between them.
use crate::cost::{Cost, Count, check_layers, largest, product};
use crate::init::torch_uniform;
use crate::layers::{images, not_zero};
use crate::ops::{Activation, linear};
use crate::registry::{Architecture, Config};
use crate::{Mode, Model, Result, Task};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Configuration of the `mlp`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MlpConfig {
    /// Widths of the hidden layers. Defaults to one of 100, the network of the AMSGrad and AdaBound papers.
    pub hidden: Vec<usize>,
}

impl Default for MlpConfig {
    fn default() -> Self {
        Self { hidden: vec![100] }
    }
}

impl MlpConfig {
    /// Inputs, hidden widths and classes, in order.
    fn widths(&self, task: Task) -> Result<Vec<usize>> {
        let [height, width, channels, classes] = images("mlp", task)?;
        not_zero("mlp", "hidden", "widths", &self.hidden)?;
        check_layers("mlp", "hidden", Count::of(self.hidden.len()) + Count(1))?;
        Ok([&[product(&[height, width, channels]).0 as usize], &self.hidden[..], &[classes]].concat())
    }
}

impl Config for MlpConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        let widths = self.widths(task)?;
        let mut layers = Vec::new();
        for (i, pair) in widths.windows(2).enumerate() {
            // PyTorch counts the ReLUs between the layers of a Sequential.
            let (vb, init) = (vb.pp(2 * i), torch_uniform(pair[0]));
            let weight = vb.get_with_hints((pair[1], pair[0]), "weight", init)?;
            layers.push((weight, vb.get_with_hints(pair[1], "bias", init)?));
        }
        Ok(Box::new(Mlp { layers }))
    }

    fn cost(&self, task: Task) -> Result<Cost> {
        let widths = self.widths(task)?;
        let mut cost = Cost { activation_bytes: product(&[4, widths[0]]).0, ..Cost::default() };
        for pair in widths.windows(2) {
            cost.parameters += product(pair) + Count::of(pair[1]);
            cost.flops += Count(2) * product(pair);
            cost.activation_bytes += product(&[4, pair[1]]);
        }
        Ok(cost)
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::Mlp(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        Some(Task::LEAST_IMAGES)
    }

    fn heaviest(&self) -> Option<String> {
        Some(largest("hidden", &self.hidden))
    }
}

struct Mlp {
    layers: Vec<(Tensor, Tensor)>,
}

impl Model for Mlp {
    fn logits(&mut self, input: &Tensor, _: Mode) -> Result<Tensor> {
        // Weights are PyTorch's, which flattens channels first; with one channel nothing moves.
        let mut x = match input.dims() {
            [_, _, _, channels] if *channels > 1 => {
                input.permute((0, 3, 1, 2))?.contiguous()?.flatten_from(1)?
            }
            [_, _] => input.clone(),
            _ => input.flatten_from(1)?,
        };
        for (i, (weight, bias)) in self.layers.iter().enumerate() {
            let last = i + 1 == self.layers.len();
            x = linear(&x, weight, Some(bias), if last { Activation::None } else { Activation::Relu })?;
        }
        Ok(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_equal_the_published_counts() {
        let mnist = Task::Images { height: 28, width: 28, channels: 1, classes: 10 };
        for (width, count) in [(100, 79_510), (500, 397_510), (1000, 795_010)] {
            let cost = MlpConfig { hidden: vec![width] }.cost(mnist).unwrap();
            assert_eq!(cost.parameters, count);
        }
    }
}

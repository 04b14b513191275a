//! What is exported.
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use taper_models::Task;
use taper_models::registry::Architecture;

/// A network with its weights.
#[derive(Clone, Debug)]
pub struct Network {
    /// What it is made of.
    pub architecture: Architecture,
    /// What it was built for.
    pub task: Task,
    /// How pixels become its input; `None` for text.
    pub normalize: Option<Normalize>,
    /// Parameters and buffers by PyTorch's names.
    pub tensors: BTreeMap<String, Tensor>,
}

/// A number `x` of a channel becomes `(x / scale - mean) / std`.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalize {
    /// 255 for pixels of bytes, 1 for floats.
    pub scale: f32,
    /// One mean a channel.
    pub mean: Vec<f32>,
    /// One standard deviation a channel.
    pub std: Vec<f32>,
}

impl Network {
    /// The shape of a parameter.
    pub(crate) fn shape(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.tensor(name)?.dims().to_vec())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The numbers of a parameter, row by row.
    pub(crate) fn numbers(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.tensor(name)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| Error::Weights(format!("there is no `{name}`")))
    }

    /// The images it takes: channels, rows, columns; and its classes.
    pub(crate) fn images(&self) -> Result<[usize; 4]> {
        match self.task {
            Task::Images { height, width, channels, classes } => Ok([channels, height, width, classes]),
            task => Err(Error::Weights(format!("a network for images was built for {task}"))),
        }
    }
}

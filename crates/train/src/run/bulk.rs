//! The numbers that shards contribute, in one row: on the CPU, or in the memory of the GPU that computed them.
//!
//! On a GPU they are weighted and added up there, and go to the other processes' GPUs over NCCL where the build has it (feature
//! `nccl`), else through the host; the bits are the same. Never run on a device: see docs/cluster.md.
use super::RunError;
use candle_core::{DType, Device, Tensor, Var};
use taper_world::{Tree, World};

/// Numbers in a row.
#[derive(Clone, Debug)]
pub(crate) enum Bulk {
    Host(Vec<f32>),
    /// Of one dimension, of f32.
    Device(Tensor),
}

impl Bulk {
    /// The `length` elements of tensors, each times a weight, or zeros where a variable has none.
    pub fn of<'a>(
        device: &Device,
        tensors: impl Iterator<Item = (Option<&'a Tensor>, &'a Var)>,
        length: usize,
        weight: f64,
    ) -> Result<Self, RunError> {
        let weight = weight as f32;
        if !device.is_cpu() {
            let row = |(tensor, var): (Option<&Tensor>, &Var)| match tensor {
                Some(tensor) => {
                    tensor.detach().flatten_all()?.to_dtype(DType::F32)?.affine(weight.into(), 0.0)
                }
                None => Tensor::zeros(var.elem_count(), DType::F32, device),
            };
            let rows = tensors.map(row).collect::<candle_core::Result<Vec<_>>>()?;
            return Ok(Self::Device(match rows.is_empty() {
                true => Tensor::zeros(0, DType::F32, device)?,
                false => Tensor::cat(&rows, 0)?,
            }));
        }
        let mut numbers = Vec::with_capacity(length);
        for (tensor, var) in tensors {
            let Some(tensor) = tensor else {
                numbers.resize(numbers.len() + var.elem_count(), 0.0);
                continue;
            };
            let own = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            numbers.extend(own.into_iter().map(|x| x * weight));
        }
        Ok(Self::Host(numbers))
    }

    /// Both, element by element.
    pub fn plus(self, other: Self) -> Result<Self, RunError> {
        Ok(match (self, other) {
            (Self::Host(mut a), Self::Host(b)) => {
                taper_world::add(&mut a, &b);
                Self::Host(a)
            }
            (a, b) => Self::Device((a.tensor()? + b.tensor()?)?),
        })
    }

    /// Those from a place on that a variable has room for, in its shape.
    pub fn part(&self, start: usize, var: &Var) -> Result<Tensor, RunError> {
        let part = match self {
            Self::Host(numbers) => {
                Tensor::from_slice(&numbers[start..][..var.elem_count()], var.shape(), &Device::Cpu)?
            }
            Self::Device(row) => row.narrow(0, start, var.elem_count())?.reshape(var.shape())?,
        };
        Ok(part.to_dtype(var.dtype())?.to_device(var.device())?)
    }

    /// The sum over all processes; see [`World::sum`].
    pub fn sum(
        world: &World,
        tree: &Tree,
        mine: Vec<Self>,
        length: usize,
        device: &Device,
    ) -> Result<Self, RunError> {
        #[cfg(feature = "nccl")]
        if let (Device::Cuda(cuda), true) = (device, world.has_devices()) {
            let mine = mine.into_iter().map(Self::tensor).collect::<Result<Vec<_>, _>>()?;
            return Ok(Self::Device(super::nccl::sum(world, tree, &mine, length, cuda)?));
        }
        let mine = mine.into_iter().map(Self::host).collect::<Result<Vec<_>, _>>()?;
        let sum = world.sum(tree, mine, length)?;
        Ok(match device.is_cpu() {
            true => Self::Host(sum),
            false => Self::Device(Tensor::from_vec(sum, length, device)?),
        })
    }

    fn tensor(self) -> Result<Tensor, RunError> {
        Ok(match self {
            Self::Host(numbers) => Tensor::new(numbers, &Device::Cpu)?,
            Self::Device(row) => row,
        })
    }

    fn host(self) -> Result<Vec<f32>, RunError> {
        Ok(match self {
            Self::Host(numbers) => numbers,
            Self::Device(row) => row.to_vec1()?,
        })
    }
}

//! What a step hands to a device: a head, and a row for every parameter.
use super::gpu::State;
use super::{PART, PARTS};
use crate::rule::MAX_BUFFERS;
use candle_core::Tensor;

/// What all parameters of a step share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// What gradients are multiplied by.
    pub scale: f64,
    /// What they are clamped to after that.
    pub limit: f64,
    /// What a fault says about when it was: the number of the step, from 1.
    pub step: u32,
}

/// A parameter as a kernel sees it.
pub(crate) struct Item<'a> {
    pub param: Tensor,
    /// Contiguous, of the parameter's shape and dtype.
    pub grad: &'a Tensor,
    pub state: &'a mut State,
    pub scalars: Vec<f64>,
    /// What the buffers are before a first step; NaN stands for the root of the loss.
    pub start: Option<[f64; MAX_BUFFERS]>,
    /// The c of √(f + c).
    pub offset: f64,
}

/// Chunks of a parameter in the scratch of a reduction.
pub(crate) fn chunks(elements: usize) -> usize {
    elements.div_ceil(PART * PARTS)
}

/// The bytes of a table: little-endian, as every device is.
#[derive(Default)]
pub(crate) struct Bytes(pub Vec<u8>);

impl Bytes {
    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    pub fn f32(&mut self, value: f64) {
        self.0.extend((value as f32).to_le_bytes());
    }
    pub fn f64(&mut self, value: f64) {
        self.0.extend(value.to_le_bytes());
    }
    /// In the precision of the kernel.
    pub fn real(&mut self, double: bool, value: f64) {
        if double { self.f64(value) } else { self.f32(value) }
    }
    /// Up to a multiple of eight bytes, the alignment of a row with pointers.
    pub fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }
}

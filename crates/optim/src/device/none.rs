//! A build without a GPU: an engine that does not exist.
use super::Source;
use super::table::{Head, Item};
use crate::driver::Buffers;
use crate::rule::SUMS;
use crate::{Deferred, Error, Result};
use candle_core::{DType, Device, Tensor};

/// Never made.
#[derive(Debug)]
pub(crate) enum Engine {}

/// Never made.
#[derive(Debug)]
pub(crate) enum State {}

impl Engine {
    pub fn new(device: &Device) -> Result<Self> {
        Err(Error::NoKernels(format!("{:?}", device.location())))
    }
    pub fn zeros(&self, _: DType, _: usize, _: usize) -> Result<State> {
        match *self {}
    }
    pub fn upload(&self, _: &Buffers) -> Result<State> {
        match *self {}
    }
    pub fn step(&mut self, _: &Source, _: &mut [Item], _: &Head, _: &Deferred) -> Result<()> {
        match *self {}
    }
    pub fn reduce(&mut self, _: &Source, _: &mut [Item], _: &Head) -> Result<[f64; SUMS]> {
        match *self {}
    }
    /// The first step whose loss, and the first whose norm, was refused on the device; 0 for none.
    pub fn faults(&self) -> Result<(u32, u32)> {
        match *self {}
    }
    pub fn clear_faults(&mut self) -> Result<()> {
        match *self {}
    }
}

impl State {
    pub fn download(&self) -> Result<Buffers> {
        match *self {}
    }
}

/// The norm of gradients of one dtype.
pub(crate) fn norm(grads: &[Tensor]) -> Result<Tensor> {
    Err(Error::NoKernels(grads.first().map_or_else(String::new, |g| format!("{:?}", g.device().location()))))
}

//! In place of `amx.rs` on CPUs that have no such thing.
use super::Into;
use crate::gemm::Kernel;

/// Rows of a register on those that do.
pub const SIDE: usize = 16;

/// There is none.
#[derive(Clone, Copy, Debug)]
pub enum Amx {}

/// An operand of [`Amx::product`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Operand {
    pub at: *const u8,
    pub row: usize,
    pub second: usize,
    pub step: usize,
}

/// Never called.
///
/// # Safety
/// None.
pub unsafe fn block(_: (*const f32, usize, usize), _: (usize, usize), _: bool, _: (*mut f32, usize, usize)) {}

impl Kernel for Amx {
    type E = f32;
    const ROWS: usize = 2 * SIDE;
    const PANEL: usize = 2 * SIDE;
    const LANES: usize = SIDE;
    const DEPTH: usize = 512;

    fn run<R>(self, _: impl FnOnce() -> R) -> R {
        match self {}
    }

    unsafe fn tile(
        self,
        _: (usize, usize),
        _: usize,
        _: (*const f32, usize, usize),
        _: (*const f32, usize),
        _: (*mut f32, usize),
        _: Into,
    ) {
        match self {}
    }

    unsafe fn transpose(self, _: *const f32, _: usize, _: *mut f32, _: usize) {
        match self {}
    }
}

impl Amx {
    /// Never called.
    pub fn with_registers<R>(self, _: impl FnOnce() -> R) -> R {
        match self {}
    }

    /// Never called.
    ///
    /// # Safety
    /// None.
    pub unsafe fn product(
        self,
        _: (usize, usize),
        _: usize,
        _: impl Iterator<Item = (Operand, Operand)>,
        _: (*mut f32, usize),
        _: Into,
    ) {
        match self {}
    }
}

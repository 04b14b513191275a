//! Kernels for GPUs: their texts, and how a step reaches a device.
//!
//! A rule's arithmetic is a plain-C function of one element, its `update.h`. The texts here wrap it: `cuda/step.cu` and
//! `metal/step.metal`, each written once for all rules. A [`Source`] joins them into the program of one rule, number
//! of buffers and dtype, which the device's own compiler translates when an optimizer first needs it.
//!
//! No fused multiply-add, no flushing of small numbers to zero, divisions and roots correctly rounded: an element's
//! update has the bits it has on the CPU. (Metal may flush subnormal numbers and computes losses and norms in f32.)
#[cfg(feature = "cuda")]
#[path = "cuda/mod.rs"]
pub(crate) mod gpu;
#[cfg(all(feature = "metal", not(feature = "cuda")))]
#[path = "metal/mod.rs"]
pub(crate) mod gpu;
#[cfg(not(any(feature = "cuda", feature = "metal")))]
#[path = "none.rs"]
pub(crate) mod gpu;
// Metal's tables need a part of it, a build without a GPU nothing.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod table;

use crate::rule::{Rule, SUMS, Scalars};
use candle_core::DType;

/// Elements a lane of which is summed by one thread.
pub(crate) const PART: usize = 2048;
/// Parts of a chunk.
pub(crate) const PARTS: usize = 16;
/// Lanes of a part.
pub(crate) const LANES: usize = 16;

/// How CUDA programs are compiled: every operation rounds once, as on the CPU.
pub const CUDA_OPTIONS: &[&str] =
    &["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17"];

/// What a file of CUDA programs begins with.
pub const CUDA_DIALECT: &str = concat!(include_str!("cuda/dialect.h"), include_str!("bf16.h"));
/// What a file of Metal programs begins with.
pub const METAL_DIALECT: &str = concat!(include_str!("metal/dialect.h"), include_str!("bf16.h"));

/// The program of one rule for one number of buffers and one dtype of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The rule's folder or, of a rule from elsewhere, its name; part of the kernels' names.
    pub rule: &'static str,
    /// The rule's `update.h`.
    pub update: &'static str,
    /// The fields of its `Scalars`, in their order.
    pub scalars: &'static [&'static str],
    /// Whether `update.h` has a `follow`, which puts the root of a loss into the scalars.
    pub follows_loss: bool,
    /// Whether `update.h` has a `reduce` and a `finish`.
    pub reduces: bool,
    /// State buffers.
    pub buffers: usize,
    /// The dtype of parameters and gradients.
    pub dtype: DType,
}

impl Source {
    /// The program of a rule, with kernels named after `name`. `None` for a rule without an `update.h`.
    pub fn of<R: Rule>(name: &'static str, buffers: usize, dtype: DType) -> Option<Self> {
        Some(Self {
            rule: name,
            update: R::UPDATE?,
            scalars: R::Scalars::NAMES,
            follows_loss: R::LOSS.is_some(),
            reduces: R::REDUCE.is_some(),
            buffers,
            dtype,
        })
    }

    /// The program of the norm of gradients.
    pub fn norm(dtype: DType) -> Self {
        let (rule, update, scalars) = ("norm", include_str!("norm.h"), &["none"]);
        Self { rule, update, scalars, follows_loss: false, reduces: true, buffers: 0, dtype }
    }

    /// What the names of its kernels begin with.
    pub fn prefix(&self) -> String {
        let letters = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let rule: String = self.rule.chars().map(letters).collect();
        format!("{rule}_{}_{}", self.buffers, self.dtype.as_str())
    }

    /// The text for CUDA: dialect and program.
    pub fn cuda(&self) -> String {
        [CUDA_DIALECT, &self.cuda_program()].concat()
    }

    /// The text for CUDA without the dialect, which a file needs once.
    pub fn cuda_program(&self) -> String {
        self.program(include_str!("cuda/step.cu"), "unsigned short", "widen_f16", "narrow_f16")
    }

    /// The text for Metal: dialect and program.
    pub fn metal(&self) -> String {
        [METAL_DIALECT, &self.metal_program()].concat()
    }

    /// The text for Metal without the dialect.
    pub fn metal_program(&self) -> String {
        self.program(include_str!("metal/step.metal"), "half", "float", "half")
    }

    fn program(&self, kernels: &str, half: &str, widen_half: &str, narrow_half: &str) -> String {
        let (real, element, widen, narrow) = match self.dtype {
            DType::F64 => ("double", "double", "", ""),
            DType::F16 => ("float", half, widen_half, narrow_half),
            DType::BF16 => ("float", "unsigned short", "widen_bf16", "narrow_bf16"),
            _ => ("float", "float", "", ""),
        };
        let double = if self.dtype == DType::F64 { "#define REAL_IS_DOUBLE\n" } else { "" };
        let (prefix, buffers, slots) = (self.prefix(), self.buffers, self.buffers.max(1));
        let flag = |on: bool, name: &str| if on { format!("#define {name}\n") } else { String::new() };
        let flags = flag(self.follows_loss, "FOLLOWS_LOSS") + &flag(self.reduces, "REDUCES");
        let scalars = format!("typedef struct {{\n  REAL {};\n}} Scalars;\n", self.scalars.join(", "));
        let macros = format!(
            "#define NAME(kernel) {prefix}_##kernel\n#define REAL {real}\n{double}#define ELEMENT {element}\n\
             #define WIDEN(x) {widen}(x)\n#define NARROW(x) {narrow}(x)\n#define BUFFERS {buffers}\n#define SLOTS {slots}\n\
             #define SUMS {SUMS}\n#define PART {PART}\n#define PARTS {PARTS}\n#define LANES {LANES}\n{flags}"
        );
        let texts =
            [&macros, include_str!("arithmetic.h"), include_str!("power.h"), &scalars, self.update, kernels];
        texts.join("\n")
    }
}

/// Sixteen hexadecimal digits that differ between texts (FNV-1a): part of a module's name, because candle caches modules
/// by name alone.
pub fn digest(text: &str) -> String {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
}

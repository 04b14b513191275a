//! The kernels for GPUs, as far as a machine without one can tell: their texts as host C++, bit for bit beside the CPU's
//! kernels, and through the compilers that are there. `cargo xtask gpu-check` brings the compilers and says what it proves.
mod cases;
mod compilers;
mod faults;
mod host;
mod job;
mod same_bits;
mod texts;

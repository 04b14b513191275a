//! Sweeps and plans as a user meets them: the binary, its workers, what they leave and print.
#[cfg(unix)]
mod interrupts;
mod lint;
mod outcomes;
mod plan;
#[cfg(unix)]
mod shared;
#[cfg(unix)]
mod slurm;
mod support;

//! The command `taper`: one file a command in `commands/`, and what only commands need: benchmarks, plans, profiles.
//!
//! All that trains, reads runs or draws is in the other crates; nothing here is needed to embed them. A program with
//! optimizers, models or data sets of its own has the whole command line with them:
//!
//! ```no_run
//! use taper_train::Registries;
//! fn main() -> std::process::ExitCode {
//!     let mut registries = Registries::default();
//!     // registries.optimizers.register(…), registries.models.register(…), …
//!     taper::main(&registries)
//! }
//! ```
/// A line on standard error for people. Where it cannot be written, because the disk is full or nobody listens, the standard
/// library's would panic and end a training.
macro_rules! eprintln {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod bench;
mod commands;
mod log;
mod plan;
mod profile;

pub use commands::main;

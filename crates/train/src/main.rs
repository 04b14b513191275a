//! The taper command.
fn main() {}

//! What every optimizer promises, read as a specification.
mod common;
mod decgd;
mod driver;
mod groups;
mod hostile;
mod numeric;
mod probe;
mod refusals;
mod state;

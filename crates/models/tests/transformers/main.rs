//! Transformers and their ops, by behaviour.
#[path = "../common/mod.rs"]
mod common;
mod golden;
mod networks;
mod ops;

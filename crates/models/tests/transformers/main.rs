//! Transformers and their ops, by behaviour.
mod candle;
#[path = "../common/mod.rs"]
mod common;
mod golden;
mod networks;
mod ops;

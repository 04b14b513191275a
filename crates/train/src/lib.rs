//! taper
pub mod data;

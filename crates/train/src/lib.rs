//! taper

pub mod data;
pub mod recipe;

//! taper

pub mod recipe;

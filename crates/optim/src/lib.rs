//! taper

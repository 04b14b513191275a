//! The rules, one folder each: configuration, arithmetic of one element, documentation.
pub mod adabelief;
pub mod adabound;
pub mod adadelta;
pub mod adagd;
pub mod adagrad;
pub mod adam;
pub mod aegd;
pub mod decgd;
pub mod padam;
pub mod radam;
pub mod rmsprop;
pub mod sgd;
pub mod yogi;

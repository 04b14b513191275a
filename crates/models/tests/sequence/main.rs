//! The ops and the model for sequences, by behaviour.
mod cross_entropy;
mod dropout;
mod embedding;
mod golden;
mod language_model;
mod linear;
mod lstm;
mod support;

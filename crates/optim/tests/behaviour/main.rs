//! What every optimizer promises, read as a specification.
mod common;
mod decadam;
mod decgd;
mod driver;
mod groups;
mod hostile;
mod kinds;
mod microscope;
mod modern;
mod numeric;
mod precision;
mod probe;
mod refusals;
mod state;
mod traps;

#[allow(dead_code)]
#[path = "../../examples/custom_optimizer.rs"]
mod custom_optimizer;

#[test]
fn a_rule_of_another_crate_is_registered_and_used() {
    custom_optimizer::main().unwrap();
}

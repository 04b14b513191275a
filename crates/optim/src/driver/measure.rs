//! What a probe shows of a step.
use super::cpu::Gradient;
use super::slot::{self, Slot};
use crate::Result;
use crate::probe::{Distribution, ParamProbe, Probe};
use crate::rule::Rule;

/// The values of all parameters that are about to change.
pub(super) fn before(slots: &[Slot], gradients: &[Gradient]) -> Result<Vec<Vec<f64>>> {
    gradients.iter().map(|g| slot::values(&slots[g.slot].var)).collect()
}

/// |after - before| / |before|, Euclidean norms; 0 / 0 counts as 0.
pub(crate) fn update_ratio(before: &[f64], after: &[f64]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let change = norm(&mut after.iter().zip(before).map(|(a, b)| a - b));
    if change == 0.0 { 0.0 } else { change / norm(&mut before.iter().copied()) }
}

pub(super) fn measure<R: Rule>(
    slots: &[Slot],
    gradients: &[Gradient],
    scalars: &[R::Scalars],
    before: &[Vec<f64>],
) -> Result<Probe> {
    let mut params = Vec::with_capacity(gradients.len());
    for ((gradient, scalars), before) in gradients.iter().zip(scalars).zip(before) {
        let slot = &slots[gradient.slot];
        let after = slot::values(&slot.var)?;
        let buffers = slot.buffers.widened()?;
        let mean = |b: &Vec<f64>| b.iter().sum::<f64>() / b.len().max(1) as f64;
        let means: Vec<f64> = buffers.iter().map(mean).collect();
        let mut state = vec![0.0; buffers.len()];
        let observed = R::OBSERVE.and_then(|observed| {
            let mut of = |i: usize| {
                state.iter_mut().zip(&buffers).for_each(|(s, buffer)| *s = buffer[i]);
                (observed.of)(scalars, &state)
            };
            Some((observed.name, Distribution::of((0..after.len()).map(&mut of).collect())?))
        });
        params.push(ParamProbe {
            name: slot.name.clone(),
            update_ratio: update_ratio(before, &after),
            observed,
            numbers: R::report(scalars, &means),
        });
    }
    Ok(Probe { params })
}

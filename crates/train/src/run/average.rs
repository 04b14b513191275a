//! Averages of the weights: EMA, SWA, Lookahead's slow weights and averaged SGD.
//!
//! An average is a second set of weights that training, but for Lookahead, never looks at. It starts as a copy of the weights at
//! its first sample and moves by a + w (x - a) at each of the others:
//!
//! | kind | a sample is | w |
//! | --- | --- | --- |
//! | `ema` | every step from epoch `start` on | 1 - `decay` |
//! | `swa` | the end of every `every`-th epoch from `start` on | 1 / number of samples |
//! | `lookahead` | the start, and every `every`-th step t of T | 1 - `decay`·(t/T)^`power` |
//! | `asgd` | every step after the switch | 1 / max(1, t - 1 - `t0`) at the t-th of them |
//!
//! Lookahead then sets the weights to the average. Between two samples they are not the same, so both are in a checkpoint.
//!
//! Running statistics belong to the weights they were gathered with. An EMA averages them like the weights: both are
//! exponential averages over the last steps, and so they stay close to each other at no cost. The members of an SWA can
//! lie far apart, so the mean of their statistics is not that of the mean; they are gathered anew from the training
//! data (see [`Task::gather_statistics`](super::task::Task::gather_statistics)).
use super::RunError;
use crate::recipe::Average;
use candle_core::{CpuStorage, DType, Layout, Tensor, Var};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use taper_models::Params;
use taper_models::init::is_buffer;

/// What an average knows besides its tensors; part of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Samples taken.
    samples: u64,
    /// The losses that averaged SGD waits by.
    losses: Vec<f64>,
    /// Averaged SGD, once it is switched on.
    asgd: Option<Asgd>,
}

impl State {
    /// Whether there is an average of this kind that evaluations are to use.
    pub fn in_use(&self, kind: &Average) -> bool {
        self.samples > 0 && !matches!(kind, Average::Asgd { swap: false, .. })
    }
}

/// Averaged SGD under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Asgd {
    /// The schedule's factor at the switch: rates are counted from the base rate anew.
    switched_at: f64,
    /// The factor of the base rate that the step before left for the next one.
    factor: Option<f64>,
}

/// The average of a run's weights.
pub(crate) struct Averaging {
    kind: Average,
    pub state: State,
    /// Every parameter and buffer with its average; empty before there is one.
    pairs: Vec<(String, Var, Tensor)>,
    params: Params,
}

impl Averaging {
    pub fn new(kind: Average, params: &Params) -> Self {
        Self { kind, state: State::default(), pairs: Vec::new(), params: params.clone() }
    }

    /// Whether averaged SGD is in the place of the recipe's optimizer.
    pub fn asgd(&self) -> bool {
        self.state.asgd.is_some()
    }

    /// Takes note of the loss of an evaluation. True when averaged SGD takes over now, where the schedule's factor is
    /// `factor`: more than `window` losses are known and this one exceeds the least of all but the last `window`.
    pub fn observe(&mut self, loss: f64, factor: f64) -> bool {
        let Average::Asgd { window, .. } = self.kind else { return false };
        if self.state.asgd.is_some() {
            return false;
        }
        let switch = stalled(&self.state.losses, usize::try_from(window).unwrap_or(usize::MAX), loss);
        if switch {
            self.state.asgd = Some(Asgd { switched_at: factor, factor: None });
        }
        // What is not finite is as bad as can be, and a number that a checkpoint can hold.
        self.state.losses.push(loss.min(f64::MAX));
        switch
    }

    /// The schedule's factor as the run goes by it: after the switch it is counted from there.
    pub fn schedule(&self, factor: f64) -> f64 {
        match self.state.asgd {
            Some(Asgd { switched_at, .. }) if switched_at > 0.0 => factor / switched_at,
            _ => factor,
        }
    }

    /// The factor of the base rate `lr` to step with where schedule and batch ask for `factor`.
    ///
    /// As in PyTorch's `ASGD`, a step goes by the rate that the step before it computed,
    /// η / (1 + λ η t)^α: changes of the rate take effect one step late.
    pub fn factor(&mut self, factor: f64, lr: f64) -> f64 {
        let (Average::Asgd { lambd, alpha, .. }, Some(asgd)) = (&self.kind, &mut self.state.asgd) else {
            return factor;
        };
        let t = (self.state.samples + 1) as f64;
        let next = factor / (1.0 + lambd * lr * factor * t).powf(*alpha);
        asgd.factor.replace(next).unwrap_or(factor)
    }

    /// Before the first step: slow weights start where the weights do.
    pub fn begin(&mut self) -> Result<(), RunError> {
        match self.kind {
            Average::Lookahead { .. } => self.copy(),
            _ => Ok(()),
        }
    }

    /// After `t` steps of `total`, the last of which was of epoch `epoch`, counted from 0.
    pub fn after_step(&mut self, epoch: u64, t: u64, total: u64) -> Result<(), RunError> {
        match self.kind {
            Average::Lookahead { every, decay, power } if t.is_multiple_of(every.max(1)) => {
                let stays = decay * (t as f64 / total.max(1) as f64).powf(power);
                self.sample(|_| 1.0 - stays)?;
                self.pairs.iter().try_for_each(|(_, var, slow)| Ok(var.set(slow)?))
            }
            Average::Ema { decay, start } if epoch >= start => self.sample(|_| 1.0 - decay),
            // One step late as well: PyTorch computes the weight of a sample at the step before it.
            Average::Asgd { t0, .. } if self.state.asgd.is_some() => {
                self.sample(|t| 1.0 / t.saturating_sub(1).saturating_sub(t0).max(1) as f64)
            }
            _ => Ok(()),
        }
    }

    /// After the last step of epoch `epoch`, counted from 0. True when the average changed and its running statistics
    /// are to be gathered anew.
    pub fn after_epoch(&mut self, epoch: u64) -> Result<bool, RunError> {
        match self.kind {
            Average::Swa { start, every }
                if epoch >= start && (epoch - start).is_multiple_of(every.max(1)) =>
            {
                self.sample(|t| 1.0 / t as f64)?;
                Ok(self.pairs.iter().any(|(name, ..)| is_buffer(name)))
            }
            _ => Ok(false),
        }
    }

    /// Whether there is an average that evaluations are to use.
    pub fn in_use(&self) -> bool {
        self.state.in_use(&self.kind)
    }

    /// The weights become the average and the average the weights, to the bit: twice is as if never.
    pub fn exchange(&mut self) -> Result<(), RunError> {
        for (_, var, average) in &mut self.pairs {
            let iterate = var.as_tensor().copy()?;
            var.set(average)?;
            *average = iterate;
        }
        Ok(())
    }

    /// Takes the sample number `t` of the weights, from 1; `weight(t)` is its part.
    fn sample(&mut self, weight: impl Fn(u64) -> f64) -> Result<(), RunError> {
        self.state.samples += 1;
        let weight = weight(self.state.samples);
        if self.pairs.is_empty() {
            return self.copy();
        }
        for (_, var, average) in &mut self.pairs {
            if !var.dtype().is_float() || weight == 1.0 {
                // A count has no mean.
                *average = var.as_tensor().copy()?;
            } else if var.device().is_cpu() && matches!(var.dtype(), DType::F32 | DType::F64) {
                average.inplace_op2(var.as_tensor(), &Blend(weight))?;
            } else {
                // Detached: an average keeps no graph.
                *average = (&*average + ((var.as_tensor().detach() - &*average)? * weight)?)?.detach();
            }
        }
        Ok(())
    }

    /// The average becomes a copy of the weights.
    fn copy(&mut self) -> Result<(), RunError> {
        let copy = |(name, var): (String, Var)| Ok((name, var.clone(), var.as_tensor().copy()?));
        self.pairs = self.params.vars().into_iter().map(copy).collect::<Result<_, RunError>>()?;
        Ok(())
    }

    /// The average by name, for a checkpoint; `None` before there is one.
    pub fn tensors(&self) -> Option<BTreeMap<String, Tensor>> {
        (!self.pairs.is_empty())
            .then(|| self.pairs.iter().map(|(name, _, t)| (name.clone(), t.clone())).collect())
    }

    /// Goes on from a checkpoint.
    pub fn load(&mut self, state: State, tensors: BTreeMap<String, Tensor>) -> Result<(), RunError> {
        let vars = self.params.vars();
        let fits = |(name, var): &(String, Var)| {
            tensors.get(name).is_some_and(|t| t.shape() == var.shape() && t.dtype() == var.dtype())
        };
        let begun = state.samples > 0 || matches!(self.kind, Average::Lookahead { .. });
        let expected = if begun { vars.len() } else { 0 };
        if tensors.len() != expected || (expected > 0 && !vars.iter().all(fits)) {
            return Err(
                candle_core::Error::msg("the average in the checkpoint is not of these weights").into()
            );
        }
        self.state = state;
        // Copies: what is updated in place is shared with nobody.
        let place = |t: &Tensor, var: &Var| t.copy()?.to_device(var.device());
        let pair =
            |(name, var): (String, Var)| Some(place(tensors.get(&name)?, &var).map(|t| (name, var, t)));
        self.pairs = vars.into_iter().filter_map(pair).collect::<candle_core::Result<_>>()?;
        Ok(())
    }
}

/// AdaBelief's test on a history of losses: `loss` is worse than the best of all but the last `window`.
fn stalled(losses: &[f64], window: usize, loss: f64) -> bool {
    let known = losses.len().saturating_sub(window);
    let best = losses[..known].iter().copied().fold(f64::INFINITY, f64::min);
    known > 0 && loss > best
}

/// a ← a + w (x - a), each element read and written once.
struct Blend(f64);

/// Large enough to be worth a task.
const CHUNK: usize = 64 * 1024;

impl candle_core::InplaceOp2 for Blend {
    fn name(&self) -> &'static str {
        "blend"
    }

    fn cpu_fwd(
        &self,
        a: &mut CpuStorage,
        la: &Layout,
        x: &CpuStorage,
        lx: &Layout,
    ) -> candle_core::Result<()> {
        let (Some((a0, a1)), Some((x0, x1))) = (la.contiguous_offsets(), lx.contiguous_offsets()) else {
            candle_core::bail!("blend: expected contiguous tensors")
        };
        macro_rules! blend {
            ($a:expr, $x:expr, $w:expr) => {{
                let w = $w;
                $a[a0..a1].par_chunks_mut(CHUNK).zip($x[x0..x1].par_chunks(CHUNK)).for_each(|(a, x)| {
                    a.iter_mut().zip(x).for_each(|(a, x)| *a += w * (x - *a));
                });
            }};
        }
        match (a, x) {
            (CpuStorage::F32(a), CpuStorage::F32(x)) => blend!(a, x, self.0 as f32),
            (CpuStorage::F64(a), CpuStorage::F64(x)) => blend!(a, x, self.0),
            _ => candle_core::bail!("blend: expected two f32 or two f64 tensors"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Result};

    /// A run of four weights that go where they are told.
    fn walk(kind: Average) -> (Averaging, Vec<Vec<f32>>) {
        let params = Params::new(1);
        let vb = params.builder(DType::F32, &Device::Cpu);
        vb.get_with_hints(4, "w", candle_nn::init::ZERO).unwrap();
        let points = (0..12).map(|t| (0..4).map(|i| ((t * 7 + i * 3) % 11) as f32 / 8.0).collect()).collect();
        (Averaging::new(kind, &params), points)
    }

    fn set(averaging: &Averaging, point: &[f32]) -> Result<()> {
        averaging.params.vars()[0].1.set(&Tensor::new(point, &Device::Cpu)?)
    }

    fn average(averaging: &Averaging) -> Vec<f32> {
        averaging.tensors().unwrap()["w"].to_vec1().unwrap()
    }

    /// The numbers are eighths below 2 and at most twelve of them are added: f32 is within a few of its ulps of f64.
    fn assert_close(found: &[f32], expected: &[f64]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 5e-7, "{found} instead of {expected}");
        }
    }

    #[test]
    fn ema_is_the_weighted_sum_of_all_steps_from_its_start() -> Result<()> {
        let (mut averaging, points) = walk(Average::Ema { decay: 0.75, start: 1 });
        for (t, point) in points.iter().enumerate() {
            set(&averaging, point)?;
            averaging.after_step(t as u64 / 4, t as u64 + 1, 12).unwrap(); // epochs of four steps
            assert!(!averaging.after_epoch(t as u64 / 4).unwrap());
        }
        // From the closed form: d^(n-1) x_1 + (1 - d) Σ d^(n-k) x_k over the last eight steps.
        let expected: Vec<f64> = (0..4)
            .map(|i| {
                let part =
                    |k: usize| if k == 0 { 0.75f64.powi(7) } else { 0.25 * 0.75f64.powi(7 - k as i32) };
                (0..8).map(|k| part(k) * f64::from(points[4 + k][i])).sum()
            })
            .collect();
        assert_close(&average(&averaging), &expected);
        Ok(())
    }

    #[test]
    fn swa_is_the_mean_of_its_epochs() -> Result<()> {
        let (mut averaging, points) = walk(Average::Swa { start: 3, every: 2 });
        for (epoch, point) in points.iter().enumerate() {
            set(&averaging, point)?;
            averaging.after_step(epoch as u64, epoch as u64 + 1, 12).unwrap();
            averaging.after_epoch(epoch as u64).unwrap();
            assert_eq!(averaging.in_use(), epoch >= 3);
        }
        let of = [3, 5, 7, 9, 11];
        let mean = |i| of.iter().map(|e| f64::from(points[*e][i])).sum::<f64>() / 5.0;
        assert_close(&average(&averaging), &[mean(0), mean(1), mean(2), mean(3)]);
        Ok(())
    }

    /// The published loop: the share that stays grows with the third power of time, and the weights are set to the slow ones.
    #[test]
    fn lookahead_pulls_the_weights_to_where_the_slow_ones_went() -> Result<()> {
        let (decay, power) = (0.75, 3.0);
        let (mut averaging, points) = walk(Average::Lookahead { every: 5, decay, power });
        set(&averaging, &[1.0, 2.0, 3.0, 4.0])?;
        averaging.begin().unwrap();
        let mut slow = vec![1.0f64, 2.0, 3.0, 4.0];
        for (done, point) in points.iter().enumerate().map(|(t, point)| (t as u64 + 1, point)) {
            set(&averaging, point)?;
            averaging.after_step(0, done, 12).unwrap();
            assert_eq!(averaging.in_use(), done >= 5);
            let weights = averaging.params.vars()[0].1.to_vec1::<f32>()?;
            if done % 5 == 0 {
                let stays = decay * (done as f64 / 12.0).powf(power);
                slow.iter_mut().zip(point).for_each(|(s, x)| *s = stays * *s + (1.0 - stays) * f64::from(*x));
                assert_eq!(weights, average(&averaging), "set to the slow ones");
            } else {
                assert_eq!(&weights, point, "left alone");
            }
            assert_close(&average(&averaging), &slow);
        }
        Ok(())
    }

    /// What `torch.optim.ASGD` (2.x) does: ax ← ax + mu (x - ax), then mu ← 1 / max(1, t - t0), mu = 1 at first.
    #[test]
    fn asgd_averages_with_the_weight_of_the_step_before() -> Result<()> {
        for t0 in [0, 3] {
            let (mut averaging, points) =
                walk(Average::Asgd { window: 1, lambd: 0.0, alpha: 0.75, t0, swap: true });
            averaging.state.asgd = Some(Asgd { switched_at: 1.0, factor: None });
            let (mut mu, mut ax) = (1.0, vec![0.0f64; 4]);
            for (t, point) in points.iter().enumerate() {
                set(&averaging, point)?;
                averaging.after_step(0, 1, 12).unwrap();
                ax.iter_mut().zip(point).for_each(|(a, x)| *a += mu * (f64::from(*x) - *a));
                mu = 1.0 / (t as f64 + 1.0 - t0 as f64).max(1.0);
                assert_close(&average(&averaging), &ax);
            }
        }
        Ok(())
    }

    #[test]
    fn asgd_steps_with_the_rate_of_the_step_before() {
        let (mut averaging, _) =
            walk(Average::Asgd { window: 5, lambd: 0.01, alpha: 0.5, t0: 0, swap: false });
        assert_eq!(averaging.factor(0.7, 30.0), 0.7, "before the switch");
        averaging.state.asgd = Some(Asgd { switched_at: 0.1, factor: None });
        let asked = [0.5, 1.0, 0.25, 0.25].map(|length| averaging.schedule(0.1) * length);
        let mut eta: Option<f64> = None;
        for (t, factor) in asked.into_iter().enumerate() {
            let used = averaging.factor(factor, 30.0);
            averaging.after_step(0, 1, 12).unwrap();
            assert_eq!(used, eta.unwrap_or(factor), "step {t}");
            eta = Some(factor / (1.0 + 0.01 * 30.0 * factor * (t as f64 + 1.0)).powf(0.5));
        }
    }

    #[test]
    fn the_switch_follows_the_published_rule() {
        // (window, losses, the evaluation at which it switches, from 0), by hand.
        let cases: [(usize, &[f64], Option<usize>); 7] = [
            // Five past values are not more than five.
            (5, &[5.0, 4.0, 3.0, 2.0, 1.0, 9.0], None),
            // Six past values: the first counts. 9 > 5.
            (5, &[5.0, 4.0, 3.0, 2.0, 1.0, 4.5, 9.0], Some(6)),
            // The least of all but the last five is the first, 5: 4.9 does not exceed it.
            (5, &[5.0, 4.0, 3.0, 2.0, 1.0, 4.5, 4.9], None),
            // Then 4 is among them, and 4.9 again is too much.
            (5, &[5.0, 4.0, 3.0, 2.0, 1.0, 4.5, 4.9, 4.9], Some(7)),
            (1, &[3.0, 2.0, 2.5], None),
            (1, &[3.0, 2.0, 3.5], Some(2)),
            // Equal is not more, and no number is more than any.
            (1, &[3.0, 2.0, 3.0], None),
        ];
        for (window, losses, expected) in cases {
            let (mut averaging, _) =
                walk(Average::Asgd { window: window as u64, lambd: 0.0, alpha: 0.75, t0: 0, swap: false });
            let switched = losses.iter().position(|loss| averaging.observe(*loss, 1.0));
            assert_eq!(switched, expected, "window {window}, losses {losses:?}");
        }
        assert!(!stalled(&[], 0, 1.0));
    }

    #[test]
    fn exchange_twice_changes_no_bit() -> Result<()> {
        let (mut averaging, points) = walk(Average::Ema { decay: 0.9, start: 0 });
        for point in &points {
            set(&averaging, point)?;
            averaging.after_step(0, 1, 12).unwrap();
        }
        let before = average(&averaging);
        averaging.exchange().unwrap();
        assert_eq!(averaging.params.vars()[0].1.to_vec1::<f32>()?, before);
        assert_eq!(&average(&averaging), points.last().unwrap());
        averaging.exchange().unwrap();
        assert_eq!(average(&averaging), before);
        assert_eq!(&averaging.params.vars()[0].1.to_vec1::<f32>()?, points.last().unwrap());
        Ok(())
    }
}

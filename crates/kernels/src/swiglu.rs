//! SwiGLU: silu(gate) · up, with silu(x) = x/(1 + e⁻ˣ).
use super::{Isa, Real, Shared, par, vectorize};

/// Elements that a task takes.
const GRAIN: usize = 1 << 14;

/// y = silu(gate) · up.
///
/// # Panics
/// If the sizes differ.
pub fn forward<T: Real>(isa: Isa, gate: &[T], up: &[T], y: &mut [T]) {
    assert!(gate.len() == y.len() && up.len() == y.len());
    let (n, y) = (y.len(), Shared::new(y));
    par(n.div_ceil(GRAIN), |task| {
        let (first, count) = (task * GRAIN, GRAIN.min(n - task * GRAIN));
        // SAFETY: each task has elements of its own.
        let y = unsafe { y.slice(first, count) };
        let (gate, up) = (&gate[first..][..count], &up[first..][..count]);
        vectorize(
            isa,
            #[inline(always)]
            || {
                for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                    *y = *g * g.sigmoid() * *u;
                }
            },
        );
    });
}

/// The gradients of `gate` and `up` from that of y, which becomes that of `up`.
///
/// # Panics
/// If the sizes differ.
pub fn backward<T: Real>(isa: Isa, gate: &[T], up: &[T], dy: &mut [T], dgate: &mut [T]) {
    assert!(gate.len() == dy.len() && up.len() == dy.len() && dgate.len() == dy.len());
    let (n, dy, dgate) = (dy.len(), Shared::new(dy), Shared::new(dgate));
    par(n.div_ceil(GRAIN), |task| {
        let (first, count) = (task * GRAIN, GRAIN.min(n - task * GRAIN));
        // SAFETY: each task has elements of its own.
        let (dy, dgate) = unsafe { (dy.slice(first, count), dgate.slice(first, count)) };
        let (gate, up) = (&gate[first..][..count], &up[first..][..count]);
        vectorize(
            isa,
            #[inline(always)]
            || {
                for ((dy, dgate), (g, u)) in dy.iter_mut().zip(dgate).zip(gate.iter().zip(up)) {
                    let s = g.sigmoid();
                    let silu = *g * s;
                    *dgate = *dy * *u * (s + silu * (T::ONE - s));
                    *dy = *dy * silu;
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points() -> Vec<f32> {
        (-60_000..60_000).map(|i| i as f32 / 500.0).collect()
    }

    #[test]
    fn sigmoid_is_that_of_f64() {
        for x in points() {
            let (found, exact) = (f64::from(x.sigmoid()), f64::from(x).sigmoid());
            // The exponential's rounding and two more; below e⁻⁸⁶ it is zero.
            assert!((found - exact).abs() <= 3.5e-7 * exact + 1e-37, "{x}: {found} {exact}");
        }
        assert!(f32::NAN.sigmoid().is_nan());
        assert_eq!(
            [f32::INFINITY, 200.0, f32::NEG_INFINITY, -200.0].map(Real::sigmoid),
            [1.0, 1.0, 0.0, 0.0]
        );
    }

    #[test]
    fn gradients_are_those_of_small_steps() {
        let (gate, up): (Vec<f64>, Vec<f64>) =
            ((-20..20).map(|i| f64::from(i) / 3.0).collect(), vec![1.7; 40]);
        let (mut dy, mut dgate) = (vec![1.0; 40], vec![f64::NAN; 40]);
        backward(Isa::PORTABLE, &gate, &up, &mut dy, &mut dgate);
        let (h, silu) = (1e-5, |x: f64| x / (1.0 + (-x).exp()));
        for i in 0..40 {
            let slope = (silu(gate[i] + h) - silu(gate[i] - h)) * up[i] / (2.0 * h);
            assert!((dgate[i] - slope).abs() < 1e-9 && (dy[i] - silu(gate[i])).abs() < 1e-14);
        }
    }

    #[test]
    fn any_instruction_set_and_number_of_threads_gives_the_same_bits() {
        let gate = points();
        let up: Vec<f32> = gate.iter().rev().copied().collect();
        let run = |isa: Isa| -> Vec<f64> {
            let (mut y, mut dy, mut dgate) = (gate.clone(), up.clone(), vec![0.0; gate.len()]);
            forward(isa, &gate, &up, &mut y);
            backward(isa, &gate, &up, &mut dy, &mut dgate);
            [y, dy, dgate].concat().into_iter().map(f64::from).collect()
        };
        let bits = |v: Vec<f64>| v.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        let portable = bits(run(Isa::PORTABLE));
        for isa in Isa::available() {
            assert!(bits(run(isa)) == portable, "{isa:?}");
            crate::threads::same_bits(|| run(isa));
        }
    }
}

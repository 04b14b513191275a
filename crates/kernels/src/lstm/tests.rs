//! Every form in f32 against the exact form in f64.
use super::*;
use crate::simd::pairs::to_bf16;
use crate::{Isa, Operands};

fn draw(n: usize, salt: usize, scale: f64) -> Vec<f64> {
    (0..n).map(|i| (((i * 7919 + salt * 104_729) % 2003) as f64 / 1001.5 - 1.0) * scale).collect()
}

fn run<T: Real>(by: impl Into<Arithmetic> + Copy, dims: Dims, drop: bool) -> Vec<Vec<f64>> {
    let Dims { steps, batch, input, hidden } = dims;
    let cast = |v: Vec<f64>| v.into_iter().map(T::from_f64).collect::<Vec<_>>();
    // Rounded to f32, so that every form computes from the same numbers.
    let numbers =
        |n, salt, scale| cast(draw(n, salt, scale).into_iter().map(|v| f64::from(v as f32)).collect());
    let spread = 1.0 / (hidden as f64).sqrt();
    let (x, dy) = (numbers(steps * batch * input, 1, 1.0), numbers(steps * batch * hidden, 2, 1.0));
    let (w_ih, w_hh) = (numbers(4 * hidden * input, 3, spread), numbers(4 * hidden * hidden, 4, spread));
    let bias = numbers(4 * hidden, 5, spread);
    let (h0, c0) = (numbers(batch * hidden, 6, 0.5), numbers(batch * hidden, 7, 0.5));
    let keep: Vec<u8> = (0..w_hh.len()).map(|i| u8::from((i * 31 + 7) % 5 < 3)).collect();
    let kept = drop.then_some(Kept { keep: &keep, scale: 1.0 / 0.625 });
    let layer = Layer { dims, x: &x, w_ih: &w_ih, w_hh: &w_hh, kept, bias: &bias, h0: &h0, c0: &c0 };
    let mut y = vec![T::ZERO; steps * batch * hidden];
    let saved = forward(by, &layer, &mut y);
    let cells = saved.cells().to_vec();
    let all = Wanted { x: true, w_ih: true, w_hh: true, bias: true };
    let grads = backward(by, &layer, &y, saved, &dy, all);
    let outputs = [Some(y), Some(cells), grads.x, grads.w_ih, grads.w_hh, grads.bias];
    outputs.into_iter().flatten().map(|v| v.into_iter().map(Real::to_f64).collect()).collect()
}

#[test]
fn every_form_agrees_with_f64_at_any_size() {
    let shapes = [
        (1, 1, 1, 1),
        (3, 2, 5, 7),
        (4, 6, 3, 16),
        (5, 7, 12, 17),
        (2, 11, 33, 31),
        (6, 20, 10, 100),
        (3, 13, 40, 64),
        (7, 1, 20, 130),
        (2, 20, 16, 800),
        (2, 3, 8, 770),
    ];
    for (steps, batch, input, hidden) in shapes {
        let dims = Dims { steps, batch, input, hidden };
        for drop in [false, true] {
            let exact = run::<f64>(Isa::detect().unwrap(), dims, drop);
            for isa in Isa::available() {
                for (i, (got, want)) in run::<f32>(isa, dims, drop).iter().zip(&exact).enumerate() {
                    let error = crate::compare::relative_difference(got, want);
                    // Sums of up to 3200 products in f32, through at most 7 steps.
                    assert!(error <= 3e-6, "{isa:?} {dims:?} output {i}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let dims = Dims { steps: 4, batch: 9, input: 30, hidden: 150 };
    for isa in Isa::available() {
        crate::threads::same_bits(|| run::<f32>(isa, dims, true).concat());
    }
}

#[test]
fn bf16_multiplies_rounded_operands() {
    for (steps, batch, input, hidden) in [(1, 3, 7, 9), (2, 2, 5, 7), (2, 5, 33, 31), (2, 13, 40, 65)] {
        let dims = Dims { steps, batch, input, hidden };
        for drop in [false, true] {
            let want = reference(dims, drop);
            for isa in Isa::available() {
                let found = run::<f32>(Arithmetic { isa, operands: Operands::Bf16 }, dims, drop);
                // f32's rounding of the sums and nonlinearities; none of these numbers lies so near the middle of two bf16 that
                // it decides between them.
                let error = crate::compare::relative_difference(&found[0], &want);
                assert!(error <= 2e-6, "{isa:?} {dims:?}: {error:e}");
                let exact = run::<f64>(isa, dims, drop);
                for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                    let error = crate::compare::relative_difference(found, exact);
                    // Operands are off by up to 2⁻⁹ each, and by chance in either direction; and they are off.
                    assert!(error <= 1.5e-2, "{isa:?} {dims:?} output {i}: {error:e}");
                    assert!(error >= 1e-5 || i == 5, "{isa:?} {dims:?} output {i}: {error:e}");
                }
            }
        }
    }
}

/// The hidden states by the equations, in f64, with the operands of every product rounded to bf16.
fn reference(dims: Dims, drop: bool) -> Vec<f64> {
    let Dims { steps, batch, input, hidden } = dims;
    let spread = 1.0 / (hidden as f64).sqrt();
    let numbers = |n, salt, scale| -> Vec<f64> {
        draw(n, salt, scale).into_iter().map(|v| f64::from(v as f32)).collect()
    };
    let round = |x: f64| f64::from(to_bf16(x as f32));
    let x = numbers(steps * batch * input, 1, 1.0);
    let (w_ih, w_hh) = (numbers(4 * hidden * input, 3, spread), numbers(4 * hidden * hidden, 4, spread));
    let bias = numbers(4 * hidden, 5, spread);
    let (mut h, mut c) = (numbers(batch * hidden, 6, 0.5), numbers(batch * hidden, 7, 0.5));
    let dropped = |i: usize| match drop {
        true if (i * 31 + 7) % 5 < 3 => f64::from(w_hh[i] as f32 * (1.0 / 0.625f64) as f32),
        true => 0.0,
        false => w_hh[i],
    };
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mut y = Vec::new();
    for step in 0..steps {
        let before = h.clone();
        for row in 0..batch {
            for unit in 0..hidden {
                let sum = |gate: usize| {
                    let r = gate * hidden + unit;
                    let ins = (0..input)
                        .map(|j| round(x[(step * batch + row) * input + j]) * round(w_ih[r * input + j]));
                    let outs =
                        (0..hidden).map(|j| round(before[row * hidden + j]) * round(dropped(r * hidden + j)));
                    ins.sum::<f64>() + outs.sum::<f64>() + bias[r]
                };
                let at = row * hidden + unit;
                c[at] = sigmoid(sum(1)) * c[at] + sigmoid(sum(0)) * sum(2).tanh();
                h[at] = sigmoid(sum(3)) * c[at].tanh();
            }
        }
        y.extend_from_slice(&h);
    }
    y
}

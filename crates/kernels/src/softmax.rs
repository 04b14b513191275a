//! One row of softmax cross-entropy, in place: logits in, gradient out, loss returned.
//!
//! The row is visited three times while it is in L1 or L2 (largest entry; exponentials and their sum; scaling),
//! so that memory sees it once.
use super::simd::Simd;
use super::vmath::exp;
use super::{Isa, Real, as_f32, as_f32_mut, with_simd};

/// Entries of the gradient below this are made zero, before the denormals of the tails reach a matrix product.
const TINY: f64 = 1e-30;
/// Partial sums of a row: as wide as the widest vector, so that every instruction set adds in the same order.
const LANES: usize = 16;

/// What one row is compared with.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The right class; it must lie inside the row.
    pub class: usize,
    /// Factor of the gradient, 1/rows for a mean.
    pub scale: f64,
    /// Share of the target that is spread evenly over all classes.
    pub smoothing: f64,
}

/// [`row`] in f32.
fn row_f32(isa: Isa, row: &mut [f32], bias: Option<&[f32]>, t: Row) -> f64 {
    with_simd!(isa, s => s.run(#[inline(always)] || row_of(s, row, bias, t)))
}

/// Replaces v by exp(v − max) and adds it to its partial sum.
#[inline(always)]
fn exponentiate<S: Simd>(s: S, chunk: &mut [f32; LANES], max: S::V, sums: &mut [S::V]) {
    for (chunk, sum) in chunk.chunks_exact_mut(S::LANES).zip(sums) {
        // SAFETY: a whole vector.
        unsafe {
            let v = exp(s, s.sub(s.load(chunk.as_ptr()), max));
            s.store(chunk.as_mut_ptr(), v);
            *sum = s.add(*sum, v);
        }
    }
}

#[inline(always)]
fn row_of<S: Simd>(s: S, row: &mut [f32], bias: Option<&[f32]>, t: Row) -> f64 {
    let n = row.len();
    if let Some(bias) = bias {
        row.iter_mut().zip(bias).for_each(|(v, b)| *v += *b);
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (m, v) in lanes.iter_mut().zip(chunk) {
            *m = if *v > *m { *v } else { *m };
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, v| if *v > m { *v } else { m });

    let at_class = row[t.class];
    let mut plain = [0f64; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    if t.smoothing != 0.0 {
        let rest = rest.iter().zip(&mut plain);
        rest.for_each(|(v, s)| *s += f64::from(*v));
        for chunk in chunks.iter() {
            for (s, v) in plain.iter_mut().zip(chunk) {
                *s += f64::from(*v);
            }
        }
    }
    // At most four vectors make up sixteen lanes.
    let (mut sums, highest) = ([s.zero(); 4], s.splat(max));
    for chunk in chunks {
        exponentiate(s, chunk, highest, &mut sums);
    }
    if !rest.is_empty() {
        let mut padded = [f32::NEG_INFINITY; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        exponentiate(s, &mut padded, highest, &mut sums);
        rest.copy_from_slice(&padded[..rest.len()]);
    }
    let mut lanes = [0f32; 4 * LANES];
    for (lanes, sum) in lanes.chunks_exact_mut(S::LANES).zip(sums) {
        // SAFETY: a whole vector.
        unsafe { s.store(lanes.as_mut_ptr(), sum) };
    }
    let sum: f64 = lanes[..LANES].iter().map(|s| f64::from(*s)).sum();

    let factor = (t.scale / sum) as f32;
    let spread = (t.scale * t.smoothing / n as f64) as f32;
    for v in row.iter_mut() {
        let p = *v * factor;
        // Written so that NaN stays.
        *v = if p < TINY as f32 { 0.0 } else { p } - spread;
    }
    row[t.class] -= (t.scale * (1.0 - t.smoothing)) as f32;
    let logsum = sum.ln() + f64::from(max);
    let likely = (1.0 - t.smoothing) * (logsum - f64::from(at_class));
    if t.smoothing == 0.0 {
        likely
    } else {
        likely + t.smoothing * (logsum - plain.iter().sum::<f64>() / n as f64)
    }
}

/// Loss of one row of logits (plus `bias`, if there is one), which are replaced by the loss's gradient times `t.scale`.
pub fn row<T: Real>(isa: Isa, row: &mut [T], bias: Option<&[T]>, t: Row) -> f64 {
    if T::IS_F32 { row_f32(isa, as_f32_mut(row), bias.map(as_f32), t) } else { row_exact(row, bias, t) }
}

/// The same in f64 and in the plainest way.
fn row_exact<T: Real>(row: &mut [T], bias: Option<&[T]>, t: Row) -> f64 {
    let n = row.len() as f64;
    let mut values: Vec<f64> = row.iter().map(|v| v.to_f64()).collect();
    if let Some(bias) = bias {
        values.iter_mut().zip(bias).for_each(|(v, b)| *v += b.to_f64());
    }
    let max = values.iter().fold(f64::NEG_INFINITY, |m, v| if *v > m { *v } else { m });
    let (at_class, mean) = (values[t.class], values.iter().sum::<f64>() / n);
    values.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f64 = values.iter().sum();
    for (out, v) in row.iter_mut().zip(&values) {
        let p = v * t.scale / sum;
        *out = T::from_f64(if p < TINY { 0.0 } else { p } - t.scale * t.smoothing / n);
    }
    row[t.class] = row[t.class] - T::from_f64(t.scale * (1.0 - t.smoothing));
    let logsum = sum.ln() + max;
    let likely = (1.0 - t.smoothing) * (logsum - at_class);
    if t.smoothing == 0.0 { likely } else { likely + t.smoothing * (logsum - mean) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_agrees_with_f64() {
        for isa in Isa::available() {
            for n in [1, 2, 15, 16, 17, 63, 100, 1000] {
                for (spread, smoothing) in [(1.0, 0.0), (20.0, 0.1), (60.0, 0.0)] {
                    let x: Vec<f32> =
                        (0..n).map(|i| ((i * 7919 + 13) % 1009) as f32 / 1009.0 * spread).collect();
                    let t = Row { class: n / 2, scale: 0.25, smoothing };
                    let (mut a, mut b) = (x.clone(), x.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
                    let (la, lb) = (row_f32(isa, &mut a, None, t), row_exact(&mut b, None, t));
                    // The sum of n exponentials in 16 partial sums: n/16 roundings of 6e-8 at worst.
                    assert!((la - lb).abs() <= 1e-6 * (1.0 + lb), "{isa:?} n={n}: {la} {lb}");
                    let found: Vec<f64> = a.iter().copied().map(f64::from).collect();
                    let worst = crate::compare::largest_difference(&found, &b);
                    assert!(worst <= 1e-6 * t.scale, "{isa:?} n={n}: {worst:e}");
                    assert!(a.iter().all(|v| *v == 0.0 || v.is_normal()), "{isa:?}: denormals");
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_number_reaches_the_loss() {
        let t = Row { class: 0, scale: 1.0, smoothing: 0.0 };
        for isa in Isa::available() {
            for bad in [f32::NAN, f32::INFINITY] {
                assert!(!row_f32(isa, &mut [0.0, bad, 1.0], None, t).is_finite());
            }
            let mut masked = [1.0, f32::NEG_INFINITY];
            assert_eq!(row_f32(isa, &mut masked, None, t), 0.0);
            assert_eq!(masked, [0.0, 0.0]);
        }
    }
}

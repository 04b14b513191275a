//! One pass over the elements of several tensors, with sums: what rules for whole tensors do on the CPU instead of op after op.
//!
//! Sums are taken in f64 in one fixed order, that of [`sums`](crate::sums): the same bits for any number of threads.
use crate::Result;
use crate::driver::cpu::{Element, borrow, slice, team, vectorized};
use crate::driver::team::Parts;
use crate::pairs::{Blend, paired};
use crate::rule::Real;
use crate::sums::{CHUNK, LANES, dot};
use candle_core::{DType, Device, Tensor, WithDType};

/// Changes `outs` element by element, as far as all slices go, and adds up what `of` returns.
pub(crate) fn pass<F: Real, const O: usize, const I: usize, const S: usize>(
    outs: [&mut [F]; O],
    ins: [&[F]; I],
    of: impl Fn(&mut [F; O], [F; I]) -> [f64; S] + Sync,
) -> [f64; S] {
    let lengths = outs.iter().map(|out| out.len()).chain(ins.iter().map(|x| x.len()));
    let n = lengths.min().unwrap_or(0);
    let mut partial = vec![[0.0; S]; n.div_ceil(CHUNK)];
    let (sums, outs) = (Parts::new(&mut partial), outs.map(Parts::new));
    // Not rayon's own loops: tensors may be the parameters, which nobody may hold and wait for the pool.
    team(n).run(n.div_ceil(CHUNK), (1, 8), &|range| {
        // SAFETY: the ranges of a run do not overlap, and `partial` is borrowed until it ends.
        let sums = unsafe { sums.part(range.clone()) };
        for (sum, i) in sums.iter_mut().zip(range) {
            let places = i * CHUNK..((i + 1) * CHUNK).min(n);
            // SAFETY: as above; chunks do not overlap either.
            let outs = outs.each_ref().map(|out| unsafe { out.part(places.clone()) });
            *sum = chunk(outs, ins.map(|x| &x[places.clone()]), &of);
        }
    });
    let mut total = [0.0; S];
    for sums in partial {
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    total
}

fn chunk<F: Real, const O: usize, const I: usize, const S: usize>(
    outs: [&mut [F]; O],
    ins: [&[F]; I],
    of: &impl Fn(&mut [F; O], [F; I]) -> [f64; S],
) -> [f64; S] {
    vectorized(
        #[inline(always)]
        || {
            let mut lanes = [[0f64; LANES]; S];
            let mut outs = outs.map(|out| out.as_chunks_mut::<LANES>());
            let ins = ins.map(|x| x.as_chunks::<LANES>());
            let blocks = outs.iter().map(|out| out.0.len()).chain(ins.iter().map(|x| x.0.len()));
            for block in 0..blocks.min().unwrap_or(0) {
                // All is read before anything is written, so that nothing can overlap.
                let mut changed = outs.each_ref().map(|out| out.0[block]);
                let read = ins.map(|x| x.0[block]);
                for lane in 0..LANES {
                    let mut now = changed.each_ref().map(|x| x[lane]);
                    let shares = of(&mut now, read.each_ref().map(|x| x[lane]));
                    changed.iter_mut().zip(now).for_each(|(x, now)| x[lane] = now);
                    lanes.iter_mut().zip(shares).for_each(|(sum, share)| sum[lane] += share);
                }
                outs.iter_mut().zip(changed).for_each(|(out, changed)| out.0[block] = changed);
            }
            let tails = outs.iter().map(|out| out.1.len()).chain(ins.iter().map(|x| x.1.len()));
            for lane in 0..tails.min().unwrap_or(0) {
                let mut now = outs.each_ref().map(|x| x.1[lane]);
                let shares = of(&mut now, ins.map(|x| x.1[lane]));
                outs.iter_mut().zip(now).for_each(|(out, now)| out.1[lane] = now);
                lanes.iter_mut().zip(shares).for_each(|(sum, share)| sum[lane] += share);
            }
            lanes.map(|lanes| lanes.into_iter().fold(0.0, |sum, lane| sum + lane))
        },
    )
}

/// Whether all lie on the CPU, as f32 or f64 all alike.
fn plain<const N: usize>(tensors: [&Tensor; N]) -> Option<DType> {
    let dtype = tensors.first()?.dtype();
    let fits = |t: &&Tensor| t.device().is_cpu() && t.dtype() == dtype && t.is_contiguous();
    (matches!(dtype, DType::F32 | DType::F64) && tensors.iter().all(fits)).then_some(dtype)
}

/// Calls `f` with the elements of tensors that are [`plain`].
pub(crate) fn elements<F: WithDType, T, const N: usize>(
    tensors: [&Tensor; N],
    f: impl FnOnce([&[F]; N]) -> T,
) -> Result<T> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut slices = [&[] as &[F]; N];
    for (place, (storage, layout)) in slices.iter_mut().zip(&guards) {
        *place = slice(storage, layout)?;
    }
    Ok(f(slices))
}

/// a x + b y, and its product with `with`: all vectors of one dtype.
pub(crate) fn combined(
    (a, x): (f64, &Tensor),
    (b, y): (f64, &Tensor),
    with: &Tensor,
) -> Result<(Tensor, f64)> {
    fn typed<F: Real + WithDType>(
        (a, x): (f64, &Tensor),
        (b, y): (f64, &Tensor),
        with: &Tensor,
    ) -> Result<(Tensor, f64)> {
        let (a, b) = (<F as Real>::from_f64(a), <F as Real>::from_f64(b));
        let mut out = vec![<F as Real>::from_f64(0.0); x.elem_count()];
        let [dot] = elements::<F, _, 3>([x, y, with], |slices| {
            pass([&mut out[..]], slices, |[out], [x, y, with]| {
                *out = a * x + b * y;
                [Real::to_f64(*out) * Real::to_f64(with)]
            })
        })?;
        Ok((Tensor::from_vec(out, x.shape(), &Device::Cpu)?, dot))
    }
    match plain([x, y, with]) {
        Some(DType::F64) => typed::<f64>((a, x), (b, y), with),
        Some(_) => typed::<f32>((a, x), (b, y), with),
        None => {
            let sum = paired(Blend { keep: a, share: b }, x, y)?;
            let dot = dot(&sum, with)?;
            Ok((sum, dot))
        }
    }
}

/// Makes (x + b y) · scale of a vector that nobody else has, where it lies if it can, and tells its product with `with`.
pub(crate) fn moved(x: Tensor, (b, y): (f64, &Tensor), scale: f64, with: &Tensor) -> Result<(Tensor, f64)> {
    fn typed<F: Element + Real>(
        x: &Tensor,
        (b, y): (f64, &Tensor),
        scale: f64,
        with: &Tensor,
    ) -> Result<f64> {
        let (b, scale) = (<F as Real>::from_f64(b), <F as Real>::from_f64(scale));
        elements::<F, _, 2>([y, with], |slices| {
            let mut dot = 0.0;
            borrow::<F>(x, &mut |x| {
                [dot] = pass([x], slices, |[x], [y, with]| {
                    *x = (*x + b * y) * scale;
                    [Real::to_f64(*x) * Real::to_f64(with)]
                });
            })?;
            Ok(dot)
        })?
    }
    let dot = match plain([&x, y, with]) {
        Some(DType::F64) => typed::<f64>(&x, (b, y), scale, with)?,
        Some(_) => typed::<f32>(&x, (b, y), scale, with)?,
        None => {
            let moved = (paired(Blend { keep: 1.0, share: b }, &x, y)? * scale)?;
            let dot = dot(&moved, with)?;
            return Ok((moved, dot));
        }
    };
    Ok((x, dot))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::squares;

    #[test]
    fn a_pass_has_the_bits_of_the_ops_and_sums_it_stands_for() {
        for dtype in [DType::F32, DType::F64] {
            for n in [0, 1, 15, 16, 17, 1000, 70_001] {
                let wave = |step: usize| {
                    let values = (0..n).map(|i| ((i * step % 1009) as f64 - 503.7) / 512.0).collect();
                    Tensor::from_vec(values, n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
                };
                let (x, y, with): (Tensor, Tensor, Tensor) = (wave(7919), wave(104_729), wave(31));
                let bits = |(t, dot): (Tensor, f64)| {
                    let t = t.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                    (t.into_iter().map(f64::to_bits).collect::<Vec<_>>(), dot.to_bits())
                };
                let both = |t: Tensor| {
                    let dot = dot(&t, &with).unwrap();
                    bits((t, dot))
                };
                let ops = ((&x * 0.3).unwrap() + (&y * -0.7).unwrap()).unwrap();
                assert_eq!(bits(combined((0.3, &x), (-0.7, &y), &with).unwrap()), both(ops), "{dtype:?} {n}");
                let ops = ((&x + (&y * 0.9).unwrap()).unwrap() * 1.1).unwrap();
                let fresh = x.copy().unwrap();
                assert_eq!(bits(moved(fresh, (0.9, &y), 1.1, &with).unwrap()), both(ops), "{dtype:?} {n}");
                let (itself, sum) = combined((1.0, &x), (0.0, &x), &x).unwrap();
                assert_eq!(squares(&itself).unwrap().to_bits(), sum.to_bits());
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let x = Tensor::arange(0f32, 300_000.0, &Device::Cpu).unwrap();
        let x = (x.sin().unwrap() * 3.0).unwrap();
        let with = |threads: usize| {
            taper_kernels::oversubscribe();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| combined((1.5, &x), (0.1, &x), &x).unwrap().1.to_bits())
        };
        assert!([2, 3, 7, 64].into_iter().all(|threads| with(threads) == with(1)));
    }
}

//! Sums over whole tensors in f64, in one fixed order: the same bits for any number of threads.
use crate::Result;
use crate::driver::cpu::{team, vectorized};
use crate::driver::team::Parts;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

/// Elements summed by one thread at a time.
pub(crate) const CHUNK: usize = 32 * 1024;
/// Independent sums inside a chunk, so that additions need not wait for each other.
pub(crate) const LANES: usize = 16;

/// Σ ab.
pub(crate) fn dot(a: &Tensor, b: &Tensor) -> Result<f64> {
    fold(a, Some(b), |a, b| a * b, |x, y| x + y, || host(&(a * b)?.sum_all()?))
}

/// Σ a².
pub(crate) fn squares(a: &Tensor) -> Result<f64> {
    fold(a, None, |a, _| a * a, |x, y| x + y, || host(&a.sqr()?.sum_all()?))
}

/// Σ |a|.
pub(crate) fn magnitudes(a: &Tensor) -> Result<f64> {
    fold(a, None, |a, _| a.abs(), |x, y| x + y, || host(&a.abs()?.sum_all()?))
}

/// max |a|; 0 of an empty tensor.
pub(crate) fn largest(a: &Tensor) -> Result<f64> {
    if a.elem_count() == 0 {
        return Ok(0.0);
    }
    fold(a, None, |a, _| a.abs(), f64::max, || host(&a.abs()?.max_all()?))
}

/// A scalar on the host. First to the CPU: not every device has f64.
fn host(scalar: &Tensor) -> Result<f64> {
    Ok(scalar.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?)
}

/// Joins what `of` makes of each pair of elements (of `a` and itself without `b`), from 0 on. Elsewhere than on the CPU, what
/// `otherwise` says.
fn fold(
    a: &Tensor,
    b: Option<&Tensor>,
    of: impl Fn(f64, f64) -> f64 + Sync,
    join: impl Fn(f64, f64) -> f64 + Sync,
    otherwise: impl FnOnce() -> Result<f64>,
) -> Result<f64> {
    if !a.device().is_cpu() {
        return otherwise();
    }
    let (a, b) = (a.contiguous()?, b.map(Tensor::contiguous).transpose()?);
    let (first, layout) = a.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else { return otherwise() };
    let other = b.as_ref().map(Tensor::storage_and_layout);
    let place = match &other {
        Some((_, layout)) => layout.contiguous_offsets(),
        None => Some((start, end)),
    };
    let Some((from, to)) = place else { return otherwise() };
    // One guard of a storage: a second one of the same would wait for a writer that waits for the first.
    match (&*first, other.as_ref().map_or(&*first, |(storage, _)| &**storage)) {
        (Storage::Cpu(CpuStorage::F32(a)), Storage::Cpu(CpuStorage::F32(b))) => {
            Ok(chunks(&a[start..end], &b[from..to], of, join))
        }
        (Storage::Cpu(CpuStorage::F64(a)), Storage::Cpu(CpuStorage::F64(b))) => {
            Ok(chunks(&a[start..end], &b[from..to], of, join))
        }
        _ => otherwise(),
    }
}

fn chunks<F: Copy + Into<f64> + Sync>(
    a: &[F],
    b: &[F],
    of: impl Fn(f64, f64) -> f64 + Sync,
    join: impl Fn(f64, f64) -> f64 + Sync,
) -> f64 {
    let chunk = |a: &[F], b: &[F]| {
        vectorized(
            #[inline(always)]
            || {
                let mut lanes = [0f64; LANES];
                let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
                for (a, b) in a.iter().zip(b) {
                    for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
                        *lane = join(*lane, of((*a).into(), (*b).into()));
                    }
                }
                for ((lane, a), b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
                    *lane = join(*lane, of((*a).into(), (*b).into()));
                }
                lanes.into_iter().fold(0.0, &join)
            },
        )
    };
    let count = a.len().div_ceil(CHUNK);
    let mut partial = vec![0.0; count];
    let parts = Parts::new(&mut partial);
    // Not rayon's own loops: tensors may be the parameters, which nobody may hold and wait for the pool.
    team(a.len()).run(count, (1, 8), &|range| {
        // SAFETY: the ranges of a run do not overlap, and `partial` is borrowed until it ends.
        let partial = unsafe { parts.part(range.clone()) };
        for (sum, i) in partial.iter_mut().zip(range) {
            let places = i * CHUNK..((i + 1) * CHUNK).min(a.len());
            *sum = chunk(&a[places.clone()], &b[places]);
        }
    });
    partial.into_iter().fold(0.0, join)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_do_not_depend_on_threads_and_are_right() {
        for dtype in [DType::F32, DType::F64] {
            let n = 200_003;
            let values: Vec<f64> = (0..n).map(|i| ((i * 7919 % 1009) as f64 - 504.0) / 512.0).collect();
            let a = Tensor::from_vec(values.clone(), n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let with = |threads: usize| {
                taper_kernels::oversubscribe();
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| [squares(&a), magnitudes(&a), largest(&a)].map(|x| x.unwrap().to_bits()))
            };
            let one = with(1);
            assert!([2, 3, 7, 64].into_iter().all(|threads| with(threads) == one));
            // Multiples of 2⁻¹⁸ below 2¹⁸: every sum is exact.
            assert_eq!(f64::from_bits(one[0]), values.iter().map(|v| v * v).sum::<f64>());
            assert_eq!(f64::from_bits(one[1]), values.iter().map(|v| v.abs()).sum::<f64>());
            assert_eq!(f64::from_bits(one[2]), 504.0 / 512.0);
        }
        assert_eq!(largest(&Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap()).unwrap(), 0.0);
    }
}

//! The one pass over memory: shadow moments move, and everything that the references are compared by is summed.
//!
//! A pass reads gradient, old and new parameter and reads and writes the moments. It goes by blocks that stay in the L1 cache: first
//! what the compiler turns into vectors element by element, then one product after another, so that memory is read once.
//! Products are added in the precision of the parameter, block by block, and blocks in f64, in an order that the shape alone
//! decides.
use crate::Result;
use crate::driver::cpu::{team, vectorized};
use crate::driver::team::Parts;
use crate::rule::Real;
use crate::sums::CHUNK;

/// Independent sums, so that additions need not wait for each other.
const LANES: usize = 16;
/// Elements whose products are added in the precision of the parameter; eleven such blocks of f32 stay in the L1 cache.
const BLOCK: usize = 512;

/// How many sums there are.
pub(super) const SUMS: usize = 18;
/// What is summed: products of the update u, the parameter w before the step, the gradient g, momentum b (ahead of it g + βb, if it
/// looks ahead), its signs s, Adam's direction a and momentum r of ∇√(f + c).
pub(super) const UU: usize = 0;
pub(super) const WW: usize = 1;
pub(super) const UW: usize = 2;
pub(super) const GG: usize = 3;
pub(super) const UG: usize = 4;
pub(super) const GW: usize = 5;
pub(super) const BB: usize = 6;
pub(super) const UB: usize = 7;
pub(super) const BW: usize = 8;
pub(super) const SS: usize = 9;
pub(super) const US: usize = 10;
pub(super) const SW: usize = 11;
pub(super) const AA: usize = 12;
pub(super) const UA: usize = 13;
pub(super) const AW: usize = 14;
pub(super) const RR: usize = 15;
pub(super) const UR: usize = 16;
pub(super) const RW: usize = 17;
/// Products with the parameter that nobody asks for where no decay is fitted: a third of all.
const OF_DECAY: [usize; 6] = [UW, GW, BW, SW, AW, RW];

/// The scalars of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalars<T> {
    /// What gradients are multiplied by and clamped to.
    pub scale: T,
    pub limit: T,
    pub beta: T,
    /// Whether momentum descent goes by g + βb in the place of b.
    pub looks_ahead: bool,
    pub beta2: T,
    pub rest2: T,
    /// Momentum to Adam's corrected mean, and root of the squares to their corrected root.
    pub mean: T,
    pub root: T,
    pub eps: T,
    /// 1 / (2 √(f + c)).
    pub half_inverse_root: T,
    /// Whether decay is fitted; else products that only it takes are 0.
    pub decays: bool,
}

impl Scalars<f64> {
    pub fn round<T: Real>(self) -> Scalars<T> {
        let of = T::from_f64;
        Scalars {
            scale: of(self.scale),
            limit: of(self.limit),
            beta: of(self.beta),
            looks_ahead: self.looks_ahead,
            beta2: of(self.beta2),
            rest2: of(self.rest2),
            mean: of(self.mean),
            root: of(self.root),
            eps: of(self.eps),
            half_inverse_root: of(self.half_inverse_root),
            decays: self.decays,
        }
    }
}

/// The parameter before and after a step.
#[derive(Clone, Copy)]
pub(super) struct Step<'a, T> {
    pub before: &'a [T],
    pub after: &'a [T],
}

/// The moments of a parameter; `root` is empty where nobody asks for it.
pub(super) struct Moments<'a, T> {
    pub momentum: &'a mut [T],
    pub square: &'a mut [T],
    pub root: &'a mut [T],
}

/// Moves the moments by a gradient; with a step, the sums too.
pub(super) fn pass<T: Real>(
    scalars: &Scalars<T>,
    g: &[T],
    step: Option<Step<'_, T>>,
    moments: Moments<'_, T>,
) -> Result<[f64; SUMS]> {
    let has_root = !moments.root.is_empty();
    let (n, count) = (g.len(), g.len().div_ceil(CHUNK));
    let fits = |len: usize| len == n;
    let whole = fits(moments.momentum.len())
        && fits(moments.square.len())
        && (!has_root || fits(moments.root.len()))
        && step.is_none_or(|step| fits(step.before.len()) && fits(step.after.len()));
    if !whole {
        let message = format!("a gradient of {n} elements for a parameter of another size");
        return Err(candle_core::Error::msg(message).into());
    }
    let mut partial = vec![[0f64; SUMS]; count];
    let sums = Parts::new(&mut partial);
    let (momentum, square) = (Parts::new(moments.momentum), Parts::new(moments.square));
    let root = Parts::new(moments.root);
    team(n).run(count, (1, 8), &|range| {
        for i in range {
            let places = i * CHUNK..((i + 1) * CHUNK).min(n);
            // SAFETY: chunks do not overlap, nor do the pieces of a run, and all four are borrowed until it ends.
            let (sum, momentum, square, root) = unsafe {
                let root = if has_root { root.part(places.clone()) } else { root.part(0..0) };
                (
                    &mut sums.part(i..i + 1)[0],
                    momentum.part(places.clone()),
                    square.part(places.clone()),
                    root,
                )
            };
            let (g, moments) = (&g[places.clone()], Moments { momentum, square, root });
            let step = step.map(|s| Step { before: &s.before[places.clone()], after: &s.after[places] });
            vectorized(
                #[inline(always)]
                || match (step, has_root) {
                    (Some(step), false) => blocks::<T, true, false>(scalars, g, step, moments, sum),
                    (Some(step), true) => blocks::<T, true, true>(scalars, g, step, moments, sum),
                    (None, false) => {
                        blocks::<T, false, false>(scalars, g, Step { before: g, after: g }, moments, sum)
                    }
                    (None, true) => {
                        blocks::<T, false, true>(scalars, g, Step { before: g, after: g }, moments, sum)
                    }
                },
            );
        }
    });
    Ok(partial.iter().fold([0.0; SUMS], |sum, part| std::array::from_fn(|k| sum[k] + part[k])))
}

#[inline(always)]
fn blocks<T: Real, const LOOK: bool, const ROOT: bool>(
    scalars: &Scalars<T>,
    g: &[T],
    step: Step<'_, T>,
    moments: Moments<'_, T>,
    sums: &mut [f64; SUMS],
) {
    let zero = T::from_f64(0.0);
    let mut scratch = [[zero; BLOCK]; 5];
    let mut roots = moments.root.chunks_mut(BLOCK);
    let of_g = g.chunks(BLOCK).zip(moments.momentum.chunks_mut(BLOCK).zip(moments.square.chunks_mut(BLOCK)));
    for ((g, (b, q)), (w, x)) in of_g.zip(step.before.chunks(BLOCK).zip(step.after.chunks(BLOCK))) {
        let r: &mut [T] = if ROOT { roots.next().unwrap_or_default() } else { &mut [] };
        let [clipped, u, sign, a, ahead] = &mut scratch;
        let clipped = &mut clipped[..g.len()];
        for (to, g) in clipped.iter_mut().zip(g) {
            *to = (*g * scalars.scale).at_most(scalars.limit).at_least(-scalars.limit);
        }
        advance::<T, ROOT>(scalars, clipped, b, q, r);
        if LOOK {
            let (u, sign, a) = (&mut u[..g.len()], &mut sign[..g.len()], &mut a[..g.len()]);
            directions(scalars, (w, x), (b, q), (u, sign, a));
            let (g, mut b, r): (&[T], &[T], &[T]) = (clipped, b, r);
            if scalars.looks_ahead {
                let ahead = &mut ahead[..g.len()];
                for ((ahead, g), b) in ahead.iter_mut().zip(g).zip(b) {
                    *ahead = *g + scalars.beta * *b;
                }
                b = ahead;
            }
            let pairs: [(&[T], &[T]); SUMS] = [
                (u, u),
                (w, w),
                (u, w),
                (g, g),
                (u, g),
                (g, w),
                (b, b),
                (u, b),
                (b, w),
                (sign, sign),
                (u, sign),
                (sign, w),
                (a, a),
                (u, a),
                (a, w),
                (r, r),
                (u, r),
                (r, w),
            ];
            for (place, (x, y)) in pairs.into_iter().enumerate().take(if ROOT { SUMS } else { RR }) {
                if scalars.decays || !OF_DECAY.contains(&place) {
                    sums[place] += dot(x, y);
                }
            }
        }
    }
}

/// Moves the moments by a gradient.
#[inline(always)]
fn advance<T: Real, const ROOT: bool>(s: &Scalars<T>, g: &[T], b: &mut [T], q: &mut [T], r: &mut [T]) {
    for ((g, b), q) in g.iter().zip(b).zip(q) {
        *b = s.beta * *b + *g;
        *q = s.beta2 * *q + s.rest2 * (*g * *g);
    }
    if ROOT {
        for (g, r) in g.iter().zip(r) {
            *r = s.beta * *r + s.half_inverse_root * *g;
        }
    }
}

/// The update, the signs of momentum and Adam's direction.
#[inline(always)]
fn directions<T: Real>(
    s: &Scalars<T>,
    (w, x): (&[T], &[T]),
    (b, q): (&[T], &[T]),
    (u, sign, a): (&mut [T], &mut [T], &mut [T]),
) {
    let (zero, one) = (T::from_f64(0.0), T::from_f64(1.0));
    for ((u, w), x) in u.iter_mut().zip(w).zip(x) {
        *u = *x - *w;
    }
    for (sign, b) in sign.iter_mut().zip(b) {
        let up = if *b > zero { one } else { zero };
        let down = if *b < zero { one } else { zero };
        *sign = up - down;
    }
    for ((a, b), q) in a.iter_mut().zip(b).zip(q) {
        let below = q.sqrt() * s.root + s.eps;
        // 0 / 0 where there never was a gradient, and ε is 0.
        let below = if below > zero { below } else { one };
        *a = s.mean * *b / below;
    }
}

/// The sum of products of a block.
#[inline(always)]
fn dot<T: Real>(x: &[T], y: &[T]) -> f64 {
    let mut lanes = [T::from_f64(0.0); LANES];
    let ((x, x_tail), (y, y_tail)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane = *lane + *x * *y;
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(x_tail).zip(y_tail) {
        *lane = *lane + *x * *y;
    }
    lanes.into_iter().fold(0.0, |sum, lane| sum + lane.to_f64())
}

/// Copies a slice with all threads.
pub(super) fn copy<T: Real>(from: &[T], to: &mut [T]) {
    let n = from.len().min(to.len());
    let parts = Parts::new(to);
    team(n).run(n.div_ceil(CHUNK), (1, 8), &|range| {
        let places = range.start * CHUNK..(range.end * CHUNK).min(n);
        // SAFETY: the ranges of a run do not overlap, and the slice is borrowed until it ends.
        unsafe { parts.part(places.clone()) }.copy_from_slice(&from[places]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalars() -> Scalars<f64> {
        Scalars {
            scale: 0.5,
            limit: 0.75,
            beta: 0.9,
            looks_ahead: false,
            beta2: 0.99,
            rest2: 0.01,
            mean: 0.1 / 0.19,
            root: (1.0f64 / 0.0199).sqrt(),
            eps: 1e-8,
            half_inverse_root: 0.25,
            decays: true,
        }
    }

    /// The same, one element after another.
    fn plainly(s: &Scalars<f64>, n: usize) -> ([f64; SUMS], Vec<f64>, Vec<f64>, Vec<f64>) {
        let (mut sums, mut lost) = ([0.0; SUMS], [0.0; SUMS]);
        let mut all = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..n {
            let (g, w, x, b, q, r) = values(i);
            let g = (g * s.scale).clamp(-s.limit, s.limit);
            let (b, q) = (s.beta * b + g, s.beta2 * q + s.rest2 * (g * g));
            let r = s.beta * r + s.half_inverse_root * g;
            let (u, sign) = (x - w, if b == 0.0 { 0.0 } else { b.signum() });
            let a = s.mean * b / (q.sqrt() * s.root + s.eps);
            let (moment, b) = (b, if s.looks_ahead { g + s.beta * b } else { b });
            let pairs = [
                (u, u),
                (w, w),
                (u, w),
                (g, g),
                (u, g),
                (g, w),
                (b, b),
                (u, b),
                (b, w),
                (sign, sign),
                (u, sign),
                (sign, w),
                (a, a),
                (u, a),
                (a, w),
                (r, r),
                (u, r),
                (r, w),
            ];
            for ((sum, lost), (x, y)) in sums.iter_mut().zip(&mut lost).zip(pairs) {
                let (before, new) = (*sum, x * y);
                *sum = before + new;
                // What an addition rounds away, exactly: so long a sum in one row would lose more than it is to prove.
                let part = *sum - before;
                *lost += (before - (*sum - part)) + (new - part);
            }
            all.0.push(moment);
            all.1.push(q);
            all.2.push(r);
        }
        sums.iter_mut().zip(lost).for_each(|(sum, lost)| *sum += lost);
        (sums, all.0, all.1, all.2)
    }

    fn values(i: usize) -> (f64, f64, f64, f64, f64, f64) {
        let of = |salt: usize| ((i * 7919 + salt * 104_729) % 1009) as f64 / 256.0 - 2.0;
        let w = of(1);
        (of(0), w, w + of(2) / 64.0, of(3), of(4).abs(), of(5))
    }

    #[test]
    fn sums_are_those_of_single_elements_whatever_the_length_and_the_threads() {
        let lengths = [0, 1, 7, 8, 9, 511, 512, 513, 40_000, 100_003];
        for (n, looks_ahead) in lengths.into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let s = Scalars { looks_ahead, ..scalars() };
            let (want, momentum, square, root) = plainly(&s, n);
            let of = |k: usize| -> Vec<f64> {
                let pick = |i| {
                    let v = values(i);
                    [v.0, v.1, v.2, v.3, v.4, v.5][k]
                };
                (0..n).map(pick).collect()
            };
            let once = |threads: usize| {
                taper_kernels::oversubscribe();
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let (g, before, after) = (of(0), of(1), of(2));
                let (mut b, mut q, mut r) = (of(3), of(4), of(5));
                let moments = Moments { momentum: &mut b, square: &mut q, root: &mut r };
                let step = Some(Step { before: &before, after: &after });
                let sums = pool.install(|| pass(&s, &g, step, moments)).unwrap();
                (sums, b, q, r)
            };
            let (sums, b, q, r) = once(1);
            assert_eq!((&b, &q, &r), (&momentum, &square, &root));
            for (k, (found, want)) in sums.iter().zip(want).enumerate() {
                let size: f64 = (0..n).map(|_| 16.0).sum();
                assert!(
                    (found - want).abs() <= 1e-15 * size.max(1.0) * 16.0,
                    "{n} elements, sum {k}: {found}, {want}"
                );
            }
            let bits = |sums: [f64; SUMS]| sums.map(f64::to_bits);
            let (of_decay, rest): (Vec<_>, Vec<_>) = (0..SUMS).partition(|place| OF_DECAY.contains(place));
            let moments = Moments { momentum: &mut of(3), square: &mut of(4), root: &mut of(5) };
            let step = Some(Step { before: &of(1), after: &of(2) });
            let without = pass(&Scalars { decays: false, ..s }, &of(0), step, moments).unwrap();
            assert!(rest.iter().all(|place| without[*place].to_bits() == sums[*place].to_bits()));
            assert!(of_decay.iter().all(|place| without[*place] == 0.0));
            assert!([2, 7].into_iter().all(|threads| bits(once(threads).0) == bits(sums)));
        }
    }

    #[test]
    fn the_moments_are_the_same_whether_anybody_looks() {
        let s = scalars().round::<f32>();
        let n = 70_001;
        let of =
            |salt: usize| (0..n).map(|i| ((i * 31 + salt) % 97) as f32 / 50.0 - 1.0).collect::<Vec<f32>>();
        let g = of(1);
        let run = |look: bool| {
            let (mut b, mut q, mut r) = (of(2), of(3).iter().map(|v| v.abs()).collect::<Vec<f32>>(), of(4));
            let moments = Moments { momentum: &mut b, square: &mut q, root: &mut r };
            let (before, after) = (of(5), of(6));
            pass(&s, &g, look.then_some(Step { before: &before, after: &after }), moments).unwrap();
            (b, q, r)
        };
        assert_eq!(run(true), run(false));
    }

    #[test]
    fn a_gradient_of_another_size_is_refused() {
        let moments = Moments { momentum: &mut [0.0; 2], square: &mut [0.0; 3], root: &mut [] };
        assert!(pass(&scalars(), &[1.0; 3], None, moments).is_err());
    }
}

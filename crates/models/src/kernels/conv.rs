//! 2-D convolution: activations `[n, h, w, channels]`, weights `[out, in / groups, kh, kw]` (PyTorch's order).
//!
//! Four ways to compute the same thing, chosen by shape and CPU ([`Algorithm::choose`]):
//! Winograd F(2×2, 3×3) and F(4×4, 3×3) for 3×3 kernels of stride 1, a direct kernel for everything else with
//! AVX-512, and im2col with the `gemm` crate for every other CPU and for f64.
use super::{Isa, Real, conv_portable};
#[cfg(target_arch = "x86_64")]
use super::{as_f32, as_f32_mut, conv_direct, conv_wino};

/// The extents of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Images.
    pub n: usize,
    /// Input rows.
    pub h: usize,
    /// Input columns.
    pub w: usize,
    /// Input channels.
    pub ci: usize,
    /// Output channels.
    pub co: usize,
    /// Kernel rows and columns.
    pub kernel: [usize; 2],
    /// Steps between output rows and columns.
    pub stride: [usize; 2],
    /// Zeros around the input, above and below, left and right.
    pub pad: [usize; 2],
    /// Groups of channels that see only each other; divides `ci` and `co`.
    pub groups: usize,
}

impl Geometry {
    /// Output rows.
    pub fn oh(&self) -> usize {
        (self.h + 2 * self.pad[0] - self.kernel[0]) / self.stride[0] + 1
    }
    /// Output columns.
    pub fn ow(&self) -> usize {
        (self.w + 2 * self.pad[1] - self.kernel[1]) / self.stride[1] + 1
    }
    /// Input channels of a group.
    pub fn cig(&self) -> usize {
        self.ci / self.groups
    }
    /// Output channels of a group.
    pub fn cog(&self) -> usize {
        self.co / self.groups
    }
    /// Elements of the input.
    pub fn x_len(&self) -> usize {
        self.n * self.h * self.w * self.ci
    }
    /// Elements of the output.
    pub fn y_len(&self) -> usize {
        self.n * self.oh() * self.ow() * self.co
    }
    /// Positions of the kernel.
    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }
    /// Operations by the plain count: a product and a sum for every tap.
    pub fn flops(&self) -> usize {
        2 * self.y_len() * self.cig() * self.taps()
    }
    /// Elements of the weights.
    pub fn w_len(&self) -> usize {
        self.co * self.cig() * self.taps()
    }
}

/// Kernel and stride, channels, and size of the input.
impl std::fmt::Display for Geometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([kh, kw], [stride, _]) = (self.kernel, self.stride);
        write!(f, "{kh}x{kw}/{stride} {}-{} {}x{}", self.ci, self.co, self.h, self.w)
    }
}

/// How the products of a convolution are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Winograd F(2×2, 3×3): 2.25 times fewer products, as accurate as the direct sum.
    Winograd2,
    /// Winograd F(4×4, 3×3): 4 times fewer products, about ten times the rounding error.
    Winograd4,
    /// The AVX-512 direct kernel.
    Direct,
    /// im2col and the `gemm` crate.
    Portable,
}

impl Algorithm {
    /// The fastest one for a shape on this CPU; `fast` permits the less accurate F(4×4).
    pub fn choose<T: Real>(isa: Isa, g: &Geometry, fast: bool) -> Self {
        if isa.of::<T>() != Isa::Avx512 {
            return Algorithm::Portable;
        }
        // Below 16 channels a vector is mostly padding; below 3 rows a tile is.
        let winograd = Self::winograd_fits(g) && g.ci >= 16 && g.co >= 16 && g.oh() > 2 && g.ow() > 2;
        match (winograd, fast) {
            (true, true) => Algorithm::Winograd4,
            (true, false) => Algorithm::Winograd2,
            (false, _) => Algorithm::Direct,
        }
    }

    /// Whether Winograd applies at all.
    pub fn winograd_fits(g: &Geometry) -> bool {
        g.kernel == [3, 3] && g.stride == [1, 1] && g.groups == 1 && g.pad[0] <= 2 && g.pad[1] <= 2
    }
}

/// y = x ∗ w (+ bias).
pub fn forward<T: Real>(algo: Algorithm, g: &Geometry, x: &[T], w: &[T], bias: Option<&[T]>, y: &mut [T]) {
    assert_eq!([x.len(), w.len(), y.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    if let Some(bias) = bias {
        for pixel in y.chunks_exact_mut(g.co) {
            pixel.copy_from_slice(bias);
        }
    }
    let add = bias.is_some();
    match algo {
        #[cfg(target_arch = "x86_64")]
        Algorithm::Winograd2 => {
            conv_wino::conv::<4, 2>(g, conv_wino::Pass::Forward, as_f32(x), as_f32(w), as_f32_mut(y), add)
        }
        #[cfg(target_arch = "x86_64")]
        Algorithm::Winograd4 => {
            conv_wino::conv::<6, 4>(g, conv_wino::Pass::Forward, as_f32(x), as_f32(w), as_f32_mut(y), add)
        }
        #[cfg(target_arch = "x86_64")]
        Algorithm::Direct => conv_direct::forward(g, as_f32(x), as_f32(w), as_f32_mut(y), add),
        _ => conv_portable::forward(g, x, w, y, add),
    }
}

/// dx = the gradient of x, or dx += it.
pub fn grad_input<T: Real>(algo: Algorithm, g: &Geometry, dy: &[T], w: &[T], dx: &mut [T], add: bool) {
    assert_eq!([dx.len(), w.len(), dy.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    match algo {
        #[cfg(target_arch = "x86_64")]
        Algorithm::Winograd2 => {
            conv_wino::conv::<4, 2>(g, conv_wino::Pass::GradInput, as_f32(dy), as_f32(w), as_f32_mut(dx), add)
        }
        #[cfg(target_arch = "x86_64")]
        Algorithm::Winograd4 => {
            conv_wino::conv::<6, 4>(g, conv_wino::Pass::GradInput, as_f32(dy), as_f32(w), as_f32_mut(dx), add)
        }
        #[cfg(target_arch = "x86_64")]
        Algorithm::Direct => conv_direct::grad_input(g, as_f32(dy), as_f32(w), as_f32_mut(dx), add),
        _ => conv_portable::grad_input(g, dy, w, dx, add),
    }
}

/// dw = the gradient of the weights.
pub fn grad_weight<T: Real>(algo: Algorithm, g: &Geometry, x: &[T], dy: &[T], dw: &mut [T]) {
    assert_eq!([x.len(), dw.len(), dy.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    match algo {
        #[cfg(target_arch = "x86_64")]
        Algorithm::Winograd2 => conv_wino::grad_weight::<4, 2>(g, as_f32(x), as_f32(dy), as_f32_mut(dw)),
        #[cfg(target_arch = "x86_64")]
        Algorithm::Winograd4 => conv_wino::grad_weight::<6, 4>(g, as_f32(x), as_f32(dy), as_f32_mut(dw)),
        #[cfg(target_arch = "x86_64")]
        Algorithm::Direct => conv_direct::grad_weight(g, as_f32(x), as_f32(dy), as_f32_mut(dw)),
        _ => conv_portable::grad_weight(g, x, dy, dw),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of the definition, in f64: y, dx, dw for given x, w, dy.
    fn reference(g: &Geometry, x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
        let (mut y, mut dx, mut dw) = (vec![0.0; g.y_len()], vec![0.0; g.x_len()], vec![0.0; g.w_len()]);
        let [kh, kw] = g.kernel;
        for i in 0..g.n {
            for oy in 0..g.oh() {
                for ox in 0..g.ow() {
                    for o in 0..g.co {
                        let yi = ((i * g.oh() + oy) * g.ow() + ox) * g.co + o;
                        for c in 0..g.cig() {
                            let ch = o / g.cog() * g.cig() + c;
                            for a in 0..kh {
                                for b in 0..kw {
                                    let iy = (oy * g.stride[0] + a).wrapping_sub(g.pad[0]);
                                    let ix = (ox * g.stride[1] + b).wrapping_sub(g.pad[1]);
                                    if iy < g.h && ix < g.w {
                                        let xi = ((i * g.h + iy) * g.w + ix) * g.ci + ch;
                                        let wi = ((o * g.cig() + c) * kh + a) * kw + b;
                                        y[yi] += x[xi] * w[wi];
                                        dx[xi] += dy[yi] * w[wi];
                                        dw[wi] += dy[yi] * x[xi];
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        [y, dx, dw]
    }

    fn numbers<T: Real>(n: usize, salt: usize) -> (Vec<T>, Vec<f64>) {
        let mut rng = crate::rng::Rng::new(7, "conv", "test", salt as u64);
        let t: Vec<T> = (0..n).map(|_| T::from_f64(rng.uniform() - 0.5)).collect();
        let d = t.iter().map(|v| v.to_f64()).collect();
        (t, d)
    }

    fn close<T: Real>(name: &str, got: &[T], want: &[f64], limit: f64) {
        let top = want.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
        for (i, (a, b)) in got.iter().zip(want).enumerate() {
            assert!((a.to_f64() - b).abs() <= limit * top, "{name} at {i}: {a:?} against {b}");
        }
    }

    fn check<T: Real>(algo: Algorithm, g: &Geometry, limit: f64) {
        let ((x, xd), (w, wd)) = (numbers::<T>(g.x_len(), 1), numbers::<T>(g.w_len(), 2));
        let ((dy, dyd), (bias, _)) = (numbers::<T>(g.y_len(), 3), numbers::<T>(g.co, 4));
        let [y, dx, dw] = reference(g, &xd, &wd, &dyd);
        let name = |what| format!("{what} {algo:?} {g:?}");
        // Outputs start as NaN: every element has to be written.
        let nan = T::from_f64(f64::NAN);
        let mut got = vec![nan; g.y_len()];
        forward(algo, g, &x, &w, None, &mut got);
        close(&name("y"), &got, &y, limit);
        forward(algo, g, &x, &w, Some(&bias), &mut got);
        let biased: Vec<f64> = y.iter().enumerate().map(|(i, v)| v + bias[i % g.co].to_f64()).collect();
        close(&name("y + bias"), &got, &biased, limit);
        let mut got = vec![nan; g.x_len()];
        grad_input(algo, g, &dy, &w, &mut got, false);
        close(&name("dx"), &got, &dx, limit);
        grad_input(algo, g, &dy, &w, &mut got, true);
        let twice: Vec<f64> = dx.iter().map(|v| 2.0 * v).collect();
        close(&name("dx added"), &got, &twice, limit);
        let mut got = vec![nan; g.w_len()];
        grad_weight(algo, g, &x, &dy, &mut got);
        close(&name("dw"), &got, &dw, limit);
    }

    fn geometry(
        [n, h, w]: [usize; 3],
        [ci, co]: [usize; 2],
        kernel: [usize; 2],
        stride: [usize; 2],
        pad: [usize; 2],
        groups: usize,
    ) -> Geometry {
        Geometry { n, h, w, ci, co, kernel, stride, pad, groups }
    }

    fn table() -> Vec<Geometry> {
        let g = geometry;
        vec![
            g([2, 8, 8], [16, 16], [3, 3], [1, 1], [1, 1], 1),
            g([3, 7, 5], [17, 70], [3, 3], [1, 1], [1, 1], 1),
            g([1, 4, 9], [64, 64], [3, 3], [1, 1], [0, 0], 1),
            g([2, 5, 6], [3, 20], [3, 3], [1, 1], [2, 2], 1),
            g([2, 5, 6], [40, 5], [3, 3], [1, 1], [0, 2], 1),
            g([1, 3, 3], [1, 1], [3, 3], [1, 1], [1, 1], 1),
            g([5, 4, 4], [130, 257], [3, 3], [1, 1], [1, 1], 1),
            g([2, 1, 1], [8, 8], [3, 3], [1, 1], [1, 1], 1),
            g([2, 9, 9], [32, 65], [3, 3], [2, 2], [1, 1], 1),
            g([2, 8, 8], [64, 128], [1, 1], [2, 2], [0, 0], 1),
            g([2, 6, 5], [300, 48], [1, 1], [1, 1], [0, 0], 1),
            g([2, 17, 15], [3, 64], [7, 7], [2, 2], [3, 3], 1),
            g([1, 10, 7], [6, 9], [5, 3], [3, 2], [2, 1], 3),
            g([2, 6, 6], [8, 8], [3, 3], [1, 1], [1, 1], 8),
            g([2, 6, 6], [8, 16], [2, 2], [1, 1], [0, 0], 4),
            g([1, 12, 4], [5, 7], [1, 4], [5, 1], [0, 3], 1),
            g([40, 4, 4], [20, 24], [3, 3], [1, 1], [1, 1], 1),
        ]
    }

    #[test]
    fn every_algorithm_matches_the_definition() {
        for g in table() {
            // f64 sums of at most a few thousand terms: 1e-13 is their rounding error, with a margin of ten.
            check::<f64>(Algorithm::Portable, &g, 1e-13);
            // f32: sums of a few thousand terms in blocks, 2e-6 of the largest; F(4×4) amplifies by about ten.
            check::<f32>(Algorithm::Portable, &g, 2e-6);
            if Isa::detect() == Isa::Avx512 {
                check::<f32>(Algorithm::Direct, &g, 2e-6);
                if Algorithm::winograd_fits(&g) {
                    check::<f32>(Algorithm::Winograd2, &g, 2e-6);
                    check::<f32>(Algorithm::Winograd4, &g, 2e-5);
                }
            }
        }
    }

    #[test]
    fn large_channel_counts_take_the_other_winograd_schedules() {
        if Isa::detect() != Isa::Avx512 {
            return;
        }
        // Weights too large for L2 with many tiles and with few; odd channel counts beyond whole panels.
        for g in [
            geometry([9, 8, 8], [260, 264], [3, 3], [1, 1], [1, 1], 1),
            geometry([3, 6, 6], [330, 300], [3, 3], [1, 1], [1, 1], 1),
        ] {
            check::<f32>(Algorithm::Winograd2, &g, 2e-6);
            check::<f32>(Algorithm::Winograd4, &g, 2e-5);
        }
    }

    #[test]
    fn one_and_two_threads_give_equal_bits() {
        let run = |threads: usize, algo: Algorithm, g: &Geometry| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (x, w) = (numbers::<f32>(g.x_len(), 1).0, numbers::<f32>(g.w_len(), 2).0);
                let dy = numbers::<f32>(g.y_len(), 3).0;
                let (mut y, mut dx) = (vec![0.0; g.y_len()], vec![0.0; g.x_len()]);
                let mut dw = vec![0.0; g.w_len()];
                forward(algo, g, &x, &w, None, &mut y);
                grad_input(algo, g, &dy, &w, &mut dx, false);
                grad_weight(algo, g, &x, &dy, &mut dw);
                [y, dx, dw].map(|v| v.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            })
        };
        let g = geometry([9, 12, 12], [48, 80], [3, 3], [1, 1], [1, 1], 1);
        let mut algorithms = vec![Algorithm::Portable];
        if Isa::detect() == Isa::Avx512 {
            algorithms.extend([Algorithm::Direct, Algorithm::Winograd2, Algorithm::Winograd4]);
        }
        for algo in algorithms {
            let one = run(1, algo, &g);
            for threads in [2, 3] {
                assert!(one == run(threads, algo, &g), "{algo:?}");
            }
        }
    }
}

//! 2-D convolution: activations `[n, h, w, channels]`, weights `[out, in / groups, kh, kw]` (PyTorch's order).
//!
//! Four ways to compute the same thing, chosen by shape and CPU ([`Algorithm::choose`]):
//! Winograd F(2×2, 3×3) and F(4×4, 3×3) for 3×3 kernels of stride 1, a direct kernel for everything else, and im2col with
//! the `gemm` crate for f64 and for CPUs without vectors of their own.
use super::conv_wino::Pass;
use super::gemm::{Mat, gemm};
use super::{Isa, Real, as_f32, as_f32_mut, conv_direct, conv_portable, conv_wino, with_simd};

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
    /// Whether every pixel is seen by itself alone, once.
    pub fn is_pointwise(&self) -> bool {
        self.kernel == [1, 1] && self.stride == [1, 1] && self.pad == [0, 0] && self.groups == 1
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
    /// A product whose rows are found through a table of pixels.
    Direct,
    /// im2col and the `gemm` crate.
    Portable,
}

impl Algorithm {
    /// The fastest one for a shape on this CPU; `fast` permits the less accurate F(4×4).
    pub fn choose<T: Real>(isa: Isa, g: &Geometry, fast: bool) -> Self {
        if isa.of::<T>() == Isa::PORTABLE {
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

    /// Whether it computes this shape in this type.
    pub fn fits<T: Real>(self, g: &Geometry) -> bool {
        match self {
            Algorithm::Portable => true,
            Algorithm::Direct => T::IS_F32,
            Algorithm::Winograd2 | Algorithm::Winograd4 => T::IS_F32 && Self::winograd_fits(g),
        }
    }

    /// Whether Winograd applies at all.
    fn winograd_fits(g: &Geometry) -> bool {
        g.kernel == [3, 3] && g.stride == [1, 1] && g.groups == 1 && g.pad[0] <= 2 && g.pad[1] <= 2
    }
}

/// y = x ∗ w (+ bias). An algorithm that does not fit is replaced by the portable one, here and below.
pub fn forward<T: Real>(
    isa: Isa,
    algo: Algorithm,
    g: &Geometry,
    (x, w, bias): (&[T], &[T], Option<&[T]>),
    y: &mut [T],
) {
    assert_eq!([x.len(), w.len(), y.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    if let Some(bias) = bias {
        for pixel in y.chunks_exact_mut(g.co) {
            pixel.copy_from_slice(bias);
        }
    }
    let add = bias.is_some();
    if !algo.fits::<T>(g) || algo == Algorithm::Portable {
        return conv_portable::forward(g, x, w, y, add);
    }
    let (xw, y) = ((as_f32(x), as_f32(w)), as_f32_mut(y));
    with_simd!(isa, s => match algo {
        Algorithm::Winograd2 => conv_wino::conv::<_, 4, 2>(s, g, Pass::Forward, xw, y, add),
        Algorithm::Winograd4 => conv_wino::conv::<_, 6, 4>(s, g, Pass::Forward, xw, y, add),
        _ => conv_direct::forward(s, g, xw, y, add),
    })
}

/// dx = the gradient of x, or dx += it.
pub fn grad_input<T: Real>(
    isa: Isa,
    algo: Algorithm,
    g: &Geometry,
    (dy, w): (&[T], &[T]),
    dx: &mut [T],
    add: bool,
) {
    assert_eq!([dx.len(), w.len(), dy.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    if !algo.fits::<T>(g) || algo == Algorithm::Portable {
        return conv_portable::grad_input(g, dy, w, dx, add);
    }
    let (dyw, dx) = ((as_f32(dy), as_f32(w)), as_f32_mut(dx));
    with_simd!(isa, s => match algo {
        Algorithm::Winograd2 => conv_wino::conv::<_, 4, 2>(s, g, Pass::GradInput, dyw, dx, add),
        Algorithm::Winograd4 => conv_wino::conv::<_, 6, 4>(s, g, Pass::GradInput, dyw, dx, add),
        _ => conv_direct::grad_input(s, g, dyw, dx, add),
    })
}

/// dw = the gradient of the weights.
pub fn grad_weight<T: Real>(isa: Isa, algo: Algorithm, g: &Geometry, (x, dy): (&[T], &[T]), dw: &mut [T]) {
    assert_eq!([x.len(), dw.len(), dy.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    if !algo.fits::<T>(g) || algo == Algorithm::Portable {
        return conv_portable::grad_weight(g, x, dy, dw);
    }
    if algo == Algorithm::Direct && g.is_pointwise() && isa.lanes() < 16 {
        // A product of what is there. With vectors of sixteen the outer products of the direct kernel are as fast.
        let pixels = g.n * g.h * g.w;
        return gemm(isa, Mat::new(dy, pixels, g.co).t(), Mat::new(x, pixels, g.ci), dw, g.ci, false);
    }
    let (xdy, dw) = ((as_f32(x), as_f32(dy)), as_f32_mut(dw));
    with_simd!(isa, s => match algo {
        Algorithm::Winograd2 => conv_wino::grad_weight::<_, 4, 2>(s, g, xdy, dw),
        Algorithm::Winograd4 => conv_wino::grad_weight::<_, 6, 4>(s, g, xdy, dw),
        _ => conv_direct::grad_weight(s, g, xdy, dw),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::relative_difference;

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
        let mut rng = taper_random::Rng::new(7, "conv", "test", salt as u64);
        let t: Vec<T> = (0..n).map(|_| T::from_f64(rng.uniform() - 0.5)).collect();
        let d = t.iter().map(|v| v.to_f64()).collect();
        (t, d)
    }

    fn close<T: Real>(name: &str, got: &[T], want: &[f64], limit: f64) {
        let got: Vec<f64> = got.iter().map(|v| v.to_f64()).collect();
        let error = relative_difference(&got, want);
        assert!(error <= limit, "{name}: off by {error:e}");
    }

    fn check<T: Real>(isa: Isa, algo: Algorithm, g: &Geometry, limit: f64) {
        let (x, w, dy) = (numbers::<T>(g.x_len(), 1), numbers::<T>(g.w_len(), 2), numbers::<T>(g.y_len(), 3));
        let expected = reference(g, &x.1, &w.1, &dy.1);
        check_against(isa, algo, g, [&x.0, &w.0, &dy.0], expected, limit);
    }

    /// Against the portable algorithm in f64, which the definition has judged: for shapes too large for the definition.
    fn check_large(isa: Isa, algo: Algorithm, g: &Geometry, limit: f64) {
        let (x, w) = (numbers::<f32>(g.x_len(), 1), numbers::<f32>(g.w_len(), 2));
        let dy = numbers::<f32>(g.y_len(), 3);
        let (mut y, mut dx) = (vec![0.0; g.y_len()], vec![0.0; g.x_len()]);
        let mut dw = vec![0.0; g.w_len()];
        conv_portable::forward(g, &x.1, &w.1, &mut y, false);
        conv_portable::grad_input(g, &dy.1, &w.1, &mut dx, false);
        conv_portable::grad_weight(g, &x.1, &dy.1, &mut dw);
        check_against(isa, algo, g, [&x.0, &w.0, &dy.0], [y, dx, dw], limit);
    }

    fn check_against<T: Real>(
        isa: Isa,
        algo: Algorithm,
        g: &Geometry,
        [x, w, dy]: [&[T]; 3],
        [y, dx, dw]: [Vec<f64>; 3],
        limit: f64,
    ) {
        let (bias, _) = numbers::<T>(g.co, 4);
        let name = |what| format!("{what} {isa:?} {algo:?} {g:?}");
        // Outputs start as NaN: every element has to be written.
        let nan = T::from_f64(f64::NAN);
        let mut got = vec![nan; g.y_len()];
        forward(isa, algo, g, (x, w, None), &mut got);
        close(&name("y"), &got, &y, limit);
        forward(isa, algo, g, (x, w, Some(&bias)), &mut got);
        let biased: Vec<f64> = y.iter().enumerate().map(|(i, v)| v + bias[i % g.co].to_f64()).collect();
        close(&name("y + bias"), &got, &biased, limit);
        let mut got = vec![nan; g.x_len()];
        grad_input(isa, algo, g, (dy, w), &mut got, false);
        close(&name("dx"), &got, &dx, limit);
        grad_input(isa, algo, g, (dy, w), &mut got, true);
        let twice: Vec<f64> = dx.iter().map(|v| 2.0 * v).collect();
        close(&name("dx added"), &got, &twice, limit);
        let mut got = vec![nan; g.w_len()];
        grad_weight(isa, algo, g, (x, dy), &mut got);
        close(&name("dw"), &got, &dw, limit);
    }

    /// The algorithms in f32 with what their rounding may come to: sums of a few thousand terms in blocks, 2e-6 of the
    /// largest; F(4×4) amplifies by about ten.
    const LIMITS: [(Algorithm, f64); 4] = [
        (Algorithm::Portable, 2e-6),
        (Algorithm::Direct, 2e-6),
        (Algorithm::Winograd2, 2e-6),
        (Algorithm::Winograd4, 2e-5),
    ];

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
            check::<f64>(Isa::PORTABLE, Algorithm::Portable, &g, 1e-13);
            for isa in Isa::available() {
                for (algo, limit) in LIMITS.into_iter().filter(|(algo, _)| algo.fits::<f32>(&g)) {
                    check::<f32>(isa, algo, &g, limit);
                }
            }
        }
    }

    #[test]
    fn an_algorithm_that_does_not_fit_is_replaced() {
        let g = geometry([2, 8, 8], [16, 16], [3, 3], [1, 1], [1, 1], 1);
        for isa in Isa::available() {
            for (algo, limit) in LIMITS {
                check::<f32>(isa, algo, &g, limit);
                check::<f64>(isa, algo, &g, 1e-13);
            }
        }
    }

    #[test]
    fn large_shapes_take_every_schedule_of_winograd() {
        let three = |image, channels| geometry(image, channels, [3, 3], [1, 1], [1, 1], 1);
        let shapes = [
            // Weights too large for L2 with many tiles and with few; odd channel counts beyond whole panels.
            three([9, 8, 8], [260, 264]),
            three([3, 6, 6], [330, 300]),
            // Several sweeps of the weight gradient (640 tiles of 4×4, 162 at a time).
            three([40, 16, 16], [64, 64]),
            // One task a position, in one sweep of 132 tiles of 4×4 and two of 528 of 2×2.
            three([33, 8, 8], [272, 272]),
            // The same in two sweeps of 528 tiles of 4×4.
            three([33, 16, 16], [272, 272]),
        ];
        for g in shapes {
            for isa in Isa::available() {
                for (algo, limit) in &LIMITS[2..] {
                    if algo.fits::<f32>(&g) {
                        check_large(isa, *algo, &g, *limit);
                    }
                }
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_equal_bits() {
        let run = |threads: usize, isa: Isa, algo: Algorithm, g: &Geometry| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (x, w) = (numbers::<f32>(g.x_len(), 1).0, numbers::<f32>(g.w_len(), 2).0);
                let dy = numbers::<f32>(g.y_len(), 3).0;
                let (mut y, mut dx) = (vec![0.0; g.y_len()], vec![0.0; g.x_len()]);
                let mut dw = vec![0.0; g.w_len()];
                forward(isa, algo, g, (&x, &w, None), &mut y);
                grad_input(isa, algo, g, (&dy, &w), &mut dx, false);
                grad_weight(isa, algo, g, (&x, &dy), &mut dw);
                [y, dx, dw].map(|v| v.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            })
        };
        let g = geometry([9, 12, 12], [48, 80], [3, 3], [1, 1], [1, 1], 1);
        for isa in Isa::available() {
            for (algo, _) in LIMITS.into_iter().filter(|(algo, _)| algo.fits::<f32>(&g)) {
                let one = run(1, isa, algo, &g);
                for threads in [2, 3, 7, 64] {
                    assert!(one == run(threads, isa, algo, &g), "{isa:?} {algo:?} on {threads} threads");
                }
            }
        }
    }
}

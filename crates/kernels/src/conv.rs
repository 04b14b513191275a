//! 2-D convolution: activations `[n, h, w, channels]`, weights `[out, in / groups, kh, kw]` (PyTorch's order).
//!
//! Four ways to compute the same thing, chosen by shape ([`Algorithm::choose`]): Winograd F(2×2, 3×3) and F(4×4, 3×3) for 3×3
//! kernels of stride 1 and a depthwise kernel, in f32, and a direct kernel for everything else. With operands rounded to bf16 the
//! direct one rounds them; Winograd's kernels, whose sums of inputs would be rounded once more, and the depthwise one, which is no
//! product, stay in f32, and Winograd's yield to the direct one where matrices of bf16 outrun them.
use super::conv_direct::Plain;
use super::{
    Arithmetic, Real, as_f32, as_f32_mut, conv_amx, conv_depthwise, conv_direct, conv_wino, with_products,
    with_simd,
};
use rayon::prelude::*;

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

/// Which of the two convolutions with the weights is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Input to output.
    Forward,
    /// Gradient of the output to gradient of the input.
    GradInput,
}

/// How the products of a convolution are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Winograd F(2×2, 3×3): 2.25 times fewer products, as accurate as the direct sum.
    Winograd2,
    /// Winograd F(4×4, 3×3): 4 times fewer products, about ten times the rounding error.
    Winograd4,
    /// Channel by channel, where every one is a group.
    Depthwise,
    /// A product whose rows are gathered block by block: for every shape and type.
    Direct,
}

impl Algorithm {
    /// The fastest one for a shape; `fast` permits the less accurate F(4×4).
    pub fn choose<T: Real>(g: &Geometry, fast: bool) -> Self {
        let winograd = if fast { Algorithm::Winograd4 } else { Algorithm::Winograd2 };
        // Below 16 channels a vector is mostly padding; below 3 rows a tile is.
        let pays = g.ci >= 16 && g.co >= 16 && g.oh() > 2 && g.ow() > 2;
        if pays && winograd.fits::<T>(g) { winograd } else { Algorithm::Depthwise.or_direct::<T>(g) }
    }

    /// Whether it computes this shape in this type.
    pub fn fits<T: Real>(self, g: &Geometry) -> bool {
        match self {
            Algorithm::Direct => true,
            Algorithm::Depthwise => T::IS_F32 && g.groups == g.ci && g.groups == g.co,
            Algorithm::Winograd2 | Algorithm::Winograd4 => {
                let plain = g.kernel == [3, 3] && g.stride == [1, 1] && g.groups == 1;
                T::IS_F32 && plain && g.pad.iter().all(|pad| *pad <= 2)
            }
        }
    }

    /// This one, or the direct one where this does not fit.
    fn or_direct<T: Real>(self, g: &Geometry) -> Self {
        if self.fits::<T>(g) { self } else { Algorithm::Direct }
    }

    /// The one to compute by, this one if it fits: matrices of bf16 outrun what Winograd's kernels save, vectors of it do not.
    fn by<T: Real>(self, g: &Geometry, by: Arithmetic) -> Self {
        match self.or_direct::<T>(g) {
            Algorithm::Winograd2 | Algorithm::Winograd4 if by.amx().is_some() => Algorithm::Direct,
            algorithm => algorithm,
        }
    }
}

/// y = x ∗ w (+ bias). An algorithm that does not fit is replaced by the direct one, here and below.
pub fn forward<T: Real>(
    by: impl Into<Arithmetic>,
    algo: Algorithm,
    g: &Geometry,
    (x, w, bias): (&[T], &[T], Option<&[T]>),
    y: &mut [T],
) {
    assert_eq!([x.len(), w.len(), y.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    if let Some(bias) = bias {
        y.par_chunks_mut(64 * g.co).for_each(|pixels| {
            pixels.chunks_exact_mut(g.co).for_each(|pixel| pixel.copy_from_slice(bias));
        });
    }
    convolve(by.into(), algo, g, Pass::Forward, (x, w), y, bias.is_some());
}

/// dx = the gradient of x, or dx += it.
pub fn grad_input<T: Real>(
    by: impl Into<Arithmetic>,
    algo: Algorithm,
    g: &Geometry,
    (dy, w): (&[T], &[T]),
    dx: &mut [T],
    add: bool,
) {
    assert_eq!([dx.len(), w.len(), dy.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    convolve(by.into(), algo, g, Pass::GradInput, (dy, w), dx, add);
}

/// y = x ∗ w, or the input gradient (then `x` is dy and `y` is dx); with `add`, y += it.
fn convolve<T: Real>(
    by: Arithmetic,
    algo: Algorithm,
    g: &Geometry,
    pass: Pass,
    (x, w): (&[T], &[T]),
    y: &mut [T],
    add: bool,
) {
    if !T::IS_F32 {
        return conv_direct::conv(Plain, g, pass, (x, w), y, add);
    }
    convolve_f32(by, algo.by::<T>(g, by), g, pass, (as_f32(x), as_f32(w)), as_f32_mut(y), add);
}

/// Not generic, here and below, so that it is compiled once.
fn convolve_f32(
    by: Arithmetic,
    algo: Algorithm,
    g: &Geometry,
    pass: Pass,
    xw: (&[f32], &[f32]),
    y: &mut [f32],
    add: bool,
) {
    let isa = by.isa;
    match algo {
        Algorithm::Winograd2 => with_simd!(isa, s => conv_wino::conv::<_, 4, 2>(s, g, pass, xw, y, add)),
        Algorithm::Winograd4 => with_simd!(isa, s => conv_wino::conv::<_, 6, 4>(s, g, pass, xw, y, add)),
        Algorithm::Depthwise => with_simd!(isa, s => conv_depthwise::conv(s, g, pass, xw, y, add)),
        Algorithm::Direct => match by.amx().filter(|_| conv_amx::fits(g)) {
            Some(amx) => conv_amx::conv(amx, g, pass, xw, y, add),
            None => with_products!(by, s => conv_direct::conv(s, g, pass, xw, y, add)),
        },
    }
}

/// dw = the gradient of the weights.
pub fn grad_weight<T: Real>(
    by: impl Into<Arithmetic>,
    algo: Algorithm,
    g: &Geometry,
    (x, dy): (&[T], &[T]),
    dw: &mut [T],
) {
    assert_eq!([x.len(), dw.len(), dy.len()], [g.x_len(), g.w_len(), g.y_len()], "{g:?}");
    if !T::IS_F32 {
        return conv_direct::grad_weight(Plain, g, (x, dy), dw);
    }
    let by = by.into();
    let algo = algo.by::<T>(g, by);
    grad_weight_f32(by, algo, g, (as_f32(x), as_f32(dy)), as_f32_mut(dw));
}

fn grad_weight_f32(by: Arithmetic, algo: Algorithm, g: &Geometry, xdy: (&[f32], &[f32]), dw: &mut [f32]) {
    let isa = by.isa;
    match algo {
        Algorithm::Winograd2 => with_simd!(isa, s => conv_wino::grad_weight::<_, 4, 2>(s, g, xdy, dw)),
        Algorithm::Winograd4 => with_simd!(isa, s => conv_wino::grad_weight::<_, 6, 4>(s, g, xdy, dw)),
        Algorithm::Depthwise => with_simd!(isa, s => conv_depthwise::grad_weight(s, g, xdy, dw)),
        Algorithm::Direct => match by.amx().filter(|_| conv_amx::fits(g)) {
            Some(amx) => conv_amx::grad_weight(amx, g, xdy, dw),
            None => with_products!(by, s => conv_direct::grad_weight(s, g, xdy, dw)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::relative_difference;
    use crate::{Isa, Operands};

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
        check_against(isa, algo, g, [&x.0, &w.0, &dy.0], &expected, limit);
    }

    fn check_against<T: Real>(
        isa: Isa,
        algo: Algorithm,
        g: &Geometry,
        [x, w, dy]: [&[T]; 3],
        [y, dx, dw]: &[Vec<f64>; 3],
        limit: f64,
    ) {
        let (bias, _) = numbers::<T>(g.co, 4);
        let name = |what| format!("{what} {isa:?} {algo:?} {g:?}");
        // Outputs start as NaN: every element has to be written.
        let nan = T::from_f64(f64::NAN);
        let mut got = vec![nan; g.y_len()];
        forward(isa, algo, g, (x, w, None), &mut got);
        close(&name("y"), &got, y, limit);
        forward(isa, algo, g, (x, w, Some(&bias)), &mut got);
        let biased: Vec<f64> = y.iter().enumerate().map(|(i, v)| v + bias[i % g.co].to_f64()).collect();
        close(&name("y + bias"), &got, &biased, limit);
        let mut got = vec![nan; g.x_len()];
        grad_input(isa, algo, g, (dy, w), &mut got, false);
        close(&name("dx"), &got, dx, limit);
        grad_input(isa, algo, g, (dy, w), &mut got, true);
        let twice: Vec<f64> = dx.iter().map(|v| 2.0 * v).collect();
        close(&name("dx added"), &got, &twice, limit);
        let mut got = vec![nan; g.w_len()];
        grad_weight(isa, algo, g, (x, dy), &mut got);
        close(&name("dw"), &got, dw, limit);
    }

    /// The algorithms in f32 with what their rounding may come to: sums of a few thousand terms in blocks, 2e-6 of the
    /// largest; F(4×4) amplifies by about ten.
    const LIMITS: [(Algorithm, f64); 3] =
        [(Algorithm::Direct, 2e-6), (Algorithm::Winograd2, 2e-6), (Algorithm::Winograd4, 2e-5)];

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
            g([2, 9, 7], [21, 21], [5, 3], [2, 2], [2, 1], 21),
            g([3, 5, 6], [40, 40], [3, 2], [3, 1], [0, 0], 40),
            g([2, 6, 4], [48, 96], [3, 3], [2, 1], [1, 1], 3),
            g([1, 12, 4], [5, 7], [1, 4], [5, 1], [0, 3], 1),
            g([40, 4, 4], [20, 24], [3, 3], [1, 1], [1, 1], 1),
        ]
    }

    #[test]
    fn every_algorithm_matches_the_definition() {
        for g in table() {
            // f64 sums of at most a few thousand terms: 1e-13 is their rounding error, with a margin of ten.
            check::<f64>(Isa::PORTABLE, Algorithm::Direct, &g, 1e-13);
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
            // Weights too large for L2, F(4×4)'s tiles in two sweeps.
            three([40, 8, 8], [200, 200]),
            // Few tiles; odd channel counts beyond whole panels.
            three([3, 6, 6], [330, 300]),
            // Several sweeps of the weight gradient.
            three([40, 16, 16], [64, 64]),
            // Weights too large for L3: in two parts, and several sweeps of the weight gradient for each.
            three([35, 8, 8], [272, 272]),
            // Few channels and many tiles: weight gradients in parts.
            three([160, 12, 11], [20, 26]),
        ];
        for g in shapes {
            // Against the direct sums in f64, which the definition has judged: these shapes are too large for it.
            let (x, w) = (numbers::<f32>(g.x_len(), 1), numbers::<f32>(g.w_len(), 2));
            let dy = numbers::<f32>(g.y_len(), 3);
            let mut want = [vec![0.0; g.y_len()], vec![0.0; g.x_len()], vec![0.0; g.w_len()]];
            let [y, dx, dw] = &mut want;
            forward(Isa::PORTABLE, Algorithm::Direct, &g, (&x.1, &w.1, None), y);
            grad_input(Isa::PORTABLE, Algorithm::Direct, &g, (&dy.1, &w.1), dx, false);
            grad_weight(Isa::PORTABLE, Algorithm::Direct, &g, (&x.1, &dy.1), dw);
            for isa in Isa::available() {
                for (algo, limit) in LIMITS.into_iter().filter(|(algo, _)| algo.fits::<f32>(&g)) {
                    check_against(isa, algo, &g, [&x.0, &w.0, &dy.0], &want, limit);
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
        let shapes = [
            geometry([9, 12, 12], [48, 80], [3, 3], [1, 1], [1, 1], 1),
            // Weights and gradients too large for L2, in several sweeps.
            geometry([13, 8, 8], [272, 144], [3, 3], [1, 1], [1, 1], 1),
            // Few channels and many tiles: weight gradients in parts.
            geometry([90, 15, 15], [24, 17], [3, 3], [1, 1], [1, 1], 1),
            geometry([5, 9, 9], [24, 40], [3, 3], [2, 2], [1, 1], 1),
            geometry([7, 6, 6], [200, 72], [1, 1], [1, 1], [0, 0], 1),
            geometry([3, 9, 9], [20, 20], [3, 3], [2, 2], [1, 1], 20),
        ];
        for g in shapes {
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

    #[test]
    fn bf16_convolves_the_rounded_operands_with_the_same_bits_everywhere() {
        let rounded = |x: &[f32]| -> Vec<f32> { x.iter().map(|x| crate::simd::pairs::to_bf16(*x)).collect() };
        let doubles = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        let more = [
            // Several blocks of images, the last with few; rows in bands; weights in parts; a band without a tap.
            geometry([70, 9, 7], [40, 70], [3, 3], [1, 1], [1, 1], 1),
            geometry([33, 40, 40], [33, 65], [3, 3], [2, 2], [1, 1], 1),
            geometry([3, 5, 5], [8, 8], [1, 1], [3, 3], [0, 0], 1),
        ];
        // For matrices; emulated CPUs would take minutes for them.
        let matrices = Isa::best().multiplies_matrices();
        for g in table().into_iter().chain(more.into_iter().filter(|_| matrices)) {
            let [x, w, dy] =
                [(g.x_len(), 1), (g.w_len(), 2), (g.y_len(), 3)].map(|(n, salt)| numbers::<f32>(n, salt).0);
            if Algorithm::choose::<f32>(&g, true) == Algorithm::Depthwise {
                continue;
            }
            let [xr, wr, dyr] = [&x, &w, &dy].map(|v| doubles(&rounded(v)));
            let want = reference(&g, &xr, &wr, &dyr);
            let run = |isa: Isa, threads: usize| {
                let by = Arithmetic { isa, operands: Operands::Bf16 };
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let mut all = [vec![0.0; g.y_len()], vec![0.0; g.x_len()], vec![0.0; g.w_len()]];
                    let [y, dx, dw] = &mut all;
                    forward(by, Algorithm::Direct, &g, (&x, &w, None), y);
                    grad_input(by, Algorithm::Direct, &g, (&dy, &w), dx, false);
                    grad_weight(by, Algorithm::Direct, &g, (&x, &dy), dw);
                    all
                })
            };
            let found = run(Isa::PORTABLE, 1);
            for isa in Isa::available() {
                // Matrices are summed up in an order of their own.
                let one = if isa.multiplies_matrices() { run(isa, 1) } else { found.clone() };
                for (one, want) in one.iter().zip(&want) {
                    close(&format!("bf16 {} {g:?}", isa.name()), one, want, 2e-6);
                }
                let threads: &[usize] = if isa.multiplies_matrices() { &[1, 2, 3, 7, 64] } else { &[1, 3] };
                for &threads in threads {
                    assert!(run(isa, threads) == one, "{} {g:?}, {threads} threads", isa.name());
                }
            }
        }
    }
    #[test]
    fn winograds_kernels_stay_in_f32_beside_vectors_of_bf16_and_yield_to_matrices() {
        let g = geometry([2, 9, 7], [20, 33], [3, 3], [1, 1], [1, 1], 1);
        let [x, w, dy] =
            [(g.x_len(), 1), (g.w_len(), 2), (g.y_len(), 3)].map(|(n, salt)| numbers::<f32>(n, salt).0);
        let run = |by: Arithmetic, algo: Algorithm| {
            let mut all = [vec![0.0; g.y_len()], vec![0.0; g.x_len()], vec![0.0; g.w_len()]];
            let [y, dx, dw] = &mut all;
            forward(by, algo, &g, (&x, &w, None), y);
            grad_input(by, algo, &g, (&dy, &w), dx, false);
            grad_weight(by, algo, &g, (&x, &dy), dw);
            all
        };
        for isa in Isa::available() {
            let bf16 = Arithmetic { isa, operands: Operands::Bf16 };
            for algo in [Algorithm::Winograd2, Algorithm::Winograd4] {
                let expected = match isa.multiplies_matrices() {
                    true => run(bf16, Algorithm::Direct),
                    false => run(isa.into(), algo),
                };
                assert!(run(bf16, algo) == expected, "{} {algo:?}", isa.name());
            }
        }
    }
}

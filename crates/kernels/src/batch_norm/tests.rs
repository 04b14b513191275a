//! Every instruction set gives the same bits.
use super::*;

fn numbers(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + salt * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Moments, outputs and gradients of two tensors side by side, as bits, for both activations.
fn run(isa: Isa) -> Vec<u64> {
    [with(isa, Activation::Relu, |a| Gate::Affine(a)), with(isa, Activation::Gelu, |a| Gate::Gelu(a))]
        .concat()
}

fn with(isa: Isa, activation: Activation, gate: for<'a> fn(&'a Affine<f32>) -> Gate<'a, f32>) -> Vec<u64> {
    let (count, [c, d]) = (700, [20, 17]);
    let (a, b) = (numbers(count * c, 1), numbers(count * d, 2));
    let xs = [Rows::new(&a, c), Rows::new(&b, d)];
    let [first, second] = xs.map(|x| moments(isa, x));
    let moments = Moments { mean: [first.mean, second.mean].concat(), var: [first.var, second.var].concat() };
    let (gamma, beta, dy) = (numbers(c + d, 3), numbers(c + d, 4), numbers(count * (c + d), 5));
    let affine = Affine::new(&moments, &gamma, &beta, 1e-5);
    let mut y = vec![f32::NAN; dy.len()];
    apply(isa, &xs, &affine, None, activation, &mut y);
    let with = Normalized { moments: &moments, gamma: &gamma, eps: 1e-5, of_batch: true };
    let gradient = Gradient::new(isa, &xs, &dy, gate(&affine), with);
    let (mut da, mut db) = (vec![f32::NAN; a.len()], numbers(b.len(), 6));
    let outs = &mut [(&mut da[..], false), (&mut db[..], true)];
    gradient.add_inputs(isa, &xs, &dy, gate(&affine), outs);
    let exact = moments.mean.iter().chain(&moments.var).map(|v| v.to_bits());
    let rounded = [y, gradient.gamma, gradient.beta, da, db].concat();
    exact.chain(rounded.into_iter().map(|v| u64::from(v.to_bits()))).collect()
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let portable = run(Isa::PORTABLE);
    assert!(Isa::available().into_iter().all(|isa| run(isa) == portable));
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for isa in Isa::available() {
        crate::threads::same_bits(|| run(isa).into_iter().map(f64::from_bits).collect());
    }
}

#[test]
fn blocks_of_channels_and_what_is_left_of_them_follow_the_definition() {
    let (count, channels) = (67, [16, 20, 3, 33]);
    let all = channels.iter().sum::<usize>();
    let data = channels.map(|c| numbers(count * c, c));
    let tensors: Vec<_> = data.iter().zip(channels).map(|(x, c)| Rows::new(x, c)).collect();
    let each: Vec<_> = tensors.iter().map(|x| moments(Isa::best(), *x)).collect();
    let of = |f: fn(&Moments) -> &Vec<f64>| each.iter().flat_map(f).copied().collect::<Vec<f64>>();
    let moments = Moments { mean: of(|m| &m.mean), var: of(|m| &m.var) };
    let (gamma, beta, dy) = (numbers(all, 3), numbers(all, 4), numbers(count * all, 5));
    let affine = Affine::new(&moments, &gamma, &beta, 1e-5);
    let with = Normalized { moments: &moments, gamma: &gamma, eps: 1e-5, of_batch: true };
    let gradient = Gradient::new(Isa::best(), &tensors, &dy, Gate::Affine(&affine), with);
    let mut dxs = channels.map(|c| numbers(count * c, 6));
    let before = dxs.clone();
    let mut outs: Vec<_> = dxs.iter_mut().enumerate().map(|(i, dx)| (&mut dx[..], i % 2 == 1)).collect();
    gradient.add_inputs(Isa::best(), &tensors, &dy, Gate::Affine(&affine), &mut outs);
    let mut first = 0;
    for (tensor, c) in channels.into_iter().enumerate() {
        for (i, j) in (0..c).map(|i| (i, first + i)) {
            let (mut sum, mut product) = (0.0, 0.0);
            for r in 0..count {
                let x = data[tensor][r * c + i];
                let open = x * affine.scale[j] + affine.shift[j] > 0.0;
                let g = if open { dy[r * all + j] } else { 0.0 };
                sum += f64::from(g);
                product += f64::from(g) * (f64::from(x) - moments.mean[j]);
                let old = if tensor % 2 == 1 { before[tensor][r * c + i] } else { 0.0 };
                let dx = old + (gradient.a[j] * g + (gradient.b[j] * x + gradient.d[j]));
                assert_eq!(dxs[tensor][r * c + i].to_bits(), dx.to_bits(), "row {r} of channel {j}");
            }
            let near = |found: f32, wanted: f64| (f64::from(found) - wanted).abs() <= 2e-5;
            let deviation = (moments.var[j] + 1e-5).sqrt();
            assert!(near(gradient.beta[j], sum), "channel {j}: {} {sum}", gradient.beta[j]);
            assert!(near(gradient.gamma[j], product / deviation), "channel {j}: {}", gradient.gamma[j]);
        }
        first += c;
    }
}

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

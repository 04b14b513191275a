use super::*;
use crate::compare::{largest_difference, relative_difference};
use taper_random::Rng;

fn draw(n: usize, name: &str) -> Vec<f64> {
    let mut rng = Rng::new(1, "test", name, 0);
    (0..n).map(|_| rng.normal()).collect()
}

/// Drops a third, by a rule.
fn keep(first: usize, keep: &mut [u8]) {
    keep.iter_mut()
        .enumerate()
        .for_each(|(i, keep)| *keep = u8::from(!((first + i) * 7919 % 31).is_multiple_of(3)));
}

const DROPOUT: Dropout = Dropout { scale: 1.5, keep: &keep };

/// By the definition, in f64: result and logarithms of sums.
fn plainly(shape: &Shape, [q, k, v]: [&[f64]; 3], dropped: bool) -> Vec<f64> {
    let Shape { batch, queries, keys, heads, kv_heads, size, causal } = *shape;
    let mut out = vec![0.0; batch * queries * heads * size];
    for b in 0..batch {
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            for i in 0..queries {
                let q = &q[((b * queries + i) * heads + h) * size..][..size];
                let seen = if causal { keys - queries + i + 1 } else { keys };
                let row =
                    |of: &'_ [f64], j: usize| of[((b * keys + j) * kv_heads + g) * size..][..size].to_vec();
                let score = |j: usize| {
                    let dot: f64 = q.iter().zip(row(k, j)).map(|(q, k)| q * k).sum();
                    (dot / (size as f64).sqrt()).exp()
                };
                let scores: Vec<f64> = (0..seen).map(score).collect();
                let sum: f64 = scores.iter().sum();
                for (j, score) in scores.iter().enumerate() {
                    let mut kept = [1];
                    if dropped {
                        keep(((b * heads + h) * queries + i) * keys + j, &mut kept);
                    }
                    let factor = f64::from(kept[0]) * if dropped { DROPOUT.scale } else { 1.0 };
                    let to = &mut out[((b * queries + i) * heads + h) * size..][..size];
                    to.iter_mut().zip(row(v, j)).for_each(|(o, v)| *o += score / sum * factor * v);
                }
            }
        }
    }
    out
}

const fn shape(
    batch: usize,
    queries: usize,
    keys: usize,
    heads: [usize; 2],
    size: usize,
    causal: bool,
) -> Shape {
    Shape { batch, queries, keys, heads: heads[0], kv_heads: heads[1], size, causal }
}

fn operands(s: &Shape) -> [Vec<f64>; 3] {
    let kv = s.batch * s.keys * s.kv_heads * s.size;
    [draw(s.batch * s.queries * s.heads * s.size, "q"), draw(kv, "k"), draw(kv, "v")]
}

/// Result and the gradients of q, k and v where that of the result is given, with operands side by side in one buffer whose gaps
/// must stay as they are.
fn run<T: Real>(isa: Isa, s: &Shape, of: [&[f64]; 3], dout: &[f64], dropped: bool) -> Vec<Vec<f64>> {
    let (gap, dropout) = (3, dropped.then_some(DROPOUT));
    let widths = [s.heads * s.size, s.kv_heads * s.size, s.kv_heads * s.size];
    let spaced = |of: &[f64], width: usize| -> Vec<T> {
        let row = |row: &[f64]| {
            [vec![T::from_f64(9.0); gap], row.iter().map(|v| T::from_f64(*v)).collect()].concat()
        };
        of.chunks(width).flat_map(row).collect()
    };
    let data: Vec<Vec<T>> = of.iter().zip(widths).map(|(of, width)| spaced(of, width)).collect();
    let rows = |i: usize| Rows { data: &data[i][..], stride: widths[i] + gap, offset: gap };
    let mut out = vec![T::from_f64(f64::NAN); s.batch * s.queries * widths[0]];
    let mut lse = vec![T::from_f64(f64::NAN); s.batch * s.heads * s.queries];
    forward(isa, s, [rows(0), rows(1), rows(2)], dropout, &mut out, &mut lse);
    let mut grads: Vec<Vec<T>> = data.iter().map(|d| vec![T::from_f64(7.0); d.len()]).collect();
    let lengths = [grads[0].len(), grads[1].len(), grads[2].len()];
    let mut to = grads.iter_mut().zip(widths).map(|(g, width)| Rows {
        data: Shared::new(g),
        stride: width + gap,
        offset: gap,
    });
    let to = std::array::from_fn(|_| to.next().unwrap());
    let dout: Vec<T> = dout.iter().map(|v| T::from_f64(*v)).collect();
    backward(isa, s, [rows(0), rows(1), rows(2)], dropout, (&out, &lse), &dout, to, lengths);
    let mut found = vec![out.iter().map(|v| v.to_f64()).collect()];
    for (grad, width) in grads.iter().zip(widths) {
        assert!(grad.chunks(width + gap).all(|row| row[..gap].iter().all(|v| v.to_f64() == 7.0)), "gaps");
        found.push(grad.chunks(width + gap).flat_map(|row| row[gap..].iter().map(|v| v.to_f64())).collect());
    }
    found
}

/// One query, one key, heads of odd sizes, blocks that are not whole, few heads and many, groups, and queries that come last.
const SHAPES: [Shape; 11] = [
    shape(1, 1, 1, [1, 1], 1, true),
    shape(2, 5, 5, [3, 3], 7, true),
    shape(2, 5, 5, [2, 1], 4, false),
    shape(1, 130, 130, [2, 1], 5, true),
    shape(1, 33, 300, [1, 1], 3, true),
    shape(1, 131, 140, [2, 2], 6, false),
    shape(40, 3, 3, [2, 1], 3, true),
    shape(34, 9, 20, [2, 2], 2, true),
    shape(1, 1, 260, [4, 2], 8, true),
    shape(33, 140, 140, [1, 1], 2, true),
    shape(1, 65, 65, [3, 3], 17, false),
];

#[test]
fn values_are_those_of_the_definition() {
    for s in &SHAPES {
        let [q, k, v] = operands(s);
        let dout = draw(s.batch * s.queries * s.heads * s.size, "dout");
        for dropped in [false, true] {
            let expected = plainly(s, [&q, &k, &v], dropped);
            let exact = run::<f64>(Isa::PORTABLE, s, [&q, &k, &v], &dout, dropped);
            // Sums of some hundred shares of one.
            assert!(largest_difference(&exact[0], &expected) < 1e-13, "{s:?}");
            for isa in Isa::available() {
                for (found, exact) in run::<f32>(isa, s, [&q, &k, &v], &dout, dropped).iter().zip(&exact) {
                    let off = relative_difference(found, exact);
                    // One query and one key have no gradient but rounding.
                    let nothing = exact.iter().all(|v| v.abs() < 1e-12);
                    assert!(
                        off < 4e-6 || nothing && found.iter().all(|v| v.abs() < 1e-6),
                        "{isa:?} {s:?}: {off:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_small_steps() {
    for s in &SHAPES[..10] {
        let of = operands(s);
        let dout = draw(s.batch * s.queries * s.heads * s.size, "dout");
        for dropped in [false, true] {
            let found = run::<f64>(Isa::PORTABLE, s, [&of[0], &of[1], &of[2]], &dout, dropped);
            for which in 0..3 {
                // A few places each: the definition is slow.
                for i in (0..of[which].len()).step_by((of[which].len() / 6).max(1)) {
                    let loss = |by: f64| -> f64 {
                        let mut of = of.clone();
                        of[which][i] += by;
                        let out = plainly(s, [&of[0], &of[1], &of[2]], dropped);
                        out.iter().zip(&dout).map(|(o, d)| o * d).sum()
                    };
                    let (h, found) = (1e-5, found[which + 1][i]);
                    let slope = (loss(h) - loss(-h)) / (2.0 * h);
                    assert!(
                        (found - slope).abs() < 1e-7 * (1.0 + slope.abs()),
                        "{s:?} {which}: {found} {slope}"
                    );
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for s in [&SHAPES[3], &SHAPES[5], &SHAPES[9]] {
        let [q, k, v] = operands(s);
        let dout = draw(s.batch * s.queries * s.heads * s.size, "dout");
        for isa in Isa::available() {
            crate::threads::same_bits(|| run::<f32>(isa, s, [&q, &k, &v], &dout, true).concat());
        }
    }
}

#[test]
fn large_scores_do_not_overflow_and_what_is_not_a_number_stays() {
    let s = shape(1, 200, 200, [1, 1], 4, true);
    let [mut q, mut k, v] = operands(&s);
    q.iter_mut().chain(&mut k).for_each(|v| *v *= 100.0);
    let dout = vec![1.0; 800];
    for isa in Isa::available() {
        let found = run::<f32>(isa, &s, [&q, &k, &v], &dout, false);
        assert!(found.iter().flatten().all(|v| v.is_finite()), "{isa:?}");
        q[4 * 150] = f64::NAN;
        let found = run::<f32>(isa, &s, [&q, &k, &v], &dout, false);
        q[4 * 150] = 1.0;
        assert!(found[0][4 * 150].is_nan() && found[0][4 * 149].is_finite(), "{isa:?}");
    }
}

//! Matrix products: this machine's peak, and the shapes that training asks for.
use super::{Case, Prepared};
use candle_core::{Device, Tensor};
use serde_json::json;
use taper_models::ops::{Activation, linear};

/// A label, rows, outputs and inputs.
const SHAPES: [(&str, [usize; 3]); 6] = [
    ("256", [256, 256, 256]),
    ("1024", [1024, 1024, 1024]),
    ("2048", [2048, 2048, 2048]),
    ("mlp", [128, 100, 784]),
    ("gates", [1400, 4600, 400]),
    ("decoder", [1400, 10_000, 400]),
];

pub fn cases() -> Vec<Case> {
    let case = |(label, [m, n, k]): (&str, [usize; 3])| {
        let gflop = 2e-9 * (m * n * k) as f64;
        Case {
            name: format!("gemm/{label}"),
            unit: "GFLOP/s",
            amount: gflop,
            // About ten milliseconds at a few hundred GFLOP/s.
            repeat: (3.0 / gflop).clamp(1.0, 1000.0) as u32,
            peer: Some(json!({"work": "gemm", "m": m, "n": n, "k": k})),
            prepare: Box::new(move || {
                let numbers = |count: usize| (0..count).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0);
                let matrix = |rows: usize, columns: usize| {
                    Tensor::from_iter(numbers(rows * columns), &Device::Cpu)?.reshape((rows, columns))
                };
                let (x, w) = (matrix(m, k)?, matrix(n, k)?);
                Ok(Prepared::alone(Box::new(move || {
                    std::hint::black_box(linear(&x, &w, None, Activation::None)?);
                    Ok(())
                })))
            }),
        }
    };
    SHAPES.into_iter().map(case).collect()
}

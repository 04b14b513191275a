//! The functions, with gradients by hand.
use super::{Config, Function};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Extended Powell singular function, minimum 0 at the origin:
/// Σ (a + 10b)² + 5(c - d)² + (b - 2c)⁴ + 10(a - d)⁴ over blocks (a, b, c, d).
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Powell {
    /// Number of variables, a multiple of 4. Defaults to 100, as in the DecGD paper.
    pub n: usize,
    /// The starting point, repeated to `n`. Defaults to (3, -1, 0, 1).
    pub start: Vec<f64>,
}

impl Default for Powell {
    fn default() -> Self {
        Self { n: 100, start: vec![3.0, -1.0, 0.0, 1.0] }
    }
}

impl Function for Powell {
    fn start(&self) -> Vec<f64> {
        repeat(&self.start, self.n)
    }

    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        let mut f = 0.0;
        for (x, out) in x.as_chunks::<4>().0.iter().zip(gradient.as_chunks_mut::<4>().0) {
            let (p, q) = (x[0] + 10.0 * x[1], x[2] - x[3]);
            let (r, s) = (x[1] - 2.0 * x[2], x[0] - x[3]);
            let (r2, s2) = (r * r, s * s);
            f += p * p + 5.0 * q * q + r2 * r2 + 10.0 * (s2 * s2);
            let (r3, s3) = (4.0 * r2 * r, 40.0 * s2 * s);
            *out = [2.0 * p + s3, 20.0 * p + r3, 10.0 * q - 2.0 * r3, -10.0 * q - s3];
        }
        f
    }
}

impl Config for Powell {
    fn check(&self) -> Result<(), (&'static str, String)> {
        blocks(self.n, 4, &self.start)
    }
}

/// Which form of the Rosenbrock function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Variant {
    /// As the DecGD paper prints it: the second variable of a pair is drawn to 1. Minima at (±1, 1).
    #[default]
    Paper,
    /// The usual one: the first variable is drawn to 1. Minimum at (1, 1).
    Standard,
}

/// Extended Rosenbrock function, minimum 0: Σ 100(a² - b)² + (b - 1)² over pairs (a, b), or (a - 1)² in the usual
/// form.
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rosenbrock {
    /// Number of variables, a multiple of 2. Defaults to 1000, as in the DecGD paper.
    pub n: usize,
    /// Which form.
    pub variant: Variant,
    /// The starting point, repeated to `n`. Defaults to (-1.2, 1).
    pub start: Vec<f64>,
}

impl Default for Rosenbrock {
    fn default() -> Self {
        Self { n: 1000, variant: Variant::Paper, start: vec![-1.2, 1.0] }
    }
}

impl Function for Rosenbrock {
    fn start(&self) -> Vec<f64> {
        repeat(&self.start, self.n)
    }

    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        // The variable of a pair that is drawn to 1.
        let drawn = match self.variant {
            Variant::Paper => 1,
            Variant::Standard => 0,
        };
        let mut f = 0.0;
        for (x, out) in x.as_chunks::<2>().0.iter().zip(gradient.as_chunks_mut::<2>().0) {
            let (valley, pull) = (x[0] * x[0] - x[1], x[drawn] - 1.0);
            f += 100.0 * valley * valley + pull * pull;
            *out = [400.0 * valley * x[0], -200.0 * valley];
            out[drawn] += 2.0 * pull;
        }
        f
    }
}

impl Config for Rosenbrock {
    fn check(&self) -> Result<(), (&'static str, String)> {
        blocks(self.n, 2, &self.start)
    }
}

/// ½ Σ λ_i x_i² with λ_i = condition^(i/(n-1)), i from 0: minimum 0 at the origin.
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quadratic {
    /// Number of variables. Defaults to 100.
    pub n: usize,
    /// The largest curvature over the smallest. Defaults to 100.
    pub condition: f64,
    /// The starting point, repeated to `n`. Defaults to (1).
    pub start: Vec<f64>,
}

impl Default for Quadratic {
    fn default() -> Self {
        Self { n: 100, condition: 100.0, start: vec![1.0] }
    }
}

impl Function for Quadratic {
    fn start(&self) -> Vec<f64> {
        repeat(&self.start, self.n)
    }

    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        let last = (self.n - 1).max(1) as f64;
        let mut f = 0.0;
        for (i, (x, out)) in x.iter().zip(gradient).enumerate() {
            *out = self.condition.powf(i as f64 / last) * x;
            f += 0.5 * x * *out;
        }
        f
    }
}

impl Config for Quadratic {
    fn check(&self) -> Result<(), (&'static str, String)> {
        blocks(self.n, 1, &self.start)?;
        match self.condition >= 1.0 && self.condition.is_finite() {
            true => Ok(()),
            false => Err((
                "condition",
                format!("expected a finite number of at least 1, found {}", self.condition),
            )),
        }
    }
}

/// More variables than this are taken for a slip: they would fill the memory.
const MOST: usize = 100_000_000;

pub(super) fn blocks(n: usize, block: usize, start: &[f64]) -> Result<(), (&'static str, String)> {
    if n == 0 || !n.is_multiple_of(block) || n > MOST {
        let what = if block == 1 { "a number".to_owned() } else { format!("a multiple of {block}") };
        return Err(("n", format!("expected {what} between {block} and {MOST}, found {n}")));
    }
    if start.is_empty() || !n.is_multiple_of(start.len()) || start.iter().any(|x| !x.is_finite()) {
        let found = start.len();
        return Err((
            "start",
            format!("expected finite numbers, as many as divide n = {n}, found {found}: {start:?}"),
        ));
    }
    Ok(())
}

pub(super) fn repeat(start: &[f64], n: usize) -> Vec<f64> {
    start.iter().copied().cycle().take(n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Central differences with steps of h lose h² to curvature and ε|f|/h to rounding: at h = 1e-5 about 1e-10 of f's
    /// scale, which is 1e4 here.
    #[test]
    fn gradients_are_those_of_the_values() {
        let functions: [Box<dyn Function>; 4] = [
            Box::new(Powell { n: 8, ..Default::default() }),
            Box::new(Rosenbrock { n: 4, ..Default::default() }),
            Box::new(Rosenbrock { n: 4, variant: Variant::Standard, ..Default::default() }),
            Box::new(Quadratic { n: 5, condition: 30.0, start: vec![1.0] }),
        ];
        for (case, function) in functions.iter().enumerate() {
            // No start is special: shift every variable by another amount.
            let x: Vec<f64> =
                function.start().iter().enumerate().map(|(i, x)| x + 0.1 * (i as f64 + 1.0)).collect();
            let (mut gradient, mut ignored) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            function.evaluate(&x, &mut gradient);
            for i in 0..x.len() {
                let mut at = |h: f64| {
                    let mut x = x.clone();
                    x[i] += h;
                    function.evaluate(&x, &mut ignored)
                };
                let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                let error = (slope - gradient[i]).abs() / gradient[i].abs().max(1.0);
                assert!(error < 1e-6, "function {case}, variable {i}: {} instead of {slope}", gradient[i]);
            }
        }
    }

    #[test]
    fn starts_have_the_papers_values() {
        let value = |f: &dyn Function| f.evaluate(&f.start(), &mut vec![0.0; f.start().len()]);
        assert_eq!(value(&Powell::default()), 5375.0);
        // -1.2 is not a number of f64; 500 terms of 19.36 round in the last digits.
        assert!((value(&Rosenbrock::default()) - 9680.0).abs() < 1e-8);
        let standard = Rosenbrock { variant: Variant::Standard, ..Default::default() };
        assert!((value(&standard) - 12100.0).abs() < 1e-8);
        assert_eq!(value(&Quadratic { n: 2, condition: 10.0, start: vec![1.0, -0.5] }), 1.75);
    }
}

//! How near a step is to that of a simple optimizer.

/// The optimizers that a step is compared with, the simplest first. `root` is momentum of ∇√(f + c), for optimizers that follow
/// the loss, and `orthogonal` the orthogonalised momentum of matrices.
pub const REFERENCES: [&str; 6] = ["gd", "sgdm", "sign", "adam", "root", "orthogonal"];

/// R² within this of the largest count as the largest: of equals the simplest is named.
const TIE: f64 = 1e-6;

/// Products of an update u with a direction d, and with the parameter w where decay is fitted too.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Products {
    pub uu: f64,
    pub dd: f64,
    pub ud: f64,
    pub ww: f64,
    pub uw: f64,
    pub dw: f64,
}

/// The least-squares fit u ≈ -rate·d - decay·w.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    /// The cosine between u and -d alone.
    pub cosine: f64,
    /// The share of |u|² that the fit explains.
    pub r2: f64,
    pub rate: f64,
    pub decay: f64,
}

impl Products {
    /// `None` where there is nothing to fit, or nothing to fit it by.
    pub fn fit(&self, decays: bool) -> Option<Fit> {
        let Self { uu, dd, ud, ww, uw, dw } = *self;
        if !(uu > 0.0 && dd > 0.0 && uu.is_finite() && dd.is_finite() && ud.is_finite()) {
            return None;
        }
        let cosine = (-ud / (uu.sqrt() * dd.sqrt())).clamp(-1.0, 1.0);
        let determinant = dd * ww - dw * dw;
        // A direction along the parameter cannot be told from decay.
        let (rate, decay) = match decays && determinant > 1e-9 * dd * ww && determinant.is_finite() {
            true => ((dw * uw - ww * ud) / determinant, (dw * ud - dd * uw) / determinant),
            false => (-ud / dd, 0.0),
        };
        let r2 = (-(rate * ud + decay * uw) / uu).clamp(0.0, 1.0);
        Some(Fit { cosine, r2, rate, decay })
    }
}

/// The reference that explains the most by a positive rate, of near equals the first of [`REFERENCES`]: its name, its R² and its
/// rate. `of` tells R² and rate of a reference that was fitted.
///
/// ```
/// let fits = |name: &str| match name {
///     "gd" => Some((0.4, 0.1)),
///     "sgdm" => Some((0.9999999, 0.01)),
///     "root" => Some((1.0, 0.02)),
///     _ => None,
/// };
/// assert_eq!(taper_optim::nearest(fits), Some(("sgdm", 0.9999999, 0.01)));
/// ```
pub fn nearest(of: impl Fn(&str) -> Option<(f64, f64)>) -> Option<(&'static str, f64, f64)> {
    let fitted = || {
        let all = REFERENCES.iter().filter_map(|name| of(name).map(|(r2, rate)| (*name, r2, rate)));
        all.filter(|(_, r2, rate)| *rate > 0.0 && r2.is_finite())
    };
    let best = fitted().map(|(_, r2, _)| r2).reduce(f64::max)?;
    fitted().find(|(_, r2, _)| *r2 >= best - TIE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn products(u: &[f64], d: &[f64], w: &[f64]) -> Products {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
        Products { uu: dot(u, u), dd: dot(d, d), ud: dot(u, d), ww: dot(w, w), uw: dot(u, w), dw: dot(d, w) }
    }

    #[test]
    fn a_step_along_a_direction_has_its_rate_and_explains_all() {
        let d = [1.0, -2.0, 0.5];
        let fit = products(&d.map(|d| -0.25 * d), &d, &[3.0, 1.0, 1.0]).fit(false).unwrap();
        assert_eq!(fit, Fit { cosine: 1.0, r2: 1.0, rate: 0.25, decay: 0.0 });
        let uphill = products(&d, &d, &d).fit(false).unwrap();
        assert_eq!((uphill.cosine, uphill.rate), (-1.0, -1.0));
    }

    #[test]
    fn decay_beside_a_direction_is_found_too() {
        let (d, w) = ([1.0, -2.0, 0.5], [4.0, 1.0, -2.0]);
        let u: Vec<f64> = d.iter().zip(&w).map(|(d, w)| -0.25 * d - 0.125 * w).collect();
        let fit = products(&u, &d, &w).fit(true).unwrap();
        assert!((fit.rate - 0.25).abs() < 1e-14 && (fit.decay - 0.125).abs() < 1e-14, "{fit:?}");
        assert!((fit.r2 - 1.0).abs() < 1e-14);
        assert!(products(&u, &d, &w).fit(false).unwrap().r2 < 0.9);
        // Along the parameter there is no telling them apart.
        let along = products(&w.map(|w| -w), &w, &w).fit(true).unwrap();
        assert_eq!((along.r2, along.rate, along.decay), (1.0, 1.0, 0.0));
    }

    #[test]
    fn nothing_is_fitted_to_nothing() {
        assert_eq!(products(&[0.0], &[1.0], &[1.0]).fit(true), None);
        assert_eq!(products(&[1.0], &[0.0], &[1.0]).fit(true), None);
        assert_eq!(products(&[f64::INFINITY], &[1.0], &[1.0]).fit(true), None);
        assert_eq!(nearest(|_| None), None);
        assert_eq!(nearest(|_| Some((0.5, -1.0))), None);
    }
}

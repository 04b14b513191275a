//! From numbers to places on an axis, and the ticks between.

/// How values are spread over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By their logarithm; values that are not positive have no place.
    Log,
}

/// An axis: values from `low` to `high` on the pixels from `start` to `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub scale: Scale,
    pub low: f64,
    pub high: f64,
    pub start: f64,
    pub end: f64,
    /// All values are whole numbers: so are its ticks.
    pub whole: bool,
}

/// More ticks than this crowd an axis.
const MOST_TICKS: f64 = 7.0;

impl Axis {
    /// An axis over all of `values` with a little room at both ends; without a value that has a place, from 0 (or 1) on.
    pub fn over(
        values: impl Iterator<Item = f64>,
        scale: Scale,
        (start, end): (f64, f64),
        room: f64,
    ) -> Self {
        let (mut low, mut high, mut whole) = (f64::INFINITY, f64::NEG_INFINITY, true);
        for value in values.filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0)) {
            (low, high) = (low.min(value), high.max(value));
            whole &= value.fract() == 0.0;
        }
        let (low, high) = match scale {
            _ if low > high => (1.0, 10.0),
            Scale::Linear => {
                // One value alone still needs an axis of some length.
                let length = if high > low { high - low } else { high.abs().max(1.0) };
                let room = if high > low { room } else { room.max(0.5) };
                (low - room * length, high + room * length)
            }
            Scale::Log => {
                let length = if high > low { high / low } else { 10.0 };
                let room = if high > low { room } else { room.max(0.5) };
                (low / length.powf(room), high * length.powf(room))
            }
        };
        // Room beyond the largest numbers there are is none.
        let least = if scale == Scale::Log { f64::MIN_POSITIVE } else { -f64::MAX };
        Self { scale, low: low.max(least), high: high.min(f64::MAX), start, end, whole }
    }

    /// The pixel of a value; `None` where it has no place.
    pub fn place(&self, value: f64) -> Option<f64> {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value > 0.0 => (value / self.low).ln() / (self.high / self.low).ln(),
            Scale::Log => return None,
        };
        let pixel = self.start + part * (self.end - self.start);
        // Far outside the picture is far enough; renderers refuse coordinates of any size.
        pixel.is_finite().then(|| pixel.clamp(-1e4, 1e4))
    }

    /// Values to mark, from low to high.
    pub fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => steps(self.low, self.high, if self.whole { 1.0 } else { 0.0 }),
            Scale::Log => {
                let (first, last) = (self.low.log10().ceil() as i32, self.high.log10().floor() as i32);
                if last - first >= 2 {
                    let stride = (f64::from(last - first) / MOST_TICKS).ceil().max(1.0) as usize;
                    // Multiples of the stride, so that 1 is marked where it is in sight.
                    let marked = (first..=last).filter(|power| power.rem_euclid(stride as i32) == 0);
                    return marked.map(decade).collect();
                }
                let fine = (first - 1..=last).flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * decade(power)));
                let fine: Vec<f64> = fine.filter(|v| (self.low..=self.high).contains(v)).collect();
                if fine.len() >= 2 { fine } else { steps(self.low, self.high, 0.0) }
            }
        }
    }
}

/// A power of ten; the inverse of a whole one, which is rounded but once.
fn decade(power: i32) -> f64 {
    if power < 0 { 1.0 / 10f64.powi(-power) } else { 10f64.powi(power) }
}

/// Round numbers between two values, at 1, 2 or 5 times a power of ten from each other, and at least `least`.
fn steps(low: f64, high: f64, least: f64) -> Vec<f64> {
    let rough = ((high - low) / MOST_TICKS).max(least);
    if !(rough > 0.0 && rough.is_finite()) {
        return Vec::new();
    }
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough).unwrap_or(power);
    let first = (low / step).ceil();
    let count = ((high / step).floor() - first).max(-1.0) as usize + 1;
    // Through whole multiples: sums of steps would drift away from round numbers.
    (0..count.min(50)).map(|i| (first + i as f64) * step).collect()
}

/// A number with as many digits as a tick or a reader needs.
pub fn short(value: f64) -> String {
    let size = value.abs();
    let text = match size {
        _ if value.is_nan() => return "NaN".into(),
        _ if value == f64::INFINITY => return "∞".into(),
        _ if value == f64::NEG_INFINITY => return "−∞".into(),
        _ if value == 0.0 => return "0".into(),
        _ if !(1e-3..1e5).contains(&size) => {
            let text = format!("{value:.2e}");
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            let digits = trimmed(digits);
            return format!("{digits}e{power}");
        }
        _ if size >= 1000.0 => format!("{value:.0}"),
        _ if size >= 10.0 => format!("{value:.2}"),
        _ if size >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    };
    trimmed(&text).to_owned()
}

/// A number for people that reads back as the same number: [`short`] where that is, all of its digits where it is not.
pub fn exact(value: f64) -> String {
    let brief = short(value);
    match brief.parse::<f64>() {
        // Whole numbers stand as they are written, so that 100000 is not 1e5 beside 100001.
        _ if value.fract() == 0.0 && value.abs() < 1e15 => format!("{value:.0}"),
        Ok(read) if value == read => brief,
        _ => format!("{value:?}"),
    }
}

/// Numbers for people, rounded as far as those that differ still look different.
pub fn told_apart(values: &[f64]) -> Vec<String> {
    let distinct = |texts: &[String]| {
        let pairs = || values.iter().zip(texts);
        pairs().all(|(v, text)| pairs().all(|(w, other)| v == w || text != other))
    };
    let rounded = |digits: usize| -> Vec<String> {
        let round = |value: &f64| exact(format!("{value:.digits$e}").parse().unwrap_or(*value));
        values.iter().map(round).collect()
    };
    let brief: Vec<String> = values.iter().map(|value| short(*value)).collect();
    if distinct(&brief) {
        return brief;
    }
    // Seventeen digits tell any two apart.
    (3..17)
        .map(rounded)
        .find(|texts| distinct(texts))
        .unwrap_or_else(|| values.iter().map(|v| exact(*v)).collect())
}

/// Without zeros that say nothing.
fn trimmed(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_and_the_smallest_numbers_have_ticks() {
        for values in
            [[1e-3, 1e300], [5e-324, 1e300], [1e299, f64::MAX], [5e-324, 1e-323], [-f64::MAX, f64::MAX]]
        {
            for scale in [Scale::Linear, Scale::Log] {
                let axis = Axis::over(values.into_iter(), scale, (0.0, 100.0), 0.1);
                assert!(axis.low.is_finite() && axis.high.is_finite(), "{values:?}");
                let ticks = axis.ticks();
                assert!(
                    ticks.len() <= 51 && ticks.iter().all(|tick| tick.is_finite()),
                    "{values:?}: {ticks:?}"
                );
            }
        }
    }

    #[test]
    fn numbers_have_as_many_digits_as_tell_them_apart() {
        let cases: [(&[f64], &[&str]); 5] = [
            (&[0.1, 0.9999], &["0.1", "1"]),
            (&[0.9995, 0.9999, 0.99991, 0.99994], &["0.9995", "0.9999", "0.99991", "0.99994"]),
            (&[1e5, 100001.0, 1e5], &["100000", "100001", "100000"]),
            (&[1.0, 1.0 + f64::EPSILON], &["1", "1.0000000000000002"]),
            (&[], &[]),
        ];
        for (values, texts) in cases {
            assert_eq!(told_apart(values), texts);
        }
        for value in [0.1, 1e-8, 1e5, 1e30, 0.1 + 0.2, -0.99994, 123456.75, f64::MIN_POSITIVE] {
            assert_eq!(exact(value).parse(), Ok(value));
        }
    }

    fn axis(low: f64, high: f64, scale: Scale) -> Axis {
        Axis { scale, low, high, start: 0.0, end: 100.0, whole: false }
    }

    #[test]
    fn ticks_are_round_numbers_inside_the_axis() {
        assert_eq!(axis(0.0, 1.0, Scale::Linear).ticks(), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(axis(93.1, 95.6, Scale::Linear).ticks(), [93.5, 94.0, 94.5, 95.0, 95.5]);
        assert_eq!(axis(1e-4, 20.0, Scale::Log).ticks(), [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0]);
        assert_eq!(axis(30.0, 600.0, Scale::Log).ticks(), [50.0, 100.0, 200.0, 500.0]);
        assert_eq!(axis(1e-27, 1e4, Scale::Log).ticks().len(), 6);
        assert!(axis(2.1, 2.9, Scale::Log).ticks().len() >= 2);
    }

    #[test]
    fn values_without_a_place_have_none() {
        let log = axis(1.0, 100.0, Scale::Log);
        assert_eq!(log.place(0.0), None);
        assert_eq!(log.place(f64::NAN), None);
        assert_eq!(log.place(10.0), Some(50.0));
        let empty = Axis::over([f64::NAN].into_iter(), Scale::Log, (0.0, 100.0), 0.1);
        assert!(empty.place(5.0).is_some());
        let single = Axis::over([3.0].into_iter(), Scale::Linear, (0.0, 100.0), 0.0);
        assert_eq!(single.place(3.0), Some(50.0));
        let epochs = Axis::over([1.0, 2.0, 3.0].into_iter(), Scale::Linear, (0.0, 100.0), 0.0);
        assert_eq!(epochs.ticks(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn numbers_are_as_long_as_they_need_to_be() {
        let cases =
            [(0.0, "0"), (1e-8, "1e-8"), (0.001, "0.001"), (0.25, "0.25"), (97.5, "97.5"), (5375.0, "5375")];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!([f64::NAN, -f64::NAN].map(short), ["NaN", "NaN"]);
        assert_eq!([f64::INFINITY, f64::NEG_INFINITY].map(short), ["∞", "−∞"]);
        assert_eq!([f64::INFINITY, f64::NAN].map(exact), ["inf", "NaN"]);
        assert_eq!(short(1.234e-15), "1.23e-15");
        assert_eq!(short(-2e6), "-2e6");
    }
}

//! Ranges by asking. What a registry refuses is said once, in its check; here the check is asked on both sides of every number
//! that ends a range somewhere. So a range in the schema is one that the check really has, also for somebody else's optimizer.

use serde_json::Value;

use crate::recipe::Range;

/// Where ranges end.
const ENDS: [f64; 6] = [0.0, 0.5, 1.0, 2.0, 100.0, 256.0];

/// Beyond an end nothing is taken, not these either: of a number that must divide another, say, 3 is refused and 4 is not.
const BEYOND: [f64; 19] = [
    3.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 96.0, 100.0, 128.0, 256.0, 512.0, 768.0, 1000.0, 1024.0,
    4096.0, 65536.0, 1e6,
];

/// The range of a number, whole or not, by what `takes` says of single values. What it is by default is in it.
pub(super) fn range(whole: bool, default: Option<f64>, takes: &dyn Fn(Value) -> bool) -> Range {
    let takes = |number: f64| match whole {
        true => takes(Value::from(number as i64)),
        false => takes(Value::from(number)),
    };
    let open_above = |end: f64| {
        default.is_some_and(|default| default > end) || BEYOND.iter().any(|n| *n > end + 1.0 && takes(*n))
    };
    let open_below = |end: f64| {
        default.is_some_and(|default| default < end) || BEYOND.iter().any(|n| -n < end - 1.0 && takes(-n))
    };
    let mut range = Range::default();
    for end in ENDS {
        let beside = |step: f64, next: fn(f64) -> f64| if whole { end + step } else { next(end) };
        // Of a whole number an end is one only at its distance of 1.
        if whole && end.fract() != 0.0 {
            continue;
        }
        match (takes(beside(-1.0, f64::next_down)), takes(end), takes(beside(1.0, f64::next_up))) {
            (false, true, true) if !open_below(end) => range.min = Some(end),
            (false, false, true) if !whole && !open_below(end) => range.above = Some(end),
            (true, true, false) if !open_above(end) => range.max = Some(end),
            // What takes every so many whole numbers does not end at one that it leaves out.
            (true, false, false) if (!whole || takes(end - 2.0)) && !open_above(end) => {
                range.below = Some(end)
            }
            _ => {}
        }
    }
    range
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_are_found_whichever_side_they_belong_to() {
        let real = |takes: fn(f64) -> bool| {
            range(false, None, &|value| value.as_f64().is_some_and(takes)).to_string()
        };
        assert_eq!(real(|_| true), "");
        assert_eq!(real(|x| x >= 0.0), "at least 0");
        assert_eq!(real(|x| x > 0.0), "greater than 0");
        assert_eq!(real(|x| (0.0..1.0).contains(&x)), "at least 0 and less than 1");
        assert_eq!(real(|x| (0.0..=1.0).contains(&x)), "between 0 and 1");
        assert_eq!(real(|x| x > 0.0 && x <= 0.5), "greater than 0 and at most 0.5");
        assert_eq!(real(|x| x <= 0.0), "at most 0");
        let whole = |takes: fn(i64) -> bool| {
            range(true, None, &|value| value.as_i64().is_some_and(takes)).to_string()
        };
        assert_eq!(whole(|n| n >= 1), "at least 1");
        assert_eq!(whole(|n| (0..100).contains(&n)), "at least 0 and less than 100");
        assert_eq!(whole(|n| (2..=256).contains(&n)), "between 2 and 256");
        assert_eq!(whole(|n| n % 4 == 0), "");
        // Divisors of 128, as heads are: 3 is no end.
        assert_eq!(whole(|n| n >= 1 && 128 % n == 0), "at least 1");
        assert_eq!(whole(|n| n != -1), "");
    }

    #[test]
    fn the_default_is_in_its_range_whatever_else_is_asked() {
        let takes = |value: Value| value.as_i64().is_some_and(|n| [1, 2, 7].contains(&n));
        assert_eq!(range(true, None, &takes).to_string(), "between 1 and 2");
        assert_eq!(range(true, Some(7.0), &takes).to_string(), "at least 1");
    }
}

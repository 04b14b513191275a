//! Text of known entropy.
//!
//! A Markov source over `vocab` words. In every state exactly `branching` words can follow, with the same probabilities
//! p_1 ≥ p_2 ≥ … in every state; which word has which probability depends on the state through seeded permutations. The
//! entropy of the next word given the past is therefore H(p) in every state, and so is the entropy rate: no estimate.
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;
use taper_random::Rng;

use crate::digest::Content;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::{Data, DataError, Loaded, Provenance, Search, Text, Unit};

/// A seeded Markov source.
pub struct SyntheticText;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    seed: u64,
    vocab: usize,
    branching: usize,
    skew: f64,
    order: usize,
    train: usize,
    valid: usize,
    test: usize,
}

impl Default for Options {
    fn default() -> Self {
        let (train, valid, test) = (200_000, 20_000, 20_000);
        Self { seed: 1, vocab: 1000, branching: 16, skew: 1.0, order: 1, train, valid, test }
    }
}

impl Dataset for SyntheticText {
    fn name(&self) -> &str {
        "synthetic-text"
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary:
                "words from a seeded Markov source; its exact entropy rate is the floor of any model's loss"
                    .into(),
            options: vec![
                option("seed", "1", "which source, and which text of it"),
                option("vocab", "1000", "words"),
                option("branching", "16", "words that can follow in a state"),
                option("skew", "1.0", "the k-th of them has probability in proportion to k^-skew"),
                option("order", "1", "words of the past the next one depends on, 1 or 2"),
                option("train", "200000", "words to train on"),
                option("valid", "20000", "words to choose on"),
                option("test", "20000", "words to report on"),
            ],
        }
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        Some(Options::json_schema(generator))
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Text)
    }

    fn check(&self, given: &Value) -> Result<(), DataError> {
        self.options(given).map(drop)
    }

    fn load(&self, given: &Value, _: &Search) -> Result<Loaded, DataError> {
        let chosen = self.options(given)?;
        let source = Source::new(&chosen);
        let split = |name: &str, words: usize| source.text(chosen.seed, name, words);
        let (train, valid, test) =
            (split("train", chosen.train), split("valid", chosen.valid), split("test", chosen.test));
        let vocab: Vec<String> = (0..chosen.vocab).map(|word| format!("w{word}")).collect();
        let content = [("train", &train), ("valid", &valid), ("test", &test)]
            .map(|(name, words)| Content::of_lines(name, [join(words, &vocab).as_str()].into_iter()))
            .into();
        let text = Text {
            train: train.into(),
            valid: valid.into(),
            test: test.into(),
            vocab: vocab.into(),
            unit: Unit::Word,
            pieces: None,
        };
        let entropy_rate = Some(source.entropy());
        let provenance = Provenance { entropy_rate, ..Provenance::generated(self.name(), content) };
        Ok(Loaded { data: Data::Text(text), normalize: None, provenance })
    }
}

impl SyntheticText {
    fn options(&self, given: &Value) -> Result<Options, DataError> {
        let chosen: Options = options(self.name(), given)?;
        let wrong = |key: &str, message: String| Err(DataError::option(self.name(), key, message));
        let Options { vocab, branching, skew, order, .. } = chosen;
        if !(2..=1 << 20).contains(&vocab) {
            return wrong("vocab", format!("expected 2 to {}, found {vocab}", 1 << 20));
        }
        if !(1..=vocab).contains(&branching) {
            return wrong("branching", format!("expected 1 to the {vocab} words, found {branching}"));
        }
        if !skew.is_finite() || !(0.0..=16.0).contains(&skew) {
            return wrong("skew", format!("expected 0 to 16, found {skew}"));
        }
        if !(1..=2).contains(&order) {
            return wrong("order", format!("expected 1 or 2, found {order}"));
        }
        for (key, words) in [("train", chosen.train), ("valid", chosen.valid), ("test", chosen.test)] {
            if !(3..=1 << 28).contains(&words) {
                return wrong(key, format!("expected 3 to {} words, found {words}", 1 << 28));
            }
        }
        Ok(chosen)
    }
}

fn join(words: &[u32], vocab: &[String]) -> String {
    words.iter().map(|w| vocab[*w as usize].as_str()).collect::<Vec<_>>().join(" ")
}

struct Source {
    /// The probabilities of a state's successors, in descending order.
    probabilities: Vec<f64>,
    /// Where the state's own place, its predecessor's place (order 2) and the successors' places meet.
    last: Vec<u32>,
    before: Vec<u32>,
    shifts: Vec<u32>,
    words: Vec<u32>,
}

impl Source {
    fn new(options: &Options) -> Self {
        let weights: Vec<f64> = (1..=options.branching).map(|k| (k as f64).powf(-options.skew)).collect();
        let total: f64 = weights.iter().sum();
        let permutation = |name: &str| {
            let mut items: Vec<u32> = (0..options.vocab as u32).collect();
            Rng::new(options.seed, "synthetic-text", name, 0).shuffle(&mut items);
            items
        };
        let before = if options.order == 2 { permutation("before") } else { vec![0; options.vocab] };
        let mut shifts = permutation("shifts");
        shifts.truncate(options.branching);
        let probabilities = weights.iter().map(|w| w / total).collect();
        Self { probabilities, last: permutation("last"), before, shifts, words: permutation("words") }
    }

    /// The word that follows `last` after `before` with the `k`-th largest probability. Shifts differ, so that the words
    /// of a state differ.
    fn successor(&self, before: u32, last: u32, k: usize) -> u32 {
        let place = self.last[last as usize] as usize
            + self.before[before as usize] as usize
            + self.shifts[k] as usize;
        self.words[place % self.words.len()]
    }

    /// Nats a word.
    fn entropy(&self) -> f64 {
        -self.probabilities.iter().map(|p| p * p.ln()).sum::<f64>()
    }

    fn text(&self, seed: u64, split: &str, words: usize) -> Vec<u32> {
        let mut rng = Rng::new(seed, "synthetic-text sample", split, 0);
        let (mut before, mut last) =
            (rng.below(self.words.len() as u64) as u32, rng.below(self.words.len() as u64) as u32);
        let mut draw = || {
            let mut left = rng.uniform();
            let k = self.probabilities.iter().position(|p| {
                left -= p;
                left < 0.0
            });
            // Rounding can leave a crumb beyond the last probability.
            let next = self.successor(before, last, k.unwrap_or(self.probabilities.len() - 1));
            (before, last) = (last, next);
            next
        };
        (0..words).map(|_| draw()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_distinct_successors_so_that_the_entropy_is_that_of_the_probabilities() {
        for order in [1, 2] {
            let source = Source::new(&Options { vocab: 50, branching: 7, order, ..Options::default() });
            for before in 0..50 {
                for last in 0..50 {
                    let mut next: Vec<u32> = (0..7).map(|k| source.successor(before, last, k)).collect();
                    next.sort_unstable();
                    next.dedup();
                    assert_eq!(next.len(), 7);
                }
            }
        }
    }

    #[test]
    fn the_text_costs_its_entropy_under_the_true_source() {
        let options = Options { vocab: 100, branching: 8, order: 2, ..Options::default() };
        let source = Source::new(&options);
        let n = 100_000;
        let text = source.text(1, "train", n);
        let cost = |window: &[u32]| {
            let k = (0..8).find(|k| source.successor(window[0], window[1], *k) == window[2]);
            -source.probabilities[k.expect("every word is a successor of its past")].ln()
        };
        let mean = text.windows(3).map(cost).sum::<f64>() / (n - 2) as f64;
        let variance: f64 =
            source.probabilities.iter().map(|p| p * (p.ln() + source.entropy()).powi(2)).sum();
        // Five standard errors of the mean of n independent draws.
        assert!(
            (mean - source.entropy()).abs() < 5.0 * (variance / n as f64).sqrt(),
            "{mean} {}",
            source.entropy()
        );
    }

    #[test]
    fn uniform_branching_has_the_entropy_of_its_logarithm() {
        let source = Source::new(&Options { branching: 16, skew: 0.0, ..Options::default() });
        // One rounding for each of 16 equal terms.
        assert!((source.entropy() - 16f64.ln()).abs() < 16.0 * f64::EPSILON * 16f64.ln());
    }
}

//! Text that goes on from a prompt.
use super::{Trained, probabilities};
use crate::run::RunError;
use crate::run::network::largest;
use taper_data::{Text, UNK};
use taper_models::rng::Rng;
use tracing::warn;

/// Up to so many unknown words of a prompt are named.
const MOST_NAMED: usize = 20;

/// How the next word is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Words to add, or characters, bytes or pieces.
    pub tokens: usize,
    /// Logits are divided by it; 0 takes the most probable word.
    pub temperature: f64,
    /// Only the so many most probable words are drawn from; 0 for all.
    pub top_k: usize,
    /// The same seed gives the same text.
    pub seed: u64,
}

/// A text that was gone on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// What was added.
    pub added: String,
    /// The prompt with it.
    pub whole: String,
}

impl Trained {
    /// Goes on from a prompt; from the end of a line without one.
    pub fn generate(&mut self, prompt: &str, sampling: &Sampling) -> Result<Continuation, RunError> {
        let refuse = |message: String| RunError::unusable(&self.run, message);
        let Some(words) = self.network.words().cloned() else {
            return Err(refuse(format!("expected a language model, found a network for {}", self.task())));
        };
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            let found = sampling.temperature;
            return Err(refuse(format!("expected a temperature of at least 0, found {found}")));
        }
        let mut read = words.encode(prompt).map_err(|e| refuse(format!("the prompt: {e}")))?;
        if let Some(warning) = unknown(&words, prompt) {
            warn!("{warning}");
        }
        if read.is_empty() {
            let missing =
                || refuse("expected a prompt: the vocabulary has no end of a line to start from".into());
            read.push(words.end().ok_or_else(missing)?);
        }
        self.network.forget()?;
        let mut rng = Rng::new(sampling.seed, "generate", "", 0);
        let mut added = Vec::with_capacity(sampling.tokens.min(1 << 16));
        while added.len() < sampling.tokens {
            let logits = self.network.continue_with(&read)?;
            if logits.iter().any(|x| x.is_nan()) {
                return Err(RunError::unusable(
                    &self.run,
                    "the network's logits are no numbers: its weights are not to be used",
                ));
            }
            let next = draw(&logits, sampling, rng.uniform()) as u32;
            added.push(next);
            read = vec![next];
        }
        let added = words.decode(&added);
        Ok(Continuation { whole: words.joined(prompt, &added), added })
    }
}

/// What to say of a prompt with words or characters that are not in the vocabulary.
fn unknown(words: &Text, prompt: &str) -> Option<String> {
    let unknown = words.unknown(prompt);
    let named: Vec<String> = unknown.iter().take(MOST_NAMED).map(|unit| format!("{unit:?}")).collect();
    let more = match unknown.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let number = words.vocab.iter().position(|known| known == UNK).map(|at| at as u32)?;
    let untrained = match words.train.contains(&number) {
        true => "",
        false => ", which is not in the training text: the network has not learnt it",
    };
    let named = named.join(", ");
    (!unknown.is_empty())
        .then(|| format!("the prompt: not in the vocabulary: {named}{more}; read as {UNK}{untrained}"))
}

/// The word at the place `at`, in [0, 1), of the distribution.
fn draw(logits: &[f32], sampling: &Sampling, at: f64) -> usize {
    if sampling.temperature == 0.0 {
        return largest(logits);
    }
    let mut kept: Vec<usize> = (0..logits.len()).collect();
    if (1..logits.len()).contains(&sampling.top_k) {
        // Stable: among equals the first words stay.
        kept.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        kept.truncate(sampling.top_k);
        kept.sort_unstable();
    }
    let chosen: Vec<f32> = kept.iter().map(|word| logits[*word]).collect();
    let mut left = at;
    let found = probabilities(&chosen, sampling.temperature).iter().position(|p| {
        left -= p;
        left < 0.0
    });
    // Rounding can leave a crumb beyond the last probability.
    kept[found.unwrap_or(largest(&chosen))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use taper_data::Unit;

    #[test]
    fn what_a_prompt_has_and_the_vocabulary_has_not_is_named_once() {
        let text = |unit, vocab: &[&str], train: &[u32]| Text {
            train: train.into(),
            valid: [].into(),
            test: [].into(),
            vocab: vocab.iter().map(|unit| (*unit).to_owned()).collect(),
            unit,
            pieces: None,
        };
        let letters = text(Unit::Char, &[UNK, "a", "\n"], &[1, 2]);
        assert_eq!(unknown(&letters, "aa\na"), None);
        let said = unknown(&letters, "aéa\té").unwrap();
        assert!(
            said.contains(r#"not in the vocabulary: "é", "\t"; read as <unk>, which is not in the"#),
            "{said}"
        );
        let words = text(Unit::Word, &[UNK, "the"], &[0, 1]);
        let said = unknown(&words, "the cat\nthe cat").unwrap();
        assert!(said.ends_with(r#"not in the vocabulary: "cat"; read as <unk>"#), "{said}");
        let many: String = ('b'..='z').collect();
        assert!(unknown(&letters, &many).unwrap().contains(r#""u" and 5 more; read"#));
        // Bytes are all known, and without <unk> the prompt is refused.
        assert_eq!(unknown(&text(Unit::Byte, &[], &[]), "é"), None);
        assert_eq!(unknown(&text(Unit::Char, &["a"], &[0]), "b"), None);
    }

    #[test]
    fn draws_follow_the_distribution_the_temperature_and_the_k_most_probable() {
        let logits = [0.0, 2.0f32.ln(), f32::NEG_INFINITY, 1.0f32.ln()];
        let sampling = |temperature, top_k| Sampling { tokens: 1, temperature, top_k, seed: 1 };
        // Probabilities 1/4, 1/2, 0, 1/4.
        let at = |at: f64| draw(&logits, &sampling(1.0, 0), at);
        assert_eq!([0.0, 0.24, 0.26, 0.74, 0.76, 0.999].map(at), [0, 0, 1, 1, 3, 3]);
        // Of two: 1/3 and 2/3; of equals the first.
        let at = |at: f64| draw(&logits, &sampling(1.0, 2), at);
        assert_eq!([0.0, 0.33, 0.34, 0.999].map(at), [0, 0, 1, 1]);
        // At half the temperature: 1/6, 4/6, 0, 1/6.
        let at = |at: f64| draw(&logits, &sampling(0.5, 0), at);
        assert_eq!([0.16, 0.17, 0.83, 0.84].map(at), [0, 1, 1, 3]);
        assert_eq!(draw(&logits, &sampling(0.0, 0), 0.99), 1);
    }
}

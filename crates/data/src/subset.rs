//! The first samples of a data set, for runs that must be short.
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Data, Images, Loaded};

/// How much of each split to keep, from its start: images, or words of text. What is not given is kept whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Subset {
    /// Of the training set, before a validation set is carved out of it.
    pub train: Option<usize>,
    /// Of the validation set that the data brings.
    pub val: Option<usize>,
    /// Of the test set.
    pub test: Option<usize>,
}

impl Loaded {
    /// Keeps the subset, and declares it where it is smaller than what was there.
    pub fn head(mut self, subset: &Subset) -> Self {
        let mut kept: Vec<String> = Vec::new();
        let mut cut = |split: &str, have: usize, keep: Option<usize>| {
            let keep = keep.unwrap_or(have).min(have);
            if keep < have {
                kept.push(format!("the first {keep} of {have} of {split}"));
            }
            keep
        };
        self.data = match self.data {
            Data::Images { train, test } => {
                let (a, b) = (cut("train", train.len(), subset.train), cut("test", test.len(), subset.test));
                Data::Images { train: train.head(a), test: test.head(b) }
            }
            Data::Text(mut text) => {
                let mut words = |split: &str, words: &Arc<[u32]>, keep: Option<usize>| -> Arc<[u32]> {
                    words[..cut(split, words.len(), keep)].into()
                };
                text.train = words("train", &text.train, subset.train);
                text.valid = words("valid", &text.valid, subset.val);
                text.test = words("test", &text.test, subset.test);
                Data::Text(text)
            }
        };
        if !kept.is_empty() {
            let before = self.provenance.subset.take().into_iter();
            self.provenance.subset = Some(before.chain(kept).collect::<Vec<_>>().join("; "));
        }
        self
    }
}

impl Images {
    /// The first `n`, or all if there are fewer.
    fn head(self, n: usize) -> Self {
        if n >= self.len() {
            return self;
        }
        let bytes = n * self.stored_bytes();
        let (pixels, labels) = (self.pixels[..bytes].to_vec(), self.labels[..n].to_vec());
        Self { pixels: Arc::new(pixels), labels: Arc::new(labels), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataRegistry, Search};
    use serde_json::json;

    #[test]
    fn a_subset_is_the_start_and_is_declared() {
        let load = || {
            DataRegistry::builtin()
                .get("synthetic-images")
                .unwrap()
                .load(&json!({"train": 20, "test": 10}), &Search::default())
        };
        let (whole, part) = (load().unwrap(), load().unwrap());
        let part = part.head(&Subset { train: Some(7), val: None, test: Some(1 << 40) });
        let (Data::Images { train, test }, Data::Images { train: all, test: all_test }) =
            (&part.data, &whole.data)
        else {
            panic!("not images")
        };
        assert_eq!((train.len(), test.len()), (7, all_test.len()));
        assert!((0..7).all(|i| train.image(i) == all.image(i) && train.label(i) == all.label(i)));
        assert_eq!(part.provenance.subset, Some(format!("the first 7 of {} of train", all.len())));
        assert_eq!(whole.head(&Subset::default()).provenance.subset, None);
    }
}

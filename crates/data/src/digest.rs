//! Content digests: proof that samples are the data set they claim to be, whatever file format they came in.
//!
//! Images: for each sample sha256(pixels, then one label byte); the digests sorted; sha256 of their concatenation.
//! Text: sha256 of each line's words joined by single spaces plus a line feed, in order; of characters and bytes, as they are.
//!
//! Sorted, the digest answers "is this CIFAR-10?" whatever order a format has. Batches and validation sets go by index, so a
//! run is a function of the order too: [`Content::ordered`] is the digest without the sorting.
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{DataError, Images, Mismatch, Search};
use taper_files::{hex, place};

/// A split whose content is known.
struct Known {
    set: &'static str,
    split: &'static str,
    samples: usize,
    sha256: &'static str,
    /// What to declare when this is only a part of the set.
    subset: Option<&'static str>,
}

const fn whole(set: &'static str, split: &'static str, samples: usize, sha256: &'static str) -> Known {
    Known { set, split, samples, sha256, subset: None }
}

const fn cifar100_part(split: &'static str, samples: usize, sha256: &'static str) -> Known {
    let subset = "20 train and 5 test images of each class; results on it are not CIFAR-100 results";
    Known { set: "cifar100", split, samples, sha256, subset: Some(subset) }
}

/// Every digest was computed from real bytes.
const KNOWN: &[Known] = &[
    whole("mnist", "train", 60_000, "54e1ab866c9484947dd4821c52bb7a43938f555d6b046be6af55247f8e6ffc64"),
    whole("mnist", "test", 10_000, "97b756d55950f1841ebd48df7379b9b2fc87a10d63e08d6213dad41d564e8508"),
    whole(
        "fashion-mnist",
        "train",
        60_000,
        "fb88a2f5c1b590c907f860b47803d006e4fa7b276cdb551799af9d443accdff7",
    ),
    whole(
        "fashion-mnist",
        "test",
        10_000,
        "0b381379398a0943a88bf3864ff3f5177903dcf178030b4b74c495294b38fa7c",
    ),
    whole("cifar10", "train", 50_000, "6a3b2c04d0a79ce272dcdacaf0bc440275db5a8cbe3717521a28fada2ea0d2ed"),
    whole("cifar10", "test", 10_000, "65a6ffe079453e514083f99356b35e02cbfd581b4951e3937fae188974b79f39"),
    whole("cifar100", "train", 50_000, "640c97a4012a8aebfcaf57fd82a33dd43b37d2e397a02cb9b0a3d89e6d6d936d"),
    // Rebuilt from images; not confirmed against a published hash.
    whole("cifar100", "test", 10_000, "a6a97df7b61bc7420bc44268696e8963d33129bc050978f2a63d8fe3420989fa"),
    cifar100_part("train", 2_000, "ccc9052502c1b84af4fcd2e453aee5d984e14dd39f56cc64c4d3faa95eb360ae"),
    cifar100_part("test", 500, "f08f6630b0b3047d9c76500acba2eadf55c297cf476d39f84eb0c05b72bbc834"),
    whole("ptb", "train", 42_068, "5145926136ee9aef6f359b267ac09cc8a920879cd71725de17c490dd111d2998"),
    whole("ptb", "valid", 3_370, "fadf6277290823f881b7bf39b84e88536c87a859cd629dcfd1d2dfdef06097cf"),
    whole("ptb", "test", 3_761, "c2f8c16a611595d31da5acdb7a61d50e7d5e95f6b9c05fceda5f5ddc4383e791"),
];

/// The digest of one split's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// `train`, `valid` or `test`.
    pub split: String,
    /// Images, or lines, characters or bytes of text.
    pub samples: usize,
    /// The digest.
    pub sha256: String,
    /// The digest of the samples in their order; the same as the other for text.
    #[serde(default)]
    pub ordered: String,
}

impl Content {
    /// The digest of labelled images.
    pub fn of_images(split: &str, images: &Images) -> Self {
        let mut digests: Vec<[u8; 32]> = (0..images.len())
            .into_par_iter()
            .map(|i| {
                Sha256::new_with_prefix(images.image(i)).chain_update([images.label(i)]).finalize().into()
            })
            .collect();
        let ordered = hex(&Sha256::digest(digests.as_flattened()));
        digests.sort_unstable();
        let sha256 = hex(&Sha256::digest(digests.as_flattened()));
        Self { split: split.into(), samples: images.len(), sha256, ordered }
    }

    /// The digest of lines of words.
    pub fn of_lines<'a>(split: &str, lines: impl Iterator<Item = &'a str>) -> Self {
        let (mut hasher, mut samples) = (Sha256::new(), 0);
        for line in lines {
            for (i, word) in line.split_whitespace().enumerate() {
                if i > 0 {
                    hasher.update(b" ");
                }
                hasher.update(word.as_bytes());
            }
            hasher.update(b"\n");
            samples += 1;
        }
        let sha256 = hex(&hasher.finalize());
        Self { split: split.into(), samples, ordered: sha256.clone(), sha256 }
    }

    /// The digest of text whose units are not words: of its bytes as they are.
    pub(crate) fn of_bytes(split: &str, bytes: &[u8], samples: usize) -> Self {
        let sha256 = hex(&Sha256::digest(bytes));
        Self { split: split.into(), samples, ordered: sha256.clone(), sha256 }
    }

    /// The same samples in the same order under other labels, which the digest of the published set does not see.
    pub(crate) fn label_with(&mut self, labels: &[u8]) {
        self.ordered = hex(&Sha256::new_with_prefix(&self.ordered).chain_update(labels).finalize());
    }

    /// What tells this content from what it was; `None` where it is the same.
    pub fn differs_from(&self, before: &Self) -> Option<String> {
        let short = |digest: &str| digest.get(..12).unwrap_or(digest).to_owned();
        if (self.samples, &self.sha256) != (before.samples, &before.sha256) {
            let was = format!("{} samples (sha256 {}…)", before.samples, short(&before.sha256));
            return Some(format!(
                "`{}` was {was}, is {} ({}…)",
                self.split,
                self.samples,
                short(&self.sha256)
            ));
        }
        (self.ordered != before.ordered).then(|| {
            format!(
                "`{}` has the same {} samples in another order or under other labels, and batches go by both",
                self.split, self.samples
            )
        })
    }
}

/// What a comparison with the known digests says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Every split is a known split of the set.
    pub verified: bool,
    /// What to declare when it is a known part of the set.
    pub subset: Option<String>,
}

/// Compares splits with the known digests of `set`. A split that does not match is an error when `verify` is set.
pub fn compare(set: &str, place: &str, contents: &[Content], verify: bool) -> Result<Verdict, DataError> {
    let mut verdict = Verdict { verified: true, subset: None };
    for content in contents {
        let of_split = |k: &&Known| k.set == set && k.split == content.split;
        if let Some(known) = KNOWN.iter().filter(of_split).find(|k| k.sha256 == content.sha256) {
            verdict.subset = verdict.subset.or(known.subset.map(String::from));
            continue;
        }
        verdict.verified = false;
        if let Some(known) = KNOWN.iter().filter(of_split).find(|k| k.subset.is_none() && verify) {
            let same = KNOWN.iter().find(|k| k.sha256 == content.sha256);
            return Err(DataError::Mismatch(Box::new(Mismatch {
                name: set.into(),
                split: content.split.clone(),
                place: place.into(),
                expected_samples: known.samples,
                expected: known.sha256.into(),
                found_samples: content.samples,
                found: content.sha256.clone(),
                known_as: same.map(|k| format!("{}, {}", k.set, k.split)),
            })));
        }
    }
    Ok(verdict)
}

/// The content digests of files with these sha256s: from the cache when they were computed before, else by `compute`.
///
/// The key is the files' own hashes, computed at every load, so that a damaged file never meets an old answer.
pub fn remembered(
    search: &Search,
    set: &str,
    files: &[String],
    compute: impl FnOnce() -> Vec<Content>,
) -> Vec<Content> {
    // The first word says what is remembered: an earlier version knew no order.
    let key = hex(&Sha256::digest(format!("ordered\n{set}\n{}", files.join("\n"))));
    let path = search.cache.as_ref().map(|c| c.join("digests").join(format!("{key}.json")));
    let cached = path
        .as_ref()
        .filter(|_| !search.fresh)
        .and_then(|p| std::fs::read(p).ok())
        .and_then(|b| serde_json::from_slice(&b).ok());
    if let Some(contents) = cached {
        return contents;
    }
    let contents = compute();
    if let (Some(path), Ok(json)) =
        (path.filter(|_| search.keeps().is_some()), serde_json::to_vec_pretty(&contents))
    {
        // A cache that cannot be written costs the next run a fraction of a second; it is not an error.
        let _ = place(&path, &json);
    }
    contents
}

#[cfg(test)]
mod tests {
    use super::Content;

    #[test]
    fn other_labels_on_the_same_samples_are_other_content_of_the_same_set() {
        let lines = || Content::of_lines("train", ["a b", "c"].into_iter());
        let (mut first, mut second) = (lines(), lines());
        first.label_with(&[1, 2]);
        second.label_with(&[1, 3]);
        assert_eq!(first.sha256, second.sha256);
        let said = second.differs_from(&first).unwrap_or_default();
        assert!(said.contains("under other labels"), "{said}");
        second = lines();
        second.label_with(&[1, 2]);
        assert_eq!(second.differs_from(&first), None);
    }
}

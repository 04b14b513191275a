//! Which pairs of pieces become one.
//!
//! Sennrich et al. 2016, on bytes: of all pairs of neighbours inside words the most frequent becomes a piece of its own, until there
//! are as many pieces as asked for. Of equals it is the pair with the smaller numbers. All counts are whole numbers and nothing is
//! taken in the order of a hash, so that the result is a function of the text alone.
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::byte_of;

type Pair = (u32, u32);

/// What is learned: pieces in the order of their numbers, and pairs that become one in the order of their ranks.
type Learned = (Vec<Vec<u8>>, Vec<Pair>);

/// A longer word is counted in parts: a text without spaces would be walked through again for every pair.
const LONGEST: usize = 256;

/// Pairs that occur less often are not worth a number.
const LEAST: u64 = 2;

/// GPT-2's words: letters, digits or other signs, each with the space before them.
pub fn words() -> PreTokenizerWrapper {
    ByteLevel::new(false, true, true).into()
}

/// Learns up to `size` pieces of the words of texts.
pub fn learn<'a>(texts: impl Iterator<Item = &'a str>, size: usize) -> Result<Learned, String> {
    Ok(merge(count(texts)?, size))
}

/// How often each word stands in texts, in an order of its own.
fn count<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<(Vec<u32>, u64)>, String> {
    let cut = words();
    let mut counts: HashMap<String, u64> = HashMap::new();
    for line in texts.flat_map(|text| text.split_inclusive('\n')) {
        let mut line = PreTokenizedString::from(line);
        cut.pre_tokenize(&mut line).map_err(|e| e.to_string())?;
        for (word, ..) in line.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
            match counts.get_mut(word) {
                Some(count) => *count += 1,
                None => drop(counts.insert(word.to_owned(), 1)),
            }
        }
    }
    let mut counts: Vec<(String, u64)> = counts.into_iter().collect();
    counts.sort_unstable();
    let numbers = |word: &str| word.chars().filter_map(byte_of).map(u32::from).collect::<Vec<u32>>();
    let parts = counts.iter().flat_map(|(word, count)| {
        let parts: Vec<_> = numbers(word).chunks(LONGEST).map(|part| (part.to_vec(), *count)).collect();
        parts
    });
    Ok(parts.collect())
}

/// Merges pairs of the symbols of words, each word with its count.
fn merge(mut words: Vec<(Vec<u32>, u64)>, size: usize) -> Learned {
    let mut pieces: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    let mut numbers: HashMap<Vec<u8>, u32> = pieces.iter().cloned().zip(0..).collect();
    let mut merges = Vec::new();
    let mut counts: HashMap<Pair, u64> = HashMap::new();
    // Words that may have a pair.
    let mut places: HashMap<Pair, BTreeSet<usize>> = HashMap::new();
    for (place, (symbols, count)) in words.iter().enumerate() {
        for pair in pairs(symbols) {
            *counts.entry(pair).or_default() += count;
            places.entry(pair).or_default().insert(place);
        }
    }
    let mut queue: BinaryHeap<(u64, Reverse<Pair>)> =
        counts.iter().map(|(pair, count)| (*count, Reverse(*pair))).collect();
    while pieces.len() < size
        && let Some((count, Reverse(pair))) = queue.pop()
    {
        // Every change of a count is in the queue: what does not say the count of now was overtaken.
        if counts.get(&pair) != Some(&count) {
            continue;
        }
        if count < LEAST {
            break;
        }
        let joined = [pair.0, pair.1].map(|piece| pieces[piece as usize].as_slice()).concat();
        // Two pairs can make the same piece.
        let number = *numbers.entry(joined.clone()).or_insert_with(|| {
            pieces.push(joined);
            pieces.len() as u32 - 1
        });
        merges.push(pair);
        let mut changed = BTreeSet::new();
        for place in places.remove(&pair).unwrap_or_default() {
            let (symbols, count) = &mut words[place];
            let after = replace(symbols, pair, number);
            if after.len() == symbols.len() {
                continue;
            }
            for old in pairs(symbols) {
                // It was counted when it came.
                if let Some(all) = counts.get_mut(&old) {
                    *all -= *count;
                }
                changed.insert(old);
            }
            for new in pairs(&after) {
                *counts.entry(new).or_default() += *count;
                places.entry(new).or_default().insert(place);
                changed.insert(new);
            }
            *symbols = after;
        }
        counts.remove(&pair);
        for pair in changed {
            match counts.get(&pair) {
                Some(0) => drop(counts.remove(&pair)),
                Some(count) => queue.push((*count, Reverse(pair))),
                None => {}
            }
        }
    }
    (pieces, merges)
}

fn pairs(symbols: &[u32]) -> impl Iterator<Item = Pair> {
    symbols.windows(2).map(|pair| (pair[0], pair[1]))
}

/// Symbols with every pair, from the left, as one.
fn replace(symbols: &[u32], pair: Pair, by: u32) -> Vec<u32> {
    let (mut after, mut at) = (Vec::with_capacity(symbols.len()), 0);
    while at < symbols.len() {
        let found = symbols[at] == pair.0 && symbols.get(at + 1) == Some(&pair.1);
        after.push(if found { by } else { symbols[at] });
        at += if found { 2 } else { 1 };
    }
    after
}

#[cfg(test)]
mod tests {
    use super::super::BYTES;
    use super::*;

    fn learned(text: &str, size: usize) -> Vec<String> {
        let (pieces, _) = learn([text].into_iter(), size).unwrap();
        pieces[BYTES..].iter().map(|piece| String::from_utf8(piece.clone()).unwrap()).collect()
    }

    #[test]
    fn the_most_frequent_pair_comes_first_and_of_equals_the_one_of_smaller_numbers() {
        // ` `+x and a+b three times, of which the space has the smaller number; then `ab`+c twice, and no pair again.
        assert_eq!(learned("abc abc xab x x", 258), [" x", "ab"]);
        assert_eq!(learned("abc abc xab x x", 300), [" x", "ab", "abc"]);
        assert_eq!(learned("", 300), Vec::<String>::new());
    }

    #[test]
    fn a_piece_that_two_pairs_make_has_one_number() {
        let words = |all: &[(&str, u64)]| {
            all.iter().map(|(word, count)| (word.bytes().map(u32::from).collect(), *count)).collect()
        };
        // `ab` then `ab`+c; in `bc` words b+c, then a+`bc`, which is the same piece.
        let (pieces, merges) = merge(words(&[("abc", 9), ("xbc", 5), ("abx", 4), ("zabc", 1)]), 400);
        let made: Vec<Vec<u8>> =
            merges.iter().map(|(a, b)| [&*pieces[*a as usize], &*pieces[*b as usize]].concat()).collect();
        let mut distinct = pieces.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), pieces.len(), "{made:?}");
    }

    #[test]
    fn counts_of_neighbours_that_overlap_do_not_go_below_zero() {
        assert_eq!(learned("aaaaaaa aaaa aaa", 300)[0], "aa");
    }
}

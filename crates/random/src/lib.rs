//! Counter-based random numbers: a draw depends on its key and index, never on threads or order.
//!
//! The key is (seed, purpose, name, step). It selects a ChaCha8 key and stream; draw `i` is the `i`-th
//! 64-bit word pair of that stream, so that any draw can be had without the ones before it. It knows nothing of what the
//! numbers are for: initial weights, batches, dropout and the bootstrap name their own purposes.
//!
//! ```
//! use taper_random::Rng;
//! let mut a = Rng::new(1, "dropout", "fc.weight", 7);
//! let third = { a.next_u64(); a.next_u64(); a.next_u64() };
//! assert_eq!(Rng::new(1, "dropout", "fc.weight", 7).at(2).next_u64(), third);
//! ```
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// One stream of random numbers. See the [module](self).
#[derive(Clone, Debug)]
pub struct Rng(ChaCha8Rng);

impl Rng {
    /// The stream of a key, at draw 0.
    pub fn new(seed: u64, purpose: &str, name: &str, step: u64) -> Self {
        // Two hashes of the name with different starts: 128 bits, so that no two names of a model collide.
        let words = [seed, fnv1a(FNV_START, purpose), fnv1a(FNV_START, name), fnv1a(!FNV_START, name)];
        let mut key = [0; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_stream(step);
        Self(rng)
    }

    /// The same stream at draw `index`.
    pub fn at(mut self, index: u64) -> Self {
        self.0.set_word_pos(2 * u128::from(index));
        self
    }

    /// The next draw: 64 uniform bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// One draw, uniform in [0, 1) on multiples of 2⁻⁵³.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Two draws, standard normal (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        // 1 - u lies in (0, 1], where the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// One draw, uniform in `0..n` (0 when `n` is 0). The bias of at most n·2⁻⁶⁴ cannot be seen.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Fisher–Yates over `items`, one draw an element.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }

    /// Fills `bytes` with uniform bits; eight bytes are one draw.
    pub fn fill_bytes(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// The FNV-1a hash: written out because the standard library's hashes may change between releases.
fn fnv1a(start: u64, text: &str) -> u64 {
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_key_changes_the_stream() {
        let draws = [
            Rng::new(1, "init", "w", 0).next_u64(),
            Rng::new(2, "init", "w", 0).next_u64(),
            Rng::new(1, "mask", "w", 0).next_u64(),
            Rng::new(1, "init", "v", 0).next_u64(),
            Rng::new(1, "init", "w", 1).next_u64(),
        ];
        for (i, a) in draws.iter().enumerate() {
            assert!(draws[..i].iter().all(|b| a != b));
        }
    }

    #[test]
    fn draws_are_pinned_so_that_old_runs_stay_reproducible() {
        let mut rng = Rng::new(1, "init", "0.weight", 0);
        assert_eq!([rng.next_u64(), rng.next_u64()], [PINNED[0], PINNED[1]]);
    }
    const PINNED: [u64; 2] = [8_793_949_494_142_946_808, 18_308_826_448_855_921_130];

    #[test]
    fn moments_of_uniform_and_normal_are_right() {
        let n = 200_000;
        let (mut u, mut z) = (Rng::new(3, "test", "u", 0), Rng::new(3, "test", "z", 0));
        let (mut mean, mut var, mut zmean, mut zvar) = (0.0, 0.0, 0.0, 0.0);
        for _ in 0..n {
            let (a, b) = (u.uniform(), z.normal());
            mean += a / n as f64;
            var += (a - 0.5).powi(2) / n as f64;
            zmean += b / n as f64;
            zvar += b * b / n as f64;
        }
        // Five standard errors of each estimate at n = 200,000.
        assert!((mean - 0.5).abs() < 3.3e-3 && (var - 1.0 / 12.0).abs() < 8.4e-4, "{mean} {var}");
        assert!(zmean.abs() < 1.2e-2 && (zvar - 1.0).abs() < 1.6e-2, "{zmean} {zvar}");
    }

    #[test]
    fn shuffle_permutes_and_below_stays_below() {
        let mut items: Vec<u32> = (0..1000).collect();
        Rng::new(5, "test", "shuffle", 0).shuffle(&mut items);
        let mut sorted = items.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..1000) && !items.iter().copied().eq(0..1000));
        assert_eq!(Rng::new(5, "test", "below", 0).below(0), 0);
    }
}

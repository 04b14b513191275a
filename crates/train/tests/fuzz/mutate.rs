//! Damage, drawn from a seeded generator (SplitMix64).

pub struct Draw(pub u64);

/// Numbers that lengths and offsets are compared with.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

impl Draw {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    fn noise(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most)).map(|_| self.bits() as u8).collect()
    }

    /// One of the seeds with a few changes, seldom noise alone.
    pub fn input(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        if seeds.is_empty() || self.below(20) == 0 {
            return self.noise(300);
        }
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(6) {
            self.change(&mut bytes, seeds);
        }
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        // Headers are short and decide much: half of all changes are near an end.
        let near = |draw: &mut Self, length: usize| match draw.below(4) {
            0 => draw.below(length.min(64)),
            1 => length.saturating_sub(1 + draw.below(64)),
            _ => draw.below(length),
        };
        let at = near(self, bytes.len());
        let end = (at + 1 + self.below(24)).min(bytes.len());
        match self.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 if at < bytes.len() => bytes[at] = self.bits() as u8,
            2 => {
                let edge = EDGES[self.below(EDGES.len())];
                let width = [1, 2, 4, 8][self.below(4)];
                let little = self.below(2) == 0;
                let number = if little { edge.to_le_bytes() } else { edge.to_be_bytes() };
                let number = if little { &number[..width] } else { &number[8 - width..] };
                bytes.iter_mut().skip(at).zip(number).for_each(|(byte, new)| *byte = *new);
            }
            3 => bytes.truncate(at),
            4 if at < end => drop(bytes.drain(at..end)),
            5 if at < end => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            6 => {
                let noise = self.noise(12);
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), noise);
            }
            7 => {
                // Text: a number becomes another.
                let edge = EDGES[self.below(EDGES.len())];
                let text = [edge.to_string(), "-1".into(), "1e999".into(), "null".into(), "\"x\"".into()];
                let text = text[self.below(text.len())].clone();
                let digits = |b: &u8| b.is_ascii_digit() || *b == b'.';
                if let Some(start) = bytes.iter().skip(at).position(digits).map(|found| at + found) {
                    let length = bytes[start..].iter().take_while(|b| digits(b)).count();
                    bytes.splice(start..start + length, text.bytes());
                }
            }
            _ => {
                let other = &seeds[self.below(seeds.len())];
                let from = self.below(other.len());
                let to = (from + self.below(200)).min(other.len());
                bytes.splice(
                    at.min(bytes.len())..end.max(at.min(bytes.len())),
                    other[from..to].iter().copied(),
                );
            }
        }
        bytes.truncate(1 << 20);
    }
}

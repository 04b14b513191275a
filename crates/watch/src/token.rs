//! The word that lets somebody in.
use std::fmt;

/// A secret of 128 random bits, as 32 hexadecimal digits.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A new one, from the system's randomness.
    pub fn new() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(Self(taper_files::hex(&bytes)))
    }

    /// Its digits.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Whether this is it. How long that takes does not tell where a wrong one differs.
    pub fn is(&self, other: &str) -> bool {
        let (own, other) = (self.0.as_bytes(), other.as_bytes());
        own.len() == other.len() && own.iter().zip(other).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

/// Not for logs.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_word_is_it() {
        let token = Token::new().unwrap();
        assert_eq!(token.text().len(), 32);
        assert!(token.is(token.text()));
        assert!(!token.is(""));
        assert!(!token.is(&token.text()[..31]));
        assert!(!token.is(&"0".repeat(32)));
        assert!(!Token::new().unwrap().is(token.text()));
    }
}

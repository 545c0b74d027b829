//! Patterns of shapes, as ops declare them. They are parsed at compile time.
//!
//! ```text
//! (B, L, D)                 a letter for each axis
//! (..., D)                  any leading axes
//! (B, W-1, D) (R+2N, D)     sums of multiples of letters
//! (O, 17I/16)               a sum divided by a number
//! (B|1, M, D)               an axis that may also be 1
//! (B, L, N) | (D, N)        alternatives, which the op checks itself: see [`Slot::loose`](super::Slot::loose)
//! ```

use crate::tensor::MAX_RANK;
use std::fmt;

/// A parsed pattern.
#[derive(Clone, Copy)]
pub struct Pattern {
    /// Its text.
    pub words: &'static str,
    /// Whether any leading axes may precede the others.
    pub rows: bool,
    axes: [Axis; MAX_RANK],
    rank: usize,
}

/// An axis: a sum of terms, divided by a number.
#[derive(Clone, Copy)]
pub struct Axis {
    /// The terms of the sum; unused ones have the factor 0.
    pub terms: [Term; 3],
    /// The divisor of the sum.
    pub over: i16,
    /// Whether the axis may also be 1.
    pub or_one: bool,
}

/// A multiple of a letter, or of the number 1.
#[derive(Clone, Copy)]
pub struct Term {
    /// The factor.
    pub factor: i16,
    /// The index of the letter in the alphabet, or [`ONE`].
    pub letter: u8,
}

/// The letter that stands for the number 1.
pub const ONE: u8 = 26;

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Panics
    /// If the text is no pattern, or exceeds the limits for axes or terms.
    pub const fn new(words: &'static str) -> Pattern {
        let text = words.as_bytes();
        let mut pattern = Pattern { words, rows: false, axes: [Axis::EMPTY; MAX_RANK], rank: 0 };
        assert!(text[0] == b'(', "a shape in parentheses");
        let mut at = 1;
        while text[at] != b')' {
            match text[at] {
                b',' | b' ' => at += 1,
                b'.' => (pattern.rows, at) = (true, at + 3),
                _ => {
                    (pattern.axes[pattern.rank], at) = Axis::read(text, at);
                    pattern.rank += 1;
                }
            }
        }
        pattern
    }

    /// The axes without the leading ones of `...`.
    pub fn axes(&self) -> &[Axis] {
        &self.axes[..self.rank]
    }

    /// The alternatives of a loose shape, in order; itself where it has none.
    pub fn alternatives(&self) -> impl Iterator<Item = Pattern> {
        self.words.match_indices('(').map(|(start, _)| Pattern::new(&self.words[start..]))
    }

    /// Whether some axis may be 1, so that the tensor is repeated along it.
    pub fn may_repeat(&self) -> bool {
        self.axes().iter().any(|axis| axis.or_one)
    }

    /// Whether some axis is more than a single letter.
    pub fn has_sums(&self) -> bool {
        self.axes().iter().any(|axis| axis.letter().is_none())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.words)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.words)
    }
}

impl Axis {
    const EMPTY: Axis = Axis { terms: [Term { factor: 0, letter: ONE }; 3], over: 1, or_one: false };

    /// Parses an axis such as `R+2N`; returns it with the position after it.
    const fn read(text: &[u8], mut at: usize) -> (Axis, usize) {
        let (mut axis, mut count) = (Axis::EMPTY, 0);
        loop {
            match text[at] {
                b',' | b')' => return (axis, at),
                b'/' => (axis.over, at) = number(text, at + 1),
                b'|' => (axis.or_one, at) = (true, at + 2),
                _ => {
                    (axis.terms[count], at) = Term::read(text, at);
                    count += 1;
                }
            }
        }
    }

    /// The letter, if the axis is a single letter.
    pub fn letter(&self) -> Option<u8> {
        let [Term { factor: 1, letter }, Term { factor: 0, .. }, _] = self.terms else { return None };
        (self.over == 1 && letter != ONE).then_some(letter)
    }
}

impl Term {
    const fn read(text: &[u8], start: usize) -> (Term, usize) {
        let sign = if text[start] == b'-' { -1 } else { 1 };
        let digits = if matches!(text[start], b'+' | b'-') { start + 1 } else { start };
        let (factor, end) = number(text, digits);
        let factor = if end == digits { 1 } else { factor };
        if text[end].is_ascii_uppercase() {
            return (Term { factor: sign * factor, letter: text[end] - b'A' }, end + 1);
        }
        assert!(end > digits, "a number or a letter");
        (Term { factor: sign * factor, letter: ONE }, end)
    }
}

/// Parses the number at `at`; returns it with the position after it.
const fn number(text: &[u8], mut at: usize) -> (i16, usize) {
    let mut number = 0;
    while text[at].is_ascii_digit() {
        number = 10 * number + (text[at] - b'0') as i16;
        at += 1;
    }
    (number, at)
}

//! Shapes in words, as ops declare them. They are read when the program is compiled.
//!
//! ```text
//! (B, L, D)                 a letter for each axis
//! (..., D)                  any first axes
//! (B, W-1, D) (R+2N, D)     sums of multiples of letters
//! (O, 17I/16)               divided by a number
//! (B|1, M, D)               an axis that may be 1 as well
//! (B, L, N) | (D, N)        either of several, which the op proves itself: see [`Slot::loose`](super::Slot::loose)
//! ```

use crate::tensor::MAX_RANK;
use std::fmt;

/// A shape in words.
#[derive(Clone, Copy)]
pub struct Pattern {
    /// The words.
    pub words: &'static str,
    /// Whether any axes may come before the others.
    pub rows: bool,
    axes: [Axis; MAX_RANK],
    rank: usize,
}

/// An axis: a sum, divided by a number.
#[derive(Clone, Copy)]
pub struct Axis {
    /// The terms of the sum; absent ones have the factor 0.
    pub terms: [Term; 3],
    /// The divisor of the sum.
    pub over: i16,
    /// Whether the axis may be 1 as well.
    pub or_one: bool,
}

/// A multiple of a letter, or of 1.
#[derive(Clone, Copy)]
pub struct Term {
    /// The multiple.
    pub factor: i16,
    /// The letter, from 0 on, or [`ONE`].
    pub letter: u8,
}

/// Stands for the number 1 among letters.
pub const ONE: u8 = 26;

impl Pattern {
    /// Reads the words.
    ///
    /// # Panics
    /// If they are no shape, or have more axes or terms than there is room for.
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

    /// The axes, without those that `...` stands for.
    pub fn axes(&self) -> &[Axis] {
        &self.axes[..self.rank]
    }

    /// Whether some axis is more than a letter.
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

    /// Reads an axis such as `R+2N`, and returns where it ends.
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

    /// The letter, if the axis is a single one.
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

/// The number at that place, and where it ends.
const fn number(text: &[u8], mut at: usize) -> (i16, usize) {
    let mut number = 0;
    while text[at].is_ascii_digit() {
        number = 10 * number + (text[at] - b'0') as i16;
        at += 1;
    }
    (number, at)
}

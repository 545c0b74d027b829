//! Shapes in words, as ops declare them, and the sizes that their letters have in a call.
//!
//! ```text
//! (B, L, D)                 a letter for each axis
//! (..., D)                  any first axes
//! (B, W-1, D) (R+2N, D)     sums of multiples of letters
//! (O, 17I/16)               divided by a number
//! (B|1, M, D)               an axis that may be 1 as well
//! (B, L, N) | (D, N)        either of several, which the op proves itself: see [`Slot::loose`](super::Slot::loose)
//! ```
//!
//! A letter gets its size where it stands alone. So each letter of a sum must stand alone in another shape.

use super::{About, Named, wrong_shape};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Spec};

/// The sizes of a call by their letters.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    letters: [usize; 26],
    rows: Option<Shape>,
}

/// No size has it: tensors hold fewer elements.
const UNKNOWN: usize = usize::MAX;

impl Sizes {
    const NONE: Sizes = Sizes { letters: [UNKNOWN; 26], rows: None };

    /// The sizes in the inputs of an op. All that are there must agree with each other.
    pub fn bind(op: &About, inputs: &Named<Spec>) -> Result<Sizes> {
        let mut sizes = Sizes::NONE;
        for sums in [false, true] {
            for (at, slot) in op.inputs.iter().enumerate().filter(|(_, slot)| !slot.loose) {
                let Some(spec) = inputs.find(slot.name).filter(|_| !sums || has_sums(slot.shape)) else { continue };
                if !sizes.take(slot.shape, &spec.shape, sums) {
                    return Err(refusal(op, inputs, at, sums));
                }
            }
        }
        Ok(sizes)
    }

    /// The size of a letter, if an input that is there has it.
    pub fn find(&self, letter: char) -> Option<usize> {
        Some(self.letters[index(letter)]).filter(|&size| size != UNKNOWN)
    }

    /// The size of a letter that an input has which must be there.
    ///
    /// # Panics
    /// If no input has it: the op's declaration is wrong.
    pub fn of(&self, letter: char) -> usize {
        self.find(letter).unwrap_or_else(|| panic!("no input has the size {letter}"))
    }

    /// The sizes of letters, as [`Sizes::of`].
    pub fn all<const N: usize>(&self, letters: &str) -> [usize; N] {
        let mut letters = letters.chars();
        std::array::from_fn(|_| self.of(letters.next().expect("a letter for each size")))
    }

    /// The first axes that `...` stands for.
    pub fn rows(&self) -> &[usize] {
        self.rows.as_deref().unwrap_or_default()
    }

    /// The sizes of the shape in these words.
    pub fn shape(&self, words: &str) -> Option<Vec<usize>> {
        let mut dims = Vec::new();
        for axis in axes(form(words)) {
            match axis {
                ROWS => dims.extend_from_slice(self.rows.as_deref()?),
                axis => dims.push(self.size(larger(axis))?),
            }
        }
        Some(dims)
    }

    /// Takes the sizes of a tensor; answers whether it fits the shape. Sums are compared only if all letters have had
    /// their chance to get a size.
    fn take(&mut self, words: &str, mut dims: &[usize], sums: bool) -> bool {
        let mut own = form(words);
        if let Some(others) = own.strip_prefix(ROWS) {
            own = others.trim_start_matches(',');
            let Some(rows) = dims.len().checked_sub(axes(own).count()) else { return false };
            let (rows, others) = dims.split_at(rows);
            if self.rows.is_some_and(|known| known[..] != *rows) {
                return false;
            }
            (self.rows, dims) = (Shape::new(rows).ok(), others);
        }
        let mut sizes = dims.iter();
        axes(own).all(|axis| sizes.next().is_some_and(|&size| self.fit(axis, size, sums))) && sizes.next().is_none()
    }

    /// Whether an axis of this size fits. A letter takes the size if it had none.
    fn fit(&mut self, axis: &str, size: usize, sums: bool) -> bool {
        if axis.ends_with("|1") && size == 1 {
            return true;
        }
        match larger(axis).as_bytes() {
            &[letter @ b'A'..=b'Z'] => {
                let known = &mut self.letters[index(letter.into())];
                *known = if *known == UNKNOWN { size } else { *known };
                *known == size
            }
            // Where the sum is negative or not whole, the op refuses the input that its letter comes from.
            _ => !sums || self.size(larger(axis)).is_none_or(|known| known == size),
        }
    }

    /// The size of an axis whose letters all have sizes.
    fn size(&self, axis: &str) -> Option<usize> {
        let (terms, over) = split(axis);
        let mut sum = 0;
        for (count, letter) in terms {
            sum += count * letter.map_or(Some(1), |letter| self.find(letter))? as i128;
        }
        let whole = (sum % over as i128 == 0).then_some(sum / over as i128)?;
        whole.try_into().ok()
    }

    fn shown(&self, form: &str) -> String {
        let rows = |rows: Shape| rows.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let axis = |axis: &str| match axis {
            ROWS => self.rows.map_or(ROWS.to_string(), rows),
            axis => {
                self.size(larger(axis)).map_or(axis.to_string(), |size| axis.replace(larger(axis), &size.to_string()))
            }
        };
        let axes = axes(form).map(axis).filter(|axis| !axis.is_empty()).collect::<Vec<_>>();
        format!("({})", axes.join(", ").replace('|', " or "))
    }
}

/// The error of the input for the slot `at`: its shape with the sizes that were known before.
#[cold]
fn refusal(op: &About, inputs: &Named<Spec>, at: usize, sums: bool) -> Error {
    let mut sizes = Sizes::NONE;
    let before = if sums { op.inputs } else { &op.inputs[..at] };
    for slot in before.iter().filter(|slot| !slot.loose) {
        if let Some(spec) = inputs.find(slot.name) {
            sizes.take(slot.shape, &spec.shape, false);
        }
    }
    let slot = &op.inputs[at];
    match inputs.get(slot.name) {
        Ok(spec) => wrong_shape(slot.name, &sizes.shown(form(slot.shape)), spec).hint(op.hint),
        Err(missing) => missing,
    }
}

/// Whether some axis is more than a letter.
fn has_sums(words: &str) -> bool {
    words.bytes().any(|byte| matches!(byte, b'+' | b'-' | b'/' | b'2'..=b'9'))
}

const ROWS: &str = "...";

fn index(letter: char) -> usize {
    (letter as usize).wrapping_sub('A' as usize)
}

/// The words between the parentheses.
fn form(words: &str) -> &str {
    words.trim_matches(['(', ')'])
}

fn axes(form: &str) -> impl Iterator<Item = &str> {
    form.split(',').map(str::trim).filter(|axis| !axis.is_empty())
}

/// The axis without the word that it may be 1 as well.
fn larger(axis: &str) -> &str {
    axis.split('|').next().unwrap_or(axis)
}

fn letters(axis: &str) -> impl Iterator<Item = char> {
    axis.chars().filter(char::is_ascii_uppercase)
}

/// The terms of a sum, each a factor and maybe a letter, and what it is divided by.
fn split(axis: &str) -> (impl Iterator<Item = (i128, Option<char>)>, usize) {
    let (sum, over) = axis.split_once('/').map_or((axis, 1), |(sum, over)| (sum, over.parse().expect("a number")));
    let term = |term: &str| {
        let letter = letters(term).next();
        let count = term.trim_end_matches(|c: char| c.is_ascii_uppercase());
        let count = match count {
            "" => 1,
            "-" => -1,
            count => count.parse().expect("a number"),
        };
        (count, letter)
    };
    (terms(sum).map(term), over)
}

/// The parts between pluses, and from each minus on.
fn terms(sum: &str) -> impl Iterator<Item = &str> {
    sum.split('+').flat_map(|part| {
        let at = part[1..].find('-').map_or(part.len(), |at| at + 1);
        let (first, second) = part.split_at(at);
        [first, second].into_iter().filter(|term| !term.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Slot, about};
    use super::*;
    use crate::matmul::Matmul;
    use crate::ops::OPS;
    use crate::tensor::DType;

    fn bound(inputs: &'static [Slot], dims: &[(&'static str, &[usize])]) -> Result<Sizes> {
        let spec = |dims| Spec::new(DType::F32, dims).unwrap();
        let op = About { inputs, ..*about::<Matmul>() };
        Sizes::bind(&op, &dims.iter().map(|&(name, dims)| (name, spec(dims))).collect())
    }

    #[test]
    fn letters_have_one_size() {
        const SLOTS: &[Slot] = &[Slot::new("a", "(B, L, K)"), Slot::new("b", "(B, L, K)")];
        let sizes = bound(SLOTS, &[("a", &[2, 3, 4]), ("b", &[2, 3, 4])]).unwrap();
        assert_eq!(sizes.all("BLK"), [2, 3, 4]);
        assert_eq!(sizes.find('D'), None);
        let error = bound(SLOTS, &[("a", &[2, 3, 4]), ("b", &[2, 3, 5])]).unwrap_err();
        assert_eq!(&*error.expected, "shape (2, 3, 4)");
        assert_eq!(&*bound(SLOTS, &[("a", &[2, 3])]).unwrap_err().expected, "shape (B, L, K)");
    }

    #[test]
    fn sums_multiples_and_rows() {
        const SLOTS: &[Slot] = &[
            Slot::new("x_proj", "(R+2N, D)"),
            Slot::new("A", "(D, N)"),
            Slot::new("dt_w", "(D, R)"),
            Slot::new("w", "(D, W)"),
            Slot::new("state", "(B, W-1, D)"),
            Slot::new("q", "(O, 17I/16)"),
            Slot::new("x", "(..., 2I)"),
            Slot::new("bias", "(I)"),
        ];
        let right: [(&str, &[usize]); 8] = [
            ("x_proj", &[9, 5]),
            ("A", &[5, 4]),
            ("dt_w", &[5, 1]),
            ("w", &[5, 4]),
            ("state", &[1, 3, 5]),
            ("q", &[7, 34]),
            ("x", &[6, 2, 64]),
            ("bias", &[32]),
        ];
        let sizes = bound(SLOTS, &right).unwrap();
        assert_eq!(sizes.all("DNWIR"), [5, 4, 4, 32, 1]);
        assert_eq!(sizes.rows(), [6, 2]);
        assert_eq!(sizes.shape("(..., W-1, 17I/16)"), Some(vec![6, 2, 3, 34]));
        for (name, dims) in [("x_proj", &[8, 5][..]), ("state", &[1, 4, 5]), ("q", &[7, 35]), ("x", &[6, 63])] {
            let wrong = right.map(|(n, right)| (n, if n == name { dims } else { right }));
            assert_eq!(&*bound(SLOTS, &wrong).unwrap_err().argument, name);
        }
    }

    #[test]
    fn axes_that_may_be_one() {
        const SLOTS: &[Slot] = &[Slot::new("x", "(B, L, D)"), Slot::new("mask", "(B|1, L|1)")];
        for mask in [[2, 3], [1, 3], [1, 1]] {
            assert!(bound(SLOTS, &[("x", &[2, 3, 4]), ("mask", &mask)]).is_ok());
        }
        let error = bound(SLOTS, &[("x", &[2, 3, 4]), ("mask", &[2, 2])]).unwrap_err();
        assert_eq!(&*error.expected, "shape (2 or 1, 3 or 1)");
    }

    /// Else a sum, or an output, would have no size, or any.
    #[test]
    fn every_letter_of_a_sum_or_an_output_stands_alone_in_an_input_that_must_be_there() {
        for about in OPS.iter().map(|op| op.about()) {
            let proven = || about.inputs.iter().filter(|slot| !slot.loose);
            let alone = |axis: &&str| axis.len() == 1 || *axis == ROWS;
            let required = proven().filter(|slot| !slot.optional);
            let bound: Vec<&str> = required.flat_map(|slot| axes(form(slot.shape)).filter(alone)).collect();
            let has = |axis: &str| match axis {
                ROWS => bound.contains(&ROWS),
                axis => letters(axis).all(|letter| bound.iter().any(|axis| axis.starts_with(letter))),
            };
            let sums = proven().flat_map(|slot| axes(form(slot.shape))).filter(|axis| !alone(axis));
            let outputs = about.outputs.iter().flat_map(|output| axes(form(output.shape)));
            for axis in sums.map(larger).chain(outputs) {
                assert!(has(axis), "{axis} of {}", about.name);
            }
            for slot in proven() {
                assert!(!slot.shape.contains(" | "), "{}", about.name);
                let is_sum = |axis: &str| larger(axis).len() > 1 && axis != ROWS || axis.parse::<usize>().is_ok();
                assert_eq!(axes(form(slot.shape)).any(is_sum), has_sums(slot.shape), "{} of {}", slot.name, about.name);
            }
        }
    }
}

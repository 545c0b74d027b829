//! Shapes in words, as ops declare them, and the sizes that their letters have in a call.
//!
//! ```text
//! (B, L, D)                 a letter for each axis
//! (..., D)                  any first axes
//! (B, W-1, D) (R+2N, D)     sums of multiples of letters
//! (O, 17I/16)               divided by a number
//! (B|1, M, D)               an axis that may be 1 as well
//! (B, L, N) | (D, N)        either of several
//! ```

use super::{About, Named, Slot, wrong_shape};
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
    /// The sizes in the inputs of an op. All that are there must agree with each other. Letters that stand alone somewhere
    /// get their sizes there, so that a sum that does not fit them is what is told to be wrong.
    pub fn bind(op: &About, inputs: &Named<Spec>) -> Result<Sizes> {
        let mut sizes = Sizes { letters: [UNKNOWN; 26], rows: None };
        for solve in [false, true, true] {
            for slot in op.inputs.iter().filter(|slot| !slot.loose) {
                let Some(spec) = inputs.find(slot.name) else { continue };
                sizes = sizes.with(slot.shape, spec, solve).ok_or_else(|| sizes.wrong(slot, spec).hint(op.hint))?;
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

    /// The sizes that the first of the shapes in these words has.
    pub fn shape(&self, words: &str) -> Option<Vec<usize>> {
        let mut dims = Vec::new();
        for axis in axes(forms(words).next()?) {
            match axis {
                ROWS => dims.extend_from_slice(self.rows.as_deref()?),
                axis => dims.push(self.size(larger(axis))?),
            }
        }
        Some(dims)
    }

    /// These sizes with those of a tensor, or nothing if none of the shapes in words fits it.
    fn with(&self, words: &str, spec: &Spec, solve: bool) -> Option<Sizes> {
        forms(words).find_map(|form| self.with_form(form, &spec.shape, solve))
    }

    fn with_form(&self, form: &str, dims: &[usize], solve: bool) -> Option<Sizes> {
        let (mut sizes, mut dims) = (*self, dims);
        let mut count = axes(form).count();
        if axes(form).next() == Some(ROWS) {
            count -= 1;
            let (rows, own) = dims.split_at(dims.len().checked_sub(count)?);
            sizes.rows = Some(Shape::new(rows).ok()?);
            if self.rows.is_some_and(|known| known[..] != *rows) {
                return None;
            }
            dims = own;
        }
        let fits = |(axis, &size): (&str, &usize)| sizes.fit(axis, size, solve);
        let own = axes(form).filter(|axis| *axis != ROWS);
        (count == dims.len() && own.zip(dims).all(fits)).then_some(sizes)
    }

    /// Whether an axis of this size fits. Its letter takes the size if it had none; one in a sum only if sums are to be
    /// solved.
    fn fit(&mut self, axis: &str, size: usize, solve: bool) -> bool {
        if axis.ends_with("|1") && size == 1 {
            return true;
        }
        let axis = larger(axis);
        let mut unknown = letters(axis).filter(|&letter| self.find(letter).is_none());
        match (unknown.next(), unknown.next()) {
            // A size below 0 is the fault of the input that its letter is from, which the op refuses.
            (None, _) => self.size(axis).is_none_or(|known| known == size),
            (Some(letter), None) if solve || axis.len() == 1 => match self.solve(axis, letter, size) {
                Some(found) => {
                    self.letters[index(letter)] = found;
                    true
                }
                None => false,
            },
            // Known later.
            _ => true,
        }
    }

    /// The size of the letter for which the axis has that size.
    fn solve(&self, axis: &str, letter: char, size: usize) -> Option<usize> {
        let (terms, over) = split(axis);
        let (mut rest, mut times) = (size as i128 * over as i128, 0);
        for (count, of) in terms {
            match of {
                Some(of) if of == letter => times += count,
                Some(of) => rest -= count * self.of(of) as i128,
                None => rest -= count,
            }
        }
        (times != 0 && rest % times == 0).then(|| rest / times).and_then(|found| found.try_into().ok())
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

    /// The error of an input that does not fit: its shapes with the sizes that are known.
    fn wrong(&self, slot: &Slot, spec: &Spec) -> Error {
        let shown: Vec<String> = forms(slot.shape).map(|form| self.shown(form)).collect();
        let (last, others) = shown.split_last().expect("a shape");
        let expected = if others.is_empty() { last.clone() } else { format!("{} or {last}", others.join(", ")) };
        wrong_shape(slot.name, &expected, spec)
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

const ROWS: &str = "...";

fn index(letter: char) -> usize {
    (letter as usize).wrapping_sub('A' as usize)
}

fn forms(words: &str) -> impl Iterator<Item = &str> {
    words.split(" | ").map(|form| form.trim_matches(['(', ')']))
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
    use super::super::about;
    use super::*;
    use crate::matmul::Matmul;
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
            Slot::new("state", "(B, W-1, D)"),
            Slot::new("q", "(O, 17I/16)"),
            Slot::new("x", "(..., 2I)"),
        ];
        let sizes = bound(
            SLOTS,
            &[("x_proj", &[9, 5]), ("A", &[5, 4]), ("state", &[1, 3, 5]), ("q", &[7, 34]), ("x", &[6, 2, 64])],
        );
        let sizes = sizes.unwrap();
        assert_eq!(sizes.all("DNWIR"), [5, 4, 4, 32, 1]);
        assert_eq!(sizes.rows(), [6, 2]);
        assert_eq!(sizes.shape("(..., W-1, 17I/16)"), Some(vec![6, 2, 3, 34]));
        assert!(bound(SLOTS, &[("q", &[7, 35]), ("x", &[6, 64])]).is_err());
    }

    #[test]
    fn alternatives_and_axes_of_one() {
        const SLOTS: &[Slot] =
            &[Slot::new("x", "(B, L, D)"), Slot::new("C", "(B, L, N) | (D, N)"), Slot::new("mask", "(B|1, L|1)")];
        for c in [&[2, 3, 7][..], &[4, 7]] {
            let sizes = bound(SLOTS, &[("x", &[2, 3, 4]), ("C", c), ("mask", &[1, 3])]).unwrap();
            assert_eq!(sizes.of('N'), 7);
        }
        assert!(bound(SLOTS, &[("x", &[2, 3, 4]), ("C", &[5, 7])]).is_err());
        assert!(bound(SLOTS, &[("x", &[2, 3, 4]), ("mask", &[2, 2])]).is_err());
    }
}

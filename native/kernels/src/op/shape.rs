//! Binds the letters of an op's shapes to the sizes of a call.
//!
//! A letter gets its size from an axis that is this letter alone. So each letter of a sum must also be an axis of its
//! own in another shape.

use super::pattern::{Axis, ONE};
use super::{About, Named, Pattern, Slot, wrong_shape};
use crate::error::{Error, Result};
use crate::tensor::{MAX_RANK, Shape, Spec};

/// The sizes of a call's letters.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    letters: [usize; ONE as usize + 1],
    rows: Option<Shape>,
}

/// Marks a letter without a size. No axis has this size, as tensors hold fewer elements.
const UNKNOWN: usize = usize::MAX;

impl Sizes {
    const NONE: Sizes = {
        let mut letters = [UNKNOWN; ONE as usize + 1];
        letters[ONE as usize] = 1;
        Sizes { letters, rows: None }
    };

    /// Sizes as given: `of` each letter, and `rows` for the leading axes of `...`.
    ///
    /// # Panics
    /// If there are more leading axes than a tensor can have.
    pub fn given(of: impl Fn(char) -> usize, rows: &[usize]) -> Sizes {
        let mut sizes = Sizes { rows: Some(Shape::new(rows).expect("few axes")), ..Sizes::NONE };
        for (letter, size) in ('A'..='Z').zip(&mut sizes.letters) {
            *size = of(letter);
        }
        sizes
    }

    /// The sizes that the inputs of an op determine; fails if inputs disagree.
    pub fn bind(op: &About, inputs: &Named<Spec>) -> Result<Sizes> {
        let mut sizes = Sizes::NONE;
        for sums in [false, true] {
            let proven = |slot: &Slot| !slot.loose && (!sums || slot.shape.has_sums());
            for (at, slot) in op.inputs.iter().enumerate().filter(|(_, slot)| proven(slot)) {
                let Some(spec) = inputs.find(slot.name) else { continue };
                if !sizes.take(&slot.shape, &spec.shape, sums) {
                    return Err(refusal(op, inputs, at, sums));
                }
            }
        }
        Ok(sizes)
    }

    /// The size of a letter, if a given input determines it.
    pub fn find(&self, letter: char) -> Option<usize> {
        Some(self.letters[letter as usize - 'A' as usize]).filter(|&size| size != UNKNOWN)
    }

    /// The size of a letter that a required input determines.
    ///
    /// # Panics
    /// If no input determines it: the op's declaration is wrong.
    pub fn of(&self, letter: char) -> usize {
        self.find(letter).unwrap_or_else(|| panic!("no input has the size {letter}"))
    }

    /// The sizes of several letters, as by [`Sizes::of`].
    pub fn all<const N: usize>(&self, letters: &str) -> [usize; N] {
        let mut letters = letters.chars();
        std::array::from_fn(|_| self.of(letters.next().expect("a letter for each size")))
    }

    /// The sizes of the leading axes of `...`.
    pub fn rows(&self) -> &[usize] {
        self.rows.as_deref().unwrap_or_default()
    }

    /// The sizes of a shape; `None` if one of its letters has no size.
    pub fn shape(&self, pattern: &Pattern) -> Option<Vec<usize>> {
        let mut dims = if pattern.rows { self.rows.as_deref()?.to_vec() } else { Vec::with_capacity(MAX_RANK) };
        for axis in pattern.axes() {
            dims.push(self.size(axis)?);
        }
        Some(dims)
    }

    /// Binds the axes of a tensor; returns whether it fits the shape. With `sums`, axes that are sums are compared too:
    /// this must come after all letters have been bound.
    fn take(&mut self, pattern: &Pattern, mut dims: &[usize], sums: bool) -> bool {
        if pattern.rows {
            let Some(rows) = dims.len().checked_sub(pattern.axes().len()) else { return false };
            let (rows, others) = dims.split_at(rows);
            if self.rows.is_some_and(|known| known[..] != *rows) {
                return false;
            }
            (self.rows, dims) = (Shape::new(rows).ok(), others);
        }
        let axes = pattern.axes();
        axes.len() == dims.len() && axes.iter().zip(dims).all(|(axis, &size)| self.fit(axis, size, sums))
    }

    /// Whether an axis has this size. A letter without a size is bound to it.
    fn fit(&mut self, axis: &Axis, size: usize, sums: bool) -> bool {
        if axis.or_one && size == 1 {
            return true;
        }
        match axis.letter() {
            Some(letter) => {
                let known = &mut self.letters[usize::from(letter)];
                *known = if *known == UNKNOWN { size } else { *known };
                *known == size
            }
            // Where the sum is negative or not a whole number, the op refuses the input that its letter comes from.
            None => !sums || self.size(axis).is_none_or(|known| known == size),
        }
    }

    /// The size of an axis; `None` if one of its letters has no size.
    fn size(&self, axis: &Axis) -> Option<usize> {
        let mut sum = 0;
        for term in axis.terms.iter().filter(|term| term.factor != 0) {
            let size = Some(self.letters[usize::from(term.letter)]).filter(|&size| size != UNKNOWN)?;
            sum += i128::from(term.factor) * size as i128;
        }
        let over = i128::from(axis.over);
        (sum % over == 0).then_some(sum / over)?.try_into().ok()
    }

    /// The text of a shape, with the sizes that are known.
    fn shown(&self, pattern: &Pattern) -> String {
        let words = pattern.words.trim_matches(['(', ')']).split(',').map(str::trim).filter(|word| *word != "...");
        let rows = pattern.rows.then(|| self.rows.map_or("...".to_string(), |rows| shown(&rows)));
        let axes = words.zip(pattern.axes()).map(|(word, axis)| {
            let size = self.size(axis).map_or(word.trim_end_matches("|1").to_string(), |size| size.to_string());
            if axis.or_one { format!("{size} or 1") } else { size }
        });
        let axes = rows.into_iter().chain(axes).filter(|axis| !axis.is_empty()).collect::<Vec<_>>();
        format!("({})", axes.join(", "))
    }
}

fn shown(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// The error for the input of slot `at`: it shows the shape with the sizes that were known before.
#[cold]
fn refusal(op: &About, inputs: &Named<Spec>, at: usize, sums: bool) -> Error {
    let mut sizes = Sizes::NONE;
    let before = if sums { op.inputs } else { &op.inputs[..at] };
    for slot in before.iter().filter(|slot| !slot.loose) {
        if let Some(spec) = inputs.find(slot.name) {
            sizes.take(&slot.shape, &spec.shape, false);
        }
    }
    let slot = &op.inputs[at];
    match inputs.get(slot.name) {
        Ok(spec) => wrong_shape(slot.name, &sizes.shown(&slot.shape), spec).hint(op.hint),
        Err(missing) => missing,
    }
}

//! The sizes that the letters of an op's shapes have in a call.
//!
//! A letter gets its size where it stands alone. So each letter of a sum must stand alone in another shape.

use super::pattern::{Axis, ONE};
use super::{About, Named, Pattern, Slot, wrong_shape};
use crate::error::{Error, Result};
use crate::tensor::{MAX_RANK, Shape, Spec};

/// The sizes of a call by their letters.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    letters: [usize; ONE as usize + 1],
    rows: Option<Shape>,
}

/// No size has it: tensors hold fewer elements.
const UNKNOWN: usize = usize::MAX;

impl Sizes {
    const NONE: Sizes = {
        let mut letters = [UNKNOWN; ONE as usize + 1];
        letters[ONE as usize] = 1;
        Sizes { letters, rows: None }
    };

    /// Sizes as they are given for each letter, and for the first axes that `...` stands for.
    ///
    /// # Panics
    /// If there are more first axes than a tensor has.
    pub fn given(of: impl Fn(char) -> usize, rows: &[usize]) -> Sizes {
        let mut sizes = Sizes { rows: Some(Shape::new(rows).expect("few axes")), ..Sizes::NONE };
        for (letter, size) in ('A'..='Z').zip(&mut sizes.letters) {
            *size = of(letter);
        }
        sizes
    }

    /// The sizes in the inputs of an op. All given ones must agree.
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

    /// The size of a letter, if an input that is there has it.
    pub fn find(&self, letter: char) -> Option<usize> {
        Some(self.letters[letter as usize - 'A' as usize]).filter(|&size| size != UNKNOWN)
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

    /// The sizes of a shape, if all its letters have some.
    pub fn shape(&self, pattern: &Pattern) -> Option<Vec<usize>> {
        let mut dims = if pattern.rows { self.rows.as_deref()?.to_vec() } else { Vec::with_capacity(MAX_RANK) };
        for axis in pattern.axes() {
            dims.push(self.size(axis)?);
        }
        Some(dims)
    }

    /// Takes the sizes of a tensor; answers whether it fits the shape. Sums are compared only if all letters have had
    /// their chance to get a size.
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

    /// Whether an axis of this size fits. A letter takes the size if it had none.
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
            // Where the sum is negative or not whole, the op refuses the input that its letter comes from.
            None => !sums || self.size(axis).is_none_or(|known| known == size),
        }
    }

    /// The size of an axis whose letters all have sizes.
    fn size(&self, axis: &Axis) -> Option<usize> {
        let mut sum = 0;
        for term in axis.terms.iter().filter(|term| term.factor != 0) {
            let size = Some(self.letters[usize::from(term.letter)]).filter(|&size| size != UNKNOWN)?;
            sum += i128::from(term.factor) * size as i128;
        }
        let over = i128::from(axis.over);
        (sum % over == 0).then_some(sum / over)?.try_into().ok()
    }

    /// The shape in words, with the sizes that are known.
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

/// The error of the input for the slot `at`: its shape with the sizes that were known before.
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

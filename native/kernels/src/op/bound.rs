//! The sizes of a call, and the outputs that follow from them.

use super::{About, Named, Op, Options, Output, Sizes, When, about};
use crate::error::Result;
use crate::tensor::{DType, Spec};

/// A call whose shapes agree with each other, and whose options are in their ranges.
pub struct Bound<'c, O: Op> {
    /// Types and shapes of the inputs.
    pub inputs: &'c Named<Spec>,
    /// The options.
    pub options: &'c O::Options,
    /// The size of each letter.
    pub sizes: Sizes,
    /// The storage type.
    pub storage: DType,
}

impl<'c, O: Op> Bound<'c, O> {
    /// Checks shapes and option values against the declaration of `O`.
    pub fn new(inputs: &'c Named<Spec>, options: &'c O::Options) -> Result<Self> {
        let sizes = O::sizes(inputs)?;
        options.check()?;
        Ok(Bound { inputs, options, sizes, storage: about::<O>().storage(inputs).1 })
    }

    /// The specs of the declared outputs.
    pub fn outputs(&self) -> Result<Named<Spec>> {
        outputs(about::<O>(), &self.sizes, self.storage, &|option| self.options.flag(option))
    }
}

fn outputs(op: &About, sizes: &Sizes, storage: DType, flag: &dyn Fn(&str) -> bool) -> Result<Named<Spec>> {
    let asked = |output: &&Output| match output.when {
        When::Always => true,
        When::Asked(option) => flag(option),
        When::Unless(option) => !flag(option),
    };
    let spec = |output: &Output| {
        let dims = sizes.shape(&output.shape).unwrap_or_else(|| panic!("{}: {}", op.name, output.shape));
        Ok((output.name, Spec::new(output.precision.dtype(storage), &dims)?))
    };
    op.outputs.iter().filter(asked).map(spec).collect()
}

//! Common parts of ops that are made of other ops.

use super::Place;
use crate::error::Result;
use crate::op::{Named, Op, gradient_of};

/// A call of an op on a backend.
pub struct Steps<'p, 'i, 'a, P: Place, Problem> {
    /// The backend.
    pub place: &'p P,
    /// The checked call.
    pub problem: &'p Problem,
    /// The inputs on this backend.
    pub inputs: &'i Named<P::View<'a>>,
}

impl<'a, P: Place, Problem> Steps<'_, '_, 'a, P, Problem> {
    /// The input of that name, or an error that says it is missing.
    pub fn input<'s>(&self, name: &str) -> Result<P::View<'s>>
    where
        'a: 's,
    {
        self.inputs.get(name).map(P::briefly)
    }

    /// The input of that name, if given.
    pub fn optional<'s>(&self, name: &str) -> Option<P::View<'s>>
    where
        'a: 's,
    {
        self.inputs.find(name).map(P::briefly)
    }
}

/// The output for the gradient of an input of `O`.
pub fn gradient<'s, 'a: 's, P: Place, O: Op>(outputs: &mut Named<P::ViewMut<'a>>, of: &str) -> Result<P::ViewMut<'s>> {
    outputs.expect(gradient_of::<O>(of)).map(P::briefly_mut)
}

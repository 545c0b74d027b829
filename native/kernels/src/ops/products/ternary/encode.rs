//! Ops for the golden values of encodings and layouts, composed of conversions.

use super::by_steps;
use super::grid::{Grid, Layout, OnSentinel, Options};
use super::layouts::ConvertTernary;
use super::problem::{agree, plane};
use super::products::DotTernary;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{Bound, Named, NoOptions, Op, Slot};
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

/// Memory for the reports of a conversion: the number of sentinels and the position of the first.
fn counts<P: Place>(place: &P) -> Result<[P::Owned; 2]> {
    Ok([place.empty(Spec::new(DType::I32, &[1])?)?, place.empty(Spec::new(DType::I64, &[1])?)?])
}

/// Runs a conversion between tensors of two layouts, ignoring its reports.
pub(super) fn convert<'a, 'b, P: Place>(
    place: &P,
    options: Options,
    from: &Named<P::View<'a>>,
    to: Named<P::ViewMut<'b>>,
) -> Result<()> {
    let mut found = counts(place)?;
    let [count, first] = found.each_mut().map(P::view_mut);
    let mut all: Named<_> = [("sentinels", count), ("first", first)].into_iter().collect();
    to.into_iter().for_each(|(name, view)| all.push(name, P::briefly_mut(view)));
    place.call::<ConvertTernary>(&options, from.map(P::briefly), all)
}

/// The values of planes; sentinels are 0.
pub(super) fn decode<'a, P: Place>(place: &P, planes: &[P::Owned; 2], n: usize, to: P::ViewMut<'a>) -> Result<()> {
    let from = Layout::Planes.tensors().iter().copied().zip(planes.iter().map(P::view)).collect();
    let options = Options { to: Some(Layout::Values), n: Some(n), on_sentinel: OnSentinel::Zero, ..Default::default() };
    convert(place, options, &from, [("values", to)].into_iter().collect())
}

/// The cells, and which outputs are wanted.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The given cells.
    grid: Grid,
    /// Whether a second factor for the dot product is given.
    dot: bool,
}

/// Values as planes, packed, negated, and their dot product with others.
pub struct TernaryEncode;

impl Op for TernaryEncode {
    const NAME: &'static str = "ternary_encode";
    const ABOUT: &'static str =
        "-1, 0 and 1 to planes of bits and to packed2, their negatives, and their product with w";
    const INPUTS: &'static [Slot] =
        &[Slot::new("v", "(..., N)").exactly(DType::I8), Slot::new("w", "(..., N)").exactly(DType::I8).optional()];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = NoOptions;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (leading, n) = (call.sizes.rows(), call.sizes.of('N'));
        let grid = Grid { layout: Layout::Values, leading: leading.to_vec(), rows: leading.iter().product(), n };
        Ok(Problem { grid, dot: call.inputs.find("w").is_some() })
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let plane = *problem.grid.to(Layout::Planes).specs()?.get("plane0")?;
        let mut outputs = problem.grid.to(Layout::Packed2).specs()?;
        for name in ["plane0", "plane1", "negated0", "negated1"] {
            outputs.push(name, plane);
        }
        if problem.dot {
            outputs.push("dot_with_w", Spec::new(DType::I32, &[problem.grid.rows])?);
        }
        Ok(outputs)
    }

    by_steps!(problem => problem.clone());
}

fn steps<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let v = inputs.get("v")?;
    let values = |of: &P::View<'a>| [("values", P::briefly(of))].into_iter().collect::<Named<_>>();
    let to = |layout| Options { to: Some(layout), ..Default::default() };
    let packed2 = [("packed2", outputs.expect("packed2")?)].into_iter().collect();
    convert(place, to(Layout::Packed2), &values(v), packed2)?;
    // Negation swaps the planes.
    for [first, second] in [["negated1", "negated0"], ["plane0", "plane1"]] {
        let planes = [outputs.expect(first)?, outputs.expect(second)?];
        convert(place, to(Layout::Planes), &values(v), Layout::Planes.tensors().iter().copied().zip(planes).collect())?;
    }
    let Some(w) = inputs.find("w") else { return Ok(()) };
    let spec = *problem.grid.to(Layout::Planes).specs()?.get("plane0")?;
    let (of_v, of_w) = (encoded(place, &values(v), spec)?, encoded(place, &values(w), spec)?);
    let ([a0, a1], [b0, b1]) = (of_v.each_ref().map(P::view), of_w.each_ref().map(P::view));
    let dot = P::reshape_mut(outputs.expect("dot_with_w")?, &problem.grid.leading)?;
    let factors = [("a0", a0), ("a1", a1), ("b0", b0), ("b1", b1)].into_iter().collect();
    place.call::<DotTernary>(&Default::default(), factors, [("dot", dot)].into_iter().collect())
}

/// The planes of values.
fn encoded<'a, P: Place>(place: &P, values: &Named<P::View<'a>>, plane: Spec) -> Result<[P::Owned; 2]> {
    let mut planes = [place.empty(plane)?, place.empty(plane)?];
    let to = Layout::Planes.tensors().iter().copied().zip(planes.each_mut().map(P::view_mut)).collect();
    convert(place, Options::default(), values, to)?;
    Ok(planes)
}

/// All layouts of one matrix.
pub mod layouts {
    use super::*;

    options! {
        /// The sizes; where given, they must match `w`.
        #[derive(Copy)]
        pub struct Sizes {
            /// rows of w, to prove them
            out: Option<usize> = None;
            /// columns of w, to prove them
            inputs as "in": Option<usize> = None;
        }
    }

    /// A matrix in every layout.
    pub struct TernaryLayouts;

    impl Op for TernaryLayouts {
        const NAME: &'static str = "ternary_layouts";
        const ABOUT: &'static str = "A matrix of -1, 0 and 1 in planes, packed2 and offset_rows";
        const INPUTS: &'static [Slot] = &[Slot::new("w", "(O, I)").exactly(DType::I8)];
        const STORAGE: &'static [DType] = crate::ops::products::ternary::STORAGE;
        const COTANGENTS: &'static [&'static str] = &[];

        type Options = Sizes;
        type Problem = Problem;

        fn check(call: &Bound<Self>) -> Result<Problem> {
            let [rows, n] = call.sizes.all("OI");
            agree("out", call.options.out, rows)?;
            agree("in", call.options.inputs, n)?;
            let grid = Grid { layout: Layout::Values, leading: vec![rows], rows, n };
            Ok(Problem { grid, dot: false })
        }

        fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
            let mut outputs = Named::default();
            for layout in [Layout::Packed2, Layout::OffsetRows, Layout::Planes] {
                problem.grid.to(layout).specs()?.into_iter().for_each(|(name, spec)| outputs.push(name, spec));
            }
            Ok(outputs)
        }

        by_steps!(problem => problem.clone());
    }

    fn steps<'a, P: Place>(
        place: &P,
        _: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        for layout in [Layout::Packed2, Layout::OffsetRows, Layout::Planes] {
            let names = layout.tensors().iter();
            let to = names.map(|&name| Ok((name, outputs.expect(name)?))).collect::<Result<_>>()?;
            let from = [("values", P::briefly(inputs.get("w")?))].into_iter().collect();
            let options = Options { to: Some(layout), ..Default::default() };
            convert(place, options, &from, to)?;
        }
        Ok(())
    }
}

/// Sentinels: cells without a value.
pub mod sentinel {
    use super::*;

    options! {
        /// The number of cells.
        #[derive(Copy)]
        pub struct Count {
            /// cells of a row of planes or packed2; all there is room for by default
            n: Option<usize> = None;
        }
    }

    /// Reads values with sentinels as 0, and counts those.
    pub struct TernarySentinel;

    impl Op for TernarySentinel {
        const NAME: &'static str = "ternary_sentinel";
        const ABOUT: &'static str = "The values of planes or packed2 with sentinels as 0, and the number of these";
        const INPUTS: &'static [Slot] = &[
            plane("packed2", "(..., P)").optional(),
            plane("plane0", "(..., P)").optional(),
            plane("plane1", "(..., P)").optional(),
        ];
        const STORAGE: &'static [DType] = crate::ops::products::ternary::STORAGE;
        const COTANGENTS: &'static [&'static str] = &[];

        type Options = Count;
        type Problem = Problem;

        fn check(call: &Bound<Self>) -> Result<Problem> {
            let (inputs, options) = (call.inputs, call.options);
            let grid = Grid::given(inputs, &Options { n: options.n, ..Default::default() })?;
            Ok(Problem { grid, dot: false })
        }

        fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
            let values = *problem.grid.to(Layout::Values).specs()?.get("values")?;
            Ok([("values_zeroed", values), ("sentinels", Spec::new(DType::I32, &[1])?)].into_iter().collect())
        }

        by_steps!(problem => problem.clone());
    }

    fn steps<'a, P: Place>(
        place: &P,
        problem: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let grid = &problem.grid;
        let options =
            Options { to: Some(Layout::Values), n: Some(grid.n), on_sentinel: OnSentinel::Zero, ..Default::default() };
        let [_, mut first] = counts(place)?;
        let to = [
            ("values", P::briefly_mut(outputs.expect("values_zeroed")?)),
            ("sentinels", P::briefly_mut(outputs.expect("sentinels")?)),
            ("first", P::view_mut(&mut first)),
        ];
        place.call::<ConvertTernary>(&options, inputs.map(P::briefly), to.into_iter().collect())
    }
}

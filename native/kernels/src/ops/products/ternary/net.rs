//! A network of two ternary layers, and the index of the largest element of a row:
//!
//! ```text
//! h = max(W1 sign(x) + b1, 0)        logits = W2 sign(h) + b2        class = place of the largest, the first on ties
//! ```
//!
//! The weights have scales only with the option `scales`. All sums are sums of integers, and each is rounded once, with
//! its bias. So the logits are equal on every device.

use super::cuda;
use super::problem::{HINT, Rows, agree, one_or, plane, plane_bytes, wrong};
use super::products::{Matmul, Options as Ends, Ternary};
use crate::base::activation::Activation;
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Described, Element, Spec, View, ViewMut};
use crate::with_type;
use ndarray::{ArrayD, Axis};

/// The index of the largest element of each row.
pub struct Argmax;

impl Op for Argmax {
    const NAME: &'static str = "argmax";
    const ABOUT: &'static str = "The place of the largest number of each row, the first on ties; NaN is never larger";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., N)")];
    const OUTPUTS: &'static [Output] = &[Output::new("class", "(...)").exactly(DType::I32)];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = op::NoOptions;
    type Problem = Rows;

    fn check(call: &Bound<Self>) -> Result<Rows> {
        let (x, n) = (call.inputs.get("x")?, call.sizes.of('N'));
        match (1..=i32::MAX as usize).contains(&n) {
            true => Ok(Rows { shape: x.shape, n, dtype: call.storage }),
            false => Err(op::wrong_shape("x", "(..., N) with at least one number in a row", x)),
        }
    }

    fn cpu(problem: &Rows, inputs: &Named<View>, mut outputs: Named<ViewMut>, _: &crate::cpu::Exec) -> Result<()> {
        let classes = outputs.expect("class")?.slice::<i32>()?;
        with_type!(problem.dtype, S => {
            let rows = inputs.get("x")?.slice::<S>()?.chunks_exact(problem.n);
            for (class, row) in classes.iter_mut().zip(rows) {
                *class = largest(row.iter().map(|value| value.to_f64()));
            }
        });
        Ok(())
    }

    fn reference(problem: &Rows, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let last = Axis(problem.shape.len() - 1);
        let classes = inputs.get("x")?.map_axis(last, |row| f64::from(largest(row.iter().copied())));
        Ok([("class", classes)].into_iter().collect())
    }

    fn cuda(problem: &Rows, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::argmax(problem, inputs, outputs, lane)
    }
}

fn largest(row: impl Iterator<Item = f64>) -> i32 {
    let mut best = (0, f64::NAN);
    for (at, value) in row.enumerate() {
        if value > best.1 || (best.1.is_nan() && !value.is_nan()) {
            best = (at, value);
        }
    }
    best.0 as i32
}

options! {
    /// The options.
    #[derive(Copy)]
    pub struct Options {
        /// multiply the integer sums by w1_scale and w2_scale
        scales: bool = false;
        /// columns of x, to check
        inputs as "in": Option<usize> = None;
        /// width of the hidden layer, to check
        hidden: Option<usize> = None;
        /// number of logits, to check
        out: Option<usize> = None;
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    leading: Vec<usize>,
    hidden: usize,
    out: usize,
}

/// The network.
pub struct SimpleRotorNet;

const LAYERS: [[&str; 4]; 2] =
    [["w1_plane0", "w1_plane1", "b1", "w1_scale"], ["w2_plane0", "w2_plane1", "b2", "w2_scale"]];

/// The output width of a layer with inputs of width `n`.
fn width(inputs: &Named<Spec>, [plane0, plane1, bias, scale]: [&str; 4], n: usize, scales: bool) -> Result<usize> {
    let plane = inputs.get(plane0)?;
    let outs = match plane.shape[..] {
        [outs, bytes] if bytes == plane_bytes(n) => outs,
        _ => return Err(wrong(plane0, &format!("(O, {})", plane_bytes(n)), plane)),
    };
    op::same_shape(inputs, plane1, &plane.shape)?;
    op::same_shape(inputs, bias, &[outs])?;
    one_or(inputs, scale, outs)?;
    if inputs.find(scale).is_some() != scales {
        let (expected, got) = if scales { ("a scale, as `scales` says", "none") } else { ("none", "a scale") };
        let error = Error::new(Kind::Argument, scale).expected(expected).got(got);
        return Err(error.hint("Sums are multiplied by scales only with the option `scales`"));
    }
    Ok(outs)
}

impl Op for SimpleRotorNet {
    const NAME: &'static str = "simple_rotor_net";
    const ABOUT: &'static str = "Two ternary layers: logits of signs, and the class with the largest";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(..., I)"),
        plane("w1_plane0", "(H, P)"),
        plane("w1_plane1", "(H, P)"),
        Slot::new("b1", "(H)").exactly(DType::F32).loose(),
        plane("w2_plane0", "(O, Q)"),
        plane("w2_plane1", "(O, Q)"),
        Slot::new("b2", "(O)").exactly(DType::F32).loose(),
        Slot::new("w1_scale", "(H|1)").exactly(DType::F32).optional().loose(),
        Slot::new("w2_scale", "(O|1)").exactly(DType::F32).optional().loose(),
    ];
    const HINT: &'static str = HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let n = call.sizes.of('I');
        let hidden = width(inputs, LAYERS[0], n, options.scales)?;
        let out = width(inputs, LAYERS[1], hidden, options.scales)?;
        agree("in", options.inputs, n)?;
        agree("hidden", options.hidden, hidden)?;
        agree("out", options.out, out)?;
        if out == 0 {
            return Err(op::wrong_shape("b2", "(O) with at least one logit", inputs.get("b2")?));
        }
        Ok(Problem { leading: call.sizes.rows().to_vec(), hidden, out })
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        op::product(&[problem.leading.iter().product(), op::elements(inputs, &["w1_plane0", "w2_plane0"])])
    }

    fn outputs(problem: &Problem, call: &Bound<Self>) -> Result<Named<Spec>> {
        let logits = Spec::new(call.storage, &[&problem.leading[..], &[problem.out]].concat())?;
        Ok([("logits", logits), ("class", Spec::new(DType::I32, &problem.leading)?)].into_iter().collect())
    }

    crate::forward_by_steps!(F32, clone);
}

/// The network as a sequence of ops.
mod steps {
    use super::*;

    /// The network on any backend.
    pub fn forward<'a, P: Place>(
        place: &P,
        problem: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let spec = |dtype, last: usize| Spec::new(dtype, &[&problem.leading[..], &[last]].concat());
        let mut logits = outputs.expect("logits")?;
        let mut h = place.empty(spec(logits.spec().dtype, problem.hidden)?)?;
        {
            let mut sums = place.empty(spec(DType::I32, problem.hidden)?)?;
            let to = [("y", P::view_mut(&mut h)), ("acc", P::view_mut(&mut sums))].into_iter().collect();
            let ends = Ends { activation: Some(Activation::Relu), return_sums: false };
            place.call::<Matmul<Ternary>>(&ends, layer::<P>(inputs, P::briefly(inputs.get("x")?), 0), to)?;
        }
        {
            let mut sums = place.empty(spec(DType::I32, problem.out)?)?;
            let to = [("y", P::reborrow(&mut logits)), ("acc", P::view_mut(&mut sums))].into_iter().collect();
            place.call::<Matmul<Ternary>>(&Ends::default(), layer::<P>(inputs, P::view(&h), 1), to)?;
        }
        let x = [("x", P::read(&logits))].into_iter().collect();
        let class = [("class", P::briefly_mut(outputs.expect("class")?))].into_iter().collect();
        place.call::<Argmax>(&Default::default(), x, class)
    }

    /// The inputs of a layer.
    fn layer<'s, 'a: 's, P: Place>(inputs: &Named<P::View<'a>>, x: P::View<'s>, which: usize) -> Named<P::View<'s>> {
        let names = ["plane0", "plane1", "bias", "w_scale"].into_iter().zip(LAYERS[which]);
        let weights = names.filter_map(|(of, name)| Some((of, P::briefly(inputs.find(name)?))));
        std::iter::once(("x", x)).chain(weights).collect()
    }
}

//! Attention of new tokens over a cache and themselves. The new keys and values are appended to the cache:
//!
//! ```text
//! keys[cached..cached + L] = k            values[cached..cached + L] = v
//! y = attention(q, keys[..cached + L], values[..cached + L])
//! ```
//!
//! Whether tokens come one by one or many at a time, the rows equal those of one causal pass over all tokens. The cache
//! is heads-first for every layout of the other tensors, so that each head's rows are contiguous.

use super::{Attention, Layout, sizes};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Slot, named};
use crate::place::Place;
use crate::place::copy_rows::CopyRows;
use crate::tensor::{DType, Described, Spec};
use crate::{options, shared_options};

shared_options! {
    cached {
        /// number of valid rows in the cache
        cached: usize = 0;
    }
}

options! {
    /// The options.
    pub struct Options {
        ..cached;
        /// scale of the scores; 1 / sqrt(W) by default
        scale: Option<f64> = None;
        /// mask later tokens
        causal: bool = true;
        /// order of axes: (B, H, L, W) or (B, L, H, W)
        layout: Layout = Layout::HeadsFirst;
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The specs of the cache's keys and values.
    pub cache: [Spec; 2],
    /// The options of attention over the cache, including the new rows.
    pub attention: super::Options,
    /// The number of rows that were filled before.
    pub cached: usize,
    /// The outputs of attention, `y` and `lse`.
    pub outputs: [Spec; 2],
}

impl Problem {
    fn in_f64(&self) -> Problem {
        let f64 = |spec: Spec| Spec { dtype: DType::F64, ..spec };
        Problem { cache: self.cache.map(f64), outputs: self.outputs.map(f64), ..self.clone() }
    }
}

fn of_cache(error: Error) -> Error {
    error.hint("New keys and values have the cache's batch, heads and width, and the length of q")
}

/// Names the cache in errors of attention, which calls its tensors `k` and `v`.
fn by_its_name(error: Error) -> Error {
    let argument = match &*error.argument {
        "k" => "keys".into(),
        "v" => "values".into(),
        _ => error.argument.clone(),
    };
    Error { argument, ..error }
}

fn no_room(room: usize, new: usize, cached: usize) -> Error {
    Error::new(Kind::Option, "cached")
        .expected(format_args!("room for {new} rows after it, of {room} in the cache"))
        .got(cached)
        .hint("Give it a larger cache")
}

/// Attention over a cache, to which the new rows are appended.
pub struct Decode;

impl Op for Decode {
    const NAME: &'static str = "decode";
    const ABOUT: &'static str = "Attention of new tokens over a cache of keys and values, which takes them in";
    const INPUTS: &'static [Slot] = &[
        // The layout determines which axes these are, so the patterns are not binding.
        Slot::new("q", "(B, H, L, W)").loose(),
        Slot::new("k", "(B, K, L, W)").loose(),
        Slot::new("v", "(B, K, L, V)").loose(),
        Slot::new("keys", "(B, K, C, W)"),
        Slot::new("values", "(B, K, C, V)"),
        Slot::new("mask", "(B|1, H|1, L|1, M|1)").mask().optional().loose(),
        Slot::new("bias", "(B|1, H|1, L|1, M|1)").wide().optional().loose(),
    ];
    const HINT: &'static str = "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, \
                              heads, width); a cache is always (batch, heads, length, width)";
    const COTANGENTS: &'static [&'static str] = &[];
    const IN_PLACE: &'static [&'static str] = &["keys", "values"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, &Options { cached, scale, causal, layout }) = (call.inputs, call.options);
        let [batch, key_heads, room, width, value_width] = call.sizes.all("BKCWV");
        let [_, _, new, _] = sizes(inputs, "q", layout)?;
        op::same_shape(inputs, "k", &super::shape(layout, [batch, key_heads, new, width])).map_err(of_cache)?;
        op::same_shape(inputs, "v", &super::shape(layout, [batch, key_heads, new, value_width])).map_err(of_cache)?;
        let most = room.checked_sub(new).filter(|&most| cached <= most);
        most.ok_or_else(|| no_room(room, new, cached))?;
        let attention = super::Options { scale, causal, layout, cache: Some(cached + new), ..Default::default() };
        let with_cache = ["q", "mask", "bias"].iter().filter_map(|&name| Some((name, *inputs.find(name)?)));
        let cache = [("k", *inputs.get("keys")?), ("v", *inputs.get("values")?)];
        let of_attention = with_cache.chain(cache).collect();
        let (_, mut outputs) = op::part::<Attention>(&of_attention, &attention).map_err(by_its_name)?;
        let outputs = [outputs.expect("y")?, outputs.expect("lse")?];
        Ok(Problem { cache: cache.map(|(_, spec)| spec), attention, cached, outputs })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let (y, keys) = (problem.outputs[0].shape, problem.cache[0].shape);
        // Only filled rows cost work; the cache's capacity is their upper bound.
        op::product(&[y.elements(), keys[1].max(keys[2])])
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let [keys, values] = problem.cache;
        Ok([("y", problem.outputs[0]), ("keys", keys), ("values", values)].into_iter().collect())
    }

    crate::forward_by_steps!();
}

/// Decoding as a sequence of steps, on any [`Place`].
mod steps {
    use super::*;

    /// Decoding: `y`, with the new rows written to `keys` and `values`.
    pub fn forward<'a, P: Place>(
        place: &P,
        problem: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let Problem { cached, ref attention, outputs: [_, lse], .. } = *problem;
        let mut cache = [outputs.expect("keys")?, outputs.expect("values")?];
        for (rows, to) in ["k", "v"].into_iter().zip(&mut cache) {
            let rows = inputs.get(rows)?;
            let spec = P::read(to).spec();
            place.copy_rows(&CopyRows::into_heads_first(rows.spec(), attention.layout, spec, cached), rows, to)?;
        }
        let mut lse = place.empty(lse)?;
        let input = |name| inputs.find(name).map(P::briefly);
        let [keys, values] = &cache;
        let given = named([
            ("q", input("q")),
            ("k", Some(P::read(keys))),
            ("v", Some(P::read(values))),
            ("mask", input("mask")),
            ("bias", input("bias")),
        ]);
        let y = P::briefly_mut(outputs.expect("y")?);
        place.call::<Attention>(attention, given, named([("y", Some(y)), ("lse", Some(P::view_mut(&mut lse)))]))
    }
}

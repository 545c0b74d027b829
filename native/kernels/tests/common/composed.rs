//! Compositions of ops that have golden values, although they are not ops themselves.

use super::Place;
use serde_json::{Value, json};
use sidewinder_kernels::op::{Named, named};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// A composition.
pub struct Composed {
    /// Its name in the manifest.
    pub name: &'static str,
    /// Whether it also accepts inputs in f64.
    pub in_f64: bool,
    /// Computes its outputs from a case's inputs and options.
    pub outputs: fn(&Place, &Named<Owned>, &Value) -> Named<Owned>,
}

macro_rules! composed {
    ($($name:ident in_f64: $in_f64:literal),* $(,)?) => {
        /// All compositions.
        pub const COMPOSED: &[Composed] =
            &[$(Composed { name: stringify!($name), in_f64: $in_f64, outputs: $name }),*];
    };
}

composed![
    memory_state in_f64: true,
    f16_convert in_f64: false,
    block_quantize in_f64: false,
    block_dequantize in_f64: false,
    block_matmul in_f64: false,
    ternary_encode in_f64: false,
    ternary_layouts in_f64: false,
    ternary_sentinel in_f64: false,
    ternary_quantize in_f64: false,
    ternary_matmul in_f64: false,
];

/// Selects tensors, each under a new name.
fn renamed(tensors: &Named<Owned>, names: &[(&str, &'static str)]) -> Named<Owned> {
    names.iter().map(|&(name, new)| (new, tensors.get(name).unwrap().clone())).collect()
}

/// The tensors of both lists.
fn both(mut first: Named<Owned>, second: Named<Owned>) -> Named<Owned> {
    second.into_iter().for_each(|(name, tensor)| first.push(name, tensor));
    first
}

/// The bytes of a tensor, reinterpreted as another type and shape.
fn seen_as(tensor: &Owned, dtype: DType, dims: &[usize]) -> Owned {
    let mut to = Owned::zeros(Spec::new(dtype, dims).unwrap());
    to.view_mut().bytes().copy_from_slice(tensor.view().bytes());
    to
}

/// Writes rows into the short bank, and all summaries into the long bank by each policy.
fn memory_state(place: &Place, given: &Named<Owned>, options: &Value) -> Named<Owned> {
    let rows = renamed(given, &[("short", "bank"), ("h", "rows")]);
    let short = place.run("write_short", json!({"start": options["cursor0"]}), &rows);
    let long = ["ring", "ema", "broadcast"].map(|policy| {
        let bank = with_summaries(place, given, options, policy);
        (format!("long_{policy}"), bank.get("bank").unwrap().clone())
    });
    both(renamed(&short, &[("bank", "short_ring")]), long.into_iter().collect())
}

fn with_summaries(place: &Place, given: &Named<Owned>, options: &Value, policy: &str) -> Named<Owned> {
    let (summaries, first) = (given.get("summaries").unwrap(), options["cursor0"].as_u64().unwrap());
    let &[count, batch, width] = &summaries.spec().shape[..] else { panic!("three axes") };
    (0..count).fold(renamed(given, &[("long_k", "bank")]), |mut bank, i| {
        let summary = summaries.view().rows(i..i + 1).unwrap().reshape(&[batch, width]).unwrap();
        bank.push("summary", summary.cast(summaries.spec().dtype));
        let options = json!({"policy": policy, "cursor": first + i as u64, "decay": options["ema_decay"]});
        place.run("write_long", options, &bank)
    })
}

/// The bits of numbers rounded to f16, and the numbers read back from them. The conversions are steps of linear
/// recurrences in f16, whose states are f32.
pub fn f16_convert(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let x = given.get("x").unwrap();
    let (shape, count) = (x.spec().shape, x.spec().shape.elements());
    let filled = |dtype, dims: &[usize], value| Owned::from_fn(Spec::new(dtype, dims).unwrap(), |_| value);
    // Adding -0 leaves every number unchanged.
    let none = -0.0;
    let step = |a, b, state| {
        let inputs = [("a", filled(DType::F16, &[1, 1, count], a)), ("b", b), ("initial_state", state)];
        place.run("linear_scan", json!({"return_state": true}), &inputs.into_iter().collect())
    };
    let rounded = step(1.0, filled(DType::F16, &[1, 1, count], none), seen_as(x, DType::F32, &[1, count]));
    let h = rounded.get("h").unwrap();
    let read = step(0.0, h.clone(), filled(DType::F32, &[1, count], none));
    let back = seen_as(read.get("last_state").unwrap(), DType::F32, &shape);
    named([("bits", Some(seen_as(h, DType::I16, &shape))), ("back", Some(back))])
}

/// For each format, the names of the bytes and of the values that are read back from them.
const FORMATS: [(&str, &str); 2] = [("q8_0", "deq8"), ("q4_0", "deq4")];

/// The bytes of `x` in a format, under the format's name.
fn quantized(place: &Place, given: &Named<Owned>, format: &'static str) -> Named<Owned> {
    renamed(&place.run("quantize", json!({"format": format}), given), &[("q", format)])
}

/// Rows quantized to both formats, and read back.
fn block_quantize(place: &Place, given: &Named<Owned>, options: &Value) -> Named<Owned> {
    let bytes = FORMATS.map(|(format, _)| quantized(place, given, format)).into_iter().reduce(both).unwrap();
    both(block_dequantize(place, &bytes, options), bytes)
}

/// Values read back from the bytes of both formats.
fn block_dequantize(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let read = FORMATS.map(|(format, back)| {
        let values = place.run("dequantize", json!({"format": format}), &renamed(given, &[(format, "q")]));
        renamed(&values, &[("x", back)])
    });
    read.into_iter().reduce(both).unwrap()
}

/// `x` in Q8_0, and its products.
fn block_matmul(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let products = [
        ("matmul_q8_q4", "w_q4_0", "y_q8_q4"),
        ("matmul_q8_q8", "w_q8_0", "y_q8_q8"),
        ("matmul_f32_q4", "w_q4_0", "y_f32_q4"),
        ("matmul_f32_q8", "w_q8_0", "y_f32_q8"),
    ];
    let x = quantized(place, &renamed(given, &[("x", "x")]), "q8_0");
    products.into_iter().fold(renamed(&x, &[("q8_0", "x_q8_0")]), |outputs, (op, w, y)| {
        let product = place.run(op, json!({}), &renamed(given, &[("x", "x"), (w, "w")]));
        both(outputs, renamed(&product, &[("y", y)]))
    })
}

/// Values in another layout.
fn converted(place: &Place, values: &Owned, layout: &str) -> Named<Owned> {
    place.run("convert_ternary", json!({"to": layout}), &named([("values", Some(values.clone()))]))
}

/// Values as planes and packed, their negatives, and their dot product with other values.
fn ternary_encode(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let (v, w) = (given.get("v").unwrap(), given.get("w").unwrap());
    let (planes, of_w) = (converted(place, v, "planes"), converted(place, w, "planes"));
    let factors = both(
        renamed(&planes, &[("plane0", "a0"), ("plane1", "a1")]),
        renamed(&of_w, &[("plane0", "b0"), ("plane1", "b1")]),
    );
    let dot = place.run("dot_ternary", json!({}), &factors);
    // Negation swaps the planes.
    let negated = renamed(&planes, &[("plane0", "negated1"), ("plane1", "negated0")]);
    let mut outputs = both(both(planes, negated), converted(place, v, "packed2"));
    outputs.push("dot_with_w", seen_as(dot.get("dot").unwrap(), DType::I32, &[1]));
    outputs
}

/// A matrix in several layouts.
fn ternary_layouts(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let layouts = ["packed2", "offset_rows", "planes"].map(|layout| converted(place, given.get("w").unwrap(), layout));
    layouts.into_iter().reduce(both).unwrap()
}

/// Conversions of cells with sentinels among them.
fn ternary_sentinel(place: &Place, given: &Named<Owned>, options: &Value) -> Named<Owned> {
    let options = json!({"to": "values", "n": options["n"], "on_sentinel": "zero"});
    let outputs = place.run("convert_ternary", options, given);
    renamed(&outputs, &[("values", "values_zeroed"), ("sentinels", "sentinels")])
}

/// A tensor quantized by every rule.
fn ternary_quantize(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let n = *given.get("w").unwrap().spec().shape.last().unwrap();
    let rules = [
        ("q_t0", "scale_t0", json!({"rule": "threshold", "threshold": 0.0})),
        ("q_t03", "scale_t03", json!({"rule": "threshold", "threshold": 0.3})),
        ("q_absmean_tensor", "scale_absmean_tensor", json!({"rule": "absmean"})),
        ("q_absmean_row", "scale_absmean_row", json!({"rule": "absmean", "per_row": true})),
        ("q_twn", "scale_twn", json!({"rule": "twn"})),
    ];
    let by_rule = rules.map(|(q, scale, options)| {
        let made = place.run("quantize_ternary", options, given);
        let planes = renamed(&made, &[("plane0", "plane0"), ("plane1", "plane1")]);
        let values = place.run("convert_ternary", json!({"to": "values", "n": n}), &planes);
        both(renamed(&values, &[("values", q)]), renamed(&made, &[("scale", scale)]))
    });
    by_rule.into_iter().reduce(both).unwrap()
}

/// All products with one matrix, and their sums.
fn ternary_matmul(place: &Place, given: &Named<Owned>, _: &Value) -> Named<Owned> {
    let signs = renamed(given, &[("x", "x"), ("plane0", "plane0"), ("plane1", "plane1")]);
    let products = [
        renamed(
            &place.run("matmul_i8_ternary", json!({"return_sums": true}), given),
            &[("xq", "xq"), ("x_scale", "x_scale"), ("acc", "acc_i8"), ("y", "y_i8")],
        ),
        renamed(&place.run("matmul_ternary", json!({}), &signs), &[("acc", "acc_ternary")]),
        renamed(&place.run("matmul_f32_ternary", json!({}), given), &[("y", "y_f32")]),
    ];
    products.into_iter().reduce(both).unwrap()
}

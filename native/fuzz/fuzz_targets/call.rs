//! Calls of all ops: each is an error, or gives outputs of the promised shapes on every level. Calls from Elixir take
//! the same path: names, types, sizes, bytes at any address, options by name.
//!
//! A call starts out valid, with shapes from the op's own declaration, and is then damaged slightly: random calls alone
//! would rarely get past the first check.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, About, AnyOp, Configured, Named, Pattern, Sizes, Slot, Takes};
use sidewinder_kernels::ops::OPS;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};

#[derive(Arbitrary, Debug)]
struct Call {
    op: u8,
    dtype: u8,
    sizes: [u8; 8],
    inputs: Vec<Input>,
    damages: [Option<(u8, Damage)>; 2],
    options: String,
    flags: u8,
    words: u8,
    threads: u8,
}

/// Which of its declared shapes an input has, and whether it is absent.
#[derive(Arbitrary, Debug, Clone, Copy, Default)]
struct Input {
    alternative: u8,
    absent: bool,
}

#[derive(Arbitrary, Debug)]
enum Damage {
    Size { axis: u8, size: usize },
    Rank { longer: bool },
    Type(u8),
    Bytes { shorter: u8, from: u8 },
    Gone,
    Unknown,
}

/// The size of each letter of the declared shapes; some letters must divide others.
fn size(call: &Call, letter: char) -> usize {
    let group = call.sizes[0] as usize % 4;
    match letter {
        'G' => group,
        'D' => group * (call.sizes[1] as usize % 8),
        // Rows of whole quantization blocks.
        'I' | 'N' if call.flags > 127 => 32 * (call.sizes[2] as usize % 4),
        'Q' => 306 * (call.sizes[2] as usize % 3),
        letter => call.sizes[2 + letter as usize % 6] as usize % 12,
    }
}

/// One of the slot's shapes; `None` where these sizes make an invalid one.
fn shape(call: &Call, slot: &Slot, input: Input) -> Option<Vec<usize>> {
    let alternatives: Vec<&str> = slot.shape.words.split(" | ").collect();
    let pattern = Pattern::new(alternatives[input.alternative as usize % alternatives.len()]);
    let rows = vec![size(call, 'B'); call.sizes[2] as usize % 3];
    let mut dims = Sizes::given(|letter| size(call, letter), &rows).shape(&pattern)?;
    let axes = pattern.axes().iter().rev().zip(dims.iter_mut().rev());
    for (_, size) in axes.filter(|(axis, _)| axis.or_one && call.flags % 2 == 1) {
        *size = 1;
    }
    Some(dims)
}

struct Tensor {
    name: &'static str,
    dtype: DType,
    dims: Vec<usize>,
    shorter: usize,
    from: usize,
}

fn damage(tensors: &mut Vec<Tensor>, at: usize, damage: &Damage) {
    if tensors.is_empty() {
        return;
    }
    let at = at % tensors.len();
    let tensor = &mut tensors[at];
    match *damage {
        Damage::Size { axis, size } if !tensor.dims.is_empty() => {
            let axis = axis as usize % tensor.dims.len();
            tensor.dims[axis] = size;
        }
        Damage::Size { .. } => {}
        Damage::Rank { longer: true } => tensor.dims.push(1),
        Damage::Rank { longer: false } => drop(tensor.dims.pop()),
        Damage::Type(dtype) => tensor.dtype = DType::ALL[dtype as usize % DType::ALL.len()],
        Damage::Bytes { shorter, from } => (tensor.shorter, tensor.from) = (shorter as usize, from as usize),
        Damage::Gone => drop(tensors.remove(at)),
        Damage::Unknown => tensor.name = "unknown",
    }
}

fn tensors(op: &About, call: &Call) -> Option<Vec<Tensor>> {
    let storage = op.storage[call.dtype as usize % op.storage.len()];
    let inputs = call.inputs.iter().copied().chain(std::iter::repeat(Input::default()));
    let present = op.inputs.iter().zip(inputs).filter(|(slot, input)| !(slot.optional && input.absent));
    let tensor = |(slot, input): (&Slot, Input)| {
        let (dtype, dims) = (slot.precision.dtype(storage), shape(call, slot, input)?);
        Some(Tensor { name: slot.name, dtype, dims, shorter: 0, from: 0 })
    };
    let mut tensors = present.map(tensor).collect::<Option<Vec<_>>>()?;
    for (at, what) in call.damages.iter().flatten() {
        damage(&mut tensors, *at as usize, what);
    }
    Some(tensors)
}

/// The op with options parsed from text, or else with arbitrary values for its own flags and choices.
fn configured(op: &dyn AnyOp, call: &Call) -> Configured {
    let known = || {
        let (mut flags, mut words) = (call.flags, call.words);
        let values = op.options().into_iter().filter_map(|option| {
            let value = match option.takes {
                Takes::Flag => Value::from(next(&mut flags, 1) == 1),
                Takes::Text(words_of) => {
                    Value::from(*words_of.get(next(&mut words, 3) as usize % (words_of.len() + 1))?)
                }
                _ => return None,
            };
            Some((option.doc.name, value))
        });
        with(op, values.collect()).expect("known options")
    };
    serde_json::from_str(&call.options).ok().and_then(|options| with(op, options)).unwrap_or_else(known)
}

/// Returns the lowest `bits` bits, and rotates them to the top.
fn next(from: &mut u8, bits: u32) -> u8 {
    let value = *from;
    *from = from.rotate_right(bits);
    value & ((1 << bits) - 1)
}

fn with(op: &dyn AnyOp, options: Value) -> Option<Configured> {
    op.with(&mut <dyn erased_serde::Deserializer>::erase(options)).ok()
}

/// Small enough to compute.
fn small(spec: &Spec) -> bool {
    spec.shape.elements() <= 1 << 13
}

fn run(op: &dyn AnyOp, call: &Call) {
    let Some(tensors) = tensors(op.about(), call) else { return };
    let mut memory = Vec::new();
    for (i, tensor) in tensors.iter().enumerate() {
        match Spec::new(tensor.dtype, &tensor.dims) {
            Ok(spec) if small(&spec) => {
                memory.push(Owned::from_fn(spec, |k| (k * 37 % 101) as f64 / 50.0 - i as f64 / 8.0))
            }
            _ => return,
        }
    }
    let mut views: Named<View> = Named::default();
    for (tensor, memory) in tensors.iter().zip(&memory) {
        let bytes = memory.view().bytes();
        let end = bytes.len().saturating_sub(tensor.shorter);
        let Ok(view) = View::new(memory.spec(), &bytes[tensor.from.min(end)..end]) else { return };
        views.push(tensor.name, view);
    }
    let Ok(checked) = configured(op, call)(op::specs(&views)) else { return };
    if checked.outputs().iter().all(|(_, spec)| small(spec)) {
        on_every_level(&checked, &views, call.threads as usize % 9 + 1);
    }
}

fn on_every_level(call: &op::Call, views: &Named<View>, threads: usize) {
    let levels = Level::available();
    let refusals = levels.iter().filter_map(|&level| {
        let exec = Exec { level, threads };
        let run = |mut to: Named<Owned>| {
            let writes = to.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
            call.cpu(views, writes, &exec).map(|()| to)
        };
        let poisoned = run(call.outputs().map(|spec| Owned::poisoned(*spec)));
        let zeroed = run(call.outputs().map(|spec| Owned::from_fn(*spec, |_| 0.0)));
        match (poisoned, zeroed) {
            (Ok(poisoned), Ok(zeroed)) => {
                let mut pairs = poisoned.iter().zip(zeroed.iter());
                let same = pairs.all(|((_, a), (_, b))| a.view().bytes() == b.view().bytes());
                assert!(same, "an output was not written on {level:?}");
                None
            }
            // Values that an op refuses when it runs.
            (Err(error), Err(again)) if error.kind == Kind::Argument && error == again => Some(error),
            _ => panic!("a checked call failed on {level:?}"),
        }
    });
    let refusals: Vec<_> = refusals.collect();
    assert!(refusals.is_empty() || refusals.len() == levels.len(), "not every level refuses: {refusals:?}");
    assert!(refusals.iter().all(|error| *error == refusals[0]), "{refusals:?}");
}

fuzz_target!(|call: Call| {
    run(OPS[call.op as usize % OPS.len()], &call);
});

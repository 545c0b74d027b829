//! Declarations of inputs and outputs as constants.

use super::Pattern;
use crate::tensor::DType;

/// How an input's element type depends on the storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The storage type itself.
    Storage,
    /// The type of the arithmetic: f32, or f64 for f64 storage.
    Wide,
    /// Bytes, where any number but 0 is true. A mask has no gradient.
    Mask,
    /// This type, whatever the storage type is. Such an input has no gradient.
    Exactly(DType),
}

impl Precision {
    /// Its name in other languages.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Storage => "storage",
            Precision::Wide => "wide",
            Precision::Mask => "mask",
            Precision::Exactly(dtype) => dtype.name(),
        }
    }

    /// The element type of a tensor of this precision for a storage type.
    pub fn dtype(self, storage: DType) -> DType {
        match self {
            Precision::Storage => storage,
            Precision::Wide => storage.wide(),
            Precision::Mask => DType::U8,
            Precision::Exactly(dtype) => dtype,
        }
    }

    /// Whether inputs of this precision have gradients.
    pub fn is_differentiable(self) -> bool {
        matches!(self, Precision::Storage | Precision::Wide)
    }
}

/// One input of an op.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The name of the tensor in calls and files.
    pub name: &'static str,
    /// The shapes that it may have.
    pub shape: Pattern,
    /// How its element type depends on the storage type.
    pub precision: Precision,
    /// Whether it may be absent.
    pub optional: bool,
    /// Whether the pattern only documents the usual shape, and the op checks the shape itself.
    pub loose: bool,
    /// The name of its gradient: a buffer, and the number of bytes used.
    gradient: ([u8; 32], usize),
}

/// The name with a `d` before it.
const fn with_d(name: &str) -> ([u8; 32], usize) {
    let (mut bytes, mut i) = ([b'd'; 32], 0);
    while i < name.len() {
        bytes[i + 1] = name.as_bytes()[i];
        i += 1;
    }
    (bytes, i + 1)
}

impl Slot {
    /// A required input of the storage type whose shape is the pattern `words`.
    pub const fn new(name: &'static str, words: &'static str) -> Slot {
        Slot::of(name, Pattern::new(words), Precision::Storage, false)
    }

    const fn of(name: &'static str, shape: Pattern, precision: Precision, optional: bool) -> Slot {
        Slot { name, shape, precision, optional, loose: false, gradient: with_d(name) }
    }

    /// The name of its gradient: a `d` before its own.
    pub fn gradient(&'static self) -> &'static str {
        std::str::from_utf8(&self.gradient.0[..self.gradient.1]).expect("a `d` and a name")
    }

    /// This slot, stored in the type of the arithmetic.
    pub const fn wide(mut self) -> Slot {
        self.precision = Precision::Wide;
        self
    }

    /// This slot as a mask: bytes, where any number but 0 is true.
    pub const fn mask(mut self) -> Slot {
        self.precision = Precision::Mask;
        self
    }

    /// This slot, stored as `dtype`.
    pub const fn exactly(mut self, dtype: DType) -> Slot {
        self.precision = Precision::Exactly(dtype);
        self
    }

    /// This slot, whose shape the op checks itself.
    pub const fn loose(mut self) -> Slot {
        self.loose = true;
        self
    }

    /// This slot, which may be absent.
    pub const fn optional(mut self) -> Slot {
        self.optional = true;
        self
    }
}

/// Concatenates two lists of slots; `N` is their total number.
pub const fn slots<const N: usize>(first: &[Slot], more: &[Slot]) -> [Slot; N] {
    assert!(first.len() + more.len() == N, "as many as there are");
    let mut all = [first[0]; N];
    let mut i = 0;
    while i < N {
        all[i] = if i < first.len() { first[i] } else { more[i - first.len()] };
        i += 1;
    }
    all
}

/// The slots of a gradient by their names: inputs of the op, its outputs, and cotangents, which have an output's name
/// with a `d` before it. Cotangents of outputs that are optional are optional too.
pub const fn given<const N: usize>(inputs: &[Slot], outputs: &[Output], names: [&'static str; N]) -> [Slot; N] {
    let mut slots = [inputs[0]; N];
    let mut i = 0;
    while i < N {
        slots[i] = one_given(inputs, outputs, names[i]);
        i += 1;
    }
    slots
}

const fn one_given(inputs: &[Slot], outputs: &[Output], name: &'static str) -> Slot {
    let mut i = 0;
    while i < inputs.len() {
        if is(name, 0, inputs[i].name) {
            return inputs[i];
        }
        i += 1;
    }
    let mut i = 0;
    while i < outputs.len() {
        let Output { name: output, shape, precision, when } = outputs[i];
        let is_cotangent = name.as_bytes()[0] == b'd' && is(name, 1, output);
        if is_cotangent || is(name, 0, output) {
            let optional = is_cotangent && !matches!(when, When::Always);
            return Slot::of(name, shape, precision, optional);
        }
        i += 1;
    }
    panic!("a gradient takes inputs, outputs and cotangents")
}

/// Whether `name` without its first `skip` bytes equals `other`.
const fn is(name: &str, skip: usize, other: &str) -> bool {
    let (name, other) = (name.as_bytes(), other.as_bytes());
    let mut i = 0;
    while i < other.len() && skip + i < name.len() && name[skip + i] == other[i] {
        i += 1;
    }
    i == other.len() && name.len() == skip + i
}

/// One output of an op.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The name of the tensor in calls and files.
    pub name: &'static str,
    /// Its shape in the letters of the inputs.
    pub shape: Pattern,
    /// How its element type depends on the storage type.
    pub precision: Precision,
    /// Which calls give it.
    pub when: When,
}

/// Which calls give an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All calls.
    Always,
    /// Those where this option is set.
    Asked(&'static str),
    /// Those where this option is not set.
    Unless(&'static str),
}

impl Output {
    /// An output of the storage type that every call gives, whose shape is the pattern `words`.
    pub const fn new(name: &'static str, words: &'static str) -> Output {
        Output { name, shape: Pattern::new(words), precision: Precision::Storage, when: When::Always }
    }

    /// This output, in the type of the arithmetic.
    pub const fn wide(mut self) -> Output {
        self.precision = Precision::Wide;
        self
    }

    /// This output, stored as `dtype`.
    pub const fn exactly(mut self, dtype: DType) -> Output {
        self.precision = Precision::Exactly(dtype);
        self
    }

    /// This output, given only where the flag `option` is set.
    pub const fn asked_by(mut self, option: &'static str) -> Output {
        self.when = When::Asked(option);
        self
    }

    /// This output, given only where the flag `option` is not set.
    pub const fn unless(mut self, option: &'static str) -> Output {
        self.when = When::Unless(option);
        self
    }
}

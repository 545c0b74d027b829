//! What ops say about their inputs and options.

use crate::tensor::DType;

/// How an input's element type follows from the one that the caller chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The storage type itself.
    Storage,
    /// The type of the arithmetic: f32, or f64 for f64 storage.
    Wide,
    /// Bytes, where any number but 0 is true. It has no gradient.
    Mask,
    /// This type, whatever the storage type is. It has no gradient.
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

    /// The element type that a tensor of this precision has beside `storage`.
    pub fn dtype(self, storage: DType) -> DType {
        match self {
            Precision::Storage => storage,
            Precision::Wide => storage.wide(),
            Precision::Mask => DType::U8,
            Precision::Exactly(dtype) => dtype,
        }
    }

    /// Whether inputs of it have gradients.
    pub fn is_differentiable(self) -> bool {
        matches!(self, Precision::Storage | Precision::Wide)
    }
}

/// One input of an op, as its documentation and its checks see it.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The name in files and maps.
    pub name: &'static str,
    /// Its allowed shapes in words, such as `(B, L, D)`.
    pub shape: &'static str,
    /// How its element type relates to the storage type.
    pub precision: Precision,
    /// Whether it may be absent.
    pub optional: bool,
}

impl Slot {
    /// A required input of the storage type.
    pub const fn new(name: &'static str, shape: &'static str) -> Slot {
        Slot { name, shape, precision: Precision::Storage, optional: false }
    }

    /// This slot, stored in the type of the arithmetic.
    pub const fn wide(mut self) -> Slot {
        self.precision = Precision::Wide;
        self
    }

    /// This slot as a mask, stored as bytes that mean yes or no.
    pub const fn mask(mut self) -> Slot {
        self.precision = Precision::Mask;
        self
    }

    /// This slot, stored as `dtype`.
    pub const fn exactly(mut self, dtype: DType) -> Slot {
        self.precision = Precision::Exactly(dtype);
        self
    }

    /// This slot, which may be absent.
    pub const fn optional(mut self) -> Slot {
        self.optional = true;
        self
    }
}

/// The slots of both lists, `N` together.
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

/// One option of an op, for its documentation and for the command line.
#[derive(Clone, Copy, Debug)]
pub struct OptionDoc {
    /// The name in maps; on the command line with dashes.
    pub name: &'static str,
    /// What values it takes: `flag`, `pair`, `integer`, `float` or `text`.
    pub takes: &'static str,
    /// What it does and its default, in a line.
    pub help: &'static str,
}

//! The element types of ggml, by their numbers in files.

use sidewinder_kernels::tensor::DType;
use std::fmt;

/// An element type: blocks of `block` values of a row, stored in `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type {
    /// Its number in files.
    pub id: u32,
    /// Its name, such as `Q4_0`; empty if unknown.
    pub name: &'static str,
    /// Values per block: 1 for plain numbers, 0 for unknown types.
    pub block: usize,
    /// Bytes per block, or 0 for unknown types.
    pub bytes: usize,
}

impl Type {
    /// The type with this number, which may be unknown.
    pub fn of(id: u32) -> Type {
        let name = || FOREIGN.iter().find(|(foreign, _)| *foreign == id).map_or("", |(_, name)| name);
        TYPES.iter().find(|kind| kind.id == id).copied().unwrap_or_else(|| kind(id, name(), 0, 0))
    }

    /// Whether the sizes of its blocks are known.
    pub fn is_known(&self) -> bool {
        self.block > 0
    }

    /// The equivalent [`DType`] of a type of plain numbers, if there is one.
    pub fn plain(&self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(self.name))
    }

    /// Whether it is one of the block formats with kernels in this crate.
    pub fn is_ours(&self) -> bool {
        ["Q8_0", "Q4_0"].contains(&self.name)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name, self.is_known()) {
            (name, true) => f.write_str(name),
            ("", false) => write!(f, "type {}", self.id),
            (name, false) => write!(f, "type {} ({name})", self.id),
        }
    }
}

const fn kind(id: u32, name: &'static str, block: usize, bytes: usize) -> Type {
    Type { id, name, block, bytes }
}

/// Types that ggml has removed, and types of other programs that write the format: bitnet.cpp from 36 on, ik_llama.cpp
/// from 97. The sizes of their blocks are not known here.
const FOREIGN: [(u32, &str); 19] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "I2_S"),
    (37, "I8_S"),
    (38, "TL1"),
    (97, "Q8_0_X4"),
    (98, "Q8_1_X4"),
    (133, "Q6_0"),
    (134, "IQ1_BN"),
    (135, "IQ2_BN"),
    (136, "Q8_K64"),
    (137, "IQ2_K"),
    (138, "IQ3_K"),
    (139, "IQ4_K"),
    (140, "IQ5_K"),
    (141, "IQ6_K"),
];

/// From ggml's `ggml_type` and the sizes of its block structs.
const TYPES: [Type; 34] = [
    kind(0, "F32", 1, 4),
    kind(1, "F16", 1, 2),
    kind(2, "Q4_0", 32, 18),
    kind(3, "Q4_1", 32, 20),
    kind(6, "Q5_0", 32, 22),
    kind(7, "Q5_1", 32, 24),
    kind(8, "Q8_0", 32, 34),
    kind(9, "Q8_1", 32, 36),
    kind(10, "Q2_K", 256, 84),
    kind(11, "Q3_K", 256, 110),
    kind(12, "Q4_K", 256, 144),
    kind(13, "Q5_K", 256, 176),
    kind(14, "Q6_K", 256, 210),
    kind(15, "Q8_K", 256, 292),
    kind(16, "IQ2_XXS", 256, 66),
    kind(17, "IQ2_XS", 256, 74),
    kind(18, "IQ3_XXS", 256, 98),
    kind(19, "IQ1_S", 256, 50),
    kind(20, "IQ4_NL", 32, 18),
    kind(21, "IQ3_S", 256, 110),
    kind(22, "IQ2_S", 256, 82),
    kind(23, "IQ4_XS", 256, 136),
    kind(24, "I8", 1, 1),
    kind(25, "I16", 1, 2),
    kind(26, "I32", 1, 4),
    kind(27, "I64", 1, 8),
    kind(28, "F64", 1, 8),
    kind(29, "IQ1_M", 256, 56),
    kind(30, "BF16", 1, 2),
    kind(34, "TQ1_0", 256, 54),
    kind(35, "TQ2_0", 256, 66),
    kind(39, "MXFP4", 32, 17),
    kind(40, "NVFP4", 64, 36),
    kind(41, "Q1_0", 128, 18),
];

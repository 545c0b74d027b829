//! GGUF files built by hand and damaged at random, for tests with seeded numbers and for fuzzing.

use sidewinder_files::gguf::{Reader, Value};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::Described;
use std::path::Path;

/// A tensor's description: its name, its sizes innermost first, the number of its type, the offset of its data.
pub type Info = (&'static str, Vec<u64>, u32, u64);

/// A file in parts.
#[derive(Clone)]
pub struct Parts {
    pub version: u32,
    /// Name, number of the type, bytes.
    pub keys: Vec<(&'static str, u32, Vec<u8>)>,
    pub infos: Vec<Info>,
    pub alignment: usize,
    pub data: usize,
}

/// A string in the encoding of files.
pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// An array of `count` values of a type.
pub fn array(kind: u32, count: u64, values: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes(), values].concat()
}

/// A file with a value of every type, arrays in arrays, and a tensor of each type that can be read.
pub fn whole() -> Parts {
    let nested = array(9, 2, &[array(1, 3, &[1, 255, 3]), array(8, 1, &text("é"))].concat());
    let keys = vec![
        ("u8", 0, vec![200]),
        ("i8", 1, vec![156]),
        ("u16", 2, 60000u16.to_le_bytes().to_vec()),
        ("i16", 3, (-30000i16).to_le_bytes().to_vec()),
        ("u32", 4, u32::MAX.to_le_bytes().to_vec()),
        ("i32", 5, i32::MIN.to_le_bytes().to_vec()),
        ("f32", 6, 0.5f32.to_le_bytes().to_vec()),
        ("bool", 7, vec![1]),
        ("string", 8, text("a text")),
        ("array", 9, nested),
        ("empty", 9, array(4, 0, &[])),
        ("bools", 9, array(7, 2, &[0, 1])),
        ("u64", 10, u64::MAX.to_le_bytes().to_vec()),
        ("i64", 11, i64::MIN.to_le_bytes().to_vec()),
        ("f64", 12, f64::INFINITY.to_le_bytes().to_vec()),
        ("general.alignment", 4, 64u32.to_le_bytes().to_vec()),
    ];
    let infos = vec![
        ("f32", vec![3, 2], 0, 0),
        ("f16", vec![5], 1, 64),
        ("bf16", vec![1, 1, 2], 30, 128),
        ("q8_0", vec![32, 2], 8, 192),
        ("q4_0", vec![64, 1], 2, 320),
        ("none", vec![0, 4], 0, 320),
        ("one", vec![], 28, 384),
        ("i8", vec![2], 24, 448),
        ("q4_k", vec![256], 12, 512),
    ];
    Parts { version: 3, keys, infos, alignment: 64, data: 656 }
}

impl Parts {
    /// The bytes of the file; bytes of data are ascending numbers.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.infos.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        for (name, kind, value) in &self.keys {
            bytes.extend([&text(name)[..], &kind.to_le_bytes(), value].concat());
        }
        for (name, dims, kind, offset) in &self.infos {
            bytes.extend([&text(name)[..], &(dims.len() as u32).to_le_bytes()].concat());
            dims.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
            bytes.extend([&kind.to_le_bytes()[..], &offset.to_le_bytes()].concat());
        }
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend((0..self.data).map(|i| i as u8));
        bytes
    }
}

/// A source of random numbers below a limit.
pub type Chance<'c> = dyn FnMut(usize) -> usize + 'c;

/// A valid file with random damage, to its descriptions or to any byte.
pub fn damaged(chance: &mut Chance) -> Vec<u8> {
    const NUMBERS: [u64; 10] = [0, 1, 31, 33, 64, 1 << 20, 1 << 31, 1 << 40, 1 << 60, u64::MAX];
    let mut parts = whole();
    let (key, info) = (chance(parts.keys.len()), chance(parts.infos.len()));
    match chance(10) {
        0 => parts.keys[key].1 = chance(15) as u32,
        1 => parts.keys[key].0 = parts.keys[0].0,
        2 => parts.infos[info].0 = parts.infos[0].0,
        3 => parts.infos[info].1.push(NUMBERS[chance(10)]),
        4 => parts.infos[info].1 = vec![NUMBERS[chance(10)], NUMBERS[chance(10)]],
        5 => parts.infos[info].2 = chance(45) as u32,
        6 => parts.infos[info].3 = NUMBERS[chance(10)],
        7 => parts.version = chance(5) as u32,
        8 => parts.keys[15].2 = (1u32 << chance(32)).to_le_bytes().to_vec(),
        _ => {}
    }
    let mut bytes = parts.bytes();
    for _ in 0..chance(3) {
        let at = chance(bytes.len());
        match chance(5) {
            0 => bytes.truncate(at + 1),
            1 => bytes.insert(at, chance(256) as u8),
            2 => drop(bytes.remove(at)),
            3 => bytes[at] ^= 1 << chance(8),
            _ => bytes[at] = chance(256) as u8,
        }
    }
    bytes
}

/// Number of scalars in a value, including those of nested arrays.
pub fn count(value: Value) -> usize {
    match value {
        Value::Array(array) => array.iter().map(count).sum(),
        _ => 1,
    }
}

/// Reads everything in a file and compares it with the file's bytes.
pub fn read(path: &Path, bytes: &[u8]) -> Result<()> {
    let reader = Reader::open(path)?;
    assert!(reader.metadata().map(|(_, value)| count(value)).sum::<usize>() <= bytes.len());
    for entry in reader.entries() {
        let own = &bytes[entry.offset as usize..][..entry.len];
        match reader.tensor(entry) {
            Ok(tensor) => {
                assert_eq!(tensor.spec().bytes(), entry.len);
                assert_eq!(tensor.view().bytes(), own);
            }
            Err(error) => assert!(entry.kind.plain().is_none() && error.kind == Kind::DType, "{error}"),
        }
    }
    Ok(())
}

/// Whether an error is about the file and has a readable text.
pub fn is_fair(error: &Error) -> bool {
    let text = error.to_string();
    error.kind == Kind::File && !error.argument.is_empty() && !error.expected.is_empty() && text.len() < 2000
}

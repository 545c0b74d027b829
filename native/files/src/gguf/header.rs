//! The header of a file: metadata and descriptions of tensors, parsed from a prefix of the file.

use super::types::Type;
use crate::recognise::GGUF;
use sidewinder_kernels::error::{Error, Kind};
use std::collections::HashSet;

/// The deepest nesting of arrays.
const MAX_DEPTH: usize = 4;
/// The most axes of a tensor in ggml.
const MAX_AXES: u32 = 4;
/// The alignment of the data if the metadata gives none.
const ALIGNMENT: u64 = 32;

/// Why parsing stopped.
pub enum Stop {
    /// The header continues past the bytes that have been read.
    More,
    /// The header is invalid.
    Wrong(Error),
}

type Parsed<T> = Result<T, Stop>;

fn wrong<T>(expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Parsed<T> {
    Err(Stop::Wrong(Error::new(Kind::File, "").expected(expected).got(got)))
}

/// A metadata value. Strings are bytes, because the format does not guarantee UTF-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A float of either width.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(&'a [u8]),
    /// An array of values of one type.
    Array(Array<'a>),
}

/// A metadata array, as stored in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    kind: u32,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its values.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (kind, mut cursor) = (self.kind, Cursor::new(self.bytes, 0, self.bytes.len() as u64));
        (0..self.len).map(move |_| cursor.parsed(kind))
    }
}

/// A metadata value by its offset in the header.
pub struct Key {
    pub name: String,
    kind: u32,
    at: usize,
}

impl Key {
    /// Reads the value from `header`, which must be the header that this key was parsed from.
    pub fn value<'a>(&self, header: &'a [u8]) -> Value<'a> {
        Cursor::new(header, self.at, header.len() as u64).parsed(self.kind)
    }
}

/// The description of a tensor.
pub struct Info {
    pub name: String,
    pub kind: Type,
    /// Outermost first; files store the innermost first.
    pub shape: Vec<usize>,
    /// Relative to the start of the data.
    pub offset: u64,
}

/// A header.
pub struct Header {
    pub version: u32,
    pub keys: Vec<Key>,
    pub infos: Vec<Info>,
    pub alignment: u64,
    /// Length of the header in bytes.
    pub len: usize,
}

impl Header {
    /// Parses the header from the first bytes of a file of `size` bytes.
    pub fn parse(bytes: &[u8], size: u64) -> Parsed<Header> {
        let mut cursor = Cursor::new(bytes, 0, size);
        let version = cursor.version()?;
        let (tensors, keys) = (cursor.u64()?, cursor.u64()?);
        let keys = cursor.many(keys, Cursor::key, |key| &key.name, "the metadata's keys")?;
        let alignment = alignment(&keys, bytes)?;
        let infos = cursor.many(tensors, Cursor::info, |info| &info.name, "the tensors' names")?;
        Ok(Header { version, keys, infos, alignment, len: cursor.at })
    }
}

fn alignment(keys: &[Key], bytes: &[u8]) -> Parsed<u64> {
    let Some(key) = keys.iter().find(|key| key.name == "general.alignment") else { return Ok(ALIGNMENT) };
    match key.value(bytes) {
        Value::Unsigned(alignment) if alignment.is_power_of_two() => Ok(alignment),
        other => wrong("a power of two as general.alignment", format_args!("{other:?}")),
    }
}

/// The bytes of a value, for types of fixed width.
fn width(kind: u32) -> Option<usize> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Size of the whole file in bytes.
    size: u64,
}

impl<'a> Cursor<'a> {
    fn new(bytes: &'a [u8], at: usize, size: u64) -> Self {
        Cursor { bytes, at, size }
    }

    fn take(&mut self, count: u64) -> Parsed<&'a [u8]> {
        let left = self.size - self.at as u64;
        if count > left {
            return wrong(
                format_args!("{count} bytes at byte {}", self.at),
                format_args!("a file that ends after {left} of them"),
            );
        }
        let taken = self.bytes[self.at..].get(..count as usize).ok_or(Stop::More)?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        Ok(self.take(N as u64)?.try_into().expect("as many as were taken"))
    }

    fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Parsed<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn version(&mut self) -> Parsed<u32> {
        let magic: [u8; 4] = self.array()?;
        if &magic != b"GGUF" {
            return wrong(GGUF, format_args!("the first bytes {magic:02x?}"));
        }
        let version = self.u32()?;
        let hint = match version {
            2 | 3 => return Ok(version),
            // Only the wrong byte order can make it this large.
            v if v & 0xffff == 0 => "It is of the other byte order: convert it with gguf_convert_endian.py of gguf-py",
            1 => "Old files have to be made anew: no tool of today reads them",
            _ => "",
        };
        let error = Error::new(Kind::File, "").expected("version 2 or 3 of GGUF, little-endian");
        Err(Stop::Wrong(error.got(format_args!("version {version:#x}")).hint(hint)))
    }

    /// Reads `count` items, whose names must be distinct.
    fn many<T>(
        &mut self,
        count: u64,
        one: impl Fn(&mut Self) -> Parsed<T>,
        name: impl Fn(&T) -> &String,
        what: &str,
    ) -> Parsed<Vec<T>> {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(one(self)?);
        }
        let mut names = HashSet::new();
        match all.iter().find(|thing| !names.insert(name(thing))) {
            Some(twice) => wrong(format_args!("{what} to differ"), format_args!("`{}` twice", name(twice))),
            None => Ok(all),
        }
    }

    fn bytes(&mut self) -> Parsed<&'a [u8]> {
        let count = self.u64()?;
        self.take(count)
    }

    fn name(&mut self) -> Parsed<String> {
        let at = self.at;
        match std::str::from_utf8(self.bytes()?) {
            Ok(name) => Ok(name.to_string()),
            Err(e) => wrong(format_args!("a name in UTF-8 at byte {at}"), e),
        }
    }

    fn key(&mut self) -> Parsed<Key> {
        let (name, kind) = (self.name()?, self.u32()?);
        let at = self.at;
        self.value(kind, 0)?;
        Ok(Key { name, kind, at })
    }

    fn value(&mut self, kind: u32, depth: usize) -> Parsed<Value<'a>> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.truth()?),
            8 => Value::Text(self.bytes()?),
            9 => Value::Array(self.values(depth)?),
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return wrong(format_args!("a type of values from 0 to 12 before byte {}", self.at), kind),
        })
    }

    fn truth(&mut self) -> Parsed<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => wrong(format_args!("0 or 1 as a truth value before byte {}", self.at), other),
        }
    }

    fn values(&mut self, depth: usize) -> Parsed<Array<'a>> {
        if depth == MAX_DEPTH {
            return wrong(format_args!("arrays at most {MAX_DEPTH} deep at byte {}", self.at), "one more");
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        let start = self.at;
        match width(kind) {
            None if !matches!(kind, 8 | 9) => return wrong(format_args!("a type of values before byte {start}"), kind),
            // Values are inspected one by one only if not all bit patterns are valid.
            Some(width) if kind != 7 => drop(self.take(count.saturating_mul(width as u64))?),
            _ => {
                for _ in 0..count {
                    self.value(kind, depth + 1)?;
                }
            }
        }
        // Each value takes at least one byte, so the count fits into usize.
        Ok(Array { kind, len: count as usize, bytes: &self.bytes[start..self.at] })
    }

    /// Reads a value of a header that has been parsed in full, and so is known to be valid.
    fn parsed(&mut self, kind: u32) -> Value<'a> {
        self.value(kind, 0).unwrap_or_else(|_| unreachable!("the whole header has been parsed before"))
    }

    fn info(&mut self) -> Parsed<Info> {
        let (name, axes) = (self.name()?, self.u32()?);
        if axes > MAX_AXES {
            return wrong(format_args!("at most {MAX_AXES} axes of `{name}`"), axes);
        }
        let mut shape = Vec::new();
        for _ in 0..axes {
            // No machine with a smaller usize has memory for a larger axis.
            shape.insert(0, usize::try_from(self.u64()?).unwrap_or(usize::MAX));
        }
        let (kind, offset) = (Type::of(self.u32()?), self.u64()?);
        Ok(Info { name, kind, shape, offset })
    }
}

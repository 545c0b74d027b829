//! GGUF files, versions 2 and 3, read one tensor at a time.
//!
//! The format is that of ggml's `docs/gguf.md`, read as strictly as ggml's own reader does. Names are distinct, offsets
//! are aligned, and all data lies in the file. No two tensors may overlap: no writer makes such a file, and one of the
//! two would be wrong. As with safetensors, tensors are read by position, not mapped. Tensors of types that only forks
//! of ggml define are listed too; the size of their data is unknown, so its upper bound, the distance to the next
//! tensor, is reported.

mod header;
mod types;

pub use header::{Array, Value};
pub use types::Type;

use crate::recognise::{self, explained};
use crate::{file, position};
use header::{Header, Info, Key, Stop};
use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{DType, Owned, Shape, Spec};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Upper limit for the bytes of a header. Headers of language models, with their tokens, take less than 30 MB.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the first read.
const FIRST: u64 = 1 << 16;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub kind: Type,
    /// The sizes of its axes, outermost first: the reverse of the order in the file.
    pub shape: Vec<usize>,
    /// The offset of its bytes in the file.
    pub offset: u64,
    /// Number of bytes. For an unknown type, all bytes up to the next tensor's data or the end of the file.
    pub len: usize,
}

/// An open file with a valid header that agrees with the file's size.
pub struct Reader {
    path: PathBuf,
    file: File,
    header: Vec<u8>,
    version: u32,
    keys: Vec<Key>,
    entries: Vec<Entry>,
}

impl Reader {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Reader> {
        let name = path.display().to_string();
        let unreadable = |e| Error::new(Kind::File, &*name).expected("a readable file").got(e);
        let named = |e: Error| Error { argument: name.as_str().into(), ..e };
        let (mut file, size) = file::open(path).map_err(unreadable)?;
        let named_for_what_it_is = |e| explained(named(e), &file::first(path, recognise::FIRST), recognise::GGUF);
        let (bytes, header) = read_header(&mut file, size).map_err(named_for_what_it_is)?;
        let start = (header.len as u64).checked_next_multiple_of(header.alignment).unwrap_or(u64::MAX);
        let entries = entries(header.infos, start, header.alignment, size).map_err(named)?;
        Ok(Reader { path: path.into(), file, header: bytes, version: header.version, keys: header.keys, entries })
    }

    /// The version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata, in the order of the file.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.keys.iter().map(|key| (key.name.as_str(), key.value(&self.header)))
    }

    /// The tensors, in the order of their data.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry named `name`.
    pub fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.iter().find(|entry| entry.name == name).ok_or_else(|| {
            Error::new(Kind::File, self.path.display().to_string())
                .expected(format_args!("a tensor `{name}`"))
                .got("a file without it")
        })
    }

    /// The type and shape of the data that [`Reader::read`] reads; for `Q8_0` and `Q4_0`, the bytes of each row.
    pub fn spec(&self, entry: &Entry) -> Result<Spec> {
        if let Some(dtype) = entry.kind.plain() {
            return Spec::new(dtype, &entry.shape);
        }
        let (mut dims, kind) = (entry.shape.clone(), entry.kind);
        match dims.last_mut() {
            Some(row) if kind.is_ours() => *row = *row / kind.block * kind.bytes,
            _ => {
                return Err(Error::new(Kind::DType, &*entry.name)
                    .expected("F64, F32, BF16, F16, I64, I32, I16, I8, Q8_0 or Q4_0")
                    .got(kind)
                    .hint("Have the file written in one of these types, as llama-quantize does"));
            }
        }
        Spec::new(DType::U8, &dims)
    }

    /// Reads an entry whose type [`Reader::spec`] supports.
    pub fn tensor(&self, entry: &Entry) -> Result<Owned> {
        let mut tensor = Owned::try_any(self.spec(entry)?)?;
        self.read(entry, tensor.view_mut().bytes(), Chunks::WHOLE)?;
        Ok(tensor)
    }

    /// Reads the data of an entry into `bytes`, which must have its length.
    pub fn read(&self, entry: &Entry, bytes: &mut [u8], chunks: Chunks) -> Result<()> {
        position::read_in_chunks(&self.file, bytes, entry.offset, chunks, |e| {
            let expected = format_args!("the data of `{}`", entry.name).to_string();
            Error::new(Kind::File, self.path.display().to_string()).expected(expected).got(e)
        })
    }
}

/// The header of a file of `size` bytes, raw and parsed. Its length is not known in advance, so the prefix that is read
/// doubles until the header is complete.
fn read_header(file: &mut impl Read, size: u64) -> Result<(Vec<u8>, Header)> {
    let most = size.min(MAX_HEADER);
    let mut bytes = Vec::new();
    loop {
        let had = bytes.len() as u64;
        let wanted = (2 * had).max(FIRST).min(most);
        let read = file.take(wanted - had).read_to_end(&mut bytes);
        read.map_err(|e| Error::new(Kind::File, "").expected("a readable file").got(e))?;
        match Header::parse(&bytes, size) {
            Ok(header) => {
                bytes.truncate(header.len);
                return Ok((bytes, header));
            }
            Err(Stop::Wrong(error)) => return Err(error),
            Err(Stop::More) if bytes.len() as u64 == wanted && wanted < most => {}
            Err(Stop::More) => {
                let expected = format_args!("a header of at most {MAX_HEADER} bytes").to_string();
                return Err(Error::new(Kind::File, "").expected(expected).got("one that goes on"));
            }
        }
    }
}

/// The tensors of a file of `size` bytes whose data begins at `start`.
fn entries(infos: Vec<Info>, start: u64, alignment: u64, size: u64) -> Result<Vec<Entry>> {
    let mut ends: Vec<u64> = infos.iter().map(|info| info.offset).chain([size.saturating_sub(start)]).collect();
    ends.sort_unstable();
    // The start of the first tensor after the given offset, or the end of the file.
    let next = |offset| ends.get(ends.partition_point(|&end| end <= offset)).copied().unwrap_or(offset);
    let entries = infos.into_iter().map(|info| {
        let room = next(info.offset) - info.offset;
        entry(info, room, start, alignment, size)
    });
    let mut entries: Vec<Entry> = entries.collect::<Result<_>>()?;
    // Tensors without data come first, because they may share an offset with another.
    entries.sort_by_key(|entry| (entry.offset, entry.len));
    match entries.windows(2).find(|pair| pair[0].offset + pair[0].len as u64 > pair[1].offset) {
        Some(pair) => Err(Error::new(Kind::File, "")
            .expected("data of its own for each tensor")
            .got(format_args!("bytes that `{}` and `{}` share", pair[0].name, pair[1].name))),
        None => Ok(entries),
    }
}

/// Checks the description of a tensor whose data may take up to `room` bytes, those before the next tensor.
fn entry(info: Info, room: u64, start: u64, alignment: u64, size: u64) -> Result<Entry> {
    let Info { name, kind, shape, offset } = info;
    let wrong = |expected: String, got: String| Error::new(Kind::File, "").expected(expected).got(got);
    let row = shape.last().copied().unwrap_or(1);
    if kind.is_known() && !row.is_multiple_of(kind.block) {
        return Err(wrong(format!("rows of `{name}` of whole blocks of {}", kind.block), format!("{row} values")));
    }
    if !offset.is_multiple_of(alignment) {
        return Err(wrong(format!("the data of `{name}` at a multiple of {alignment}"), format!("{offset}")));
    }
    // At most 2^60 elements, so their bytes fit too.
    let elements = Shape::new(&shape).map_err(|e| Error { kind: Kind::File, ..e })?.elements();
    let len = match elements {
        0 => 0,
        _ if kind.is_known() => (elements / kind.block * kind.bytes) as u64,
        _ => room,
    };
    let begin = start.checked_add(offset);
    match begin.filter(|begin| begin.checked_add(len).is_some_and(|end| end <= size)) {
        Some(offset) => Ok(Entry { name, kind, shape, offset, len: len as usize }),
        None => {
            let expected = format!("{len} bytes of `{name}`, {offset} behind byte {start}");
            Err(wrong(expected, format!("a file of {size}")).hint(recognise::AGAIN))
        }
    }
}

//! Safetensors files: their index, one tensor at a time, and writes that are complete or have no effect.
//!
//! Headers are parsed here, so that a tensor of an unknown element type does not hide the others. Tensors are read by
//! position, not mapped: a file that another program cuts short gives an error, where a mapping would end the process.

mod write;

pub use write::{Writer, to_bytes, write, write_in_chunks, write_told};

use crate::recognise::{AGAIN, FIRST, SAFETENSORS, explained};
use crate::{file, position};
use safetensors::tensor::Dtype;
use serde::Deserialize;
use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{DType, Owned, Spec};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Upper limit for the bytes of a header, as in the format's own implementation.
const MAX_HEADER: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its element type as the file names it, such as `F32`.
    pub dtype: String,
    /// The sizes of its axes.
    pub shape: Vec<usize>,
    /// Offset of its data in the file, in bytes.
    pub offset: u64,
    /// Length of its data, in bytes.
    pub len: usize,
}

impl Entry {
    /// The range of its data in the file.
    pub fn range(&self) -> Range<usize> {
        let start = self.offset as usize;
        start..start + self.len
    }
}

/// An open file with a valid header that agrees with the file's size.
pub struct Reader {
    path: PathBuf,
    file: File,
    metadata: Told,
    entries: Vec<Entry>,
}

fn failure(path: &Path, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, path.display().to_string()).expected(expected).got(got)
}

impl Reader {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Reader> {
        let (mut file, size) = file::open(path).map_err(|e| failure(path, "a readable file", e))?;
        let header = read_header(&mut file, size).and_then(|header| Header::parse(&header, size));
        let wrong = |got| explained(not_whole(failure(path, SAFETENSORS, got)), &file::first(path, FIRST), SAFETENSORS);
        let Header { metadata, entries } = header.map_err(wrong)?;
        Ok(Reader { path: path.to_path_buf(), file, metadata, entries })
    }

    /// The file's metadata.
    pub fn metadata(&self) -> &Told {
        &self.metadata
    }

    /// The file's tensors, in the order of the data.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry named `name`.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// The type and shape of an entry; fails if its element type is not supported.
    pub fn spec(&self, entry: &Entry) -> Result<Spec> {
        let dtype = our_type(&entry.dtype).ok_or_else(|| {
            Error::new(Kind::DType, &*entry.name)
                .expected("F64, F32, BF16, F16, I64, I32, I16, I8, U8 or BOOL")
                .got(&entry.dtype)
        })?;
        Spec::new(dtype, &entry.shape)
    }

    /// Reads an entry of a supported element type.
    pub fn tensor(&self, entry: &Entry) -> Result<Owned> {
        let mut tensor = Owned::try_any(self.spec(entry)?)?;
        self.read(entry, tensor.view_mut().bytes(), Chunks::WHOLE)?;
        Ok(tensor)
    }

    /// Reads the bytes of an entry. `bytes` must be as long as the entry.
    pub fn read(&self, entry: &Entry, bytes: &mut [u8], chunks: Chunks) -> Result<()> {
        let failed = |e| failure(&self.path, &format!("the data of `{}`", entry.name), e);
        position::read_in_chunks(&self.file, bytes, entry.offset, chunks, failed)
    }
}

/// Reads the header of a file of `size` bytes.
fn read_header(file: &mut impl Read, size: u64) -> std::result::Result<Vec<u8>, String> {
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| format!("{size} bytes"))?;
    let header = u64::from_le_bytes(length);
    if header > MAX_HEADER || header > size.saturating_sub(8) {
        return Err(format!("a header of {header} bytes in a file of {size}"));
    }
    let mut bytes = vec![0; header as usize];
    file.read_exact(&mut bytes).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// Adds the hint for a file that may be truncated.
fn not_whole(error: Error) -> Error {
    let cut = error.got.contains(CUT);
    if cut { error.hint(AGAIN) } else { error }
}

const CUT: &str = "bytes, where its header says";

/// A parsed header. The data of all tensors is contiguous and within the file.
struct Header {
    metadata: Told,
    entries: Vec<Entry>,
}

/// A tensor's entry.
#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl Header {
    /// Parses the header of a file of `size` bytes.
    fn parse(header: &[u8], size: u64) -> std::result::Result<Header, String> {
        let mut parts: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(header).map_err(|e| e.to_string())?;
        let metadata = parts.remove("__metadata__").map_or(Ok(None), serde_json::from_value);
        let metadata: Option<Told> = metadata.map_err(|e| format!("metadata: {e}"))?;
        let start = 8 + header.len() as u64;
        let entry = |(name, info)| entry(name, info, start);
        let mut entries: Vec<Entry> = parts.into_iter().map(entry).collect::<std::result::Result<_, _>>()?;
        // Empty tensors come first, since they may begin where another tensor does.
        entries.sort_by_key(|entry| (entry.offset, entry.len));
        let end = entries.iter().try_fold(start, |end, entry| match entry.offset == end {
            true => Ok(end + entry.len as u64),
            false => Err(format!("`{}` at byte {}, where byte {end} is the next", entry.name, entry.offset)),
        })?;
        if end != size {
            return Err(format!("{size} {CUT} {end}"));
        }
        Ok(Header { metadata: metadata.unwrap_or_default(), entries })
    }
}

/// Checks a tensor's description in a file whose data begins at `start`. For unknown element types, the number of bytes
/// cannot be checked against the shape.
fn entry(name: String, info: serde_json::Value, start: u64) -> std::result::Result<Entry, String> {
    let info: Info = serde_json::from_value(info).map_err(|e| format!("`{name}`: {e}"))?;
    let (from, to) = info.data_offsets;
    let len = to.checked_sub(from).filter(|_| start.checked_add(to).is_some());
    let elements = info.shape.iter().try_fold(1usize, |elements, &size| elements.checked_mul(size));
    let bits = elements.zip(bits(&info.dtype)).map(|(elements, bits)| elements.checked_mul(bits));
    let fits = bits.is_none_or(|bits| bits.is_some_and(|bits| bits.is_multiple_of(8) && Some(bits as u64 / 8) == len));
    match len.filter(|_| fits && elements.is_some()) {
        Some(len) => Ok(Entry { name, dtype: info.dtype, shape: info.shape, offset: start + from, len: len as usize }),
        None => Err(format!("`{name}` of {} {:?} at {from} to {to}", info.dtype, info.shape)),
    }
}

/// Bits per element of a type that the format defines; `None` for other types.
fn bits(dtype: &str) -> Option<usize> {
    let known: std::result::Result<Dtype, _> = serde_json::from_value(dtype.into());
    known.ok().map(|dtype| dtype.bitsize())
}

/// A file's metadata: strings by key.
pub type Told = BTreeMap<String, String>;

/// The tensors of a file in memory; fails if an element type is not supported. `name` is for errors.
pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Vec<(String, Owned)>> {
    let wrong = |got: String| Error::new(Kind::Argument, name).expected("the bytes of a safetensors file").got(got);
    let size = bytes.len() as u64;
    let header = read_header(&mut &bytes[..], size).and_then(|header| Header::parse(&header, size));
    let Header { entries, .. } = header.map_err(|got| explained(not_whole(wrong(got)), bytes, SAFETENSORS))?;
    let owned = |entry: Entry| {
        let dtype = our_type(&entry.dtype).ok_or_else(|| wrong(format!("{} of {}", entry.name, entry.dtype)))?;
        let mut tensor = Owned::try_any(Spec::new(dtype, &entry.shape)?)?;
        tensor.view_mut().bytes().copy_from_slice(&bytes[entry.range()]);
        Ok((entry.name, tensor))
    };
    entries.into_iter().map(owned).collect()
}

/// The element type with this name in files, if it is supported.
fn our_type(name: &str) -> Option<DType> {
    // Booleans are stored as bytes.
    let name = if name == "BOOL" { "U8" } else { name };
    DType::ALL.into_iter().find(|&dtype| file_type(dtype).to_string() == name)
}

fn file_type(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::U8 => Dtype::U8,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidewinder_kernels::tensor::Described;

    fn temporary(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("sidewinder-{}-{name}", std::process::id()))
    }

    #[test]
    fn what_is_written_is_read() {
        let path = temporary("round_trip.safetensors");
        for dtype in DType::ALL {
            let tensor = Owned::from_fn(Spec::new(dtype, &[2, 3]).unwrap(), |i| i as f64 - 2.5);
            let empty = Owned::poisoned(Spec::new(dtype, &[2, 0]).unwrap());
            write(&path, &[("a", tensor.view()), ("empty", empty.view())]).unwrap();
            let reader = Reader::open(&path).unwrap();
            assert_eq!(reader.entries().len(), 2);
            let read = reader.tensor(reader.entry("a").unwrap()).unwrap();
            assert_eq!(read.spec(), tensor.spec());
            assert_eq!(read.view().bytes(), tensor.view().bytes());
            assert_eq!(reader.tensor(reader.entry("empty").unwrap()).unwrap().spec(), empty.spec());
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn one_tensor_after_another_is_the_same_file() {
        let (path, other) = (temporary("pieces.safetensors"), temporary("whole.safetensors"));
        let tensor = |dtype, dims: &[usize]| Owned::from_fn(Spec::new(dtype, dims).unwrap(), |i| i as f64);
        let tensors =
            [("b", tensor(DType::U8, &[3])), ("a", tensor(DType::I64, &[2])), ("c", tensor(DType::F32, &[2, 0]))];
        let specs = tensors.each_ref().map(|(name, tensor)| (*name, tensor.spec()));
        let mut writer = Writer::create(&path, &specs, &Told::new()).unwrap();
        tensors.iter().for_each(|(name, tensor)| writer.put(name, tensor.view()).unwrap());
        assert!(!path.exists());
        writer.finish().unwrap();
        let views = tensors.each_ref().map(|(name, tensor)| (*name, tensor.view()));
        write(&other, &views).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&other).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), to_bytes(&views).unwrap());
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(other).unwrap();
    }

    #[test]
    fn what_a_file_says_beside_its_tensors_is_kept() {
        let path = temporary("told.safetensors");
        let told = Told::from([("format", "pt"), ("a \"b\"", "é\n")].map(|(key, text)| (key.into(), text.into())));
        let tensor = Owned::from_fn(Spec::new(DType::F64, &[3]).unwrap(), |i| i as f64);
        for tensors in [&[("a", tensor.view())][..], &[]] {
            write_told(&path, tensors, &told).unwrap();
            let reader = Reader::open(&path).unwrap();
            assert_eq!((reader.metadata(), reader.entries().len()), (&told, tensors.len()));
            assert!(reader.entries().iter().all(|entry| entry.offset.is_multiple_of(8)));
            let theirs = std::fs::read(&path).unwrap();
            assert_eq!(safetensors::SafeTensors::deserialize(&theirs).unwrap().len(), tensors.len());
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_in_pieces_is_whole_or_not_there() {
        let path = temporary("unfinished.safetensors");
        let spec = Spec::new(DType::F32, &[2]).unwrap();
        let tensor = Owned::from_fn(spec, |i| i as f64);
        let mut writer = Writer::create(&path, &[("a", spec), ("b", spec)], &Told::new()).unwrap();
        let unfinished = writer.unfinished.clone();
        writer.put("a", tensor.view()).unwrap();
        assert_eq!(writer.put("c", tensor.view()).unwrap_err().kind, Kind::File);
        assert_eq!(writer.put("b", tensor.cast(DType::F64).view()).unwrap_err().kind, Kind::Shape);
        assert!(unfinished.exists());
        assert!(writer.finish().unwrap_err().got.contains("`b`"));
        assert!(!path.exists() && !unfinished.exists());
        let twice = [("a", tensor.view()), ("a", tensor.view())];
        for error in [
            Writer::create(&path, &[("a", spec), ("a", spec)], &Told::new()).err().unwrap(),
            write(&path, &twice).unwrap_err(),
            to_bytes(&twice).unwrap_err(),
        ] {
            assert!(error.got.contains("two tensors named `a`"), "{error}");
        }
        assert!(Writer::create(Path::new("/nowhere/at/all"), &[], &Told::new()).is_err());
    }

    /// A file of a tensor of four F32 numbers and a second tensor, whose header entry is `other`.
    fn with(other: &str, bytes: usize) -> Vec<u8> {
        let header = format!(
            r#"{{"__metadata__":{{"format":"pt"}},"a":{{"dtype":"F32","shape":[4],"data_offsets":[0,16]}},"b":{{{other}}}}}"#
        );
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![1; 16 + bytes]].concat()
    }

    #[test]
    fn a_tensor_of_an_unknown_type_hides_no_other() {
        let path = temporary("unknown.safetensors");
        for (dtype, shape, bytes) in [("F8_E4M3", "[3]", 3), ("F4", "[2,4]", 4), ("I2_S", "[128]", 7), ("X", "[0]", 0)]
        {
            let end = 16 + bytes;
            let other = format!(r#""dtype":"{dtype}","shape":{shape},"data_offsets":[16,{end}]"#);
            std::fs::write(&path, with(&other, bytes)).unwrap();
            let reader = Reader::open(&path).unwrap();
            assert_eq!(reader.metadata()["format"], "pt");
            assert_eq!(reader.tensor(reader.entry("a").unwrap()).unwrap().view().bytes(), [1; 16]);
            let entry = reader.entry("b").unwrap();
            assert_eq!((&*entry.dtype, entry.len), (dtype, bytes));
            let error = reader.tensor(entry).err().unwrap();
            assert_eq!((error.kind, &*error.argument, &*error.got), (Kind::DType, "b", dtype));
        }
        for other in [
            r#""dtype":"F8_E4M3","shape":[4],"data_offsets":[16,19]"#,
            r#""dtype":"F4","shape":[3],"data_offsets":[16,19]"#,
            r#""dtype":"X","shape":[3],"data_offsets":[17,19]"#,
            r#""dtype":"X","shape":[3],"data_offsets":[15,19]"#,
            r#""dtype":"X","shape":[3],"data_offsets":[19,16]"#,
            r#""dtype":"X","shape":[4294967296,4294967296,4294967296],"data_offsets":[16,19]"#,
            r#""dtype":3,"shape":[3],"data_offsets":[16,19]"#,
            r#""shape":[3],"data_offsets":[16,19]"#,
        ] {
            std::fs::write(&path, with(other, 3)).unwrap();
            assert!(Reader::open(&path).err().expect(other).got.contains("`b`"), "{other}");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn other_files_are_named_for_what_they_are() {
        let path = temporary("other.safetensors");
        for (bytes, part) in [
            (&b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 516567560\n"[..], "git lfs pull"),
            (b"<!DOCTYPE html>", "HTML"),
            (b"GGUF\x03\0\0\0\0\0\0\0", "a GGUF file"),
            (b"PK\x03\x04 archive/data.pkl", "PyTorch"),
            (b"\x80\x02\x8a\nl\xfc", "pickle"),
            (b"{\"weight_map\": {}}", "JSON"),
            (b"Entry not found", "Entry not found"),
            (b"", "an empty file"),
            (&[0; 64], "nothing but zeros"),
            (&with(r#""dtype":"U8","shape":[3],"data_offsets":[16,19]"#, 2), "download it again"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = Reader::open(&path).err().expect(part);
            assert!(error.to_string().contains(part) && &*error.expected == SAFETENSORS, "{error}");
            assert!(from_bytes("bytes", bytes).err().unwrap().to_string().contains(part));
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn damaged_files_are_errors() {
        let path = temporary("damaged.safetensors");
        let tensor = Owned::from_fn(Spec::new(DType::F32, &[4]).unwrap(), |i| i as f64);
        write(&path, &[("a", tensor.view())]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let long = [&whole[..], b"x"].concat();
        let huge_header = [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat();
        // Sixteen tensors that claim `usize::MAX` bytes between them.
        let at = |i: usize| if i < 16 { i << 60 } else { usize::MAX };
        let part = |i| {
            let (from, to) = (at(i), at(i + 1));
            format!(r#""{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
        };
        let header = format!("{{{}}}", (0..16).map(part).collect::<Vec<_>>().join(","));
        let claimed = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        for damaged in [&whole[..whole.len() - 1], &whole[..20], &whole[..7], &[], &long, &huge_header, &claimed] {
            std::fs::write(&path, damaged).unwrap();
            let error = Reader::open(&path).err().expect("a damaged file is refused");
            assert_eq!(error.kind, Kind::File);
            assert_eq!(from_bytes("bytes", damaged).err().unwrap().kind, Kind::Argument);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Reader::open(&path).err().unwrap().kind, Kind::File);
        assert_eq!(write(Path::new("/nowhere/at/all"), &[]).unwrap_err().kind, Kind::File);
    }
}

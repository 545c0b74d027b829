//! Writes files completely or not at all.

use super::{Entry, Header, Told, failure, file_type};
use crate::position;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{Described, Spec, View};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Writes tensors to a new file in the folder of `path` and renames it to `path`. A reader sees the old file or the
/// complete new one.
pub fn write(path: &Path, tensors: &[(&str, View)]) -> Result<()> {
    write_told(path, tensors, &Told::new())
}

/// Like [`write()`], with metadata.
pub fn write_told(path: &Path, tensors: &[(&str, View)], told: &Told) -> Result<()> {
    write_in_chunks(path, tensors, told, Chunks::WHOLE)
}

/// Like [`write_told`], in chunks of the tensors' bytes.
pub fn write_in_chunks(path: &Path, tensors: &[(&str, View)], told: &Told, chunks: Chunks) -> Result<()> {
    let specs: Vec<(&str, Spec)> = tensors.iter().map(|(name, view)| (*name, view.spec())).collect();
    let mut writer = Writer::create(path, &specs, told)?;
    tensors.iter().try_for_each(|(name, view)| writer.put_in_chunks(name, *view, chunks))?;
    writer.finish()
}

/// The temporary name of a file that is still being written, in the folder of `path`.
fn beside(path: &Path) -> Result<PathBuf> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or_else(|| failure(path, "the name of a file", "none"))?;
    Ok(folder.join(format!(".{}.{}", name.to_string_lossy(), std::process::id())))
}

fn unwritten(path: &Path, got: impl std::fmt::Display) -> Error {
    failure(path, "a file that can be written", got)
}

/// Writes a file one tensor at a time, in any order, so that the tensors need not all be in memory at once. The file
/// appears under its name when it is complete; dropping the writer before removes it.
pub struct Writer {
    path: PathBuf,
    pub(super) unfinished: PathBuf,
    file: File,
    entries: Vec<Entry>,
    missing: BTreeSet<String>,
}

impl Writer {
    /// Begins a file of tensors of these names, types and shapes.
    pub fn create(path: &Path, specs: &[(&str, Spec)], told: &Told) -> Result<Writer> {
        distinct(specs.iter().map(|(name, _)| *name)).map_err(|got| unwritten(path, got))?;
        let header = header(specs, told).map_err(|got| unwritten(path, got))?;
        let bytes = specs.iter().map(|(_, spec)| spec.bytes() as u64);
        let len = bytes.fold(header.len() as u64, u64::saturating_add);
        let Header { entries, .. } = Header::parse(&header[8..], len).map_err(|got| unwritten(path, got))?;
        let missing = entries.iter().map(|entry| entry.name.clone()).collect();
        let unfinished = beside(path)?;
        let file = File::create(&unfinished).map_err(|e| unwritten(path, e))?;
        let writer = Writer { path: path.into(), unfinished, file, entries, missing };
        position::write_all_at(&writer.file, &header, 0).map_err(|e| unwritten(path, e))?;
        Ok(writer)
    }

    /// Writes the tensor of that name.
    pub fn put(&mut self, name: &str, tensor: View) -> Result<()> {
        self.put_in_chunks(name, tensor, Chunks::WHOLE)
    }

    fn put_in_chunks(&mut self, name: &str, tensor: View, chunks: Chunks) -> Result<()> {
        let entry = self.entries.iter().find(|entry| entry.name == name);
        let entry = entry.ok_or_else(|| unwritten(&self.path, format_args!("a tensor `{name}` that it has not")))?;
        let spec = tensor.spec();
        if (file_type(spec.dtype).to_string(), &spec.shape[..]) != (entry.dtype.clone(), &entry.shape[..]) {
            let expected = format_args!("{} {:?}, as its header says", entry.dtype, entry.shape).to_string();
            return Err(Error::new(Kind::Shape, name).expected(expected).got(spec));
        }
        let failed = |e| unwritten(&self.path, e);
        position::write_in_chunks(&self.file, tensor.bytes(), entry.offset, chunks, failed)?;
        self.missing.remove(name);
        Ok(())
    }

    /// Completes the file: renames it to its final name.
    pub fn finish(mut self) -> Result<()> {
        if let Some(name) = self.missing.first() {
            return Err(unwritten(&self.path, format_args!("no tensor `{name}`, which its header names")));
        }
        rename(&self.unfinished, &self.path).map_err(|got| unwritten(&self.path, got))?;
        self.unfinished.clear();
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // There is no caller to return an error to. A finished file was renamed, so this finds nothing.
        let _ = std::fs::remove_file(&self.unfinished);
    }
}

/// The bytes before the data, which begins at a multiple of 8. Large elements come first, so that all are aligned.
fn header(specs: &[(&str, Spec)], told: &Told) -> std::result::Result<Vec<u8>, String> {
    let mut sorted: Vec<&(&str, Spec)> = specs.iter().collect();
    sorted.sort_by_key(|(name, spec)| (std::cmp::Reverse(spec.dtype.size()), *name));
    let mut end = 0usize;
    let infos = sorted.into_iter().map(|(name, spec)| {
        let start = end;
        // A size that overflows is refused by the format.
        end = end.saturating_add(spec.bytes());
        let info = TensorInfo { dtype: file_type(spec.dtype), shape: spec.shape.to_vec(), data_offsets: (start, end) };
        (name.to_string(), info)
    });
    let metadata = Metadata::new(None, infos.collect()).map_err(|e| e.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    if !told.is_empty() {
        // Sorted by key: the format's crate would write metadata in random order.
        let told = serde_json::to_string(told).map_err(|e| e.to_string())?;
        let comma = if specs.is_empty() { "" } else { "," };
        json.splice(1..1, format!("\"__metadata__\":{told}{comma}").into_bytes());
    }
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

fn views<'t>(tensors: &[(&'t str, View<'t>)]) -> std::result::Result<Vec<(&'t str, TensorView<'t>)>, String> {
    distinct(tensors.iter().map(|(name, _)| *name))?;
    let view = |(name, view): &(&'t str, View<'t>)| {
        let spec = view.spec();
        TensorView::new(file_type(spec.dtype), spec.shape.to_vec(), view.bytes()).map(|v| (*name, v))
    };
    tensors.iter().map(view).collect::<std::result::Result<_, _>>().map_err(|e| e.to_string())
}

/// Checks for two tensors of one name, for which the format's crate has no clear error.
fn distinct<'n>(mut names: impl Iterator<Item = &'n str>) -> std::result::Result<(), String> {
    let mut seen = BTreeSet::new();
    names.find(|name| !seen.insert(*name)).map_or(Ok(()), |name| Err(format!("two tensors named `{name}`")))
}

/// Tensors as the bytes of a file.
pub fn to_bytes(tensors: &[(&str, View)]) -> Result<Vec<u8>> {
    views(tensors)
        .and_then(|views| safetensors::serialize(views, None).map_err(|e| e.to_string()))
        .map_err(|e| Error::new(Kind::Argument, "tensors").expected("tensors that a file can hold").got(e))
}

fn rename(from: &Path, to: &Path) -> std::result::Result<(), String> {
    File::open(from)
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(from, to))
        .map_err(|e| e.to_string())
}

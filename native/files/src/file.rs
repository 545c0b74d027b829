//! Reads regular files only: reading a pipe or a device may block forever or never end.

use sidewinder_kernels::error::{self, Kind};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a file and returns it with its size in bytes.
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Opening a pipe would block until it has a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::other("no regular file"));
    }
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    Ok((file, size))
}

/// Reads a whole file; fails if it has more than `most` bytes.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    if size > most {
        return Err(Error::other(format!("{size} bytes, more than {most}")));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Like [`read`], but `None` if the file does not exist.
pub fn read_if_there(path: &Path, most: u64) -> error::Result<Option<Vec<u8>>> {
    match read(path, most) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => {
            let error = error::Error::new(Kind::File, path.display().to_string());
            Err(error.expected("a readable file, or none").got(e))
        }
    }
}

/// Up to `most` bytes from the start of a file; empty if it cannot be read.
pub fn first(path: &Path, most: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Errors are ignored: the caller already has one to report, and these bytes only add a hint to it.
    let _ = open(path).and_then(|(file, _)| file.take(most as u64).read_to_end(&mut bytes));
    bytes
}

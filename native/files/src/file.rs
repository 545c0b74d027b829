//! Reads regular files alone: a read from others, such as pipes, may block forever or never end.

use sidewinder_kernels::error::{self, Kind};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a file; with its size.
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Opening a pipe would block until it has a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::other("no regular file"));
    }
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    Ok((file, size))
}

/// The bytes of a file; an error if there are more than `most`.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    if size > most {
        return Err(Error::other(format!("{size} bytes, more than {most}")));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Like [`read`], but `None` where there is no such file.
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

/// The first bytes of a file, at most `most`, or none where it cannot be read.
pub fn first(path: &Path, most: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    // The caller has an error to report already; these bytes only make it clearer.
    let _ = open(path).and_then(|(file, _)| file.take(most as u64).read_to_end(&mut bytes));
    bytes
}

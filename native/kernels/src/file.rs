//! Files to be read: regular ones alone, for what is read from others, such as pipes, may never come or never end.

use std::fs::File;
use std::io::{Error, Read, Result};
use std::path::Path;

/// Opens a file; with its size.
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Opening a pipe would wait for somebody to write.
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::other("no regular file"));
    }
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    Ok((file, size))
}

/// The bytes of a file that has at most so many.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    if size > most {
        return Err(Error::other(format!("{size} bytes, more than {most}")));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

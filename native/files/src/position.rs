//! Reading and writing at a position of a file, whatever the system.

use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::error::{Error, Result};
use std::fs::File;
use std::io;
#[cfg(unix)]
use std::os::unix::fs::FileExt;
#[cfg(windows)]
use std::os::windows::fs::FileExt;

/// Fills `bytes` with those of the file from `position`, in chunks. `failed` makes the error of a read that fails.
pub fn read_in_chunks(
    file: &File,
    bytes: &mut [u8],
    position: u64,
    chunks: Chunks,
    failed: impl Fn(io::Error) -> Error,
) -> Result<()> {
    chunks.each(bytes.len(), 1, |range| {
        let at = position + range.start as u64;
        read_exact_at(file, &mut bytes[range], at).map_err(&failed)
    })
}

/// Writes all `bytes` into the file from `position`, in chunks. `failed` makes the error of a write that fails.
pub fn write_in_chunks(
    file: &File,
    bytes: &[u8],
    position: u64,
    chunks: Chunks,
    failed: impl Fn(io::Error) -> Error,
) -> Result<()> {
    chunks.each(bytes.len(), 1, |range| {
        let at = position + range.start as u64;
        write_all_at(file, &bytes[range], at).map_err(&failed)
    })
}

/// Fills `bytes` with those of the file from `position`.
#[cfg(unix)]
pub fn read_exact_at(file: &File, bytes: &mut [u8], position: u64) -> io::Result<()> {
    file.read_exact_at(bytes, position)
}

/// Writes all `bytes` into the file from `position`.
#[cfg(unix)]
pub fn write_all_at(file: &File, bytes: &[u8], position: u64) -> io::Result<()> {
    file.write_all_at(bytes, position)
}

/// Fills `bytes` with those of the file from `position`.
#[cfg(windows)]
pub fn read_exact_at(file: &File, mut bytes: &mut [u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.seek_read(bytes, position) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => (bytes, position) = (&mut bytes[read..], position + read as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all `bytes` into the file from `position`.
#[cfg(windows)]
pub fn write_all_at(file: &File, mut bytes: &[u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.seek_write(bytes, position) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => (bytes, position) = (&bytes[written..], position + written as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

//! Compiled kernels in the user's cache directory: one file per kernel, named by a hash of all its inputs. A failure
//! here only costs a compilation.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, process};

/// The machine code of a kernel compiled earlier from the same parts.
pub(in crate::cuda) fn load(parts: &[&str]) -> Option<Vec<u8>> {
    let mut content = fs::read(path(parts)?).ok()?;
    let (sum, code) = content.split_first_chunk::<16>()?;
    if hash(&[code]).to_le_bytes() != *sum {
        return None;
    }
    Some(content.split_off(16))
}

/// Stores machine code. The file is written under another name and renamed, so a reader never sees half a file.
pub(in crate::cuda) fn store(parts: &[&str], code: &[u8]) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let Some(path) = path(parts) else { return };
    let name = format!("{}.{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let content = [&hash(&[code]).to_le_bytes(), code].concat();
    let _ = write(&path, &path.with_extension(name), &content);
}

fn write(path: &Path, draft: &Path, content: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(draft, content).and_then(|()| fs::rename(draft, path)).inspect_err(|_| drop(fs::remove_file(draft)))
}

fn path(parts: &[&str]) -> Option<PathBuf> {
    let parts: Vec<_> = parts.iter().map(|part| part.as_bytes()).collect();
    Some(folder()?.join(format!("{:032x}.cubin", hash(&parts))))
}

/// `SIDEWINDER_CACHE`, or `sidewinder` in the user's cache directory; `None` without a home directory.
fn folder() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("SIDEWINDER_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME").filter(|path| path.is_absolute())?.join("sidewinder")))
        .or_else(|| Some(env::home_dir()?.join(".cache/sidewinder")))
}

/// 128-bit FNV-1a over the parts and their boundaries. It is stable across builds and releases.
fn hash(parts: &[&[u8]]) -> u128 {
    const BASIS: u128 = 0x6c62272e07bb014262b821756295c58d;
    const PRIME: u128 = 0x0000000001000000000000000000013b;
    let step = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(PRIME);
    parts.iter().fold(BASIS, |hash, part| {
        let ends = part.len().to_le_bytes();
        part.iter().chain(&ends).fold(hash, |hash, &byte| step(hash, byte))
    })
}

//! Arbitrary bytes, and damaged files, as GGUF: an error, or exactly what the bytes say.
#![no_main]

#[path = "../../files/tests/common/gguf.rs"]
#[allow(dead_code)]
mod made;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut next = bytes.iter().copied();
    let mut chance = |limit: usize| next.by_ref().take(2).fold(0, |n, byte| n << 8 | byte as usize) % limit.max(1);
    // Arbitrary bytes rarely get past the first checks.
    let file = if bytes.starts_with(b"GGUF") { bytes.to_vec() } else { made::damaged(&mut chance) };
    let path = std::env::temp_dir().join(format!("sidewinder-fuzz-{}.gguf", std::process::id()));
    std::fs::write(&path, &file).expect("a temporary file");
    if let Err(error) = made::read(&path, &file) {
        assert!(made::is_fair(&error), "{error}");
    }
});

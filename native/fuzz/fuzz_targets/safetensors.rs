//! Arbitrary bytes as a safetensors file: an error, or tensors of the declared sizes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidewinder_files::safetensors::Reader;
use sidewinder_kernels::tensor::Described;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("sidewinder-fuzz-{}", std::process::id()));
    std::fs::write(&path, bytes).expect("a temporary file");
    let Ok(reader) = Reader::open(&path) else { return };
    for entry in reader.entries() {
        assert!(entry.offset + entry.len as u64 <= bytes.len() as u64);
        if let Ok(tensor) = reader.tensor(entry) {
            assert_eq!(tensor.spec().bytes(), entry.len);
            assert_eq!(tensor.view().bytes(), &bytes[entry.offset as usize..][..entry.len]);
        }
    }
});

//! GGUF files: one that gguf-py wrote, ones made by hand, and thousands of damaged ones.

#[path = "../../kernels/tests/common/largest.rs"]
mod largest;
#[path = "common/gguf.rs"]
mod made;

use largest::LARGEST;
use made::{Parts, array, damaged, is_fair, read, text, whole};
use sidewinder_files::gguf::{Reader, Value};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::tensor::{DType, Described};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// A temporary file, removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: &[u8]) -> Temporary {
        let path = std::env::temp_dir().join(format!("sidewinder-{name}-{}.gguf", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Temporary(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // A failed test may not have created it.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn refused(name: &str, bytes: &[u8]) -> Error {
    let file = Temporary::new(name, bytes);
    let error = Reader::open(&file.0).err().unwrap_or_else(|| panic!("{name} is refused"));
    assert!(is_fair(&error), "{name}: {error}");
    assert!(error.to_string().contains(name), "{error}");
    error
}

fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../test/golden/gguf/sample.gguf")
}

#[test]
fn a_file_of_gguf_py_is_read() {
    let reader = Reader::open(&sample()).unwrap();
    let metadata: Vec<(&str, Value)> = reader.metadata().collect();
    let value = |name: &str| metadata.iter().find(|(n, _)| *n == name).unwrap().1;
    assert_eq!(value("general.architecture"), Value::Text(b"sample"));
    assert_eq!(value("t.u8"), Value::Unsigned(200));
    assert_eq!(value("t.i16"), Value::Signed(-30000));
    assert_eq!(value("t.u64"), Value::Unsigned(u64::MAX));
    assert_eq!(value("t.i64"), Value::Signed(i64::MIN));
    assert_eq!(value("t.f32"), Value::Float(f64::from(0.1f32)));
    assert_eq!(value("t.f64"), Value::Float(0.1));
    assert_eq!(value("t.bool"), Value::Bool(true));
    assert_eq!(value("t.string"), Value::Text("snäke".as_bytes()));
    let Value::Array(strings) = value("t.strings") else { panic!("an array") };
    assert_eq!(strings.iter().collect::<Vec<_>>(), [&b"a"[..], b"", b"bc"].map(Value::Text));
    let Value::Array(ints) = value("t.ints") else { panic!("an array") };
    assert_eq!(ints.iter().collect::<Vec<_>>(), [1, -2, 3].map(Value::Signed));

    let wide = reader.tensor(reader.entry("w.f32").unwrap()).unwrap();
    for (name, dtype) in [("w.f16", DType::F16), ("w.bf16", DType::Bf16)] {
        let narrow = reader.tensor(reader.entry(name).unwrap()).unwrap();
        assert_eq!(narrow.spec(), wide.cast(dtype).spec());
        assert_eq!(narrow.view().bytes(), wide.cast(dtype).view().bytes());
    }
    for (name, row) in [("w.q8_0", 68), ("w.q4_0", 36)] {
        let entry = reader.entry(name).unwrap();
        let spec = reader.tensor(entry).unwrap().spec();
        assert_eq!((entry.shape.as_slice(), spec.dtype, &spec.shape[..]), (&[3, 64][..], DType::U8, &[3, row][..]));
    }
    let ids = reader.tensor(reader.entry("ids").unwrap()).unwrap();
    assert_eq!(ids.view().to_f64().iter().copied().collect::<Vec<_>>(), [1.0, -2.0, 3.0, 4.0]);
    let other = reader.entry("w.q5_0").unwrap();
    let error = reader.tensor(other).err().unwrap();
    assert_eq!((error.kind, &*error.argument, &*error.got), (Kind::DType, "w.q5_0", "Q5_0"));
}

#[test]
fn every_part_is_read() {
    for version in [2, 3] {
        let bytes = Parts { version, ..whole() }.bytes();
        let file = Temporary::new("every-part", &bytes);
        read(&file.0, &bytes).unwrap();
        let reader = Reader::open(&file.0).unwrap();
        assert_eq!(reader.version(), version);
        let values: Vec<Value> = reader.metadata().map(|(_, value)| value).collect();
        let firsts = [Value::Unsigned(200), Value::Signed(-100), Value::Unsigned(60000), Value::Signed(-30000)];
        assert_eq!(values[..4], firsts);
        assert_eq!(values[4..7], [Value::Unsigned(4294967295), Value::Signed(-2147483648), Value::Float(0.5)]);
        let Value::Array(nested) = values[9] else { panic!("an array") };
        let [Value::Array(bytes), Value::Array(texts)] = nested.iter().collect::<Vec<_>>()[..] else {
            panic!("two arrays")
        };
        assert_eq!(bytes.iter().collect::<Vec<_>>(), [1, -1, 3].map(Value::Signed));
        assert_eq!(texts.iter().collect::<Vec<_>>(), [Value::Text("é".as_bytes())]);
        let Value::Array(empty) = values[10] else { panic!("an array") };
        assert!(empty.is_empty() && empty.iter().next().is_none());
        assert_eq!(values[14], Value::Float(f64::INFINITY));
        assert_eq!(reader.entry("f32").unwrap().shape, [2, 3]);
        assert_eq!(reader.entry("bf16").unwrap().shape, [2, 1, 1]);
        assert_eq!(reader.entry("one").unwrap().shape, [0usize; 0]);
        assert_eq!(reader.entry("q4_k").unwrap().kind.name, "Q4_K");
        assert_eq!(reader.entry("other").unwrap_err().kind, Kind::File);
    }
}

#[test]
fn a_tensor_of_an_unknown_type_hides_nothing_else() {
    for (id, told) in [(36, "type 36 (I2_S)"), (4, "type 4 (Q4_2)"), (77, "type 77"), (u32::MAX, "type 4294967295")] {
        let mut parts = whole();
        // In the middle and at the end.
        (parts.infos[3].2, parts.infos[8].2) = (id, id);
        parts.infos[3].1 = vec![33, 2];
        let bytes = parts.bytes();
        let file = Temporary::new("unknown-type", &bytes);
        read(&file.0, &bytes).unwrap();
        let reader = Reader::open(&file.0).unwrap();
        assert_eq!((reader.metadata().count(), reader.entries().len()), (parts.keys.len(), parts.infos.len()));
        for (name, shape, room) in [("q8_0", &[2, 33][..], 128), ("q4_k", &[256], 144)] {
            let entry = reader.entry(name).unwrap();
            assert_eq!((entry.shape.as_slice(), entry.len, entry.kind.to_string()), (shape, room, told.to_string()));
            let error = reader.tensor(entry).err().unwrap();
            assert_eq!((error.kind, &*error.argument, &*error.got), (Kind::DType, name, told));
        }
        assert_eq!(reader.tensor(reader.entry("f32").unwrap()).unwrap().spec().dtype, DType::F32);
        // The size of this tensor's data is unknown, so a file that ends before it is valid.
        parts.data = 512;
        let file = Temporary::new("unknown-end", &parts.bytes());
        assert_eq!(Reader::open(&file.0).unwrap().entry("q4_k").unwrap().len, 0);
    }
}

#[test]
fn a_header_larger_than_what_is_read_at_first() {
    let mut parts = whole();
    let values: Vec<u8> = (0..50_000u32).flat_map(|i| text(&i.to_string())).collect();
    parts.keys.push(("tokens", 9, array(8, 50_000, &values)));
    let bytes = parts.bytes();
    let file = Temporary::new("large-header", &bytes);
    read(&file.0, &bytes).unwrap();
    let reader = Reader::open(&file.0).unwrap();
    let Some((_, Value::Array(tokens))) = reader.metadata().last() else { panic!("an array") };
    assert_eq!((tokens.len(), tokens.iter().last()), (50_000, Some(Value::Text(b"49999"))));
}

#[test]
fn what_is_wrong_is_said() {
    let change = |change: &dyn Fn(&mut Parts)| {
        let mut parts = whole();
        change(&mut parts);
        parts.bytes()
    };
    let deep =
        (0..6).fold(vec![0; 0], |inner, depth| array(if depth == 0 { 0 } else { 9 }, (depth > 0).into(), &inner));
    let cases: [(&str, Vec<u8>, &str); 26] = [
        ("empty", vec![], "4 bytes at byte 0"),
        ("magic", b"ggjt, and more".to_vec(), "a GGUF file"),
        ("old", change(&|p| p.version = 1), "made anew"),
        ("swapped", change(&|p| p.version = 3u32.swap_bytes()), "byte order"),
        ("young", change(&|p| p.version = 4), "version 2 or 3"),
        ("truth", change(&|p| p.keys[7].2 = vec![2]), "0 or 1 as a truth value"),
        ("value", change(&|p| p.keys[0].1 = 13), "a type of values from 0 to 12"),
        ("element", change(&|p| p.keys[10].2 = array(13, 0, &[])), "a type of values"),
        ("deep", change(&|p| p.keys[9].2 = deep.clone()), "4 deep"),
        ("long", change(&|p| p.keys[9].2 = array(12, u64::MAX / 8, &[0; 8])), "bytes at byte"),
        ("key-twice", change(&|p| p.keys[1].0 = "u8"), "`u8` twice"),
        ("name-twice", change(&|p| p.infos[1].0 = "f32"), "`f32` twice"),
        ("alignment", change(&|p| p.keys[15].2 = 48u32.to_le_bytes().to_vec()), "a power of two"),
        ("axes", change(&|p| p.infos[0].1 = vec![1; 5]), "at most 4 axes"),
        ("shared-room", change(&|p| (p.infos[0].2, p.infos[0].3) = (77, 64)), "share"),
        ("no-room", change(&|p| (p.infos[8].2, p.infos[8].3) = (77, 704)), "of `q4_k`"),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\nsize 9\n".to_vec(), "git lfs pull"),
        ("page", b"<!DOCTYPE html>".to_vec(), "a GGUF file, got an HTML page"),
        ("torch", b"PK\x03\x04 archive/data.pkl".to_vec(), "a PyTorch checkpoint"),
        ("tensors", b"\x40\0\0\0\0\0\0\0{\"a\"".to_vec(), "got a safetensors file"),
        ("short", change(&|p| p.data -= 1), "download it again"),
        ("blocks", change(&|p| p.infos[3].1 = vec![33, 2]), "whole blocks of 32, got 33"),
        ("offset", change(&|p| p.infos[1].3 = 96), "at a multiple of 64, got 96"),
        ("overlap", change(&|p| p.infos[4].3 = 192), "share"),
        ("beyond", change(&|p| p.infos[8].3 = 1 << 62), "144 bytes of `q4_k`"),
        ("huge", change(&|p| p.infos[0].1 = vec![1 << 40, 1 << 40]), "fits in memory"),
    ];
    for (name, bytes, said) in cases {
        let error = refused(name, &bytes);
        assert!(error.to_string().contains(said), "{error}");
    }
    let name = [&b"GGUF"[..], &3u32.to_le_bytes(), &[0; 8], &1u64.to_le_bytes(), &1u64.to_le_bytes(), &[0xff]].concat();
    assert!(refused("no-text", &name).to_string().contains("UTF-8"));
    assert_eq!(Reader::open(Path::new("/nowhere")).err().unwrap().kind, Kind::File);
    assert_eq!(Reader::open(&std::env::temp_dir()).err().unwrap().kind, Kind::File);
}

#[test]
fn files_cut_short_anywhere_are_errors() {
    let bytes = whole().bytes();
    for end in 0..bytes.len() {
        refused("cut", &bytes[..end]);
    }
}

#[test]
fn damaged_files_are_read_or_are_errors() {
    let mut good = 0;
    for seed in 0..6000u64 {
        let mut state = seed;
        // SplitMix64 (Steele et al. 2014).
        let mut chance = |limit: usize| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
        };
        let bytes = damaged(&mut chance);
        let file = Temporary::new("damaged", &bytes);
        match read(&file.0, &bytes) {
            Ok(()) => good += 1,
            Err(error) => assert!(is_fair(&error), "seed {seed}: {error}"),
        }
    }
    assert!((500..5000).contains(&good), "{good} are read");
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < 4 << 20, "{largest} bytes were asked for at once");
}

//! Damaged models and session dumps: each works, or gives an error that says what is wrong.
#![no_main]

#[path = "../../models/tests/common/damage.rs"]
mod damage;

use damage::{Files, damage_file, damaged, is_fair, model, restore, run};
use libfuzzer_sys::fuzz_target;
use sidewinder_models::mamba::{Model, Session};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

/// A temporary folder, a valid model, and the dump of one of its sessions.
static WHOLE: LazyLock<(PathBuf, Arc<Model>, Vec<u8>)> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("sidewinder-fuzz-mamba-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let model = model(&folder);
    let dump = Session::new(&model).and_then(|session| session.dump()).expect("a dump");
    (folder, model, dump)
});

fuzz_target!(|bytes: &[u8]| {
    let (folder, model, dump) = &*WHOLE;
    let mut rest = bytes;
    let mut chance = |limit: usize| {
        let (first, others) = rest.split_at(rest.len().min(2));
        rest = others;
        first.iter().fold(0, |number, byte| number << 8 | *byte as usize) % limit.max(1)
    };
    let done = match chance(4) {
        0 => run(&damaged(&mut chance), folder, &mut chance),
        1 => {
            let mut dump = dump.clone();
            damage_file(&mut dump, &mut chance);
            restore(model, &dump)
        }
        2 => restore(model, bytes),
        _ => {
            let [mamba, mamba2] = damage::whole();
            let whole = if chance(2) == 0 { mamba } else { mamba2 };
            run(&Files { config: Some(bytes.to_vec()), ..whole }, folder, &mut chance)
        }
    };
    if let Err(error) = done {
        assert!(is_fair(&error), "{error}");
    }
});

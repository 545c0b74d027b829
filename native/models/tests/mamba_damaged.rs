//! Thousands of damaged models and dumps: each works or is an error that describes the problem, and none allocates more
//! memory than its files could need.

#[path = "common/damage.rs"]
mod damage;
#[path = "../../kernels/tests/common/largest.rs"]
mod largest;

use damage::{damage_file, damaged, is_fair, model, restore, run, whole};
use largest::LARGEST;
use sidewinder_kernels::error::Result;
use sidewinder_models::mamba::Session;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

const SEEDS: u64 = 3000;

/// Random numbers below a limit, by SplitMix64 (Steele et al. 2014).
fn numbers(mut state: u64) -> impl FnMut(usize) -> usize {
    move |limit| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("sidewinder-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs `work` with many seeds. Some must succeed, so that damage that leaves a valid model is covered as well.
fn many(mut work: impl FnMut(&mut damage::Chance) -> Result<()>) {
    let good = (0..SEEDS).filter(|&seed| {
        let done = work(&mut numbers(seed));
        done.as_ref().err().iter().for_each(|error| assert!(is_fair(error), "seed {seed}: {error}"));
        done.is_ok()
    });
    let good = good.count() as u64;
    assert!((SEEDS / 50..SEEDS).contains(&good), "{good} of {SEEDS} work");
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < 16 << 20, "{largest} bytes were asked for at once");
}

#[test]
fn damaged_checkpoints_work_or_are_errors() {
    let folder = folder("damaged-models");
    whole().iter().for_each(|files| run(files, &folder, &mut |_| 1).unwrap());
    many(|chance| run(&damaged(chance), &folder, chance));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn damaged_dumps_work_or_are_errors() {
    let folder = folder("damaged-dumps");
    let model = model(&folder);
    let dump = Session::new(&model).unwrap().dump().unwrap();
    many(|chance| {
        let mut dump = dump.clone();
        (0..=chance(2)).for_each(|_| damage_file(&mut dump, chance));
        restore(&model, &dump)
    });
    std::fs::remove_dir_all(folder).unwrap();
}

//! A session that runs for long: its memory does not grow, and its state depends on the last tokens alone.
//! `SIDEWINDER_STEPS=10000000 cargo test --release --test mamba_steady -- --nocapture` takes some minutes.

use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::tensor::{DType, Owned, Spec};
use sidewinder_models::mamba::sample::Sampling;
use sidewinder_models::mamba::{Checkpoint, Input, Model, Session, Weight, Where};
use std::sync::Arc;
use std::time::Instant;

const TOKENS: u64 = 16;
/// Tokens after which the state does not depend on earlier ones: states decay by a third each step.
const REMEMBERED: u64 = 1000;

fn model() -> Arc<Model> {
    let tensor = |name: &str, dims: &[usize], scale: f64, shift: f64| {
        let of = |i: usize| shift + scale * ((i as f64 + 1.0) * (name.len() as f64 + 0.7)).sin();
        let spec = Spec::new(DType::F32, dims).unwrap();
        (format!("backbone.{name}"), Weight::from(Owned::from_fn(spec, of)))
    };
    let tensors = [
        tensor("embeddings.weight", &[TOKENS as usize, 8], 1.0, 0.0),
        tensor("layers.0.norm.weight", &[8], 0.1, 1.0),
        tensor("layers.0.mixer.in_proj.weight", &[32, 8], 0.4, 0.0),
        tensor("layers.0.mixer.conv1d.weight", &[16, 1, 4], 0.5, 0.0),
        tensor("layers.0.mixer.x_proj.weight", &[33, 16], 0.3, 0.0),
        tensor("layers.0.mixer.dt_proj.weight", &[16, 1], 0.1, 0.0),
        tensor("layers.0.mixer.dt_proj.bias", &[16], 0.1, -0.7),
        tensor("layers.0.mixer.A_log", &[16, 16], 0.5, 0.5),
        tensor("layers.0.mixer.D", &[16], 0.1, 1.0),
        tensor("layers.0.mixer.out_proj.weight", &[8, 16], 0.3, 0.0),
        tensor("norm_f.weight", &[8], 0.1, 1.0),
    ];
    let place = Where::Cpu(Exec { threads: 1, ..Exec::default() });
    Arc::new(Model::new(Checkpoint::new("steady", None, tensors), None, false, place).unwrap())
}

/// The token at a position of an endless pseudorandom text.
fn token(place: u64) -> u32 {
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as u32
}

/// Steps with the tokens at positions `from..to`, and returns the last token chosen.
fn go_on(session: &mut Session, from: u64, to: u64) -> u32 {
    let mut chosen = 0;
    for place in from..to {
        let sampling = Sampling { top_k: Some(5), seed: 7, ..Default::default() };
        let choices = [(sampling, place)];
        chosen = Session::next(&mut [&mut *session], Input::Tokens(&[token(place)]), &choices).unwrap()[0];
    }
    chosen
}

fn logits(session: &Session) -> Vec<f64> {
    let mut logits = Owned::poisoned(session.model().output(&[1]).unwrap());
    let mut fork = session.fork().unwrap();
    Session::step(&mut [&mut fork], Input::Tokens(&[1]), logits.view_mut()).unwrap();
    logits.view().to_f64().into_iter().collect()
}

/// Resident memory of the process, in bytes.
fn resident() -> Option<i64> {
    let pages: i64 = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

#[test]
fn memory_and_numbers_stay_where_they_are() {
    // Steps take several times as long under AddressSanitizer.
    let usual = if cfg!(fuzzing) { 20_000 } else { 50_000 };
    let steps = std::env::var("SIDEWINDER_STEPS").map_or(usual, |steps| steps.parse().expect("a number of steps"));
    let model = model();
    let mut session = Session::new(&model).unwrap();
    go_on(&mut session, 0, 10_000);
    let (before, start) = (resident(), Instant::now());
    let chosen = go_on(&mut session, 10_000, steps);
    let (after, seconds) = (resident(), start.elapsed().as_secs_f64());
    println!("{steps} steps in {seconds:.1} s, resident before and after: {before:?} {after:?}");
    assert_eq!(session.length(), steps);
    if let (Some(before), Some(after)) = (before, after) {
        assert!(after - before < 1 << 20, "{} bytes more", after - before);
    }
    let mut short = Session::new(&model).unwrap();
    assert_eq!(go_on(&mut short, steps - REMEMBERED, steps), chosen);
    let (long, short) = (logits(&session), logits(&short));
    let difference = long.iter().zip(&short).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("the largest difference of logits: {difference:e} of {:?}", long);
    assert!(long.iter().all(|logit| logit.is_finite()) && difference < 1e-5, "{long:?} {short:?}");
}

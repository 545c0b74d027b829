//! Models against an independent float64 implementation (`test/support/mamba_reference.py`), and whole sequences
//! against the same sequences cut into prefills and decode steps. On the CPU, and on a GPU where there is one.

#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "common/golden.rs"]
mod golden;
#[path = "common/models.rs"]
mod models;

use common::{EXACT, gpu, levels};
use golden::{Golden, MAMBA, config, expected, folder, forward, tensors, tokens};
use sidewinder_files::safetensors::{self, Reader};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use sidewinder_models::mamba::sample::Sampling;
use sidewinder_models::mamba::{Checkpoint, Config, Heads, Input, Mixer, Model, Session, Weight, Where, choose};
use std::sync::Arc;

fn model(dtype: DType, place: Where) -> Arc<Model> {
    model_of(MAMBA, dtype, place)
}

fn model_of(golden: Golden, dtype: DType, place: Where) -> Arc<Model> {
    Arc::new(Model::new(Checkpoint::open(&golden.folder(), false).unwrap(), Some(dtype), false, place).unwrap())
}

/// The model in every type on every device, each with a label.
fn models(golden: Golden) -> impl Iterator<Item = (Arc<Model>, String)> {
    let model = move |dtype, place| model_of(golden, dtype, place);
    let on_cpu =
        levels().flat_map(|level| DType::FLOATS.map(|dtype| (dtype, level))).flat_map(move |(dtype, level)| {
            [1, 2].map(|threads| {
                (model(dtype, Where::Cpu(Exec { level, threads })), format!("{dtype} {level:?} {threads}"))
            })
        });
    let on_gpu = gpu().into_iter().flat_map(move |device| {
        DType::FLOATS.map(|dtype| (model(dtype, Where::Cuda(device.clone(), false)), format!("{dtype} on a GPU")))
    });
    [(model(DType::F64, Where::Cpu(EXACT)), "reference".to_string())].into_iter().chain(on_cpu).chain(on_gpu)
}

fn prefill(session: &mut Session, tokens: &[u32]) -> Owned {
    let mut logits = Owned::poisoned(session.model().output(&[1]).unwrap());
    session.prefill(Input::Tokens(tokens), Some(logits.view_mut())).unwrap();
    logits
}

fn step(sessions: &mut [&mut Session], tokens: &[u32]) -> Result<Owned> {
    let mut logits = Owned::poisoned(sessions[0].model().output(&[sessions.len()]).unwrap());
    Session::step(sessions, Input::Tokens(tokens), logits.view_mut())?;
    Ok(logits)
}

fn with_rounded_matrices(
    tensors: impl IntoIterator<Item = (String, Weight)>,
    dtype: DType,
) -> impl Iterator<Item = (String, Weight)> {
    let matrices = ["_proj.weight", "embeddings.weight", "embedding.weight", "lm_head.weight"];
    tensors.into_iter().map(move |(name, weight)| {
        let rounded = if matrices.iter().any(|end| name.ends_with(end)) { weight.cast(dtype) } else { weight };
        (name, rounded.cast(DType::F64))
    })
}

/// The f64 results with matrices rounded to a type: the logits, and `conv_state` and `ssm_state` after the first
/// sequence.
fn rounded(golden: Golden, dtype: DType) -> [Owned; 3] {
    let tokens = golden.tokens();
    let tensors = with_rounded_matrices(golden.tensors(), dtype);
    let checkpoint = Checkpoint::new("rounded", Some(golden.config()), tensors);
    let model = Arc::new(Model::new(checkpoint, None, false, Where::Cpu(EXACT)).unwrap());
    let mut session = Session::new(&model).unwrap();
    session.prefill(Input::Tokens(&tokens[..tokens.len() / 2]), None).unwrap();
    let [conv, ssm] = states(&session);
    [forward(&model, &tokens, 2), conv, ssm]
}

/// Asserts equality up to the rounding of all layers, relative to the largest value.
fn near(got: &Owned, expected: &Owned, dtype: DType, what: &str) {
    let relative = match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::Bf16 => 0.08,
        _ => 0.02,
    };
    let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
    let off = common::worst(got, expected, 0.0, relative * largest);
    assert!(off <= 1.0, "{off} times the tolerance: {what}");
}

/// Row `row` of the logits of a sequence.
fn row(logits: &Owned, sequence: usize, row: usize) -> Owned {
    let of = common::part(&common::part(logits, 0, sequence..sequence + 1), 1, row..row + 1);
    let width = of.spec().shape[2];
    let mut flat = Owned::poisoned(Spec::new(of.spec().dtype, &[1, width]).unwrap());
    flat.view_mut().bytes().copy_from_slice(of.view().bytes());
    flat
}

/// `conv_state` and `ssm_state` of a session, from its dump.
fn states(session: &Session) -> [Owned; 2] {
    let tensors = safetensors::from_bytes("dump", &session.dump().unwrap()).unwrap();
    ["conv_state", "ssm_state"].map(|name| tensors.iter().find(|(found, _)| found == name).unwrap().1.clone())
}

#[test]
fn no_tokens_give_no_rows() {
    for model in golden::ALL.map(|golden| model_of(golden, DType::F32, Where::Cpu(Exec::default()))) {
        for batch in [1, 3] {
            assert_eq!(forward(&model, &[], batch).spec().shape[..], [batch, 0, 37]);
        }
        let mut rows = Owned::poisoned(model.output(&[0, 3]).unwrap());
        model.forward(Input::Tokens(&[]), 0, rows.view_mut()).unwrap();
    }
}

/// Decode steps of several batch sizes, for sizes that the kernels read in aligned packs and for others, and for more
/// states than threads can share a channel.
#[test]
fn steps_of_any_number_are_those_of_whole_sequences() {
    const LENGTH: usize = 4;
    let sizes = Config {
        width: 48,
        layers: 2,
        vocabulary: 29,
        inner: 72,
        state: 16,
        rank: 4,
        conv: 4,
        eps: 1e-5,
        mixer: Mixer::Mamba,
    };
    let heads = |count, groups, limit| Mixer::Mamba2(Heads { count, groups, limit });
    let open = (0.0, f64::INFINITY);
    let configs = [
        sizes,
        Config { rank: 48, ..sizes },
        Config { state: 100, rank: 6, inner: 41, conv: 3, ..sizes },
        Config { mixer: Mixer::FalconMamba(1e-3), ..sizes },
        Config { mixer: heads(6, 2, open), rank: 0, ..sizes },
        Config { mixer: heads(2, 1, (0.1, 0.5)), rank: 0, inner: 128, state: 128, ..sizes },
        Config { mixer: heads(3, 3, open), rank: 0, inner: 39, state: 5, conv: 1, ..sizes },
    ];
    for (config, dtype) in configs.into_iter().flat_map(|config| [(config, DType::F32), (config, DType::F16)]) {
        let tensors = models::tensors(&config, true);
        let tensors: Vec<_> = with_rounded_matrices(tensors, dtype).collect();
        let made = |dtype: DType, place: Where| {
            let checkpoint = Checkpoint::new("sizes", Some(config), tensors.clone());
            Arc::new(Model::new(checkpoint, Some(dtype), false, place).unwrap())
        };
        let exact = made(DType::F64, Where::Cpu(EXACT));
        let places = [Where::Cpu(Exec::default())].into_iter().chain(gpu().map(|device| Where::Cuda(device, false)));
        for model in places.map(|place| made(dtype, place)) {
            for batch in [1, 3, 5, 8, 16, 33] {
                let tokens: Vec<u32> = (0..batch * LENGTH).map(|i| (i * i % config.vocabulary) as u32).collect();
                let expected = forward(&exact, &tokens, batch);
                let mut sessions: Vec<Session> = (0..batch).map(|_| Session::new(&model).unwrap()).collect();
                for at in 0..LENGTH {
                    let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
                    let now: Vec<u32> = tokens.iter().skip(at).step_by(LENGTH).copied().collect();
                    let logits = step(&mut all, &now).unwrap();
                    let expected = common::part(&expected, 1, at..at + 1);
                    let expected = expected.view().reshape(&[batch, config.vocabulary]).unwrap().cast(DType::F64);
                    near(&logits, &expected, dtype, &format!("{config:?} {dtype} {batch} at {at}"));
                }
            }
        }
    }
}

#[test]
fn logits_and_states_agree_with_the_independent_implementation() {
    golden::ALL.into_iter().for_each(agrees_with_the_independent_implementation);
}

fn agrees_with_the_independent_implementation(golden: Golden) {
    let tokens = golden.tokens();
    let [logits, conv, ssm] = ["logits", "conv_state", "ssm_state"].map(|name| golden.expected(name));
    let exact = rounded(golden, DType::F64);
    for (got, expected) in exact.iter().zip([&logits, &conv, &ssm]) {
        near(got, expected, DType::F64, &format!("{golden:?} reference"));
    }
    let length = tokens.len() / 2;
    for (model, what) in models(golden) {
        let (dtype, what) = (model.dtype(), format!("{golden:?} {what}"));
        let [logits, conv, ssm] = rounded(golden, dtype);
        near(&forward(&model, &tokens, 2), &logits, dtype, &what);
        for cut in [0, 1, 2, 5, length - 1] {
            let mut session = Session::new(&model).unwrap();
            let (first, rest) = tokens[..length].split_at(cut);
            session.prefill(Input::Tokens(first), None).unwrap();
            let last = prefill(&mut session, rest);
            near(&last, &row(&logits, 0, length - 1), dtype, &format!("{what} cut at {cut}"));
            let [own_conv, own_ssm] = states(&session);
            near(&own_conv, &conv, dtype, &format!("{what}: samples, cut at {cut}"));
            near(&own_ssm, &ssm, dtype, &format!("{what}: states, cut at {cut}"));
            assert_eq!(session.length(), length as u64);
        }
    }
}

#[test]
fn steps_of_several_sessions_equal_whole_sequences() {
    golden::ALL.into_iter().for_each(steps_equal_whole_sequences);
}

fn steps_equal_whole_sequences(golden: Golden) {
    let tokens = golden.tokens();
    let length = tokens.len() / 2;
    for (model, what) in models(golden) {
        let what = format!("{golden:?} {what}");
        let [logits, ..] = rounded(golden, model.dtype());
        for others in [0, 1, 7, 8] {
            let mut sessions: Vec<Session> = (0..2 + others).map(|_| Session::new(&model).unwrap()).collect();
            // Sessions of a batch may have different lengths.
            prefill(&mut sessions[1], &tokens[length..length + 3]);
            for t in 0..length - 3 {
                let mut fed = vec![tokens[t], tokens[length + 3 + t]];
                fed.resize(2 + others, 1);
                let got = step(&mut sessions.iter_mut().collect::<Vec<_>>(), &fed).unwrap();
                for (sequence, at) in [(0, t), (1, t + 3)] {
                    let own = common::part(&got, 0, sequence..sequence + 1);
                    let what = format!("{what}: token {at} of sequence {sequence} of {}", 2 + others);
                    near(&own, &row(&logits, sequence, at), model.dtype(), &what);
                }
            }
            let [mut one, mut more] = [Session::new(&model).unwrap(), Session::new(&model).unwrap()];
            for t in 0..3 {
                let alone = step(&mut [&mut one], &tokens[t..t + 1]).unwrap();
                near(&alone, &row(&logits, 0, t), model.dtype(), &format!("{what}: token {t} alone"));
            }
            prefill(&mut more, &tokens[..3]);
            let [of_one, of_more] = [&mut one, &mut more].map(|session| step(&mut [session], &tokens[3..4]).unwrap());
            near(&of_one, &of_more, model.dtype(), &format!("{what}: after steps and after a prefill"));
        }
    }
}

#[test]
fn tokens_are_chosen_as_the_logits_say() {
    let plain = Sampling::default();
    let samplings = [
        Sampling { temperature: 0.0, ..plain },
        Sampling { temperature: 0.7, seed: 1, ..plain },
        Sampling { top_k: Some(5), seed: 2, ..plain },
        Sampling { top_p: Some(0.6), seed: 3, ..plain },
        Sampling { temperature: 1.5, top_k: Some(9), top_p: Some(0.8), seed: 4, ..plain },
        Sampling { temperature: 0.0, repetition_penalty: 2.0, ..plain },
        Sampling { seed: 5, repetition_penalty: 1.3, ..plain },
    ];
    let tokens = tokens();
    for (model, what) in models(MAMBA).chain(models(golden::MAMBA2)) {
        let mut base = Session::new(&model).unwrap();
        prefill(&mut base, &tokens[..5]);
        for (sampling, count) in samplings.iter().flat_map(|sampling| [(sampling, 3), (sampling, 40)]) {
            let [mut stepped, mut chosen] =
                [0, 1].map(|_| (0..count).map(|_| base.fork().unwrap()).collect::<Vec<_>>());
            let fed = vec![tokens[5]; count];
            let choices: Vec<_> = (0..count as u64).map(|draw| (*sampling, draw)).collect();
            let logits = step(&mut stepped.iter_mut().collect::<Vec<_>>(), &fed).unwrap();
            let mut sessions: Vec<_> = chosen.iter_mut().collect();
            let got = Session::next(&mut sessions, Input::Tokens(&fed), &choices).unwrap();
            let expected = choose(&logits, &choices, stepped.iter().map(Session::seen)).unwrap();
            let same = got.iter().zip(&expected).filter(|(got, expected)| got == expected).count();
            // On a GPU, rounding decides if a draw falls between two tokens.
            let enough = if what.contains("GPU") && sampling.temperature > 0.0 { count * 9 / 10 } else { count };
            assert!(same >= enough, "{what}: {sampling:?} gave {got:?} for {expected:?}");
            assert_eq!(chosen[0].dump().unwrap(), stepped[0].dump().unwrap(), "{what}");
        }
        let wrong = Session::next(&mut [&mut base], Input::Tokens(&[1]), &[]);
        assert_eq!(wrong.unwrap_err().kind, Kind::Argument);
    }
}

#[test]
fn forks_and_dumps_go_on_with_the_same_bits() {
    let tokens = tokens();
    for (model, what) in golden::ALL.into_iter().flat_map(models) {
        let mut session = Session::new(&model).unwrap();
        prefill(&mut session, &tokens[..7]);
        let (mut fork, dump) = (session.fork().unwrap(), session.dump().unwrap());
        let mut restored = Session::restore(&model, &dump).unwrap();
        assert_eq!((fork.length(), restored.length()), (7, 7));
        let logits = step(&mut [&mut session], &tokens[7..8]).unwrap();
        for other in [&mut fork, &mut restored] {
            let same = step(&mut [other], &tokens[7..8]).unwrap();
            assert_eq!(same.view().bytes(), logits.view().bytes(), "{what}");
            assert_eq!(other.dump().unwrap(), session.dump().unwrap(), "{what}");
        }
        session.reset().unwrap();
        assert_eq!(session.dump().unwrap(), Session::new(&model).unwrap().dump().unwrap(), "{what}");
        assert_ne!(fork.dump().unwrap(), session.dump().unwrap(), "{what}: a fork goes its own way");
    }
}

#[test]
fn a_backbone_takes_features() {
    let tokens = tokens();
    let length = tokens.len() / 2;
    let embedding = |model: &Model| {
        let tensors = Reader::open(&folder().join("model.safetensors")).unwrap();
        let table = tensors.tensor(tensors.entry("backbone.embeddings.weight").unwrap()).unwrap().cast(model.dtype());
        let width = model.config().width;
        let values = table.view().to_f64();
        let at = |i: usize| values[[tokens[i / width] as usize, i % width]];
        Owned::from_fn(Spec::new(model.dtype(), &[1, length, width]).unwrap(), at)
    };
    let place = || Where::Cpu(Exec::default());
    let open = || Checkpoint::open(&folder(), true).unwrap();
    let backbone = Arc::new(Model::new(open(), None, true, place()).unwrap());
    assert_eq!(backbone.config().vocabulary, 0);
    let features = embedding(&backbone);
    let mut whole = Owned::poisoned(backbone.output(&[1, length]).unwrap());
    backbone.forward(Input::Features(features.view()), 1, whole.view_mut()).unwrap();
    // The embeddings are tied, so the logits are the product of the backbone's output and the embedding.
    let table = Reader::open(&folder().join("model.safetensors")).unwrap();
    let table = table.tensor(table.entry("backbone.embeddings.weight").unwrap()).unwrap().view().to_f64();
    let (whole_values, logits) = (whole.view().to_f64(), expected("logits").view().to_f64());
    for t in 0..length {
        for v in 0..table.shape()[0] {
            let sum: f64 = (0..table.shape()[1]).map(|m| whole_values[[0, t, m]] * table[[v, m]]).sum();
            assert!((sum - logits[[0, t, v]]).abs() < 1e-3, "token {t}, logit {v}");
        }
    }
    let mut session = Session::new(&backbone).unwrap();
    for t in 0..length {
        let frame = common::part(&features, 1, t..t + 1);
        let mut y = Owned::poisoned(backbone.output(&[1]).unwrap());
        Session::step(&mut [&mut session], Input::Features(frame.view()), y.view_mut()).unwrap();
        near(&y, &row(&whole, 0, t), DType::F32, &format!("frame {t}"));
    }
    let error = session.prefill(Input::Tokens(&[1]), None).unwrap_err();
    assert_eq!(error.kind, Kind::Argument);
}

#[test]
fn logits_that_are_no_numbers_leave_sessions_as_they_were() {
    let nowhere = |(name, weight): (String, Weight)| match name.as_str() {
        "backbone.norm_f.weight" => (name, Owned::poisoned(weight.spec()).into()),
        _ => (name, weight),
    };
    let plain = Sampling::default();
    for place in [Where::Cpu(Exec::default())].into_iter().chain(gpu().map(|device| Where::Cuda(device, false))) {
        let model = changed(place, |tensors| tensors.into_iter().map(nowhere).collect());
        let mut session = Session::new(&model).unwrap();
        session.prefill(Input::Tokens(&[1, 2, 3]), None).unwrap();
        let before = session.dump().unwrap();
        for sampling in [plain, Sampling { temperature: 0.0, ..plain }, Sampling { repetition_penalty: 1.5, ..plain }] {
            for token in [4, 1] {
                let wrong = Session::next(&mut [&mut session], Input::Tokens(&[token]), &[(sampling, 4)]);
                assert_eq!(wrong.unwrap_err().kind, Kind::Argument);
                assert_eq!(session.dump().unwrap(), before);
            }
        }
    }
}

/// A step of several sessions of which one has no logits that are numbers changes none of them.
#[test]
fn sessions_step_together_or_not_at_all() {
    for place in [Where::Cpu(Exec::default())].into_iter().chain(gpu().map(|device| Where::Cuda(device, false))) {
        let model = changed(place, without_token_7);
        for count in [2, 5] {
            let mut sessions: Vec<Session> = (0..count).map(|_| Session::new(&model).unwrap()).collect();
            let mut tokens = vec![3; count];
            let dumps = |sessions: &[Session]| sessions.iter().map(|one| one.dump().unwrap()).collect::<Vec<_>>();
            let choices = vec![(Sampling::default(), 0); count];
            let next = |sessions: &mut [Session], tokens: &[u32]| {
                Session::next(&mut sessions.iter_mut().collect::<Vec<_>>(), Input::Tokens(tokens), &choices)
            };
            next(&mut sessions, &tokens).unwrap();
            let before = dumps(&sessions);
            tokens[1] = 7;
            assert_eq!(next(&mut sessions, &tokens).unwrap_err().kind, Kind::Argument);
            assert_eq!(dumps(&sessions), before);
            tokens[1] = 6;
            next(&mut sessions, &tokens).unwrap();
            assert_ne!(dumps(&sessions), before);
        }
    }
}

#[test]
fn a_loss_that_is_no_number_leaves_the_session_as_it_was() {
    for place in [Where::Cpu(Exec::default())].into_iter().chain(gpu().map(|device| Where::Cuda(device, false))) {
        let mut session = Session::new(&changed(place, without_token_7)).unwrap();
        session.prefill(Input::Tokens(&[1, 2, 3]), None).unwrap();
        let before = session.dump().unwrap();
        // Only the third chunk has the token.
        let mut text = vec![5; 2500];
        text[2400] = 7;
        assert_eq!(session.loss(&text).unwrap_err().kind, Kind::Argument);
        assert_eq!(session.dump().unwrap(), before);
        assert!(session.loss(&text[..2400]).unwrap() > 0.0);
        assert_eq!(session.length(), 3 + 2399);
    }
}

type Tensors = Vec<(String, Weight)>;

/// The golden model with changed tensors.
fn changed(place: Where, change: impl Fn(Tensors) -> Tensors) -> Arc<Model> {
    let checkpoint = Checkpoint::new("changed", Some(config()), change(tensors()));
    Arc::new(Model::new(checkpoint, None, false, place).unwrap())
}

/// Replaces the embedding of token 7, but not its row of the head, by numbers that are not finite.
fn without_token_7(mut tensors: Tensors) -> Tensors {
    let (_, weight) = tensors.iter_mut().find(|(name, _)| name == "backbone.embeddings.weight").unwrap();
    let (spec, values) = (weight.spec(), weight.view().to_f64());
    let value =
        |i: usize| if i / spec.shape[1] == 7 { f64::NAN } else { values[[i / spec.shape[1], i % spec.shape[1]]] };
    let head = std::mem::replace(weight, Owned::from_fn(spec, value).into());
    tensors.push(("lm_head.weight".into(), head));
    tensors
}

#[test]
fn wrong_calls_say_what_is_wrong_and_change_nothing() {
    let model = model(DType::F32, Where::Cpu(Exec::default()));
    let other = self::model(DType::F32, Where::Cpu(Exec::default()));
    let (mut a, mut b) = (Session::new(&model).unwrap(), Session::new(&other).unwrap());
    prefill(&mut a, &[1, 2, 3]);
    let before = a.dump().unwrap();
    let kind = |result: Result<Owned>| result.err().expect("an error").kind;
    assert_eq!(kind(step(&mut [&mut a], &[37])), Kind::Argument);
    assert_eq!(kind(step(&mut [&mut a], &[1, 2])), Kind::Argument);
    assert_eq!(kind(step(&mut [&mut a, &mut b], &[1, 2])), Kind::Argument);
    let mut logits = Owned::poisoned(model.output(&[1]).unwrap());
    assert_eq!(a.prefill(Input::Tokens(&[]), Some(logits.view_mut())).unwrap_err().kind, Kind::Argument);
    let narrow = Owned::zeros(Spec::new(DType::F32, &[1, 19]).unwrap());
    let wide = Owned::zeros(Spec::new(DType::F64, &[1, 20]).unwrap());
    let fitting = Owned::zeros(Spec::new(DType::F32, &[1, 20]).unwrap());
    assert_eq!(a.prefill(Input::Features(fitting.view()), None).unwrap_err().kind, Kind::Argument);
    let place = Where::Cpu(Exec::default());
    let backbone = Arc::new(Model::new(Checkpoint::open(&folder(), false).unwrap(), None, true, place).unwrap());
    let mut session = Session::new(&backbone).unwrap();
    let fresh = session.dump().unwrap();
    let unfit = [f32::NAN, f32::INFINITY].map(|odd| {
        let value = |i| if i == 7 { odd.into() } else { 0.5 };
        Owned::from_fn(Spec::new(DType::F32, &[1, 20]).unwrap(), value)
    });
    for (features, kind) in
        [(&narrow, Kind::Shape), (&wide, Kind::Shape), (&unfit[0], Kind::Argument), (&unfit[1], Kind::Argument)]
    {
        assert_eq!(session.prefill(Input::Features(features.view()), None).unwrap_err().kind, kind);
        let mut y = Owned::poisoned(backbone.output(&[1]).unwrap());
        let stepped = Session::step(&mut [&mut session], Input::Features(features.view()), y.view_mut());
        assert_eq!(stepped.unwrap_err().kind, kind);
    }
    assert_eq!(session.dump().unwrap(), fresh);
    let half = self::model(DType::Bf16, Where::Cpu(Exec::default()));
    assert_eq!(Session::restore(&half, &before).err().unwrap().kind, Kind::Argument);
    for damaged in [&before[..before.len() - 1], &before[..5], &[]] {
        assert_eq!(Session::restore(&model, damaged).err().unwrap().kind, Kind::Argument);
    }
    for (length, allowed) in [(1 << 32, true), (1 << 62, true), ((1 << 62) + 1, false), (u64::MAX, false)] {
        let restored = Session::restore(&model, &with_length(&before, length));
        assert_eq!(restored.as_ref().map(Session::length).ok(), allowed.then_some(length));
    }
    assert_eq!(a.dump().unwrap(), before);
}

#[test]
fn lengths_beyond_32_bits_are_counted() {
    let model = model(DType::F32, Where::Cpu(Exec::default()));
    let mut plain = Session::new(&model).unwrap();
    prefill(&mut plain, &[1, 2, 3]);
    let mut long = Session::restore(&model, &with_length(&plain.dump().unwrap(), (1 << 32) - 2)).unwrap();
    for (token, length) in [(4, (1 << 32) - 1), (5, 1 << 32), (6, (1 << 32) + 1)] {
        let [of_plain, of_long] = [&mut plain, &mut long].map(|session| step(&mut [session], &[token]).unwrap());
        assert_eq!(of_long.view().bytes(), of_plain.view().bytes());
        assert_eq!(long.length(), length);
    }
    let restored = Session::restore(&model, &long.dump().unwrap()).unwrap();
    assert_eq!(restored.length(), (1 << 32) + 1);
}

/// The dump with `length` as the number of processed tokens.
fn with_length(dump: &[u8], length: u64) -> Vec<u8> {
    let tensors = safetensors::from_bytes("dump", dump).unwrap();
    let (spec, bytes) = (Spec::new(DType::U8, &[8]).unwrap(), length.to_le_bytes());
    let views: Vec<(&str, View)> = tensors
        .iter()
        .map(|(name, tensor)| match name.as_str() {
            "length" => ("length", View::new(spec, &bytes).unwrap()),
            name => (name, tensor.view()),
        })
        .collect();
    safetensors::to_bytes(&views).unwrap()
}

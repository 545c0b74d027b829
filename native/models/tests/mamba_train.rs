//! Training: the gradient of a whole model against finite differences of the loss, and the same on every device; AdamW
//! against its formula; and that the loss falls. On the CPU, and on a GPU where there is one.

#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "common/models.rs"]
mod models;

use common::{EXACT, gpu, levels};
use models::Tensors;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::tensor::{DType, Described, Owned};
use sidewinder_models::mamba::train::{AdamW, Trainer};
use sidewinder_models::mamba::{Checkpoint, Config, Heads, Mixer, Model, Session, Where};
use std::collections::BTreeMap;
use std::sync::Arc;

const CONFIG: Config = Config {
    width: 6,
    layers: 2,
    vocabulary: 11,
    inner: 10,
    state: 3,
    rank: 2,
    conv: 4,
    eps: 1e-5,
    mixer: Mixer::Mamba,
};

/// Mamba-2 with bounds of the step size.
const SECOND: Config =
    Config { inner: 12, rank: 0, mixer: Mixer::Mamba2(Heads { count: 4, groups: 2, limit: (0.05, 0.5) }), ..CONFIG };

/// The first Mamba with norms of dt, B and C.
const NORMED: Config = Config { mixer: Mixer::FalconMamba(1e-3), ..CONFIG };

fn tensors(whole: bool) -> Tensors {
    models::tensors(&CONFIG, whole)
}

/// All models, with the biases of projections and a separate head, or with neither.
fn all_models() -> impl Iterator<Item = (Config, Tensors)> {
    [CONFIG, NORMED, SECOND]
        .into_iter()
        .flat_map(|config| [false, true].map(|whole| (config, models::tensors(&config, whole))))
}

fn model(tensors: &Tensors, dtype: DType, place: Where) -> Arc<Model> {
    model_of(CONFIG, tensors, dtype, place)
}

fn model_of(config: Config, tensors: &Tensors, dtype: DType, place: Where) -> Arc<Model> {
    let checkpoint = Checkpoint::new("test", Some(config), tensors.clone());
    Arc::new(Model::new(checkpoint, Some(dtype), false, place).unwrap())
}

fn trainer(tensors: &Tensors, dtype: DType, place: Where) -> Trainer {
    Trainer::new(&model(tensors, dtype, place)).unwrap()
}

/// Three sequences of eight tokens, with some tokens more than once and some never.
fn tokens() -> Vec<u32> {
    (0..24u32).map(|i| (i * i + 3 * i + i / 7) % 9).collect()
}

const BATCH: usize = 3;

fn gradient(mut trainer: Trainer) -> (f64, Tensors) {
    let loss = trainer.gradient(&tokens(), BATCH).unwrap();
    (loss, trainer.gradients().unwrap().into_iter().collect())
}

/// The tensors with `name` moved by `by` along a random direction, and the direction.
fn moved(tensors: &Tensors, name: &str, by: f64) -> (Tensors, Owned) {
    let mut random = common::Random(name.len() as u64 + 77);
    let weight = tensors[name].view().to_f64();
    let direction = Owned::from_fn(tensors[name].spec(), |_| random.next() - 0.5);
    let mut values = weight.iter().zip(direction.view().to_f64()).map(|(w, d)| w + by * d).collect::<Vec<_>>();
    let mut moved = tensors.clone();
    moved.insert(name.into(), Owned::from_fn(tensors[name].spec(), |i| std::mem::take(&mut values[i])).into());
    (moved, direction)
}

#[test]
fn the_gradient_of_each_weight_is_that_of_the_loss() {
    for (config, tensors) in all_models() {
        let learner = |tensors: &_, dtype, place| Trainer::new(&model_of(config, tensors, dtype, place)).unwrap();
        let (_, gradients) = gradient(learner(&tensors, DType::F64, Where::Cpu(EXACT)));
        assert_eq!(gradients.keys().collect::<Vec<_>>(), tensors.keys().collect::<Vec<_>>());
        for name in tensors.keys() {
            let by = 1e-5;
            let loss = |by| gradient(learner(&moved(&tensors, name, by).0, DType::F64, Where::Cpu(EXACT))).0;
            let slope = (loss(by) - loss(-by)) / (2.0 * by);
            let direction = moved(&tensors, name, 0.0).1.view().to_f64();
            let expected = (gradients[name].view().to_f64() * direction).sum();
            assert!(slope.abs() > 1e-6, "{name} does not matter");
            assert!((slope - expected).abs() < 1e-8 + 1e-6 * slope.abs(), "{name}: {slope} and {expected}");
        }
    }
}

#[test]
fn losses_and_gradients_are_the_same_everywhere() {
    for (config, tensors) in all_models() {
        let learner = |tensors: &_, dtype, place| Trainer::new(&model_of(config, tensors, dtype, place)).unwrap();
        let (loss, expected) = gradient(learner(&tensors, DType::F64, Where::Cpu(EXACT)));
        for (place, dtype, what) in places() {
            let (got, gradients) = gradient(learner(&tensors, dtype, place));
            let relative = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
            assert!((got - loss).abs() < relative * loss, "{got} and {loss}: {what}");
            for (name, expected) in &expected {
                let expected = expected.view().to_f64();
                let largest = expected.iter().fold(0.0f64, |most, v| most.max(v.abs()));
                let off = (gradients[name].view().to_f64() - expected).iter().fold(0.0f64, |most, v| most.max(v.abs()));
                assert!(off <= 10.0 * relative * largest, "{name} is off by {off} of {largest}: {what}");
            }
        }
    }
}

/// Every device and type of arithmetic for training, each with a label.
fn places() -> impl Iterator<Item = (Where, DType, String)> {
    let types = [DType::F64, DType::F32];
    let on_cpu = levels().flat_map(move |level| types.map(|dtype| (level, dtype))).flat_map(|(level, dtype)| {
        [1, 2].map(|threads| (Where::Cpu(Exec { level, threads }), dtype, format!("{dtype} {level:?} {threads}")))
    });
    let on_gpu = gpu().into_iter().flat_map(move |device| {
        types.map(|dtype| (Where::Cuda(device.clone(), false), dtype, format!("{dtype} on a GPU")))
    });
    on_cpu.chain(on_gpu)
}

#[test]
fn the_loss_is_that_of_sessions() {
    let tokens = tokens();
    for (place, dtype, what) in places() {
        let model = model(&tensors(true), dtype, place);
        let mean = (0..BATCH).map(|i| {
            let mut session = Session::new(&model).unwrap();
            let loss = session.loss(&tokens[8 * i..8 * (i + 1)]).unwrap();
            assert_eq!(session.length(), 7);
            loss / BATCH as f64
        });
        let (expected, _) = gradient(Trainer::new(&model).unwrap());
        let mean: f64 = mean.sum();
        assert!((mean - expected).abs() < 1e-5 * expected, "{mean} and {expected}: {what}");
    }
    // A text of several chunks of `Session::loss`.
    let long: Vec<u32> = (0..2500u32).map(|i| (i * i + i / 3) % 11).collect();
    let model = model(&tensors(true), DType::F64, Where::Cpu(EXACT));
    let whole = Session::new(&model).unwrap().loss(&long).unwrap();
    let expected = Trainer::new(&model).unwrap().gradient(&long, 1).unwrap();
    assert!((whole - expected).abs() < 1e-9, "{whole} and {expected}");
}

#[test]
fn a_step_is_that_of_adamw() {
    let how = AdamW { learning_rate: 0.01, clip: 0.5, eps: 1e-3, ..AdamW::default() };
    let mut trainer = trainer(&tensors(true), DType::F64, Where::Cpu(EXACT));
    let mut weights: Tensors = trainer.tensors().unwrap().into_iter().collect();
    let (mut means, mut squares) = (BTreeMap::new(), BTreeMap::new());
    for step in 1..=3 {
        let progress = trainer.step(&tokens(), BATCH, &how).unwrap();
        let gradients: Tensors = trainer.gradients().unwrap().into_iter().collect();
        let norm = gradients.values().map(|g| g.view().to_f64().mapv(|v| v * v).sum()).sum::<f64>().sqrt();
        assert!((norm - progress.norm).abs() < 1e-12 * norm && norm > how.clip, "{norm} and {}", progress.norm);
        let now: Tensors = trainer.tensors().unwrap().into_iter().collect();
        for (name, g) in &gradients {
            let g = g.view().to_f64() * (how.clip / norm);
            let m = means.entry(name.clone()).or_insert_with(|| g.clone() * 0.0);
            *m = m.clone() * how.beta1 + g.clone() * (1.0 - how.beta1);
            let v = squares.entry(name.clone()).or_insert_with(|| g.clone() * 0.0);
            *v = v.clone() * how.beta2 + g.mapv(|g| g * g) * (1.0 - how.beta2);
            let corrected = |beta: f64| 1.0 - beta.powi(step);
            let scale = v.mapv(|v| (v / corrected(how.beta2)).sqrt() + how.eps);
            let decay = if g.ndim() == 2 && !name.ends_with("A_log") { how.weight_decay } else { 0.0 };
            let w = weights[name].view().to_f64();
            let change = m.clone() / corrected(how.beta1) / scale + w.clone() * decay;
            let expected = w - change * how.learning_rate;
            let off = (now[name].view().to_f64() - expected).iter().fold(0.0f64, |most, v| most.max(v.abs()));
            assert!(off < 1e-12, "{name} is off by {off}");
        }
        weights = now;
    }
}

#[test]
fn a_model_learns_a_text_with_the_same_bits_each_time() {
    let mut by_level = BTreeMap::new();
    let places = || places().filter(|(_, dtype, _)| *dtype == DType::F32);
    let kinds = [CONFIG, NORMED, SECOND].into_iter().flat_map(|config| places().map(move |place| (config, place)));
    for (config, (place, dtype, what)) in kinds {
        let level = match &place {
            Where::Cpu(exec) => exec.level.name(),
            Where::Cuda(..) => "cuda",
        };
        let (level, what) = ((config.mixer.name(), level), format!("{} {what}", config.mixer.name()));
        let model = model_of(config, &models::tensors(&config, false), dtype, place);
        let learn = || {
            let mut trainer = Trainer::new(&model).unwrap();
            let how = AdamW { learning_rate: 0.02, ..AdamW::default() };
            let losses: Vec<f64> = (0..150).map(|_| trainer.step(&tokens(), BATCH, &how).unwrap().loss).collect();
            (losses, trainer)
        };
        let (losses, trainer) = learn();
        assert!(losses[0] > 1.5 && losses[149] < 0.1, "{} and {}: {what}", losses[0], losses[149]);
        assert_eq!(losses, learn().0, "{what}");
        let others = by_level.entry(level).or_insert_with(|| losses.clone());
        assert_eq!(losses, *others, "with any number of threads: {what}");
        let learnt = Arc::new(Model::new(trainer.checkpoint().unwrap(), None, false, Where::Cpu(EXACT)).unwrap());
        let loss = Session::new(&learnt).unwrap().loss(&tokens()[..8]).unwrap();
        assert!(loss < 0.15, "{loss} from its checkpoint: {what}");
    }
}

fn gpus() -> Vec<Device> {
    gpu().into_iter().chain((1..).map_while(|ordinal| Device::get(ordinal).ok())).collect()
}

/// Several devices of each kind, in turn for `count` shares.
fn shared_by(count: usize) -> impl Iterator<Item = (Vec<Where>, DType, String)> {
    let on_gpus = |all: Vec<Device>| (0..count).map(|i| Where::Cuda(all[i % all.len()].clone(), false)).collect();
    let gpus = Some(gpus()).filter(|all| !all.is_empty()).map(on_gpus);
    let on_cpu = levels().map(|level| Exec { level, threads: 2 }).map(move |exec| vec![Where::Cpu(exec); count]);
    on_cpu.chain(gpus).flat_map(|places: Vec<_>| {
        [DType::F64, DType::F32].map(|dtype| (places.clone(), dtype, format!("{dtype} on {}", places.len())))
    })
}

#[test]
fn several_devices_learn_as_one_does() {
    let how = AdamW { learning_rate: 0.02, ..AdamW::default() };
    let tokens: Vec<u32> = (0..7 * 8).map(|i: u32| (i * i + 3 * i + i / 7) % 9).collect();
    for config in [CONFIG, NORMED, SECOND] {
        let tensors = models::tensors(&config, true);
        for (places, dtype, what) in [2, 3, 7].into_iter().flat_map(shared_by) {
            let model = model_of(config, &tensors, dtype, places[0].clone());
            let learn = |places: &[Where]| {
                let mut trainer = Trainer::on(&model, places).unwrap();
                let steps: Vec<_> = (0..4).map(|_| trainer.step(&tokens, 7, &how).unwrap()).collect();
                (steps.iter().flat_map(|step| [step.loss, step.norm]).collect::<Vec<_>>(), trainer)
            };
            let (one, alone) = learn(&places[..1]);
            let (several, trainer) = learn(&places);
            assert_eq!(several, learn(&places).0, "{what}: equal bits");
            let relative = if dtype == DType::F64 { 1e-10 } else { 1e-4 };
            for (one, several) in one.iter().zip(&several) {
                assert!((one - several).abs() < relative * one, "{one} and {several}: {what}");
            }
            for ((name, one), (_, several)) in alone.tensors().unwrap().iter().zip(trainer.tensors().unwrap()) {
                // Where gradients are near 0, AdamW's first steps follow their signs.
                let off = one.view().to_f64() - several.view().to_f64();
                let most = off.iter().fold(0.0f64, |most, v| most.max(v.abs()));
                assert!(most < if dtype == DType::F64 { 1e-7 } else { 5e-3 }, "{name} is off by {most}: {what}");
            }
            assert!(trainer.equal_ranks().unwrap(), "{what}");
        }
    }
}

#[test]
fn devices_that_cannot_share_a_batch_are_refused() {
    let model = model(&tensors(false), DType::F32, Where::Cpu(EXACT));
    let cpu = || Where::Cpu(EXACT);
    assert_eq!(&*Trainer::on(&model, &[]).err().unwrap().argument, "devices");
    if let Some(device) = gpu() {
        assert_eq!(&*Trainer::on(&model, &[cpu(), Where::Cuda(device, false)]).err().unwrap().argument, "devices");
    }
    let mut trainer = Trainer::on(&model, &[cpu(), cpu(), cpu(), cpu()]).unwrap();
    let error = trainer.step(&tokens(), BATCH, &AdamW::default()).unwrap_err();
    assert_eq!((error.kind, &*error.argument), (Kind::Size, "tokens"));
}

#[test]
fn what_cannot_be_learnt_from_is_refused() {
    let mut trainer = trainer(&tensors(false), DType::F32, Where::Cpu(EXACT));
    let how = AdamW::default();
    let argument = |result: sidewinder_kernels::error::Result<_>| result.map(|_: f64| ()).unwrap_err().argument;
    let mut step = |tokens: &[u32], batch, how: &AdamW| trainer.step(tokens, batch, how).map(|p| p.loss);
    for (tokens, batch) in [(&[1, 2, 3][..], 2), (&[1, 2], 2), (&[], 0), (&[], 1), (&[1, 11], 1)] {
        assert_eq!(&*argument(step(tokens, batch, &how)), "tokens");
    }
    for (name, how) in [
        ("learning_rate", AdamW { learning_rate: f64::NAN, ..how }),
        ("beta1", AdamW { beta1: 1.0, ..how }),
        ("beta2", AdamW { beta2: -0.1, ..how }),
        ("eps", AdamW { eps: 0.0, ..how }),
        ("weight_decay", AdamW { weight_decay: -1.0, ..how }),
        ("clip", AdamW { clip: f64::INFINITY, ..how }),
    ] {
        assert_eq!(&*argument(step(&[1, 2, 3], 1, &how)), name);
    }
    let checkpoint = Checkpoint::new("test", Some(CONFIG), tensors(false));
    let backbone = Model::new(checkpoint, None, true, Where::Cpu(EXACT)).unwrap();
    assert_eq!(Trainer::new(&backbone).err().unwrap().kind, Kind::Argument);
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let mut tensors = tensors(false);
    let broken = Owned::from_fn(tensors["backbone.norm_f.weight"].spec(), |_| f64::NAN);
    tensors.insert("backbone.norm_f.weight".into(), broken.into());
    let mut trainer = trainer(&tensors, DType::F32, Where::Cpu(EXACT));
    let before = trainer.tensors().unwrap();
    let error = trainer.step(&tokens(), BATCH, &AdamW::default()).unwrap_err();
    assert_eq!(&*error.argument, "learning_rate");
    for ((name, before), (_, after)) in before.iter().zip(trainer.tensors().unwrap()) {
        assert_eq!(before.view().bytes(), after.view().bytes(), "{name}");
    }
}

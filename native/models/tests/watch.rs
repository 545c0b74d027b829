//! Progress of long calls, and their early end: reports grow from nothing to all of each stage, and a call that ends at
//! any of them has changed nothing. On the CPU, and on a GPU where there is one.

#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "common/golden.rs"]
mod golden;
#[path = "common/models.rs"]
mod models;

use common::gpu;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::ops::products::matrices::Quantization;
use sidewinder_kernels::tensor::{DType, Owned};
use sidewinder_models::mamba::train::{AdamW, Trainer};
use sidewinder_models::mamba::{Checkpoint, Config, Heads, Input, Mixer, Model, Session, Weight, Where};
use sidewinder_models::watch::{Stage, Watch};
use std::cell::RefCell;
use std::sync::Arc;

const MAMBA: Config = Config {
    width: 32,
    layers: 3,
    vocabulary: 11,
    inner: 64,
    state: 4,
    rank: 2,
    conv: 4,
    eps: 1e-5,
    mixer: Mixer::Mamba,
};
const SECOND: Config =
    Config { rank: 0, mixer: Mixer::Mamba2(Heads { count: 4, groups: 2, limit: (0.05, 0.5) }), ..MAMBA };
const CONFIGS: [Config; 2] = [MAMBA, SECOND];

/// Two chunks for a loss, and two sequences for training.
const TOKENS: usize = 1030;

type Report = (Stage, usize, usize);

/// Keeps all reports, and ends the call at the one with this index.
struct Log {
    reports: RefCell<Vec<Report>>,
    end: usize,
}

impl Log {
    fn until(end: usize) -> Log {
        Log { reports: RefCell::default(), end }
    }
}

impl Watch for Log {
    fn exact(&self) -> bool {
        true
    }

    fn report(&self, stage: Stage, done: usize, total: usize) -> Result<()> {
        let mut reports = self.reports.borrow_mut();
        if reports.len() == self.end {
            return Err(Error::new(Kind::Cancelled, "test").got(self.end));
        }
        reports.push((stage, done, total));
        Ok(())
    }
}

fn places() -> impl Iterator<Item = Where> {
    let on_cpu = [1, 2].map(|threads| Where::Cpu(Exec { threads, ..Exec::default() }));
    on_cpu.into_iter().chain(gpu().map(|device| Where::Cuda(device, false)))
}

fn models() -> impl Iterator<Item = Arc<Model>> {
    let model = |config: &Config, place: Where| {
        Arc::new(Model::new(checkpoint(config), Some(DType::F32), false, place).unwrap())
    };
    places().flat_map(move |place| CONFIGS.map(|config| model(&config, place.clone())))
}

fn checkpoint(config: &Config) -> Checkpoint {
    Checkpoint::new("random", Some(*config), models::tensors(config, true))
}

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| (i * i + 3 * i + i / 7) % MAMBA.vocabulary as u32).collect()
}

/// The reports of a call that runs to its end, which grow by one, or by several for bytes, from 0 to the total of each
/// of these stages.
fn reports(stages: &[Stage], call: impl FnOnce(&Log) -> Result<()>) -> Vec<Report> {
    let log = Log::until(usize::MAX);
    call(&log).unwrap();
    let reports = log.reports.into_inner();
    let mut of_stages = reports.chunk_by(|a, b| a.0 == b.0);
    for stage in stages {
        let reports = of_stages.next().unwrap_or_else(|| panic!("no {stage:?}"));
        let (first, last) = (reports[0], reports[reports.len() - 1]);
        assert_eq!((first.0, first.1), (*stage, 0));
        assert!(last.1 == last.2 && last.2 > 0, "{last:?}");
        assert!(reports.windows(2).all(|pair| pair[0].1 < pair[1].1 && pair[0].2 == pair[1].2), "{reports:?}");
    }
    assert!(of_stages.next().is_none(), "{reports:?}");
    reports
}

/// Calls that end at each of `count` reports, and what each has heard until then.
fn ended(count: usize, mut call: impl FnMut(&Log) -> Result<()>) {
    for end in 0..count {
        let log = Log::until(end);
        let error = call(&log).unwrap_err();
        assert_eq!((error.kind, &*error.got), (Kind::Cancelled, &*end.to_string()));
        assert_eq!(log.reports.into_inner().len(), end, "it goes on after its end");
    }
}

#[test]
fn a_session_is_as_it_was() {
    for model in models() {
        let tokens = tokens();
        let logits = |session: &mut Session, watch: &dyn Watch| {
            let mut logits = Owned::poisoned(model.output(&[1]).unwrap());
            session.prefill_watched(Input::Tokens(&tokens), Some(logits.view_mut()), watch)?;
            Ok(logits)
        };
        let mut session = Session::new(&model).unwrap();
        session.prefill(Input::Tokens(&[1, 2, 3]), None).unwrap();
        let before = session.dump().unwrap();
        let mut other = session.fork().unwrap();
        let all = reports(&[Stage::Prefill], |log| logits(&mut other, log).map(drop));
        assert_eq!(all.len(), MAMBA.layers + 2);

        ended(all.len(), |log| logits(&mut session, log).map(drop));
        assert_eq!(session.dump().unwrap(), before);
        let all = reports(&[Stage::Loss], |log| session.fork()?.loss_watched(&tokens, log).map(drop));
        assert_eq!(all.len(), 2 * (MAMBA.layers + 1) + 1);
        ended(all.len(), |log| session.loss_watched(&tokens, log).map(drop));
        assert_eq!(session.dump().unwrap(), before);

        let mut fresh = Session::restore(&model, &before).unwrap();
        let [whole, again] =
            [&mut session, &mut fresh].map(|session| logits(session, &Log::until(usize::MAX)).unwrap());
        assert_eq!(whole.view().bytes(), again.view().bytes());
        assert_eq!(session.dump().unwrap(), other.dump().unwrap());
    }
}

#[test]
fn whole_sequences_end_early() {
    for model in models() {
        let tokens = tokens();
        let forward = |log: &Log| {
            let mut logits = Owned::poisoned(model.output(&[2, TOKENS / 2]).unwrap());
            model.forward_watched(Input::Tokens(&tokens), 2, logits.view_mut(), log)
        };
        let all = reports(&[Stage::Forward], forward);
        assert_eq!(all.len(), MAMBA.layers + 2);
        ended(all.len(), forward);
    }
}

#[test]
fn a_trainer_is_as_it_was() {
    for model in models() {
        let step = |trainer: &mut Trainer, log: &Log| {
            trainer.step_watched(&tokens(), 2, &AdamW::default(), log).map(|progress| progress.loss)
        };
        let bytes = |trainer: &Trainer| -> Vec<Vec<u8>> {
            let tensors: Vec<(String, Weight)> = trainer.tensors().unwrap();
            tensors.iter().map(|(_, weight)| weight.view().bytes().to_vec()).collect()
        };
        let [mut trainer, mut other] = [(); 2].map(|()| Trainer::new(&model).unwrap());
        let before = bytes(&trainer);
        let all = reports(&[Stage::Train], |log| step(&mut other, log).map(drop));
        assert_eq!(all.len(), 2 * MAMBA.layers + 2);
        ended(all.len(), |log| step(&mut trainer, log).map(drop));
        assert!(bytes(&trainer) == before);

        let losses = [&mut trainer, &mut other].map(|trainer| step(trainer, &Log::until(usize::MAX)).unwrap());
        assert!(losses[0] > losses[1], "the other trainer is a step ahead");
        let loss = step(&mut trainer, &Log::until(usize::MAX)).unwrap();
        assert_eq!(loss.to_bits(), losses[1].to_bits());
    }
}

#[test]
fn loading_tells_each_stage() {
    for place in places() {
        let how = Quantization::from_name("q8_0");
        let load = |log: &Log| {
            Checkpoint::open_watched(&golden::folder(), true, log)?;
            Model::watched(checkpoint(&MAMBA), Some(DType::F32), false, how, place.clone(), log).map(drop)
        };
        let stages = [Stage::Read, Stage::Convert, Stage::Quantize, Stage::Upload];
        let all = reports(if matches!(place, Where::Cpu(_)) { &stages[..3] } else { &stages }, load);
        assert_eq!(all.iter().filter(|report| report.0 == Stage::Convert).count(), MAMBA.layers + 2);
        assert_eq!(all.iter().filter(|report| report.0 == Stage::Quantize).count(), MAMBA.layers + 2);
        ended(all.len(), load);
    }
}

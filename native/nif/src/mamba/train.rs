//! Trainers.

use super::{Fed, HeldModel, loaded};
use crate::answer::answer;
use crate::ops::{Target, decode_map};
use crate::watch::Call;
use rustler::{Env, ResourceArc, Term};
use sidewinder_kernels::error::Result;
use sidewinder_models::mamba::train::{AdamW, Trainer};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A trainer as a resource, used by one call at a time.
pub struct HeldTrainer(Mutex<Trainer>);

impl rustler::Resource for HeldTrainer {}

impl HeldTrainer {
    fn lock(&self) -> MutexGuard<'_, Trainer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a trainer that starts from the weights of a model, on these targets, or where the model is if there are none.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_trainer<'a>(env: Env<'a>, model: ResourceArc<HeldModel>, targets: Vec<Term<'a>>) -> Term<'a> {
    answer(env, || {
        let place = |target: Term<'a>| decode_map::<Target>("target", target)?.place();
        let places = targets.into_iter().map(place).collect::<Result<Vec<_>>>()?;
        let trainer = if places.is_empty() { Trainer::new(&model.0) } else { Trainer::on(&model.0, &places) };
        Ok(ResourceArc::new(HeldTrainer(Mutex::new(trainer?))))
    })
}

scheduled!(mamba_learn_cpu, mamba_learn_io => learn,
    [trainer: ResourceArc<HeldTrainer>] [input: Term<'a>] [how: Term<'a>] [watch: Term<'a>]);

/// Trains on sequences for one step: `{loss, norm of the gradient}`.
fn learn<'a>(
    env: Env<'a>,
    trainer: ResourceArc<HeldTrainer>,
    input: Term<'a>,
    how: Term<'a>,
    watch: Term<'a>,
) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let fed = Fed::decode(input)?;
        let how: AdamW = decode_map("options", how)?;
        let [batch, _] = fed.sizes()?;
        let progress = trainer.lock().step_watched(fed.tokens()?, batch, &how, &watch)?;
        Ok((progress.loss, progress.norm))
    })
}

/// A model with the trainer's current weights, as [`mamba_load`] returns it; on the trainer's device if the target is
/// `nil`.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_learnt<'a>(
    env: Env<'a>,
    trainer: ResourceArc<HeldTrainer>,
    loading: Term<'a>,
    target: Term<'a>,
    watch: Term<'a>,
) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let trainer = trainer.lock();
        let place = match target.is_atom() {
            true => trainer.place(),
            false => decode_map::<Target>("target", target)?.place()?,
        };
        loaded(env, trainer.checkpoint()?, &decode_map("options", loading)?, place, &watch)
    })
}

//! candle's Mamba language model, which takes one token at a time.

use crate::Call;
use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::mamba::{Config, Model, State};
use serde_json::{Value, from_slice};
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

/// What to time, and how often its results are checked.
pub fn call(op: &str, folder: &Path) -> Result<(Call, usize)> {
    let (prompt, steps) = (tokens(folder, "prompt")?, tokens(folder, "steps")?);
    let model = Rc::new(Running::new(folder)?);
    match op {
        "prefill" => Ok((Box::new(move || Ok(model.prefill(&prompt)?.0)), 1)),
        _ => {
            let state = RefCell::new(model.prefill(&prompt)?.1);
            let (checked, next) = (steps.len(), RefCell::new(steps.into_iter().cycle()));
            let token = move || next.borrow_mut().next().ok_or_else(|| Error::msg("no steps"));
            Ok((Box::new(move || model.step(token()?, &mut state.borrow_mut())), checked))
        }
    }
}

struct Running {
    model: Model,
    config: Config,
}

impl Running {
    fn new(folder: &Path) -> Result<Running> {
        let json = json(folder, "config.json")?;
        let size = |name: &str| json[name].as_u64().ok_or_else(|| Error::msg(format!("no `{name}`")));
        let config = Config {
            d_model: size("hidden_size")? as usize,
            n_layer: size("num_hidden_layers")? as usize,
            vocab_size: size("vocab_size")? as usize,
            pad_vocab_size_multiple: 1,
        };
        // SAFETY: the file does not change as long as this runs.
        let tensors = unsafe {
            VarBuilder::from_mmaped_safetensors(&[folder.join("model.safetensors")], DType::F32, &Device::Cpu)?
        };
        // It has the name of another package.
        let tensors = tensors.rename_f(|name| name.replace("embedding.", "embeddings."));
        Ok(Running { model: Model::new(&config, tensors.pp("backbone"))?, config })
    }

    fn step(&self, token: u32, state: &mut State) -> Result<Tensor> {
        self.model.forward(&Tensor::new(&[token], &Device::Cpu)?, state)
    }

    /// The logits behind the last token, and where the sequence then stands.
    fn prefill(&self, tokens: &[u32]) -> Result<(Tensor, State)> {
        let mut state = State::new(1, &self.config, DType::F32, &Device::Cpu)?;
        let logits = tokens.iter().map(|&token| self.step(token, &mut state)).last();
        Ok((logits.ok_or_else(|| Error::msg("no tokens"))??, state))
    }
}

fn json(folder: &Path, name: &str) -> Result<Value> {
    from_slice(&std::fs::read(folder.join(name))?).map_err(Error::wrap)
}

fn tokens(folder: &Path, name: &str) -> Result<Vec<u32>> {
    let json = json(folder, "tokens.json")?;
    let tokens = json[name].as_array().into_iter().flatten();
    Ok(tokens.filter_map(|token| token.as_u64()).map(|token| token as u32).collect())
}

//! The sizes of a model, as `config.json` tells them: in the words of Hugging Face's `MambaConfig`, or in
//! those of the `mamba_ssm` package.

use crate::error::{Error, Kind, Result};
use serde::Deserialize;

/// The sizes of a model and what its norms add under the root.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Width of the model, `M` in the shapes.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Tokens that there are, `V`, or 0 for a backbone that is fed with features.
    pub vocabulary: usize,
    /// Inner width, `D`.
    pub inner: usize,
    /// States per channel, `N`.
    pub state: usize,
    /// Columns of the projection of `dt`, `R`.
    pub rank: usize,
    /// Width of the convolution, `W`.
    pub conv: usize,
    /// What keeps the norms' divisors from 0.
    pub eps: f64,
}

/// What a `config.json` may say of that; whatever else it says concerns training or text.
#[derive(Deserialize)]
struct File {
    model_type: Option<String>,
    #[serde(alias = "d_model")]
    hidden_size: usize,
    #[serde(alias = "n_layer")]
    num_hidden_layers: usize,
    #[serde(default)]
    vocab_size: usize,
    pad_vocab_size_multiple: Option<usize>,
    #[serde(alias = "d_state")]
    state_size: Option<usize>,
    #[serde(alias = "d_conv")]
    conv_kernel: Option<usize>,
    expand: Option<usize>,
    #[serde(alias = "d_inner")]
    intermediate_size: Option<usize>,
    #[serde(alias = "dt_rank")]
    time_step_rank: Option<Rank>,
    #[serde(alias = "norm_epsilon")]
    layer_norm_epsilon: Option<f64>,
    rms_norm: Option<bool>,
    hidden_act: Option<String>,
    #[serde(default)]
    ssm_cfg: Ssm,
}

/// The part of `mamba_ssm`'s file that concerns its blocks.
#[derive(Default, Deserialize)]
struct Ssm {
    layer: Option<String>,
    d_state: Option<usize>,
    d_conv: Option<usize>,
    expand: Option<usize>,
    dt_rank: Option<Rank>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Rank {
    Number(usize),
    /// `"auto"`.
    Word(String),
}

impl Config {
    /// Reads what a `config.json` says. `name` is for errors.
    pub fn parse(name: &str, json: &[u8]) -> Result<Config> {
        let file: File =
            serde_json::from_slice(json).map_err(|e| wrong(name, "the configuration of a Mamba model", e))?;
        file.check(name)?;
        let ssm = &file.ssm_cfg;
        let width = file.hidden_size;
        let expand = file.expand.or(ssm.expand).unwrap_or(2);
        let multiple = file.pad_vocab_size_multiple.unwrap_or(1).max(1);
        let rank = match file.time_step_rank.as_ref().or(ssm.dt_rank.as_ref()) {
            Some(Rank::Number(rank)) => *rank,
            Some(Rank::Word(word)) if word != "auto" => {
                return Err(wrong(name, "a rank that is a number or auto", word));
            }
            _ => width.div_ceil(16).max(1),
        };
        let config = Config {
            width,
            layers: file.num_hidden_layers,
            vocabulary: file.vocab_size.checked_next_multiple_of(multiple).unwrap_or(usize::MAX),
            inner: file.intermediate_size.unwrap_or_else(|| expand.saturating_mul(width)),
            state: file.state_size.or(ssm.d_state).unwrap_or(16),
            rank,
            conv: file.conv_kernel.or(ssm.d_conv).unwrap_or(4),
            eps: file.layer_norm_epsilon.unwrap_or(1e-5),
        };
        config.check(name)
    }

    /// Refuses sizes that no model has.
    pub fn check(self, name: &str) -> Result<Config> {
        let Config { width, layers, vocabulary, inner, state, rank, conv, eps } = self;
        let least = [width, layers, inner, state, rank, conv].into_iter().min().unwrap_or(0);
        let most = [width, layers, vocabulary, inner, state, rank, conv].into_iter().max().unwrap_or(0);
        if least == 0 || most > i32::MAX as usize || !(eps >= 0.0 && eps.is_finite()) {
            return Err(wrong(
                name,
                "positive sizes of 31 bits, and a finite epsilon that is not negative",
                format_args!("{self:?}"),
            ));
        }
        Ok(self)
    }
}

impl File {
    /// Refuses models whose layers compute something else.
    fn check(&self, name: &str) -> Result<()> {
        let is = |value: &Option<String>, allowed: &[&str]| value.as_deref().is_none_or(|v| allowed.contains(&v));
        let what = if !is(&self.model_type, &["mamba", "mamba_ssm"]) {
            format!("model_type {}", self.model_type.as_deref().unwrap_or_default())
        } else if !is(&self.ssm_cfg.layer, &["Mamba1"]) {
            format!("layers of {}", self.ssm_cfg.layer.as_deref().unwrap_or_default())
        } else if !is(&self.hidden_act, &["silu", "swish"]) {
            format!("hidden_act {}", self.hidden_act.as_deref().unwrap_or_default())
        } else if self.rms_norm == Some(false) {
            "layer norms".to_string()
        } else {
            return Ok(());
        };
        Err(wrong(name, "a model of the first Mamba: blocks with SiLU between norms of the root mean square", what))
    }
}

fn wrong(name: &str, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, name).expected(expected).got(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAMBA_130M: Config =
        Config { width: 768, layers: 24, vocabulary: 50280, inner: 1536, state: 16, rank: 48, conv: 4, eps: 1e-5 };

    fn parsed(json: &str) -> Result<Config> {
        Config::parse("config.json", json.as_bytes())
    }

    #[test]
    fn both_families_say_the_same_in_their_words() {
        let hugging_face = r#"{"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768,
            "intermediate_size": 1536, "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4, "expand": 2,
            "time_step_rank": 48, "vocab_size": 50280, "layer_norm_epsilon": 1e-05, "hidden_act": "silu",
            "residual_in_fp32": true, "use_bias": false, "use_conv_bias": true, "torch_dtype": "float32"}"#;
        let original = r#"{"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": true,
            "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 8}"#;
        assert_eq!(parsed(hugging_face), Ok(MAMBA_130M));
        assert_eq!(parsed(original), Ok(MAMBA_130M));
        let automatic =
            r#"{"hidden_size": 100, "num_hidden_layers": 1, "time_step_rank": "auto", "ssm_cfg": {"expand": 3}}"#;
        let config = parsed(automatic).unwrap();
        assert_eq!((config.rank, config.inner, config.vocabulary), (7, 300, 0));
    }

    #[test]
    fn other_models_are_refused() {
        for other in [
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "model_type": "mamba2"}"#,
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "model_type": "falcon_mamba"}"#,
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "hidden_act": "gelu"}"#,
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "time_step_rank": "many"}"#,
            r#"{"d_model": 8, "n_layer": 1, "rms_norm": false}"#,
            r#"{"d_model": 8, "n_layer": 1, "ssm_cfg": {"layer": "Mamba2"}}"#,
            r#"{"d_model": 0, "n_layer": 1}"#,
            r#"{"d_model": 8, "n_layer": 99999999999}"#,
            r#"{"d_model": 8}"#,
            r#"{"d_model": "8", "n_layer": 1}"#,
            "[]",
            "",
        ] {
            assert_eq!(parsed(other).unwrap_err().kind, Kind::File, "{other}");
        }
    }
}

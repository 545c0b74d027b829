//! The sizes of a model in `config.json`. The names are those of Hugging Face's `MambaConfig`, of the `mamba_ssm`
//! package, or of other programs, such as `mamba.py` and MLX. Published files give some sizes under several names.

use super::family::{self, Words};
use serde_json::Value;
use sidewinder_files::json::{self, shown};
use sidewinder_kernels::error::{Error, Kind, Result};
use std::collections::BTreeSet;

/// The sizes of a model, and the epsilon of its norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Width of the model, `M` in the shapes.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Size of the vocabulary, `V`, or 0 for a backbone that takes features.
    pub vocabulary: usize,
    /// Inner width, `D`.
    pub inner: usize,
    /// States per channel, `N`.
    pub state: usize,
    /// Columns of the projection of `dt`, `R`.
    pub rank: usize,
    /// Width of the convolution, `W`.
    pub conv: usize,
    /// The epsilon that keeps the norms' divisors from 0.
    pub eps: f64,
}

/// The content of a `config.json`: the sizes of a model, and its quantization formats if given.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The sizes.
    pub config: Config,
    /// The names of the formats.
    pub formats: Option<BTreeSet<String>>,
}

/// The keys under which a configuration gives the quantization and its method. Readers that do not know the method
/// refuse the model.
pub(super) const QUANTIZATION: &str = "quantization_config";
pub(super) const METHOD: &str = "quant_method";
pub(super) const OURS: &str = "sidewinder";
pub(super) const FORMATS: &str = "formats";

impl From<Config> for Description {
    fn from(config: Config) -> Description {
        Description { config, formats: None }
    }
}

impl Description {
    /// Reads a `config.json`. `name` is for errors.
    pub fn parse(name: &str, json: &[u8]) -> Result<Description> {
        let words = words(name, json)?;
        family::check(name, &words)?;
        let file = File { name, words: &words };
        Ok(Description { formats: file.formats()?, config: file.config()?.check(name)? })
    }
}

/// The keys and values of a `config.json`. `name` is for errors.
pub(super) fn words(name: &str, json: &[u8]) -> Result<Words> {
    let expected = "the configuration of a Mamba model";
    match json::parse(name, json, expected)? {
        Value::Object(words) => Ok(words),
        other => Err(wrong(name, expected, shown(&other))),
    }
}

/// The names of each size: Hugging Face's first, then that of `mamba_ssm`.
const WIDTH: &[&str] = &["hidden_size", "d_model"];
const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const VOCABULARY: &[&str] = &["vocab_size"];
const MULTIPLE: &[&str] = &["pad_vocab_size_multiple"];
const INNER: &[&str] = &["intermediate_size", "d_inner"];
const EXPAND: &[&str] = &["expand", "expand_factor", "ssm_cfg.expand"];
const STATE: &[&str] = &["state_size", "d_state", "ssm_cfg.d_state"];
const RANK: &[&str] = &["time_step_rank", "dt_rank", "ssm_cfg.dt_rank"];
const CONV: &[&str] = &["conv_kernel", "d_conv", "ssm_cfg.d_conv"];
const EPS: &[&str] = &["layer_norm_epsilon", "norm_epsilon", "rms_norm_eps", "norm_eps"];

impl Config {
    /// The sizes in a `config.json`. `name` is for errors.
    pub fn parse(name: &str, json: &[u8]) -> Result<Config> {
        Ok(Description::parse(name, json)?.config)
    }

    /// Writes the sizes into a configuration, by Hugging Face's names and by every other name that it already uses for
    /// them.
    pub fn tell(&self, words: &mut Words) {
        let Config { width, layers, vocabulary, inner, state, rank, conv, eps } = *self;
        // A reader that ignores the inner width computes it by this factor.
        let expand =
            if inner.is_multiple_of(width) { (inner / width).into() } else { Value::from(inner as f64 / width as f64) };
        for (names, value) in [
            (WIDTH, width.into()),
            (LAYERS, layers.into()),
            (VOCABULARY, vocabulary.into()),
            (INNER, inner.into()),
            (EXPAND, expand),
            (STATE, state.into()),
            (RANK, rank.into()),
            (CONV, conv.into()),
            (EPS, Value::from(eps)),
        ] {
            words.insert(names[0].into(), value.clone());
            for name in names {
                said_mut(words, name).into_iter().for_each(|said| *said = value.clone());
            }
        }
    }

    /// Refuses sizes that no model can have.
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

/// A configuration that is being read.
struct File<'j> {
    name: &'j str,
    words: &'j Words,
}

impl File<'_> {
    fn config(&self) -> Result<Config> {
        let width = self.needed(WIDTH)?;
        let rank = self.one(RANK, "a whole number or \"auto\"", |value| rank(value, width))?;
        let inner = match self.size(INNER)? {
            Some(inner) => inner,
            None => (self.one(EXPAND, "a factor", factor)?.unwrap_or(2.0) * width as f64) as usize,
        };
        Ok(Config {
            width,
            layers: self.needed(LAYERS)?,
            vocabulary: self.vocabulary()?,
            inner,
            state: self.size(STATE)?.unwrap_or(16),
            rank: rank.unwrap_or(automatic(width)),
            conv: self.size(CONV)?.unwrap_or(4),
            eps: self.one(EPS, "a finite number, not negative", factor)?.unwrap_or(1e-5),
        })
    }

    /// Rows of the embedding. `mamba_ssm` pads them to a multiple; in Hugging Face's files `vocab_size` is the padded
    /// number.
    fn vocabulary(&self) -> Result<usize> {
        let rows = self.size(VOCABULARY)?.unwrap_or(0);
        let multiple = self.size(MULTIPLE)?.unwrap_or(8).max(1);
        let padded = self.said("hidden_size").is_none();
        Ok(if padded { rows.checked_next_multiple_of(multiple).unwrap_or(usize::MAX) } else { rows })
    }

    /// The quantization formats, if any. Another method, or a list that cannot be read, is an error.
    fn formats(&self) -> Result<Option<BTreeSet<String>>> {
        let Some(said) = self.said(QUANTIZATION).filter(|said| **said != Value::Object(Words::new())) else {
            return Ok(None);
        };
        let read =
            |formats: &Value| formats.as_array()?.iter().map(|format| Some(format.as_str()?.to_string())).collect();
        let ours = said.get(METHOD).is_some_and(|method| method == OURS);
        let formats = said.get(FORMATS).filter(|_| ours).and_then(read);
        formats.map(Some).ok_or_else(|| {
            wrong(
                self.name,
                "weights as floats, or quantized by Sidewinder",
                format!("`{QUANTIZATION}` {}", shown(said)),
            )
            .hint("Take the checkpoint whose weights are floats, and load it with `quantize`")
        })
    }

    fn needed(&self, names: &[&str]) -> Result<usize> {
        let expected = || format!("a configuration of a Mamba model with `{}`", names[..2].join("` or `"));
        self.size(names)?.ok_or_else(|| wrong(self.name, expected(), "none"))
    }

    fn size(&self, names: &[&str]) -> Result<Option<usize>> {
        self.one(names, "a whole number of at most 31 bits", whole)
    }

    /// The single value given under these names, or none.
    fn one<T: PartialEq>(
        &self,
        names: &[&str],
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let mut first: Option<(&str, &Value, T)> = None;
        for (name, value) in names.iter().filter_map(|name| Some((*name, self.said(name)?))) {
            let got = || format!("`{name}` {}", shown(value));
            let read = read(value).ok_or_else(|| wrong(self.name, format!("{expected} as `{name}`"), got()))?;
            match &first {
                None => first = Some((name, value, read)),
                Some((before, other, one)) if *one != read => {
                    let got = format!("`{before}` {} and {}", shown(other), got());
                    return Err(wrong(self.name, format!("one value of `{before}` and `{name}`"), got));
                }
                Some(_) => {}
            }
        }
        Ok(first.map(|(_, _, value)| value))
    }

    /// The value of a key, which may be `object.key`; null counts as absent.
    fn said(&self, name: &str) -> Option<&Value> {
        let value = match name.split_once('.') {
            Some((object, name)) => self.words.get(object)?.get(name),
            None => self.words.get(name),
        };
        value.filter(|value| !value.is_null())
    }
}

/// Like [`File::said`], for writing.
fn said_mut<'w>(words: &'w mut Words, name: &str) -> Option<&'w mut Value> {
    let value = match name.split_once('.') {
        Some((object, name)) => words.get_mut(object)?.get_mut(name),
        None => words.get_mut(name),
    };
    value.filter(|value| !value.is_null())
}

fn whole(value: &Value) -> Option<usize> {
    let number = value.as_f64()?;
    (number.fract() == 0.0 && (0.0..=f64::from(i32::MAX)).contains(&number)).then_some(number as usize)
}

fn factor(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite() && *number >= 0.0)
}

fn rank(value: &Value, width: usize) -> Option<usize> {
    if value == "auto" { Some(automatic(width)) } else { whole(value) }
}

fn automatic(width: usize) -> usize {
    width.div_ceil(16).max(1)
}

fn wrong(name: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
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

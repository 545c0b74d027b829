//! Reads and writes the sizes in a `config.json`. The keys are those of Hugging Face's `MambaConfig`,
//! `FalconMambaConfig` and `Mamba2Config`, of the `mamba_ssm` package, or of other programs, such as `mamba.py`, MLX
//! and `mistral_inference`. Published files give some sizes under several keys, which must agree.

use super::family::{self, Family, NORMED_BY, Words, word};
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
    /// Rank of the projection of `dt`, `R`; 0 in Mamba-2, which has no such projection.
    pub rank: usize,
    /// Width of the convolution, `W`.
    pub conv: usize,
    /// Epsilon of the RMS norms.
    pub eps: f64,
    /// The kind of the layers.
    pub mixer: Mixer,
}

/// The kind of a model's layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixer {
    /// The first Mamba (Gu and Dao 2023).
    Mamba,
    /// FalconMamba (Zuo et al. 2024): the first Mamba with RMS norms of `dt`, `B` and `C`, which have this epsilon.
    FalconMamba(f64),
    /// Mamba-2 (Dao and Gu 2024).
    Mamba2(Heads),
}

impl Mixer {
    /// The name of the architecture in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Mixer::Mamba => "Mamba",
            Mixer::FalconMamba(_) => "FalconMamba",
            Mixer::Mamba2(_) => "Mamba-2",
        }
    }

    /// The `model_type` in a `config.json`.
    pub fn model_type(&self) -> &'static str {
        self.family().model_type()
    }

    pub(super) fn family(&self) -> Family {
        match self {
            Mixer::Mamba => Family::Mamba,
            Mixer::FalconMamba(_) => Family::FalconMamba,
            Mixer::Mamba2(_) => Family::Mamba2,
        }
    }
}

/// The parameters that only Mamba-2 has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Heads, `H`, of `D / H` channels each.
    pub count: usize,
    /// Groups of heads that share `B` and `C`, `G`. The gated norm runs over the channels of each group separately.
    pub groups: usize,
    /// Lower and upper bound of the step size `dt`.
    pub limit: (f64, f64),
}

/// The content of a `config.json`: the sizes of a model, and its quantization formats if given.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The sizes.
    pub config: Config,
    /// The names of the quantization formats; `None` if the file names no quantization.
    pub formats: Option<BTreeSet<String>>,
}

/// The keys of the quantization and of its method, the name of the method, and the key of its formats. Loaders that do
/// not know the method refuse the checkpoint instead of misreading it.
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
    pub(super) fn family(&self) -> Family {
        self.config.mixer.family()
    }

    /// Reads a `config.json`; `name` identifies it in errors.
    pub fn parse(name: &str, json: &[u8]) -> Result<Description> {
        let words = words(name, json)?;
        let file = File { name, words: &words };
        let family = family::of(name, &words)?;
        Ok(Description { formats: file.formats()?, config: file.config(family)?.check(name)? })
    }
}

/// The keys and values of a `config.json`; `name` identifies it in errors.
pub(super) fn words(name: &str, json: &[u8]) -> Result<Words> {
    let expected = "the configuration of a Mamba model";
    match json::parse(name, json, expected)? {
        Value::Object(words) => Ok(words),
        other => Err(wrong(name, expected, shown(&other))),
    }
}

/// The accepted keys of each size. Hugging Face's comes first, which [`Config::tell`] always writes; then those of
/// `mamba_ssm` and of other programs.
const WIDTH: &[&str] = &["hidden_size", "d_model", "dim"];
const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const VOCABULARY: &[&str] = &["vocab_size"];
const MULTIPLE: &[&str] = &["pad_vocab_size_multiple"];
const INNER: &[&str] = &["intermediate_size", "d_inner"];
const EXPAND: &[&str] = &["expand", "expand_factor", "ssm_cfg.expand"];
const STATE: &[&str] = &["state_size", "d_state", "ssm_cfg.d_state"];
const RANK: &[&str] = &["time_step_rank", "dt_rank", "ssm_cfg.dt_rank"];
const CONV: &[&str] = &["conv_kernel", "d_conv", "ssm_cfg.d_conv"];
const EPS: &[&str] = &["layer_norm_epsilon", "norm_epsilon", "rms_norm_eps", "norm_eps"];
const MIXER_EPS: &[&str] = &[NORMED_BY];
const HEADS: &[&str] = &["num_heads", "n_heads", "nheads"];
const HEAD: &[&str] = &["head_dim", "headdim", "ssm_cfg.headdim"];
const GROUPS: &[&str] = &["n_groups", "ngroups", "ssm_cfg.ngroups"];
const LIMIT: &[&str] = &["time_step_limit", "ssm_cfg.dt_limit"];

/// Defaults of a Mamba-2 configuration: channels per head, and states per channel.
const HEAD_CHANNELS: usize = 64;
const HEAD_STATE: usize = 128;
/// Default number of groups in Hugging Face's configurations; `mamba_ssm` defaults to 1.
const HEAD_GROUPS: usize = 8;

impl Config {
    /// The sizes in a `config.json`; `name` identifies it in errors.
    pub fn parse(name: &str, json: &[u8]) -> Result<Config> {
        Ok(Description::parse(name, json)?.config)
    }

    /// Writes the sizes into a configuration: under Hugging Face's keys, and under every other accepted key that is
    /// already present, so that no old value contradicts them.
    pub fn tell(&self, words: &mut Words) {
        let Config { width, layers, vocabulary, inner, state, rank, conv, eps, mixer } = *self;
        // Loaders that ignore `intermediate_size` compute the inner width from this factor.
        let expand =
            if inner.is_multiple_of(width) { (inner / width).into() } else { Value::from(inner as f64 / width as f64) };
        let of_all = [
            (WIDTH, width.into()),
            (LAYERS, layers.into()),
            (VOCABULARY, vocabulary.into()),
            (INNER, inner.into()),
            (EXPAND, expand),
            (STATE, state.into()),
            (CONV, conv.into()),
            (EPS, Value::from(eps)),
        ];
        let of_mixer = match mixer {
            Mixer::Mamba => vec![(RANK, rank.into())],
            Mixer::FalconMamba(eps) => vec![(RANK, rank.into()), (MIXER_EPS, eps.into())],
            Mixer::Mamba2(Heads { count, groups, limit: (lo, hi) }) => vec![
                (HEADS, count.into()),
                (HEAD, (inner / count).into()),
                (GROUPS, groups.into()),
                (LIMIT, Value::Array(vec![json::number(lo), json::number(hi)])),
            ],
        };
        for (names, value) in of_all.into_iter().chain(of_mixer) {
            words.insert(names[0].into(), value.clone());
            for name in names {
                said_mut(words, name).into_iter().for_each(|said| *said = value.clone());
            }
        }
    }

    /// Refuses sizes that are 0 (except the vocabulary's) or exceed 31 bits, invalid epsilons and inconsistent heads.
    pub fn check(self, name: &str) -> Result<Config> {
        let Config { width, layers, vocabulary, inner, state, rank, conv, eps, mixer } = self;
        let [own, other] = match mixer {
            Mixer::Mamba | Mixer::FalconMamba(_) => [rank, rank],
            Mixer::Mamba2(Heads { count, groups, .. }) => [count, groups],
        };
        let least = [width, layers, inner, state, own, other, conv].into_iter().min().unwrap_or(0);
        let most = [width, layers, vocabulary, inner, state, own, other, conv].into_iter().max().unwrap_or(0);
        if least == 0 || most > i32::MAX as usize || !(eps >= 0.0 && eps.is_finite()) {
            return Err(wrong(
                name,
                "positive sizes of 31 bits, and a finite epsilon that is not negative",
                format_args!("{self:?}"),
            ));
        }
        self.check_heads(name).map(|()| self)
    }

    /// Refuses Mamba-2 with heads or groups of unequal size, invalid bounds of the step size, or an epsilon of 0.
    fn check_heads(&self, name: &str) -> Result<()> {
        let Config { inner, eps, mixer: Mixer::Mamba2(Heads { count, groups, limit: (lo, hi) }), .. } = *self else {
            return Ok(());
        };
        let whole = inner.is_multiple_of(count) && count.is_multiple_of(groups);
        if !whole || lo.is_nan() || hi.is_nan() || lo > hi || eps == 0.0 {
            let got = format_args!(
                "{inner} channels, {count} heads, {groups} groups, step sizes from {lo} to {hi}, epsilon {eps}"
            )
            .to_string();
            let expected = "Mamba-2 with heads of equal width, groups of equally many heads, and a positive epsilon";
            return Err(wrong(name, expected, got));
        }
        Ok(())
    }

    /// Channels of the convolution, which in Mamba-2 covers `x`, `B` and `C`.
    pub(super) fn conv_channels(&self) -> usize {
        match self.mixer {
            Mixer::Mamba2(Heads { groups, .. }) => self.inner + 2 * groups * self.state,
            _ => self.inner,
        }
    }

    /// Heads of Mamba-2; other models have none.
    pub(super) fn heads(&self) -> usize {
        match self.mixer {
            Mixer::Mamba2(Heads { count, .. }) => count,
            _ => 0,
        }
    }

    /// Outputs of a layer's `in_proj`: `[x | z]`, in Mamba-2 `[z | xBC | dt]`.
    pub(super) fn projected(&self) -> usize {
        self.inner + self.conv_channels() + self.heads()
    }
}

/// The keys and values of a configuration, during parsing.
struct File<'j> {
    name: &'j str,
    words: &'j Words,
}

impl File<'_> {
    fn config(&self, family: Family) -> Result<Config> {
        let width = self.needed(WIDTH)?;
        let inner = match self.size(INNER)? {
            Some(inner) => inner,
            None => (self.one(EXPAND, "a factor", factor)?.unwrap_or(2.0) * width as f64) as usize,
        };
        let mixer = self.mixer(family, inner)?;
        let (rank, state) = match mixer {
            Mixer::Mamba2(_) => (0, HEAD_STATE),
            _ => (self.rank(width)?, 16),
        };
        Ok(Config {
            width,
            layers: self.needed(LAYERS)?,
            vocabulary: self.vocabulary()?,
            inner,
            state: self.size(STATE)?.unwrap_or(state),
            rank,
            conv: self.size(CONV)?.unwrap_or(4),
            eps: self.eps(EPS)?.unwrap_or(1e-5),
            mixer,
        })
    }

    fn mixer(&self, family: Family, inner: usize) -> Result<Mixer> {
        Ok(match family {
            Family::Mamba => Mixer::Mamba,
            Family::FalconMamba => Mixer::FalconMamba(self.eps(MIXER_EPS)?.unwrap_or(1e-6)),
            Family::Mamba2 => Mixer::Mamba2(self.heads(inner)?),
        })
    }

    /// The heads of Mamba-2. Their number defaults to the inner width divided by the channels per head.
    fn heads(&self, inner: usize) -> Result<Heads> {
        let width = self.size(HEAD)?.unwrap_or(HEAD_CHANNELS);
        let count = self.size(HEADS)?.unwrap_or(inner / width.max(1));
        if count.checked_mul(width) != Some(inner) {
            let got = format!("{count} heads and {width} channels for each, as `{}` and `{}`", HEADS[0], HEAD[0]);
            return Err(wrong(self.name, format!("heads that have {inner} channels together, for Mamba-2"), got));
        }
        let groups = if self.is_hugging_face() { HEAD_GROUPS } else { 1 };
        let limit = self.one(LIMIT, "two numbers", limit)?.unwrap_or((0.0, f64::INFINITY));
        Ok(Heads { count, groups: self.size(GROUPS)?.unwrap_or(groups), limit })
    }

    fn rank(&self, width: usize) -> Result<usize> {
        let rank = self.one(RANK, "a whole number or \"auto\"", |value| rank(value, width))?;
        Ok(rank.unwrap_or(automatic(width)))
    }

    fn eps(&self, names: &[&str]) -> Result<Option<f64>> {
        self.one(names, "a finite number, not negative", factor)
    }

    /// Whether the keys are Hugging Face's rather than `mamba_ssm`'s; the two differ in their defaults.
    fn is_hugging_face(&self) -> bool {
        self.said(WIDTH[0]).is_some()
    }

    /// Rows of the embedding. `mamba_ssm` pads them to a multiple; in Hugging Face's files `vocab_size` is the padded
    /// number.
    fn vocabulary(&self) -> Result<usize> {
        let rows = self.size(VOCABULARY)?.unwrap_or(0);
        let multiple = self.size(MULTIPLE)?.unwrap_or(8).max(1);
        let padded = || rows.checked_next_multiple_of(multiple).unwrap_or(usize::MAX);
        Ok(if self.is_hugging_face() { rows } else { padded() })
    }

    /// The quantization formats, if any. Fails for another quantization method and for a malformed list.
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

    /// The value under any of these keys, if present. Fails if two keys disagree.
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
        word(self.words, name).filter(|value| !value.is_null())
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

/// A lower and an upper bound, which may be infinite.
fn limit(value: &Value) -> Option<(f64, f64)> {
    match &value.as_array()?[..] {
        [lo, hi] => Some((json::as_number(lo)?, json::as_number(hi)?)),
        _ => None,
    }
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

    const MAMBA_130M: Config = Config {
        width: 768,
        layers: 24,
        vocabulary: 50280,
        inner: 1536,
        state: 16,
        rank: 48,
        conv: 4,
        eps: 1e-5,
        mixer: Mixer::Mamba,
    };

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
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "model_type": "jamba"}"#,
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "hidden_act": "gelu"}"#,
            r#"{"hidden_size": 8, "num_hidden_layers": 1, "time_step_rank": "many"}"#,
            r#"{"d_model": 8, "n_layer": 1, "rms_norm": false}"#,
            r#"{"d_model": 8, "n_layer": 1, "ssm_cfg": {"layer": "Mamba3"}}"#,
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

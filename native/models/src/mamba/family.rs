//! Detects the family of a model from the keys of its configuration, the metadata of its files and its tensors. Similar
//! models that compute something else are refused, because their weights could load and give wrong results.

use serde_json::{Map, Value};
use sidewinder_files::json::shown;
use sidewinder_kernels::error::{Error, Kind, Result};
use std::collections::BTreeMap;

/// The keys and values of a configuration.
pub type Words = Map<String, Value>;

/// The supported model families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Mamba,
    FalconMamba,
    Mamba2,
}

use Family::{FalconMamba, Mamba, Mamba2};

impl Family {
    const ALL: [Family; 3] = [Mamba, FalconMamba, Mamba2];

    /// The `model_type` in a `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Mamba => "mamba",
            FalconMamba => "falcon_mamba",
            Mamba2 => "mamba2",
        }
    }

    /// The family of that `model_type`.
    pub fn of_model_type(name: &str) -> Result<Family> {
        Family::ALL.into_iter().find(|family| family.model_type() == name).ok_or_else(|| {
            let known = Family::ALL.map(Family::model_type).join(", ");
            Error::new(Kind::Argument, "model_type").expected(format_args!("one of {known}")).got(name)
        })
    }

    /// The names in `architectures` for a language model and for a backbone.
    pub fn architectures(self) -> [&'static str; 2] {
        match self {
            Mamba => ["MambaForCausalLM", "MambaModel"],
            FalconMamba => ["FalconMambaForCausalLM", "FalconMambaModel"],
            Mamba2 => ["Mamba2ForCausalLM", "Mamba2Model"],
        }
    }

    /// The family of a layer by its name in `mamba_ssm`.
    fn of_layer(name: &str) -> Option<Family> {
        [("Mamba1", Mamba), ("Mamba2", Mamba2)].into_iter().find(|(layer, _)| *layer == name).map(|(_, family)| family)
    }
}

/// Names that `mamba_ssm` writes for models of every kind of layer, so they do not tell the family.
const PACKAGE: [&str; 2] = ["mamba_ssm", "MambaLMHeadModel"];
const ACTIVATIONS: [&str; 2] = ["silu", "swish"];

const NORMED: &str = "FalconMamba, which norms B, C and dt";
const SECOND: &str = "Mamba-2";
const HYBRID: &str = "a hybrid with layers of attention";

/// Substrings of lowercase model types and architectures, with a description of the model.
const NAMES: [(&str, &str); 9] = [
    ("falcon_mamba", NORMED),
    ("falconmamba", NORMED),
    ("mamba2", SECOND),
    ("jamba", HYBRID),
    ("bamba", HYBRID),
    ("zamba", HYBRID),
    ("samba", HYBRID),
    ("falcon_h1", HYBRID),
    ("recurrent", HYBRID),
];

/// Keys that change what layers compute unless they are null, false, 0 or empty, with a description of the variant.
const TELLING: [(&str, &str); 8] = [
    ("use_bcdt_rms", "norms of B, C and dt"),
    ("inner_layernorms", "norms of B, C and dt with weights"),
    ("attn_layer_idx", HYBRID),
    ("d_intermediate", "layers of MLPs beside those of Mamba"),
    ("mup", "logits scaled by muP"),
    ("ssm_cfg.norm_before_gate", "a norm before the gate"),
    ("ssm_cfg.D_has_hdim", "a D for each channel of a head"),
    ("ssm_cfg.d_ssm", "a scan of a part of the channels"),
];

/// Keys that change what layers compute if they are false, with a description of the variant.
const TELLING_IF_FALSE: [(&str, &str); 2] = [("rms_norm", "layer norms"), ("ssm_cfg.rmsnorm", "a gate without a norm")];

/// The key of the epsilon of FalconMamba's norms of `dt`, `B` and `C`.
pub const NORMED_BY: &str = "mixer_rms_eps";

/// Keys that only Mamba-2 configurations have.
const OF_SECOND: [&str; 6] = ["n_groups", "ngroups", "head_dim", "headdim", "chunk_size", "num_heads"];

/// The vocabulary size of the Falcon models. FalconMamba's norms of `dt`, `B` and `C` have no weights, so without a
/// configuration only this size distinguishes its tensors from those of the first Mamba.
const FALCON: u64 = 65024;

/// Substrings of tensor names that only Mamba-2 has.
const TENSORS_OF_SECOND: [&str; 2] = [".mixer.dt_bias", ".mixer.norm.weight"];

/// Substrings of tensor names of unsupported models, with a description of the model.
const TENSORS: [(&str, &str); 11] = [
    (".dt_layernorm.", "Jamba, which norms B, C and dt"),
    (".dt_norm.", "a model that norms B, C and dt"),
    (".lora_A.", "an adapter (LoRA) to another model"),
    (".lora_B.", "an adapter (LoRA) to another model"),
    (".self_attn.", "a model with layers of attention"),
    (".Wqkv.", "a model with layers of attention"),
    (".attention.", "a model with layers of attention"),
    (".temporal_block.", "RecurrentGemma"),
    (".mamba.A_log", HYBRID),
    (".mlp.", "a model with layers of MLPs"),
    (".ssm_a", "a model with the names of GGUF"),
];

/// A result whose error describes the evidence for an unsupported model.
type Told<T> = std::result::Result<T, String>;

/// The family that keys indicate, if any, with a description of the evidence.
type Named = Option<(Family, String)>;

/// The family of a configuration; the first Mamba if it names none. Refuses unsupported models.
pub fn of(name: &str, words: &Words) -> Result<Family> {
    let told = told(words).and_then(|told| match told {
        None => nameless_falcon(words).map_or(Ok(Mamba), Err),
        Some((family, _)) => Ok(family),
    });
    told.map_err(|got| foreign(name, got))
}

/// Refuses a file whose metadata describes another family than `family`, that of the configuration if there is one. The
/// metadata may hold single keys, or a whole configuration as JSON.
pub fn check_metadata(name: &str, metadata: &BTreeMap<String, String>, family: Option<Family>) -> Result<()> {
    let read = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()));
    let words: Words = metadata.iter().map(|(key, text)| (key.clone(), read(text))).collect();
    let nested = words.values().filter_map(Value::as_object);
    std::iter::once(&words)
        .chain(nested)
        .try_for_each(|words| same_family(words, family))
        .map_err(|got| foreign(name, got))
}

/// Refuses keys of another family than `family`, which defaults to the first Mamba.
fn same_family(words: &Words, family: Option<Family>) -> Told<()> {
    match told(words)? {
        Some((other, by)) if other != family.unwrap_or(Mamba) => Err(by),
        None if family.is_none() => nameless_falcon(words).map_or(Ok(()), Err),
        _ => Ok(()),
    }
}

/// Refuses tensors of another family than `family`, by their names and numbers of axes. `rows` is the number of rows of
/// the embedding, given only if there is no configuration.
pub fn check_tensors<'n>(
    name: &str,
    mut tensors: impl Iterator<Item = (&'n str, usize)>,
    family: Family,
    rows: Option<usize>,
) -> Result<()> {
    let told = |(tensor, axes)| Some(format!("{}, as `{tensor}` tells", of_tensor(tensor, axes, family)?));
    let other = tensors.find_map(told);
    let falcon = || (rows == Some(FALCON as usize)).then(|| falcon("no configuration"));
    match other.or_else(falcon) {
        Some(got) => Err(foreign(name, got)),
        None => Ok(()),
    }
}

fn of_tensor(name: &str, axes: usize, family: Family) -> Option<&'static str> {
    // Mamba-2 has one decay per head; the first Mamba has one for each state of each channel.
    let heads =
        || axes == 1 && name.ends_with(".mixer.A_log") || TENSORS_OF_SECOND.iter().any(|part| name.contains(part));
    let second = (family != Mamba2 && heads()).then_some(SECOND);
    second.or_else(|| TENSORS.iter().find(|(part, _)| name.contains(part)).map(|(_, what)| *what))
}

fn falcon(without: &str) -> String {
    format!("{FALCON} tokens, as FalconMamba has, and {without} that says what model it is")
}

fn foreign(name: &str, got: String) -> Error {
    let types = Family::ALL.map(|family| format!("\"{}\"", family.model_type())).join(", ");
    Error::new(Kind::File, name)
        .expected("Mamba, FalconMamba or Mamba-2, with SiLU and norms of the root mean square, as its config.json says")
        .got(got)
        .hint(format!("Other models cannot be run. The `model_type` in the config.json of these is one of {types}"))
}

/// The family that the keys indicate, if any. All evidence must be for one family; the error describes evidence for
/// another model.
fn told(words: &Words) -> Told<Named> {
    let named = [type_told(words)?, architecture_told(words)?, layer_told(words)?];
    other_told(words).map_or(Ok(()), Err)?;
    let mut named = named.into_iter().flatten();
    let normed = word(words, NORMED_BY).filter(|value| is_on(value));
    let normed = normed.map(|value| (FalconMamba, format!("`{NORMED_BY}` {}: {NORMED}", shown(value))));
    let Some((family, by)) = named.next() else {
        return Ok(normed.or_else(|| second_told(words)));
    };
    match named.chain(normed).find(|(other, _)| *other != family) {
        Some((_, other)) => Err(format!("{by} and {other}")),
        None => Ok(Some((family, by))),
    }
}

fn type_told(words: &Words) -> Told<Named> {
    let value = said(words.get("model_type")).filter(|value| !is_package(value) && !is_codestral(words));
    let Some(value) = value else {
        return Ok(None);
    };
    let by = described("model_type", value);
    match Family::ALL.into_iter().find(|family| value == family.model_type()) {
        Some(family) => Ok(Some((family, by))),
        None => Err(by),
    }
}

/// The family that `architectures` names; all names must agree. An unknown name is accepted only beside a `model_type`,
/// and only if it does not resemble that of an unsupported model.
fn architecture_told(words: &Words) -> Told<Named> {
    let named = said(words.get("model_type")).is_some();
    let mut family: Named = None;
    for value in said(words.get("architectures")).into_iter().flat_map(listed).filter(|value| !is_package(value)) {
        let by = described("architectures", value);
        let known = Family::ALL.into_iter().find(|family| family.architectures().iter().any(|name| value == name));
        match known {
            Some(known) if family.as_ref().is_none_or(|(family, _)| *family == known) => family = Some((known, by)),
            None if named && what(&shown(value)).is_none() => {}
            _ => return Err(by),
        }
    }
    Ok(family)
}

/// The family that `ssm_cfg.layer`, a key of `mamba_ssm`, names.
fn layer_told(words: &Words) -> Told<Named> {
    let Some(value) = said(word(words, "ssm_cfg.layer")) else {
        return Ok(None);
    };
    let by = described("ssm_cfg.layer", value);
    match value.as_str().and_then(Family::of_layer) {
        Some(family) => Ok(Some((family, by))),
        None => Err(by),
    }
}

/// Mamba-2, if a key is present that only its configurations have. For configurations that name no model.
fn second_told(words: &Words) -> Named {
    let ssm = words.get("ssm_cfg").and_then(Value::as_object);
    let all = || [Some(words), ssm].into_iter().flatten();
    let second = OF_SECOND.iter().find(|word| all().any(|words| said(words.get(**word)).is_some()));
    second.map(|word| (Mamba2, format!("`{word}`: {SECOND}")))
}

/// The evidence for an unsupported variant of the layers, if any.
fn other_told(words: &Words) -> Option<String> {
    let activation = said(words.get("hidden_act"))
        .filter(|value| !value.as_str().is_some_and(|text| ACTIVATIONS.contains(&text)))
        .map(|value| described("hidden_act", value));
    let is_off = |value: &Value| *value == Value::Bool(false);
    activation.or_else(|| word_told(words, &TELLING_IF_FALSE, is_off)).or_else(|| word_told(words, &TELLING, is_on))
}

/// A description of the first of these keys whose value satisfies `tells`.
fn word_told(words: &Words, telling: &[(&str, &str)], tells: impl Fn(&Value) -> bool) -> Option<String> {
    let found = |(name, what): &(&str, &str)| {
        let value = word(words, name).filter(|value| tells(value))?;
        Some(format!("`{name}` {}: {what}", shown(value)))
    };
    telling.iter().find_map(found)
}

/// The value of a key, which may be `object.key`.
pub fn word<'w>(words: &'w Words, name: &str) -> Option<&'w Value> {
    match name.split_once('.') {
        Some((object, name)) => words.get(object)?.get(name),
        None => words.get(name),
    }
}

/// The value of a key, unless it is null or empty.
fn said(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !matches!(value, Value::Null) && *value != "" && *value != &Value::Array(Vec::new()))
}

fn listed(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice).iter()
}

/// Whether the keys are those of Codestral Mamba, a Mamba-2 whose `model_type` in `mistral_inference` is `mamba`.
fn is_codestral(words: &Words) -> bool {
    let of_mistral = ["dim", "n_groups"].iter().all(|word| said(words.get(*word)).is_some());
    of_mistral && words.get("model_type").is_some_and(|value| *value == Mamba.model_type())
}

fn is_package(value: &Value) -> bool {
    value.as_str().is_some_and(|name| PACKAGE.contains(&name))
}

/// Whether a value is anything but null, false, 0 or empty.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::String(text) => !text.is_empty(),
    }
}

/// A key and its value, with the family if it is known.
fn described(word: &str, value: &Value) -> String {
    let value = shown(value);
    let value = value.trim_matches('"');
    match what(value) {
        Some(what) => format!("`{word}` {value}: {what}"),
        None => format!("`{word}` {value}"),
    }
}

fn what(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    NAMES.iter().find(|(part, _)| name.contains(part)).map(|(_, what)| *what)
}

/// The evidence for FalconMamba in a configuration that names no model: its vocabulary size.
fn nameless_falcon(words: &Words) -> Option<String> {
    let named = ["model_type", "architectures"].into_iter().any(|word| said(words.get(word)).is_some());
    let rows = words.get("vocab_size").and_then(Value::as_u64) == Some(FALCON);
    (!named && rows && words.contains_key("hidden_size")).then(|| falcon("no `model_type`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_tell_models_of_other_layers() {
        let of_family =
            |name: &str, axes, family, rows| check_tensors("t", [("a", 1), (name, axes)].into_iter(), family, rows);
        let of = |name: &str, axes, rows| of_family(name, axes, Mamba, rows);
        let layer = |part: &str| format!("backbone.layers.0.{part}");
        for (name, axes, part) in [
            (layer("mixer.dt_bias"), 1, "Mamba-2"),
            (layer("mixer.norm.weight"), 1, "Mamba-2"),
            (layer("mixer.A_log"), 1, "Mamba-2"),
            ("model.layers.0.mamba.dt_layernorm.weight".to_string(), 1, "Jamba"),
            ("model.layers.0.mamba.A_log".to_string(), 2, "hybrid"),
            (layer("mixer.Wqkv.weight"), 2, "attention"),
            (layer("mlp.fc1.weight"), 2, "MLPs"),
            ("base_model.model.backbone.layers.0.mixer.in_proj.lora_A.weight".to_string(), 2, "adapter"),
            ("blk.0.ssm_a".to_string(), 2, "GGUF"),
        ] {
            let error = of(&name, axes, None).unwrap_err();
            assert!(error.got.contains(part) && error.got.contains(&name), "{error}");
        }
        assert_eq!(of(&layer("mixer.A_log"), 2, Some(50280)), Ok(()));
        for (name, axes) in [(layer("mixer.dt_bias"), 1), (layer("mixer.norm.weight"), 1), (layer("mixer.A_log"), 1)] {
            assert_eq!(of_family(&name, axes, Mamba2, None), Ok(()));
            assert!(of_family(&name, axes, FalconMamba, None).unwrap_err().got.contains("Mamba-2"));
        }
        assert!(of_family(&layer("mixer.Wqkv.weight"), 2, Mamba2, None).unwrap_err().got.contains("attention"));
        let error = of(&layer("mixer.A_log"), 2, Some(65024)).unwrap_err();
        assert!(error.got.contains("FalconMamba") && error.hint.contains("model_type"), "{error}");
    }

    #[test]
    fn metadata_tells_models_of_other_layers() {
        let of_family = |key: &str, text: &str, family| {
            let told = [("format".to_string(), "pt".to_string()), (key.into(), text.into())];
            check_metadata("t", &BTreeMap::from(told), family)
        };
        let of = |key: &str, text: &str| of_family(key, text, None);
        for (key, text) in [
            ("model_type", "falcon_mamba"),
            ("mixer_rms_eps", "1e-06"),
            ("architectures", "[\"FalconMambaForCausalLM\"]"),
            ("config", "{\"model_type\": \"falcon_mamba\", \"hidden_size\": 16}"),
        ] {
            assert!(of(key, text).unwrap_err().got.contains("FalconMamba"), "{key}");
            assert!(of_family(key, text, Some(Mamba2)).unwrap_err().got.contains("FalconMamba"), "{key}");
            assert_eq!(of_family(key, text, Some(FalconMamba)), Ok(()), "{key}");
        }
        for (key, text) in [("model_type", "mamba"), ("total_size", "65024"), ("config", "{\"d_model\": 16}")] {
            assert_eq!(of(key, text), Ok(()));
        }
        let falcon = "{\"hidden_size\": 16, \"vocab_size\": 65024}";
        assert!(of("config", falcon).unwrap_err().got.contains("65024"));
        assert_eq!(of_family("config", falcon, Some(FalconMamba)), Ok(()));
    }
}

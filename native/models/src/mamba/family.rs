//! Tells apart models that resemble the first Mamba but compute something else: by the keys of a configuration, by the
//! metadata of a file, or by its tensors.

use serde_json::{Map, Value};
use sidewinder_files::json::shown;
use sidewinder_kernels::error::{Error, Kind, Result};

/// The keys and values of a configuration.
pub type Words = Map<String, Value>;

/// Values by which models of the first Mamba are named.
const TYPES: [&str; 2] = ["mamba", "mamba_ssm"];
const ARCHITECTURES: [&str; 3] = ["MambaForCausalLM", "MambaModel", "MambaLMHeadModel"];
const ACTIVATIONS: [&str; 2] = ["silu", "swish"];

const NORMED: &str = "FalconMamba, which norms B, C and dt";
const SECOND: &str = "Mamba-2";
const HYBRID: &str = "a hybrid with layers of attention";

/// Parts of the names of architectures, with the family that they belong to.
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

/// Keys that change what layers compute if they are anything but false, 0 or empty.
const TELLING: [(&str, &str); 6] = [
    ("mixer_rms_eps", NORMED),
    ("use_bcdt_rms", NORMED),
    ("inner_layernorms", NORMED),
    ("attn_layer_idx", HYBRID),
    ("d_intermediate", "layers of MLPs beside those of Mamba"),
    ("mup", "logits scaled by muP"),
];

/// Keys that only configurations of the second Mamba have.
const OF_SECOND: [&str; 6] = ["n_groups", "ngroups", "head_dim", "headdim", "chunk_size", "num_heads"];

/// The vocabulary of Falcon's models. FalconMamba's norms of B, C and dt have no weights, so its tensors look like
/// those of the first Mamba in everything else.
const FALCON: u64 = 65024;

/// Parts of tensor names that the first Mamba does not have, with the family that has them.
const TENSORS: [(&str, &str); 13] = [
    (".mixer.dt_bias", SECOND),
    (".mixer.norm.weight", SECOND),
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

/// Refuses configurations of models other than the first Mamba.
pub fn check(name: &str, words: &Words) -> Result<()> {
    match told(words) {
        Some(got) => Err(foreign(name, got)),
        None => Ok(()),
    }
}

/// Refuses files whose metadata describes another model, by single keys or as JSON.
pub fn check_metadata(name: &str, metadata: &std::collections::BTreeMap<String, String>) -> Result<()> {
    let read = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()));
    let words: Words = metadata.iter().map(|(key, text)| (key.clone(), read(text))).collect();
    let nested = words.values().filter_map(Value::as_object);
    std::iter::once(&words).chain(nested).try_for_each(|words| check(name, words))
}

/// Refuses tensors of other models, by their names and numbers of axes. `rows` is the number of rows of the embedding,
/// given only where no configuration names the model.
pub fn check_tensors<'n>(
    name: &str,
    mut tensors: impl Iterator<Item = (&'n str, usize)>,
    rows: Option<usize>,
) -> Result<()> {
    let other = tensors.find_map(|(tensor, axes)| Some(format!("{}, as `{tensor}` tells", of_tensor(tensor, axes)?)));
    let falcon = || (rows == Some(FALCON as usize)).then(|| falcon("no configuration"));
    match other.or_else(falcon) {
        Some(got) => Err(foreign(name, got)),
        None => Ok(()),
    }
}

fn of_tensor(name: &str, axes: usize) -> Option<&'static str> {
    // A decay per head; the first Mamba has one for each state of each channel.
    let heads = (axes == 1 && name.ends_with(".mixer.A_log")).then_some(SECOND);
    heads.or_else(|| TENSORS.iter().find(|(part, _)| name.contains(part)).map(|(_, what)| *what))
}

fn falcon(without: &str) -> String {
    format!("{FALCON} tokens, as FalconMamba has, and {without} that says what model it is")
}

fn foreign(name: &str, got: String) -> Error {
    Error::new(Kind::File, name)
        .expected("a model of the first Mamba: blocks with SiLU between norms of the root mean square")
        .got(got)
        .hint("Other models cannot be run. One of the first Mamba says `\"model_type\": \"mamba\"` in its config.json")
}

/// The evidence for another model, if there is any.
fn told(words: &Words) -> Option<String> {
    let own = type_told(words).or_else(|| architecture_told(words));
    let layer = words.get("ssm_cfg").and_then(|ssm| ssm.get("layer"));
    own.or_else(|| other_than("ssm_cfg.layer", layer, &["Mamba1"]))
        .or_else(|| other_than("hidden_act", words.get("hidden_act"), &ACTIVATIONS))
        .or_else(|| {
            (words.get("rms_norm") == Some(&Value::Bool(false))).then(|| "layer norms (`rms_norm` false)".into())
        })
        .or_else(|| word_told(words))
        .or_else(|| unnamed_told(words))
}

fn type_told(words: &Words) -> Option<String> {
    other_than("model_type", words.get("model_type"), &TYPES)
}

/// The architectures: without a type all must be known, and none may be known as another family's.
fn architecture_told(words: &Words) -> Option<String> {
    let named = said(words.get("model_type")).is_some();
    let known = |value: &Value| value.as_str().is_some_and(|name| ARCHITECTURES.contains(&name));
    let other = |value: &&Value| !known(value) && (!named || what(&shown(value)).is_some());
    listed(said(words.get("architectures"))?).find(other).map(|name| described("architectures", name))
}

/// The value of a key, unless it is null or empty.
fn said(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !matches!(value, Value::Null) && *value != "" && *value != &Value::Array(Vec::new()))
}

fn listed(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice).iter()
}

fn other_than(word: &str, value: Option<&Value>, allowed: &[&str]) -> Option<String> {
    let value = said(value)?;
    let fits = value.as_str().is_some_and(|text| allowed.contains(&text));
    (!fits).then(|| described(word, value))
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

fn word_told(words: &Words) -> Option<String> {
    let is_on = |value: &Value| match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::String(text) => !text.is_empty(),
    };
    let (word, what) = TELLING.iter().find(|(word, _)| words.get(*word).is_some_and(is_on))?;
    Some(format!("`{word}` {}: {what}", shown(&words[*word])))
}

/// Evidence in other keys, for configurations that name no model.
fn unnamed_told(words: &Words) -> Option<String> {
    if ["model_type", "architectures"].into_iter().any(|word| said(words.get(word)).is_some()) {
        return None;
    }
    let ssm = words.get("ssm_cfg").and_then(Value::as_object);
    let all = || [Some(words), ssm].into_iter().flatten();
    let second = OF_SECOND.iter().find(|word| all().any(|words| said(words.get(**word)).is_some()));
    let falcon = || {
        let rows = words.get("vocab_size").and_then(Value::as_u64) == Some(FALCON);
        (rows && words.contains_key("hidden_size")).then(|| falcon("no `model_type`"))
    };
    second.map(|word| format!("`{word}`: {SECOND}")).or_else(falcon)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn tensors_tell_models_of_other_layers() {
        let of = |name: &str, axes, rows| check_tensors("t", [("a", 1), (name, axes)].into_iter(), rows);
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
        let error = of(&layer("mixer.A_log"), 2, Some(65024)).unwrap_err();
        assert!(error.got.contains("FalconMamba") && error.hint.contains("model_type"), "{error}");
    }

    #[test]
    fn metadata_tells_models_of_other_layers() {
        let of = |key: &str, text: &str| {
            check_metadata("t", &BTreeMap::from([("format".to_string(), "pt".to_string()), (key.into(), text.into())]))
        };
        for (key, text) in [
            ("model_type", "falcon_mamba"),
            ("mixer_rms_eps", "1e-06"),
            ("architectures", "[\"FalconMambaForCausalLM\"]"),
            ("config", "{\"model_type\": \"falcon_mamba\", \"hidden_size\": 16}"),
        ] {
            assert!(of(key, text).unwrap_err().got.contains("FalconMamba"), "{key}");
        }
        for (key, text) in [("model_type", "mamba"), ("total_size", "65024"), ("config", "{\"d_model\": 16}")] {
            assert_eq!(of(key, text), Ok(()));
        }
    }
}

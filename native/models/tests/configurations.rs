//! Published configurations, and variants that other tools write.

use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_models::mamba::{Config, Heads, Mixer};

fn published(name: &str) -> String {
    let path = format!("{}/../../test/golden/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn parsed(json: &str) -> Result<Config> {
    Config::parse("config.json", json.as_bytes())
}

fn refused(json: &str) -> Error {
    let error = parsed(json).err().unwrap_or_else(|| panic!("refused: {json}"));
    assert!(error.kind == Kind::File && &*error.argument == "config.json", "{error}");
    error
}

fn sizes(width: usize, layers: usize) -> Config {
    Config {
        width,
        layers,
        vocabulary: 50280,
        inner: 2 * width,
        state: 16,
        rank: width / 16,
        conv: 4,
        eps: 1e-5,
        mixer: Mixer::Mamba,
    }
}

/// The configuration of a small model, with these additional keys.
fn with(words: &str) -> String {
    format!(r#"{{"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 30, {words}}}"#)
}

#[test]
fn published_models_have_the_sizes_that_they_say() {
    for (name, width, layers) in
        [("130m", 768, 24), ("370m", 1024, 48), ("790m", 1536, 48), ("1.4b", 2048, 48), ("2.8b", 2560, 64)]
    {
        for style in ["", "-hf"] {
            let json = published(&format!("mamba-{name}{style}"));
            assert_eq!(parsed(&json), Ok(sizes(width, layers)), "{name}{style}");
            let unpadded = json
                .replace("\"pad_vocab_size_multiple\": 8,", "")
                .replace(",\n  \"pad_vocab_size_multiple\": 8\n", "\n");
            assert!(!unpadded.contains("pad_vocab"));
            assert_eq!(parsed(&unpadded), Ok(sizes(width, layers)), "{name}{style} without a multiple");
        }
    }
    assert_eq!(parsed(&published("mamba-2.8b-slimpj")), Ok(sizes(2560, 64)));
}

const OPEN: (f64, f64) = (0.0, f64::INFINITY);

/// A configuration without these keys. `serde_json` refuses `Infinity`, so it becomes 1e308.
fn without(json: &str, words: &[&str]) -> String {
    let mut json: serde_json::Value = serde_json::from_str(&json.replace("Infinity", "1e308")).unwrap();
    words.iter().for_each(|word| drop(json.as_object_mut().unwrap().remove(*word)));
    json.to_string()
}

#[test]
fn published_models_of_other_kinds_have_the_sizes_that_they_say() {
    let falcon =
        Config { vocabulary: 65024, inner: 8192, rank: 256, mixer: Mixer::FalconMamba(1e-6), ..sizes(4096, 64) };
    let json = published("falcon-mamba-7b");
    assert_eq!(parsed(&json), Ok(falcon));
    assert_eq!(parsed(&without(&json, &["model_type"])), Ok(falcon));
    assert_eq!(parsed(&without(&json, &["architectures"])), Ok(falcon));
    // Only its vocabulary size is left to tell the family.
    assert!(
        refused(&without(&json, &["model_type", "architectures"])).got.contains("65024 tokens, as FalconMamba has")
    );

    let second = |limit| Config {
        vocabulary: 50288,
        state: 128,
        rank: 0,
        mixer: Mixer::Mamba2(Heads { count: 24, groups: 1, limit }),
        ..sizes(768, 24)
    };
    assert_eq!(parsed(&published("mamba2-130m")), Ok(second(OPEN)));
    let json = published("mamba2-130m-hf");
    assert_eq!(parsed(&json), Ok(second(OPEN)));
    for words in [&["model_type"][..], &["architectures"], &["model_type", "architectures"]] {
        assert_eq!(parsed(&without(&json, words)), Ok(second((0.0, 1e308))), "{words:?}");
    }
    let attention = refused(&published("mamba2attn-2.7b"));
    assert!(attention.got.contains("`attn_layer_idx` [9,18,27,36,45,56]: a hybrid"), "{attention}");
}

/// A small Mamba-2 configuration with these keys of Hugging Face, or in `package` of `mamba_ssm`.
fn second(words: &str) -> String {
    with(&format!(r#""model_type": "mamba2", {words}"#))
}

fn package(words: &str) -> String {
    format!(r#"{{"d_model": 16, "n_layer": 2, "ssm_cfg": {{"layer": "Mamba2", {words}}}}}"#)
}

#[test]
fn heads_and_groups_are_those_that_a_configuration_says_or_leaves_out() {
    let of = |json: &str| match parsed(json).unwrap_or_else(|e| panic!("{json}: {e}")).mixer {
        Mixer::Mamba2(heads) => heads,
        other => panic!("{other:?} in {json}"),
    };
    for (json, expected) in [
        (second(r#""head_dim": 4, "num_heads": 8"#), Heads { count: 8, groups: 8, limit: OPEN }),
        (second(r#""head_dim": 8, "n_groups": 2"#), Heads { count: 4, groups: 2, limit: OPEN }),
        (
            second(r#""head_dim": 16, "n_groups": 1, "time_step_limit": [0.5, 2]"#),
            Heads { count: 2, groups: 1, limit: (0.5, 2.0) },
        ),
        (
            second(r#""head_dim": 16, "n_groups": 1, "time_step_limit": [-Infinity, Infinity]"#),
            Heads { count: 2, groups: 1, limit: (f64::NEG_INFINITY, f64::INFINITY) },
        ),
        (package(r#""headdim": 8"#), Heads { count: 4, groups: 1, limit: OPEN }),
        (
            package(r#""headdim": 8, "ngroups": 2, "dt_limit": [0.0, 1.0]"#),
            Heads { count: 4, groups: 2, limit: (0.0, 1.0) },
        ),
        (package(r#""headdim": 8, "expand": 1"#), Heads { count: 2, groups: 1, limit: OPEN }),
        (
            r#"{"d_model": 64, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}}"#.to_string(),
            Heads { count: 2, groups: 1, limit: OPEN },
        ),
    ] {
        assert_eq!(of(&json), expected, "{json}");
    }
    // The configuration of Codestral Mamba in `mistral_inference`.
    let codestral = r#"{"model_type": "mamba", "dim": 4096, "n_layers": 64, "vocab_size": 32768, "n_groups": 8, "rms_norm": true,
        "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 1, "tie_embeddings": false}"#;
    let mixer = Mixer::Mamba2(Heads { count: 128, groups: 8, limit: OPEN });
    let sizes = Config { vocabulary: 32768, state: 128, rank: 0, mixer, ..sizes(4096, 64) };
    assert_eq!(parsed(codestral), Ok(sizes));
}

#[test]
fn heads_that_no_model_can_have_are_refused() {
    for (json, part) in [
        (second(r#""n_groups": 1"#), "0 heads"),
        (second(r#""head_dim": 8, "num_heads": 3"#), "3 heads"),
        (second(r#""head_dim": 5, "n_groups": 1"#), "6 heads and 5 channels"),
        (second(r#""head_dim": 0, "n_groups": 1"#), "0 channels"),
        (second(r#""head_dim": 8, "n_groups": 3"#), "3 groups"),
        (second(r#""head_dim": 8, "n_groups": 0"#), "groups: 0"),
        (second(r#""head_dim": 8, "n_groups": 8"#), "8 groups"),
        (second(r#""head_dim": 8, "n_groups": 1, "time_step_limit": [2, 1]"#), "from 2 to 1"),
        (second(r#""head_dim": 8, "n_groups": 1, "time_step_limit": [NaN, 1]"#), "from NaN"),
        (second(r#""head_dim": 8, "n_groups": 1, "time_step_limit": [1]"#), "`time_step_limit` [1]"),
        (second(r#""head_dim": 8, "n_groups": 1, "time_step_limit": ["0", "1"]"#), "`time_step_limit`"),
        (second(r#""head_dim": 8, "n_groups": 1, "layer_norm_epsilon": 0"#), "epsilon 0"),
        (package(r#""headdim": 8, "norm_before_gate": true"#), "`ssm_cfg.norm_before_gate` true"),
        (package(r#""headdim": 8, "rmsnorm": false"#), "`ssm_cfg.rmsnorm` false"),
        (package(r#""headdim": 8, "D_has_hdim": true"#), "`ssm_cfg.D_has_hdim` true"),
        (package(r#""headdim": 8, "d_ssm": 16"#), "`ssm_cfg.d_ssm` 16"),
    ] {
        let error = refused(&json);
        assert!(error.got.contains(part), "{json}: {error}");
    }
    let falcon = |eps: &str| with(&format!(r#""model_type": "falcon_mamba", "mixer_rms_eps": {eps}"#));
    assert_eq!(parsed(&falcon("0.25")).unwrap().mixer, Mixer::FalconMamba(0.25));
    assert_eq!(parsed(&with(r#""mixer_rms_eps": 0.25"#)).unwrap().mixer, Mixer::FalconMamba(0.25));
    for eps in ["Infinity", "-1", "\"1\""] {
        assert!(refused(&falcon(eps)).got.contains("`mixer_rms_eps`"), "{eps}");
    }
}

#[test]
fn what_is_told_is_read_again() {
    for json in [
        published("falcon-mamba-7b"),
        published("mamba2-130m"),
        published("mamba2-130m-hf"),
        published("mamba-130m"),
        package(r#""headdim": 8, "ngroups": 2, "dt_limit": [0.0, 1.0]"#),
        second(r#""head_dim": 8, "n_groups": 2"#),
    ] {
        let config = parsed(&json).unwrap();
        for before in ["{}", &json] {
            let mut words = match sidewinder_files::json::parse("words", before.as_bytes(), "words").unwrap() {
                serde_json::Value::Object(words) => words,
                other => panic!("{other}"),
            };
            config.tell(&mut words);
            words.insert("model_type".into(), config.mixer.model_type().into());
            let told = sidewinder_files::json::written(&words.into());
            assert_eq!(parsed(&told), Ok(config), "{told}");
        }
    }
}

#[test]
fn what_needs_other_arithmetic_is_refused_by_name() {
    for (words, part) in [
        (r#""model_type": "jamba""#, "jamba: a hybrid"),
        (r#""model_type": "zamba2""#, "zamba2: a hybrid"),
        (r#""model_type": "bamba""#, "bamba: a hybrid"),
        (r#""model_type": "recurrent_gemma""#, "recurrent_gemma"),
        (r#""model_type": "llama""#, "`model_type` llama"),
        (r#""model_type": 3"#, "`model_type` 3"),
        (r#""architectures": ["LlamaForCausalLM"]"#, "LlamaForCausalLM"),
        (r#""architectures": "JambaForCausalLM""#, "JambaForCausalLM"),
        (r#""model_type": "mamba", "architectures": ["FalconMambaForCausalLM"]"#, "FalconMamba"),
        (r#""model_type": "mamba", "mixer_rms_eps": 0.5"#, "`mixer_rms_eps` 0.5: FalconMamba"),
        (r#""model_type": "mamba2", "mixer_rms_eps": 0.5"#, "`mixer_rms_eps` 0.5: FalconMamba"),
        (r#""model_type": "mamba2", "architectures": ["FalconMambaForCausalLM"]"#, "FalconMamba"),
        (r#""model_type": "mamba", "ssm_cfg": {"layer": "Mamba2"}"#, "`model_type` mamba and `ssm_cfg.layer` Mamba2"),
        (r#""architectures": ["MambaForCausalLM", "Mamba2ForCausalLM"]"#, "Mamba-2"),
        (r#""use_bcdt_rms": true"#, "`use_bcdt_rms` true: norms"),
        (r#""inner_layernorms": true"#, "`inner_layernorms` true"),
        (r#""vocab_size": 65024"#, "65024 tokens, as FalconMamba has"),
        (r#""ssm_cfg": {"layer": "Mamba3"}"#, "Mamba3"),
        (r#""attn_layer_idx": [1]"#, "attention"),
        (r#""d_intermediate": 64"#, "MLPs"),
        (r#""mup": true"#, "muP"),
        (r#""hidden_act": "gelu""#, "`hidden_act` gelu"),
        (r#""rms_norm": false"#, "layer norms"),
    ] {
        let error = refused(&with(words));
        assert!(error.got.contains(part), "{words}: {error}");
        assert!(error.expected.contains("Mamba, FalconMamba or Mamba-2"), "{error}");
    }
    for words in [
        r#""mixer_rms_eps": null, "use_bcdt_rms": false, "attn_layer_idx": [], "attn_cfg": {}, "d_intermediate": 0"#,
        r#""model_type": "mamba", "architectures": ["MyOwnMamba"], "use_mambapy": true, "num_heads": 4"#,
        r#""model_type": null, "architectures": ["MambaLMHeadModel"], "ssm_cfg": {"layer": "Mamba1"}, "mup": false"#,
        r#""model_type": "mamba", "architectures": null, "hidden_act": null, "rms_norm": null, "ssm_cfg": null"#,
        r#""model_type": "mamba_ssm", "architectures": [], "time_step_limit": [0.0, Infinity], "x": [NaN, -Infinity]"#,
    ] {
        assert_eq!(parsed(&with(words)).map(|config| config.inner), Ok(32), "{words}");
    }
    assert_eq!(parsed(&with(r#""model_type": "mamba", "vocab_size": 65024"#)).unwrap().vocabulary, 65024);
}

#[test]
fn every_name_of_a_size_is_taken_and_two_that_differ_are_not() {
    let names: [&[&str]; 7] = [
        &["hidden_size", "d_model", "dim"],
        &["num_hidden_layers", "n_layer", "n_layers", "num_layers"],
        &["intermediate_size", "d_inner"],
        &["state_size", "d_state", "ssm_cfg.d_state"],
        &["time_step_rank", "dt_rank", "ssm_cfg.dt_rank"],
        &["conv_kernel", "d_conv", "ssm_cfg.d_conv"],
        &["layer_norm_epsilon", "norm_epsilon", "rms_norm_eps", "norm_eps"],
    ];
    let whole = |config: &Config| {
        let Config { width, layers, inner, state, rank, conv, eps, .. } = *config;
        [width as f64, layers as f64, inner as f64, state as f64, rank as f64, conv as f64, eps]
    };
    let json = |said: &[(&str, &str)]| {
        let (mut words, mut ssm) = (vec![], vec![]);
        for (name, value) in said {
            match name.strip_prefix("ssm_cfg.") {
                Some(name) => ssm.push(format!("\"{name}\": {value}")),
                None => words.push(format!("\"{name}\": {value}")),
            }
        }
        words.push(format!("\"ssm_cfg\": {{{}}}", ssm.join(", ")));
        format!("{{{}}}", words.join(", "))
    };
    for (size, names) in names.iter().enumerate() {
        let needed = [("hidden_size", "16"), ("num_hidden_layers", "2")];
        let others: Vec<_> = needed.into_iter().filter(|(name, _)| !names.contains(name)).collect();
        for name in *names {
            let said = |values: &[(&'static str, &'static str)]| json(&[&others[..], values].concat());
            let name: &'static str = name;
            assert_eq!(whole(&parsed(&said(&[(name, "7")])).unwrap())[size], 7.0, "{name}");
            for other in names.iter().filter(|other| **other != name) {
                let other: &'static str = other;
                for equal in ["7", "7.0", "7e0", "70e-1", "null"] {
                    let json = said(&[(name, "7"), (other, equal)]);
                    assert_eq!(whole(&parsed(&json).unwrap())[size], 7.0, "{json}");
                }
                let error = refused(&said(&[(name, "7"), (other, "8")]));
                let both = [format!("`{name}` 7"), format!("`{other}` 8")];
                assert!(both.iter().all(|part| error.got.contains(part)), "{error}");
            }
        }
    }
}

#[test]
fn numbers_that_are_none_are_refused_where_they_matter_by_their_names() {
    for value in ["Infinity", "-Infinity", "NaN", "1e999", "\"16\"", "true", "[16]", "{}", "-1", "1.5", "4294967296"] {
        for name in ["d_model", "n_layer", "vocab_size", "state_size", "d_conv", "intermediate_size", "dt_rank"] {
            let error = refused(&with(&format!("\"{name}\": {value}")));
            assert!(error.got.contains(&format!("`{name}`")), "{error}");
        }
    }
    for (name, value) in [
        ("layer_norm_epsilon", "Infinity"),
        ("layer_norm_epsilon", "NaN"),
        ("layer_norm_epsilon", "-0.5"),
        ("layer_norm_epsilon", "\"1e-5\""),
        ("expand", "Infinity"),
        ("expand", "\"2\""),
        ("dt_rank", "\"many\""),
        ("d_state", "\"auto\""),
    ] {
        let error = refused(&with(&format!("\"{name}\": {value}")));
        assert!(error.got.contains(&format!("`{name}` ")), "{error}");
        assert!(error.expected.contains(name), "{error}");
    }
}

#[test]
fn words_of_other_writers_are_understood() {
    let config = parsed(&with(r#""expand": 1.5, "time_step_rank": "auto""#)).unwrap();
    assert_eq!((config.inner, config.rank, config.vocabulary), (24, 1, 30));
    // Rounded down, as int(expand * d_model) in Python.
    assert_eq!(parsed(&with(r#""expand": 1.3"#)).unwrap().inner, 20);
    assert_eq!(parsed(&with(r#""expand": 16, "intermediate_size": 8"#)).unwrap().inner, 8);
    assert_eq!(parsed(&with(r#""dt_rank": "auto", "time_step_rank": 1"#)).unwrap().rank, 1);
    assert!(refused(&with(r#""dt_rank": "auto", "time_step_rank": 2"#)).got.contains("`dt_rank` \"auto\""));
    // Of duplicate keys the last one is used, as in Python.
    assert_eq!(parsed(&with(r#""state_size": 4, "state_size": 8"#)).unwrap().state, 8);
    assert_eq!(parsed(&format!("\u{feff}{}", with("\"x\": 1"))).unwrap().width, 16);
    // Hugging Face's `vocab_size` is not padded, even if a conversion has left a multiple in the file.
    assert_eq!(parsed(&with(r#""pad_vocab_size_multiple": 8"#)).unwrap().vocabulary, 30);
    let original = |words: &str| format!(r#"{{"d_model": 16, "n_layer": 2, "vocab_size": 30{words}}}"#);
    for (words, rows) in [
        ("", 32),
        (r#", "pad_vocab_size_multiple": null"#, 32),
        (r#", "pad_vocab_size_multiple": 16.0"#, 32),
        (r#", "pad_vocab_size_multiple": 10"#, 30),
        (r#", "pad_vocab_size_multiple": 1"#, 30),
        (r#", "pad_vocab_size_multiple": 64"#, 64),
    ] {
        assert_eq!(parsed(&original(words)).unwrap().vocabulary, rows, "{words}");
    }
    assert!(refused(r#"{"n_layer": 2}"#).expected.contains("`hidden_size` or `d_model`"));
    assert!(refused(r#"{"d_model": 2}"#).expected.contains("`num_hidden_layers` or `n_layer`"));
}

#[test]
fn what_is_no_configuration_is_named_for_what_it_is() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n";
    for (json, part) in [
        (pointer, "git lfs pull"),
        ("<!doctype html><html>", "HTML"),
        ("", "an empty file"),
        ("Entry not found", "Entry not found"),
        ("[]", "[]"),
        ("{\"hidden_size\": 16,", "EOF"),
    ] {
        assert!(refused(json).to_string().contains(part), "{json}: {}", refused(json));
    }
}

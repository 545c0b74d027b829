//! Checkpoints of models: other names, tensors that are wrong or missing, and damaged files.

#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "common/golden.rs"]
mod golden;

use common::gpu;
use golden::{FALCON_MAMBA, Golden, MAMBA, MAMBA2, MAMBA2_GROUPS, config, forward, of_tensors, tensors, tokens};
use sidewinder_files::safetensors;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use sidewinder_models::mamba::{Checkpoint, Config, Heads, Mixer, Model, Weight, Where};
use std::path::Path;

#[test]
fn other_names_and_no_configuration_make_the_same_model() {
    let tokens = tokens();
    let plain = forward(&of_tensors(Some(config()), tensors()).unwrap(), &tokens, 2);
    let renamed = |rename: &dyn Fn(&str) -> String| -> Vec<(String, Weight)> {
        tensors().into_iter().map(|(name, weight)| (rename(&name), weight)).collect()
    };
    let original = |name: &str| name.replace("embeddings", "embedding");
    let bare = |name: &str| name.replace("backbone.", "");
    let mut with_head = tensors();
    let embedding = with_head.iter().find(|(name, _)| name == "backbone.embeddings.weight").unwrap().1.clone();
    with_head.push(("lm_head.weight".to_string(), embedding));
    for (config, tensors) in [
        (None, tensors()),
        (Some(config()), renamed(&original)),
        (None, renamed(&original)),
        (Some(config()), renamed(&bare)),
        (Some(config()), with_head),
    ] {
        let model = of_tensors(config, tensors).unwrap();
        assert_eq!(forward(&model, &tokens, 2).view().bytes(), plain.view().bytes());
    }
}

#[test]
fn other_kinds_are_read_by_all_their_names() {
    for golden in [FALCON_MAMBA, MAMBA2, MAMBA2_GROUPS] {
        let tokens = golden.tokens();
        let plain = forward(&of_tensors(Some(golden.config()), golden.tensors()).unwrap(), &tokens, 2);
        let outer = |name: &str| format!("model.{name}");
        let original = |name: &str| name.replace("embeddings", "embedding");
        let hugging_face = |name: &str| original(name).replace("embedding", "embeddings");
        let bare = |name: &str| name.replace("backbone.", "");
        for rename in [&outer as &dyn Fn(&str) -> String, &original, &hugging_face, &bare] {
            let renamed = golden.tensors().into_iter().map(|(name, weight)| (rename(&name), weight)).collect();
            let model = of_tensors(Some(golden.config()), renamed).unwrap();
            assert_eq!(forward(&model, &tokens, 2).view().bytes(), plain.view().bytes(), "{golden:?}");
        }
    }
}

#[test]
fn other_kinds_are_saved_as_they_are_read() {
    let folder = std::env::temp_dir().join(format!("sidewinder-kinds-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for golden in [FALCON_MAMBA, MAMBA2, MAMBA2_GROUPS] {
        let model = of_tensors(Some(golden.config()), golden.tensors()).unwrap();
        let written = std::fs::read(golden.folder().join("config.json")).unwrap();
        for configs in [&[][..], &[&written[..]]] {
            let described = model.described(configs).unwrap();
            assert!(described.contains(&format!("\"model_type\": \"{}\"", golden.config().mixer.model_type())));
            std::fs::write(folder.join("config.json"), described).unwrap();
            model.save(&folder.join("model.safetensors")).unwrap();
            let again = Checkpoint::open(&folder, false).unwrap();
            let again = Model::new(again, None, false, Where::Cpu(Exec::default())).unwrap();
            assert_eq!(again.config(), model.config());
            assert_eq!(sorted(again.tensors().unwrap()), sorted(model.tensors().unwrap()), "{golden:?}");
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn tensors_of_another_kind_than_the_configuration_says_are_refused() {
    let refused = |config: Option<Golden>, tensors: Golden| {
        of_tensors(config.map(Golden::config), tensors.tensors()).err().expect("an error").got
    };
    for config in [None, Some(MAMBA), Some(FALCON_MAMBA)] {
        let got = refused(config, MAMBA2);
        assert!(got.contains("Mamba-2, as `backbone.layers.0.mixer."), "{got}");
    }
    let got = refused(Some(MAMBA2), MAMBA);
    for part in [
        "no `backbone.layers.0.mixer.dt_bias`",
        "no `backbone.layers.1.mixer.norm.weight`",
        "`backbone.layers.0.mixer.A_log` of shape (40, 5) where it should be (5)",
        "`backbone.layers.0.mixer.x_proj.weight`, which no Mamba-2 model has",
    ] {
        assert!(got.contains(part), "{part} in {got}");
    }
    let plain = MAMBA2_GROUPS.config();
    let Mixer::Mamba2(heads) = plain.mixer else { panic!("{plain:?}") };
    for (config, part) in [
        (Config { mixer: Mixer::Mamba2(Heads { groups: 1, ..heads }), ..plain }, "in_proj.weight` of shape (96, 20)"),
        (Config { mixer: Mixer::Mamba2(Heads { count: 8, ..heads }), ..plain }, "mixer.D` of shape (4)"),
        (Config { mixer: Mixer::Mamba2(Heads { count: 3, ..heads }), ..plain }, "3 heads"),
        (Config { mixer: Mixer::Mamba2(Heads { count: 0, ..heads }), ..plain }, "count: 0"),
        (Config { state: 1 << 30, ..plain }, "conv1d.weight` of shape (52, 1, 3)"),
        (Config { inner: i32::MAX as usize + 1, ..plain }, "inner: 2147483648"),
    ] {
        let error = of_tensors(Some(config), MAMBA2_GROUPS.tensors()).err().expect(part);
        assert!(error.kind == Kind::File && error.got.contains(part), "{part}: {error}");
    }
}

/// Tensors sorted by name, with their specs and bytes.
fn sorted(tensors: Vec<(String, Weight)>) -> Vec<(String, Spec, Vec<u8>)> {
    let mut all: Vec<_> = tensors.into_iter().map(|(n, w)| (n, w.spec(), w.view().bytes().to_vec())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn the_tensors_of_a_model_are_those_it_was_made_of() {
    let of = sorted;
    let mut untied = tensors();
    untied.push(("lm_head.weight".to_string(), Owned::zeros(Spec::new(DType::F32, &[37, 20]).unwrap()).into()));
    let places = || [Where::Cpu(Exec::default())].into_iter().chain(gpu().map(|device| Where::Cuda(device, false)));
    for made_of in [tensors(), untied] {
        for place in places() {
            let checkpoint = Checkpoint::new("tensors", Some(config()), made_of.clone());
            let model = Model::new(checkpoint, None, false, place).unwrap();
            assert_eq!(of(model.tensors().unwrap()), of(made_of.clone()));
        }
    }
    let backbone = Checkpoint::new("tensors", Some(config()), tensors());
    let backbone = Model::new(backbone, Some(DType::Bf16), true, Where::Cpu(Exec::default())).unwrap();
    let again = Checkpoint::new("again", None, backbone.tensors().unwrap());
    let again = Model::new(again, None, false, Where::Cpu(Exec::default())).unwrap();
    assert_eq!((again.dtype(), again.config()), (DType::Bf16, backbone.config()));
    assert_eq!(of(again.tensors().unwrap()), of(backbone.tensors().unwrap()));
}

#[test]
fn one_error_tells_all_that_is_wrong() {
    let mut tensors = tensors();
    tensors.retain(|(name, _)| name != "backbone.layers.1.mixer.D" && name != "backbone.norm_f.weight");
    tensors.push(("backbone.layers.3.mixer.D".into(), Owned::zeros(Spec::new(DType::F32, &[40]).unwrap()).into()));
    for (name, weight) in &mut tensors {
        if name == "backbone.layers.0.mixer.x_proj.weight" {
            *weight = weight.reshape(&[40, 13]).unwrap();
        }
    }
    let error = of_tensors(Some(config()), tensors).err().expect("a model that is not whole");
    assert_eq!(error.kind, Kind::File);
    for part in [
        "no `backbone.layers.1.mixer.D`",
        "no `backbone.norm_f.weight`",
        "`backbone.layers.3.mixer.D`, which no Mamba model has",
        "`backbone.layers.0.mixer.x_proj.weight` of shape (40, 13) where it should be (13, 40)",
    ] {
        assert!(error.got.contains(part), "{part} in {error}");
    }
}

#[test]
fn layers_that_are_only_claimed_are_told_together() {
    let claimed = Config { layers: i32::MAX as usize, ..config() };
    let mut tensors = tensors();
    tensors.retain(|(name, _)| !name.starts_with("backbone.layers.1."));
    tensors.push(("backbone.layers.99.mixer.D".into(), Owned::zeros(Spec::new(DType::F32, &[40]).unwrap()).into()));
    let error = of_tensors(Some(claimed), tensors).err().expect("a model that is not whole");
    let told: Vec<&str> = error.got.split("; ").collect();
    for part in [
        "no `backbone.layers.1`",
        "no `backbone.layers.3` to `backbone.layers.98`",
        "no `backbone.layers.99.mixer.in_proj.weight`",
        "no `backbone.layers.100` to `backbone.layers.2147483646`",
    ] {
        assert!(told.contains(&part), "{part} in {error}");
    }
    assert_eq!(told.len(), 3 + 8, "{error}");
    let extra =
        (0..5000).map(|i| (format!("extra{i}"), Weight::from(Owned::zeros(Spec::new(DType::F32, &[1]).unwrap()))));
    let error = of_tensors(Some(config()), golden::tensors().into_iter().chain(extra).collect()).err().unwrap();
    assert!(error.got.ends_with("; and 4000 more"), "{error}");
}

#[test]
fn sizes_that_no_memory_has_are_errors() {
    let huge = 1 << 40;
    let plain = config();
    for config in [
        Config { width: huge, ..plain },
        Config { state: 1 << 60, ..plain },
        Config { inner: i32::MAX as usize, ..plain },
        Config { rank: usize::MAX, ..plain },
        Config { conv: 0, ..plain },
        Config { vocabulary: usize::MAX, ..plain },
        Config { eps: f64::INFINITY, ..plain },
    ] {
        assert_eq!(of_tensors(Some(config), tensors()).err().expect("an error").kind, Kind::File, "{config:?}");
    }
    let bytes = |(name, weight): (String, Weight)| (name, weight.cast(DType::U8));
    let error = of_tensors(None, tensors().into_iter().map(bytes).collect()).err().unwrap();
    assert!(error.got.contains("`backbone.layers.0.mixer.in_proj.weight` of u8"), "{error}");
    let wrong =
        Model::new(Checkpoint::new("tensors", None, tensors()), Some(DType::U8), false, Where::Cpu(Exec::default()));
    assert_eq!(wrong.err().unwrap().kind, Kind::Option);
}

#[test]
fn damaged_checkpoints_are_errors() {
    let folder = std::env::temp_dir().join(format!("sidewinder-mamba-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let kind = |path: &Path| Checkpoint::open(path, false).err().expect("an error").kind;
    assert_eq!(kind(&folder), Kind::File);
    assert_eq!(kind(&folder.join("none")), Kind::File);
    let whole = std::fs::read(golden::folder().join("model.safetensors")).unwrap();
    for damaged in [&whole[..whole.len() / 2], &whole[..100], b"not a safetensors file at all"] {
        std::fs::write(folder.join("model.safetensors"), damaged).unwrap();
        assert_eq!(kind(&folder), Kind::File);
    }
    std::fs::write(folder.join("model.safetensors"), &whole).unwrap();
    std::fs::write(folder.join("config.json"), "{").unwrap();
    assert_eq!(kind(&folder), Kind::File);
    // A file that exists but cannot be read is an error; it does not count as absent.
    std::fs::remove_file(folder.join("config.json")).unwrap();
    assert!(Checkpoint::open(&folder, false).is_ok());
    for name in ["config.json", "model.safetensors.index.json"] {
        std::fs::create_dir(folder.join(name)).unwrap();
        let error = Checkpoint::open(&folder, false).err().expect(name);
        assert!(error.kind == Kind::File && error.argument.ends_with(name), "{error}");
        std::fs::remove_dir(folder.join(name)).unwrap();
    }
    let index = folder.join("model.safetensors.index.json");
    std::fs::copy(folder.join("model.safetensors"), folder.join("same.safetensors")).unwrap();
    for (map, part) in [
        (r#"{"x": "gone.safetensors"}"#, "gone.safetensors"),
        (r#"{"x": "../model.safetensors"}"#, "../model.safetensors"),
        (r#"{"x": "/etc/passwd"}"#, "/etc/passwd"),
        (r#"{"x": "model.safetensors", "y": "same.safetensors"}"#, "each tensor in one file"),
        (r#"{"x": 1}"#, "invalid type"),
    ] {
        std::fs::write(&index, format!(r#"{{"weight_map": {map}}}"#)).unwrap();
        let error = Checkpoint::open(&folder, false).err().expect(map);
        assert!(error.kind == Kind::File && error.to_string().contains(part), "{error}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn checkpoints_in_several_files_are_read() {
    let folder = std::env::temp_dir().join(format!("sidewinder-shards-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let tensors = tensors();
    let mut index = serde_json::Map::new();
    for (i, part) in tensors.chunks(10).enumerate() {
        let file = format!("model-{i}.safetensors");
        let views: Vec<(&str, View)> = part.iter().map(|(name, weight)| (name.as_str(), weight.view())).collect();
        safetensors::write(&folder.join(&file), &views).unwrap();
        part.iter().for_each(|(name, _)| drop(index.insert(name.clone(), file.clone().into())));
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": index});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let model =
        Model::new(Checkpoint::open(&folder, false).unwrap(), None, false, Where::Cpu(Exec::default())).unwrap();
    let tokens = tokens();
    let plain = forward(&of_tensors(Some(config()), tensors).unwrap(), &tokens, 2);
    assert_eq!(forward(&model, &tokens, 2).view().bytes(), plain.view().bytes());
    std::fs::remove_dir_all(folder).unwrap();
}

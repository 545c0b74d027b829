//! Selects the files of a folder that make up the model: the files that an index names, else `model.safetensors`, else
//! the shards of one model, else the only safetensors file. Files whose names mark them as something else, such as an
//! adapter, are never taken.

use super::checkpoint::MAX_DESCRIPTION;
use serde::Deserialize;
use sidewinder_files::recognise::{AGAIN, CONVERT, OTHER_READER, PICKLE};
use sidewinder_files::{file, json};
use sidewinder_kernels::error::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The file that maps tensors to files, for models in several files.
const INDEX: &str = "model.safetensors.index.json";
const MODEL: &str = "model.safetensors";
const ENDING: &str = ".safetensors";
const WANTED: &str = "a folder with model.safetensors";

/// Name prefixes of safetensors files that are not the model, with a description of each.
const OTHERS: [(&str, &str); 8] = [
    ("adapter", "an adapter to a model"),
    ("lora", "an adapter to a model"),
    ("pytorch_lora", "an adapter to a model"),
    ("optimizer", "the state of an optimizer"),
    ("scheduler", "the state of a scheduler"),
    ("training_args", "arguments of a training"),
    ("rng_state", "the state of a random generator"),
    ("random_states", "the state of a random generator"),
];

/// Endings of files that hold models in other formats, with a hint for each.
const FORMATS: [(&str, &str); 15] = [
    (".gguf", OTHER_READER),
    (".ggml", OTHER_READER),
    (".bin", PICKLE),
    (".pt", PICKLE),
    (".pth", PICKLE),
    (".ckpt", PICKLE),
    (".h5", CONVERT),
    (".msgpack", CONVERT),
    (".onnx", CONVERT),
    (".npz", CONVERT),
    (".nemo", CONVERT),
    (".part", AGAIN),
    (".incomplete", AGAIN),
    (".crdownload", AGAIN),
    (".aria2", AGAIN),
];

/// The fields of an index that are read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The safetensors files of a checkpoint, given by its folder or by one file.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return alone(path);
    }
    let files = match file::read_if_there(&path.join(INDEX), MAX_DESCRIPTION)? {
        Some(json) => indexed(path, &json)?,
        None => chosen(path, &names(path)?)?,
    };
    Ok(files.into_iter().map(|name| path.join(name)).collect())
}

fn failure(path: &Path, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, path.display().to_string()).expected(expected).got(got)
}

/// A file that is named directly; one shard of several is refused.
fn alone(path: &Path) -> Result<Vec<PathBuf>> {
    match path.file_name().and_then(|name| Part::of(name.to_str()?)).filter(|part| part.count > 1) {
        Some(part) => Err(failure(path, "a whole model", format_args!("one of its {} parts", part.count))
            .hint("Name the folder in which all of them are")),
        None => Ok(vec![path.to_path_buf()]),
    }
}

/// The files that an index names. All must exist.
fn indexed(folder: &Path, json: &[u8]) -> Result<Vec<String>> {
    let path = folder.join(INDEX);
    let expected = "an index of safetensors files beside it";
    let json = json::parse(&path.display().to_string(), json, expected)?;
    let index: Index = serde_json::from_value(json).map_err(|e| failure(&path, expected, e))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    if names.is_empty() {
        return Err(failure(&path, expected, "one that names none"));
    }
    if let Some(elsewhere) = names.iter().find(|name| !is_plain(name)) {
        return Err(failure(&path, expected, format_args!("`{elsewhere}`")));
    }
    missing(&path, names.iter().filter(|name| !folder.join(name).exists()).map(String::as_str).collect())?;
    Ok(names.into_iter().collect())
}

/// Whether a name stays within its folder.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Refuses a model whose files `names` are missing.
fn missing(path: &Path, names: Vec<&str>) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    Err(failure(path, "all parts of a model", format_args!("no {}", listed(&names)))
        .hint("Download what is missing to the same folder"))
}

/// The files of a folder, without hidden ones and leftovers of writing. They are sorted, so that errors are stable.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).map_err(|e| failure(folder, "a readable folder", e))?;
    let is_left_over = |name: &str| name.starts_with(['.', '~']) || name.ends_with('~');
    let files = entries.filter_map(|entry| entry.ok().filter(|entry| !entry.path().is_dir()));
    let names = files.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| !is_left_over(name)).collect();
    names.sort();
    Ok(names)
}

/// The files that make up the model, without an index.
fn chosen(folder: &Path, names: &[String]) -> Result<Vec<String>> {
    let all: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.ends_with(ENDING)).collect();
    if all.contains(&MODEL) {
        return Ok(vec![MODEL.to_string()]);
    }
    let models: Vec<&str> = all.iter().copied().filter(|name| other(name).is_none()).collect();
    if let Some(set) = Set::of(&models) {
        return set.whole(folder);
    }
    match (&models[..], &all[..]) {
        ([_], [model]) => Ok(vec![model.to_string()]),
        ([], []) => Err(none(folder, names)),
        ([], _) => Err(only_others(folder, &all)),
        _ => Err(failure(folder, "one safetensors file that is plainly the model", listed(&all))
            .hint(format_args!("Name the file that is the model, or give it the name {MODEL}"))),
    }
}

/// The kind of a file whose name marks it as something other than a model.
fn other(name: &str) -> Option<&'static str> {
    OTHERS.iter().find(|(start, _)| name.to_lowercase().starts_with(start)).map(|(_, what)| *what)
}

fn listed(names: &[&str]) -> String {
    const MOST: usize = 12;
    let more = names.len().saturating_sub(MOST);
    let shown: Vec<String> = names.iter().take(MOST).map(|name| format!("`{name}`")).collect();
    shown.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

/// The error for a folder without any safetensors file.
fn none(folder: &Path, names: &[String]) -> Error {
    let hint =
        |name: &str| FORMATS.iter().find(|(ending, _)| name.to_lowercase().ends_with(ending)).map(|(_, hint)| hint);
    let formats = names.iter().map(String::as_str).filter(|name| hint(name).is_some());
    let (others, models): (Vec<&str>, Vec<&str>) = formats.partition(|name| other(name).is_some());
    match (&models[..], &others[..]) {
        ([], []) => failure(folder, WANTED, "none there"),
        ([], _) => only_others(folder, &others),
        ([first, ..], _) => failure(folder, WANTED, listed(&models)).hint(hint(first).unwrap_or(&"")),
    }
}

/// The error for a folder whose safetensors files are no models.
fn only_others(folder: &Path, names: &[&str]) -> Error {
    let what = names.iter().find_map(|name| other(name)).unwrap_or_default();
    let hint = if what.starts_with("an adapter") {
        "Merge the adapter into its base model first, as `merge_and_unload` of peft does, and save that"
    } else {
        "Name the folder of the model itself"
    };
    failure(folder, WANTED, format_args!("{}: {what}", listed(names))).hint(hint)
}

/// A shard of a model, such as `model-00001-of-00002.safetensors`: the stem, and the number of shards.
#[derive(Clone, Copy, PartialEq)]
struct Part<'n> {
    stem: &'n str,
    count: usize,
}

impl<'n> Part<'n> {
    fn of(name: &'n str) -> Option<Part<'n>> {
        let (start, count) = name.strip_suffix(ENDING)?.rsplit_once("-of-")?;
        let (stem, number) = start.rsplit_once('-')?;
        let is_number = |digits: &str| digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        let part = Part { stem, count: count.parse().ok()? };
        (is_number(number) && is_number(count) && part.count > 0).then_some(part)
    }

    fn name(self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}{ENDING}", self.stem, self.count)
    }
}

/// The shards of a model that are present.
struct Set<'n> {
    part: Part<'n>,
    names: BTreeSet<&'n str>,
}

impl<'n> Set<'n> {
    /// The shards of the model: the only safetensors files, or those with the stem `model` among others.
    fn of(names: &[&'n str]) -> Option<Set<'n>> {
        let part = |name: &&'n str| Part::of(name);
        let own = |part: &Part| names.iter().all(|name| Part::of(name) == Some(*part));
        let found = names.iter().filter_map(part).find(own);
        let named = || {
            let mut named: Vec<Part> = names.iter().filter_map(part).filter(|part| part.stem == "model").collect();
            named.dedup();
            if let [part] = named[..] { Some(part) } else { None }
        };
        let part = found.or_else(named)?;
        let names = names.iter().copied().filter(|name| Part::of(name) == Some(part)).collect();
        Some(Set { part, names })
    }

    /// The files of all shards, in order; fails if one is missing.
    fn whole(&self, folder: &Path) -> Result<Vec<String>> {
        let all: Vec<String> = (1..=self.part.count).map(|number| self.part.name(number)).collect();
        missing(folder, all.iter().map(String::as_str).filter(|name| !self.names.contains(name)).collect())?;
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The files chosen in a folder with empty files of these names, and an index if there is one.
    fn model(names: &[&str], index: Option<&str>) -> Result<Vec<String>> {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("sidewinder-layout-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        names.iter().for_each(|name| std::fs::write(folder.join(name), "").unwrap());
        index.iter().for_each(|index| std::fs::write(folder.join(INDEX), index).unwrap());
        let found = files(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        found.map(|files| files.iter().map(|file| file.file_name().unwrap().to_str().unwrap().to_string()).collect())
    }

    const PARTS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

    #[test]
    fn what_is_plainly_the_model_is_taken() {
        let adapter = "adapter_model.safetensors";
        for (names, found) in [
            (&["model.safetensors"][..], &["model.safetensors"][..]),
            (&["mamba-tiny.safetensors"], &["mamba-tiny.safetensors"]),
            (&[adapter, "model.safetensors", "other.safetensors"], &["model.safetensors"]),
            (&["model.safetensors", PARTS[0]], &["model.safetensors"]),
            (&[".model.safetensors.12", "._a.safetensors", "x.safetensors~", "a.safetensors"], &["a.safetensors"]),
            (&["~$a.safetensors", "a.safetensors", "pytorch_model.bin", "optimizer.pt"], &["a.safetensors"]),
            (&PARTS, &PARTS),
            (&[adapter, "optimizer.safetensors", PARTS[1], PARTS[0]], &PARTS),
            (&["consolidated.safetensors", PARTS[1], PARTS[0]], &PARTS),
            (&["a-00001-of-00001.safetensors"], &["a-00001-of-00001.safetensors"]),
        ] {
            assert_eq!(model(names, None).unwrap(), found, "{names:?}");
        }
        let index = r#"{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}"#;
        let names = ["x.safetensors", "y.safetensors", "z.safetensors"];
        assert_eq!(model(&names, Some(index)).unwrap(), names[..2]);
        assert_eq!(model(&names, Some(&format!("\u{feff}{index}"))).unwrap(), names[..2]);
    }

    #[test]
    fn folders_that_leave_it_open_are_told_by_their_files() {
        for (names, parts) in [
            (&["a.safetensors", "b.safetensors"][..], &["`a.safetensors`, `b.safetensors`", "plainly"][..]),
            (&["adapter_model.safetensors", "mamba-tiny.safetensors"], &["adapter_model", "mamba-tiny"]),
            (&["model.fp16.safetensors", "model.bf16.safetensors"], &["model.fp16", "model.bf16"]),
            (&["optimizer.safetensors", "a.safetensors"], &["`optimizer.safetensors`", "`a.safetensors`"]),
            (&["adapter_model.safetensors"], &["an adapter to a model", "merge_and_unload"]),
            (&["adapter_model.bin", "training_args.bin"], &["an adapter to a model"]),
            (&["optimizer.safetensors"], &["the state of an optimizer"]),
            (&[PARTS[0]], &["no `model-00002-of-00002.safetensors`"]),
            (&[PARTS[0], "model-00001-of-00003.safetensors"], &["model-00001-of-00003"]),
            (&["pytorch_model.bin"], &["`pytorch_model.bin`", "save_pretrained"]),
            (&["mamba.Q8_0.gguf"], &["`mamba.Q8_0.gguf`", "Sidewinder.GGUF"]),
            (&["model.safetensors.aria2"], &["aria2", "download it again"]),
            (&["README.md"], &["none there"]),
        ] {
            let error = model(names, None).unwrap_err();
            assert!(parts.iter().all(|part| error.to_string().contains(part)), "{error}");
        }
    }

    #[test]
    fn an_index_says_what_is_missing_and_what_it_is_if_it_is_none() {
        let index = r#"{"weight_map": {"a": "x.safetensors", "b": "gone.safetensors"}}"#;
        for (index, part) in [
            (index, "no `gone.safetensors`"),
            (r#"{"weight_map": {}}"#, "names none"),
            (r#"{"metadata": {}}"#, "weight_map"),
            ("version https://git-lfs.github.com/spec/v1\nsize 1\n", "git lfs pull"),
            ("<html>", "HTML"),
            ("", "an empty file"),
        ] {
            let error = model(&["x.safetensors", "model.safetensors"], Some(index)).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
            assert!(error.argument.ends_with(INDEX), "{error}");
        }
        let part = Path::new("/nowhere").join(PARTS[0]);
        assert!(files(&part).unwrap_err().hint.contains("folder"));
        assert_eq!(files(Path::new("/nowhere/a.safetensors")).unwrap().len(), 1);
    }
}

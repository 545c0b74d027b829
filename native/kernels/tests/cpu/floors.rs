//! Layering: no file imports from a layer above its own.

use std::fs;
use std::path::{Path, PathBuf};

/// The layers, from the bottom up, by folders of `src`. Folders of one layer may import each other. Anything else, such
/// as the list of ops, is above all layers.
const FLOORS: &[&[&str]] = &[
    &["base"],
    &["cpu"],
    &["cuda/load"],
    &["cuda/runtime"],
    &["cuda/steps", "cuda"],
    &["op"],
    &["place"],
    &["ops/activations", "ops/attention", "ops/causal_conv1d", "ops/norm", "ops/positions", "ops/products", "ops/scan"],
    &["ops/layers", "ops/mm_rec"],
];

/// The layer of a file or of an imported path, with slashes.
fn floor(path: &str) -> usize {
    let inside = |room: &&str| path.strip_prefix(*room).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    FLOORS.iter().position(|rooms| rooms.iter().any(inside)).unwrap_or(FLOORS.len())
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let all = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    all.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// The code of a file without its comments.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The paths that the code imports from the crate's root, with slashes; a list in braces gives one path for each name.
/// Braces must not be nested.
fn imports(code: &str) -> Vec<String> {
    let starts = code.match_indices("crate::").filter(|(at, _)| {
        // Macros name paths for their expansion, and visibility is not an import.
        let before = &code[..*at];
        !before.ends_with('$') && !before.ends_with("pub(in ")
    });
    starts.flat_map(|(at, root)| paths(&code[at + root.len()..])).collect()
}

fn paths(text: &str) -> Vec<String> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    match rest.strip_prefix("::") {
        Some(more) => paths(more).into_iter().map(|path| format!("{name}/{path}")).collect(),
        None if name.is_empty() && text.starts_with('{') => {
            let names = &text[1..text.find('}').unwrap_or(text.len())];
            assert!(!names.contains('{'), "nested braces: {names}");
            names.split(',').flat_map(|item| paths(item.trim())).collect()
        }
        None => vec![name.to_string()],
    }
}

/// Maps modules and macros that the crate exports at its root to their actual paths.
fn shown_at_the_root(path: &str, macros: &[(String, String)]) -> String {
    let (first, rest) = path.split_once('/').unwrap_or((path, ""));
    match first {
        "chunks" | "difference" | "error" | "tensor" => format!("base/{path}"),
        name if rest.is_empty() => {
            macros.iter().find(|(known, _)| known == name).map_or(path, |(_, file)| file).to_string()
        }
        _ => path.to_string(),
    }
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The library is compiled once, without tests: compiling it takes minutes.
#[test]
fn tests_are_where_they_run() {
    let with_tests: Vec<_> = sources(&src()).into_iter().filter(|file| code(file).contains("#[test]")).collect();
    assert!(with_tests.is_empty(), "tests that never run: {with_tests:?}");
}

#[test]
fn imports_go_down() {
    let src = src();
    let files: Vec<(String, String)> = sources(&src)
        .into_iter()
        .map(|path| (path.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/"), code(&path)))
        .collect();
    let defined = |(file, code): &(String, String)| {
        let exported = code.split("#[macro_export]\nmacro_rules! ").skip(1).map(|rest| rest.split(' ').next().unwrap());
        exported.map(|name| (name.to_string(), file.clone())).collect::<Vec<_>>()
    };
    let macros: Vec<(String, String)> = files.iter().flat_map(defined).collect();
    assert!(macros.iter().any(|(name, _)| name == "options"), "{macros:?}");

    let of_file = |(file, code): &(String, String)| {
        let paths = imports(code).into_iter().map(|path| shown_at_the_root(&path, &macros));
        paths.map(|path| (file.clone(), path)).collect::<Vec<_>>()
    };
    let all: Vec<(String, String)> = files.iter().flat_map(of_file).collect();
    assert!(all.len() > 1000, "{} imports", all.len());
    let up: Vec<_> = all.iter().filter(|(file, path)| floor(path) > floor(file)).collect();
    assert!(up.is_empty(), "imports from above: {up:#?}");
}

#[test]
fn paths_are_found() {
    let code = "use crate::op::{self, Op};\nuse crate::{with_type, cpu::Exec};\nlet x = crate::tensor::DType::F32;";
    let found = ["op/self", "op/Op", "with_type", "cpu/Exec", "tensor/DType/F32"];
    assert_eq!(imports(code), found);
    assert!(floor("base/error.rs") < floor("ops/norm/mod.rs") && floor("ops/mod.rs") == FLOORS.len());
}

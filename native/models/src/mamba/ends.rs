//! The end-of-text tokens, from `generation_config.json` or `config.json`.

use serde_json::Value;
use sidewinder_files::file;
use sidewinder_files::json::{self, shown};
use sidewinder_kernels::error::{Error, Kind, Result};
use std::path::Path;

/// The files, in order of precedence.
const FILES: [&str; 2] = ["generation_config.json", "config.json"];
/// Upper limit for the bytes of a file.
const MAX_FILE: u64 = 1 << 26;
/// The key of the end-of-text tokens.
const KEY: &str = "eos_token_id";

/// The end-of-text tokens in the files of a checkpoint (a folder, or a file in one), for a model with `vocabulary`
/// tokens; `None` if the files give none.
pub fn read(path: &Path, vocabulary: usize) -> Result<Option<Vec<u32>>> {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    for path in FILES.map(|name| folder.join(name)).iter().filter(|path| path.is_file()) {
        let name = path.display().to_string();
        let bytes = file::read(path, MAX_FILE).map_err(|e| wrong(&name, "a configuration", e))?;
        if let Some(ends) = parse(&name, &bytes, vocabulary)? {
            return Ok(Some(ends));
        }
    }
    Ok(None)
}

/// The end-of-text tokens of a configuration. A missing key, `null` and an empty list give none. Other values that are
/// neither a token nor a list of tokens are refused, because with them no text would ever end.
pub fn parse(name: &str, json: &[u8], vocabulary: usize) -> Result<Option<Vec<u32>>> {
    let json = json::parse(name, json, "a configuration")?;
    let said = json.get(KEY).unwrap_or(&Value::Null);
    let all = match said {
        Value::Null => &[][..],
        Value::Array(all) => all,
        one => std::slice::from_ref(one),
    };
    let ends: Option<Vec<u32>> = all.iter().map(|value| token(value, vocabulary)).collect();
    let expected = || format!("a token below {vocabulary}, or a list of them, as `{KEY}`");
    let hint = "Mend the file, load the model with the tokens as :ends, or generate with ignore_eos: true";
    let ends = ends.ok_or_else(|| wrong(name, &expected(), shown(said)).hint(hint))?;
    Ok(Some(ends).filter(|ends| !ends.is_empty()))
}

fn token(value: &Value, vocabulary: usize) -> Option<u32> {
    let number = value.as_f64().filter(|number| number.fract() == 0.0)?;
    (number >= 0.0 && number < vocabulary as f64).then_some(number as u32)
}

fn wrong(name: &str, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, name).expected(expected).got(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(json: &str) -> Result<Option<Vec<u32>>> {
        parse("config.json", json.as_bytes(), 10)
    }

    #[test]
    fn a_number_or_a_list_are_ends() {
        for (json, ends) in [
            (r#"{"eos_token_id": 0}"#, Some(vec![0])),
            (r#"{"eos_token_id": 9.0, "a": Infinity}"#, Some(vec![9])),
            ("\u{feff}{\"eos_token_id\": [3, 0]}", Some(vec![3, 0])),
            (r#"{"eos_token_id": null}"#, None),
            (r#"{"eos_token_id": []}"#, None),
            ("{}", None),
        ] {
            assert_eq!(parsed(json), Ok(ends), "{json}");
        }
    }

    #[test]
    fn what_would_never_end_a_text_is_refused() {
        for value in ["10", "-1", "[0, 10]", "[[0]]", "\"0\"", "true", "0.5", "NaN", "{}", "[null]", "1e999"] {
            let error = parsed(&format!("{{\"eos_token_id\": {value}}}")).unwrap_err();
            assert!(error.to_string().contains("eos_token_id"), "{error}");
        }
        assert!(parsed("").is_err());
    }
}

//! JSON as model files contain it: possibly with a byte-order mark, or with `NaN` and `Infinity` as Python writes them.

use crate::recognise::{JSON, explained};
use serde_json::Value;
use sidewinder_kernels::error::{Error, Kind, Result};

/// Marks the strings by which parsed values hold non-finite numbers. No string of a file begins with it.
const ODD: char = '\0';

/// Parses a JSON file. As in Python, the last of equal keys wins. Non-finite numbers become marked strings, from which
/// [`shown`] and [`written`] restore them. `name` and `expected` are for errors.
pub fn parse(name: &str, bytes: &[u8], expected: &str) -> Result<Value> {
    let wrong = |e: String| explained(Error::new(Kind::File, name).expected(expected).got(e), bytes, JSON);
    let text = std::str::from_utf8(text(bytes)).map_err(|e| wrong(e.to_string()))?;
    serde_json::from_str(&finite(text)).map_err(|e| wrong(e.to_string()))
}

/// The bytes of a file after its byte-order mark, if it has one.
pub fn text(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes)
}

/// Serialises a value; non-finite numbers are written as Python writes them.
pub fn written(value: &Value) -> String {
    let text = serde_json::to_string_pretty(value).expect("values with texts as keys");
    let mut written = String::with_capacity(text.len());
    let mut rest = &text[..];
    while !rest.is_empty() {
        let (part, behind) = rest.split_at(part(rest));
        let odd = part.strip_prefix("\"\\u0000").and_then(|odd| odd.strip_suffix('"'));
        written.push_str(odd.filter(|odd| is_odd(odd)).unwrap_or(part));
        rest = behind;
    }
    written + "\n"
}

/// A short text of a value, for errors.
pub fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) if text.starts_with(ODD) => text[1..].to_string(),
        other => other.to_string(),
    };
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

/// A number as a value of a file; it need not be finite.
pub fn number(number: f64) -> Value {
    let odd = || match number {
        f64::INFINITY => "Infinity",
        f64::NEG_INFINITY => "-Infinity",
        _ => "NaN",
    };
    serde_json::Number::from_f64(number).map_or_else(|| format!("{ODD}{}", odd()).into(), Value::Number)
}

/// The number that a value of a file stands for, if it is one; it need not be finite.
pub fn as_number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.strip_prefix(ODD)?.parse().ok())
}

/// Replaces the non-finite numbers in JSON text by marked strings.
fn finite(mut text: &str) -> String {
    let mut finite = String::with_capacity(text.len());
    while !text.is_empty() {
        let (part, rest) = text.split_at(part(text));
        match is_odd(part) {
            true => finite.extend(["\"\\u0000", part, "\""]),
            false => finite.push_str(part),
        }
        text = rest;
    }
    finite
}

/// Length of the first token of a text: a string literal, a word or number, or everything up to the next of these.
fn part(text: &str) -> usize {
    let is_word = |c: char| c.is_ascii_alphanumeric() || "+-._".contains(c);
    let end = |found: Option<usize>| found.unwrap_or(text.len());
    match text.chars().next() {
        Some('"') => quoted(text.as_bytes()),
        Some(c) if is_word(c) => end(text.find(|c| !is_word(c))),
        _ => end(text.find(|c| c == '"' || is_word(c))),
    }
}

/// Length of a string literal including its quotes, or of all bytes if it is not terminated.
fn quoted(bytes: &[u8]) -> usize {
    let mut escaped = false;
    let ends = bytes.iter().skip(1).position(|&byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    ends.map_or(bytes.len(), |at| at + 2)
}

/// Whether a token is a non-finite number, or one outside the range of f64.
fn is_odd(word: &str) -> bool {
    let digits = word.ends_with(|c: char| c.is_ascii_digit());
    ["NaN", "Infinity", "-Infinity"].contains(&word)
        || digits && word.parse().is_ok_and(|number: f64| number.is_infinite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Value {
        parse("a.json", text.as_bytes(), "JSON").unwrap()
    }

    #[test]
    fn what_python_writes_is_read() {
        let value = read("\u{feff}{\"a\": [0.0, Infinity, -Infinity,NaN], \"b\": \"Infinity \\\" NaN\", \"c\": 1e999}");
        let odd = value["a"].as_array().unwrap().iter().map(shown).collect::<Vec<_>>();
        assert_eq!(odd, ["0.0", "Infinity", "-Infinity", "NaN"]);
        assert_eq!(value["b"], "Infinity \" NaN");
        assert_eq!(shown(&value["c"]), "1e999");
        assert_eq!(read(r#"{"a": 1, "a": 2}"#)["a"], 2);
        assert_eq!(read(r#"{"é\\": "\\\\"}"#)["é\\"], "\\\\");
        assert_eq!(shown(&read(&format!("{:?}", "ü".repeat(100)))).chars().count(), 83);
    }

    #[test]
    fn what_was_read_is_written() {
        let text = r#"{"a": [0.0, Infinity, -Infinity, NaN, 1e999], "b": "\u0000a \"é\\ Infinity", "c": {"d": null}}"#;
        let value = read(text);
        let again = written(&value);
        assert!(again.contains("-Infinity,") && again.contains("1e999") && again.ends_with("}\n"), "{again}");
        assert_eq!(read(&again), value);
    }

    #[test]
    fn numbers_need_not_be_finite() {
        for (value, text) in
            [(0.5, "0.5"), (f64::INFINITY, "Infinity"), (f64::NEG_INFINITY, "-Infinity"), (f64::NAN, "NaN")]
        {
            let number = number(value);
            assert_eq!(written(&number), format!("{text}\n"));
            assert_eq!(as_number(&read(text)).map(f64::to_bits), as_number(&number).map(f64::to_bits));
        }
        assert_eq!(as_number(&read("1e999")), Some(f64::INFINITY));
        assert_eq!(as_number(&read("\"Infinity\"")), None);
    }

    #[test]
    fn what_is_no_json_is_said() {
        for (bytes, part) in [
            (&b"{\"a\": infinity}"[..], "expected"),
            (b"{\"a\": +Infinity}", "expected"),
            (b"{\"a", "EOF"),
            (b"\"\\", "EOF"),
            (b"", "an empty file"),
            (b"{\"a\": \"\xff\"}", "utf-8"),
            (b"\xff\xfe{\0", "UTF-16"),
            (b"version https://git-lfs.github.com/spec/v1\nsize 3\n", "git lfs pull"),
            (b"<!doctype html>", "HTML"),
        ] {
            let error = parse("a.json", bytes, "a configuration").unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(parse("a.json", deep.as_bytes(), "JSON").is_err());
    }
}

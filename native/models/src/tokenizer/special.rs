//! The tokens that begin and end texts, from `tokenizer.json` and other files in its folder.

use serde_json::Value;
use sidewinder_files::file;
use sidewinder_files::json::{self, shown};
use sidewinder_kernels::error::{Error, Kind, Result};
use std::path::Path;
use tokenizers::{Encoding, PostProcessor, PostProcessorWrapper, Token};

/// The files, in order of precedence.
const FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];
/// Upper limit for the bytes of a file.
const MAX_FILE: u64 = 1 << 26;

/// The tokens that begin and end texts if the files name none; the first one in the vocabulary is used.
pub const BEGINS: [&str; 4] = ["<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"];
pub const ENDS: [&str; 5] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>"];

/// The content of the other files in the folder of a `tokenizer.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Special {
    /// The text of the token that begins texts.
    pub bos: Option<String>,
    /// The text of the token that ends texts.
    pub eos: Option<String>,
    /// Whether texts begin with the `bos` token.
    pub add_bos: Option<bool>,
}

impl Special {
    /// Reads those of the files that exist in a folder.
    pub fn read(folder: &Path) -> Result<Special> {
        let mut special = Special::default();
        for path in FILES.map(|name| folder.join(name)).iter().filter(|path| path.is_file()) {
            special.add(path)?;
        }
        Ok(special)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let name = path.display().to_string();
        let expected = "an object in JSON";
        let bytes = file::read(path, MAX_FILE).map_err(|e| wrong(&name, expected, e))?;
        let json = json::parse(&name, &bytes, expected)?;
        let said = |key: &str| json.get(key).filter(|value| !value.is_null());
        let text = |key: &str| said(key).map(|value| text(value).ok_or_else(|| no_text(&name, key, value))).transpose();
        self.bos = self.bos.take().or(text("bos_token")?);
        self.eos = self.eos.take().or(text("eos_token")?);
        let flag =
            |value: &Value| value.as_bool().ok_or_else(|| wrong(&name, "a boolean `add_bos_token`", shown(value)));
        self.add_bos = self.add_bos.or(said("add_bos_token").map(flag).transpose()?);
        Ok(())
    }
}

/// The text of a token, given directly or in an object.
fn text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_string)
}

fn no_text(name: &str, key: &str, value: &Value) -> Error {
    wrong(name, &format!("a text, or an object with `content`, as `{key}`"), shown(value))
}

fn wrong(name: &str, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, name).expected(expected).got(got)
}

/// The tokens that a post-processor puts before each text.
pub fn prefix(processor: Option<&PostProcessorWrapper>) -> Vec<u32> {
    let text = Encoding::from_tokens(vec![Token::new(0, "a".into(), (0, 1))], 0);
    let processed = processor.and_then(|processor| processor.process(text, None, true).ok()).unwrap_or_default();
    let added = processed.get_ids().iter().zip(processed.get_special_tokens_mask());
    added.take_while(|(_, special)| **special == 1).map(|(id, _)| *id).collect()
}

//! Converts text to tokens and back: by the `tokenizer.json` of a checkpoint, through the `tokenizers` crate, or byte
//! by byte.

use rules::Rules;
use sidewinder_files::file;
use sidewinder_files::json::text;
use sidewinder_files::recognise::{JSON, explained};
use sidewinder_kernels::error::{Error, Kind, Result};
use special::Special;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

mod rules;
mod special;
mod stream;

pub use stream::Window;

/// Upper limit for the bytes of a `tokenizer.json`.
const MAX_FILE: u64 = 1 << 30;

/// A tokenizer.
pub enum Tokenizer {
    /// Each byte is a token.
    Bytes,
    /// The tokenizer of a `tokenizer.json`.
    File(Box<File>),
}

/// A `tokenizer.json`.
pub struct File {
    tokenizer: tokenizers::Tokenizer,
    rules: Rules,
    /// The tokens that the post-processor puts before each text.
    prefix: Vec<u32>,
    /// The special tokens in the other files of its folder. An error in them is returned only to callers that need
    /// their content.
    special: Result<Special>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`, given by its path or its folder.
    pub fn open(path: &Path) -> Result<Tokenizer> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let wrong =
            |got: String| Error::new(Kind::File, path.display().to_string()).expected("a tokenizer.json").got(got);
        let json = file::read(&path, MAX_FILE).map_err(|e| wrong(e.to_string()))?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(text(&json));
        let mut tokenizer = tokenizer.map_err(|e| explained(wrong(e.to_string()), &json, JSON))?;
        // Padding and truncation are for training batches; a prompt is taken as it is.
        tokenizer.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let rules = Rules::of(tokenizer.get_decoder());
        let prefix = special::prefix(tokenizer.get_post_processor());
        let special = Special::read(path.parent().unwrap_or(Path::new("")));
        Ok(Tokenizer::File(Box::new(File { tokenizer, rules, prefix, special })))
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::File(file) => file.tokenizer.get_vocab_size(true),
        }
    }

    /// The tokens of a text. Invalid UTF-8 can only be encoded byte by byte.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.iter().map(|&byte| byte.into()).collect()),
            Tokenizer::File(file) => {
                let wrong = |got: String| Error::new(Kind::Argument, "text").expected("text in UTF-8").got(got);
                let text = std::str::from_utf8(text).map_err(|e| wrong(e.to_string()))?;
                let encoding = file.tokenizer.encode_fast(text, false).map_err(|e| wrong(e.to_string()))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens; special tokens give none. The text may begin or end within a character. A byte tokenizer
    /// then returns the partial bytes, others U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>> {
        match self {
            Tokenizer::Bytes => tokens.iter().map(|&token| byte(token)).collect(),
            Tokenizer::File(_) => self.text(tokens).map(String::into_bytes),
        }
    }

    /// The text of tokens, with U+FFFD for invalid characters.
    fn text(&self, tokens: &[u32]) -> Result<String> {
        match self {
            Tokenizer::Bytes => Ok(String::from_utf8_lossy(&self.decode(tokens)?).into_owned()),
            Tokenizer::File(file) => file.text(tokens),
        }
    }

    /// The name of a token that has text; `None` for special tokens.
    fn name(&self, token: u32) -> Result<Option<String>> {
        match self {
            Tokenizer::Bytes => byte(token).map(|_| Some(String::new())),
            Tokenizer::File(file) => Ok(file.name(token)),
        }
    }

    fn rules(&self) -> Rules {
        match self {
            Tokenizer::Bytes => Rules::BYTES,
            Tokenizer::File(file) => file.rules,
        }
    }

    /// The id of a token by its text.
    pub fn token(&self, text: &[u8]) -> Option<u32> {
        match self {
            Tokenizer::Bytes => text.first().filter(|_| text.len() == 1).map(|&byte| byte.into()),
            Tokenizer::File(file) => file.tokenizer.token_to_id(std::str::from_utf8(text).ok()?),
        }
    }

    /// The id of a special token, which decodes to no text.
    pub fn special(&self, text: &[u8]) -> Option<u32> {
        self.token(text).filter(|&token| matches!(self.name(token), Ok(None)))
    }

    /// The end-of-text token, if there is one.
    pub fn end(&self) -> Result<Option<u32>> {
        match self {
            Tokenizer::Bytes => Ok(None),
            Tokenizer::File(file) => match &file.special()?.eos {
                Some(text) => file.known("eos_token", text).map(Some),
                None => Ok(special::ENDS.iter().find_map(|text| self.token(text.as_bytes()))),
            },
        }
    }

    /// The beginning-of-text tokens, if `wanted`; `None` follows the files.
    pub fn beginning(&self, wanted: Option<bool>) -> Result<Vec<u32>> {
        match (self, wanted) {
            (_, Some(false)) | (Tokenizer::Bytes, None) => Ok(Vec::new()),
            (Tokenizer::Bytes, _) => Err(no_beginning()),
            (Tokenizer::File(file), _) => file.beginning(wanted),
        }
    }
}

impl File {
    fn name(&self, token: u32) -> Option<String> {
        let special = |name: &String| self.tokenizer.get_added_vocabulary().is_special_token(name);
        self.tokenizer.id_to_token(token).filter(|name| !special(name))
    }

    /// The text of tokens. Some decoders panic on tokens without text, so these are not passed to them; others' panics
    /// become errors.
    fn text(&self, tokens: &[u32]) -> Result<String> {
        if tokens.iter().all(|&token| self.name(token).is_none()) {
            return Ok(String::new());
        }
        let decoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.decode(tokens, true)));
        let wrong = |got: String| Error::new(Kind::Argument, "tokens").expected("tokens that have a text").got(got);
        let decoded = decoded.map_err(|_| wrong("tokens for which the tokenizer's decoder fails".into()))?;
        decoded.map_err(|e| wrong(e.to_string()))
    }

    fn special(&self) -> Result<&Special> {
        self.special.as_ref().map_err(Error::clone)
    }

    fn known(&self, key: &str, text: &str) -> Result<u32> {
        self.tokenizer.token_to_id(text).ok_or_else(|| {
            let expected = format!("an `{key}` that is a token of the tokenizer");
            Error::new(Kind::File, "tokenizer_config.json").expected(expected).got(format!("{text:?}"))
        })
    }

    fn beginning(&self, wanted: Option<bool>) -> Result<Vec<u32>> {
        // A prefix in `tokenizer.json` needs no other files, so errors in them are ignored.
        if wanted.is_some() && !self.prefix.is_empty() {
            return Ok(self.prefix.clone());
        }
        let special = self.special()?;
        match wanted.or(special.add_bos) {
            Some(false) => Ok(Vec::new()),
            Some(true) if self.prefix.is_empty() => Ok(vec![self.first(special)?]),
            _ => Ok(self.prefix.clone()),
        }
    }

    fn first(&self, special: &Special) -> Result<u32> {
        let usual =
            || special::BEGINS.iter().find_map(|text| self.tokenizer.token_to_id(text)).ok_or_else(no_beginning);
        special.bos.as_ref().map_or_else(usual, |text| self.known("bos_token", text))
    }
}

fn byte(token: u32) -> Result<u8> {
    u8::try_from(token)
        .map_err(|_| Error::new(Kind::Argument, "tokens").expected("tokens below 256").got(token.to_string()))
}

fn no_beginning() -> Error {
    Error::new(Kind::Option, "add_bos")
        .expected("a tokenizer with a token that begins texts")
        .got("none of the usual ones, nor `bos_token` in a tokenizer_config.json beside tokenizer.json")
        .hint("Leave it out, or put that token before a list of tokens")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte-level BPE in the manner of GPT-NeoX's, with two merges and a special token.
    fn small() -> String {
        let mut vocabulary = serde_json::Map::new();
        let texts = ["<|endoftext|>", "h", "e", "l", "o", "\u{120}", "w", "r", "d", "\u{c3}", "\u{a9}", "he", "ll"];
        texts.iter().enumerate().for_each(|(id, text)| drop(vocabulary.insert(text.to_string(), id.into())));
        serde_json::json!({
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "vocab": vocabulary, "merges": ["h e", "l l"]},
        })
        .to_string()
    }

    #[test]
    fn files_are_read_and_used() {
        let folder = std::env::temp_dir().join(format!("sidewinder-tokenizer-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("tokenizer.json"), small()).unwrap();
        let tokenizer = Tokenizer::open(&folder).unwrap();
        assert_eq!(tokenizer.vocabulary(), 13);
        let tokens = tokenizer.encode("hello world<|endoftext|>\u{e9}".as_bytes()).unwrap();
        assert_eq!(tokens, [11, 12, 4, 5, 6, 4, 7, 3, 8, 0, 9, 10]);
        assert_eq!(tokenizer.decode(&tokens).unwrap(), "hello world\u{e9}".as_bytes());
        assert_eq!(tokenizer.decode(&[9]).unwrap(), "\u{fffd}".as_bytes());
        assert_eq!(tokenizer.token(b"<|endoftext|>"), Some(0));
        assert_eq!(tokenizer.encode(b"\xff").unwrap_err().kind, Kind::Argument);
        for wrong in ["", "{}", "[1]", "not JSON"] {
            std::fs::write(folder.join("tokenizer.json"), wrong).unwrap();
            assert_eq!(Tokenizer::open(&folder).err().expect(wrong).kind, Kind::File);
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(Tokenizer::open(&folder).err().unwrap().kind, Kind::File);
    }

    #[test]
    fn bytes_are_themselves() {
        let bytes = Tokenizer::Bytes;
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes.decode(&bytes.encode(&all).unwrap()).unwrap(), all);
        assert_eq!(bytes.decode(&[256]).unwrap_err().kind, Kind::Argument);
        assert_eq!((bytes.vocabulary(), bytes.token(b"\xc8"), bytes.token(b"ab")), (256, Some(200), None));
    }
}

//! From text to tokens and back: by the `tokenizer.json` of a checkpoint, through the `tokenizers` crate, or byte by
//! byte.

use crate::error::{Error, Kind, Result};
use crate::file;
use crate::json::text;
use crate::recognise::{JSON, explained};
use std::path::Path;

/// A `tokenizer.json` may take this many bytes.
const MAX_FILE: u64 = 1 << 30;

/// A tokenizer.
pub enum Tokenizer {
    /// A token is a byte.
    Bytes,
    /// That of a `tokenizer.json`.
    File(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Reads a `tokenizer.json`, or that of a folder.
    pub fn open(path: &Path) -> Result<Tokenizer> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let wrong =
            |got: String| Error::new(Kind::File, path.display().to_string()).expected("a tokenizer.json").got(got);
        let json = file::read(&path, MAX_FILE).map_err(|e| wrong(e.to_string()))?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(text(&json));
        let tokenizer = tokenizer.map_err(|e| explained(wrong(e.to_string()), &json, JSON))?;
        Ok(Tokenizer::File(Box::new(tokenizer)))
    }

    /// How many tokens there are.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::File(tokenizer) => tokenizer.get_vocab_size(true),
        }
    }

    /// The tokens of a text. What is no UTF-8 can only be taken byte by byte.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.iter().map(|&byte| byte.into()).collect()),
            Tokenizer::File(tokenizer) => {
                let wrong = |got: String| Error::new(Kind::Argument, "text").expected("text in UTF-8").got(got);
                let text = std::str::from_utf8(text).map_err(|e| wrong(e.to_string()))?;
                let encoding = tokenizer.encode_fast(text, false).map_err(|e| wrong(e.to_string()))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens, of which special ones give none. It may begin or end within a character: from bytes it
    /// then comes so, else with U+FFFD there.
    pub fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>> {
        let wrong = |got: String| {
            let expected = format_args!("tokens below {}", self.vocabulary()).to_string();
            Error::new(Kind::Argument, "tokens").expected(expected).got(got)
        };
        match self {
            Tokenizer::Bytes => {
                tokens.iter().map(|&token| u8::try_from(token).map_err(|_| wrong(token.to_string()))).collect()
            }
            Tokenizer::File(tokenizer) => {
                let text = tokenizer.decode(tokens, true).map_err(|e| wrong(e.to_string()))?;
                Ok(text.into_bytes())
            }
        }
    }

    /// The number of a token, such as one that ends texts.
    pub fn token(&self, text: &[u8]) -> Option<u32> {
        match self {
            Tokenizer::Bytes => text.first().filter(|_| text.len() == 1).map(|&byte| byte.into()),
            Tokenizer::File(tokenizer) => tokenizer.token_to_id(std::str::from_utf8(text).ok()?),
        }
    }
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

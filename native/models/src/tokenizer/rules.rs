//! Which part of a text may still change when more tokens follow, derived from the decoder of a `tokenizer.json`.

use tokenizers::decoders::DecoderWrapper as Decoder;
use tokenizers::normalizers::replace::Replace;

/// The replacement for bytes that are invalid or incomplete UTF-8.
pub const UNKNOWN: char = '\u{fffd}';

/// Assumed upper limit for the characters that a regular expression spans.
const PATTERN: usize = 64;
/// The characters that WordPiece's cleanup patterns can span together.
const TIDIED: usize = 25;

/// The parts at the end of a text that may change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rules {
    /// Tokens such as `<0x41>` stand for bytes. A run of them is either valid text as a whole, or one [`UNKNOWN`] per
    /// byte.
    pub bytes: bool,
    /// A final [`UNKNOWN`] may be the beginning of a character.
    pub unfinished: bool,
    /// Number of final characters that may be part of a pattern that is replaced in the whole text.
    pub margin: usize,
}

impl Rules {
    /// The rules of a tokenizer whose tokens are bytes.
    pub const BYTES: Rules = Rules { bytes: false, unfinished: true, margin: 0 };

    /// The rules of a decoder.
    pub fn of(decoder: Option<&Decoder>) -> Rules {
        let mut rules = Rules::default();
        let mut fused = false;
        decoder.into_iter().for_each(|decoder| rules.add(decoder, &mut fused));
        rules
    }

    /// Adds the rules of a decoder. It receives single tokens or, once they are `fused`, one text.
    fn add(&mut self, decoder: &Decoder, fused: &mut bool) {
        match decoder {
            Decoder::Sequence(all) => all.get_decoders().iter().for_each(|one| self.add(one, fused)),
            Decoder::Fuse(_) => *fused = true,
            Decoder::ByteLevel(_) => (self.unfinished, *fused) = (true, true),
            Decoder::ByteFallback(_) => self.bytes |= !*fused,
            other if *fused => self.margin += span(other),
            _ => {}
        }
    }

    /// Bytes at the start of a text that no further token can change.
    pub fn settled(&self, text: &str) -> usize {
        let text = text.strip_suffix(UNKNOWN).filter(|_| self.unfinished).unwrap_or(text);
        match self.margin {
            0 => text.len(),
            margin => text.char_indices().rev().nth(margin - 1).map_or(0, |(at, _)| at),
        }
    }
}

/// Characters that a decoder examines together, less one: the margin that it adds.
fn span(decoder: &Decoder) -> usize {
    let others = |text: &str| text.chars().count().saturating_sub(1);
    match decoder {
        Decoder::Replace(replace) => replaced(replace),
        Decoder::BPE(bpe) => others(&bpe.suffix),
        Decoder::WordPiece(pieces) if pieces.cleanup => TIDIED,
        Decoder::CTC(ctc) => others(&ctc.pad_token) + others(&ctc.word_delimiter_token) + TIDIED,
        _ => 0,
    }
}

fn replaced(replace: &Replace) -> usize {
    let json = serde_json::to_value(replace).unwrap_or_default();
    match json["pattern"]["String"].as_str().map(|pattern| pattern.chars().count()) {
        None => PATTERN,
        Some(0 | 1) => 0,
        Some(pattern) => pattern.max(replace.content.chars().count()),
    }
}

//! What of a text may still change when more tokens follow, by the decoder of a `tokenizer.json`.

use tokenizers::decoders::DecoderWrapper as Decoder;
use tokenizers::normalizers::replace::Replace;

/// What stands for bytes that are no character, or not yet one.
pub const UNKNOWN: char = '\u{fffd}';

/// How many characters a pattern that is a regular expression is taken to span at most.
const PATTERN: usize = 64;
/// So many characters can the patterns span together by which WordPiece tidies a text.
const TIDIED: usize = 25;

/// What may change at the end of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rules {
    /// Tokens such as `<0x41>` stand for bytes. A run of them is either text as a whole, or a [`UNKNOWN`] for each.
    pub bytes: bool,
    /// A last [`UNKNOWN`] may be the beginning of a character.
    pub unfinished: bool,
    /// How many of the last characters may be part of what a pattern replaces in the whole text.
    pub margin: usize,
}

impl Rules {
    /// Those of a tokenizer whose tokens are bytes.
    pub const BYTES: Rules = Rules { bytes: false, unfinished: true, margin: 0 };

    /// Those of a decoder.
    pub fn of(decoder: Option<&Decoder>) -> Rules {
        let mut rules = Rules::default();
        let mut fused = false;
        decoder.into_iter().for_each(|decoder| rules.add(decoder, &mut fused));
        rules
    }

    /// Adds those of a decoder, which gets tokens one by one, or `fused` to one text.
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

    /// How many bytes of a text stay as they are, whatever follows.
    pub fn settled(&self, text: &str) -> usize {
        let text = text.strip_suffix(UNKNOWN).filter(|_| self.unfinished).unwrap_or(text);
        match self.margin {
            0 => text.len(),
            margin => text.char_indices().rev().nth(margin - 1).map_or(0, |(at, _)| at),
        }
    }
}

/// How many characters a decoder looks at together, but for one.
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

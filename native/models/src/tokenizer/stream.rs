//! Incremental decoding of tokens that arrive one by one: the concatenated pieces equal the text of all tokens, without
//! the text of the prompt.
//!
//! The text of a token depends on the tokens before it: the first token of a text loses its space, and one character
//! can span the bytes of several tokens. So a [`Window`] of the last tokens is decoded with each new one. What is new
//! in its text is emitted, except for the part that later tokens may change ([`Rules`](super::rules::Rules)). Older
//! tokens are dropped as soon as the window has text without them, so that a new token is never decoded as the first of
//! a text.

use super::Tokenizer;
use sidewinder_kernels::error::Result;

/// A run of byte tokens is held back until it ends, because only then it is known whether it is valid UTF-8. A run of
/// this many tokens is emitted in parts.
const RUN: usize = 256;
/// Lower limit for the tokens in a window, if the decoder replaces patterns in the whole text.
const CONTEXT: usize = 128;
/// Upper limit for the bytes of a character in UTF-8.
const CHARACTER: usize = 4;

/// The last tokens of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// The tokens, except special ones, which have no text.
    pub tokens: Vec<u32>,
    /// Number of tokens that the next window can drop.
    pub old: usize,
    /// The part of their text that has been emitted.
    pub said: String,
}

impl Tokenizer {
    /// The window after the tokens of a prompt, whose text is not emitted.
    pub fn start(&self, tokens: &[u32]) -> Result<Window> {
        let mut window = Window::default();
        for &token in tokens {
            window.tokens.extend(self.name(token)?.map(|_| token));
        }
        window.old = window.tokens.len();
        window.said = self.text(&window.tokens).unwrap_or_default();
        Ok(window)
    }

    /// The text that a token completes.
    pub fn next(&self, window: &mut Window, token: u32) -> Result<String> {
        if self.name(token)?.is_none() {
            return Ok(String::new());
        }
        window.tokens.push(token);
        let run = self.run(&window.tokens);
        let piece = match std::str::from_utf8(&run) {
            _ if run.is_empty() => self.whole(window),
            Err(e) if e.error_len().is_some() => self.broken(window, run.len() - e.valid_up_to()),
            _ if run.len() < RUN => None,
            Ok(_) => self.long(window, 0),
            Err(e) => self.long(window, run.len() - e.valid_up_to()),
        };
        Ok(piece.unwrap_or_default())
    }

    /// The text that is still held back when the stream ends.
    pub fn rest(&self, window: &Window) -> Result<String> {
        let text = self.text(&window.tokens)?;
        Ok(text[common(&window.said, &text)..].to_string())
    }

    /// The text emitted with a token that is not a byte.
    fn whole(&self, window: &mut Window) -> Option<String> {
        let (piece, tail) = self.advance(window)?;
        let least = if self.rules().margin > 0 { CONTEXT } else { 1 };
        if window.tokens.len() - window.old >= least {
            self.shorten(window, window.tokens[window.old..].to_vec(), &tail);
        }
        Some(piece)
    }

    /// The text emitted with a byte that makes the run invalid UTF-8. The last `broken` tokens begin with the invalid
    /// bytes; a few of them suffice as context.
    fn broken(&self, window: &mut Window, broken: usize) -> Option<String> {
        let (piece, tail) = self.advance(window)?;
        let (end, margin) = (window.tokens.len(), self.rules().margin);
        if broken > CHARACTER + margin {
            let bytes = &window.tokens[end - broken..][..CHARACTER];
            self.shorten(window, [bytes, &window.tokens[end - margin..]].concat(), &tail);
        }
        window.old = window.tokens.len();
        Some(piece)
    }

    /// The text emitted from a run that is too long to await its end, without the last `unfinished` bytes of a
    /// character.
    fn long(&self, window: &mut Window, unfinished: usize) -> Option<String> {
        let held = window.tokens.split_off(window.tokens.len() - unfinished);
        let out = self.advance(window);
        if let Some((_, tail)) = &out {
            let run = self.run(&window.tokens);
            let from = run.len().saturating_sub(2 * CHARACTER + self.rules().margin);
            let inside = run[from..].iter().take_while(|&byte| byte & 0xc0 == 0x80).count();
            self.shorten(window, window.tokens[window.tokens.len() - run.len() + from + inside..].to_vec(), tail);
        }
        window.tokens.extend(held);
        out.map(|(piece, _)| piece)
    }

    /// The new settled text of a window, and its unsettled tail. `None` if the beginning of the window has no text yet.
    fn advance(&self, window: &mut Window) -> Option<(String, String)> {
        let text = self.text(&window.tokens).ok()?;
        let (from, end) = (common(&window.said, &text), self.rules().settled(&text));
        (from < end).then(|| {
            window.said = text[..end].to_string();
            (text[from..end].to_string(), text[end..].to_string())
        })
    }

    /// Shortens a window to `tokens`, if they have settled text followed by the same tail as the whole window.
    fn shorten(&self, window: &mut Window, tokens: Vec<u32>, tail: &str) {
        let text = self.text(&tokens).unwrap_or_default();
        let settled = self.rules().settled(&text);
        if settled > 0 && text[settled..] == *tail {
            *window = Window { old: tokens.len(), tokens, said: text[..settled].to_string() };
        }
    }

    /// The bytes of the final run of byte tokens.
    fn run(&self, tokens: &[u32]) -> Vec<u8> {
        let bytes = tokens.iter().rev().filter(|_| self.rules().bytes).map_while(|&token| self.byte(token));
        let mut bytes: Vec<u8> = bytes.collect();
        bytes.reverse();
        bytes
    }

    fn byte(&self, token: u32) -> Option<u8> {
        let name = self.name(token).ok()??;
        let digits = name.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
        u8::from_str_radix(digits, 16).ok()
    }
}

/// The length of the common prefix of two texts, in bytes of whole characters.
fn common(a: &str, b: &str) -> usize {
    let alike = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    (0..=alike).rev().find(|&at| b.is_char_boundary(at)).unwrap_or(0)
}

//! The text of tokens that come one by one: all pieces together are the text of all tokens, without that of the tokens
//! before them.
//!
//! What a token adds depends on those before it: the first of a text loses its space, and bytes of several tokens are
//! one character. So a [`Window`] of the last tokens is decoded with each new one, and what is new in its text comes
//! out, but for what later tokens may change ([`Rules`](super::rules::Rules)). Older tokens are dropped as soon as the
//! window has text without them: its tokens then are no longer decoded as the first of a text.

use super::Tokenizer;
use crate::error::Result;

/// A run of byte tokens comes out when it has ended and is known to be text or not; one that is longer comes in parts.
const RUN: usize = 256;
/// A window has this many tokens where patterns are replaced in the whole text.
const CONTEXT: usize = 128;
/// A character has this many bytes at most.
const CHARACTER: usize = 4;

/// The last tokens of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// The tokens, without those that never have text.
    pub tokens: Vec<u32>,
    /// How many of them the next window does without.
    pub old: usize,
    /// The part of their text that has come out.
    pub said: String,
}

impl Tokenizer {
    /// The window of a text's first tokens, whose text does not come out.
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

    /// The text that was held back, when no token follows.
    pub fn rest(&self, window: &Window) -> Result<String> {
        let text = self.text(&window.tokens)?;
        Ok(text[common(&window.said, &text)..].to_string())
    }

    /// What comes out with a token that is no byte.
    fn whole(&self, window: &mut Window) -> Option<String> {
        let (piece, tail) = self.advance(window)?;
        let least = if self.rules().margin > 0 { CONTEXT } else { 1 };
        if window.tokens.len() - window.old >= least {
            self.shorten(window, window.tokens[window.old..].to_vec(), &tail);
        }
        Some(piece)
    }

    /// What comes out with a byte that is part of no text, nor are all bytes after it. The last tokens, `broken` in
    /// number, begin with bytes that are no character: these few are enough for what follows.
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

    /// What comes out of a run that is too long to wait for its end, without the last bytes of a character.
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

    /// What is new and settled in a window's text, and what is not settled. Nothing, if its beginning has no text yet.
    fn advance(&self, window: &mut Window) -> Option<(String, String)> {
        let text = self.text(&window.tokens).ok()?;
        let (from, end) = (common(&window.said, &text), self.rules().settled(&text));
        (from < end).then(|| {
            window.said = text[..end].to_string();
            (text[from..end].to_string(), text[end..].to_string())
        })
    }

    /// Leaves a window with its last tokens, if they have settled text and then the tail that the whole has.
    fn shorten(&self, window: &mut Window, tokens: Vec<u32>, tail: &str) {
        let text = self.text(&tokens).unwrap_or_default();
        let settled = self.rules().settled(&text);
        if settled > 0 && text[settled..] == *tail {
            *window = Window { old: tokens.len(), tokens, said: text[..settled].to_string() };
        }
    }

    /// The bytes for which the last tokens stand, as far as they do.
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

/// How many bytes of whole characters two texts begin with in common.
fn common(a: &str, b: &str) -> usize {
    let alike = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    (0..=alike).rev().find(|&at| b.is_char_boundary(at)).unwrap_or(0)
}

//! The set of tokens in a text, for penalties on repetition.

/// A set of tokens with one bit per token of the vocabulary, so its size does not grow with the text.
#[derive(Clone)]
pub struct Seen {
    bits: Vec<u8>,
    /// The last token inserted, if it was not in the set before.
    newest: Option<u32>,
}

impl Seen {
    /// The empty set.
    pub fn new(vocabulary: usize) -> Seen {
        Seen { bits: vec![0; vocabulary.div_ceil(8)], newest: None }
    }

    /// A set of tokens of the vocabulary.
    pub fn of(vocabulary: usize, tokens: &[u32]) -> Seen {
        let mut seen = Seen::new(vocabulary);
        tokens.iter().for_each(|&token| seen.insert(token));
        seen
    }

    /// The set with these bits; token 0 is the lowest bit of the first byte.
    pub(super) fn from_bits(bits: &[u8]) -> Seen {
        Seen { bits: bits.to_vec(), newest: None }
    }

    pub(super) fn bits(&self) -> &[u8] {
        &self.bits
    }

    pub(super) fn clear(&mut self) {
        self.bits.fill(0);
        self.newest = None;
    }

    /// Adds a token of the vocabulary.
    pub(super) fn insert(&mut self, token: u32) {
        let (byte, bit) = (&mut self.bits[token as usize / 8], 1 << (token % 8));
        self.newest = (*byte & bit == 0).then_some(token);
        *byte |= bit;
    }

    /// Undoes the last insertion.
    pub(super) fn retract(&mut self) {
        if let Some(token) = self.newest.take() {
            self.bits[token as usize / 8] &= !(1 << (token % 8));
        }
    }

    /// The tokens in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = usize> + '_ {
        let bytes = self.bits.iter().enumerate().filter(|(_, byte)| **byte != 0);
        bytes.flat_map(|(i, byte)| (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| 8 * i + bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_there_once_and_the_last_insertion_can_be_taken_back() {
        let mut seen = Seen::of(20, &[19, 3, 8, 3]);
        assert_eq!(seen.tokens().collect::<Vec<_>>(), [3, 8, 19]);
        // Changes nothing, because the last token inserted was in the set before.
        seen.retract();
        assert_eq!(seen.tokens().collect::<Vec<_>>(), [3, 8, 19]);
        seen.insert(7);
        seen.retract();
        seen.retract();
        assert_eq!(Seen::from_bits(seen.bits()).tokens().collect::<Vec<_>>(), [3, 8, 19]);
        seen.clear();
        assert_eq!(seen.tokens().count(), 0);
    }
}

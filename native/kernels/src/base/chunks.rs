//! Long work in chunks: after each of them its caller hears of it, and may end it.

use crate::error::Result;
use std::ops::Range;

/// How work is cut, and what hears of the chunks that are done.
#[derive(Clone, Copy)]
pub struct Chunks<'d> {
    /// Numbers, or bytes, of a chunk.
    pub size: usize,
    /// Gets how many of them are done after each chunk. An error ends the work, which returns it.
    pub done: &'d dyn Fn(usize) -> Result<()>,
}

impl<'d> Chunks<'d> {
    /// All work in one chunk, of which nothing hears.
    pub const WHOLE: Chunks<'static> = Chunks { size: usize::MAX, done: &|_| Ok(()) };

    /// Chunks that take milliseconds, so that waking threads for each costs little.
    pub fn heard(done: &'d dyn Fn(usize) -> Result<()>) -> Chunks<'d> {
        Chunks { size: 1 << 24, done }
    }

    /// Calls `work` for ranges of `count` rows of `len` numbers, one after another.
    pub fn each(&self, count: usize, len: usize, mut work: impl FnMut(Range<usize>) -> Result<()>) -> Result<()> {
        let rows = (self.size / len.max(1)).max(1);
        for start in (0..count).step_by(rows) {
            let range = start..count.min(start.saturating_add(rows));
            let numbers = range.len() * len;
            work(range)?;
            (self.done)(numbers)?;
        }
        Ok(())
    }
}

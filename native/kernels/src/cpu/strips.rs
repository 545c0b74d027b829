//! Work that is independent from channel to channel, shared among threads: each gets some
//! neighbouring channels of some rows, where a row is a batch or a stretch of time in it.

use super::{Exec, Vector, pool};
use crate::error::Result;
use std::ops::Range;

/// Below this many elements waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// Strips start at multiples of this, so that threads share few cache lines.
const ALIGN: usize = 32;

/// Rows of channels, cut into strips.
#[derive(Clone, Copy, Debug)]
pub struct Strips {
    rows: usize,
    channels: usize,
    width: usize,
    threads: usize,
}

impl Strips {
    /// Cuts `rows` of `channels` into strips of at most `widest` channels, one for each thread where
    /// there are fewer rows: narrower ones read memory out of order, which costs more than a thread
    /// that is held up. `elements` is how much work all of it is.
    pub fn new(exec: &Exec, rows: usize, channels: usize, elements: usize, widest: usize) -> Strips {
        let threads = pool::worth(exec.threads, elements, WORTH_SHARING);
        let width = channels.div_ceil(threads.div_ceil(rows.max(1))).next_multiple_of(ALIGN);
        Strips { rows, channels, width: width.clamp(ALIGN, widest), threads }
    }

    /// Calls `work` with every row and each of its strips.
    pub fn for_each(&self, work: impl Fn(usize, Range<usize>) + Send + Sync) -> Result<()> {
        let each = self.channels.div_ceil(self.width);
        pool::for_each(self.threads, self.rows * each, |i| {
            let first = i % each * self.width;
            work(i / each, first..self.channels.min(first + self.width));
        })
    }
}

/// The values of a strip as vectors, or zeros for its `len` channels.
#[inline(always)]
pub fn load<V: Vector>(values: Option<&[V::Element]>, len: usize) -> Vec<V> {
    let mut vectors = vec![V::zero(); len.div_ceil(V::LANES)];
    if let Some(values) = values {
        for (vector, values) in vectors.iter_mut().zip(values.chunks(V::LANES)) {
            *vector = V::load_partial(values);
        }
    }
    vectors
}

/// The way back.
#[inline(always)]
pub fn store<V: Vector>(vectors: &[V], values: &mut [V::Element]) {
    for (vector, values) in vectors.iter().zip(values.chunks_mut(V::LANES)) {
        vector.store_partial(values);
    }
}

//! Work that is independent per channel, divided among threads. Each thread gets some adjacent channels of some rows,
//! where a row is a batch or a chunk of time in it.

use super::{Exec, Vector, pool};
use crate::error::Result;
use std::ops::Range;

/// Below this number of elements, waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// Strips start at multiples of this number of channels, so that threads share few cache lines.
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
    /// Cuts `rows` rows of `channels` channels into strips of at most `widest` channels. There is one strip per thread
    /// where there are fewer rows than threads. Narrower strips read memory out of order, which costs more than an idle
    /// thread. `elements` is the size of all the work.
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

/// Loads the values of a strip into vectors; zeros for its `len` channels without values.
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

/// Writes the vectors of a strip back to its values.
#[inline(always)]
pub fn store<V: Vector>(vectors: &[V], values: &mut [V::Element]) {
    for (vector, values) in vectors.iter().zip(values.chunks_mut(V::LANES)) {
        vector.store_partial(values);
    }
}

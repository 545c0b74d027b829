//! The sequences of a call on CUDA, for kernels over chunks of [`CHUNK`] steps: those of a batch, all of equal length, or
//! packed ones. Kernels find them by `sequences.cu`, in a batch by arithmetic, else in a table.

use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::tensor::{DType, Spec};
use std::ops::Range;

/// Steps of a chunk.
pub const CHUNK: usize = 64;

/// Kernels count the steps of all sequences in 32 bits: they take fewer than these.
pub const MOST_STEPS: usize = 1 << 31;

/// The text that kernels include.
pub const TEXT: &str = concat!(include_str!("sequence.cu"), include_str!("sequences.cu"));

/// The text of kernels over segments, after [`TEXT`].
pub const PART: &str = include_str!("part.cu");
/// The text of the kernel `carry_states`, after [`PART`].
pub const CARRY: &str = include_str!("carry.cu");

/// The sequences of a call.
#[derive(Clone, Copy)]
pub enum Sequences<'a> {
    /// A batch of `count` sequences of `length` steps.
    Batch {
        /// Batch size.
        count: usize,
        /// Sequence length.
        length: usize,
    },
    /// Packed sequences with these steps, in order.
    Packed(&'a [Range<usize>]),
}

impl Sequences<'_> {
    /// The number of sequences.
    pub fn count(&self) -> usize {
        match self {
            Sequences::Batch { count, .. } => *count,
            Sequences::Packed(all) => all.len(),
        }
    }

    /// The sum over all sequences of what `of` gives for a sequence's number of chunks.
    fn sum(&self, of: impl Fn(usize) -> usize) -> usize {
        match self {
            Sequences::Batch { count, length } => count * of(length.div_ceil(CHUNK)),
            Sequences::Packed(all) => all.iter().map(|steps| of(steps.len().div_ceil(CHUNK))).sum(),
        }
    }

    /// Chunks of all sequences.
    pub fn chunks(&self) -> usize {
        self.sum(|chunks| chunks)
    }

    /// Steps of all sequences.
    pub fn steps(&self) -> usize {
        match self {
            Sequences::Batch { count, length } => count * length,
            Sequences::Packed(all) => all.last().map_or(0, |steps| steps.end),
        }
    }

    /// The first step of a chunk among those of all sequences; the number of all steps for that after the last one.
    pub fn first_step(&self, chunk: usize) -> usize {
        match self {
            Sequences::Batch { length, .. } => {
                let chunks = length.div_ceil(CHUNK).max(1);
                chunk / chunks * length + chunk % chunks * CHUNK
            }
            Sequences::Packed(all) => {
                let starts = all.iter().flat_map(|steps| steps.clone().step_by(CHUNK));
                starts.chain(all.last().map(|last| last.end)).nth(chunk).unwrap_or(0)
            }
        }
    }

    /// Segments of all sequences, each of `each` chunks but for the last of a sequence.
    pub fn segments(&self, each: usize) -> usize {
        self.sum(|chunks| segments(chunks, each))
    }

    /// Steps of the longest sequence.
    pub fn longest(&self) -> usize {
        match self {
            Sequences::Batch { length, .. } => *length,
            Sequences::Packed(all) => all.iter().map(Range::len).max().unwrap_or(0),
        }
    }

    /// The batch of the longest sequence that has as many chunks, rounded down: what keeps the device as busy.
    pub fn batch(&self) -> usize {
        (self.chunks() / self.longest().div_ceil(CHUNK).max(1)).max(1)
    }

    /// The compiler option of the kernels that include [`TEXT`].
    pub fn option(&self) -> &'static str {
        match self {
            Sequences::Batch { .. } => "-DPACKED=0",
            Sequences::Packed(_) => "-DPACKED=1",
        }
    }

    /// Uploads the table of packed sequences, with segments of `each` chunks.
    ///
    /// Multiprocessors get blocks in turn. Where they all run at once, `round` is the number of sequences whose blocks fill
    /// the multiprocessors once: in every second round the shortest comes first, so that each multiprocessor has about as
    /// much to do. Otherwise it is `usize::MAX`.
    pub fn table(&self, each: usize, round: usize, lane: &Lane) -> Result<Table> {
        let Sequences::Packed(all) = self else { return Ok(Table::default()) };
        let words = words(all, each, round);
        let buffer = lane.temporary(Spec::new(DType::I32, &[words.concat().len()])?)?;
        lane.upload(bytemuck::cast_slice(&words.concat()), &buffer)?;
        let sequences = lane.address(&buffer)?;
        let after = |address: u64, words: &[i32]| address + size_of_val(words) as u64;
        let of_segments = after(sequences, &words[0]);
        let of_chunks = after(of_segments, &words[1]);
        Ok(Table { sequences, of_segments, of_chunks, memory: Some(buffer) })
    }
}

/// Segments of a sequence: an empty one has a segment too, which passes its state on.
fn segments(chunks: usize, each: usize) -> usize {
    chunks.div_ceil(each).max(1)
}

/// The table of packed sequences on the device; zeros in a batch.
#[derive(Default)]
pub struct Table {
    /// The address of the sequences, the longest first, so that no long one begins when all others are done, or in rounds:
    /// first step, steps, first chunk, place among all.
    pub sequences: u64,
    /// For each segment the index of its sequence in that table, and its number there.
    pub of_segments: u64,
    /// For each chunk, in the order of steps, the index of its sequence in that table.
    pub of_chunks: u64,
    /// The memory of all three.
    pub memory: Option<Buffer>,
}

/// The table's parts, in the order of their addresses.
fn words(all: &[Range<usize>], each: usize, round: usize) -> [Vec<i32>; 3] {
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(all[at].len()));
    order.chunks_mut(round).skip(1).step_by(2).for_each(<[usize]>::reverse);
    let chunks = |at: usize| all[at].len().div_ceil(CHUNK);
    let before: Vec<usize> =
        (0..all.len()).scan(0, |sum, at| Some(std::mem::replace(sum, *sum + chunks(at)))).collect();
    let mut words = [const { Vec::new() }; 3];
    words[2].resize(before.last().map_or(0, |last| last + chunks(all.len() - 1)), 0);
    for (index, &at) in order.iter().enumerate() {
        words[0].extend([all[at].start, all[at].len(), before[at], at].map(|word| word as i32));
        (0..segments(chunks(at), each)).for_each(|number| words[1].extend([index as i32, number as i32]));
        words[2][before[at]..before[at] + chunks(at)].fill(index as i32);
    }
    words
}

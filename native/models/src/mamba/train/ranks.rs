//! Training on several devices: each has the weights and computes the gradient of a part of the batch. Then each adds up the
//! gradients of all for a piece of the weights, and the others copy that piece. All make the same step from it, so that
//! their weights stay equal, bit by bit.

use super::{Kept, Memory};
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::cuda::Buffer;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::place::{self, Place};
use sidewinder_kernels::tensor::{Described, Owned};
use std::ops::Range;
use std::thread;

/// The most tensors that are added up at once.
const TERMS: usize = 4;

/// A piece of the sum of all gradients, on the device that added it up.
enum Piece {
    Cpu(Owned),
    Cuda(Buffer),
}

/// `count` successive ranges of `all`, as equal as possible.
pub fn shares(all: usize, count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).map(move |i| all * i / count..all * (i + 1) / count)
}

/// Does `work` for all at once, each in a thread, but `own` for the first in the thread that calls.
pub fn at_once<T: Send, R: Send>(
    all: impl Iterator<Item = T>,
    own: impl FnOnce(T) -> Result<R>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (mut all, work) = (all, &work);
    let Some(first) = all.next() else { return Ok(vec![]) };
    thread::scope(|scope| {
        let spawn = |one| thread::Builder::new().spawn_scoped(scope, move || work(one)).map_err(no_thread);
        let others: Vec<_> = all.map(spawn).collect::<Result<_>>()?;
        let first = own(first);
        let ended = |other: thread::ScopedJoinHandle<_>| {
            other.join().unwrap_or_else(|payload| Err(Error::panicked(&*payload, "")))
        };
        let others: Vec<_> = others.into_iter().map(ended).collect();
        std::iter::once(first).chain(others).collect()
    })
}

fn no_thread(why: std::io::Error) -> Error {
    Error::new(Kind::Unavailable, "devices")
        .expected("a thread for each")
        .got(why)
        .hint("Train on fewer devices or raise the limit of threads")
}

/// Replaces the gradient of each rank by the sum of those of all, in the order of ranks.
pub fn add_up(ranks: &mut [Memory]) -> Result<()> {
    if ranks.len() < 2 {
        return Ok(());
    }
    let all = &*ranks;
    let ranges: Vec<_> = shares(all[0].elements(), all.len()).collect();
    let add = |(rank, range): (&Memory, &Range<usize>)| rank.sum_of(all, range);
    let pieces = at_once(all.iter().zip(&ranges), add, add)?;
    let copy = |rank: &mut Memory| ranges.iter().zip(&pieces).try_for_each(|(range, piece)| rank.replace(range, piece));
    at_once(ranks.iter_mut(), copy, copy).map(|_| ())
}

/// The sum of tensors in their order, a few at a time.
fn sum<P: Place>(place: &P, terms: &[P::View<'_>]) -> Result<P::Owned> {
    let (some, rest) = terms.split_at(terms.len().min(TERMS));
    let mut sum = place.empty(some[0].spec())?;
    place.map(Map::Sum, some, P::view_mut(&mut sum))?;
    for more in rest.chunks(TERMS - 1) {
        let mut next = place.empty(some[0].spec())?;
        let all: Vec<_> = std::iter::once(P::view(&sum)).chain(more.iter().map(P::briefly)).collect();
        place.map(Map::Sum, &all, P::view_mut(&mut next))?;
        drop(all);
        sum = next;
    }
    Ok(sum)
}

/// An error for ranks that cannot read each other.
pub fn mixed() -> Error {
    Error::new(Kind::Argument, "devices").expected("only GPUs, or only the CPU").got("both")
}

impl Memory {
    /// The sum of a range of the gradients of all ranks, in memory of this one.
    fn sum_of(&self, all: &[Memory], range: &Range<usize>) -> Result<Piece> {
        match self {
            Memory::Cpu(_, exec) => {
                let view = |rank| match rank {
                    &Memory::Cpu(Kept { ref gradient, .. }, _) => gradient.view().rows(range.clone()),
                    Memory::Cuda(..) => Err(mixed()),
                };
                let terms = all.iter().map(view).collect::<Result<Vec<_>>>()?;
                Ok(Piece::Cpu(sum(&place::Cpu(exec), &terms)?))
            }
            Memory::Cuda(_, device, _) => {
                let lane = device.lane()?;
                let pulled = |rank: &Memory| match rank {
                    Memory::Cuda(Kept { gradient, .. }, ..) => lane.pulled(&gradient.rows(range.clone())?),
                    Memory::Cpu(..) => Err(mixed()),
                };
                let terms = all.iter().map(pulled).collect::<Result<Vec<_>>>()?;
                let sum = sum(&place::Cuda(&lane), &terms)?;
                // Other devices cannot use what belongs to a lane.
                let kept = Buffer::new(device, sum.spec())?;
                lane.copy(&sum, &kept)?;
                lane.synchronize()?;
                Ok(Piece::Cuda(kept))
            }
        }
    }

    /// Copies a piece into a range of the gradient.
    fn replace(&mut self, range: &Range<usize>, piece: &Piece) -> Result<()> {
        match (self, piece) {
            (Memory::Cpu(Kept { gradient, .. }, exec), Piece::Cpu(piece)) => {
                let to = gradient.view_mut().rows(range.clone())?;
                place::Cpu(exec).map(Map::Sum, &[piece.view()], to)
            }
            (Memory::Cuda(Kept { gradient, .. }, device, _), Piece::Cuda(piece)) => {
                let lane = device.lane()?;
                lane.copy_from(piece, &gradient.rows(range.clone())?)?;
                lane.synchronize()
            }
            _ => Err(mixed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::at_once;
    use sidewinder_kernels::error::{Error, Kind};

    #[test]
    fn a_panic_in_a_thread_is_an_error_with_its_text() {
        let work = |one: usize| if one == 2 { panic!("boom {one}") } else { Ok(one) };
        let error = at_once(0..3, Ok, work).unwrap_err();
        assert_eq!((error.kind, &*error.got), (Kind::Panic, "a panic: boom 2"));
        assert_eq!(at_once(0..2, Ok, work).unwrap(), [0, 1]);
        let refused = |one: usize| Err::<usize, _>(Error::new(Kind::Memory, one.to_string()));
        assert_eq!(&*at_once(0..3, Ok, refused).unwrap_err().argument, "1");
    }
}

//! Workspace and the memory that is kept for it.

use sidewinder_kernels::base::scratch::{LEAST, MOST, Scratch, Spare, Words};
use sidewinder_kernels::error::Kind;

#[test]
fn the_smallest_block_that_fits_is_used_again() {
    let mut spare = Spare::default();
    for size in [5000, 1000, 1900, 1200] {
        spare.keep(Vec::with_capacity(size));
    }
    let mut take = |count| spare.take(count).map(|block| block.capacity());
    assert_eq!([1100, 1100, 1100, 2000].map(&mut take), [Some(1200), Some(1900), None, None]);
    assert_eq!([1000, 5000].map(&mut take), [Some(1000), Some(5000)]);
}

#[test]
fn the_oldest_blocks_make_room() {
    let mut spare = Spare::default();
    (1..=4).for_each(|i| spare.keep(Vec::with_capacity(MOST / 4 - i)));
    spare.keep(Vec::with_capacity(MOST / 4));
    let mut take = || spare.take(MOST / 8).map(|block| MOST / 4 - block.capacity());
    assert_eq!([(); 5].map(|()| take()), [Some(4), Some(3), Some(2), Some(0), None]);
}

#[test]
fn memory_is_filled() {
    let dirty = Words::filled(LEAST, 7).unwrap();
    drop(dirty);
    assert!(Words::filled(LEAST, 3).unwrap().iter().all(|&word| word == 3));
    assert_eq!(Scratch::<f32>::any(2 * LEAST + 1).unwrap().len(), 2 * LEAST + 1);
}

#[test]
fn more_memory_than_there_is_is_an_error() {
    assert_eq!(Scratch::<u8>::any(usize::MAX / 4).err().map(|error| error.kind), Some(Kind::Memory));
}

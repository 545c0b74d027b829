//! Workspace that starts at a cache line, because a vector load across two lines takes twice as long.

use bytemuck::Pod;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: an array of bytes without padding.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: an array of bytes without padding.
unsafe impl Pod for Line {}

/// Values that start at a cache line.
pub struct Aligned<E> {
    lines: Vec<Line>,
    len: usize,
    values: PhantomData<E>,
}

impl<E> Aligned<E> {
    /// An empty workspace.
    pub const fn none() -> Self {
        Aligned { lines: Vec::new(), len: 0, values: PhantomData }
    }
}

impl<E: Pod> Aligned<E> {
    /// `len` zeros.
    pub fn new(len: usize) -> Self {
        let lines = bytemuck::zeroed_vec((len * size_of::<E>()).div_ceil(size_of::<Line>()));
        Aligned { lines, len, values: PhantomData }
    }
}

impl<E: Pod> Deref for Aligned<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl<E: Pod> DerefMut for Aligned<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

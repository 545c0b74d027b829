//! The inputs of a step, packed so that one copy takes all of them to the device.

use crate::mamba::sample::Draw;
use crate::mamba::{Config, State};
use sidewinder_kernels::tensor::DType;

/// The offsets of the inputs in bytes. The tokens or features of all sequences come first.
#[derive(Clone, Copy)]
pub struct InputLayout {
    /// The addresses of each sequence's states, which the step reads.
    pub now: State<usize>,
    /// The addresses of the states that the step writes.
    pub next: State<usize>,
    /// The sampling parameters of each sequence.
    pub draws: usize,
    /// The size of all of them.
    pub bytes: usize,
}

impl InputLayout {
    pub fn new(config: &Config, dtype: DType, batch: usize) -> InputLayout {
        let row = if config.vocabulary > 0 { size_of::<u32>() } else { config.width * dtype.size() };
        let states = (batch * row).next_multiple_of(8);
        let addresses = |index: usize| states + index * batch * size_of::<u64>();
        let [now, next] = [0, 2].map(|index| State { conv: addresses(index), ssm: addresses(index + 1) });
        let draws = addresses(4);
        InputLayout { now, next, draws, bytes: draws + batch * size_of::<Draw>() }
    }

    /// The parts of packed inputs, in their order: rows, addresses of states, and sampling parameters.
    pub fn split<'p>(&self, packed: &'p mut [u8]) -> [&'p mut [u8]; 3] {
        let (rows, rest) = packed[..self.bytes].split_at_mut(self.now.conv);
        let (addresses, draws) = rest.split_at_mut(self.draws - self.now.conv);
        [rows, addresses, draws]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mamba::Mixer;

    #[test]
    fn parts_are_aligned_and_have_room_for_the_batch() {
        let backbone = Config {
            width: 5,
            layers: 1,
            vocabulary: 0,
            inner: 1,
            state: 1,
            rank: 1,
            conv: 1,
            eps: 1e-5,
            mixer: Mixer::Mamba,
        };
        for (vocabulary, dtype, batch) in
            [(0, DType::Bf16, 3), (0, DType::F32, 8), (29, DType::F16, 1), (29, DType::F32, 16)]
        {
            let row = if vocabulary == 0 { 5 * dtype.size() } else { 4 };
            let layout = InputLayout::new(&Config { vocabulary, ..backbone }, dtype, batch);
            let InputLayout { now, next, draws, .. } = layout;
            let offsets = [now.conv, now.ssm, next.conv, next.ssm, draws];
            assert!(offsets.iter().all(|offset| offset.is_multiple_of(8)));
            assert!(offsets.windows(2).all(|pair| pair[1] - pair[0] == 8 * batch));
            let sizes = layout.split(&mut vec![0; layout.bytes + 1]).map(|part| part.len());
            assert_eq!(sizes, [(row * batch).next_multiple_of(8), 4 * 8 * batch, size_of::<Draw>() * batch]);
        }
    }
}

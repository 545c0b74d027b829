//! How the gradient's chunks and heads are shared among blocks.

/// The fixed time of a block, in units of the time of a head.
const ENDS: usize = 2;

/// The chunks with a block for all heads of a group, and the heads of a part of the others, with which all blocks take the
/// least time: `multiprocessors` of them run at once. Either all chunks are divided, or those past the last full wave.
pub fn shares([chunks, groups, heads]: [usize; 3], multiprocessors: usize) -> [usize; 2] {
    let waves = |blocks: usize, heads: usize| blocks.div_ceil(multiprocessors) * (heads + ENDS);
    let time = |&[whole, some]: &[usize; 2]| {
        waves(whole * groups, heads) + waves((chunks - whole) * groups * heads.div_ceil(some), some)
    };
    let full = (chunks * groups / multiprocessors * multiprocessors).checked_div(groups).unwrap_or(0);
    let all = [0, full].into_iter().flat_map(|whole| (1..=heads).rev().map(move |some| [whole, some]));
    all.min_by_key(time).unwrap_or([0, 1])
}

//! Attention in 16-bit storage on tensor cores: by mma.sync from Ampere on, and by wgmma on Hopper.

use super::super::Problem;
use super::{Call, Launch, Own, Params, Statistics, specialised};
use crate::cuda::{Lane, Source, compiler};
use crate::error::Result;
use crate::tensor::DType;

/// The kernel's text, after the sources that all of these kernels share.
macro_rules! text {
    ($($file:literal),*) => {
        concat!(
            include_str!("../../../cuda/include/mma.cu"),
            include_str!("../common.cu"),
            include_str!("../mma.cu"),
            $(include_str!($file)),*
        )
    };
}
pub(super) use text;

const FORWARD: Source<Params<()>> = Source::new("attention_mma", text!("../softmax.cu", "../mma_forward.cu"));
const BACKWARD: Source<Params<()>> =
    Source::new("attention_mma_backward", text!("../gradients.cu", "../mma_backward.cu"));
const HOPPER_FORWARD: Source<Params<()>> =
    Source::new("attention_wgmma", text!("../softmax.cu", "../wgmma.cu", "../wgmma_forward.cu"));
const HOPPER_BACKWARD: Source<Params<()>> =
    Source::new("attention_wgmma_backward", text!("../wgmma.cu", "../gradients.cu", "../wgmma_backward.cu"));

/// The widest rows whose sums fit in a warp's registers.
const WIDEST: usize = 256;

/// The output of a launch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Forward,
    Dq,
    Dkv,
    Dk,
    Dv,
}

/// The sizes of a block's tiles; the names are those of the macros in `mma.cu`.
#[derive(Clone, Copy)]
struct Tile {
    role: Role,
    /// Whether it is for Hopper's wgmma.
    hopper: bool,
    width: usize,
    value_width: usize,
    tiles: usize,
    other: usize,
    warps: usize,
    /// The minimum number of resident blocks per multiprocessor.
    min: usize,
}

impl Tile {
    /// The fastest tile, or a smaller one where that does not fit in the device's shared memory.
    fn choose(problem: &Problem, role: Role, lane: &Lane) -> Tile {
        let [width, value_width] = [problem.width, problem.value_width].map(whole);
        let wide = width.max(value_width);
        let (tiles, other) = match role {
            Role::Forward if value_width <= 128 && problem.queries > 64 => (2, 64),
            Role::Forward => (1, 64),
            Role::Dq if wide <= 64 => (2, 64),
            Role::Dq if width <= 128 => (2, 32),
            Role::Dkv if width + value_width <= 128 => (2, 32),
            Role::Dkv => (1, 64),
            Role::Dq | Role::Dk | Role::Dv => (1, 32),
        };
        let min = if wide <= 128 { 2 } else { 1 };
        let tile = Tile { role, hopper: false, width, value_width, tiles, other, warps: 4, min };
        if tile.shared() <= lane.device().facts().shared as usize { tile } else { Tile { tiles: 1, other: 32, ..tile } }
    }

    /// The tile for Hopper's wgmma. `None` for 64 rows or fewer, for widths outside of 33 to 128, and for the roles
    /// that compute `dk` or `dv` alone.
    fn for_hopper(problem: &Problem, role: Role) -> Option<Tile> {
        let Problem { queries, keys, width, value_width, .. } = *problem;
        let own = if role == Role::Dkv { keys } else { queries };
        if own <= 64 || matches!(role, Role::Dk | Role::Dv) {
            return None;
        }
        let [width, value_width] = hopper_widths([width, value_width])?;
        let small = width + value_width == 128;
        let (other, warps, min) = match role {
            Role::Forward | Role::Dq if small => (64, 8, 2),
            Role::Forward | Role::Dq => (64, 12, 1),
            _ => (if small { 128 } else { 64 }, 8, 1),
        };
        Some(Tile { role, hopper: true, width, value_width, tiles: 1, other, warps, min })
    }

    fn own(&self) -> usize {
        16 * self.tiles * self.warps
    }

    fn source(&self) -> &'static Source<Params<()>> {
        match (self.role, self.hopper) {
            (Role::Forward, false) => &FORWARD,
            (Role::Forward, true) => &HOPPER_FORWARD,
            (_, false) => &BACKWARD,
            (_, true) => &HOPPER_BACKWARD,
        }
    }

    /// Bytes of shared memory, as the kernel computes them.
    fn shared(&self) -> usize {
        let padding = if self.hopper { 0 } else { 8 };
        let (row, value_row) = (2 * (self.width + padding), 2 * (self.value_width + padding));
        match self.role {
            Role::Forward if self.hopper => self.own() * row + 2 * self.other * (row + value_row),
            Role::Forward => (self.own() + self.other) * row + self.other * value_row,
            _ => (self.own() + 2 * self.other) * (row + value_row) + 2 * self.other * 8,
        }
    }

    fn launch(&self, call: &Call<f32>) -> Result<()> {
        let Tile { role, width, value_width, tiles, other, warps, min, .. } = *self;
        let options = format!(
            "{} -DWIDTH={width} -DVALUE_WIDTH={value_width} -DTILES={tiles} -DOTHER={other} -DWARPS={warps} \
             -DMIN={min}{}",
            options(call),
            match role {
                Role::Forward => "",
                Role::Dq => " -DROLE=DQ",
                Role::Dkv => " -DROLE=DKV",
                Role::Dk => " -DROLE=DK",
                Role::Dv => " -DROLE=DV",
            }
        );
        scaled(call).launch(&Launch {
            source: self.source(),
            options,
            threads: 32 * warps,
            shared: self.shared(),
            own: if matches!(role, Role::Forward | Role::Dq) { Own::Queries } else { Own::Keys },
            rows: self.own(),
            slices: 1,
            most: u32::MAX,
        })
    }
}

/// The compiler options common to these kernels.
pub(super) fn options(call: &Call<f32>) -> String {
    let half = u32::from(call.problem.dtype == DType::F16);
    format!("{} -DCOPY={} -DHALF={half}", call.options(), call.copy)
}

/// The call with the scale that these kernels take.
pub(super) fn scaled<'a>(call: &Call<'a, f32>) -> Call<'a, f32> {
    Call { params: Params { scale: scale(call.problem), ..call.params }, ..*call }
}

/// A width rounded up to whole tiles.
pub(super) fn whole(width: usize) -> usize {
    width.max(1).next_multiple_of(16)
}

/// Widths rounded up to blocks of 64 columns; `None` outside of 33 to 128.
pub(super) fn hopper_widths(widths: [usize; 2]) -> Option<[usize; 2]> {
    let fit = widths.iter().all(|width| (33..=128).contains(width));
    fit.then(|| widths.map(|width| width.next_multiple_of(64)))
}

/// The scale of scores as exponents of 2.
pub(super) fn scale(problem: &Problem) -> f32 {
    (problem.scale * std::f64::consts::LOG2_E) as f32
}

/// The launches that the gradient consists of.
fn roles(problem: &Problem) -> &'static [Role] {
    if problem.width.max(problem.value_width) <= 128 { &[Role::Dq, Role::Dkv] } else { &[Role::Dq, Role::Dk, Role::Dv] }
}

/// Whether these kernels can compute the call: without mask and bias, with a scale that keeps the order of scores, and
/// with rows that are not too wide for registers and shared memory.
pub(super) fn fits(problem: &Problem, lane: &Lane) -> bool {
    let Problem { dtype, mask, bias, width, value_width, .. } = *problem;
    let facts = lane.device().facts();
    let shared = |&role: &Role| Tile::choose(problem, role, lane).shared();
    let most = [Role::Forward].iter().chain(roles(problem)).map(shared).max().unwrap_or(0);
    dtype.size() == 2
        && facts.capability.0 >= 8
        && mask.is_none()
        && bias.is_none()
        && scale(problem) >= f32::MIN_POSITIVE
        && scale(problem).is_finite()
        && width.max(value_width) <= WIDEST
        && most <= facts.shared as usize
}

/// Queues attention.
pub(super) fn forward(call: &Call<f32>) -> Result<()> {
    match specialised::Tile::choose(call) {
        Some(tile) if hopper(call)? => tile.launch(call),
        _ => launch(call, Role::Forward),
    }
}

/// Queues the gradient.
pub(super) fn backward(call: &Call<f32>) -> Result<()> {
    match specialised::BackwardTile::choose(call) {
        Some(tile) if hopper(call)? => tile.launch(call),
        _ => call
            .backward(Statistics::Binary, |call| roles(call.problem).iter().try_for_each(|&role| launch(call, role))),
    }
}

fn launch(call: &Call<f32>, role: Role) -> Result<()> {
    let tile = if hopper(call)? { Tile::for_hopper(call.problem, role) } else { None };
    tile.unwrap_or_else(|| Tile::choose(call.problem, role, call.lane)).launch(call)
}

/// Whether the device, the compiler and the tensors' addresses allow kernels for Hopper.
fn hopper(call: &Call<f32>) -> Result<bool> {
    Ok(call.lane.device().facts().capability == (9, 0) && compiler()?.0 >= 12 && call.copy == 16)
}

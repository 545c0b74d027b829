//! Products with planes that the device copies without using threads (tensor maps).

use super::prepare::{Order, prepare};
use super::products::{common, whole};
use super::{CHUNK, FEW, Params, THREADS};
use crate::cuda::{Kernel, Lane, Source, TensorMap, Tiles, params};
use crate::error::Result;
use crate::ops::products::cuda::{Route, Sizes, Teams, text};
use crate::ops::products::ternary::problem::{Form, Product};

const BOX: Source<Boxed> = Source::new(
    "ternary_box",
    text!(
        ["activation", "early", "cluster", "pipeline", "tiles", "wgmma", "teams"],
        "epilogue",
        "ternary/ends",
        "ternary/box"
    ),
);

params! {
    /// The parameters of `box.cu`.
    pub(super) struct Boxed with TensorMap, Params {
        planes: [TensorMap; 2],
        of: Params,
        // Columns of tiles, and tiles of all groups of rows.
        columns: i32,
        tiles: i32,
    }
}

/// Teams of warps, and the kernel that they are planned for.
pub struct Boxes(Teams, Kernel<Boxed>);

impl Boxes {
    /// For many rows of bytes, if the device has tensor maps and warpgroup multiplications, and sums that are 64 times
    /// as large fit in i32.
    pub fn planned(problem: &Product, params: &Params, lane: &Lane) -> Result<Option<Boxes>> {
        let Product { rows, n, outs: outputs, .. } = *problem;
        let fits = n > 0 && outputs.max(problem.bytes()) < 1 << 31 && n <= 1 << 18 && whole(problem, params);
        if problem.form != Form::I8 || rows <= FEW || !fits || !Tiles::possible(lane) {
            return Ok(None);
        }
        let sizes = Sizes { rows, outputs, pieces: n.div_ceil(CHUNK) };
        let all = [4, 2, 1].into_iter().flat_map(|sides| [8, 4, 2, 1].map(|split| [sides, split]));
        // Large tiles come first, as they read x less often.
        let all = all.filter_map(|how| Teams::planned(sizes, how, |chunks| chunks.min(8), bytes, lane));
        let fastest = Teams::fastest(all, |teams| kernel(teams, problem, lane), lane)?;
        Ok(fastest.map(|(teams, kernel)| Boxes(teams, kernel)))
    }
}

/// Bytes of shared memory: of a stage, and of a partial sum for every two teams with two numbers per output.
fn bytes(teams: &Teams) -> [usize; 2] {
    let (rows, outputs) = (teams.rows(), teams.outputs());
    [2 * outputs * (CHUNK / 8) + rows * CHUNK, teams.sums(teams.deep.div_ceil(2)) + outputs * 8]
}

fn kernel(teams: &Teams, problem: &Product, lane: &Lane) -> Result<Kernel<Boxed>> {
    let teams = teams.options(2 * problem.outs * problem.bytes(), THREADS, lane);
    let options = format!("{} -DCHUNK={CHUNK} {teams}", common(problem));
    // SAFETY: the kernel waits before it accesses anything but weights. It writes no weights, and begins early only
    // after kernels that write none.
    Ok(unsafe { lane.device().kernel(&BOX, &options)?.early() })
}

impl Route<Product, Params> for Boxes {
    fn launch(&self, problem: &Product, params: &Params, lane: &Lane) -> Result<()> {
        let Boxes(teams, kernel) = self;
        let params = prepare(problem, Order::Matrices(teams.eights), params, lane)?;
        let (all, part) = ([problem.outs, problem.bytes() / 2], [teams.outputs(), CHUNK / 16]);
        let map = |plane| lane.device().tensor_map(plane, all, part, true);
        let planes = [map(params.planes[0])?, map(params.planes[1])?];
        let [columns, tiles] = teams.tiles.numbers()?;
        // SAFETY: the op's checks prove that all sizes fit the buffers, and `prepare` has filled the scratch memory.
        unsafe { teams.tiles.launch(kernel, &Boxed { planes, of: params, columns, tiles }, lane) }
    }
}

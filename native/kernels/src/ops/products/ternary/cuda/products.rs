//! Products, by one of four routes.

use super::boxes::Boxes;
use super::counts::Counts;
use super::prepare::{Order, prepare};
use super::tile::Tile;
use super::walk::Walk;
use super::{Params, at};
use crate::cuda::{Buffer, Lane, function, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::cuda::{Planner, constants, launch_first, route};
use crate::ops::products::ternary::problem::{Form, Product};
use std::sync::LazyLock;

/// The routes; the first that has a plan is taken.
const ROUTES: &[Planner<Product, Params>] = &[
    |problem, params, lane| route(Counts::planned(problem, params, lane)),
    |problem, params, lane| route(Boxes::planned(problem, params, lane)?),
    |problem, params, lane| route(Tile::planned(problem, params, lane)),
    |problem, params, lane| route(Some(Walk::planned(problem, params, lane))),
];

/// Queues a product by the first route that is possible.
pub fn matmul(problem: &Product, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let params = Params {
        planes: [at(inputs, "plane0", lane)?, at(inputs, "plane1", lane)?],
        x: at(inputs, "x", lane)?,
        x_planes: [at(inputs, "x_plane0", lane)?, at(inputs, "x_plane1", lane)?],
        w_scale: at(inputs, "w_scale", lane)?,
        bias: at(inputs, "bias", lane)?,
        acc: at(outputs, "acc", lane)?,
        y: at(outputs, "y", lane)?,
        q: at(outputs, "xq", lane)?,
        x_scales: at(outputs, "x_scale", lane)?,
        rows: problem.rows as i64,
        n: problem.n as i64,
        outs: problem.outs as i64,
        scales: problem.scales as i64,
        floor: problem.activations().floor,
        ..Params::default()
    };
    if problem.rows * problem.outs == 0 {
        return prepare(problem, Order::Rows, &params, lane).map(drop);
    }
    launch_first(ROUTES, problem, &params, lane)
}

/// Whether rows of the weights' planes are whole units of 16 bytes.
pub fn whole(problem: &Product, params: &Params) -> bool {
    problem.bytes().is_multiple_of(16) && params.planes.iter().all(|at| at.is_multiple_of(16))
}

/// Whether rows of all planes are whole units of 16 bytes.
pub fn aligned(problem: &Product, params: &Params) -> bool {
    whole(problem, params) && params.x_planes.iter().all(|at| at.is_multiple_of(16))
}

/// The numbers of forms as compiler options. They are made once: launches are few microseconds apart.
static FORMS: LazyLock<String> = LazyLock::new(|| constants(&Form::ALL));

/// The compiler options of all products.
pub fn common(problem: &Product) -> String {
    let (form, function) = (problem.form as usize, function(problem.options.activation));
    format!("{} {} -DFORM={form} -DFN={function}", types(problem.dtype), *FORMS)
}

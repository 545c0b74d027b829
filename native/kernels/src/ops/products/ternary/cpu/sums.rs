//! Dot products of rows of planes, and sums of columns.

use super::cells::values_of_row;
use super::products::{WORTH_SHARING, vector_of};
use super::wide::{Task, Wide, dispatch};
use crate::cpu::Exec;
use crate::cpu::pool::{self, Shared};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::ternary::problem::{Pairs, Weights, plane_bytes};
use crate::tensor::{View, ViewMut};

/// Products of rows of planes on the CPU.
pub fn dot(problem: &Pairs, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let of = |name: &str| Ok(inputs.get(name)?.bytes());
    let planes = [of("a0")?, of("a1")?, of("b0")?, of("b1")?];
    let (bytes, to) = (problem.bytes, Shared::new(outputs.expect("dot")?.slice::<i32>()?));
    pool::for_each(pool::worth(exec.threads, problem.rows * bytes * 8, WORTH_SHARING), problem.rows, |row| {
        let rows = planes.map(|plane| &plane[row * bytes..][..bytes]);
        // SAFETY: rows share no sum.
        let to = unsafe { to.part(row, 1) };
        to[0] = dispatch(exec.level, Dot(rows));
    })
}

struct Dot<'a>([&'a [u8]; 4]);

impl Task for Dot<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<V: Wide>(self) -> i32 {
        let [a0, a1, b0, b1] = self.0;
        let (mut all, mut negative) = (V::no_counts(), V::no_counts());
        for block in 0..a0.len().div_ceil(V::BYTES) {
            let (a0, a1): (V, V) = (vector_of(a0, block), vector_of(a1, block));
            let (b0, b1): (V, V) = (vector_of(b0, block), vector_of(b1, block));
            let both = a0.xor(a1).and(b0.xor(b1));
            all = V::add_count(all, both);
            negative = V::add_count(negative, both.and(a1.xor(b1)));
        }
        V::count(all, negative) as i32
    }
}

/// Columns per task.
const COLUMNS: usize = 4096;

/// Sums of columns on the CPU.
pub fn column_sums(problem: &Weights, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let Weights { rows, n } = *problem;
    let planes = [inputs.get("plane0")?.bytes(), inputs.get("plane1")?.bytes()];
    let (bytes, to) = (plane_bytes(n), Shared::new(outputs.expect("column_sums")?.slice::<i32>()?));
    pool::for_each(pool::worth(exec.threads, rows * n, WORTH_SHARING), n.div_ceil(COLUMNS), |task| {
        let (start, end) = (task * COLUMNS, n.min((task + 1) * COLUMNS));
        // SAFETY: tasks share no column.
        let sums = unsafe { to.part(start, end - start) };
        sums.fill(0);
        let mut values = vec![0i8; end - start];
        for row in 0..rows {
            let part = planes.map(|plane| &plane[row * bytes..][..bytes][start / 8..]);
            values_of_row(part, 0, end - start, exec.level, &mut values);
            sums.iter_mut().zip(&values).for_each(|(sum, &value)| *sum += i32::from(value));
        }
    })
}

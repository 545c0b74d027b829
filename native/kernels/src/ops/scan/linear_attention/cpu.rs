//! Linear attention on the CPU: the recurrence is that of [`matrix_state`]. Calls that need `z` go over `v`, `y` and the
//! states once more before and after it, which costs a share of about 1 / K.

use super::z::{self, Columns, Pass};
use super::{EPS, Problem};
use crate::cpu::pool::Shared;
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector, rows};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state;
use crate::place::Cpu;
use crate::tensor::{Described, Element, View, ViewMut};
use crate::with_type;

/// Computes the op on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    if problem.needs_z(inputs, &outputs) {
        return z::forward(&Cpu(exec), problem, inputs, outputs);
    }
    matrix_state::cpu::forward(&problem.of_values, inputs, outputs, exec)
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    if problem.needs_z(inputs, &outputs) {
        return z::backward(&Cpu(exec), problem, inputs, outputs);
    }
    matrix_state::cpu::backward(&problem.of_values, inputs, outputs, exec)
}

impl Columns for Cpu<'_> {
    fn recurrence(&self, problem: &matrix_state::Problem, inputs: &Named<View>, outputs: Named<ViewMut>) -> Result<()> {
        matrix_state::cpu::forward(problem, inputs, outputs, self.0)
    }

    fn gradient(&self, problem: &matrix_state::Problem, inputs: &Named<View>, outputs: Named<ViewMut>) -> Result<()> {
        matrix_state::cpu::backward(problem, inputs, outputs, self.0)
    }

    fn append(&self, from: Option<&View>, last: Option<&View>, otherwise: f64, to: ViewMut) -> Result<()> {
        let (from, last) = (from.copied(), last.copied());
        with_type!(from.map_or(to.spec().dtype, |from| from.spec().dtype), S => {
            let pass = Pass::new(to.spec(), from.map(|from| from.spec()));
            let from = from.map(|from| from.slice::<S>()).transpose()?;
            let last = last.map(|last| last.slice::<<S as Storage>::Wide>()).transpose()?;
            let to = Shared::new(to.slice::<<S as Storage>::Wide>()?);
            rows::for_each([pass.rows, pass.wide()], self.0, |rows| {
                // SAFETY: pieces share no row.
                let to = unsafe { to.part(rows.start * pass.wide(), rows.len() * pass.wide()) };
                let from = from.map(|from| &from[rows.start * pass.width..rows.end * pass.width]);
                let last = last.map(|last| &last[rows]);
                <S as Storage>::Wide::dispatch(self.0.level, Append::<S> { pass, from, last, otherwise, to });
            })
        })
    }

    fn split(&self, from: &View, divide: bool, to: Option<ViewMut>, last: Option<ViewMut>) -> Result<()> {
        let pass = Pass::new(from.spec(), to.as_ref().map(Described::spec));
        with_type!(to.as_ref().map_or(from.spec().dtype, |to| to.spec().dtype), S => {
            let from = from.slice::<<S as Storage>::Wide>()?;
            let to = to.map(ViewMut::slice::<S>).transpose()?.map(Shared::new);
            let last = last.map(ViewMut::slice::<<S as Storage>::Wide>).transpose()?.map(Shared::new);
            rows::for_each([pass.rows, pass.wide()], self.0, |rows| {
                let from = &from[rows.start * pass.wide()..rows.end * pass.wide()];
                let start = rows.start * pass.width;
                // SAFETY: pieces share no row.
                let to = to.as_ref().map(|to| unsafe { to.part(start, rows.len() * pass.width) });
                // SAFETY: as above.
                let last = last.as_ref().map(|last| unsafe { last.part(rows.start, rows.len()) });
                <S as Storage>::Wide::dispatch(self.0.level, Split::<S> { pass, divide, from, to, last });
            })
        })
    }

    fn cotangents(&self, products: &View, dy: &View, divide: bool, to: ViewMut) -> Result<()> {
        let pass = Pass::new(products.spec(), Some(dy.spec()));
        with_type!(dy.spec().dtype, S => {
            let (products, dy) = (products.slice::<<S as Storage>::Wide>()?, dy.slice::<S>()?);
            let to = Shared::new(to.slice::<<S as Storage>::Wide>()?);
            rows::for_each([pass.rows, pass.wide()], self.0, |rows| {
                let wide = rows.start * pass.wide()..rows.end * pass.wide();
                // SAFETY: pieces share no row.
                let to = unsafe { to.part(wide.start, wide.len()) };
                let dy = &dy[rows.start * pass.width..rows.end * pass.width];
                let work = Cotangents::<S> { pass, divide, products: &products[wide], dy, to };
                <S as Storage>::Wide::dispatch(self.0.level, work);
            })
        })
    }
}

struct Append<'a, S: Storage> {
    pass: Pass,
    from: Option<&'a [S]>,
    last: Option<&'a [S::Wide]>,
    otherwise: f64,
    to: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for Append<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let width = self.pass.width;
        for (row, to) in self.to.chunks_exact_mut(self.pass.wide().max(1)).enumerate() {
            each_vector!(width, |at, end| {
                let from = self.from.map_or(V::zero(), |from| S::load(&from[row * width + at..row * width + end]));
                from.store_partial(&mut to[at..end]);
            });
            if self.pass.more {
                to[width] = self.last.map_or(S::Wide::from_f64(self.otherwise), |last| last[row]);
            }
        }
    }
}

struct Split<'a, S: Storage> {
    pass: Pass,
    divide: bool,
    from: &'a [S::Wide],
    to: Option<&'a mut [S]>,
    last: Option<&'a mut [S::Wide]>,
}

impl<S: Storage> Work<S::Wide> for Split<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(mut self) {
        let width = self.pass.width;
        for (row, from) in self.from.chunks_exact(self.pass.wide().max(1)).enumerate() {
            if let Some(to) = self.to.as_deref_mut() {
                let to = &mut to[row * width..(row + 1) * width];
                let divisor = if self.divide { divisor::<V>(from) } else { V::constant(1.0) };
                each_vector!(width, |at, end| {
                    S::store(V::load_partial(&from[at..end]).div(divisor), &mut to[at..end]);
                });
            }
            if let Some(last) = self.last.as_deref_mut() {
                last[row] = from[width];
            }
        }
    }
}

struct Cotangents<'a, S: Storage> {
    pass: Pass,
    divide: bool,
    products: &'a [S::Wide],
    dy: &'a [S],
    to: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for Cotangents<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (width, wide) = (self.pass.width, self.pass.wide());
        for (row, (products, to)) in self.products.chunks_exact(wide).zip(self.to.chunks_exact_mut(wide)).enumerate() {
            let divisor = if self.divide { divisor::<V>(products) } else { V::constant(1.0) };
            let mut along = V::zero();
            each_vector!(width, |at, end| {
                let d = S::load::<V>(&self.dy[row * width + at..row * width + end]).div(divisor);
                d.store_partial(&mut to[at..end]);
                along = d.mul_add(V::load_partial(&products[at..end]), along);
            });
            let along = V::splat(along.sum()).div(divisor);
            to[width] = if self.divide { V::zero().sub(along).lanes()[0] } else { S::Wide::from_f64(0.0) };
        }
    }
}

/// What a row of `n` and `d` is divided by.
#[inline(always)]
fn divisor<V: Vector>(row: &[V::Element]) -> V {
    V::splat(row[row.len() - 1]).add(V::constant(EPS))
}

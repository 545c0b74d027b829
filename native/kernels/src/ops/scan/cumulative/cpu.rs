//! The scans on the CPU.

mod steps;
mod walk;

use super::{Problem, Scan};
use crate::cpu::pool::Shared;
use crate::cpu::{Exec, Storage, Vector};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use steps::Steps;
use walk::{Read, Walk, Write};

/// Computes a scan on the CPU.
pub fn forward(
    problem: &Problem,
    names: [&str; 2],
    inputs: &Named<View>,
    outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    with_type!(problem.dtype(), S => forward_as::<S>(problem, names, inputs, outputs, exec))
}

fn forward_as<S: Storage>(
    problem: &Problem,
    [x, _]: [&str; 2],
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let y = outputs.expect("y")?.slice::<S>()?;
    let call = Forward {
        problem,
        x: inputs.get(x)?.slice::<S>()?,
        start: slice(inputs, "initial_state")?,
        last: outputs.take("last_state").map(ViewMut::slice).transpose()?.map(Shared::new),
    };
    match problem.settings.scan {
        Scan::ExpProduct { eps, log_min, .. } => {
            let log_y = outputs.expect("log_y")?.slice()?;
            let scan = steps::ExpProduct { eps, log_min };
            call.run(scan, [Write::Narrow(Shared::new(y)), Write::Wide(Shared::new(log_y))], exec)
        }
        Scan::Product => call.run(steps::Product, [Write::Narrow(Shared::new(y))], exec),
        Scan::LogSumExp => call.run(steps::LogSumExp, [Write::Narrow(Shared::new(y))], exec),
        Scan::Sum => call.run(steps::Sum, [Write::Narrow(Shared::new(y))], exec),
    }
}

fn slice<'a, T: Element>(inputs: &Named<View<'a>>, name: &str) -> Result<Option<&'a [T]>> {
    inputs.find(name).map(View::slice).transpose()
}

/// A scan: its input and states. The outputs along time are arguments of `run`.
struct Forward<'a, S: Storage> {
    problem: &'a Problem,
    x: &'a [S],
    start: Option<&'a [S::Wide]>,
    last: Option<Shared<'a, S::Wide>>,
}

impl<'a, S: Storage> Forward<'a, S> {
    fn run<K: Steps<1, N, T, OUT>, const N: usize, const T: usize, const OUT: usize>(
        self,
        scan: K,
        outputs: [Write<'a, S>; OUT],
        exec: &Exec,
    ) -> Result<()> {
        let &Problem { rows, length, width, .. } = self.problem;
        let (start, inputs, last) = (self.start, [Read::Narrow(self.x)], self.last);
        let back = self.problem.settings.reverse;
        Walk { scan, rows, length, width, back, start, inputs, before: Read::Zero, first: None, outputs, last }
            .run::<N, T>(exec)
    }
}

/// Computes the gradient of a scan on the CPU.
pub fn backward(
    problem: &Problem,
    names: [&str; 2],
    inputs: &Named<View>,
    outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    with_type!(problem.dtype(), S => backward_as::<S>(problem, names, inputs, outputs, exec))
}

fn backward_as<S: Storage>(
    problem: &Problem,
    [x, dx]: [&str; 2],
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let narrow = |name| Ok(Read::Narrow(inputs.get(name)?.slice::<S>()?));
    let dlog_y = slice(inputs, "dlog_y")?.map_or(Read::Zero, Read::Wide);
    let first = slice::<S::Wide>(inputs, "initial_state")?;
    let call = Gradient {
        problem,
        start: slice(inputs, "dlast_state")?,
        before: Read::Zero,
        first,
        dx: Write::Narrow(Shared::new(outputs.expect(dx)?.slice()?)),
        last: outputs.take("dinitial_state").map(ViewMut::slice).transpose()?.map(Shared::new),
    };
    match problem.settings.scan {
        Scan::ExpProduct { floor, .. } => {
            let exp: Option<Vec<S::Wide>> = first.map(|state| state.iter().map(|&v| Vector::exp(v)).collect());
            let call = Gradient { before: narrow("y")?, first: exp.as_deref(), ..call };
            call.run(steps::ExpProductGradient { floor }, [narrow(x)?, narrow("dy")?, dlog_y], exec)
        }
        Scan::Product => {
            let call = Gradient { before: narrow("y")?, ..call };
            call.run(steps::ProductGradient, [narrow(x)?, narrow("dy")?], exec)
        }
        Scan::LogSumExp => {
            let x = inputs.get(x)?.slice::<S>()?;
            let mut y = vec![<S::Wide as Element>::from_f64(0.0); x.len()];
            let forward = Forward { problem, x, start: first, last: None };
            forward.run(steps::LogSumExp, [Write::Wide(Shared::new(&mut y))], exec)?;
            let call = Gradient { before: Read::Wide(&y), ..call };
            call.run(steps::LogSumExpGradient, [Read::Narrow(x), Read::Wide(&y), narrow("dy")?], exec)
        }
        Scan::Sum => call.run(steps::Sum, [narrow("dy")?], exec),
    }
}

/// A gradient: a walk in the opposite direction. The inputs along time are arguments of `run`.
struct Gradient<'a, S: Storage> {
    problem: &'a Problem,
    start: Option<&'a [S::Wide]>,
    before: Read<'a, S>,
    first: Option<&'a [S::Wide]>,
    dx: Write<'a, S>,
    last: Option<Shared<'a, S::Wide>>,
}

impl<'a, S: Storage> Gradient<'a, S> {
    fn run<K: Steps<IN, N, T, 1>, const IN: usize, const N: usize, const T: usize>(
        self,
        scan: K,
        inputs: [Read<'a, S>; IN],
        exec: &Exec,
    ) -> Result<()> {
        let &Problem { rows, length, width, .. } = self.problem;
        let Gradient { start, before, first, last, .. } = self;
        let back = !self.problem.settings.reverse;
        Walk { scan, rows, length, width, back, start, inputs, before, first, outputs: [self.dx], last }
            .run::<N, T>(exec)
    }
}

//! The backward pass of a Mamba-2 layer, for whole sequences without states. The intermediate activations are
//! recomputed, and then the gradient passes through the ops in reverse.

use super::{Mamba2, Scanned, Shapes, conv_options, rows_of};
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{Named, named};
use sidewinder_kernels::ops::causal_conv1d::CausalConv1dBackward;
use sidewinder_kernels::ops::norm::gated::GatedRmsNormBackward;
use sidewinder_kernels::ops::products::linear;
use sidewinder_kernels::ops::products::matrices::{Dense, Matrix};
use sidewinder_kernels::ops::scan::ssd::SsdBackward;
use sidewinder_kernels::place::{Place, copy_rows};
use sidewinder_kernels::tensor::Described;

/// Memory for the gradients of weights, by the names of their slots.
type Gradients<'g, P> = Named<<P as Place>::ViewMut<'g>>;

impl<P: Place> Mamba2<'_, '_, P> {
    /// Writes the gradients of all weights to `to`, and that of `u` to `du`; `dy` is the gradient of the output.
    pub fn backward(
        &self,
        [u, dy]: [&P::View<'_>; 2],
        dims: [usize; 2],
        mut to: Gradients<P>,
        du: P::ViewMut<'_>,
    ) -> Result<()> {
        let whole = || vec![Default::default()];
        let [z, xbc, dt] = self.projected(u)?;
        let of = self.scanned(&self.conv(&xbc, dims, whole())?, dt)?;
        let s = self.scan(&of, dims, whole())?;
        let normed = self.norm(&s, &z)?;
        let mut dnormed = self.like(&normed)?;
        let out_proj = ("out_proj", "out_proj_b", &self.weights.out_proj);
        self.dense_backward(out_proj, [P::view(&normed), P::briefly(dy)], &mut to, P::view_mut(&mut dnormed))?;
        let [ds, dz] = self.norm_backward([&s, &z, &dnormed], &mut to)?;
        let dscanned = self.scan_backward(&of, &ds, dims, &mut to)?;
        let dc = self.joined([&dscanned.x, &dscanned.b, &dscanned.c])?;
        let dxbc = self.conv_backward([&xbc, &dc], dims, &mut to)?;
        let dprojected = self.joined([&dz, &dxbc, &dscanned.dt])?;
        let in_proj = ("in_proj", "in_proj_b", &self.weights.in_proj);
        self.dense_backward(in_proj, [P::briefly(u), P::view(&dprojected)], &mut to, du)
    }

    /// Backward through a dense layer with weights `name` and `bias`: writes their gradients, and `dx` of `x` and `dy`.
    fn dense_backward(
        &self,
        (name, bias, of): (&str, &str, &Dense<P::View<'_>>),
        [x, dy]: [P::View<'_>; 2],
        to: &mut Gradients<P>,
        dx: P::ViewMut<'_>,
    ) -> Result<()> {
        let Matrix::Float(w) = &of.w else { unreachable!("only models of floats are trained") };
        let (dw, db) = (P::briefly_mut(to.expect(name)?), to.take(bias).map(P::briefly_mut));
        let inputs = [P::briefly(&x), P::briefly(w), P::briefly(&dy)];
        linear::backward_at(self.place, inputs, of.b.as_ref().map(P::briefly), [P::briefly_mut(dx), dw], db)
    }

    /// Backward through the gated norm: returns `ds` and `dz`.
    fn norm_backward(&self, [s, z, dy]: [&P::Owned; 3], to: &mut Gradients<P>) -> Result<[P::Owned; 2]> {
        let (mut ds, mut dz) = (self.like(s)?, self.like(z)?);
        let mut inputs = self.norm_inputs(s, z);
        inputs.push("dy", P::view(dy));
        let dw = P::briefly_mut(to.expect("norm")?);
        let outputs = [("dx", P::view_mut(&mut ds)), ("dz", P::view_mut(&mut dz)), ("dw", dw)];
        let outputs = named(outputs.map(|(name, to)| (name, Some(to))));
        self.place.call::<GatedRmsNormBackward>(&self.norm_options(), inputs, outputs)?;
        Ok([ds, dz])
    }

    /// Backward through the scan and `A = -exp(A_log)`: returns the gradients of `x`, `dt`, `B` and `C`.
    fn scan_backward(
        &self,
        of: &Scanned<P::Owned>,
        ds: &P::Owned,
        dims @ [batch, length]: [usize; 2],
        to: &mut Gradients<P>,
    ) -> Result<Scanned<P::Owned>> {
        let mut d =
            Scanned { x: self.like(&of.x)?, dt: self.like(&of.dt)?, b: self.like(&of.b)?, c: self.like(&of.c)? };
        let mut da = self.place.empty(self.a.spec())?;
        let Shapes { x, dt, b, .. } = self.shapes(dims);
        let mut inputs = self.scan_inputs(of, 0, dims)?;
        inputs.push("dy", rows_of::<P>(ds, 0, batch * length, &x)?);
        let outputs = named([
            ("dx", Some(P::reshape_mut(P::view_mut(&mut d.x), &x)?)),
            ("ddt", Some(P::reshape_mut(P::view_mut(&mut d.dt), &dt)?)),
            ("dA", Some(P::view_mut(&mut da))),
            ("dB", Some(P::reshape_mut(P::view_mut(&mut d.b), &b)?)),
            ("dC", Some(P::reshape_mut(P::view_mut(&mut d.c), &b)?)),
            ("dD", Some(P::briefly_mut(to.expect("D")?))),
            ("ddt_bias", Some(P::briefly_mut(to.expect("dt_b")?))),
        ]);
        self.place.call::<SsdBackward>(&self.scan_options(), inputs, outputs)?;
        // A is -exp(A_log), so its derivative by A_log is A.
        self.place.map(Map::Product, &[P::view(&da), P::briefly(self.a)], P::briefly_mut(to.expect("A_log")?))?;
        Ok(d)
    }

    /// Backward through the convolution: returns `dx` of `x` and `dy`.
    fn conv_backward(&self, [x, dy]: [&P::Owned; 2], dims: [usize; 2], to: &mut Gradients<P>) -> Result<P::Owned> {
        let (mut dx, shape) = (self.like(x)?, self.conv_shape(dims));
        let mut inputs = self.conv_inputs(x, 0, dims)?;
        inputs.push("dy", P::reshape(&P::view(dy), &shape)?);
        let outputs = named([
            ("dx", Some(P::reshape_mut(P::view_mut(&mut dx), &shape)?)),
            ("dw", Some(P::briefly_mut(to.expect("conv_w")?))),
            ("dbias", to.take("conv_b").map(P::briefly_mut)),
        ]);
        self.place.call::<CausalConv1dBackward>(&conv_options(false), inputs, outputs)?;
        Ok(dx)
    }

    /// Concatenates the columns of these tensors.
    fn joined(&self, parts: [&P::Owned; 3]) -> Result<P::Owned> {
        let widths = parts.map(|part| P::view(part).spec().shape[1]);
        let mut all = self.rows_like(&P::view(parts[0]), widths.iter().sum())?;
        let mut start = 0;
        for (part, width) in parts.into_iter().zip(widths) {
            copy_rows::put_columns(self.place, &P::view(part), P::view_mut(&mut all), start)?;
            start += width;
        }
        Ok(all)
    }

    fn like(&self, of: &P::Owned) -> Result<P::Owned> {
        self.place.empty(P::view(of).spec())
    }
}

//! The gradient of the block, step by step in reverse.

use super::*;
use crate::op::gradient_of;
use crate::ops::mm_rec::block_recurrence::BlockRecurrenceBackward;
use crate::ops::mm_rec::hds::HdsConstructBackward;
use crate::ops::mm_rec::mdi::gamma::MdiGammaBackward;
use crate::ops::mm_rec::mmrec_block::MmrecBlock;
use crate::ops::mm_rec::multi_memory_attention::MultiMemoryAttentionBackward;
use crate::ops::norm::RmsNormBackward;

/// The gradients of all given inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let between = steps.between(&mut Named::default())?;
    let dr = steps.feed_forward_backward(&between, &mut outputs)?;
    let OfAttention { dh, dq } = steps.attention_backward(&between, &dr, &mut outputs)?;
    let OfRecurrence { dz, dgamma } = steps.recurrence_backward(&between, &dr, &dh, &mut outputs)?;
    let [dk, dz] = steps.gamma_backward(&between, dgamma, &dz, &mut outputs)?;
    let mut dv = steps.like_x()?;
    place.map(Map::Scaled(problem.options.v_mix), &[P::view(&dr)], P::view_mut(&mut dv))?;
    let dxn = steps.projections_backward(&between.xn, [&dq, &dk, &dv, &dz], &mut outputs)?;
    let mut of_norm = steps.like_x()?;
    steps.norm_backward(steps.input("x")?, "n1", &dxn, &mut of_norm, &mut outputs)?;
    place.map(Map::Sum, &[P::view(&dr), P::view(&of_norm)], P::briefly_mut(outputs.expect("dx")?))
}

/// The gradients of attention's inputs.
struct OfAttention<T> {
    dh: T,
    dq: T,
}

/// The gradients of the recurrence's inputs.
struct OfRecurrence<T> {
    dz: T,
    dgamma: T,
}

/// The output for the gradient of an input.
fn gradient<'s, 'a: 's, P: Place>(outputs: &mut Named<P::ViewMut<'a>>, of: &str) -> Result<P::ViewMut<'s>> {
    place::gradient::<P, MmrecBlock>(outputs, of)
}

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    /// The sum of some tensors like `x`, plus the cotangent of that name, if given.
    fn sum(&self, terms: &[&P::Owned], cotangent: &str) -> Result<P::Owned> {
        let mut sum = self.like_x()?;
        let terms = terms.iter().map(|&term| P::view(term));
        let all: Vec<_> = terms.chain(self.optional(cotangent)).collect();
        self.place.map(Map::Sum, &all, P::view_mut(&mut sum))?;
        Ok(sum)
    }

    fn linear_backward(
        &self,
        x: P::View<'_>,
        [w, b]: [&str; 2],
        dy: P::View<'_>,
        dx: &mut P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let given = [P::briefly(&x), self.input(w)?, P::briefly(&dy)];
        let to = [P::view_mut(dx), gradient::<P>(outputs, w)?];
        linear::backward_at(self.place, given, Some(self.input(b)?), to, Some(gradient::<P>(outputs, b)?))
    }

    fn norm_backward(
        &self,
        x: P::View<'_>,
        weight: &str,
        dy: &P::Owned,
        dx: &mut P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let inputs = named([("x", Some(P::briefly(&x))), ("w", Some(self.input(weight)?)), ("dy", Some(P::view(dy)))]);
        let to = named([("dx", Some(P::view_mut(dx))), ("dw", Some(gradient::<P>(outputs, weight)?))]);
        self.place.call::<RmsNormBackward>(&self.problem.options.norm(), inputs, to)
    }

    /// The cotangent of `y`, including the part through its mean.
    fn of_y(&self) -> Result<Option<P::Owned>> {
        let [_, length, _] = self.problem.sizes();
        let Some(dsummary) = self.inputs.find("dsummary").filter(|_| length > 0) else { return Ok(None) };
        let (options, spec) = self.mean()?;
        let [mut of_mean, mut none, mut sum] = [self.like_x()?, self.like_x()?, self.like_x()?];
        // The hierarchy's gradient needs only the sizes of the level below, so that any tensor like `y` will do.
        let y = self.input("x")?;
        let cotangent = P::reshape(dsummary, &spec.shape)?;
        let given = named([("k", Some(P::briefly(&y))), ("v", Some(y)), ("dk1", Some(cotangent))]);
        let to = named([("dk", Some(P::view_mut(&mut of_mean))), ("dv", Some(P::view_mut(&mut none)))]);
        self.place.call::<HdsConstructBackward>(&options, given, to)?;
        self.place.map(Map::Sum, &[self.input("dy")?, P::view(&of_mean)], P::view_mut(&mut sum))?;
        Ok(Some(sum))
    }

    /// Goes back through the feed-forward layer: the gradient of `r`.
    fn feed_forward_backward(&self, between: &Between<'a, P>, outputs: &mut Named<P::ViewMut<'a>>) -> Result<P::Owned> {
        let [mut drn, mut of_norm, mut dr] = [self.like_x()?, self.like_x()?, self.like_x()?];
        let of_y = self.of_y()?;
        let dy = of_y.as_ref().map_or_else(|| self.input("dy"), |sum| Ok(P::view(sum)))?;
        let u = self.activated(&between.hidden)?;
        let like_hidden = || self.place.empty(self.problem.hidden()?);
        let (mut du, mut dhidden) = (like_hidden()?, like_hidden()?);
        self.linear_backward(P::view(&u), ["wf2", "bf2"], P::briefly(&dy), &mut du, outputs)?;
        let given = [between.hidden.view(), P::view(&du)];
        self.place.map(Map::SlopeTimes(GELU), &given, P::view_mut(&mut dhidden))?;
        self.linear_backward(P::view(&between.rn), ["wf1", "bf1"], P::view(&dhidden), &mut drn, outputs)?;
        self.norm_backward(P::view(&between.r), "n2", &drn, &mut of_norm, outputs)?;
        self.place.map(Map::Sum, &[dy, P::view(&of_norm)], P::view_mut(&mut dr))?;
        Ok(dr)
    }

    fn attention_backward(
        &self,
        between: &Between<'a, P>,
        dr: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<OfAttention<P::Owned>> {
        let dcontext = self.sum(&[dr], "dcontext")?;
        let (mut of, top) = (OfAttention { dh: self.like_x()?, dq: self.like_x()? }, self.problem.top()?);
        let mut dtop = [self.place.empty(top)?, self.place.empty(top)?];
        {
            let mut given = self.attention_inputs(between.h.view(), &between.top, between.q.view())?;
            given.push("dy", P::view(&dcontext));
            let mut to = named([("dh", Some(P::view_mut(&mut of.dh))), ("dq_in", Some(P::view_mut(&mut of.dq)))]);
            let [dk, dv] = &mut dtop;
            to.push("dk_mem", P::view_mut(dk));
            to.push("dv_mem", P::view_mut(dv));
            for name in ATTENTION {
                to.push(gradient_of::<MultiMemoryAttention>(name), gradient::<P>(outputs, name)?);
            }
            let options = multi_memory_attention::Options { heads: self.problem.options.heads };
            self.place.call::<MultiMemoryAttentionBackward>(&options, given, to)?;
        }
        self.hierarchy_backward(&dtop, outputs)?;
        Ok(of)
    }

    fn hierarchy_backward(&self, [dk, dv]: &[P::Owned; 2], outputs: &mut Named<P::ViewMut<'a>>) -> Result<()> {
        let options = self.problem.options.hierarchy();
        let (dk_mem, dv_mem) = (gradient::<P>(outputs, "k_mem")?, gradient::<P>(outputs, "v_mem")?);
        if options.levels == 1 {
            self.place.map(Map::Sum, &[P::view(dk)], dk_mem)?;
            return self.place.map(Map::Sum, &[P::view(dv)], dv_mem);
        }
        let [_, _, of_k, of_v] = hds::NAMES[options.levels - 2];
        let mut given = named([("k", Some(self.input("k_mem")?)), ("v", Some(self.input("v_mem")?))]);
        given.push(of_k, P::view(dk));
        given.push(of_v, P::view(dv));
        let to = named([("dk", Some(dk_mem)), ("dv", Some(dv_mem))]);
        self.place.call::<HdsConstructBackward>(&options, given, to)
    }

    fn recurrence_backward(
        &self,
        between: &Between<'a, P>,
        dr: &P::Owned,
        of_attention: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<OfRecurrence<P::Owned>> {
        let dh = self.sum(&[dr, of_attention], "dh")?;
        let mut of = OfRecurrence { dz: self.like_x()?, dgamma: self.like_x()? };
        let mut given = self.recurrence_inputs(between.z.view(), between.gamma.view());
        given.push("h", between.h.view());
        given.push("dh", P::view(&dh));
        given.extend_with("dlast_state", self.optional("dlast_state"));
        let mut to = named([("dz", Some(P::view_mut(&mut of.dz))), ("dgamma", Some(P::view_mut(&mut of.dgamma)))]);
        for [name, here] in RECURRENCE {
            let gradient = outputs.take(gradient_of::<MmrecBlock>(here)).map(P::briefly_mut);
            to.extend_with(gradient_of::<BlockRecurrence>(name), gradient);
        }
        self.place.call::<BlockRecurrenceBackward>(&self.problem.options.recurrence(), given, to)?;
        Ok(of)
    }

    /// The gradients of `k` and `z` through `gamma`; that of `z` is added to the given one.
    fn gamma_backward(
        &self,
        between: &Between<'a, P>,
        dgamma: P::Owned,
        dz: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<[P::Owned; 2]> {
        let dgamma = self.sum(&[&dgamma], "dgamma")?;
        let [mut dk, mut through] = [self.like_x()?, self.like_x()?];
        let mut given = self.gamma_inputs(between.z.view(), between.k.view())?;
        given.push("dgamma", P::view(&dgamma));
        let mut to = named([("dz", Some(P::view_mut(&mut through))), ("dcontext", Some(P::view_mut(&mut dk)))]);
        for [_, weights @ ..] in NETWORKS {
            for name in weights {
                to.push(gradient_of::<MdiGamma>(name), gradient::<P>(outputs, name)?);
            }
        }
        self.place.call::<MdiGammaBackward>(&Default::default(), given, to)?;
        let dz = self.sum(&[dz, &through], "")?;
        Ok([dk, dz])
    }

    /// The gradient of `xn`, from those of `q`, `k`, `v` and `z`.
    fn projections_backward(
        &self,
        xn: &P::Owned,
        gradients: [&P::Owned; 4],
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<P::Owned> {
        let mut terms = [self.like_x()?, self.like_x()?, self.like_x()?, self.like_x()?];
        let weights = [["wq", "bq"], ["wk", "bk"], ["wv", "bv"], ["wz", "bz"]];
        for ((weights, dy), term) in weights.into_iter().zip(gradients).zip(&mut terms) {
            self.linear_backward(P::view(xn), weights, P::view(dy), term, outputs)?;
        }
        let [q, k, v, z] = &terms;
        self.sum(&[q, k, v, z], "")
    }
}

//! Takes the weights of a model out of the tensors of a checkpoint.

use super::{EMBEDDINGS, Found, HEAD, Matrices, NORM, Part, failure, parts, squeezed};
use crate::mamba::block::{self, Block};
use crate::mamba::quantize::{self, OF_LAYER};
use crate::mamba::weights::Weight;
use crate::mamba::{Config, Layer, Mixer};
use crate::watch::Tally;
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::products::matrices::{Dense, Matrix};
use sidewinder_kernels::place::{Cpu, Place};
use sidewinder_kernels::tensor::{DType, Described, Owned};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Takes tensors out of a checkpoint and collects the problems with them.
pub(super) struct Taker<'c> {
    pub(super) tensors: &'c mut BTreeMap<String, Found>,
    pub(super) matrices: Matrices,
    pub(super) dtype: DType,
    pub(super) wrong: Vec<String>,
}

/// The head of a language model.
type Head = Option<Dense<Weight>>;

/// Upper limit for the problems that an error lists, because a crafted file can have any number of them.
const TOLD: usize = 1000;

impl Taker<'_> {
    /// The weights of the layers with these numbers, each a part of `tally`. Missing layers are reported as ranges,
    /// because a configuration may claim billions.
    pub(super) fn layers(
        &mut self,
        config: &Config,
        prefix: &str,
        numbers: BTreeSet<usize>,
        tally: &Tally,
    ) -> Result<Vec<Option<Layer<Weight>>>> {
        let mut layers = Vec::new();
        let mut next = 0;
        for number in numbers {
            self.nothing_of(prefix, next..number);
            next = number + 1;
            layers.push(self.layer(config, &format!("{prefix}{number}.")));
            tally.add(1)?;
        }
        self.nothing_of(prefix, next..config.layers);
        Ok(layers)
    }

    fn nothing_of(&mut self, prefix: &str, numbers: Range<usize>) {
        match numbers.len() {
            0 => {}
            1 => self.wrong.push(format!("no `{prefix}{}`", numbers.start)),
            _ => self.wrong.push(format!("no `{prefix}{}` to `{prefix}{}`", numbers.start, numbers.end - 1)),
        }
    }

    /// The weights of a layer; `None` if one is missing.
    fn layer(&mut self, config: &Config, prefix: &str) -> Option<Layer<Weight>> {
        // Every weight is taken before the first missing one ends the function, so that the error lists all problems.
        let mut found = Named::default();
        for part in parts(config.mixer.family()) {
            found.extend_with(part.name, self.part(config, part, &format!("{prefix}{}", part.file)));
        }
        let norm = self.take(&format!("{prefix}{NORM}"), &[config.width], self.dtype.wide(), false);
        let mut block = Block::new(&config.mixer, |name| found.find(name).cloned()).ok()?;
        for (_, dense) in block.matrices_mut() {
            *dense = quantize::with_bias(dense.w.clone(), dense.b.take());
        }
        if let Block::Mamba(weights) = &mut block {
            weights.norms = block::norms(config, self.dtype.wide());
        }
        let a = negative_exp(block.a_log());
        Some(Layer { norm: norm?, block, a })
    }

    /// A weight of a layer.
    fn part(&mut self, config: &Config, part: &Part, name: &str) -> Option<Matrix<Weight>> {
        let slot = config.mixer.slots().iter().find(|slot| slot.name == part.name).expect("a name of the block's");
        let dims = (part.dims)(config);
        if OF_LAYER.contains(&part.name) {
            return self.matrix(name, &dims, slot.optional);
        }
        let weight = self.take(name, &dims, slot.precision.dtype(self.dtype), slot.optional)?;
        Some(Matrix::Float(weight.reshape(&squeezed(&dims)).expect("the same elements")))
    }

    /// The embedding and the head. A checkpoint without a head has tied embeddings.
    pub(super) fn ends(&mut self, config: &Config, prefix: &str, backbone: bool) -> (Option<Weight>, Head) {
        if config.vocabulary == 0 {
            return (None, None);
        }
        let rows = [config.vocabulary, config.width];
        let names = EMBEDDINGS.map(|name| format!("{prefix}{name}"));
        let is_there = |name: &&String| self.tensors.contains_key(*name) || self.matrices.contains_key(*name);
        let name = names.iter().find(is_there).unwrap_or(&names[0]);
        let stored = self.matrices.get(name).map(|stored| stored.matrix.clone());
        let embedding = self.take(name, &rows, self.dtype, backbone);
        let own = self.matrix(HEAD, &rows, true);
        let head = own.or(stored).or_else(|| embedding.clone().map(Matrix::Float));
        (embedding, head.map(Dense::from))
    }

    /// A matrix as it is stored: floats, or quantized.
    fn matrix(&mut self, name: &str, dims: &[usize], optional: bool) -> Option<Matrix<Weight>> {
        match self.matrices.remove(name) {
            None => self.take(name, dims, self.dtype, optional).map(Matrix::Float),
            Some(stored) if stored.dims[..] == *dims => Some(stored.matrix),
            Some(stored) => {
                self.misshapen(name, &stored.dims, dims);
                None
            }
        }
    }

    fn misshapen(&mut self, name: &str, got: &[usize], expected: &[usize]) {
        let listed = |dims: &[usize]| dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let (got, expected) = (listed(got), listed(expected));
        self.wrong.push(format!("`{name}` of shape ({got}) where it should be ({expected})"));
    }

    /// A weight as floats; a quantized one is dequantized.
    pub(super) fn take(&mut self, name: &str, dims: &[usize], dtype: DType, optional: bool) -> Option<Weight> {
        let found = match self.matrices.remove(name) {
            Some(stored) if stored.dims[..] == *dims => Some(stored.floats()),
            Some(stored) => {
                self.misshapen(name, &stored.dims, dims);
                return None;
            }
            None => self.tensors.remove(name),
        };
        let problem = match found {
            None if optional => return None,
            None => format!("no `{name}`"),
            Some(Err(error)) => format!("`{name}` of {}", error.got),
            Some(Ok(weight)) if !weight.spec().dtype.is_float() => format!("`{name}` of {}", weight.spec().dtype),
            Some(Ok(weight)) if weight.spec().shape[..] == *dims => return Some(weight.cast(dtype)),
            Some(Ok(weight)) => {
                self.misshapen(name, &weight.spec().shape, dims);
                return None;
            }
        };
        self.wrong.push(problem);
        None
    }

    /// One error with all collected problems, if there are any.
    pub(super) fn done(mut self, name: &str, mixer: &Mixer) -> Result<()> {
        let kind = mixer.name();
        let others = self.tensors.keys().chain(self.matrices.keys());
        self.wrong.extend(others.map(|name| format!("`{name}`, which no {kind} model has")));
        if self.wrong.is_empty() {
            return Ok(());
        }
        if let Some(others) = self.wrong.len().checked_sub(TOLD).filter(|&others| others > 0) {
            self.wrong.truncate(TOLD);
            self.wrong.push(format!("and {others} more"));
        }
        let expected = format!("the tensors of a {kind} model of the sizes of its configuration");
        Err(failure(name, &expected, self.wrong.join("; ")))
    }
}

/// `-exp(A_log)`, the `A` of the scan.
fn negative_exp(a_log: &Weight) -> Weight {
    let mut a = Owned::any(a_log.spec());
    Cpu(&Exec::default()).map(Map::NegExp, &[a_log.view()], a.view_mut()).expect("tensors of one float type");
    a.into()
}

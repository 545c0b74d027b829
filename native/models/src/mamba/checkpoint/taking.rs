//! Takes the weights of a model out of the tensors of a checkpoint.

use super::{BLOCK, EMBEDDINGS, Found, HEAD, Matrices, NORM, failure, squeezed};
use crate::mamba::quantize::{self, OF_LAYER};
use crate::mamba::weights::Weight;
use crate::mamba::{Config, HEAD as OWN_HEAD, Layer};
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{Named, Op};
use sidewinder_kernels::ops::layers::mamba_block::MambaBlock;
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

/// Most problems that an error lists. A crafted file could have any number of them.
const TOLD: usize = 1000;

impl Taker<'_> {
    /// The weights of the layers with these numbers, up to the configuration's number of layers. Missing layers are
    /// reported as ranges, because a configuration may claim billions.
    pub(super) fn layers(
        &mut self,
        config: &Config,
        prefix: &str,
        numbers: BTreeSet<usize>,
    ) -> Vec<Option<Layer<Weight>>> {
        let mut layers = Vec::new();
        let mut next = 0;
        for number in numbers.into_iter().take_while(|&number| number < config.layers) {
            self.nothing_of(prefix, next..number);
            next = number + 1;
            layers.push(self.layer(config, &format!("{prefix}{number}.")));
        }
        self.nothing_of(prefix, next..config.layers);
        layers
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
        let mut block = Named::default();
        for part in &BLOCK {
            let slot = MambaBlock::INPUTS.iter().find(|slot| slot.name == part.name).expect("a name of the block's");
            let dtype = slot.precision.dtype(self.dtype);
            let name = format!("{prefix}{}", part.file);
            let dims = (part.dims)(config);
            if OF_LAYER.contains(&part.name) {
                let parts = self.matrix(part.name, &name, &dims, slot.optional);
                parts.into_iter().for_each(|(name, part)| block.push(name, part));
            } else if let Some(weight) = self.take(&name, &dims, dtype, slot.optional) {
                let dims = squeezed(&weight.spec().shape);
                block.push(part.name, weight.reshape(&dims).expect("the same elements"));
            }
        }
        let norm = self.take(&format!("{prefix}{NORM}"), &[config.width], self.dtype.wide(), false);
        let a = negative_exp(block.find("A_log")?);
        Some(Layer { norm: norm?, block: quantize::with_biases(block), a })
    }

    /// The embedding and the head; without a head of its own, the embedding is the head.
    pub(super) fn ends(&mut self, config: &Config, prefix: &str, backbone: bool) -> (Option<Weight>, Named<Weight>) {
        if config.vocabulary == 0 {
            return (None, Named::default());
        }
        let rows = [config.vocabulary, config.width];
        let names = EMBEDDINGS.map(|name| format!("{prefix}{name}"));
        let is_there = |name: &&String| self.tensors.contains_key(*name) || self.matrices.contains_key(*name);
        let name = names.iter().find(is_there).unwrap_or(&names[0]);
        let stored = self.matrices.get(name).cloned();
        let embedding = self.take(name, &rows, self.dtype, backbone);
        let own = self.matrix(OWN_HEAD, HEAD, &rows, true);
        let tied = || stored.map(|stored| stored.named(OWN_HEAD).collect());
        let head = if own.is_empty() { tied().unwrap_or_else(|| whole(OWN_HEAD, embedding.clone())) } else { own };
        (embedding, head.into_iter().collect())
    }

    /// A matrix, or the parts of a quantized one, by their names here.
    fn matrix(&mut self, own: &str, name: &str, dims: &[usize], optional: bool) -> Vec<(String, Weight)> {
        match self.matrices.remove(name) {
            None => whole(own, self.take(name, dims, self.dtype, optional)),
            Some(stored) if stored.dims[..] == *dims => stored.named(own).collect(),
            Some(stored) => {
                self.misshapen(name, &stored.dims, dims);
                Vec::new()
            }
        }
    }

    fn misshapen(&mut self, name: &str, got: &[usize], expected: &[usize]) {
        let listed = |dims: &[usize]| dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let (got, expected) = (listed(got), listed(expected));
        self.wrong.push(format!("`{name}` of shape ({got}) where it should be ({expected})"));
    }

    /// A weight as floats; a quantized one is converted back.
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
    pub(super) fn done(mut self, name: &str) -> Result<()> {
        let others = self.tensors.keys().chain(self.matrices.keys());
        self.wrong.extend(others.map(|name| format!("`{name}`, which no Mamba model has")));
        if self.wrong.is_empty() {
            return Ok(());
        }
        if let Some(others) = self.wrong.len().checked_sub(TOLD).filter(|&others| others > 0) {
            self.wrong.truncate(TOLD);
            self.wrong.push(format!("and {others} more"));
        }
        Err(failure(name, "the tensors of a Mamba model of the sizes of its configuration", self.wrong.join("; ")))
    }
}

/// A weight with its name here, if it is present.
fn whole(name: &str, weight: Option<Weight>) -> Vec<(String, Weight)> {
    weight.map(|weight| (name.to_string(), weight)).into_iter().collect()
}

/// `-exp(A_log)`, which steps need.
fn negative_exp(a_log: &Weight) -> Weight {
    let mut a = Owned::poisoned(a_log.spec());
    Cpu(&Exec::default()).map(Map::NegExp, &[a_log.view()], a.view_mut()).expect("tensors of one float type");
    a.into()
}

//! The declaration of an op as data, for code that is generic over ops.

use super::{Name, Named, Op, Output, Precision, Slot};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Spec};
use std::borrow::Cow;

/// The constants of an [`Op`].
#[derive(Debug)]
pub struct About {
    /// [`Op::NAME`]
    pub name: &'static str,
    /// [`Op::ABOUT`]
    pub about: &'static str,
    /// [`Op::INPUTS`]
    pub inputs: &'static [Slot],
    /// [`Op::OUTPUTS`]
    pub outputs: &'static [Output],
    /// [`Op::HINT`]
    pub hint: &'static str,
    /// [`Op::STORAGE`]
    pub storage: &'static [DType],
    /// [`Op::COTANGENTS`]
    pub cotangents: &'static [&'static str],
    /// [`Op::BACKWARD_OF`]
    pub backward_of: Option<&'static str>,
    /// [`Op::IN_PLACE`]
    pub in_place: &'static [&'static str],
}

/// The constants of `O`.
pub const fn about<O: Op>() -> &'static About {
    const {
        &About {
            name: O::NAME,
            about: O::ABOUT,
            inputs: O::INPUTS,
            outputs: O::OUTPUTS,
            hint: O::HINT,
            storage: O::STORAGE,
            cotangents: O::COTANGENTS,
            backward_of: O::BACKWARD_OF,
            in_place: O::IN_PLACE,
        }
    }
}

impl About {
    /// A name with the lifetime of the declaration where the op declares it; other names are copied.
    pub fn name_of(&self, name: &str) -> Name {
        let known = self.inputs.iter().find(|slot| slot.name == name);
        known.map_or_else(|| Cow::Owned(name.to_string()), |slot| Cow::Borrowed(slot.name))
    }

    /// The input that determines the storage type, and that type: f32 if no such input is given.
    pub fn storage(&self, inputs: &Named<Spec>) -> (&'static str, DType) {
        let of_storage = self.inputs.iter().filter(|slot| slot.precision == Precision::Storage);
        let mut given = of_storage.filter_map(|slot| Some((slot.name, inputs.find(slot.name)?.dtype)));
        given.next().unwrap_or((self.inputs[0].name, DType::F32))
    }

    /// The specs of a call's inputs, [`held`](About::held) ones among them.
    pub fn specs_of_call<I: Described, T: Described>(&self, inputs: &Named<I>, outputs: &Named<T>) -> Named<Spec> {
        let mut all = super::specs(inputs);
        self.held(inputs, outputs).for_each(|(name, tensor)| all.push(name, tensor.spec()));
        all
    }

    /// The in-place tensors that are passed as outputs alone, and so are inputs too.
    pub fn held<'t, I, T>(
        &self,
        inputs: &'t Named<I>,
        outputs: &'t Named<T>,
    ) -> impl Iterator<Item = (&'static str, &'t T)> {
        let alone = move |name: &&&'static str| inputs.find(name).is_none();
        self.in_place.iter().filter(alone).filter_map(|&name| Some((name, outputs.find(name)?)))
    }

    /// The given inputs that must be copied to their outputs before these are changed in place.
    pub(super) fn copied<'t, T>(&self, inputs: &'t Named<T>) -> impl Iterator<Item = (&'static str, &'t T)> {
        self.in_place.iter().filter_map(|&name| Some((name, inputs.find(name)?)))
    }

    /// Checks what holds for every op: names are known, required inputs are given, all have one storage type.
    pub(super) fn check(&self, inputs: &Named<Spec>) -> Result<()> {
        self.known_names(inputs).and_then(|()| self.one_storage_type(inputs))
    }

    fn known_names(&self, inputs: &Named<Spec>) -> Result<()> {
        for slot in self.inputs.iter().filter(|slot| !slot.optional) {
            inputs.get(slot.name).map_err(|e| e.hint(format_args!("{} has shape {}", slot.name, slot.shape)))?;
        }
        let names = || self.inputs.iter().map(|slot| slot.name).collect::<Vec<_>>().join(", ");
        match inputs.iter().find(|(name, _)| self.inputs.iter().all(|slot| slot.name != **name)) {
            Some((name, _)) => {
                Err(Error::new(Kind::Argument, name.as_ref()).expected(format_args!("one of {}", names())).got(name))
            }
            None => inputs.distinct(),
        }
    }

    fn one_storage_type(&self, inputs: &Named<Spec>) -> Result<()> {
        let (first, storage) = self.storage(inputs);
        if !self.storage.contains(&storage) {
            let names: Vec<_> = self.storage.iter().map(|dtype| dtype.name()).collect();
            let (last, others) = names.split_last().expect("a type");
            let expected =
                if others.is_empty() { last.to_string() } else { format!("{} or {last}", others.join(", ")) };
            return Err(Error::new(Kind::DType, first).expected(expected).got(storage));
        }
        for slot in self.inputs {
            let Some(spec) = inputs.find(slot.name) else { continue };
            let expected = slot.precision.dtype(storage);
            if spec.dtype != expected {
                let error = Error::new(Kind::DType, slot.name).expected(expected).got(spec.dtype);
                return Err(match slot.precision {
                    Precision::Exactly(_) => error,
                    _ => error.hint(format_args!("`{first}` is {storage}; convert one of them")),
                });
            }
        }
        Ok(())
    }
}

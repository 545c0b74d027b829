//! Tensors by name.

use crate::error::{Error, Kind, Result};
use std::borrow::Cow;

/// A list of tensors by name. Calls have few of them, so lookups are linear.
#[derive(Clone, Debug)]
pub struct Named<T>(Vec<(Name, T)>);

/// A tensor's name; names that ops declare are never copied.
pub type Name = Cow<'static, str>;

impl<T> Default for Named<T> {
    fn default() -> Self {
        Named(Vec::new())
    }
}

impl<T> Named<T> {
    /// Adds a tensor.
    pub fn push(&mut self, name: impl Into<Name>, tensor: T) {
        self.0.push((name.into(), tensor));
    }

    /// Adds a tensor if it is given.
    pub fn extend_with(&mut self, name: impl Into<Name>, tensor: Option<T>) {
        self.0.extend(tensor.map(|tensor| (name.into(), tensor)));
    }

    /// The tensor of that name, if given.
    pub fn find(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, t)| t)
    }

    /// The tensor of that name, or an error that says it is missing.
    pub fn get(&self, name: &str) -> Result<&T> {
        self.find(name).ok_or_else(|| Error::new(Kind::Argument, name).expected("a tensor").got("none"))
    }

    /// Fails where a name is given twice.
    pub(super) fn distinct(&self) -> Result<()> {
        let twice = (1..self.0.len()).find(|&at| self.0[..at].iter().any(|(name, _)| *name == self.0[at].0));
        match twice {
            Some(at) => Err(Error::new(Kind::Argument, &*self.0[at].0).expected("one tensor").got("two of this name")),
            None => Ok(()),
        }
    }

    /// The tensor of that name to change, or an error that says it is missing.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut T> {
        self.get(name)?;
        Ok(self.0.iter_mut().find(|(n, _)| n == name).map(|(_, t)| t).expect("it was just there"))
    }

    /// Removes and returns the tensor of that name, or an error that says it is missing.
    pub fn expect(&mut self, name: &str) -> Result<T> {
        self.get(name)?;
        Ok(self.take(name).expect("it was just there"))
    }

    /// Removes and returns the tensor of that name, if given.
    pub fn take(&mut self, name: &str) -> Option<T> {
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All tensors with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &T)> {
        self.0.iter().map(|(n, t)| (n, t))
    }

    /// All tensors with their names, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&Name, &mut T)> {
        self.0.iter_mut().map(|(n, t)| (&*n, t))
    }

    /// The result of `f` for each tensor, under its name.
    pub fn map<'a, U>(&'a self, f: impl Fn(&'a T) -> U) -> Named<U> {
        Named(self.0.iter().map(|(n, t)| (n.clone(), f(t))).collect())
    }

    /// Like [`Named::map`]; stops at the first error.
    pub fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U>) -> Result<Named<U>> {
        self.0.iter().map(|(n, t)| Ok((n.clone(), f(t)?))).collect()
    }

    /// References to all tensors.
    pub fn as_ref(&self) -> Named<&T> {
        self.map(|tensor| tensor)
    }
}

impl<T: Clone> Named<&T> {
    /// Copies of tensors that are referred to.
    pub fn cloned(&self) -> Named<T> {
        self.map(|&tensor| tensor.clone())
    }
}

impl<N: Into<Name>, T> FromIterator<(N, T)> for Named<T> {
    fn from_iter<I: IntoIterator<Item = (N, T)>>(items: I) -> Self {
        Named(items.into_iter().map(|(n, t)| (n.into(), t)).collect())
    }
}

impl<T> IntoIterator for Named<T> {
    type Item = (Name, T);
    type IntoIter = std::vec::IntoIter<(Name, T)>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Named tensors, without those that are absent.
pub fn named<T, const N: usize>(tensors: [(&'static str, Option<T>); N]) -> Named<T> {
    let mut all = Named(Vec::with_capacity(N));
    tensors.into_iter().for_each(|(name, tensor)| all.extend_with(name, tensor));
    all
}

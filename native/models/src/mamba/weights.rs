//! The weights of a model, in mapped files or in owned memory.

use memmap2::Mmap;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use std::ops::Range;
use std::sync::Arc;

/// An immutable tensor. Clones share its memory.
#[derive(Clone)]
pub struct Weight {
    spec: Spec,
    memory: Memory,
}

#[derive(Clone)]
enum Memory {
    Mapped(Arc<Mmap>, Range<usize>),
    Own(Arc<Owned>),
}

impl Weight {
    /// A range of a mapped file; copied if it is not aligned for the element type.
    pub fn mapped(spec: Spec, file: &Arc<Mmap>, bytes: Range<usize>) -> Result<Weight> {
        let part = file.get(bytes.clone()).ok_or_else(|| {
            Error::new(Kind::Size, "data").expected("bytes within the file").got(format_args!("{bytes:?}"))
        })?;
        if View::new(spec, part).is_ok() {
            return Ok(Weight { spec, memory: Memory::Mapped(file.clone(), bytes) });
        }
        Weight::copied(spec, part)
    }

    /// A copy of these bytes.
    pub fn copied(spec: Spec, bytes: &[u8]) -> Result<Weight> {
        if bytes.len() != spec.bytes() {
            let expected = format_args!("{} bytes for {spec}", spec.bytes()).to_string();
            return Err(Error::new(Kind::Size, "data").expected(expected).got(bytes.len()));
        }
        let mut own = Owned::try_any(spec)?;
        own.view_mut().bytes().copy_from_slice(bytes);
        Ok(own.into())
    }

    /// The tensor, for reading.
    pub fn view(&self) -> View<'_> {
        match &self.memory {
            Memory::Mapped(file, bytes) => View::new(self.spec, &file[bytes.clone()]).expect("proven when it was made"),
            Memory::Own(own) => own.view().reshape(&self.spec.shape).expect("proven when it was reshaped"),
        }
    }

    /// The elements under another shape of equal size, in the same memory.
    pub fn reshape(&self, dims: &[usize]) -> Result<Weight> {
        let spec = self.view().reshape(dims)?.spec();
        Ok(Weight { spec, memory: self.memory.clone() })
    }

    /// The values rounded to another type; a clone if the type is equal.
    pub fn cast(&self, dtype: DType) -> Weight {
        if self.spec.dtype == dtype { self.clone() } else { self.view().cast(dtype).into() }
    }
}

impl From<Owned> for Weight {
    fn from(own: Owned) -> Weight {
        Weight { spec: own.spec(), memory: Memory::Own(Arc::new(own)) }
    }
}

impl Described for Weight {
    fn spec(&self) -> Spec {
        self.spec
    }
}

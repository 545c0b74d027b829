//! Backends for ops that are made of other ops. Such an op is written once, over [`Place`].

pub mod copy_rows;
mod steps;

use self::copy_rows::CopyRows;
use crate::base::elementwise::Map;
use crate::cpu::{Exec, Level, elementwise, matrix, pool};
use crate::cuda::{self, Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Name, Named, Op, Slot};
use crate::tensor::{DType, Described, Owned, Spec, View, ViewMut};
use ndarray::ArrayD;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

pub use steps::{Steps, gradient};

/// A backend: where tensors are stored and ops run.
pub trait Place {
    /// An owned temporary tensor.
    type Owned: Send + Sync;
    /// A tensor that is read.
    type View<'a>: Clone + Described + Send + Sync;
    /// A tensor that is written.
    type ViewMut<'a>: Described + Send;

    /// Allocates a tensor; its contents are undefined.
    fn empty(&self, spec: Spec) -> Result<Self::Owned>;
    /// Allocates a tensor of zeros.
    fn zeros(&self, spec: Spec) -> Result<Self::Owned>;
    /// Copies a tensor from the host.
    fn bring(&self, from: View) -> Result<Self::Owned>;
    /// Copies a tensor to a host tensor of equal size, after waiting for all queued work.
    fn fetch(&self, from: &Self::View<'_>, to: ViewMut) -> Result<()>;
    /// Waits for all queued work.
    fn wait(&self) -> Result<()>;
    /// A view of a temporary tensor.
    fn view<'a>(of: &'a Self::Owned) -> Self::View<'a>;
    /// A writable view of a temporary tensor.
    fn view_mut<'a>(of: &'a mut Self::Owned) -> Self::ViewMut<'a>;
    /// A view with a shorter lifetime, so that it can be passed along with views of that lifetime.
    fn briefly<'s, 'a: 's>(view: &Self::View<'a>) -> Self::View<'s>;
    /// A writable view with a shorter lifetime.
    fn briefly_mut<'s, 'a: 's>(view: Self::ViewMut<'a>) -> Self::ViewMut<'s>;
    /// A range of the first axis.
    fn rows<'s, 'a: 's>(of: &Self::View<'a>, range: Range<usize>) -> Result<Self::View<'s>>;
    /// Splits the first axis: the first `at` rows, and the rest.
    fn split_rows<'s, 'a: 's>(of: Self::ViewMut<'a>, at: usize) -> Result<(Self::ViewMut<'s>, Self::ViewMut<'s>)>;
    /// Borrows a writable view.
    fn reborrow<'s, 'a: 's>(of: &'s mut Self::ViewMut<'a>) -> Self::ViewMut<'s>;
    /// A view of the current contents of a writable one.
    fn read<'s, 'a: 's>(of: &'s Self::ViewMut<'a>) -> Self::View<'s>;
    /// The elements in the same order under another shape of equal size.
    fn reshape<'s, 'a: 's>(of: &Self::View<'a>, dims: &[usize]) -> Result<Self::View<'s>>;
    /// Like [`Place::reshape`], for a writable view.
    fn reshape_mut<'s, 'a: 's>(of: Self::ViewMut<'a>, dims: &[usize]) -> Result<Self::ViewMut<'s>>;

    /// Checks an op and runs it.
    fn call<'s, O: Op>(
        &self,
        options: &O::Options,
        inputs: Named<Self::View<'s>>,
        outputs: Named<Self::ViewMut<'s>>,
    ) -> Result<()>;
    /// Does `work` for each item; its ops must not depend on other items. On the CPU each item gets a thread.
    fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(&Self, T) -> Result<()> + Sync) -> Result<()>;
    /// Does work that calls ops for `rows` rows. With few rows the calls are short, so that the CPU's threads stay
    /// awake between them.
    fn of_rows<T>(&self, rows: usize, work: impl FnOnce() -> Result<T>) -> Result<T>;
    /// A temporary tensor that `make` computes from another one on a CUDA device; `None` elsewhere.
    fn made_on_device(
        &self,
        spec: Spec,
        from: &Self::View<'_>,
        make: impl FnOnce(&Buffer, &Buffer, &Lane) -> Result<()>,
    ) -> Result<Option<Self::Owned>>;
    /// Computes an elementwise operation on tensors of equal type and shape.
    fn map(&self, map: Map, inputs: &[Self::View<'_>], to: Self::ViewMut<'_>) -> Result<()>;
    /// Copies the rows of a table with these indices, which must be valid.
    fn gather(&self, table: &Self::View<'_>, rows: &[u32], to: Self::ViewMut<'_>) -> Result<()>;
    /// Copies rows between tensors with heads; the copy must have been made for these tensors.
    fn copy_rows(&self, copy: &CopyRows, from: &Self::View<'_>, to: &mut Self::ViewMut<'_>) -> Result<()>;
}

/// The CPU.
pub struct Cpu<'e>(pub &'e Exec);

impl Place for Cpu<'_> {
    type Owned = Owned;
    type View<'a> = View<'a>;
    type ViewMut<'a> = ViewMut<'a>;

    fn empty(&self, spec: Spec) -> Result<Owned> {
        Owned::try_any(spec)
    }
    fn zeros(&self, spec: Spec) -> Result<Owned> {
        Owned::try_zeros(spec)
    }
    fn bring(&self, from: View) -> Result<Owned> {
        Ok(from.cast(from.spec().dtype))
    }
    fn fetch(&self, from: &View, to: ViewMut) -> Result<()> {
        to.bytes().copy_from_slice(from.bytes());
        Ok(())
    }
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    fn view<'a>(of: &'a Owned) -> View<'a> {
        of.view()
    }
    fn view_mut<'a>(of: &'a mut Owned) -> ViewMut<'a> {
        of.view_mut()
    }
    fn briefly<'s, 'a: 's>(view: &View<'a>) -> View<'s> {
        *view
    }
    fn briefly_mut<'s, 'a: 's>(view: ViewMut<'a>) -> ViewMut<'s> {
        view
    }
    fn rows<'s, 'a: 's>(of: &View<'a>, range: Range<usize>) -> Result<View<'s>> {
        of.rows(range)
    }
    fn split_rows<'s, 'a: 's>(of: ViewMut<'a>, at: usize) -> Result<(ViewMut<'s>, ViewMut<'s>)> {
        of.split_rows(at)
    }
    fn reborrow<'s, 'a: 's>(of: &'s mut ViewMut<'a>) -> ViewMut<'s> {
        of.reborrow()
    }
    fn read<'s, 'a: 's>(of: &'s ViewMut<'a>) -> View<'s> {
        of.view()
    }
    fn reshape<'s, 'a: 's>(of: &View<'a>, dims: &[usize]) -> Result<View<'s>> {
        of.reshape(dims)
    }
    fn reshape_mut<'s, 'a: 's>(of: ViewMut<'a>, dims: &[usize]) -> Result<ViewMut<'s>> {
        of.reshape(dims)
    }

    fn call<'s, O: Op>(
        &self,
        options: &O::Options,
        inputs: Named<View<'s>>,
        outputs: Named<ViewMut<'s>>,
    ) -> Result<()> {
        op::run_cpu::<O>(options, &inputs, outputs, self.0)
    }
    fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(&Self, T) -> Result<()> + Sync) -> Result<()> {
        if self.0.threads == 1 || items.len() == 1 {
            return items.into_iter().try_for_each(|item| work(self, item));
        }
        let alone = Cpu(self.0.level.alone());
        let results: Vec<_> = items.into_iter().map(|item| Mutex::new((Some(item), Ok(())))).collect();
        pool::for_each(self.0.threads, results.len(), |i| {
            let mut result = results[i].lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(item) = result.0.take() {
                result.1 = work(&alone, item);
            }
        })?;
        results.into_iter().try_for_each(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner).1)
    }
    fn of_rows<T>(&self, rows: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if rows < matrix::SEVERAL { pool::awake(self.0.threads, work)? } else { work() }
    }
    fn made_on_device(
        &self,
        _: Spec,
        _: &View,
        _: impl FnOnce(&Buffer, &Buffer, &Lane) -> Result<()>,
    ) -> Result<Option<Owned>> {
        Ok(None)
    }
    fn map(&self, map: Map, inputs: &[View], to: ViewMut) -> Result<()> {
        elementwise::map(map, inputs, to, self.0)
    }
    fn gather(&self, table: &View, rows: &[u32], to: ViewMut) -> Result<()> {
        let bytes = table.bytes().len() / table.spec().shape[0].max(1);
        for (row, to) in rows.iter().zip(to.bytes().chunks_exact_mut(bytes.max(1))) {
            to.copy_from_slice(&table.bytes()[*row as usize * bytes..][..bytes]);
        }
        Ok(())
    }
    fn copy_rows(&self, copy: &CopyRows, from: &View, to: &mut ViewMut) -> Result<()> {
        copy.cpu(from, to);
        Ok(())
    }
}

/// A lane of a CUDA device. Views and writable views are buffers that share memory.
pub struct Cuda<'l>(pub &'l Lane);

impl Place for Cuda<'_> {
    type Owned = Buffer;
    type View<'a> = Buffer;
    type ViewMut<'a> = Buffer;

    fn empty(&self, spec: Spec) -> Result<Buffer> {
        self.0.temporary(spec)
    }
    fn zeros(&self, spec: Spec) -> Result<Buffer> {
        let zeros = self.0.temporary(spec)?;
        self.0.fill(&zeros, 0)?;
        Ok(zeros)
    }
    fn bring(&self, from: View) -> Result<Buffer> {
        let buffer = self.0.temporary(from.spec())?;
        self.0.upload(from.bytes(), &buffer)?;
        Ok(buffer)
    }
    fn fetch(&self, from: &Buffer, to: ViewMut) -> Result<()> {
        self.0.download(from, to.bytes())
    }
    fn wait(&self) -> Result<()> {
        self.0.synchronize()
    }
    fn view(of: &Buffer) -> Buffer {
        of.clone()
    }
    fn view_mut(of: &mut Buffer) -> Buffer {
        of.clone()
    }
    fn briefly<'s, 'a: 's>(view: &Buffer) -> Buffer {
        view.clone()
    }
    fn briefly_mut<'s, 'a: 's>(view: Buffer) -> Buffer {
        view
    }
    fn rows<'s, 'a: 's>(of: &Buffer, range: Range<usize>) -> Result<Buffer> {
        of.rows(range)
    }
    fn split_rows<'s, 'a: 's>(of: Buffer, at: usize) -> Result<(Buffer, Buffer)> {
        let all = of.spec().shape.first().copied().unwrap_or(0);
        Ok((of.rows(0..at)?, of.rows(at..all)?))
    }
    fn reborrow<'s, 'a: 's>(of: &'s mut Buffer) -> Buffer {
        of.clone()
    }
    fn read<'s, 'a: 's>(of: &'s Buffer) -> Buffer {
        of.clone()
    }
    fn reshape<'s, 'a: 's>(of: &Buffer, dims: &[usize]) -> Result<Buffer> {
        of.reshape(dims)
    }
    fn reshape_mut<'s, 'a: 's>(of: Buffer, dims: &[usize]) -> Result<Buffer> {
        of.reshape(dims)
    }

    fn call<O: Op>(&self, options: &O::Options, inputs: Named<Buffer>, outputs: Named<Buffer>) -> Result<()> {
        op::run_cuda::<O>(options, &inputs.as_ref(), &outputs.as_ref(), self.0)
    }
    fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(&Self, T) -> Result<()> + Sync) -> Result<()> {
        items.into_iter().try_for_each(|item| work(self, item))
    }
    fn of_rows<T>(&self, _rows: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work()
    }
    fn made_on_device(
        &self,
        spec: Spec,
        from: &Buffer,
        make: impl FnOnce(&Buffer, &Buffer, &Lane) -> Result<()>,
    ) -> Result<Option<Buffer>> {
        let to = self.0.temporary(spec)?;
        make(from, &to, self.0)?;
        Ok(Some(to))
    }
    fn map(&self, map: Map, inputs: &[Buffer], to: Buffer) -> Result<()> {
        cuda::map(map, &inputs.iter().collect::<Vec<_>>(), &to, self.0)
    }
    fn gather(&self, table: &Buffer, rows: &[u32], to: Buffer) -> Result<()> {
        cuda::gather(table, rows, &to, self.0)
    }
    fn copy_rows(&self, copy: &CopyRows, from: &Buffer, to: &mut Buffer) -> Result<()> {
        copy.cuda(from, to, self.0)
    }
}

/// Tensors for these slots with `storage` as the storage type.
pub fn typed(slots: &[Slot], storage: DType, inputs: &Named<ArrayD<f64>>) -> Result<Named<Owned>> {
    let typed = |(name, array): (&Name, &ArrayD<f64>)| {
        let mut values = array.iter().copied();
        let slot = slots.iter().find(|slot| slot.name == *name);
        let spec = Spec::new(slot.map_or(storage, |slot| slot.precision.dtype(storage)), array.shape())?;
        Ok((name.clone(), Owned::from_fn(spec, |_| values.next().unwrap_or(f64::NAN))))
    };
    inputs.iter().map(typed).collect()
}

/// Steps of an op, from its inputs to its outputs.
pub type OnReferences<'r> = dyn Fn(&Cpu, &Named<View>, Named<ViewMut>) -> Result<()> + 'r;

/// Runs steps by the references of their ops with `storage` as the storage type. The inputs are those of `slots`; those
/// in `in_place` are copied to the outputs first.
pub fn through_references(
    slots: &[Slot],
    storage: DType,
    in_place: &[&str],
    inputs: &Named<ArrayD<f64>>,
    outputs: &Named<Spec>,
    run: &OnReferences,
) -> Result<Named<ArrayD<f64>>> {
    let inputs = typed(slots, storage, inputs)?;
    let precise = |spec: &Spec| Spec { dtype: if spec.dtype.is_float() { storage } else { spec.dtype }, ..*spec };
    let mut results = outputs.map(|spec| Owned::poisoned(precise(spec)));
    for &name in in_place {
        if let (Some(from), Ok(to)) = (inputs.find(name), results.get_mut(name)) {
            to.clone_from(from);
        }
    }
    let views = results.iter_mut().map(|(name, result)| (name.clone(), result.view_mut())).collect();
    run(&Cpu(&Exec { level: Level::Reference, threads: 1 }), &inputs.map(Owned::view), views)?;
    Ok(results.map(|result| result.view().to_f64()))
}

/// The implementations of an op, or of its gradient, as the function `$run` of its module `steps`. The reference runs
/// the steps with the storage type `$storage`, on the problem that the method `$in_storage` gives.
#[doc(hidden)]
#[macro_export]
macro_rules! by_steps {
    ($run:ident, $storage:ident, $in_storage:ident, $slots:expr, $in_place:expr
     => $cpu:ident $reference:ident $cuda:ident) => {
        $crate::runs! {
            $cpu(problem, inputs, outputs, exec) { steps::$run(&$crate::place::Cpu(exec), problem, inputs, outputs) }
            $reference(problem, inputs, outputs) {
                let (problem, storage) = (problem.$in_storage(), $crate::tensor::DType::$storage);
                $crate::place::through_references($slots, storage, $in_place, inputs, outputs, &|place, inputs, outputs| {
                    steps::$run(place, &problem, inputs, outputs)
                })
            }
            $cuda(problem, inputs, outputs, lane) {
                steps::$run(&$crate::place::Cuda(lane), problem, &inputs.cloned(), outputs.cloned())
            }
        }
    };
}

/// Implements an [`Op`] by the function `forward` of its module `steps` on every backend. The reference runs it in f64,
/// on the problem that the method `in_f64` of `Problem` gives. Where roundings define the results, it runs in another
/// type, for which another method gives the problem.
#[macro_export]
macro_rules! forward_by_steps {
    () => {
        $crate::forward_by_steps!(F64, in_f64);
    };
    ($storage:ident, $in_storage:ident) => {
        $crate::by_steps!(forward, $storage, $in_storage, Self::INPUTS, Self::IN_PLACE => cpu reference cuda);
    };
}

/// Like `forward_by_steps`, for the gradient of an op.
#[macro_export]
macro_rules! backward_by_steps {
    () => {
        $crate::by_steps!(
            backward, F64, in_f64, Self::GIVEN, &[] => cpu_backward reference_backward cuda_backward
        );
    };
}

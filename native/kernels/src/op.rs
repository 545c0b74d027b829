//! What every op has in common: named tensors in, checked options, named tensors out.
//!
//! An op is a type that implements [`Op`]. The NIF, the golden tests and the timing example are
//! written once over the trait, so a new op is one folder and one line in each list.

use crate::cpu;
use crate::cuda;
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Shape, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::marker::PhantomData;

/// How an input's element type follows from the one that the caller chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The storage type itself.
    Storage,
    /// The type of the arithmetic: f32, or f64 for f64 storage.
    Wide,
    /// Bytes, where any number but 0 is true. It has no gradient.
    Mask,
    /// This type, whatever the storage type is. It has no gradient.
    Exactly(DType),
}

impl Precision {
    /// Its name in other languages.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Storage => "storage",
            Precision::Wide => "wide",
            Precision::Mask => "mask",
            Precision::Exactly(dtype) => dtype.name(),
        }
    }

    /// The element type that a tensor of this precision has beside `storage`.
    pub fn dtype(self, storage: DType) -> DType {
        match self {
            Precision::Storage => storage,
            Precision::Wide => storage.wide(),
            Precision::Mask => DType::U8,
            Precision::Exactly(dtype) => dtype,
        }
    }

    /// Whether inputs of it have gradients.
    pub fn is_differentiable(self) -> bool {
        matches!(self, Precision::Storage | Precision::Wide)
    }
}

/// One input of an op, as its documentation and its checks see it.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The name in files and maps.
    pub name: &'static str,
    /// Its allowed shapes in words, such as `(B, L, D)`.
    pub shape: &'static str,
    /// How its element type relates to the storage type.
    pub precision: Precision,
    /// Whether it may be absent.
    pub optional: bool,
}

impl Slot {
    /// A required input of the storage type.
    pub const fn new(name: &'static str, shape: &'static str) -> Slot {
        Slot { name, shape, precision: Precision::Storage, optional: false }
    }

    /// This slot, stored in the type of the arithmetic.
    pub const fn wide(mut self) -> Slot {
        self.precision = Precision::Wide;
        self
    }

    /// This slot as a mask, stored as bytes that mean yes or no.
    pub const fn mask(mut self) -> Slot {
        self.precision = Precision::Mask;
        self
    }

    /// This slot, stored as `dtype`.
    pub const fn exactly(mut self, dtype: DType) -> Slot {
        self.precision = Precision::Exactly(dtype);
        self
    }

    /// This slot, which may be absent.
    pub const fn optional(mut self) -> Slot {
        self.optional = true;
        self
    }
}

/// The slots of both lists, `N` together.
pub const fn slots<const N: usize>(first: &[Slot], more: &[Slot]) -> [Slot; N] {
    assert!(first.len() + more.len() == N, "as many as there are");
    let mut all = [first[0]; N];
    let mut i = 0;
    while i < N {
        all[i] = if i < first.len() { first[i] } else { more[i - first.len()] };
        i += 1;
    }
    all
}

/// One option of an op, for its documentation and for the command line.
#[derive(Clone, Copy, Debug)]
pub struct OptionDoc {
    /// The name in maps; on the command line with dashes.
    pub name: &'static str,
    /// What values it takes: `flag`, `pair`, `integer`, `float` or `text`.
    pub takes: &'static str,
    /// What it does and its default, in a line.
    pub help: &'static str,
}

/// Tensors by name. They are few, so a lookup goes through the list.
#[derive(Clone, Debug)]
pub struct Named<T>(Vec<(Name, T)>);

/// A tensor's name; those that ops know are never copied.
pub type Name = Cow<'static, str>;

impl<T> Default for Named<T> {
    fn default() -> Self {
        Named(Vec::new())
    }
}

impl<T> Named<T> {
    /// Adds one.
    pub fn push(&mut self, name: impl Into<Name>, tensor: T) {
        self.0.push((name.into(), tensor));
    }

    /// Adds one, if there is one.
    pub fn extend_with(&mut self, name: impl Into<Name>, tensor: Option<T>) {
        self.0.extend(tensor.map(|tensor| (name.into(), tensor)));
    }

    /// The one of that name, if it is there.
    pub fn find(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, t)| t)
    }

    /// The one of that name, or an error that says it is missing.
    pub fn get(&self, name: &str) -> Result<&T> {
        self.find(name).ok_or_else(|| Error::new(Kind::Argument, name).expected("a tensor").got("none"))
    }

    /// The one of that name to change, or an error that says it is missing.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut T> {
        self.get(name)?;
        Ok(self.0.iter_mut().find(|(n, _)| n == name).map(|(_, t)| t).expect("it was just there"))
    }

    /// Removes and returns the one of that name, or says that it is missing.
    pub fn expect(&mut self, name: &str) -> Result<T> {
        self.get(name)?;
        Ok(self.take(name).expect("it was just there"))
    }

    /// Removes and returns the one of that name, if it is there.
    pub fn take(&mut self, name: &str) -> Option<T> {
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &T)> {
        self.0.iter().map(|(n, t)| (n, t))
    }

    /// All of them with their names, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&Name, &mut T)> {
        self.0.iter_mut().map(|(n, t)| (&*n, t))
    }

    /// The names, each with `f` of its value.
    pub fn map<'a, U>(&'a self, f: impl Fn(&'a T) -> U) -> Named<U> {
        Named(self.0.iter().map(|(n, t)| (n.clone(), f(t))).collect())
    }
}

impl<T> Named<T> {
    /// Like [`Named::map`], or the first error.
    pub fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U>) -> Result<Named<U>> {
        self.0.iter().map(|(n, t)| Ok((n.clone(), f(t)?))).collect()
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

/// Named tensors of which some may be absent.
pub fn named<T, const N: usize>(tensors: [(&'static str, Option<T>); N]) -> Named<T> {
    tensors.into_iter().filter_map(|(name, tensor)| Some((name, tensor?))).collect()
}

/// An operation: what it takes, what it gives, and how each backend computes it.
pub trait Op {
    /// Its name in every language.
    const NAME: &'static str;
    /// What it does, in a line.
    const ABOUT: &'static str;
    /// Its inputs. The first of the storage type sets that type.
    const INPUTS: &'static [Slot];
    /// The storage types that it takes.
    const STORAGE: &'static [DType] = &DType::FLOATS;
    /// Its options.
    const OPTIONS: &'static [OptionDoc];
    /// Cotangents of its outputs that files may carry beside its inputs.
    const COTANGENTS: &'static [&'static str];
    /// The op that this one is the gradient of. It takes inputs, outputs and cotangents of that op
    /// by their names, and gives for each of its inputs `x` that is there a gradient `dx`.
    const BACKWARD_OF: Option<&'static str> = None;
    /// Inputs that are changed in place. An output of the same name and spec holds the input's values when the
    /// computation begins, which reads them there. A caller that no longer needs the old values may pass the tensor as
    /// that output alone.
    const IN_PLACE: &'static [&'static str] = &[];

    /// The options, with their defaults; unknown keys are refused when they are decoded.
    type Options: DeserializeOwned + Default + Clone;
    /// The checked call: sizes, forms and options, everything but the data.
    type Problem;

    /// Proves that inputs and options fit each other.
    fn check(inputs: &Named<Spec>, options: &Self::Options) -> Result<Self::Problem>;

    /// How many products or updates of a state a checked call computes, where that is more than a few for each
    /// element that it reads or writes. It chooses the scheduler and the device: see [`Call::work`].
    fn work(_problem: &Self::Problem, _inputs: &Named<Spec>) -> u64 {
        0
    }

    /// The outputs of a checked call, in a fixed order.
    fn outputs(problem: &Self::Problem) -> Result<Named<Spec>>;

    /// Computes on the CPU. Writes every element of every output.
    fn cpu(problem: &Self::Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()>;

    /// Computes in f64, as plainly as the formula; may give more outputs than [`Op::outputs`].
    fn reference(problem: &Self::Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>>;

    /// Queues the computation on a lane of a CUDA device. Writes every element of every output.
    fn cuda(
        problem: &Self::Problem,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        lane: &cuda::Lane,
    ) -> Result<()>;
}

/// A name as the op knows it, without a copy; an unknown one is copied.
pub fn name<O: Op>(name: &str) -> Name {
    let known = O::INPUTS.iter().find(|slot| slot.name == name);
    known.map_or_else(|| Cow::Owned(name.to_string()), |slot| Cow::Borrowed(slot.name))
}

/// Checks a call of `O`: first what every op asks for (known names, required inputs, one storage
/// type), then the op's own rules.
pub fn check<O: Op>(inputs: &Named<Spec>, options: &O::Options) -> Result<O::Problem> {
    known_names::<O>(inputs)
        .and_then(|()| one_storage_type::<O>(inputs))
        .and_then(|()| O::check(inputs, options))
        .map_err(|error| error.in_op(O::NAME))
}

fn known_names<O: Op>(inputs: &Named<Spec>) -> Result<()> {
    for slot in O::INPUTS.iter().filter(|slot| !slot.optional) {
        inputs.get(slot.name).map_err(|e| e.hint(format_args!("{} has shape {}", slot.name, slot.shape)))?;
    }
    let names = || O::INPUTS.iter().map(|slot| slot.name).collect::<Vec<_>>().join(", ");
    match inputs.iter().find(|(name, _)| O::INPUTS.iter().all(|slot| slot.name != **name)) {
        Some((name, _)) => {
            Err(Error::new(Kind::Argument, name.as_ref()).expected(format_args!("one of {}", names())).got(name))
        }
        None => Ok(()),
    }
}

fn one_storage_type<O: Op>(inputs: &Named<Spec>) -> Result<()> {
    let (first, storage) = storage::<O>(inputs);
    if !O::STORAGE.contains(&storage) {
        let names: Vec<_> = O::STORAGE.iter().map(|dtype| dtype.name()).collect();
        let (last, others) = names.split_last().expect("a type");
        let expected = if others.is_empty() { last.to_string() } else { format!("{} or {last}", others.join(", ")) };
        return Err(Error::new(Kind::DType, first).expected(expected).got(storage));
    }
    for slot in O::INPUTS {
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

/// The input that sets the storage type, and that type: f32 where there is none.
pub fn storage<O: Op>(inputs: &Named<Spec>) -> (&'static str, DType) {
    let of_storage = O::INPUTS.iter().filter(|slot| slot.precision == Precision::Storage);
    let mut given = of_storage.filter_map(|slot| Some((slot.name, inputs.find(slot.name)?.dtype)));
    given.next().unwrap_or((O::INPUTS[0].name, DType::F32))
}

/// The error of a tensor whose shape is not the one that is `expected` in words.
pub fn wrong_shape(name: &str, expected: &str, got: &Spec) -> Error {
    Error::new(Kind::Shape, name)
        .expected(format_args!("shape {expected}"))
        .got(got.shape)
        .hint("Layout is channel-last: (batch, length, channels)")
}

/// Checks that the input of that name, if it is there, has these sizes.
pub fn same_shape(inputs: &Named<Spec>, name: &str, dims: &[usize]) -> Result<()> {
    match inputs.find(name) {
        Some(spec) if spec.shape[..] != *dims => Err(wrong_shape(name, &Shape::new(dims)?.to_string(), spec)),
        _ => Ok(()),
    }
}

/// The product of sizes, at most the largest number there is.
pub fn product(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
}

/// How many elements the inputs of these names have together.
pub fn elements(inputs: &Named<Spec>, names: &[&str]) -> usize {
    names.iter().filter_map(|name| inputs.find(name)).map(|spec| spec.shape.elements()).fold(0, usize::saturating_add)
}

/// The work of a gradient: it computes its op again and goes back through it.
pub fn work_of_gradient<O: Op>(of: &O::Problem, inputs: &Named<Spec>) -> u64 {
    O::work(of, inputs).saturating_mul(4)
}

/// Checks that an option's value is a positive number.
pub fn positive(name: &str, value: f64) -> Result<()> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(Error::new(Kind::Option, name).expected("a positive number").got(value)),
    }
}

/// An op whose gradient is an op too: [`Backward`] of it.
pub trait Differentiable: Op {
    /// The gradient's name.
    const BACKWARD: &'static str;
    /// What the gradient takes: inputs of the op, outputs of it, and cotangents, all by their names.
    const GIVEN: &'static [Slot];

    /// The gradients: for each input that is there and can have one, its spec under its name with a `d`
    /// before.
    fn gradients(inputs: &Named<Spec>) -> Named<Spec> {
        let wanted = Self::INPUTS.iter().filter(|slot| slot.precision.is_differentiable());
        wanted.filter_map(|slot| Some((format!("d{}", slot.name), *inputs.find(slot.name)?))).collect()
    }

    /// Computes the gradients on the CPU. Writes every element of every output.
    fn cpu_backward(
        call: &Gradient<Self::Problem>,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &cpu::Exec,
    ) -> Result<()>;

    /// Computes the gradients in f64, as plainly as the formula.
    fn reference_backward(call: &Gradient<Self::Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>>;

    /// Queues the gradients on a lane of a CUDA device. Writes every element of every output.
    fn cuda_backward(
        call: &Gradient<Self::Problem>,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        lane: &cuda::Lane,
    ) -> Result<()>;
}

/// A checked call of a gradient.
#[derive(Clone, Debug)]
pub struct Gradient<P> {
    /// The call that it is the gradient of.
    pub of: P,
    /// The gradients, by their names.
    pub outputs: Named<Spec>,
}

/// What a backward op gives: for each pair of an input and its gradient's name, the gradient with
/// the spec of the input, if that is there.
pub fn gradients(inputs: &Named<Spec>, names: &[(&str, &'static str)]) -> Named<Spec> {
    names.iter().filter_map(|&(input, gradient)| Some((gradient, *inputs.find(input)?))).collect()
}

/// The gradient of an op.
pub struct Backward<O>(PhantomData<O>);

impl<O: Differentiable> Op for Backward<O> {
    const NAME: &'static str = O::BACKWARD;
    const ABOUT: &'static str = "The gradient of an op";
    const INPUTS: &'static [Slot] = O::GIVEN;
    const OPTIONS: &'static [OptionDoc] = O::OPTIONS;
    const COTANGENTS: &'static [&'static str] = &[];
    const BACKWARD_OF: Option<&'static str> = Some(O::NAME);

    /// The options of the op; those that choose outputs have no effect here.
    type Options = O::Options;
    type Problem = Gradient<O::Problem>;

    fn check(inputs: &Named<Spec>, options: &O::Options) -> Result<Gradient<O::Problem>> {
        let of = O::check(inputs, options)?;
        for (name, spec) in O::outputs(&of)?.iter() {
            same_shape(inputs, name, &spec.shape)?;
            same_shape(inputs, &format!("d{name}"), &spec.shape)?;
        }
        Ok(Gradient { of, outputs: O::gradients(inputs) })
    }

    fn work(call: &Gradient<O::Problem>, inputs: &Named<Spec>) -> u64 {
        work_of_gradient::<O>(&call.of, inputs)
    }

    fn outputs(call: &Gradient<O::Problem>) -> Result<Named<Spec>> {
        Ok(call.outputs.clone())
    }

    fn cpu(call: &Gradient<O::Problem>, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        O::cpu_backward(call, inputs, outputs, exec)
    }

    fn reference(call: &Gradient<O::Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        O::reference_backward(call, inputs)
    }

    fn cuda(
        call: &Gradient<O::Problem>,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        lane: &cuda::Lane,
    ) -> Result<()> {
        O::cuda_backward(call, inputs, outputs, lane)
    }
}

/// The specs of some described tensors.
pub fn specs<T: Described>(tensors: &Named<T>) -> Named<Spec> {
    tensors.map(Described::spec)
}

/// Below this much work a call is too short to be worth waking other threads: `Sidewinder.Kernel` knows it too.
pub const QUICK: u64 = 131_072;

/// What an update in f64 costs, of those in f32. Some ops compute one value of f64 at a time.
const F64: u64 = 16;

/// A call of `O` whose inputs and options are proven to fit each other; what is left is the data.
pub struct Call<O: Op> {
    problem: O::Problem,
    inputs: Named<Spec>,
    outputs: Named<Spec>,
}

impl<O: Op> Call<O> {
    /// Checks inputs and options.
    pub fn new(inputs: Named<Spec>, options: &O::Options) -> Result<Self> {
        let problem = check::<O>(&inputs, options)?;
        let outputs = O::outputs(&problem).map_err(|error| error.in_op(O::NAME))?;
        Ok(Call { problem, inputs, outputs })
    }

    /// What the call gives.
    pub fn outputs(&self) -> &Named<Spec> {
        &self.outputs
    }

    /// How long the call takes on a CPU, in products or updates of a state in f32: at least one for each element that
    /// it reads or writes.
    pub fn work(&self) -> u64 {
        let tensors = self.inputs.iter().chain(self.outputs.iter());
        let elements = tensors.map(|(_, spec)| spec.shape.elements() as u64).fold(0, u64::saturating_add);
        let each = if storage::<O>(&self.inputs).1 == DType::F64 { F64 } else { 1 };
        O::work(&self.problem, &self.inputs).max(elements).saturating_mul(each)
    }

    /// Computes on the CPU, from views to views of the specs that were checked.
    pub fn cpu(&self, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        self.same_specs(inputs, &outputs)
            .and_then(|()| {
                // There is nothing to write; the loops would still run over all empty rows.
                if self.outputs.iter().all(|(_, spec)| spec.shape.elements() == 0) {
                    return Ok(());
                }
                for (name, from) in in_place::<O, _>(inputs) {
                    outputs.get_mut(name)?.bytes_mut().copy_from_slice(from.bytes());
                }
                match exec.level {
                    cpu::Level::Reference => run_reference::<O>(&self.problem, inputs, outputs),
                    _ => O::cpu(&self.problem, inputs, outputs, exec),
                }
            })
            .map_err(|error| error.in_op(O::NAME))
    }

    /// Queues the computation on a lane, from buffers to buffers of the specs that were checked.
    pub fn cuda(&self, inputs: &Named<&cuda::Buffer>, outputs: &Named<&cuda::Buffer>, lane: &cuda::Lane) -> Result<()> {
        self.same_specs(inputs, outputs)
            .and_then(|()| in_place::<O, _>(inputs).try_for_each(|(name, from)| lane.copy(from, outputs.get(name)?)))
            .and_then(|()| O::cuda(&self.problem, inputs, outputs, lane))
            .map_err(|error| error.in_op(O::NAME))
    }

    /// Checks that the tensors have exactly the specs that were checked, for kernels trust those.
    fn same_specs<I: Described, T: Described>(&self, inputs: &Named<I>, outputs: &Named<T>) -> Result<()> {
        same_specs(self.inputs.iter(), &specs_of_call::<O, _, _>(inputs, outputs))?;
        same_specs(self.outputs.iter(), outputs)
    }
}

/// The inputs that are there to be copied and then changed in place.
fn in_place<O: Op, T>(inputs: &Named<T>) -> impl Iterator<Item = (&'static str, &T)> {
    O::IN_PLACE.iter().filter_map(|&name| Some((name, inputs.find(name)?)))
}

/// The inputs that are only there as outputs, to be changed in place.
pub fn held<'t, O: Op, I, T>(
    inputs: &'t Named<I>,
    outputs: &'t Named<T>,
) -> impl Iterator<Item = (&'static str, &'t T)> {
    let alone = move |name: &&&'static str| inputs.find(name).is_none();
    O::IN_PLACE.iter().filter(alone).filter_map(|&name| Some((name, outputs.find(name)?)))
}

/// The specs of a call's inputs, [`held`] ones among them.
pub fn specs_of_call<O: Op, I: Described, T: Described>(inputs: &Named<I>, outputs: &Named<T>) -> Named<Spec> {
    let mut all = specs(inputs);
    held::<O, _, _>(inputs, outputs).for_each(|(name, tensor)| all.push(name, tensor.spec()));
    all
}

/// Checks and runs `O` on the CPU from views to views.
pub fn run_cpu<O: Op>(
    options: &O::Options,
    inputs: &Named<View>,
    outputs: Named<ViewMut>,
    exec: &cpu::Exec,
) -> Result<()> {
    Call::<O>::new(specs_of_call::<O, _, _>(inputs, &outputs), options)?.cpu(inputs, outputs, exec)
}

/// Checks `O` and queues it on a lane, from device buffers to device buffers.
pub fn run_cuda<O: Op>(
    options: &O::Options,
    inputs: &Named<&cuda::Buffer>,
    outputs: &Named<&cuda::Buffer>,
    lane: &cuda::Lane,
) -> Result<()> {
    Call::<O>::new(specs_of_call::<O, _, _>(inputs, outputs), options)?.cuda(inputs, outputs, lane)
}

fn run_reference<O: Op>(problem: &O::Problem, inputs: &Named<View>, outputs: Named<ViewMut>) -> Result<()> {
    let mut given = inputs.map(View::to_f64);
    held::<O, _, _>(inputs, &outputs).for_each(|(name, tensor)| given.push(name, tensor.view().to_f64()));
    let mut results = O::reference(problem, &given)?;
    for (name, output) in outputs {
        output.store_f64(&results.expect(&name)?);
    }
    Ok(())
}

fn same_specs<'e, T: Described>(expected: impl Iterator<Item = (&'e Name, &'e Spec)>, got: &Named<T>) -> Result<()> {
    for (name, expected) in expected {
        let got = got.get(name)?.spec();
        if got != *expected {
            return Err(Error::new(Kind::Shape, name.as_ref()).expected(expected).got(got));
        }
    }
    Ok(())
}

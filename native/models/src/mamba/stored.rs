//! Quantized matrices in files: tensors named after the matrix, with a suffix for the format. A ternary matrix also
//! stores its shape, because its planes pad rows to whole bytes.

use super::Weight;
use super::checkpoint::Found;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::products::matrices::{self, Matrix, Quantization};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::collections::{BTreeMap, BTreeSet};

/// A result whose error describes a problem with a tensor.
type Told<T> = std::result::Result<T, String>;

/// The suffix of the tensor with the shape.
const SHAPE: &str = "shape";

/// A quantized matrix. A ternary one has a scale for each row, even if its file has a single one.
#[derive(Clone)]
pub struct Stored {
    pub how: Quantization,
    pub dims: [usize; 2],
    pub matrix: Matrix<Weight>,
}

/// The quantized matrix that a tensor of this name is a part of, and its format; `None` for other tensors.
fn of_name(name: &str) -> Option<(&str, Quantization)> {
    let (matrix, _) = name.rsplit_once('.')?;
    let how = Quantization::all().find(|how| how.names(matrix).iter().any(|part| part == name))?;
    Some((matrix, how))
}

/// The quantization formats that the names of all tensors indicate.
pub fn formats<'n>(names: impl Iterator<Item = &'n str>) -> BTreeSet<&'static str> {
    names.filter_map(|name| Some(of_name(name)?.1.name())).collect()
}

/// Whether a tensor of that name is a part of a quantized matrix.
pub fn is_part(name: &str) -> bool {
    of_name(name).is_some()
}

/// The name of the shape tensor beside the first plane of a ternary matrix; `None` for other names.
pub fn shape_of(plane: &str) -> Option<String> {
    plane.strip_suffix(".plane0").map(|matrix| format!("{matrix}.{SHAPE}"))
}

/// A shape as a tensor.
pub fn told_shape(dims: &[usize]) -> Weight {
    let spec = Spec::new(DType::I64, &[dims.len()]).expect("few axes");
    Owned::from_fn(spec, |axis| dims[axis] as f64).into()
}

/// Moves quantized matrices out of `tensors`, and returns them by their names. Problems are added to `wrong`.
pub fn take(tensors: &mut BTreeMap<String, Found>, wrong: &mut Vec<String>) -> BTreeMap<String, Stored> {
    let pairs = tensors.keys().filter_map(|name| of_name(name)).map(|(name, how)| (name.to_string(), how.name()));
    let pairs: BTreeSet<(String, &str)> = pairs.collect();
    let mut all = BTreeMap::new();
    for (name, how) in pairs {
        let how = Quantization::from_name(how).expect("its own name");
        match Stored::take(tensors, &name, how) {
            Ok(_) if tensors.contains_key(&name) => wrong.push(format!("`{name}` as floats and in {}", how.name())),
            Ok(stored) => {
                if let Some(other) = all.insert(name.clone(), stored) {
                    wrong.push(format!("`{name}` in {} and in {}", other.how.name(), how.name()));
                }
            }
            Err(problem) => wrong.push(problem),
        }
    }
    all
}

impl Stored {
    /// The matrix as floats.
    pub fn floats(&self) -> Result<Weight> {
        let matrix = self.matrix.as_ref().try_map(|part| Ok(part.view()))?;
        Ok(matrices::floats(&matrix, self.dims[1])?.into())
    }

    fn take(tensors: &mut BTreeMap<String, Found>, name: &str, how: Quantization) -> Told<Stored> {
        let parts: Vec<Told<Weight>> = how.names(name).iter().map(|part| part_of(tensors, part)).collect();
        match how {
            Quantization::Blocks(format) => {
                let parts = parts.into_iter().collect::<Told<Vec<Weight>>>()?;
                let spec = part_spec(&parts[0], DType::U8, &format!("{name}.{}", how.name()))?;
                let values = format.values(name, &spec).map_err(|_| {
                    format!("`{name}.{}` of {spec}, whose rows are no multiple of {} bytes", how.name(), format.bytes())
                })?;
                let dims = values[..].try_into().map_err(|_| format!("`{name}.{}` of {spec}", how.name()))?;
                let [bytes] = parts.try_into().map_err(|_| "one part").expect("as many as names");
                Ok(Stored { how, dims, matrix: Matrix::Blocks(format, bytes) })
            }
            Quantization::Ternary => {
                let shape = part_of(tensors, &format!("{name}.{SHAPE}"));
                let parts = parts.into_iter().collect::<Told<Vec<Weight>>>()?;
                let dims =
                    dims_of(&shape?).ok_or_else(|| format!("`{name}.{SHAPE}`, which is no shape of a matrix"))?;
                Ok(Stored { how, dims, matrix: planes(name, parts, dims)? })
            }
        }
    }
}

fn part_of(tensors: &mut BTreeMap<String, Found>, name: &str) -> Told<Weight> {
    match tensors.remove(name) {
        None => Err(format!("no `{name}`")),
        Some(found) => found.map_err(|error| format!("`{name}` of {}", error.got)),
    }
}

fn part_spec(part: &Weight, dtype: DType, name: &str) -> Told<Spec> {
    let spec = part.spec();
    if spec.dtype == dtype { Ok(spec) } else { Err(format!("`{name}` of {spec} where it should be {dtype}")) }
}

/// The shape of the matrix that a shape tensor holds; `None` if it is malformed.
fn dims_of(shape: &Weight) -> Option<[usize; 2]> {
    let spec = shape.spec();
    if spec.dtype != DType::I64 || spec.shape[..] != [2] {
        return None;
    }
    let view = shape.view();
    let size = |bytes: &[u8]| usize::try_from(i64::from_ne_bytes(bytes.try_into().ok()?)).ok();
    let mut sizes = view.bytes().chunks_exact(8).map(size);
    Some([sizes.next()??, sizes.next()??]).filter(|dims| !dims.contains(&0))
}

/// Checks the planes of a ternary matrix of this shape, and expands a single scale to one per row.
fn planes(name: &str, parts: Vec<Weight>, [rows, columns]: [usize; 2]) -> Told<Matrix<Weight>> {
    let names = Quantization::Ternary.names(name);
    let bytes = columns.div_ceil(8);
    for (part, name) in parts.iter().zip(&names[..2]) {
        let spec = part_spec(part, DType::U8, name)?;
        if spec.shape[..] != [rows, bytes] {
            return Err(format!("`{name}` of {spec}, which has no room for ({rows}, {columns})"));
        }
    }
    let spec = part_spec(&parts[2], DType::F32, &names[2])?;
    if spec.shape[..] != [1] && spec.shape[..] != [rows] {
        return Err(format!("`{}` of {spec} where there should be one for all or each of {rows} rows", names[2]));
    }
    cells(name, parts[0].view().bytes(), parts[1].view().bytes(), columns)?;
    let [plane0, plane1, scale] = parts.try_into().map_err(|_| "three parts").expect("as many as names");
    let scales = scale.view().to_f64().into_iter().collect::<Vec<f64>>();
    let each = Owned::from_fn(Spec::new(DType::F32, &[rows]).map_err(|e| e.to_string())?, |row| {
        scales[if scales.len() == 1 { 0 } else { row }]
    });
    Ok(Matrix::Ternary([plane0, plane1], each.into()))
}

/// Refuses cells with both bits set, and padding that is not 0: a file with either has another layout.
fn cells(name: &str, plane0: &[u8], plane1: &[u8], columns: usize) -> Told<()> {
    let row = columns.div_ceil(8).max(1);
    let behind = if columns.is_multiple_of(8) { 0 } else { u8::MAX << (columns % 8) };
    let rows = plane0.chunks_exact(row).zip(plane1.chunks_exact(row));
    let odd = |(a, b): (&[u8], &[u8])| {
        let both = a.iter().zip(b).any(|(a, b)| a & b != 0);
        both || (a[row - 1] | b[row - 1]) & behind != 0
    };
    match rows.map(odd).position(|odd| odd) {
        None => Ok(()),
        Some(at) => Err(format!("`{name}` of planes whose row {at} has cells that are none of -1, 0 and 1")),
    }
}

//! Ops composed of several others: a tensor quantized to a format, and all products with it.

use super::format::Format;
use super::problem::{self, Conversion, Factors};
use super::quantize::{Dequantize, Quantize};
use super::{cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{Bound, Name, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

/// The names of a format's bytes, of the values read back, and of weights.
const fn names(format: Format) -> [&'static str; 3] {
    match format {
        Format::Q8 => ["q8_0", "deq8", "w_q8_0"],
        Format::Q4 => ["q4_0", "deq4", "w_q4_0"],
    }
}

/// Checks that an option for a size agrees with the shapes.
fn agrees(name: &'static str, option: Option<usize>, size: usize) -> Result<()> {
    match option {
        Some(asked) if asked != size => {
            Err(Error::new(Kind::Option, name).expected(format_args!("{size}, as the shapes say")).got(asked))
        }
        _ => Ok(()),
    }
}

options! {
    /// Options of [`F16Convert`].
    pub struct F16Options {
        /// words about the data, which change nothing
        note: String = String::new();
    }
}

/// The bits of half-precision numbers: rounded to nearest, ties to even; 65520 and more become infinite.
pub struct F16Convert;

impl Op for F16Convert {
    const NAME: &'static str = "f16_convert";
    const ABOUT: &'static str = "The bits of half-precision numbers, and what they are read back as";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(...)")];
    const OUTPUTS: &'static [Output] =
        &[Output::new("bits", "(...)").exactly(DType::I16), Output::new("back", "(...)")];
    const STORAGE: &'static [DType] = &[DType::F32];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = F16Options;
    type Problem = ();

    fn check(_: &Bound<Self>) -> Result<()> {
        Ok(())
    }

    fn cpu(_: &(), inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::to_f16(inputs.get("x")?, outputs.expect("bits")?, outputs.expect("back")?, exec)
    }

    fn reference(_: &(), inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        Ok(["bits", "back"].into_iter().zip(reference::to_f16(inputs.get("x")?)).collect())
    }

    fn cuda(_: &(), inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::to_f16(inputs.get("x")?, [outputs.get("bits")?, outputs.get("back")?], lane)
    }
}

options! {
    /// Options of [`BlockQuantize`] and [`BlockDequantize`].
    #[derive(Copy)]
    pub struct RowOptions {
        /// values of a row; any number by default
        n: Option<usize> = None;
    }
}

/// Quantizes rows to both formats, and reads them back.
pub struct BlockQuantize;

impl Op for BlockQuantize {
    const NAME: &'static str = "block_quantize";
    const ABOUT: &'static str = "Rows in Q8_0 and in Q4_0, and what these are read back as";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., N)").loose()];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = RowOptions;
    type Problem = [Conversion; 2];

    fn check(call: &Bound<Self>) -> Result<[Conversion; 2]> {
        let (inputs, options) = (call.inputs, call.options);
        let x = inputs.get("x")?;
        let [q8, q4] = Format::ALL.map(|format| Quantize::problem(x, format));
        agrees("n", options.n, x.shape.last().copied().unwrap_or(0))?;
        Ok([q8?, q4?])
    }

    fn outputs(problems: &[Conversion; 2], _: &Bound<Self>) -> Result<Named<Spec>> {
        let mut outputs = Named::default();
        for problem in problems {
            let [bytes, back, _] = names(problem.format);
            outputs.push(bytes, problem.q);
            outputs.push(back, Spec { dtype: DType::F32, ..problem.x });
        }
        Ok(outputs)
    }

    fn cpu(
        problems: &[Conversion; 2],
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        for problem in problems {
            let [bytes, back, _] = names(problem.format);
            let mut q = outputs.expect(bytes)?;
            cpu::quantize(problem, inputs.get("x")?, q.reborrow(), exec)?;
            cpu::dequantize(problem.format, &q.view(), outputs.expect(back)?, exec)?;
        }
        Ok(())
    }

    fn reference(
        problems: &[Conversion; 2],
        inputs: &Named<ArrayD<f64>>,
        _: &Named<Spec>,
    ) -> Result<Named<ArrayD<f64>>> {
        let mut outputs = Named::default();
        for problem in problems {
            let [bytes, back, _] = names(problem.format);
            let q = reference::quantize(problem, inputs.get("x")?)?;
            outputs.push(back, reference::dequantize(problem, &q));
            outputs.push(bytes, q);
        }
        Ok(outputs)
    }

    fn cuda(problems: &[Conversion; 2], inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        for problem in problems {
            let [bytes, back, _] = names(problem.format);
            cuda::quantize(problem, inputs.get("x")?, outputs.get(bytes)?, lane)?;
            cuda::dequantize(problem.format, outputs.get(bytes)?, outputs.get(back)?, lane)?;
        }
        Ok(())
    }
}

/// Reads blocks of either format back.
pub struct BlockDequantize;

impl Op for BlockDequantize {
    const NAME: &'static str = "block_dequantize";
    const ABOUT: &'static str = "Blocks of Q8_0 and of Q4_0 read back";
    const INPUTS: &'static [Slot] = &[
        Slot::new("q8_0", "(..., 17N/16)").exactly(DType::U8).optional().loose(),
        Slot::new("q4_0", "(..., 9N/16)").exactly(DType::U8).optional().loose(),
    ];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = RowOptions;
    type Problem = Vec<Conversion>;

    fn check(call: &Bound<Self>) -> Result<Vec<Conversion>> {
        let (inputs, options) = (call.inputs, call.options);
        let given = Format::ALL.into_iter().filter_map(|format| Some((format, inputs.find(names(format)[0])?)));
        if given.clone().next().is_none() {
            return Err(Error::new(Kind::Argument, "q8_0").expected("bytes of at least one format").got("none"));
        }
        let problem = |(format, q): (Format, &Spec)| {
            let problem = Dequantize::problem(names(format)[0], q, format)?;
            agrees("n", options.n, problem.x.shape.last().copied().unwrap_or(0)).map(|()| problem)
        };
        given.map(problem).collect()
    }

    fn outputs(problems: &Vec<Conversion>, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok(problems.iter().map(|problem| (names(problem.format)[1], problem.x)).collect())
    }

    fn cpu(
        problems: &Vec<Conversion>,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        problems.iter().try_for_each(|problem| {
            let [bytes, back, _] = names(problem.format);
            cpu::dequantize(problem.format, inputs.get(bytes)?, outputs.expect(back)?, exec)
        })
    }

    fn reference(
        problems: &Vec<Conversion>,
        inputs: &Named<ArrayD<f64>>,
        _: &Named<Spec>,
    ) -> Result<Named<ArrayD<f64>>> {
        let read = |problem: &Conversion| {
            let [bytes, back, _] = names(problem.format);
            Ok((back, reference::dequantize(problem, inputs.get(bytes)?)))
        };
        problems.iter().map(read).collect()
    }

    fn cuda(problems: &Vec<Conversion>, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        problems.iter().try_for_each(|problem| {
            let [bytes, back, _] = names(problem.format);
            cuda::dequantize(problem.format, inputs.get(bytes)?, outputs.get(back)?, lane)
        })
    }
}

options! {
    /// Options of [`BlockMatmul`].
    #[derive(Copy)]
    pub struct SizeOptions {
        /// columns of x; any number by default
        inputs as "in": Option<usize> = None;
        /// columns of the results; any number by default
        outputs as "out": Option<usize> = None;
    }
}

/// A checked call of [`BlockMatmul`].
#[derive(Clone, Debug)]
pub struct Products {
    /// The quantizer of x.
    quantizer: Conversion,
    /// Each product with its name, and the name of its weights.
    products: Vec<(&'static str, &'static str, problem::Problem)>,
}

/// The name of a product's result.
const fn result(factors: Factors) -> &'static str {
    match (factors.weights, factors.quantized) {
        (Format::Q4, true) => "y_q8_q4",
        (Format::Q8, true) => "y_q8_q8",
        (Format::Q4, false) => "y_f32_q4",
        (Format::Q8, false) => "y_f32_q8",
    }
}

/// x in Q8_0, and its products with weights in Q4_0 and in Q8_0.
pub struct BlockMatmul;

impl Op for BlockMatmul {
    const NAME: &'static str = "block_matmul";
    const ABOUT: &'static str = "x in Q8_0, and products of that and of x with weights in Q4_0 and in Q8_0";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(..., I)").loose(),
        Slot::new("w_q4_0", "(O, 9I/16)").exactly(DType::U8).optional().loose(),
        Slot::new("w_q8_0", "(O, 17I/16)").exactly(DType::U8).optional().loose(),
    ];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = SizeOptions;
    type Problem = Products;

    fn check(call: &Bound<Self>) -> Result<Products> {
        let (inputs, options) = (call.inputs, call.options);
        let x = inputs.get("x")?;
        let quantizer = Quantize::problem(x, Format::Q8)?;
        let mut products = Vec::new();
        for weights in Format::ALL {
            let name = names(weights)[2];
            for quantized in [true, false].into_iter().filter(|_| inputs.find(name).is_some()) {
                let factors = Factors { weights, quantized };
                let problem = problem::Problem::new(name, factors, inputs, &problem::Options::default())?;
                agrees("in", options.inputs, problem.inputs)?;
                agrees("out", options.outputs, problem.outputs)?;
                products.push((result(factors), name, problem));
            }
        }
        Ok(Products { quantizer, products })
    }

    fn work(problem: &Products, _: &Named<Spec>) -> u64 {
        let products = problem.products.iter().map(|(_, _, of)| crate::op::product(&[of.rows, of.inputs, of.outputs]));
        products.fold(0, u64::saturating_add)
    }

    fn outputs(problem: &Products, _: &Bound<Self>) -> Result<Named<Spec>> {
        let spec = |of: &problem::Problem| Ok(Spec { dtype: of.x.dtype, shape: of.y()? });
        let quantized = [Ok((Name::from("x_q8_0"), problem.quantizer.q))].into_iter();
        quantized.chain(problem.products.iter().map(|(y, _, of)| Ok(((*y).into(), spec(of)?)))).collect()
    }

    fn cpu(
        problem: &Products,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        let x = inputs.get("x")?;
        cpu::quantize(&problem.quantizer, x, outputs.expect("x_q8_0")?, exec)?;
        problem
            .products
            .iter()
            .try_for_each(|(y, w, product)| cpu::multiply(product, [x, inputs.get(w)?], None, outputs.expect(y)?, exec))
    }

    fn reference(problem: &Products, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let x = inputs.get("x")?;
        let mut outputs: Named<_> = [("x_q8_0", reference::quantize(&problem.quantizer, x)?)].into_iter().collect();
        for (y, w, product) in &problem.products {
            outputs.push(*y, reference::multiply(product, [x, inputs.get(w)?], None)?);
        }
        Ok(outputs)
    }

    fn cuda(problem: &Products, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let x = inputs.get("x")?;
        cuda::quantize(&problem.quantizer, x, outputs.get("x_q8_0")?, lane)?;
        problem
            .products
            .iter()
            .try_for_each(|(y, w, product)| cuda::multiply(product, [x, inputs.get(w)?], None, outputs.get(y)?, lane))
    }
}

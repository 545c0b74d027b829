//! Rotary position embedding (Su et al. 2021): pairs of elements of a row are rotated by angles that grow
//! with the row's position `p`. For pair `i` of `W / 2`:
//!
//! ```text
//! angle = p theta_i          theta_i = theta^(-2i/W)
//! (a, b) -> (a cos - b sin, a sin + b cos)
//! half: (a, b) = (x[i], x[i+W/2])        interleaved: (a, b) = (x[2i], x[2i+1])
//! ```
//!
//! With Llama 3's scaling, of factor `f`, low and high factors `lo` and `hi` and original length `n`, and with the
//! wavelength `w = 2 pi / theta_i`: `theta_i` is unchanged for `w < n/hi`, becomes `theta_i / f` for `w > n/lo`, and
//! otherwise `(1 - s) theta_i / f + s theta_i` with `s = (n/w - lo) / (hi - lo)`.
//!
//! The gradient rotates by the negative angles. Angles, cosines and sines are computed in f64, since in f32 angles are
//! off by 1e-3 at positions of 1e5. Cosines and sines are then rounded to the type of the arithmetic, f32 (f64 for
//! f64), and results once to that of storage.

pub mod angles;
mod cpu;
pub mod cuda;
mod reference;

use crate::base::heads::Layout;
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Op, Output, Slot, named};
use crate::tensor::Spec;
use crate::{options, shared_options};
use angles::Angles;
use serde::{Deserialize, Serialize};

/// Which elements form a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// `x[i]` and `x[i+W/2]`.
    #[default]
    Half,
    /// `x[2i]` and `x[2i+1]`.
    Interleaved,
}

shared_options! {
    pairing {
        /// rotated pairs: x[i] and x[i+W/2], or adjacent elements
        pairing: crate::ops::positions::rope::Pairing = crate::ops::positions::rope::Pairing::Half;
    }
}

options! {
    /// The options.
    pub struct Options {
        ..pairing;
        /// base of the angles
        theta: f64 = 10000.0, positive;
        /// position of the first row
        first_position: i64 = 0;
        /// order of axes: (B, H, L, W) or (B, L, H, W)
        layout: Layout = Layout::HeadsFirst;
        /// scaling factor of Llama 3's frequency scaling; none by default
        scaling_factor: Option<f64> = None, positive;
        /// low-frequency factor of that scaling
        low_freq_factor: f64 = 1.0, positive;
        /// high-frequency factor of that scaling
        high_freq_factor: f64 = 4.0, positive;
        /// context length before that scaling
        original_length: f64 = 8192.0, positive;
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// Rows per position, contiguous for each outer index.
    pub inner: usize,
    /// Number of positions.
    pub length: usize,
    /// Repetitions of all positions.
    pub outer: usize,
    /// Elements of a row, `W` in the shapes.
    pub width: usize,
    /// Which elements form a pair.
    pub pairing: Pairing,
    /// The angles of each position.
    pub angles: Angles,
}

impl Problem {
    /// The indices in a row of the two elements of a pair.
    #[inline]
    pub fn pair(&self, i: usize) -> (usize, usize) {
        match self.pairing {
            Pairing::Half => (i, i + self.width / 2),
            Pairing::Interleaved => (2 * i, 2 * i + 1),
        }
    }
}

impl Options {
    fn check_factors(&self) -> Result<()> {
        if self.high_freq_factor > self.low_freq_factor {
            return Ok(());
        }
        Err(Error::new(Kind::Option, "high_freq_factor")
            .expected(format_args!("more than low_freq_factor, {}", self.low_freq_factor))
            .got(self.high_freq_factor))
    }

    fn rate(&self, i: usize, width: usize) -> f64 {
        let rate = angles::rate(self.theta, i, width);
        let Some(factor) = self.scaling_factor else { return rate };
        let (wavelength, length) = (2.0 * std::f64::consts::PI / rate, self.original_length);
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        if wavelength < length / high {
            return rate;
        }
        if wavelength > length / low {
            return rate / factor;
        }
        let share = (length / wavelength - low) / (high - low);
        (1.0 - share) * rate / factor + share * rate
    }
}

/// Rotary position embedding.
pub struct Rope;

impl Op for Rope {
    const NAME: &'static str = "rope";
    const ABOUT: &'static str = "Rotary position embedding";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(B, H, L, W)")];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(B, H, L, W)")];
    const HINT: &'static str = crate::base::heads::HINT;
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (x, options) = (*call.inputs.get("x")?, call.options);
        // The pattern's letters name axes in order; the layout determines their meaning.
        let [batch, second, third, width] = call.sizes.all("BHLW");
        let (outer, length, inner) = match options.layout {
            Layout::HeadsFirst => (batch * second, third, 1),
            Layout::HeadsLast => (batch, second, third),
        };
        if !width.is_multiple_of(2) {
            return Err(op::wrong_shape("x", "(..., W) with an even W", &x).hint("Elements are rotated in pairs"));
        }
        options.check_factors()?;
        let rates = (0..width / 2).map(|i| options.rate(i, width)).collect();
        let angles = Angles { first_position: options.first_position as f64, rates };
        Ok(Problem { x, inner, length, outer, width, pairing: options.pairing, angles })
    }

    crate::runs! {
        cpu(problem, inputs, mut outputs, exec) {
            cpu::rotate(problem, 1.0, inputs.get("x")?, outputs.expect("y")?, exec)
        }
        reference(problem, inputs, _) { Ok(named([("y", Some(reference::rotate(problem, 1.0, inputs.get("x")?)))])) }
        cuda(problem, inputs, outputs, lane) { cuda::rotate(problem, 1.0, inputs.get("x")?, outputs.get("y")?, lane) }
    }
}

/// The gradient of [`Rope`].
pub type RopeBackward = Backward<Rope>;

impl Differentiable for Rope {
    const BACKWARD: &'static str = "rope_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "dy"]);

    crate::runs! {
        cpu_backward(problem, inputs, mut outputs, exec) {
            cpu::rotate(problem, -1.0, inputs.get("dy")?, outputs.expect("dx")?, exec)
        }
        reference_backward(problem, inputs, _) {
            Ok(named([("dx", Some(reference::rotate(problem, -1.0, inputs.get("dy")?)))]))
        }
        cuda_backward(problem, inputs, outputs, lane) {
            cuda::rotate(problem, -1.0, inputs.get("dy")?, outputs.get("dx")?, lane)
        }
    }
}

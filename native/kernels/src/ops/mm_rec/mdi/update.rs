//! The element-wise core of memory decay integration and its gradient:
//!
//! ```text
//! h = gate z + (1 - gate) h_old + gamma h_old
//! dz = gate dh    dh_old = (1 - gate + gamma) dh    dgate = (z - h_old) dh    dgamma = h_old dh
//! ```

use crate::base::elementwise::Map;
use crate::cpu::{self, Exec};
use crate::cuda::{self, Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::tensor::{Spec, View, ViewMut};
use ndarray::{ArrayD, Zip};

pub use crate::op::NoOptions as Options;

/// The update.
pub struct MdiUpdate;

impl Op for MdiUpdate {
    const NAME: &'static str = "mdi_update";
    const ABOUT: &'static str = "Memory decay integration, element by element";
    const INPUTS: &'static [Slot] = &[
        Slot::new("z", "(...)"),
        Slot::new("h_old", "(...)"),
        Slot::new("gate", "(...)"),
        Slot::new("gamma", "(...)"),
    ];
    const OUTPUTS: &'static [Output] = &[Output::new("h", "(...)")];
    const HINT: &'static str = "All tensors have the shape of z";
    const COTANGENTS: &'static [&'static str] = &["dh"];

    type Options = Options;
    type Problem = ();

    fn check(_: &Bound<Self>) -> Result<()> {
        Ok(())
    }

    fn cpu(_: &(), inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        cpu::elementwise::map(Map::Integrate, &all(inputs)?.map(|v| *v), outputs.expect("h")?, exec)
    }

    fn reference(_: &(), inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let [z, h, gate, gamma] = all(inputs)?;
        Ok([("h", gate * z + (1.0 - gate) * h + gamma * h)].into_iter().collect())
    }

    fn cuda(_: &(), inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::map(Map::Integrate, &all(inputs)?.map(|v| *v), outputs.get("h")?, lane)
    }
}

/// The inputs in order.
fn all<T>(inputs: &Named<T>) -> Result<[&T; 4]> {
    Ok([inputs.get("z")?, inputs.get("h_old")?, inputs.get("gate")?, inputs.get("gamma")?])
}

/// Each gradient, with its elementwise operation and the inputs of that.
const GRADIENTS: [(&str, Map, &[&str]); 4] = [
    ("dz", Map::Product, &["gate", "dh"]),
    ("dh_old", Map::Carry, &["gate", "gamma", "dh"]),
    ("dgate", Map::DifferenceTimes, &["z", "h_old", "dh"]),
    ("dgamma", Map::Product, &["h_old", "dh"]),
];

/// The gradient of [`MdiUpdate`].
pub type MdiUpdateBackward = Backward<MdiUpdate>;

impl Differentiable for MdiUpdate {
    const BACKWARD: &'static str = "mdi_update_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["z", "h_old", "gate", "gamma", "dh"]);

    fn cpu_backward(_: &(), inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        GRADIENTS.into_iter().try_for_each(|(name, map, of)| {
            let given = of.iter().map(|name| inputs.get(name).copied()).collect::<Result<Vec<_>>>()?;
            cpu::elementwise::map(map, &given, outputs.expect(name)?, exec)
        })
    }

    fn reference_backward(_: &(), inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let ([z, h, gate, gamma], dh) = (all(inputs)?, inputs.get("dh")?);
        let carried = Zip::from(gate).and(gamma).map_collect(|gate, gamma| 1.0 - gate + gamma);
        Ok([("dz", gate * dh), ("dh_old", carried * dh), ("dgate", (z - h) * dh), ("dgamma", h * dh)]
            .into_iter()
            .collect())
    }

    fn cuda_backward(_: &(), inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        GRADIENTS.into_iter().try_for_each(|(name, map, of)| {
            let given = of.iter().map(|name| inputs.get(name).copied()).collect::<Result<Vec<_>>>()?;
            cuda::map(map, &given, outputs.get(name)?, lane)
        })
    }
}

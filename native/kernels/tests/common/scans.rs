//! Calls of the selective scan for tests, with values as in trained layers and at the edges.

use super::Random;
use proptest::prelude::*;
use sidewinder_kernels::op::{Named, Op};
use sidewinder_kernels::ops::scan::selective_scan::{ClampGrad, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// A call to generate: its sizes, its optional inputs, and the forms of `B` and `C`.
#[derive(Clone, Debug)]
pub struct Call {
    pub batch: usize,
    pub length: usize,
    pub channels: usize,
    pub state: usize,
    pub b: Varies,
    pub c: Varies,
    pub optional: [bool; 4],
    pub options: Options,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Varies {
    PerStep,
    PerGroup(usize),
    Constant,
}

impl Call {
    /// A call without optional inputs.
    pub fn plain(batch: usize, length: usize, channels: usize, state: usize) -> Call {
        let options = Options { return_state: true, ..Options::default() };
        let (b, c) = (Varies::PerStep, Varies::PerStep);
        Call { batch, length, channels, state, b, c, optional: [false; 4], options, seed: 1 }
    }

    fn coefficient_shape(&self, varies: Varies) -> Vec<usize> {
        match varies {
            Varies::PerStep => vec![self.batch, self.length, self.state],
            Varies::PerGroup(groups) => vec![self.batch, self.length, groups, self.state],
            Varies::Constant => vec![self.channels, self.state],
        }
    }

    /// Inputs in f32 with magnitudes as in trained layers: decays from near 0 to near 1.
    pub fn inputs(&self) -> Named<Owned> {
        let mut random = Random(self.seed);
        let Call { batch, length, channels, state, .. } = *self;
        let mut inputs = Named::default();
        let mut push = |name: &'static str, shape: &[usize], low: f64, high: f64| {
            let spec = Spec::new(DType::F32, shape).unwrap();
            inputs.push(name, Owned::from_fn(spec, |_| low + (high - low) * random.next()));
        };
        push("x", &[batch, length, channels], -2.0, 2.0);
        push("dt", &[batch, length, channels], if self.options.dt_softplus { -6.0 } else { 0.0 }, 1.0);
        push("A", &[channels, state], -8.0, 0.0);
        push("B", &self.coefficient_shape(self.b), -1.0, 1.0);
        push("C", &self.coefficient_shape(self.c), -1.0, 1.0);
        let optional = [
            ("D", vec![channels], 2.0),
            ("z", vec![batch, length, channels], 4.0),
            ("dt_bias", vec![channels], 0.5),
            ("initial_state", vec![batch, channels, state], 3.0),
        ];
        for ((name, shape, size), present) in optional.into_iter().zip(self.optional) {
            if present {
                push(name, &shape, if name == "dt_bias" { 0.0 } else { -size }, size);
            }
        }
        inputs
    }
}

impl Call {
    /// Cotangents in f32 of `y` and of the states that are requested.
    pub fn cotangents(&self) -> Named<Owned> {
        let mut random = Random(self.seed ^ 0x5eed);
        let Call { batch, length, channels, state, .. } = *self;
        let all = [
            ("dy", vec![batch, length, channels], true),
            ("dlast_state", vec![batch, channels, state], self.options.return_state),
            ("dstates", vec![batch, length, channels, state], self.options.return_states),
        ];
        let mut tensor =
            |shape: &[usize]| Owned::from_fn(Spec::new(DType::F32, shape).unwrap(), |_| 2.0 * random.next() - 1.0);
        all.iter().filter(|(_, _, wanted)| *wanted).map(|(name, shape, _)| (*name, tensor(shape))).collect()
    }
}

impl Call {
    /// The magnitude of each result without cancellation. Results are linear in some inputs jointly, so flipping signs
    /// of these adds up terms of equal magnitude to other sums, not all of which are small by accident.
    pub fn sizes<O: Op<Options = Options>>(
        &self,
        inputs: &Named<Owned>,
        expected: &Named<Owned>,
        linear_in: &[&str],
    ) -> Named<f64> {
        // Among many values of a tensor one is large anyway.
        let few = expected.iter().any(|(_, t)| t.spec().shape.elements() < 8);
        (0..if few { 4 } else { 0 }).fold(super::sizes(expected), |sizes, turn| {
            let mut random = Random(self.seed.wrapping_add(turn));
            let mut turned = |t: &Owned| {
                let values = t.view().to_f64();
                let mut values = values.iter().map(|v| if random.next() < 0.5 { -v } else { *v });
                Owned::from_fn(t.spec(), |_| values.next().unwrap())
            };
            let linear = |name: &str| linear_in.contains(&name);
            let other = inputs.iter().map(|(n, t)| (n.clone(), if linear(n) { turned(t) } else { t.clone() }));
            let other = super::sizes(&super::reference::<O>(&self.options, &other.collect()));
            sizes.iter().map(|(name, size)| (name.clone(), size.max(*other.get(name).unwrap()))).collect()
        })
    }
}

fn varies(channels: usize) -> impl Strategy<Value = Varies> {
    let divisors = (1..=channels.max(1)).filter(|g| channels.is_multiple_of(*g)).collect::<Vec<_>>();
    prop_oneof![
        3 => Just(Varies::PerStep),
        2 => prop::sample::select(divisors).prop_map(Varies::PerGroup),
        1 => Just(Varies::Constant),
    ]
}

pub fn options() -> impl Strategy<Value = Options> {
    let clamp = prop_oneof![Just(None), Just(Some((0.001, 0.1))), Just(Some((0.05, 0.7)))];
    let grad = prop_oneof![Just(ClampGrad::Mask), Just(ClampGrad::StraightThrough)];
    (any::<bool>(), clamp, any::<bool>(), any::<bool>(), grad).prop_map(
        |(dt_softplus, dt_clamp, return_state, return_states, clamp_grad)| Options {
            dt_softplus,
            dt_clamp,
            return_state,
            return_states,
            clamp_grad,
        },
    )
}

pub fn calls() -> impl Strategy<Value = Call> {
    let sizes =
        (0..4usize, 0..70usize, prop_oneof![0..5usize, 5..70usize], prop_oneof![0..7usize, 15..19usize, 31..35usize]);
    sizes.prop_flat_map(|(batch, length, channels, state)| {
        (varies(channels), varies(channels), any::<[bool; 4]>(), options(), any::<u64>()).prop_map(
            move |(b, c, optional, options, seed)| Call {
                batch,
                length,
                channels,
                state,
                b,
                c,
                optional,
                options,
                seed,
            },
        )
    })
}

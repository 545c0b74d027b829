//! Samples the next token from logits. `step/choose.cu` implements it on CUDA.

use super::seen::Seen;
use serde::Deserialize;
use sidewinder_kernels::cuda::params;
use sidewinder_kernels::error::{Error, Kind, Result};

/// How tokens are chosen, in the steps and the order of Hugging Face's `generate`. Logits of tokens that the text
/// contains are divided by the repetition penalty if positive, and multiplied by it otherwise (Keskar et al. 2019). All
/// logits are divided by the temperature. The largest `top_k` are kept, and of those the fewest whose probabilities sum
/// to `top_p`; tokens that equal the last one kept are kept too. One of them is drawn by its probability.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// The divisor of logits. With 0 the largest logit is chosen, the first one on ties.
    pub temperature: f64,
    /// Number of the largest logits that may be chosen.
    pub top_k: Option<usize>,
    /// The sum of the probabilities of the tokens that may be chosen.
    pub top_p: Option<f64>,
    /// Equal seeds give equal draws.
    pub seed: u64,
    /// Above 1, tokens that the text contains become less probable; below 1, more probable; 1 changes nothing.
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 0, repetition_penalty: 1.0 }
    }
}

/// Number of the largest logits that `top_p` examines first; usually they suffice.
const FIRST: usize = 256;

impl Sampling {
    /// Refuses options outside their ranges.
    pub fn check(&self) -> Result<()> {
        let wrong =
            |name: &str, expected: &str, got: String| Err(Error::new(Kind::Option, name).expected(expected).got(got));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature", "a finite number, not negative", self.temperature.to_string());
        }
        if self.top_k == Some(0) {
            return wrong("top_k", "a positive number", "0".to_string());
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return wrong("repetition_penalty", "a finite positive number", self.repetition_penalty.to_string());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => wrong("top_p", "a number above 0, at most 1", p.to_string()),
            _ => Ok(()),
        }
    }

    /// Whether the kernel of `choose.cu` supports these options.
    pub(super) fn on_device(&self) -> bool {
        self.repetition_penalty == 1.0
    }

    /// Applies the repetition penalty to the logits of tokens that a text contains. Finite logits stay finite.
    pub(super) fn penalize(&self, logits: &mut [f32], seen: &Seen) {
        let penalty = self.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        for token in seen.tokens() {
            if let Some(logit) = logits.get_mut(token).filter(|logit| logit.is_finite()) {
                let wide = f64::from(*logit);
                let changed = if wide > 0.0 { wide / penalty } else { wide * penalty };
                *logit = (changed as f32).clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// Chooses a token by these logits; `draw` is the number of the choice within its text. NaN logits are never
    /// chosen.
    pub fn choose(&self, logits: &[f32], draw: u64) -> Result<u32> {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !most.is_finite() {
            return Err(Error::new(Kind::Argument, "logits").expected("finite numbers").got(most));
        }
        if self.temperature == 0.0 {
            return Ok(logits.iter().position(|&logit| logit == most).unwrap_or(0) as u32);
        }
        let weight = |logit: f32| match logit.is_nan() {
            true => 0.0,
            false => (f64::from(logit - most) / self.temperature).exp(),
        };
        let mut kept: Vec<(u32, f64)> =
            logits.iter().enumerate().map(|(i, &logit)| (i as u32, weight(logit))).collect();
        if let Some(k) = self.top_k {
            keep_largest(&mut kept, k);
        }
        if let Some(p) = self.top_p {
            keep_probable(&mut kept, p);
        }
        Ok(draw_from(&kept, uniform(self.seed, draw)))
    }
}

/// Keeps the `count` largest weights, with ties of the last one.
fn keep_largest(kept: &mut Vec<(u32, f64)>, count: usize) {
    if let Some(least) = nth_largest(kept, count) {
        kept.retain(|(_, weight)| *weight >= least);
    }
}

/// The `count`th largest weight, if there are more than `count`.
fn nth_largest(kept: &[(u32, f64)], count: usize) -> Option<f64> {
    let mut weights: Vec<f64> = kept.iter().map(|(_, weight)| *weight).collect();
    let (_, nth, _) =
        (count < weights.len()).then(|| weights.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)))?;
    Some(*nth)
}

/// Keeps the fewest weights that sum to `share` of the total.
fn keep_probable(kept: &mut Vec<(u32, f64)>, share: f64) {
    let enough = share * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut count = FIRST;
    loop {
        let at_least = nth_largest(kept, count);
        let mut largest: Vec<f64> = kept.iter().map(|(_, weight)| *weight).collect();
        largest.retain(|weight| at_least.is_none_or(|least| *weight >= least));
        largest.sort_unstable_by(|a, b| b.total_cmp(a));
        let mut sum = 0.0;
        let needed = largest.iter().find(|weight| {
            sum += **weight;
            sum >= enough
        });
        if let Some(least) = needed {
            return kept.retain(|(_, weight)| weight >= least);
        }
        if at_least.is_none() {
            return;
        }
        count *= 8;
    }
}

fn draw_from(kept: &[(u32, f64)], uniform: f64) -> u32 {
    let target = uniform * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut sum = 0.0;
    let found = kept.iter().find(|(_, weight)| {
        sum += weight;
        sum > target
    });
    // Rounding may leave the last sum at the target, not above it.
    found.or_else(|| kept.iter().rfind(|(_, weight)| *weight > 0.0)).map_or(0, |(token, _)| *token)
}

params! {
    /// The parameters of a choice on CUDA.
    #[derive(bytemuck::Pod, bytemuck::Zeroable)]
    pub(super) struct Draw {
        per_temperature: f32, // 0: the largest logit is chosen
        top_k: u32, // 0: any number
        top_p: f32, // 1: all
        none: u32,
        uniform: f64,
    }
}

impl Sampling {
    /// The parameters of the `draw`th choice of a text.
    pub(super) fn draw(&self, draw: u64) -> Draw {
        // Clamped, because 0 selects the largest logit, and a larger factor would overflow.
        let within = |inverse: f32| inverse.clamp(1e-38, 1e38);
        let per_temperature = if self.temperature == 0.0 { 0.0 } else { within(1.0 / self.temperature as f32) };
        Draw {
            per_temperature,
            top_k: self.top_k.map_or(0, |k| k.try_into().unwrap_or(u32::MAX)),
            top_p: self.top_p.unwrap_or(1.0) as f32,
            none: 0,
            uniform: uniform(self.seed, draw),
        }
    }
}

/// A number in [0, 1): the `draw`th of SplitMix64 (Steele et al. 2014) with this seed.
fn uniform(seed: u64, draw: u64) -> f64 {
    let mut z = seed.wrapping_add(draw.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [0.5, 2.0, -1.0, 2.0, f32::NAN, 1.0];

    fn counts(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        (0..20_000).for_each(|draw| counts[sampling.choose(logits, draw).unwrap() as usize] += 1);
        counts
    }

    fn probabilities(weights: &[f64]) -> Vec<f64> {
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }

    fn agree(sampling: Sampling, weights: &[f64]) {
        for (i, (count, expected)) in counts(sampling, &LOGITS).iter().zip(probabilities(weights)).enumerate() {
            let share = *count as f64 / 20_000.0;
            assert!((share - expected).abs() < 0.015, "{sampling:?}: token {i} came {share}, not {expected}");
            assert!(expected > 0.0 || *count == 0, "{sampling:?}: token {i} must not come");
        }
    }

    #[test]
    fn tokens_come_as_often_as_they_should() {
        let e = f64::exp;
        let plain = Sampling::default();
        agree(plain, &[e(0.5), e(2.0), e(-1.0), e(2.0), 0.0, e(1.0)]);
        agree(Sampling { temperature: 0.5, ..plain }, &[e(1.0), e(4.0), e(-2.0), e(4.0), 0.0, e(2.0)]);
        agree(Sampling { top_k: Some(3), ..plain }, &[0.0, e(2.0), 0.0, e(2.0), 0.0, e(1.0)]);
        agree(Sampling { top_k: Some(1), ..plain }, &[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
        agree(Sampling { top_p: Some(0.5), ..plain }, &[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
        agree(Sampling { top_k: Some(3), top_p: Some(0.9), ..plain }, &[0.0, e(2.0), 0.0, e(2.0), 0.0, e(1.0)]);
        agree(Sampling { temperature: 0.0, ..plain }, &[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        agree(
            Sampling { top_k: Some(100), top_p: Some(1.0), ..plain },
            &[e(0.5), e(2.0), e(-1.0), e(2.0), 0.0, e(1.0)],
        );
    }

    #[test]
    fn flat_logits_need_more_than_the_first_look() {
        let flat = vec![0.0; 5000];
        let sampling = Sampling { top_p: Some(0.5), seed: 7, ..Default::default() };
        let slope: Vec<f32> = flat.iter().enumerate().map(|(i, _): (usize, &f32)| i as f32 * -1e-6).collect();
        let chosen: Vec<u32> = (0..2000).map(|draw| sampling.choose(&slope, draw).unwrap()).collect();
        assert!(chosen.iter().all(|&token| token < 2500));
        assert!(chosen.iter().any(|&token| token > 2000));
        // Ties are kept together.
        assert!((0..2000).any(|draw| sampling.choose(&flat, draw).unwrap() > 4000));
    }

    /// The expected values are those of transformers' `RepetitionPenaltyLogitsProcessor`.
    #[test]
    fn tokens_that_were_there_are_less_probable_by_the_penalty() {
        let mut logits = LOGITS;
        let seen = Seen::of(6, &[2, 1, 4, 1]);
        Sampling { repetition_penalty: 1.25, ..Default::default() }.penalize(&mut logits, &seen);
        assert_eq!(logits[..4], [0.5, 1.6, -1.25, 2.0]);
        assert!(logits[4].is_nan() && logits[5] == 1.0);
        Sampling { repetition_penalty: 0.5, ..Default::default() }.penalize(&mut logits, &seen);
        assert_eq!(logits[..4], [0.5, 3.2, -0.625, 2.0]);
    }

    #[test]
    fn extreme_penalties_leave_finite_logits_finite() {
        let seen = Seen::of(4, &[0, 1, 2, 3]);
        for penalty in [1e-300, f64::MIN_POSITIVE, f64::MAX] {
            let mut logits = [3.0, -2.0, 0.0, f32::NEG_INFINITY];
            Sampling { repetition_penalty: penalty, ..Default::default() }.penalize(&mut logits, &seen);
            assert!(logits[..3].iter().all(|logit| logit.is_finite()), "{penalty}: {logits:?}");
            assert!(logits[0] >= logits[2] && logits[2] >= logits[1] && logits[3] == f32::NEG_INFINITY);
        }
    }

    #[test]
    fn seeds_decide() {
        let sampling = |seed| Sampling { seed, ..Default::default() };
        let text = |seed| (0..50).map(|draw| sampling(seed).choose(&[0.0; 100], draw).unwrap()).collect::<Vec<_>>();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }

    #[test]
    fn temperatures_beyond_f32_are_still_temperatures() {
        for temperature in [f64::MIN_POSITIVE, 1e-45, 1e-30, 1.0, 1e30, 1e45, f64::MAX] {
            let sampling = Sampling { temperature, ..Default::default() };
            let factor = sampling.draw(0).per_temperature * std::f32::consts::LOG2_E;
            assert!(factor > 0.0 && factor.is_finite(), "{temperature}: {factor}");
            let counts = counts(sampling, &LOGITS);
            assert_eq!(counts[2] > 0, temperature >= 1.0, "{temperature}: {counts:?}");
            assert!(counts[4] == 0 && counts[1] > 0 && counts[3] > 0, "{temperature}: {counts:?}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let sampling = Sampling::default();
        for logits in [&[][..], &[f32::NAN; 3], &[f32::NEG_INFINITY], &[1.0, f32::INFINITY]] {
            assert_eq!(sampling.choose(logits, 0).unwrap_err().kind, Kind::Argument, "{logits:?}");
        }
        for wrong in [
            Sampling { temperature: -1.0, ..sampling },
            Sampling { temperature: f64::NAN, ..sampling },
            Sampling { top_k: Some(0), ..sampling },
            Sampling { top_p: Some(0.0), ..sampling },
            Sampling { top_p: Some(1.1), ..sampling },
            Sampling { repetition_penalty: 0.0, ..sampling },
            Sampling { repetition_penalty: -1.0, ..sampling },
            Sampling { repetition_penalty: f64::NAN, ..sampling },
            Sampling { repetition_penalty: f64::INFINITY, ..sampling },
        ] {
            assert_eq!(wrong.check().unwrap_err().kind, Kind::Option, "{wrong:?}");
        }
        assert!(sampling.check().is_ok());
    }
}

//! The names, inputs and options of the ops.

use super::{Cumulative, Scan, Settings, Table};
use crate::op::{self, Output, Slot};
use crate::options;
use crate::tensor::DType;

const SEQUENCE: &str = "(B, H, L, W)";
const STATE: &str = "(B, H, W)";
const INITIAL_STATE: Slot = Slot::new("initial_state", STATE).wide().optional();
const Y: Output = Output::new("y", SEQUENCE);
const LAST_STATE: Output = Output::new("last_state", STATE).wide().asked_by("return_state");

options! {
    /// The options of [`CumprodScan`] and [`LogCumSumExp`].
    pub struct Options {
        /// scan from the last step to the first
        reverse: bool = false;
        /// write last_state (B, H, W)
        return_state: bool = false;
    }
}

options! {
    /// The options of [`CumSum`] and [`ReverseCumSum`].
    pub struct SumOptions {
        /// write last_state (B, H, W)
        return_state: bool = false;
    }
}

options! {
    /// The options of [`ExpProductScan`].
    pub struct ExpProductOptions {
        /// lower limit of the decays
        eps: f64 = 1e-8, share;
        /// lower limit of the logarithms of decays
        log_min: f64 = -50.0, not_positive;
        /// scan from the last step to the first
        reverse: bool = false;
        /// write last_state (B, H, W)
        return_state: bool = false;
    }
}

/// The table of [`ExpProductScan`].
pub struct ExpProduct;
/// The table of [`CumprodScan`].
pub struct Product;
/// The table of [`LogCumSumExp`].
pub struct LogSumExp;
/// The table of [`CumSum`] and [`ReverseCumSum`].
pub struct Sum<const REVERSE: bool>;

/// The cumulative product of decays, computed from their logarithms.
pub type ExpProductScan = Cumulative<ExpProduct>;
/// The cumulative product.
pub type CumprodScan = Cumulative<Product>;
/// The cumulative log-sum-exp.
pub type LogCumSumExp = Cumulative<LogSumExp>;
/// The cumulative sum.
pub type CumSum = Cumulative<Sum<false>>;
/// The cumulative sum from the last step to the first.
pub type ReverseCumSum = Cumulative<Sum<true>>;

impl Table for ExpProduct {
    const NAME: &'static str = "exp_product_scan";
    const ABOUT: &'static str = "Cumulative product of decays in [0, 1] by the sum of their logarithms";
    const BACKWARD: &'static str = "exp_product_scan_backward";
    const NAMES: [&'static str; 2] = ["gamma", "dgamma"];
    const INPUTS: &'static [Slot] = &[Slot::new("gamma", SEQUENCE), INITIAL_STATE];
    const OUTPUTS: &'static [Output] = &[Y, Output::new("log_y", SEQUENCE).wide(), LAST_STATE];
    const GIVEN: &'static [Slot] = &[
        Slot::new("gamma", SEQUENCE),
        Slot::new("y", SEQUENCE),
        INITIAL_STATE,
        Slot::new("dy", SEQUENCE),
        // Every call has log_y, but its cotangent may be absent.
        Slot::new("dlog_y", SEQUENCE).wide().optional(),
        Slot::new("dlast_state", STATE).wide().optional(),
    ];
    const COTANGENTS: &'static [&'static str] = &["dy", "dlog_y", "dlast_state"];
    type Options = ExpProductOptions;

    fn settings(options: &ExpProductOptions, wide: DType) -> Settings {
        let &ExpProductOptions { eps, log_min, reverse, .. } = options;
        // Bounds are inclusive, so they are rounded to the type in which the arithmetic compares.
        let round = |bound: f64| if wide == DType::F64 { bound } else { f64::from(bound as f32) };
        let floor = round(eps.max(log_min.exp()));
        let scan = Scan::ExpProduct { eps: round(eps), log_min: round(log_min), floor };
        Settings { scan, reverse }
    }
}

impl Table for Product {
    const NAME: &'static str = "cumprod_scan";
    const ABOUT: &'static str = "Cumulative product, exact for zeros";
    const BACKWARD: &'static str = "cumprod_scan_backward";
    const NAMES: [&'static str; 2] = ["gamma", "dgamma"];
    const INPUTS: &'static [Slot] = &[Slot::new("gamma", SEQUENCE), INITIAL_STATE];
    const OUTPUTS: &'static [Output] = &[Y, LAST_STATE];
    const GIVEN: &'static [Slot] =
        &op::given(Self::INPUTS, Self::OUTPUTS, ["gamma", "y", "initial_state", "dy", "dlast_state"]);
    type Options = Options;

    fn settings(options: &Options, _wide: DType) -> Settings {
        Settings { scan: Scan::Product, reverse: options.reverse }
    }
}

impl Table for LogSumExp {
    const NAME: &'static str = "logcumsumexp";
    const ABOUT: &'static str = "Logarithm of the cumulative sum of exponentials";
    const BACKWARD: &'static str = "logcumsumexp_backward";
    const NAMES: [&'static str; 2] = ["x", "dx"];
    const INPUTS: &'static [Slot] = &[Slot::new("x", SEQUENCE), INITIAL_STATE];
    const OUTPUTS: &'static [Output] = &[Y, LAST_STATE];
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "initial_state", "dy", "dlast_state"]);
    type Options = Options;

    fn settings(options: &Options, _wide: DType) -> Settings {
        Settings { scan: Scan::LogSumExp, reverse: options.reverse }
    }
}

impl<const REVERSED: bool> Table for Sum<REVERSED> {
    const NAME: &'static str = if REVERSED { "reverse_cumsum" } else { "cumsum" };
    const ABOUT: &'static str = if REVERSED { "Cumulative sum from the end" } else { "Cumulative sum" };
    const BACKWARD: &'static str = if REVERSED { "reverse_cumsum_backward" } else { "cumsum_backward" };
    const NAMES: [&'static str; 2] = ["x", "dx"];
    const INPUTS: &'static [Slot] = &[Slot::new("x", SEQUENCE), INITIAL_STATE];
    const OUTPUTS: &'static [Output] = &[Y, LAST_STATE];
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "initial_state", "dy", "dlast_state"]);
    type Options = SumOptions;

    fn settings(_options: &SumOptions, _wide: DType) -> Settings {
        Settings { scan: Scan::Sum, reverse: REVERSED }
    }
}

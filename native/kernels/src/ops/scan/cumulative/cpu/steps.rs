//! One step of each scan, on vectors: the operations of the walk over time in [`super::walk`].

use crate::cpu::Vector;

/// The operations of a scan. A step reads `IN` vectors, carries `N` vectors to the next step and has `OUT` results; the
/// total of a range of steps is `T` vectors.
///
/// All methods are `#[inline(always)]` and pass no vector through a closure: see [`crate::cpu::level::Work`].
pub trait Steps<const IN: usize, const N: usize, const T: usize, const OUT: usize>: Copy + Sync {
    /// The scan's result before its first step without an initial state.
    const FIRST: f64;

    /// The carry into the first step, from the caller's initial state.
    fn start<V: Vector>(self, given: V) -> [V; N];
    /// The carry into the first step without an initial state.
    fn neutral<V: Vector>(self) -> [V; N];
    /// Advances by a step: the new carry, and the results. `before` is the scan's result before this step.
    fn step<V: Vector>(self, state: [V; N], read: [V; IN], before: V) -> ([V; N], [V; OUT]);
    /// The last state, from the carry after the last step; `first` is the initial state.
    fn last<V: Vector>(self, state: [V; N], first: V) -> V;

    /// The total of an empty range of steps.
    fn identity<V: Vector>(self) -> [V; T];
    /// A total, extended by one step.
    fn extend<V: Vector>(self, stretch: [V; T], read: [V; IN], before: V) -> [V; T];
    /// The carry after the steps of a total.
    fn after<V: Vector>(self, state: [V; N], stretch: [V; T]) -> [V; N];
}

/// Adds `term` to `[sum, error]`, where `sum + error` is the exact sum as far as the pair can hold it (Knuth's
/// two-sum). An infinite sum has no error.
#[inline(always)]
fn add<V: Vector>([sum, error]: [V; 2], term: V) -> [V; 2] {
    let total = sum.add(term);
    let part = total.sub(sum);
    let lost = sum.sub(total.sub(part)).add(term.sub(part));
    [total, error.add(lost).where_less(total.abs(), V::constant(f64::INFINITY), V::zero())]
}

/// 0, or NaN where the lane is NaN.
#[inline(always)]
fn zero_or_nan<V: Vector>(v: V) -> V {
    let finite = v.max(V::constant(f32::MIN as f64)).min(V::constant(f32::MAX as f64));
    finite.sub(finite)
}

/// `exp(a - b)`, or 1 for equal infinities.
#[inline(always)]
fn ratio<V: Vector>(a: V, b: V) -> V {
    let (distance, none) = (a.sub(b), zero_or_nan(a).add(zero_or_nan(b)));
    distance.where_less(a, b, distance.where_less(b, a, none)).exp()
}

/// `y = state * x`.
#[derive(Clone, Copy)]
pub struct Product;

/// The total of a product is kept as a factor times a power of [`STEP`], since it may overflow or underflow the type
/// although its product with the state before it does not.
const STEP: f64 = (1u64 << 40) as f64;
const POWERS: usize = 26;

#[inline(always)]
fn scaled<V: Vector>([factor, power]: [V; 2]) -> [V; 2] {
    let (high, low, one) = (V::constant(STEP.sqrt()), V::constant(1.0 / STEP.sqrt()), V::constant(1.0));
    let (size, down, up) = (factor.abs(), factor.mul(V::constant(1.0 / STEP)), factor.mul(V::constant(STEP)));
    let factor = down.where_less(high, size, up.where_less(size, low, factor));
    [factor, power.add(one).where_less(high, size, power.sub(one).where_less(size, low, power))]
}

#[inline(always)]
fn unscaled<V: Vector>(state: V, [factor, power]: [V; 2]) -> V {
    let (mut state, one) = ([state, power], V::constant(1.0));
    for _ in 0..POWERS {
        state = scaled(state);
    }
    let [mut value, mut power] = [state[0].mul(factor), state[1]];
    for _ in 0..POWERS {
        let (down, up) = (value.mul(V::constant(1.0 / STEP)), value.mul(V::constant(STEP)));
        value = up.where_less(V::zero(), power, down.where_less(power, V::zero(), value));
        power = power.sub(one).where_less(V::zero(), power, power.add(one).where_less(power, V::zero(), power));
    }
    value
}

impl Steps<1, 1, 2, 1> for Product {
    const FIRST: f64 = 1.0;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 1] {
        [given]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 1] {
        [V::constant(1.0)]
    }
    #[inline(always)]
    fn step<V: Vector>(self, [state]: [V; 1], [x]: [V; 1], _before: V) -> ([V; 1], [V; 1]) {
        let y = state.mul(x);
        ([y], [y])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [state]: [V; 1], _first: V) -> V {
        state
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 2] {
        [V::constant(1.0), V::zero()]
    }
    #[inline(always)]
    fn extend<V: Vector>(self, [factor, power]: [V; 2], [x]: [V; 1], _before: V) -> [V; 2] {
        scaled([factor.mul(x), power])
    }
    #[inline(always)]
    fn after<V: Vector>(self, [state]: [V; 1], stretch: [V; 2]) -> [V; 1] {
        [unscaled(state, stretch)]
    }
}

/// The gradient of [`Product`]: reads `gamma` and `dy`, carries `gamma T`.
#[derive(Clone, Copy)]
pub struct ProductGradient;

impl Steps<2, 1, 3, 1> for ProductGradient {
    const FIRST: f64 = 1.0;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 1] {
        [given]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 1] {
        [V::zero()]
    }
    #[inline(always)]
    fn step<V: Vector>(self, [later]: [V; 1], [gamma, dy]: [V; 2], before: V) -> ([V; 1], [V; 1]) {
        let total = dy.add(later);
        ([gamma.mul(total)], [before.mul(total)])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [later]: [V; 1], _first: V) -> V {
        later
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 3] {
        [V::constant(1.0), V::zero(), V::zero()]
    }
    #[inline(always)]
    fn extend<V: Vector>(self, [factor, power, end]: [V; 3], [gamma, dy]: [V; 2], _before: V) -> [V; 3] {
        let [factor, power] = scaled([factor.mul(gamma), power]);
        [factor, power, gamma.mul(dy.add(end))]
    }
    #[inline(always)]
    fn after<V: Vector>(self, [later]: [V; 1], [factor, power, end]: [V; 3]) -> [V; 1] {
        [unscaled(later, [factor, power]).add(end)]
    }
}

/// `y = sum + x`; in reverse it is its own gradient.
#[derive(Clone, Copy)]
pub struct Sum;

impl Steps<1, 2, 2, 1> for Sum {
    const FIRST: f64 = 0.0;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 2] {
        [given, V::zero()]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 2] {
        [V::zero(); 2]
    }
    #[inline(always)]
    fn step<V: Vector>(self, state: [V; 2], [x]: [V; 1], _before: V) -> ([V; 2], [V; 1]) {
        let [sum, error] = add(state, x);
        ([sum, error], [sum.add(error)])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [sum, error]: [V; 2], _first: V) -> V {
        sum.add(error)
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 2] {
        [V::zero(); 2]
    }
    #[inline(always)]
    fn extend<V: Vector>(self, stretch: [V; 2], [x]: [V; 1], _before: V) -> [V; 2] {
        add(stretch, x)
    }
    #[inline(always)]
    fn after<V: Vector>(self, state: [V; 2], [sum, error]: [V; 2]) -> [V; 2] {
        add(add(state, sum), error)
    }
}

/// `y = exp(log_y)`, with `log_y` the sum of the logarithms of the values clamped to `[eps, 1]`.
#[derive(Clone, Copy)]
pub struct ExpProduct {
    pub eps: f64,
    pub log_min: f64,
}

impl ExpProduct {
    #[inline(always)]
    fn log<V: Vector>(self, gamma: V) -> V {
        let factor = gamma.max(V::constant(self.eps)).min(V::constant(1.0));
        factor.ln().max(V::constant(self.log_min))
    }
}

impl Steps<1, 2, 2, 2> for ExpProduct {
    const FIRST: f64 = 0.0;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 2] {
        [given, V::zero()]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 2] {
        [V::zero(); 2]
    }
    #[inline(always)]
    fn step<V: Vector>(self, state: [V; 2], [gamma]: [V; 1], _before: V) -> ([V; 2], [V; 2]) {
        let [sum, error] = add(state, self.log(gamma));
        let log_y = sum.add(error);
        ([sum, error], [log_y.exp(), log_y])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [sum, error]: [V; 2], _first: V) -> V {
        sum.add(error)
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 2] {
        [V::zero(); 2]
    }
    #[inline(always)]
    fn extend<V: Vector>(self, stretch: [V; 2], [gamma]: [V; 1], _before: V) -> [V; 2] {
        add(stretch, self.log(gamma))
    }
    #[inline(always)]
    fn after<V: Vector>(self, state: [V; 2], stretch: [V; 2]) -> [V; 2] {
        Sum.after(state, stretch)
    }
}

/// The gradient of [`ExpProduct`]: reads `gamma`, `dy` and `dlog_y`, carries `f T` and the sum of `dlog_y`.
#[derive(Clone, Copy)]
pub struct ExpProductGradient {
    pub floor: f64,
}

impl ExpProductGradient {
    #[inline(always)]
    fn factor<V: Vector>(self, gamma: V) -> V {
        gamma.max(V::constant(self.floor)).min(V::constant(1.0))
    }
}

impl Steps<3, 3, 4, 1> for ExpProductGradient {
    const FIRST: f64 = 1.0;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 3] {
        [V::zero(), given, V::zero()]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 3] {
        [V::zero(); 3]
    }
    #[inline(always)]
    fn step<V: Vector>(self, [later, sum, error]: [V; 3], [gamma, dy, dlog_y]: [V; 3], before: V) -> ([V; 3], [V; 1]) {
        let total = dy.add(later);
        let [sum, error] = add([sum, error], dlog_y);
        let slope = before.mul(total).add(sum.add(error).div(gamma));
        let (zero, floor, one) = (V::zero(), V::constant(self.floor), V::constant(1.0));
        let slope = zero.where_less(gamma, floor, zero.where_less(one, gamma, slope));
        ([self.factor(gamma).mul(total), sum, error], [slope])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [later, sum, error]: [V; 3], first: V) -> V {
        first.mul(later).add(sum.add(error))
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 4] {
        [V::constant(1.0), V::zero(), V::zero(), V::zero()]
    }
    #[inline(always)]
    fn extend<V: Vector>(self, [product, end, sum, error]: [V; 4], [gamma, dy, dlog_y]: [V; 3], _before: V) -> [V; 4] {
        let (factor, [sum, error]) = (self.factor(gamma), add([sum, error], dlog_y));
        [product.mul(factor), factor.mul(dy.add(end)), sum, error]
    }
    #[inline(always)]
    fn after<V: Vector>(self, [later, sum, error]: [V; 3], [product, end, more, lost]: [V; 4]) -> [V; 3] {
        let [sum, error] = add(add([sum, error], more), lost);
        [product.mul(later).add(end), sum, error]
    }
}

/// `y = max + ln(sum)`, where `max` is the largest `x` and `sum` adds up `exp(x - max)`.
#[derive(Clone, Copy)]
pub struct LogSumExp;

impl Steps<1, 3, 3, 1> for LogSumExp {
    const FIRST: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 3] {
        [given, V::constant(1.0), V::zero()]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 3] {
        self.identity()
    }
    #[inline(always)]
    fn step<V: Vector>(self, state: [V; 3], read: [V; 1], before: V) -> ([V; 3], [V; 1]) {
        let state = self.extend(state, read, before);
        (state, [self.last(state, before)])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [max, sum, error]: [V; 3], _first: V) -> V {
        max.add(sum.add(error).ln())
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 3] {
        [V::constant(f64::NEG_INFINITY), V::zero(), V::zero()]
    }
    // One exponential instead of the two of `after`: that of the larger of `max` and `x` is 1.
    #[inline(always)]
    fn extend<V: Vector>(self, [max, sum, error]: [V; 3], [x]: [V; 1], _before: V) -> [V; 3] {
        let one = V::constant(1.0);
        let below = x.sub(max).where_less(x, max, max.sub(x).where_less(max, x, zero_or_nan(x))).exp();
        let (faded, lost) = (sum.mul(below), error.mul(below));
        let [sum, error] =
            add([faded.where_less(max, x, sum), lost.where_less(max, x, error)], one.where_less(max, x, below));
        [x.where_less(max, x, max), sum, error]
    }
    #[inline(always)]
    fn after<V: Vector>(self, [max, sum, error]: [V; 3], [other, more, lost]: [V; 3]) -> [V; 3] {
        let highest = other.where_less(max, other, max);
        let (ours, theirs) = (ratio(max, highest), ratio(other, highest));
        let [sum, error] = add([sum.mul(ours), error.mul(ours)], more.mul(theirs));
        [highest, sum, error.add(lost.mul(theirs))]
    }
}

/// The gradient of [`LogSumExp`]: reads `x`, `y` and `dy`, carries `exp(y[t-1] - y[t]) G`.
#[derive(Clone, Copy)]
pub struct LogSumExpGradient;

impl Steps<3, 1, 2, 1> for LogSumExpGradient {
    const FIRST: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn start<V: Vector>(self, given: V) -> [V; 1] {
        [given]
    }
    #[inline(always)]
    fn neutral<V: Vector>(self) -> [V; 1] {
        [V::zero()]
    }
    #[inline(always)]
    fn step<V: Vector>(self, [later]: [V; 1], [x, y, dy]: [V; 3], before: V) -> ([V; 1], [V; 1]) {
        let total = dy.add(later);
        let slope = ratio(x, y).mul(total).where_less(V::constant(f64::NEG_INFINITY), x, zero_or_nan(x));
        ([ratio(before, y).mul(total)], [slope])
    }
    #[inline(always)]
    fn last<V: Vector>(self, [later]: [V; 1], _first: V) -> V {
        later
    }
    #[inline(always)]
    fn identity<V: Vector>(self) -> [V; 2] {
        [V::constant(1.0), V::zero()]
    }
    #[inline(always)]
    fn extend<V: Vector>(self, [product, end]: [V; 2], [_x, y, dy]: [V; 3], before: V) -> [V; 2] {
        let fade = ratio(before, y);
        [product.mul(fade), fade.mul(dy.add(end))]
    }
    #[inline(always)]
    fn after<V: Vector>(self, [later]: [V; 1], [product, end]: [V; 2]) -> [V; 1] {
        [product.mul(later).add(end)]
    }
}

//! The activation functions as types, so that loops are compiled separately for each.

use super::math;
use super::vector::Vector;

/// An activation function and its derivative.
pub trait Unary: Send + Sync {
    /// The function.
    fn value<V: Vector>(v: V) -> V;
    /// The derivative.
    fn slope<V: Vector>(v: V) -> V;
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident = $value:path, $slope:path;)*) => {
        $(
            $(#[$doc])*
            pub struct $name;

            impl Unary for $name {
                #[inline(always)]
                fn value<V: Vector>(v: V) -> V {
                    $value(v)
                }
                #[inline(always)]
                fn slope<V: Vector>(v: V) -> V {
                    $slope(v)
                }
            }
        )*
    };
}

unary! {
    /// The identity.
    Identity = same, one;
    /// `1 / (1 + exp(-v))`.
    Sigmoid = math::sigmoid, math::sigmoid_slope;
    /// `v sigmoid(v)`.
    Silu = math::silu, math::silu_slope;
    /// GELU by tanh.
    GeluTanh = math::gelu_tanh, math::gelu_tanh_slope;
    /// GELU by erf.
    GeluErf = math::gelu_erf, math::gelu_erf_slope;
    /// `ln(1 + exp(v))`.
    Softplus = math::softplus, math::sigmoid;
    /// `max(v, 0)`.
    Relu = math::relu, math::relu_slope;
}

#[inline(always)]
fn same<V: Vector>(v: V) -> V {
    v
}

#[inline(always)]
fn one<V: Vector>(_: V) -> V {
    V::constant(1.0)
}

/// Calls `$body` with the type of an `Option<Activation>` as `$type`.
#[macro_export]
macro_rules! with_activation {
    ($activation:expr, $type:ident => $body:expr) => {{
        use $crate::base::activation::Activation;
        use $crate::cpu::activation;
        macro_rules! with {
            ($unary:ident) => {{
                type $type = activation::$unary;
                $body
            }};
        }
        match $activation {
            None => with!(Identity),
            Some(Activation::Sigmoid) => with!(Sigmoid),
            Some(Activation::Silu) => with!(Silu),
            Some(Activation::GeluTanh) => with!(GeluTanh),
            Some(Activation::GeluErf) => with!(GeluErf),
            Some(Activation::Softplus) => with!(Softplus),
            Some(Activation::Relu) => with!(Relu),
        }
    }};
}

//! All ops, one folder each, in families; and their list.

pub mod activations;
pub mod attention;
pub mod causal_conv1d;
pub mod layers;
pub mod mm_rec;
pub mod norm;
pub mod positions;
pub mod products;
pub mod scan;

use crate::error::{Error, Kind, Result};
use crate::op::{Any, AnyOp, Call, Named, Op, Packed};
use crate::tensor::Spec;
use std::collections::HashMap;
use std::sync::LazyLock;

macro_rules! list {
    ($($op:ty),* $(,)?) => {
        /// All ops.
        pub static OPS: &[&dyn AnyOp] = &[$(&Any::<$op>::NEW),*];
    };
}

list![
    Packed<crate::ops::scan::selective_scan::SelectiveScan>,
    Packed<crate::ops::scan::selective_scan::backward::SelectiveScanBackward>,
    crate::ops::scan::selective_state_update::SelectiveStateUpdate,
    Packed<crate::ops::scan::ssd::Ssd>,
    Packed<crate::ops::scan::ssd::SsdBackward>,
    Packed<crate::ops::scan::gated_delta_rule::GatedDeltaRule>,
    Packed<crate::ops::scan::gated_delta_rule::GatedDeltaRuleBackward>,
    Packed<crate::ops::scan::linear_attention::LinearAttention>,
    Packed<crate::ops::scan::linear_attention::LinearAttentionBackward>,
    Packed<crate::ops::scan::linear_scan::LinearScan>,
    Packed<crate::ops::scan::linear_scan::LinearScanBackward>,
    crate::ops::scan::cumulative::ExpProductScan,
    crate::ops::scan::cumulative::ExpProductScanBackward,
    crate::ops::scan::cumulative::CumprodScan,
    crate::ops::scan::cumulative::CumprodScanBackward,
    crate::ops::scan::cumulative::LogCumSumExp,
    crate::ops::scan::cumulative::LogCumSumExpBackward,
    crate::ops::scan::cumulative::CumSum,
    crate::ops::scan::cumulative::CumSumBackward,
    crate::ops::scan::cumulative::ReverseCumSum,
    crate::ops::scan::cumulative::ReverseCumSumBackward,
    Packed<crate::ops::causal_conv1d::CausalConv1d>,
    Packed<crate::ops::causal_conv1d::CausalConv1dBackward>,
    crate::ops::causal_conv1d::update::CausalConv1dUpdate,
    crate::ops::products::linear::Linear,
    crate::ops::products::linear::LinearBackward,
    crate::ops::layers::mamba_block::MambaBlock,
    crate::ops::layers::mamba_block::MambaBlockBackward,
    crate::ops::activations::Activations,
    crate::ops::activations::ActivationsBackward,
    crate::ops::norm::RmsNorm,
    crate::ops::norm::RmsNormBackward,
    crate::ops::norm::LayerNorm,
    crate::ops::norm::LayerNormBackward,
    crate::ops::norm::LayerNormGelu,
    crate::ops::norm::LayerNormGeluBackward,
    crate::ops::norm::gated::GatedRmsNorm,
    crate::ops::norm::gated::GatedRmsNormBackward,
    crate::ops::products::matmul::Matmul,
    crate::ops::products::matmul::MatmulBackward,
    crate::ops::positions::rope::Rope,
    crate::ops::positions::rope::RopeBackward,
    crate::ops::positions::sinusoidal_positions::SinusoidalPositions,
    crate::ops::positions::sinusoidal_positions::SinusoidalPositionsBackward,
    Packed<crate::ops::attention::Attention>,
    Packed<crate::ops::attention::AttentionBackward>,
    crate::ops::attention::decode::Decode,
    crate::ops::layers::swiglu_mlp::SwigluMlp,
    crate::ops::layers::swiglu_mlp::SwigluMlpBackward,
    crate::ops::layers::mha::Mha,
    crate::ops::layers::mha::MhaBackward,
    crate::ops::layers::transformer_block::TransformerBlock,
    crate::ops::layers::transformer_block::TransformerBlockBackward,
    crate::ops::mm_rec::mdi::update::MdiUpdate,
    crate::ops::mm_rec::mdi::update::MdiUpdateBackward,
    crate::ops::mm_rec::mdi::gamma::MdiGamma,
    crate::ops::mm_rec::mdi::gamma::MdiGammaBackward,
    crate::ops::mm_rec::mdi::Mdi,
    crate::ops::mm_rec::mdi::MdiBackward,
    crate::ops::mm_rec::block_recurrence::BlockRecurrence,
    crate::ops::mm_rec::block_recurrence::BlockRecurrenceBackward,
    crate::ops::mm_rec::hds::HdsConstruct,
    crate::ops::mm_rec::hds::HdsConstructBackward,
    crate::ops::mm_rec::hds::query::HdsQueryTopk,
    crate::ops::mm_rec::multi_memory_attention::MultiMemoryAttention,
    crate::ops::mm_rec::multi_memory_attention::MultiMemoryAttentionBackward,
    crate::ops::mm_rec::mmrec_block::MmrecBlock,
    crate::ops::mm_rec::mmrec_block::MmrecBlockBackward,
    crate::ops::mm_rec::memory::write_short::WriteShort,
    crate::ops::mm_rec::memory::write_long::WriteLong,
    crate::ops::products::blocks::Quantize,
    crate::ops::products::blocks::Dequantize,
    crate::ops::products::blocks::MatmulQ8Q8,
    crate::ops::products::blocks::MatmulQ8Q4,
    crate::ops::products::blocks::MatmulF32Q8,
    crate::ops::products::blocks::MatmulF32Q4,
    crate::ops::products::ternary::layouts::ConvertTernary,
    crate::ops::products::ternary::stats::StatsTernary,
    crate::ops::products::ternary::rules::QuantizeTernary,
    crate::ops::products::ternary::dequantize::DequantizeTernary,
    crate::ops::products::ternary::rules::ActivationI8,
    crate::ops::products::ternary::products::DotTernary,
    crate::ops::products::ternary::products::Matmul<crate::ops::products::ternary::products::Ternary>,
    crate::ops::products::ternary::products::Matmul<crate::ops::products::ternary::products::I8>,
    crate::ops::products::ternary::products::Matmul<crate::ops::products::ternary::products::F32>,
    crate::ops::products::ternary::linear::TernaryLinear,
    crate::ops::products::ternary::net::SimpleRotorNet,
    crate::ops::products::ternary::net::Argmax,
    crate::ops::products::ternary::sums::ColumnSumsTernary,
    crate::ops::products::ternary::sums::VerifySumsTernary,
];

/// A checked call of a listed op by the code of this crate, where [`Call::new`] compiles the op in the caller's too.
pub fn call<O: Op>(inputs: Named<Spec>, options: &O::Options) -> Result<Call> {
    find(O::NAME)?.call(inputs, options)
}

/// The op of that name, or an error if there is none.
pub fn find(name: &str) -> Result<&'static dyn AnyOp> {
    static BY_NAME: LazyLock<HashMap<&str, &dyn AnyOp>> =
        LazyLock::new(|| OPS.iter().map(|&op| (op.about().name, op)).collect());
    BY_NAME
        .get(name)
        .copied()
        .ok_or_else(|| Error::new(Kind::Argument, "op").expected("the name of an op").got(format_args!("`{name}`")))
}

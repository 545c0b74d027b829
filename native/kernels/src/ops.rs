//! The list of all ops.

use crate::error::{Error, Kind, Result};
use crate::op::{Any, AnyOp};
use std::collections::HashMap;
use std::sync::LazyLock;

macro_rules! list {
    ($($op:ty),* $(,)?) => {
        /// Every op there is.
        pub static OPS: &[&dyn AnyOp] = &[$(&Any::<$op>::NEW),*];
    };
}

list![
    crate::selective_scan::SelectiveScan,
    crate::selective_scan::backward::SelectiveScanBackward,
    crate::selective_state_update::SelectiveStateUpdate,
    crate::linear_scan::LinearScan,
    crate::linear_scan::LinearScanBackward,
    crate::cumulative::ExpProductScan,
    crate::cumulative::ExpProductScanBackward,
    crate::cumulative::CumprodScan,
    crate::cumulative::CumprodScanBackward,
    crate::cumulative::LogCumSumExp,
    crate::cumulative::LogCumSumExpBackward,
    crate::cumulative::CumSum,
    crate::cumulative::CumSumBackward,
    crate::cumulative::ReverseCumSum,
    crate::cumulative::ReverseCumSumBackward,
    crate::causal_conv1d::CausalConv1d,
    crate::causal_conv1d::CausalConv1dBackward,
    crate::causal_conv1d::update::CausalConv1dUpdate,
    crate::linear::Linear,
    crate::linear::LinearBackward,
    crate::mamba_block::MambaBlock,
    crate::mamba_block::MambaBlockBackward,
    crate::activations::Activations,
    crate::activations::ActivationsBackward,
    crate::norm::RmsNorm,
    crate::norm::RmsNormBackward,
    crate::norm::LayerNorm,
    crate::norm::LayerNormBackward,
    crate::norm::LayerNormGelu,
    crate::norm::LayerNormGeluBackward,
    crate::matmul::Matmul,
    crate::matmul::MatmulBackward,
    crate::rope::Rope,
    crate::rope::RopeBackward,
    crate::sinusoidal_positions::SinusoidalPositions,
    crate::sinusoidal_positions::SinusoidalPositionsBackward,
    crate::attention::Attention,
    crate::attention::AttentionBackward,
    crate::attention::decode::Decode,
    crate::swiglu_mlp::SwigluMlp,
    crate::swiglu_mlp::SwigluMlpBackward,
    crate::mha::Mha,
    crate::mha::MhaBackward,
    crate::transformer_block::TransformerBlock,
    crate::transformer_block::TransformerBlockBackward,
    crate::mdi::update::MdiUpdate,
    crate::mdi::update::MdiUpdateBackward,
    crate::mdi::gamma::MdiGamma,
    crate::mdi::gamma::MdiGammaBackward,
    crate::mdi::Mdi,
    crate::mdi::MdiBackward,
    crate::block_recurrence::BlockRecurrence,
    crate::block_recurrence::BlockRecurrenceBackward,
    crate::hds::HdsConstruct,
    crate::hds::HdsConstructBackward,
    crate::hds::query::HdsQueryTopk,
    crate::multi_memory_attention::MultiMemoryAttention,
    crate::multi_memory_attention::MultiMemoryAttentionBackward,
    crate::mmrec_block::MmrecBlock,
    crate::mmrec_block::MmrecBlockBackward,
    crate::memory::write_short::WriteShort,
    crate::memory::write_long::WriteLong,
    crate::memory::state::MemoryState,
    crate::blocks::Quantize,
    crate::blocks::Dequantize,
    crate::blocks::MatmulQ8Q8,
    crate::blocks::MatmulQ8Q4,
    crate::blocks::MatmulF32Q8,
    crate::blocks::MatmulF32Q4,
    crate::blocks::F16Convert,
    crate::blocks::BlockQuantize,
    crate::blocks::BlockDequantize,
    crate::blocks::BlockMatmul,
    crate::ternary::encode::TernaryEncode,
    crate::ternary::encode::layouts::TernaryLayouts,
    crate::ternary::encode::sentinel::TernarySentinel,
    crate::ternary::layouts::ConvertTernary,
    crate::ternary::stats::StatsTernary,
    crate::ternary::rules::QuantizeTernary,
    crate::ternary::rules::TernaryQuantize,
    crate::ternary::dequantize::DequantizeTernary,
    crate::ternary::rules::ActivationI8,
    crate::ternary::products::DotTernary,
    crate::ternary::products::Matmul<crate::ternary::products::Ternary>,
    crate::ternary::products::Matmul<crate::ternary::products::I8>,
    crate::ternary::products::Matmul<crate::ternary::products::F32>,
    crate::ternary::linear::all::TernaryMatmul,
    crate::ternary::linear::TernaryLinear,
    crate::ternary::net::SimpleRotorNet,
    crate::ternary::net::Argmax,
    crate::ternary::sums::ColumnSumsTernary,
    crate::ternary::sums::VerifySumsTernary,
];

/// The op of that name, or an error that says that there is none.
pub fn find(name: &str) -> Result<&'static dyn AnyOp> {
    static BY_NAME: LazyLock<HashMap<&str, &dyn AnyOp>> =
        LazyLock::new(|| OPS.iter().map(|&op| (op.about().name, op)).collect());
    BY_NAME
        .get(name)
        .copied()
        .ok_or_else(|| Error::new(Kind::Argument, "op").expected("the name of an op").got(format_args!("`{name}`")))
}

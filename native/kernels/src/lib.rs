//! Fast sequence-model kernels for CPUs (AVX-512, AVX2, NEON, scalar) and NVIDIA GPUs.
//!
//! Read in this order: [`tensor`] and [`error`] (what goes in and out), [`op`] (what an op is),
//! [`cpu`] and [`cuda`] (what kernels are written with), then the ops, one folder each; [`place`] is for
//! ops that are made of other ops, and [`mamba`] is a model made of them.

pub mod cpu;
pub mod cuda;
pub mod error;
mod file;
pub mod op;
pub mod place;
pub mod safetensors;
pub mod tensor;
pub mod tokenizer;

pub mod activations;
pub mod attention;
pub mod block_recurrence;
pub mod causal_conv1d;
pub mod cumulative;
pub mod hds;
pub mod linear;
pub mod linear_scan;
pub mod mamba;
pub mod mamba_block;
pub mod matmul;
pub mod mdi;
pub mod memory;
pub mod mha;
pub mod mmrec_block;
pub mod multi_memory_attention;
pub mod norm;
pub mod rope;
pub mod selective_scan;
pub mod selective_state_update;
pub mod sinusoidal_positions;
pub mod swiglu_mlp;
pub mod ternary;
pub mod transformer_block;

/// Calls `$with!(Op)` for every op there is: the one list that all op-independent code walks.
#[macro_export]
macro_rules! for_each_op {
    ($with:ident) => {
        $with!($crate::selective_scan::SelectiveScan);
        $with!($crate::selective_scan::backward::SelectiveScanBackward);
        $with!($crate::selective_state_update::SelectiveStateUpdate);
        $with!($crate::linear_scan::LinearScan);
        $with!($crate::linear_scan::LinearScanBackward);
        $with!($crate::cumulative::ExpProductScan);
        $with!($crate::cumulative::ExpProductScanBackward);
        $with!($crate::cumulative::CumprodScan);
        $with!($crate::cumulative::CumprodScanBackward);
        $with!($crate::cumulative::LogCumSumExp);
        $with!($crate::cumulative::LogCumSumExpBackward);
        $with!($crate::cumulative::CumSum);
        $with!($crate::cumulative::CumSumBackward);
        $with!($crate::cumulative::ReverseCumSum);
        $with!($crate::cumulative::ReverseCumSumBackward);
        $with!($crate::causal_conv1d::CausalConv1d);
        $with!($crate::causal_conv1d::CausalConv1dBackward);
        $with!($crate::causal_conv1d::update::CausalConv1dUpdate);
        $with!($crate::linear::Linear);
        $with!($crate::linear::LinearBackward);
        $with!($crate::mamba_block::MambaBlock);
        $with!($crate::mamba_block::MambaBlockBackward);
        $with!($crate::activations::Activations);
        $with!($crate::activations::ActivationsBackward);
        $with!($crate::norm::RmsNorm);
        $with!($crate::norm::RmsNormBackward);
        $with!($crate::norm::LayerNorm);
        $with!($crate::norm::LayerNormBackward);
        $with!($crate::norm::LayerNormGelu);
        $with!($crate::norm::LayerNormGeluBackward);
        $with!($crate::matmul::Matmul);
        $with!($crate::matmul::MatmulBackward);
        $with!($crate::rope::Rope);
        $with!($crate::rope::RopeBackward);
        $with!($crate::sinusoidal_positions::SinusoidalPositions);
        $with!($crate::sinusoidal_positions::SinusoidalPositionsBackward);
        $with!($crate::attention::Attention);
        $with!($crate::attention::AttentionBackward);
        $with!($crate::attention::decode::Decode);
        $with!($crate::swiglu_mlp::SwigluMlp);
        $with!($crate::swiglu_mlp::SwigluMlpBackward);
        $with!($crate::mha::Mha);
        $with!($crate::mha::MhaBackward);
        $with!($crate::transformer_block::TransformerBlock);
        $with!($crate::transformer_block::TransformerBlockBackward);
        $with!($crate::mdi::update::MdiUpdate);
        $with!($crate::mdi::update::MdiUpdateBackward);
        $with!($crate::mdi::gamma::MdiGamma);
        $with!($crate::mdi::gamma::MdiGammaBackward);
        $with!($crate::mdi::Mdi);
        $with!($crate::mdi::MdiBackward);
        $with!($crate::block_recurrence::BlockRecurrence);
        $with!($crate::block_recurrence::BlockRecurrenceBackward);
        $with!($crate::hds::HdsConstruct);
        $with!($crate::hds::HdsConstructBackward);
        $with!($crate::hds::query::HdsQueryTopk);
        $with!($crate::multi_memory_attention::MultiMemoryAttention);
        $with!($crate::multi_memory_attention::MultiMemoryAttentionBackward);
        $with!($crate::mmrec_block::MmrecBlock);
        $with!($crate::mmrec_block::MmrecBlockBackward);
        $with!($crate::memory::write_short::WriteShort);
        $with!($crate::memory::write_long::WriteLong);
        $with!($crate::memory::state::MemoryState);
        $with!($crate::ternary::encode::TernaryEncode);
        $with!($crate::ternary::encode::layouts::TernaryLayouts);
        $with!($crate::ternary::encode::sentinel::TernarySentinel);
        $with!($crate::ternary::layouts::ConvertTernary);
        $with!($crate::ternary::stats::StatsTernary);
        $with!($crate::ternary::rules::QuantizeTernary);
        $with!($crate::ternary::rules::TernaryQuantize);
        $with!($crate::ternary::rules::ActivationI8);
        $with!($crate::ternary::products::DotTernary);
        $with!($crate::ternary::products::Matmul<$crate::ternary::products::Ternary>);
        $with!($crate::ternary::products::Matmul<$crate::ternary::products::I8>);
        $with!($crate::ternary::products::Matmul<$crate::ternary::products::F32>);
        $with!($crate::ternary::linear::all::TernaryMatmul);
        $with!($crate::ternary::linear::TernaryLinear);
        $with!($crate::ternary::net::SimpleRotorNet);
        $with!($crate::ternary::net::Argmax);
        $with!($crate::ternary::sums::ColumnSumsTernary);
        $with!($crate::ternary::sums::VerifySumsTernary);
    };
}

defmodule Sidewinder.CustomCall do
  @moduledoc """
  Sidewinder's ops in graphs that EXLA compiles.

  EXLA asks here for each block with a struct of `Sidewinder.Block`. The answer is `:skip`: XLA then
  compiles the block's default, the op in pure Nx.
  """

  @doc "What `EXLA.CustomCall.call/4` gives; the place to name XLA's targets of the kernels."
  @spec call(struct, Nx.Container.t(), [Nx.Tensor.t()], struct) :: :skip
  def call(_op, _out, _args, _client), do: :skip
end

alias Sidewinder.Block

defimpl EXLA.CustomCall,
  for: [
    Block.SelectiveScan,
    Block.SelectiveScanBackward,
    Block.SelectiveStateUpdate,
    Block.LinearScan,
    Block.LinearScanBackward,
    Block.ExpProductScan,
    Block.ExpProductScanBackward,
    Block.CumprodScan,
    Block.CumprodScanBackward,
    Block.Logcumsumexp,
    Block.LogcumsumexpBackward,
    Block.Cumsum,
    Block.CumsumBackward,
    Block.ReverseCumsum,
    Block.ReverseCumsumBackward,
    Block.CausalConv1d,
    Block.CausalConv1dBackward,
    Block.CausalConv1dUpdate,
    Block.MambaBlock,
    Block.MambaBlockBackward,
    Block.Activations,
    Block.ActivationsBackward,
    Block.RmsNorm,
    Block.RmsNormBackward,
    Block.LayerNorm,
    Block.LayerNormBackward,
    Block.LayerNormGelu,
    Block.LayerNormGeluBackward,
    Block.Linear,
    Block.LinearBackward,
    Block.Matmul,
    Block.MatmulBackward,
    Block.Rope,
    Block.RopeBackward,
    Block.SinusoidalPositions,
    Block.SinusoidalPositionsBackward,
    Block.Attention,
    Block.AttentionBackward,
    Block.Decode,
    Block.SwigluMlp,
    Block.SwigluMlpBackward,
    Block.Mha,
    Block.MhaBackward,
    Block.TransformerBlock,
    Block.TransformerBlockBackward,
    Block.MdiUpdate,
    Block.MdiUpdateBackward,
    Block.MdiGamma,
    Block.MdiGammaBackward,
    Block.Mdi,
    Block.MdiBackward,
    Block.BlockRecurrence,
    Block.BlockRecurrenceBackward,
    Block.HdsConstruct,
    Block.HdsConstructBackward,
    Block.HdsQueryTopk,
    Block.MultiMemoryAttention,
    Block.MultiMemoryAttentionBackward,
    Block.MmrecBlock,
    Block.MmrecBlockBackward
  ] do
  defdelegate call(op, out, args, client), to: Sidewinder.CustomCall
end

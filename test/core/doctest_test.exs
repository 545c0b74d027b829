defmodule Sidewinder.DoctestTest do
  use ExUnit.Case, async: true

  doctest Sidewinder.Error
  doctest Sidewinder.Tensor
  doctest Sidewinder.Device
  doctest Sidewinder.Kernel
  doctest Sidewinder.Kernel.Scan
  doctest Sidewinder.Kernel.SequenceParallel
  doctest Sidewinder.Kernel.Conv
  doctest Sidewinder.Kernel.NN
  doctest Sidewinder.Kernel.Attention
  doctest Sidewinder.Kernel.Mamba
  doctest Sidewinder.Kernel.MMRec
  doctest Sidewinder.Kernel.Quant
  doctest Sidewinder.Kernel.Ternary
  doctest Sidewinder.MMRec.Memory
  doctest Sidewinder.KVCache
  doctest Sidewinder.Transformer
  doctest Sidewinder.Mamba
  doctest Sidewinder.Mamba.Session
  doctest Sidewinder.Mamba.Trainer
  doctest Sidewinder.Tokenizer
  doctest Sidewinder.Safetensors
  doctest Sidewinder.Quantized
  doctest Sidewinder.Compare
  doctest Sidewinder.RandomInputs
  doctest Sidewinder.Shapes
  doctest Sidewinder.JSON
  doctest Sidewinder.Progress
  doctest Sidewinder.Cancellation
end

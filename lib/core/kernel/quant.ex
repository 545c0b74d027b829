defmodule Sidewinder.Kernel.Quant do
  @moduledoc """
  Quantized weights: ggml's block formats Q8_0 and Q4_0, byte by byte, and products with them.

  A row is cut into blocks of 32 values that share a scale `d`, stored as `:f16`:

      :q8_0   34 bytes   d, 32 signed bytes q                     value j = d q[j]
      :q4_0   18 bytes   d, 16 bytes of two nibbles               value j = d (nibble - 8): j in the low nibble
                                                                  of byte j, j + 16 in the high one

  Quantized tensors are `:u8` tensors of bytes, whose last axis has 34 or 18 bytes for each block. Weights are stored
  `{out, in}`, in blocks along `in`. Floats are `:f32`, `:bf16` or `:f16`; the arithmetic is `:f32`, and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Tensor}

  ## Block formats

  @typedoc "A block format."
  @type format :: :q8_0 | :q4_0

  @doc """
  Quantizes rows of floats.

    * `x` - `{..., N}`, where N is a multiple of 32

  Options besides those of `Sidewinder.Kernel`:

    * `:unchecked` - stores infinite scales for values that are not finite or too large (8.32e6 for `:q8_0`, 5.24e5 for
      `:q4_0`), as ggml does; by default they are errors
    * `:progress`, `:cancel` - to follow and to end the call: see `Sidewinder.Progress`

  Returns the bytes, `{..., N / 32 * 34}` or `{..., N / 32 * 18}`. Bytes are the same on all devices.

      iex> x = Sidewinder.Tensor.from_list(Enum.to_list(-16..15), :f32, {32})
      iex> q = Sidewinder.Kernel.Quant.quantize(x, :q4_0)
      iex> Base.encode16(q.data)
      "0040809191A2A2B3B3C4C4D5D5E6E6F7F7F8"
      iex> Sidewinder.Kernel.Quant.quantize(Sidewinder.Tensor.from_list([1, 2], :f32, {2}), :q4_0)
      ** (Sidewinder.Error) quantize: x: expected shape (..., N) with N a multiple of 32, got (2). A block is 32 values of a row; pad rows with zeros
  """
  @spec quantize(Tensor.t(), format, keyword) :: Tensor.t()
  def quantize(x, format, options \\ []),
    do: Kernel.call_watched(:quantize, [{"x", x}], options, %{format: format})["q"]

  @doc """
  Reads quantized rows back, as `:f32`.

    * `q` - `{..., BYTES}` of type `:u8`, whole blocks of the format

  Takes `:progress` and `:cancel`, as `quantize/3` does.

      iex> x = Sidewinder.Tensor.from_list(Enum.to_list(0..31), :f32, {32})
      iex> q = Sidewinder.Kernel.Quant.quantize(x, :q8_0)
      iex> x = Sidewinder.Kernel.Quant.dequantize(q, :q8_0)
      iex> Enum.take(Sidewinder.Tensor.to_list(x), 3)
      [0.0, 0.9765625, 1.953125]
  """
  @spec dequantize(Tensor.t(), format, keyword) :: Tensor.t()
  def dequantize(q, format, options \\ []),
    do: Kernel.call_watched(:dequantize, [{"q", q}], options, %{format: format})["x"]

  @doc """
  The dense layer `activation(x w^T + bias)` of x quantized to `:q8_0` and weights in `:q8_0`.

    * `x` - `{..., I}`, where I is a multiple of 32
    * `w` - `{O, I / 32 * 34}`, as `quantize/3` gives it

  Options besides those of `Sidewinder.Kernel`:

    * `:bias` - `{O}` of type `:f32`
    * `:activation` - as `Sidewinder.Kernel.NN.linear/3` has it; none by default

  Returns `y`, `{..., O}`, in the type of x. A row of x that is not finite gives a row of y that is not finite.

      iex> x = Sidewinder.Tensor.from_list(Enum.to_list(0..31), :f32, {1, 32})
      iex> w = Sidewinder.Kernel.Quant.quantize(x, :q8_0)
      iex> [y] = Sidewinder.Tensor.to_list(Sidewinder.Kernel.Quant.matmul_q8_q8(x, w))
      iex> Float.round(y, 1)
      10429.9
  """
  @spec matmul_q8_q8(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def matmul_q8_q8(x, w, options \\ []), do: product(:matmul_q8_q8, x, w, options)

  @doc """
  Like `matmul_q8_q8/3`, with weights in `:q4_0`, `{O, I / 32 * 18}`.

      iex> [x, w] = for range <- [0..31, -16..15],
      ...>   do: Sidewinder.Tensor.from_list(Enum.to_list(range), :f32, {1, 32})
      iex> w = Sidewinder.Kernel.Quant.quantize(w, :q4_0)
      iex> [y] = Sidewinder.Tensor.to_list(Sidewinder.Kernel.Quant.matmul_q8_q4(x, w))
      iex> Float.round(y, 3)
      2679.199
      iex> bias = Sidewinder.Tensor.from_list([-3000], :f32, {1})
      iex> Sidewinder.Kernel.Quant.matmul_q8_q4(x, w, bias: bias, activation: :relu)
      #Sidewinder.Tensor<f32 (1, 1) [0.0]>
  """
  @spec matmul_q8_q4(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def matmul_q8_q4(x, w, options \\ []), do: product(:matmul_q8_q4, x, w, options)

  @doc """
  The dense layer with weights in `:q8_0` and x as it is: more exact than `matmul_q8_q8/3`, and slower. Options are
  the same.

      iex> x = Sidewinder.Tensor.from_list(List.duplicate(2, 32), :f32, {1, 32})
      iex> w = Sidewinder.Kernel.Quant.quantize(x, :q8_0)
      iex> Sidewinder.Kernel.Quant.matmul_f32_q8(x, w)
      #Sidewinder.Tensor<f32 (1, 1) [127.9921875]>
  """
  @spec matmul_f32_q8(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def matmul_f32_q8(x, w, options \\ []), do: product(:matmul_f32_q8, x, w, options)

  @doc """
  Like `matmul_f32_q8/3`, with weights in `:q4_0`.

      iex> x = Sidewinder.Tensor.from_list(List.duplicate(-2, 32), :f32, {1, 32})
      iex> w = Sidewinder.Kernel.Quant.quantize(x, :q4_0)
      iex> Sidewinder.Kernel.Quant.matmul_f32_q4(x, w)
      #Sidewinder.Tensor<f32 (1, 1) [128.0]>
  """
  @spec matmul_f32_q4(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def matmul_f32_q4(x, w, options \\ []), do: product(:matmul_f32_q4, x, w, options)

  defp product(op, x, w, options),
    do: Kernel.call(op, [{"x", x}, {"w", w}], options)["y"]
end

defmodule Sidewinder.GGUF do
  @moduledoc """
  GGUF files, in which ggml and llama.cpp keep models: what is in them, and one tensor at a time.

  Versions 2 and 3 are read, little-endian. Shapes are outermost first, `{out, in}` for a weight, where the file has them
  the other way round. A tensor of ggml's block formats `Q8_0` or `Q4_0` comes as a `Sidewinder.Quantized`, its bytes as
  they are; one of `F32`, `F16`, `BF16`, `F64` or integers as a `Sidewinder.Tensor`. Tensors of other types, also unknown ones such
  as those of forks of ggml, are listed but not loaded.

      Sidewinder.GGUF.metadata("model.gguf")["general.architecture"]
      w = Sidewinder.GGUF.load!("model.gguf", "blk.0.ffn_up.weight")
      y = Sidewinder.Quantized.matmul(x, w)

  All functions raise `Sidewinder.Error` of kind `:file` for a file that is missing, damaged or of another version.
  """

  alias Sidewinder.{Error, Native, Options, Progress, Quantized, Tensor}

  @formats %{"Q8_0" => :q8_0, "Q4_0" => :q4_0}

  @typedoc """
  What a file says about a tensor. `type` is as the file names it, such as `Q4_K`, and `bytes` what its data takes.

  A type that is not known has its number, and its name where that is known, such as `type 36 (I2_S)`; `bytes` is then
  the room up to the next tensor or the end of the file.
  """
  @type entry :: %{name: String.t(), type: String.t(), shape: tuple, bytes: non_neg_integer}

  @typedoc "A value of the metadata. A text is the bytes of the file, which need not be valid UTF-8."
  @type value ::
          integer | float | :nan | :infinity | :neg_infinity | boolean | binary | [value]

  @doc "What tensors a file holds, in the order of its data."
  @spec index(Path.t()) :: [entry]
  def index(path) do
    for {name, type, sizes, bytes} <- Error.unwrap!(Native.gguf_index(Options.path!(path))) do
      %{name: name, type: type, shape: List.to_tuple(sizes), bytes: bytes}
    end
  end

  @doc "All metadata of a file by its keys, such as `general.architecture`."
  @spec metadata(Path.t()) :: %{String.t() => value}
  def metadata(path), do: Map.new(Error.unwrap!(Native.gguf_metadata(Options.path!(path))))

  @doc """
  Reads the tensor of that name.

  Options are `:progress` and `:cancel`: see `Sidewinder.Progress`. Raises `Sidewinder.Error` also of kind `:dtype`, for a
  type that cannot be loaded.
  """
  @spec load!(Path.t(), String.t(), [Progress.option()]) :: Tensor.t() | Quantized.t()
  def load!(path, name, options \\ [])

  def load!(path, name, options) when is_binary(name) do
    path = Options.path!(path)
    options = Options.known!(options, Progress.options())
    read = &Native.gguf_read(path, name, &1)
    {type, sizes, tensor} = Error.unwrap!(Progress.follow(options, read))
    tensor = Tensor.from_native({:ok, tensor})

    case @formats do
      %{^type => format} -> Quantized.new(format, List.to_tuple(sizes), tensor)
      _ -> tensor
    end
  end

  def load!(_path, other, _options),
    do: Options.wrong_argument!("name", "the name of a tensor", other)
end

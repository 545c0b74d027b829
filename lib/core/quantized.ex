defmodule Sidewinder.Quantized do
  @moduledoc """
  A quantized tensor: weights that take an eighth to a third of the memory of f32.

    * `:q8_0` and `:q4_0` - ggml's block formats, byte by byte: every 32 values of a row share a scale. `data` has the
      blocks of each row, a `Sidewinder.Tensor` of `:u8`, and rows are multiples of 32.
    * `:ternary` - -1, 0 and 1. `data` are two planes of a bit for each value, which is the first bit less the second;
      `scale` is a tensor of one number for all rows, or of one for each. Rows are of any length.

  `shape` is that of the weights, `{out, in}`. The data is on the host or on a CUDA device, and stays there.
  """

  alias Sidewinder.{Error, Options, Progress, Safetensors, Tensor}
  alias Sidewinder.Kernel.{Quant, Ternary}

  @enforce_keys [:format, :shape, :data]
  defstruct [:format, :shape, :data, :scale]

  @type format :: :q8_0 | :q4_0 | :ternary
  @type t :: %__MODULE__{
          format: format,
          shape: tuple,
          data: Tensor.t() | {Tensor.t(), Tensor.t()},
          scale: Tensor.t() | nil
        }

  @block 32
  @block_bytes %{q8_0: 34, q4_0: 18}
  @blocks Map.keys(@block_bytes)
  @formats [:q8_0, :q4_0, :ternary]

  @doc """
  All formats.

      iex> :q4_0 in Sidewinder.Quantized.formats()
      true
  """
  @spec formats() :: [format]
  def formats, do: @formats

  @doc """
  A quantized tensor of given bytes: blocks, or two planes and a scale.

  Raises `Sidewinder.Error` of kind `:shape` or `:dtype` where they do not fit `shape`, and `:argument` for another format.

      iex> Sidewinder.Quantized.new(:q4_0, {1, 32}, Sidewinder.Tensor.new(<<0::144>>, :u8, {1, 18}))
      #Sidewinder.Quantized<q4_0 (1, 32) 18 bytes, 7.1x smaller than f32>

      iex> planes = {Sidewinder.Tensor.new(<<0x09>>, :u8, {1, 1}), Sidewinder.Tensor.new(<<0x02>>, :u8, {1, 1})}
      iex> Sidewinder.Quantized.new(:ternary, {1, 4}, planes, Sidewinder.Tensor.from_list([0.5], :f32, {1}))
      #Sidewinder.Quantized<ternary (1, 4) 6 bytes, 2.7x smaller than f32>

      iex> Sidewinder.Quantized.new(:q4_0, {2, 32}, Sidewinder.Tensor.new(<<0::144>>, :u8, {1, 18}))
      ** (Sidewinder.Error) data: expected u8 (2, 18) for q4_0 (2, 32), got u8 (1, 18)
  """
  @spec new(format, tuple, Tensor.t() | {Tensor.t(), Tensor.t()}, Tensor.t() | nil) :: t
  def new(format, shape, data, scale \\ nil)

  def new(format, shape, %Tensor{} = data, nil) when format in @blocks do
    check!("data", data, :u8, blocks!(format, shape), {format, shape})
    %__MODULE__{format: format, shape: shape, data: data}
  end

  def new(:ternary, {out, width} = shape, {plane0, plane1}, scale) do
    Tensor.elements(shape)
    bytes = {out, div(width + 7, 8)}
    check!("plane0", plane0, :u8, bytes, {:ternary, shape})
    check!("plane1", plane1, :u8, bytes, {:ternary, shape})
    rows = if match?(%Tensor{shape: {1}}, scale), do: 1, else: out
    check!("scale", scale, :f32, {rows}, {:ternary, shape})
    %__MODULE__{format: :ternary, shape: shape, data: {plane0, plane1}, scale: scale}
  end

  def new(format, _shape, _data, _scale) when format in @formats do
    expected = "a tensor of blocks, or for ternary {out, in}, two planes and a scale"
    raise Error.new(:argument, "data", expected: expected, got: "another form for #{format}")
  end

  def new(other, _shape, _data, _scale),
    do: Options.wrong_argument!("format", "q8_0, q4_0 or ternary", other)

  # The shape of the bytes.
  defp blocks!(format, shape) do
    Tensor.elements(shape)
    rank = tuple_size(shape)
    row = if rank > 0, do: elem(shape, rank - 1), else: 1

    if rem(row, @block) != 0 do
      raise Error.new(:shape, "shape",
              expected: "rows of a multiple of #{@block} for #{format}",
              got: Tensor.describe(%Tensor{type: format, shape: shape, data: nil})
            )
    end

    put_elem(shape, rank - 1, div(row, @block) * @block_bytes[format])
  end

  defp check!(_name, %Tensor{type: type, shape: shape}, type, shape, _of), do: :ok

  defp check!(name, tensor, type, shape, {format, whole}) do
    describe = &Tensor.describe(%Tensor{type: &1, shape: &2, data: nil})
    expected = "#{describe.(type, shape)} for #{describe.(format, whole)}"
    got = if match?(%Tensor{}, tensor), do: Tensor.describe(tensor), else: Error.show(tensor)
    kind = if match?(%Tensor{type: ^type}, tensor), do: :shape, else: :dtype
    raise Error.new(kind, name, expected: expected, got: got)
  end

  @doc """
  Quantizes weights `{out, in}` of f32, bf16 or f16, where they are.

  Options for `:q8_0` and `:q4_0`:

    * `:unchecked` - numbers that are not finite, or too large for the format, become infinite scales in place of an
      error

  for `:ternary`:

    * `:rule` - `:absmean` (the default), `:twn`, or `:threshold` with `:threshold`
    * `:per_row` - a scale for each row in place of one for all

  for all formats `:progress` and `:cancel`, as `Sidewinder.Progress` has them, and those of `Sidewinder.Kernel`. Raises
  `Sidewinder.Error` for rows that do not fit, of other types, and for numbers that are not finite.

      iex> x = Sidewinder.Tensor.from_list(Enum.to_list(-16..15), :f32, {1, 32})
      iex> q = Sidewinder.Quantized.quantize(x, :q4_0)
      #Sidewinder.Quantized<q4_0 (1, 32) 18 bytes, 7.1x smaller than f32>
      iex> Base.encode16(q.data.data, case: :lower)
      "0040809191a2a2b3b3c4c4d5d5e6e6f7f7f8"
  """
  @spec quantize(Tensor.t(), format, keyword) :: t
  def quantize(x, format, options \\ [])

  def quantize(%Tensor{} = x, format, options) when format in @blocks,
    do: new(format, x.shape, Quant.quantize(x, format, options))

  def quantize(%Tensor{} = x, :ternary, options) do
    {planes, scale} = Ternary.quantize(x, options)
    new(:ternary, x.shape, planes, scale)
  end

  def quantize(%Tensor{}, other, _options),
    do: Options.wrong_argument!("format", "q8_0, q4_0 or ternary", other)

  def quantize(other, _format, _options),
    do: Options.wrong_argument!("x", "a Sidewinder.Tensor", other)

  @doc """
  The dequantized weights, in f32, on the same device. Options are `:progress` and `:cancel` (`Sidewinder.Progress`), and
  those of `Sidewinder.Kernel`.

      iex> x = Sidewinder.Tensor.from_list(Enum.to_list(-16..15), :f32, {1, 32})
      iex> Sidewinder.Quantized.dequantize(Sidewinder.Quantized.quantize(x, :q4_0))
      #Sidewinder.Tensor<f32 (1, 32) [-16.0, -14.0, -14.0, -12.0, -12.0, -10.0, ...]>
  """
  @spec dequantize(t, keyword) :: Tensor.t()
  def dequantize(quantized, options \\ [])

  def dequantize(%__MODULE__{format: format, data: data}, options) when format in @blocks,
    do: Quant.dequantize(data, format, options)

  def dequantize(%__MODULE__{shape: {_, width}, data: planes, scale: scale}, options),
    do: Ternary.dequantize(planes, scale, [n: width] ++ options)

  @doc """
  Rows `x` of `{..., in}` times the transpose of weights `{out, in}`, which gives `{..., out}`. Both are on the host or on
  one device, and so is the result.

    * `:activations` - the format that rows are quantized to. For `:q8_0` and `:q4_0` weights `:q8` (the default): to Q8_0, so that
      sums are of integers; for ternary `:i8` (the default): to bytes, each row with a scale, or `:ternary`: to their signs.
      For all `:f32`: not at all, more accurate and slower
    * `:bias` - `{out}`, added last
    * `:activation` - applied to the result, as `Sidewinder.Kernel.NN.linear/3` does

  and the options of `Sidewinder.Kernel`.

      iex> x = Sidewinder.Tensor.from_list(Enum.to_list(0..31), :f32, {1, 32})
      iex> w = Sidewinder.Quantized.quantize(Sidewinder.Tensor.from_list(Enum.to_list(-16..15), :f32, {1, 32}), :q4_0)
      iex> Sidewinder.Quantized.matmul(x, w)
      #Sidewinder.Tensor<f32 (1, 1) [2679.19921875]>
      iex> Sidewinder.Quantized.matmul(x, w, activations: :f32)
      #Sidewinder.Tensor<f32 (1, 1) [2674.0]>

      iex> w = Sidewinder.Tensor.from_list([0.9, -0.1, 0.4, -0.6], :f32, {1, 4})
      iex> x = Sidewinder.Tensor.from_list([1, 1, 1, -1], :f32, {1, 4})
      iex> Sidewinder.Quantized.matmul(x, Sidewinder.Quantized.quantize(w, :ternary))
      #Sidewinder.Tensor<f32 (1, 1) [1.5]>
  """
  @spec matmul(Tensor.t(), t, keyword) :: Tensor.t()
  def matmul(x, %__MODULE__{format: format} = weights, options \\ []) do
    unless Keyword.keyword?(options), do: Options.wrong!("options", "a keyword list", options)
    {activations, options} = Keyword.pop(options, :activations)
    product(format, activations || default(format), x, weights, options)
  end

  defp default(:ternary), do: :i8
  defp default(_blocks), do: :q8

  defp product(:q8_0, :q8, x, w, options), do: Quant.matmul_q8_q8(x, w.data, options)
  defp product(:q4_0, :q8, x, w, options), do: Quant.matmul_q8_q4(x, w.data, options)
  defp product(:q8_0, :f32, x, w, options), do: Quant.matmul_f32_q8(x, w.data, options)
  defp product(:q4_0, :f32, x, w, options), do: Quant.matmul_f32_q4(x, w.data, options)

  defp product(:ternary, :i8, x, w, options), do: Ternary.matmul_i8(x, w.data, scaled(w, options))

  defp product(:ternary, :f32, x, w, options),
    do: Ternary.matmul_f32(x, w.data, scaled(w, options))

  defp product(:ternary, :ternary, x, w, options),
    do: Ternary.matmul_ternary(x, w.data, scaled(w, options))

  defp product(format, other, _x, _w, _options) do
    known = if format == :ternary, do: "i8, ternary or f32", else: "q8 or f32"
    Options.wrong!("activations", "#{known} for #{format}", other)
  end

  defp scaled(weights, options), do: [w_scale: weights.scale] ++ options

  @doc """
  Whether weights of a shape can be quantized to a format.

      iex> for format <- [:q8_0, :ternary], do: Sidewinder.Quantized.fits?(format, {2, 33})
      [false, true]
  """
  @spec fits?(format, tuple) :: boolean
  def fits?(:ternary, shape), do: tuple_size(shape) == 2

  def fits?(_blocks, shape),
    do: tuple_size(shape) > 0 and rem(elem(shape, tuple_size(shape) - 1), @block) == 0

  @doc false
  # The types and shapes alone, of tensors without data.
  def blank(:ternary, {out, width} = shape, per_row) do
    plane = %Tensor{type: :u8, shape: {out, div(width + 7, 8)}, data: ""}
    scale = %Tensor{type: :f32, shape: {if(per_row, do: out, else: 1)}, data: ""}
    %__MODULE__{format: :ternary, shape: shape, data: {plane, plane}, scale: scale}
  end

  def blank(format, shape, _per_row) do
    blocks = %Tensor{type: :u8, shape: blocks!(format, shape), data: ""}
    %__MODULE__{format: format, shape: shape, data: blocks}
  end

  @doc """
  How many bytes it takes, with its scale.

      iex> Sidewinder.Quantized.bytes(Sidewinder.Quantized.new(:q8_0, {1, 32}, Sidewinder.Tensor.new(<<0::272>>, :u8, {1, 34})))
      34
  """
  @spec bytes(t) :: non_neg_integer
  def bytes(%__MODULE__{} = quantized) do
    Enum.sum(for {_, tensor} <- parts(quantized), do: tensor_bytes(tensor))
  end

  defp tensor_bytes(%Tensor{type: :u8, shape: shape}), do: Tensor.elements(shape)
  defp tensor_bytes(%Tensor{type: :f32, shape: shape}), do: 4 * Tensor.elements(shape)

  # Its tensors, by their names in files.
  defp parts(%__MODULE__{format: :ternary, data: {plane0, plane1}, scale: scale}),
    do: [{"plane0", plane0}, {"plane1", plane1}, {"scale", scale}]

  defp parts(%__MODULE__{format: format, data: data}), do: [{to_string(format), data}]

  @doc """
  Where the data is.

      iex> w = Sidewinder.Quantized.quantize(Sidewinder.RandomInputs.normal({2, 32}, :f32, 1, :w), :q8_0)
      iex> Sidewinder.Quantized.device(w)
      :host
  """
  @spec device(t) :: Tensor.device()
  def device(%__MODULE__{data: {plane0, _plane1}}), do: Tensor.device(plane0)
  def device(%__MODULE__{data: data}), do: Tensor.device(data)

  @doc """
  A copy on a CUDA device, or the tensor itself if it is there already.

      iex> w = Sidewinder.Quantized.quantize(Sidewinder.RandomInputs.normal({2, 32}, :f32, 1, :w), :q8_0)
      iex> Sidewinder.Quantized.to_device(w, :host) == w
      true
  """
  @spec to_device(t, {:cuda, non_neg_integer} | :host) :: t
  def to_device(%__MODULE__{} = quantized, device),
    do: each(quantized, &Tensor.to_device(&1, device))

  @doc """
  A copy in binaries, or the tensor itself if it is on the host already.

      iex> w = Sidewinder.Quantized.quantize(Sidewinder.RandomInputs.normal({2, 32}, :f32, 1, :w), :q8_0)
      iex> Sidewinder.Quantized.to_host(w) == w
      true
  """
  @spec to_host(t) :: t
  def to_host(%__MODULE__{} = quantized), do: each(quantized, &Tensor.to_host/1)

  defp each(%{format: :ternary, data: {plane0, plane1}, scale: scale} = quantized, move),
    do: %{quantized | data: {move.(plane0), move.(plane1)}, scale: move.(scale)}

  defp each(%{data: data} = quantized, move), do: %{quantized | data: move.(data)}

  @doc """
  The tensors by which files have it: `NAME.q8_0` or `NAME.q4_0` with the blocks; for ternary `NAME.plane0`, `NAME.plane1`,
  `NAME.scale`, and `NAME.shape`, since the planes do not have the length of rows.

      iex> blocks = Sidewinder.Tensor.new(<<0::144>>, :u8, {1, 18})
      iex> Sidewinder.Quantized.to_tensors(Sidewinder.Quantized.new(:q4_0, {1, 32}, blocks), "w") == [{"w.q4_0", blocks}]
      true
  """
  @spec to_tensors(t, String.t()) :: [{String.t(), Tensor.t()}]
  def to_tensors(%__MODULE__{} = quantized, name) do
    for {part, tensor} <- parts(quantized) ++ told_shape(quantized),
        do: {"#{name}.#{part}", tensor}
  end

  defp told_shape(%{format: :ternary, shape: shape}),
    do: [{"shape", Tensor.from_list(Tuple.to_list(shape), :i64, {tuple_size(shape)})}]

  defp told_shape(_blocks), do: []

  @doc """
  The quantized tensor of that name among those of a file.

  Takes the option `:on_sentinel` for cells of ternary planes that are no value: `:error` (the default), `:zero`, or `:warn`,
  which is `:zero` with a warning in the log.

  Raises `Sidewinder.Error` of kind `:argument` if there is none, and as `new/4` does if its parts do not fit.

      iex> blocks = Sidewinder.Tensor.new(<<0::272>>, :u8, {1, 34})
      iex> Sidewinder.Quantized.from_tensors(%{"w.q8_0" => blocks}, "w")
      #Sidewinder.Quantized<q8_0 (1, 32) 34 bytes, 3.8x smaller than f32>
  """
  @spec from_tensors(%{String.t() => Tensor.t()}, String.t(), keyword) :: t
  def from_tensors(tensors, name, options \\ []) do
    Options.known!(options, [:on_sentinel])

    case Enum.find(@formats, &Enum.all?(names(name, &1), fn name -> tensors[name] end)) do
      nil ->
        names = Enum.map_join(@formats, " or ", &hd(names(name, &1)))
        raise Error.new(:argument, name, expected: "tensors named #{names}", got: "none")

      format ->
        parts = for name <- names(name, format), do: tensors[name]
        parts |> from_parts(format, name) |> verified(options)
    end
  end

  @ternary ~w(plane0 plane1 scale shape)

  defp names(name, :ternary), do: for(part <- @ternary, do: "#{name}.#{part}")
  defp names(name, format), do: ["#{name}.#{format}"]

  defp from_parts([plane0, plane1, scale, shape], :ternary, name) do
    check_shape!(shape, name)
    new(:ternary, List.to_tuple(Tensor.to_list(shape)), {plane0, plane1}, scale)
  end

  defp from_parts([data], format, name) do
    rank = tuple_size(data.shape)
    row = if rank > 0, do: elem(data.shape, rank - 1), else: 1
    bytes = @block_bytes[format]

    if rem(row, bytes) != 0 do
      expected = "rows of a multiple of #{bytes} bytes"
      raise Error.new(:shape, "#{name}.#{format}", expected: expected, got: Tensor.describe(data))
    end

    new(format, put_elem(data.shape, rank - 1, div(row, bytes) * @block), data)
  end

  # A cell with both bits set is no value: the file has another layout, or is damaged.
  defp verified(%{format: :ternary, shape: {_, width}, data: planes} = quantized, options),
    do: %{quantized | data: Ternary.convert(planes, :planes, :planes, [n: width] ++ options)}

  defp verified(quantized, _options), do: quantized

  defp check_shape!(%Tensor{type: :i64, shape: {2}}, _name), do: :ok

  defp check_shape!(other, name) do
    raise Error.new(:shape, "#{name}.shape", expected: "i64 (2)", got: Tensor.describe(other))
  end

  @doc """
  Writes tensors, quantized ones and others, to a safetensors file, which is complete or absent.

  Options are `:progress` and `:cancel`: see `Sidewinder.Progress`.

      iex> path = Path.join(System.tmp_dir!(), "sidewinder-quantized-#{System.pid()}.safetensors")
      iex> w = Sidewinder.Quantized.new(:q8_0, {1, 32}, Sidewinder.Tensor.new(<<0::272>>, :u8, {1, 34}))
      iex> Sidewinder.Quantized.save!(path, %{"w" => w, "b" => Sidewinder.Tensor.from_list([1], :f32, {1})})
      :ok
      iex> Sidewinder.Quantized.load!(path)["w"] == w
      true
      iex> File.rm(path)
      :ok
  """
  @spec save!(Path.t(), %{String.t() => t | Tensor.t()}, [Progress.option()]) :: :ok
  def save!(path, tensors, options \\ []) do
    Options.known!(options, Progress.options())
    Safetensors.write(path, stored(tensors), options)
  end

  @kept "a Sidewinder.Quantized or Sidewinder.Tensor"

  defp stored(tensors) when is_map(tensors) and not is_struct(tensors),
    do: stored(Map.to_list(tensors))

  defp stored([tensor | rest]), do: stored_one(tensor) ++ stored(rest)
  defp stored([]), do: []
  defp stored(other), do: not_stored(other)

  defp stored_one({name, %__MODULE__{} = quantized}) when is_binary(name),
    do: to_tensors(to_host(quantized), name)

  defp stored_one({name, %Tensor{} = tensor}) when is_binary(name),
    do: [{name, Tensor.to_host(tensor)}]

  defp stored_one({name, other}) when is_binary(name),
    do: Options.wrong_argument!(name, @kept, other)

  defp stored_one(other), do: not_stored(other)

  defp not_stored(got),
    do: Options.wrong_argument!("tensors", "pairs of a text and " <> @kept, got)

  @doc """
  Reads the tensors of these names, or all of them, quantized ones by the names that `save!/2` was given.

  Takes the option of `from_tensors/3`, and `:progress` and `:cancel` (`Sidewinder.Progress`), between tensors. Raises
  `Sidewinder.Error` as that does, and of kind `:file` for a file that is missing, damaged or without a tensor of that
  name.
  """
  @spec load!(Path.t(), [String.t()] | :all, keyword) :: %{String.t() => t | Tensor.t()}
  def load!(path, names \\ :all, options \\ []) do
    Options.known!(options, [:on_sentinel | Progress.options()])
    {watched, options} = Keyword.split(options, Progress.options())
    types = for %{name: name, type: type} <- Safetensors.index(path), into: %{}, do: {name, type}
    quantized = quantized(types)
    parts = for {name, format} <- quantized, part <- names(name, format), do: part
    names = if names == :all, do: Map.keys(quantized) ++ (Map.keys(types) -- parts), else: names
    load = &{&1, load_one(path, &1, quantized[&1], options)}
    Map.new(Progress.map(names, :read, watched, load))
  end

  # The names of quantized tensors, with their formats.
  defp quantized(types) do
    for {part, "U8"} <- types,
        format <- @formats,
        suffix = "." <> if(format == :ternary, do: "plane0", else: to_string(format)),
        String.ends_with?(part, suffix),
        name = String.replace_suffix(part, suffix, ""),
        Enum.all?(names(name, format), &is_map_key(types, &1)),
        into: %{},
        do: {name, format}
  end

  defp load_one(path, name, nil, _options), do: Safetensors.read(path, [name])[name]

  defp load_one(path, name, format, options),
    do: path |> Safetensors.read(names(name, format)) |> from_tensors(name, options)

  @doc """
  The weights of a linear layer out of a BitNet checkpoint, a safetensors file with `NAME.weight` and `NAME.weight_scale`.

  The options are those of `Sidewinder.Kernel.Ternary.from_bitnet/3`; `:scale_mode` must be given.
  """
  @spec from_bitnet(Path.t(), String.t(), keyword) :: t
  def from_bitnet(path, name, options) do
    {{plane0, _} = planes, scale} = Ternary.from_bitnet(path, name, options)
    weight = name <> ".weight"
    [width] = for %{name: ^weight, shape: {_, width}} <- Safetensors.index(path), do: width
    # One scale for all rows may be stored without an axis.
    scale = if Tensor.elements(scale.shape) == 1, do: Tensor.reshape(scale, {1}), else: scale
    new(:ternary, {elem(plane0.shape, 0), width}, planes, scale)
  end

  @doc """
  A number of bytes as a text, such as `9.4 MB`.

      iex> Sidewinder.Quantized.size(4608)
      "4.6 kB"
  """
  @spec size(non_neg_integer) :: String.t()
  def size(bytes) when bytes < 1000, do: "#{bytes} bytes"
  def size(bytes) when bytes < 1_000_000, do: "#{Float.round(bytes / 1000, 1)} kB"
  def size(bytes) when bytes < 1_000_000_000, do: "#{Float.round(bytes / 1_000_000, 1)} MB"
  def size(bytes), do: "#{Float.round(bytes / 1_000_000_000, 2)} GB"

  defimpl Inspect do
    alias Sidewinder.{Device, Error, Quantized, Tensor}

    def inspect(%{format: format, shape: shape} = quantized, _opts) do
      spec = Tensor.describe(%Tensor{type: format, shape: shape, data: nil})
      "#Sidewinder.Quantized<#{spec} #{takes(quantized)}#{place(Quantized.device(quantized))}>"
    rescue
      # Damaged tensors are shown in errors too.
      error in Error -> "#Sidewinder.Quantized<#{error.argument}: #{error.got}>"
    end

    defp takes(%{shape: shape} = quantized) do
      bytes = Quantized.bytes(quantized)
      smaller = Float.round(4 * Tensor.elements(shape) / max(bytes, 1), 1)
      "#{Quantized.size(bytes)}, #{smaller}x smaller than f32"
    end

    defp place(:host), do: ""
    defp place(device), do: ", on #{Device.name(device)}"
  end
end

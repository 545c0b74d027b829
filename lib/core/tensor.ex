defmodule Sidewinder.Tensor do
  @moduledoc """
  A tensor: an element type, a shape and the data.

  The types are `:f64`, `:f32`, `:bf16` and `:f16`; for masks `:u8`: a byte for each element, where any
  number but 0 is true; for counts and indices `:i32` and `:i64`; for quantized values `:i8` and `:i16`. The
  data is row-major with the last axis contiguous: a binary in the machine's byte order, or a reference
  to memory of a CUDA device.
  Ops leave their results where their inputs are; `to_device/2` and `to_host/1` are the only
  copies between the two.

      iex> t = Sidewinder.Tensor.from_list([1, 2, 3, 4, 5, 6], :f32, {2, 3})
      #Sidewinder.Tensor<f32 (2, 3) [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]>
      iex> byte_size(t.data)
      24
  """

  alias Sidewinder.{Error, Native}

  @enforce_keys [:type, :shape, :data]
  defstruct [:type, :shape, :data]

  @type type :: :f64 | :f32 | :bf16 | :f16 | :u8 | :i8 | :i16 | :i32 | :i64
  @type shape :: tuple
  @type device :: :host | {:cuda, non_neg_integer}
  @type t :: %__MODULE__{type: type, shape: shape, data: binary | reference}

  @sizes %{f64: 8, f32: 4, bf16: 2, f16: 2, u8: 1, i8: 1, i16: 2, i32: 4, i64: 8}
  @types Map.keys(@sizes)
  @integers [:u8, :i8, :i16, :i32, :i64]

  @doc """
  A tensor over a binary of row-major data, which is not copied.

  Raises `Sidewinder.Error` of kind `:dtype` for another type, `:shape` if `shape` is not a tuple
  of sizes, and `:size` if the binary is not as long as they ask for.

      iex> Sidewinder.Tensor.new(<<0, 0, 128, 63>>, :f32, {1, 1})
      #Sidewinder.Tensor<f32 (1, 1) [1.0]>

      iex> Sidewinder.Tensor.new(<<0, 0>>, :f32, {1})
      ** (Sidewinder.Error) data: expected 4 bytes for f32 (1), got 2 bytes
  """
  @spec new(binary, type, shape) :: t
  def new(data, type, shape) when is_binary(data) do
    bytes = elements(shape) * element_bytes(type)

    if byte_size(data) == bytes,
      do: %__MODULE__{type: type, shape: shape, data: data},
      else: wrong_size(data, type, shape, bytes)
  end

  def new(data, _type, _shape) do
    raise Error.new(:argument, "data", expected: "a binary", got: Error.show(data))
  end

  @doc """
  A tensor of a flat list of numbers, rounded to `type`. For a mask the list may be of `true` and
  `false` too.

  Raises `Sidewinder.Error` as `new/3` does, and of kind `:argument` if an element is not a number, or for
  `:u8` no whole number from 0 to 255.

      iex> Sidewinder.Tensor.from_list([1, 2.5, -3], :bf16, {3})
      #Sidewinder.Tensor<bf16 (3) [1.0, 2.5, -3.0]>
      iex> Sidewinder.Tensor.from_list([true, false, true], :u8, {3})
      #Sidewinder.Tensor<u8 (3) [1, 0, 1]>
  """
  @spec from_list([number | boolean], type, shape) :: t
  def from_list(list, type, shape) when is_list(list) do
    list = if type == :u8, do: Enum.map(list, &truth/1), else: list

    unless Enum.all?(list, &is_number/1) do
      raise Error.new(:argument, "list", expected: "numbers", got: Error.show(list))
    end

    element_bytes(type)
    wide = for value <- list, into: <<>>, do: <<value::float-native-64>>
    wide |> new(:f64, shape) |> cast(type)
  end

  defp truth(true), do: 1
  defp truth(false), do: 0
  defp truth(other), do: other

  @doc """
  The elements as a flat list, row-major: floats, or integers for types of these. Values that are no Elixir floats are `:nan`, `:infinity` and `:neg_infinity`.

      iex> Sidewinder.Tensor.to_list(Sidewinder.Tensor.new(<<0, 0, 128, 63, 0, 0, 128, 255>>, :f32, {2}))
      [1.0, :neg_infinity]
      iex> Sidewinder.Tensor.to_list(Sidewinder.Tensor.new(<<1, 0>>, :u8, {2}))
      [1, 0]
  """
  @spec to_list(t) :: [float | integer | :nan | :infinity | :neg_infinity]
  def to_list(%__MODULE__{type: :u8} = tensor), do: :binary.bin_to_list(to_host(tensor).data)

  def to_list(%__MODULE__{type: :i8} = tensor),
    do: for(<<value::signed-8 <- to_host(tensor).data>>, do: value)

  def to_list(%__MODULE__{type: :i16} = tensor),
    do: for(<<value::signed-native-16 <- to_host(tensor).data>>, do: value)

  def to_list(%__MODULE__{type: :i32} = tensor),
    do: for(<<value::signed-native-32 <- to_host(tensor).data>>, do: value)

  def to_list(%__MODULE__{type: :i64} = tensor),
    do: for(<<value::signed-native-64 <- to_host(tensor).data>>, do: value)

  def to_list(%__MODULE__{} = tensor) do
    %{data: data} = tensor |> to_host() |> cast(:f64)
    for <<bits::binary-8 <- data>>, do: number(bits)
  end

  defp number(<<value::float-native-64>>), do: value
  defp number(<<bits::native-64>>) when bits == 0x7FF0000000000000, do: :infinity
  defp number(<<bits::native-64>>) when bits == 0xFFF0000000000000, do: :neg_infinity
  defp number(_), do: :nan

  @doc """
  Rounds the values to another type. The tensor must be on the host.

  Raises `Sidewinder.Error` of kind `:argument` where a value for an integer type is not a whole number in its
  range (for `:i64`, exact in f64), and of kind `:dtype` for an unknown type.

      iex> Sidewinder.Tensor.cast(Sidewinder.Tensor.from_list([0.1], :f32, {1}), :f64)
      #Sidewinder.Tensor<f64 (1) [0.10000000149011612]>
  """
  @spec cast(t, type) :: t
  def cast(%__MODULE__{type: type} = tensor, type), do: tensor

  def cast(%__MODULE__{} = tensor, type),
    do: from_native(Native.tensor_cast(to_native(tensor), type))

  @doc """
  A copy on a CUDA device, or the tensor itself if it is there already.

  Raises `Sidewinder.Error` of kind `:unavailable` where there is no such device.

      iex> tensor = Sidewinder.Tensor.from_list([1], :f32, {1})
      iex> Sidewinder.Tensor.to_device(tensor, :host) == tensor
      true
  """
  @spec to_device(t, {:cuda, non_neg_integer} | :host) :: t
  def to_device(%__MODULE__{} = tensor, :host), do: to_host(tensor)

  def to_device(%__MODULE__{} = tensor, {:cuda, ordinal} = device) do
    case device(tensor) do
      ^device -> tensor
      :host -> from_native(Native.buffer_from_host(to_native(tensor), ordinal))
      _other -> tensor |> to_host() |> to_device(device)
    end
  end

  @doc """
  A copy in a binary, or the tensor itself if it is on the host already.

      iex> Sidewinder.Tensor.to_host(Sidewinder.Tensor.from_list([1], :f32, {1}))
      #Sidewinder.Tensor<f32 (1) [1.0]>
  """
  @spec to_host(t) :: t
  def to_host(%__MODULE__{data: data} = tensor) when is_binary(data), do: tensor
  def to_host(%__MODULE__{} = tensor), do: from_native(Native.buffer_to_host(to_native(tensor)))

  @doc """
  Where the data is.

      iex> Sidewinder.Tensor.device(Sidewinder.Tensor.from_list([1], :f32, {1}))
      :host
  """
  @spec device(t) :: device
  def device(%__MODULE__{data: data}) when is_binary(data), do: :host

  def device(%__MODULE__{} = tensor) do
    ordinal = Error.unwrap!(Native.buffer_device(to_native(tensor)))
    if ordinal, do: {:cuda, ordinal}, else: :host
  end

  @doc """
  The elements in order under another shape, where they are. Nothing is copied.

  Raises `Sidewinder.Error` of kind `:size` if the shape has another number of elements.

      iex> Sidewinder.Tensor.reshape(Sidewinder.Tensor.from_list([1, 2], :f32, {1, 2}), {2})
      #Sidewinder.Tensor<f32 (2) [1.0, 2.0]>
      iex> Sidewinder.Tensor.reshape(Sidewinder.Tensor.from_list([1, 2], :f32, {1, 2}), {3})
      ** (Sidewinder.Error) data: expected 12 bytes for f32 (3), got 8 bytes
  """
  @spec reshape(t, shape) :: t
  def reshape(%__MODULE__{data: data, type: type}, shape) when is_binary(data),
    do: new(data, type, shape)

  def reshape(%__MODULE__{shape: old} = tensor, shape) do
    unless elements(shape) == elements(old) do
      expected = "#{elements(shape)} elements for #{describe(%{tensor | shape: shape})}"
      raise Error.new(:size, "data", expected: expected, got: "#{elements(old)}")
    end

    from_native(Native.buffer_reshape(to_native(tensor), Tuple.to_list(shape)))
  end

  @doc """
  How many elements a shape has. Raises `Sidewinder.Error` of kind `:shape` if it is not a tuple of
  sizes.

      iex> Sidewinder.Tensor.elements({2, 3})
      6
  """
  @spec elements(shape) :: non_neg_integer
  def elements(shape) when is_tuple(shape), do: product(shape, tuple_size(shape), 1)
  def elements(shape), do: wrong_shape(shape)

  defp product(_shape, 0, product), do: product

  defp product(shape, axis, product) do
    size = :erlang.element(axis, shape)

    if is_integer(size) and size >= 0,
      do: product(shape, axis - 1, product * size),
      else: wrong_shape(shape)
  end

  @doc """
  All types, by name.

      iex> :u8 in Sidewinder.Tensor.types()
      true
  """
  @spec types() :: [type]
  def types, do: @types

  @doc """
  The types that ops compute with: all but those of integers.

      iex> Enum.sort(Sidewinder.Tensor.float_types())
      [:bf16, :f16, :f32, :f64]
  """
  @spec float_types() :: [type]
  def float_types, do: @types -- @integers

  @doc false
  def to_native(%__MODULE__{type: type, shape: shape, data: data}), do: {type, shape, data}

  @doc false
  def from_native({:ok, {type, shape, data}}),
    do: %__MODULE__{type: type, shape: shape, data: data}

  def from_native(error), do: Error.unwrap!(error)

  @doc """
  How many bytes an element of a type has.

      iex> Sidewinder.Tensor.element_bytes(:bf16)
      2
  """
  @spec element_bytes(type) :: pos_integer
  def element_bytes(type) do
    Map.get(@sizes, type) ||
      raise Error.new(:dtype, "type",
              expected: "f64, f32, bf16, f16, u8, i8, i16, i32 or i64",
              got: Error.show(type)
            )
  end

  defp wrong_shape(shape) do
    raise Error.new(:shape, "shape",
            expected: "a tuple of sizes, none negative",
            got: Error.show(shape)
          )
  end

  defp wrong_size(data, type, shape, bytes) do
    spec = describe(%__MODULE__{type: type, shape: shape, data: data})

    raise Error.new(:size, "data",
            expected: "#{bytes} bytes for #{spec}",
            got: "#{byte_size(data)} bytes"
          )
  end

  @doc """
  Type and shape as a text.

      iex> Sidewinder.Tensor.describe(Sidewinder.Tensor.from_list([1, 2], :f16, {2, 1}))
      "f16 (2, 1)"
  """
  @spec describe(t) :: String.t()
  def describe(%__MODULE__{type: type, shape: shape}) do
    elements(shape)
    "#{type} (#{Enum.map_join(Tuple.to_list(shape), ", ", &to_string/1)})"
  end

  defimpl Inspect do
    alias Sidewinder.{Error, Tensor}

    @shown 6

    def inspect(tensor, _opts) do
      "#Sidewinder.Tensor<#{Tensor.describe(tensor)} #{values(tensor)}>"
    rescue
      # Damaged tensors are shown in errors too.
      error in Error -> "#Sidewinder.Tensor<#{error.argument}: #{error.got}>"
    end

    defp values(%{data: data} = tensor) when is_binary(data) do
      count = Tensor.elements(tensor.shape)
      shown = min(count, @shown)
      start = binary_part(data, 0, div(byte_size(data), max(count, 1)) * shown)
      first = Tensor.to_list(%{tensor | shape: {shown}, data: start})
      "[#{Enum.map_join(first, ", ", &to_string/1)}#{if count > shown, do: ", ..."}]"
    end

    defp values(tensor), do: "on #{tensor |> Tensor.device() |> Sidewinder.Device.name()}"
  end
end

defmodule Sidewinder.KVCache do
  @moduledoc """
  The keys and values of the tokens that a sequence has so far, for the attention of later tokens.

  A cache lives where its tensors do, on the host or on a GPU, and has room for more rows than it has:
  `Sidewinder.Kernel.Attention.decode/5`, `mha/3` and `transformer_block/3` write new rows into it in place,
  and it doubles its room where that is used up. It is still a value: a call returns a cache with the new
  rows, and the cache it was given keeps its length. A second call that extends the same cache, as in
  trying several continuations, copies its rows first. This holds across processes, too.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> cache = Sidewinder.KVCache.new(:f32, {1, 1, 2})
      iex> q = from_list([1, 0], :f32, {1, 1, 1, 2})
      iex> v = from_list([1, 2], :f32, {1, 1, 1, 2})
      iex> {y, longer} = Sidewinder.Kernel.Attention.decode(q, q, v, cache)
      iex> {y, longer.length, cache.length}
      {v, 1, 0}
  """

  alias Sidewinder.{Error, Held, Tensor}

  @enforce_keys [:keys, :values, :length, :written]
  defstruct [:keys, :values, :length, :written]

  @typedoc """
  A cache of `length` rows. The contents of `keys` and `values` are internal to the kernels.
  """
  @type t :: %__MODULE__{
          keys: Tensor.t(),
          values: Tensor.t(),
          length: non_neg_integer,
          written: :atomics.atomics_ref()
        }

  @capacity 64

  @doc """
  A cache without rows, for `batch` sequences and `heads` heads of keys and values, each `width` wide.

  Options:

    * `:capacity` - rows that there is room for at first, #{@capacity} by default
    * `:value_width` - the width of values, `width` by default
    * `:device` - `:host`, the default, or `{:cuda, ordinal}`

  Raises `Sidewinder.Error`: of kind `:dtype` for a type that is not a float type, `:shape` and `:option` for invalid sizes
  and options, `:unavailable` for a device that is not there, and `:memory` where no memory is left.

      iex> cache = Sidewinder.KVCache.new(:bf16, {1, 8, 64}, capacity: 1024)
      iex> {cache.length, Sidewinder.KVCache.capacity(cache), Sidewinder.KVCache.device(cache)}
      {0, 1024, :host}
  """
  @spec new(Tensor.type(), {non_neg_integer, non_neg_integer, non_neg_integer}, keyword) :: t
  def new(type, shape, options \\ [])

  def new(type, {batch, heads, width} = shape, options) do
    options = options!(options)
    capacity = size!("capacity", options[:capacity] || @capacity)
    value_width = size!("value_width", options[:value_width] || width)
    Tensor.elements(shape)
    unless type in Tensor.float_types(), do: wrong_type(type)
    shapes = for width <- [width, value_width], do: [batch, heads, capacity, width]
    held = Held.new(type, shapes, Held.ordinal!(options[:device] || :host))
    held(%__MODULE__{keys: nil, values: nil, length: 0, written: nil}, held)
  end

  def new(_type, shape, _options) do
    raise Error.new(:shape, "shape", expected: "{batch, heads, width}", got: Error.show(shape))
  end

  defp options!(options) do
    case is_list(options) && Keyword.keyword?(options) &&
           Keyword.keys(options) -- [:capacity, :value_width, :device] do
      [] ->
        options

      [unknown | _] ->
        raise Error.new(:option, to_string(unknown),
                expected: "an option out of capacity, value_width, device",
                got: to_string(unknown)
              )

      false ->
        raise Error.new(:option, "options", expected: "a keyword list", got: Error.show(options))
    end
  end

  defp size!(_name, size) when is_integer(size) and size >= 0, do: size

  defp size!(name, other) do
    raise Error.new(:option, name, expected: "a size, not negative", got: Error.show(other))
  end

  defp wrong_type(type) do
    raise Error.new(:dtype, "type", expected: "f64, f32, bf16 or f16", got: Error.show(type))
  end

  defp held(cache, %Held{tensors: [keys, values], written: written}),
    do: %{cache | keys: keys, values: values, written: written}

  @doc """
  How many rows there is room for before memory grows.

      iex> Sidewinder.KVCache.capacity(Sidewinder.KVCache.new(:f32, {1, 2, 4}, capacity: 7))
      7
  """
  @spec capacity(t) :: non_neg_integer
  def capacity(%__MODULE__{keys: %{shape: {_batch, _heads, capacity, _width}}}), do: capacity

  @doc """
  Where it lives.

      iex> Sidewinder.KVCache.device(Sidewinder.KVCache.new(:f32, {1, 2, 4}))
      :host
  """
  @spec device(t) :: Tensor.device()
  def device(%__MODULE__{keys: keys}), do: Tensor.device(keys)

  @doc """
  The first `length` rows, to continue from there. Nothing is copied until a call extends it.

      iex> cache = Sidewinder.KVCache.new(:f32, {1, 1, 2})
      iex> Sidewinder.KVCache.truncate(cache, 1)
      ** (Sidewinder.Error) length: expected 0 to 0, got 1
  """
  @spec truncate(t, non_neg_integer) :: t
  def truncate(%__MODULE__{length: most} = cache, length) when length in 0..most//1,
    do: %{cache | length: length}

  def truncate(%__MODULE__{length: most}, length) do
    raise Error.new(:argument, "length", expected: "0 to #{most}", got: Error.show(length))
  end

  @doc false
  # Calls `run` with the cache as an op's inputs and options, with `new` rows claimed after its own; gives the outputs
  # with the cache that has them. If `run` raises, the rows stay claimed, and the next call that extends this
  # cache copies it.
  def extend(%__MODULE__{} = cache, new, run) do
    %{keys: keys, values: values, length: length, written: written} = cache
    held = %Held{tensors: [keys, values], first: 0, length: length, written: written}
    cache = held(cache, Held.claim(held, new))
    inputs = [{"keys", cache.keys}, {"values", cache.values}]
    {run.(inputs, %{cached: length}), %{cache | length: length + new}}
  end

  def extend(other, _new, _run) do
    raise Error.new(:argument, "cache", expected: "a Sidewinder.KVCache", got: Error.show(other))
  end

  defimpl Inspect do
    alias Sidewinder.{Device, KVCache}

    def inspect(cache, _opts) do
      {batch, heads, capacity, width} = cache.keys.shape
      rows = "#{cache.length} of #{capacity} rows"
      where = Device.name(KVCache.device(cache))
      "#Sidewinder.KVCache<#{cache.keys.type} (#{batch}, #{heads}, #{width}), #{rows}, #{where}>"
    end
  end
end

defmodule Sidewinder.MMRec.Memory do
  @moduledoc """
  The memory of MM-Rec: for each layer a short bank, which takes in the hidden state of each step, and a long one,
  which takes in summaries and has a hierarchy above it that queries go to.

  A memory lives on the host or on a GPU, and so do the tensors read from it. It is a value: a write returns a new memory,
  and the given one is unchanged, across processes as well. A write into the short bank costs only its rows, which are
  appended in place; only a second write to the same memory copies the bank. Slots of the short bank that were never
  written take no memory. A write into the long bank makes a new bank with all levels of its hierarchy.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, short_slots: 3, levels: 2)
      iex> h = Tensor.from_list([1, 2, 3, 4], :f32, {1, 2, 2})
      iex> written = Memory.write_short(memory, h, h)
      iex> {k, _v} = Memory.read(written, :short)
      iex> Tensor.to_list(k)
      [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]
      iex> {k, _v} = Memory.read(memory, :short)
      iex> Tensor.to_list(k) |> Enum.sum()
      0.0
      iex> summary = Tensor.from_list([4, 8], :f32, {1, 2})
      iex> {k, _v} = written |> Memory.write_long(summary, summary) |> Memory.query(1)
      iex> Tensor.to_list(k)
      [1.0, 2.0]

  Functions that are about one layer take the option `:layer`, 0 by default. All raise `Sidewinder.Error`: of kind
  `:option` or `:argument` for arguments that are no tensors, `:shape` and `:dtype` for tensors that do not fit the
  memory, `:unavailable` for a device that is not there, and `:memory` where no memory is left.
  """

  alias Sidewinder.{Error, Kernel, Options, RandomInputs, Tensor}
  alias Sidewinder.MMRec.{Bank, Dump, ShortBank}

  @defaults [
    width: nil,
    batch: 1,
    layers: 1,
    short_slots: 32_768,
    long_slots: 1024,
    levels: 3,
    ratio: 4,
    init: :zeros,
    type: :f32,
    backend: :cpu
  ]

  @enforce_keys [:layers | Keyword.keys(@defaults) -- [:layers]]
  defstruct @enforce_keys

  @typedoc "A memory. The contents of `layers` are internal."
  @type t :: %__MODULE__{
          layers: tuple,
          width: pos_integer,
          batch: pos_integer,
          short_slots: pos_integer,
          long_slots: pos_integer,
          levels: pos_integer,
          ratio: pos_integer,
          init: init,
          type: Tensor.type(),
          backend: :cpu | {:cuda, non_neg_integer}
        }

  @typedoc "The initial long bank: zeros, or normally distributed numbers of a deviation and a seed."
  @type init :: :zeros | {:normal, number, integer}

  @typedoc "Keys and values."
  @type pair :: {Tensor.t(), Tensor.t()}

  # Offsets and byte counts stay far below 2^63.
  @most 268_435_456

  @doc """
  A memory in which nothing has been written.

  Options:

    * `:width` - D, that of slots; it must be given
    * `:batch` - how many sequences it is for, B; 1 by default
    * `:layers` - 1 by default
    * `:short_slots` - S, 32768 by default; memory is taken as they are written
    * `:long_slots` - M, 1024 by default
    * `:levels` - levels of the hierarchy with the long bank itself, 1 to 16; 3 by default
    * `:ratio` - how many slots of a level make one of the next, 2 or more; 4 by default
    * `:init` - the initial long banks: `:zeros`, the default, or `{:normal, deviation, seed}`
    * `:type` - `:f32`, the default, or another type of floats
    * `:backend` - `:cpu`, the default, or `{:cuda, ordinal}`

      iex> Sidewinder.MMRec.Memory.new(width: 16, layers: 2)
      #Sidewinder.MMRec.Memory<f32, 2 layers of width 16, batch 1, 0 of 32768 short slots, 1024 long slots in 3 levels, cpu>
  """
  @spec new(keyword) :: t
  def new(options) do
    memory =
      described!(Keyword.merge(@defaults, Options.known!(options, Keyword.keys(@defaults))))

    count = count!(:layers, memory.layers, 65_536)
    layers = for layer <- 0..(count - 1), do: layer(memory, layer)
    %{memory | layers: List.to_tuple(layers)}
  end

  defp described!(options) do
    %{batch: batch, width: width} = memory = struct!(__MODULE__, options)
    for name <- [:batch, :width], do: count!(name, Map.fetch!(memory, name), @most)

    Options.check!(
      batch * width,
      batch * width <= @most,
      :width,
      "at most #{@most} with the batch"
    )

    for name <- [:short_slots, :long_slots], do: count!(name, Map.fetch!(memory, name), @most)
    count!(:levels, memory.levels, 16)
    ratio = memory.ratio
    Options.check!(ratio, is_integer(ratio) and ratio in 2..@most, :ratio, "2 to #{@most}")
    init!(memory.init)

    unless memory.type in Tensor.float_types() do
      expected = "f64, f32, bf16 or f16"
      raise Error.new(:dtype, "type", expected: expected, got: Error.show(memory.type))
    end

    unless memory.backend == :cpu,
      do: match?({:cuda, _}, memory.backend) || wrong_backend(memory.backend)

    Bank.ordinal(memory)
    memory
  end

  defp count!(name, value, most),
    do: Options.check!(value, is_integer(value) and value in 1..most, name, "1 to #{most}")

  defp init!(:zeros), do: :ok

  defp init!({:normal, deviation, seed})
       when is_number(deviation) and deviation >= 0 and is_integer(seed),
       do: :ok

  defp init!(other), do: Options.wrong!(:init, ":zeros or {:normal, deviation, seed}", other)

  defp wrong_backend(other), do: Options.wrong!(:backend, ":cpu or {:cuda, ordinal}", other)

  # A layer: its short bank, as `ShortBank` has it, and its long bank with the levels above it.
  defp layer(memory, index) do
    filled(memory, %{short: nil, short_cursor: 0, long: long(memory, index), long_cursor: 0})
  end

  defp long(%{init: :zeros} = memory, _index) do
    zeros = Bank.zeros(memory, memory.long_slots)
    {zeros, zeros}
  end

  defp long(%{init: {:normal, deviation, seed}} = memory, index) do
    shape = {memory.batch, memory.long_slots, memory.width}

    normal =
      &(shape
        |> RandomInputs.normal(memory.type, deviation, {seed, index, &1})
        |> Bank.here(memory))

    {normal.("k"), normal.("v")}
  end

  # A stale hierarchy would be a bug, so it is made with every long bank.
  defp filled(%{levels: 1}, layer), do: Map.put(layer, :above, [])

  defp filled(memory, %{long: {k, v}, long_cursor: cursor} = layer) do
    options = [levels: memory.levels, ratio: memory.ratio, cursor: cursor]

    Map.put(
      layer,
      :above,
      Kernel.MMRec.hds_construct(k, v, [{:backend, memory.backend} | options])
    )
  end

  @doc """
  Writes rows into the short bank: slot `start + i` gets row `i`.

    * `k`, `v` - `{B, n, D}`

  Options:

    * `:start` - the slot of the first row; the one after the last that was written by default
    * `:mode` - `:ring`, the default, where slot numbers wrap around, and of more rows than slots the last ones
      stay; or `:strict`, where rows past the last slot raise
    * `:layer`

  A start that is not the default one costs a copy of the bank.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 1, short_slots: 2, long_slots: 1)
      iex> rows = Tensor.from_list([1, 2, 3], :f32, {1, 3, 1})
      iex> {k, _v} = memory |> Memory.write_short(rows, rows) |> Memory.read(:short)
      iex> Tensor.to_list(k)
      [3.0, 2.0]
      iex> Memory.write_short(memory, rows, rows, mode: :strict)
      ** (Sidewinder.Error) write_short: start: expected room for 3 rows after it, of 2 slots, got 0. The mode `ring` goes on from the first slot
  """
  @spec write_short(t, Tensor.t(), Tensor.t(), keyword) :: t
  def write_short(%__MODULE__{} = memory, k, v, options \\ []) do
    options = Options.known!(options, [:start, :mode, :layer])
    index = layer!(memory, options[:layer])
    layer = elem(memory.layers, index)
    {batch, count, width} = rows!(memory, k)
    [k, v] = for {name, t} <- [k: k, v: v], do: tensor!(memory, name, t, {batch, count, width})
    start = start!(options[:start], layer.short_cursor)
    mode!(memory, options[:mode] || :ring, start, count)
    put(memory, index, ShortBank.write(memory, layer, [k, v], start, count))
  end

  defp rows!(%{batch: batch, width: width}, %Tensor{shape: {batch, count, width}}),
    do: {batch, count, width}

  defp rows!(%{batch: batch, width: width}, other),
    do: wrong_tensor("k", "{#{batch}, n, #{width}}", other)

  defp tensor!(memory, name, %Tensor{shape: shape, type: type} = tensor, shape) do
    unless type == memory.type do
      hint = "A memory has one type; convert with Sidewinder.Tensor.cast/2"
      raise Error.new(:dtype, "#{name}", expected: "#{memory.type}", got: "#{type}", hint: hint)
    end

    Bank.here(tensor, memory)
  end

  defp tensor!(_memory, name, other, shape), do: wrong_tensor("#{name}", inspect(shape), other)

  defp wrong_tensor(name, expected, %Tensor{shape: shape}),
    do: raise(Error.new(:shape, name, expected: "shape #{expected}", got: inspect(shape)))

  defp wrong_tensor(name, _expected, other),
    do: Options.wrong_argument!(name, "a Sidewinder.Tensor", other)

  defp start!(nil, cursor), do: cursor

  defp start!(start, _cursor),
    do: Options.check!(start, slot?(start), :start, "a slot, not negative")

  defp slot?(slot), do: is_integer(slot) and slot >= 0 and slot < 0x4000000000000000

  defp mode!(_memory, :ring, _start, _count), do: :ok

  defp mode!(%{short_slots: slots}, :strict, start, count) when start + count <= slots, do: :ok

  defp mode!(%{short_slots: slots}, :strict, start, count) do
    raise Error.new(:option, "start",
            op: "write_short",
            expected: "room for #{count} rows after it, of #{slots} slots",
            got: "#{start}",
            hint: "The mode `ring` goes on from the first slot"
          )
  end

  defp mode!(_memory, other, _start, _count),
    do: Options.wrong!(:mode, ":ring or :strict", other)

  defp put(memory, index, layer), do: %{memory | layers: put_elem(memory.layers, index, layer)}

  @doc """
  Writes a summary into the long bank, and rebuilds the hierarchy above it.

    * `k`, `v` - `{B, D}`

  Options:

    * `:policy` - `:ring`, the default: into the slot at the cursor, which advances by one; `:ema`: each slot becomes
      `decay slot + (1 - decay) summary`; or `:broadcast`: into all slots, which makes attention over them the same for
      all queries
    * `:decay` - 0.99 by default
    * `:layer`

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, levels: 2)
      iex> summary = Tensor.from_list([4, 8], :f32, {1, 2})
      iex> memory |> Memory.write_long(summary, summary) |> Memory.cursor(:long)
      1
  """
  @spec write_long(t, Tensor.t(), Tensor.t(), keyword) :: t
  def write_long(%__MODULE__{} = memory, k, v, options \\ []) do
    options = Options.known!(options, [:policy, :decay, :layer])
    index = layer!(memory, options[:layer])
    %{long: {k_bank, v_bank}, long_cursor: cursor} = layer = elem(memory.layers, index)
    shape = {memory.batch, memory.width}
    [k, v] = for {name, t} <- [k: k, v: v], do: tensor!(memory, name, t, shape)
    policy = options[:policy] || :ring
    policies = [:ring, :ema, :broadcast]
    Options.check!(policy, policy in policies, :policy, ":ring, :ema or :broadcast")

    how = [
      policy: policy,
      cursor: cursor,
      backend: memory.backend,
      decay: decay!(options[:decay])
    ]

    new = &Kernel.MMRec.write_long(&1, &2, how)
    layer = %{layer | long: {new.(k_bank, k), new.(v_bank, v)}}
    layer = if policy == :ring, do: %{layer | long_cursor: cursor + 1}, else: layer
    put(memory, index, filled(memory, layer))
  end

  defp decay!(nil), do: nil

  defp decay!(decay) do
    valid = is_number(decay) and decay >= 0 and decay <= 1
    Options.check!(decay, valid, :decay, "a number from 0 to 1") * 1.0
  end

  @doc """
  The keys and values of a bank, `:short` or `:long`: `{B, S, D}` or `{B, M, D}`, in order of slots. Option: `:layer`.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, short_slots: 3, levels: 2)
      iex> h = Tensor.from_list([4, 8], :f32, {1, 1, 2})
      iex> {keys, _values} = memory |> Memory.write_short(h, h) |> Memory.read(:short)
      iex> Tensor.to_list(keys)
      [4.0, 8.0, 0.0, 0.0, 0.0, 0.0]
  """
  @spec read(t, :short | :long, keyword) :: pair
  def read(%__MODULE__{} = memory, bank, options \\ []) do
    layer = the_layer!(memory, options)

    case bank!(bank) do
      :long -> layer.long
      :short -> ShortBank.read(memory, layer)
    end
  end

  defp bank!(bank) when bank in [:short, :long], do: bank
  defp bank!(other), do: Options.wrong_argument!("bank", ":short or :long", other)

  @doc """
  The keys and values of one slot of the short bank, `{B, D}`. Option: `:layer`.

      iex> memory = Sidewinder.MMRec.Memory.new(width: 2, short_slots: 4)
      iex> {k, _v} = Sidewinder.MMRec.Memory.read_step(memory, 3)
      iex> k
      #Sidewinder.Tensor<f32 (1, 2) [0.0, 0.0]>
      iex> Sidewinder.MMRec.Memory.read_step(memory, 4)
      ** (Sidewinder.Error) step: expected 0 to 3, got 4
  """
  @spec read_step(t, non_neg_integer, keyword) :: pair
  def read_step(memory, step, options \\ [])

  def read_step(%__MODULE__{short_slots: slots} = memory, step, options)
      when is_integer(step) and step >= 0 and step < slots do
    ShortBank.read_slot(memory, the_layer!(memory, options), step)
  end

  def read_step(%__MODULE__{short_slots: slots}, other, _options),
    do: Options.wrong_argument!("step", "0 to #{slots - 1}", other)

  @doc """
  The keys and values of a level of the hierarchy: 0 is the long bank; -1, the default, or a number beyond the last level
  is the top. Option: `:layer`.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, levels: 2)
      iex> summary = Tensor.from_list([4, 8], :f32, {1, 2})
      iex> {keys, _values} = memory |> Memory.write_long(summary, summary) |> Memory.query(0)
      iex> Enum.take(Tensor.to_list(keys), 2)
      [4.0, 8.0]
  """
  @spec query(t, integer, keyword) :: pair
  def query(memory, level \\ -1, options \\ [])

  def query(%__MODULE__{levels: levels} = memory, level, options)
      when is_integer(level) and level >= -1 do
    %{long: long, above: above} = the_layer!(memory, options)
    level = if level == -1, do: levels - 1, else: min(level, levels - 1)
    Enum.at([long | above], level)
  end

  def query(%__MODULE__{}, other, _options),
    do: Options.wrong_argument!("level", "-1 or more", other)

  @doc """
  The number of rows, or of summaries by the policy `:ring`, that a bank has had. Modulo the bank's slots it is the next
  slot. Option: `:layer`.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, short_slots: 3, levels: 2)
      iex> h = Tensor.from_list([4, 8], :f32, {1, 1, 2})
      iex> memory |> Memory.write_short(h, h) |> Memory.cursor(:short)
      1
  """
  @spec cursor(t, :short | :long, keyword) :: non_neg_integer
  def cursor(%__MODULE__{} = memory, bank, options \\ []) do
    layer = the_layer!(memory, options)
    if bank!(bank) == :short, do: layer.short_cursor, else: layer.long_cursor
  end

  defp the_layer!(memory, options) do
    options = Options.known!(options, [:layer])
    elem(memory.layers, layer!(memory, options[:layer]))
  end

  defp layer!(_memory, nil), do: 0

  defp layer!(%{layers: layers}, layer) do
    most = tuple_size(layers) - 1

    Options.check!(
      layer,
      is_integer(layer) and layer in 0..most,
      :layer,
      "0 to #{most}"
    )
  end

  @doc """
  The memory with the initial contents of its `:init`.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, short_slots: 3, levels: 2)
      iex> h = Tensor.from_list([4, 8], :f32, {1, 1, 2})
      iex> memory |> Memory.write_short(h, h) |> Memory.reset() |> Memory.cursor(:short)
      0
  """
  @spec reset(t) :: t
  def reset(%__MODULE__{layers: layers} = memory) do
    layers = for index <- 0..(tuple_size(layers) - 1), do: layer(memory, index)
    %{memory | layers: List.to_tuple(layers)}
  end

  @doc """
  The memory's contents as the bytes of a safetensors file: for each layer `i` and bank `short` and `long` the
  tensors `layer.i.bank.k` and `layer.i.bank.v`, and `layer.i.bank.cursor`, `{1}` of I64. Bytes of the same memory are the
  same everywhere.

      iex> alias Sidewinder.{MMRec.Memory, Safetensors}
      iex> dump = Memory.dump(Memory.new(width: 2, short_slots: 4, long_slots: 4, init: {:normal, 0.02, 1}))
      iex> Enum.sort(Map.keys(Safetensors.decode(dump)))
      ["layer.0.long.cursor", "layer.0.long.k", "layer.0.long.v",
        "layer.0.short.cursor", "layer.0.short.k", "layer.0.short.v"]
      iex> Memory.dump(Memory.restore(dump)) == dump
      true
  """
  @spec dump(t) :: binary
  def dump(%__MODULE__{layers: layers} = memory) do
    for index <- 0..(tuple_size(layers) - 1), bank <- [:short, :long] do
      {k, v} = read(memory, bank, layer: index)
      {index, bank, [k: k, v: v, cursor: cursor(memory, bank, layer: index)]}
    end
    |> Dump.encode()
  end

  @doc """
  The memory of a dump. Options are `:levels`, `:ratio`, `:init` and `:backend` as in `new/1`, which are not in the dump.

  Raises `Sidewinder.Error` of kind `:argument` for a binary that is no dump, or is damaged.

      iex> alias Sidewinder.{MMRec.Memory, Tensor}
      iex> memory = Memory.new(width: 2, long_slots: 4, short_slots: 3, levels: 2)
      iex> h = Tensor.from_list([4, 8], :f32, {1, 1, 2})
      iex> written = Memory.write_short(memory, h, h)
      iex> Memory.read(Memory.restore(Memory.dump(written)), :short) == Memory.read(written, :short)
      true
  """
  @spec restore(binary, keyword) :: t
  def restore(dump, options \\ []) do
    options = Options.known!(options, [:levels, :ratio, :init, :backend])
    {tensors, count, short, long} = Dump.decode!(dump)
    {batch, slots, width} = short.shape

    sizes = [
      batch: batch,
      width: width,
      short_slots: slots,
      long_slots: elem(long.shape, 1),
      type: short.type,
      layers: {}
    ]

    memory = @defaults |> Keyword.merge(options) |> Keyword.merge(sizes) |> described!()

    layers = for layer <- 0..(count - 1), do: restored(memory, tensors, layer)
    %{memory | layers: List.to_tuple(layers)}
  end

  defp restored(memory, tensors, layer) do
    [{short, short_cursor}, {long, long_cursor}] =
      for {bank, slots} <- [short: memory.short_slots, long: memory.long_slots] do
        spec = {memory.type, {memory.batch, slots, memory.width}}
        {banks, cursor} = Dump.bank!(tensors, layer, bank, spec)
        {for(t <- banks, do: Bank.here(t, memory)), cursor}
      end

    for cursor <- [short_cursor, long_cursor],
        do: Options.check!(cursor, slot?(cursor), :cursor, "less than 2^62")

    empty = %{short: nil, short_cursor: 0, long: List.to_tuple(long), long_cursor: long_cursor}
    start = Integer.mod(-short_cursor, memory.short_slots)
    filled(memory, ShortBank.fill(memory, empty, short, start, short_cursor))
  end

  defimpl Inspect do
    alias Sidewinder.{Device, MMRec.Memory, MMRec.ShortBank}

    def inspect(%Memory{layers: layers} = memory, _opts) do
      [first | _] = Tuple.to_list(layers)
      count = tuple_size(layers)
      written = ShortBank.count(first.short)

      "#Sidewinder.MMRec.Memory<#{memory.type}, #{count} #{if count == 1, do: "layer", else: "layers"} of width " <>
        "#{memory.width}, batch #{memory.batch}, #{written} of #{memory.short_slots} short slots, " <>
        "#{memory.long_slots} long slots in #{memory.levels} levels, #{Device.name(memory.backend)}>"
    end
  end
end

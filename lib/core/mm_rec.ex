defmodule Sidewinder.MMRec do
  @moduledoc """
  Blocks of MM-Rec with their memory, over sequences in parts.

  `Sidewinder.Kernel.MMRec` has the block itself, whose gradient a training step takes. Here a call is a part of a
  longer sequence: it attends to what earlier calls wrote into a `Sidewinder.MMRec.Memory`, starts from their state,
  and gives a memory and a state for the next call.
  """

  alias Sidewinder.{Error, Kernel, MMRec.Memory, Options, Tensor}

  @typedoc "What a call gives: the result of the whole part, and the memory and state for the next one."
  @type result :: %{
          y: Tensor.t(),
          last_state: Tensor.t(),
          summary: Tensor.t(),
          memory: Memory.t()
        }

  @chunk 8192
  @long 32_768

  @doc """
  `Sidewinder.Kernel.MMRec.mmrec_block/4` over a part of a sequence, with a memory.

    * `x` - `{B, L, D}`
    * `memory` - a `Sidewinder.MMRec.Memory` of that batch, width and type
    * `weights` - a map

  If the memory is on a GPU, tensors on the host are copied there.

  Attention reads the top level of the memory from before the call. Then the hidden states of all steps are written
  into its short bank, and the mean of the results into its long one.

  Options besides those of `Sidewinder.Kernel` and of the block (but `:levels`, `:ratio` and `:cursor`, which the memory
  knows, and `:checkpoint`):

    * `:layer` - of the memory; 0 by default
    * `:initial_state` - `{B, D}`: the `:last_state` of the part before; zeros by default
    * `:chunk` - the steps of a piece of `x`. Pieces are computed one after the other, so that intermediate tensors are
      held for one piece at a time. #{@chunk} by default for `x` of more than #{@long} steps, and for others
      all of them. The results of pieces are on the host
    * `:short` - whether states are written into the short bank; true by default
    * `:policy` - how the summary goes into the long bank, `:ring`, the default, `:ema` or `:broadcast`, or nil for not
      at all

  Returns a map of `:y`, `:last_state`, `:summary` and `:memory`. The given `memory` is unchanged.

      iex> alias Sidewinder.{MMRec, MMRec.Memory, RandomInputs}
      iex> shape = "B=1,L=4,M=1,D=2,I=1,F=3"
      iex> [{"x", x}, _, _ | weights] = RandomInputs.make(:mmrec_block, shape: shape, with: ["wm", "bm"])
      iex> memory = Memory.new(width: 2, long_slots: 4)
      iex> first = MMRec.block(x, memory, Map.new(weights))
      iex> second = MMRec.block(x, first.memory, Map.new(weights), initial_state: first.last_state)
      iex> {second.y.shape, Memory.cursor(second.memory, :short), Memory.cursor(second.memory, :long)}
      {{1, 4, 2}, 8, 2}
  """
  @spec block(Tensor.t(), Memory.t(), Kernel.weights(), keyword) :: result
  def block(x, memory, weights, options \\ [])

  def block(%Tensor{shape: {batch, length, width}} = x, %Memory{} = memory, weights, options) do
    {own, options} = own!(options)
    fits!(memory, batch, width)
    weights = beside(weights, memory)
    top = Memory.query(memory, -1, layer: own.layer)
    parts = parts(x, length, own.chunk)
    start = {beside(options[:initial_state], memory), memory, []}

    {last_state, memory, results} =
      Enum.reduce(parts, start, &part(beside(&1, memory), &2, {top, weights, options, own}))

    {y, summary} = whole(Enum.reverse(results), {batch, length, width})
    memory = remember(memory, summary, length, own)
    %{y: y, last_state: last_state, summary: summary, memory: memory}
  end

  def block(%Tensor{shape: shape}, %Memory{}, _weights, _options) do
    raise error(:shape, "x", expected: "shape {B, L, D}", got: inspect(shape))
  end

  def block(%Tensor{}, other, _weights, _options) do
    raise error(:argument, "memory",
            expected: "a Sidewinder.MMRec.Memory",
            got: Error.show(other)
          )
  end

  def block(other, _memory, _weights, _options) do
    raise error(:argument, "x", expected: "a Sidewinder.Tensor", got: Error.show(other))
  end

  ## Options

  @own [layer: 0, chunk: nil, short: true, policy: :ring]
  @not_here [:levels, :ratio, :cursor, :checkpoint]

  defp own!(options) do
    unless is_list(options) and Keyword.keyword?(options),
      do: raise(error(:option, "options", expected: "a keyword list", got: Error.show(options)))

    {own, rest} = Keyword.split(options, Keyword.keys(@own))
    own = Map.new(Keyword.merge(@own, own))
    Options.check!(own.short, is_boolean(own.short), :short, "true or false")

    Options.check!(
      own.chunk,
      own.chunk == nil or (is_integer(own.chunk) and own.chunk > 0),
      :chunk,
      "a positive integer"
    )

    with [{key, _} | _] <- Keyword.take(rest, @not_here) do
      raise error(:option, "#{key}",
              expected: "no such option",
              got: "#{key}",
              hint: "The memory has its levels, and there is no gradient here"
            )
    end

    {own, rest}
  end

  defp fits!(%{batch: batch, width: width}, batch, width), do: :ok

  defp fits!(memory, batch, width) do
    raise error(:shape, "x",
            expected: "batch #{memory.batch} and width #{memory.width}, as the memory has them",
            got: "#{batch} and #{width}"
          )
  end

  defp error(kind, argument, fields), do: Error.new(kind, argument, [op: "MMRec.block"] ++ fields)

  # Tensors on the memory's device, if that is a GPU.
  defp beside(%Tensor{} = tensor, %{backend: {:cuda, _} = device}),
    do: Tensor.to_device(tensor, device)

  defp beside(%{} = tensors, memory) when not is_struct(tensors),
    do: Map.new(tensors, fn {name, tensor} -> {name, beside(tensor, memory)} end)

  defp beside(other, _memory), do: other

  ## Pieces

  defp parts(x, length, nil) when length <= @long, do: [x]
  defp parts(x, length, nil), do: parts(x, length, @chunk)
  defp parts(x, length, chunk) when length <= chunk, do: [x]

  defp parts(%Tensor{} = x, length, chunk) do
    x = Tensor.to_host(x)
    Stream.map(0..(length - 1)//chunk, &slice(x, &1, min(chunk, length - &1)))
  end

  defp slice(%Tensor{shape: {batch, length, width}} = x, first, count) do
    row = row(x)

    data =
      for b <- 0..(batch - 1)//1, into: <<>> do
        binary_part(x.data, (b * length + first) * row, count * row)
      end

    Tensor.new(data, x.type, {batch, count, width})
  end

  # Bytes of a step.
  defp row(%Tensor{shape: shape, data: data}),
    do: div(byte_size(data), max(elem(shape, 0) * elem(shape, 1), 1))

  defp whole([%{y: y, summary: summary}], _shape), do: {y, summary}

  defp whole(results, {batch, length, width}) do
    results = on_host(results)
    {join(results, batch, length, width), summary(results, batch, width)}
  end

  defp join([%{y: first} | _] = results, batch, length, width) do
    tensors = for %{y: y} <- results, do: {y.data, elem(y.shape, 1) * row(y)}

    data =
      for b <- 0..(batch - 1)//1, {data, size} <- tensors, into: <<>> do
        binary_part(data, b * size, size)
      end

    Tensor.new(data, first.type, {batch, length, width})
  end

  defp part(x, {initial, memory, results}, {top, weights, options, own}) do
    options = Keyword.merge(options, initial_state: initial, levels: 1)
    where = Keyword.put_new(options, :backend, memory.backend)
    result = Kernel.MMRec.mmrec_block(x, top, weights, where)
    %{shape: {_, count, _}} = x

    memory =
      if own.short and count > 0,
        do: Memory.write_short(memory, result.h, result.h, layer: own.layer),
        else: memory

    # One result stays where it is.
    {result.last_state, memory, [Map.take(result, [:y, :summary]) | on_host(results)]}
  end

  defp on_host(results) do
    for result <- results, do: Map.new(result, fn {name, t} -> {name, Tensor.to_host(t)} end)
  end

  # The mean over all steps, from each part's mean, weighted by the steps of the part.
  defp summary(results, batch, width) do
    counts = for %{y: y} <- results, do: elem(y.shape, 1)
    lists = for %{summary: summary} <- results, do: Tensor.to_list(summary)
    sums = Enum.zip_with(lists, &weighted(&1, counts, Enum.sum(counts)))
    Tensor.from_list(sums, hd(results).summary.type, {batch, width})
  end

  defp weighted(values, counts, all),
    do: Enum.sum(Enum.zip_with(values, counts, &(&1 * &2))) / all

  defp remember(memory, _summary, length, %{policy: policy}) when length == 0 or policy == nil,
    do: memory

  defp remember(memory, summary, _length, own) do
    Memory.write_long(memory, summary, summary, policy: own.policy, layer: own.layer)
  end
end

defmodule Sidewinder.Axon.Embedding do
  @moduledoc false
  # An embedding whose table is tied to that of the logits. Two layers of Axon cannot share parameters, so the layer
  # returns the table together with the rows.

  import Nx.Defn.Kernel, only: [custom_grad: 3]
  import Sidewinder.Axon.Layers, only: [layer: 4]

  # A product with one-hot rows is a kernel, and so is its gradient. For larger vocabularies these rows are too long.
  @most 4096

  @doc "A layer of `{rows, table}` for tokens."
  def table(tokens, vocabulary, width, name) do
    start = Axon.Initializers.normal(scale: 1 / :math.sqrt(width))
    params = [{"kernel", fn _ -> {vocabulary, width} end, start}]
    layer(:tied_embedding, [tokens: tokens], params, %{name: name})
  end

  @doc "The rows alone."
  def rows(table), do: layer(:rows, [x: table], [], %{})

  @doc "Logits by the same table."
  def logits(x, table) do
    layer(:tied_logits, [x: x, table: layer(:table, [x: table], [], %{})], [], %{})
  end

  @doc "The rows of tokens."
  def take(kernel, tokens) do
    if Nx.axis_size(kernel, 0) > @most,
      do: Nx.take(kernel, tokens),
      else: Sidewinder.linear(one_hot(tokens, kernel), Nx.transpose(kernel))
  end

  # Nx.BinaryBackend compares number by number, which takes a thousand times longer.
  defp one_hot(tokens, %{type: type} = kernel) do
    vocabulary = Nx.axis_size(kernel, 0)
    shape = Tuple.insert_at(tokens.shape, tuple_size(tokens.shape), vocabulary)
    template = Nx.template(shape, type)

    if Nx.Defn.Compiler.current() == Nx.Defn.Evaluator,
      do: Nx.runtime_call(template, {tokens}, [template: template], &__MODULE__.callback/2),
      else: compared(tokens, template)
  end

  @doc false
  def callback({%{data: %Nx.BinaryBackend{}} = tokens}, template: %{shape: shape} = template) do
    vocabulary = elem(shape, tuple_size(shape) - 1)
    one = one(template.type)
    zeros = &:binary.copy(<<0>>, &1 * byte_size(one))

    rows =
      for row <- 0..(vocabulary - 1),
          into: %{},
          do: {row, zeros.(row) <> one <> zeros.(vocabulary - 1 - row)}

    data = for token <- Nx.to_flat_list(tokens), into: <<>>, do: row!(rows, token)
    Nx.BinaryBackend.from_binary(template, data, [])
  end

  def callback({tokens}, template: template), do: compared(tokens, template)

  # Binaries, since tensors made while a graph is built would become part of it.
  defp one({:bf, 16}), do: <<0x3F80::16-native>>
  defp one({:f, bits}), do: <<1.0::float-size(bits)-native>>

  defp row!(rows, token) do
    case rows do
      %{^token => row} -> row
      _ -> raise wrong(token, map_size(rows))
    end
  end

  defp wrong(token, vocabulary) do
    Sidewinder.Error.new(:argument, "tokens",
      op: "Sidewinder.Axon.mm_rec",
      expected: "numbers from 0 to #{vocabulary - 1}",
      got: inspect(token)
    )
  end

  defp compared(tokens, %{shape: shape, type: type}) do
    vocabulary = elem(shape, tuple_size(shape) - 1)
    tokens |> Nx.new_axis(-1) |> Nx.equal(Nx.iota({vocabulary})) |> Nx.as_type(type)
  end

  @doc "The last rows of each sequence. The gradient concatenates zeros and rows, since Nx would pad number by number."
  def last(x, count) do
    length = Nx.axis_size(x, 1)
    if count < length, do: last(x, count, length - count), else: x
  end

  defp last(x, count, before) do
    {batch, _length, width} = x.shape
    last = Nx.slice_along_axis(x, before, count, axis: 1)

    custom_grad(last, [x], fn dy ->
      zeros = Nx.broadcast(Nx.tensor(0, type: x.type), {batch, before, width})
      [Nx.concatenate([zeros, dy], axis: 1)]
    end)
  end
end

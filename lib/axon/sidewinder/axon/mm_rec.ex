defmodule Sidewinder.Axon.MMRec do
  @moduledoc false
  # The layers of MM-Rec, which `Sidewinder.Axon` documents.

  import Sidewinder.Axon.Options, only: [options!: 3]
  import Sidewinder.Axon.Params, only: [by_width: 1, uniform: 1, uniform: 3]
  import Sidewinder.Axon.Layers, only: [layer: 4, layer: 5, key: 2]
  alias Sidewinder.{Axon.Embedding, Error}

  @steps [
    heads: {1, :size},
    mix: {0.1, :number},
    v_mix: {0.1, :number},
    norm: {:outside, [:outside, :inside]},
    levels: {3, :size},
    ratio: {4, :size},
    state_clip: {nil, :positive},
    state_norm: {false, :flag},
    checkpoint: {true, :flag}
  ]
  @start [
    inner: {nil, :size},
    hidden: {nil, :size},
    epsilon: {1.0e-6, :positive},
    dropout: {0.0, :rate},
    decay_bias: {-3.0, :number},
    kernel_initializer: {nil, :initializer},
    bias_initializer: {nil, :initializer}
  ]
  @carried [memory: {nil, :layers}, initial_state: {nil, :layer}, return_state: {false, :flag}]
  @computed Keyword.keys(@steps)
  @block @steps ++ @start
  @names [name: {nil, :name}, meta: {nil, :any}]

  ## A block

  def block(%Axon{} = x, opts \\ []), do: block(x, opts, %{})

  # `known` has the width, if the block is one of a model.
  defp block(x, opts, known) do
    opts = Map.merge(options!(:mm_rec_block, opts, @names ++ @carried ++ @block), known)
    options = Map.to_list(Map.take(opts, [:epsilon, :dropout, :return_state | @computed]))
    out = layer(:mm_rec_block, inputs(x, opts), params(opts), opts, options)
    if opts.return_state, do: parts(out), else: out
  end

  defp inputs(x, opts) do
    {k, v} = opts.memory || {nil, nil}
    name = if is_binary(opts.name), do: "#{opts.name}_key"
    key = if opts.dropout > 0, do: key(x, name)
    [x: x, k_mem: k, v_mem: v, initial_state: opts.initial_state, dropout_key: key]
  end

  defp parts(out) do
    [y, last_state, summary] =
      for name <- [:y, :last_state, :summary], do: layer(name, [x: out], [], %{})

    {y, %{last_state: last_state, summary: summary}}
  end

  defp params(opts) do
    {inner, hidden, width} = {inner(opts), &(opts.hidden || 4 * &1), & &1}
    layer = &dense(opts, &1, &2, &3)

    by_width(
      [{"n1", &{&1}, :ones}, {"n2", &{&1}, :ones}] ++
        Enum.flat_map(~w(q k v z gate aq ao), &layer.(&1, width, {width, width})) ++
        if(opts.mix == 0, do: [], else: layer.("m", width, {&(2 * &1), &(2 * &1)})) ++
        layer.("g1", inner, {width, of(opts, opts.inner, &(4 * &1))}) ++
        [{"wg2", &{&1, inner.(&1)}, :zeros}, {"bg2", &{&1}, constant(opts.decay_bias)}] ++
        layer.("c1", inner, {width, of(opts, opts.inner, &(4 * &1))}) ++
        layer.("c2", width, {inner, inner}) ++
        layer.("f1", hidden, {width, of(opts, opts.hidden, &div(&1, 4))}) ++
        layer.("f2", width, {hidden, hidden})
    )
  end

  defp inner(opts), do: &(opts.inner || max(div(&1, 4), 1))

  # The width as a function of a size that follows from it, or nil if the size was given and the width is unknown.
  defp of(%{width: width}, _given, _by_size), do: fn _size -> width end
  defp of(_opts, nil, by_size), do: by_size
  defp of(_opts, _given, _by_size), do: nil

  # The number of inputs as functions of the width, and of the number of outputs, which an initializer gets.
  defp dense(opts, name, out, {inputs, by_outputs}) do
    bias = opts.bias_initializer || if(by_outputs, do: uniform(by_outputs), else: :zeros)
    kernel = opts.kernel_initializer || (&uniform/3)
    [{"w" <> name, &{out.(&1), inputs.(&1)}, kernel}, {"b" <> name, &{out.(&1)}, bias}]
  end

  defp constant(value),
    do: fn shape, type -> Nx.broadcast(Nx.tensor(value, type: type), shape) end

  ## A model

  @model [
    name: {"mm_rec", :prefix},
    vocabulary: {nil, :size},
    width: {64, :size},
    layers: {2, :size},
    last: {nil, :size}
  ]

  def model(%Axon{} = tokens, opts \\ []) do
    all = options!(:mm_rec, opts, @model ++ @carried ++ @block)
    unless all.vocabulary, do: raise(missing())
    block = Keyword.take(opts, Keyword.keys(@block))

    table = Embedding.table(tokens, all.vocabulary, all.width, "#{all.name}_embedding")
    first = {Embedding.rows(table), []}
    {x, states} = Enum.reduce(0..(all.layers - 1), first, &stacked(&1, &2, block, all))

    logits =
      x
      |> last(all.last)
      |> norm(all)
      |> Embedding.logits(table)

    if all.return_state, do: {logits, together(Enum.reverse(states))}, else: logits
  end

  defp stacked(i, {x, states}, block, all) do
    of = fn layer -> layer && layer(:of_block, [x: layer], [], %{}, block: i) end
    memory = with {k, v} <- all.memory, do: {of.(k), of.(v)}
    carried = [memory: memory, initial_state: of.(all.initial_state), return_state: true]
    opts = [name: "#{all.name}_#{i}"] ++ carried ++ block
    {y, state} = block(x, opts, %{width: all.width})
    {y, [state | states]}
  end

  defp together(states) do
    for name <- [:last_state, :summary], into: %{} do
      layers = for state <- states, do: state[name]
      {name, layer(:states, [x: Axon.container(List.to_tuple(layers))], [], %{})}
    end
  end

  # With the blocks' epsilon and mode.
  defp norm(x, all) do
    names = %{name: "#{all.name}_norm"}
    params = by_width([{"gamma", &{&1}, :ones}])
    layer(:rms_norm, [x: x], params, names, epsilon: all.epsilon, eps_mode: all.norm)
  end

  defp last(x, nil), do: x
  defp last(x, count), do: layer(:last, [x: x], [], %{}, count: count)

  defp missing do
    Error.new(:option, "vocabulary",
      op: "Sidewinder.Axon.mm_rec",
      expected: "a positive integer",
      got: "none"
    )
  end
end

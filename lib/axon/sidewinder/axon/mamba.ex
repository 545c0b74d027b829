defmodule Sidewinder.Axon.Mamba do
  @moduledoc false
  # The parameters of a model of `Sidewinder.Axon` as a `Sidewinder.Mamba`, and back.

  alias Axon.ModelState
  alias Sidewinder.{Error, Mamba, Native, Op}

  @types [f: 64, f: 32, bf: 16, f: 16]

  # The blocks of Axon, with the `model_type` of checkpoints that have them.
  @blocks %{mamba_block: "mamba", mamba2_block: "mamba2"}

  # Stands for the infinity that bounds of dt have in configurations: the largest number of f32.
  @largest 3.4028234663852886e38

  ## To a Mamba

  def to_mamba(%Axon{} = model, %ModelState{data: data}, options) do
    parts = parts(model)
    tensors = Map.new(tensors(parts, data), fn {name, t} -> {name, Op.to_kernel(t)} end)
    config = Map.merge(config(parts, tensors), of_mixer(hd(parts.blocks), tensors))
    Mamba.new(config, untied(tensors), options)
  end

  # The layers of a model, from its output back.
  defp parts(%Axon{output: id} = model) do
    graph = named(model)
    {head, id} = head(graph[id], id)
    {norm, id} = norm(graph[id])
    {blocks, id} = blocks(graph, last(graph[id], id), [])
    if blocks == [], do: wrong(graph[id], "a Mamba block and a residual connection around it")
    embedding = embedding(graph, graph[id])
    one_kind!(blocks)
    one_epsilon!(norm, blocks)
    whole!(head, embedding)
    %{embedding: embedding, blocks: blocks, norm: norm, head: head}
  end

  defp head(%{op: op, parents: [below]} = layer, _id) when op in [:dense, :linear] do
    if "bias" in layer.params,
      do: wrong(layer, "a head without a bias", "Say use_bias: false")

    if layer.opts[:activation], do: wrong(layer, "a head without an activation")
    {layer, below}
  end

  defp head(_layer, id), do: {nil, id}

  defp norm(%{op: :rms_norm, params: ["gamma"], opts: [epsilon: _], parents: [below]} = layer),
    do: {layer, below}

  defp norm(layer), do: wrong(layer, "Sidewinder.Axon.mamba, or a dense layer right behind it")

  defp last(%{op: :last, parents: [below | _ends]}, _id), do: below
  defp last(_layer, id), do: id

  defp blocks(graph, id, behind) do
    with %{op: :add, parents: [pair]} <- graph[id],
         %{op: :container, parents: [below, block]} <- graph[pair],
         %{op: op, parents: [norm | _ends]} = block when is_map_key(@blocks, op) <- graph[block],
         %{op: :rms_norm, opts: [epsilon: _], parents: [^below]} = norm <- graph[norm] do
      blocks(graph, below, [{norm, block} | behind])
    else
      _ -> {behind, id}
    end
  end

  defp embedding(_graph, %{op: :input}), do: nil

  defp embedding(graph, %{op: :embedding, parents: [below]} = layer) do
    if graph[below].op != :input, do: wrong(graph[below], "tokens as an input")
    layer
  end

  defp embedding(_graph, layer), do: wrong(layer, "an embedding or features as an input")

  # What the options of the blocks of Mamba-2 say must be the same in each.
  defp one_kind!([{_, %{op: op} = first} | others]) do
    for {_, block} <- others, {block.op, block.opts} != {op, first.opts} do
      wrong(block, "a block like the first, \"#{first.name}\"", "A Mamba has layers of one kind")
    end

    groups = first.opts[:norm_groups]

    if groups && groups != first.opts[:groups],
      do: wrong(first, "a gated norm of each group", "Leave out norm_groups")
  end

  defp one_epsilon!(%{opts: [epsilon: epsilon]}, blocks) do
    for {norm, block} <- blocks,
        layer <- [norm, block],
        Keyword.get(layer.opts, :epsilon, epsilon) != epsilon do
      wrong(layer, "the epsilon of the last norm, #{epsilon}", "A Mamba has one for all norms")
    end
  end

  defp whole!(head, embedding) do
    if head && !embedding, do: wrong(head, "an embedding where there is a head")
    if embedding && !head, do: wrong(embedding, "a head where there is an embedding")
  end

  # Layers by their ids, with the names that Axon gives them: unnamed ones are counted in the order of the graph.
  defp named(%Axon{output: id, nodes: nodes}) do
    {graph, _counts} = named(id, nodes, {%{}, %{}})
    graph
  end

  defp named(id, _nodes, {graph, counts}) when is_map_key(graph, id), do: {graph, counts}

  defp named(id, nodes, acc) do
    %{op_name: op, parent: parents} = node = nodes[id]
    {graph, counts} = Enum.reduce(parents, acc, &named(&1, nodes, &2))
    params = for param <- node.parameters, do: param.name
    opts = Keyword.drop(node.opts, [:inputs, :parameters])
    layer = %{op: op, parents: parents, params: params, opts: opts}
    layer = Map.put(layer, :name, node.name.(op, counts))
    {Map.put(graph, id, layer), Map.update(counts, op, 1, &(&1 + 1))}
  end

  # Tensors by their names in checkpoints.
  defp tensors(%{blocks: blocks} = parts, data) do
    layers =
      for {{norm, block}, i} <- Enum.with_index(blocks),
          {file, t} <- [
            {"norm.weight", param(data, norm, "gamma")} | block(data, block)
          ],
          do: {"backbone.layers.#{i}.#{file}", t}

    layers ++
      [{"backbone.norm_f.weight", param(data, parts.norm, "gamma")}] ++
      embedding_tensor(data, parts.embedding) ++ head_tensor(data, parts.head)
  end

  defp block(data, block) do
    for {name, file} <- names(@blocks[block.op]), name in block.params do
      t = param(data, block, name)
      {file, if(name == "conv_w", do: Nx.new_axis(t, 1), else: t)}
    end
  end

  defp embedding_tensor(_data, nil), do: []

  defp embedding_tensor(data, layer),
    do: [{"backbone.embeddings.weight", param(data, layer, "kernel")}]

  defp head_tensor(_data, nil), do: []

  defp head_tensor(data, %{op: op} = layer) do
    kernel = param(data, layer, "kernel")
    # Axon's own dense layers have {in, out}.
    [{"lm_head.weight", if(op == :dense, do: Nx.transpose(kernel), else: kernel)}]
  end

  defp param(data, %{name: layer}, name) do
    case data do
      %{^layer => %{^name => %Nx.Tensor{type: type} = t}} when type in @types -> t
      %{^layer => %{^name => other}} -> wrong_param(layer, name, Error.show(other))
      _ -> wrong_param(layer, name, "none")
    end
  end

  defp wrong_param(layer, name, got) do
    raise error("state",
            expected: "a tensor of floats as \"#{name}\" of the layer \"#{layer}\"",
            got: got,
            hint: "Hand in the state of this model, or of one whose layers have the same names"
          )
  end

  # A head with the weights of the embedding is tied to it.
  defp untied(%{"lm_head.weight" => same, "backbone.embeddings.weight" => same} = tensors),
    do: Map.delete(tensors, "lm_head.weight")

  defp untied(tensors), do: tensors

  # A map with the keys of a config.json.
  defp config(%{blocks: [{_, block} | _] = blocks, norm: norm}, tensors) do
    {width} = tensors["backbone.norm_f.weight"].shape
    {vocabulary, _} = Map.get(tensors, "backbone.embeddings.weight", %{shape: {0, width}}).shape

    %{
      model_type: @blocks[block.op],
      hidden_size: width,
      num_hidden_layers: length(blocks),
      vocab_size: vocabulary,
      conv_kernel: elem(of_first(tensors, "conv1d.weight"), 2),
      layer_norm_epsilon: norm.opts[:epsilon]
    }
  end

  defp of_mixer({_, %{op: :mamba_block}}, tensors) do
    {inner, state} = of_first(tensors, "A_log")
    {_, rank} = of_first(tensors, "dt_proj.weight")
    %{intermediate_size: inner, state_size: state, time_step_rank: rank}
  end

  defp of_mixer({_, %{op: :mamba2_block, opts: opts}}, tensors) do
    {inner} = of_first(tensors, "norm.weight")
    {heads} = of_first(tensors, "A_log")

    sizes = %{
      intermediate_size: inner,
      state_size: opts[:state_size],
      num_heads: heads,
      head_dim: div(inner, heads),
      n_groups: opts[:groups]
    }

    limit = opts[:dt_clamp]
    if limit, do: Map.put(sizes, :time_step_limit, Tuple.to_list(limit)), else: sizes
  end

  defp of_first(tensors, name), do: tensors["backbone.layers.0.mixer.#{name}"].shape

  @again "Build the model again without it: layers of the same names take the same state"

  defp wrong(%{name: name, op: op}, expected, hint \\ @again) do
    raise error("model",
            expected: expected,
            got: "the layer \"#{name}\" (#{op})",
            hint: hint
          )
  end

  defp error(argument, fields),
    do: Error.new(:argument, argument, [op: "Sidewinder.Axon.to_mamba"] ++ fields)

  # Names of a block's parameters here and in checkpoints.
  defp names(model_type), do: Error.unwrap!(Native.mamba_names(model_type))

  ## From a Mamba

  def from_mamba(%Mamba{config: %{mixer: :falcon_mamba}}, _name),
    do: wrong_mamba("layers of Mamba or Mamba-2", "those of falcon_mamba")

  def from_mamba(%Mamba{config: %{mixer: mixer}} = mamba, name) do
    tensors = Mamba.tensors(mamba)
    names = names(Atom.to_string(mixer))
    blocks = for i <- 0..(mamba.config.layers - 1), do: {i, block_of(tensors, names, i)}
    model = model(mamba.config, elem(hd(blocks), 1), name)
    data = Map.merge(data(blocks, tensors, name), ends(mamba.config, tensors, name))
    same_params!(model, data)
    parameters = Map.new(data, fn {layer, params} -> {layer, Map.keys(params)} end)
    {model, %ModelState{data: data, parameters: parameters, state: %{}, frozen_parameters: %{}}}
  end

  defp block_of(tensors, names, i) do
    for {name, file} <- names,
        tensor = tensors["backbone.layers.#{i}.#{file}"],
        into: %{} do
      t = Op.from_kernel(tensor)
      {name, if(name == "conv_w", do: Nx.squeeze(t, axes: [1]), else: t)}
    end
  end

  defp data(blocks, tensors, name) do
    for {i, block} <- blocks,
        {layer, params} <- [
          {"#{name}_#{i}", block},
          {"#{name}_#{i}_norm", gamma(tensors["backbone.layers.#{i}.norm.weight"])}
        ],
        into: %{"#{name}_norm" => gamma(tensors["backbone.norm_f.weight"])},
        do: {layer, params}
  end

  defp gamma(tensor), do: %{"gamma" => Op.from_kernel(tensor)}

  defp ends(%{vocabulary: 0}, _tensors, _name), do: %{}

  defp ends(_config, tensors, name) do
    embedding = Op.from_kernel(tensors["backbone.embeddings.weight"])
    head = tensors["lm_head.weight"]

    %{
      "#{name}_embedding" => %{"kernel" => embedding},
      "#{name}_head" => %{"kernel" => if(head, do: Op.from_kernel(head), else: embedding)}
    }
  end

  defp model(%{vocabulary: 0, width: width} = config, block, name),
    do: "features" |> Axon.input(shape: {nil, nil, width}) |> layers(config, block, name)

  defp model(%{vocabulary: vocabulary, width: width} = config, block, name) do
    "tokens"
    |> Axon.input(shape: {nil, nil})
    |> Axon.embedding(vocabulary, width, name: "#{name}_embedding")
    |> layers(config, block, name)
    |> Sidewinder.Axon.linear(vocabulary, use_bias: false, name: "#{name}_head")
  end

  defp layers(x, %{inner: inner, width: width} = config, block, name) do
    if rem(inner, width) != 0,
      do: wrong_mamba("an inner width that is a multiple of the width, #{width}", "#{inner}")

    options = [
      name: name,
      layers: config.layers,
      state_size: config.state,
      expand: div(inner, width),
      kernel_size: config.conv,
      epsilon: config.eps,
      use_bias: is_map_key(block, "in_proj_b"),
      conv_bias: is_map_key(block, "conv_b")
    ]

    stack(x, config, options)
  end

  defp stack(x, %{mixer: :mamba, rank: rank}, options),
    do: Sidewinder.Axon.mamba(x, [dt_rank: rank] ++ options)

  defp stack(x, %{mixer: :mamba2, heads: heads, groups: groups} = config, options) do
    of_heads = [head_size: div(config.inner, heads), groups: groups, dt_clamp: clamp(config)]
    Sidewinder.Axon.mamba2(x, of_heads ++ options)
  end

  # Steps are positive without it.
  defp clamp(%{dt_limit: {low, high}}) when low <= 0 and high >= @largest, do: nil
  defp clamp(%{dt_limit: {low, high}}), do: {low, min(high, @largest)}

  # Checkpoints may have biases where layers of Axon have none.
  defp same_params!(model, data) do
    for {_id, %{name: layer, params: [_ | _] = params}} <- named(model),
        got = Map.keys(data[layer]),
        Enum.sort(params) != Enum.sort(got) do
      wrong_mamba("#{Enum.join(params, ", ")} in \"#{layer}\"", Enum.join(got, ", "))
    end
  end

  defp wrong_mamba(expected, got) do
    raise Error.new(:argument, "model",
            op: "Sidewinder.Axon.from_mamba",
            expected: expected,
            got: got,
            hint: "Layers of Axon have no parameters for it"
          )
  end
end

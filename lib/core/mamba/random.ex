defmodule Sidewinder.Mamba.Random do
  @moduledoc false
  # Models of random weights, drawn as layers are initialised before training.

  alias Sidewinder.{Options, RandomInputs, Tensor}

  # Elements of a tensor.
  @most 268_435_456

  @doc "The options of `Sidewinder.Mamba.random/1` that say what is drawn."
  def options,
    do: ~w(layers width vocabulary mixer expand state rank heads groups conv seed)a

  @doc "The configuration that the options say."
  def config(own) do
    [layers, width] = for name <- [:layers, :width], do: size!(own, name, nil)
    [expand, conv] = for {name, default} <- [expand: 2, conv: 4], do: size!(own, name, default)
    inner = expand * width

    config =
      Map.merge(mixer(own[:mixer] || :mamba, own, inner, width), %{
        hidden_size: width,
        num_hidden_layers: layers,
        vocab_size: if(own[:vocabulary] in [nil, 0], do: 0, else: size!(own, :vocabulary, nil)),
        intermediate_size: inner,
        conv_kernel: conv
      })

    for {name, count} <- largest(config),
        do:
          Options.check!(own[name], count <= @most, name, "a size that a machine has memory for")

    config
  end

  defp mixer(:mamba, own, _inner, width) do
    refuse!(own, [:heads, :groups], ":mamba2")
    rank = size!(own, :rank, max(div(width + 15, 16), 1))
    %{model_type: "mamba", state_size: size!(own, :state, 16), time_step_rank: rank}
  end

  defp mixer(:mamba2, own, inner, _width) do
    refuse!(own, [:rank], ":mamba")
    heads = size!(own, :heads, max(div(inner, 64), 1))
    Options.check!(heads, rem(inner, heads) == 0, :heads, "a divisor of #{inner} channels")
    groups = size!(own, :groups, 1)
    Options.check!(groups, rem(heads, groups) == 0, :groups, "a divisor of #{heads} heads")

    %{
      model_type: "mamba2",
      state_size: size!(own, :state, 128),
      num_heads: heads,
      head_dim: div(inner, heads),
      n_groups: groups
    }
  end

  defp mixer(other, _own, _inner, _width), do: Options.wrong!(:mixer, ":mamba or :mamba2", other)

  defp refuse!(own, names, mixer) do
    for name <- names,
        do: Options.check!(own[name], is_nil(own[name]), name, "none but with mixer: #{mixer}")
  end

  defp size!(options, name, default) do
    size = options[name] || default
    Options.check!(size, is_integer(size) and size > 0, name, "a size")
  end

  # Elements of the largest tensors of a layer.
  defp largest(%{hidden_size: width, intermediate_size: inner} = config) do
    [
      width: 2 * inner * width,
      vocabulary: config.vocab_size * width,
      conv: inner * config.conv_kernel,
      layers: config.num_hidden_layers * max(div(inner * width, 16), 0x10000)
    ] ++ largest_of_mixer(config)
  end

  defp largest_of_mixer(%{model_type: "mamba", intermediate_size: inner} = config),
    do: [state: 2 * config.state_size * inner, rank: config.time_step_rank * inner]

  defp largest_of_mixer(%{model_type: "mamba2", hidden_size: width} = config),
    do: [state: 2 * config.n_groups * config.state_size * max(width, config.conv_kernel)]

  @doc "The weights of a model of that configuration, by their names."
  def weights(%{hidden_size: width, vocab_size: vocabulary} = config, seed) do
    for layer <- 0..(config.num_hidden_layers - 1),
        {name, tensor} <- layer(config, &normal(&1, &2, {seed, {layer, &3}})),
        into: embedding({vocabulary, width}, seed),
        do: {"backbone.layers.#{layer}.#{name}", tensor}
  end

  defp embedding({vocabulary, width} = shape, seed) do
    norm = %{"backbone.norm_f.weight" => ones(width)}

    if vocabulary > 0,
      do: Map.put(norm, "backbone.embeddings.weight", normal(shape, 0.02, {seed, :embedding})),
      else: norm
  end

  defp layer(%{hidden_size: width, intermediate_size: inner} = config, normal) do
    {projected, convolved, own} = own(config, normal)
    conv = config.conv_kernel

    [
      {"norm.weight", ones(width)},
      {"mixer.in_proj.weight", normal.({projected, width}, 1 / :math.sqrt(width), 1)},
      {"mixer.conv1d.weight", normal.({convolved, 1, conv}, 1 / :math.sqrt(conv), 2)},
      {"mixer.conv1d.bias", normal.({convolved}, 0.1, 3)},
      {"mixer.out_proj.weight", normal.({width, inner}, 1 / :math.sqrt(inner), 6)} | own
    ]
  end

  # Rows of `in_proj`, channels of the convolution, and the tensors that only layers of this kind have.
  defp own(%{model_type: "mamba", intermediate_size: inner, state_size: state} = config, normal) do
    rank = config.time_step_rank

    {2 * inner, inner,
     [
       {"mixer.x_proj.weight", normal.({rank + 2 * state, inner}, 1 / :math.sqrt(inner), 4)},
       {"mixer.dt_proj.weight", normal.({inner, rank}, 1 / :math.sqrt(rank), 5)},
       {"mixer.dt_proj.bias", steps(inner)},
       {"mixer.A_log", decays(inner, state)},
       {"mixer.D", ones(inner)}
     ]}
  end

  defp own(%{model_type: "mamba2", intermediate_size: inner, num_heads: heads} = config, _normal) do
    convolved = inner + 2 * config.n_groups * config.state_size

    {inner + convolved + heads, convolved,
     [
       {"mixer.dt_bias", steps(heads)},
       {"mixer.A_log", decays(heads)},
       {"mixer.D", ones(heads)},
       {"mixer.norm.weight", ones(inner)}
     ]}
  end

  defp normal(shape, deviation, seed), do: RandomInputs.normal(shape, :f32, deviation, seed)
  defp ones(count), do: Tensor.from_list(List.duplicate(1, count), :f32, {count})

  # The inverse softplus of steps from 0.001 to 0.1.
  defp steps(inner) do
    steps = for i <- 1..inner, do: :math.log(:math.exp(0.001 * :math.pow(100, i / inner)) - 1)
    Tensor.from_list(steps, :f32, {inner})
  end

  defp decays(inner, state) do
    logs = for _ <- 1..inner, n <- 1..state, do: :math.log(n)
    Tensor.from_list(logs, :f32, {inner, state})
  end

  # From -1 to -16 among the heads, the slow ones with the long steps.
  defp decays(heads) do
    logs = for head <- 1..heads, do: :math.log(1 + 15 * (heads - head) / heads)
    Tensor.from_list(logs, :f32, {heads})
  end
end

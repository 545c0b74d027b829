defmodule Sidewinder.Mamba.Random do
  @moduledoc false
  # Models of random weights, drawn as layers are initialised before training.

  alias Sidewinder.{Options, RandomInputs, Tensor}

  # Elements of a tensor.
  @most 268_435_456

  @doc "The options of `Sidewinder.Mamba.random/1` that say what is drawn."
  def options, do: [:layers, :width, :vocabulary, :expand, :state, :rank, :conv, :seed]

  @doc "The configuration that the options say."
  def config(own) do
    [layers, width] = for name <- [:layers, :width], do: size!(own, name, nil)
    rank = max(div(width + 15, 16), 1)
    defaults = [expand: 2, state: 16, rank: rank, conv: 4]
    [expand, state, rank, conv] = for {name, default} <- defaults, do: size!(own, name, default)

    config = %{
      model_type: "mamba",
      hidden_size: width,
      num_hidden_layers: layers,
      vocab_size: if(own[:vocabulary] in [nil, 0], do: 0, else: size!(own, :vocabulary, nil)),
      intermediate_size: expand * width,
      state_size: state,
      time_step_rank: rank,
      conv_kernel: conv
    }

    for {name, count} <- largest(config),
        do:
          Options.check!(own[name], count <= @most, name, "a size that a machine has memory for")

    config
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
      state: 2 * config.state_size * inner,
      rank: config.time_step_rank * inner,
      conv: inner * config.conv_kernel,
      layers: config.num_hidden_layers * max(div(inner * width, 16), 0x10000)
    ]
  end

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

  defp layer(config, normal) do
    %{hidden_size: width, intermediate_size: inner, state_size: state} = config
    %{time_step_rank: rank, conv_kernel: conv} = config

    [
      {"norm.weight", ones(width)},
      {"mixer.in_proj.weight", normal.({2 * inner, width}, 1 / :math.sqrt(width), 1)},
      {"mixer.conv1d.weight", normal.({inner, 1, conv}, 1 / :math.sqrt(conv), 2)},
      {"mixer.conv1d.bias", normal.({inner}, 0.1, 3)},
      {"mixer.x_proj.weight", normal.({rank + 2 * state, inner}, 1 / :math.sqrt(inner), 4)},
      {"mixer.dt_proj.weight", normal.({inner, rank}, 1 / :math.sqrt(rank), 5)},
      {"mixer.dt_proj.bias", steps(inner)},
      {"mixer.A_log", decays(inner, state)},
      {"mixer.D", ones(inner)},
      {"mixer.out_proj.weight", normal.({width, inner}, 1 / :math.sqrt(inner), 6)}
    ]
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
end

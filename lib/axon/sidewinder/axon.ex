defmodule Sidewinder.Axon do
  @moduledoc """
  Sequence models as layers of Axon. `mamba/2`, `mamba2/2` and `gated_delta_net/2` stack whole blocks, and `mm_rec/2` is a
  whole model of them. `mamba_block/2`, `mamba2_block/2`, `gated_delta_net_block/2`, `mm_rec_block/2` and
  `transformer_block/2` are single blocks, and the others are their parts.

      iex> model =
      ...>   Axon.input("tokens", shape: {nil, 60})
      ...>   |> Axon.embedding(256, 32)
      ...>   |> Sidewinder.Axon.mamba(layers: 2, output: :last, name: "mamba")
      ...>   |> Axon.dense(256)
      iex> Axon.get_output_shape(model, Nx.template({8, 60}, :s64)).shape
      {8, 256}

  Sequences are `{batch, length, width}`. Each layer is one kernel forward and one backward under
  `Nx.Defn.Evaluator`. `Axon.build/2`, `Axon.Loop`, policies of `Axon.MixedPrecision` and the freezing of
  parameters work as with Axon's own layers.

  So do types: a layer computes in the common type of its inputs and parameters (`Nx.Type.merge/2`), once a policy has
  cast both, and returns it. Features in bf16 and parameters in f32 make f32, as in `Axon.dense/3`, and integers take the
  type of the parameters. Masks, tokens, ends of sequences and an initial state do not count. The arithmetic within a kernel
  is f32 at least.

  Matrices are stored `{out, in}`, as in Mamba's checkpoints, so `:fan_out` of Axon's initializers is the number of
  inputs here. The parameters keep those checkpoints' names and need no
  transposing: `mixer.in_proj.weight` is `in_proj`, `mixer.conv1d.weight` is `conv_w` without its axis of
  size 1, `mixer.dt_proj.weight` and `bias` are `dt_w` and `dt_b`, `norm.weight` is `gamma`.

  `to_mamba/3` converts a trained model to one that runs inside the native library; `from_mamba/2` is the reverse.

  ## Packed sequences

  `mamba/2`, `mamba2/2`, `gated_delta_net/2`, their blocks, `linear_attention/2`, `causal_conv1d/2`, `selective_scan/5` and
  `attention/4` take sequences of different lengths, one after the other in a batch of 1, with a layer of their ends as the
  option `:cu_seqlens`: integers `{sequences + 1}`, which `Sidewinder` describes. Results and gradients are those of one call
  for each sequence, and parameters those of the same layer without the option.

      iex> [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      iex> {init, predict} = Axon.build(Sidewinder.Axon.mamba(x, layers: 1, cu_seqlens: ends))
      iex> inputs = %{"x" => Nx.iota({1, 5, 8}, type: :f32), "cu_seqlens" => Nx.tensor([0, 2, 5])}
      iex> state = init.(inputs, Axon.ModelState.empty())
      iex> second = %{"x" => inputs["x"][[.., 2..4]], "cu_seqlens" => Nx.tensor([0, 3])}
      iex> Nx.all_close(predict.(state, inputs)[[.., 2..4]], predict.(state, second)) |> Nx.to_number()
      1

  ## Options of every layer

    * `:name` - layer name, as in Axon
    * `:meta` - any term to keep with the layer (not for `residual/3` and `mamba/2`)

  Options that are unknown or have a value that is not allowed raise `Sidewinder.Error` of kind `:option`.
  """
  import Sidewinder.Axon.Layers, only: [layer: 4, layer: 5]
  import Sidewinder.Axon.Options
  import Sidewinder.Axon.Params, except: [mha: 1, mlp: 1]
  alias Sidewinder.Axon.{GatedDeltaNet, LinearAttention, Mamba2, Params}
  alias Sidewinder.Reference

  @layer [name: {nil, :name}, meta: {nil, :any}]
  @steps [
    dt_min: {0.001, :positive},
    dt_max: {0.1, :positive},
    dt_init_floor: {1.0e-4, :positive}
  ]
  @norm [epsilon: {1.0e-5, :positive}, gamma_initializer: {:ones, :initializer}]
  @weights [kernel_initializer: {nil, :initializer}, bias_initializer: {nil, :initializer}]
  @packed [cu_seqlens: {nil, :layer}]

  @block [
           state_size: {16, :size},
           expand: {2, :size},
           kernel_size: {4, :size},
           dt_rank: {nil, :size},
           use_bias: {false, :flag},
           conv_bias: {true, :flag}
         ] ++ @packed ++ @steps ++ @weights

  @attention [
    heads: {1, :size},
    causal: {false, :flag},
    rope_theta: {nil, :positive},
    pairing: {:half, [:half, :interleaved]},
    use_bias: {false, :flag},
    mask: {nil, :layer}
  ]
  @heads [:heads, :causal, :rope_theta, :pairing]
  @activations Reference.Activations.names()

  @doc """
  Adds a stack of Mamba blocks: `residual/3` around `mamba_block/2`, `:layers` times, then `rms_norm/2`.

  ## Options

    * `:layers` - how many blocks. Defaults to `2`.

    * `:output` - `:sequence` for `{batch, length, width}`, or `:last` for the last step of it,
      `{batch, width}`, and of packed sequences for that of each, `{sequences, width}`, zeros for an empty one. Defaults to
      `:sequence`.

    * `:name` - what the names of the layers start with. Those of `name: "mamba"` are `"mamba_0_norm"`,
      `"mamba_0"` (the block), `"mamba_0_add"`, `"mamba_1_norm"` and so on, and `"mamba_norm"` at the end.
      Without it Axon numbers them by their kind: `"rms_norm_0"`, `"mamba_block_0"`.

    * `:epsilon`, `:gamma_initializer` - those of `rms_norm/2`

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in `x`, `{1, length, width}`.
      Defaults to `nil`, a sequence in each row.

    * all other options of `mamba_block/2` but `:meta`

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.mamba(layers: 1, name: "mamba")
      iex> {init, _predict} = Axon.build(model)
      iex> state = init.(Nx.template({1, 5, 8}, :f32), Axon.ModelState.empty())
      iex> Map.keys(state.data)
      ["mamba_0", "mamba_0_norm", "mamba_norm"]

      iex> [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      iex> model = Sidewinder.Axon.mamba(x, output: :last, cu_seqlens: ends)
      iex> two = %{"x" => Nx.template({1, 5, 8}, :f32), "cu_seqlens" => Nx.template({3}, :s32)}
      iex> Axon.get_output_shape(model, two).shape
      {2, 8}
  """
  @doc type: :model
  @spec mamba(Axon.t(), keyword) :: Axon.t()
  def mamba(%Axon{} = x, opts \\ []) do
    stack(:mamba, x, opts, @block, &mamba_block/2)
  end

  # Blocks of those options, with norms and residual connections.
  defp stack(op, x, opts, of_block, block) do
    stack = [name: {nil, :prefix}, layers: {2, :size}, output: {:sequence, [:sequence, :last]}]
    all = options!(op, opts, stack ++ Keyword.merge(@norm, of_block))
    norm = Keyword.take(opts, Keyword.keys(@norm))
    own = Keyword.take(opts, Keyword.keys(of_block))

    Enum.reduce(0..(all.layers - 1), x, fn i, x ->
      name = join(all.name, i)
      residual(x, &block.(&1, [name: name] ++ own), [name: name] ++ norm)
    end)
    |> output(all)
    |> rms_norm([name: join(all.name, "norm")] ++ norm)
  end

  # The norm is computed for each step independently, so with `:last` for the last step alone.
  defp output(x, %{output: :sequence}), do: x

  defp output(x, %{output: :last, cu_seqlens: ends}),
    do: layer(:last, [x: x, cu_seqlens: ends], [], %{}, count: nil)

  @doc """
  Adds a stack of Mamba-2 blocks: `residual/3` around `mamba2_block/2`, `:layers` times, then `rms_norm/2`.

  Options are `:layers`, `:output`, `:name`, `:gamma_initializer` and `:cu_seqlens`, `{sequences + 1}`, as in `mamba/2`,
  `:epsilon` for all norms, those in blocks too, and all other options of `mamba2_block/2` but `:meta`.

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.mamba2(layers: 1, head_size: 4, name: "mamba")
      iex> {init, _predict} = Axon.build(model)
      iex> state = init.(Nx.template({1, 5, 8}, :f32), Axon.ModelState.empty())
      iex> Map.keys(state.data)
      ["mamba_0", "mamba_0_norm", "mamba_norm"]

      iex> [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      iex> model = Sidewinder.Axon.mamba2(x, head_size: 4, cu_seqlens: ends)
      iex> two = %{"x" => Nx.template({1, 5, 8}, :f32), "cu_seqlens" => Nx.template({3}, :s32)}
      iex> Axon.get_output_shape(model, two).shape
      {1, 5, 8}
  """
  @doc type: :model
  @spec mamba2(Axon.t(), keyword) :: Axon.t()
  def mamba2(%Axon{} = x, opts \\ []),
    do: stack(:mamba2, x, opts, Mamba2.known(), &mamba2_block/2)

  @doc """
  Adds a stack of Gated DeltaNet blocks: `residual/3` around `gated_delta_net_block/2`, `:layers` times, then `rms_norm/2`.

  Options are `:layers`, `:output`, `:name`, `:gamma_initializer` and `:cu_seqlens`, `{sequences + 1}`, as in `mamba/2`,
  `:epsilon` for all norms, those in blocks too, and all other options of `gated_delta_net_block/2` but `:meta`.

  ## Examples

      iex> x = Axon.input("x", shape: {nil, nil, 8})
      iex> model = Sidewinder.Axon.gated_delta_net(x, layers: 1, head_size: 4, name: "net")
      iex> {init, _predict} = Axon.build(model)
      iex> init.(Nx.template({2, 5, 8}, :f32), Axon.ModelState.empty()).data |> Map.keys()
      ["net_0", "net_0_norm", "net_norm"]

      iex> [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      iex> model = Sidewinder.Axon.gated_delta_net(x, head_size: 4, cu_seqlens: ends)
      iex> two = %{"x" => Nx.template({1, 5, 8}, :f32), "cu_seqlens" => Nx.template({3}, :s32)}
      iex> Axon.get_output_shape(model, two).shape
      {1, 5, 8}
  """
  @doc type: :model
  @spec gated_delta_net(Axon.t(), keyword) :: Axon.t()
  def gated_delta_net(%Axon{} = x, opts \\ []),
    do: stack(:gated_delta_net, x, opts, GatedDeltaNet.known(), &gated_delta_net_block/2)

  @doc """
  The `Sidewinder.Mamba` of a model that was trained: `mamba/2` or `mamba2/2` over features, or over an embedding of tokens
  and with a dense head on top, `Axon.dense/3` or `linear/3`, without bias and activation. It gives the same numbers,
  within rounding, for whole sequences; with `output: :last` the model gives those of the last step alone.

  A head with the weights of the embedding is kept once. Options are those of `Sidewinder.Mamba.new/3`: `:type`,
  `:tokenizer`, where to run, and `:like`, the model that this one came from by `from_mamba/2`: it is then saved with
  the configuration and files of that model.

  Of a larger model the stack can be converted alone: built again over an input, under the same name and with the
  same options, it takes its parameters out of the same state.

  Raises `Sidewinder.Error` of kind `:argument` for layers that a `Sidewinder.Mamba` does not have, and for missing
  parameters.

      iex> model =
      ...>   Axon.input("tokens", shape: {nil, nil})
      ...>   |> Axon.embedding(11, 8)
      ...>   |> Sidewinder.Axon.mamba(layers: 2)
      ...>   |> Axon.dense(11, use_bias: false)
      iex> {init, predict} = Axon.build(model)
      iex> state = init.(Nx.template({1, 3}, :s64), Axon.ModelState.empty())
      iex> mamba = Sidewinder.Axon.to_mamba(model, state, backend: :cpu)
      iex> logits = Sidewinder.Mamba.forward(mamba, [[1, 2, 3]])
      iex> Nx.all_close(Nx.from_binary(logits.data, :f32), Nx.flatten(predict.(state, Nx.tensor([[1, 2, 3]]))), atol: 1.0e-4) |> Nx.to_number()
      1
  """
  @doc type: :model
  @spec to_mamba(Axon.t(), %Axon.ModelState{}, keyword) :: Sidewinder.Mamba.t()
  defdelegate to_mamba(model, state, options \\ []), to: Sidewinder.Axon.Mamba

  @doc """
  A model of Axon with the parameters of a `Sidewinder.Mamba`, to be trained on: `{model, state}`.

  Its layers are `mamba/2` or, of a Mamba-2, `mamba2/2`, and its input is `"tokens"` or, of a backbone, `"features"`. With
  `name: "mamba"`, the default, layers are named as in `mamba/2`, and `"mamba_embedding"` and `"mamba_head"`, which is
  `linear/3`. A tied head starts as a copy of the embedding, and training makes them differ.

  Raises `Sidewinder.Error` of kind `:argument` for what layers of Axon cannot express: a FalconMamba, an inner width
  that is not a multiple of the width, or a bias in some layers only.

      iex> mamba = Sidewinder.Mamba.random(layers: 1, width: 8, vocabulary: 11, backend: :cpu)
      iex> {model, state} = Sidewinder.Axon.from_mamba(mamba)
      iex> logits = Axon.predict(model, state, Nx.tensor([[1, 2, 3]]))
      iex> expected = Sidewinder.Mamba.forward(mamba, [[1, 2, 3]])
      iex> Nx.all_close(Nx.from_binary(expected.data, :f32), Nx.flatten(logits), atol: 1.0e-4) |> Nx.to_number()
      1
  """
  @doc type: :model
  @spec from_mamba(Sidewinder.Mamba.t(), keyword) :: {Axon.t(), %Axon.ModelState{}}
  def from_mamba(%Sidewinder.Mamba{} = mamba, opts \\ []) do
    %{name: name} = options!(:from_mamba, opts, name: {"mamba", :prefix})
    Sidewinder.Axon.Mamba.from_mamba(mamba, name)
  end

  @doc """
  Adds `x + fun.(rms_norm(x))`, where `fun` takes and returns a layer of the width of `x`.

  ## Options

    * `:name` - the norm is named `"\#{name}_norm"` and the sum `"\#{name}_add"`

    * `:epsilon`, `:gamma_initializer` - those of `rms_norm/2`

  ## Examples

      iex> x = Axon.input("x", shape: {nil, nil, 8})
      iex> model = Sidewinder.Axon.residual(x, &Axon.dense(&1, 8))
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :combinator
  @spec residual(Axon.t(), (Axon.t() -> Axon.t()), keyword) :: Axon.t()
  def residual(%Axon{} = x, fun, opts \\ []) when is_function(fun, 1) do
    %{name: name} = options!(:residual, opts, [name: {nil, :prefix}] ++ @norm)
    norm = Keyword.put(opts, :name, join(name, "norm"))
    Axon.add(x, fun.(rms_norm(x, norm)), name: join(name, "add"))
  end

  defp join(nil, _), do: nil
  defp join(name, part), do: "#{name}_#{part}"

  @doc """
  Adds a Mamba block (Gu and Dao 2023, section 3.4), `Sidewinder.mamba_block/3`, without norm and residual
  connection.

  With the width M of `x`, the inner width I = `:expand` M, the state size N, the kernel size W and the
  rank R of the steps, its parameters are

  | name                      | shape                    | start                                            |
  | ------------------------- | ------------------------ | ------------------------------------------------ |
  | `in_proj`, `in_proj_b`    | `{2 I, M}`, `{2 I}`      | uniform within 1 / sqrt(M)                       |
  | `conv_w`, `conv_b`        | `{I, W}`, `{I}`          | uniform within 1 / sqrt(W)                       |
  | `x_proj`                  | `{R + 2 N, I}`           | uniform within 1 / sqrt(I)                       |
  | `dt_w`                    | `{I, R}`                 | uniform within 1 / sqrt(R)                       |
  | `dt_b`                    | `{I}`                    | softplus(dt_b) log-uniform, `:dt_min`..`:dt_max` |
  | `A_log`                   | `{I, N}`                 | ln(n + 1), so that A = -(1..N)                   |
  | `D`                       | `{I}`                    | 1                                                |
  | `out_proj`, `out_proj_b`  | `{M, I}`, `{M}`          | uniform within 1 / sqrt(I)                       |

  ## Options

    * `:state_size` - N. Defaults to `16`.

    * `:expand` - I / M. Defaults to `2`.

    * `:kernel_size` - W. Defaults to `4`.

    * `:dt_rank` - R. Defaults to a sixteenth of M, rounded up.

    * `:use_bias` - whether the projections add `in_proj_b` and `out_proj_b`. Defaults to `false`.

    * `:conv_bias` - whether the convolution adds `conv_b`. Defaults to `true`.

    * `:dt_min`, `:dt_max` - bounds of the initial steps. Default to `0.001` and `0.1`.

    * `:dt_init_floor` - no step starts below this. Defaults to `1.0e-4`.

    * `:kernel_initializer`, `:bias_initializer` - other initializers, for all but `dt_w`, `dt_b`, `A_log`
      and `D`

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in `x`, `{1, length, width}`. With
      it the block is computed as its parts, and not as one kernel. Defaults to `nil`, a sequence in each row.

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.mamba_block(state_size: 4)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}

      iex> Sidewinder.Axon.mamba_block(Axon.input("x"), state_size: 0)
      ** (Sidewinder.Error) Sidewinder.Axon.mamba_block: state_size: expected a positive integer, got 0
  """
  @doc type: :recurrent
  @spec mamba_block(Axon.t(), keyword) :: Axon.t()
  def mamba_block(%Axon{} = x, opts \\ []) do
    opts = options!(:mamba_block, opts, @layer ++ @block)
    layer(:mamba_block, [x: x, cu_seqlens: opts.cu_seqlens], block_params(opts), opts)
  end

  defp block_params(%{expand: e, state_size: n, kernel_size: w} = opts) do
    rank = fn m -> opts.dt_rank || div(m + 15, 16) end
    kernel = opts.kernel_initializer || (&uniform/3)
    bias = fn inputs -> opts.bias_initializer || uniform(inputs) end

    by_width([
      {"in_proj", &{2 * e * &1, &1}, kernel},
      opts.use_bias && {"in_proj_b", &{2 * e * &1}, bias.(&div(&1, 2 * e))},
      {"conv_w", &{e * &1, w}, kernel},
      opts.conv_bias && {"conv_b", &{e * &1}, bias.(fn _ -> w end)},
      {"x_proj", &{rank.(&1) + 2 * n, e * &1}, kernel},
      {"dt_w", &{e * &1, rank.(&1)}, &uniform/3},
      {"dt_b", &{e * &1}, steps(opts)},
      {"A_log", &{e * &1, n}, &decays/2},
      {"D", &{e * &1}, :ones},
      {"out_proj", &{&1, e * &1}, kernel},
      opts.use_bias && {"out_proj_b", &{&1}, bias.(&(e * &1))}
    ])
  end

  @doc """
  Adds a Mamba-2 block (Dao and Gu 2024, section 7; `Mamba2` of `mamba_ssm`), without norm and residual connection:
  a projection, `Sidewinder.causal_conv1d/3` with SiLU, `Sidewinder.ssd/6`, `Sidewinder.gated_rms_norm/4` and a projection
  back.

  With the width M of `x`, the inner width I = `:expand` M, H = I / `:head_size` heads, G groups of N states and the
  kernel size W, its parameters are

  | name                      | shape                               | start                                            |
  | ------------------------- | ----------------------------------- | ------------------------------------------------ |
  | `in_proj`, `in_proj_b`    | `{2 I + 2 G N + H, M}`, without `M` | uniform within 1 / sqrt(M), 0                    |
  | `conv_w`, `conv_b`        | `{I + 2 G N, W}`, `{I + 2 G N}`     | uniform within 1 / sqrt(W)                       |
  | `dt_b`                    | `{H}`                               | softplus(dt_b) log-uniform, `:dt_min`..`:dt_max` |
  | `A_log`                   | `{H}`                               | -A uniform, `:a_min`..`:a_max`                   |
  | `D`                       | `{H}`                               | 1                                                |
  | `norm`                    | `{I}`                               | 1                                                |
  | `out_proj`, `out_proj_b`  | `{M, I}`, `{M}`                     | uniform within 1 / sqrt(I), 0                    |

  Rows of `in_proj` are those of the gate z, then of x, B and C, then of the steps dt, as in checkpoints, whose
  `mixer.dt_bias` and `mixer.norm.weight` are `dt_b` and `norm`.

  ## Options

    * `:state_size` - N. Defaults to `128`.

    * `:head_size` - the width of a head, which divides I. Defaults to `64`.

    * `:groups` - G, groups of heads with the same B and C; divides H. Defaults to `1`.

    * `:norm_groups` - into how many parts the gated norm cuts rows. Defaults to `:groups`.

    * `:expand` - I / M. Defaults to `2`.

    * `:kernel_size` - W. Defaults to `4`.

    * `:epsilon` - numerical stability term of the gated norm. Defaults to `1.0e-5`.

    * `:use_bias` - whether the projections add `in_proj_b` and `out_proj_b`. Defaults to `false`.

    * `:conv_bias` - whether the convolution adds `conv_b`. Defaults to `true`.

    * `:dt_clamp` - `{low, high}`, bounds of the steps, `dt_limit` in checkpoints. None by default.

    * `:a_min`, `:a_max` - bounds of the initial -A. Default to `1.0` and `16.0`.

    * `:dt_min`, `:dt_max`, `:dt_init_floor` - bounds of the initial steps, as in `mamba_block/2`

    * `:kernel_initializer`, `:bias_initializer` - other initializers for the matrices with the convolution, and for
      the biases but `dt_b`

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in `x`, `{1, length, width}`.
      Defaults to `nil`, a sequence in each row.

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.mamba2_block(state_size: 4, head_size: 8)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :recurrent
  @spec mamba2_block(Axon.t(), keyword) :: Axon.t()
  defdelegate mamba2_block(x, opts \\ []), to: Mamba2, as: :block

  @doc """
  Adds a Gated DeltaNet block (Yang, Kautz and Hatamizadeh 2024, section 3.4; `GatedDeltaNet` of flash-linear-attention),
  without norm and residual connection: a projection, `Sidewinder.causal_conv1d/3` with SiLU,
  `Sidewinder.gated_delta_rule/5` with keys and queries of L2 norm 1, `Sidewinder.gated_rms_norm/4` of each head, norm
  before gate, and a projection back.

  With the width M of `x`, H heads of V values, G groups of them with the same query and key of K numbers, the inner
  width I = H V and the kernel size W, its parameters are

  | name                      | shape                                   | start                                            |
  | ------------------------- | --------------------------------------- | ------------------------------------------------ |
  | `in_proj`, `in_proj_b`    | `{2 G K + 2 I + 2 H, M}`, without `M`   | uniform within 1 / sqrt(M), 0                    |
  | `conv_w`, `conv_b`        | `{2 G K + I, W}`, `{2 G K + I}`         | uniform within 1 / sqrt(W)                       |
  | `dt_b`                    | `{H}`                                   | softplus(dt_b) log-uniform, `:dt_min`..`:dt_max` |
  | `A_log`                   | `{H}`                                   | -A uniform, `:a_min`..`:a_max`                   |
  | `norm`                    | `{V}`                                   | 1                                                |
  | `out_proj`, `out_proj_b`  | `{M, I}`, `{M}`                         | uniform within 1 / sqrt(I), 0                    |

  Rows of `in_proj` are those of q, k and v, then of the gate, of beta before its sigmoid, and of a, which makes the
  logarithm of the decay, `g = -exp(A_log) softplus(a + dt_b)`. Each part has its rows head by head.

  ## Options

    * `:heads` - H. Defaults to M / `:head_size`, rounded down, at least 1.

    * `:groups` - G, which divides H. Defaults to `:heads`.

    * `:head_size` - K, the width of a query and of a key. Defaults to `128`.

    * `:value_size` - V, the width of a value. Defaults to `:head_size`.

    * `:negative_eigenvalues` - whether beta is doubled, so that a step can flip the sign of what a state has for a key
      (Grazzi et al. 2024). Defaults to `false`.

    * `:conv_bias` - whether the convolution adds `conv_b`. Defaults to `false`.

    * `:kernel_size`, `:epsilon`, `:use_bias`, `:a_min`, `:a_max`, `:dt_min`, `:dt_max`, `:dt_init_floor`,
      `:kernel_initializer`, `:bias_initializer`, `:cu_seqlens` - as in `mamba2_block/2`

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.gated_delta_net_block(head_size: 4)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :recurrent
  @spec gated_delta_net_block(Axon.t(), keyword) :: Axon.t()
  defdelegate gated_delta_net_block(x, opts \\ []), to: GatedDeltaNet, as: :block

  @doc """
  Adds a layer of linear attention, without norm of its input and residual connection: a projection to queries, keys and
  values, a feature map of the first two, `Sidewinder.linear_attention/4`, a norm of each head, with a gate
  `Sidewinder.gated_rms_norm/4`, norm before gate, and a projection back.

  With the width M of `x`, H heads of V values, G groups of them with the same query and key of K numbers, and the inner
  width I = H V, its parameters are

  | name                      | shape                                   | start                                 |
  | ------------------------- | --------------------------------------- | ------------------------------------- |
  | `in_proj`, `in_proj_b`    | `{2 G K + 2 I + D, M}`, without `M`     | uniform within 1 / sqrt(M), 0         |
  | `decay_b`                 | `{D}`, with a learned decay             | 0                                     |
  | `norm`                    | `{V}`                                   | 1                                     |
  | `out_proj`, `out_proj_b`  | `{M, I}`, `{M}`                         | uniform within 1 / sqrt(I), 0         |

  Rows of `in_proj` are those of q, k and v, then I of the gate, if any, and D of the decay: 0, H or H K. Each part has its
  rows head by head.

  ## Options

    * `:heads` - H. Defaults to M / `:head_size`, rounded down, at least 1.

    * `:groups` - G, which divides H. Defaults to `:heads`.

    * `:head_size` - K, the width of a query and of a key. Defaults to `128`.

    * `:value_size` - V, the width of a value. Defaults to `:head_size`.

    * `:feature_map` - of queries and keys: `:elu`, elu(x) + 1 (Katharopoulos et al. 2020), `:relu`, `:silu` (lightning
      attention) or `:identity` (retention, GLA). Defaults to `:elu`.

    * `:decay` - of states. Defaults to `:none`.

      * `:none` - states are sums
      * `:retention` - head h keeps the share 1 - 2^(-5 - h), h from 0 (Sun et al. 2023, section 2.2)
      * `:head` - sigmoid(a + decay_b)^(1/16), with a number a of each head in each step
      * `:key` - the same for each key, as in GLA (Yang et al. 2024, section 4.4, whose matrix for a is of low rank)

    * `:normalize` - whether outputs are divided by the product of the query and the sum of keys. It needs a feature map
      that is positive. Defaults to `false`.

    * `:gate` - whether outputs of heads have a gate. Defaults to `true`.

    * `:epsilon` - of the norm. Defaults to `1.0e-5`.

    * `:use_bias` - whether the projections add biases. Defaults to `false`.

    * `:kernel_initializer`, `:bias_initializer` - other initializers for the matrices, and for the biases but `decay_b`

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in `x`, `{1, length, width}`.
      Defaults to `nil`, a sequence in each row.

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.linear_attention(head_size: 4, decay: :key)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}

      iex> [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      iex> model = Sidewinder.Axon.linear_attention(x, head_size: 4, cu_seqlens: ends)
      iex> two = %{"x" => Nx.template({1, 5, 8}, :f32), "cu_seqlens" => Nx.template({3}, :s32)}
      iex> Axon.get_output_shape(model, two).shape
      {1, 5, 8}
  """
  @doc type: :recurrent
  @spec linear_attention(Axon.t(), keyword) :: Axon.t()
  defdelegate linear_attention(x, opts \\ []), to: LinearAttention, as: :block

  @doc """
  Adds a block of MM-Rec, `Sidewinder.mmrec_block/3`: a gated recurrence, attention over a memory from before the
  sequence, and a feed-forward layer, with norms and residual connections.

  With the width D of `x`, the inner width I and that of the feed-forward layer F, its parameters are

  | name                                                      | shape              | start                        |
  | --------------------------------------------------------- | ------------------ | ---------------------------- |
  | `n1`, `n2`                                                | `{D}`              | 1                            |
  | `wq`, `wk`, `wv`, `wz`, `wgate`, `waq`, `wao`             | `{D, D}`           | uniform within 1 / sqrt(D)   |
  | `wg1`, `wc1`, `wf1`                                       | `{I, D}`, `{F, D}` | uniform within 1 / sqrt(D)   |
  | `wc2`, `wf2`                                              | `{D, I}`, `{D, F}` | uniform within 1 / sqrt of I and F |
  | `wm`                                                      | `{D, 2 D}`         | uniform within 1 / sqrt(2 D) |
  | `wg2`                                                     | `{D, I}`           | 0                            |
  | `bg2`                                                     | `{D}`              | `:decay_bias`                |
  | the other biases, by the names of their matrices          | `{D}`, `{I}`, `{F}` | as their matrices           |

  (But `bg1`, `bc1` and `bf1` start as 0 if I or F is given here, where D is not known.)

  The state's weight on itself grows with the coefficient of decay, which is near s(`:decay_bias`) / 2 at first. With
  -3 that is 0.02: a start that is stable at any length. A model that shall remember over long times may start from a larger value,
  with `:state_norm` or `:state_clip`, or with a `:mix` of 0, where the weight is at most 1.

  ## Options

    * `:heads` - of attention, a divisor of D. Defaults to `1`.

    * `:inner` - I. Defaults to a quarter of D, and at least 1.

    * `:hidden` - F. Defaults to 4 D.

    * `:mix` - the weight of the second gate's mean. Defaults to `0.1`. With 0 there are no `wm` and `bm`.

    * `:dropout` - a rate. Defaults to `0.0`. With a positive rate, the layer keeps a key of random numbers as its state, and
      is computed as its parts in training.

    * `:decay_bias` - the initial value of `bg2`. Defaults to `-3.0`.

    * `:memory` - a pair of layers, `{batch or 1, slots, D}` each. Defaults to none, which is a memory of zeros.

    * `:initial_state` - a layer, `{batch, D}`, the state that the recurrence starts from. Defaults to none: zeros.

    * `:return_state` - returns `{y, %{last_state: layer, summary: layer}}`, `{batch, D}` each: the first is the
      `:initial_state` of the next part of a sequence, the second is for its memory. Defaults to `false`.

    * `:v_mix`, `:epsilon`, `:norm`, `:levels`, `:ratio`, `:state_clip`, `:state_norm`, `:checkpoint` - as in
      `Sidewinder.mmrec_block/3`

    * `:kernel_initializer`, `:bias_initializer` - other initializers, for all but `wg2`, `bg2`, `n1` and `n2`

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.mm_rec_block(heads: 2)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}

      iex> [x, h] = for name <- ["x", "h"], do: Axon.input(name)
      iex> {y, state} = Sidewinder.Axon.mm_rec_block(x, initial_state: h, return_state: true)
      iex> {init, predict} = Axon.build(Axon.container({y, state.last_state}))
      iex> first = %{"x" => Nx.iota({1, 2, 4}, type: :f32), "h" => Nx.broadcast(0.0, {1, 4})}
      iex> params = init.(first, Axon.ModelState.empty())
      iex> {_y, last_state} = predict.(params, first)
      iex> {y, _last_state} = predict.(params, %{first | "h" => last_state})
      iex> y.shape
      {1, 2, 4}
  """
  @doc type: :recurrent
  @spec mm_rec_block(Axon.t(), keyword) :: Axon.t() | {Axon.t(), %{atom => Axon.t()}}
  defdelegate mm_rec_block(x, opts \\ []), to: Sidewinder.Axon.MMRec, as: :block

  @doc """
  A model of MM-Rec over tokens: an embedding, `:layers` times `mm_rec_block/2`, a norm like those of the blocks, and
  logits by the weights of the embedding.

  `tokens` is a layer of integers, `{batch, length}`. Parameters are the `kernel` of the embedding, `{vocabulary, width}`,
  normally distributed with a deviation of 1 / sqrt(width), those of the blocks, and the `gamma` of the norm.

  ## Options

    * `:vocabulary` - how many tokens there are. It must be given.

    * `:width` - D. Defaults to `64`.

    * `:layers` - how many blocks. Defaults to `2`.

    * `:last` - how many tokens at the end get logits. Defaults to all.

    * `:memory`, `:initial_state`, `:return_state` - those of `mm_rec_block/2`, with a leading axis of the blocks:
      `{layers, batch or 1, slots, width}`, and `{layers, batch, width}`

    * `:name` - what the names of the layers start with. Defaults to `"mm_rec"`: `"mm_rec_embedding"`, `"mm_rec_0"` (a
      block), and so on, and `"mm_rec_norm"`.

    * all other options of `mm_rec_block/2` but `:meta`

  ## Examples

      iex> model = Sidewinder.Axon.mm_rec(Axon.input("tokens", shape: {nil, nil}), vocabulary: 11, width: 8)
      iex> {init, predict} = Axon.build(model)
      iex> tokens = Nx.tensor([[1, 2, 3]])
      iex> state = init.(tokens, Axon.ModelState.empty())
      iex> Map.keys(state.data)
      ["mm_rec_0", "mm_rec_1", "mm_rec_embedding", "mm_rec_norm"]
      iex> predict.(state, tokens).shape
      {1, 3, 11}
  """
  @doc type: :model
  @spec mm_rec(Axon.t(), keyword) :: Axon.t() | {Axon.t(), %{atom => Axon.t()}}
  defdelegate mm_rec(tokens, opts \\ []), to: Sidewinder.Axon.MMRec, as: :model

  @doc """
  Adds a causal convolution over time of each channel by itself, `Sidewinder.causal_conv1d/3`.

  Parameters are `kernel` `{channels, kernel_size}`, whose last column is the weight of the present, and
  `bias` `{channels}`.

  ## Options

    * `:kernel_size` - the number of steps of the window, with the present one. Defaults to `4`.

    * `:activation` - `:silu` or `nil`. Defaults to `nil`.

    * `:use_bias` - whether to add a bias to each channel. Defaults to `true`.

    * `:kernel_initializer`, `:bias_initializer` - default to uniform within 1 / sqrt(kernel_size)

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in `x`, `{1, length, channels}`

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.causal_conv1d(activation: :silu)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :convolution
  @spec causal_conv1d(Axon.t(), keyword) :: Axon.t()
  def causal_conv1d(%Axon{} = x, opts \\ []) do
    known = [kernel_size: {4, :size}, activation: {nil, [:silu]}, use_bias: {true, :flag}]

    %{kernel_size: w} =
      opts = options!(:causal_conv1d, opts, @layer ++ @packed ++ known ++ @weights)

    bias = opts.bias_initializer || uniform(fn _ -> w end)

    params = [
      {"kernel", fn [x | _] -> {width(x), w} end, opts.kernel_initializer || (&uniform/3)},
      opts.use_bias && {"bias", fn [x | _] -> {width(x)} end, bias}
    ]

    inputs = [x: x, cu_seqlens: opts.cu_seqlens]
    layer(:causal_conv1d, inputs, params, opts, activation: opts.activation)
  end

  @doc """
  Adds a selective scan, `Sidewinder.selective_scan/6`, with softplus of the steps.

  The inputs are layers: `x` and `dt` `{batch, length, channels}`, `b` and `c`
  `{batch, length, state_size}` or `{batch, length, groups, state_size}`. Parameters are `dt_b`
  `{channels}`, `A_log` `{channels, state_size}` and `D` `{channels}`, which start as in `mamba_block/2`.

  ## Options

    * `:gate` - a layer of the shape of `x`; the output is multiplied by its silu

    * `:dt_min`, `:dt_max`, `:dt_init_floor` - as in `mamba_block/2`

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in a batch of 1

  ## Examples

      iex> x = Axon.input("x", shape: {nil, nil, 8})
      iex> [dt, b, c] = for width <- [8, 4, 4], do: Axon.dense(x, width)
      iex> model = Sidewinder.Axon.selective_scan(x, dt, b, c, gate: Axon.dense(x, 8))
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :recurrent
  @spec selective_scan(Axon.t(), Axon.t(), Axon.t(), Axon.t(), keyword) :: Axon.t()
  def selective_scan(%Axon{} = x, %Axon{} = dt, %Axon{} = b, %Axon{} = c, opts \\ []) do
    opts = options!(:selective_scan, opts, @layer ++ [gate: {nil, :layer}] ++ @packed ++ @steps)

    params = [
      {"dt_b", fn [x | _] -> {width(x)} end, steps(opts)},
      {"A_log", fn [x, _, b | _] -> {width(x), width(b)} end, &decays/2},
      {"D", fn [x | _] -> {width(x)} end, :ones}
    ]

    inputs = [x: x, dt: dt, b: b, c: c, gate: opts.gate, cu_seqlens: opts.cu_seqlens]
    layer(:selective_scan, inputs, params, opts)
  end

  @doc """
  Adds root mean square normalization over the last axis (Zhang and Sennrich 2019):

      y = gamma x / sqrt(mean(x^2) + epsilon)

  It is `Sidewinder.rms_norm/3` with the epsilon of Mamba's checkpoints. The parameter is `gamma`,
  `{width}`.

  ## Options

    * `:epsilon` - numerical stability term. Defaults to `1.0e-5`.

    * `:gamma_initializer` - gamma parameter initializer. Defaults to `:ones`.

  ## Examples

      iex> model = Axon.input("x", shape: {nil, 2}) |> Sidewinder.Axon.rms_norm()
      iex> {init, predict} = Axon.build(model)
      iex> x = Nx.tensor([[3.0, -3.0]])
      iex> predict.(init.(x, Axon.ModelState.empty()), x) |> Nx.to_flat_list() |> Enum.map(&round/1)
      [1, -1]
  """
  @doc type: :normalization
  @spec rms_norm(Axon.t(), keyword) :: Axon.t()
  def rms_norm(%Axon{} = x, opts \\ []) do
    opts = options!(:rms_norm, opts, @layer ++ @norm)
    params = by_width([{"gamma", &{&1}, opts.gamma_initializer}])
    layer(:rms_norm, [x: x], params, opts, epsilon: opts.epsilon)
  end

  @doc """
  Adds root mean square normalization with a gate over the last axis, of Mamba-2 (Dao and Gu 2024):

      y = gamma u / sqrt(mean(u^2) + epsilon), u = x silu(z)

  It is `Sidewinder.gated_rms_norm/4`. `z` is a layer of the shape of `x`. The parameter is `gamma`, `{width}`.

  ## Options

    * `:groups` - into how many equal parts rows are cut, each with a mean of its own. Defaults to `1`.

    * `:norm_before_gate` - whether `silu(z)` is multiplied by after the norm. Defaults to `false`.

    * `:epsilon` - numerical stability term. Defaults to `1.0e-5`.

    * `:gamma_initializer` - gamma parameter initializer. Defaults to `:ones`.

  ## Examples

      iex> {x, z} = {Axon.input("x", shape: {nil, 2}), Axon.input("z", shape: {nil, 2})}
      iex> {init, predict} = Axon.build(Sidewinder.Axon.gated_rms_norm(x, z))
      iex> inputs = %{"x" => Nx.tensor([[3.0, -3.0]]), "z" => Nx.tensor([[2.0, 2.0]])}
      iex> predict.(init.(inputs, Axon.ModelState.empty()), inputs) |> Nx.to_flat_list() |> Enum.map(&round/1)
      [1, -1]
  """
  @doc type: :normalization
  @spec gated_rms_norm(Axon.t(), Axon.t(), keyword) :: Axon.t()
  def gated_rms_norm(%Axon{} = x, %Axon{} = z, opts \\ []) do
    known = [groups: {1, :size}, norm_before_gate: {false, :flag}]
    opts = options!(:gated_rms_norm, opts, @layer ++ @norm ++ known)
    params = by_width([{"gamma", &{&1}, opts.gamma_initializer}])

    options = [
      groups: opts.groups,
      norm_before_gate: opts.norm_before_gate,
      epsilon: opts.epsilon
    ]

    layer(:gated_rms_norm, [x: x, z: z], params, opts, options)
  end

  @doc """
  Adds layer normalization over the last axis, `Sidewinder.layer_norm/4`.

  Parameters are `gamma` and `beta`, `{width}`.

  ## Options

    * `:activation` - `:gelu_tanh` (also `:gelu`) or `:gelu_erf`, done in the same pass:
      `Sidewinder.layer_norm_gelu/4`. Defaults to `nil`.

    * `:epsilon` - numerical stability term. Defaults to `1.0e-5`.

    * `:gamma_initializer`, `:beta_initializer` - default to `:ones` and `:zeros`

  ## Examples

      iex> model = Axon.input("x", shape: {nil, 2}) |> Sidewinder.Axon.layer_norm()
      iex> {init, predict} = Axon.build(model)
      iex> x = Nx.tensor([[3.0, 5.0]])
      iex> predict.(init.(x, Axon.ModelState.empty()), x) |> Nx.to_flat_list() |> Enum.map(&round/1)
      [-1, 1]
  """
  @doc type: :normalization
  @spec layer_norm(Axon.t(), keyword) :: Axon.t()
  def layer_norm(%Axon{} = x, opts \\ []) do
    known = [
      activation: {nil, [:gelu, :gelu_tanh, :gelu_erf]},
      beta_initializer: {:zeros, :initializer}
    ]

    opts = options!(:layer_norm, opts, @layer ++ @norm ++ known)

    params =
      by_width([
        {"gamma", &{&1}, opts.gamma_initializer},
        {"beta", &{&1}, opts.beta_initializer}
      ])

    layer(:layer_norm, [x: x], params, opts, epsilon: opts.epsilon, activation: opts.activation)
  end

  @doc """
  Adds a dense layer of `units` outputs, `Sidewinder.linear/3`.

  It is `Axon.dense/3` with its activation in the same kernel and a matrix stored `{out, in}`:

  | name     | shape            | start                          |
  | -------- | ---------------- | ------------------------------ |
  | `kernel` | `{units, width}` | uniform within 1 / sqrt(width) |
  | `bias`   | `{units}`        | zero                           |

  ## Options

    * `:activation` - one of those of `Sidewinder.linear/3`, such as `:relu`. Defaults to `nil`.

    * `:use_bias` - whether to add a bias. Defaults to `true`.

    * `:kernel_initializer`, `:bias_initializer` - other initializers

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.linear(3, activation: :relu)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 3}
  """
  @doc type: :linear
  @spec linear(Axon.t(), pos_integer, keyword) :: Axon.t()
  def linear(%Axon{} = x, units, opts \\ []) do
    known = [activation: {nil, @activations}, use_bias: {true, :flag}]
    opts = options!(:linear, opts, @layer ++ known ++ @weights)
    size!(:linear, :units, units)

    layer(:linear, [x: x], dense(units, opts), opts, activation: opts.activation)
  end

  @doc """
  Adds a dense layer of `units` outputs whose weights are ternary when they are used, `Sidewinder.Ternary.dense/3`.

  The parameters are floats, as those of `linear/3`, and are trained with a straight-through gradient of the rounding.
  `Sidewinder.Kernel.Ternary` runs the trained weights in two bits each.

  | name     | shape            | start                          |
  | -------- | ---------------- | ------------------------------ |
  | `kernel` | `{units, width}` | uniform within 1 / sqrt(width) |
  | `bias`   | `{units}`        | zero                           |

  ## Options

    * `:rule` - `:absmean`, `:twn` or `:threshold`, as in `Sidewinder.Ternary.quantize/2`. Defaults to `:absmean`.

    * `:threshold` - that of the rule `:threshold`

    * `:per_row` - whether each unit has its own scale. Defaults to `false`.

    * `:use_bias` - whether to add a bias. Defaults to `true`.

    * `:kernel_initializer`, `:bias_initializer` - other initializers

  ## Examples

      iex> model = Axon.input("x", shape: {nil, 8}) |> Sidewinder.Axon.ternary_dense(3)
      iex> Axon.get_output_shape(model, Nx.template({2, 8}, :f32)).shape
      {2, 3}
  """
  @doc type: :linear
  @spec ternary_dense(Axon.t(), pos_integer, keyword) :: Axon.t()
  def ternary_dense(%Axon{} = x, units, opts \\ []) do
    known = [
      rule: {:absmean, [:absmean, :twn, :threshold]},
      threshold: {nil, :number},
      per_row: {false, :flag},
      use_bias: {true, :flag}
    ]

    opts = options!(:ternary_dense, opts, @layer ++ known ++ @weights)
    size!(:ternary_dense, :units, units)

    given = given(opts, [:rule, :threshold, :per_row])
    layer(:ternary_dense, [x: x], dense(units, opts), opts, given)
  end

  @doc """
  Adds attention of layers of queries, keys and values, `Sidewinder.attention/4`. It has no parameters.

  `q` is `{batch, heads, queries, width}`, `k` and `v` `{batch, key_heads, keys, width}`, or as `:layout` has
  them.

  ## Options

    * `:causal` - whether a query attends only to keys up to its own position. Defaults to `false`.

    * `:scale`, `:q_offset`, `:layout` - as in `Sidewinder.attention/4`

    * `:mask` - a layer of integers, not 0 where a query attends to a key, of a shape that repeats to
      `{batch, heads, queries, keys}`

    * `:cu_seqlens` - a layer of integers `{sequences + 1}`, the ends of packed sequences in a batch of 1, without `:mask`

  ## Examples

      iex> q = Axon.input("q", shape: {nil, 4, nil, 8})
      iex> kv = Axon.input("kv", shape: {nil, 2, nil, 8})
      iex> model = Sidewinder.Axon.attention(q, kv, kv, causal: true)
      iex> templates = %{"q" => Nx.template({1, 4, 3, 8}, :f32), "kv" => Nx.template({1, 2, 5, 8}, :f32)}
      iex> Axon.get_output_shape(model, templates).shape
      {1, 4, 3, 8}
  """
  @doc type: :attention
  @spec attention(Axon.t(), Axon.t(), Axon.t(), keyword) :: Axon.t()
  def attention(%Axon{} = q, %Axon{} = k, %Axon{} = v, opts \\ []) do
    known = [
      causal: {false, :flag},
      scale: {nil, :number},
      q_offset: {nil, :integer},
      layout: {:heads_first, [:heads_first, :heads_last]},
      mask: {nil, :layer}
    ]

    opts = options!(:attention, opts, @layer ++ @packed ++ known)
    options = given(opts, [:causal, :scale, :q_offset, :layout])
    inputs = [q: q, k: k, v: v, mask: opts.mask, cu_seqlens: opts.cu_seqlens]
    layer(:attention, inputs, [], opts, options)
  end

  @doc """
  Adds multi-head self-attention with its projections, `Sidewinder.mha/3`.

  With the width D of `x`, its parameters are

  | name   | shape      | start                      |
  | ------ | ---------- | -------------------------- |
  | `wqkv` | `{3 D, D}` | uniform within 1 / sqrt(D) |
  | `wo`   | `{D, D}`   | uniform within 1 / sqrt(D) |
  | `bo`   | `{D}`      | zero                       |

  ## Options

    * `:heads` - how many there are, a divisor of D. Defaults to `1`.

    * `:causal` - whether a token attends only to itself and earlier tokens. Defaults to `false`.

    * `:rope_theta` - the base of rotary angles. Defaults to `nil`, no rotation.

    * `:pairing` - which elements are rotated in pairs, `:half` or `:interleaved`. Defaults to `:half`.

    * `:use_bias` - whether to add `bo`. Defaults to `false`.

    * `:mask` - a layer of integers, not 0 where a token sees another one, of a shape that repeats to
      `{batch, heads, length, length}`

    * `:kernel_initializer`, `:bias_initializer` - other initializers

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.mha(heads: 2, causal: true)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :attention
  @spec mha(Axon.t(), keyword) :: Axon.t()
  def mha(%Axon{} = x, opts \\ []) do
    opts = options!(:mha, opts, @layer ++ @attention ++ @weights)
    layer(:mha, [x: x, mask: opts.mask], by_width(Params.mha(opts)), opts, given(opts, @heads))
  end

  @doc """
  Adds the gated feed-forward layer of Llama, `Sidewinder.swiglu_mlp/3`.

  With the width D of `x` and the hidden width F, its parameters are

  | name       | shape    | start                      |
  | ---------- | -------- | -------------------------- |
  | `wg`, `wu` | `{F, D}` | uniform within 1 / sqrt(D) |
  | `wd`       | `{D, F}` | uniform within 1 / sqrt(F) |

  ## Options

    * `:hidden` - F. Defaults to 4 D.

    * `:activation` - one of those of `Sidewinder.linear/3`. Defaults to `:silu`.

    * `:kernel_initializer` - another initializer

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.swiglu_mlp(hidden: 20)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :linear
  @spec swiglu_mlp(Axon.t(), keyword) :: Axon.t()
  def swiglu_mlp(%Axon{} = x, opts \\ []) do
    known = [
      hidden: {nil, :size},
      activation: {:silu, @activations},
      kernel_initializer: {nil, :initializer}
    ]

    opts = options!(:swiglu_mlp, opts, @layer ++ known)

    params = by_width(Params.mlp(opts))
    layer(:swiglu_mlp, [x: x], params, opts, activation: opts.activation)
  end

  @doc """
  Adds a block of a transformer, `Sidewinder.transformer_block/3`: `mha/2` and `swiglu_mlp/2`, each after a
  `layer_norm/2` and with a residual connection around both.

  Parameters are those of `mha/2` and `swiglu_mlp/2`, and `ln1_w`, `ln1_b`, `ln2_w` and `ln2_b`, `{D}`, which
  start as ones and zeros.

  ## Options

    * `:hidden` - the hidden width of the feed-forward layer. Defaults to 4 D.

    * `:epsilon` - numerical stability term of the norms. Defaults to `1.0e-5`.

    * all options of `mha/2`

  ## Examples

      iex> model = Axon.input("x", shape: {nil, nil, 8}) |> Sidewinder.Axon.transformer_block(heads: 2)
      iex> Axon.get_output_shape(model, Nx.template({2, 5, 8}, :f32)).shape
      {2, 5, 8}
  """
  @doc type: :attention
  @spec transformer_block(Axon.t(), keyword) :: Axon.t()
  def transformer_block(%Axon{} = x, opts \\ []) do
    known = [hidden: {nil, :size}, epsilon: {1.0e-5, :positive}]
    opts = options!(:transformer_block, opts, @layer ++ known ++ @attention ++ @weights)

    norms =
      for {name, start} <- [ln1_w: :ones, ln1_b: :zeros, ln2_w: :ones, ln2_b: :zeros],
          do: {Atom.to_string(name), &{&1}, start}

    params = by_width(Params.mha(opts) ++ Params.mlp(opts) ++ norms)

    options = given(opts, [:epsilon | @heads])
    layer(:transformer_block, [x: x, mask: opts.mask], params, opts, options)
  end

  defp given(opts, keys), do: for(key <- keys, do: {key, Map.fetch!(opts, key)})
end

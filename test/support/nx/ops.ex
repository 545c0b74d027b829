defmodule Sidewinder.NxTest.Ops do
  @moduledoc """
  All ops with their tensors by the kernels' names, so that a test is written once for all.

  A call is `{op, inputs, cotangents, opts}`; its loss is the sum of the products of outputs and
  cotangents, `"dy"` being that of the output `:y`.
  """

  import Sidewinder.NxTest.Scans, only: [random: 5]
  alias Sidewinder.Ops

  @activations ~w(sigmoid silu gelu softplus relu)
  @cumulative ~w(cumprod_scan logcumsumexp cumsum reverse_cumsum)

  @ops Map.new(@activations, &{&1, {~w(x), [], []}})
       |> Map.merge(%{
         "selective_scan" =>
           {~w(x dt A B C), [d: "D", z: "z", dt_bias: "dt_bias", initial_state: "initial_state"],
            return_states: :states, return_state: :last_state},
         "ssd" =>
           {~w(x dt A B C), [d: "D", z: "z", dt_bias: "dt_bias", initial_state: "initial_state"],
            return_state: :last_state},
         "selective_state_update" =>
           {~w(initial_state x dt A B C), [d: "D", z: "z", dt_bias: "dt_bias"], []},
         "linear_scan" => {~w(a b), [initial_state: "initial_state"], return_state: :last_state},
         "exp_product_scan" =>
           {~w(gamma), [initial_state: "initial_state"], return_state: :last_state},
         "cumprod_scan" =>
           {~w(gamma), [initial_state: "initial_state"], return_state: :last_state},
         "logcumsumexp" => {~w(x), [initial_state: "initial_state"], return_state: :last_state},
         "cumsum" => {~w(x), [initial_state: "initial_state"], return_state: :last_state},
         "reverse_cumsum" => {~w(x), [initial_state: "initial_state"], return_state: :last_state},
         "causal_conv1d" =>
           {~w(x w), [bias: "bias", initial_state: "initial_state"], return_state: :last_state},
         "causal_conv1d_update" => {~w(initial_state x w), [bias: "bias"], []},
         "mamba_block" =>
           {~w(x), [conv_state: "conv_state", ssm_state: "ssm_state"],
            return_state: :conv_state, return_state: :ssm_state},
         "layer_norm" => {~w(x w b), [], return_statistics: :mean, return_statistics: :rstd},
         "linear" => {~w(x w), [bias: "b"], []},
         "matmul" => {~w(a b), [], []},
         "rope" => {~w(x), [], []},
         "sinusoidal_positions" => {~w(x), [], []},
         "attention" => {~w(q k v), [mask: "mask", bias: "bias"], return_lse: :lse},
         "decode" => {~w(q k v keys values), [mask: "mask", bias: "bias"], []},
         "swiglu_mlp" => {~w(x), [], []},
         "mha" => {~w(x), [mask: "mask"], []},
         "transformer_block" => {~w(x), [mask: "mask"], []},
         "mdi_update" => {~w(z h_old gate gamma), [], []},
         "mdi_gamma" => {~w(z), [context: "context"], []},
         "mdi" => {~w(z h_prev), [context: "context"], return_parts: :gamma, return_parts: :gate},
         "block_recurrence" =>
           {~w(z gamma w_gate b_gate), [wm: "w_mix", bm: "b_mix", initial_state: "initial_state"],
            return_state: :last_state},
         "mmrec_block" =>
           {~w(x), [k_mem: "k_mem", v_mem: "v_mem", initial_state: "initial_state"],
            for(name <- ~w(h last_state gamma context summary)a, do: {:return_state, name})},
         "hds_construct" => {~w(k v), [], []},
         "multi_memory_attention" => {~w(h k_mem v_mem), [q_in: "q_in"], return_lse: :lse}
       })

  @optional %{
    "selective_scan" => ~w(D z dt_bias initial_state),
    "ssd" => ~w(D z dt_bias initial_state),
    "selective_state_update" => ~w(D z dt_bias),
    "linear_scan" => ~w(initial_state),
    "exp_product_scan" => ~w(initial_state),
    "cumprod_scan" => ~w(initial_state),
    "logcumsumexp" => ~w(initial_state),
    "cumsum" => ~w(initial_state),
    "reverse_cumsum" => ~w(initial_state),
    "causal_conv1d" => ~w(bias initial_state),
    "causal_conv1d_update" => ~w(bias),
    "mamba_block" => ~w(conv_b in_proj_b out_proj_b conv_state ssm_state),
    "linear" => ~w(b),
    "attention" => ~w(mask bias),
    "decode" => ~w(mask bias),
    "mha" => ~w(bo mask),
    "transformer_block" => ~w(bo mask),
    "block_recurrence" => ~w(initial_state),
    "mmrec_block" => ~w(initial_state),
    "multi_memory_attention" => ~w(baq bao q_in)
  }

  # Those that take a map of parameters, with their other inputs.
  @parameters %{
    "mamba_block" => ~w(x conv_state ssm_state),
    "swiglu_mlp" => ~w(x),
    "mha" => ~w(x mask),
    "transformer_block" => ~w(x mask),
    "mdi_gamma" => ~w(z context),
    "mdi" => ~w(z h_prev context),
    "mmrec_block" => ~w(x k_mem v_mem initial_state),
    "multi_memory_attention" => ~w(h k_mem v_mem q_in)
  }

  @doc "The names of all ops."
  def ops,
    do: Map.keys(@ops) ++ for(%{name: name} <- of_rows(), not is_map_key(@ops, name), do: name)

  @doc """
  The declarations of ops that take and give rows of one width, and weights of that width: all that is asked here follows
  from them.
  """
  def of_rows do
    Code.ensure_loaded!(Sidewinder)
    all = Ops.all()

    for %{inputs: inputs} = op <- Ops.forward(all),
        Ops.backward(all, op),
        Enum.all?(inputs ++ op.outputs, &(&1.shape in ["(..., D)", "(D)"])),
        function_exported?(Sidewinder, String.to_atom(op.name), length(inputs) + 1),
        do: op
  end

  # Its arguments, the tensors among its options, and the options that ask for outputs.
  defp entry(op) when is_map_key(@ops, op), do: Map.fetch!(@ops, op)

  defp entry(op) do
    %{inputs: inputs} = Ops.find!(of_rows(), op)
    {Enum.map(inputs, & &1.name), [], []}
  end

  @doc "The names of an op's optional inputs."
  def optional(op), do: Map.get(@optional, op, [])

  @doc "The names of all functions that are one kernel."
  def activations, do: @activations

  @doc "The name of the kernel of an op."
  def kernel(op), do: if(op in @activations, do: "activations", else: op)

  @doc "Whether an op is a sequence of others where it is no kernel."
  def composed?(op), do: is_map_key(@parameters, op) or op == "decode"

  @doc "The options that `problem/3` has for an op."
  def defaults("attention"), do: [causal: true, q_offset: 1]
  def defaults("decode"), do: [cached: 1]

  def defaults("mmrec_block"), do: [heads: 2, levels: 2, ratio: 2, cursor: 1]

  def defaults(op) when op in ~w(mha transformer_block),
    do: [heads: 2, causal: true, rope_theta: 100.0]

  def defaults("multi_memory_attention"), do: [heads: 2]
  def defaults("hds_construct"), do: [ratio: 2, cursor: 3]
  def defaults(_op), do: []

  @doc "All lists of some elements of a list."
  def subsets([]), do: [[]]
  def subsets([first | rest]), do: for(s <- subsets(rest), t <- [s, [first | s]], do: t)

  @doc "Calls the function of `Sidewinder`; returns all outputs that cotangents may want, by name."
  def run(op, inputs, opts) do
    {args, tensors, _} = entry(op)
    args = for(name <- args, do: inputs[name]) ++ params(op, inputs)
    tensors = for {key, name} <- tensors, t = inputs[name], do: {key, t}
    named(op, apply(Sidewinder, String.to_atom(op), args ++ [tensors ++ opts]))
  end

  defp params(op, inputs) do
    if others = @parameters[op], do: [Map.drop(inputs, others)], else: []
  end

  defp named(_, %{y: _} = outputs), do: outputs
  defp named("mdi_update", h), do: %{h: h}
  defp named("mdi_gamma", gamma), do: %{gamma: gamma}
  defp named("mdi", {h_new, parts}), do: Map.put(parts, :h_new, h_new)
  defp named("mdi", h_new), do: %{h_new: h_new}
  defp named("block_recurrence", {h, last_state}), do: %{h: h, last_state: last_state}
  defp named("block_recurrence", h), do: %{h: h}
  defp named("mmrec_block", {y, state}), do: Map.put(state, :y, y)
  defp named("linear_scan", {h, last_state}), do: %{h: h, last_state: last_state}
  defp named("linear_scan", h), do: %{h: h}
  defp named("exp_product_scan", {y, log_y}), do: %{y: y, log_y: log_y}
  defp named("exp_product_scan", {y, log_y, state}), do: %{y: y, log_y: log_y, last_state: state}
  defp named("attention", {y, lse}), do: %{y: y, lse: lse}
  defp named("decode", {y, keys, values}), do: %{y: y, keys: keys, values: values}
  defp named("multi_memory_attention", {y, lse}), do: %{y: y, lse: lse}
  defp named("hds_construct", {{k1, v1}, {k2, v2}}), do: %{k1: k1, v1: v1, k2: k2, v2: v2}
  defp named("matmul", c), do: %{c: c}
  defp named("mamba_block", {y, states}), do: Map.put(states, :y, y)
  defp named(_, {y, state}), do: %{y: y, last_state: state}
  defp named(_, y), do: %{y: y}

  @doc "The options with which the op returns what has a cotangent."
  def asking(op, cotangents, opts) do
    {_, _, asked} = entry(op)
    wanted = for {option, output} <- asked, cotangents["d#{output}"], do: {option, true}
    opts ++ Enum.take(wanted, 1)
  end

  @doc "The sum of the products of outputs and cotangents."
  def loss({op, inputs, cotangents, opts}) do
    outputs = run(op, inputs, asking(op, cotangents, opts))

    for({"d" <> name, c} <- cotangents, do: outputs |> Map.fetch!(:"#{name}") |> product(c))
    |> Enum.reduce(&Nx.add/2)
  end

  defp product(t, cotangent) do
    [t, cotangent] = for t <- [t, cotangent], do: if(narrow?(t), do: Nx.as_type(t, :f32), else: t)
    Nx.sum(Nx.multiply(t, cotangent))
  end

  defp narrow?(t), do: t.type in [{:f, 16}, {:bf, 16}]

  @doc """
  The gradients by the names of the inputs, but for masks, in one of the ways of
  `Sidewinder.NxTest.Scans`.
  """
  def gradients(call, way \\ &apply/2), do: derive(call, way, &Nx.Defn.grad/2)

  @doc "Loss and gradients."
  def value_and_grad(call, way \\ &apply/2), do: derive(call, way, &Nx.Defn.value_and_grad/2)

  defp derive({op, inputs, cotangents, opts}, way, derive) do
    {masks, inputs} = Map.split_with(inputs, fn {_, t} -> mask?(t) end)

    way.(
      fn inputs, masks ->
        derive.(inputs, &loss({op, Map.merge(&1, masks), cotangents, opts}))
      end,
      [inputs, masks]
    )
  end

  defp mask?(t), do: t.type == {:u, 8}

  @doc """
  A call with random tensors: all inputs, and cotangents of all outputs. `sizes` are `{b, l, d, n}`;
  other sizes are made of them.
  """
  def problem(op, sizes, type \\ :f64) do
    wide = if type == :f64, do: :f64, else: :f32

    {inputs, cotangents} =
      for {{name, shape, lo, hi, precision}, seed} <- Enum.with_index(shapes(op, sizes)),
          into: %{} do
        case precision do
          :storage -> {name, random(seed + 1, shape, lo, hi, type)}
          :wide -> {name, random(seed + 1, shape, lo, hi, wide)}
          :mask -> {name, mask(random(seed + 1, shape, lo, hi, :f32))}
        end
      end
      |> Map.split_with(fn {name, _} -> name not in cotangents(op) end)

    {op, inputs, cotangents, defaults(op)}
  end

  # The first key is seen by all.
  defp mask(t), do: Nx.logical_or(Nx.greater(t, 0), Nx.equal(Nx.iota(t.shape, axis: -1), 0))

  defp cotangents("selective_scan"), do: ~w(dy dlast_state dstates)
  defp cotangents("ssd"), do: ~w(dy dlast_state)
  defp cotangents("linear_scan"), do: ~w(dh dlast_state)
  defp cotangents("exp_product_scan"), do: ~w(dy dlog_y dlast_state)
  defp cotangents(op) when op in @cumulative, do: ~w(dy dlast_state)
  defp cotangents("causal_conv1d"), do: ~w(dy dlast_state)
  defp cotangents("mamba_block"), do: ~w(dy dconv_state dssm_state)
  defp cotangents("mdi_update"), do: ~w(dh)
  defp cotangents("mdi_gamma"), do: ~w(dgamma)
  defp cotangents("mdi"), do: ~w(dh_new dgamma dgate)
  defp cotangents("block_recurrence"), do: ~w(dh dlast_state)
  defp cotangents("mmrec_block"), do: ~w(dy dh dlast_state dgamma dcontext dsummary)
  defp cotangents("attention"), do: ~w(dy dlse)
  defp cotangents("multi_memory_attention"), do: ~w(dy dlse)
  defp cotangents("hds_construct"), do: ~w(dk1 dv1 dk2 dv2)
  defp cotangents("decode"), do: ~w(dy dkeys dvalues)
  defp cotangents("matmul"), do: ~w(dc)
  defp cotangents("layer_norm"), do: ~w(dy dmean drstd)
  defp cotangents("selective_state_update"), do: ~w(dy dlast_state)
  defp cotangents("causal_conv1d_update"), do: ~w(dy dlast_state)
  defp cotangents(_), do: ~w(dy)

  # Name, shape, bounds, precision.
  defp shapes("selective_scan", {b, l, d, n}) do
    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"dt", {b, l, d}, 0.001, 0.5, :storage},
      {"A", {d, n}, -2.0, -0.1, :wide},
      {"B", {b, l, n}, -1.0, 1.0, :storage},
      {"C", {b, l, n}, -1.0, 1.0, :storage},
      {"D", {d}, -1.0, 1.0, :wide},
      {"z", {b, l, d}, -1.0, 1.0, :storage},
      {"dt_bias", {d}, -0.5, 0.5, :wide},
      {"initial_state", {b, d, n}, -1.0, 1.0, :wide},
      {"dy", {b, l, d}, -1.0, 1.0, :storage},
      {"dlast_state", {b, d, n}, -1.0, 1.0, :wide},
      {"dstates", {b, l, d, n}, -1.0, 1.0, :wide}
    ]
  end

  # Channels are heads of two rows.
  defp shapes("ssd", {b, l, d, n}) do
    [
      {"x", {b, l, d, 2}, -1.0, 1.0, :storage},
      {"dt", {b, l, d}, 0.001, 0.5, :storage},
      {"A", {d}, -2.0, -0.1, :wide},
      {"B", {b, l, 1, n}, -1.0, 1.0, :storage},
      {"C", {b, l, 1, n}, -1.0, 1.0, :storage},
      {"D", {d}, -1.0, 1.0, :wide},
      {"z", {b, l, d, 2}, -1.0, 1.0, :storage},
      {"dt_bias", {d}, -0.5, 0.5, :wide},
      {"initial_state", {b, d, 2, n}, -1.0, 1.0, :wide},
      {"dy", {b, l, d, 2}, -1.0, 1.0, :storage},
      {"dlast_state", {b, d, 2, n}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes("selective_state_update", {b, _, d, n}) do
    [
      {"x", {b, d}, -1.0, 1.0, :storage},
      {"initial_state", {b, d, n}, -1.0, 1.0, :wide},
      {"dt", {b, d}, 0.001, 0.5, :storage},
      {"A", {d, n}, -2.0, -0.1, :wide},
      {"B", {b, n}, -1.0, 1.0, :storage},
      {"C", {b, n}, -1.0, 1.0, :storage},
      {"D", {d}, -1.0, 1.0, :wide},
      {"z", {b, d}, -1.0, 1.0, :storage},
      {"dt_bias", {d}, -0.5, 0.5, :wide},
      {"dy", {b, d}, -1.0, 1.0, :storage},
      {"dlast_state", {b, d, n}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes("linear_scan", {b, l, k, _}) do
    [
      {"a", {b, l, k}, -1.0, 1.0, :storage},
      {"b", {b, l, k}, -1.0, 1.0, :storage},
      {"initial_state", {b, k}, -1.0, 1.0, :wide},
      {"dh", {b, l, k}, -1.0, 1.0, :storage},
      {"dlast_state", {b, k}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes("exp_product_scan", {b, l, d, n}) do
    [
      {"gamma", {b, n, l, d}, 0.1, 0.9, :storage},
      {"initial_state", {b, n, d}, -1.0, 1.0, :wide},
      {"dy", {b, n, l, d}, -1.0, 1.0, :storage},
      {"dlog_y", {b, n, l, d}, -1.0, 1.0, :wide},
      {"dlast_state", {b, n, d}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes(op, {b, l, d, n}) when op in @cumulative do
    x = if op == "cumprod_scan", do: "gamma", else: "x"

    [
      {x, {b, n, l, d}, -1.0, 1.0, :storage},
      {"initial_state", {b, n, d}, -1.0, 1.0, :wide},
      {"dy", {b, n, l, d}, -1.0, 1.0, :storage},
      {"dlast_state", {b, n, d}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes("causal_conv1d", {b, l, d, n}) do
    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"w", {d, n + 1}, -1.0, 1.0, :wide},
      {"bias", {d}, -1.0, 1.0, :wide},
      {"initial_state", {b, n, d}, -1.0, 1.0, :storage},
      {"dy", {b, l, d}, -1.0, 1.0, :storage},
      {"dlast_state", {b, n, d}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("causal_conv1d_update", {b, _, d, n}) do
    [
      {"x", {b, d}, -1.0, 1.0, :storage},
      {"w", {d, n + 1}, -1.0, 1.0, :wide},
      {"bias", {d}, -1.0, 1.0, :wide},
      {"initial_state", {b, n, d}, -1.0, 1.0, :storage},
      {"dy", {b, d}, -1.0, 1.0, :storage},
      {"dlast_state", {b, n, d}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("mamba_block", {b, l, d, n}) do
    {inner, rank, width} = {2 * d, 2, 4}

    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"in_proj", {2 * inner, d}, -1.0, 1.0, :storage},
      {"conv_w", {inner, width}, -0.5, 0.5, :wide},
      {"x_proj", {rank + 2 * n, inner}, -0.5, 0.5, :storage},
      {"dt_w", {inner, rank}, -0.5, 0.5, :storage},
      {"dt_b", {inner}, -2.0, 0.0, :wide},
      {"A_log", {inner, n}, -1.0, 1.0, :wide},
      {"D", {inner}, -1.0, 1.0, :wide},
      {"out_proj", {d, inner}, -0.5, 0.5, :storage},
      {"conv_b", {inner}, -0.5, 0.5, :wide},
      {"in_proj_b", {2 * inner}, -0.5, 0.5, :storage},
      {"out_proj_b", {d}, -0.5, 0.5, :storage},
      {"conv_state", {b, width - 1, inner}, -1.0, 1.0, :storage},
      {"ssm_state", {b, inner, n}, -1.0, 1.0, :wide},
      {"dy", {b, l, d}, -1.0, 1.0, :storage},
      {"dconv_state", {b, width - 1, inner}, -1.0, 1.0, :storage},
      {"dssm_state", {b, inner, n}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes(op, {b, l, d, _}) when op in @activations do
    [{"x", {b, l, d}, -3.0, 3.0, :storage}, {"dy", {b, l, d}, -1.0, 1.0, :storage}]
  end

  defp shapes("layer_norm", {b, l, _, _} = sizes) do
    statistics = for name <- ~w(dmean drstd), do: {name, {b, l}, -1.0, 1.0, :wide}
    shapes("layer_norm_gelu", sizes) ++ statistics
  end

  defp shapes("linear", {b, l, d, n}) do
    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"w", {n, d}, -1.0, 1.0, :storage},
      {"b", {n}, -1.0, 1.0, :storage},
      {"dy", {b, l, n}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("matmul", {_, l, d, n}) do
    [
      {"a", {l, d}, -1.0, 1.0, :storage},
      {"b", {d, n}, -1.0, 1.0, :storage},
      {"dc", {l, n}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("rope", {b, l, d, n}) do
    for name <- ~w(x dy), do: {name, {b, d, l, 2 * n}, -1.0, 1.0, :storage}
  end

  defp shapes("sinusoidal_positions", {b, l, d, _}) do
    for name <- ~w(x dy), do: {name, {b, l, d}, -1.0, 1.0, :storage}
  end

  defp shapes("attention", {b, l, d, n}) do
    [
      {"q", {b, 4, l, d}, -1.0, 1.0, :storage},
      {"k", {b, 2, l + 1, d}, -1.0, 1.0, :storage},
      {"v", {b, 2, l + 1, n}, -1.0, 1.0, :storage},
      {"mask", {1, l, l + 1}, -1.0, 1.0, :mask},
      {"bias", {b, 1, l, 1}, -1.0, 1.0, :wide},
      {"dy", {b, 4, l, n}, -1.0, 1.0, :storage},
      {"dlse", {b, 4, l}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes("decode", {b, l, d, n}) do
    [
      {"q", {b, 4, l, d}, -1.0, 1.0, :storage},
      {"k", {b, 2, l, d}, -1.0, 1.0, :storage},
      {"v", {b, 2, l, n}, -1.0, 1.0, :storage},
      {"keys", {b, 2, l + 2, d}, -1.0, 1.0, :storage},
      {"values", {b, 2, l + 2, n}, -1.0, 1.0, :storage},
      {"mask", {1, l, l + 1}, -1.0, 1.0, :mask},
      {"bias", {b, 1, 1, l + 1}, -1.0, 1.0, :wide},
      {"dy", {b, 4, l, n}, -1.0, 1.0, :storage},
      {"dkeys", {b, 2, l + 2, d}, -1.0, 1.0, :storage},
      {"dvalues", {b, 2, l + 2, n}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("swiglu_mlp", {b, l, d, n}) do
    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"wg", {n, d}, -1.0, 1.0, :storage},
      {"wu", {n, d}, -1.0, 1.0, :storage},
      {"wd", {d, n}, -1.0, 1.0, :storage},
      {"dy", {b, l, d}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("mha", {b, l, n, _}) do
    d = 4 * n

    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"wqkv", {3 * d, d}, -0.5, 0.5, :storage},
      {"wo", {d, d}, -0.5, 0.5, :storage},
      {"bo", {d}, -1.0, 1.0, :storage},
      {"mask", {b, 1, l, l}, -1.0, 1.0, :mask},
      {"dy", {b, l, d}, -1.0, 1.0, :storage}
    ]
  end

  defp shapes("transformer_block", {b, l, _, n} = sizes) do
    d = 4

    norms =
      for name <- ~w(ln1_w ln1_b ln2_w ln2_b), do: {name, {d}, 0.5, 1.5, :wide}

    norms ++ shapes("mha", {b, l, 1, n}) ++ tl(shapes("swiglu_mlp", put_elem(sizes, 2, d)))
  end

  defp shapes("mdi_update", {b, l, d, _}) do
    for name <- ~w(z h_old gate gamma dh), do: {name, {b, l, d}, -1.0, 1.0, :storage}
  end

  defp shapes("mdi_gamma", {b, l, d, n}) do
    sequences = for name <- ~w(z context dgamma), do: {name, {b, l, d}, -1.0, 1.0, :storage}
    sequences ++ networks(d, n)
  end

  defp shapes("mdi", {b, l, d, n}) do
    names = ~w(z h_prev context dh_new dgamma dgate)
    sequences = for name <- names, do: {name, {b, l, d}, -1.0, 1.0, :storage}
    sequences ++ networks(d, n) ++ second_gate("wm", "bm", d)
  end

  defp shapes("block_recurrence", {b, l, d, _}) do
    [
      {"z", {b, l, d}, -1.0, 1.0, :storage},
      {"gamma", {b, l, d}, 0.0, 0.6, :storage},
      {"w_gate", {d, d}, -0.5, 0.5, :storage},
      {"b_gate", {d}, -0.5, 0.5, :storage},
      {"initial_state", {b, d}, -1.0, 1.0, :wide},
      {"dh", {b, l, d}, -1.0, 1.0, :storage},
      {"dlast_state", {b, d}, -1.0, 1.0, :wide}
    ] ++ second_gate("w_mix", "b_mix", d)
  end

  defp shapes("mmrec_block", {b, l, _, n}) do
    {d, f, m} = {4, n + 2, 5}
    squares = ~w(wq wk wv wz wgate waq wao)
    vectors = ~w(bq bk bv bz bgate baq bao bf2)

    [
      {"x", {b, l, d}, -1.0, 1.0, :storage},
      {"k_mem", {b, m, d}, -1.0, 1.0, :storage},
      {"v_mem", {b, m, d}, -1.0, 1.0, :storage},
      {"n1", {d}, 0.5, 1.5, :wide},
      {"n2", {d}, 0.5, 1.5, :wide},
      {"wf1", {f, d}, -0.5, 0.5, :storage},
      {"bf1", {f}, -0.5, 0.5, :storage},
      {"wf2", {d, f}, -0.5, 0.5, :storage},
      {"initial_state", {b, d}, -1.0, 1.0, :wide},
      {"dlast_state", {b, d}, -1.0, 1.0, :wide},
      {"dsummary", {b, d}, -1.0, 1.0, :storage}
    ] ++
      for(name <- squares, do: {name, {d, d}, -0.5, 0.5, :storage}) ++
      for(name <- vectors, do: {name, {d}, -0.5, 0.5, :storage}) ++
      for(name <- ~w(dy dh dgamma dcontext), do: {name, {b, l, d}, -1.0, 1.0, :storage}) ++
      networks(d, n) ++ second_gate("wm", "bm", d)
  end

  defp shapes("hds_construct", {b, l, d, _}) do
    slots = l + 2
    levels = [{1, div(slots, 2)}, {2, max(1, div(slots, 4))}]

    for(name <- ~w(k v), do: {name, {b, slots, d}, -1.0, 1.0, :storage}) ++
      for {level, size} <- levels,
          name <- ~w(dk dv),
          do: {"#{name}#{level}", {b, size, d}, -1.0, 1.0, :storage}
  end

  # One memory for the whole batch, where the batch is larger than one.
  defp shapes("multi_memory_attention", {b, l, n, _}) do
    d = 2 * n

    [
      {"h", {b, l, d}, -1.0, 1.0, :storage},
      {"k_mem", {1, l + 1, d}, -1.0, 1.0, :storage},
      {"v_mem", {1, l + 1, d}, -1.0, 1.0, :storage},
      {"waq", {d, d}, -0.5, 0.5, :storage},
      {"baq", {d}, -1.0, 1.0, :storage},
      {"wao", {d, d}, -0.5, 0.5, :storage},
      {"bao", {d}, -1.0, 1.0, :storage},
      {"q_in", {b, l, d}, -1.0, 1.0, :storage},
      {"dy", {b, l, d}, -1.0, 1.0, :storage},
      {"dlse", {b, 2, l}, -1.0, 1.0, :wide}
    ]
  end

  defp shapes(op, {b, l, d, _}) do
    %{inputs: inputs, cotangents: cotangents} = Ops.find!(of_rows(), op)

    slots = for(%{name: name, shape: words} = slot <- inputs, do: {name, words, slot.precision})

    for {name, words, precision} <-
          slots ++ for(name <- cotangents, do: {name, "(..., D)", "storage"}) do
      shape = if words == "(D)", do: {d}, else: {b, l, d}
      {low, high} = if name == "w", do: {0.5, 1.5}, else: {-1.0, 1.0}
      {name, shape, low, high, String.to_atom(precision)}
    end
  end

  # Of coefficients of decay.
  defp networks(d, n) do
    for net <- ~w(g c),
        {layer, out, inputs} <- [{"1", n, d}, {"2", d, n}],
        {kind, shape} <- [{"w", {out, inputs}}, {"b", {out}}],
        do: {kind <> net <> layer, shape, -0.5, 0.5, :storage}
  end

  defp second_gate(w, b, d) do
    [{w, {d, 2 * d}, -0.5, 0.5, :storage}, {b, {d}, -0.5, 0.5, :storage}]
  end

  @doc "The call with some more options, or without some of its tensors."
  def with_options({op, inputs, cotangents, opts}, more),
    do: {op, inputs, cotangents, opts ++ more}

  def without({op, inputs, cotangents, opts}, names) do
    {op, Map.drop(inputs, names), Map.drop(cotangents, names), opts}
  end

  @doc "All tensors of a call in a type, weights and states in that of the arithmetic."
  def as_type({op, inputs, cotangents, opts}, type) do
    change = fn tensors ->
      Map.new(tensors, fn {name, t} -> {name, if(mask?(t), do: t, else: Nx.as_type(t, type))} end)
    end

    {op, change.(inputs), change.(cotangents), opts}
  end

  @doc """
  Asserts that each gradient has the shape of its input and agrees with the central
  difference along a random direction, in f64.
  """
  def check_differences({op, inputs, cotangents, opts} = call, gradients \\ nil) do
    gradients = gradients || gradients(call)

    for {{name, t}, seed} <- Enum.with_index(inputs), not mask?(t) do
      direction = random(seed + 77, t.shape, -1.0, 1.0, :f64)

      at = fn step ->
        moved = Map.put(inputs, name, Nx.add(t, Nx.multiply(direction, step)))
        Nx.to_number(loss({op, moved, cotangents, opts}))
      end

      expected = (at.(1.0e-5) - at.(-1.0e-5)) / 2.0e-5
      got = Nx.to_number(Nx.sum(Nx.multiply(gradients[name], direction)))

      unless abs(got - expected) <= 1.0e-6 * (1 + abs(expected)) and
               gradients[name].shape == t.shape do
        ExUnit.Assertions.flunk(
          "#{op}, d#{name}, #{inspect(opts)}, #{inspect(Map.keys(inputs))}: " <>
            "#{got}, not #{expected}"
        )
      end
    end
  end

  @doc "The names of the kernels that `fun` calls in this process, in order."
  def kernel_calls(fun) do
    tracer = spawn_link(fn -> collect([]) end)
    Code.ensure_loaded!(Sidewinder.Kernel)
    :erlang.trace_pattern({Sidewinder.Kernel, :run, 4}, true, [:global])
    :erlang.trace(self(), true, [:call, {:tracer, tracer}])
    fun.()
    :erlang.trace(self(), false, [:call])
    reference = :erlang.trace_delivered(self())
    receive do: ({:trace_delivered, _, ^reference} -> :ok)
    send(tracer, {:calls, self()})
    receive do: ({:calls, calls} -> calls)
  end

  defp collect(calls) do
    receive do
      {:trace, _, :call, {_, _, [name | _]}} -> collect([name | calls])
      {:calls, to} -> send(to, {:calls, Enum.reverse(calls)})
    end
  end
end

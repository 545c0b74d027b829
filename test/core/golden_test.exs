defmodule Sidewinder.GoldenTest do
  use ExUnit.Case, async: true

  # Long sequences, at every level.
  @moduletag timeout: 300_000

  alias Sidewinder.{Calls, Composed, Error, Golden, Kernel, Tensor}
  alias Sidewinder.Kernel.{Attention, Conv, Mamba, NN, Scan}

  # Every op with golden values, and whether they have gradients.
  @ops [
    selective_scan: true,
    selective_state_update: false,
    linear_scan: true,
    exp_product_scan: true,
    cumprod_scan: true,
    logcumsumexp: false,
    reverse_cumsum: false,
    causal_conv1d: true,
    linear: true,
    mamba_block: true,
    attention: true,
    activations: false,
    rms_norm: true,
    layer_norm: true,
    layer_norm_gelu: true,
    matmul: false,
    rope: true,
    swiglu_mlp: true,
    transformer_block: true,
    mdi_update: true,
    mdi: true,
    block_recurrence: true,
    mmrec_block: true,
    hds_construct: false,
    multi_memory_attention: true,
    hds_query_topk: false,
    activation_i8: false,
    simple_rotor_net: false
  ]

  defp op(find), do: Enum.find(Sidewinder.Ops.all(), find)

  # All that a case has outputs for: of the op, and of its gradient.
  defp check(name, gradients, where, place \\ & &1) do
    forward = op(&(&1.name == to_string(name)))
    backward = if gradients, do: op(&(&1.backward_of == forward.name))

    for golden <- Golden.cases(name) do
      options = options(forward, golden)
      run = &Kernel.run(String.to_atom(&1.name), &2, options, where)
      got = run.(forward, inputs(forward, golden, %{}, place))
      of_backward = backward && run.(backward, inputs(backward, golden, got, place))
      all_close(Map.merge(got, of_backward || %{}), golden, where)
    end
  end

  defp check_composed(name, where, place \\ & &1) do
    for golden <- Golden.cases(name) do
      inputs = Map.new(golden.inputs, fn {name, tensor} -> {name, place.(tensor)} end)
      all_close(Composed.outputs(name, inputs, golden.attrs, where, place), golden, where)
    end
  end

  defp all_close(got, golden, where) do
    assert Map.keys(golden.outputs) -- Map.keys(got) == []

    for {output, %{tensor: expected, rtol: rtol, atol: atol}} <- golden.outputs do
      label = "#{golden.name} #{output} #{inspect(where)}"
      Golden.assert_close(got[output], expected, rtol, atol, label)
    end
  end

  defp options(op, golden) do
    asked =
      for %{name: name} <- op.options,
          name in ["return_state", "return_derivative"],
          into: %{},
          do: {String.to_atom(name), true}

    states = if golden.outputs["states"], do: %{return_states: true}, else: %{}
    golden.attrs |> Map.merge(asked) |> Map.merge(states)
  end

  # What the gradient takes beside the op's inputs and cotangents is what the op gave.
  defp inputs(op, golden, outputs, place) do
    for %{name: name} = slot <- op.inputs,
        tensor = golden.inputs[name] || (not slot.optional && outputs[name]),
        do: {name, place.(tensor)}
  end

  for {op, gradients} <- @ops do
    test "#{op} agrees at every level" do
      for where <- [[backend: :cpu] | Calls.levels()],
          do: check(unquote(op), unquote(gradients), where)
    end

    @tag :cuda
    test "#{op} agrees on CUDA, from the host and resident" do
      check(unquote(op), unquote(gradients), backend: {:cuda, 0})
      check(unquote(op), unquote(gradients), [], &Tensor.to_device(&1, {:cuda, 0}))
    end
  end

  for name <- Composed.names() do
    test "#{name} composed of ops agrees at every level" do
      for where <- [[backend: :cpu] | Calls.levels()], do: check_composed(unquote(name), where)
    end

    @tag :cuda
    test "#{name} composed of ops agrees on CUDA, from the host and resident" do
      check_composed(unquote(name), backend: {:cuda, 0})
      check_composed(unquote(name), [], &Tensor.to_device(&1, {:cuda, 0}))
    end
  end

  test "what has golden values is an op or composed of ops" do
    ops = Keyword.keys(@ops)
    assert Enum.sort(Golden.names()) == Enum.sort(ops ++ Composed.names())
    for name <- Composed.names(), do: refute(op(&(&1.name == to_string(name))))
  end

  defp golden(op, name), do: Enum.find(Golden.cases(op), &(&1.name == name))

  defp close(got, golden) do
    for {name, tensor} <- got do
      %{tensor: expected, rtol: rtol, atol: atol} = golden.outputs[to_string(name)]
      Golden.assert_close(tensor, expected, rtol, atol, name)
    end
  end

  test "gradients of the scans by their functions" do
    %{inputs: i, attrs: attrs} = golden = golden(:selective_scan, "small")

    options =
      Map.to_list(attrs) ++
        [d: i["D"], z: i["z"], dt_bias: i["dt_bias"], initial_state: i["initial_state"]] ++
        [dlast_state: i["dlast_state"]]

    got =
      Scan.selective_scan_backward(i["x"], i["dt"], i["A"], i["B"], i["C"], i["dy"], options)

    assert map_size(got) == 9
    close(got, golden)

    %{inputs: i} = golden = golden(:linear_scan, "l8")

    {h, _last_state} =
      Scan.linear_scan(i["a"], i["b"], initial_state: i["initial_state"], return_state: true)

    close([h: h], golden)
    got = Scan.linear_scan_backward(i["a"], h, i["dh"], initial_state: i["initial_state"])
    assert map_size(got) == 3
    close(got, golden)
  end

  test "the convolution, the layer and the block by their functions" do
    %{inputs: i} = golden = golden(:causal_conv1d, "c5")
    options = [bias: i["bias"], initial_state: i["initial_state"], activation: :silu]
    {y, last_state} = Conv.causal_conv1d(i["x"], i["w"], [{:return_state, true} | options])
    close([y: y, last_state: last_state], golden)
    close([y: Conv.causal_conv1d(i["x"], i["w"], options)], golden)
    got = Conv.causal_conv1d_backward(i["x"], i["w"], i["dy"], options)
    assert map_size(got) == 4
    close(got, golden)

    %{inputs: i} = golden = golden(:linear, "m13k19n23")
    close([y: NN.linear(i["x"], i["w"], bias: i["b"])], golden)
    got = NN.linear_backward(i["x"], i["w"], i["dy"], bias: i["b"])
    assert map_size(got) == 3
    close(got, golden)

    %{inputs: i} = golden = golden(:mamba_block, "step")
    states = [conv_state: i["conv_state"], ssm_state: i["ssm_state"]]
    weights = Map.drop(i, ~w(x dy conv_state ssm_state))
    {y, new} = Mamba.mamba_block(i["x"], weights, [{:return_state, true} | states])
    close([{:y, y} | Map.to_list(new)], golden)
    close([y: Mamba.mamba_block(i["x"], weights, states)], golden)
    got = Mamba.mamba_block_backward(i["x"], weights, i["dy"], states)
    assert map_size(got) == 12
    close(got, golden)
  end

  test "activations, norms and products by their functions" do
    for f <- [:sigmoid, :silu, :gelu_tanh, :gelu_erf, :softplus] do
      %{inputs: %{"x" => x}} = golden = golden(:activations, to_string(f))
      close([y: apply(NN, f, [x])], golden)
      ones = Tensor.from_list(List.duplicate(1, Tensor.elements(x.shape)), :f32, x.shape)
      close([dydx: NN.activation_backward(f, x, ones).dx], golden)
    end

    %{inputs: i} = golden = golden(:rms_norm, "outside_17_normal")
    close([y: NN.rms_norm(i["x"], i["w"], eps_mode: :outside)], golden)
    close(NN.rms_norm_backward(i["x"], i["w"], i["dy"], eps_mode: :outside), golden)

    %{inputs: i} = golden = golden(:layer_norm, "17_normal")
    close(NN.layer_norm(i["x"], i["w"], i["b"], return_statistics: true), golden)
    close(NN.layer_norm_backward(i["x"], i["w"], i["b"], i["dy"]), golden)

    %{inputs: i} = golden = golden(:layer_norm_gelu, "erf_17_normal")
    close([y: NN.layer_norm_gelu(i["x"], i["w"], i["b"], gelu: :erf)], golden)
    got = NN.layer_norm_gelu_backward(i["x"], i["w"], i["b"], i["dy"], gelu: :erf)
    close(got, golden)

    %{inputs: i} = golden = golden(:matmul, "m13k19n23")
    close([c: NN.matmul(i["a"], i["b"])], golden)

    %{inputs: i} = golden = golden(:swiglu_mlp, "b2l3d5h7")
    weights = Map.take(i, ~w(wg wu wd))
    close([y: NN.swiglu_mlp(i["x"], weights)], golden)
    close(NN.swiglu_mlp_backward(i["x"], weights, i["dy"]), golden)
  end

  test "attention, rotation and the block by their functions" do
    %{inputs: i} = golden = golden(:attention, "bias_key")
    options = [causal: true, q_offset: 64, bias: i["bias"]]
    {y, lse} = Attention.attention(i["q"], i["k"], i["v"], [{:return_lse, true} | options])
    close([y: y, lse: lse], golden)
    gradients = Attention.attention_backward(i["q"], i["k"], i["v"], y, lse, i["dy"], options)
    assert map_size(gradients) == 4
    close(gradients, golden)

    %{inputs: i} = golden = golden(:rope, "int6")
    options = [pairing: :interleaved, first_position: 7, theta: 10000]
    close([y: Attention.rope(i["x"], options)], golden)
    close(Attention.rope_backward(i["x"], i["dy"], options), golden)

    %{inputs: i} = golden = golden(:transformer_block, "t2")
    weights = Map.drop(i, ~w(x dy))
    options = [heads: 4, causal: true, rope_theta: 10000]
    close([y: Attention.transformer_block(i["x"], weights, options)], golden)
    gradients = Attention.transformer_block_backward(i["x"], weights, i["dy"], options)
    assert map_size(gradients) == 11
    close(gradients, golden)
  end

  test "self-attention is what the op makes of projections" do
    %{inputs: i} = golden(:transformer_block, "t2")
    weights = Map.take(i, ~w(wqkv wo bo))
    options = [heads: 4, causal: true]
    y = Attention.mha(i["x"], weights, options)
    projected = NN.linear(i["x"], i["wqkv"])
    parts = for part <- 0..2, do: part(projected, part, 16)
    [q, k, v] = for t <- parts, do: %{t | shape: {1, 9, 4, 4}}
    a = Attention.attention(q, k, v, causal: true, layout: :heads_last)
    expected = NN.linear(%{a | shape: {1, 9, 16}}, i["wo"], bias: i["bo"])
    Golden.assert_close(y, expected, 1.0e-5, 1.0e-6, "mha")
    assert map_size(Attention.mha_backward(i["x"], weights, i["dy"], options)) == 4
  end

  # Some columns of {1, 9, 48}.
  defp part(tensor, part, width) do
    rows = tensor |> Tensor.to_list() |> Enum.chunk_every(3 * width)
    columns = for row <- rows, do: Enum.slice(row, part * width, width)
    Tensor.from_list(List.flatten(columns), :f32, {1, 9, width})
  end

  test "forms of GELU, and what is none" do
    x = Tensor.from_list([0.5], :f32, {1})
    assert NN.gelu(x) == NN.gelu_tanh(x)
    assert NN.gelu(x, form: :erf) == NN.gelu_erf(x)

    assert %Error{kind: :option, argument: "form", op: "gelu"} =
             catch_error(NN.gelu(x, form: :exact))
  end

  test "weights that are no map, and sizes that do not agree, are refused" do
    %{inputs: i} = golden(:mamba_block, "b0")
    weights = Map.drop(i, ~w(x dy))

    assert %Error{kind: :argument, argument: "weights", op: "mamba_block"} =
             catch_error(Mamba.mamba_block(i["x"], i["x"]))

    assert %Error{kind: :option, argument: "d_state"} =
             catch_error(Mamba.mamba_block(i["x"], weights, d_state: 16))

    assert %Error{kind: :argument, argument: "in_proj"} =
             catch_error(Mamba.mamba_block(i["x"], Map.delete(weights, "in_proj")))

    assert %Error{kind: :option, op: "causal_conv1d"} =
             catch_error(Conv.causal_conv1d(i["x"], i["conv_w"], activation: :gelu))
  end

  test "selective_scan/6 gives what its options ask for" do
    %{inputs: i, attrs: attrs, outputs: outputs} =
      Enum.find(Golden.cases(:selective_scan), &(&1.name == "small"))

    options =
      Map.to_list(attrs) ++
        [d: i["D"], z: i["z"], dt_bias: i["dt_bias"], initial_state: i["initial_state"]]

    scan = &Scan.selective_scan(i["x"], i["dt"], i["A"], i["B"], i["C"], options ++ &1)
    close = &Golden.assert_close(&1, outputs[&2].tensor, outputs[&2].rtol, outputs[&2].atol, &2)

    close.(scan.([]), "y")
    {y, last_state} = scan.(return_state: true)
    close.(y, "y")
    close.(last_state, "last_state")
    all = scan.(return_states: true)
    close.(all.y, "y")
    close.(all.last_state, "last_state")
    close.(all.states, "states")
  end

  test "selective_state_update/7 returns output and state" do
    %{inputs: i, outputs: outputs} =
      Enum.find(Golden.cases(:selective_state_update), &(&1.name == "s2"))

    options = [dt_softplus: true, d: i["D"], z: i["z"], dt_bias: i["dt_bias"]]

    {y, state} =
      Scan.selective_state_update(
        i["initial_state"],
        i["x"],
        i["dt"],
        i["A"],
        i["B"],
        i["C"],
        options
      )

    Golden.assert_close(y, outputs["y"].tensor, outputs["y"].rtol, outputs["y"].atol, "y")

    Golden.assert_close(
      state,
      outputs["last_state"].tensor,
      outputs["last_state"].rtol,
      outputs["last_state"].atol,
      "last_state"
    )
  end
end

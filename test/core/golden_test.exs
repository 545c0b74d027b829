defmodule Sidewinder.GoldenTest do
  use ExUnit.Case, async: true

  # Long sequences, at every level.
  @moduletag timeout: 300_000

  alias Sidewinder.{Calls, Error, Golden, Kernel, Native, Tensor}
  alias Sidewinder.Kernel.{Conv, Mamba, NN, Scan}

  # Every op with golden values, and whether they have gradients.
  @ops [
    selective_scan: true,
    selective_state_update: false,
    linear_scan: true,
    causal_conv1d: true,
    linear: true,
    mamba_block: true,
    attention: true
  ]

  defp op(find), do: Enum.find(Error.unwrap!(Native.op_list()), find)

  # All that a case has outputs for: of the op, and of its gradient.
  defp check(name, gradients, where, place \\ & &1) do
    forward = op(&(&1.name == to_string(name)))
    backward = op(&(&1.backward_of == forward.name))
    assert gradients == (backward != nil)

    for golden <- Golden.cases(name) do
      options = options(forward, golden)
      run = &Kernel.run(String.to_atom(&1.name), inputs(&1, golden, place), options, where)
      got = Map.merge(run.(forward), if(backward, do: run.(backward), else: %{}))
      assert Enum.sort(Map.keys(golden.outputs)) -- Map.keys(got) == []

      for {output, %{tensor: expected, rtol: rtol, atol: atol}} <- golden.outputs do
        label = "#{golden.name} #{output} #{inspect(where)}"
        Golden.assert_close(got[output], expected, rtol, atol, label)
      end
    end
  end

  defp options(op, golden) do
    asked = for %{name: "return_state"} <- op.options, into: %{}, do: {:return_state, true}
    states = if golden.outputs["states"], do: %{return_states: true}, else: %{}
    golden.attrs |> Map.merge(asked) |> Map.merge(states)
  end

  # What the gradient takes beside the op's inputs and cotangents is what the op gave.
  defp inputs(op, golden, place) do
    for %{name: name} = slot <- op.inputs,
        tensor = golden.inputs[name] || given(slot, golden),
        do: {name, place.(tensor)}
  end

  defp given(%{optional: true}, _golden), do: nil
  defp given(%{name: name}, golden), do: Tensor.cast(golden.outputs[name].tensor, :f32)

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
        [d: i["D"], z: i["z"], dt_bias: i["dt_bias"], initial_state: i["h0"]] ++
        [dlast_state: i["dlast_state"]]

    got =
      Scan.selective_scan_backward(i["x"], i["dt"], i["A"], i["B"], i["C"], i["dy"], options)

    assert map_size(got) == 9
    close(got, golden)

    %{inputs: i} = golden = golden(:linear_scan, "l8")

    {h, _last_state} =
      Scan.linear_scan(i["a"], i["b"], initial_state: i["h0"], return_state: true)

    close([h: h], golden)
    got = Scan.linear_scan_backward(i["a"], h, i["dh"], initial_state: i["h0"])
    assert map_size(got) == 3
    close(got, golden)
  end

  test "the convolution, the layer and the block by their functions" do
    %{inputs: i} = golden = golden(:causal_conv1d, "c5")
    options = [bias: i["bias"], initial_state: i["init_state"], activation: :silu]
    {y, final_state} = Conv.causal_conv1d(i["x"], i["w"], [{:return_state, true} | options])
    close([y: y, final_state: final_state], golden)
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
      Map.to_list(attrs) ++ [d: i["D"], z: i["z"], dt_bias: i["dt_bias"], initial_state: i["h0"]]

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
      Scan.selective_state_update(i["state"], i["x"], i["dt"], i["A"], i["B"], i["C"], options)

    Golden.assert_close(y, outputs["y"].tensor, outputs["y"].rtol, outputs["y"].atol, "y")

    Golden.assert_close(
      state,
      outputs["state"].tensor,
      outputs["state"].rtol,
      outputs["state"].atol,
      "state"
    )
  end
end

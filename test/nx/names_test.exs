defmodule Sidewinder.NamesTest do
  use ExUnit.Case, async: true

  alias Sidewinder.NxTest.Ops
  import Sidewinder.NxTest.Ops, only: [problem: 2, run: 3]
  import Sidewinder.NxTest.Scans, only: [assert_close: 3, random: 2]

  # Axes that are the same one, by the inputs that have them.
  @same %{
    "selective_scan" => [
      [x: 2, dt: 2, A: 0, D: 0, z: 2, dt_bias: 0, initial_state: 1],
      [A: 1, B: 2, C: 2, initial_state: 2],
      [x: 1, dt: 1, B: 1, C: 1],
      [x: 0, B: 0, initial_state: 0]
    ],
    "ssd" => [
      [x: 2, dt: 2, A: 0, D: 0, z: 2, dt_bias: 0, initial_state: 1],
      [x: 3, z: 3, initial_state: 2],
      [B: 2, C: 2],
      [B: 3, C: 3, initial_state: 3],
      [x: 1, dt: 1, B: 1, C: 1],
      [x: 0, B: 0, initial_state: 0]
    ],
    "gated_delta_rule" => [
      [q: 2, k: 2],
      [q: 3, k: 3, initial_state: 2],
      [v: 2, beta: 2, g: 2, initial_state: 1],
      [v: 3, initial_state: 3],
      [q: 1, k: 1, v: 1, beta: 1, g: 1],
      [q: 0, v: 0, initial_state: 0]
    ],
    "linear_attention" => [
      [q: 2, k: 2],
      [q: 3, k: 3, initial_state: 2, initial_z: 2],
      [v: 2, g: 2, initial_state: 1, initial_z: 1],
      [v: 3, initial_state: 3],
      [q: 1, k: 1, v: 1, g: 1],
      [q: 0, v: 0, initial_state: 0, initial_z: 0]
    ],
    "selective_state_update" => [
      [x: 1, initial_state: 1, dt: 1, A: 0],
      [initial_state: 2, A: 1, B: 1],
      [x: 0, C: 0]
    ],
    "linear_scan" => [
      [a: 0, b: 0, initial_state: 0],
      [a: 1, b: 1],
      [a: 2, b: 2, initial_state: 1]
    ],
    "exp_product_scan" => [[gamma: 1, initial_state: 1], [gamma: 3, initial_state: 2]],
    "cumprod_scan" => [[gamma: 0, initial_state: 0]],
    "cumsum" => [[x: 3, initial_state: 2]],
    "causal_conv1d" => [[x: 2, w: 0, bias: 0, initial_state: 2], [x: 0, initial_state: 0]],
    "causal_conv1d_update" => [[x: 1, initial_state: 2, w: 0]],
    "mamba_block" => [
      [x: 0, conv_state: 0, ssm_state: 0],
      [conv_w: 0, A_log: 0, D: 0, conv_b: 0, dt_b: 0, conv_state: 2, ssm_state: 1],
      [A_log: 1, ssm_state: 2]
    ],
    "layer_norm" => [[x: 2, w: 0, b: 0]],
    "linear" => [[w: 0, b: 0]],
    "attention" => [
      [q: 0, k: 0, v: 0],
      [k: 1, v: 1],
      [k: 2, v: 2, mask: 2],
      [q: 2, mask: 1, bias: 2]
    ],
    "decode" => [[q: 0, k: 0, keys: 0, values: 0], [q: 2, k: 2, v: 2], [k: 1, keys: 1]],
    "mha" => [[x: 0, mask: 0]],
    "mdi_update" => for(i <- 0..2, do: [z: i, h_old: i, gate: i, gamma: i]),
    "mdi_gamma" => [[z: 1, context: 1], [z: 2, context: 2]],
    "mdi" => [[z: 0, h_prev: 0, context: 0]],
    "block_recurrence" => [[z: 1, gamma: 1], [z: 2, gamma: 2, b_gate: 0, initial_state: 1]],
    "mmrec_block" => [[x: 2, n1: 0, k_mem: 2, initial_state: 1], [k_mem: 1, v_mem: 1]],
    "hds_construct" => [[k: 1, v: 1], [k: 2, v: 2]],
    "multi_memory_attention" => [[h: 1, q_in: 1], [k_mem: 1, v_mem: 1]]
  }

  # With the last axes of rows and of their weights.
  defp same do
    for op <- Ops.of_rows(), into: @same do
      {op.name, [for(slot <- op.inputs, do: {:"#{slot.name}", last_axis(slot)})]}
    end
  end

  defp last_axis(%{shape: "(D)"}), do: 0
  defp last_axis(%{shape: "(..., D)"}), do: 2

  # Axes that products sum over, and those of the two sides of a square.
  @apart %{
    "linear" => [[x: 2, w: 1]],
    "matmul" => [[a: 1, b: 0]],
    "swiglu_mlp" => [[x: 2, wg: 1, wu: 1, wd: 0], [wg: 0, wu: 0, wd: 1]],
    "mha" => [[x: 2, wqkv: 1, wo: 0]],
    "transformer_block" => [[x: 2, wqkv: 1, wo: 1]],
    "mamba_block" => [[x: 2, in_proj: 1, out_proj: 0]],
    "mdi_gamma" => [[z: 2, wg1: 1, wc1: 1], [wg1: 0, wc1: 0]],
    "block_recurrence" => [[z: 2, w_gate: 0], [z: 2, w_gate: 1]],
    "mmrec_block" => [[x: 2, wq: 1, wf1: 1], [wf1: 0, wf2: 1]]
  }

  defp calls(groups) do
    for {op, groups} <- groups, [{first, axis} | others] <- groups, other <- others do
      {_, inputs, _, opts} = problem(op, {2, 6, 4, 3})
      {op, {"#{first}", axis}, {"#{elem(other, 0)}", elem(other, 1)}, inputs, opts}
    end
  end

  defp name(inputs, {input, axis}, name) do
    Map.update!(inputs, input, fn t ->
      assert t, input
      Nx.rename(t, List.replace_at(t.names, axis, name))
    end)
  end

  test "inputs that call the same axis differently raise, as in Nx.add/2" do
    for {op, {first, _} = one, {second, _} = other, inputs, opts} <- calls(same()) do
      wrong = inputs |> name(one, :left) |> name(other, :right)
      error = assert_raise Sidewinder.Error, fn -> run(op, wrong, opts) end
      assert %{kind: :shape, op: ^op, argument: argument, expected: expected, got: got} = error
      assert argument in [first, second], op
      assert expected =~ "an axis called" and got in [":left", ":right"]
      assert error.hint =~ "Nx.rename/2"
    end
  end

  test "names that agree, and those of one input alone, are taken" do
    for {op, one, other, inputs, opts} <- calls(same()), backend <- [:cpu, :nx] do
      opts = [backend: backend] ++ opts
      expected = run(op, inputs, opts)
      both = inputs |> name(one, :same) |> name(other, :same)
      for given <- [both, name(inputs, other, :only)], do: same!(run(op, given, opts), expected)
    end
  end

  test "axes that a product sums over may be called differently, as in Nx.dot/2" do
    for {op, one, other, inputs, opts} <- calls(@apart) do
      given = inputs |> name(one, :left) |> name(other, :right)
      same!(run(op, given, opts), run(op, inputs, opts))
    end
  end

  defp same!(outputs, expected) do
    for {name, t} <- expected do
      plain = Nx.rename(outputs[name], List.duplicate(nil, Nx.rank(t)))
      assert_close(plain, Nx.rename(t, List.duplicate(nil, Nx.rank(t))), rtol: 0)
    end
  end

  test "an axis of any rank has one name" do
    for shape <- [{3}, {2, 3}, {2, 2, 2, 3}] do
      x = random(1, shape)
      names = for i <- 1..tuple_size(shape), do: :"axis_#{i}"
      named = Nx.rename(x, names)
      assert Sidewinder.mdi_update(named, x, x, x).names == names
      other = Nx.rename(x, List.replace_at(names, 0, :other))
      assert_raise Sidewinder.Error, fn -> Sidewinder.mdi_update(named, x, other, x) end
    end
  end

  test "they raise in a graph and through a gradient, and in all that is made of other functions" do
    x = random(1, {1, 2, 3})
    [left, right] = for name <- [:left, :right], do: Nx.rename(x, [nil, nil, name])
    scan = &Sidewinder.linear_scan(left, &1)
    assert_raise Sidewinder.Error, fn -> Nx.Defn.jit_apply(scan, [right]) end
    assert_raise Sidewinder.Error, fn -> Nx.Defn.grad(right, &Nx.sum(scan.(&1))) end
    a = random(2, {3, 3})

    for call <- [
          &Sidewinder.scan(left, &1, a, x, x),
          &Sidewinder.scan_with_states(left, &1, a, x, x),
          &Sidewinder.Reference.selective_scan(left, &1, a, x, x),
          &Sidewinder.Reference.linear_scan(left, &1),
          &Sidewinder.selective_scan_backward(&1, left, x, a, x, x),
          &Sidewinder.backward(&1, left, nil, x, a, x, x),
          &Sidewinder.hds_query_topk(x, left, &1, levels: 1)
        ],
        do: assert_raise(Sidewinder.Error, fn -> call.(right) end)
  end

  test "every op of several sequences is here" do
    alone = Ops.activations() ++ ~w(rope sinusoidal_positions logcumsumexp reverse_cumsum)
    known = Map.keys(same()) ++ Map.keys(@apart) ++ alone
    assert Ops.ops() -- known == []
  end
end

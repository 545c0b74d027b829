defmodule Sidewinder.GoldenTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Golden, Kernel, Tensor}
  alias Sidewinder.Kernel.Scan

  @outputs %{
    selective_scan: ["y", "last_state", "states"],
    selective_state_update: ["y", "state"]
  }

  defp check(op, where, place \\ & &1) do
    for golden <- Golden.cases(op) do
      {inputs, options} = call(op, golden)

      got =
        Kernel.run(op, for({name, tensor} <- inputs, do: {name, place.(tensor)}), options, where)

      for {name, %{tensor: expected, rtol: rtol, atol: atol}} <- golden.outputs,
          name in @outputs[op] do
        Golden.assert_close(
          got[name],
          expected,
          rtol,
          atol,
          "#{golden.name} #{name} #{inspect(where)}"
        )
      end
    end
  end

  defp call(:selective_scan, golden) do
    inputs =
      for name <- ~w(x dt A B C D z dt_bias h0), tensor = golden.inputs[name], do: {name, tensor}

    {inputs,
     Map.merge(golden.attrs, %{return_state: true, return_states: golden.outputs["states"] != nil})}
  end

  defp call(:selective_state_update, golden) do
    inputs =
      for name <- ~w(x state dt A B C D z dt_bias),
          tensor = golden.inputs[name],
          do: {name, tensor}

    {inputs, golden.attrs}
  end

  for op <- [:selective_scan, :selective_state_update] do
    test "#{op} agrees at every level" do
      for where <- [[backend: :cpu] | Calls.levels()], do: check(unquote(op), where)
    end

    @tag :cuda
    test "#{op} agrees on CUDA, from the host and resident" do
      check(unquote(op), backend: {:cuda, 0})
      check(unquote(op), [], &Tensor.to_device(&1, {:cuda, 0}))
    end
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

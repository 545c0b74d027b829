defmodule Sidewinder.Op.DeclaredTest do
  use ExUnit.Case, async: true

  alias Sidewinder.Op.Declared

  doctest Declared

  test "sums, first axes, alternatives, and axes that may be 1" do
    %{inputs: inputs, optional: optional} = Declared.table(:mamba_block)
    assert inputs["x_proj"] == {:storage, [[{:sum, [:r, :n, :n], 0}, :d]]}
    assert inputs["conv_state"] == {:storage, [[:b, {:sum, [:w], -1}, :d]]}
    assert :conv_b in optional

    %{inputs: inputs} = Declared.table(:hds_query_topk)
    assert inputs["k"] == {:storage, [[:b, :m, :d], [1, :m, :d]]}
    %{inputs: inputs} = Declared.table(:attention)
    assert inputs["mask"] == {:mask, [{:repeated, [:b, :h, :l, :m]}]}
    %{inputs: inputs} = Declared.table(:selective_scan)
    assert inputs["B"] == {:storage, [[:b, :l, :n], [:b, :l, :g, :n], [:d, :n]]}
  end

  test "what comes in a map is no option, and one capital letter is a small one" do
    params = %{required: ~w(waq wao), optional: ~w(baq bao)}
    assert Declared.table(:multi_memory_attention, params: params).optional == [:q_in]

    assert Declared.table(:selective_scan).optional ==
             [{:d, "D"}, :z, :dt_bias, :initial_state]
  end

  test "what only the kernel has is left out, and a flag asks for all outputs but the first" do
    table = Declared.table(:layer_norm, without: ~w(b rstd), rest: :return_mean)
    assert Map.keys(table.inputs) == ["w", "x"]
    assert table.options == [eps: :not_negative, return_mean: {:here, :flag}]
    assert [{:y, _, _, :always}, {:mean, :wide, [:...], :return_mean}] = table.outputs
  end
end

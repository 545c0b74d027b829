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
    assert inputs["cu_seqlens"] == {:i32, [[{:after, :s}]]}
  end

  test "what comes in a map is no option, and one capital letter is a small one" do
    %{optional: optional, params: params} = Declared.table(:mamba_block, composed: true)
    assert optional == [:conv_state, :ssm_state]
    assert params.optional == ~w(conv_b in_proj_b out_proj_b)
    # The width of x_proj is a sum of what the others tell.
    assert List.last(params.required) == "x_proj"

    assert Declared.table(:selective_scan).optional ==
             [{:d, "D"}, :z, :dt_bias, :initial_state, :cu_seqlens]

    assert Declared.table(:linear).optional == [bias: "b"]
  end

  test "letters stand for what is said of their axes" do
    axes = [k: {:divides, :h, :k}, m: :rows]
    %{inputs: inputs, outputs: outputs} = Declared.table(:attention, axes: axes, rest: :lse?)
    keys = {:divides, :h, :k}

    assert inputs["k"] ==
             {:storage,
              [%{heads_first: [:b, keys, :rows, :w], heads_last: [:b, :rows, keys, :w]}]}

    assert inputs["mask"] == {:mask, [{:repeated, [:b, :h, :l, :rows]}]}
    assert [{:y, :storage, %{heads_last: [:b, :l, :h, :v]}, :always}, lse] = outputs
    assert lse == {:lse, :wide, [:b, :h, :l], :lse?}
    # A cache lies in one way.
    assert Declared.table(:decode).inputs["keys"] == {:storage, [[:b, :k, :c, :w]]}
  end

  test "outputs that only Nx declares, and those that an option counts" do
    outputs = [context: "(B, L, D)", slots: {"(B, L, C)", "index"}]

    assert Declared.table(:hds_query_topk, outputs: outputs, axes: [c: 4]).outputs ==
             [{:context, :storage, [:b, :l, :d], :always}, {:slots, :index, [:b, :l, 4], :always}]

    assert [{:k1, :storage, [:b, :m1, :d], {:more, :levels, 1}} | _] =
             Declared.table(:hds_construct, numbered: :levels).outputs
  end

  test "fields are the options with their defaults" do
    table = Declared.table(:layer_norm, rest: :return_statistics)

    assert Declared.fields(table, eps: 0.5, algorithm: :plain) ==
             [eps: 0.5, return_statistics: false, algorithm: :plain, inputs: [], target: []]
  end

  test "what only the kernel has is left out, and a flag asks for all outputs but the first" do
    table = Declared.table(:layer_norm, without: ~w(b rstd), rest: :return_mean)
    assert Map.keys(table.inputs) == ["w", "x"]
    assert table.options == [eps: :not_negative, return_mean: {:here, :flag}]
    assert [{:y, _, _, :always}, {:mean, :wide, [:...], :return_mean}] = table.outputs
  end
end

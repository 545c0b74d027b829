defmodule Sidewinder.OpsTest do
  use ExUnit.Case, async: true

  alias Sidewinder.Ops

  defp called(name), do: Ops.all() |> Ops.find!(name) |> Ops.called()

  test "optional inputs are options of their names in lower case, with few exceptions" do
    assert {"D", {:d, "D"}} in called(:selective_scan).optional
    assert {"b", {:bias, "b"}} in called(:linear).optional
    assert [{_, {:wm, "w_mix"}}, {_, {:bm, "b_mix"}}, _] = called(:block_recurrence).optional

    assert [{"initial_state", :initial_state}, {"cu_seqlens", :cu_seqlens}] =
             called(:linear_scan).optional
  end

  test "gradients have the options of their ops but those that ask for outputs" do
    assert called(:linear_scan).options == [:return_state]
    assert called(:linear_scan_backward).options == []
    assert called(:selective_scan_backward).options == [:dt_softplus, :dt_clamp, :clamp_grad]
    assert :checkpoint in called(:mmrec_block_backward).options
  end

  test "weights are the inputs without first axes" do
    assert called(:mdi_gamma).weights == ~w(wg1 bg1 wg2 bg2 wc1 bc1 wc2 bc2)
    assert called(:multi_memory_attention).weights == ~w(waq baq wao bao)
    assert "mask" not in called(:mha).weights
  end

  test "no two options of an op share a name" do
    for op <- Ops.all() do
      %{optional: optional, options: options} = Ops.called(op)
      keys = for {_name, option} <- optional, do: with({key, _name} <- option, do: key)
      assert Enum.uniq(keys ++ options) == keys ++ options
    end
  end
end

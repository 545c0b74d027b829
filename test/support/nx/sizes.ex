defmodule Sidewinder.NxTest.Sizes do
  @moduledoc "Sizes and ranges of a kernel's tensors in tests, where the defaults do not fit."

  @cumulative ~w(exp_product_scan cumprod_scan logcumsumexp cumsum reverse_cumsum)

  @doc "The sizes of the letters of a kernel's table, by `{b, l, d, n}`."
  def letters(op, {b, l, d, n} = sizes),
    do: Map.merge(%{...: [b, l], b: b, l: l, d: d, n: n}, own(op, sizes))

  defp own("linear_scan", {_, _, d, _}), do: %{k: d}
  defp own(op, {_, _, d, n}) when op in @cumulative, do: %{h: n, w: d}
  defp own("ssd", {_, _, d, _}), do: %{h: d, p: 2, g: 1}

  defp own(op, {_, _, d, n}) when op in ~w(gated_delta_rule linear_attention),
    do: %{h: d, k: n, v: 2, g: 1}

  defp own("causal_conv1d" <> _, {_, _, _, n}), do: %{w: n + 1}
  defp own("mamba_block", {_, _, d, _}), do: %{m: d, d: 2 * d, r: 2, w: 4}
  defp own(op, {b, l, d, _}) when op in ~w(activations mdi_update), do: %{...: [b, l, d]}
  defp own("linear", {_, _, d, n}), do: %{i: d, o: n}
  defp own("matmul", {_, l, d, _}), do: %{b: l, k: d}
  defp own("rope", {_, _, d, n}), do: %{h: d, w: 2 * n}

  defp own(op, {_, l, d, n}) when op in ~w(attention decode),
    do: %{h: 4, k: 2, w: d, v: n, m: l + 1, c: l + 2}

  defp own("swiglu_mlp", {_, _, _, n}), do: %{f: n}
  defp own("mha", {_, _, d, _}), do: %{d: 4 * d}
  defp own("transformer_block", {_, _, _, n}), do: %{d: 4, f: n}
  defp own("mdi" <> _, {_, _, _, n}), do: %{i: n}
  defp own("mmrec_block", {_, _, _, n}), do: %{d: 4, f: n + 2, i: n, m: 5}
  defp own("hds_construct", {_, l, _, _}), do: %{m: l + 2}
  defp own("multi_memory_attention", {_, l, d, _}), do: %{d: 2 * d, s: l + 1}
  defp own(_op, _sizes), do: %{}

  @doc "The shape of a tensor that repeats to that of the table, or nil."
  def shape(op, "mask", {_, l, _, _}) when op in ~w(attention decode), do: {1, l, l + 1}
  def shape(_op, "mask", {b, l, _, _}), do: {b, 1, l, l}
  def shape("attention", "bias", {b, l, _, _}), do: {b, 1, l, 1}
  def shape("decode", "bias", {b, l, _, _}), do: {b, 1, 1, l + 1}

  # One memory for the whole batch, where the batch is larger than one.
  def shape("multi_memory_attention", memory, {_, l, d, _}) when memory in ~w(k_mem v_mem),
    do: {1, l + 1, 2 * d}

  def shape(_op, _name, _sizes), do: nil

  @half {-0.5, 0.5}
  @scales {0.5, 1.5}
  @ranges %{
    "dt" => {0.001, 0.5},
    "dt_bias" => @half,
    "dt_b" => {-2.0, 0.0},
    "A" => {-2.0, -0.1},
    "wqkv" => @half,
    "wo" => @half
  }
  @of_mamba ~w(conv_w x_proj dt_w conv_b in_proj_b out_proj out_proj_b)
  @of_mmrec ~w(mdi mdi_gamma mmrec_block block_recurrence multi_memory_attention)

  @doc "The bounds of a tensor's numbers."
  def range("exp_product_scan", "gamma"), do: {0.1, 0.9}
  def range("block_recurrence", "gamma"), do: {0.0, 0.6}
  def range(op, "g") when op in ~w(gated_delta_rule linear_attention), do: {-0.5, 0.0}
  def range("gated_delta_rule", "beta"), do: {0.1, 1.0}
  def range("activations", "x"), do: {-3.0, 3.0}
  def range("mamba_block", name) when name in @of_mamba, do: @half
  def range(op, "w") when op not in ~w(linear causal_conv1d causal_conv1d_update), do: @scales
  def range("transformer_block", "ln" <> _), do: @scales
  def range("mmrec_block", name) when name in ~w(n1 n2), do: @scales
  def range("multi_memory_attention", name) when name in ~w(baq bao), do: {-1.0, 1.0}
  def range(op, "w" <> _) when op in @of_mmrec, do: @half
  def range(op, "b" <> _) when op in @of_mmrec, do: @half
  def range(_op, name), do: Map.get(@ranges, name, {-1.0, 1.0})
end

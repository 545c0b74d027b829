defmodule Sidewinder.Reference.MambaBlock do
  @moduledoc false
  # The Mamba block, composed of products of matrices and other ops.

  alias Sidewinder.{Block, Op}

  def body(op, inputs) do
    [inner, rank] = Tuple.to_list(inputs["dt_w"].shape)
    state = Nx.axis_size(inputs["A_log"], 1)

    [u, z] =
      inputs["x"] |> linear(inputs["in_proj"], inputs["in_proj_b"]) |> split([inner, inner])

    {c, conv_state} = convolve(op, u, inputs)
    [delta, b_t, c_t] = c |> linear(inputs["x_proj"], nil) |> split([rank, state, state])
    {s, ssm_state} = scan(op, [c, linear(delta, inputs["dt_w"], nil), b_t, c_t, z], inputs)

    y = linear(s, inputs["out_proj"], inputs["out_proj_b"])
    [y: y, conv_state: conv_state, ssm_state: ssm_state]
  end

  defp convolve(op, u, %{"conv_w" => w} = inputs) do
    tensors = [
      {"x", u},
      {"w", w},
      {"bias", inputs["conv_b"]},
      {"initial_state", inputs["conv_state"]}
    ]

    part(%Block.CausalConv1d{activation: :silu}, op, tensors)
  end

  defp scan(op, [c, dt, b_t, c_t, z], %{"A_log" => a_log} = inputs) do
    tensors = [{"x", c}, {"dt", dt}, {"A", Nx.negate(Nx.exp(a_log))}, {"B", b_t}, {"C", c_t}]

    more = [
      {"D", inputs["D"]},
      {"z", z},
      {"dt_bias", inputs["dt_b"]},
      {"initial_state", inputs["ssm_state"]}
    ]

    part(%Block.SelectiveScan{dt_softplus: true}, op, tensors ++ more)
  end

  defp part(part, %{return_state: return_state} = op, tensors) do
    outputs = Op.part(op, %{part | return_state: return_state}, tensors)
    {elem(hd(outputs), 1), if(return_state, do: elem(List.last(outputs), 1))}
  end

  defp linear(t, weight, nil), do: Nx.dot(t, [-1], weight, [1])
  defp linear(t, weight, bias), do: Nx.add(linear(t, weight, nil), bias)

  defp split(t, sizes) do
    starts = Enum.scan([0 | sizes], &+/2)

    for {start, size} <- Enum.zip(starts, sizes),
        do: Nx.slice_along_axis(t, start, size, axis: -1)
  end
end

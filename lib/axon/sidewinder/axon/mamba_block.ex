defmodule Sidewinder.Axon.MambaBlock do
  @moduledoc false
  # The block of Mamba over packed sequences, as a composition of ops: its own kernel takes none.

  alias Sidewinder.Axon.Mixer

  @doc "`Sidewinder.mamba_block/3` of `x`, `{1, L, M}`, whose sequences end at `ends`."
  def packed(x, params, ends) do
    {inner, rank} = Nx.shape(params["dt_w"])
    states = Nx.axis_size(params["A_log"], 1)
    [u, z] = Mixer.project(x, params, [inner, inner])
    u = Mixer.convolve(u, params, ends)
    products = Sidewinder.linear(u, params["x_proj"])
    [dt, b, c] = Mixer.split(products, 2, [rank, states, states])

    u
    |> Sidewinder.selective_scan(Sidewinder.linear(dt, params["dt_w"]), a(params), b, c,
      d: params["D"],
      z: z,
      dt_bias: params["dt_b"],
      dt_softplus: true,
      cu_seqlens: ends
    )
    |> Sidewinder.linear(params["out_proj"], bias: params["out_proj_b"])
  end

  # In f32 among 16-bit numbers, as in the kernel of the block.
  defp a(%{"A_log" => a_log}),
    do: Nx.negate(Nx.exp(Nx.as_type(a_log, Mixer.wide(a_log.type))))
end

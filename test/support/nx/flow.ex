defmodule Sidewinder.NxTest.Flow do
  @moduledoc "Scans inside `while` and `cond`."
  import Nx.Defn

  @doc "The scan of the scan of the scan."
  defn repeat(x, dt, a, b, c) do
    {_, x, _} =
      while {i = 0, x, {dt, a, b, c}}, i < 3 do
        {i + 1, Sidewinder.selective_scan(x, dt, a, b, c), {dt, a, b, c}}
      end

    x
  end

  @doc "The scan if `flag` is 1, else `x`."
  defn choose(flag, x, dt, a, b, c) do
    if flag == 1 do
      Sidewinder.selective_scan(x, dt, a, b, c)
    else
      x
    end
  end
end

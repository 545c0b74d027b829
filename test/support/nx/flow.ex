defmodule Sidewinder.NxTest.Flow do
  @moduledoc "Scans inside `while` and `cond`, and gradients there."
  import Nx.Defn

  @doc "The scan of the scan of the scan."
  defn repeat(x, dt, a, b, c) do
    {_, x, _} =
      while {i = 0, x, {dt, a, b, c}}, i < 3 do
        {i + 1, Sidewinder.selective_scan(x, dt, a, b, c), {dt, a, b, c}}
      end

    x
  end

  @doc "The loop, unrolled by Nx."
  defn unrolled(x, {dt, a, b, c}) do
    {x, _} =
      while {x, {dt, a, b, c}}, _ <- 0..2, unroll: true do
        {Sidewinder.selective_scan(x, dt, a, b, c), {dt, a, b, c}}
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

  @doc "The sum of the scan's squares."
  defn energy(x, {dt, a, b, c}) do
    Nx.sum(Sidewinder.selective_scan(x, dt, a, b, c) ** 2)
  end

  @doc "Three steps down the gradient of that."
  defn descend(x, weights) do
    {_, x, _} =
      while {i = 0, x, weights}, i < 3 do
        {i + 1, x - grad(x, &energy(&1, weights)), weights}
      end

    x
  end

  @doc "The sum of the energies of 0, x and 2 x."
  defn total(x, weights) do
    {_, sum, _} =
      while {i = 0, sum = 0.0, {x, weights}}, i < 3 do
        {i + 1, sum + energy(x * i, weights), {x, weights}}
      end

    sum
  end

  @doc "sin(sin(sin(x w) w) w)"
  defn sines(x, w) do
    {_, x, _} =
      while {i = 0, x, w}, i < 3 do
        {i + 1, Nx.sin(x * w), w}
      end

    Nx.sum(x)
  end
end

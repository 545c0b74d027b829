defmodule Sidewinder.Calls do
  @moduledoc false
  # Calls of the scan to test with: of given sizes, and small random ones.

  alias Sidewinder.{Kernel, Tensor}

  @doc "Inputs of a scan by name, from a seed."
  def inputs({batch, length, channels, state}, seed \\ 1) do
    :rand.seed(:exsss, seed)

    [
      {"x", uniform({batch, length, channels}, -1, 1)},
      {"dt", uniform({batch, length, channels}, 0, 0.5)},
      {"A", uniform({channels, state}, -3, -0.1)},
      {"B", uniform({batch, length, state}, -1, 1)},
      {"C", uniform({batch, length, state}, -1, 1)}
    ]
  end

  @doc "A tensor of evenly distributed numbers."
  def uniform(shape, lo, hi, type \\ :f32) do
    values =
      for _ <- List.duplicate(nil, Tensor.elements(shape)), do: lo + (hi - lo) * :rand.uniform()

    Tensor.from_list(values, type, shape)
  end

  @doc """
  Inputs and options of a random small scan: sizes of 0 to 3 and odd ones, every form of B and C,
  every type and option. More such calls find more than larger ones.
  """
  def random(seed) do
    :rand.seed(:exsss, seed)
    type = pick([:f32, :f32, :bf16, :f16, :f64])
    wide = if type == :f64, do: :f64, else: :f32
    batch = pick([0, 1, 1, 2, 3])
    length = pick([0, 1, 2, 3, 5, 17, 33, 63, 100])
    channels = pick([0, 1, 2, 3, 6, 17, 33])
    state = pick([0, 1, 3, 4, 5, 15, 16, 17, 64])

    inputs = [
      {"x", uniform({batch, length, channels}, -1, 1, type)},
      {"dt", uniform({batch, length, channels}, 0, 0.5, type)},
      {"A", uniform({channels, state}, -3, 0, wide)},
      {"B", uniform(form(batch, length, channels, state), -1, 1, type)},
      {"C", uniform(form(batch, length, channels, state), -1, 1, type)}
    ]

    optional = [
      {"D", uniform({channels}, -1, 1, wide)},
      {"z", uniform({batch, length, channels}, -2, 2, type)},
      {"dt_bias", uniform({channels}, 0, 0.5, wide)},
      {"initial_state", uniform({batch, channels, state}, -1, 1, wide)}
    ]

    options = %{
      dt_softplus: pick([true, false]),
      dt_clamp: pick([nil, {0.01, 0.2}]),
      return_state: pick([true, false]),
      return_states: pick([true, false])
    }

    {inputs ++ Enum.filter(optional, fn _ -> pick([true, false]) end), options}
  end

  defp form(batch, length, channels, state) do
    groups = Enum.filter([1, 2, 3, channels], &(&1 > 0 and rem(channels, &1) == 0))

    forms =
      [{batch, length, state}, {channels, state}] ++
        for g <- groups, do: {batch, length, g, state}

    pick(forms)
  end

  @doc "One of the list."
  def pick(list), do: Enum.random(list)

  @doc "What the plain reference in f64 says."
  def reference(op, inputs, options) do
    wide = for {name, tensor} <- inputs, do: {name, Tensor.cast(tensor, :f64)}
    Kernel.run(op, wide, options, level: "reference")
  end

  @doc "Every CPU level, those that share work with one thread, two and more than there are pieces of it."
  def levels do
    {:ok, %{levels: ["reference" | levels]}} = Sidewinder.Native.cpu_info()
    fast = for level <- levels, threads <- [1, 2, 7], do: {level, threads}

    for {level, threads} <- [{"reference", 1} | fast],
        do: [backend: :cpu, level: level, threads: threads]
  end
end

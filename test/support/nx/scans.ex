defmodule Sidewinder.NxTest.Scans do
  @moduledoc "Inputs for scans, ways to call them, and how to compare results."

  import ExUnit.Assertions
  alias Sidewinder.NxTest.{Inline, Wrapper}

  @types [f32: 1.0e-5, f64: 1.0e-11, bf16: 2.0e-2, f16: 2.0e-3]

  @doc "Storage types with the relative error that they allow."
  def types, do: @types

  @doc "All ways into the kernels or their pure form: `{name, fun}`, where `fun.(f, args)` calls `f`."
  def ways do
    [
      eager: fn fun, args -> apply(fun, args) end,
      evaluator: &Nx.Defn.jit_apply/2,
      wrapper: &Nx.Defn.jit_apply(&1, &2, compiler: Wrapper),
      inline: &Nx.Defn.jit_apply(&1, &2, compiler: Inline)
    ]
  end

  @doc "Numbers between `lo` and `hi`, always the same for the same `seed`."
  def random(seed, shape, lo \\ -1.0, hi \\ 1.0, type \\ :f32) do
    {t, _} = Nx.Random.uniform(Nx.Random.key(seed), lo, hi, shape: shape, type: :f64)
    Nx.as_type(t, type)
  end

  @doc """
  The five tensors of a scan and, as options, all its optional ones. `sizes` are `{b, l, d, n}`,
  `forms` those of B and C: `:shared`, `{:groups, g}` or `:constant`.
  """
  def problem({b, l, d, n} = sizes, opts \\ []) do
    type = opts[:type] || :f32
    wide = if type == :f64, do: :f64, else: :f32
    {form_b, form_c} = opts[:forms] || {:shared, :shared}

    required = [
      random(1, {b, l, d}, -1.0, 1.0, type),
      random(2, {b, l, d}, 0.001, 0.5, type),
      random(3, {d, n}, -2.0, -0.1, wide),
      random(4, shape(form_b, sizes), -1.0, 1.0, type),
      random(5, shape(form_c, sizes), -1.0, 1.0, type)
    ]

    optional = [
      d: random(6, {d}, -1.0, 1.0, wide),
      z: random(7, {b, l, d}, -1.0, 1.0, type),
      dt_bias: random(8, {d}, -0.5, 0.5, wide),
      initial_state: random(9, {b, d, n}, -1.0, 1.0, wide)
    ]

    {required, optional}
  end

  defp shape(:shared, {b, l, _, n}), do: {b, l, n}
  defp shape({:groups, g}, {b, l, _, n}), do: {b, l, g, n}
  defp shape(:constant, {_, _, d, n}), do: {d, n}

  @doc "Calls `fun` with random sizes up to 7, forms and options: `fun.(args, opts)`."
  def for_random(runs, fun) do
    for run <- 1..runs do
      :rand.seed(:exsss, {run, 2, 3})
      [b, l, n, per_group, groups] = for max <- [3, 7, 7, 3, 3], do: :rand.uniform(max)
      forms = {form(groups), form(groups)}
      {args, optional} = problem({b, l, per_group * groups, n}, forms: forms)
      fun.(args, Enum.filter(optional, fn _ -> coin() end) ++ options())
    end
  end

  defp form(groups), do: Enum.random([:shared, {:groups, groups}, :constant])
  defp coin, do: :rand.uniform(2) == 1

  defp options do
    [dt_softplus: coin(), dt_clamp: Enum.random([nil, {0.01, 0.3}]), return_states: coin()]
  end

  @doc "The first tensor of what a scan returns, or the one of that name."
  def output(outputs, name \\ :y)
  def output(%Nx.Tensor{} = y, :y), do: y
  def output({y, _}, :y), do: y
  def output({_, last_state}, :last_state), do: last_state
  def output(%{} = outputs, name), do: Map.fetch!(outputs, name)

  @doc "All tensors of what a scan returns."
  def outputs(outputs), do: Nx.Defn.Composite.flatten_list([outputs])

  @doc "Fails with the largest excess over `atol + rtol |expected|`; shapes must be equal."
  def assert_close(actual, expected, opts \\ [])

  def assert_close(%Nx.Tensor{} = actual, %Nx.Tensor{} = expected, opts) do
    rtol = Keyword.get(opts, :rtol, 1.0e-5)
    atol = Keyword.get(opts, :atol, rtol)
    assert actual.shape == expected.shape
    assert actual.vectorized_axes == expected.vectorized_axes

    values = Enum.zip(numbers(actual), numbers(expected))
    {got, wanted} = worst = Enum.max_by(values, &excess(&1, atol, rtol))

    assert excess(worst, atol, rtol) <= 0,
           "#{opts[:of]} furthest apart: #{inspect(got)}, not #{inspect(wanted)}"
  end

  def assert_close(actual, expected, opts) do
    assert_same(actual, expected, &assert_close(&1, &2, opts))
  end

  @doc "Compares what two scans return, tensor by tensor, with `compare`."
  def assert_same(actual, expected, compare) do
    {actual, expected} = {outputs(actual), outputs(expected)}
    assert length(actual) == length(expected)
    Enum.zip_with(actual, expected, compare)
  end

  defp numbers(t), do: t |> Nx.devectorize() |> Nx.as_type(:f64) |> Nx.to_flat_list()

  defp excess({a, b}, atol, rtol) when is_number(a) and is_number(b),
    do: abs(a - b) - (atol + rtol * abs(b))

  defp excess({a, a}, _, _), do: 0
  defp excess(_, _, _), do: :infinity

  @doc "For `skip` tags: a reason, or false where the native library is there."
  def no_library do
    if Sidewinder.Native.loaded?(), do: false, else: "there is no native library"
  end

  @doc "Whether this call of `fun` reaches a kernel; it is called with a level that none has."
  def kernel?(fun) do
    fun.(level: "of no CPU")
    false
  rescue
    error in Sidewinder.Error -> error.kind in [:option, :unavailable]
  end
end

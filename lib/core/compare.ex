defmodule Sidewinder.Compare do
  @moduledoc """
  The same call of an op through every level that this machine has: how long it takes, and how far
  its results are from those of the plain reference in f64.
  """

  alias Sidewinder.{Device, Kernel, Tensor}

  # A level is measured until it has run this often or this long, but at least once.
  @runs 30
  @enough_ms 1_500

  @typedoc """
  A level's result. `ms` is the median, or nil if the level took longer than it may; `error` is the
  largest absolute difference of an element from the reference.
  """
  @type row :: %{level: String.t(), ms: float | nil, error: float | nil}

  @doc """
  Runs `op` on host tensors at every level of this machine. `progress` is told each level's name
  before it runs.

      iex> inputs = for {name, shape} <- [x: {1, 1, 1}, dt: {1, 1, 1}, A: {1, 1}, B: {1, 1, 1}, C: {1, 1, 1}],
      ...>   do: {name, Sidewinder.Tensor.from_list([2], :f32, shape)}
      iex> [reference, scalar | _] = Sidewinder.Compare.run(:selective_scan, inputs, %{dt_clamp: {0, 0}})
      iex> {reference.level, reference.error, scalar.level, scalar.error}
      {"f64 reference", 0.0, "scalar, 1 thread", 0.0}
  """
  @spec run(atom, Kernel.inputs(), map, (String.t() -> any)) :: [row]
  def run(op, inputs, options, progress \\ fn _name -> :ok end) do
    progress.("f64 reference")
    {truth, ms} = measure(fn -> reference(op, inputs, options) end)

    rows =
      for {name, work} <- levels(op, inputs, options) do
        progress.(name)
        row(name, measure(work), truth)
      end

    [%{level: "f64 reference", ms: ms, error: 0.0} | rows]
  end

  @doc """
  Measures other code that computes the same: `work` returns outputs by name. It is stopped after
  `limit` milliseconds.

      iex> inputs = for {name, shape} <- [x: {1, 1, 1}, dt: {1, 1, 1}, A: {1, 1}, B: {1, 1, 1}, C: {1, 1, 1}],
      ...>   do: {name, Sidewinder.Tensor.from_list([2], :f32, shape)}
      iex> work = fn -> %{"y" => Sidewinder.Tensor.from_list([0.5], :f32, {1, 1, 1})} end
      iex> Sidewinder.Compare.other("a guess", work, :selective_scan, inputs, %{dt_clamp: {0, 0}}, 1000).error
      0.5
  """
  @spec other(String.t(), fun, atom, Kernel.inputs(), map, pos_integer) :: row
  def other(name, work, op, inputs, options, limit) do
    task = Task.async(fn -> measure(work) end)

    case Task.yield(task, limit) || Task.shutdown(task, :brutal_kill) do
      {:ok, measured} -> row(name, measured, reference(op, inputs, options))
      nil -> %{level: name, ms: nil, error: nil}
    end
  end

  defp reference(op, inputs, options) do
    wide = for {name, tensor} <- inputs, do: {name, Tensor.cast(tensor, :f64)}
    Kernel.run(op, wide, options, level: "reference")
  end

  defp row(name, {outputs, ms}, truth) do
    errors = for {output, tensor} <- outputs, do: largest_error(tensor, truth[output])
    %{level: name, ms: ms, error: Enum.max(errors)}
  end

  defp levels(op, inputs, options) do
    %{cpu: cpu} = Device.info()
    run = fn where -> fn -> Kernel.run(op, inputs, options, where) end end
    one = for level <- cpu.levels, do: {"#{level}, 1 thread", run.(level: level, threads: 1)}
    all = {"#{cpu.best}, #{cpu.threads} threads", run.(level: cpu.best, threads: cpu.threads)}
    cuda = if Device.cuda?(), do: cuda_levels(op, inputs, options), else: []
    tl(one) ++ if(cpu.threads > 1, do: [all | cuda], else: cuda)
  end

  defp cuda_levels(op, inputs, options) do
    resident = for {name, tensor} <- inputs, do: {name, Tensor.to_device(tensor, {:cuda, 0})}

    [
      {"CUDA from host memory", fn -> Kernel.run(op, inputs, options, backend: {:cuda, 0}) end},
      {"CUDA resident", fn -> Kernel.run(op, resident, options, backend: {:cuda, 0}) end}
    ]
  end

  defp measure(run) do
    {first, outputs} = :timer.tc(run)
    # The first run starts threads, loads kernels and touches memory.
    times = if first / 1000 > @enough_ms, do: [first], else: times(run, [], 0)
    {outputs, Enum.at(Enum.sort(times), div(length(times), 2)) / 1000}
  end

  defp times(_run, times, total) when length(times) == @runs or total > @enough_ms * 1000,
    do: times

  defp times(run, times, total) do
    {time, _} = :timer.tc(run)
    times(run, [time | times], total + time)
  end

  @doc """
  The largest absolute difference between elements of two tensors of one shape; infinite where only
  one of two is a number.

      iex> [a, b] = for v <- [2.5, 3], do: Sidewinder.Tensor.from_list([1, v], :f32, {2})
      iex> Sidewinder.Compare.largest_error(a, b)
      0.5
  """
  @spec largest_error(Tensor.t(), Tensor.t()) :: float | :infinity
  def largest_error(%Tensor{shape: shape} = a, %Tensor{shape: shape} = b) do
    [a, b] = for tensor <- [a, b], do: tensor |> Tensor.to_host() |> Tensor.cast(:f64)
    largest(a.data, b.data, 0.0)
  end

  # An infinity or NaN does not match as a float; equal bits are no difference all the same.
  defp largest(<<a::float-native-64, as::binary>>, <<b::float-native-64, bs::binary>>, largest) do
    largest(as, bs, max(largest, abs(a - b)))
  end

  defp largest(<<a::64, as::binary>>, <<a::64, bs::binary>>, largest),
    do: largest(as, bs, largest)

  defp largest(<<>>, <<>>, largest), do: largest
  defp largest(_, _, _), do: :infinity
end

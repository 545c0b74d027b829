# Programs of EXLA with the kernels as custom calls, and with Sidewinder's ops as plain XLA:
#
#     mix run bench/exla.exs [RESULT.json]
#
# Medians of many runs on EXLA's default client: the selective scan and its gradient, the same scan called directly on
# the CPU, and a training step of examples/digits.exs, each in turns. Needs EXLA and Axon.

for file <- ~w(machine digits), do: Code.require_file("#{file}.exs", __DIR__)

defmodule ExlaTimes do
  alias Sidewinder.{Kernel.Scan, Tensor}

  @rounds 5
  @microseconds 500_000
  @scans [reference: {32, 60, 512, 16}, "mamba-130m layer": {1, 2048, 1536, 16}]

  def run(out) do
    rows = Enum.flat_map(@scans, &scans/1) ++ training_steps()
    for row <- rows, do: IO.puts("#{row.what}, #{row.way}: #{row.median_ms} ms")
    if out, do: File.write!(out, Machine.result(Enum.map(rows, &json/1)))
  end

  defp json(%{what: what, way: way, median_ms: median}),
    do: ~s({"what": "#{what}", "way": "#{way}", "median_ms": #{median}})

  ## The scan

  defp scans({name, size}) do
    inputs = inputs(size)
    held = for t <- Tuple.to_list(inputs), do: Nx.backend_copy(t, EXLA.Backend)

    calls =
      for(way <- [kernels: :auto, plain: :nx], kind <- [:forward, :gradient]) do
        {{"selective_scan #{name}, #{kind}", elem(way, 0)}, compiled(kind, elem(way, 1), held)}
      end

    # What XLA's memory for a result of that size costs, whatever is computed.
    add = EXLA.jit(fn x -> Nx.add(x, 1) end)
    sum = {{"x + 1 of the size of #{name}", :plain}, fn -> add.(hd(held)) end}
    in_turns([sum, {{"selective_scan #{name}, forward", :direct}, direct(inputs)} | calls])
  end

  defp inputs({b, l, d, n}) do
    key = Nx.Random.key(1)
    [x, dt, a, bb, c] = for i <- 1..5, do: Nx.Random.fold_in(key, i)

    random = fn key, low, high, shape ->
      key |> Nx.Random.uniform(low, high, shape: shape) |> elem(0)
    end

    {random.(x, -1, 1, {b, l, d}), random.(dt, 0.001, 0.1, {b, l, d}),
     random.(a, -16, -1, {d, n}), random.(bb, -1, 1, {b, l, n}), random.(c, -1, 1, {b, l, n})}
  end

  defp direct(inputs) do
    [x, dt, a, b, c] =
      for t <- Tuple.to_list(inputs), do: Tensor.new(Nx.to_binary(t), :f32, Nx.shape(t))

    fn -> Scan.selective_scan(x, dt, a, b, c, backend: :cpu) end
  end

  defp compiled(kind, backend, inputs) do
    scan = &Sidewinder.selective_scan(&1, &2, &3, &4, &5, backend: backend)

    gradient =
      &Nx.Defn.grad({&1, &2, &3, &4, &5}, fn {x, dt, a, b, c} -> Nx.sum(scan.(x, dt, a, b, c)) end)

    call = EXLA.jit(if kind == :forward, do: scan, else: gradient)
    fn -> apply(call, inputs) end
  end

  ## A training step

  defp training_steps do
    ways = [kernels: "auto", plain: "nx"]
    step = &Digits.step(&1, 32, 12, [{"COMPILER", "exla"}])
    times = for _ <- 1..3, {way, backend} <- ways, do: {way, step.(backend)}

    for {way, times} <- Enum.group_by(times, &elem(&1, 0), &elem(&1, 1)),
        do: %{what: "training step, examples/digits.exs", way: way, median_ms: median(times)}
  end

  ## Times

  # The calls take turns, so that what else the machine does meets them all.
  defp in_turns(calls) do
    for {_name, call} <- calls, do: call.()
    times = for _ <- 1..@rounds, {name, call} <- calls, do: {name, times(call)}

    for {{what, way}, times} <- Enum.group_by(times, &elem(&1, 0), &elem(&1, 1)),
        do: %{what: what, way: way, median_ms: times |> Enum.concat() |> median()}
  end

  # Results are given back at once, as by a program that uses them: Erlang would do it some calls later, and each of them
  # would be in memory that the system has to clear first.
  defp times(call, left \\ @microseconds) do
    {took, result} = :timer.tc(call)
    unless is_struct(result, Tensor), do: Nx.backend_deallocate(result)
    [took / 1000 | if(left > took, do: times(call, left - took), else: [])]
  end

  defp median(times), do: times |> Enum.sort() |> Enum.at(div(length(times), 2)) |> Float.round(3)
end

ExlaTimes.run(List.first(System.argv()))

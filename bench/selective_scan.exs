# The selective scan from Elixir:  mix run bench/selective_scan.exs
#
# Sizes are batch x length x channels x states. Pure Nx runs on the default backend, and on a size
# that it finishes in seconds on Nx.BinaryBackend.

defmodule Bench do
  alias Sidewinder.{Kernel.Scan, Op, Reference}

  @forms [
    x: {:b, :l, :d},
    dt: {:b, :l, :d},
    a: {:d, :n},
    b: {:b, :l, :n},
    c: {:b, :l, :n}
  ]

  def scan_inputs({b, l, d, n}) do
    sizes = %{b: b, l: l, d: d, n: n}
    for {name, form} <- @forms, do: random(name, form, sizes)
  end

  def step_inputs({b, d, n}) do
    [x, dt, a, b1, c] = scan_inputs({b, 1, d, n})
    [x, dt, b1, c] = for t <- [x, dt, b1, c], do: Nx.squeeze(t, axes: [1])
    [Nx.broadcast(0.0, {b, d, n}), x, dt, a, b1, c]
  end

  defp random(name, form, sizes) do
    shape = form |> Tuple.to_list() |> Enum.map(&sizes[&1]) |> List.to_tuple()
    {lo, hi} = Map.get(%{dt: {0.001, 0.1}, a: {-16.0, -1.0}}, name, {-1.0, 1.0})
    key = Nx.Random.key(:erlang.phash2(name))
    key |> Nx.Random.uniform(lo, hi, shape: shape, type: :f32) |> elem(0)
  end

  def scan_jobs(args, pure?) do
    kernel_args = Enum.map(args, &Op.to_kernel/1)
    compiled = Nx.Defn.compile(&Sidewinder.selective_scan/5, args)

    %{
      "Kernel.Scan" => fn -> apply(Scan, :selective_scan, kernel_args) end,
      "eager" => fn -> apply(Sidewinder, :selective_scan, args) end,
      "defn, traced at each call" => fn ->
        Nx.Defn.jit_apply(&Sidewinder.selective_scan/5, args, compiler: Nx.Defn.Evaluator)
      end,
      "defn, compiled once" => fn -> apply(compiled, args) end
    }
    |> Map.merge(if pure?, do: pure_jobs(args), else: %{})
  end

  defp pure_jobs(args) do
    for algorithm <- [:sequential, :hillis_steele, :blelloch], into: %{} do
      {"pure Nx, #{algorithm}",
       fn -> apply(Reference, :selective_scan, args ++ [[algorithm: algorithm]]) end}
    end
  end

  def step_jobs(args) do
    kernel_args = Enum.map(args, &Op.to_kernel/1)

    %{
      "Kernel.Scan" => fn -> apply(Scan, :selective_state_update, kernel_args) end,
      "eager" => fn -> apply(Sidewinder, :selective_state_update, args) end
    }
  end

  def run(title, jobs) do
    IO.puts("\n#{title}")
    Benchee.run(jobs, warmup: 0.5, time: 2, print: [configuration: false, benchmarking: false])
  end
end

IO.inspect(Sidewinder.Device.info(), label: "here")

for {title, sizes, pure?} <- [
      {"reference workload, 32 x 60 x 512 x 16", {32, 60, 512, 16}, false},
      {"one layer of mamba-130m, 1 x 2048 x 1536 x 16", {1, 2048, 1536, 16}, false},
      {"1 x 60 x 64 x 16, with pure Nx", {1, 60, 64, 16}, true},
      {"1 x 1 x 4 x 2: what the layers above the kernel cost", {1, 1, 4, 2}, false}
    ] do
  Bench.run(title, Bench.scan_jobs(Bench.scan_inputs(sizes), pure?))
end

Bench.run(
  "one decode step, 1 x 1536 x 16",
  Bench.step_jobs(Bench.step_inputs({1, 1536, 16}))
)

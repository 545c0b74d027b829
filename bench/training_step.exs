# A training step of examples/digits.exs with the kernels and in pure Nx, both on Nx.BinaryBackend and
# Nx.Defn.Evaluator:
#
#     mix run bench/training_step.exs [RESULT.json]
#
# With four images, since pure Nx takes minutes for the example's 32. The two take turns, each in a
# process of its own; of each the median is told, without the first step, which builds the graph.

for file <- ~w(machine digits), do: Code.require_file("#{file}.exs", __DIR__)

defmodule TrainingStep do
  @rounds 3
  @images 4
  @steps %{"cpu" => 11, "nx" => 2}

  def run(out) do
    times =
      for _ <- 1..@rounds,
          backend <- Map.keys(@steps),
          do: {backend, Digits.step(backend, @images, @steps[backend])}

    rows =
      for {backend, times} <- Enum.group_by(times, &elem(&1, 0), &elem(&1, 1)),
          do: %{
            backend: backend,
            times: times,
            median: Enum.at(Enum.sort(times), div(@rounds, 2))
          }

    for row <- rows, do: IO.puts("backend #{row.backend}: #{row.median} ms")
    if out, do: File.write!(out, Machine.result(Enum.map(rows, &json/1)))
  end

  defp json(%{backend: backend, times: times, median: median}) do
    rounds = inspect(times, charlists: :as_lists)

    ~s({"backend": "#{backend}", "images": #{@images}, "median_ms": #{median}, "rounds_ms": #{rounds}})
  end
end

TrainingStep.run(List.first(System.argv()))

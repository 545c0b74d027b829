# Steps of a Mamba of mamba-130m's sizes in bf16 for many sessions at once, each token chosen on the device, from Elixir:
#
#     mix run bench/sessions.exs [RESULT.json]
#     ELIXIR_ERL_OPTIONS="+sbwt very_long +sbwtdio very_long" mix run bench/sessions.exs [RESULT.json]
#
# Milliseconds of 400 steps after 50, on CUDA device 0 where there is one. Weights are random.

Code.require_file("machine.exs", __DIR__)

defmodule Sessions do
  alias Sidewinder.{Device, Mamba, Mamba.Session}

  @sizes [layers: 24, width: 768, vocabulary: 50_280, type: :bf16]

  def run(out) do
    model = Mamba.random([backend: if(Device.cuda?(), do: {:cuda, 0}, else: :cpu)] ++ @sizes)
    rows = for count <- [1, 8, 64], do: row(model, count)
    Enum.each(rows, &IO.puts/1)
    if out, do: File.write!(out, Machine.result(rows))
  end

  defp row(model, count) do
    sessions = for _ <- 1..count, do: Session.new(model)
    first = steps(sessions, Enum.to_list(1..count), 50) |> elem(1)
    times = steps(sessions, first, 400) |> elem(0) |> Enum.sort()

    ~s({"sessions": #{count}, "flags": "#{System.get_env("ELIXIR_ERL_OPTIONS", "")}", ) <>
      ~s("median_ms": #{Enum.at(times, 200)}, "min_ms": #{hd(times)}})
  end

  # The milliseconds of each step, and the tokens after the last one.
  defp steps(sessions, tokens, count) do
    Enum.map_reduce(1..count, tokens, fn _, tokens ->
      start = System.monotonic_time(:nanosecond)
      tokens = Session.next(sessions, tokens)
      {(System.monotonic_time(:nanosecond) - start) / 1.0e6, tokens}
    end)
  end
end

Sessions.run(List.first(System.argv()))

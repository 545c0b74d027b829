defmodule Sidewinder.ModelDemo do
  @moduledoc false
  # The small language model of `examples/models/novels` at work: its text, its speed, and how well it predicts a book
  # that is not in its training data. It was trained by `examples/text.exs`.

  import Sidewinder.CommandLine, only: [short: 1, timed: 1]
  alias Sidewinder.{Device, Error, Mamba, PPM, Quantized, Timing}
  alias Sidewinder.Mamba.Session

  @frame_ms 1000 / 60
  @prompt "The Queen of Hearts looked at the little girl, and said"
  @drawing [temperature: 0.7, top_p: 0.95, seed: 1]
  @written 320
  @stepped 1000
  @prompt_bytes 2048
  @predicted 65_536

  @doc "Runs that of the folder `path` on the CPU and, if there is one, on a GPU, perhaps quantized; lines go to `tell`."
  @spec run(Path.t(), (String.t() -> any), Quantized.format() | nil) :: :ok
  def run(path, tell, quantize \\ nil) do
    book = File.read!(priv("samples/alice.txt"))
    load = &Mamba.load(path, [quantize: quantize] ++ &1)
    write(load.(backend: :cpu), tell)
    backends = if Device.cuda?(), do: [:cpu, {:cuda, 0}], else: [:cpu]

    for backend <- backends do
      model = load.(backend: backend, type: type(backend))
      matrices = if quantize, do: " with matrices in #{quantize}"
      tell.("\n#{Device.name(backend)}, #{model.type}#{matrices}:")
      speeds(model, book, tell)
    end

    predict(load.([]), quantize, book, tell)
  end

  defp priv(path), do: Application.app_dir(:sidewinder, ["priv", path])

  # CPUs compute in f32 in any case.
  defp type(:cpu), do: :f32
  defp type(_cuda), do: :bf16

  defp write(model, tell) do
    text = Enum.join(Mamba.generate(model, @prompt, [max_tokens: @written] ++ @drawing))
    tell.("\n#{inspect(model)} goes on with a text:\n\n#{@prompt}#{text}\n")
  end

  defp speeds(model, book, tell) do
    session = Session.new(model)
    prompt = :binary.bin_to_list(book, 0, @prompt_bytes)
    # The first run loads kernels.
    [first | _] = for _ <- 1..4, do: prefill(session, prompt)
    times = for _ <- 1..3, do: prefill(session, prompt)
    ms = times |> Enum.sort() |> Timing.at(0.5)

    tell.(
      "  a prompt of #{@prompt_bytes} bytes is read in #{short(ms)} ms (the first in #{short(first)} ms), " <>
        "#{round(@prompt_bytes / ms * 1000)} bytes a second"
    )

    steps = steps(session, ?a, @stepped, [])
    [p50, p99] = for share <- [0.5, 0.99], do: Timing.at(steps, share)
    verdict = if p99 <= @frame_ms, do: "keeps", else: "does not keep"

    tell.(
      "  it writes #{round(1000 / (Enum.sum(steps) / @stepped))} bytes a second: a step takes #{short(p50)} ms " <>
        "(99 of 100 at most #{short(p99)} ms) and #{verdict} up with 60 frames a second"
    )
  end

  defp prefill(session, prompt) do
    Session.reset(session)
    {_, ms} = timed(fn -> Session.prefill(session, prompt, logits: true) end)
    ms
  end

  defp steps(_session, _token, 0, times), do: Enum.sort(times)

  defp steps(session, token, count, times) do
    {token, ms} = timed(fn -> Session.next(session, token, @drawing) end)
    steps(session, token, count - 1, [ms | times])
  end

  defp predict(model, quantize, book, tell) do
    text = binary_part(book, 0, @predicted)
    model = Mamba.loss(model, text) / :math.log(2)
    baseline = PPM.bits_per_byte(text)

    tell.(
      "\nThe first #{@predicted} bytes of Alice's Adventures in Wonderland, which it has not read, take it " <>
        "#{short(model)} bits a byte, and PPM of order 5 #{short(baseline)}"
    )

    # Quantized weights may predict worse.
    unless quantize || model < baseline do
      raise Error.new(:panic, "bits a byte",
              expected: "fewer than PPM's #{short(baseline)}",
              got: short(model)
            )
    end

    :ok
  end
end

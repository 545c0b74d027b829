defmodule Mix.Tasks.Sidewinder.Demo do
  @shortdoc "Shows the selective scan at work, at every level of this machine"

  @moduledoc """
  Runs the selective scan on real data and compares with PyTorch's results, then measures every
  level that this machine has on two real sizes.

      mix sidewinder.demo

  Takes less than two minutes. The exit code is 1 if a result is wrong.
  """

  use Mix.Task

  import Sidewinder.CommandLine, only: [short: 1]
  alias Sidewinder.{CommandLine, Compare, Error, Safetensors, Tensor}

  @sample "samples/mamba_layer.safetensors"
  @tolerance 1.0e-4
  @frame_ms 1000 / 60
  @limit_ms 20_000

  # {name, {batch, length, channels, state}}
  @sizes [
    {"Reference workload", {32, 60, 512, 16}},
    {"Layer of mamba-130m", {1, 2048, 1536, 16}}
  ]

  @impl true
  def run(_args) do
    Mix.Task.run("app.config")

    CommandLine.run(fn ->
      real_data()
      tables = for size <- @sizes, do: {title(size), rows(size)}
      Enum.each(tables, &print/1)
      for {_title, rows} <- tables, row <- rows, row.error, do: small!(row.level, row.error)
    end)
  end

  defp real_data do
    sample = Application.app_dir(:sidewinder, ["priv", @sample])
    output = Path.join(System.tmp_dir!(), "sidewinder-demo-#{System.pid()}.safetensors")
    Mix.Task.rerun("sidewinder.run", ["selective_scan", sample, output, "--dt-softplus"])
    expected = Safetensors.read(sample, ["out.y", "out.last_state"])
    got = Safetensors.read(output)
    File.rm(output)
    Enum.each(["y", "last_state"], &agree!(&1, got[&1], expected["out." <> &1]))
  end

  defp agree!(name, got, expected) do
    error = Compare.largest_error(got, expected)
    Mix.shell().info("#{name} differs from PyTorch's by at most #{short(error)}")
    small!(name, error)
  end

  # Every atom is greater than every number, `:infinity` too.
  defp small!(_name, error) when error <= @tolerance, do: :ok

  defp small!(name, error) do
    raise Error.new(:panic, name,
            expected: "a difference up to #{@tolerance}",
            got: inspect(error)
          )
  end

  defp title({name, {batch, length, channels, state}}) do
    "#{name}: batch #{batch}, length #{length}, channels #{channels}, state #{state}"
  end

  defp rows({_name, {batch, length, channels, state} = size}) do
    progress = fn level -> Mix.shell().info("measuring #{inspect(size)}: #{level}") end
    native = Compare.run(:selective_scan, random(size), %{}, progress)

    if batch == 1,
      do: native,
      else: native ++ nx_rows({1, length, channels, state}, batch, progress)
  end

  # Pure Nx would take minutes for all of it.
  defp nx_rows(size, batch, progress) do
    inputs = random(size)
    reference = Sidewinder.Reference
    levels = if Code.ensure_loaded?(reference), do: apply(reference, :demo_levels, []), else: []

    for {name, scan} <- levels do
      progress.(name)
      work = fn -> %{"y" => apply(scan, Keyword.values(inputs))} end
      row = Compare.other("#{name} *", work, :selective_scan, inputs, %{}, @limit_ms)
      %{row | ms: row.ms && row.ms * batch}
    end
  end

  # As inside a trained model: small steps, states that fade at different rates.
  defp random({batch, length, channels, state}) do
    :rand.seed(:exsss, 1)
    rates = for _channel <- 1..channels, n <- 1..state, do: -n

    [
      x: uniform({batch, length, channels}, -1, 1),
      dt: uniform({batch, length, channels}, 0.001, 0.1),
      A: Tensor.from_list(rates, :f32, {channels, state}),
      B: uniform({batch, length, state}, -1, 1),
      C: uniform({batch, length, state}, -1, 1)
    ]
  end

  defp uniform(shape, lo, hi) do
    data =
      for _ <- 1..Tensor.elements(shape),
          into: <<>>,
          do: <<lo + (hi - lo) * :rand.uniform()::float-native-32>>

    Tensor.new(data, :f32, shape)
  end

  defp print({title, rows}) do
    scalar = Enum.find(rows, &(&1.level =~ "scalar")).ms
    Mix.shell().info("\n#{title}")
    line(["level", "ms", "speed-up", "60 FPS", "largest error"])
    for row <- rows, do: line([row.level | cells(row, scalar)])

    if Enum.any?(rows, &(&1.level =~ "*")),
      do: Mix.shell().info("* one batch measured, times their number")
  end

  defp cells(%{ms: nil}, _scalar), do: ["too long", "", "no", "-"]

  defp cells(%{ms: ms, error: error}, scalar) do
    [
      short(ms),
      short(scalar / ms) <> "x",
      if(ms <= @frame_ms, do: "yes", else: "no"),
      short(error)
    ]
  end

  defp line([level | cells]) do
    cells = for cell <- cells, do: String.pad_leading(cell, 14)
    Mix.shell().info(String.pad_trailing(level, 24) <> Enum.join(cells))
  end
end

defmodule Mix.Tasks.Sidewinder.Demo do
  @shortdoc "Shows a language model and the selective scan at work on this machine"

  @moduledoc """
  Lets a small language model of bytes continue a text, prints how fast it reads and writes, and how well it predicts a
  book that is not in its training data, compared with prediction by partial matching. Then runs the selective scan on
  real data, compares with PyTorch's results, and measures every level that this machine has on two real sizes.

      mix sidewinder.demo [--model FOLDER] [--quantize q8_0|q4_0|ternary]

  The model is `examples/models/novels` of Sidewinder's repository, which packages leave out; `--model` says where it is.
  With `--quantize` the model's large matrices are quantized (`Sidewinder.Mamba.load/2`), and may predict less well.

  Takes less than two minutes. The exit code is 1 if a result is wrong.
  """

  use Mix.Task

  import Sidewinder.CommandLine, only: [short: 1]
  alias Sidewinder.{CommandLine, Compare, Error, ModelDemo, RandomInputs, Safetensors}

  @task "sidewinder.demo"
  @sample "samples/mamba_layer.safetensors"
  @model "examples/models/novels"
  @hint "it is not in packages: unpack sidewinder-novels.tar.gz of the release, and name its folder by --model"
  @tolerance 1.0e-4
  @frame_ms 1000 / 60
  @limit_ms 20_000
  @measured [gradient: false, max_ms: 1_500]

  # {name, {batch, length, channels, state}}
  @sizes [
    {"Reference workload", {32, 60, 512, 16}},
    {"Layer of mamba-130m", {1, 2048, 1536, 16}}
  ]

  @impl true
  def run(args) do
    Mix.Task.run("app.config")

    CommandLine.run(args, fn args ->
      options = CommandLine.options!(args, [model: :string, quantize: :string], @task)
      quantize = CommandLine.format!(options[:quantize], "--quantize", @task)
      ModelDemo.run(model!(options[:model]), &Mix.shell().info/1, quantize)
      real_data()
      tables = for size <- @sizes, do: {title(size), rows(size)}
      Enum.each(tables, &print/1)
      for {_title, rows} <- tables, row <- rows, do: right!(row)
    end)
  end

  defp model!(path) do
    path = path || Path.join(Mix.Project.deps_paths()[:sidewinder] || File.cwd!(), @model)

    unless File.dir?(path),
      do:
        raise(
          Error.new(:file, path, expected: "the model of the demo", got: "no folder", hint: @hint)
        )

    path
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
    differ = Compare.difference(got, expected, rtol: 0, atol: @tolerance)
    error = short(differ.max_abs_err)
    Mix.shell().info("#{name} differs from PyTorch's by at most #{error}")
    unless differ.within_tolerance, do: raise(wrong(name, error))
  end

  defp right!(%{status: :wrong} = row), do: raise(wrong(row.label, short(row.max_abs_err)))
  defp right!(%{status: {:error, %Error{} = error}}), do: raise(error)
  # Pure Nx may be too slow to wait for.
  defp right!(_row), do: :ok

  defp wrong(name, error) do
    Error.new(:panic, name, expected: "no more than rounding errors", got: error)
  end

  defp title({name, {batch, length, channels, state}}) do
    "#{name}: batch #{batch}, length #{length}, channels #{channels}, state #{state}"
  end

  defp rows({_name, {batch, length, channels, state} = size}) do
    native = compare(size, []).forward
    # Pure Nx would take minutes for all of it.
    if batch == 1, do: native, else: native ++ nx_rows({1, length, channels, state}, batch)
  end

  defp nx_rows(size, batch) do
    [_reference | rows] = compare(size, levels: [], others: nx_levels()).forward
    for row <- rows, do: %{row | label: row.label <> " *", time: row.time && times(row, batch)}
  end

  defp times(%{time: time}, count), do: %{time | median: time.median * count}

  defp nx_levels do
    reference = Sidewinder.Reference
    levels = if Code.ensure_loaded?(reference), do: apply(reference, :demo_levels, []), else: []
    for {name, scan} <- levels, do: {name, &%{"y" => apply(scan, in_order(&1))}}
  end

  defp in_order(inputs), do: for(name <- ~w(x dt A B C), do: inputs[name])

  defp compare({batch, length, channels, state} = size, options) do
    shape = "B=#{batch},L=#{length},D=#{channels},N=#{state}"
    progress = &Mix.shell().info("measuring #{inspect(size)}: #{&1}")
    options = [progress: progress, limit_ms: @limit_ms] ++ @measured ++ options
    Compare.levels(:selective_scan, RandomInputs.make(:selective_scan, shape: shape), options)
  end

  defp print({title, rows}) do
    Mix.shell().info("\n#{title}")
    line(["level", "ms", "speed-up", "60 FPS", "largest error"])
    [reference | levels] = rows
    base = Enum.find(levels, reference, & &1.time).time.median
    for row <- rows, cells = cells(row, base), do: line([row.label | cells])

    if Enum.any?(rows, &(&1.label =~ "*")),
      do: Mix.shell().info("* one batch measured, times their number")
  end

  defp cells(%{status: {:unavailable, _}}, _base), do: nil
  defp cells(%{status: {:error, error}}, _base), do: [" " <> Exception.message(error)]

  defp cells(%{time: %{median: ms}, status: status, max_abs_err: error}, base) do
    speedup = if status == :ok, do: short(base / ms) <> "x", else: "WRONG"
    [short(ms), speedup, if(ms <= @frame_ms, do: "yes", else: "no"), short(error)]
  end

  defp line([level | cells]) do
    cells = for cell <- cells, do: String.pad_leading(cell, 14)
    Mix.shell().info(String.pad_trailing(level, 24) <> Enum.join(cells))
  end
end

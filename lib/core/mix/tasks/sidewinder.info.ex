defmodule Mix.Tasks.Sidewinder.Info do
  @shortdoc "Prints what this machine has, and where each op would run"

  @moduledoc """
  Prints whether the native library is there, what the CPU and the GPUs offer, and for each op
  where it would run now, and why not on a device that may be faster.

      mix sidewinder.info
      mix sidewinder.info --json

  With `--json` it prints what `Sidewinder.Device.info/0` returns as one line of JSON.

  From Elixir use `Sidewinder.Device.info/0`. The environment variables `SIDEWINDER_BACKEND` and
  `SIDEWINDER_THREADS` and the configuration apply. Missing hardware or software is reported, and is no failure.
  """

  use Mix.Task

  alias Sidewinder.{CommandLine, Device, JSON}

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(args, &main/1)
  end

  defp main(args) do
    options = CommandLine.options!(args, [json: :boolean], "sidewinder.info")
    info = Device.info()
    lines = if options[:json], do: [json(info)], else: lines(info)
    Enum.each(lines, &Mix.shell().info/1)
  end

  @doc false
  def json(info) do
    gpus =
      for %{driver: {major, minor}} = gpu <- info.gpus, do: %{gpu | driver: "#{major}.#{minor}"}

    JSON.text(%{info | backend: Device.name(info.backend), gpus: gpus})
  end

  @doc false
  def lines(info) do
    about = [
      {"native library", if(info.native, do: "loaded", else: "none: #{info.why_no_native}")},
      {"cpu", cpu(info.cpu)},
      {"cuda", cuda(info)},
      {"exla", exla(info.exla)},
      {"backend", Device.name(info.backend)}
    ]

    Enum.map(about, &line/1) ++ [""] ++ ops(info.ops)
  end

  defp cpu(nil), do: "unknown without the native library"

  defp cpu(%{levels: levels, best: best, threads: threads}),
    do: "#{best}, the best of #{Enum.join(levels -- ["reference"], ", ")}; threads: #{threads}"

  defp cuda(%{cuda: %{available: true}, gpus: gpus}), do: Enum.map_join(gpus, ", ", &gpu/1)
  defp cuda(%{cuda: %{devices: [], why_not: why}}), do: "none: #{why}"
  defp cuda(%{cuda: cuda}), do: "#{Enum.join(cuda.devices, ", ")}, not usable: #{cuda.why_not}"

  defp exla(%{available: true, platforms: names}),
    do: "runs the kernels: #{Enum.join(names, ", ")}"

  defp exla(%{why_not: why}), do: "runs no kernels: #{why}"

  defp gpu(%{name: name, ordinal: ordinal, memory: memory, driver: {major, minor}}) do
    "cuda:#{ordinal} #{name}, #{div(memory, 1_073_741_824)} GiB, driver for CUDA #{major}.#{minor}"
  end

  defp ops(ops) when map_size(ops) == 0,
    do: ["No op can run: without the native library they need Nx 0.12 and Elixir 1.17."]

  # Most ops have one and the same reason, which is printed once, after all of them.
  defp ops(ops) do
    reasons = ops |> Map.values() |> Enum.map(& &1.why_not) |> Enum.reject(&is_nil/1)
    lines = for {name, choice} <- Enum.sort(ops), do: line({name, choice.backend})
    lines ++ for why <- Enum.uniq(reasons), do: "\nWhy not faster: #{why}"
  end

  defp line({left, right}), do: String.pad_trailing(left, 24) <> right
end

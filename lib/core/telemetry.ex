defmodule Sidewinder.Telemetry do
  @moduledoc """
  The events that Sidewinder sends through [`:telemetry`](https://hexdocs.pm/telemetry).

      :telemetry.attach(
        "slow calls",
        [:sidewinder, :call, :stop],
        fn _event, %{duration: duration}, %{op: op, backend: backend}, _config ->
          ms = System.convert_time_unit(duration, :native, :microsecond) / 1000
          if ms > 100, do: Logger.warning("\#{op} took \#{ms} ms on \#{backend}")
        end,
        nil
      )

  | event | sent after | measurements | metadata |
  | --- | --- | --- | --- |
  | `[:sidewinder, :call, :stop]` | a call of an op | `duration`, `bytes` | `op`, `backend`, `level`, `threads` |
  | `[:sidewinder, :load, :stop]` | `Sidewinder.Mamba.load/2` | `duration` | `path`, `config`, `type` |
  | `[:sidewinder, :forward, :stop]` | `Sidewinder.Mamba.forward/3` | `duration`, `tokens` | `model` |
  | `[:sidewinder, :loss, :stop]` | `Sidewinder.Mamba.loss/3` | `duration`, `tokens` | `model` |
  | `[:sidewinder, :prefill, :stop]` | a prompt of `Sidewinder.Mamba.Session.prefill/3` | `duration`, `tokens` | `model` |
  | `[:sidewinder, :step, :stop]` | `Sidewinder.Mamba.Session.step/2` and `next/3` | `duration`, `tokens` | `model` |
  | `[:sidewinder, :train, :stop]` | `Sidewinder.Mamba.Trainer.step/3` | `duration`, `tokens` | `model` |
  | `[:sidewinder, :device, :fault]` | any of these that failed on a GPU | `system_time` | `error`, `event` |

  Measurements and metadata are

    * `duration` - in units of `System.monotonic_time/0`. Every `:stop` event has a `monotonic_time` as well,
      that at its end
    * `bytes` - of all inputs and outputs of the call, 0 if it failed
    * `tokens` - how many were processed, or frames of features: one for each session of a step
    * `op` - its name, an atom; gradients have names such as `:selective_scan_backward`
    * `backend` - `:cpu` or `{:cuda, ordinal}`
    * `level`, `threads` - the CPU's level, such as `"avx2"`, and its threads; both nil on a GPU
    * `path`, `config`, `type` - what was loaded, and the model's sizes and type; these are nil if loading failed
    * `model` - the `Sidewinder.Mamba`
    * `error` - nil, or the `Sidewinder.Error` of a call that failed. Every `:stop` event has it
    * `event` - the event of the call that failed

  A fault is an error of kind `:cuda`, after which a device may still be usable, or `:device_lost`, after which it is
  not, until the VM is started anew.

  A call that is refused before it reaches the native library, as for an unknown option, sends no event. Neither do
  calls of pure Nx, nor custom calls in programs of XLA, which never pass through Elixir.

  `:telemetry` is optional: Nx depends on it, and without Nx it is a dependency of the project that wants the events. They
  are sent while the applications `:sidewinder` and `:telemetry` run. Where no handler is attached to an event, neither time
  nor bytes are taken; `bench/RESULTS.md` has the nanoseconds that are left.
  """

  alias Sidewinder.{Error, Native, Tensor}

  @running {__MODULE__, :running}

  # `execute/3` would want the measurements made before it finds that there is no handler. Releases of :telemetry without
  # this function would have every event sent.
  @table :telemetry_handler_table

  @doc false
  # Called when the application starts, after :telemetry where that is there.
  def start do
    running? = List.keymember?(Application.started_applications(), :telemetry, 0)
    asks? = running? and Code.ensure_loaded?(@table)
    asks? = asks? and function_exported?(@table, :list_for_event, 1)
    :persistent_term.put(@running, if(asks?, do: :asks, else: running?))
  end

  @doc false
  # Does `work` and sends the event `[:sidewinder, name, :stop]`. `work` returns what the native library answers, or a
  # pair of where the call ran and that answer; `about` makes measurements and metadata of what `work` returns.
  def span(name, work, about) do
    case :persistent_term.get(@running, false) do
      false -> work.()
      running -> watched([:sidewinder, name, :stop], running, work, about)
    end
  end

  defp watched(event, running, work, about) do
    result =
      if running == true or apply(@table, :list_for_event, [event]) != [],
        do: measured(event, work, about),
        else: work.()

    fault(event, result)
    result
  end

  defp measured(event, work, about) do
    start = System.monotonic_time()
    result = work.()
    stop = System.monotonic_time()
    {measurements, metadata} = about.(result)
    times = %{duration: stop - start, monotonic_time: stop}
    execute(event, Map.merge(measurements, times), Map.put(metadata, :error, error(result)))
    result
  end

  defp error({:ok, _value}), do: nil
  defp error({:error, fields}), do: struct!(Error, fields)
  defp error({_target, answer}), do: error(answer)

  defp fault(_event, {:ok, _value}), do: :ok

  defp fault(event, {:error, %{kind: kind} = fields}) when kind in [:cuda, :device_lost] do
    now = %{system_time: System.system_time()}
    execute([:sidewinder, :device, :fault], now, %{error: error({:error, fields}), event: event})
  end

  defp fault(_event, {:error, _fields}), do: :ok
  defp fault(event, {_target, answer}), do: fault(event, answer)

  # By `apply`, because :telemetry may not be there when this is compiled.
  defp execute(event, measurements, metadata),
    do: apply(:telemetry, :execute, [event, measurements, metadata])

  @doc false
  # `span/3` of a call of an op, where `work` returns the native library's target with its answer.
  def call(op, inputs, work) do
    span(:call, work, fn {target, answer} ->
      {%{bytes: bytes(inputs, answer)}, Map.put(place(target), :op, op)}
    end)
  end

  defp bytes(inputs, {:ok, outputs}), do: bytes(inputs) + bytes(outputs)
  defp bytes(_inputs, {:error, _fields}), do: 0

  # Of one sequence in parts there are outputs of each.
  defp bytes([part | _] = parts) when is_map(part), do: Enum.sum(Enum.map(parts, &bytes/1))

  defp bytes(tensors) do
    Enum.sum(
      for {_, {type, shape, _}} <- tensors,
          do: Tensor.elements(shape) * Tensor.element_bytes(type)
    )
  end

  @doc false
  # `span/3` of loading a model from a path.
  def load(path, work), do: span(:load, work, &{%{}, Map.put(loaded(&1), :path, path)})

  defp loaded({:ok, {_ref, config, type}}), do: %{config: config, type: type}
  defp loaded({:error, _fields}), do: %{config: nil, type: nil}

  @doc false
  # `span/3` of work of a model on tokens or features, as the native library takes them.
  def model(model, name, fed, work),
    do: span(name, work, fn _answer -> {%{tokens: tokens(fed)}, %{model: model}} end)

  defp tokens({_packed, sizes}), do: Enum.product(sizes)
  defp tokens({_type, shape, _data}), do: div(Tensor.elements(shape), max(width(shape), 1))

  defp width(shape), do: elem(shape, tuple_size(shape) - 1)

  defp place(%{device: nil} = target) do
    {:ok, cpu} = Native.cpu_info()
    %{backend: :cpu, level: target.level || cpu.best, threads: target.threads || cpu.threads}
  end

  defp place(%{device: ordinal}), do: %{backend: {:cuda, ordinal}, level: nil, threads: nil}
end

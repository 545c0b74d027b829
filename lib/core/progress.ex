defmodule Sidewinder.Progress do
  @moduledoc """
  The progress of long calls, and the two options by which it is followed and ended.

    * `:progress` - a function of a report, which is called in the process of the call; or a process of this node, which
      gets `{:sidewinder_progress, pid, report}` as a message, with the process of the call
    * `:cancel` - a `Sidewinder.Cancellation`, which ends the call with an error of kind `:cancelled`

  These calls take them:

    * `Sidewinder.Mamba.load/2`, `new/3`, `save/3`, `forward/3`, `loss/3` and `generate/3`
    * `Sidewinder.Mamba.Session.prefill/3`
    * `Sidewinder.Mamba.Trainer.step/3` and `model/2`
    * `Sidewinder.Quantized.quantize/3`, `dequantize/2`, `load!/3` and `save!/3`, with `quantize` and `dequantize` of
      `Sidewinder.Kernel.Quant` and `Sidewinder.Kernel.Ternary`
    * `Sidewinder.Safetensors.read/3` and `write/3`
    * `Sidewinder.GGUF.load!/3`

  A report has the `:stage` of the call, and how many of the `:total` parts of the stage are `:done`: from 0 to all of
  them, never fewer than before.

      iex> model = Sidewinder.Mamba.random(layers: 2, width: 16, vocabulary: 11, backend: :cpu)
      iex> Sidewinder.Mamba.forward(model, [[1, 2, 3]], progress: self())
      iex> for _ <- 0..3, do: receive(do: ({:sidewinder_progress, pid, %{done: done}} when pid == self() -> done))
      [0, 1, 2, 3]
      iex> Sidewinder.Mamba.loss(model, [1, 2, 3], progress: &send(self(), Sidewinder.Progress.percent(&1)))
      iex> for _ <- 0..3, do: receive(do: (percent -> percent))
      [0, 33, 67, 100]

  | stage | call | parts |
  | --- | --- | --- |
  | `:read` | loading with `copy: true` | bytes of the files |
  | `:read` | `Sidewinder.Safetensors.read/3`, `Sidewinder.GGUF.load!/3` | bytes of the tensors |
  | `:read` | `Sidewinder.Quantized.load!/3` | the tensors |
  | `:write` | `Sidewinder.Mamba.save/3`, `Sidewinder.Safetensors.write/3`, `Sidewinder.Quantized.save!/3` | bytes of the tensors |
  | `:convert` | loading | the layers, and one for embedding and head |
  | `:quantize` | loading with `:quantize` | the layers, and one for the head |
  | `:quantize` | `Sidewinder.Quantized.quantize/3` | the numbers of the matrix, for ternary ones again for each mean of the rule |
  | `:dequantize` | `Sidewinder.Quantized.dequantize/2` | the numbers of the matrix |
  | `:upload` | loading to a GPU | bytes of the weights |
  | `:forward` | `Sidewinder.Mamba.forward/3` | the layers, and one for the head |
  | `:prefill` | `Sidewinder.Mamba.Session.prefill/3`, prompts of `Sidewinder.Mamba.generate/3` | the layers, and one for the head |
  | `:loss` | `Sidewinder.Mamba.loss/3` | the same for each 1024 tokens |
  | `:train` | `Sidewinder.Mamba.Trainer.step/3` | the layers forwards and backwards, and one for the head |

  On a GPU, a call with one of these options waits for each layer, so that reports are of work that is done; without them
  all of its work is queued at once. A matrix that is quantized on a GPU, which takes milliseconds, is reported when all of
  it is done. Steps of a session by one token each have no parts.

  A function that raises, exits or throws ends the call: it does so in the caller, when the part at work is done.
  """

  alias Sidewinder.{Cancellation, Error, Options}

  @typedoc "What is done of a stage."
  @type report :: %{
          stage:
            :read
            | :write
            | :convert
            | :quantize
            | :dequantize
            | :upload
            | :forward
            | :prefill
            | :loss
            | :train,
          done: non_neg_integer,
          total: non_neg_integer
        }

  @typedoc "The options of calls that are followed."
  @type option :: {:progress, (report -> any) | pid} | {:cancel, Cancellation.t()}

  @options [:progress, :cancel]

  @doc """
  What is done, in whole percent.

      iex> Sidewinder.Progress.percent(%{stage: :train, done: 2, total: 9})
      22
  """
  @spec percent(report) :: 0..100
  def percent(%{done: done, total: total}), do: round(100 * done / max(total, 1))

  @doc false
  def options, do: @options

  @doc false
  # Does `work` with what the native library is told of these options, and returns its answer.
  def follow(options, work) do
    cancels = cancels(options[:cancel])

    case options[:progress] do
      nil ->
        work.({nil, nil, cancels})

      pid when is_pid(pid) and node(pid) == node() ->
        work.({pid, self(), cancels})

      fun when is_function(fun, 1) ->
        called(fun, cancels, work)

      other ->
        no_listener(other)
    end
  end

  defp no_listener(other),
    do: Options.wrong!(:progress, "a function of a report, or a process of this node", other)

  @doc false
  # The results of `work` for each of `parts`, which are those of a stage, in a call with these options.
  def map(parts, stage, options, work) do
    cancels(options[:cancel])
    tell = listener(options[:progress])
    report = &%{stage: stage, done: &1, total: length(parts)}

    results =
      for {part, done} <- Enum.with_index(parts) do
        go_on!(options, report.(done))
        tell.(report.(done))
        work.(part)
      end

    if parts != [], do: tell.(report.(length(parts)))
    results
  end

  defp listener(nil), do: fn _report -> :ok end
  defp listener(fun) when is_function(fun, 1), do: fun

  defp listener(pid) when is_pid(pid) and node(pid) == node(),
    do: &send(pid, {:sidewinder_progress, self(), &1})

  defp listener(other), do: no_listener(other)

  defp cancels(nil), do: []
  defp cancels(%Cancellation{ref: ref}), do: [ref]
  defp cancels(other), do: Options.wrong!(:cancel, "a Sidewinder.Cancellation", other)

  # The native library occupies the process that calls it, so that is another one.
  defp called(fun, cancels, work) do
    {caller, tag} = {self(), make_ref()}
    own = Cancellation.new(caller)
    watch = {caller, tag, [own.ref | cancels]}
    {_pid, monitor} = spawn_monitor(fn -> exit({tag, work.(watch)}) end)

    try do
      heard(fun, tag, monitor)
    catch
      kind, reason ->
        Cancellation.cancel(own)
        heard(fn _ -> :ok end, tag, monitor)
        :erlang.raise(kind, reason, __STACKTRACE__)
    else
      {^tag, answer} -> answer
      reason -> exit(reason)
    end
  end

  # The reason for which the other process ended.
  defp heard(fun, tag, monitor) do
    receive do
      {:sidewinder_progress, ^tag, report} ->
        fun.(report)
        heard(fun, tag, monitor)

      {:DOWN, ^monitor, :process, _pid, reason} ->
        reason
    end
  end

  @doc false
  # Raises if a call with these options is cancelled, between calls of the native library.
  def go_on!(options), do: go_on!(options, "call", "a cancellation")

  defp go_on!(options, %{stage: stage, done: done, total: total}),
    do: go_on!(options, "#{stage}", "a cancellation after #{done} of #{total} parts")

  defp go_on!(options, what, got) do
    cancellation = options[:cancel]

    if cancellation && Cancellation.cancelled?(cancellation),
      do: raise(Error.new(:cancelled, what, got: got))
  end
end

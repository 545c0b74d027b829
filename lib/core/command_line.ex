defmodule Sidewinder.CommandLine do
  @moduledoc false
  # What the Mix tasks share.

  alias Sidewinder.{Device, Error, Kernel}

  @doc "Runs a task's work; an error of ours becomes one line on standard error and exit code 1."
  def run(work) do
    work.()
  rescue
    error in Error ->
      Mix.shell().error(error |> Exception.message() |> String.replace(~r/\s*\n\s*/, " "))
      exit({:shutdown, 1})
  end

  @doc "The options of a task that takes no other arguments."
  def options!(args, switches, task) do
    case parse!(args, switches, task) do
      {options, []} -> options
      {_options, [other | _]} -> wrong!("arguments", "options only", other, task)
    end
  end

  @doc "The options of a task, and its other arguments."
  def parse!(args, switches, task) do
    case OptionParser.parse(args, strict: switches) do
      {options, words, []} ->
        {options, words}

      {_options, _words, [{name, value} | _]} ->
        wrong!(name, "a known option with a value of its type", value || "none", task)
    end
  end

  @doc "Raises the error about an option of a task."
  def wrong!(name, expected, got, task) do
    hint = "`mix help #{task}` lists the options"
    raise Error.new(:option, name, expected: expected, got: got, hint: hint)
  end

  @doc "Does the work; on a terminal, tells every second how long it has been going on."
  def ticking(label, work) do
    # Elixir allows ANSI sequences where output and errors go to a terminal.
    ticker = if IO.ANSI.enabled?(), do: spawn_link(fn -> tick(label, 1) end)
    result = work.()
    if ticker, do: stop(ticker)
    result
  end

  defp tick(label, seconds) do
    receive do
      {:stop, from} ->
        IO.write(:stderr, "\r\e[K")
        send(from, :stopped)
    after
      1000 ->
        IO.write(:stderr, "\r#{label}: #{seconds} s")
        tick(label, seconds + 1)
    end
  end

  defp stop(ticker) do
    send(ticker, {:stop, self()})
    receive do: (:stopped -> :ok)
  end

  @doc "The result of the work and the milliseconds it took."
  def timed(work) do
    {microseconds, result} = :timer.tc(work)
    {result, microseconds / 1000}
  end

  @doc "Where a call of an op runs, as a text."
  def place(op, inputs, options, where) do
    case Kernel.plan(op, inputs, options, where) do
      {_scheduler, %{device: nil} = target} ->
        cpu = Device.info().cpu
        "cpu (#{target.level || cpu.best}, threads: #{target.threads || cpu.threads})"

      {_scheduler, %{device: ordinal}} ->
        Device.name({:cuda, ordinal})
    end
  end

  @doc "A number with about three digits that matter."
  def short(:infinity), do: "infinite"
  def short(number) when number == 0, do: "0"
  def short(number) when number >= 100, do: :erlang.float_to_binary(number / 1, decimals: 0)
  def short(number) when number >= 1, do: :erlang.float_to_binary(number / 1, decimals: 2)
  def short(number) when number >= 0.01, do: :erlang.float_to_binary(number / 1, decimals: 3)
  def short(number), do: :erlang.float_to_binary(number / 1, [{:scientific, 1}])
end

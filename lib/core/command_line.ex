defmodule Sidewinder.CommandLine do
  @moduledoc false
  # What the Mix tasks share.

  alias Sidewinder.{Device, Error, Kernel, Progress, Quantized}

  # Erlang's error for a write to a pipe without a reader, and also to a full disk.
  @unwritten [:terminated, :epipe]
  @erased "\r\e[K"
  @full [expected: "a file that can be written", got: "a failed write"]

  @doc """
  Runs a task's work on its arguments. An error of ours becomes one line on standard error and exit code 1. Where the
  reader of standard output has seen enough, as `head` has, the task ends quietly.
  """
  def run(args, work) do
    for device <- [:standard_io, :standard_error], do: :io.setopts(device, encoding: :unicode)
    :logger.add_primary_filter(__MODULE__, {&__MODULE__.printable/2, nil})
    ports = ports(Process.group_leader())
    result = args |> utf8!() |> work.()
    written!(ports)
    result
  rescue
    error in Error -> fail(error)
    error in ErlangError -> unwritten(error, __STACKTRACE__)
  end

  # The device that it writes to.
  defp ports(leader) when node(leader) == node() do
    with {:links, links} <- Process.info(leader, :links), do: Enum.filter(links, &is_port/1)
  end

  defp ports(_leader), do: []

  # Erlang answers a request before it has written. A port whose write failed is gone.
  defp written!(ports) do
    Enum.each(ports || [], &written_by!/1)
    IO.write("")
  end

  defp written_by!(port) do
    case Port.info(port, :queue_size) do
      {:queue_size, 0} ->
        :ok

      {:queue_size, _} ->
        Process.sleep(1)
        written_by!(port)

      nil ->
        raise ErlangError, original: :terminated
    end
  end

  defp fail(error) do
    if IO.ANSI.enabled?(), do: IO.write(:stderr, @erased)
    Mix.shell().error(error |> Exception.message() |> String.replace(~r/\s*\n\s*/, " "))
    exit({:shutdown, 1})
  end

  defp unwritten(%{original: reason}, _stacktrace) when reason in @unwritten do
    case File.read_link("/proc/self/fd/1") do
      {:ok, "/" <> _ = path} -> fail(Error.new(:file, path, @full))
      _ -> exit({:shutdown, 0})
    end
  end

  defp unwritten(error, stacktrace), do: reraise(error, stacktrace)

  @doc false
  # The end of standard output is logged, and loggers that print there tell of their own end after it.
  def printable(_event, _), do: if(Process.whereis(:user), do: :ignore, else: :stop)

  @doc "Prints a line about work whose result is elsewhere, so that the work continues if its reader is gone."
  def tell(line, say \\ &Mix.shell().info/1) do
    say.(line)
  rescue
    error in ErlangError ->
      if error.original in @unwritten, do: :ok, else: reraise(error, __STACKTRACE__)
  end

  ## Texts

  # If the locale's encoding is not UTF-8, Erlang takes each byte of an argument for a character. Other arguments were not
  # on the command line.
  defp utf8!(args) do
    misread =
      if :file.native_name_encoding() == :latin1,
        do: for(arg <- :init.get_plain_arguments(), do: List.to_string(arg)),
        else: []

    for arg <- args do
      bytes = if arg in misread, do: :unicode.characters_to_binary(arg, :utf8, :latin1), else: arg
      utf8!(bytes, "arguments")
    end
  end

  defp utf8!(text, what) do
    case :unicode.characters_to_binary(text) do
      ^text -> text
      {_, good, _} -> no_utf8(text, what, byte_size(good))
    end
  end

  defp no_utf8(text, what, at) do
    byte = text |> :binary.at(at) |> Integer.to_string(16)
    got = "the byte 0x#{byte} at offset #{at}, which is none"
    raise Error.new(:argument, what, expected: "text in UTF-8", got: got)
  end

  @doc "The text of a file, or of standard input where its name is `-`, as it is to the last byte."
  def text!("-"), do: text!(standard_input(), "standard input")

  def text!(path) do
    case File.read(path) do
      {:ok, text} ->
        text!(text, path)

      {:error, reason} ->
        got = List.to_string(:file.format_error(reason))
        raise Error.new(:file, path, expected: "a file that can be read", got: got)
    end
  end

  defp text!("", what),
    do: raise(Error.new(:argument, what, expected: "a text, not empty", got: "nothing"))

  defp text!(text, what), do: utf8!(text, what)

  # Bytes come through where each of them is a character.
  defp standard_input do
    before = Keyword.take(:io.getopts(:standard_io), [:encoding])
    :io.setopts(:standard_io, encoding: :latin1)
    bytes = read_on([])
    :io.setopts(:standard_io, before)
    bytes
  end

  # As `IO.binread/2` does, but with a prompt that ExUnit's devices take.
  defp read_on(read) do
    case :io.request(:standard_io, {:get_chars, :latin1, "", 65_536}) do
      more when is_binary(more) or is_list(more) -> read_on([read | more])
      _ -> IO.iodata_to_binary(read)
    end
  end

  ## Options

  @doc "The options of a task that takes no other arguments."
  def options!(args, switches, task) do
    case parse!(args, switches, task) do
      {options, []} -> options
      {_options, [other | _]} -> wrong!("arguments", "options only", other, task)
    end
  end

  @doc "The options of a task, and its other arguments."
  def parse!(args, switches, task) do
    case parse(args, switches) do
      {options, words, []} ->
        {options, words}

      {_options, _words, [{name, value} | _]} ->
        wrong!(name, "a known option with a value of its type", value || "none", task)
    end
  end

  @doc "What `OptionParser` makes of arguments."
  def parse(args, switches) do
    OptionParser.parse(args, strict: switches)
  rescue
    # `OptionParser` raises this, without a name, for digits outside the range of floats.
    ArgumentError ->
      got = "one that is too large"
      reraise Error.new(:option, "arguments", expected: "numbers", got: got), __STACKTRACE__
  end

  @doc "The format that `--quantize` or the like names, or nil."
  def format!(nil, _name, _task), do: nil

  def format!(given, name, task) do
    Enum.find(Quantized.formats(), &(to_string(&1) == given)) ||
      wrong!(name, "q8_0, q4_0 or ternary", given, task)
  end

  @doc "Raises the error about an option of a task."
  def wrong!(name, expected, got, task) do
    hint = "`mix help #{task}` lists the options"
    raise Error.new(:option, name, expected: expected, got: got, hint: hint)
  end

  @doc "Does the work; on a terminal, prints the elapsed time every second."
  def ticking(label, work) do
    # Elixir allows ANSI sequences where output and errors go to a terminal.
    ticker = if IO.ANSI.enabled?(), do: spawn_link(fn -> tick(label, 1) end)

    try do
      work.()
    after
      if ticker, do: stop(ticker)
    end
  end

  defp tick(label, seconds) do
    receive do
      {:stop, from} ->
        IO.write(:stderr, @erased)
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

  @doc "The option by which, on a terminal, a call tells its progress in a line. It is gone when a stage is done."
  def progress(label) do
    if IO.ANSI.enabled?(),
      do: [progress: &IO.write(:stderr, [@erased, line(label, &1)])],
      else: []
  end

  defp line(_label, %{done: all, total: all}), do: ""
  defp line(label, report), do: "#{label}: #{report.stage} #{Progress.percent(report)} %"

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

  @doc "A number with about three significant digits."
  def short(:infinity), do: "infinite"
  def short(number) when number == 0, do: "0"
  def short(number) when number >= 100, do: :erlang.float_to_binary(number / 1, decimals: 0)
  def short(number) when number >= 1, do: :erlang.float_to_binary(number / 1, decimals: 2)
  def short(number) when number >= 0.01, do: :erlang.float_to_binary(number / 1, decimals: 3)
  def short(number), do: :erlang.float_to_binary(number / 1, [{:scientific, 1}])
end

defmodule Mix.Tasks.Sidewinder.Run do
  @shortdoc "Runs an op on a safetensors file"

  @moduledoc """
  Runs an op on the tensors of a safetensors file and writes its outputs to another.

      mix sidewinder.run OP IN.safetensors OUT.safetensors [OPTIONS]
      mix sidewinder.run --help

  The op's inputs are the tensors of its inputs' names; optional ones may be absent. Tensors named
  `out.*` are passed over: sample files carry what should come out. So are cotangents, until their
  op has a gradient. Any other tensor is an error. The output appears whole or not at all.

  `--help` lists the ops with their inputs, shapes and options. Options of an op have dashes here:
  `--dt-softplus`, `--no-dt-softplus`, `--dt-clamp 0.001,0.1`. The last state is written unless
  `--no-return-state` is given. Every op takes these as well:

    * `--backend auto|cpu|cuda|cuda:N` - where to run
    * `--level LEVEL`, `--threads N` - how to run on the CPU
    * `--type f32|bf16|f16|f64` - rounds the inputs to that type first; those that are always in the
      type of the arithmetic to `f32`, or `f64` for `f64`
    * `--case NAME` - takes the tensors named `NAME.*` out of a file of several cases

  On success one line tells what was done; otherwise one line on standard error tells what is
  wrong, and the exit code is 1.
  """

  use Mix.Task

  alias Sidewinder.{CommandLine, Error, Kernel, Native, Safetensors, Tensor}

  @where [backend: :string, level: :string, threads: :integer]
  @common [type: :string, case: :string, help: :boolean] ++ @where
  @takes %{
    "flag" => :boolean,
    "integer" => :integer,
    "float" => :float,
    "pair" => :string,
    "text" => :string
  }

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(fn -> main(args, Error.unwrap!(Native.op_list())) end)
  end

  defp main(args, ops) do
    every = Enum.flat_map(ops, & &1.options)

    case OptionParser.parse(args, strict: switches(every)) do
      {[help: true], _words, _invalid} -> Mix.shell().info(help(ops))
      {_options, [], _invalid} -> Mix.shell().info(help(ops))
      {_options, [name | files], _invalid} -> job(op!(ops, name), files, args)
    end
  end

  defp switches(options),
    do: @common ++ for(o <- options, do: {String.to_atom(o.name), @takes[o.takes]})

  defp op!(ops, name) do
    Enum.find(ops, &(&1.name == name)) ||
      raise Error.new(:argument, "op", expected: Enum.map_join(ops, " or ", & &1.name), got: name)
  end

  defp job(op, files, args) do
    options = options!(op, args)
    [input, output] = files!(files)
    inputs = op |> read(input, options[:case]) |> cast(op, options[:type])
    where = Keyword.take(options, Keyword.keys(@where))
    own = own_options(op, options)
    work = fn -> compute(op, inputs, own, where) end
    {outputs, ms} = CommandLine.timed(fn -> CommandLine.ticking(op.name, work) end)
    Safetensors.write(output, outputs)
    done = "#{op.name}: #{describe(Enum.take(inputs, 1))} -> #{describe(outputs)}"
    place = CommandLine.place(inputs, where)
    Mix.shell().info("#{done} in #{CommandLine.short(ms)} ms on #{place}, written to #{output}")
  end

  defp compute(op, inputs, own, where) do
    Kernel.run(String.to_atom(op.name), inputs, own, where)
  rescue
    error in Error ->
      hint =
        if error.kind == :dtype,
          do: "--type TYPE rounds all inputs to what fits",
          else: error.hint

      reraise %{error | hint: hint}, __STACKTRACE__
  end

  # Long work should not be lost to a misspelt folder.
  defp files!([_input, output] = files) do
    folder = Path.dirname(output)

    if File.dir?(folder),
      do: files,
      else: raise(Error.new(:file, output, expected: "an existing folder", got: folder))
  end

  defp files!(files) do
    raise Error.new(:argument, "files",
            expected: "an input and an output",
            got: Enum.join(files, " ")
          )
  end

  defp describe(tensors) do
    Enum.map_join(tensors, ", ", fn {name, tensor} -> "#{name} #{Tensor.describe(tensor)}" end)
  end

  # Parsed again, for now it is known which options there are.
  defp options!(op, args) do
    case OptionParser.parse(args, strict: switches(op.options)) do
      {options, _words, []} ->
        options

      {_options, _words, [{name, nil} | _]} ->
        known = Enum.map_join(switches(op.options), ", ", fn {key, _} -> dashed(key) end)

        raise Error.new(:option, name,
                op: op.name,
                expected: "an option out of #{known}",
                got: name
              )

      {_options, _words, [{name, value} | _]} ->
        raise Error.new(:option, name, op: op.name, expected: "another sort of value", got: value)
    end
  end

  defp own_options(op, options) do
    defaults =
      if Enum.any?(op.options, &(&1.name == "return_state")), do: %{return_state: true}, else: %{}

    for %{name: name, takes: takes} <- op.options,
        key = String.to_atom(name),
        options[key] != nil,
        into: defaults do
      {key, value(takes, key, options[key])}
    end
  end

  defp value("pair", key, text) do
    with [lo, hi] <- String.split(text, ","),
         {lo, ""} <- Float.parse(lo),
         {hi, ""} <- Float.parse(hi) do
      {lo, hi}
    else
      _ -> raise Error.new(:option, dashed(key), expected: "two numbers LO,HI", got: text)
    end
  end

  defp value(_takes, _key, value), do: value

  defp dashed(key), do: "--" <> (key |> to_string() |> String.replace("_", "-"))

  defp read(op, path, nil), do: read(op, path, "", Enum.map(Safetensors.index(path), & &1.name))

  defp read(op, path, name) do
    case for %{name: full} <- Safetensors.index(path),
             String.starts_with?(full, name <> "."),
             do: full do
      [] -> raise Error.new(:option, "--case", expected: "a case that #{path} has", got: name)
      names -> read(op, path, name <> ".", names)
    end
  end

  defp read(op, path, prefix, names) do
    short = for full <- names, do: String.replace_prefix(full, prefix, "")
    known = for input <- op.inputs, do: input.name
    {passed_over, rest} = Enum.split_with(short -- known, &(&1 in op.cotangents))
    Enum.each(Enum.reject(rest, &String.starts_with?(&1, "out.")), &unknown(op, &1, known))
    tell_passed_over(op, passed_over)
    tensors = Safetensors.read(path, for(name <- known, name in short, do: prefix <> name))
    for name <- known, tensor = tensors[prefix <> name], do: {name, tensor}
  end

  defp unknown(op, name, known) do
    hint =
      if name =~ ".", do: "If the file has several cases, take one with --case NAME", else: ""

    expected = "tensors out of #{Enum.join(known, ", ")}"

    raise Error.new(:argument, name, op: op.name, expected: expected, got: "`#{name}`", hint: hint)
  end

  defp tell_passed_over(_op, []), do: :ok

  defp tell_passed_over(op, names) do
    Mix.shell().info("#{op.name} has no gradient yet; passed over: #{Enum.join(names, ", ")}")
  end

  defp cast(inputs, _op, nil), do: inputs

  defp cast(inputs, op, type) do
    type = Enum.find(Tensor.types(), &(to_string(&1) == type)) || wrong_type(type)
    wide = for %{wide: true, name: name} <- op.inputs, do: name

    for {name, tensor} <- inputs,
        do: {name, Tensor.cast(tensor, if(name in wide, do: wide(type), else: type))}
  end

  defp wide(:f64), do: :f64
  defp wide(_), do: :f32

  defp wrong_type(type),
    do: raise(Error.new(:option, "--type", expected: "f32, bf16, f16 or f64", got: type))

  defp help(ops) do
    """
    mix sidewinder.run OP IN.safetensors OUT.safetensors [OPTIONS]

    Every op: --backend auto|cpu|cuda|cuda:N  --level LEVEL  --threads N  --type f32|bf16|f16|f64
              --case NAME (tensors named NAME.* of a file of several cases)

    #{Enum.map_join(ops, "\n", &help_of/1)}\
    """
  end

  defp help_of(op) do
    inputs =
      for i <- op.inputs,
          do:
            {i.name,
             i.shape <>
               if(i.wide, do: ", wide", else: "") <> if(i.optional, do: ", optional", else: "")}

    options = for o <- op.options, do: {usage(o.takes, dashed(o.name)), o.help}
    "#{op.name}: #{op.about}\n#{rows(inputs ++ options)}"
  end

  defp usage("flag", "--" <> name), do: "--[no-]#{name}"
  defp usage("pair", name), do: "#{name} LO,HI"
  defp usage(takes, name), do: "#{name} #{String.upcase(takes)}"

  defp rows(rows) do
    for {left, right} <- rows, into: "", do: "  #{String.pad_trailing(left, 28)}#{right}\n"
  end
end

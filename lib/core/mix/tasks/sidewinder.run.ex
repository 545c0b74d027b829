defmodule Mix.Tasks.Sidewinder.Run do
  @shortdoc "Runs an op on a safetensors file"

  @moduledoc """
  Runs an op on the tensors of a safetensors file and writes its outputs to another.

      mix sidewinder.run OP IN.safetensors OUT.safetensors [OPTIONS]
      mix sidewinder.run --help

  The op's inputs are the tensors of its inputs' names; optional ones may be absent. Tensors named
  `out.*` are passed over: sample files carry what should come out. Any other tensor is an error. The
  output appears whole or not at all.

  Where the file has cotangents too, gradients of a loss with respect to the op's outputs, such as `dy`
  for `y`, the gradients with respect to all inputs that are there are written beside the outputs: `dx`
  for `x`. Of several cotangents those that are not there are zero.

  `--help` lists the ops with their inputs, cotangents, shapes and options. Options of an op have
  dashes here: `--dt-softplus`, `--no-dt-softplus`, `--dt-clamp 0.001,0.1`, `--activation silu`. The
  last state is written unless `--no-return-state` is given. Every op takes these as well:

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

  @rounds "--type TYPE rounds all inputs to what fits together"
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
      {[help: true], _words, _invalid} -> Mix.shell().info(help(forward(ops)))
      {_options, [], _invalid} -> Mix.shell().info(help(forward(ops)))
      {_options, [name | files], _invalid} -> job(op!(forward(ops), name), ops, files, args)
    end
  end

  # Gradients are asked for by cotangents, not by name.
  defp forward(ops), do: for(op <- ops, op.backward_of == nil, do: op)

  defp switches(options) do
    @common ++ for option <- options, do: {String.to_atom(option.name), @takes[option.takes]}
  end

  defp op!(ops, name) do
    Enum.find(ops, &(&1.name == name)) ||
      raise Error.new(:argument, "op", expected: Enum.map_join(ops, " or ", & &1.name), got: name)
  end

  defp job(op, ops, files, args) do
    options = options!(op, args)
    [input, output] = files!(files)
    backward = Enum.find(ops, &(&1.backward_of == op.name))
    type = options[:type]
    {inputs, cotangents} = read(op, input, options[:case])
    inputs = cast(inputs, op, type)
    cotangents = if cotangents == [], do: [], else: cast(cotangents, backward, type)
    where = Keyword.take(options, Keyword.keys(@where))
    own = own_options(op, options)

    work = fn ->
      outputs = compute(op, inputs, own, where)
      Map.merge(outputs, gradients(backward, inputs, outputs, cotangents, own, where))
    end

    {outputs, ms} = CommandLine.timed(fn -> CommandLine.ticking(op.name, work) end)
    Safetensors.write(output, outputs)
    done = "#{op.name}: #{describe(Enum.take(inputs, 1))} -> #{describe(outputs)}"
    place = CommandLine.place(inputs, where)
    Mix.shell().info("#{done} in #{CommandLine.short(ms)} ms on #{place}, written to #{output}")
  end

  defp compute(op, inputs, own, where) do
    Kernel.run(String.to_atom(op.name), inputs, own, where)
  rescue
    error in Error -> raise if(error.kind == :dtype, do: %{error | hint: @rounds}, else: error)
  end

  defp gradients(_backward, _inputs, _outputs, [], _own, _where), do: %{}

  # The gradient takes what the op took, cotangents, and maybe what the op gave.
  defp gradients(backward, inputs, outputs, cotangents, own, where) do
    given = Map.new(inputs ++ cotangents)

    slots =
      for %{name: name, optional: optional} <- backward.inputs,
          tensor = given[name] || (not optional && from_outputs(outputs, name)),
          do: {name, tensor}

    compute(backward, slots, own, where)
  end

  # An output that the gradient needs, or the cotangent of one that the loss does not depend on.
  defp from_outputs(outputs, name), do: outputs[name] || zeros(outputs, name)

  defp zeros(outputs, "d" <> output) do
    %Tensor{type: type, shape: shape} = outputs[output]
    Tensor.from_list(List.duplicate(0, Tensor.elements(shape)), type, shape)
  end

  # Long work should not be lost to a misspelt folder.
  defp files!([_input, output] = files) do
    folder = Path.dirname(output)
    unless File.dir?(folder), do: no_folder(output, folder)
    files
  end

  defp files!(files) do
    raise Error.new(:argument, "files",
            expected: "an input and an output",
            got: Enum.join(files, " ")
          )
  end

  defp no_folder(output, folder) do
    raise Error.new(:file, output, expected: "an existing folder", got: folder)
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
    known = for option <- op.options, do: {String.to_atom(option.name), option.takes}

    given =
      for {key, takes} <- known, options[key] != nil, do: {key, value(takes, key, options[key])}

    # Who runs an op on files may want to go on from where it stopped.
    defaults = if known[:return_state], do: %{return_state: true}, else: %{}
    Enum.into(given, defaults)
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

  # The op's inputs and cotangents, in its order.
  defp read(op, path, case_name) do
    prefix = if case_name, do: case_name <> ".", else: ""

    names =
      for %{name: name} <- Safetensors.index(path), String.starts_with?(name, prefix), do: name

    if case_name && names == [], do: no_case(path, case_name)

    known = for input <- op.inputs, do: input.name
    given = for name <- names, do: String.replace_prefix(name, prefix, "")
    for name <- given -- (known ++ op.cotangents), do: pass_over(op, name, known)

    tensors = Safetensors.read(path, for(name <- given, not out?(name), do: prefix <> name))
    of = fn names -> for name <- names, t = tensors[prefix <> name], do: {name, t} end
    {of.(known), of.(op.cotangents)}
  end

  defp out?(name), do: String.starts_with?(name, "out.")

  defp no_case(path, name) do
    raise Error.new(:option, "--case", expected: "a case that #{path} has", got: name)
  end

  # Sample files carry what should come out.
  defp pass_over(op, name, known) do
    unless out?(name), do: unknown(op, name, known ++ op.cotangents)
  end

  defp unknown(op, name, known) do
    cases = "If the file has several cases, take one with --case NAME"

    raise Error.new(:argument, name,
            op: op.name,
            expected: "tensors out of #{Enum.join(known, ", ")}",
            got: "`#{name}`",
            hint: if(name =~ ".", do: cases, else: "")
          )
  end

  defp cast(inputs, _op, nil), do: inputs

  defp cast(inputs, op, type) do
    type = Enum.find(Tensor.types(), &(to_string(&1) == type)) || wrong_type(type)
    wide = for %{wide: true, name: name} <- op.inputs, do: name

    type_of = fn name -> if name in wide, do: wide(type), else: type end
    for {name, tensor} <- inputs, do: {name, Tensor.cast(tensor, type_of.(name))}
  end

  defp wide(:f64), do: :f64
  defp wide(_), do: :f32

  defp wrong_type(type) do
    raise Error.new(:option, "--type", expected: "f32, bf16, f16 or f64", got: type)
  end

  defp help(ops) do
    """
    mix sidewinder.run OP IN.safetensors OUT.safetensors [OPTIONS]

    Every op: --backend auto|cpu|cuda|cuda:N  --level LEVEL  --threads N  --type f32|bf16|f16|f64
              --case NAME (tensors named NAME.* of a file of several cases)
    Tensors have one type; those marked wide are f32 beside bf16 and f16, and are cast so by --type.

    #{Enum.map_join(ops, "\n", &help_of/1)}\
    """
  end

  defp help_of(op) do
    inputs = for input <- op.inputs, do: {input.name, input.shape <> notes(input)}

    options =
      for option <- op.options, do: {usage(option.takes, dashed(option.name)), option.help}

    "#{op.name}: #{op.about}\n#{rows(inputs ++ cotangents(op.cotangents) ++ options)}"
  end

  defp cotangents([]), do: []
  defp cotangents(names), do: [{Enum.join(names, ", "), "cotangents: gradients are written too"}]

  defp notes(input) do
    Enum.join(for note <- [:wide, :optional], input[note], do: ", #{note}")
  end

  defp usage("flag", "--" <> name), do: "--[no-]#{name}"
  defp usage("pair", name), do: "#{name} LO,HI"
  defp usage(takes, name), do: "#{name} #{String.upcase(takes)}"

  defp rows(rows) do
    for {left, right} <- rows, into: "", do: "  #{String.pad_trailing(left, 28)}#{right}\n"
  end
end

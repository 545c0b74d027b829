defmodule Sidewinder.OpArguments do
  @moduledoc false
  # An op's options and tensors as the Mix tasks get them: from the command line and from files.

  alias Sidewinder.{CommandLine, Error, Ops, Safetensors, Tensor}

  @takes %{
    "flag" => :boolean,
    "integer" => :integer,
    "float" => :float,
    "pair" => :string,
    "text" => :string
  }

  @doc "Options of ops as switches of `OptionParser`."
  def switches(options),
    do: for(option <- options, do: {String.to_atom(option.name), @takes[option.takes]})

  @doc """
  The name of the op, or `:help`. Options of all ops are known here, so that their values are
  not taken for words.
  """
  def name(args, ops, common) do
    every = switches(Enum.flat_map(ops, & &1.options))

    case CommandLine.parse(args, common ++ every) do
      {options, [name | _], _invalid} -> if(options == [help: true], do: :help, else: name)
      _ -> :help
    end
  end

  @doc "The options, and the words after the op's name, now that the op's options are known."
  def parse!(op, args, common) do
    known = common ++ switches(op.options)

    case CommandLine.parse(args, known) do
      {options, [_name | words], []} -> {options, words}
      {_options, _words, [{name, nil} | _]} -> unknown_option(op, name, known)
      {_options, _words, [{name, value} | _]} -> wrong_value(op, name, value)
    end
  end

  defp unknown_option(op, name, known) do
    raise Error.new(:option, name,
            op: op.name,
            expected: "an option out of #{Enum.map_join(known, ", ", &dashed(elem(&1, 0)))}",
            got: name
          )
  end

  defp wrong_value(op, name, value) do
    raise Error.new(:option, name, op: op.name, expected: "another sort of value", got: value)
  end

  @doc "The op's own options, with values of its types."
  def own(op, options) do
    for %{name: name, takes: takes} <- op.options,
        key = String.to_atom(name),
        options[key] != nil,
        into: %{},
        do: {key, value(takes, key, options[key])}
  end

  defp value("pair", key, text) do
    with [lo, hi] <- String.split(text, ","),
         {lo, ""} <- number(lo),
         {hi, ""} <- number(hi) do
      {lo, hi}
    else
      _ -> raise Error.new(:option, dashed(key), expected: "two numbers LO,HI", got: text)
    end
  end

  defp value(_takes, _key, value), do: value

  # It raises this for digits outside the range of floats.
  defp number(text) do
    Float.parse(text)
  rescue
    ArgumentError -> :error
  end

  defp dashed(key), do: "--" <> (key |> to_string() |> String.replace("_", "-"))

  @doc "The type of that name, or nil for nil."
  def type!(nil), do: nil

  def type!(name) do
    Enum.find(Tensor.float_types(), &(to_string(&1) == name)) ||
      raise Error.new(:option, "--type", expected: "f32, bf16, f16 or f64", got: name)
  end

  @doc "Tensors cast to the types that an op takes with the storage type `type`; unchanged for nil. Masks are never cast."
  def cast(tensors, _op, nil), do: tensors

  def cast(tensors, op, type) do
    slots = for slot <- op.inputs, Ops.float?(slot), into: %{}, do: {slot.name, slot}

    for {name, tensor} <- tensors do
      slot = slots[name]
      {name, if(slot, do: Tensor.cast(tensor, Ops.type(slot, type)), else: tensor)}
    end
  end

  @doc "The op's inputs and the cotangents that a file holds, in the op's order."
  def read(op, path, case_name) do
    prefix = if case_name, do: case_name <> ".", else: ""

    names =
      for %{name: name} <- Safetensors.index(path), String.starts_with?(name, prefix), do: name

    if case_name && names == [], do: no_case(path, case_name)

    known = for input <- op.inputs, do: input.name
    given = for name <- names, do: String.replace_prefix(name, prefix, "")
    for name <- given -- (known ++ op.cotangents), do: pass_over(op, name, known)

    wanted = for name <- given, not out?(name), do: prefix <> name
    tensors = Safetensors.read(path, wanted, CommandLine.progress(path))
    of = fn names -> for name <- names, t = tensors[prefix <> name], do: {name, t} end
    {of.(known), of.(op.cotangents)}
  end

  defp out?(name), do: String.starts_with?(name, "out.")

  defp no_case(path, name) do
    raise Error.new(:option, "--case", expected: "a case that #{path} has", got: name)
  end

  # Sample files have the expected outputs, too.
  defp pass_over(op, name, known) do
    unless out?(name), do: unknown_tensor(op, name, known ++ op.cotangents)
  end

  defp unknown_tensor(op, name, known) do
    cases = "If the file has several cases, take one with --case NAME"

    raise Error.new(:argument, name,
            op: op.name,
            expected: "tensors out of #{Enum.join(known, ", ")}",
            got: "`#{name}`",
            hint: if(name =~ ".", do: cases, else: "")
          )
  end

  @doc "The text about an op in a task's help."
  def help(op) do
    inputs = for input <- op.inputs, do: {input.name, input.shape <> notes(input)}

    options =
      for option <- op.options,
          do: {usage(option.takes, dashed(option.name)), about(option)}

    "#{op.name}: #{op.about}\n#{rows(inputs ++ cotangents(op.cotangents) ++ options)}"
  end

  defp about(%{help: help, choices: []} = option), do: help <> default(option.default)

  defp about(%{help: help, choices: choices} = option),
    do: "#{help}: #{Enum.join(choices, ", ")}#{default(option.default)}"

  # Flags that are off need no text. The texts of options without a default say what happens.
  defp default(none) when none in [nil, false, ""], do: ""
  defp default(value), do: "; #{value} by default"

  defp cotangents([]), do: []
  defp cotangents(names), do: [{Enum.join(names, ", "), "cotangents, for gradients"}]

  defp notes(%{precision: precision, optional: optional}) do
    precision = if precision == "storage", do: "", else: ", #{precision}"
    if optional, do: precision <> ", optional", else: precision
  end

  defp usage("flag", "--" <> name), do: "--[no-]#{name}"
  defp usage("pair", name), do: "#{name} LO,HI"
  defp usage(takes, name), do: "#{name} #{String.upcase(takes)}"

  defp rows(rows) do
    for {left, right} <- rows, into: "", do: "  #{String.pad_trailing(left, 28)}#{right}\n"
  end
end

defmodule Sidewinder.Op.Declared do
  @moduledoc false
  # The table of an op from what its kernel declares.

  alias Sidewinder.{Ops, Shapes}

  @doc """
  The table of the op of that name: its inputs, those of them that are options, its options and its outputs. `more` has
  the rest, and what is not as the kernel has it; its `inputs` and `options` are put in place of those of their names,
  `without` names what only the kernel has, and `rest` is a flag that asks for all outputs but the first.

      iex> %{inputs: inputs, options: options} = Sidewinder.Op.Declared.table(:rms_norm)
      iex> {inputs, options}
      {%{"x" => {:storage, [[:..., :d]]}, "w" => {:wide, [[:d]]}},
       [eps: :not_negative, eps_mode: [:inside, :outside]]}
  """
  @spec table(atom, keyword) :: map
  def table(name, more \\ []) do
    {own, more} = Keyword.split(more, [:inputs, :options, :without, :rest])
    op = Ops.all() |> Ops.find!(name) |> less(own[:without] || [])
    options = (own[:options] || []) ++ flag(own[:rest])

    Map.merge(
      %{
        name: name,
        inputs: op.inputs |> Map.new(&input/1) |> Map.merge(own[:inputs] || %{}),
        optional: optional(op.inputs, more[:params]),
        options: op.options |> Enum.map(&{key(&1), sort(&1)}) |> put(options),
        outputs: op.outputs |> Enum.map(&output/1) |> ask(own[:rest])
      },
      Map.new(more)
    )
  end

  defp less(op, names) do
    own = fn list -> Enum.reject(list, &(&1.name in names)) end
    %{op | inputs: own.(op.inputs), options: own.(op.options), outputs: own.(op.outputs)}
  end

  defp flag(nil), do: []
  defp flag(rest), do: [{rest, {:here, :flag}}]

  @doc """
  The fields of the op's struct: its options with their defaults, `more` in place of them or beside them, and what all
  structs of ops have.

      iex> Sidewinder.Op.Declared.fields(:rms_norm)
      [eps: 1.0e-6, eps_mode: :inside, inputs: [], target: []]
  """
  @spec fields(atom, keyword) :: keyword
  def fields(name, more \\ []) do
    %{options: options} = Ops.find!(Ops.all(), name)
    defaults = for option <- options, do: {key(option), default(option)}
    put(defaults, more) ++ [inputs: [], target: []]
  end

  # Values of the names that are there stay at their places.
  defp put(list, more),
    do: Enum.reduce(more, list, fn {k, v}, list -> List.keystore(list, k, 0, {k, v}) end)

  defp key(%{name: name}), do: String.to_atom(name)

  defp sort(%{takes: "text", choices: choices}), do: Enum.map(choices, &String.to_atom/1)
  defp sort(%{takes: "integer", range: :positive}), do: :size
  defp sort(%{takes: "integer", range: :not_negative}), do: :count
  defp sort(%{range: range}) when range != :any, do: range
  defp sort(%{takes: "float"}), do: :number
  defp sort(%{takes: takes}), do: String.to_atom(takes)

  defp default(%{takes: "text", default: text}) when is_binary(text), do: String.to_atom(text)
  defp default(%{default: default}), do: default

  defp input(%{name: name, precision: precision, shape: words}),
    do: {name, {String.to_atom(precision), forms(words)}}

  # Those that come in a map are no options.
  defp optional(slots, params) do
    in_map = if params, do: params.optional, else: []
    for %{optional: true, name: name} <- slots, name not in in_map, do: optional(name)
  end

  # Inputs of one capital letter are options of the small one.
  defp optional(name) do
    case String.downcase(name) do
      ^name -> String.to_atom(name)
      small -> {String.to_atom(small), name}
    end
  end

  defp output(%{name: name, precision: precision, shape: words, when: asked}) do
    [sizes] = forms(words)
    {String.to_atom(name), String.to_atom(precision), sizes, asked(asked)}
  end

  # What the kernel always gives after the first.
  defp ask(outputs, nil), do: outputs
  defp ask([first | outputs], rest), do: [first | Enum.map(outputs, &asked_by(&1, rest))]

  defp asked_by({name, precision, sizes, :always}, rest), do: {name, precision, sizes, rest}
  defp asked_by(output, _rest), do: output

  defp asked(:always), do: :always
  defp asked({:asked, option}), do: option
  defp asked({:unless, option}), do: {:unless, option}

  ## Shapes

  # The words of axes that may be 1 as well are either of both, or broadcast where all axes are such.
  defp forms(words) do
    if words =~ ~r/^\((\w+\|1(, )?)+\)$/,
      do: [{:repeated, hd(sizes(words))}],
      else: Enum.flat_map(ones(words), &sizes/1)
  end

  defp ones(words) do
    case Regex.run(~r/\w+\|1/, words) do
      [axis] -> [words, String.replace(words, axis, "1")]
      nil -> [words]
    end
  end

  defp sizes(words), do: for(form <- Shapes.parse!(words), do: Enum.map(form, &size/1))

  defp size("..."), do: :...
  defp size({[{1, letter}], 1}) when is_binary(letter), do: atom(letter)
  defp size({[{number, nil}], 1}), do: number

  defp size({terms, 1}) do
    letters = for {count, letter} <- terms, letter, _ <- 1..count, do: atom(letter)
    {:sum, letters, Enum.sum(for {count, nil} <- terms, do: count)}
  end

  defp atom(letter), do: letter |> String.downcase() |> String.to_atom()
end

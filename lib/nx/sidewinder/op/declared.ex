defmodule Sidewinder.Op.Declared do
  @moduledoc false
  # The table of an op from what its kernel declares.

  alias Sidewinder.{Ops, Shapes}
  alias Sidewinder.Op.Heads

  @doc """
  Defines the table of the op of that name and the struct of its module. `fields` are those that are no options of the
  kernel, or have other defaults; the rest of `more` is that of `table/2`.
  """
  defmacro declare(name, more \\ []) do
    quote do
      {fields, more} = Keyword.pop(unquote(more), :fields, [])
      @table Sidewinder.Op.Declared.table(unquote(name), more)
      defstruct Sidewinder.Op.Declared.fields(@table, fields)
    end
  end

  @own [:axes, :options, :outputs, :numbered, :without, :rest, :aliases]

  @doc """
  The table of the op of that name: its inputs, those of them that are options, its options and its outputs. `more` has
  the other entries of the table, and what differs from the kernel's declaration:

    * `axes` - sizes that replace letters of shapes
    * `options` - sorts that replace those of the kernel's options
    * `outputs` - of a kernel that declares none, in its words: the shape, or shape and precision
    * `numbered` - an option: a call has an output whose name ends in a number if the option is greater than it
    * `without` - names that only the kernel has
    * `rest` - a flag that asks for all outputs but the first
    * `aliases` - other names of weights; a composed op takes its weights as a map

      iex> %{inputs: inputs, options: options} = Sidewinder.Op.Declared.table(:rms_norm)
      iex> {inputs, options}
      {%{"x" => {:storage, [[:..., :d]]}, "w" => {:wide, [[:d]]}},
       [eps: :not_negative, eps_mode: [:inside, :outside]]}
  """
  @spec table(atom, keyword) :: map
  def table(name, more \\ []) do
    {own, more} = Keyword.split(more, @own)
    op = Ops.all() |> Ops.find!(name) |> less(own[:without] || [])
    {of_map, inputs} = Enum.split_with(op.inputs, &(more[:composed] && Ops.weight?(&1)))
    form = &forms(&1, own[:axes] || [], option?(op, "layout"))

    %{
      name: name,
      hint: hint(op.hint),
      inputs: op.inputs |> Map.new(&input(&1, form)),
      optional: for(%{optional: true} = slot <- inputs, do: Ops.optional(slot)),
      options: op.options |> Enum.map(&{key(&1), sort(&1)}) |> put(options(own)),
      outputs: op |> outputs(own) |> Enum.map(&output(&1, form)) |> ask(own[:rest])
    }
    |> Map.merge(layout(op))
    |> Map.merge(if(of_map == [], do: %{}, else: %{params: params(of_map, own[:aliases] || %{})}))
    |> Map.merge(Map.new(more))
  end

  defp less(op, names) do
    own = fn list -> Enum.reject(list, &(&1.name in names)) end
    %{op | inputs: own.(op.inputs), options: own.(op.options), outputs: own.(op.outputs)}
  end

  defp option?(op, name), do: Enum.any?(op.options, &(&1.name == name))

  defp options(own), do: (own[:options] || []) ++ flag(own[:rest])

  defp flag(nil), do: []
  defp flag({:saved, rest}), do: flag(rest)
  defp flag(rest), do: [{rest, {:here, :flag}}]

  # A weight whose size is a sum of other sizes comes after those that tell them.
  defp params(slots, aliases) do
    {optional, required} = Enum.split_with(slots, & &1.optional)
    names = fn slots -> for slot <- slots, do: slot.name end

    %{
      required: names.(Enum.sort_by(required, &(&1.shape =~ ~r/[A-Z]\+/))),
      optional: names.(optional),
      aliases: aliases
    }
  end

  # A kernel without declared outputs has them as the cotangents of its gradient.
  defp outputs(%{outputs: [], cotangents: [_ | _]} = op, own) do
    %{inputs: inputs} = Ops.backward(Ops.all(), op)

    for %{name: "d" <> name = cotangent} = slot <- inputs,
        cotangent in op.cotangents,
        do: Map.merge(slot, %{name: name, when: numbered(name, own[:numbered])})
  end

  defp outputs(%{outputs: []}, own) do
    for {name, words} <- own[:outputs] || [] do
      {shape, precision} = if is_binary(words), do: {words, "storage"}, else: words
      %{name: Atom.to_string(name), shape: shape, precision: precision, when: :always}
    end
  end

  defp outputs(op, _own), do: op.outputs

  defp numbered(_name, nil), do: :always

  defp numbered(name, option) do
    [number] = Regex.run(~r/\d+$/, name)
    {:more, option, String.to_integer(number)}
  end

  @doc """
  The fields of an op's struct: the options of its table with their defaults, replaced or extended by `more`, and the
  fields of every op.

      iex> Sidewinder.Op.Declared.fields(Sidewinder.Op.Declared.table(:rms_norm))
      [eps: 1.0e-6, eps_mode: :inside, inputs: [], target: []]
  """
  @spec fields(map, keyword) :: keyword
  def fields(table, more \\ []) do
    %{options: declared} = Ops.find!(Ops.all(), table.name)
    defaults = for option <- declared, do: {key(option), default(option)}
    own = for {key, _sort} <- table.options, do: {key, Keyword.get(defaults, key, false)}
    put(own, more) ++ [inputs: [], target: []]
  end

  # Replaces values in place; new names are appended.
  defp put(list, more),
    do: Enum.reduce(more, list, fn {k, v}, list -> List.keystore(list, k, 0, {k, v}) end)

  defp key(%{name: name}), do: String.to_atom(name)

  defp sort(%{takes: "text", choices: choices}), do: Enum.map(choices, &String.to_atom/1)
  defp sort(%{takes: "integer", range: :positive}), do: :size
  # Kernels refuse 0 for options whose default is positive.
  defp sort(%{takes: "integer", range: :not_negative, default: default})
       when default not in [nil, 0],
       do: :size

  defp sort(%{takes: "integer", range: :not_negative}), do: :count
  defp sort(%{range: range}) when range != :any, do: range
  defp sort(%{takes: "float"}), do: :number
  defp sort(%{takes: takes}), do: String.to_atom(takes)

  defp default(%{takes: "text", default: text}) when is_binary(text), do: String.to_atom(text)
  defp default(%{default: default}), do: default

  # Its size tells the number of packed sequences.
  defp input(%{name: "cu_seqlens" = name}, _form), do: {name, {:i32, [[{:after, :s}]]}}

  defp input(%{name: name, precision: precision, shape: words}, form),
    do: {name, {String.to_atom(precision), form.(words)}}

  defp output(%{name: name, precision: precision, shape: words, when: asked}, form) do
    [sizes] = form.(words)
    {String.to_atom(name), String.to_atom(precision), letters(sizes), asked(asked)}
  end

  defp letters(%{} = by_layout), do: Map.new(by_layout, fn {k, sizes} -> {k, letters(sizes)} end)
  defp letters(sizes), do: for(size <- sizes, do: letter(size))

  defp letter({kind, _size, letter}) when kind in [:divides, :multiple], do: letter
  defp letter(size), do: size

  # A flag asks for the outputs after the first, which the kernel always gives.
  defp ask(outputs, nil), do: outputs
  defp ask([first | outputs], rest), do: [first | Enum.map(outputs, &asked_by(&1, rest))]

  defp asked_by({name, precision, sizes, :always}, rest), do: {name, precision, sizes, rest}
  defp asked_by(output, _rest), do: output

  defp asked({:asked, option}), do: option
  defp asked(asked), do: asked

  ## Shapes

  defp layout(op), do: if(option?(op, "layout"), do: %{chosen_by: :layout}, else: %{})

  # The hint about wrong shapes, with shapes as Nx shows them.
  defp hint(text), do: text |> String.replace("(", "{") |> String.replace(")", "}")

  # If all axes may be 1, the tensor is broadcast; if some may be, both sizes are allowed.
  defp forms(words, axes, layout?) do
    if words =~ ~r/^\((\w+\|1(, )?)+\)$/,
      do: [{:repeated, named(hd(sizes(words)), axes)}],
      else:
        for(one <- ones(words), form <- sizes(one), do: laid(named(form, axes), form, layout?))
  end

  defp named(form, axes),
    do: for(size <- form, do: if(is_atom(size), do: Keyword.get(axes, size, size), else: size))

  # The layout swaps length and heads, but not in a cache, whose length is C.
  defp laid([:b, heads, length, width], [_, _, letter, _], true) when letter in [:l, :m],
    do: Heads.axes(heads, length, width)

  defp laid(form, _letters, _layout?), do: form

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

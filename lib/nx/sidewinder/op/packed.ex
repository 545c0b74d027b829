defmodule Sidewinder.Op.Packed do
  @moduledoc false
  # Packed calls: sequences of different lengths, one after the other in a batch of 1, with their ends as `cu_seqlens`.
  # Tensors of sequences begin with the batch and have an axis of steps; states, one for each sequence, begin with the
  # batch and have none.

  alias Sidewinder.Error
  alias Sidewinder.Op.Check

  @ends "cu_seqlens"

  @doc "The table for a call with these inputs: of packed sequences, or without `cu_seqlens`."
  @spec choose(Sidewinder.Op.table(), [{String.t(), Nx.t()}]) :: Sidewinder.Op.table()
  def choose(%{inputs: %{@ends => _}} = table, given) do
    if List.keymember?(given, @ends, 0),
      do: packed(table, given),
      else: %{table | inputs: Map.delete(table.inputs, @ends)}
  end

  def choose(table, _given), do: table

  defp packed(table, given) do
    for {name, t} <- given do
      if match?(%{vectorized_axes: [_ | _]}, t), do: raise(vectorized(table, name))
      if repeats?(table, name), do: raise(repeated(table, name))
    end

    inputs =
      Map.new(table.inputs, fn {name, {p, forms}} -> {name, {p, Enum.map(forms, &form/1)}} end)

    outputs =
      Enum.map(table.outputs, fn
        {name, precision, dims, asked} -> {name, precision, form(dims), asked}
        gradient -> gradient
      end)

    hint = "Packed sequences lie one after the other in a batch of 1, and have a state each"
    %{table | inputs: inputs, outputs: outputs, hint: hint}
  end

  # Keys M are those of the queries L.
  defp form([:b | rest]) do
    if Enum.any?(rest, &(&1 in [:l, :m])),
      do: [1 | Enum.map(rest, &if(&1 == :m, do: :l, else: &1))],
      else: [:s | rest]
  end

  defp form(form), do: form

  defp repeats?(table, name) do
    case table.inputs do
      %{^name => {_precision, [{:repeated, _} | _]}} -> true
      _ -> false
    end
  end

  defp repeated(table, name) do
    error(table, :argument, name,
      expected: "none beside cu_seqlens",
      got: "one",
      hint: "Packed sequences do not see each other without it; causal masks are allowed"
    )
  end

  defp vectorized(table, name) do
    error(table, :shape, name,
      expected: "no vectorized axes beside cu_seqlens",
      got: "some",
      hint: "Call the op for each entry"
    )
  end

  @doc "Whether an op with inputs of these names is called with packed sequences."
  @spec packed?([String.t()]) :: boolean
  def packed?(names), do: @ends in names

  @doc """
  The outputs of `templates` of a packed call in pure Nx, from the concrete tensors of `inputs`. `body` gives those of one
  sequence, for its inputs and templates.
  """
  @spec pure(struct, [{String.t(), Nx.Tensor.t()}], keyword, function) :: [Nx.Tensor.t()]
  def pure(%module{} = op, inputs, templates, body) do
    table = module.table() |> Check.choose(op) |> choose(inputs)
    {ends, inputs} = Map.pop!(Map.new(inputs), @ends)
    roles = roles(table)
    steps = steps!(table, Nx.to_flat_list(ends), inputs, roles)

    parts =
      for {{start, length}, at} <- Enum.with_index(steps), length > 0 do
        own =
          for name <- List.delete(op.inputs, @ends),
              do: {name, part(inputs[name], roles[name], at, start, length)}

        of_one = for {name, t} <- templates, do: {name, template(t, roles["#{name}"], length)}

        outputs =
          body.(%{op | inputs: Enum.map(own, &elem(&1, 0))}, Enum.map(own, &elem(&1, 1)), of_one)

        {at, Map.new(Enum.zip(Keyword.keys(templates), outputs))}
      end

    for {name, template} <- templates,
        do: join(name, template, roles["#{name}"], Map.new(parts), inputs)
  end

  # By the names of inputs and outputs, and there by their rank; a gradient has those of its input.
  defp roles(table) do
    own = Map.new(table.inputs, fn {name, {_, forms}} -> {name, Enum.map(forms, &by_rank/1)} end)

    outputs =
      for output <- table.outputs, into: %{} do
        case output do
          {name, _, dims, _} -> {"#{name}", [by_rank(dims)]}
          {name, like} -> {"#{name}", own[like]}
        end
      end

    Map.merge(own, outputs)
  end

  defp by_rank({:repeated, form}), do: {length(form), :shared}
  defp by_rank(form), do: {length(form), role(form)}

  # Steps have an axis.
  defp role([1 | rest]) do
    case Enum.find_index(rest, &(&1 == :l)) do
      nil -> :shared
      axis -> {:steps, axis + 1}
    end
  end

  defp role([:s | _]), do: :state
  defp role(_form), do: :shared

  # Of the forms of an input, the first of the tensor's rank counts.
  defp role(roles, t) do
    rank = Nx.rank(t)
    Enum.find_value(roles, :shared, fn {of, role} -> if of == rank, do: role end)
  end

  defp part(t, role, at, start, length) do
    case role(role, t) do
      {:steps, axis} -> Nx.slice_along_axis(t, start, length, axis: axis)
      :state -> Nx.slice_along_axis(t, at, 1, axis: 0)
      :shared -> t
    end
  end

  defp template(t, role, length) do
    shape =
      case role(role, t) do
        {:steps, axis} -> put_elem(t.shape, axis, length)
        :state -> put_elem(t.shape, 0, 1)
        :shared -> t.shape
      end

    Nx.template(shape, t.type)
  end

  defp join(name, template, role, parts, inputs) do
    case role(role, template) do
      {:steps, axis} -> parts |> in_order(name) |> Nx.concatenate(axis: axis)
      :state -> states(name, template, parts, inputs)
      :shared -> parts |> in_order(name) |> sum(template)
    end
  end

  defp in_order(parts, name), do: for({_at, outputs} <- Enum.sort(parts), do: outputs[name])

  defp sum(terms, template) do
    wide = if template.type == {:f, 64}, do: :f64, else: :f32

    terms
    |> Enum.map(&Nx.as_type(&1, wide))
    |> Enum.reduce(&Nx.add(&2, &1))
    |> Nx.as_type(template.type)
  end

  # The state of an empty sequence passes through, and so does its cotangent.
  defp states(name, template, parts, inputs) do
    through = inputs[through("#{name}")]
    none = Nx.broadcast(Nx.tensor(0, type: template.type), put_elem(template.shape, 0, 1))

    for at <- 0..(elem(template.shape, 0) - 1) do
      case parts do
        %{^at => outputs} -> outputs[name]
        _ -> if through, do: Nx.slice_along_axis(through, at, 1, axis: 0), else: none
      end
    end
    |> Nx.concatenate(axis: 0)
  end

  defp through("dinitial_" <> state), do: "dlast_" <> state
  defp through("last_" <> state), do: "initial_" <> state

  # The start and the length of each sequence.
  defp steps!(table, [first | _] = ends, inputs, roles) do
    length =
      Enum.find_value(inputs, fn {name, t} ->
        with {:steps, axis} <- role(roles[name], t), do: elem(t.shape, axis), else: (_ -> nil)
      end)

    pairs = Enum.zip(ends, tl(ends))
    fall = Enum.find(pairs, fn {from, to} -> to < from end)

    cond do
      first != 0 ->
        raise wrong(table, "0 as its first element", first)

      fall ->
        raise wrong(table, "at least #{elem(fall, 0)} after #{elem(fall, 0)}", elem(fall, 1))

      List.last(ends) != length ->
        raise wrong(table, "the length #{length} as its last element", List.last(ends))

      true ->
        for {from, to} <- pairs, do: {from, to - from}
    end
  end

  defp wrong(table, expected, got) do
    error(table, :argument, @ends,
      expected: expected,
      got: Integer.to_string(got),
      hint: "It has the ends of all sequences after a 0, as in [0, 5, 12] for lengths of 5 and 7"
    )
  end

  defp error(table, kind, name, about),
    do: Error.new(kind, name, [op: Atom.to_string(table.name)] ++ about)
end

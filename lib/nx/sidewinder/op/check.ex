defmodule Sidewinder.Op.Check do
  @moduledoc false
  # Nx tensors and options against an op's table, before anything is computed or traced.

  alias Sidewinder.Error
  alias Sidewinder.Op.Gradient

  @storage [{:f, 32}, {:f, 64}, {:bf, 16}, {:f, 16}]

  @doc """
  Checks shapes and brings all tensors to the types that the op takes: integers become floats, and
  inputs of wide precision may have the storage type. Returns `{[{name, tensor, :data | :weight}],
  sizes}`, the tensors without names; `sizes` has the `dims` and their `names` as the first input
  has them, and the types `storage` and `wide`.
  """
  @spec inputs!(Sidewinder.Op.table(), [{String.t(), Nx.t()}]) ::
          {[{String.t(), Nx.Tensor.t(), :data | :weight}], map}
  def inputs!(table, inputs) do
    inputs = for {name, value} <- inputs, do: {name, tensor!(table, name, value)}
    {bound, dims} = Enum.map_reduce(inputs, %{}, &bind!(table, &1, &2))
    storage = storage(table, inputs)
    sizes = %{dims: dims, names: names(table, hd(inputs)), storage: storage, wide: wide(storage)}
    {for({name, t, kind} <- bound, do: {name, plain(cast!(table, name, t, sizes)), kind}), sizes}
  end

  defp tensor!(_table, _name, %Nx.Tensor{} = t), do: t
  defp tensor!(_table, _name, number) when is_number(number), do: Nx.to_tensor(number)

  defp tensor!(table, name, other) do
    raise error(table, :argument, name, expected: "an Nx tensor", got: Error.show(other))
  end

  defp plain(%{names: names} = t) do
    if Enum.all?(names, &is_nil/1), do: t, else: %{t | names: Enum.map(names, fn _ -> nil end)}
  end

  defp names(table, {input, t}) do
    {_precision, [dims | _]} = Map.fetch!(table.inputs, input)
    for {dim, name} when name != nil <- Enum.zip(dims, t.names), into: %{}, do: {dim, name}
  end

  ## Shapes

  defp bind!(table, {name, t}, dims) do
    {_precision, forms} = Map.fetch!(table.inputs, name)
    found = Enum.find_value(forms, &fit(&1, Tuple.to_list(t.shape), dims, &1))

    case found do
      {[:b | _], dims} -> {{name, t, :data}, dims}
      {_weight, dims} -> {{name, t, :weight}, dims}
      nil -> raise wrong_shape(table, name, t, forms, dims)
    end
  end

  defp fit([], [], dims, form), do: {form, dims}

  defp fit([{:divides, dim} | rest], [size | sizes], dims, form) do
    if rem(Map.fetch!(dims, dim), size) == 0, do: fit(rest, sizes, dims, form)
  end

  defp fit([{:sum, _, _} = sum | rest], [size | sizes], dims, form) do
    if size!(sum, dims) == size, do: fit(rest, sizes, dims, form)
  end

  defp fit([dim | rest], [size | sizes], dims, form) do
    case dims do
      %{^dim => ^size} -> fit(rest, sizes, dims, form)
      %{^dim => _} -> nil
      %{} -> fit(rest, sizes, Map.put(dims, dim, size), form)
    end
  end

  defp fit(_form, _sizes, _dims, _), do: nil

  @doc "The size of an axis, once all letters in it have one."
  @spec size!(atom | {:sum, [atom], integer}, map) :: integer
  def size!({:sum, letters, plus}, dims), do: Enum.sum(Enum.map(letters, &size!(&1, dims))) + plus
  def size!(letter, dims), do: Map.fetch!(dims, letter)

  @doc "The template of an output."
  @spec template!(tuple, Nx.Type.t()) :: Nx.Tensor.t()
  def template!(shape, type) do
    if 0 in Tuple.to_list(shape) do
      raise Error.new(:shape, "state",
              expected: "a size of 1 or more in each axis",
              got: show(Tuple.to_list(shape), %{}),
              hint: "Nx has no empty tensors; do not ask for this one"
            )
    end

    Nx.template(shape, type)
  end

  defp wrong_shape(table, name, t, forms, dims) do
    error(table, :shape, name,
      expected: "shape #{Enum.map_join(forms, " or ", &show(&1, dims))}",
      got: show(Tuple.to_list(t.shape), %{}),
      hint: "Layout is channel-last: batch, length, channels"
    )
  end

  defp show(form, dims), do: "{#{Enum.map_join(form, ", ", &show_dim(&1, dims))}}"

  defp show_dim({:divides, dim}, dims), do: "a divisor of #{show_dim(dim, dims)}"
  defp show_dim({:sum, _, _} = sum, dims), do: to_string(size!(sum, dims))
  defp show_dim(dim, dims), do: to_string(Map.get(dims, dim, dim))

  ## Types

  # The first float type among those that set it; integers say nothing.
  defp storage(table, inputs) do
    Enum.find_value(inputs, {:f, 32}, fn {name, %{type: type}} ->
      if precision(table, name) == :storage and not Nx.Type.integer?(type), do: type
    end)
  end

  defp wide({:f, 64}), do: {:f, 64}
  defp wide(_), do: {:f, 32}

  defp precision(table, name), do: table.inputs |> Map.fetch!(name) |> elem(0)

  defp cast!(table, name, %{type: type} = t, sizes) do
    target = Map.fetch!(sizes, precision(table, name))

    cond do
      sizes.storage not in @storage -> raise wrong_type(table, name, t, "f32, bf16, f16 or f64")
      type == target -> t
      type == sizes.storage or Nx.Type.integer?(type) -> Gradient.cast(t, target)
      true -> raise wrong_type(table, name, t, Nx.Type.to_string(target))
    end
  end

  defp wrong_type(table, name, t, expected) do
    error(table, :dtype, name,
      expected: expected,
      got: Nx.Type.to_string(t.type),
      hint: "Types do not mix; convert with Nx.as_type/2"
    )
  end

  ## Options

  @doc "The options as they came, once every value is of its sort."
  @spec options!(Sidewinder.Op.table(), map) :: map
  def options!(table, options) do
    for {name, value} <- options,
        sort = Keyword.fetch!(table.options, name),
        not valid?(sort, value) do
      raise error(table, :option, name, expected: expected(sort), got: Error.show(value))
    end

    options
  end

  defp valid?(:flag, value), do: is_boolean(value)
  defp valid?(:pair, {lo, hi}), do: is_number(lo) and is_number(hi) and lo <= hi
  defp valid?(:pair, _), do: false
  defp valid?({:gradient, sort}, value), do: valid?(sort, value)
  defp valid?(choices, value) when is_list(choices), do: value in choices

  defp expected(:flag), do: "true or false"
  defp expected(:pair), do: "a pair {lo, hi} of numbers, lo <= hi"
  defp expected({:gradient, sort}), do: expected(sort)
  defp expected(choices), do: Enum.map_join(choices, " or ", &inspect/1)

  defp error(table, kind, argument, fields) do
    Error.new(kind, to_string(argument), [op: Atom.to_string(table.name)] ++ fields)
  end
end

defmodule Sidewinder.Op.Check do
  @moduledoc false
  # Nx tensors and options against an op's table, before anything is computed or traced.

  alias Sidewinder.Error
  alias Sidewinder.Op.{Gradient, Names}

  @storage [{:f, 32}, {:f, 64}, {:bf, 16}, {:f, 16}]
  @long 2 ** 62

  @doc "The table with the shapes of the layout, or of another option that chooses shapes."
  @spec choose(Sidewinder.Op.table(), struct) :: Sidewinder.Op.table()
  def choose(%{chosen_by: option, inputs: inputs, outputs: outputs} = table, op) do
    value = Map.fetch!(op, option)

    inputs =
      Map.new(inputs, fn {name, {p, forms}} -> {name, {p, Enum.map(forms, &at(&1, value))}} end)

    outputs =
      Enum.map(outputs, fn
        {name, precision, dims, asked} -> {name, precision, at(dims, value), asked}
        gradient -> gradient
      end)

    %{table | inputs: inputs, outputs: outputs}
  end

  def choose(table, _op), do: table

  defp at(%{} = forms, value), do: Map.fetch!(forms, value)
  defp at(form, _value), do: form

  @doc """
  Checks shapes and casts all tensors to the types that the op takes: integers become floats, and
  inputs of wide precision may have the storage type. Returns `{[{name, tensor, :data | :weight}],
  sizes}`, the tensors without names, and with leading axes flattened; `sizes`
  has the `dims` and their `names` as the first input has them, the `shapes` of all inputs, and the
  types `storage`, `wide` and `index`.
  """
  @spec inputs!(Sidewinder.Op.table(), struct, [{String.t(), Nx.t()}]) ::
          {[{String.t(), Nx.Tensor.t(), :data | :weight}], map}
  def inputs!(table, op, inputs) do
    inputs = for {name, value} <- inputs, do: {name, tensor!(table, name, value)}

    sizes =
      for {key, sort} <- table.options,
          sort in [:size, :count],
          into: %{},
          do: {key, Map.fetch!(op, key)}

    {forms, dims} = Enum.map_reduce(inputs, sizes, &bind!(table, &1, &2))
    Names.check!(table, inputs, forms)
    storage = storage(table, inputs)

    sizes = %{
      dims: dims,
      names: names(table, hd(inputs)),
      shapes: for({name, t} <- inputs, do: {name, t.shape}),
      storage: storage,
      wide: wide(storage),
      index: {:s, 32}
    }

    ready =
      for {{name, t}, form} <- Enum.zip(inputs, forms) do
        {t, kind} = t |> cast!(table, name, sizes) |> plain() |> shape(form, dims)
        {name, t, kind}
      end

    {ready, sizes}
  end

  @doc "An output with the axes and names that its inputs had."
  @spec restore(Nx.Tensor.t(), tuple, map) :: Nx.Tensor.t()
  def restore(t, {_, input}, %{shapes: shapes}) do
    {_, shape} = List.keyfind!(shapes, input, 0)
    Nx.reshape(t, shape)
  end

  def restore(t, {_, _, dims, _}, %{dims: sizes, names: names}) do
    shape = for dim <- dims, size <- List.wrap(size!(dim, sizes)), do: size
    Nx.reshape(t, List.to_tuple(shape), names: Enum.flat_map(dims, &named(&1, names, sizes)))
  end

  defp named(:..., names, sizes), do: names[:...] || Enum.map(sizes[:...], fn _ -> nil end)
  defp named(dim, names, _sizes), do: [names[letter(dim)]]

  defp tensor!(_table, _name, %Nx.Tensor{} = t), do: t
  defp tensor!(_table, _name, number) when is_number(number), do: Nx.to_tensor(number)

  defp tensor!(table, name, other) do
    raise error(table, :argument, name, expected: "an Nx tensor", got: Error.show(other))
  end

  defp plain(%{names: names} = t) do
    if Enum.all?(names, &is_nil/1), do: t, else: %{t | names: Enum.map(names, fn _ -> nil end)}
  end

  defp names(_table, {_input, %{names: []}}), do: %{}

  defp names(table, {input, %{names: names}}) do
    {_precision, [dims | _]} = Map.fetch!(table.inputs, input)
    named_dims(dims, names)
  end

  defp named_dims([:... | dims], names) do
    {leading, names} = Enum.split(names, length(names) - length(dims))
    Map.put(named_dims(dims, names), :..., leading)
  end

  defp named_dims(dims, names) do
    for {dim, name} when name != nil <- Enum.zip(dims, names), into: %{}, do: {letter(dim), name}
  end

  defp letter({_, _, letter}), do: letter
  defp letter(dim), do: dim

  ## Shapes

  defp bind!(table, {name, t}, dims) do
    {_precision, forms} = Map.fetch!(table.inputs, name)
    sizes = Tuple.to_list(t.shape)

    found =
      Enum.find_value(forms, fn form -> (found = fit(form, sizes, dims)) && {form, found} end)

    found || raise wrong_shape(table, name, t, forms, dims)
  end

  defp fit({:repeated, full}, sizes, dims) do
    own = Enum.take(full, -length(sizes))
    fits = length(own) == length(sizes) and Enum.all?(Enum.zip(own, sizes), &repeats?(&1, dims))
    if fits, do: dims
  end

  defp fit([:... | rest], sizes, dims) do
    {leading, own} = Enum.split(sizes, max(length(sizes) - length(rest), 0))
    dims = bind(:..., leading, dims)
    dims && fit(rest, own, Map.put(dims, :b, Enum.product(leading)))
  end

  defp fit([dim | rest], [size | sizes], dims) do
    dims = bind(dim, size, dims)
    dims && fit(rest, sizes, dims)
  end

  defp fit([], [], dims), do: dims
  defp fit(_dims, _sizes, _), do: nil

  defp repeats?({dim, size}, dims), do: size == 1 or size == size!(dim, dims)

  defp bind({:divides, dim}, size, dims), do: if(rem(size!(dim, dims), size) == 0, do: dims)

  defp bind({:divides, dim, letter}, size, dims),
    do: if(rem(size!(dim, dims), size) == 0, do: bind(letter, size, dims))

  defp bind({:multiple, dim, letter}, size, dims),
    do: if(rem(size, size!(dim, dims)) == 0, do: bind(letter, size, dims))

  defp bind({:sum, _, _} = sum, size, dims), do: if(size!(sum, dims) == size, do: dims)
  defp bind({:after, letter}, size, dims), do: bind(letter, size - 1, dims)
  defp bind({:by, _} = by, size, dims), do: if(size!(by, dims) == size, do: dims)
  defp bind(number, size, dims) when is_integer(number), do: if(size == number, do: dims)

  defp bind(letter, size, dims) do
    case dims do
      %{^letter => ^size} -> dims
      %{^letter => _} -> nil
      %{} -> Map.put(dims, letter, size)
    end
  end

  # The tensor in the op's shape, and whether it has the batch.
  defp shape(t, {:repeated, full}, dims) do
    [first | rest] = List.duplicate(1, length(full) - Nx.rank(t)) ++ Tuple.to_list(t.shape)

    if first == 1 and t.vectorized_axes == [],
      do: {Nx.reshape(t, List.to_tuple([1 | rest])), :weight},
      else: {repeat(t, [first | rest], [dims.b | rest]), :data}
  end

  defp shape(t, [:... | rest], %{b: b}) do
    own = Enum.take(Tuple.to_list(t.shape), -length(rest))
    {Nx.reshape(t, List.to_tuple([b | own])), :data}
  end

  defp shape(t, [:b | _], _dims), do: {t, :data}
  defp shape(t, _weight, _dims), do: {t, :weight}

  defp repeat(t, full, more) do
    t |> Nx.reshape(List.to_tuple(full)) |> Nx.broadcast(List.to_tuple(more))
  end

  @doc "The size of an axis, or the sizes of `:...`. All letters in it must be bound."
  @spec size!(Sidewinder.Op.size() | tuple, map) :: integer | [integer]
  def size!({:sum, letters, plus}, dims), do: Enum.sum(Enum.map(letters, &size!(&1, dims))) + plus
  def size!({:after, letter}, dims), do: size!(letter, dims) + 1
  def size!({:by, {module, function, more}}, dims), do: apply(module, function, [dims | more])
  def size!({_, _, letter}, dims), do: size!(letter, dims)
  def size!(number, _dims) when is_integer(number), do: number
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
      hint: table.hint
    )
  end

  defp show({:repeated, form}, dims), do: "#{show(form, dims)} or what repeats to it"
  defp show(form, dims), do: "{#{Enum.map_join(form, ", ", &show_dim(&1, dims))}}"

  defp show_dim({:divides, dim}, dims), do: "a divisor of #{show_dim(dim, dims)}"
  defp show_dim({_, _, letter}, dims) when is_map_key(dims, letter), do: show_dim(letter, dims)
  defp show_dim({:divides, dim, _}, dims), do: "a divisor of #{show_dim(dim, dims)}"
  defp show_dim({:multiple, dim, _}, dims), do: "a multiple of #{show_dim(dim, dims)}"
  defp show_dim({:after, letter}, dims) when is_map_key(dims, letter), do: "#{dims[letter] + 1}"
  defp show_dim({:after, letter}, _dims), do: "#{letter} + 1"
  defp show_dim(:..., %{...: leading}), do: Enum.join(leading, ", ")
  defp show_dim({:sum, _, _} = sum, dims), do: to_string(size!(sum, dims))
  defp show_dim({:by, _} = by, dims), do: to_string(size!(by, dims))
  defp show_dim(dim, dims), do: to_string(Map.get(dims, dim, dim))

  ## Types

  # The type of the first input of storage precision that is no integer.
  defp storage(table, inputs) do
    Enum.find_value(inputs, {:f, 32}, fn {name, %{type: type}} ->
      if precision(table, name) == :storage and not Nx.Type.integer?(type), do: type
    end)
  end

  defp wide({:f, 64}), do: {:f, 64}
  defp wide(_), do: {:f, 32}

  defp precision(table, name), do: table.inputs |> Map.fetch!(name) |> elem(0)

  defp cast!(t, table, name, sizes) do
    case precision(table, name) do
      :mask -> mask!(t, table, name)
      :i32 -> integer!(t, table, name)
      _ -> float!(t, table, name, sizes)
    end
  end

  defp integer!(%{type: {:s, 32}} = t, _table, _name), do: t

  defp integer!(t, table, name) do
    if Nx.Type.integer?(t.type),
      do: Nx.as_type(t, {:s, 32}),
      else: raise(wrong_type(table, name, t, "s32 or another type of integers"))
  end

  defp mask!(%{type: {:u, 8}} = t, _table, _name), do: t

  defp mask!(t, table, name) do
    if Nx.Type.integer?(t.type),
      do: Nx.not_equal(t, 0),
      else: raise(wrong_type(table, name, t, "u8 or another type of integers"))
  end

  defp float!(%{type: type} = t, table, name, sizes) do
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

  @doc "The options, after a check that every value is of its sort."
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
  defp valid?(:number, value), do: is_number(value)
  defp valid?(:positive, value), do: is_number(value) and value > 0
  defp valid?(:not_negative, value), do: is_number(value) and value >= 0
  defp valid?(:not_positive, value), do: is_number(value) and value <= 0
  defp valid?(:share, value), do: is_number(value) and value >= 0 and value <= 1
  defp valid?(:integer, value), do: is_integer(value) and abs(value) < @long
  defp valid?(:count, value), do: is_integer(value) and value in 0..@long//1
  defp valid?(:size, value), do: is_integer(value) and value > 0 and value < @long
  defp valid?({_, sort}, value), do: valid?(sort, value)
  defp valid?(choices, value) when is_list(choices), do: value in choices

  defp expected(:flag), do: "true or false"
  defp expected(:pair), do: "a pair {lo, hi} of numbers, lo <= hi"
  defp expected(:number), do: "a number"
  defp expected(:positive), do: "a positive number"
  defp expected(:not_negative), do: "a number, not negative"
  defp expected(:not_positive), do: "a number, not positive"
  defp expected(:share), do: "a number from 0 to 1"
  defp expected(:integer), do: "an integer of 64 bits"
  defp expected(:count), do: "an integer, not negative"
  defp expected(:size), do: "a positive integer"
  defp expected({_, sort}), do: expected(sort)
  defp expected(choices), do: Enum.map_join(choices, " or ", &inspect/1)

  defp error(table, kind, argument, fields) do
    Error.new(kind, to_string(argument), [op: Atom.to_string(table.name)] ++ fields)
  end
end

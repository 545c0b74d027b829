defmodule Sidewinder.Op.Names do
  @moduledoc false
  # Names of axes. An axis of several sequences, states or vectors must have one name, as in `Nx.add/2`; the axis of a
  # weight that a product sums over may have another name, as in `Nx.dot/2`.

  alias Sidewinder.Error

  @doc "Raises where two of the inputs `{name, tensor}`, of the shapes `forms`, call an axis differently."
  @spec check!(Sidewinder.Op.table(), [{String.t(), Nx.Tensor.t()}], list) :: :ok
  def check!(table, inputs, forms) do
    of_data = for [_ | _] = form <- forms, data?(form), dim <- form, do: letter(dim)

    for {{input, t}, form} <- Enum.zip(inputs, forms),
        {letter, name} when name != nil <- axes(form, t.names),
        shared?(table, input, form, letter in of_data),
        reduce: %{} do
      known -> agree!(table, known, letter, {name, input})
    end

    :ok
  end

  defp agree!(table, known, letter, {name, input} = this) do
    case known do
      %{^letter => {other, first}} when other != name -> raise wrong(table, this, other, first)
      %{} -> Map.put_new(known, letter, {name, input})
    end
  end

  # A product sums over the matrix's axis that data has, too. Weights of different products share no names.
  defp shared?(table, input, form, of_data) do
    cond do
      data?(form) or elem(table.inputs[input], 0) == :wide -> true
      is_map_key(table, :params) -> false
      true -> length(form) == 1 or not of_data
    end
  end

  defp data?({:repeated, _}), do: true
  defp data?([first | _]), do: first in [:b, :..., 1]

  defp axes({:repeated, full}, names), do: axes(Enum.take(full, -length(names)), names)

  defp axes([:... | rest], names) do
    {leading, names} = Enum.split(names, length(names) - length(rest))
    leading = for {name, i} <- Enum.with_index(leading), do: {{:..., i}, name}
    leading ++ axes(rest, names)
  end

  # An axis that occurs twice, as in a square, may have two names.
  defp axes(form, names) do
    letters = Enum.map(form, &letter/1)
    times = Enum.frequencies(letters)

    for {letter, name} <- Enum.zip(letters, names),
        is_atom(letter) and times[letter] == 1,
        do: {letter, name}
  end

  defp letter({_, _, letter}) when is_atom(letter), do: letter
  defp letter(dim), do: dim

  defp wrong(table, {name, input}, other, first) do
    Error.new(:shape, input,
      op: Atom.to_string(table.name),
      expected: "an axis called #{inspect(other)}, as #{first} has it",
      got: inspect(name),
      hint: "Names of axes must agree, as in Nx.add/2; change them with Nx.rename/2"
    )
  end
end

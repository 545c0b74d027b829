defmodule Sidewinder.MMRec.Dump do
  @moduledoc false
  # The bytes of a memory: a safetensors file of keys, values and cursor of each layer's banks.

  alias Sidewinder.{Error, Safetensors, Tensor}

  @doc "The bytes of banks, `{layer, :short | :long, [k: tensor, v: tensor, cursor: number]}`."
  def encode(banks) do
    for(
      {layer, bank, parts} <- banks,
      {part, value} <- parts,
      do: {name(layer, bank, part), tensor(value)}
    )
    |> Safetensors.encode()
  end

  defp name(layer, bank, part), do: "layer.#{layer}.#{bank}.#{part}"

  defp tensor(%Tensor{} = tensor), do: Tensor.to_host(tensor)
  defp tensor(cursor), do: Tensor.new(<<cursor::signed-native-64>>, :i64, {1})

  @doc "The tensors of a dump by name, how many layers they are of, and the keys of the first layer's banks."
  def decode!(dump) do
    tensors = Safetensors.decode(dump)
    count = div(map_size(tensors), 6)

    unless count > 0 and map_size(tensors) == 6 * count,
      do: no_dump("six tensors for each layer", "#{map_size(tensors)}")

    [short, long] = for bank <- [:short, :long], do: keys!(tensors, bank)
    {tensors, count, short, long}
  end

  defp keys!(tensors, bank) do
    case tensors[name(0, bank, :k)] do
      %{shape: {_, _, _}} = tensor -> tensor
      other -> no_dump("#{name(0, bank, :k)} of three axes", show(other))
    end
  end

  @doc "Keys and values of a bank, of that type and shape, and its cursor."
  def bank!(tensors, layer, bank, spec) do
    banks = for part <- [:k, :v], do: part!(tensors, name(layer, bank, part), spec)
    {banks, cursor!(tensors, name(layer, bank, :cursor))}
  end

  defp part!(tensors, name, {type, shape}) do
    case tensors[name] do
      %{shape: ^shape, type: ^type} = tensor -> tensor
      other -> no_dump("#{name} of #{type} #{inspect(shape)}", show(other))
    end
  end

  defp cursor!(tensors, name) do
    case tensors[name] do
      %{type: :i64, data: <<cursor::signed-native-64>>} when cursor >= 0 -> cursor
      other -> no_dump("#{name}, one number of i64, not negative", show(other))
    end
  end

  defp show(nil), do: "none"
  defp show(tensor), do: inspect(tensor)

  defp no_dump(expected, got) do
    raise Error.new(:argument, "dump",
            expected: expected,
            got: got,
            hint: "It is what Sidewinder.MMRec.Memory.dump/1 gives"
          )
  end
end

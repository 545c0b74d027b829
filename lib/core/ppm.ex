defmodule Sidewinder.PPM do
  @moduledoc false
  # Prediction by partial matching, method C (Moffat 1990), with exclusion: how many bits a byte it needs for a text, each
  # byte being predicted from those before it. The baseline for a small language model of bytes.

  @order 5

  @doc "Bits a byte for a text, after reading another one."
  @spec bits_per_byte(binary, binary) :: float
  def bits_per_byte(text, read \\ "") do
    counts = :ets.new(:ppm, [:set, :private])
    {_, past} = walk(read, counts, "", 0.0)
    {bits, _} = walk(text, counts, past, 0.0)
    :ets.delete(counts)
    bits / byte_size(text)
  end

  defp walk(<<byte, rest::binary>>, counts, past, bits) do
    {cost, order} = cost(byte, counts, past, byte_size(past), %{}, 0.0)
    # Contexts shorter than the one that knew the byte keep their counts.
    for length <- max(order, 0)..byte_size(past), do: add(counts, suffix(past, length), byte)
    walk(rest, counts, suffix(past <> <<byte>>, min(byte_size(past) + 1, @order)), bits + cost)
  end

  defp walk("", _counts, past, bits), do: {bits, past}

  # The bits that a byte takes and the length of the context that knows it, -1 for none.
  defp cost(_byte, _counts, _past, -1, excluded, bits),
    do: {bits + :math.log2(256 - map_size(excluded)), -1}

  defp cost(byte, counts, past, length, excluded, bits) do
    known = known(counts, suffix(past, length))
    left = if excluded == %{}, do: known, else: Map.drop(known, Map.keys(excluded))
    total = left |> Map.values() |> Enum.sum()

    case {left, map_size(left)} do
      {_, 0} ->
        cost(byte, counts, past, length - 1, excluded, bits)

      {%{^byte => count}, kinds} ->
        {bits - :math.log2(count / (total + kinds)), length}

      {_, kinds} ->
        escape = -:math.log2(kinds / (total + kinds))
        cost(byte, counts, past, length - 1, Map.merge(excluded, left), bits + escape)
    end
  end

  defp known(counts, context) do
    case :ets.lookup(counts, context) do
      [{_, known}] -> known
      [] -> %{}
    end
  end

  defp add(counts, context, byte),
    do: :ets.insert(counts, {context, Map.update(known(counts, context), byte, 1, &(&1 + 1))})

  defp suffix(text, length), do: binary_part(text, byte_size(text) - length, length)
end

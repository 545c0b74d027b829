defmodule Sidewinder.Reference.Rope do
  @moduledoc false
  # Rotary position embedding, and its gradient: the rotation by the negative angles.

  alias Sidewinder.Error
  import Sidewinder.Reference.Numbers

  def body(op, %{"x" => x}), do: [y: rotate(op, x, 1)]
  def backward(op, %{"dy" => dy}), do: [dx: rotate(op, dy, -1)]

  defp rotate(op, x, sign) do
    {pairs, axis} = pairs(op, x)

    [a, b] =
      for i <- 0..1, do: Nx.squeeze(Nx.slice_along_axis(pairs, i, 1, axis: axis), axes: [axis])

    angles = angles(op, x)
    [cos, sin] = for f <- [&Nx.cos/1, &Nx.sin/1], do: Nx.as_type(f.(angles), a.type)
    sin = Nx.multiply(sin, constant(sign, sin))

    [
      Nx.subtract(Nx.multiply(a, cos), Nx.multiply(b, sin)),
      Nx.add(Nx.multiply(a, sin), Nx.multiply(b, cos))
    ]
    |> Nx.stack(axis: axis)
    |> Nx.reshape(x.shape)
    |> Nx.as_type(x.type)
  end

  # The last axis split into two, and which of the two is the pair.
  defp pairs(op, x) do
    [width | outer] = Enum.reverse(Tuple.to_list(x.shape))
    half = div(width, 2)
    {last, axis} = if op.pairing == :half, do: {[half, 2], -2}, else: {[2, half], -1}
    {x |> wide() |> Nx.reshape(List.to_tuple(Enum.reverse(last ++ outer))), axis}
  end

  # {1, 1, L, W / 2}, or as the layout has it.
  defp angles(op, x) do
    {axis, new} = if op.layout == :heads_first, do: {2, 0}, else: {1, 1}
    angles = angles(op.first_position, elem(x.shape, axis), rates(op, elem(x.shape, 3)))
    Nx.new_axis(angles, new)
  end

  @doc """
  The angles of rows from the position `first` on, `{length, rates}`. They are f64: in f32 they are off
  by 1e-3 at positions of 1e5.
  """
  def angles(first, length, rates) do
    positions = Nx.add(Nx.iota({length, 1}, axis: 0, type: :f64), Nx.tensor(first, type: :f64))
    Nx.multiply(positions, Nx.tensor(rates, type: :f64))
  end

  @doc "`theta^(-2i / width)`"
  def rate(theta, i, width), do: :math.pow(theta, -2 * i / width)

  defp rates(%{low_freq_factor: low, high_freq_factor: high}, _) when high <= low do
    raise Error.new(:option, "high_freq_factor",
            op: "rope",
            expected: "more than low_freq_factor, #{low}",
            got: high
          )
  end

  defp rates(op, width) do
    for i <- 0..(div(width, 2) - 1), do: scale(op, rate(op.theta, i, width))
  end

  defp scale(%{scaling_factor: nil}, rate), do: rate

  defp scale(%{low_freq_factor: low, high_freq_factor: high, original_length: length} = op, rate) do
    wavelength = 2 * :math.pi() / rate
    share = (length / wavelength - low) / (high - low)

    cond do
      wavelength < length / high -> rate
      wavelength > length / low -> rate / op.scaling_factor
      true -> (1 - share) * rate / op.scaling_factor + share * rate
    end
  end
end

defmodule Sidewinder.Compare.Difference do
  @moduledoc false
  # Differences of tensors from the reference, and tolerances; `Sidewinder.Compare` has the rules.

  alias Sidewinder.{Error, Tensor}

  # {rtol, atol}; the latter times the largest of a tensor, and sqrt(n) where no step is rounded to less
  # than it is computed in.
  @summed %{f64: {1.0e-10, 1.0e-12}, f32: {1.0e-5, 1.0e-6}}
  @rounded %{bf16: {0.00390625, 0.015625}, f16: {0.00048828125, 0.001953125}}

  @type t :: Sidewinder.Compare.difference()

  @typedoc "A tensor of the reference, its largest element, and the tolerance."
  @type truth :: %{tensor: Tensor.t(), largest: float, rtol: number, atol: number}

  @doc """
  The reference's outputs on the host, of floats or of integers, with their tolerances: those of the type of the first
  of the `inputs`, or those of `options`.
  """
  @spec truths(map, [{String.t(), Tensor.t()}], keyword) :: %{String.t() => truth}
  def truths(outputs, inputs, options) do
    Map.new(outputs, fn {name, tensor} -> {name, truth(tensor, inputs, options)} end)
  end

  defp truth(%{type: type} = tensor, [{_, %{type: storage}} | _] = inputs, options)
       when type in [:f64, :f32, :bf16, :f16] do
    {rtol, atol} = tolerance(storage, options[:terms] || terms(tensor, inputs))
    # Outputs of a narrower type are rounded to it in the reference as well.
    tensor = Tensor.cast(tensor, :f64)
    largest = largest(tensor.data, 0.0)
    rtol = options[:rtol] || rtol
    %{tensor: tensor, largest: largest, rtol: rtol, atol: options[:atol] || atol * largest}
  end

  # Indices of slots have no tolerance.
  defp truth(integers, _inputs, _options) do
    tensor = Tensor.cast(integers, :f64)
    %{tensor: tensor, largest: largest(tensor.data, 0.0), rtol: 0.0, atol: 0.0}
  end

  defp tolerance(type, _terms) when is_map_key(@rounded, type),
    do: @rounded[type]

  defp tolerance(type, terms) do
    {rtol, atol} = @summed[type] || @summed.f32
    {rtol, atol * :math.sqrt(terms)}
  end

  defp terms(tensor, inputs) do
    axes = for {_, %{shape: shape}} <- inputs, axis <- Tuple.to_list(shape), do: axis
    sizes = for {_, %{shape: shape}} <- inputs, do: Tensor.elements(shape)
    Enum.max([1, div(Enum.max(sizes), max(Tensor.elements(tensor.shape), 1)) | axes])
  end

  defp largest(<<a::float-native-64, rest::binary>>, largest),
    do: largest(rest, max(largest, abs(a)))

  defp largest(<<_no_number::64, rest::binary>>, largest), do: largest(rest, largest)
  defp largest(<<>>, largest), do: largest

  @doc "The difference of one tensor from another, with `:rtol` and `:atol` of `tolerance`."
  @spec of(Tensor.t(), Tensor.t(), keyword(number)) :: t
  def of(%Tensor{shape: shape} = got, %Tensor{shape: shape} = expected, tolerance) do
    expected = Tensor.cast(Tensor.to_host(expected), :f64)
    largest = largest(expected.data, 0.0)
    differ(got, Map.merge(%{tensor: expected, largest: largest}, Map.new(tolerance)))
  end

  def of(%Tensor{} = got, %Tensor{} = expected, _), do: wrong_shape("tensor", got, expected)

  @doc "The differences of some outputs by name, at least one, from their references."
  @spec all(map, %{String.t() => truth}) :: %{String.t() => t}
  def all(outputs, truths) when map_size(outputs) > 0 do
    Map.new(outputs, fn {name, tensor} -> {to_string(name), one(name, tensor, truths)} end)
  end

  def all(_outputs, truths), do: no_output("none", truths)

  defp one(name, tensor, truth) do
    case truth[to_string(name)] do
      nil -> no_output(to_string(name), truth)
      %{tensor: %{shape: shape}} = truth when shape == tensor.shape -> differ(tensor, truth)
      %{tensor: expected} -> wrong_shape(name, tensor, expected)
    end
  end

  defp no_output(got, truth) do
    raise Error.new(:argument, "outputs",
            expected: "some out of #{Enum.join(Map.keys(truth), ", ")}",
            got: got
          )
  end

  defp wrong_shape(name, got, expected) do
    raise Error.new(:shape, to_string(name),
            expected: Tensor.describe(expected),
            got: Tensor.describe(got)
          )
  end

  defp differ(got, %{tensor: expected, largest: largest} = truth) do
    got = got |> Tensor.to_host() |> Tensor.cast(:f64)
    # Relative to almost nothing, any difference is large.
    least = if largest > 1.0e-280, do: largest / 1000, else: 1.0
    limits = {truth.atol, truth.rtol, least}
    {most, relative, excess} = differ(got.data, expected.data, limits, {0.0, 0.0, 0.0})
    %{max_abs_err: most, max_rel_err: relative, within_tolerance: excess <= 0}
  end

  defp differ(same, same, _limits, worst), do: worst

  # An infinity or NaN does not match as a float.
  defp differ(
         <<a::float-native-64, as::binary>>,
         <<b::float-native-64, bs::binary>>,
         {atol, rtol, least} = limits,
         {most, relative, excess}
       ) do
    off = abs(a - b)
    size = abs(b)

    worst =
      {max(most, off), max(relative, off / max(size, least)),
       max(excess, off - (atol + rtol * size))}

    differ(as, bs, limits, worst)
  end

  defp differ(<<a::binary-8, as::binary>>, <<b::binary-8, bs::binary>>, limits, worst) do
    if kind(a) == kind(b),
      do: differ(as, bs, limits, worst),
      else: {:infinity, :infinity, :infinity}
  end

  defp kind(<<_::float-native-64>>), do: :number
  defp kind(<<bits::native-64>>) when bits in [0x7FF0000000000000, 0xFFF0000000000000], do: bits
  defp kind(_), do: :nan
end

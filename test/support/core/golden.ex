defmodule Sidewinder.Golden do
  @moduledoc false
  # The golden cases in test/golden, and how results are compared with them.

  import ExUnit.Assertions
  alias Sidewinder.{Compare, Safetensors, Tensor}

  @folder Path.expand("../../golden", __DIR__)
  @described Path.join(@folder, "manifest.json")
  @external_resource @described

  # Elixir has no JSON parser before 1.18; this file is JSON simple enough to be made Elixir. That takes seconds, so it
  # is done when this is compiled.
  {manifest, _} =
    @described
    |> File.read!()
    |> String.replace("{", "%{")
    |> String.replace("\":", "\" =>")
    |> String.replace("null", "nil")
    |> String.replace(~r/(?<![\d.])(\d+)e(?=[-+\d])/, "\\1.0e")
    |> Code.eval_string()

  @ops manifest["ops"]

  defp ops, do: @ops

  @doc "The file with an op's cases."
  def file(op), do: Path.join(@folder, "#{op}.safetensors")

  @doc "What there are cases of."
  def names, do: for({name, _} <- ops(), do: String.to_atom(name))

  @doc "An op's cases: name, attributes, input tensors, and expected outputs with their tolerances."
  def cases(op) do
    tensors = Safetensors.read(file(op))
    for described <- ops()[to_string(op)]["cases"], do: build(described, tensors)
  end

  defp build(
         %{"name" => name, "attrs" => attrs, "inputs" => inputs, "outputs" => outputs},
         tensors
       ) do
    %{
      name: name,
      attrs:
        for(
          {key, value} <- attrs,
          value != nil,
          into: %{},
          do: {String.to_atom(key), attr(value)}
        ),
      inputs: for({input, _} <- inputs, into: %{}, do: {input, tensors["#{name}.#{input}"]}),
      outputs:
        for {output, about} <- outputs, into: %{} do
          {rtol, atol} = tolerance(about)
          {output, %{tensor: tensors["#{name}.out.#{output}"], rtol: rtol, atol: atol}}
        end
    }
  end

  defp tolerance(%{"exact" => true}), do: {0.0, 0.0}
  defp tolerance(%{"rtol" => rtol, "atol" => atol}), do: {rtol, atol}

  defp attr([lo, hi]), do: {lo, hi}
  defp attr(value), do: value

  @doc "Asserts `|got - expected| <= atol + rtol * |expected|` for every element, and equal shapes."
  def assert_close(%Tensor{} = got, %Tensor{} = expected, rtol, atol, label) do
    assert got.shape == expected.shape,
           "#{label}: shape #{inspect(got.shape)} is not #{inspect(expected.shape)}"

    unless Compare.difference(got, expected, rtol: rtol, atol: atol).within_tolerance,
      do: tell(got, expected, rtol, atol, label)
  end

  defp tell(got, expected, rtol, atol, label) do
    pairs = Enum.zip(Tensor.to_list(got), Tensor.to_list(expected))
    wrong = Enum.reject(pairs, fn {g, e} -> close?(g, e, rtol, atol) end)

    flunk("#{label}: #{length(wrong)} of #{length(pairs)} differ, such as #{worst(wrong)}")
  end

  defp close?(got, expected, rtol, atol) when is_float(got) and is_float(expected) do
    abs(got - expected) <= atol + rtol * abs(expected)
  end

  defp close?(got, expected, _rtol, _atol), do: got == expected

  defp worst(wrong) do
    {got, expected} =
      Enum.max_by(wrong, fn {g, e} ->
        if is_float(g) and is_float(e), do: abs(g - e), else: :far
      end)

    "#{got} in place of #{expected}"
  end
end

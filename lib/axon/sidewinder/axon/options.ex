defmodule Sidewinder.Axon.Options do
  @moduledoc false
  # Options of layers.

  alias Sidewinder.Error

  @doc "The options as a map. `known` has the default and the kind of each."
  def options!(op, opts, known) do
    unless Keyword.keyword?(opts), do: raise(wrong(op, "options", "a keyword list", opts))
    options = Map.new(known, fn {key, {default, _}} -> {key, default} end)

    options =
      Enum.reduce(opts, options, fn {key, value}, options ->
        {_, {default, sort}} = List.keyfind(known, key, 0) || raise(unknown(op, key, known))

        unless value == default or fits?(sort, value),
          do: raise(wrong(op, key, expected(sort), value))

        Map.put(options, key, value)
      end)

    for {least, most} <- [dt_min: :dt_max, a_min: :a_max],
        %{^least => min, ^most => max} when min > max <- [options],
        do: raise(wrong(op, most, "a number not below #{least}, #{min}", max))

    options
  end

  @doc "A number of units or the like."
  def size!(op, name, size) do
    unless fits?(:size, size), do: raise(wrong(op, name, expected(:size), size))
  end

  @doc "A size that must divide another, `{number, what it is}`."
  def divides!(op, name, size, {whole, what}) do
    unless rem(whole, size) == 0,
      do: raise(wrong(op, name, "a divisor of #{whole}, #{what}", size))
  end

  defp fits?(:any, _), do: true
  defp fits?(:name, name), do: is_binary(name) or is_function(name, 2)
  defp fits?(:prefix, name), do: is_binary(name)
  defp fits?(:size, n), do: is_integer(n) and n > 0
  defp fits?(:positive, number), do: is_number(number) and number > 0
  defp fits?(:number, number), do: is_number(number)
  defp fits?(:integer, integer), do: is_integer(integer)
  defp fits?(:range, {low, high}), do: is_number(low) and is_number(high) and low <= high
  defp fits?(:range, _), do: false
  defp fits?(:flag, flag), do: is_boolean(flag)
  defp fits?(:layer, layer), do: is_struct(layer, Axon)
  defp fits?(:layers, {a, b}), do: is_struct(a, Axon) and is_struct(b, Axon)
  defp fits?(:layers, _), do: false
  defp fits?(:rate, rate), do: is_number(rate) and rate >= 0 and rate < 1
  defp fits?(choices, value) when is_list(choices), do: value in choices

  defp fits?(:initializer, name) when is_atom(name),
    do: Code.ensure_loaded?(Axon.Initializers) and function_exported?(Axon.Initializers, name, 0)

  defp fits?(:initializer, fun), do: is_function(fun, 2) or is_function(fun, 3)

  defp expected(:name), do: "a string or a function of two arguments"
  defp expected(:prefix), do: "a string"
  defp expected(:size), do: "a positive integer"
  defp expected(:positive), do: "a positive number"
  defp expected(:number), do: "a number"
  defp expected(:integer), do: "an integer"
  defp expected(:range), do: "{low, high}, two numbers in order"
  defp expected(:flag), do: "true or false"
  defp expected(:layer), do: "a layer of Axon"
  defp expected(:layers), do: "a pair of layers of Axon"
  defp expected(:rate), do: "a number from 0 on, below 1"
  defp expected(choices) when is_list(choices), do: Enum.map_join(choices, " or ", &inspect/1)

  defp expected(:initializer),
    do: "the name of a function of Axon.Initializers, or a function of two or three arguments"

  defp unknown(op, key, known) do
    wrong(op, key, "an option out of #{Enum.join(Keyword.keys(known), ", ")}", key)
  end

  defp wrong(op, argument, expected, got) do
    Error.new(:option, to_string(argument),
      op: "Sidewinder.Axon.#{op}",
      expected: expected,
      got: Error.show(got)
    )
  end
end

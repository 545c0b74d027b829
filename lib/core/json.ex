defmodule Sidewinder.JSON do
  @moduledoc false
  # Writes JSON, for which Elixir has no module before 1.18.

  alias Sidewinder.Options

  @doc """
  Maps become objects, their keys in order, and atoms other than `nil`, `true` and `false` texts. `wrong` gets a value that
  is none of JSON, and raises.

      iex> Sidewinder.JSON.text(%{b: [1, 2.5, nil, :x], a: %{}})
      ~S({"a": {}, "b": [1, 2.5, null, "x"]})
  """
  @spec text(term, (term -> no_return)) :: String.t()
  def text(value, wrong \\ &wrong/1)
  def text(value, _wrong) when is_number(value) or is_boolean(value), do: "#{value}"
  def text(nil, _wrong), do: "null"
  def text(value, wrong) when is_atom(value), do: text(Atom.to_string(value), wrong)

  def text(value, wrong) when is_map(value) and not is_struct(value) do
    members = for {name, value} <- value, do: {key(name, wrong), text(value, wrong)}

    "{" <>
      Enum.map_join(Enum.sort(members), ", ", fn {name, text} -> "#{name}: #{text}" end) <> "}"
  end

  def text(value, wrong) do
    cond do
      is_binary(value) and String.valid?(value) -> quoted(value)
      Options.list?(value) -> "[" <> Enum.map_join(value, ", ", &text(&1, wrong)) <> "]"
      true -> wrong.(value)
    end
  end

  defp key(name, wrong) when is_atom(name) or is_binary(name), do: text(to_string(name), wrong)
  defp key(other, wrong), do: wrong.(other)

  defp quoted(text) do
    escaped =
      for <<c::utf8 <- text>>, into: "" do
        if c < 32 or c in [?", ?\\],
          do: "\\u" <> String.pad_leading(Integer.to_string(c, 16), 4, "0"),
          else: <<c::utf8>>
      end

    ~s("#{escaped}")
  end

  defp wrong(value),
    do: Options.wrong_argument!("value", "numbers, texts, lists and maps of these", value)
end

defmodule Sidewinder.Mamba.Config do
  @moduledoc false
  # The map of a `config.json`.

  alias Sidewinder.Options

  @doc "Its text, which is empty for an empty one."
  def json(config) when config == %{}, do: ""
  def json(config) when is_map(config) and not is_struct(config), do: value(config)
  def json(other), do: wrong(other)

  defp value(value) when is_number(value) or is_boolean(value), do: "#{value}"
  defp value(nil), do: "null"
  defp value(value) when is_atom(value), do: value(Atom.to_string(value))

  defp value(value) when is_map(value) and not is_struct(value) do
    members = for {name, value} <- value, do: "#{key(name)}: #{value(value)}"
    "{" <> Enum.join(members, ", ") <> "}"
  end

  defp value(value) do
    cond do
      is_binary(value) and String.valid?(value) -> quoted(value)
      Options.list?(value) -> "[" <> Enum.map_join(value, ", ", &value/1) <> "]"
      true -> wrong(value)
    end
  end

  defp key(name) when is_atom(name) or is_binary(name), do: value(to_string(name))
  defp key(other), do: wrong(other)

  defp quoted(text) do
    escaped =
      for <<c::utf8 <- text>>, into: "" do
        if c < 32 or c in [?", ?\\],
          do: "\\u" <> String.pad_leading(Integer.to_string(c, 16), 4, "0"),
          else: <<c::utf8>>
      end

    ~s("#{escaped}")
  end

  defp wrong(got),
    do: Options.wrong_argument!("config", "a map in the words of a config.json", got)
end

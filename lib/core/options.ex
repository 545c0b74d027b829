defmodule Sidewinder.Options do
  @moduledoc false
  # Checks arguments that are no tensors, and raises clear errors for wrong types.

  alias Sidewinder.Error

  @doc "A keyword list of known names; `fields` are those of the error otherwise."
  def known!(options, known, fields \\ []) do
    unless Keyword.keyword?(options), do: wrong!("options", "a keyword list", options)

    for {name, _} <- options, name not in known do
      expected = "an option out of #{Enum.join(known, ", ")}"
      got = to_string(name)
      raise Error.new(:option, got, [expected: expected, got: got] ++ fields)
    end

    options
  end

  @doc "A value for which the condition holds."
  def check!(value, true, _name, _expected), do: value
  def check!(value, false, name, expected), do: wrong!(name, expected, value)

  @doc "Raises the error about an option."
  def wrong!(name, expected, got) do
    raise Error.new(:option, to_string(name), expected: expected, got: Error.show(got))
  end

  @doc "Raises the error about an argument."
  def wrong_argument!(name, expected, got, fields \\ []) do
    raise Error.new(:argument, name, [expected: expected, got: Error.show(got)] ++ fields)
  end

  @doc "A path as a text."
  def path!(path) do
    case path_text(path) do
      text when is_binary(text) and text != "" -> text
      _ -> wrong_argument!("path", "a path in UTF-8, not empty", path)
    end
  end

  defp path_text(path) when is_binary(path), do: if(String.valid?(path), do: path)

  defp path_text(path) when is_list(path) do
    :unicode.characters_to_binary(path)
  rescue
    ArgumentError -> nil
  end

  defp path_text(_path), do: nil

  @doc "Whether it is a list that has an end."
  def list?(term), do: is_list(term) and not List.improper?(term)
end

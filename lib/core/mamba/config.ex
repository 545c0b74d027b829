defmodule Sidewinder.Mamba.Config do
  @moduledoc false
  # The map of a `config.json`.

  alias Sidewinder.{JSON, Options}

  @doc "Its text, which is empty for an empty one."
  def json(config) when config == %{}, do: ""
  def json(config) when is_map(config) and not is_struct(config), do: JSON.text(config, &wrong/1)
  def json(other), do: wrong(other)

  defp wrong(got),
    do: Options.wrong_argument!("config", "a map in the words of a config.json", got)
end

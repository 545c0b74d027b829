defmodule Sidewinder.Op.Warning do
  @moduledoc false
  # Warnings that are logged once in a VM, for any number of processes that cause them.

  require Logger

  @doc "Logs the text of `fun`, unless `topic` had its warning before."
  @spec once(atom, (-> String.t())) :: :ok
  def once(topic, fun) do
    unless given?(topic),
      do: :global.trans({{__MODULE__, topic}, self()}, fn -> give(topic, fun) end, [node()])

    :ok
  end

  defp give(topic, fun) do
    unless given?(topic), do: Logger.warning(fun.())
    :persistent_term.put({__MODULE__, topic}, true)
  end

  defp given?(topic), do: :persistent_term.get({__MODULE__, topic}, false)
end

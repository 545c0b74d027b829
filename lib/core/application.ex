defmodule Sidewinder.Application do
  @moduledoc false
  use Application

  @impl true
  def start(_type, _args) do
    Sidewinder.Telemetry.start()
    if exla?(), do: apply(Sidewinder.CustomCall, :register, [])
    Supervisor.start_link([], strategy: :one_for_one)
  end

  # Registered at the start, because EXLA reads executables from its disk cache without asking for the calls in them.
  defp exla? do
    List.keymember?(Application.started_applications(), :exla, 0) and
      Code.ensure_loaded?(Sidewinder.CustomCall)
  end
end

# What a result file says about where it was made.

defmodule Machine do
  alias Sidewinder.Device

  # One line of JSON.
  def json do
    fields = [elixir: System.version(), otp: System.otp_release(), device: device()] ++ nx()
    "{" <> Enum.map_join(fields, ", ", fn {name, value} -> ~s("#{name}": "#{value}") end) <> "}"
  end

  defp nx do
    with nil <- Application.spec(:nx, :vsn), do: [], else: (version -> [nx: version])
  end

  defp device do
    %{cpu: cpu, gpus: gpus} = Device.info()
    gpu = with [%{name: name} | _] <- gpus, do: ", " <> name, else: (_ -> "")
    "#{cpu_model()} (#{cpu.best}, #{cpu.threads} threads)#{gpu}"
  end

  defp cpu_model do
    with {:ok, text} <- File.read("/proc/cpuinfo"),
         [_, model] <- Regex.run(~r/model name\s*: (.*)/, text) do
      model
    else
      _ -> "CPU"
    end
  end
end

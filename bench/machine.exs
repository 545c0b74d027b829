# Result files, which say where they were made.

defmodule Machine do
  alias Sidewinder.Device

  # A result file of rows that are lines of JSON already.
  def result(rows) do
    ~s({\n  "machine": #{json()},\n  "rows": [\n    ) <>
      Enum.join(rows, ",\n    ") <> "\n  ]\n}\n"
  end

  defp json do
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

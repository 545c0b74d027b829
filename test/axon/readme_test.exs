# Without Axon there is nothing to train, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.ReadmeTest do
    # It starts a process by name.
    use ExUnit.Case, async: false

    import ExUnit.CaptureIO

    @readme Path.expand("../../README.md", __DIR__)

    defp blocks(heading) do
      [_, section] = @readme |> File.read!() |> String.split("\n## #{heading}\n")
      [section | _] = String.split(section, "\n## ")
      for [_, code] <- Regex.scan(~r/```elixir\n(.*?)```/s, section), do: code
    end

    # There is no Sidewinder.Mamba in pure Nx.
    @tag skip: Sidewinder.NxTest.Scans.no_library()
    test "its way from training to serving can be gone" do
      [_, _, _] = blocks = blocks("From training to serving")
      told = capture_io(fn -> send(self(), Code.eval_string(Enum.join(blocks, "\n"))) end)
      assert told =~ "loss: "
      assert_received {text, binding}
      on_exit(fn -> File.rm_rf!(binding[:folder]) end)
      assert is_binary(text) and text != ""
      assert Sidewinder.Mamba.load(binding[:folder]).config == binding[:mamba].config
    end
  end
end

%{gpus: gpus, why_no_gpus: why, exla: exla} = Sidewinder.Device.info()

# As in the tests in Rust.
if gpus == [] and System.get_env("SIDEWINDER_REQUIRE_CUDA") == "1",
  do: raise("SIDEWINDER_REQUIRE_CUDA=1, but there is no CUDA device: #{why}")

left_out =
  case gpus do
    [] -> [cuda: "no CUDA device: #{why}"]
    [gpu | _] -> [no_cuda: "there is a CUDA device: #{gpu.name}"]
  end

left_out = if exla.available, do: left_out, else: [{:exla, exla.why_not} | left_out]

for {tag, reason} <- left_out, do: IO.puts("Tests tagged #{tag} are left out (#{reason}).")

unless Code.ensure_loaded?(Sidewinder.Reference) do
  IO.puts(
    "The tests of lib/nx are left out (it was not compiled: it needs Nx 0.12 and Elixir 1.17)."
  )
end

unless Code.ensure_loaded?(Sidewinder.Axon) do
  IO.puts("The tests of lib/axon are left out (it was not compiled: it needs Axon 0.7).")
end

# A minute is little on a busy machine with two cores.
ExUnit.start(exclude: Keyword.keys(left_out), timeout: 300_000)

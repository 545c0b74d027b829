# Steps of examples/digits.exs, each run in a process of its own.

defmodule Digits do
  # The median step in milliseconds, as the example tells it. The variables of `env` say how it computes.
  def step(backend, images, steps, env \\ []) do
    env = [
      {"SIDEWINDER_BACKEND", backend},
      {"BATCH", "#{images}"},
      {"STEPS", "#{steps}"} | env
    ]

    {text, 0} = System.cmd("mix", ["run", "examples/digits.exs"], env: env)
    [_, ms] = Regex.run(~r/A training step of #{images} images.*: ([\d.]+) ms/, text)
    String.to_float(ms)
  end
end

defmodule Sidewinder.PropertyTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Golden, Kernel, Tensor}

  # {relative to the element, relative to the largest element}
  @tolerance %{
    f64: {1.0e-9, 1.0e-12},
    f32: {1.0e-5, 2.0e-6},
    f16: {2.0e-3, 2.0e-3},
    bf16: {2.0e-2, 1.0e-2}
  }

  defp check(seed, levels, place \\ & &1) do
    {inputs, options} = Calls.random(seed)
    expected = Calls.reference(:selective_scan, inputs, options)

    for where <- levels do
      got =
        Kernel.run(
          :selective_scan,
          for({name, t} <- inputs, do: {name, place.(t)}),
          options,
          where
        )

      assert Map.keys(got) == Map.keys(expected)

      for {name, tensor} <- got,
          do: close(tensor, expected[name], "seed #{seed} #{name} #{inspect(where)}")
    end
  end

  defp close(got, expected, label) do
    {rtol, atol} = @tolerance[got.type]
    largest = expected |> Tensor.to_list() |> Enum.reduce(0.0, &max(abs(&1), &2))
    Golden.assert_close(got, expected, rtol, atol * largest, label)
  end

  test "random small calls agree with the reference at every level" do
    for seed <- 1..150, do: check(seed, Calls.levels())
  end

  # Most calls need a kernel that has to be compiled first.
  @tag :cuda
  @tag timeout: 600_000
  test "random small calls agree with the reference on CUDA" do
    for seed <- 1..150 do
      check(seed, [[backend: {:cuda, 0}]])
      check(seed, [[]], &Tensor.to_device(&1, {:cuda, 0}))
    end
  end

  test "a sequence in two parts gives what it gives in one" do
    inputs = Calls.inputs({2, 101, 5, 16})
    cut = fn tensor, from, count -> cut(tensor, from, count) end
    whole = Kernel.run(:selective_scan, inputs, %{return_state: true})

    part = fn from, count, more ->
      sliced =
        for {name, t} <- inputs, do: {name, if(name == "A", do: t, else: cut.(t, from, count))}

      Kernel.run(:selective_scan, sliced ++ more, %{return_state: true})
    end

    first = part.(0, 37, [])
    second = part.(37, 64, [{"initial_state", first["last_state"]}])
    Golden.assert_close(second["last_state"], whole["last_state"], 1.0e-5, 1.0e-6, "last_state")
    Golden.assert_close(first["y"], cut.(whole["y"], 0, 37), 1.0e-5, 1.0e-6, "first part")
    Golden.assert_close(second["y"], cut.(whole["y"], 37, 64), 1.0e-5, 1.0e-6, "second part")
  end

  # `count` steps of a {B, L, _} tensor.
  defp cut(%Tensor{shape: {batch, length, size}, type: type, data: data}, from, count) do
    row = size * 4

    parts =
      for b <- 0..(batch - 1),
          into: <<>>,
          do: binary_part(data, (b * length + from) * row, count * row)

    Tensor.new(parts, type, {batch, count, size})
  end

  test "the same level and threads give the same bits" do
    inputs = Calls.inputs({1, 500, 40, 16})

    for where <- Calls.levels() do
      [first | others] =
        for _ <- 1..3, do: Kernel.run(:selective_scan, inputs, %{return_state: true}, where)

      assert Enum.all?(others, &(&1 == first)), inspect(where)
    end
  end
end

defmodule Sidewinder.GradientTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops
  import Sidewinder.NxTest.Scans, only: [assert_close: 3, types: 0]
  alias Sidewinder.NxTest.Golden

  @backends [:nx, :cpu]
  @sizes [{1, 1, 1, 1}, {2, 5, 3, 2}, {1, 7, 5, 3}]

  # A golden case as a call, of f32 or f64.
  defp call(op, %{inputs: inputs, outputs: outputs} = golden, type) do
    {cotangents, inputs} =
      Map.split_with(inputs, fn {name, _} ->
        name != "mask" and not is_map_key(outputs, "d" <> name)
      end)

    as_type({op, inputs, cotangents, Golden.attributes(golden)}, type)
  end

  @golden ~w(selective_scan linear_scan causal_conv1d mamba_block rms_norm layer_norm layer_norm_gelu) ++
            ~w(linear rope attention swiglu_mlp transformer_block mdi_update mdi block_recurrence mmrec_block multi_memory_attention) ++
            ~w(exp_product_scan cumprod_scan)

  for op <- @golden,
      backend <- @backends,
      {type, tolerance} <- [f32: 1, f64: 1.0e-4] do
    test "of #{op} agrees with the golden values, on #{backend} in #{type}" do
      for golden <- Golden.cases(unquote(op)),
          not long?(golden.name, unquote(backend), unquote(type)) do
        call =
          unquote(op) |> call(golden, unquote(type)) |> with_options(backend: unquote(backend))

        {value, gradients} = value_and_grad(call)
        assert value.type == {:f, if(unquote(type) == :f64, do: 64, else: 32)}

        outputs =
          for {"d" <> input, o} <- golden.outputs, do: {input, scale(o, unquote(tolerance))}

        assert Enum.sort(Map.keys(gradients)) == Enum.sort(Enum.map(outputs, &elem(&1, 0)))

        Golden.check(
          %{golden | outputs: outputs},
          Map.new(gradients, fn {k, t} -> {:"#{k}", t} end)
        )
      end
    end
  end

  # Pure Nx takes seconds for the long ones: one of each op is enough, in f32.
  defp long?(_, :cpu, _), do: false
  defp long?(name, :nx, :f32), do: name in ~w(long4096 l4096_fast l1000 l1024 core_1000 core_4096)
  defp long?(name, :nx, :f64), do: name =~ ~r/4096|1000|1024/

  # Of many, all but one or one alone.
  defp some?(absent, all), do: absent < all and (all < 5 or absent in [0, 1, all - 1])

  defp scale(output, factor),
    do: %{output | rtol: output.rtol * factor, atol: output.atol * factor}

  for op <- ops(), backend <- @backends do
    test "of #{op} agrees with differences for all subsets of inputs, on #{backend}" do
      for {absent, i} <- Enum.with_index(subsets(optional(unquote(op)))) do
        sizes =
          if unquote(op) == "mamba_block", do: {1, 3, 2, 2}, else: Enum.at(@sizes, rem(i, 3))

        problem(unquote(op), sizes)
        |> without(absent)
        |> with_options(backend: unquote(backend))
        |> check_differences()
      end
    end

    test "of #{op} takes the cotangents of any outputs, on #{backend}" do
      {_, _, cotangents, _} = call = problem(unquote(op), {2, 5, 3, 2})

      for absent <- subsets(Map.keys(cotangents)), some?(length(absent), map_size(cotangents)) do
        call |> without(absent) |> with_options(backend: unquote(backend)) |> check_differences()
      end
    end

    test "of #{op} has the types of its inputs, in all types, on #{backend}" do
      for {type, rtol} <- types() do
        call = problem(unquote(op), {2, 5, 4, 3}, type) |> with_options(backend: unquote(backend))
        {_, inputs, _, _} = call
        exact = gradients(as_type(call, :f64))

        for {name, t} <- gradients(call) do
          assert t.type == inputs[name].type
          size = exact[name] |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

          assert_close(t, exact[name],
            rtol: 3 * rtol,
            atol: 3 * rtol * size,
            of: "#{type} d#{name}"
          )
        end
      end
    end
  end
end

defmodule Sidewinder.GatedRmsNormTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 2, assert_close: 3, random: 5, types: 0, ways: 0]

  @op "gated_rms_norm"

  # Axes, groups.
  @sizes [{{1}, 1}, {{3}, 3}, {{2, 31}, 1}, {{2, 3, 64}, 4}, {{5, 65}, 5}, {{3, 257}, 1}]

  defp call({shape, groups}, norm_before_gate, type \\ :f64) do
    width = elem(shape, tuple_size(shape) - 1)

    inputs = %{
      "x" => random(1, shape, -2.0, 2.0, type),
      "z" => random(2, shape, -4.0, 4.0, type),
      "w" => random(3, {width}, -2.0, 2.0, if(type == :f64, do: :f64, else: :f32))
    }

    # The gradient of a short part is a difference that grows with eps: with a small one there would be little but
    # roundings.
    eps = if div(width, groups) < 3, do: 0.5, else: 1.0e-5
    opts = [groups: groups, norm_before_gate: norm_before_gate, eps: eps]
    {@op, inputs, %{"dy" => random(4, shape, -1.0, 1.0, type)}, opts}
  end

  # By the formula, part by part.
  defp formula(%{"x" => x, "z" => z, "w" => w}, opts) do
    [x, z, w] = for t <- [x, z, w], do: Nx.as_type(t, :f64)
    part = div(Nx.axis_size(x, -1), opts[:groups])
    gate = Nx.multiply(z, Nx.sigmoid(z))
    u = if opts[:norm_before_gate], do: x, else: Nx.multiply(x, gate)

    units =
      for i <- 0..(opts[:groups] - 1) do
        u = Nx.slice_along_axis(u, i * part, part, axis: -1)
        square = Nx.mean(Nx.multiply(u, u), axes: [-1], keep_axes: true)
        Nx.divide(u, Nx.sqrt(Nx.add(square, Nx.tensor(opts[:eps], type: :f64))))
      end

    y = Nx.multiply(Nx.concatenate(units, axis: -1), w)
    if opts[:norm_before_gate], do: Nx.multiply(y, gate), else: y
  end

  for backend <- [:nx, :cpu] do
    test "is its formula, in every way and type, on #{backend}" do
      for sizes <- @sizes, norm_before_gate <- [false, true], {type, rtol} <- types() do
        {_, inputs, _, opts} = call(sizes, norm_before_gate, type)
        expected = formula(inputs, opts)

        for {_, way} <- ways() do
          %{y: y} = way.(&run(@op, &1, [backend: unquote(backend)] ++ opts), [inputs])
          assert y.type == Nx.Type.normalize!(type)
          assert_close(y, expected, rtol: 4 * rtol, of: inspect({sizes, opts, type}))
        end
      end
    end

    test "has the gradient of its formula, in every way, on #{backend}" do
      for sizes <- @sizes, norm_before_gate <- [false, true] do
        {_, inputs, %{"dy" => dy}, opts} = call = call(sizes, norm_before_gate)
        loss = &Nx.sum(Nx.multiply(formula(&1, opts), dy))
        expected = Nx.Defn.grad(inputs, loss)

        for {_, way} <- ways() do
          got = call |> with_options(backend: unquote(backend)) |> gradients(way)
          assert Enum.sort(Map.keys(got)) == ~w(w x z)

          for {name, t} <- got,
              do: assert_close(t, expected[name], rtol: 1.0e-8, of: inspect({name, sizes, opts}))
        end
      end
    end

    test "agrees with differences, on #{backend}" do
      for norm_before_gate <- [false, true], groups <- [1, 2] do
        call = call({{2, 3, 6}, groups}, norm_before_gate)
        call |> with_options(backend: unquote(backend)) |> check_differences()
      end
    end
  end

  test "is one kernel forward and one backward" do
    call = call({{2, 6}, 3}, false, :f32) |> with_options(backend: :cpu)

    assert kernel_calls(fn -> value_and_grad(call) end) == [
             :gated_rms_norm,
             :gated_rms_norm_backward
           ]
  end

  test "axes have their names, and integers become floats" do
    x = Nx.iota({2, 4}, names: [:l, :d])
    y = Sidewinder.gated_rms_norm(x, Nx.iota({2, 4}), Nx.tensor([1, 2, 3, 4]), groups: 2)
    assert {y.names, y.type} == {[:l, :d], {:f, 32}}
    floats = for t <- [x, Nx.iota({2, 4}), Nx.tensor([1, 2, 3, 4])], do: Nx.as_type(t, :f32)
    assert_close(y, apply(Sidewinder, :gated_rms_norm, floats ++ [[groups: 2]]))
  end

  test "what does not fit raises, in every way" do
    [x, w] = [Nx.iota({2, 6}, type: :f32), Nx.iota({6}, type: :f32)]
    norm = &Sidewinder.gated_rms_norm(&1, &2, &3, &4)

    for {kind, argument, message, fun} <- [
          {:shape, "x", "a multiple of 4", fn -> norm.(x, x, w, groups: 4) end},
          {:shape, "z", "shape {2, 6}, got {6}", fn -> norm.(x, w, w, []) end},
          {:shape, "w", "shape {6}, got {2}", fn -> norm.(x, x, w[0..1], []) end},
          {:option, "groups", "a positive integer, got 0", fn -> norm.(x, x, w, groups: 0) end},
          {:option, "groups", "a positive integer, got 1.5",
           fn -> norm.(x, x, w, groups: 1.5) end},
          {:option, "eps", "a positive number, got 0", fn -> norm.(x, x, w, eps: 0) end},
          {:option, "norm_before_gate", "true or false",
           fn -> norm.(x, x, w, norm_before_gate: 1) end}
        ],
        {_, way} <- ways() do
      error = assert_raise Sidewinder.Error, fn -> way.(fun, []) end
      assert %{kind: ^kind, argument: ^argument} = error, Exception.message(error)
      assert Exception.message(error) =~ message
    end
  end
end

defmodule Sidewinder.ReferenceTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans
  alias Sidewinder.NxTest.Golden
  alias Sidewinder.Reference

  doctest Sidewinder.Reference

  @algorithms [:sequential, :hillis_steele, :blelloch]
  @lengths [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]

  # The recurrence on lists of numbers.
  defp scanned(a, b, initial) do
    {h, _} = Enum.map_reduce(Enum.zip(a, b), initial, fn {a, b}, h -> {a * h + b, a * h + b} end)
    h
  end

  defp coefficients(length),
    do: for(t <- 1..length, do: {rem(t * 7, 5) / 2 - 1, rem(t * 3, 4) - 1.5})

  for algorithm <- @algorithms do
    describe "linear_scan, #{algorithm}" do
      @describetag algorithm: algorithm

      test "is the recurrence at every length, with zeros and negative factors", %{
        algorithm: algorithm
      } do
        for length <- @lengths, initial <- [0.0, -2.0] do
          {a, b} = Enum.unzip(coefficients(length))
          [at, bt] = for list <- [a, b], do: Nx.tensor([Enum.map(list, &[&1])], type: :f64)

          h =
            Reference.linear_scan(at, bt,
              algorithm: algorithm,
              initial_state: Nx.tensor([[initial]], type: :f64)
            )

          assert_close(h, Nx.tensor([Enum.map(scanned(a, b, initial), &[&1])], type: :f64),
            rtol: 1.0e-12
          )
        end
      end

      test "keeps batches and channels apart, in all types", %{algorithm: algorithm} do
        for {type, rtol} <- types() do
          a = random(1, {2, 6, 3}, -1.0, 1.0, type)
          b = random(2, {2, 6, 3}, -1.0, 1.0, type)
          h = Reference.linear_scan(a, b, algorithm: algorithm)
          assert h.type == Nx.Type.normalize!(type)

          for i <- 0..1, k <- 0..2 do
            [a, b] = for t <- [a, b], do: Nx.to_flat_list(t[[i, .., k]])
            assert_close(h[[i, .., k]], Nx.tensor(scanned(a, b, 0.0), type: :f64), rtol: rtol)
          end
        end
      end

      test "works inside defn", %{algorithm: algorithm} do
        {a, b} = {random(1, {1, 5, 2}), random(2, {1, 5, 2})}
        eager = Reference.linear_scan(a, b, algorithm: algorithm)

        for {_, way} <- ways() do
          assert way.(&Reference.linear_scan(&1, &2, algorithm: algorithm), [a, b]) == eager
        end
      end
    end

    test "selective_scan by #{algorithm} agrees with the kernel" do
      for_random(20, fn args, opts ->
        expected = apply(Sidewinder, :selective_scan, args ++ [opts])

        actual =
          apply(Reference, :selective_scan, args ++ [[algorithm: unquote(algorithm)] ++ opts])

        assert_close(actual, expected)
      end)
    end

    @tag skip: no_library()
    test "selective_scan by #{algorithm} agrees with the golden values" do
      for %{inputs: i} = golden <- Golden.cases("selective_scan") do
        opts = [algorithm: unquote(algorithm)] ++ Golden.options(golden)
        outputs = Reference.selective_scan(i["x"], i["dt"], i["A"], i["B"], i["C"], opts)
        Golden.check(golden, Golden.named(outputs))
      end
    end
  end

  test "all algorithms have the gradient of the kernel" do
    {[x | rest], optional} = problem({2, 7, 3, 2}, type: :f64)
    opts = [dt_softplus: true, return_state: true] ++ optional

    loss = fn module, x, opts ->
      {y, state} = apply(module, :selective_scan, [x | rest] ++ [opts])
      Nx.add(Nx.sum(Nx.pow(y, 2)), Nx.sum(state))
    end

    expected = Nx.Defn.grad(x, &loss.(Sidewinder, &1, opts))

    for algorithm <- @algorithms, {_, way} <- ways() do
      gradient =
        &Nx.Defn.grad(&1, fn x -> loss.(Reference, x, [algorithm: algorithm] ++ opts) end)

      assert_close(way.(gradient, [x]), expected, rtol: 1.0e-11)
    end
  end

  test "a single step without a state before it gives its input" do
    t = Nx.tensor([[[3.0]]])

    for algorithm <- @algorithms,
        do: assert(Reference.linear_scan(t, t, algorithm: algorithm) == t)
  end

  test "softplus neither overflows nor vanishes" do
    x = Nx.tensor([[[1.0]]])
    one = Nx.tensor([[1.0]])

    for {dt, step} <- [{0.0, 0.693147181}, {200.0, 200.0}, {-20.0, 2.06115362e-9}] do
      y =
        Reference.selective_scan(x, Nx.tensor([[[dt]]]), Nx.tensor([[0.0]]), one, one,
          dt_softplus: true
        )

      assert_close(y, Nx.tensor([[[step]]]), atol: 0.0, rtol: 1.0e-6)
    end
  end

  test "an algorithm that is not there is refused" do
    t = Nx.tensor([[[1.0]]])

    assert_raise Sidewinder.Error, ~r/algorithm: expected one of/, fn ->
      Reference.linear_scan(t, t, algorithm: :odd)
    end
  end

  test "demo_levels/0 runs on kernel tensors" do
    {args, _} = problem({2, 3, 4, 2})
    expected = apply(Sidewinder, :selective_scan, args)
    kernel_args = Enum.map(args, &Sidewinder.Op.to_kernel/1)

    for {name, fun} <- Reference.demo_levels() do
      assert is_binary(name)
      assert_close(Sidewinder.Op.from_kernel(apply(fun, kernel_args)), expected)
    end
  end
end

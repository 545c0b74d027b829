# Without EXLA there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.CustomCall) do
  defmodule Sidewinder.CustomCallTest.Loop do
    @moduledoc false
    import Nx.Defn

    defn run(x, h) do
      {_, h, _} =
        while {i = 0, h, x}, i < 3 do
          {i + 1, Sidewinder.silu(h + x), x}
        end

      if Nx.sum(h) > 100, do: Sidewinder.gelu(h), else: Sidewinder.softplus(h)
    end
  end

  defmodule Sidewinder.CustomCallTest do
    use ExUnit.Case, async: true

    alias Sidewinder.CustomCallTest.Loop
    alias Sidewinder.ExlaTest.Changed

    import ExUnit.CaptureLog
    import Sidewinder.NxTest.Ops
    import Sidewinder.NxTest.Scans, only: [random: 5]

    @moduletag :exla

    @sizes {2, 5, 3, 2}
    @host %{platform: :host}

    # The blocks in the graph of a call's loss and gradients.
    defp blocks(call) do
      {_, inputs, _, _} = call
      in_graph(&value_and_grad(put_elem(call, 1, &1)), inputs)
    end

    # It is not among the ops of the tests: there is no kernel for its gradient.
    defp blocks_of_query,
      do: in_graph(&Sidewinder.hds_query_topk(&1, &1, &1), Nx.template({1, 16, 2}, :f32))

    defp in_graph(fun, inputs) do
      graph = Nx.Defn.debug_expr_apply(fun, [inputs])

      [graph]
      |> Nx.Defn.Composite.flatten_list()
      |> Enum.reduce(%{}, &collect/2)
      |> Map.values()
      |> Enum.reject(&is_nil/1)
    end

    defp collect(%{data: %{id: id}}, found) when is_map_key(found, id), do: found

    defp collect(%{data: %{id: id, op: op, args: args}} = t, found) do
      {_, found} =
        Nx.Defn.Tree.apply_args(t, :scope, Map.put(found, id, nil), &{&1, collect(&1, &2)})

      if op == :block, do: Map.put(found, id, args), else: found
    end

    defp all_blocks(type) do
      for blocks <- [blocks_of_query() | Enum.map(ops(), &blocks(problem(&1, @sizes, type)))],
          args <- blocks,
          do: args
    end

    defp modules do
      {:ok, modules} = :application.get_key(:sidewinder, :modules)
      for module <- modules, match?(["Sidewinder", "Block", _], Module.split(module)), do: module
    end

    defp whole?(module) do
      whole = String.replace_suffix(Atom.to_string(module), "Backward", "")
      Map.has_key?(String.to_existing_atom(whole).table(), :composed)
    end

    defp exla(fun, args), do: Nx.Defn.jit_apply(fun, args, compiler: EXLA)

    defp module_of(fun, args) do
      %{mlir_module: text} = EXLA.to_mlir_module(fun, args)
      text
    end

    test "all blocks, forwards and backwards, are custom calls" do
      for type <- [:f32, :bf16, :f64] do
        found =
          for [block, inputs, out, _default] <- all_blocks(type), uniq: true do
            assert {:ok, spec} = EXLA.CustomCall.call(block, out, inputs, @host)
            assert spec.call_target_name == "sidewinder_op"
            assert spec.operand_element_types == :default
            block.__struct__
          end

        # Composed ops are blocks of their parts.
        assert Enum.sort(found) ==
                 Enum.sort(for module <- modules(), not whole?(module), do: module)
      end
    end

    test "what the kernels do not take is left to XLA" do
      [[block, [input], out, _default] | _] = in_graph(&Sidewinder.silu/1, Nx.template({2}, :f32))
      call = &EXLA.CustomCall.call(&1, &2, &3, &4)
      assert {:ok, _} = call.(block, out, [input], @host)
      assert call.(block, out, [input], %{platform: :tpu}) == :skip
      assert call.(block, out, [], @host) == :skip
      assert call.(%{block | target: [backend: :nx]}, out, [input], @host) == :skip
      assert call.(block, %{out | shape: {1, 3}}, [input], @host) == :skip
      assert call.(block, %{out | type: {:f, 64}}, [input], @host) == :skip

      for type <- [{:u, 32}, {:c, 64}, {:s, 64}],
          do: assert(call.(block, out, [%{input | type: type}], @host) == :skip)

      cache = %Sidewinder.Block.Decode{inputs: ["q", "k", "v", "keys", "values"], cached: 1}
      heads = Nx.template({1, 1, 1, 2}, :f32)
      store = Nx.template({1, 1, 4, 2}, :f32)
      args = [heads, heads, heads, store, store]
      assert call.(cache, {heads, store, store}, args, @host) == :skip
    end

    test "every op gives the bits of a direct call" do
      for op <- ops(), not composed?(op), type <- [:f32, :bf16, :f16, :f64] do
        {_, inputs, cotangents, opts} = problem(op, @sizes, type)
        opts = asking(op, cotangents, opts)
        assert exla(&run(op, &1, opts), [inputs]) |> same?(run(op, inputs, opts)), "#{op} #{type}"
      end
    end

    test "gradients are those of a direct call" do
      for op <- ops() do
        call = {_, inputs, _, _} = problem(op, @sizes, :f32)
        {loss, gradients} = exla(&value_and_grad(put_elem(call, 1, &1)), [inputs])
        {expected, all} = value_and_grad(call)
        # A sum of numbers of about 1, which may cancel.
        close!(loss, expected, op, 1.0)
        for {name, gradient} <- all, do: close!(gradients[name], gradient, "#{op} #{name}")
      end
    end

    test "calls in while, cond and over vectorized axes" do
      [x, h] = for seed <- [1, 2], do: random(seed, {3, 4}, -1.0, 1.0, :f32)

      expected =
        Enum.reduce(1..3, h, fn _, h -> Sidewinder.silu(Nx.add(h, x)) end)
        |> Sidewinder.softplus()

      assert same?(exla(&Loop.run/2, [x, h]), expected)

      [x, dt, b, c] =
        for seed <- 1..4, do: random(seed, {2, 3, 1, 5, 2}, 0.1, 1.0, :f32)

      a = Nx.negate(random(5, {2, 2}, 0.1, 1.0, :f32))
      [x, dt, b, c] = for t <- [x, dt, b, c], do: Nx.vectorize(t, [:i, :j])
      scan = &Sidewinder.selective_scan/5
      assert same?(exla(scan, [x, dt, a, b, c]), scan.(x, dt, a, b, c))
    end

    test "one program serves packed sequences of all lengths" do
      [a, b] = for seed <- [1, 2], do: random(seed, {1, 9, 3}, -1.0, 1.0, :f32)
      initial = random(3, {3, 3}, -1.0, 1.0, :f32)

      scan = fn a, b, initial, ends ->
        opts = [initial_state: initial, cu_seqlens: ends, return_state: true]
        {h, last} = Sidewinder.linear_scan(a, b, opts)
        Nx.add(Nx.sum(Nx.sin(h)), Nx.sum(Nx.cos(last)))
      end

      gradients = fn a, b, initial, ends ->
        Nx.Defn.grad({a, b, initial}, fn {a, b, initial} -> scan.(a, b, initial, ends) end)
      end

      compiled = EXLA.jit(gradients)

      for ends <- [[0, 2, 5, 9], [0, 0, 8, 9]], ends = Nx.tensor(ends, type: :s32) do
        expected = gradients.(a, b, initial, ends)
        all = Enum.zip(Tuple.to_list(compiled.(a, b, initial, ends)), Tuple.to_list(expected))
        for {got, expected} <- all, do: close!(got, expected, "packed")

        [h, direct] =
          for run <- [&exla/2, &apply/2],
              do: run.(&Sidewinder.linear_scan(&1, &2, cu_seqlens: &3), [a, b, ends])

        assert same?(h, direct)
      end

      wrong = Nx.tensor([0, 2, 5, 8], type: :s32)
      assert_raise RuntimeError, ~r/the length 9/, fn -> compiled.(a, b, initial, wrong) end
    end

    test "programs run beside each other, with one thread and with all" do
      [x, a] =
        for {seed, shape} <- [{1, {4, 256, 64}}, {2, {64, 16}}],
            do: random(seed, shape, -1.0, -0.1, :f32)

      b = random(3, {4, 256, 16}, -1.0, 1.0, :f32)

      for threads <- [1, 2] do
        scan = &Sidewinder.selective_scan(&1, Nx.abs(&1), &2, &3, &3, threads: threads)
        expected = scan.(x, a, b)
        all = Task.async_stream(1..16, fn _ -> exla(scan, [x, a, b]) end, timeout: :infinity)
        assert Enum.all?(all, fn {:ok, y} -> same?(y, expected) end)
      end
    end

    @tag :tmp_dir
    test "executables from the disk cache find the kernels", %{tmp_dir: folder} do
      x = Nx.tensor([[1.0, -2.0]])
      cached = &EXLA.jit(fn x -> Sidewinder.silu(x) end, cache: Path.join(folder, &1))
      for _ <- 1..2, do: assert(same?(cached.("silu").(x), Sidewinder.silu(x)))
      assert File.exists?(Path.join(folder, "silu"))
    end

    test "servings run the kernels" do
      x = Nx.tensor([1.0, -2.0, 3.0])
      serving = Nx.Serving.jit(&Sidewinder.silu/1, compiler: EXLA)

      assert same?(
               Nx.Serving.run(serving, Nx.Batch.stack([x, x])),
               Sidewinder.silu(Nx.stack([x, x]))
             )
    end

    if Code.ensure_loaded?(Sidewinder.Axon) do
      test "Axon trains to the same parameters as with direct calls" do
        model =
          Axon.input("x", shape: {nil, 4, 6})
          |> Sidewinder.Axon.mamba_block(state_size: 2)
          |> Sidewinder.Axon.rms_norm()

        [x, y] = for seed <- [1, 2], do: random(seed, {3, 4, 6}, -1.0, 1.0, :f32)

        [ours, direct] =
          for compiler <- [EXLA, Nx.Defn.Evaluator] do
            model
            |> Axon.Loop.trainer(:mean_squared_error, :sgd, log: 0, seed: 1)
            |> Axon.Loop.run([{x, y}, {x, y}], Axon.ModelState.empty(),
              epochs: 2,
              compiler: compiler
            )
          end

        for {layer, params} <- direct.data,
            {name, t} <- params,
            do: close!(ours.data[layer][name], t, "#{layer} #{name}")
      end
    end

    test "options reach the kernel" do
      x = random(1, {1, 4, 2, 8}, -1.0, 1.0, :f32)

      for opts <- [
            [pairing: :interleaved, theta: 1.0e-5, first_position: 7],
            [layout: :heads_last, theta: 1.0e22, scaling_factor: 8],
            [level: "scalar", threads: 1]
          ] do
        rope = &Sidewinder.rope(&1, opts)
        assert same?(exla(rope, [x]), rope.(x)), inspect(opts)
      end

      dt = Nx.abs(random(2, {1, 4, 2}, 0.1, 3.0, :f32))
      a = random(3, {2, 1}, -1.0, -0.5, :f32)
      b = random(4, {1, 4, 1}, 0.5, 1.0, :f32)
      scan = &Sidewinder.selective_scan(&1, &1, &2, &3, &3, dt_clamp: {0, 1.5}, dt_softplus: true)
      assert same?(exla(scan, [dt, a, b]), scan.(dt, a, b))
      assert module_of(&Sidewinder.rope/1, [x]) =~ "sidewinder_op"
      refute module_of(&Sidewinder.rope(&1, backend: :nx), [x]) =~ "sidewinder_op"
    end

    test "denormal numbers are numbers in every thread" do
      x = Nx.tensor([[1.0e-39, 2.0e-39]], type: :f32)
      sum = &Sidewinder.cumsum(Nx.new_axis(Nx.new_axis(&1, 0), -1))
      assert same?(exla(sum, [x]), sum.(x))
    end

    test "a wrong call is an error of XLA's with our text, and the next call works" do
      x = Nx.tensor([[1.0, 2.0]])

      # What is checked before can't reach the handler, so the attributes are changed behind the check.
      for {name, value, text} <- [
            {"op", ~s("no_such_op"), "no_such_op"},
            {"inputs", ~s("y"), "x"},
            {"wrong", "1 : i64", "wrong"},
            {"fn", ~s("no function"), "no function"},
            {"threads", "-1 : i64", "threads"},
            {"level", ~s("avx9"), "avx9"}
          ] do
        block = %Changed{name: name, value: value}
        broken = &Nx.block(block, [&1], &1, fn _, x -> x end)
        error = catch_error(exla(broken, [x]))
        assert Exception.message(error) =~ text
      end

      assert same?(exla(&Sidewinder.silu/1, [x]), Sidewinder.silu(x))
    end

    test "registering again changes nothing" do
      assert Sidewinder.CustomCall.register() == ["Host", "CUDA"]

      assert capture_log(fn -> assert Sidewinder.CustomCall.register() == ["Host", "CUDA"] end) ==
               ""

      assert %{exla: %{available: true, why_not: nil}} = Sidewinder.Device.info()
    end

    test "another library is no XLA" do
      library = Application.app_dir(:sidewinder, "priv/native/sidewinder_nif.so")
      assert {:error, %{kind: :unavailable}} = Sidewinder.Native.xla_register(library)
      assert {:error, %{kind: :unavailable}} = Sidewinder.Native.xla_register("/no/such/library")
    end

    defp same?(a, b), do: bits(a) == bits(b)

    defp bits(container),
      do:
        for(
          t <- Nx.Defn.Composite.flatten_list([container]),
          do: {t.shape, t.type, Nx.to_binary(t)}
        )

    # XLA may sum a loss in another order.
    defp close!(a, b, what, least \\ 0.0) do
      scale = max(Nx.to_number(Nx.reduce_max(Nx.abs(b))), least)
      assert Nx.to_number(Nx.all_close(a, b, atol: 1.0e-5 * scale, rtol: 1.0e-5)) == 1, what
    end
  end
end

defmodule Sidewinder.ErrorTest do
  use ExUnit.Case, async: true

  import Sidewinder.Calls, only: [inputs: 1]
  alias Sidewinder.{Error, Kernel, Native, Tensor}
  alias Sidewinder.Kernel.Scan

  @sizes {2, 3, 4, 5}

  defp error(work) do
    assert_raise Error, work |> then(fn work -> fn -> work.() end end)
  end

  defp scan(replaced, options \\ []) do
    [x, dt, a, b, c] = for {name, tensor} <- inputs(@sizes), do: Map.get(replaced, name, tensor)
    Scan.selective_scan(x, dt, a, b, c, options)
  end

  defp ones(shape, type \\ :f32),
    do: Tensor.from_list(List.duplicate(1, Tensor.elements(shape)), type, shape)

  test "wrong shapes" do
    for {name, shape} <- [
          {"x", {2, 3}},
          {"x", {2, 3, 5}},
          {"dt", {2, 3, 5}},
          {"A", {4}},
          {"A", {5, 4}},
          {"B", {2, 3, 6}},
          {"B", {2, 3, 3, 5}},
          {"B", {2, 3, 0, 5}},
          {"C", {1, 3, 5}},
          {"C", {}}
        ] do
      error = error(fn -> scan(%{name => ones(shape)}) end)
      assert %{kind: :shape, op: "selective_scan"} = error
      assert error.argument != "" and error.expected != "" and error.got != ""
    end

    for {option, shape} <- [d: {5}, z: {2, 3}, dt_bias: {1, 4}, initial_state: {2, 5, 4}] do
      assert %{kind: :shape} = error(fn -> scan(%{}, [{option, ones(shape)}]) end)
    end
  end

  test "wrong types" do
    assert %{kind: :dtype, argument: "B"} =
             error(fn -> scan(%{"B" => ones({2, 3, 5}, :bf16)}) end)

    assert %{kind: :dtype, argument: "A"} = error(fn -> scan(%{"A" => ones({4, 5}, :f64)}) end)
    assert %{kind: :dtype, argument: "D"} = error(fn -> scan(%{}, d: ones({4}, :f16)) end)
    assert %{kind: :dtype} = error(fn -> Tensor.from_list([1], :s32, {1}) end)
    assert %{kind: :dtype} = error(fn -> Tensor.cast(ones({1}), :u16) end)
    assert %{kind: :dtype} = error(fn -> scan(%{"x" => %{ones({2, 3, 4}) | type: :f8}}) end)
  end

  test "what is no tensor" do
    for other <- [nil, 1, "x", %{}, {:f32, {1}, <<0, 0, 0, 0>>}] do
      assert %{kind: :argument, argument: "x", got: got} = error(fn -> scan(%{"x" => other}) end)
      assert got == inspect(other)
    end
  end

  test "data that is too short, too long or no data" do
    x = ones({2, 3, 4})

    for data <- [<<>>, binary_part(x.data, 0, 95), x.data <> <<0>>] do
      assert %{kind: :size, argument: "x"} = error(fn -> scan(%{"x" => %{x | data: data}}) end)
      assert %{kind: :size} = error(fn -> Tensor.new(data, :f32, {2, 3, 4}) end)
    end

    for data <- [nil, 1, [1, 2], <<1::3>>, self()] do
      assert %{kind: :argument} = error(fn -> scan(%{"x" => %{x | data: data}}) end)
    end

    assert %{kind: :argument} =
             error(fn -> scan(%{"x" => %{x | data: make_ref()}}, backend: :cpu) end)

    assert %{kind: :argument} = error(fn -> scan(%{"x" => %{x | data: make_ref()}}) end)
  end

  test "negative and huge sizes, and shapes that are none" do
    for shape <- [{-1}, {2, -3}, {1.5}, {:a}, [2, 3], 6, nil] do
      assert %{kind: :shape} = error(fn -> Tensor.new(<<>>, :f32, shape) end)
      assert %{kind: :shape} = error(fn -> scan(%{"x" => %{ones({1}) | shape: shape}}) end)
    end

    huge = 4_611_686_018_427_387_904

    for shape <- [
          {huge, huge, huge},
          {huge, 4, 4},
          {0, huge, huge},
          {1, 1, huge * huge},
          Tuple.duplicate(1, 9)
        ] do
      empty = %{ones({1}) | shape: shape, data: <<>>}
      assert {:error, %{kind: kind}} = Native.tensor_cast({:f32, shape, <<>>}, :f64)
      assert kind in [:shape, :size]
      assert %{kind: kind} = error(fn -> scan(%{"x" => empty, "dt" => empty}) end)
      assert kind in [:shape, :size]
    end
  end

  test "results that memory has no room for" do
    # Tensors without elements can ask for a result that has very many.
    length = 4_000_000_000_000

    inputs = [
      {"x", Tensor.new(<<>>, :f32, {1, length, 0})},
      {"dt", Tensor.new(<<>>, :f32, {1, length, 0})},
      {"A", Tensor.new(<<>>, :f32, {0, 4})},
      {"B", Tensor.new(<<>>, :f32, {0, 4})},
      {"C", Tensor.new(<<>>, :f32, {0, 4})}
    ]

    assert %{"y" => %{shape: {1, ^length, 0}, data: <<>>}} =
             Kernel.run(:selective_scan, inputs, %{})

    update = [
      {"x", Tensor.new(<<>>, :f32, {0, 4})},
      {"initial_state", Tensor.new(<<>>, :f32, {0, 4, 3})},
      {"dt", Tensor.new(<<>>, :f32, {0, 4})},
      {"A", ones({4, 3})},
      {"B", Tensor.new(<<>>, :f32, {0, 3})},
      {"C", Tensor.new(<<>>, :f32, {0, 3})}
    ]

    assert %{"y" => %{shape: {0, 4}}, "last_state" => %{shape: {0, 4, 3}}} =
             Kernel.run(:selective_state_update, update, %{})
  end

  test "missing, unknown and doubled inputs, and an unknown op" do
    inputs = inputs(@sizes)

    for {name, _} <- inputs do
      error = error(fn -> Kernel.run(:selective_scan, List.keydelete(inputs, name, 0), %{}) end)
      assert %{kind: :argument, argument: ^name} = error
    end

    extra = inputs ++ [{"E", ones({4})}]

    assert %{kind: :argument, argument: "E"} =
             error(fn -> Kernel.run(:selective_scan, extra, %{}) end)

    assert %{kind: :argument} = error(fn -> Kernel.run(:selective_scan, [], %{}) end)

    assert %{kind: :argument, argument: "op"} =
             error(fn -> Kernel.run(:no_such_op, inputs, %{}) end)

    for op <- ["selective_scan", 5],
        do:
          assert_raise(Error, ~r/op: expected the name of an op/, fn ->
            Kernel.run(op, inputs, %{})
          end)
  end

  test "unknown options and values that are none" do
    assert %{kind: :option, argument: "softplus"} =
             error = error(fn -> scan(%{}, softplus: true) end)

    assert error.expected =~ "dt_softplus"
    assert Exception.message(error) =~ "selective_scan: softplus: expected an option out of "

    for options <- [
          [dt_softplus: 1],
          [dt_clamp: {1}],
          [dt_clamp: {1, 0}],
          [dt_clamp: :both],
          [return_state: "yes"],
          [threads: 0],
          [threads: -1],
          [threads: 1_000_000],
          [threads: "2"],
          [level: :scalar],
          [backend: "tpu"],
          [backend: {:cuda, -1}],
          [backend: :nx],
          [{"d", ones({4})}],
          [1],
          %{d: nil}
        ] do
      assert %{kind: :option} = error(fn -> scan(%{}, options) end), inspect(options)
    end

    assert %{kind: :unavailable, argument: "level"} = error(fn -> scan(%{}, level: "sse9") end)

    assert %{kind: :option} =
             error(fn -> Kernel.run(:selective_scan, inputs(@sizes), %{other: 1}) end)
  end

  @tag :no_cuda
  test "a GPU that is not there" do
    assert %{kind: :unavailable, argument: argument} =
             error(fn -> scan(%{}, backend: {:cuda, 0}) end)

    assert argument != ""
    assert %{kind: :unavailable} = error(fn -> Tensor.to_device(ones({1}), {:cuda, 0}) end)
  end

  @tag :cuda
  test "a GPU of a number that is not there" do
    assert %{kind: :unavailable} = error(fn -> scan(%{}, backend: {:cuda, 99}) end)
    assert %{kind: :unavailable} = error(fn -> Tensor.to_device(ones({1}), {:cuda, 99}) end)
  end

  @tag :cuda
  test "tensors on the host and on a device in one call" do
    x = Tensor.to_device(ones({2, 3, 4}), {:cuda, 0})
    assert %{kind: :argument, hint: hint} = error(fn -> scan(%{"x" => x}) end)
    assert hint =~ "to_device"
    assert %{kind: :argument} = error(fn -> scan(%{"x" => x}, backend: :cpu) end)
  end

  test "nil options count as absent" do
    assert scan(%{},
             d: nil,
             z: nil,
             dt_clamp: nil,
             dt_softplus: nil,
             backend: nil,
             level: nil,
             threads: nil
           ) == scan(%{})
  end

  test "data at an address that its type cannot be read from gives the same results" do
    shifted =
      for {name, %{data: data} = tensor} <- inputs(@sizes), into: %{} do
        <<_, rest::binary>> = <<0, data::binary>>
        {name, %{tensor | data: rest}}
      end

    assert scan(shifted) == scan(%{})
    assert Tensor.to_list(shifted["x"]) == Tensor.to_list(Map.new(inputs(@sizes))["x"])
  end

  test "sizes of zero give empty results, and a length of zero the initial state" do
    for sizes <- [{0, 3, 4, 5}, {2, 3, 0, 5}] do
      assert %{"y" => %{data: <<>>}} =
               Kernel.run(:selective_scan, inputs(sizes), %{return_state: true})
    end

    initial_state = ones({2, 4, 5})

    outputs =
      Kernel.run(:selective_scan, inputs({2, 0, 4, 5}) ++ [{"initial_state", initial_state}], %{
        return_state: true
      })

    assert outputs == %{"y" => Tensor.new(<<>>, :f32, {2, 0, 4}), "last_state" => initial_state}
    assert %{"y" => y} = Kernel.run(:selective_scan, inputs({2, 3, 4, 0}), %{})
    assert Enum.uniq(Tensor.to_list(y)) == [0.0]
  end
end

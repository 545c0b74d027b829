defmodule Sidewinder.Kernel.TernaryTest do
  use ExUnit.Case, async: true

  import ExUnit.CaptureLog

  alias Sidewinder.Kernel.Ternary
  alias Sidewinder.{Error, Safetensors, Tensor}

  defp tensor(list, type, shape), do: Tensor.from_list(list, type, shape)

  defp bitnet(context, scale) do
    path = Path.join(System.tmp_dir!(), "bitnet-#{context.line}.safetensors")
    on_exit(fn -> File.rm(path) end)

    tensors = [
      {"layer.weight", tensor([0xA1, 0x18, 0x90, 0x0A], :u8, {2, 2})},
      {"layer.weight_scale", tensor([scale], :bf16, {1})}
    ]

    :ok = Safetensors.write(path, tensors)
    path
  end

  test "a BitNet checkpoint, by either convention", context do
    path = bitnet(context, 4.0)

    for {mode, scale} <- [multiply: 4.0, divide: 0.25] do
      {planes, got} = Ternary.from_bitnet(path, "layer", scale_mode: mode)

      assert Tensor.to_list(Ternary.decode(planes, n: 2)) ==
               [0, -1, -1, 1, -1, 1, -1, 1, 1, 0, 0, -1, 1, -1, 1, -1]

      assert {got.type, Tensor.to_list(got)} == {:f32, [scale]}
    end

    {{plane0, _}, _} = Ternary.from_bitnet(path, "layer", scale_mode: :multiply, rows: 7)
    assert plane0.shape == {7, 1}

    for options <- [[], [scale_mode: :guess]] do
      error = assert_raise Error, fn -> Ternary.from_bitnet(path, "layer", options) end
      assert error.argument == "scale_mode"
    end
  end

  test "nothing is divided by 0", context do
    path = bitnet(context, 0.0)
    error = assert_raise Error, fn -> Ternary.from_bitnet(path, "layer", scale_mode: :divide) end
    assert error.argument == "scale_mode"
  end

  test "sentinels are refused, cleared, or cleared with a warning" do
    bytes = tensor([0x9C], :u8, {1})
    error = assert_raise Error, fn -> Ternary.convert(bytes, :packed2, :values) end
    assert {error.kind, error.argument} == {:argument, "packed2"}
    quiet = Ternary.convert(bytes, :packed2, :values, on_sentinel: :zero)
    assert Tensor.to_list(quiet) == [0, 0, -1, 1]

    log =
      capture_log(fn ->
        assert Ternary.convert(bytes, :packed2, :values, on_sentinel: :warn) == quiet
      end)

    assert log =~ "1 cells of packed2 are no value"
  end

  test "layouts there and back" do
    values = tensor(for(i <- 0..62, do: rem(i, 3) - 1), :i8, {9, 7})

    for layout <- [:planes, :packed2, :offset_rows, :byte_planes] do
      there = Ternary.convert(values, :values, layout)
      assert Ternary.convert(there, layout, :values, n: 7, rows: 9) == values
      assert Ternary.verify(there, layout: layout, n: 7, rows: 9) == :ok
    end
  end

  test "sums of integers are the same at every level" do
    x = tensor(for(i <- 1..200, do: :math.sin(i)), :f32, {2, 100})
    w = tensor(for(i <- 1..300, do: :math.cos(i)), :f32, {3, 100})
    {planes, scale} = Ternary.quantize(w, per_row: true)
    options = [w_scale: scale, return_sums: true]

    results =
      for level <- Sidewinder.Device.info().cpu.levels -- ["reference"] do
        Ternary.matmul_i8(x, planes, [level: level] ++ options)
      end

    assert [one] = Enum.uniq(results)
    assert Ternary.verify_sums(one.acc, Ternary.column_sums(planes, n: 100), one.xq) == :ok
    assert Ternary.linear(x, w, per_row: true) == one.y
  end

  test "what is wrong is named" do
    x = tensor([1, 2], :f32, {1, 2})
    planes = Ternary.encode(tensor([1, 1], :i8, {1, 2}))
    nan = Tensor.new(<<0x7FC00000::32-native, 0::32>>, :f32, {1, 2})

    for {call, argument} <- [
          {fn -> Ternary.matmul_i8(nan, planes) end, "x"},
          {fn -> Ternary.matmul_f32(x, x) end, "plane0"},
          {fn -> Ternary.matmul_i8(x, planes, scale: 1) end, "scale"},
          {fn -> Ternary.convert(x, :planes, :values) end, "plane0"},
          {fn -> Ternary.convert(x, :ternary, :values) end, "from"},
          {fn -> Ternary.convert(planes, :planes, :ternary) end, "to"},
          {fn -> Ternary.quantize(x, rule: :threshold) end, "threshold"},
          {fn -> Ternary.simple_rotor_net(x, []) end, "layers"}
        ] do
      error = assert_raise Error, call
      assert error.argument == argument
    end
  end
end

defmodule Sidewinder.QuantBlocksTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Compare, Error, Kernel.Quant, RandomInputs, Safetensors, Tensor}

  @reference [backend: :cpu, level: "reference"]
  @formats [q8_0: 34, q4_0: 18]

  defp random(shape, seed \\ 1, range \\ {-3, 3}),
    do: RandomInputs.tensor(shape, :f32, range, seed)

  defp places, do: [[backend: :cpu] | Calls.levels()]

  test "bytes are those of the reference at every level" do
    for {format, bytes} <- @formats, shape <- [{32}, {3, 96}, {2, 0, 64}, {5, 1024}, {7, 0}] do
      x = random(shape)
      expected = Quant.quantize(x, format, @reference)
      blocks = div(Tensor.elements(shape), 32)
      assert expected.type == :u8 and Tensor.elements(expected.shape) == blocks * bytes
      back = Quant.dequantize(expected, format, @reference)
      assert {back.type, back.shape} == {:f32, shape}

      for where <- places() do
        assert Quant.quantize(x, format, where) == expected
        assert Quant.dequantize(expected, format, where) == back
      end
    end
  end

  test "values come back within a step" do
    x = random({4, 320}, 2, {-100, 100})

    for {format, steps} <- [q8_0: 0.6, q4_0: 1.01] do
      back = Quant.dequantize(Quant.quantize(x, format), format)
      step = 100 / if(format == :q8_0, do: 127, else: 8)
      assert Compare.difference(back, x, rtol: 0, atol: steps * step).within_tolerance
    end
  end

  test "products agree with the reference, with bias and activation and without" do
    for {call, format} <- [
          {&Quant.matmul_q8_q8/3, :q8_0},
          {&Quant.matmul_q8_q4/3, :q4_0},
          {&Quant.matmul_f32_q8/3, :q8_0},
          {&Quant.matmul_f32_q4/3, :q4_0}
        ],
        {rows, inputs, outputs} <- [{1, 32, 1}, {1, 320, 35}, {6, 64, 17}, {0, 32, 3}],
        options <- [[], [bias: random({outputs}, 3), activation: :silu]] do
      x = random({rows, inputs})
      w = Quant.quantize(random({outputs, inputs}, 2), format)
      expected = call.(x, w, options ++ @reference)
      assert expected.shape == {rows, outputs}

      for where <- places() do
        got = call.(x, w, options ++ where)
        assert Compare.difference(got, expected, rtol: 1.0e-5, atol: 1.0e-3).within_tolerance
      end
    end
  end

  test "products take and give bf16 and f16" do
    w = Quant.quantize(random({5, 64}), :q8_0)

    for type <- [:bf16, :f16] do
      x = Tensor.cast(random({2, 64}, 4), type)
      assert %{type: ^type, shape: {2, 5}} = y = Quant.matmul_q8_q8(x, w)
      wide = Quant.matmul_q8_q8(Tensor.cast(x, :f32), w)
      y = Tensor.cast(y, :f32)
      assert Compare.difference(y, wide, rtol: 0.01, atol: 0.01).within_tolerance
    end
  end

  test "rows that are no whole blocks are refused" do
    for n <- [1, 31, 33], format <- [:q8_0, :q4_0] do
      error = assert_raise Error, fn -> Quant.quantize(random({2, n}), format) end
      assert {error.kind, error.argument} == {:shape, "x"}
      assert error.expected =~ "multiple of 32" and error.hint =~ "pad"
    end

    q = Quant.quantize(random({64}), :q8_0)
    error = assert_raise Error, fn -> Quant.dequantize(q, :q4_0) end
    assert {error.kind, error.argument} == {:shape, "q"}
  end

  test "values without a scale are refused by their place, unless that is asked for" do
    for {value, format} <- [nan: :q8_0, infinity: :q4_0, large: :q4_0] do
      bits = %{nan: 0x7FC00000, infinity: 0x7F800000, large: 0x49742400}[value]
      <<front::binary-40, _::32, rest::binary>> = random({64}).data
      x = Tensor.new(<<front::binary, bits::32-native, rest::binary>>, :f32, {64})

      for where <- places() do
        error = assert_raise Error, fn -> Quant.quantize(x, format, where) end
        assert {error.kind, error.argument} == {:argument, "x"}
        assert error.got =~ "at position 10"
        q = Quant.quantize(x, format, [unchecked: true] ++ where)
        assert Enum.any?(Tensor.to_list(Quant.dequantize(q, format)), &is_atom/1)
      end
    end
  end

  test "weights of the wrong format, type or size are refused" do
    x = random({2, 64})
    q8 = Quant.quantize(random({3, 64}), :q8_0)
    error = assert_raise Error, fn -> Quant.matmul_q8_q4(x, q8) end
    assert {error.kind, error.argument} == {:shape, "w"} and error.hint =~ "q4_0"
    error = assert_raise Error, fn -> Quant.matmul_q8_q8(x, random({3, 68})) end
    assert {error.kind, error.argument} == {:dtype, "w"}
    error = assert_raise Error, fn -> Quant.matmul_q8_q8(Tensor.cast(x, :f64), q8) end
    assert {error.kind, error.argument} == {:dtype, "x"}
    error = assert_raise Error, fn -> Quant.matmul_q8_q8(x, q8, bias: random({4})) end
    assert {error.kind, error.argument} == {:shape, "b"}
    error = assert_raise Error, fn -> Quant.quantize(x, :q5_0) end
    assert error.kind == :option
    error = assert_raise Error, fn -> Quant.matmul_q8_q8(x, q8, unchecked: true) end
    assert error.kind == :option
  end

  @tag :tmp_dir
  test "bytes go through a file", %{tmp_dir: folder} do
    path = Path.join(folder, "q.safetensors")
    q = Quant.quantize(random({4, 64}), :q4_0)
    Safetensors.write(path, %{"w" => q})
    assert Safetensors.read(path)["w"] == q
  end

  test "random inputs of all these ops are such that levels agree" do
    for op <- [
          :quantize,
          :dequantize,
          :matmul_q8_q8,
          :matmul_q8_q4,
          :matmul_f32_q8,
          :matmul_f32_q4
        ] do
      result = Compare.levels(op, RandomInputs.make(op), iterations: 1, warmup: 0, max_ms: 1)
      assert result.ok?, Compare.table(result)
    end

    inputs = RandomInputs.make(:dequantize, options: %{format: "q4_0"})
    options = [options: %{format: "q4_0"}, iterations: 1, warmup: 0, max_ms: 1]
    assert Compare.levels(:dequantize, inputs, options).ok?
  end

  @tag :cuda
  test "bytes and results stay on the device" do
    x = random({2, 128})
    w = random({7, 128}, 2)

    for format <- [:q8_0, :q4_0] do
      [there, weights] = for t <- [x, w], do: Tensor.to_device(t, {:cuda, 0})
      q = Quant.quantize(weights, format)
      assert Tensor.device(q) == {:cuda, 0}
      assert Tensor.to_host(q) == Quant.quantize(w, format)
      call = if format == :q8_0, do: &Quant.matmul_q8_q8/2, else: &Quant.matmul_q8_q4/2
      y = call.(there, q)
      assert Tensor.device(y) == {:cuda, 0}
      expected = call.(x, Tensor.to_host(q))

      assert Compare.difference(Tensor.to_host(y), expected, rtol: 1.0e-5, atol: 1.0e-3).within_tolerance
    end
  end
end

defmodule Sidewinder.QuantizedTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Quantized, RandomInputs, Safetensors, Tensor}

  defp zeros(type, shape),
    do: Tensor.from_list(List.duplicate(0, Tensor.elements(shape)), type, shape)

  defp ternary(out, width, rows \\ 1) do
    bytes = {out, div(width + 7, 8)}
    scale = Tensor.from_list(Enum.to_list(1..rows), :f32, {rows})
    Quantized.new(:ternary, {out, width}, {zeros(:u8, bytes), zeros(:u8, bytes)}, scale)
  end

  test "parts that do not fit are refused" do
    planes = {zeros(:u8, {3, 2}), zeros(:u8, {3, 2})}
    one = zeros(:f32, {1})

    for {arguments, kind, part} <- [
          {[:q9, {1, 32}, zeros(:u8, {1, 34})], :argument, "format"},
          {[:q8_0, {1, 33}, zeros(:u8, {1, 34})], :shape, "a multiple of 32"},
          {[:q8_0, {}, zeros(:u8, {1})], :shape, "a multiple of 32"},
          {[:q8_0, {1, 32}, zeros(:i8, {1, 34})], :dtype, "expected u8 (1, 34)"},
          {[:q4_0, {1, 32}, zeros(:u8, {1, 34})], :shape, "expected u8 (1, 18)"},
          {[:q4_0, {1, 32}, planes], :argument, "another form"},
          {[:q4_0, {1, 32}, zeros(:u8, {1, 18}), one], :argument, "another form"},
          {[:ternary, {3, 9}, zeros(:u8, {3, 2}), one], :argument, "two planes"},
          {[:ternary, {3, 17}, planes, one], :shape, "plane0"},
          {[:ternary, {3, 9}, put_elem(planes, 1, one), one], :dtype, "plane1"},
          {[:ternary, {3, 9}, planes], :dtype, "scale"},
          {[:ternary, {3, 9}, planes, zeros(:f32, {2})], :shape, "expected f32 (3)"},
          {[:ternary, {9}, planes, one], :argument, "{out, in}"}
        ] do
      error = assert_raise Error, fn -> apply(Quantized, :new, arguments) end
      assert error.kind == kind and Exception.message(error) =~ part
    end
  end

  test "prints what it takes" do
    blocks = fn format, bytes -> %Quantized{format: format, shape: {4096, 4096}, data: bytes} end
    data = %Tensor{type: :u8, shape: {4096, 2304}, data: ""}

    assert inspect(blocks.(:q4_0, data)) ==
             "#Sidewinder.Quantized<q4_0 (4096, 4096) 9.4 MB, 7.1x smaller than f32>"

    assert inspect(ternary(3, 9, 3)) ==
             "#Sidewinder.Quantized<ternary (3, 9) 24 bytes, 4.5x smaller than f32>"

    assert Quantized.size(1_234) == "1.2 kB" and Quantized.size(2_500_000_000) == "2.5 GB"
  end

  @tag :tmp_dir
  test "files give back what they were given", %{tmp_dir: folder} do
    path = Path.join(folder, "model.safetensors")

    tensors =
      for width <- [1, 7, 8, 9, 31, 64], rows <- [1, 3], into: %{} do
        {"t.#{width}.#{rows}", ternary(3, width, rows)}
      end

    tensors =
      Map.merge(tensors, %{
        "b.weight" => Quantized.new(:q8_0, {2, 64}, zeros(:u8, {2, 68})),
        "c" => Quantized.new(:q4_0, {2, 2, 32}, zeros(:u8, {2, 2, 18})),
        "empty" => Quantized.new(:q4_0, {2, 0}, zeros(:u8, {2, 0})),
        "norm.weight" => zeros(:bf16, {5}),
        # No blocks, whatever its name.
        "other.q4_0" => zeros(:f32, {18}),
        "some.plane0" => zeros(:u8, {1})
      })

    assert Quantized.save!(path, tensors) == :ok
    assert Quantized.load!(path) == tensors
    assert Quantized.load!(path, ["c"]) == Map.take(tensors, ["c"])
    assert Quantized.load!(path, ["c.q4_0"])["c.q4_0"] == tensors["c"].data
    assert_raise Error, ~r/a tensor `d`/, fn -> Quantized.load!(path, ["d"]) end
    names = for %{name: name} <- Safetensors.index(path), do: name
    assert "b.weight.q8_0" in names and "t.9.3.plane1" in names and "t.9.3.shape" in names
  end

  @tag :tmp_dir
  test "damaged parts of files are told", %{tmp_dir: folder} do
    path = Path.join(folder, "damaged.safetensors")

    for {tensors, part} <- [
          {[{"w.q8_0", zeros(:u8, {1, 33})}], "w.q8_0: expected rows of a multiple of 34 bytes"},
          {[{"w.q8_0", zeros(:u8, {})}], "multiple of 34"},
          {Quantized.to_tensors(%{ternary(3, 9) | shape: {3, 99}}, "w"), "plane0"},
          {Quantized.to_tensors(%{ternary(3, 9) | shape: {3, -9}}, "w"), "shape"},
          {Quantized.to_tensors(%{ternary(3, 9) | shape: {3, 9, 1}}, "w"), "w.shape"}
        ] do
      Safetensors.write(path, tensors)
      error = assert_raise Error, fn -> Quantized.load!(path) end
      assert Exception.message(error) =~ part
    end

    assert_raise Error, ~r/w: expected tensors named/, fn -> Quantized.from_tensors(%{}, "w") end
    assert_raise Error, ~r/w: expected a Sidewinder/, fn -> Quantized.save!(path, %{"w" => 1}) end

    w = zeros(:f32, {1})

    for tensors <- [5, [5], [{1, w}], [{"w", w} | 5], %{w: w}],
        do:
          assert_raise(Error, ~r/tensors: expected pairs/, fn ->
            Quantized.save!(path, tensors)
          end)
  end

  @tag :tmp_dir
  test "files in pieces are whole or not there", %{tmp_dir: folder} do
    path = Path.join(folder, "pieces.safetensors")
    specs = [{"a", :f32, {2}}, {"b", :u8, {3}}]
    {a, b} = {zeros(:f32, {2}), zeros(:u8, {3})}
    each = fn pieces -> &Enum.map(pieces, fn {name, tensor} -> &1.(name, tensor) end) end
    assert Safetensors.write_each(path, specs, each.([{"b", b}, {"a", a}])) == [:ok, :ok]
    assert Safetensors.read(path) == %{"a" => a, "b" => b}
    File.rm!(path)

    for {pieces, part} <- [
          {[{"a", a}], "no tensor `b`"},
          {[{"a", b}], "as its header says"},
          {[{"c", a}], "a tensor `c` that it has not"}
        ] do
      error = assert_raise Error, fn -> Safetensors.write_each(path, specs, each.(pieces)) end
      assert Exception.message(error) =~ part
    end

    assert_raise RuntimeError, fn ->
      Safetensors.write_each(path, specs, fn _ -> raise "no" end)
    end

    twice = fn -> Safetensors.write_each(path, specs ++ specs, each.([])) end
    assert_raise Error, ~r/two tensors named `a`/, twice
    assert File.ls!(folder) == []
  end

  test "ternary weights multiply as what they stand for does" do
    for width <- [1, 8, 9, 63, 130], per_row <- [false, true] do
      x = RandomInputs.normal({3, width}, :f32, 1.0, {:x, width})
      w = RandomInputs.normal({5, width}, :f32, 1.0, {:w, width})
      bias = RandomInputs.normal({5}, :f32, 1.0, :bias)
      quantized = Quantized.quantize(w, :ternary, per_row: per_row)
      assert quantized.scale.shape == if(per_row, do: {5}, else: {1})
      plain = Quantized.dequantize(quantized)
      assert plain.shape == {5, width}
      signs = x |> Tensor.to_list() |> Enum.map(&if(&1 > 0, do: 1, else: -1))

      for {activations, x_as_it_is, within} <- [
            {:f32, x, 1.0e-4},
            {:i8, x, 0.02 * width},
            {:ternary, Tensor.from_list(signs, :f32, {3, width}), 1.0e-4}
          ] do
        given = [bias: bias, activation: :relu]
        y = Quantized.matmul(x, quantized, [activations: activations] ++ given)
        wanted = Sidewinder.Kernel.NN.linear(x_as_it_is, plain, given)
        pairs = Enum.zip(Tensor.to_list(y), Tensor.to_list(wanted))
        for {got, wanted} <- pairs, do: assert_in_delta(got, wanted, within)
      end
    end
  end

  test "activations that a format has not are refused" do
    x = zeros(:f32, {1, 32})
    blocks = Quantized.quantize(x, :q8_0)

    assert_raise Error, ~r/q8 or f32 for q8_0/, fn ->
      Quantized.matmul(x, blocks, activations: :i8)
    end

    ternary = Quantized.quantize(x, :ternary)

    assert_raise Error, ~r/i8, ternary or f32/, fn ->
      Quantized.matmul(x, ternary, activations: :q8)
    end

    assert_raise Error, ~r/a keyword list/, fn -> Quantized.matmul(x, blocks, 3) end
    assert_raise Error, ~r/format: expected q8_0/, fn -> Quantized.quantize(x, :q5_0) end

    assert_raise Error, ~r/x: expected a Sidewinder.Tensor/, fn ->
      Quantized.quantize(1, :q8_0)
    end

    assert_raise Error, ~r/\(32\)|\{out, in\}/, fn ->
      Quantized.quantize(zeros(:f32, {32}), :ternary)
    end
  end

  @tag :tmp_dir
  test "cells that are no value are refused, unless told otherwise", %{tmp_dir: folder} do
    path = Path.join(folder, "sentinel.safetensors")
    plane = Tensor.new(<<0b101>>, :u8, {1, 1})

    w =
      Quantized.new(
        :ternary,
        {1, 3},
        {plane, Tensor.new(<<0b100>>, :u8, {1, 1})},
        zeros(:f32, {1})
      )

    Quantized.save!(path, %{"w" => w})
    error = assert_raise Error, fn -> Quantized.load!(path) end
    assert error.kind == :argument and error.got =~ "the first in row 0 at 2"
    one = Tensor.new(<<0b001>>, :u8, {1, 1})
    none = Tensor.new(<<0>>, :u8, {1, 1})
    assert Quantized.load!(path, ["w"], on_sentinel: :zero)["w"].data == {one, none}
    log = ExUnit.CaptureLog.capture_log(fn -> Quantized.load!(path, :all, on_sentinel: :warn) end)
    assert log =~ "1 cells"
    assert_raise Error, ~r/on_other/, fn -> Quantized.load!(path, :all, on_other: :zero) end
  end

  @tag :tmp_dir
  test "layers of BitNet checkpoints", %{tmp_dir: folder} do
    path = Path.join(folder, "bitnet.safetensors")
    bytes = Tensor.from_list([0xA1, 0x18, 0x90, 0x0A], :u8, {2, 2})
    values = [0, -1, -1, 1, -1, 1, -1, 1, 1, 0, 0, -1, 1, -1, 1, -1]

    for shape <- [{1}, {}], {mode, factor} <- [multiply: 4, divide: 0.25] do
      scale = Tensor.from_list([4], :bf16, shape)
      Safetensors.write(path, %{"up.weight" => bytes, "up.weight_scale" => scale})
      w = Quantized.from_bitnet(path, "up", scale_mode: mode)
      assert w.shape == {8, 2} and w.scale == Tensor.from_list([factor], :f32, {1})

      assert Tensor.to_list(Quantized.dequantize(w)) ==
               for(value <- values, do: value * factor / 1)

      seven = Quantized.from_bitnet(path, "up", scale_mode: mode, rows: 7)
      assert seven.shape == {7, 2}

      assert Tensor.to_list(Quantized.dequantize(seven)) ==
               Enum.take(Tensor.to_list(Quantized.dequantize(w)), 14)
    end

    assert_raise Error, ~r/multiply or :divide/, fn -> Quantized.from_bitnet(path, "up", []) end
  end

  @tag :cuda
  test "weights stay on a device, and results with them" do
    x = RandomInputs.normal({3, 96}, :f32, 1.0, :x)
    w = RandomInputs.normal({40, 96}, :f32, 1.0, :w)

    for format <- Quantized.formats() do
      host = Quantized.quantize(w, format)
      there = Quantized.to_device(host, {:cuda, 0})
      assert Quantized.device(there) == {:cuda, 0} and inspect(there) =~ "smaller than f32, on "
      assert Quantized.to_host(there) == host
      assert Quantized.bytes(there) == Quantized.bytes(host)
      assert there == Quantized.to_device(there, {:cuda, 0})
      made = Quantized.quantize(Tensor.to_device(w, {:cuda, 0}), format)
      assert Quantized.device(made) == {:cuda, 0} and Quantized.to_host(made).data == host.data
      back = Quantized.dequantize(there)
      assert Tensor.device(back) == {:cuda, 0}
      assert Tensor.to_host(back) == Quantized.dequantize(host)
      y = Quantized.matmul(Tensor.to_device(x, {:cuda, 0}), there)
      assert Tensor.device(y) == {:cuda, 0}
      pairs = Enum.zip(Tensor.to_list(y), Tensor.to_list(Quantized.matmul(x, host)))
      for {got, wanted} <- pairs, do: assert_in_delta(got, wanted, 1.0e-3)
    end
  end

  test "the guide's first example does what it says" do
    guide = File.read!(Path.expand("../../guides/quantize_and_run.livemd", __DIR__))
    [_, shown] = Regex.run(~r/^# (Sidewinder.Quantized<.*>)$/m, guide)
    cells = ~r/Quantized.quantize\(weights, :q4_0\)|Quantized.matmul\(x, w,/
    {_, binding} = guide |> Sidewinder.Markdown.code(&(&1 =~ cells)) |> Code.eval_string()
    assert inspect(binding[:w]) == "#" <> shown
    assert %Tensor{type: :f32, shape: {1, 64}} = binding[:y]

    wanted = Sidewinder.Kernel.NN.linear(binding[:x], binding[:weights], activation: :relu)
    pairs = Enum.zip(Tensor.to_list(binding[:y]), Tensor.to_list(wanted))
    # A step of a weight is an eighth of the largest, which is 1.
    for {quantized, exact} <- pairs, do: assert_in_delta(quantized, exact, 128 / 8)
  end
end

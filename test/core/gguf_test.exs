defmodule Sidewinder.GGUFTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, GGUF, Quantized, Tensor}

  # Written by gguf-py 0.19.
  @sample Path.expand("../golden/gguf/sample.gguf", __DIR__)

  # A file of `{key, type, bytes}` and `{name, sizes innermost first, type, offset}`.
  defp write(folder, keys, infos, data) do
    text = fn text -> <<byte_size(text)::little-64, text::binary>> end
    keys_bytes = for {key, type, value} <- keys, do: [text.(key), <<type::little-32>>, value]

    infos_bytes =
      for {name, sizes, type, offset} <- infos do
        axes = for size <- sizes, do: <<size::little-64>>
        [text.(name), <<length(sizes)::little-32>>, axes, <<type::little-32, offset::little-64>>]
      end

    head = ["GGUF", <<3::little-32, length(infos)::little-64, length(keys)::little-64>>]
    header = IO.iodata_to_binary([head, keys_bytes, infos_bytes])
    padding = :binary.copy(<<0>>, rem(32 - rem(byte_size(header), 32), 32))
    path = Path.join(folder, "made.gguf")
    File.write!(path, [header, padding, data])
    path
  end

  test "what a file holds, in the order of its data" do
    assert [%{name: "w.f32", type: "F32", shape: {3, 64}, bytes: 768} | _] = GGUF.index(@sample)
    types = for entry <- GGUF.index(@sample), into: %{}, do: {entry.name, entry.type}

    assert types == %{
             "w.f32" => "F32",
             "w.f16" => "F16",
             "w.bf16" => "BF16",
             "w.q8_0" => "Q8_0",
             "w.q4_0" => "Q4_0",
             "w.q5_0" => "Q5_0",
             "bias" => "F32",
             "ids" => "I32"
           }
  end

  test "its metadata, of every type" do
    assert GGUF.metadata(@sample) == %{
             "general.architecture" => "sample",
             "t.u8" => 200,
             "t.i8" => -100,
             "t.u16" => 60000,
             "t.i16" => -30000,
             "t.u32" => 4_000_000_000,
             "t.i32" => -2_000_000_000,
             "t.f32" => 0.10000000149011612,
             "t.bool" => true,
             "t.string" => "snäke",
             "t.u64" => 18_446_744_073_709_551_615,
             "t.i64" => -9_223_372_036_854_775_808,
             "t.f64" => 0.1,
             "t.ints" => [1, -2, 3],
             "t.floats" => [0.5, -0.25],
             "t.bools" => [true, false],
             "t.strings" => ["a", "", "bc"]
           }
  end

  test "its tensors" do
    wide = GGUF.load!(@sample, "w.f32")
    assert %Tensor{type: :f32, shape: {3, 64}} = wide
    assert GGUF.load!(@sample, "w.f16") == Tensor.cast(wide, :f16)
    assert GGUF.load!(@sample, "w.bf16") == Tensor.cast(wide, :bf16)
    assert GGUF.load!(@sample, "bias") == Tensor.from_list([0, 1, 2, 3, 4], :f32, {5})
    assert GGUF.load!(@sample, "ids") == Tensor.from_list([1, -2, 3, 4], :i32, {2, 2})

    assert %Quantized{format: :q8_0, shape: {3, 64}, data: %{type: :u8, shape: {3, 68}}} =
             GGUF.load!(@sample, "w.q8_0")

    assert inspect(GGUF.load!(@sample, "w.q4_0")) ==
             "#Sidewinder.Quantized<q4_0 (3, 64) 108 bytes, 7.1x smaller than f32>"
  end

  test "our quantizer makes the blocks that gguf-py made" do
    wide = GGUF.load!(@sample, "w.f32")

    for format <- [:q8_0, :q4_0] do
      theirs = GGUF.load!(@sample, "w.#{format}")
      assert Quantized.quantize(wide, format) == theirs
      pairs = Enum.zip(Tensor.to_list(Quantized.dequantize(theirs)), Tensor.to_list(wide))
      for {back, value} <- pairs, do: assert_in_delta(back, value, 0.5)
    end
  end

  @tag :tmp_dir
  test "floats that Elixir has no number for, and texts that are none", %{tmp_dir: folder} do
    keys = [
      {"infinite", 6, <<0, 0, 128, 127>>},
      {"less", 12, <<0, 0, 0, 0, 0, 0, 240, 255>>},
      {"none", 6, <<0, 0, 192, 127>>},
      {"bytes", 8, <<2::little-64, 255, 254>>},
      {"deep", 9, <<9::little-32, 1::little-64, 0::little-32, 2::little-64, 7, 8>>}
    ]

    assert GGUF.metadata(write(folder, keys, [], "")) == %{
             "infinite" => :infinity,
             "less" => :neg_infinity,
             "none" => :nan,
             "bytes" => <<255, 254>>,
             "deep" => [[7, 8]]
           }
  end

  @tag :tmp_dir
  test "blocks come as they are", %{tmp_dir: folder} do
    bytes = for i <- 1..68, into: <<>>, do: <<i>>
    path = write(folder, [], [{"w", [64, 1], 8, 0}], bytes)
    assert GGUF.load!(path, "w") == Quantized.new(:q8_0, {1, 64}, Tensor.new(bytes, :u8, {1, 68}))
  end

  @tag :tmp_dir
  test "a tensor of an unknown type hides neither metadata nor other tensors", %{tmp_dir: folder} do
    keys = [{"general.architecture", 8, <<12::little-64, "bitnet-b1.58">>}]
    infos = [{"up", [128], 36, 0}, {"norm", [4], 0, 64}, {"down", [64, 3], 200, 96}]
    path = write(folder, keys, infos, <<0::512, 1.0::float-little-32, 0::96, 0::128, 7::160>>)
    assert GGUF.metadata(path) == %{"general.architecture" => "bitnet-b1.58"}

    assert GGUF.index(path) == [
             %{name: "up", type: "type 36 (I2_S)", shape: {128}, bytes: 64},
             %{name: "norm", type: "F32", shape: {4}, bytes: 16},
             %{name: "down", type: "type 200", shape: {3, 64}, bytes: 20}
           ]

    assert GGUF.load!(path, "norm") == Tensor.from_list([1, 0, 0, 0], :f32, {4})

    for {name, type} <- [{"up", "type 36 (I2_S)"}, {"down", "type 200"}] do
      error = assert_raise Error, fn -> GGUF.load!(path, name) end
      assert {error.kind, error.argument, error.got} == {:dtype, name, type}
    end
  end

  @tag :tmp_dir
  test "says what is wrong", %{tmp_dir: folder} do
    error = assert_raise Error, fn -> GGUF.load!(@sample, "w.q5_0") end
    assert {error.kind, error.got} == {:dtype, "Q5_0"}
    assert_raise Error, ~r/expected a tensor `x`/, fn -> GGUF.load!(@sample, "x") end
    assert_raise Error, ~r/name: expected the name of a tensor/, fn -> GGUF.load!(@sample, :x) end
    assert_raise Error, ~r/path: expected a path/, fn -> GGUF.index("") end
    assert_raise Error, ~r/a readable file/, fn -> GGUF.metadata("/nowhere") end

    path = write(folder, [], [{"w", [33, 1], 8, 0}], <<0::544>>)
    assert_raise Error, ~r/whole blocks of 32, got 33 values/, fn -> GGUF.index(path) end
    path = write(folder, [], [{"w", [64, 1], 8, 0}], <<0::536>>)
    error = assert_raise Error, ~r/68 bytes of `w`/, fn -> GGUF.load!(path, "w") end
    assert error.kind == :file
  end
end

defmodule Sidewinder.RandomInputsTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Ops, RandomInputs, Shapes, Tensor}

  defp shapes(op, options) do
    for {name, tensor} <- RandomInputs.make(op, options), into: %{}, do: {name, tensor.shape}
  end

  test "the words of every op's inputs are understood" do
    for op <- Ops.all(), slot <- op.inputs do
      assert [[_ | _] | _] = Shapes.parse!(slot.shape)
      assert slot.precision in ~w(storage wide mask u8 i8 i16 i32 i64 f32)
    end
  end

  test "shapes follow from letters" do
    assert shapes(:mamba_block, shape: "B=2,L=7,M=6,D=12,N=4,R=3,W=5", with: ["conv_state"]) == %{
             "x" => {2, 7, 6},
             "in_proj" => {24, 6},
             "conv_w" => {12, 5},
             "x_proj" => {11, 12},
             "dt_w" => {12, 3},
             "dt_b" => {12},
             "A_log" => {12, 4},
             "D" => {12},
             "out_proj" => {6, 12},
             "conv_state" => {2, 4, 12}
           }

    assert shapes(:linear, shape: "O=5") == %{"x" => {256, 256}, "w" => {5, 256}}
    assert shapes(:linear, shape: "4x7x9,O=5") == %{"x" => {4, 7, 9}, "w" => {5, 9}}
    assert shapes(:linear, shape: "9,O=5") == %{"x" => {9}, "w" => {5, 9}}
    assert shapes(:linear, shape: "...=2x3,I=4")["x"] == {2, 3, 4}

    attention = shapes(:attention, shape: "B=2,H=4,K=2,L=3,M=5,W=6,V=7", with: ["mask"])
    assert attention["k"] == {2, 2, 5, 6} and attention["mask"] == {2, 4, 3, 5}
  end

  test "heads may come last" do
    options = [
      shape: "B=2,H=4,K=2,L=3,M=5,W=6,V=7",
      with: ["bias"],
      options: %{layout: "heads_last"}
    ]

    last = shapes(:attention, options)

    assert last == %{
             "q" => {2, 3, 4, 6},
             "k" => {2, 5, 2, 6},
             "v" => {2, 5, 2, 7},
             "bias" => {2, 4, 3, 5}
           }
  end

  test "types, seeds and ranges" do
    types = fn type ->
      for {n, t} <-
            RandomInputs.make(:attention, type: type, with: ["mask", "bias"], shape: "L=5,M=6"),
          into: %{},
          do: {n, t.type}
    end

    assert types.(:bf16) == %{
             "q" => :bf16,
             "k" => :bf16,
             "v" => :bf16,
             "mask" => :u8,
             "bias" => :f32
           }

    assert types.(:f64)["bias"] == :f64

    make = &RandomInputs.make(:selective_scan, [shape: "L=9,D=8"] ++ &1)
    assert make.([]) == make.(seed: 1)
    assert make.([]) != make.(seed: 2)
    inputs = Map.new(make.([]))
    assert inputs["x"] != inputs["dt"]
    assert Enum.all?(Tensor.to_list(inputs["A"]), &(&1 < 0))
    assert Enum.all?(Tensor.to_list(inputs["dt"]), &(&1 > 0 and &1 <= 0.1001))
    assert Enum.any?(Tensor.to_list(inputs["x"]), &(&1 < -0.5))

    mask = RandomInputs.tensor({1000}, :u8, {0, 1}, 1)
    assert Enum.sum(Tensor.to_list(mask)) in 650..850
  end

  test "what is impossible is refused" do
    for {op, options, kind, part} <- [
          {:no_op, [], :argument, "no_op"},
          {:linear, [shape: "Q=1"], :option, "letters out of ..., I, O, got Q"},
          {:linear, [shape: "I=-1"], :option, "got -1"},
          {:linear, [shape: "I=two"], :option, "two"},
          {:linear, [shape: "I=2x3"], :option, "2x3"},
          {:linear, [shape: "I=2=3"], :option, "I=2=3"},
          {:causal_conv1d, [shape: "2x3"], :shape, "x: expected shape (B, L, D), got 2x3"},
          {:causal_conv1d, [shape: "W=0", with: ["initial_state"]], :shape, "got -1 with W = 0"},
          {:linear, [shape: "I=1000000000"], :size, "at most"},
          {:linear, [with: ["w"]], :argument, "optional inputs out of b, got w"},
          {:linear, [type: :s32], :dtype, "s32"}
        ] do
      error = assert_raise Error, fn -> RandomInputs.make(op, options) end
      assert error.kind == kind
      assert Exception.message(error) =~ part
    end
  end

  test "words that are none are refused" do
    for words <- ["", "B, L", "(B, +)", "(2*B)", "(B/0)", "(B/2/3)", "(B L)"] do
      assert_raise Error, fn -> Shapes.parse!(words) end
    end

    assert Shapes.sizes!("x", "(W/2, 3, Dh)", %{"W" => 8, "Dh" => 4}) == [4, 3, 4]
    assert_raise Error, fn -> Shapes.sizes!("x", "(W/2)", %{"W" => 7}) end
    assert Shapes.bind("(W/2, 2D, W)", [4, 6, 8]) == %{"W" => 8, "D" => 3}
    assert Shapes.bind("(B, B)", [4, 5]) == nil
    assert Shapes.bind("(2D)", [5]) == nil
    assert Shapes.bind("(B, L) | (D)", [5]) == %{"D" => 5}
  end
end

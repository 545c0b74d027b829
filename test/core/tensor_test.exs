defmodule Sidewinder.TensorTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Error, Tensor}

  test "numbers survive where the type has room for them" do
    for type <- Tensor.float_types() do
      tensor = Tensor.from_list([0, -1, 0.5, 2], type, {2, 2})
      assert Tensor.to_list(tensor) == [0.0, -1.0, 0.5, 2.0]
      assert tensor |> Tensor.cast(:f64) |> Tensor.cast(type) == tensor
    end
  end

  test "masks are bytes, from numbers and from truth values" do
    mask = Tensor.from_list([true, false, 1, 255], :u8, {2, 2})
    assert mask == Tensor.new(<<1, 0, 1, 255>>, :u8, {2, 2})
    assert Tensor.to_list(mask) == [1, 0, 1, 255]
    assert inspect(mask) == "#Sidewinder.Tensor<u8 (2, 2) [1, 0, 1, 255]>"
    assert Tensor.describe(mask) == "u8 (2, 2)"
    assert Tensor.from_list([], :u8, {0}).data == <<>>
    assert :u8 in Tensor.types() and :u8 not in Tensor.float_types()

    for type <- Tensor.float_types() do
      assert mask |> Tensor.cast(type) |> Tensor.to_list() == [1.0, 0.0, 1.0, 255.0] or
               type == :bf16

      assert mask |> Tensor.cast(type) |> Tensor.cast(:u8) == mask or type == :bf16
    end
  end

  test "what is no byte does not become one" do
    for value <- [-1, 0.5, 256, 1.0e30] do
      assert %{kind: :argument, got: got} =
               assert_raise(Error, fn -> Tensor.from_list([1, value], :u8, {2}) end)

      assert got != ""
      wide = Tensor.from_list([value], :f64, {1})
      assert %{kind: :argument} = assert_raise(Error, fn -> Tensor.cast(wide, :u8) end)
    end

    for data <- [<<0x7F800000::32-native>>, <<0x7FC00000::32-native>>] do
      assert_raise Error, fn -> Tensor.cast(Tensor.new(data, :f32, {1}), :u8) end
    end

    assert %{kind: :argument} =
             assert_raise(Error, fn -> Tensor.from_list([true], :f32, {1}) end)

    assert %{kind: :size} = assert_raise(Error, fn -> Tensor.new(<<1>>, :u8, {2}) end)
  end

  test "casts round to the nearest, ties to even" do
    assert Tensor.to_list(Tensor.from_list([1.00390625, 1.01171875, 1.0e39], :bf16, {3})) == [
             1.0,
             1.015625,
             :infinity
           ]

    assert Tensor.to_list(Tensor.from_list([65_519, 65_520, -1.0e-9], :f16, {3})) == [
             65_504.0,
             :infinity,
             0.0
           ]
  end

  test "what is no number has a name" do
    data = <<0x7F800000::32-native, 0xFF800000::32-native, 0x7FC00000::32-native>>
    assert Tensor.to_list(Tensor.new(data, :f32, {3})) == [:infinity, :neg_infinity, :nan]
  end

  test "a list of the wrong length or of no numbers" do
    assert %{kind: :size} = assert_raise(Error, fn -> Tensor.from_list([1, 2], :f32, {3}) end)

    assert %{kind: :argument} =
             assert_raise(Error, fn -> Tensor.from_list([1, :a], :f32, {2}) end)
  end

  test "inspect shows the first values, and damaged tensors too" do
    assert inspect(Tensor.from_list(Enum.to_list(1..9), :f16, {9})) ==
             "#Sidewinder.Tensor<f16 (9) [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, ...]>"

    assert inspect(Tensor.new(<<>>, :f32, {0, 2})) == "#Sidewinder.Tensor<f32 (0, 2) []>"

    for {type, shape, data} <- [
          {:f32, {9}, <<1>>},
          {:u8, {2}, <<1>>},
          {:s8, {1}, <<1>>},
          {:f32, {-1}, <<>>},
          {:f32, nil, nil},
          {:f32, {1}, make_ref()},
          {:f32, {1}, 5}
        ] do
      assert inspect(%Tensor{type: type, shape: shape, data: data}) =~
               ~r/^#Sidewinder.Tensor<.+>$/
    end
  end

  defp some(type, shape) do
    if type in Tensor.float_types(),
      do: Calls.uniform(shape, -1, 1, type),
      else: Tensor.from_list(whole_numbers(Tensor.elements(shape)), type, shape)
  end

  # Those that all types of integers have.
  defp whole_numbers(count), do: for(_ <- 1..count//1, do: :rand.uniform(128) - 1)

  @tag :cuda
  test "to a device and back" do
    for type <- Tensor.types(), shape <- [{}, {0}, {3, 5}, {1000, 7}] do
      tensor = some(type, shape)
      there = Tensor.to_device(tensor, {:cuda, 0})
      assert Tensor.device(there) == {:cuda, 0}
      assert Tensor.to_device(there, {:cuda, 0}) == there
      assert Tensor.to_host(there) == tensor
      assert Tensor.to_list(there) == Tensor.to_list(tensor)
      assert inspect(there) =~ "on cuda:0"
      flat = {Tensor.elements(shape)}
      assert Tensor.to_host(Tensor.reshape(there, flat)) == Tensor.reshape(tensor, flat)
    end
  end
end

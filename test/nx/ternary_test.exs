defmodule Sidewinder.TernaryTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Ternary}

  doctest Sidewinder.Ternary

  defp weights(shape) do
    {w, _key} = Nx.Random.normal(Nx.Random.key(3), 0.0, 1.0, shape: shape)
    w
  end

  for rule <- [:absmean, :twn], per_row <- [false, true] do
    test "weights by #{rule}, per row: #{per_row}, are those of the kernel" do
      w = weights({5, 37})
      options = [rule: unquote(rule), per_row: unquote(per_row)]
      tensor = Sidewinder.Tensor.new(Nx.to_binary(w), :f32, {5, 37})
      {planes, scale} = Sidewinder.Kernel.Ternary.quantize(tensor, options)
      q = Sidewinder.Kernel.Ternary.decode(planes, n: 37)
      q = Nx.tensor(Sidewinder.Tensor.to_list(q)) |> Nx.reshape({5, 37})
      scale = Nx.tensor(Sidewinder.Tensor.to_list(scale)) |> Nx.reshape({:auto, 1})
      expected = Nx.multiply(q, scale)
      assert Nx.to_number(Nx.all_close(Ternary.quantize(w, options), expected, rtol: 1.0e-5)) == 1
    end
  end

  test "weights by a threshold" do
    w = Nx.tensor([[0.3, 0.31, -0.5, 0.0]])

    assert Nx.to_flat_list(Ternary.quantize(w, rule: :threshold, threshold: 0.3)) ==
             [0.0, 1.0, -1.0, 0.0]
  end

  test "the gradient of a dense layer is that of the weights it used" do
    {w, x} = {weights({3, 8}), weights({4, 8})}
    loss = fn w, x -> Nx.sum(Nx.multiply(Ternary.dense(x, w, rule: :twn), Nx.iota({4, 3}))) end
    dy = Nx.as_type(Nx.iota({4, 3}), :f32)
    assert_close(Nx.Defn.grad(w, &loss.(&1, x)), Nx.dot(Nx.transpose(dy), x))
    assert_close(Nx.Defn.grad(x, &loss.(w, &1)), Nx.dot(dy, Ternary.quantize(w, rule: :twn)))
  end

  test "it works in compiled functions" do
    w = weights({3, 8})
    jitted = Nx.Defn.jit(&Ternary.quantize(&1, per_row: true)).(w)
    assert_close(jitted, Ternary.quantize(w, per_row: true))
  end

  test "wrong options say what is wrong" do
    w = weights({2, 2})

    for {options, name} <- [
          {[rule: :round], "rule"},
          {[rule: :threshold], "threshold"},
          {[rule: :threshold, threshold: -1], "threshold"},
          {[threshold: 1], "threshold"},
          {[scale: 1], "scale"}
        ] do
      error = assert_raise Error, fn -> Ternary.quantize(w, options) end
      assert {error.kind, error.argument} == {:option, name}
    end
  end

  defp assert_close(a, b), do: assert(Nx.to_number(Nx.all_close(a, b, rtol: 1.0e-5)) == 1)
end

defmodule Sidewinder.ExlaTest.Changed do
  @moduledoc false
  # A call of silu with one other attribute.
  defstruct [:name, :value]

  defimpl EXLA.CustomCall do
    def call(%{name: name, value: value}, out, [x], client) do
      silu = %Sidewinder.Block.Activations{fn: :silu, inputs: ["x"]}
      x = %{x | shape: {2, 1}}
      {:ok, spec} = EXLA.CustomCall.call(silu, %{out | shape: {2, 1}}, [x], client)
      attributes = [{name, value} | List.keydelete(spec.attributes, name, 0)]
      {:ok, %{spec | attributes: attributes}}
    end
  end
end

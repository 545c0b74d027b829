defmodule Sidewinder.Reference.Numbers do
  @moduledoc false
  # Types of the arithmetic.

  @doc "In the type of the arithmetic: f32, or f64 for f64."
  def wide(%{type: {:f, 64}} = t), do: t
  def wide(t), do: Nx.as_type(t, :f32)

  @doc "A number of the type of `t`. By itself it would be rounded to f32."
  def constant(value, t), do: Nx.tensor(value, type: t.type)
end

defmodule Sidewinder.Op.Heads do
  @moduledoc false
  # Shapes of tensors with heads by the option `layout`.

  @doc "The shapes of a tensor by layout."
  def axes(heads, length, width) do
    %{heads_first: [:b, heads, length, width], heads_last: [:b, length, heads, width]}
  end
end

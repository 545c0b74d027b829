defmodule Sidewinder.Block.Activations do
  @moduledoc """
  `Sidewinder.silu/2` and the other activations in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Activations,
    gradient: Sidewinder.Block.ActivationsBackward

  declare(:activations,
    without: ~w(return_derivative dydx),
    options: [fn: :fixed]
  )

  @doc false
  def call(function, x, opts) do
    [y: y] = Sidewinder.Op.call(%__MODULE__{fn: function}, [{"x", x}], opts)
    y
  end

  @doc false
  # `:form` chooses between two functions of the op.
  def gelu(x, opts) do
    {form, opts} =
      if Keyword.keyword?(opts), do: Keyword.pop(opts, :form, :tanh), else: {:tanh, opts}

    case form do
      :tanh -> call(:gelu_tanh, x, opts)
      :erf -> call(:gelu_erf, x, opts)
      other -> raise wrong_form(other)
    end
  end

  defp wrong_form(other) do
    got = Sidewinder.Error.show(other)
    Sidewinder.Error.new(:option, "form", op: "gelu", expected: ":tanh or :erf", got: got)
  end
end

defmodule Sidewinder.Block.ActivationsBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Activations`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Activations,
    gradient_of: Sidewinder.Block.Activations
end

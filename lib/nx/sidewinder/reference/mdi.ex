defmodule Sidewinder.Reference.MdiUpdate do
  @moduledoc false
  # The core of memory decay integration, and its gradient.

  import Sidewinder.Reference.Numbers

  def body(_op, %{"z" => z, "h_old" => h, "gate" => gate} = inputs) do
    h = Nx.add(Nx.multiply(wide(gate), wide(z)), Nx.multiply(carried(inputs), wide(h)))
    [h: Nx.as_type(h, z.type)]
  end

  def backward(_op, %{"z" => z, "h_old" => h, "gate" => gate, "dh" => dh} = inputs) do
    gradients = [
      dz: wide(gate),
      dh_old: carried(inputs),
      dgate: Nx.subtract(wide(z), wide(h)),
      dgamma: wide(h)
    ]

    for {name, t} <- gradients, do: {name, t |> Nx.multiply(wide(dh)) |> Nx.as_type(z.type)}
  end

  defp carried(%{"gate" => gate, "gamma" => gamma}) do
    Nx.add(Nx.subtract(constant(1, wide(gate)), wide(gate)), wide(gamma))
  end
end

defmodule Sidewinder.Reference.MdiGamma do
  @moduledoc false
  # The coefficient of decay, composed of the layers of its networks.

  alias Sidewinder.Block.{Activations, Linear}
  alias Sidewinder.Op
  import Sidewinder.Reference.Numbers

  @ends {1.0e-6, 1 - 1.0e-6}

  def body(op, %{"z" => z} = inputs) do
    gamma = factor(op, z, inputs, "g")
    context = inputs["context"]
    gamma = if context, do: Nx.multiply(gamma, factor(op, context, inputs, "c")), else: gamma
    [gamma: gamma |> clamp() |> Nx.as_type(z.type)]
  end

  # Rounded once, at the end.
  defp factor(op, x, inputs, net) do
    [w1, b1, w2, b2] = for part <- ["w1", "b1", "w2", "b2"], do: inputs[weight(part, net)]
    inner = linear(op, %Linear{activation: :gelu_erf}, x, w1, b1)
    logits = wide(linear(op, %Linear{}, inner, w2, b2))
    [y: y] = Op.part(op, %Activations{fn: :sigmoid}, [{"x", logits}])
    y
  end

  defp weight(<<kind::binary-size(1), layer::binary>>, net), do: kind <> net <> layer

  defp linear(op, layer, x, w, b) do
    [y: y] = Op.part(op, layer, [{"x", x}, {"w", w}, {"b", b}])
    y
  end

  # The gradient passes at the bounds, and is 0 beyond.
  defp clamp(gamma) do
    {low, high} = @ends
    [low, high] = for value <- [low, high], do: constant(value, gamma)
    low_or = Nx.select(Nx.less(gamma, low), low, gamma)
    Nx.select(Nx.greater(gamma, high), high, low_or)
  end
end

defmodule Sidewinder.Reference.Mdi do
  @moduledoc false
  # A step of memory decay integration, composed of its parts.

  alias Sidewinder.Block.{Linear, MdiGamma, MdiUpdate}
  alias Sidewinder.Op

  def body(op, %{"z" => z, "h_prev" => h, "wm" => wm, "bm" => bm} = inputs) do
    both = Nx.concatenate([z, h], axis: -1)
    [y: gate] = Op.part(op, %Linear{activation: :sigmoid}, [{"x", both}, {"w", wm}, {"b", bm}])
    names = ["context" | MdiGamma.weights()]
    [gamma: gamma] = Op.part(op, %MdiGamma{}, [{"z", z} | for(n <- names, do: {n, inputs[n]})])
    given = [{"z", z}, {"h_old", h}, {"gate", gate}, {"gamma", gamma}]
    [h: h_new] = Op.part(op, %MdiUpdate{}, given)
    [h_new: h_new, gamma: gamma, gate: gate]
  end
end

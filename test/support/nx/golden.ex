defmodule Sidewinder.NxTest.Golden do
  @moduledoc "The golden cases as Nx tensors."

  alias Sidewinder.{NxTest.Scans, Op, Safetensors}

  @folder Path.expand("../../golden", __DIR__)

  @doc "The cases of an op: maps with `name`, `attrs`, `inputs` (by name) and `outputs`."
  def cases(op) do
    %{"cases" => cases, "file" => file} = manifest()["ops"][op]
    tensors = Safetensors.read(Path.join(@folder, file))
    Enum.map(cases, &golden(&1, tensors))
  end

  # The manifest is plain enough to become Elixir by a change of signs.
  defp manifest do
    Path.join(@folder, "manifest.json")
    |> File.read!()
    |> String.replace("{", "%{")
    |> String.replace("\":", "\" =>")
    |> String.replace("null", "nil")
    |> String.replace(~r/([>,[])(\d+)e/, "\\1\\2.0e")
    |> Code.eval_string()
    |> elem(0)
  end

  defp golden(%{"name" => name} = golden, tensors) do
    inputs =
      for {key, _} <- golden["inputs"],
          into: %{},
          do: {key, Op.from_kernel(tensors["#{name}.#{key}"])}

    outputs =
      for {key, spec} <- golden["outputs"],
          do: {key, Op.from_kernel(tensors["#{name}.out.#{key}"]), spec}

    %{name: name, attrs: golden["attrs"], inputs: inputs, outputs: outputs}
  end

  @doc "The options of a case: its attributes, its optional inputs, and those for all its outputs."
  def options(%{inputs: inputs, attrs: attrs, outputs: outputs}) do
    tensors = [d: "D", z: "z", dt_bias: "dt_bias", initial_state: "h0"]
    clamp = if pair = attrs["dt_clamp"], do: List.to_tuple(pair)
    states? = List.keymember?(outputs, "states", 0)

    for({key, name} <- tensors, t = inputs[name], do: {key, t}) ++
      [
        dt_softplus: attrs["dt_softplus"],
        dt_clamp: clamp,
        return_state: true,
        return_states: states?
      ]
  end

  @doc "What a scan that returns states returns, by name."
  def named({y, last_state}), do: %{y: y, last_state: last_state}
  def named(%{y: _} = outputs), do: outputs

  @doc "Checks those outputs of a case that `actual` has."
  def check(%{name: name, outputs: outputs}, actual) do
    for {key, expected, spec} <- outputs, got = actual[String.to_atom(key)] do
      Scans.assert_close(got, expected,
        rtol: spec["rtol"],
        atol: spec["atol"],
        of: "#{name}, #{key}"
      )
    end
  end
end

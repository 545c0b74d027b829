defmodule Sidewinder.NxTest.Golden do
  @moduledoc "The golden cases as Nx tensors."

  alias Sidewinder.{Golden, NxTest.Scans, Op}

  @doc "The cases of an op, as `Sidewinder.Golden.cases/1` has them but for the tensors."
  def cases(op) do
    for golden <- Golden.cases(op) do
      inputs = Map.new(golden.inputs, fn {name, t} -> {name, Op.from_kernel(t)} end)

      outputs =
        Map.new(golden.outputs, fn {name, o} -> {name, update_in(o.tensor, &Op.from_kernel/1)} end)

      %{golden | inputs: inputs, outputs: outputs}
    end
  end

  @attributes [:dt_softplus, :dt_clamp, :activation, :eps, :eps_mode, :gelu, :pairing, :theta] ++
                [:first_position, :scale, :causal, :q_offset, :heads, :rope_theta, :log_min] ++
                [:mix, :v_mix, :norm, :levels, :ratio, :state_clip, :state_norm]

  @doc "The attributes of a case that are options of the function of its op; texts are atoms."
  def attributes(%{attrs: attrs}) do
    for {key, value} <- attrs,
        key in @attributes,
        do: {key, if(is_binary(value), do: String.to_atom(value), else: value)}
  end

  @doc "The options of a case: its attributes, its optional inputs, and those for all its outputs."
  def options(%{inputs: inputs, attrs: attrs, outputs: outputs}) do
    tensors = [d: "D", z: "z", dt_bias: "dt_bias", initial_state: "initial_state"]
    states? = Map.has_key?(outputs, "states")

    for({key, name} <- tensors, t = inputs[name], do: {key, t}) ++
      Map.to_list(attrs) ++ [return_state: true, return_states: states?]
  end

  @doc "What a scan that returns states returns, by name."
  def named({y, last_state}), do: %{y: y, last_state: last_state}
  def named(%{y: _} = outputs), do: outputs

  @doc "Checks those outputs of a case that `actual` has."
  def check(%{name: name, outputs: outputs}, actual) do
    for {key, %{tensor: expected, rtol: rtol, atol: atol}} <- outputs,
        got = actual[String.to_atom(key)] do
      Scans.assert_close(got, expected, rtol: rtol, atol: atol, of: "#{name}, #{key}")
    end
  end
end

defmodule Sidewinder.Block.LinearScan do
  @moduledoc """
  `Sidewinder.Reference.linear_scan/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  @behaviour Sidewinder.Op

  defstruct inputs: [], target: [], algorithm: :sequential

  @impl true
  def table do
    %{
      name: :linear_scan,
      inputs: %{
        "a" => {:storage, [[:b, :l, :k]]},
        "b" => {:storage, [[:b, :l, :k]]},
        "h0" => {:wide, [[:b, :k]]}
      },
      optional: [initial_state: "h0"],
      options: [],
      outputs: [{:h, :storage, [:b, :l, :k], :always}]
    }
  end

  @impl true
  defdelegate body(op, inputs), to: Sidewinder.Reference, as: :linear_scan_body
end

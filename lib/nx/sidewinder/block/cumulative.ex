defmodule Sidewinder.Block.ExpProductScan do
  @moduledoc """
  `Sidewinder.exp_product_scan/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.ExpProductScanBackward

  alias Sidewinder.Op.{Cumulative, Declared}

  defstruct Declared.fields(:exp_product_scan)

  @table Cumulative.table(:exp_product_scan, eps: :share, log_min: :not_positive)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.ExpProductScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.ExpProductScan`. It takes y as well."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.ExpProductScan

  @table Sidewinder.Op.Cumulative.with_result(@table)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.CumprodScan do
  @moduledoc """
  `Sidewinder.cumprod_scan/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.CumprodScanBackward

  alias Sidewinder.Op.{Cumulative, Declared}

  defstruct Declared.fields(:cumprod_scan)

  @table Cumulative.table(:cumprod_scan)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.CumprodScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.CumprodScan`. It takes y as well."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.CumprodScan

  @table Sidewinder.Op.Cumulative.with_result(@table)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.Logcumsumexp do
  @moduledoc """
  `Sidewinder.logcumsumexp/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.LogcumsumexpBackward

  alias Sidewinder.Op.{Cumulative, Declared}

  defstruct Declared.fields(:logcumsumexp)

  @table Cumulative.table(:logcumsumexp)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.LogcumsumexpBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Logcumsumexp`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.Logcumsumexp
end

defmodule Sidewinder.Block.Cumsum do
  @moduledoc """
  `Sidewinder.cumsum/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.CumsumBackward

  alias Sidewinder.Op.{Cumulative, Declared}

  defstruct Declared.fields(:cumsum)

  @table Cumulative.table(:cumsum)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.CumsumBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Cumsum`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.Cumsum
end

defmodule Sidewinder.Block.ReverseCumsum do
  @moduledoc """
  `Sidewinder.reverse_cumsum/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.ReverseCumsumBackward

  alias Sidewinder.Op.{Cumulative, Declared}

  defstruct Declared.fields(:reverse_cumsum)

  @table Cumulative.table(:reverse_cumsum)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.ReverseCumsumBackward do
  @moduledoc "The gradient of `Sidewinder.Block.ReverseCumsum`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.ReverseCumsum
end

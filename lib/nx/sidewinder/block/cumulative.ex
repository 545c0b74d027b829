defmodule Sidewinder.Block.ExpProductScan do
  @moduledoc """
  `Sidewinder.exp_product_scan/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.ExpProductScanBackward

  declare(:exp_product_scan)
end

defmodule Sidewinder.Block.ExpProductScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.ExpProductScan`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.ExpProductScan
end

defmodule Sidewinder.Block.CumprodScan do
  @moduledoc """
  `Sidewinder.cumprod_scan/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.CumprodScanBackward

  declare(:cumprod_scan)
end

defmodule Sidewinder.Block.CumprodScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.CumprodScan`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.CumprodScan
end

defmodule Sidewinder.Block.Logcumsumexp do
  @moduledoc """
  `Sidewinder.logcumsumexp/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient: Sidewinder.Block.LogcumsumexpBackward

  declare(:logcumsumexp)
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

  declare(:cumsum)
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

  declare(:reverse_cumsum)
end

defmodule Sidewinder.Block.ReverseCumsumBackward do
  @moduledoc "The gradient of `Sidewinder.Block.ReverseCumsum`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Cumulative,
    gradient_of: Sidewinder.Block.ReverseCumsum
end

defmodule Sidewinder.DoctestTest do
  use ExUnit.Case, async: true

  doctest Sidewinder.Error
  doctest Sidewinder.Tensor
  doctest Sidewinder.Device
  doctest Sidewinder.Kernel
  doctest Sidewinder.Kernel.Scan
  doctest Sidewinder.Safetensors
  doctest Sidewinder.Compare
end

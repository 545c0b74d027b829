defmodule Sidewinder.ResultsTest do
  use ExUnit.Case, async: true

  @python System.find_executable("python3")
  @script Path.expand("../../bench/results.py", __DIR__)

  @tag skip: if(@python, do: false, else: "there is no python3")
  test "the tables of results are those of the result files" do
    {told, status} = System.cmd(@python, [@script, "--check"], stderr_to_stdout: true)
    assert {told, status} == {"", 0}
  end
end

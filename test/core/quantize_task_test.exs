defmodule Sidewinder.QuantizeTaskTest do
  use ExUnit.Case

  alias Sidewinder.{Quantized, RandomInputs, Safetensors, Tensor}

  setup do
    shell = Mix.shell()
    Mix.shell(Mix.Shell.Process)
    on_exit(fn -> Mix.shell(shell) end)
  end

  defp run(args), do: Mix.Tasks.Sidewinder.Quantize.run(args)

  defp said(sort) do
    receive do
      {:mix_shell, ^sort, [line]} -> [line | said(sort)]
    after
      0 -> []
    end
  end

  defp normal(shape, seed, type \\ :f32),
    do: Tensor.cast(RandomInputs.normal(shape, :f32, 1.0, seed), type)

  defp write(folder) do
    path = Path.join(folder, "in.safetensors")

    tensors = %{
      "a.proj.weight" => normal({3, 64}, 1),
      "b.proj.weight" => normal({5, 32}, 2, :bf16),
      "c.weight" => normal({2, 96}, 3, :f64),
      "odd.weight" => normal({4, 33}, 4),
      "norm" => normal({64}, 5),
      "ids" => Tensor.from_list([1, 2], :i64, {1, 2})
    }

    Safetensors.write(path, tensors)
    {path, Path.join(folder, "out.safetensors"), tensors}
  end

  @tag :tmp_dir
  test "what fits is quantized, all else copied, and what is lost is told", %{tmp_dir: folder} do
    {input, output, tensors} = write(folder)

    for {format, error, smaller} <- [{"q8_0", 0.01, 2.0}, {"q4_0", 0.2, 2.5}] do
      run([input, output, "--format", format, "--force", "--backend", "cpu"])
      lines = said(:info)
      loaded = Quantized.load!(output)
      assert Map.keys(loaded) == Map.keys(tensors)

      for name <- ["odd.weight", "norm", "ids"], do: assert(loaded[name] == tensors[name])

      for name <- ["a.proj.weight", "b.proj.weight", "c.weight"] do
        wanted = Tensor.cast(tensors[name], :f32)
        assert loaded[name] == Quantized.quantize(wanted, String.to_atom(format))
        assert Enum.any?(lines, &(&1 =~ ~r/^#{name} .* -> #{format}: .* relative error/))
      end

      assert Enum.any?(lines, &(&1 =~ "odd.weight f32 (4, 33): copied (rows of 33 do not fit)"))
      assert Enum.any?(lines, &(&1 =~ "norm f32 (64): copied (not two axes), 256 bytes"))
      assert Enum.any?(lines, &(&1 =~ "ids i64 (1, 2): copied (no floats)"))
      total = List.last(lines)
      assert total =~ "3 of 6 tensors quantized to #{format}" and total =~ "written to #{output}"
      [_, times, relative] = Regex.run(~r/\((.*)x smaller\), relative error ([^,]*),/, total)
      assert String.to_float(times) > smaller
      assert_in_delta String.to_float(relative), error / 2, error / 2
    end
  end

  @tag :tmp_dir
  test "errors are those of the tensors", %{tmp_dir: folder} do
    {input, output, tensors} = write(folder)
    run([input, output, "--format", "q8_0", "--only", "a.*", "--backend", "cpu"])

    [line] =
      Enum.filter(
        said(:info),
        &(&1 =~ "a.proj.weight f32 (3, 64) -> q8_0: 768 bytes -> 204 bytes (3.76x")
      )

    back = Quantized.dequantize(Quantized.load!(output, ["a.proj.weight"])["a.proj.weight"])
    pairs = Enum.zip(Tensor.to_list(back), Tensor.to_list(tensors["a.proj.weight"]))
    largest = Enum.max(for {a, b} <- pairs, do: abs(a - b))
    squares = fn numbers -> Enum.sum(for number <- numbers, do: number * number) end

    relative =
      :math.sqrt(squares.(for {a, b} <- pairs, do: a - b) / squares.(for {_, b} <- pairs, do: b))

    short = &Sidewinder.CommandLine.short/1
    assert line =~ "relative error #{short.(relative)}, largest #{short.(largest)}"
  end

  @tag :tmp_dir
  test "ternary numbers, of rows of any length, by every rule", %{tmp_dir: folder} do
    {input, output, tensors} = write(folder)

    for {args, options} <- [
          {[], []},
          {["--rule", "twn", "--per-row"], [rule: :twn, per_row: true]},
          {["--rule", "threshold", "--threshold", "0.5"], [rule: :threshold, threshold: 0.5]}
        ] do
      run([input, output, "--format", "ternary", "--force", "--only", "*.weight"] ++ args)
      loaded = Quantized.load!(output)

      for name <- ["a.proj.weight", "b.proj.weight", "c.weight", "odd.weight"] do
        wanted = Tensor.cast(tensors[name], :f32)
        assert loaded[name] == Quantized.quantize(wanted, :ternary, options)
      end

      assert loaded["norm"] == tensors["norm"] and loaded["ids"] == tensors["ids"]
      assert List.last(said(:info)) =~ "4 of 6 tensors quantized to ternary"
    end
  end

  @tag :tmp_dir
  test "names choose", %{tmp_dir: folder} do
    {input, output, tensors} = write(folder)
    chosen = fn -> for {name, %Quantized{}} <- Quantized.load!(output), do: name end
    run([input, output, "--format", "q8_0", "--only", "*proj*", "--except", "b.*"])
    assert chosen.() == ["a.proj.weight"]
    run([input, output, "--format", "q8_0", "--except", "?.proj.weight", "--force"])
    assert chosen.() == ["a.proj.weight", "b.proj.weight", "c.weight"]
    run([input, output, "--format", "q8_0", "--only", "norm", "--force"])
    assert chosen.() == []
    assert List.last(said(:info)) =~ "0 of 6 tensors"
    assert Quantized.load!(output) == tensors
  end

  @tag :tmp_dir
  test "says in a line what is wrong, and leaves nothing behind", %{tmp_dir: folder} do
    {input, output, _} = write(folder)
    bad = Path.join(folder, "bad.safetensors")
    Safetensors.write(bad, %{"w" => Tensor.new(<<0, 0, 128, 127, 0::992>>, :f32, {1, 32})})

    for {args, part} <- [
          {[input, output], "--format"},
          {[input, output, "--format", "q5_0"], "q8_0, q4_0 or ternary, got q5_0"},
          {[input, "--format", "q8_0"], "IN.safetensors OUT.safetensors"},
          {["/nowhere", output, "--format", "q8_0"], "/nowhere"},
          {[input, "/nowhere/at/all", "--format", "q8_0"], "/nowhere/at/all"},
          {[input, output, "--format", "q8_0", "--rule", "twn"], "--rule"},
          {[input, output, "--format", "q8_0", "--per-row"], "--per-row"},
          {[input, output, "--format", "q8_0", "--heat", "3"], "--heat"},
          {[input, output, "--format", "q8_0", "--threads", "0"], "threads"},
          {[input, output, "--format", "q8_0", "--only", "none", "--threads", "0"], "threads"},
          {[input, output, "--format", "ternary", "--rule", "best"], "best"},
          {[input, output, "--format", "ternary", "--rule", "threshold"], "threshold"},
          {[input, input, "--format", "q8_0"], "--force replaces it"},
          {[bad, output, "--format", "q8_0"], "finite"}
        ] do
      assert catch_exit(run(args)) == {:shutdown, 1}
      assert_received {:mix_shell, :error, [message]}
      assert message =~ part
      refute message =~ "\n"
    end

    assert Enum.sort(File.ls!(folder)) == ["bad.safetensors", "in.safetensors"]
  end
end

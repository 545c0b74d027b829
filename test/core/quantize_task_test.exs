defmodule Sidewinder.QuantizeTaskTest do
  use ExUnit.Case

  import ExUnit.CaptureIO

  alias Sidewinder.{CommandLine, Mamba, Quantized, RandomInputs, Safetensors, Tensor}

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

  test "long work tells its seconds on a terminal, and the line is gone then" do
    before = Application.fetch_env!(:elixir, :ansi_enabled)
    on_exit(fn -> Application.put_env(:elixir, :ansi_enabled, before) end)

    work = fn ->
      Process.sleep(1200)
      :done
    end

    for {terminal?, told} <- [{true, "\r1 of 2: w: 1 s\r\e[K"}, {false, ""}] do
      Application.put_env(:elixir, :ansi_enabled, terminal?)

      assert capture_io(:stderr, fn ->
               assert CommandLine.ticking("1 of 2: w", work) == :done
             end) == told
    end

    Application.put_env(:elixir, :ansi_enabled, true)
    links = Process.info(self(), :links)
    catch_throw(CommandLine.ticking("w", fn -> throw(:error) end))
    assert Process.info(self(), :links) == links
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

  defp load(path, options \\ []), do: Mamba.load(path, [backend: :cpu] ++ options)
  defp logits(model), do: Mamba.forward(model, [[1, 2, 3, 4, 5]])

  # A whole model with a tokenizer beside it.
  defp model(folder, options) do
    sizes = [layers: 2, width: 64, vocabulary: 50, ends: [3], backend: :cpu]
    Mamba.save(Mamba.random(sizes ++ options), folder)
    File.write!(Path.join(folder, "tokenizer.json"), "{")
    folder
  end

  @tag :tmp_dir
  test "a whole Mamba is read again as the model that is quantized when it is loaded", %{
    tmp_dir: folder
  } do
    input = model(Path.join(folder, "in"), state: 32, rank: 32)
    file = Path.join(input, "model.safetensors")
    bf16 = Path.join(folder, "bf16")
    Mamba.save(load(input, type: :bf16), bf16)
    untied = Path.join(folder, "untied")
    head = %{"lm_head.weight" => normal({50, 64}, 9)}
    tensors = Map.merge(Mamba.tensors(load(input)), head)
    Mamba.save(Mamba.new(nil, tensors, like: load(input), backend: :cpu), untied)
    output = Path.join([folder, "out", "model.safetensors"])

    for format <- ["q8_0", "q4_0", "ternary"], input <- [input, bf16, untied] do
      expected = load(input, quantize: String.to_atom(format))

      run([
        Path.join(input, "model.safetensors"),
        Path.join(folder, "alone.safetensors"),
        "--format",
        format,
        "--force"
      ])

      assert logits(load(Path.join(folder, "alone.safetensors"))) == logits(expected)
      run([input, Path.join(folder, "out"), "--format", format, "--force", "--backend", "cpu"])
      model = load(Path.join(folder, "out"))
      assert logits(model) == logits(expected)
      assert {model.type, model.config} == {expected.type, expected.config}
      assert Safetensors.metadata(output) == %{"format" => "pt", "sidewinder.quantized" => format}
      assert List.last(said(:info)) =~ "7 of "
      # What it is saved as is it again.
      Mamba.save(model, Path.join(folder, "saved"))
      assert logits(load(Path.join(folder, "saved"))) == logits(expected)
      File.rm_rf!(Path.join(folder, "saved"))
    end

    assert File.read!(Path.join([folder, "out", "tokenizer.json"])) == "{"
    assert load(Path.join(folder, "out")).ends == [3]

    # Beside the input, which stays as it is, and in its place.
    quantized = Path.join(input, "q8.safetensors")
    config = File.read!(Path.join(input, "config.json"))
    run([file, quantized, "--format", "q8_0"])
    expected = logits(load(input, quantize: :q8_0))
    assert logits(load(quantized)) == expected
    assert File.read!(Path.join(input, "config.json")) == config
    run([file, file, "--format", "q8_0", "--force"])
    assert logits(load(input)) == expected
    assert File.read!(Path.join(input, "config.json")) =~ "sidewinder"
  end

  @tag :tmp_dir
  test "models of other kinds are quantized too", %{tmp_dir: folder} do
    for {name, matrices} <- [{"falcon_mamba", 7}, {"mamba2", 5}, {"mamba2_groups", 5}] do
      input = Path.expand("../golden/#{name}", __DIR__)
      [parts, output] = for name <- ["in-#{name}", name], do: Path.join(folder, name)
      File.mkdir_p!(parts)

      for file <- ["config.json", "model.safetensors"],
          do: File.cp!(Path.join(input, file), Path.join(parts, file))

      run([parts, output, "--format", "ternary", "--backend", "cpu"])
      assert List.last(said(:info)) =~ "#{matrices} of "
      assert logits(load(output)) == logits(load(parts, quantize: :ternary))
    end
  end

  @tag :tmp_dir
  test "of a model in parts one file is made", %{tmp_dir: folder} do
    input = model(Path.join(folder, "in"), [])
    expected = logits(load(input, quantize: :q8_0))
    file = Path.join(input, "model.safetensors")
    {first, second} = file |> Safetensors.read() |> Enum.split(7)
    File.rm!(file)

    for {tensors, i} <- [{first, 1}, {second, 2}],
        do: Safetensors.write(Path.join(input, "model-0000#{i}-of-00002.safetensors"), tensors)

    run([input, Path.join(folder, "out"), "--format", "q8_0"])

    assert Enum.sort(File.ls!(Path.join(folder, "out"))) ==
             ~w(config.json model.safetensors tokenizer.json)

    assert logits(load(Path.join(folder, "out"))) == expected
    File.write!(Path.join([folder, "out", "model.safetensors.index.json"]), "{}")

    assert catch_exit(run([input, Path.join(folder, "out"), "--format", "q8_0", "--force"])) ==
             {:shutdown, 1}

    assert_received {:mix_shell, :error, [message]}
    assert message =~ "an index of files"
  end

  @tag :tmp_dir
  test "of a whole Mamba all that is named is quantized, and read as floats where it must be", %{
    tmp_dir: folder
  } do
    input = model(Path.join(folder, "in"), state: 32, rank: 32)
    output = Path.join(folder, "out.safetensors")

    for format <- ["q8_0", "q4_0", "ternary"] do
      run([
        Path.join(input, "model.safetensors"),
        output,
        "--format",
        format,
        "--only",
        "*",
        "--force"
      ])

      floats = for {name, t} <- Quantized.load!(output), into: %{}, do: {name, float(t)}
      model = load(output)
      # Rows of what is multiplied are rounded to bytes on the way.
      pairs =
        Enum.zip(
          for(
            t <- [logits(model), logits(Mamba.new(nil, floats, backend: :cpu))],
            do: Tensor.to_list(t)
          )
        )

      largest = Enum.max(for {_, b} <- pairs, do: abs(b))
      for {a, b} <- pairs, do: assert_in_delta(a, b, 0.05 * largest)

      run([
        Path.join(input, "model.safetensors"),
        output,
        "--format",
        format,
        "--only",
        "*in_proj*",
        "--force"
      ])

      assert Enum.count(Quantized.load!(output), &match?({_, %Quantized{}}, &1)) == 2
      assert logits(load(output)) != logits(model)
    end
  end

  defp float(%Quantized{} = quantized), do: Quantized.dequantize(quantized)
  defp float(tensor), do: tensor

  @tag :tmp_dir
  test "metadata go along", %{tmp_dir: folder} do
    {input, output, tensors} = write(folder)

    Safetensors.write(input, tensors,
      metadata: %{"format" => "np", "sidewinder.quantized" => "q4_0"}
    )

    run([input, output, "--format", "q8_0"])
    assert Safetensors.metadata(output) == %{"format" => "np", "sidewinder.quantized" => "q8_0"}
    run([input, output, "--format", "q8_0", "--only", "none", "--force"])
    assert Safetensors.metadata(output) == %{"format" => "np"}
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

defmodule Sidewinder.CommandLineTest do
  # Tasks as processes of the system, with the locale, the arguments and the pipes that they may meet.
  use ExUnit.Case, async: true

  @root Path.expand("../..", __DIR__)
  @model Path.join(@root, "test/golden/scripted/chat_eos")
  @moduletag :tmp_dir

  # What a task writes to standard output and to standard error, and its exit code. `input` is a file; `script` what a
  # shell does with `"$@"`, the task.
  defp task(folder, args, options \\ []) do
    errors = Path.join(folder, "errors")
    script = options[:script] || "\"$@\" < \"$INPUT\""
    mix = System.find_executable("mix")

    env = [
      {"LC_ALL", options[:locale] || "C"},
      {"MIX_ENV", "test"},
      {"INPUT", options[:input] || "/dev/null"},
      {"ERRORS", errors}
    ]

    command = ["-c", "exec 2> \"$ERRORS\"; " <> script, "sh", mix | args]
    {output, status} = System.cmd("sh", command, env: env, cd: @root)
    {output, errors |> File.read!() |> ours(), status}
  end

  # Elixir warns of a locale that is not one of UTF-8.
  defp ours(errors),
    do: errors |> String.split("\n", trim: true) |> Enum.reject(&(&1 =~ "native name encoding"))

  defp generate(folder, args, options \\ []),
    do:
      task(
        folder,
        ["sidewinder.generate", "--model", @model, "--backend", "cpu"] ++ args,
        options
      )

  test "texts and paths are UTF-8 in every locale", %{tmp_dir: folder} do
    umlaut = Path.join(folder, "Modell für ünï→")
    File.cp_r!(@model, umlaut)

    for locale <- ["C", "C.UTF-8"] do
      {output, errors, 0} =
        task(folder, ["sidewinder.generate", "--model", umlaut, "--prompt", "Hélló → wörld"],
          locale: locale
        )

      assert output =~ "Hélló → wörld" and length(errors) == 1

      {"", [error], 1} =
        task(folder, ["sidewinder.generate", "--model", umlaut <> "é", "--prompt", "x"],
          locale: locale
        )

      assert error =~ umlaut <> "é"
    end
  end

  test "a text has the tokens that it has in any other locale", %{tmp_dir: folder} do
    # Not an argument of the command line, and so right already.
    code = ~S"""
    Mix.Task.run("sidewinder.generate", ["--model", System.fetch_env!("M"), "--prompt", "H\u00E9 w"])
    """

    {direct, _, 0} = task(folder, ["run", "-e", code], script: "M=#{@model} \"$@\"")
    assert direct =~ "Hé w"

    for locale <- ["C", "C.UTF-8"],
        do: assert({^direct, _, 0} = generate(folder, ["--prompt", "Hé w"], locale: locale))
  end

  test "what is no UTF-8 is refused in one line", %{tmp_dir: folder} do
    bad = Path.join(folder, "bad")
    File.write!(bad, <<"Hello ", 0xC3, "x">>)

    for args <- [
          ["--prompt", <<"Hello ", 0xC3, "x">>],
          ["--prompt-file", bad],
          ["--prompt-file", "-"]
        ] do
      {"", [error], 1} = generate(folder, args, input: bad)
      assert error =~ "expected text in UTF-8, got the byte 0xC3 at offset 6"
    end

    for task <- ["run", "compare", "quantize", "frames", "info"] do
      {"", [error], 1} = task(folder, ["sidewinder." <> task, <<"x", 0xFF>>])
      assert error =~ "expected text in UTF-8"
    end
  end

  test "prompts come from files and from standard input to the last byte", %{tmp_dir: folder} do
    file = Path.join(folder, "prompt für")

    for text <- ["Hello", "Hello\n", "Hello\r\n\r\n", "é→\0 end", String.duplicate("Hé ", 5000)],
        File.write!(file, text) == :ok,
        {name, locale} <- [{file, "C"}, {"-", "C"}, {"-", "C.UTF-8"}] do
      options = [input: file, locale: locale]

      {output, [_speed], 0} =
        generate(folder, ["--prompt-file", name, "--max-tokens", "0"], options)

      assert output == text <> "\n"
    end

    File.write!(file, "")

    for {args, part} <- [
          {["--prompt-file", file], "not empty"},
          {["--prompt-file", "-"], "standard input: expected a text, not empty"},
          {["--prompt-file", folder], folder},
          {["--prompt-file", file <> "ö"], "für" <> "ö"},
          {["--prompt-file", ""], "--prompt-file"}
        ] do
      {"", [error], 1} = generate(folder, args)
      assert error =~ part
    end
  end

  test "files of other tasks have any names", %{tmp_dir: folder} do
    [input, output] =
      for name <- ["größe.safetensors", "→.safetensors"], do: Path.join(folder, name)

    File.cp!(Path.join(@model, "model.safetensors"), input)

    {lines, [], 0} = task(folder, ["sidewinder.quantize", input, output, "--format", "q8_0"])
    assert lines =~ "written to #{output}" and File.exists?(output)

    File.cp!(Path.join(@root, "test/golden/linear_scan.safetensors"), input)
    {line, [], 0} = task(folder, ["sidewinder.run", "linear_scan", input, output, "--case", "l2"])
    assert line =~ "written to #{output}"

    {table, [], 0} =
      task(folder, [
        "sidewinder.compare",
        "linear_scan",
        "--file",
        input,
        "--case",
        "l2",
        "--max-ms",
        "1"
      ])

    assert table =~ "f64 reference"
  end

  # Nothing reads: `:` is over before the task begins.
  @closed "{ \"$@\"; echo $? > \"$ERRORS.code\"; } | :"
  # One byte is read.
  @head "{ \"$@\"; echo $? > \"$ERRORS.code\"; } | head -c 1"

  test "a closed pipe ends tasks quietly", %{tmp_dir: folder} do
    small = ~w(--backend cpu --agents 1 --window 2 --width 16 --layers 1 --seconds 0.1)
    many = ["sidewinder.generate", "--model", @model, "--ignore-eos", "--max-tokens", "3000"]

    for args <- [
          ["sidewinder.info"],
          ["sidewinder.run", "--help"],
          ["sidewinder.compare", "linear_scan", "--max-ms", "1"],
          ["sidewinder.frames" | small],
          ["sidewinder.demo"],
          many ++ ["--prompt", "Hello"],
          many ++ ["--prompt", "Hello", "--prompt", "The"]
        ],
        script <- if("sidewinder.demo" in args, do: [@closed], else: [@closed, @head]) do
      {_output, errors, 0} = task(folder, args, script: script)
      assert File.read!(Path.join(folder, "errors.code")) == "0\n"
      # The line about the speed, where all was written before the reader was gone.
      assert Enum.reject(errors, &(&1 =~ "loaded in")) == [], inspect({args, errors})
    end
  end

  test "a file is written whatever becomes of what is said about it", %{tmp_dir: folder} do
    output = Path.join(folder, "out.safetensors")
    input = Path.join(@model, "model.safetensors")

    {"", [], 0} =
      task(folder, ["sidewinder.quantize", input, output, "--format", "q8_0"], script: @closed)

    assert File.read!(Path.join(folder, "errors.code")) == "0\n"
    assert %{} = Sidewinder.Quantized.load!(output)
  end

  test "a full disk is no closed pipe", %{tmp_dir: folder} do
    if File.exists?("/dev/full") do
      {"", [error], 1} = task(folder, ["sidewinder.info"], script: "\"$@\" > /dev/full")
      assert error =~ "/dev/full: expected a file that can be written"
    end
  end
end

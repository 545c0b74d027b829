defmodule Sidewinder.GenerateTaskTest do
  use ExUnit.Case

  import ExUnit.CaptureIO

  @model Path.expand("../golden/mamba", __DIR__)

  setup do
    shell = Mix.shell()
    Mix.shell(Mix.Shell.Process)
    on_exit(fn -> Mix.shell(shell) end)
  end

  defp run(args), do: Mix.Tasks.Sidewinder.Generate.run(args)

  @tag :tmp_dir
  test "writes the prompt and what follows, and tells the speed", %{tmp_dir: folder} do
    byte_model(folder)
    args = ["--model", folder, "--prompt", "Hi", "--max-tokens", "7", "--backend", "cpu"]

    told =
      capture_io(:stderr, fn ->
        text = capture_io(fn -> run(args ++ ["--temperature", "1", "--seed", "2"]) end)
        assert String.starts_with?(text, "Hi")
        send(self(), {:text, text})
      end)

    assert told =~ ~r/2 layers of 16, vocabulary 256, f32> loaded in .* ms; \d pieces of text/
    assert_received {:text, text}

    again =
      capture_io(fn ->
        capture_io(:stderr, fn -> run(args ++ ["--temperature", "1", "--seed", "2"]) end)
      end)

    assert text == again
  end

  @tag :tmp_dir
  test "on a terminal a line tells the progress, and is gone then", %{tmp_dir: folder} do
    byte_model(folder)
    before = Application.fetch_env!(:elixir, :ansi_enabled)
    Application.put_env(:elixir, :ansi_enabled, true)
    on_exit(fn -> Application.put_env(:elixir, :ansi_enabled, before) end)
    args = ["--model", folder, "--prompt", "Hi", "--max-tokens", "3", "--backend", "cpu"]

    told =
      capture_io(:stderr, fn ->
        text = capture_io(fn -> run(args ++ ["--quantize", "q8_0"]) end)
        assert String.starts_with?(text, "Hi")
      end)

    lines = String.split(told, "\r\e[K")

    for line <- ["loading: convert 67 %", "loading: quantize 33 %", "prompt: prefill 0 %"],
        do: assert(line in lines)

    assert List.last(lines) =~ " loaded in "
  end

  @scripted Path.expand("../golden/scripted", __DIR__)

  defp written(model, args) do
    args =
      ["--model", Path.join(@scripted, model), "--prompt", "Hello", "--backend", "cpu"] ++ args

    capture_io(fn -> capture_io(:stderr, fn -> run(args) end) end)
  end

  test "ends where the model's texts end, and where it is told to" do
    goes_on = ["--ignore-eos", "--max-tokens", "4"]

    for {model, args, text} <- [
          {"chat_eos", [], "Hello world"},
          {"chat_eos", ["--stop", "cat"], "Hello world"},
          {"chat_eos", goes_on, "Hello worldThe cat"},
          {"chat_eos", ["--stop", "<|im_end|>" | goes_on], "Hello world"},
          {"chat_eos", ["--stop", "none", "--stop", "he c" | goes_on], "Hello worldT"},
          {"chat_eos", ["--stop-token", "393" | goes_on], "Hello world"},
          {"chat_eos", ["--stop-token", "2", "--stop-token", "360" | goes_on], "Hello"},
          {"chat_eos", ["--add-bos"], "Hello world"},
          {"llama_space", ["--max-tokens", "4"], "Hello world how are you"},
          {"llama_space", ["--max-tokens", "4", "--no-add-bos"], "Hello world how are you"}
        ],
        do: assert(written(model, args) == text <> "\n")
  end

  test "prompts that are given several times are continued as one batch, below a line each" do
    args = ["--max-tokens", "4", "--ignore-eos", "--temperature", "1", "--seed", "7"]
    file = Path.join(System.tmp_dir!(), "sidewinder-prompt-#{System.pid()}")
    File.write!(file, "The cat\n")
    [first, second] = for prompt <- ["Hello", "The"], do: continued(["--prompt", prompt | args])
    third = continued(["--prompt-file", file | args])

    prompts = ["--prompt", "Hello", "--prompt-file", file, "--prompt", "The", "--prompt", "Hello"]
    text = continued(prompts ++ args)
    File.rm!(file)

    assert text ==
             Enum.map_join(Enum.with_index([first, third, second, first], 1), "\n", fn {one, i} ->
               "==> prompt #{i} <==\n" <> one
             end)
  end

  defp continued(args) do
    args = ["--model", @scripted <> "/chat_eos", "--backend", "cpu"] ++ args
    capture_io(fn -> capture_io(:stderr, fn -> run(args) end) end)
  end

  test "a prompt comes from standard input" do
    args = ["--model", @scripted <> "/chat_eos", "--backend", "cpu", "--prompt-file", "-"]
    text = capture_io("Hello", fn -> capture_io(:stderr, fn -> run(args) end) end)
    assert text == "Hello world\n"
  end

  @tag :tmp_dir
  test "a repetition penalty leads elsewhere", %{tmp_dir: folder} do
    byte_model(folder)

    written = fn args ->
      args = ["--model", folder, "--backend", "cpu", "--prompt", "Hi" | args]
      capture_io(fn -> capture_io(:stderr, fn -> run(args) end) end)
    end

    assert written.([]) == written.(["--repetition-penalty", "1"])
    assert written.([]) != written.(["--repetition-penalty", "1.0e9"])
  end

  @tag :tmp_dir
  test "matrices may be quantized when they are loaded, or before", %{tmp_dir: folder} do
    byte_model(folder)
    args = ["--prompt", "Hi", "--max-tokens", "20", "--seed", "2", "--temperature", "1"]
    args = args ++ ["--backend", "cpu"]

    text = fn path, more ->
      capture_io(fn -> capture_io(:stderr, fn -> run(["--model", path | args] ++ more) end) end)
    end

    for format <- ["q8_0", "q4_0", "ternary"] do
      model = Sidewinder.Mamba.load(folder, quantize: String.to_atom(format), backend: :cpu)
      saved = Path.join(folder, format)
      Sidewinder.Mamba.save(model, saved)
      assert text.(folder, ["--quantize", format]) == text.(saved, [])
      if format == "ternary", do: refute(text.(saved, []) == text.(folder, []))
    end
  end

  test "says in a line what is wrong" do
    for {args, part} <- [
          {["--prompt", "x"], "--model"},
          {["--model", @model], "--prompt"},
          {["--model", @model, "--prompt", "x", "--heat", "3"], "--heat"},
          {["--model", @model, "--prompt", "x", "--top-k", "many"], "--top-k"},
          {["--model", "/nowhere", "--prompt", "x"], "/nowhere"},
          {["--model", @model, "--prompt", "x", "--backend", "cpu"], "no tokenizer"},
          {["--model", @model, "--prompt", "x", "--type", "f31"], "--type"},
          {["--model", @model, "--prompt", "x", "--quantize", "q5_0"], "--quantize"},
          {["--model", @model, "--prompt", ""], "--prompt"},
          {["--model", "", "--prompt", "x"], "--model"},
          {["--model", @model, "--prompt", "x", "--max-tokens", "1.5"], "--max-tokens"},
          {["--model", @model, "--prompt", "x", "--max-tokens", "-1"], "max_tokens"},
          {["--model", @model, "--prompt", "x", "--temperature", "nan"], "--temperature"},
          {["--model", @model, "--prompt", "x", "--threads", "0"], "threads"},
          {["--model", @model, "--prompt", "x", "--level", "best"], "level"},
          {["--model", @model, "--prompt", "x", "--tokenizer", "/nowhere"], "/nowhere"},
          {["--model", @scripted <> "/chat_eos", "--prompt", "x", "--stop-token", "400"], "stop"},
          {["--model", @model, "--prompt", "x", "--stop-token", "a"], "--stop-token"},
          {["--model", @model, "--prompt", "x", "more"], "arguments"},
          {["--model", @model, "--prompt", "x", "--seed", "-1"], "seed"},
          {["--model", @model, "--prompt", "x", "--seed", "1.5"], "--seed"},
          {["--model", @model, "--prompt", "x", "--seed", String.duplicate("9", 23)], "seed"},
          {["--model", @model, "--prompt", "x", "--top-k", "0"], "top_k"},
          {["--model", @model, "--prompt", "x", "--top-k", "2.0"], "--top-k"},
          {["--model", @model, "--prompt", "x", "--top-p", "0"], "top_p"},
          {["--model", @model, "--prompt", "x", "--top-p", "1e999"], "--top-p"},
          {["--model", @model, "--prompt", "x", "--top-p", String.duplicate("9", 400)],
           "too large"},
          {["--model", @model, "--prompt", "x", "--temperature", "-1"], "temperature"},
          {["--model", @model, "--prompt", "x", "--repetition-penalty", "0"],
           "repetition_penalty"},
          {["--model", @model, "--prompt", "x", "--threads", "-1"], "threads"},
          {["--model", @model, "--prompt", "x", "--threads", String.duplicate("9", 23)],
           "threads"},
          {["--model", @model, "--prompt", <<255>>], "UTF-8"},
          {["--model", @model, "--prompt-file", "/nowhere"], "/nowhere"},
          {["--model", @model, "--prompt", "x", "--prompt", ""], "--prompt"}
        ] do
      assert catch_exit(run(args)) == {:shutdown, 1}
      assert_received {:mix_shell, :error, [message]}
      assert message =~ part
      refute message =~ "\n"
    end
  end

  @tag :tmp_dir
  test "a model that is no such file is called what it is", %{tmp_dir: folder} do
    gguf = Path.expand("../golden/gguf/sample.gguf", __DIR__)
    pointer = Path.join(folder, "model.safetensors")
    File.write!(pointer, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")

    for {path, part} <- [{gguf, "a GGUF file"}, {folder, "git lfs pull"}] do
      assert catch_exit(run(["--model", path, "--prompt", "x"])) == {:shutdown, 1}
      assert_received {:mix_shell, :error, [message]}
      assert message =~ part
      refute message =~ "\n"
    end
  end

  # Without a tokenizer.json a vocabulary of 256 is that of bytes.
  defp byte_model(folder) do
    {rows, width} = {256, 16}

    normal = &Sidewinder.RandomInputs.normal(&1, :f32, 0.3, &2)
    ones = &Sidewinder.Tensor.from_list(List.duplicate(1, &1), :f32, {&1})

    layers =
      for layer <- 0..1,
          {name, tensor} <- [
            {"norm.weight", ones.(width)},
            {"mixer.in_proj.weight", normal.({64, width}, {layer, 1})},
            {"mixer.conv1d.weight", normal.({32, 1, 4}, {layer, 2})},
            {"mixer.x_proj.weight", normal.({9, 32}, {layer, 3})},
            {"mixer.dt_proj.weight", normal.({32, 1}, {layer, 4})},
            {"mixer.dt_proj.bias", normal.({32}, {layer, 5})},
            {"mixer.A_log", normal.({32, 4}, {layer, 6})},
            {"mixer.D", ones.(32)},
            {"mixer.out_proj.weight", normal.({width, 32}, {layer, 7})}
          ],
          do: {"backbone.layers.#{layer}.#{name}", tensor}

    tensors = [
      {"backbone.embeddings.weight", normal.({rows, width}, :embedding)},
      {"backbone.norm_f.weight", ones.(width)} | layers
    ]

    Sidewinder.Safetensors.write(Path.join(folder, "model.safetensors"), tensors)
  end
end

defmodule Mix.Tasks.Sidewinder.RunTest do
  use ExUnit.Case, async: false

  alias Mix.Tasks.Sidewinder.Run
  alias Sidewinder.{Calls, Golden, Kernel, Ops, RandomInputs, Safetensors, Tensor}

  setup do
    shell = Mix.shell()
    Mix.shell(Mix.Shell.Process)
    folder = Path.join(System.tmp_dir!(), "sidewinder-run-#{System.pid()}")
    File.mkdir_p!(folder)

    on_exit(fn ->
      Mix.shell(shell)
      File.rm_rf!(folder)
    end)

    %{folder: folder, out: Path.join(folder, "out.safetensors")}
  end

  defp said(sort) do
    receive do
      {:mix_shell, ^sort, [line]} -> [line | said(sort)]
    after
      0 -> []
    end
  end

  defp refused(args) do
    assert catch_exit(Run.run(args)) == {:shutdown, 1}
    assert [line] = said(:error)
    refute line =~ "\n"
    line
  end

  defp write(folder, tensors) do
    path = Path.join(folder, "in.safetensors")
    Safetensors.write(path, tensors)
    path
  end

  defp options(attrs) do
    Enum.flat_map(attrs, fn
      {flag, true} -> ["--" <> dashed(flag)]
      {flag, false} -> ["--no-" <> dashed(flag)]
      {pair, {lo, hi}} -> ["--" <> dashed(pair), "#{lo},#{hi}"]
      {name, value} -> ["--" <> dashed(name), "#{value}"]
    end)
  end

  defp dashed(name), do: String.replace(to_string(name), "_", "-")

  # {type, relative and absolute tolerance beside the golden ones}
  @types [
    {[], 0, 0},
    {["--type", "f64"], 1.0e-9, 0},
    {["--type", "bf16"], 5.0e-2, 5.0e-2},
    {["--type", "f16"], 1.0e-2, 1.0e-2}
  ]

  # Sixteen bits are too few where gradients cancel, where steps lie at a bound of the clamp, and where
  # each step of a block is rounded.
  @exact ~w(exphil b0 b1 b2 b3 step l2state l33 l64)
  @cases ~w(tiny2 small groups2 const_bc dt_zero s2 s3 s5 l2 l3 l8 c2 c5 c7 c8 m13k19n23
              mask masked_rows bias_full dv) ++
           @exact

  for op <-
        ~w(selective_scan selective_state_update linear_scan causal_conv1d linear mamba_block
           attention)a do
    test "#{op} of golden cases and its gradients, in every type", %{out: out} do
      for golden <- Golden.cases(unquote(op)),
          golden.name in @cases,
          {type, rtol, atol} <- @types,
          golden.name not in @exact or type in [[], ["--type", "f64"]] do
        states = if golden.outputs["states"], do: ["--return-states"], else: []

        Run.run(
          ["#{unquote(op)}", Golden.file(unquote(op)), out, "--case", golden.name] ++
            options(golden.attrs) ++ states ++ type
        )

        got = Safetensors.read(out)
        new = ["last_state" | Map.keys(golden.outputs)]
        assert Map.keys(golden.outputs) -- Map.keys(got) == []
        assert Map.keys(got) -- new == []

        for {name, e} <- golden.outputs do
          largest = for value <- Tensor.to_list(e.tensor), is_float(value), do: abs(value)
          largest = Enum.max(largest)

          Golden.assert_close(
            got[name],
            e.tensor,
            e.rtol + rtol,
            e.atol + atol * largest,
            "#{golden.name} #{name} #{type}"
          )
        end
      end
    end
  end

  # There are no golden cases of these.
  for {op, sizes, flags, options} <- [
        {:ssd, "P=2,N=3", ["--dt-softplus"], %{dt_softplus: true}},
        {:gated_delta_rule, "K=3,V=2", ["--qk-l2norm"], %{qk_l2norm: true}},
        {:linear_attention, "K=3,V=2", ["--normalize", "--return-z"],
         %{normalize: true, return_z: true}}
      ] do
    test "#{op} and its gradients are those of the kernel, in every type", context do
      options = unquote(Macro.escape(options))
      declared = Ops.find!(Ops.all(), unquote(op))
      backward = Ops.backward(Ops.all(), declared)
      optional = for %{optional: true, name: name} <- declared.inputs, do: name
      sizes = [shape: "B=2,L=5,H=4,G=2," <> unquote(sizes), with: optional -- ["cu_seqlens"]]

      for type <- Tensor.float_types() do
        inputs = RandomInputs.make(unquote(op), [type: type] ++ sizes)
        outputs = Kernel.run(unquote(op), inputs, Map.put(options, :return_state, true))

        cotangents =
          for "d" <> name <- declared.cotangents,
              do: {"d" <> name, Calls.uniform(outputs[name].shape, -1, 1, outputs[name].type)}

        given = Map.new(inputs ++ cotangents)
        given = Ops.gradient_inputs(backward, given, outputs, fn _slot, _output -> nil end)
        gradients = Kernel.run(String.to_atom(backward.name), given, options)
        assert map_size(gradients) == length(inputs)

        path = write(context.folder, inputs ++ cotangents)
        Run.run(["#{unquote(op)}", path, context.out | unquote(flags)])
        assert Safetensors.read(context.out) == Map.merge(outputs, gradients)
      end
    end
  end

  test "one line tells what was done", %{out: out} do
    Run.run([
      "selective_scan",
      Golden.file(:selective_scan),
      out,
      "--case",
      "small",
      "--dt-softplus"
    ])

    assert [done] = said(:info)

    assert done =~ "selective_scan: x f32 (2, 5, 3) -> " and done =~ "last_state f32 (2, 3, 16)" and
             done =~ "ddt_bias f32 (3)" and done =~ out

    assert Enum.sort(Map.keys(Safetensors.read(out))) ==
             ~w(dA dB dC dD ddt ddt_bias dinitial_state dx dz last_state y)
  end

  test "on a terminal a line tells the progress of files, and is gone then", context do
    before = Application.fetch_env!(:elixir, :ansi_enabled)
    Application.put_env(:elixir, :ansi_enabled, true)
    on_exit(fn -> Application.put_env(:elixir, :ansi_enabled, before) end)
    input = write(context.folder, %{"x" => RandomInputs.normal({1, 1, 3, 8}, :f32, 1.0, 1)})
    work = fn -> Run.run(["cumsum", input, context.out]) end
    told = ExUnit.CaptureIO.capture_io(:stderr, work)
    lines = String.split(told, "\r\e[K")
    for line <- ["#{input}: read 0 %", "#{context.out}: write 0 %", ""], do: assert(line in lines)
    assert List.last(lines) == ""
  end

  test "without cotangents there are no gradients, and cotangents that are missing are zero", %{
    folder: folder,
    out: out
  } do
    inputs = Calls.inputs({1, 3, 2, 4})
    Run.run(["selective_scan", write(folder, inputs), out])
    assert Map.keys(Safetensors.read(out)) == ["last_state", "y"]

    dlast_state = {"dlast_state", Calls.uniform({1, 2, 4}, -1, 1)}
    zero = {"dy", Tensor.from_list(List.duplicate(0, 6), :f32, {1, 3, 2})}

    [alone, beside_zero] =
      for cotangents <- [[dlast_state], [dlast_state, zero]] do
        Run.run(["selective_scan", write(folder, inputs ++ cotangents), out, "--no-return-state"])
        Safetensors.read(out)
      end

    assert alone == beside_zero
    assert Map.keys(alone) == ~w(dA dB dC ddt dx y)
    assert Enum.any?(Tensor.to_list(alone["dx"]), &(&1 != 0))

    straight = ["--dt-clamp", "0.001,0.002", "--clamp-grad"]
    path = write(folder, inputs ++ [dlast_state])

    [mask, through] =
      for grad <- ["mask", "straight_through"] do
        Run.run(["selective_scan", path, out] ++ straight ++ [grad])
        Tensor.to_list(Safetensors.read(out)["ddt"])
      end

    assert Enum.all?(mask, &(&1 == 0)) and Enum.any?(through, &(&1 != 0))
  end

  test "the last state can be left out, and levels and threads be chosen", %{out: out} do
    run = [
      "selective_scan",
      Golden.file(:selective_scan),
      out,
      "--case",
      "plain",
      "--no-return-state"
    ]

    Run.run(run ++ ["--level", "scalar", "--threads", "1", "--backend", "cpu"])
    got = Safetensors.read(out)
    assert got["y"] && got["dx"] && !got["last_state"]
  end

  test "tensors of the wrong types are rounded with --type only", %{folder: folder, out: out} do
    tensors = for {name, t} <- Calls.inputs({1, 2, 3, 4}), do: {name, Tensor.cast(t, :bf16)}
    path = write(folder, tensors)
    assert refused(["selective_scan", path, out]) =~ "A: expected f32, got bf16. --type TYPE"
    Run.run(["selective_scan", path, out, "--type", "bf16"])
    assert %{"y" => %{type: :bf16}, "last_state" => %{type: :f32}} = Safetensors.read(out)
  end

  test "masks are read from bytes and truth values, and stay what they are", %{
    folder: folder,
    out: out
  } do
    [q, k, v] = for _ <- 1..3, do: Tensor.from_list([1, 1], :f32, {1, 1, 2, 1})
    mask = Tensor.from_list([0, 7, 0, 0], :u8, {2, 2})
    path = write(folder, [{"q", q}, {"k", k}, {"v", v}, {"mask", mask}])
    assert %{"mask" => ^mask} = Safetensors.read(path)
    Run.run(["attention", path, out, "--type", "bf16"])
    assert %{"y" => %{type: :bf16} = y} = Safetensors.read(out)
    assert Tensor.to_list(y) == [1.0, 0.0]

    wrong = write(folder, [{"q", q}, {"k", k}, {"v", v}, {"mask", Tensor.cast(mask, :f32)}])
    assert refused(["attention", wrong, out]) =~ "mask: expected u8, got f32"
  end

  test "--help lists ops, inputs, shapes and options" do
    Run.run(["--help"])
    assert [help] = said(:info)

    for part <- [
          "selective_scan",
          "selective_state_update",
          "linear_scan",
          "mamba_block",
          "dy, dlast_state, dstates",
          "--activation TEXT",
          "(B, L, D)",
          "--[no-]dt-softplus",
          "--dt-clamp LO,HI",
          "(B|1, H|1, L|1, M|1), mask, optional",
          "(D, N), wide",
          "--backend"
        ],
        do: assert(help =~ part)

    refute help =~ "_backward"
  end

  test "what cannot be done gives one line and exit code 1, and no output", %{
    folder: folder,
    out: out
  } do
    inputs = Calls.inputs({1, 2, 3, 4})
    path = write(folder, inputs ++ [{"out.y", Calls.uniform({1}, 0, 1)}])
    golden = Golden.file(:selective_scan)

    other = fn name, tensors ->
      folder |> Path.join(name) |> tap(&Safetensors.write(&1, tensors))
    end

    garbage = Path.join(folder, "garbage")
    File.write!(garbage, "no tensors at all")

    for {args, part} <- [
          {["selective_scam", path, out], "selective_scam"},
          {["selective_scan_backward", path, out], "selective_scan_backward"},
          {["selective_scan"], "an input and an output"},
          {["selective_scan", path], "an input and an output"},
          {["selective_scan", path, out, "more"], "an input and an output"},
          {["selective_scan", path <> ".not", out], "No such file"},
          {["selective_scan", folder, out], folder},
          {["selective_scan", garbage, out], "safetensors"},
          {["selective_scan", path, Path.join(folder, "no/where")], "folder"},
          {["selective_scan", golden, out], "--case"},
          {["selective_scan", golden, out, "--case", "none"], "none"},
          {["selective_scan", other.("missing", List.keydelete(inputs, "C", 0)), out],
           "C: expected a tensor, got none"},
          {["selective_scan", other.("extra", inputs ++ [{"E", Calls.uniform({1}, 0, 1)}]), out],
           "`E`"},
          {[
             "selective_scan",
             other.(
               "shape",
               List.keyreplace(inputs, "dt", 0, {"dt", Calls.uniform({1, 2, 4}, 0, 1)})
             ),
             out
           ], "dt: expected shape (1, 2, 3), got (1, 2, 4)"},
          {["selective_scan", path, out, "--softplus"], "--softplus"},
          {["selective_state_update", path, out, "--return-states"], "--return-states"},
          {["selective_scan", path, out, "--threads", "two"], "--threads"},
          {["selective_scan", path, out, "--threads", "0"], "threads"},
          {["selective_scan", path, out, "--dt-clamp", "1"], "--dt-clamp"},
          {["selective_scan", path, out, "--dt-clamp", "2,1"], "dt_clamp"},
          {["selective_scan", path, out, "--dt-clamp", "1e999,1"], "--dt-clamp"},
          {["selective_scan", path, out, "--dt-clamp", String.duplicate("9", 400) <> ",1"],
           "--dt-clamp"},
          {["selective_scan", path, out, "--threads", String.duplicate("9", 23)], "threads"},
          {["selective_scan", path, out, "--clamp-grad", "none"], "clamp_grad"},
          {[
             "selective_scan",
             other.("cotangent", inputs ++ [{"dy", Calls.uniform({1, 2}, 0, 1)}]),
             out
           ], "dy: expected shape (1, 2, 3)"},
          {["selective_scan", path, out, "--type", "i8"], "--type"},
          {["selective_scan", path, out, "--level", "sse"], "level"},
          {["selective_scan", path, out, "--backend", "tpu"], "tpu"},
          {["selective_scan", path, out, "--backend", "cuda:99"], "CUDA"}
        ] do
      assert refused(args) =~ part
      refute File.exists?(out), inspect(args)
    end

    Run.run(["selective_scan", path, out])
    assert File.exists?(out)
  end

  test "tensors of types that there are none of here", %{folder: folder, out: out} do
    path = Path.join(folder, "integers")
    header = ~s({"x":{"dtype":"U32","shape":[1],"data_offsets":[0,4]}})
    File.write!(path, <<byte_size(header)::64-little, header::binary, 0::32>>)

    assert refused(["selective_scan", path, out]) =~
             "x: expected F64, F32, BF16, F16, I64, I32, I16, I8, U8 or BOOL, got U32"
  end
end

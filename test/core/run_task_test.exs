defmodule Mix.Tasks.Sidewinder.RunTest do
  use ExUnit.Case, async: false

  alias Mix.Tasks.Sidewinder.Run
  alias Sidewinder.{Calls, Golden, Safetensors, Tensor}

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
      {:dt_softplus, true} -> ["--dt-softplus"]
      {:dt_softplus, false} -> ["--no-dt-softplus"]
      {:dt_clamp, {lo, hi}} -> ["--dt-clamp", "#{lo},#{hi}"]
    end)
  end

  # {type, relative and absolute tolerance beside the golden ones}
  @types [
    {[], 0, 0},
    {["--type", "f64"], 1.0e-9, 0},
    {["--type", "bf16"], 5.0e-2, 5.0e-2},
    {["--type", "f16"], 1.0e-2, 1.0e-2}
  ]

  for op <- [:selective_scan, :selective_state_update] do
    test "#{op} of golden cases, in every type", %{out: out} do
      for golden <- Golden.cases(unquote(op)),
          golden.name in ~w(tiny2 small exphil groups2 const_bc dt_zero s2 s3 s5),
          {type, rtol, atol} <- @types do
        states = if golden.outputs["states"], do: ["--return-states"], else: []

        Run.run(
          ["#{unquote(op)}", Golden.file(unquote(op)), out, "--case", golden.name] ++
            options(golden.attrs) ++ states ++ type
        )

        got = Safetensors.read(out)
        expected = Map.take(golden.outputs, ~w(y last_state states state))
        assert Enum.sort(Map.keys(got)) == Enum.sort(Map.keys(expected))

        for {name, e} <- expected do
          largest = e.tensor |> Tensor.to_list() |> Enum.map(&abs/1) |> Enum.max()

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

  test "one line tells what was done, and cotangents are passed over with a line", %{out: out} do
    Run.run([
      "selective_scan",
      Golden.file(:selective_scan),
      out,
      "--case",
      "small",
      "--dt-softplus"
    ])

    assert [passed_over, done] = said(:info)
    assert passed_over =~ "dlast_state" and passed_over =~ "dy"

    assert done =~ "selective_scan: x f32 (2, 5, 3) -> " and done =~ "last_state f32 (2, 3, 16)" and
             done =~ out

    assert Map.keys(Safetensors.read(out)) == ["last_state", "y"]
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
    assert Map.keys(Safetensors.read(out)) == ["y"]
  end

  test "tensors of the wrong types are rounded with --type only", %{folder: folder, out: out} do
    tensors = for {name, t} <- Calls.inputs({1, 2, 3, 4}), do: {name, Tensor.cast(t, :bf16)}
    path = write(folder, tensors)
    assert refused(["selective_scan", path, out]) =~ "A: expected f32, got bf16. --type TYPE"
    Run.run(["selective_scan", path, out, "--type", "bf16"])
    assert %{"y" => %{type: :bf16}, "last_state" => %{type: :f32}} = Safetensors.read(out)
  end

  test "--help lists ops, inputs, shapes and options" do
    Run.run(["--help"])
    assert [help] = said(:info)

    for part <- [
          "selective_scan",
          "selective_state_update",
          "(B, L, D)",
          "--[no-]dt-softplus",
          "--dt-clamp LO,HI",
          "--backend"
        ],
        do: assert(help =~ part)
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

  test "tensors that are not of floats", %{folder: folder, out: out} do
    path = Path.join(folder, "integers")
    header = ~s({"x":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})
    File.write!(path, <<byte_size(header)::64-little, header::binary, 0::32>>)
    assert refused(["selective_scan", path, out]) =~ "x: expected F64, F32, BF16 or F16, got I32"
  end
end

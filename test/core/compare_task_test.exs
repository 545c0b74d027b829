defmodule Mix.Tasks.Sidewinder.CompareTest do
  use ExUnit.Case, async: false

  alias Mix.Tasks.Sidewinder.{Compare, Info}
  alias Sidewinder.{Calls, Device, Golden, Safetensors, Tensor}

  @quick ~w(--iterations 2 --warmup 1 --max-ms 50)

  setup do
    shell = Mix.shell()
    Mix.shell(Mix.Shell.Process)
    on_exit(fn -> Mix.shell(shell) end)
  end

  defp said(sort) do
    receive do
      {:mix_shell, ^sort, [line]} -> [line | said(sort)]
    after
      0 -> []
    end
  end

  defp table(args) do
    Compare.run(args ++ @quick)
    assert [table] = said(:info)
    table
  end

  test "the table has every level, forward and gradient" do
    table = table(~w(causal_conv1d --shape 2x33x5 --with bias --activation silu --threads 2))
    assert table =~ "causal_conv1d: x f32 (2, 33, 5), w f32 (5, 4), bias f32 (5)"
    %{levels: levels, best: best} = Device.info().cpu

    for level <- levels -- ["reference"] do
      assert length(Regex.scan(~r/^#{level}, 1 thread .* ok$/m, table)) == 2
    end

    assert length(Regex.scan(~r/^#{best}, 2 threads .* ok$/m, table)) == 2
    assert table =~ ~r/^forward .*^gradient /ms
    refute table =~ "WRONG"
  end

  test "without the gradient, for an op without one, and in other types" do
    refute table(~w(linear --shape 4x5,O=3 --no-gradient)) =~ "gradient"
    refute table(~w(selective_state_update --shape D=3)) =~ "gradient"
    table = table(~w(attention --shape L=5,M=6,H=2,K=1 --type bf16 --with mask,bias --causal))
    assert table =~ "mask u8 (1, 2, 5, 6), bias f32 (1, 2, 5, 6)" and table =~ "q bf16"
  end

  test "inputs and cotangents from a file" do
    args = ["--file", Golden.file(:attention), "--case", "masked_rows"]
    assert table(["attention" | args]) =~ "q f32 (2, 2, 8, 8), k f32 (2, 2, 9, 8)"
    assert table(["attention", "--type", "f64" | args]) =~ "q f64 (2, 2, 8, 8)"

    path = Path.join(System.tmp_dir!(), "sidewinder-compare-#{System.pid()}.safetensors")
    zero = Tensor.from_list(List.duplicate(0, 6), :f32, {2, 3})
    inputs = [{"x", Calls.uniform({2, 4}, -1, 1)}, {"w", Calls.uniform({3, 4}, -1, 1)}]
    Safetensors.write(path, [{"dy", zero} | inputs])
    [_forward, gradient] = String.split(table(["linear", "--file", path]), "gradient")
    assert gradient =~ ~r/scalar, 1 thread .* 0 +0 +ok/
    File.rm!(path)
  end

  test "a level out of tolerance gives exit code 1" do
    args = ~w(linear --shape 32x100 --rtol 0.0 --atol 0.0)
    assert catch_exit(Compare.run(args ++ @quick)) == {:shutdown, 1}
    assert [table] = said(:info)
    assert table =~ "WRONG" and table =~ "scalar, 1 thread is out of tolerance: y by"
  end

  @linear ~w(linear --shape 4x5,O=3)

  test "--json has all of the table as one object" do
    json = table(@linear ++ ["--json"])
    assert json =~ ~r/^\{"forward": \[\{.*"gradient": \[\{.*"ok\?": true, "op": "linear"\}$/s
    assert json =~ ~s("inputs": {"w": "f32 (3, 5\)", "x": "f32 (4, 5\)"})
    %{levels: levels} = Device.info().cpu

    for level <- levels -- ["reference"] do
      assert json =~ ~s("label": "#{level}, 1 thread")

      assert json =~
               ~r/"level": "#{level}"[^{}]*"outputs": \{[^}]*\}[^{}]*\}, "speedup": [\d.e-]+, "status": "ok"/
    end

    assert json =~ ~s("level": "cuda") and
             json =~ ~r/"time": \{"iterations": [12], "mean": [\d.e-]+/

    unless Device.cuda?(),
      do: assert(json =~ ~r/"status": "unavailable"[^{}]*"why": "CUDA driver/)
  end

  test "JSON of what failed and of what is infinite" do
    fails = [{"fails", fn _ -> raise "a \"fault\"\n" end}]

    wrong = [
      {"wrong", fn %{"x" => x} -> %{"y" => Tensor.from_list([1.0e300], :f64, x.shape)} end}
    ]

    inputs = [x: Tensor.from_list([1], :f32, {1, 1}), w: Tensor.from_list([1.0], :f32, {1, 1})]
    options = [max_ms: 1, gradient: false, levels: []]

    json =
      &Sidewinder.Compare.json(
        Sidewinder.Compare.levels(:linear, inputs, options ++ [others: &1])
      )

    assert json.(fails) =~ ~S("status": "error", "time": null, "why": "a \u0022fault\u0022\u000A")
    assert json.(wrong) =~ ~S("max_abs_err": 1.0e300) and json.(wrong) =~ ~S("status": "wrong")
  end

  test "--svg is a picture of well-formed XML with a bar for each level" do
    svg = table(@linear ++ ["--svg"])
    shapes = ~r{<(text|rect)\b[^<>]*(/>|>[^<>&]*</text>)}
    assert String.replace(svg, shapes, "") =~ ~r{^<svg [^<>]*>\s*</svg>\s*$}
    %{levels: levels, threads: threads} = Device.info().cpu
    count = length(levels -- ["reference"]) + if(threads > 1, do: 1, else: 0)
    unless Device.cuda?(), do: assert(length(Regex.scan(~r/fill="#1b6ca8"/, svg)) == 2 * count)
    assert svg =~ "x f32 (4, 5), w f32 (3, 5)" and svg =~ "gradient, median time"
    refute table(@linear ++ ["--svg", "--no-gradient"]) =~ "gradient"

    assert catch_exit(Compare.run(@linear ++ ~w(--svg --rtol 0.0 --atol 0.0 --shape 32x100))) ==
             {:shutdown, 1}

    assert [svg] = said(:info)
    assert svg =~ "WRONG"
  end

  test "mix sidewinder.info --json is Device.info as one line" do
    Info.run(["--json"])
    assert [json] = said(:info)
    refute json =~ "\n"
    info = Device.info()
    assert json =~ ~s("best": "#{info.cpu.best}") and json =~ ~s("native": true, "ops": {)
    for {op, _} <- info.ops, do: assert(json =~ ~s("#{op}": {"backend": "))
    gpu = %{ordinal: 0, name: "H100", driver: {12, 4}}

    assert Info.json(%{info | gpus: [gpu]}) =~
             ~s("gpus": [{"driver": "12.4", "name": "H100", "ordinal": 0}])

    assert Info.json(%{info | backend: {:cuda, 1}}) =~ ~s("backend": "cuda:1")
    assert catch_exit(Info.run(["--xml"])) == {:shutdown, 1}
    assert [line] = said(:error)
    assert line =~ "--xml"
  end

  test "what cannot be done gives one line and exit code 1" do
    for {args, part} <- [
          {~w(selective_scam), "selective_scam"},
          {~w(linear_backward), "linear_backward"},
          {~w(linear more), "more"},
          {~w(linear --shape Q=1), "letters out of"},
          {~w(linear --shape I=-1), "-1"},
          {~w(linear --type s8), "--type"},
          {~w(linear --with q), "optional inputs out of b"},
          {~w(linear --softplus), "--softplus"},
          {~w(linear --iterations 0), "iterations"},
          {~w(linear --threads x), "--threads"},
          {~w(linear --json --svg), "one of --json and --svg"},
          {~w(linear --file none), "none"},
          {~w(selective_scan --dt-clamp 2,1), "dt_clamp"},
          {["linear", "--shape", "2x3", "--file", Golden.file(:linear)], "--shape"},
          {["linear", "--file", Golden.file(:linear)], "--case"}
        ] do
      assert catch_exit(Compare.run(args)) == {:shutdown, 1}
      assert [line] = said(:error)
      assert line =~ part
      refute line =~ "\n"
      assert said(:info) == []
    end
  end

  test "--help lists ops and shapes" do
    for args <- [["--help"], []] do
      Compare.run(args)
      assert [help] = said(:info)

      for part <- ["--shape B=1", "attention:", "(B, H, L, W)", "--[no-]causal"],
          do: assert(help =~ part)

      refute help =~ "_backward"
    end
  end

  test "mix sidewinder.info has a line for every op" do
    Info.run([])
    text = Enum.join(said(:info), "\n")
    info = Device.info()
    assert text =~ ~r/^native library +loaded$/m and text =~ ~r/^cpu +#{info.cpu.best}/m

    ops = Sidewinder.Ops.all()

    for op <- ops do
      line = ~r/^#{op.name} +#{Regex.escape(info.ops[op.name][:backend] || "no line")}$/m
      assert text =~ line == (op.backward_of == nil)
    end
  end
end

defmodule Mix.Tasks.Compile.Sidewinder do
  @moduledoc """
  Builds the native library with cargo and puts it into the application's `priv` below the build path.

  Nothing is written to where the sources are. The environment variable `SIDEWINDER_NATIVE` names a
  library that is used instead of running cargo, or is `none`: then nothing is built, and only the
  slow pure Nx functions work. `CARGO_TARGET_DIR` is where cargo builds, if it is set.
  """
  use Mix.Task.Compiler

  @sources ~w(native/Cargo.* native/*/Cargo.toml native/*/build.rs native/*/src/**)

  @impl true
  def run(args) do
    Sidewinder.MixProject.choose_layers()
    prebuilt = prebuilt(System.get_env("SIDEWINDER_NATIVE"))
    seen = seen(prebuilt)

    if "--force" in args or File.read(stamp()) != {:ok, seen} or gone?(prebuilt),
      do: build(prebuilt, seen),
      else: :noop
  end

  @impl true
  def manifests, do: [stamp()]

  @impl true
  def clean, do: Enum.each([library(), stamp()], &File.rm/1)

  defp library, do: Path.join(Mix.Project.app_path(), "priv/native/sidewinder_nif.so")
  defp stamp, do: Path.join(Mix.Project.manifest_path(), "compile.sidewinder")

  defp prebuilt(unset) when unset in [nil, ""], do: nil
  defp prebuilt("none"), do: "none"
  defp prebuilt(path), do: from_project(path)

  # A dependency is compiled in its own folder; paths are meant from that of the whole project.
  defp from_project(path) do
    Path.expand(path, Path.dirname(Path.expand(Mix.Project.config()[:lockfile])))
  end

  # Looking at the files' times is faster than asking cargo.
  defp seen(prebuilt) do
    files = if prebuilt, do: [prebuilt], else: sources()
    stats = for path <- files, {:ok, stat} <- [File.stat(path)], do: {path, stat.mtime, stat.size}
    "#{prebuilt || "cargo"} #{:erlang.phash2(stats)}"
  end

  defp sources, do: Enum.flat_map(@sources, &Path.wildcard(Path.expand(&1, __DIR__)))

  defp gone?(prebuilt), do: prebuilt != "none" and not File.exists?(library())

  defp build(prebuilt, seen) do
    Sidewinder.MixProject.tell_packages()
    own_priv(Path.join(Mix.Project.app_path(), "priv"))
    File.mkdir_p!(Path.dirname(library()))

    case prebuilt do
      nil -> cargo(System.find_executable("cargo"))
      "none" -> File.rm(library())
      path -> install(path, &check_prebuilt!(path, &1))
    end

    File.mkdir_p!(Path.dirname(stamp()))
    File.write!(stamp(), seen)
  end

  # Mix links `priv` to that of the sources, where other projects would find our library as well.
  # Where it finds a folder it copies into that.
  defp own_priv(priv) do
    if match?({:ok, _}, File.read_link(priv)), do: File.rm!(priv)
    File.mkdir_p!(priv)
    Mix.Project.build_structure()
  end

  defp cargo(nil) do
    Mix.raise("""
    Sidewinder's native library is written in Rust, and there is no cargo on this machine. Either
      * install Rust 1.91 or later,
      * set SIDEWINDER_NATIVE to the path of a library that was built elsewhere, or
      * set SIDEWINDER_NATIVE=none to do without it: then only the slow pure Nx functions work.
    """)
  end

  defp cargo(cargo) do
    args = ~w(build --release --locked --package sidewinder_nif)
    env = [{"CARGO_TARGET_DIR", target()}]
    output = [stderr_to_stdout: true, into: IO.stream(:stderr, :line)]

    case System.cmd(cargo, args, [cd: Path.join(__DIR__, "native"), env: env] ++ output) do
      {_, 0} -> install(built(), & &1)
      {_, code} -> Mix.raise("cargo build failed with exit code #{code}; its output is above")
    end
  end

  # Environments share what cargo builds, unless their build paths are said one by one.
  defp target do
    build = Mix.Project.build_path()
    root = if System.get_env("MIX_BUILD_PATH"), do: build, else: Path.dirname(build)
    from_project(System.get_env("CARGO_TARGET_DIR") || Path.join(root, "native"))
  end

  defp built do
    triple = System.get_env("CARGO_BUILD_TARGET", "")
    Path.join([target(), triple, "release", built_name(:os.type())])
  end

  defp built_name({:unix, :darwin}), do: "libsidewinder_nif.dylib"
  defp built_name(_), do: "libsidewinder_nif.so"

  # By rename, for a running VM may have mapped the old file.
  defp install(from, check) do
    unfinished = "#{Path.rootname(library())}.#{System.pid()}.so"

    try do
      with {:error, reason} <- File.cp(from, unfinished), do: refuse(from, file_error(reason))
      check.(unfinished)
      File.rename!(unfinished, library())
    after
      File.rm(unfinished)
    end
  end

  defp file_error(reason), do: reason |> :file.format_error() |> List.to_string()

  # A library for another machine than this one cannot be tried here.
  defp check_prebuilt!(path, copy) do
    with true <- Mix.target() == :host, {:error, why} <- try_library(copy) do
      refuse(path, why |> String.replace(copy, path) |> plainly(path))
    end
  end

  # The system's loader passes over a file for another processor, and then has found none.
  defp plainly(why, path) do
    if why =~ "#{path}: cannot open shared object file",
      do: "it was built for another kind of machine",
      else: why
  end

  defp refuse(path, why) do
    Mix.raise("""
    Sidewinder's native library cannot be taken from #{path}: #{why}
    Set SIDEWINDER_NATIVE to the path of Sidewinder's library, built for this machine, or to "none"
    to do without it; without SIDEWINDER_NATIVE, cargo builds the library.
    """)
  end

  # A module of another name cannot use the library, but Erlang tells then whose it is: so all is
  # tried that may go wrong, and nothing is started. In another VM, which a damaged file may crash.
  defp try_library(path) do
    erl = Path.join(:code.root_dir(), "bin/erl")

    code = """
    {module, probe} = code:load_binary(probe, "", base64:decode("#{Base.encode64(probe())}")),
    {error, {_, Why}} = probe:load(filename:rootname(hd(init:get_plain_arguments()))),
    io:put_chars(Why), halt().
    """

    case System.cmd(erl, ["-noinput", "-eval", code, "-extra", path], stderr_to_stdout: true) do
      {why, 0} -> if why =~ "'Elixir.Sidewinder.Native'", do: :ok, else: {:error, why}
      {_, status} -> {:error, "loading it crashes Erlang (exit code #{status})"}
    end
  end

  defp probe do
    lines = ["-module(probe).", "-export([load/1]).", "load(Path) -> erlang:load_nif(Path, 0)."]

    forms =
      for line <- lines do
        {:ok, tokens, _} = line |> String.to_charlist() |> :erl_scan.string()
        {:ok, form} = :erl_parse.parse_form(tokens)
        form
      end

    {:ok, :probe, beam} = :compile.forms(forms)
    beam
  end
end

defmodule Sidewinder.MixProject do
  use Mix.Project

  # What our layers build on, and what the scripts in bench/ use.
  @layered [:nx, :exla, :axon, :polaris]
  @found_elsewhere @layered ++ [:benchee, :telemetry]

  def project do
    [
      app: :sidewinder,
      version: "0.1.0",
      elixir: "~> 1.14",
      description: "Fast sequence-model kernels for Nx and Axon: Rust on CPUs, CUDA on GPUs",
      compilers: [:sidewinder] ++ Mix.compilers(),
      deps: deps(),
      package: package(),
      docs: &docs/0
    ] ++ layers()
  end

  # Beside an Nx of the project, what was built for that of Erlang would be out of place.
  def application do
    declared? = List.keymember?(Mix.Project.config()[:deps], :nx, 0)
    found = if declared? or not elixir_for_nx?(), do: [], else: @found_elsewhere

    [
      mod: {Sidewinder.Application, []},
      extra_applications: [:logger | Enum.map(found, &{&1, :optional})]
    ]
  end

  @doc """
  Chooses what is compiled by what there is to compile it with.

  To be called when Mix has compiled and loaded what we depend on, and nothing else: what comes, goes
  or changes its version then brings its layer or takes it away.
  """
  def choose_layers, do: Mix.ProjectStack.merge_config(layers())

  @doc "Says in a line where packages come from, if not from Hex."
  def tell_packages do
    nx = if nx?(), do: "Nx #{version(:nx)}", else: "no Nx 0.12 or later, so without lib/nx"

    unless hex?(), do: Mix.shell().info("sidewinder: built without Hex packages, with #{nx}")
  end

  defp layers do
    [
      elixirc_paths: elixirc_paths(Mix.env()),
      test_pattern: if(nx?(), do: "*_test.exs", else: "core/**/*_test.exs")
    ]
  end

  defp elixirc_paths(:test),
    do:
      elixirc_paths(:dev) ++
        ["test/support/core" | nx("test/support/nx") ++ exla("test/support/exla")]

  defp elixirc_paths(_), do: ["lib/core" | nx("lib/nx") ++ axon("lib/axon") ++ exla("lib/exla")]

  defp nx(path), do: if(nx?(), do: [path], else: [])
  defp axon(path), do: if(nx?() and there?(:axon, "0.7.0"), do: [path], else: [])
  defp exla(path), do: if(nx?() and there?(:exla, "0.12.0"), do: [path], else: [])

  # What the projects above us take from a folder or a repository, we take from there as well: then
  # Mix compiles it before us.
  defp deps do
    Enum.reduce(declared_above(), if(hex?(), do: hex_deps(), else: []), fn dep, deps ->
      List.keystore(deps, elem(dep, 0), 0, dep)
    end)
  end

  defp hex_deps do
    [
      {:nx, "~> 0.12", optional: true},
      {:exla, "~> 0.12", optional: true},
      {:axon, "~> 0.7", optional: true},
      {:telemetry, "~> 1.0", optional: true},
      {:benchee, "~> 1.3", only: [:dev, :test], runtime: false},
      {:ex_doc, "~> 0.34", only: :dev, runtime: false}
    ]
  end

  # While Mix loads this file, the current project is the one that depends on us.
  defp declared_above do
    if Mix.Project.get() in [nil, __MODULE__] or not elixir_for_nx?(),
      do: [],
      else: declared(Path.dirname(Mix.Project.project_file()), [:sidewinder])
  end

  defp declared(root, seen) do
    deps = for dep <- Mix.Project.config()[:deps] || [], do: split(dep, root)
    {ours, others} = Enum.split_with(deps, fn {app, _, _} -> app in @layered end)
    for(dep <- ours, taken?(dep), do: optional(dep)) ++ declared_below(others ++ apps(root), seen)
  end

  defp split({app, requirement, opts}, root), do: {app, requirement, from(opts, root)}
  defp split({app, opts}, root) when is_list(opts), do: {app, nil, from(opts, root)}
  defp split({app, requirement}, _root), do: {app, requirement, []}

  defp from(opts, root) do
    if path = opts[:path], do: Keyword.put(opts, :path, Path.expand(path, root)), else: opts
  end

  # With Hex, versions from there are for it to choose.
  defp taken?({_app, _requirement, opts}),
    do: not hex?() or Enum.any?([:path, :git, :github], &Keyword.has_key?(opts, &1))

  defp optional({app, requirement, opts}) do
    opts =
      opts |> Keyword.drop([:override, :only, :targets, :runtime]) |> Keyword.put(:optional, true)

    if requirement, do: {app, requirement, opts}, else: {app, opts}
  end

  # The apps of an umbrella are no dependencies of it.
  defp apps(root) do
    apps = File.cd!(root, fn -> Mix.Project.apps_paths() end)
    for {app, path} <- apps || %{}, do: {app, nil, path: Path.expand(path, root)}
  end

  defp declared_below(deps, seen) do
    for {app, _, opts} <- deps, path = opts[:path], app not in seen, mix?(path), reduce: [] do
      found -> found ++ in_project(app, path, fn -> declared(path, [app | seen]) end)
    end
  end

  defp mix?(path), do: File.regular?(Path.join(path, "mix.exs"))

  # What Mix has prepared for us must not go to the other project.
  defp in_project(app, path, work) do
    Mix.ProjectStack.on_clean_slate(fn ->
      Mix.Project.in_project(app, path, fn _module -> work.() end)
    end)
  end

  defp hex?, do: System.get_env("SIDEWINDER_OFFLINE") != "1" and Code.ensure_loaded?(Hex)

  # Nx 0.12 needs it itself.
  defp elixir_for_nx?, do: Version.match?(System.version(), ">= 1.17.0")

  defp nx?, do: elixir_for_nx?() and there?(:nx, "0.12.0")
  defp there?(app, least), do: Version.match?(version(app) || "0.0.0", ">= #{least}")

  defp version(app) do
    with dir when is_list(dir) <- :code.lib_dir(app),
         {:ok, [{:application, ^app, keys}]} <- :file.consult(Path.join(dir, "ebin/#{app}.app")) do
      List.to_string(keys[:vsn])
    else
      _ -> nil
    end
  end

  # Modules of one family, and functions by the `type` in their metadata.
  defp docs do
    [
      main: "readme",
      source_ref: "v#{project()[:version]}",
      extras: extras(),
      groups_for_extras: [Guides: ~r"guides/", About: ~r"md$"],
      groups_for_modules: [
        Nx: [Sidewinder, Sidewinder.Ternary, Sidewinder.Reference],
        Axon: [Sidewinder.Axon],
        "Language models": [
          ~r/^Sidewinder\.Mamba/,
          ~r/^Sidewinder\.(Transformer|KVCache|Tokenizer)$/
        ],
        "Long memory": ~r/^Sidewinder\.MMRec/,
        Kernels: ~r/^Sidewinder\.Kernel/,
        "Tensors and files": ~r/^Sidewinder\.(Tensor|Quantized|Safetensors|GGUF)$/,
        "Devices and measurements":
          ~r/^Sidewinder\.(Device|Compare|RandomInputs|Telemetry|Error)/,
        "For compilers": ~r/^Sidewinder\.(Block|CustomCall)/
      ],
      groups_for_docs: for({type, title} <- doc_types(), do: {title, &(&1[:type] == type)}),
      skip_undefined_reference_warnings_on: ~w(CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md),
      before_closing_body_tag: &formulas/1
    ]
  end

  @guides ~w(scan_in_five_minutes train_mamba serve_to_a_cluster game_agents quantize_and_run from_pytorch
             mm_rec_and_long_memory write_an_op)

  defp extras do
    for(guide <- @guides, do: "guides/#{guide}.livemd") ++
      ~w(guides/command_line.md guides/cheatsheet.cheatmd README.md bench/RESULTS.md CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md LICENSE)
  end

  defp doc_types do
    [
      model: "Models",
      recurrent: "Recurrences",
      convolution: "Convolutions",
      attention: "Attention",
      normalization: "Norms",
      activation: "Activations",
      linear: "Products",
      cumulative: "Cumulative ops",
      mm_rec: "MM-Rec",
      combinator: "Combinators"
    ]
  end

  # Formulas of notebooks, as Livebook shows them.
  defp formulas(:html) do
    """
    <script src="https://cdn.jsdelivr.net/npm/katex@0.16.11/dist/katex.min.js"></script>
    <link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/katex@0.16.11/dist/katex.min.css">
    <script src="https://cdn.jsdelivr.net/npm/katex@0.16.11/dist/contrib/auto-render.min.js"></script>
    <script>
      window.addEventListener("exdoc:loaded", () => renderMathInElement(document.body))
    </script>
    """
  end

  defp formulas(_other), do: ""

  defp package do
    sources =
      ~w(lib native/Cargo.toml native/Cargo.lock native/kernels native/files native/models native/nif native/xla native/fuzz
         native/bench priv/models priv/samples)

    about = ~w(mix.exs .formatter.exs README.md guides CHANGELOG.md LICENSE)
    [licenses: ["Apache-2.0"], links: %{}, files: sources ++ about]
  end
end

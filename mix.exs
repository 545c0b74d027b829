# What Mix needs before anything is compiled.
for file <- ~w(archive compile), do: Code.require_file("mix/#{file}.exs", __DIR__)

defmodule Sidewinder.MixProject do
  use Mix.Project

  @version "0.1.0"
  @source_url "https://github.com/sidewinder-elixir/sidewinder"

  # What our layers build on, and what the scripts in bench/ use.
  @layered [:nx, :exla, :axon, :polaris]
  @found_elsewhere @layered ++ [:benchee, :telemetry]

  def project do
    [
      app: :sidewinder,
      version: @version,
      source_url: @source_url,
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

  @doc "Where the archives of precompiled libraries of this version are."
  def release_url, do: "#{@source_url}/releases/download/v#{@version}"

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
      source_ref: "v#{@version}",
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
          ~r/^Sidewinder\.(Device|Compare|RandomInputs|Telemetry|Progress|Cancellation|Error)/,
        "For compilers": ~r/^Sidewinder\.(Block|CustomCall)/
      ],
      assets: %{"assets" => "assets"},
      groups_for_docs: for({type, title} <- doc_types(), do: {title, &(&1[:type] == type)}),
      skip_undefined_reference_warnings_on: ~w(CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md),
      before_closing_body_tag: &formulas/1
    ]
  end

  @guides ~w(scan_in_five_minutes train_mamba serve_to_a_cluster game_agents quantize_and_run from_pytorch
             mm_rec_and_long_memory write_an_op)

  defp extras do
    for(guide <- @guides, do: "guides/#{guide}.livemd") ++
      ~w(guides/installation.md guides/command_line.md guides/cheatsheet.cheatmd README.md bench/RESULTS.md CHANGELOG.md
           UPGRADE.md SECURITY.md ARCHITECTURE.md CONTRIBUTING.md LICENSE)
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
      combinator: "Combinators",
      call: "Long calls"
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

  # Sources without tests, and without the model of the demo, which is an archive of the release.
  defp package do
    crates =
      for crate <- ~w(bench files fuzz kernels models nif xla), do: "native/#{crate}/Cargo.toml"

    rust =
      ~w(native/Cargo.toml native/Cargo.lock native/nif/build.rs native/fuzz/fuzz_targets native/xla/examples
         native/*/src)

    elixir = ~w(lib mix mix.exs .formatter.exs priv/samples checksum-*.exs)
    about = ~w(README.md guides CHANGELOG.md UPGRADE.md SECURITY.md LICENSE)

    [
      licenses: ["Apache-2.0"],
      links: %{
        "GitHub" => @source_url,
        "Changelog" => "#{@source_url}/blob/v#{@version}/CHANGELOG.md"
      },
      files: elixir ++ rust ++ crates ++ about
    ]
  end
end

defmodule Mix.Tasks.Compile.Sidewinder do
  @moduledoc """
  Builds the native library with cargo and puts it into `priv/`.

  The environment variable `SIDEWINDER_NATIVE` names a library that is used instead of running
  cargo, or is `none`: then nothing is built, and only the slow pure Nx functions work.
  """
  use Mix.Task.Compiler

  @library Path.join(__DIR__, "priv/sidewinder_nif.so")
  @target Path.join(__DIR__, "_build/native")
  @stamp Path.join(@target, "stamp")
  @sources ~w(native/Cargo.* native/*/Cargo.toml native/*/src/**)

  @impl true
  def run(args) do
    prebuilt = System.get_env("SIDEWINDER_NATIVE")
    stamp = stamp(if(prebuilt, do: [prebuilt], else: @sources))

    if "--force" in args or File.read(@stamp) != {:ok, stamp},
      do: build(prebuilt, stamp),
      else: :noop
  end

  @impl true
  def clean, do: Enum.each([@library, @stamp], &File.rm/1)

  # Looking at the files' times is faster than asking cargo.
  defp stamp(sources) do
    files = for source <- sources, path <- Path.wildcard(Path.expand(source, __DIR__)), do: path
    seen = for path <- files, {:ok, stat} <- [File.stat(path)], do: {path, stat.mtime, stat.size}
    "#{Enum.join(sources, " ")} #{:erlang.phash2(seen)}"
  end

  defp build(prebuilt, stamp) do
    Sidewinder.MixProject.tell_packages()
    Enum.each([@library, @stamp], &File.mkdir_p!(Path.dirname(&1)))

    case prebuilt do
      nil -> cargo(System.find_executable("cargo"))
      "none" -> File.rm(@library)
      path -> install(path)
    end

    File.write!(@stamp, stamp)
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
    env = [{"CARGO_TARGET_DIR", @target}]
    output = [stderr_to_stdout: true, into: IO.stream(:stderr, :line)]

    case System.cmd(cargo, args, [cd: Path.join(__DIR__, "native"), env: env] ++ output) do
      {_, 0} -> install(Path.join(@target, "release/#{built_name(:os.type())}"))
      {_, code} -> Mix.raise("cargo build failed with exit code #{code}; its output is above")
    end
  end

  defp built_name({:unix, :darwin}), do: "libsidewinder_nif.dylib"
  defp built_name(_), do: "libsidewinder_nif.so"

  # By rename, for a running VM may have mapped the old file.
  defp install(from) do
    unfinished = "#{@library}.#{System.pid()}"
    File.cp!(from, unfinished)
    File.rename!(unfinished, @library)
  end
end

defmodule Sidewinder.MixProject do
  use Mix.Project

  # What lib/nx builds on and what the scripts in bench/ use, where this Erlang has them.
  @found_elsewhere [:nx, :exla, :axon, :polaris, :benchee]

  def project do
    [
      app: :sidewinder,
      version: "0.1.0",
      elixir: "~> 1.14",
      description: "Fast sequence-model kernels for Nx and Axon: Rust on CPUs, CUDA on GPUs",
      compilers: [:sidewinder] ++ Mix.compilers(),
      elixirc_paths: elixirc_paths(Mix.env()),
      test_pattern: if(nx?(), do: "*_test.exs", else: "core/**/*_test.exs"),
      deps: deps(hex?()),
      package: package()
    ]
  end

  def application do
    found =
      for app <- @found_elsewhere,
          not hex?() and nx?() and version(app) != nil,
          do: {app, :optional}

    [extra_applications: [:logger | found]]
  end

  @doc "Says in a line where packages come from, if not from Hex."
  def tell_packages do
    nx =
      if nx?(), do: "the Nx #{version(:nx)} beside this Erlang", else: "no Nx, so without lib/nx"

    unless hex?(), do: Mix.shell().info("sidewinder: built without Hex packages, with #{nx}")
  end

  defp elixirc_paths(:test),
    do: elixirc_paths(:dev) ++ ["test/support/core" | nx("test/support/nx")]

  defp elixirc_paths(_), do: ["lib/core" | nx("lib/nx") ++ axon("lib/axon") ++ exla("lib/exla")]

  defp nx(path), do: if(nx?(), do: [path], else: [])
  defp axon(path), do: if(nx?() and there?(:axon, "0.7.0"), do: [path], else: [])
  defp exla(path), do: if(nx?() and there?(:exla, "0.12.0"), do: [path], else: [])

  defp deps(false), do: []

  defp deps(true) do
    [
      {:nx, "~> 0.12", optional: true},
      {:exla, "~> 0.12", optional: true},
      {:axon, "~> 0.7", optional: true},
      {:benchee, "~> 1.3", only: [:dev, :test], runtime: false},
      {:ex_doc, "~> 0.34", only: :dev, runtime: false}
    ]
  end

  defp hex?, do: System.get_env("SIDEWINDER_OFFLINE") != "1" and Code.ensure_loaded?(Hex)

  # Nx 0.12 needs Elixir 1.17 itself.
  defp nx?, do: Version.match?(System.version(), ">= 1.17.0") and there?(:nx, "0.12.0")

  # What Hex has fetched may not be compiled yet.
  defp there?(app, least) do
    fetched = hex?() and File.dir?(Path.join(Mix.Project.deps_path(), Atom.to_string(app)))
    fetched or Version.match?(version(app) || "0.0.0", ">= #{least}")
  end

  defp version(app) do
    with dir when is_list(dir) <- :code.lib_dir(app),
         {:ok, [{:application, ^app, keys}]} <- :file.consult(Path.join(dir, "ebin/#{app}.app")) do
      List.to_string(keys[:vsn])
    else
      _ -> nil
    end
  end

  defp package do
    sources =
      ~w(lib native/Cargo.toml native/Cargo.lock native/kernels native/nif priv/models priv/samples)

    about = ~w(mix.exs .formatter.exs README.md CHANGELOG.md LICENSE)
    [licenses: ["Apache-2.0"], links: %{}, files: sources ++ about]
  end
end

defmodule Mix.Tasks.Compile.Sidewinder do
  @moduledoc """
  Puts the native library into the application's `priv` below the build path.

  The first of these that applies says where the library is from:

    * `SIDEWINDER_NATIVE` is the path of a library, or `none`: then only the slow pure Nx functions work.
    * `SIDEWINDER_BUILD=1`: cargo builds it, in `CARGO_TARGET_DIR` if that is set.
    * `SIDEWINDER_ARCHIVES` is a folder or a URL with archives of precompiled libraries.
    * A package brings the checksums of the archives of its release, and takes the archive from there.
    * A checkout has no checksums: cargo builds it.

  Nothing is written to where the sources are.
  """
  use Mix.Task.Compiler
  alias Sidewinder.Archive

  # mix.exs loads this file before its own module.
  @compile {:no_warn_undefined, Sidewinder.MixProject}

  @root Path.dirname(__DIR__)
  @sources ~w(native/Cargo.* native/*/Cargo.toml native/*/build.rs native/*/src/**)

  @impl true
  def run(args) do
    Sidewinder.MixProject.choose_layers()
    source = source()
    seen = seen(source)

    if "--force" in args or File.read(stamp()) != {:ok, seen} or gone?(source),
      do: build(source, seen),
      else: :noop
  end

  @impl true
  def manifests, do: [stamp()]

  @impl true
  def clean, do: Enum.each([library(), stamp()], &File.rm/1)

  defp library, do: Path.join(Mix.Project.app_path(), "priv/native/sidewinder_nif#{extension()}")
  defp extension, do: if(match?({:win32, _}, :os.type()), do: ".dll", else: ".so")
  defp stamp, do: Path.join(Mix.Project.manifest_path(), "compile.sidewinder")

  defp source do
    archives = set("SIDEWINDER_ARCHIVES")

    cond do
      path = set("SIDEWINDER_NATIVE") -> native(path)
      set("SIDEWINDER_BUILD") in ~w(1 true) -> :cargo
      archives -> {:archive, if(archives =~ "://", do: archives, else: from_project(archives))}
      File.exists?(checksums()) -> {:archive, Sidewinder.MixProject.release_url()}
      true -> :cargo
    end
  end

  defp set(name), do: with("" <- System.get_env(name, ""), do: nil)
  defp native("none"), do: :none
  defp native(path), do: {:file, from_project(path)}
  defp checksums, do: Path.join(@root, Archive.checksums())

  # A dependency is compiled in its own folder; paths are meant from that of the whole project.
  defp from_project(path) do
    Path.expand(path, Path.dirname(Path.expand(Mix.Project.config()[:lockfile])))
  end

  # Looking at the files' times is faster than asking cargo.
  defp seen(source) do
    stats =
      for path <- files(source),
          {:ok, stat} <- [File.stat(path)],
          do: {path, stat.mtime, stat.size}

    "#{inspect(source)} #{:erlang.phash2(stats)}"
  end

  defp files(:cargo), do: Enum.flat_map(@sources, &Path.wildcard(Path.expand(&1, @root)))
  defp files({:file, path}), do: [path]
  defp files({:archive, _base}), do: [checksums()]
  defp files(:none), do: []

  defp gone?(source), do: source != :none and not File.exists?(library())

  defp build(source, seen) do
    Sidewinder.MixProject.tell_packages()
    own_priv(Path.join(Mix.Project.app_path(), "priv"))
    File.mkdir_p!(Path.dirname(library()))
    put(source)
    File.mkdir_p!(Path.dirname(stamp()))
    File.write!(stamp(), seen)
  end

  defp put(:none), do: File.rm(library())
  defp put(:cargo), do: cargo(System.find_executable("cargo"))
  defp put({:file, path}), do: install(path, &File.cp(path, &1), &check_prebuilt!(path, &1))

  defp put({:archive, base}) do
    name = Archive.name(Mix.Project.config()[:version], Archive.target())

    case Archive.library(name, checksums(), base) do
      {:ok, library} -> install(name, &File.write(&1, library), &check_prebuilt!(name, &1))
      {:error, why} -> refuse(name, why)
    end
  end

  # Mix links `priv` to that of the sources, where other projects would find our library as well.
  # Where it finds a folder it copies into that.
  defp own_priv(priv) do
    if match?({:ok, _}, File.read_link(priv)), do: File.rm!(priv)
    File.mkdir_p!(priv)
    Mix.Project.build_structure()
  end

  defp cargo(nil),
    do:
      no_library(
        "Sidewinder's native library is written in Rust, and there is no cargo on this machine."
      )

  defp cargo(cargo) do
    args = ~w(build --release --locked --package sidewinder_nif)
    env = [{"CARGO_TARGET_DIR", target()}]
    output = [stderr_to_stdout: true, into: IO.stream(:stderr, :line)]

    case System.cmd(cargo, args, [cd: Path.join(@root, "native"), env: env] ++ output) do
      {_, 0} -> install(built(), &File.cp(built(), &1), & &1)
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
  defp built_name({:win32, _}), do: "sidewinder_nif.dll"
  defp built_name(_), do: "libsidewinder_nif.so"

  # By rename, for a running VM may have mapped the old file.
  defp install(from, put, check) do
    unfinished = "#{Path.rootname(library())}.#{System.pid()}#{extension()}"

    try do
      with {:error, reason} <- put.(unfinished), do: refuse(from, file_error(reason))
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

  defp refuse(path, why),
    do: no_library("Sidewinder's native library cannot be taken from #{path}: #{why}")

  defp no_library(why) do
    Mix.raise("""
    #{why}
    Either
      * set SIDEWINDER_BUILD=1 and install Rust 1.91 or later: then cargo builds the library,
      * set SIDEWINDER_ARCHIVES to a folder or a URL with the archives of this release,
      * set SIDEWINDER_NATIVE to the path of Sidewinder's library, built for this machine, or
      * set SIDEWINDER_NATIVE=none to do without it: then only the slow pure Nx functions work.
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

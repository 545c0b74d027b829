defmodule Sidewinder.PackageTest do
  # What a package holds, by the patterns of mix.exs.
  use ExUnit.Case, async: true

  @most_bytes 2_000_000

  # As Hex takes them: folders with all that is in them.
  defp files do
    patterns = Mix.Project.config()[:package][:files]
    found = patterns |> Enum.flat_map(&Path.wildcard(&1, match_dot: true))

    for path <- found,
        file <- [path | Path.wildcard(path <> "/**", match_dot: true)],
        File.regular?(file),
        do: file
  end

  test "it brings what compiling the library and the modules reads" do
    files = files()

    read =
      ~w(mix.exs mix/*.exs .formatter.exs lib/**/*.ex native/Cargo.* native/*/Cargo.toml native/*/build.rs
      native/*/src/**/*.{rs,cu})

    missing = Enum.flat_map(read, &Path.wildcard(&1, match_dot: true)) -- files
    assert missing == []

    for file <- ~w(README.md LICENSE CHANGELOG.md UPGRADE.md SECURITY.md),
        do: assert(file in files)

    # Cargo wants every crate of the workspace, and every target that a manifest names.
    for manifest <- Path.wildcard("native/*/Cargo.toml"),
        [_, path] <- Regex.scan(~r/^path = "(.+\.rs)"$/m, File.read!(manifest)),
        do: assert(Path.join(Path.dirname(manifest), path) in files)
  end

  test "it brings no tests, no test data and no model, and is small" do
    for file <- files(), unwanted <- ~w(test tests golden models bench/results examples/models) do
      refute "/#{Path.dirname(file)}/" =~ "/#{unwanted}/" and not (file =~ "native/models/"), file
    end

    assert compressed(files()) < @most_bytes
  end

  test "the entry of this version in CHANGELOG.md is the text of its release" do
    notes = &System.cmd(Path.expand("bin/release_notes"), [&1], stderr_to_stdout: true)
    {text, 0} = notes.(Mix.Project.config()[:version])
    assert text =~ ~r/\S/
    refute text =~ ~r/^##? /m
    assert notes.("0.0.0") == {"CHANGELOG.md has no entry for version 0.0.0\n", 1}
  end

  defp compressed(files) do
    path = Path.join(System.tmp_dir!(), "sidewinder-package-#{System.pid()}.tar.gz")
    :ok = :erl_tar.create(path, Enum.map(files, &String.to_charlist/1), [:compressed])
    File.stat!(path).size
  after
    File.rm(Path.join(System.tmp_dir!(), "sidewinder-package-#{System.pid()}.tar.gz"))
  end
end

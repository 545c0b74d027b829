files = ["{mix,.formatter}.exs", "mix/*.exs", "{config,lib,test,bench,examples}/**/*.{ex,exs}"]

# All but the file that is generated.
[inputs: Enum.flat_map(files, &Path.wildcard(&1, match_dot: true)) -- ["lib/core/op_table.ex"]]

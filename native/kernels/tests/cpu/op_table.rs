//! The table of ops for other languages.

#[path = "../common/op_table.rs"]
mod text;

#[test]
fn the_table_in_elixir_is_that_of_the_ops() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lib/core/op_table.ex");
    let written = std::fs::read_to_string(path).unwrap();
    assert!(written == text::text(), "lib/core/op_table.ex is not what the ops say: run bin/op_table");
}

//! Prints the ops' declarations as the Elixir module `lib/core/op_table.ex`.

#[path = "../tests/common/op_table.rs"]
mod op_table;

fn main() {
    print!("{}", op_table::text());
}

//! The ops' declarations as an Elixir module: `lib/core/op_table.ex`.

use serde_json::Value;
use sidewinder_kernels::op::{AnyOp, OptionInfo, Output, Range, Slot, Takes, When};
use sidewinder_kernels::ops::OPS;

const HEAD: &str = "defmodule Sidewinder.OpTable do
  @moduledoc false
  # Written by `bin/op_table` from the declarations of the ops in native/kernels: edit those.

  @doc \"All ops: what they take and give, and their options.\"
  def ops do
    [
";

/// The text of the module.
pub fn text() -> String {
    let ops: Vec<String> = OPS.iter().map(|&op| of_op(op)).collect();
    format!("{HEAD}{}\n    ]\n  end\nend\n", ops.join(",\n"))
}

fn of_op(op: &dyn AnyOp) -> String {
    let about = op.about();
    let defaults = serde_json::to_value(&*op.defaults()).expect("defaults that JSON has");
    let option = |one: &OptionInfo| option(one, &defaults[one.doc.name]);
    let fields = [
        format!("name: {}", quoted(about.name)),
        format!("about: {}", quoted(about.about)),
        format!("hint: {}", quoted(about.hint)),
        format!("inputs: {}", list(about.inputs.iter().map(input))),
        format!("outputs: {}", list(about.outputs.iter().map(output))),
        format!("options: {}", list(op.options().iter().map(option))),
        format!("storage: [{}]", words(about.storage.iter().map(|dtype| dtype.name()))),
        format!("cotangents: [{}]", words(about.cotangents.iter().copied())),
        format!("backward_of: {}", about.backward_of.map_or("nil".to_string(), quoted)),
    ];
    format!("      %{{\n        {}\n      }}", fields.join(",\n        "))
}

fn input(slot: &Slot) -> String {
    let Slot { name, shape, precision, optional, .. } = *slot;
    let [name, shape, precision] = [name, shape.words, precision.name()].map(quoted);
    format!("%{{name: {name}, shape: {shape}, precision: {precision}, optional: {optional}}}")
}

fn output(output: &Output) -> String {
    let Output { name, shape, precision, when } = *output;
    let [name, shape, precision] = [name, shape.words, precision.name()].map(quoted);
    let when = match when {
        When::Always => ":always".to_string(),
        When::Asked(option) => format!("{{:asked, :{option}}}"),
        When::Unless(option) => format!("{{:unless, :{option}}}"),
    };
    format!("%{{name: {name}, shape: {shape}, precision: {precision}, when: {when}}}")
}

fn option(option: &OptionInfo, by_default: &Value) -> String {
    let [name, takes, help] = [option.doc.name, option.takes.name(), option.doc.help].map(quoted);
    let default = default(by_default);
    let choices = words(option.takes.choices().iter().copied());
    let range = match (option.doc.range, option.takes) {
        (Range::any, Takes::Count) => Range::not_negative,
        (range, _) => range,
    };
    format!(
        "%{{name: {name}, takes: {takes}, choices: [{choices}], range: :{range:?}, default: {default}, help: {help}}}"
    )
}

fn default(value: &Value) -> String {
    match value {
        Value::Null => "nil".to_string(),
        Value::String(text) => quoted(text),
        // Elixir needs a fraction where Rust writes 1e-6.
        Value::Number(number) if number.is_f64() => {
            let text = format!("{:e}", number.as_f64().expect("a float"));
            let (digits, exponent) = text.split_once('e').expect("an exponent");
            let point = if digits.contains('.') { "" } else { ".0" };
            format!("{digits}{point}e{exponent}")
        }
        other => other.to_string(),
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.map(|item| format!("          {item}")).collect();
    if items.is_empty() { "[]".to_string() } else { format!("[\n{}\n        ]", items.join(",\n")) }
}

fn words<'w>(words: impl Iterator<Item = &'w str>) -> String {
    words.map(quoted).collect::<Vec<_>>().join(", ")
}

fn quoted(text: &str) -> String {
    format!("{text:?}").replace("#{", "\\#{")
}

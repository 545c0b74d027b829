//! Values of attributes, from which the options of ops are decoded.

use serde::de::value::{Error as SerdeError, MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{AnyOp, Configured};
use std::fmt::Display;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'f> {
    /// A boolean.
    Bool(bool),
    /// An integer.
    Integer(i64),
    /// A number.
    Float(f64),
    /// A text, such as the name of a choice.
    Text(&'f str),
    /// An array of numbers.
    List(Vec<Value<'f>>),
}

/// Decodes named values into a struct, which determines whether unknown names are errors.
pub fn decode<'f, T: DeserializeOwned>(
    what: &str,
    values: impl Iterator<Item = (&'f str, Value<'f>)> + Clone,
) -> Result<T> {
    T::deserialize(map(values.clone())).map_err(|e| wrong(what, values, e))
}

/// The op with named values as its options.
pub fn configure<'f>(op: &dyn AnyOp, values: impl Iterator<Item = (&'f str, Value<'f>)> + Clone) -> Result<Configured> {
    let mut erased = <dyn erased_serde::Deserializer>::erase(map(values.clone()));
    op.with(&mut erased).map_err(|e| wrong("attributes", values, e))
}

fn map<'f, I: Iterator<Item = (&'f str, Value<'f>)>>(values: I) -> MapDeserializer<'f, I, SerdeError> {
    MapDeserializer::new(values)
}

fn wrong<'f>(what: &str, values: impl Iterator<Item = (&'f str, Value<'f>)>, why: impl Display) -> Error {
    let got: Vec<String> = values.map(|(name, value)| format!("{name} = {value:?}")).collect();
    Error::new(Kind::Option, what)
        .expected("known names with values of their types")
        .got(format_args!("{} ({why})", got.join(", ")))
}

impl<'f> IntoDeserializer<'f, SerdeError> for Value<'f> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Value<'de> {
    type Error = SerdeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, SerdeError> {
        match self {
            Value::Bool(value) => visitor.visit_bool(value),
            Value::Integer(value) => visitor.visit_i64(value),
            Value::Float(value) => visitor.visit_f64(value),
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::List(values) => visitor.visit_seq(SeqDeserializer::new(values.into_iter())),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, SerdeError> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, SerdeError> {
        match self {
            Value::Text(text) => text.into_deserializer().deserialize_enum(name, variants, visitor),
            other => other.deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct seq
        tuple tuple_struct map struct identifier ignored_any
    }
}

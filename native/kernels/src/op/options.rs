//! Options of ops: one declaration for the struct, its defaults, its checks and its documentation.

use crate::error::{Error, Kind as ErrorKind, Result};
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde::{Serialize, forward_to_deserialize_any};
use std::any::Any;
use std::fmt;

/// The options of an op, as [`options!`](crate::options) declares them.
pub trait Options: DeserializeOwned + Serialize + Default + Clone + Send + Sync + 'static {
    /// The documentation of all options that callers can set.
    const DOCS: &'static [OptionDoc];

    /// Checks that the values are in their ranges.
    fn check(&self) -> Result<()>;
    /// The value of that name.
    fn value(&self, name: &str) -> Option<&dyn Any>;

    /// Whether the flag of that name is set.
    fn flag(&self, name: &str) -> bool {
        self.value(name).and_then(|value| value.downcast_ref()) == Some(&true)
    }
}

/// One option of an op, for its documentation and for the command line.
#[derive(Clone, Copy, Debug)]
pub struct OptionDoc {
    /// The name in maps; on the command line with dashes.
    pub name: &'static str,
    /// The range of its values.
    pub range: Range,
    /// What it does, in a line.
    pub help: &'static str,
}

/// The range of an option's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub enum Range {
    /// All values.
    any,
    /// Finite numbers above 0.
    positive,
    /// Finite numbers from 0 on.
    not_negative,
    /// Numbers up to 0, in the range of f32.
    not_positive,
    /// Numbers from 0 to 1.
    share,
}

impl Range {
    /// Checks a value; other types than numbers are always in range.
    pub fn check(self, name: &str, value: &dyn Any) -> Result<()> {
        let whole = || Some(*value.downcast_ref::<usize>()? as f64);
        let number =
            value.downcast_ref::<f64>().copied().or_else(|| *value.downcast_ref::<Option<f64>>()?).or_else(whole);
        let (expected, fits): (_, fn(f64) -> bool) = match self {
            Range::any => ("a number", |_| true),
            Range::positive => ("a positive number", |number| number > 0.0 && number.is_finite()),
            Range::not_negative => ("a finite number, not negative", |number| number >= 0.0 && number.is_finite()),
            Range::not_positive => {
                ("a finite number that is not positive", |number| (f64::from(f32::MIN)..=0.0).contains(&number))
            }
            Range::share => ("a number from 0 to 1", |number| (0.0..=1.0).contains(&number)),
        };
        match number.filter(|&number| !fits(number)) {
            Some(number) => Err(Error::new(ErrorKind::Option, name).expected(expected).got(number)),
            None => Ok(()),
        }
    }
}

/// Declares the options of an op: names, types, defaults, optional ranges, and a description as the doc comment, which
/// is the text of `--help`. Unknown names are errors when options are decoded. Fields after `internal` are set only by
/// ops that are made of the op, and are never decoded. `..NAME;` among the fields inserts those that
/// [`shared_options!`](crate::shared_options) declares under this name.
///
/// ```text
/// options! {
///     /// The options of the scan.
///     pub struct Options {
///         /// epsilon of the norm
///         eps: f64 = 1e-6, positive;
///         /// write last_state
///         return_state: bool = false;
///     }
/// }
/// ```
#[macro_export]
macro_rules! options {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[doc = $help:literal])+
            $field:ident $(as $shown:literal)?: $type:ty = $default:expr $(, $range:ident)?;)*
            $(internal { $($(#[doc = $own_help:literal])+ $own:ident: $own_type:ty = $own_default:expr;)* })?
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
        #[serde(default, deny_unknown_fields)]
        // The docs are also texts of `--help`, in which brackets are not links.
        #[allow(rustdoc::broken_intra_doc_links)]
        pub struct $name {
            $($(#[doc = $help])+ $(#[serde(rename = $shown)])? pub $field: $type,)*
            $($($(#[doc = $own_help])+ #[serde(skip)] pub $own: $own_type,)*)?
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default,)* $($($own: $own_default,)*)? }
            }
        }

        impl $crate::op::Options for $name {
            const DOCS: &'static [$crate::op::OptionDoc] = &[$($crate::op::OptionDoc {
                name: $crate::first!($($shown,)? stringify!($field)),
                range: $crate::range!($($range)?),
                help: concat!($($help),+).trim_ascii_start(),
            },)*];

            fn check(&self) -> $crate::error::Result<()> {
                $($crate::range!($($range)?).check($crate::first!($($shown,)? stringify!($field)), &self.$field)?;)*
                Ok(())
            }

            fn value(&self, name: &str) -> Option<&dyn std::any::Any> {
                let values: &[(&str, &dyn std::any::Any)] =
                    &[$(($crate::first!($($shown,)? stringify!($field)), &self.$field),)*];
                values.iter().find(|(own, _)| *own == name).map(|(_, value)| *value)
            }
        }
    };
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[doc = $help:literal])+
            $field:ident $(as $shown:literal)?: $type:ty = $default:expr $(, $range:ident)?;)*
            ..$shared:path;
            $($rest:tt)*
        }
    ) => {
        $shared! {
            [$(#[$about])* pub struct $name]
            [$($(#[doc = $help])+ $field $(as $shown)?: $type = $default $(, $range)?;)*]
            [$($rest)*]
        }
    };
}

/// Declares options that several ops share, to be inserted by [`options!`](crate::options). Their types are resolved
/// there, so they must be written as paths from `crate`.
///
/// ```text
/// shared_options! {
///     step {
///         /// apply softplus to dt + dt_bias
///         dt_softplus: bool = false;
///     }
/// }
/// ```
#[macro_export]
macro_rules! shared_options {
    ($($name:ident { $($fields:tt)* })+) => {
        $($crate::shared_options! { ($) $name { $($fields)* } })+
    };
    // The generated macro has variables of its own, so their `$` is passed in as `$d`.
    (($d:tt) $name:ident { $($fields:tt)* }) => {
        macro_rules! $name {
            ([$d($d head:tt)*] [$d($d before:tt)*] [$d($d after:tt)*]) => {
                $crate::options! { $d($d head)* { $d($d before)* $($fields)* $d($d after)* } }
            };
        }
        // The file that declares the options does not need the import.
        #[allow(unused_imports)]
        pub(crate) use $name;
    };
}

/// The first of its arguments.
#[doc(hidden)]
#[macro_export]
macro_rules! first {
    ($first:expr $(, $rest:expr)*) => {
        $first
    };
}

/// The declared range of an option, or that of all values.
#[doc(hidden)]
#[macro_export]
macro_rules! range {
    () => {
        $crate::op::Range::any
    };
    ($range:ident) => {
        $crate::op::Range::$range
    };
}

crate::options! {
    /// No options.
    pub struct NoOptions {}
}

/// The type of an option, which determines how it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A boolean.
    Flag,
    /// An integer.
    Integer,
    /// A non-negative integer.
    Count,
    /// A number.
    Float,
    /// Two numbers.
    Pair,
    /// One of these names.
    Text(&'static [&'static str]),
}

impl Takes {
    /// Its name in other languages.
    pub fn name(self) -> &'static str {
        match self {
            Takes::Flag => "flag",
            Takes::Integer | Takes::Count => "integer",
            Takes::Float => "float",
            Takes::Pair => "pair",
            Takes::Text(_) => "text",
        }
    }

    /// The names of a text option.
    pub fn choices(self) -> &'static [&'static str] {
        match self {
            Takes::Text(choices) => choices,
            _ => &[],
        }
    }
}

/// One option of an op, with its type.
#[derive(Clone, Debug)]
pub struct OptionInfo {
    /// Its name, range and documentation.
    pub doc: OptionDoc,
    /// The values that it takes.
    pub takes: Takes,
}

/// The options of an op.
pub(super) fn describe<O: Options>() -> Vec<OptionInfo> {
    O::DOCS.iter().map(|doc| OptionInfo { doc: *doc, takes: takes::<O>(doc.name) }).collect()
}

/// The kind of the field of that name: the kind that its type requests from a deserializer.
fn takes<O: DeserializeOwned>(name: &'static str) -> Takes {
    match O::deserialize(Field(name)) {
        Err(Probe(Some(takes))) => takes,
        _ => panic!("`{name}` has a type that no option has"),
    }
}

/// A deserializer of a struct with this one field.
struct Field(&'static str);

/// The error that ends the decoding; it holds the requested kind.
#[derive(Debug)]
struct Probe(Option<Takes>);

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for Probe {}

impl serde::de::Error for Probe {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Probe(None)
    }
}

impl<'de> Deserializer<'de> for Field {
    type Error = Probe;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, Probe> {
        visitor.visit_map(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Field {
    type Error = Probe;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> std::result::Result<Option<K::Value>, Probe> {
        seed.deserialize(StrDeserializer::new(self.0)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> std::result::Result<V::Value, Probe> {
        seed.deserialize(Asked)
    }
}

/// A deserializer that fails with the requested kind.
struct Asked;

macro_rules! tell {
    ($($method:ident => $takes:expr;)*) => {
        $(fn $method<V: Visitor<'de>>(self, _: V) -> std::result::Result<V::Value, Probe> {
            Err(Probe(Some($takes)))
        })*
    };
}

impl<'de> Deserializer<'de> for Asked {
    type Error = Probe;

    tell! {
        deserialize_bool => Takes::Flag;
        deserialize_i8 => Takes::Integer;
        deserialize_i16 => Takes::Integer;
        deserialize_i32 => Takes::Integer;
        deserialize_i64 => Takes::Integer;
        deserialize_u8 => Takes::Count;
        deserialize_u16 => Takes::Count;
        deserialize_u32 => Takes::Count;
        deserialize_u64 => Takes::Count;
        deserialize_f32 => Takes::Float;
        deserialize_f64 => Takes::Float;
        deserialize_str => Takes::Text(&[]);
        deserialize_string => Takes::Text(&[]);
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> std::result::Result<V::Value, Probe> {
        Err(Probe(None))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, Probe> {
        visitor.visit_some(self)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, _: V) -> std::result::Result<V::Value, Probe> {
        Err(Probe(Some(Takes::Pair)))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> std::result::Result<V::Value, Probe> {
        Err(Probe(Some(Takes::Text(variants))))
    }

    forward_to_deserialize_any! {
        char bytes byte_buf unit unit_struct newtype_struct seq tuple_struct map struct identifier ignored_any
    }
}

//! Reads strict TOML: typed values, and every mistake with its place.
//!
//! ```text
//! Source --Table::parse--> Table (values with places) --Reader--> typed values, or problems
//! ```
//!
//! A [`Reader`] has a getter for each type of value. A getter records a [`Problem`] if the written value is
//! wrong, so that one pass over a file finds all its mistakes. The keys that are asked for are the keys that
//! exist: [`Reader::finish`] reports all others.
//!
//! ```
//! use pipewright_document::{Reader, Table};
//!
//! let problems = Table::read("ranks = 0\nrnks = 8", 1 << 20, |table, problems| {
//!     let mut reader = Reader::new("the file", table, problems);
//!     let ranks = reader.count("ranks", 1..=64);
//!     reader.finish();
//!     ranks
//! });
//! let expected = "line 1, column 9: `ranks` is 0, where a whole number from 1 to 64 is expected; write a whole \
//!                 number from 1 to 64\nline 2, column 1: unknown key `rnks` in the file; did you mean `ranks`?";
//! assert_eq!(problems.unwrap_err().to_string(), expected);
//! ```

pub mod text;
mod place;
mod problem;
mod names;
mod bound;
mod value;
mod quantity;
mod reader;

pub use bound::Bound;
pub use names::{advice_for_unknown, nearest};
pub use place::{Place, Source, shortened};
pub use problem::{Problem, Problems};
pub use quantity::{Dimension, GIB, Measure};
pub use reader::Reader;
pub use value::{Entry, Table, Value};

//! The errors of reading training data, with the file and the place in it.

mod file;
mod format;
mod tokenizer;
mod token_place;
mod tokenized;
mod mix;
mod data;

pub use data::DataError;
pub use file::FileError;
pub use format::FormatError;
pub use mix::MixError;
pub use token_place::TokenPlace;
pub use tokenized::TokenizedError;
pub use tokenizer::TokenizerError;

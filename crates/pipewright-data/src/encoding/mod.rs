//! Texts and records as token ids.

pub(crate) mod record_content;
pub(crate) mod llama_tokenizer;
pub(crate) mod tokenizer_file;
pub(crate) mod tokenizer;
pub(crate) mod codec;
pub(crate) mod document_text;
pub(crate) mod example_text;

//! Chat templates, and the parts of a chat that count in the loss.

pub(crate) mod identity;
pub(crate) mod python_text;
pub(crate) mod json_text;
pub(crate) mod python_json;
pub(crate) mod special_tokens;
pub(crate) mod tokens;
pub(crate) mod tag;
pub(crate) mod source;
pub(crate) mod arguments;
pub(crate) mod limits;
pub(crate) mod text_methods;
pub(crate) mod operators;
pub(crate) mod filters;
pub(crate) mod value_tests;
pub(crate) mod message;
pub(crate) mod template;
pub(crate) mod anchors;
pub(crate) mod spans;
pub(crate) mod turns;

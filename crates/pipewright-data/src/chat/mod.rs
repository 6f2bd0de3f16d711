//! Chat templates, and the parts of a chat that count in the loss.

pub(crate) mod error;
pub(crate) mod identity;
pub(crate) mod python_json;
pub(crate) mod special_tokens;
pub(crate) mod template;
pub(crate) mod anchors;
pub(crate) mod spans;
pub(crate) mod turns;

//! Chat templates that are known by name, for models without one of their own.
//!
//! They write the formats that the models of these names document. `gpt_oss` and `qwen3` write tools and thoughts
//! too.

/// Returns the names of the known templates, for messages.
pub(crate) fn names() -> String {
    TEMPLATES.map(|(name, _)| name).join(", ")
}

/// The known templates, by name.
pub(crate) const TEMPLATES: [(&str, &str); 9] = [
    ("chatml", include_str!("templates/chatml.jinja")),
    ("gemma", include_str!("templates/gemma.jinja")),
    ("gpt_oss", include_str!("templates/gpt_oss.jinja")),
    ("llama2", include_str!("templates/llama2.jinja")),
    ("llama3", include_str!("templates/llama3.jinja")),
    ("mistral", include_str!("templates/mistral.jinja")),
    ("phi3", include_str!("templates/phi3.jinja")),
    ("qwen3", include_str!("templates/qwen3.jinja")),
    ("zephyr", include_str!("templates/zephyr.jinja")),
];

//! Makes a scratch folder with a configuration and a text to train on.

use std::fs;

use tempfile::TempDir;

/// Returns a configuration that trains very quickly. It ends with `[run]`, so that more keys of that section
/// may follow.
pub(crate) fn small(layers: u32, microbatches: u32, steps: u32) -> String {
    format!(
        "\
[model]
vocab_size = 128
hidden_size = 16
intermediate_size = 24
num_hidden_layers = {layers}
num_attention_heads = 2
[data]
path = \"text.txt\"
seq_len = 8
[pipeline]
microbatches = {microbatches}
[run]
steps = {steps}
out = \"out\"
"
    )
}

/// Makes a scratch folder with `text.txt` and with `config` as `small.toml`.
pub(crate) fn folder(config: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let text = "the quick brown fox jumps over the lazy dog and runs away from it ".repeat(4);
    for (name, content) in [("small.toml", config), ("text.txt", &text)] {
        fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
    }
    folder
}

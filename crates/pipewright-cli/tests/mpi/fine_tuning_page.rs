//! The commands of the page about fine-tuning on two machines work in their order, on a tiny model. The two
//! machines are this one.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use pipewright_book::markdown::{code_blocks, shell_lines};
use serde_json::json;
use tempfile::TempDir;

use super::turns::SharedTurn;
use super::{figures_of, pipewright, words};

/// A template of chats like the one of Qwen3: the last answer has a thought.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }} \
    {% if loop.last and message.role == 'assistant' %}<think> </think> {% endif %}{{ message.content }}<|im_end|>\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}";

/// Writes a tiny Qwen3 with a tokenizer and a template, under the name that the page uses.
fn write_model(folder: &Path) {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data/qwen3-tiny");
    let model = folder.join("Qwen3-0.6B");
    fs::create_dir(&model).expect("a folder");
    fs::copy(tiny.join("model.safetensors"), model.join("model.safetensors")).expect("the weights");
    let config = fs::read_to_string(tiny.join("config.json")).expect("a configuration");
    // The page's rows are longer than the tiny model's.
    let config = config.replace(r#""max_position_embeddings": 128"#, r#""max_position_embeddings": 512"#);
    fs::write(model.join("config.json"), config).expect("a configuration");
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [special(1, "<|im_start|>"), special(2, "<|im_end|>")],
        "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "<|im_start|>": 1, "<|im_end|>": 2, "user": 3, "assistant": 4, "port": 5, "9100": 6}},
    });
    fs::write(model.join("tokenizer.json"), tokenizer.to_string()).expect("a tokenizer");
    let settings = json!({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"});
    fs::write(model.join("tokenizer_config.json"), settings.to_string()).expect("its settings");
}

/// Writes the files of the page: its chats, its configuration with fewer steps, and a hostfile with this
/// machine for both.
fn write_files(folder: &Path, page: &str) {
    let block = |language: &str| {
        let mut blocks = code_blocks(page).into_iter();
        blocks.find(|block| block.language == language).expect(language).text
    };
    fs::write(folder.join("chats.jsonl"), block("json").repeat(8)).expect("chats");
    let mut config = block("toml");
    for (long, short) in [
        ("steps = 200", "steps = 4"),
        ("warmup_steps = 20", "warmup_steps = 2"),
        ("checkpoint_every = 50", "checkpoint_every = 2"),
    ] {
        assert!(config.contains(long), "`{long}`");
        config = config.replace(long, short);
    }
    fs::write(folder.join("qwen.toml"), config).expect("a configuration");
    fs::write(folder.join("hosts"), "localhost slots=2\n").expect("a hostfile");
}

/// Returns a shell that runs a line of the page.
fn shell(folder: &Path, line: &str) -> Command {
    let programs = pipewright().parent().expect("a folder").display();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    command.current_dir(folder).args(["-c", line]).env("PATH", format!("{programs}:{path}"));
    command.env("OMPI_MCA_orte_tmpdir_base", folder).env("MPIEXEC_TIMEOUT", "150").stdin(Stdio::null());
    command
}

#[test]
fn the_commands_of_the_page_work() {
    let _turn = SharedTurn::begin();
    let folder = TempDir::new().expect("a scratch folder");
    let path = pipewright_book::root().join("docs/fine-tuning.md");
    let page = fs::read_to_string(path).expect("the page");
    write_model(folder.path());
    write_files(folder.path(), &page);
    let lines = shell_lines(&page);
    let commands: Vec<&str> =
        lines.iter().map(|line| line.text.as_str()).filter(|line| line.starts_with("pipewright ")).collect();
    assert_eq!(commands.len(), 9, "{commands:?}");
    for command in commands {
        // The tiny run ends after fewer steps than the page's.
        let command = command.replace("run.steps=300", "run.steps=6");
        let output = shell(folder.path(), &command).output().expect("sh is everywhere");
        assert_eq!(output.status.code(), Some(0), "{command}: {}", words(&output));
    }
    assert_eq!(figures_of(&folder.path().join("runs/qwen")).len(), 6);
    for file in ["report.html", "qwen-adapter/adapter_model.safetensors", "qwen-tuned/model.safetensors"] {
        assert!(folder.path().join(file).exists(), "{file}");
    }
}

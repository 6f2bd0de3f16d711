//! Adapters that are trained on chats: the rows, the masks and the losses of TRL's collator with PEFT and
//! transformers.

use std::fs;
use std::path::Path;

use pipewright::train::data::{ChatTemplate, DataConfig, IGNORED_TARGET, LongRecords, Tokenizer, TrainOn};
use serde_json::Value;

use super::command_line::reference;
use crate::run::{Run, numbers};

fn expected() -> Value {
    let expected = fs::read_to_string(reference("chat-lora/expected.json")).expect("the reference");
    serde_json::from_str(&expected).expect("JSON")
}

fn ids(list: &Value) -> Vec<i32> {
    list.as_array().expect("a list").iter().map(|id| id.as_i64().expect("an id") as i32).collect()
}

/// Compares the inputs and targets of each chat with the rows of the reference, whose labels are at the
/// places of the tokens themselves. The rest of a row does not count.
fn check_rows(name: &str, tokenizer: Tokenizer, chat_template: Option<ChatTemplate>) {
    let expected = expected();
    let rows = expected[name]["rows"].as_array().expect("the rows");
    let config = DataConfig {
        path: vec![reference("chat-lora/chats.jsonl")],
        tokenizer,
        chat_template,
        train_on: Some(TrainOn::Assistant),
        long_records: LongRecords::Cut,
        seq_len: 127,
        shuffle: false,
        ..DataConfig::default()
    };
    let mut found = config.open(256, 8).expect("the chats are read");
    assert_eq!(found.rows(), rows.len());
    for (index, row) in rows.iter().enumerate() {
        let batch = found.next_batch(1).expect("a row");
        let (ids, labels) = (ids(&row["ids"]), ids(&row["labels"]));
        let count = ids.len() - 1;
        assert_eq!(batch.inputs[..count], ids[..count], "{name}, chat {index}");
        assert_eq!(batch.targets[..count], labels[1..], "{name}, chat {index}");
        assert!(batch.targets[count..].iter().all(|&target| target == IGNORED_TARGET));
    }
}

/// Trains on two ranks for all steps of the reference, and compares losses and gradient norms.
fn check_losses(name: &str, data: &str) {
    let folder = Run::empty();
    let (base, adapter) = (reference("qwen3-tiny"), reference("lora/qwen3-tiny"));
    let config = format!(
        "[model]\nfrom = \"{base}\"\n[adapter]\nkind = \"lora\"\npath = \"{adapter}\"\n[data]\npath = \"{}\"\n{data}\n\
         train_on = \"assistant\"\nlong_records = \"cut\"\nseq_len = 127\nshuffle = false\n[pipeline]\nranks = 2\nmicrobatches = 8\n\
         [optimizer]\nlearning_rate = 5e-3\n[run]\nsteps = 30\nout = \"out\"\n",
        reference("chat-lora/chats.jsonl")
    );
    folder.write("small.toml", config);
    folder.train(&[]);
    let found = folder.losses();
    let expected = expected();
    let steps = numbers(expected[name]["steps"].as_array().expect("the steps"));
    assert_eq!((found.len(), steps.len()), (30, 30));
    for (step, (found, expected)) in found.iter().zip(&steps).enumerate() {
        for (key, tolerance) in [(0, 5e-6), (1, 5e-5)] {
            let [found, expected] = [found[key], expected[key]];
            let error = ((found - expected) / expected).abs();
            assert!(error <= tolerance, "{name}, step {step}, {key}: {found} for {expected}");
        }
    }
}

#[test]
fn bytes_of_chats_train_as_with_trl_and_peft() {
    let template = reference("chat-lora/chat_template.jinja");
    check_rows("bytes", Tokenizer::Bytes, Some(ChatTemplate::File(Path::new(&template).into())));
    check_losses("bytes", &format!("tokenizer = \"bytes\"\nchat_template = \"{template}\""));
}

/// The template is next to the tokenizer.
#[cfg(feature = "tokenizers")]
#[test]
fn tokens_of_chats_train_as_with_trl_and_peft() {
    let tokenizer = reference("chat-lora/tokenizer.json");
    check_rows("merges", Tokenizer::File(Path::new(&tokenizer).into()), None);
    check_losses("merges", &format!("tokenizer = \"{tokenizer}\""));
}

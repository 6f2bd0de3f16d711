//! Files of token ids through the command line: a run has the same losses as one that reads the files
//! directly, and a file that does not fit is refused.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use super::command_line::{folder, run_in, succeed, text};
#[cfg(unix)]
use crate::run::{self, Run};

fn refused(folder: &TempDir, arguments: &[&str], part: &str) {
    let output = run_in(folder.path(), arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(part), "{said}\nhas not: {part}");
}

/// Trains with overrides. Returns the losses and gradient norms as they are written.
fn train(folder: &TempDir, set: &[&str]) -> Vec<[String; 2]> {
    let set = set.iter().flat_map(|set| ["--set", set]);
    let _ = fs::remove_dir_all(folder.path().join("out"));
    succeed(folder, &["train", "small.toml"].into_iter().chain(set).collect::<Vec<_>>());
    figures(folder)
}

/// Returns the losses and gradient norms of the run in the folder.
fn figures(folder: &TempDir) -> Vec<[String; 2]> {
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("the metrics");
    let step = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        ["loss", "grad_norm"].map(|key| line[key].to_string())
    };
    metrics.lines().map(step).collect()
}

const PWTOK: &str = "data.path=text.pwtok";

#[test]
fn a_run_has_the_losses_of_the_files_to_the_bit() {
    let folder = folder();
    let output = run_in(folder.path(), &["tokenize", "text.txt", "--tokenizer", "bytes", "-o", "text.pwtok"]);
    // Standard error is not a terminal, so there is no progress bar.
    let said = "text.pwtok: 264 tokens, 1 byte each, from 1 file of text\n";
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), said));
    assert_eq!(text(&output.stdout), "");
    let ways: &[&[&str]] = &[&[], &["data.shuffle=false", "pipeline.ranks=1"], &["mesh.data_parallel=2"]];
    for set in ways {
        assert_eq!(train(&folder, &[set, &[PWTOK][..]].concat()), train(&folder, set), "{set:?}");
    }
    let summary = succeed(&folder, &["check", "small.toml", "--set", PWTOK]);
    assert!(summary.contains("from 1 file of token ids of `pipewright tokenize`"), "{summary}");
    let shown =
        succeed(&folder, &["data", "show", "text.pwtok", "--rows", "1", "--set", "data.shuffle=false"]);
    assert!(shown.contains("the quick brown fox"), "{shown}");
    let tokenizer = folder.path().join("tokenizer.json");
    fs::write(&tokenizer, "{}").expect("the scratch folder takes files");
    let part = "text.pwtok: the file was made with another `tokenizer` (bytes) than [data] has (";
    refused(&folder, &["data", "show", "text.pwtok", "--tokenizer", "."], part);
    let bytes =
        ["data", "show", "text.pwtok", "--tokenizer", "bytes", "--set", "data.tokenizer=tokenizer.json"];
    refused(&folder, &bytes, part);
}

#[test]
fn chats_have_the_losses_of_the_files_to_the_bit_and_a_run_resumes() {
    let folder = folder();
    let chat = |question: &str, answer: &str| {
        let message = |role, content| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
        format!("{{\"messages\": [{}, {}]}}\n", message("user", question), message("assistant", answer))
    };
    let lines: String =
        (0..32).map(|n| chat(&format!("what is {n}"), &"a number ".repeat(n % 4 + 1))).collect();
    fs::write(folder.path().join("chats.jsonl"), lines).expect("the scratch folder takes files");
    let template = "data.chat_template=chatml";
    let common = [template, "data.seq_len=160", "data.packed=true", "run.checkpoint_every=1"];
    let direct = [&common[..], &["data.path=chats.jsonl"]].concat();
    let arguments = ["tokenize", "chats.jsonl", "--tokenizer", "bytes", "--chat-template", "chatml"];
    succeed(&folder, &[&arguments[..], &["-o", "chats.pwtok"]].concat());
    let tokenized = [&common[..], &["data.path=chats.pwtok"]].concat();
    let expected = train(&folder, &direct);
    assert_eq!(train(&folder, &tokenized), expected);
    // The data is the same, so a run of one resumes with the other, and under another mesh.
    let path = format!("data.path=[\"{}\"]", folder.path().join("chats.jsonl").display());
    fs::remove_dir_all(folder.path().join("out/checkpoints/step-00000003")).expect("the last checkpoint");
    succeed(&folder, &["resume", "out", "--set", &path, "--set", "pipeline.ranks=1"]);
    let resumed = figures(&folder);
    assert_eq!(resumed, expected);
}

#[test]
fn the_file_has_the_targets_of_train_on() {
    let folder = folder();
    let records = "{\"prompt\": \"to be \", \"completion\": \"or not\"}\n".repeat(8);
    fs::write(folder.path().join("records.jsonl"), records).expect("the scratch folder takes files");
    let tokenize = ["tokenize", "records.jsonl", "--tokenizer", "bytes", "-o", "a.pwtok", "--train-on"];
    let check = ["check", "small.toml", "--set", "data.path=a.pwtok", "--set"];
    for (own, other) in [("all", "assistant"), ("assistant", "completion"), ("completion", "all")] {
        succeed(&folder, &[&tokenize[..], &[own]].concat());
        let part = format!("another `train_on` ({own}) than [data] has ({other})");
        refused(&folder, &[&check[..], &[&format!("data.train_on={other}")]].concat(), &part);
    }
    refused(
        &folder,
        &[&tokenize[..], &["answers"]].concat(),
        "[possible values: all, assistant, completion]",
    );
}

#[test]
fn a_file_that_cannot_be_made_is_refused() {
    let folder = folder();
    fs::create_dir(folder.path().join("there.pwtok")).expect("the scratch folder takes folders");
    let tokenize = |data: &str, output: &str, part: &str| {
        refused(&folder, &["tokenize", data, "--tokenizer", "bytes", "-o", output], part);
    };
    tokenize("text.txt", "there.pwtok", "there.pwtok: this is a folder; name a file to write");
    tokenize("text.txt", "text.bin", "must end in `.pwtok`");
    succeed(&folder, &["tokenize", "text.txt", "--tokenizer", "bytes", "-o", "text.pwtok"]);
    tokenize("text.pwtok", "again.pwtok", "give it to a run alone");
    assert!(!folder.path().join("again.pwtok").exists());
}

#[test]
fn a_file_that_does_not_fit_is_refused() {
    let folder = folder();
    succeed(&folder, &["tokenize", "text.txt", "--tokenizer", "bytes", "-o", "text.pwtok"]);
    let check = |set: &[&str], part: &str| {
        let set = set.iter().flat_map(|set| ["--set", set]);
        let arguments = ["check", "small.toml", "--set", PWTOK];
        refused(&folder, &arguments.into_iter().chain(set).collect::<Vec<_>>(), part);
    };
    check(&["model.vocab_size=121"], "text.pwtok: token 37: token id 122 lies beyond the vocabulary of 121");
    check(
        &["data.bos_id=3"],
        "text.pwtok: the file was made with another `bos_id` (none) than [data] has (3)",
    );
    check(&["data.path=[\"text.pwtok\", \"text.txt\"]"], "is the only file of its data");
    let tokenizer = folder.path().join("tokenizer.json");
    fs::write(&tokenizer, "{}").expect("the scratch folder takes files");
    check(
        &["data.tokenizer=tokenizer.json"],
        "the file was made with another `tokenizer` (bytes) than [data] has (",
    );
    let file = folder.path().join("text.pwtok");
    let bytes = fs::read(&file).expect("the file");
    fs::write(&file, &bytes[..bytes.len() - 9]).expect("the scratch folder takes files");
    check(&[], "text.pwtok: the file has 4383 bytes, and its header says 4392; copy the file or tokenize");
}

#[test]
fn arguments_that_cannot_be_used() {
    let folder = folder();
    let tokenize = |rest: &[&str], part: &str| {
        refused(&folder, &[&["tokenize", "text.txt", "--tokenizer"][..], rest].concat(), part);
        let left = fs::read_dir(folder.path()).expect("the folder").filter_map(Result::ok);
        let mut left = left.map(|file| file.file_name()).filter(|name| !is_given(Path::new(name)));
        assert_eq!(left.next(), None);
    };
    tokenize(&["bytes", "-o", "text.bin"], "text.bin: the name of the file must end in `.pwtok`");
    tokenize(&["bytes", "-o", "no/text.pwtok"], "no/text.pwtok: cannot be written");
    tokenize(&["bytes", "-o", "t.pwtok", "--key", "body"], "--key body: not the new name of a key");
    tokenize(&["no/tokenizer.json", "-o", "t.pwtok"], "no/tokenizer.json");
}

#[test]
fn the_id_that_begins_documents_need_not_be_one_of_the_tokenizer() {
    let folder = folder();
    let arguments = ["tokenize", "text.txt", "--tokenizer", "bytes", "--bos-id", "256", "-o", "text.pwtok"];
    succeed(&folder, &arguments);
    let set = ["data.bos_id=256", "model.vocab_size=257", "run.checkpoint_every=1"];
    let expected = train(&folder, &set);
    assert_eq!(train(&folder, &[&set[..], &[PWTOK]].concat()), expected);
}

/// A process that gets a signal while it tokenizes stops, with the exit code of an interrupted run.
#[test]
#[cfg(unix)]
fn a_signal_stops_the_work_and_leaves_no_file() {
    let run = Run::new();
    let lines = format!("{{\"text\": \"{}\"}}\n", "to be or not to be ".repeat(50)).repeat(1000);
    fs::write(run.path("0.jsonl"), lines).expect("the scratch folder takes files");
    // The files share their content, so that there is much to read and little on the disk.
    for number in 1..400 {
        fs::hard_link(run.path("0.jsonl"), run.path(&format!("{number}.jsonl"))).expect("a link");
    }
    for signal in ["INT", "TERM"] {
        let mut child = run.start("tokenize", &["*.jsonl", "--tokenizer", "bytes", "-o", "a.pwtok"], &[]);
        let unfinished = run.path(&format!("a.pwtok.{}.tmp", child.id()));
        while !unfinished.exists() {
            assert_eq!(child.try_wait().expect("the process is ours"), None);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        run::signal(&child, signal);
        assert_eq!(child.wait().expect("the process is ours").code(), Some(5));
        assert!(!unfinished.exists() && !run.path("a.pwtok").exists());
    }
}

/// Returns whether the scratch folder has this file from the beginning.
fn is_given(name: &Path) -> bool {
    ["small.toml", "text.txt"].iter().any(|given| Path::new(given) == name)
}

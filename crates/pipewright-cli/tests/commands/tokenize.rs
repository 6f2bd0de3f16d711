//! Files of token ids through the command line: a run has the same losses as one that reads the files
//! directly, and a file that does not fit is refused.

use std::fs;
use std::path::Path;

use super::command_line::folder;
use crate::run::{self, Figures, Run};

/// Trains with overrides. Returns the losses and gradient norms as they are written.
fn train(folder: &Run, set: &[&str]) -> Vec<Figures> {
    let _ = fs::remove_dir_all(folder.out());
    folder.train(set);
    folder.figures()
}

const PWTOK: &str = "data.path=text.pwtok";

#[test]
fn a_run_has_the_losses_of_the_files_to_the_bit() {
    let folder = folder();
    let printed = folder.succeed(&["tokenize", "text.txt", "--tokenizer", "bytes", "-o", "text.pwtok"], &[]);
    // Standard error is not a terminal, so there is no progress bar.
    let said = "text.pwtok: 264 tokens, 1 byte each, from 1 file of text\n";
    assert_eq!(printed, (String::new(), said.to_owned()));
    let ways: &[&[&str]] = &[&[], &["data.shuffle=false", "pipeline.ranks=1"], &["mesh.data_parallel=2"]];
    for set in ways {
        assert_eq!(train(&folder, &[set, &[PWTOK][..]].concat()), train(&folder, set), "{set:?}");
    }
    let summary = folder.print(&["check", "small.toml", "--set", PWTOK]);
    assert!(summary.contains("from 1 file of token ids of `pipewright tokenize`"), "{summary}");
    let shown = folder.print(&["data", "show", "text.pwtok", "--rows", "1", "--set", "data.shuffle=false"]);
    assert!(shown.contains("the quick brown fox"), "{shown}");
    folder.write("tokenizer.json", "{}");
    let part = "text.pwtok: the file was made with another `tokenizer` (bytes) than [data] has (";
    folder.refuse(&["data", "show", "text.pwtok", "--tokenizer", "."], &[], part);
    let bytes = ["data", "show", "text.pwtok", "--tokenizer", "bytes"];
    folder.refuse(&bytes, &["data.tokenizer=tokenizer.json"], part);
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
    folder.write("chats.jsonl", lines);
    let template = "data.chat_template=chatml";
    let common = [template, "data.seq_len=160", "data.packed=true", "run.checkpoint_every=1"];
    let direct = [&common[..], &["data.path=chats.jsonl"]].concat();
    let arguments = ["tokenize", "chats.jsonl", "--tokenizer", "bytes", "--chat-template", "chatml"];
    folder.print(&[&arguments[..], &["-o", "chats.pwtok"]].concat());
    let tokenized = [&common[..], &["data.path=chats.pwtok"]].concat();
    let expected = train(&folder, &direct);
    assert_eq!(train(&folder, &tokenized), expected);
    // The data is the same, so a run of one resumes with the other, and under another mesh.
    let path = format!("data.path=[\"{}\"]", folder.path("chats.jsonl").display());
    fs::remove_dir_all(folder.path("out/checkpoints/step-00000003")).expect("the last checkpoint");
    folder.resume(&[&path, "pipeline.ranks=1"]);
    assert_eq!(folder.figures(), expected);
}

#[test]
fn the_file_has_the_targets_of_train_on() {
    let folder = folder();
    let records = "{\"prompt\": \"to be \", \"completion\": \"or not\"}\n".repeat(8);
    folder.write("records.jsonl", records);
    let tokenize = ["tokenize", "records.jsonl", "--tokenizer", "bytes", "-o", "a.pwtok", "--train-on"];
    for (own, other) in [("all", "assistant"), ("assistant", "completion"), ("completion", "all")] {
        folder.print(&[&tokenize[..], &[own]].concat());
        let part = format!("another `train_on` ({own}) than [data] has ({other})");
        let set = ["data.path=a.pwtok", &format!("data.train_on={other}")];
        folder.refuse(&["check", "small.toml"], &set, &part);
    }
    folder.refuse(
        &[&tokenize[..], &["answers"]].concat(),
        &[],
        "[possible values: all, assistant, completion]",
    );
}

#[test]
fn a_file_that_cannot_be_made_is_refused() {
    let folder = folder();
    fs::create_dir(folder.path("there.pwtok")).expect("the scratch folder takes folders");
    let tokenize = |data: &str, output: &str, part: &str| {
        folder.refuse(&["tokenize", data, "--tokenizer", "bytes", "-o", output], &[], part);
    };
    tokenize("text.txt", "there.pwtok", "there.pwtok: this is a folder; name a file to write");
    tokenize("text.txt", "text.bin", "must end in `.pwtok`");
    folder.print(&["tokenize", "text.txt", "--tokenizer", "bytes", "-o", "text.pwtok"]);
    tokenize("text.pwtok", "again.pwtok", "give it to a run alone");
    assert!(!folder.path("again.pwtok").exists());
}

#[test]
fn a_file_that_does_not_fit_is_refused() {
    let folder = folder();
    folder.print(&["tokenize", "text.txt", "--tokenizer", "bytes", "-o", "text.pwtok"]);
    folder.write("tokenizer.json", "{}");
    for (set, part) in [
        ("model.vocab_size=121", "text.pwtok: token 37: token id 122 lies beyond the vocabulary of 121"),
        ("data.bos_id=3", "text.pwtok: the file was made with another `bos_id` (none) than [data] has (3)"),
        (
            "data.tokenizer=tokenizer.json",
            "the file was made with another `tokenizer` (bytes) than [data] has (",
        ),
    ] {
        folder.refuse(&["check", "small.toml"], &[PWTOK, set], part);
    }
}

#[test]
fn arguments_that_cannot_be_used() {
    let folder = folder();
    let tokenize = |rest: &[&str], part: &str| {
        folder.refuse(&[&["tokenize", "text.txt", "--tokenizer"], rest].concat(), &[], part);
        let left = fs::read_dir(folder.root()).expect("the folder").filter_map(Result::ok);
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
    folder.print(&arguments);
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
    run.write("0.jsonl", lines);
    // The files share their content, so that there is much to read and little on the disk.
    for number in 1..400 {
        fs::hard_link(run.path("0.jsonl"), run.path(&format!("{number}.jsonl"))).expect("a link");
    }
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
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

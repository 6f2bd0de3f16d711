//! Tests of the command line for scripts and people: where output is written, exit codes, and the texts of
//! errors.

use std::fs;
use std::path::Path;

use crate::run::{Run, finished};
use crate::scratch;

pub(super) fn small() -> String {
    scratch::small(2, 2, 3)
}

pub(super) fn folder() -> Run {
    Run::of(&small())
}

/// Returns a file or a folder of the references of the models.
pub(super) fn reference(name: &str) -> String {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
    data.join(name).display().to_string()
}

/// Runs a command that fails with `code`, and compares the lines of its standard error that start an error or
/// its help.
pub(super) fn fail(folder: &Run, arguments: &[&str], code: i32, expected: &[&str]) {
    let (found, _, said) = folder.call(arguments, &[]);
    let said = said.replace(&format!("{}/", folder.root().display()), "");
    assert_eq!(found, Some(code), "{arguments:?}: {said}");
    let is_first = |line: &&str| line.starts_with("error:") || line.trim_start().starts_with("help:");
    assert_eq!(said.lines().filter(is_first).map(str::trim).collect::<Vec<_>>(), expected, "{arguments:?}");
    assert!(!said.contains('\u{1b}'), "colour where there is no terminal: {said:?}");
}

/// Checks `small.toml` with one override, which is refused with one sentence and optional help.
pub(super) fn refuse(argument: &str, expected: &[&str]) {
    fail(&folder(), &["check", "small.toml", "--set", argument], 2, expected);
}

#[test]
fn a_misspelt_key_is_shown_where_it_stands() {
    let folder = folder();
    folder.write("bad.toml", small().replace("microbatches", "mikrobatches"));
    let (code, _, said) = folder.call(&["check", "bad.toml"], &[]);
    let expected = "\
error: bad.toml:11:1: unknown key `mikrobatches` in [pipeline]
    ,-[11:1]
 10 | [pipeline]
 11 | mikrobatches = 2
    : ^^^^^^^^^^^^
 12 | [run]
    `----
  help: did you mean `microbatches`?
";
    assert_eq!((code, said.as_str()), (Some(2), expected));
}

#[test]
fn all_mistakes_of_a_configuration_are_reported() {
    let folder = folder();
    folder.write("bad.toml", "[run]\nsteps = 0\n[pipeline]\nranks = \"two\"\n");
    fail(
        &folder,
        &["check", "bad.toml", "--set", "data.seqlen=8", "--set", "data.path=text.txt"],
        2,
        &[
            "error: --set data.seqlen=8: unknown key `seqlen` in [data]",
            "help: did you mean `seq_len`?",
            "error: bad.toml:4:9: `ranks` is a text, where a whole number is expected",
            "help: write a whole number",
            "error: bad.toml:2:9: `steps` is 0, where a whole number from 1 to 9223372036854775807 is expected",
            "help: write a whole number from 1 to 9223372036854775807",
        ],
    );
}

#[test]
fn missing_configurations() {
    let expected = "error: none.toml: cannot read the configuration: No such file or directory (os error 2)";
    fail(&folder(), &["train", "none.toml"], 2, &[expected]);
    let expected = "error: none.toml: cannot read the profile: No such file or directory (os error 2)";
    for arguments in [
        &["plan", "--profile", "none.toml", "--ranks", "2", "--microbatches", "4"][..],
        &["plan", "small.toml", "--profile", "none.toml"],
        &["simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--profile", "none.toml"],
    ] {
        fail(&folder(), arguments, 2, &[expected]);
    }
}

#[test]
fn the_sample_needs_no_files() {
    let folder = Run::empty();
    folder.print(&["train", "--set", "run.steps=2"]);
    let config = folder.read("runs/sample/config.toml");
    assert!(config.contains("path = [\"built-in\"]\n"), "{config}");
    folder.print(&["resume", "runs/sample", "--set", "run.steps=3"]);
}

/// The crate that reads data tests every kind of fault.
#[test]
fn faults_of_the_data_reach_the_user_with_their_place() {
    let folder = folder();
    folder.write("rows.jsonl", "[1,2,3,4,5,6,7,8,9]\n[1,2,3]\n");
    for (path, message) in [
        ("none.txt", "none.txt: there is no such data file; check the path"),
        (
            "rows.jsonl",
            "rows.jsonl:2: the row holds 3 ids, and seq_len 8 takes 9; correct the row or seq_len",
        ),
    ] {
        let argument = format!("data.path={path}");
        fail(&folder, &["check", "small.toml", "--set", &argument], 2, &[&format!("error: {message}")]);
    }
}

#[test]
fn an_output_folder_that_cannot_be_written() {
    refuse("run.out=text.txt/out", &["error: text.txt: not a folder; choose another run.out"]);
    let folder = folder();
    fs::create_dir(folder.path("out")).expect("a folder");
    folder.write("out/config.toml", "mine");
    let message = "error: out/config.toml: the file does not belong to an earlier run and would be overwritten; \
                   choose another run.out";
    fail(&folder, &["train", "small.toml"], 2, &[message]);
    assert_eq!(fs::read_to_string(folder.path("out/config.toml")).ok().as_deref(), Some("mine"));
}

/// `mpirun` passes the names to `ssh`, which would take this one for an option.
#[test]
fn a_host_that_would_be_an_option_of_ssh_is_refused() {
    let folder = folder();
    folder.write("hosts", "node1 slots=2\n-oProxyCommand=touch${IFS}out\n");
    let message = "error: hosts:2: `-oProxyCommand=touch${IFS}out` is not the name of a host: a name has letters, digits, `.`, \
                   `-` and `_`, and begins with a letter, a digit or `_`";
    fail(&folder, &["launch", "--hosts", "hosts", "--", "train", "small.toml"], 2, &[message]);
}

#[test]
fn an_earlier_run_with_files_of_the_user_stays_where_it_is() {
    let folder = folder();
    fs::create_dir_all(folder.path("out/.git")).expect("a folder");
    folder.write("out/metrics.jsonl", "{\"step\":1}\n");
    folder.write("out/notes.txt", "mine");
    let message = "error: out: the folder of the earlier run also has `.git/` and `notes.txt`, which no run has written, so \
                   the folder is not moved aside; move what is yours to another place, or choose another run.out";
    for command in ["train", "check"] {
        fail(&folder, &[command, "small.toml"], 2, &[message]);
    }
    assert!(folder.path("out/notes.txt").exists() && !folder.path("out.1").exists());
}

#[test]
fn check_tells_what_would_run_and_leaves_no_trace() {
    let folder = folder();
    let expected = "\
model     4 layers, 8528 parameters
stage 0   on rank 0: layers 0 to 2 (1 embedding, 2 decoder), 6464 parameters
stage 1   on rank 1: layers 3 to 3 (1 head), 2064 parameters
cut       optimal: the heaviest stage has 53.7% of the work; with `pipeline.partition = \"blocks\"` 72.4%
schedule  1f1b: 2 ranks, 2 microbatches, proved sound
data      264 tokens, 32 rows, 16 steps of 2 rows an epoch
data      from 1 file of text
";
    let found = folder.print(&["check", "small.toml"]);
    let (summary, run) = found.split_at(found.find("run ").expect("a line on the run"));
    assert_eq!(summary, expected);
    assert!(run.starts_with("run       3 steps, results in /"), "{run}");
    let line =
        "a total includes the gradients inside a backward; messages of a step are not included\nmachine ";
    assert!(run.contains(line), "{run}");
    assert!(!folder.path("out").exists());
    let blocks = folder.print(&["check", "small.toml", "--set", "pipeline.partition=blocks"]);
    let words = "\
stage 0   on rank 0: layers 0 to 1 (1 embedding, 1 decoder), 4256 parameters
stage 1   on rank 1: layers 2 to 3 (1 decoder, 1 head), 4272 parameters
cut       blocks: the heaviest stage has 72.4% of the work; with `pipeline.partition = \"optimal\"` 53.7%
";
    assert!(blocks.contains(words), "{blocks}");
    let json = folder.print(&["check", "small.toml", "--format", "json", "--set", "pipeline.ranks=3"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("an object");
    assert_eq!(json["cuts"].as_array().map(Vec::len), Some(1), "2 blocks cannot fill 3 stages: {json}");
}

#[test]
fn check_counts_what_a_family_and_tied_embeddings_change() {
    let folder = folder();
    let check = |argument: &str, words: &str| {
        let found = folder.print(&["check", "small.toml", "--set", argument]);
        assert_eq!(found.lines().next(), Some(format!("model     4 layers, {words}").as_str()), "{argument}");
    };
    check("model.tie_word_embeddings=true", "6480 parameters");
    check("model.architecture=qwen2", "8624 parameters");
    check("model.architecture=qwen3", "8560 parameters");
}

#[test]
fn init_writes_a_configuration_once() {
    let folder = folder();
    folder.print(&["init"]);
    folder.print(&["check", "pipewright.toml", "--set", "data.path=text.txt", "--set", "data.seq_len=4"]);
    let message = "error: pipewright.toml: it exists already and is left as it is; name another file";
    fail(&folder, &["init"], 2, &[message]);
    let template = folder.print(&["init", "-"]);
    assert!(template == folder.read("pipewright.toml") && !folder.path("-").exists());
}

#[test]
fn completions_and_manual_pages() {
    let folder = folder();
    for (shell, words) in
        [("bash", "complete -F"), ("zsh", "#compdef pipewright"), ("fish", "complete -c pipewright")]
    {
        let script = folder.print(&["completions", shell]);
        assert!(script.contains(words) && script.contains("microbatches"), "{shell}");
    }
    fail(&folder, &["completions", "tcsh"], 2, &["error: invalid value 'tcsh' for '<SHELL>'"]);
    assert!(folder.print(&["man"]).contains(".TH pipewright 1"));
    folder.print(&["man", "pages/man1"]);
    let page = |name: &str| fs::read_to_string(folder.path("pages/man1").join(name)).expect(name);
    assert!(page("pipewright.1").contains("pipewright\\-train(1)"), "{}", page("pipewright.1"));
    assert!(page("pipewright-schedule.1").contains("microbatches"));
    let message = "error: text.txt: cannot be created: File exists (os error 17); choose another folder";
    fail(&folder, &["man", "text.txt"], 2, &[message]);
}

#[test]
fn quiet_leaves_errors_alone() {
    let folder = folder();
    assert_eq!(folder.succeed(&["train", "small.toml", "--quiet"], &[]).1, "");
    folder.says(&["train", "small.toml"], &[], "step 3/3");
    let expected =
        ["error: none.toml: cannot read the configuration: No such file or directory (os error 2)"];
    fail(&folder, &["-q", "check", "none.toml"], 2, &expected);
}

#[test]
fn every_cause_of_a_bad_model_folder_is_named() {
    let folder = folder();
    let model = folder.path("m");
    let refuse = |words: &str| {
        let arguments = ["check", "small.toml", "--set", "model.from=m"];
        fail(&folder, &arguments, 2, &[&format!("error: {words}")]);
    };
    refuse("m/config.json: cannot read it: No such file or directory (os error 2)");
    fs::create_dir(&model).expect("a folder");
    folder.write("m/config.json", "{\n  \"vocab_size\": 12,\n}");
    refuse("m/config.json: cannot be parsed: trailing comma at line 3 column 1");
    folder.write("m/config.json", "{\n  \"model_type\": \"llama\",\n  \"vocab_size\": \"many\"\n}");
    refuse(
        "m/config.json:3: the model cannot be run: the value of `vocab_size` cannot be used: invalid type: string \
         \"many\", expected usize",
    );
    folder.write("m/config.json", "{\n  \"model_type\": \"llama\"\n}");
    refuse("m/config.json: the model cannot be run: missing field `vocab_size`");
    fs::remove_file(model.join("config.json")).expect("the file exists");
    fs::create_dir(model.join("config.json")).expect("a folder");
    refuse("m/config.json: cannot read it: this is a folder; name a file");
}

#[test]
fn the_cause_of_bad_weights_reaches_the_user() {
    let folder = folder();
    folder.print(&["train", "small.toml", "--set", "run.checkpoint_every=3"]);
    folder.print(&["export", "out", "m"]);
    folder.write("m/model.safetensors", b"\x04\0\0\0\0\0\0\0{..}");
    let words = "m/model.safetensors: the file does not begin with a safetensors header: key must be a string at line 1";
    folder.refuse(&["train", "small.toml"], &["model.from=m", "run.out=again"], words);
}

#[test]
fn an_exported_model_keeps_its_tokenizer_and_settings() {
    let folder = folder();
    folder.print(&["train", "small.toml", "--set", "run.checkpoint_every=3"]);
    folder.print(&["export", "out", "m"]);
    assert!(!folder.path("m/tokenizer.json").exists(), "bytes need none");
    let config = folder.read("m/config.json");
    folder.write("m/config.json", config.replacen('{', "{\"eos_token_id\": [3, 4], \"bos_token_id\": 2,", 1));
    folder.write("m/tokenizer.json", "{\"some\": \"tokenizer\"}");
    folder.write("m/generation_config.json", "{\"temperature\": 0.6}");
    let bytes = "data.tokenizer=bytes";
    let arguments =
        ["train", "small.toml", "--set", "run.checkpoint_every=3", "--set", "model.from=m", "--set", bytes];
    folder.print(&arguments);
    // The run no longer needs the folder of its original model.
    fs::remove_dir_all(folder.path("m")).expect("the folder exists");
    let (_, said) = folder.succeed(&["export", "out", "again"], &[]);
    assert!(said.ends_with("again, with its tokenizer\n"), "{said}");
    let read = |name: &str| fs::read_to_string(folder.path("again").join(name)).expect(name);
    assert_eq!(read("tokenizer.json"), "{\"some\": \"tokenizer\"}");
    assert_eq!(read("generation_config.json"), "{\"temperature\": 0.6}");
    let config: serde_json::Value = serde_json::from_str(&read("config.json")).expect("JSON");
    assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&2.into(), &serde_json::json!([3, 4])));
    assert_eq!(config["hidden_size"], 16);
}

#[test]
fn advice_names_what_exists() {
    refuse(
        "pipeline.transport=nccl",
        &[
            "error: --set pipeline.transport=nccl: `transport` is \"nccl\", which this version of Pipewright does not \
             support",
            "help: write `transport = \"local\"` (threads of one process), or \"mpi\" (a process for each rank)",
        ],
    );
    let device = "error: --set run.device=cuda:0: this build cannot compute on `cuda:0`: build it with `cargo build \
                  --release --features cuda`";
    refuse("run.device=cuda:0", &[device]);
}

#[test]
#[cfg(target_os = "linux")]
fn files_without_an_end_are_refused() {
    let folder = folder();
    let limit = |limit: &str| format!("it has more than {limit}, the limit for such a file; check the path");
    let configuration = format!("error: /dev/zero: cannot read the configuration: {}", limit("16 MiB"));
    fail(&folder, &["check", "/dev/zero"], 2, &[&configuration]);
    let sparse = |name: &str, length: u64| {
        let file = fs::File::create(folder.path(name)).expect("a file");
        file.set_len(length).expect("a sparse file");
    };
    sparse("large.csv", 2 << 30);
    let schedule = format!("error: large.csv: cannot read the schedule: {}", limit("1 GiB"));
    fail(&folder, &["validate", "large.csv"], 2, &[&schedule]);
    let device = "this is a device or a pipe; copy its content to a regular file";
    refuse("data.path=/dev/zero", &[&format!("error: /dev/zero: {device} and name that")]);
    #[cfg(feature = "tokenizers")]
    refuse("data.tokenizer=/dev/zero", &[&format!("error: /dev/zero: cannot be read: {device}")]);
    sparse("large.txt", 8 << 40);
    for expected in [
        "large.txt: reading this file takes 8 TiB, and ",
        "give less data, or use a machine with more memory",
    ] {
        folder.refuse(&["check", "small.toml"], &["data.path=large.txt"], expected);
    }
}

#[test]
fn the_written_configuration_trains_as_it_is_and_on_other_text() {
    let folder = Run::empty();
    folder.print(&["init"]);
    folder.print(&["check", "pipewright.toml"]);
    // A smaller model and batch make the test shorter.
    let sizes =
        ["run.steps=1", "optimizer.warmup_steps=1", "model.num_hidden_layers=2", "pipeline.microbatches=2"];
    let arguments: Vec<&str> = sizes.iter().flat_map(|set| ["--set", set]).collect();
    let train_a_step = || {
        folder.print(&[&["train", "pipewright.toml"], &arguments[..]].concat());
        let metrics = folder.read("runs/sample/metrics.jsonl");
        assert_eq!(metrics.lines().count(), 1, "{metrics}");
    };
    train_a_step();
    // The comment in the file says: name your files.
    let template = folder.read("pipewright.toml");
    folder.write("pipewright.toml", template.replace("\"built-in\" ", "[\"**/*.txt\", \"!**/old/**\"] "));
    folder.write("a.txt", "some text ".repeat(300));
    let checked = folder.print(&["check", "pipewright.toml"]);
    assert!(checked.contains("3000 tokens"), "{checked}");
    train_a_step();
}

#[test]
fn numbers_that_nothing_can_hold() {
    refuse(
        "run.steps=99999999999999999999",
        &[
            "error: --set run.steps=99999999999999999999: the value of `steps` cannot be held: invalid type: integer \
             `99999999999999999999` as i128, expected any valid TOML value",
            "help: write a number that fits 64 bits",
        ],
    );
    let folder = folder();
    folder.write("s.csv", "0F0,0F1\n");
    let few = "error: s.csv: --microbatches is 1, and the rows have the microbatch 1; give more, or leave the number out";
    fail(&folder, &["lower", "s.csv", "--pass", "send-recv", "--microbatches", "1"], 2, &[few]);
}

#[test]
#[cfg(target_os = "linux")]
fn paths_that_are_not_utf8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = folder();
    let strange = folder.root().join(OsStr::from_bytes(b"\xff"));
    fs::create_dir(&strange).expect("a folder");
    fs::write(strange.join("small.toml"), small()).expect("a file");
    for (place, path, expected) in [
        (strange.as_path(), Path::new("small.toml"), "is not UTF-8; go to another"),
        (folder.root(), &strange.join("small.toml"), "the path is not UTF-8; rename"),
    ] {
        let (code, _, said) = finished(folder.binary().current_dir(place).arg("check").arg(path));
        assert!(code == Some(2) && said.contains(expected), "{said}");
    }
}

#[test]
fn wrong_arguments_have_the_code_of_wrong_input() {
    for arguments in [&["trian"][..], &["schedule", "gpipe"], &["partition", "--weights", "x"], &[]] {
        assert_eq!(folder().call(arguments, &[]).0, Some(2), "{arguments:?}");
    }
}

//! Tests of the command line for scripts and people: where output is written, exit codes, and the texts of
//! errors.

use std::fs;
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use tempfile::TempDir;

use crate::scratch;

pub(super) fn small() -> String {
    scratch::small(2, 2, 3)
}

pub(super) fn folder() -> TempDir {
    scratch::folder(&small())
}

pub(super) fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
}

pub(super) fn run_in(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder).args(arguments).timeout(std::time::Duration::from_secs(60));
    command.output().expect("the binary starts")
}

/// Returns a file or a folder of the references of the models.
pub(super) fn reference(name: &str) -> String {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
    data.join(name).display().to_string()
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that succeeds. Returns its standard output.
pub(super) fn succeed(folder: &TempDir, arguments: &[&str]) -> String {
    let output = run_in(folder.path(), arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that fails with `code`, and compares the lines of its standard error that start an error or
/// its help.
pub(super) fn fail(folder: &TempDir, arguments: &[&str], code: i32, expected: &[&str]) {
    let output = run_in(folder.path(), arguments);
    let stderr = text(&output.stderr).replace(&format!("{}/", folder.path().display()), "");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    let lines =
        stderr.lines().filter(|line| line.starts_with("error:") || line.trim_start().starts_with("help:"));
    assert_eq!(lines.map(str::trim).collect::<Vec<_>>(), expected, "{arguments:?}");
    assert!(!stderr.contains('\u{1b}'), "colour where there is no terminal: {stderr:?}");
}

/// Checks `small.toml` with one override, which is refused with one sentence and optional help.
pub(super) fn refuse(argument: &str, expected: &[&str]) {
    fail(&folder(), &["check", "small.toml", "--set", argument], 2, expected);
}

#[test]
fn a_misspelt_key_is_shown_where_it_stands() {
    let folder = folder();
    write(&folder, "bad.toml", small().replace("microbatches", "mikrobatches"));
    let output = run_in(folder.path(), &["check", "bad.toml"]);
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
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(2), expected));
}

#[test]
fn all_mistakes_of_a_configuration_are_reported() {
    let folder = folder();
    write(&folder, "bad.toml", "[run]\nsteps = 0\n[pipeline]\nranks = \"two\"\n");
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
fn sizes_that_do_not_fit_each_other() {
    refuse(
        "model.num_attention_heads=3",
        &[
            "error: --set model.num_attention_heads=3: `hidden_size = 16` is not divisible by `num_attention_heads = 3`",
        ],
    );
    let folder = folder();
    let arguments = ["check", "small.toml", "--set", "pipeline.ranks=5", "--set", "pipeline.microbatches=8"];
    let message = "error: --set pipeline.ranks=5: 4 layers cannot fill 5 stages; use at most 4 stages, not 5 ranks with 1 \
                   stage each, so use 4 ranks";
    fail(&folder, &arguments, 2, &[message]);
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
    let folder = tempfile::tempdir().expect("a scratch folder");
    let output = run_in(folder.path(), &["train", "--set", "run.steps=2"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let config = fs::read_to_string(folder.path().join("runs/sample/config.toml")).expect("a configuration");
    assert!(config.contains("path = [\"built-in\"]\n"), "{config}");
    let output = run_in(folder.path(), &["resume", "runs/sample", "--set", "run.steps=3"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn bad_data() {
    let folder = folder();
    write(&folder, "empty.txt", "");
    write(&folder, "latin.txt", b"na\xefve text in Latin-1");
    write(&folder, "short.txt", "ten bytes!");
    write(&folder, "accent.txt", "seventeen bytes, caf\u{e9}");
    write(&folder, "rows.jsonl", "[1,2,3,4,5,6,7,8,9]\n[1,2,3]\n");
    write(&folder, "large.jsonl", "[1,2,3,4,5,6,7,8,9]\n[1,2,3,4,5,6,7,8,128]\n");
    let refuse = |path: &str, message: &str| {
        let argument = format!("data.path={path}");
        fail(&folder, &["check", "small.toml", "--set", &argument], 2, &[&format!("error: {message}")]);
    };
    refuse("none.txt", "none.txt: there is no such data file; check the path");
    refuse("empty.txt", "empty.txt: the data is empty; name files that hold text");
    refuse(
        "latin.txt",
        "latin.txt: byte 2 is not valid UTF-8; convert the file, or leave it out with a pattern such as \"!**/latin.txt\"",
    );
    refuse(
        "short.txt",
        "the data has 1 rows of seq_len 8, and a step's batch takes 2; \
         give more data, a shorter seq_len, or fewer or smaller microbatches",
    );
    refuse(
        "accent.txt",
        "accent.txt: byte 20: token id 195 lies beyond the vocabulary of 128; raise vocab_size, or correct the data",
    );
    refuse(
        "rows.jsonl",
        "rows.jsonl:2: the row holds 3 ids, and seq_len 8 takes 9; correct the row or seq_len",
    );
    refuse(
        "large.jsonl",
        "large.jsonl:2: token id 128 lies beyond the vocabulary of 128; raise vocab_size, or correct the data",
    );
}

#[test]
fn an_output_folder_that_cannot_be_written() {
    refuse("run.out=text.txt/out", &["error: text.txt: not a folder; choose another run.out"]);
    let folder = folder();
    fs::create_dir(folder.path().join("out")).expect("a folder");
    write(&folder, "out/config.toml", "mine");
    let message = "error: out/config.toml: the file does not belong to an earlier run and would be overwritten; \
                   choose another run.out";
    fail(&folder, &["train", "small.toml"], 2, &[message]);
    assert_eq!(fs::read_to_string(folder.path().join("out/config.toml")).ok().as_deref(), Some("mine"));
}

/// `mpirun` passes the names to `ssh`, which would take this one for an option.
#[test]
fn a_host_that_would_be_an_option_of_ssh_is_refused() {
    let folder = folder();
    write(&folder, "hosts", "node1 slots=2\n-oProxyCommand=touch${IFS}out\n");
    let message = "error: hosts:2: `-oProxyCommand=touch${IFS}out` is not the name of a host: a name has letters, digits, `.`, \
                   `-` and `_`, and begins with a letter, a digit or `_`";
    fail(&folder, &["launch", "--hosts", "hosts", "--", "train", "small.toml"], 2, &[message]);
}

#[test]
fn an_earlier_run_with_files_of_the_user_stays_where_it_is() {
    let folder = folder();
    fs::create_dir_all(folder.path().join("out/.git")).expect("a folder");
    write(&folder, "out/metrics.jsonl", "{\"step\":1}\n");
    write(&folder, "out/notes.txt", "mine");
    let message = "error: out: the folder of the earlier run also has `.git/` and `notes.txt`, which no run has written, so \
                   the folder is not moved aside; move what is yours to another place, or choose another run.out";
    for command in ["train", "check"] {
        fail(&folder, &[command, "small.toml"], 2, &[message]);
    }
    assert!(folder.path().join("out/notes.txt").exists() && !folder.path().join("out.1").exists());
}

#[test]
fn check_tells_what_would_run_and_leaves_no_trace() {
    let folder = folder();
    let expected = "\
model     4 layers, 8528 parameters
stage 0   on rank 0: layers 0 to 2 (1 embedding, 2 decoder), 6464 parameters
stage 1   on rank 1: layers 3 to 3 (1 head), 2064 parameters
schedule  1f1b: 2 ranks, 2 microbatches, proved sound
data      264 tokens, 32 rows, 16 steps of 2 rows an epoch
data      from 1 file of text
";
    let found = succeed(&folder, &["check", "small.toml"]);
    let (summary, run) = found.split_at(found.find("run ").expect("a line on the run"));
    assert_eq!(summary, expected);
    assert!(run.starts_with("run       3 steps, results in /"), "{run}");
    let line = "\n          temporary tensors and messages of a step are not included\nmachine ";
    assert!(run.contains(line), "{run}");
    assert!(!folder.path().join("out").exists());
}

#[test]
fn check_counts_what_a_family_and_tied_embeddings_change() {
    let folder = folder();
    let check = |argument: &str, words: &str| {
        let found = succeed(&folder, &["check", "small.toml", "--set", argument]);
        assert_eq!(found.lines().next(), Some(format!("model     4 layers, {words}").as_str()), "{argument}");
    };
    check("model.tie_word_embeddings=true", "6480 parameters");
    check("model.architecture=qwen2", "8624 parameters");
    check("model.architecture=qwen3", "8560 parameters");
}

#[test]
fn init_writes_a_configuration_once() {
    let folder = folder();
    succeed(&folder, &["init"]);
    succeed(&folder, &["check", "pipewright.toml", "--set", "data.path=text.txt", "--set", "data.seq_len=4"]);
    let message = "error: pipewright.toml: it exists already and is left as it is; name another file";
    fail(&folder, &["init"], 2, &[message]);
}

#[test]
fn completions_and_manual_pages() {
    let folder = folder();
    for (shell, words) in
        [("bash", "complete -F"), ("zsh", "#compdef pipewright"), ("fish", "complete -c pipewright")]
    {
        let script = succeed(&folder, &["completions", shell]);
        assert!(script.contains(words) && script.contains("microbatches"), "{shell}");
    }
    fail(&folder, &["completions", "tcsh"], 2, &["error: invalid value 'tcsh' for '<SHELL>'"]);
    assert!(succeed(&folder, &["man"]).contains(".TH pipewright 1"));
    succeed(&folder, &["man", "pages/man1"]);
    let page = |name: &str| fs::read_to_string(folder.path().join("pages/man1").join(name)).expect(name);
    assert!(page("pipewright.1").contains("pipewright\\-train(1)"), "{}", page("pipewright.1"));
    assert!(page("pipewright-schedule.1").contains("microbatches"));
    let message = "error: text.txt: cannot be created: File exists (os error 17); choose another folder";
    fail(&folder, &["man", "text.txt"], 2, &[message]);
}

#[test]
fn quiet_leaves_errors_alone() {
    let folder = folder();
    let quiet = run_in(folder.path(), &["train", "small.toml", "--quiet"]);
    assert_eq!((quiet.status.code(), text(&quiet.stderr).as_str()), (Some(0), ""));
    let loud = run_in(folder.path(), &["train", "small.toml"]);
    assert!(text(&loud.stderr).contains("step 3/3"), "{}", text(&loud.stderr));
    let expected =
        ["error: none.toml: cannot read the configuration: No such file or directory (os error 2)"];
    fail(&folder, &["-q", "check", "none.toml"], 2, &expected);
}

#[test]
fn every_cause_of_a_bad_model_folder_is_named() {
    let folder = folder();
    let model = folder.path().join("m");
    let refuse = |words: &str| {
        let arguments = ["check", "small.toml", "--set", "model.from=m"];
        fail(&folder, &arguments, 2, &[&format!("error: {words}")]);
    };
    refuse("m/config.json: cannot read it: No such file or directory (os error 2)");
    fs::create_dir(&model).expect("a folder");
    write(&folder, "m/config.json", "{\n  \"vocab_size\": 12,\n}");
    refuse("m/config.json: cannot be parsed: trailing comma at line 3 column 1");
    write(&folder, "m/config.json", "{\n  \"model_type\": \"llama\",\n  \"vocab_size\": \"many\"\n}");
    refuse(
        "m/config.json:3: the model cannot be run: the value of `vocab_size` cannot be used: invalid type: string \
         \"many\", expected usize",
    );
    write(&folder, "m/config.json", "{\n  \"model_type\": \"llama\"\n}");
    refuse("m/config.json: the model cannot be run: missing field `vocab_size`");
    fs::remove_file(model.join("config.json")).expect("the file exists");
    fs::create_dir(model.join("config.json")).expect("a folder");
    refuse("m/config.json: cannot read it: this is a folder; name a file");
}

#[test]
fn the_cause_of_bad_weights_reaches_the_user() {
    let folder = folder();
    succeed(&folder, &["train", "small.toml", "--set", "run.checkpoint_every=3"]);
    succeed(&folder, &["export", "out", "m"]);
    write(&folder, "m/model.safetensors", b"\x04\0\0\0\0\0\0\0{..}");
    let output =
        run_in(folder.path(), &["train", "small.toml", "--set", "model.from=m", "--set", "run.out=again"]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    let words = "m/model.safetensors: the file does not begin with a safetensors header: key must be a string at line 1";
    assert!(told.contains(words), "{told}");
}

#[test]
fn an_exported_model_keeps_its_tokenizer_and_settings() {
    let folder = folder();
    succeed(&folder, &["train", "small.toml", "--set", "run.checkpoint_every=3"]);
    succeed(&folder, &["export", "out", "m"]);
    assert!(!folder.path().join("m/tokenizer.json").exists(), "bytes need none");
    let config = fs::read_to_string(folder.path().join("m/config.json")).expect("a configuration");
    write(
        &folder,
        "m/config.json",
        config.replacen('{', "{\"eos_token_id\": [3, 4], \"bos_token_id\": 2,", 1),
    );
    write(&folder, "m/tokenizer.json", "{\"some\": \"tokenizer\"}");
    write(&folder, "m/generation_config.json", "{\"temperature\": 0.6}");
    let bytes = "data.tokenizer=bytes";
    let arguments =
        ["train", "small.toml", "--set", "run.checkpoint_every=3", "--set", "model.from=m", "--set", bytes];
    succeed(&folder, &arguments);
    // The run no longer needs the folder of its original model.
    fs::remove_dir_all(folder.path().join("m")).expect("the folder exists");
    let output = run_in(folder.path(), &["export", "out", "again"]);
    assert!(text(&output.stderr).ends_with("again, with its tokenizer\n"), "{}", text(&output.stderr));
    let read = |name: &str| fs::read_to_string(folder.path().join("again").join(name)).expect(name);
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
        let file = fs::File::create(folder.path().join(name)).expect("a file");
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
    let output = run_in(folder.path(), &["check", "small.toml", "--set", "data.path=large.txt"]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("large.txt: reading this file takes 8 TiB, and "), "{told}");
    assert!(told.contains("give less data, or use a machine with more memory"), "{told}");
}

#[test]
fn the_written_configuration_trains_as_it_is_and_on_other_text() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    succeed(&folder, &["init"]);
    succeed(&folder, &["check", "pipewright.toml"]);
    // A smaller model and batch make the test shorter.
    let sizes =
        ["run.steps=1", "optimizer.warmup_steps=1", "model.num_hidden_layers=2", "pipeline.microbatches=2"];
    let arguments: Vec<&str> = sizes.iter().flat_map(|set| ["--set", set]).collect();
    let train_a_step = || {
        succeed(&folder, &[&["train", "pipewright.toml"], &arguments[..]].concat());
        let metrics = fs::read_to_string(folder.path().join("runs/sample/metrics.jsonl")).expect("metrics");
        assert_eq!(metrics.lines().count(), 1, "{metrics}");
    };
    train_a_step();
    // The comment in the file says: name your files.
    let template = fs::read_to_string(folder.path().join("pipewright.toml")).expect("it is written");
    write(&folder, "pipewright.toml", template.replace("\"built-in\" ", "[\"**/*.txt\", \"!**/old/**\"] "));
    write(&folder, "a.txt", "some text ".repeat(300));
    let checked = succeed(&folder, &["check", "pipewright.toml"]);
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
    write(&folder, "s.csv", "0F0,0F1\n");
    let few = "error: s.csv: --microbatches is 1, and the rows have the microbatch 1; give more, or leave the number out";
    fail(&folder, &["lower", "s.csv", "--pass", "send-recv", "--microbatches", "1"], 2, &[few]);
}

#[test]
#[cfg(target_os = "linux")]
fn paths_that_are_not_utf8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = folder();
    let strange = folder.path().join(OsStr::from_bytes(b"\xff"));
    fs::create_dir(&strange).expect("a folder");
    fs::write(strange.join("small.toml"), small()).expect("a file");
    let inside = run_in(&strange, &["check", "small.toml"]);
    assert_eq!(inside.status.code(), Some(2));
    assert!(text(&inside.stderr).contains("is not UTF-8; go to another"), "{}", text(&inside.stderr));
    let mut binary = Command::cargo_bin("pipewright").expect("the binary is built");
    binary.current_dir(folder.path()).arg("check").arg(strange.join("small.toml"));
    let outside = binary.output().expect("the binary starts");
    assert_eq!(outside.status.code(), Some(2));
    assert!(text(&outside.stderr).contains("the path is not UTF-8; rename"), "{}", text(&outside.stderr));
}

#[test]
fn wrong_arguments_have_the_code_of_wrong_input() {
    for arguments in [&["trian"][..], &["schedule", "gpipe"], &["partition", "--weights", "x"], &[]] {
        assert_eq!(run_in(folder().path(), arguments).status.code(), Some(2), "{arguments:?}");
    }
}

//! Tests of how `launch` starts the processes, with a script in place of `mpirun`. The script records each
//! start instead of starting processes.

use std::env;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{Folder, folder, pipewright, signal, train_on_threads, with_overrides, words};

/// Answers a question to a host with the real program, after `ask`. Records a start in the file `starts` and
/// runs `start`, which has the number of the start in `$1`.
const MPIRUN: &str = r#"#!/bin/sh
case "$*" in
--version) echo 'mpirun (Open MPI) 4'; exit ;;
*' launch --answer '*)
    [ ! -e ask ] || . ./ask
    while [ "$1" != -x ]; do shift; done
    shift 2
    exec "$@" ;;
esac
echo "$*" >> starts
exec sh ./start "$(wc -l < starts)"
"#;

/// Returns a folder with the script, whose first start fails. `first` is what the first start does before.
fn with_launcher(first: &str) -> Folder {
    let folder = folder();
    let path = folder.path().join("bin/mpirun");
    fs::create_dir(folder.path().join("bin")).expect("a new folder");
    fs::write(&path, MPIRUN).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
    let start = format!("[ \"$1\" = 1 ] || exit 0\n{first}\nexit 1\n");
    fs::write(folder.path().join("start"), start).expect("a file");
    folder
}

/// Returns `launch` with these options, which starts the script.
fn launch(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(pipewright());
    let path = format!("{}:{}", folder.join("bin").display(), env::var("PATH").expect("text"));
    command.current_dir(folder).env("PATH", path).arg("launch").args(options).arg("--");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    words(&output)
}

/// Returns the command of the second start, behind the path of the program.
fn second_start(folder: &Path) -> (String, String) {
    let starts = fs::read_to_string(folder.join("starts")).expect("a start");
    let starts: Vec<&str> = starts.lines().collect();
    assert_eq!(starts.len(), 2, "{starts:?}");
    let (options, words) =
        starts[1].split_once(&format!(" {} ", pipewright().display())).expect("the program");
    (options.to_owned(), words.to_owned())
}

/// Waits until a file exists.
fn wait_for(file: &Path) {
    let since = Instant::now();
    while !file.exists() {
        assert!(since.elapsed() < Duration::from_secs(60), "{} does not appear", file.display());
        thread::sleep(Duration::from_millis(5));
    }
}

fn end_after_signal(child: Child) -> Output {
    signal(child.id(), "TERM");
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_run_that_has_not_begun_starts_again_on_the_hosts_that_answer() {
    let folder = with_launcher("echo 'case \"$*\" in *--host\\ b:*) exit 1 ;; esac' > ask");
    fs::write(folder.path().join("hosts"), "a slots=2\nb slots=2\n").expect("a file");
    let mut command = launch(folder.path(), &["--hosts", "hosts"]);
    with_overrides(&mut command, &["pipeline.ranks=4"]);
    let said = succeed(&mut command);
    let sentence = "the processes start again, with 2 ranks instead of 4 (restart 1 of 3)";
    assert!(said.contains(sentence), "{said}");
    let (options, words) = second_start(folder.path());
    assert!(options.contains("-n 2 --host a:2 "), "{options}");
    let set = "--set pipeline.ranks=4 --set pipeline.transport=mpi --set pipeline.ranks=2 --set mesh.data_parallel=1";
    assert_eq!(words, format!("train small.toml {set}"));
}

#[test]
fn a_resumption_that_has_not_begun_keeps_its_settings() {
    let folder = with_launcher("");
    train_on_threads(folder.path(), &["run.steps=2", "pipeline.ranks=2"]);
    let said = succeed(launch(folder.path(), &[]).args(["resume", "out", "--set", "run.steps=4"]));
    assert!(
        said.contains("step 3: a process has ended") && said.contains("the processes start again"),
        "{said}"
    );
    let expected = "resume out --set run.steps=4 --set pipeline.transport=mpi";
    assert_eq!(second_start(folder.path()).1, expected);
}

#[test]
fn a_run_that_has_begun_resumes_as_quietly_as_it_has_begun() {
    let begin = "mkdir out; echo > out/config.toml";
    for quiet in [true, false] {
        let folder = with_launcher(begin);
        let mut command = launch(folder.path(), &[]);
        with_overrides(&mut command, &["run.steps=2"]);
        succeed(command.args(quiet.then_some("--quiet")));
        let words = second_start(folder.path()).1;
        assert!(
            words.starts_with("resume ") && words.ends_with(if quiet { "/out --quiet" } else { "/out" }),
            "{words}"
        );
    }
    let folder = with_launcher("");
    let mut command = launch(folder.path(), &["--quiet"]);
    with_overrides(&mut command, &["run.steps=2"]);
    succeed(&mut command);
    assert!(second_start(folder.path()).1.ends_with(" --quiet"), "the processes are quiet too");
}

#[test]
#[ignore = "takes half a minute"]
fn a_start_that_hangs_is_ended_long_before_a_minute_after_one_that_did_not() {
    let folder = with_launcher("mkdir out; echo > out/config.toml; sleep 0.5");
    let start = fs::read_to_string(folder.path().join("start")).expect("the script");
    // The resumed run would print the record of its restart.
    let hangs = "[ \"$1\" != 2 ] || exec sleep 600\n[ \"$1\" != 3 ] || cp out/restart.json record\n";
    fs::write(folder.path().join("start"), hangs.to_owned() + &start).expect("a file");
    let begun = Instant::now();
    let mut command = launch(folder.path(), &[]);
    with_overrides(&mut command, &["run.steps=2"]);
    succeed(&mut command);
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    let record = fs::read_to_string(folder.path().join("record")).expect("a third start");
    let cause = "the processes have not joined each other within 2";
    assert!(record.contains(cause) && record.contains(r#""restart":2"#), "{record}");
}

#[test]
fn a_signal_ends_the_launch_while_hosts_are_asked() {
    let folder = with_launcher("");
    fs::write(folder.path().join("ask"), "echo > asked\nexec sleep 600\n").expect("a file");
    fs::write(folder.path().join("hosts"), "a slots=2\n").expect("a file");
    let mut command = launch(folder.path(), &["--hosts", "hosts"]);
    with_overrides(&mut command, &["pipeline.ranks=2"]);
    let child = command.spawn().expect("it starts");
    wait_for(&folder.path().join("asked"));
    let output = end_after_signal(child);
    let said = words(&output);
    // A launch that waits for the answer ends with code 2, because the host does not answer.
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("stopped by a signal while the hosts were asked"), "{said}");
    assert!(!folder.path().join("starts").exists(), "no process has started");
}

/// Answers for the host `b` with another build, and for `c` about another folder.
const OTHERS: &str = r#"
words() { while [ "$1" != -x ]; do shift; done; shift 3; echo "$*"; }
case "$*" in
*' b:2 '*) exec ./other $(words "$@") ;;
*' c:2 '*) exec ./other-folder $(words "$@") ;;
esac
"#;

#[test]
fn hosts_with_another_build_or_folder_are_an_error_before_the_first_start() {
    let folder = with_launcher("");
    let other = folder.path().join("other");
    fs::copy(pipewright(), &other).expect("the scratch folder takes files");
    let mut build = fs::File::options().append(true).open(&other).expect("it was copied");
    build.write_all(b"another build").expect("the scratch folder takes files");
    drop(build);
    let script = folder.path().join("other-folder");
    let text = format!("#!/bin/sh\nexec '{}' \"$1\" \"$2\" \"$3.elsewhere\"\n", pipewright().display());
    fs::write(&script, text).expect("a file");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("the file is ours");
    fs::write(folder.path().join("ask"), OTHERS).expect("a file");
    fs::write(folder.path().join("hosts"), "a slots=2\nb slots=2\nc slots=2\n").expect("a file");
    let mut command = launch(folder.path(), &["--hosts", "hosts"]);
    with_overrides(&mut command, &["pipeline.ranks=2"]);
    let output = command.output().expect("it starts");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for expected in ["the host b has another build of this program", "the host c does not see what this host"]
    {
        assert!(said.contains(expected), "`{expected}` in: {said}");
    }
    assert!(!said.contains("the host a "), "{said}");
    assert!(!folder.path().join("starts").exists(), "no process has started");
}

#[test]
fn processes_that_are_left_are_ended_and_the_lock_of_others_is_waited_for() {
    // One process belongs to the run, and another one, which does not, still holds the lock of the folder.
    let begin = "mkdir -p out/checkpoints; echo > out/config.toml\n\
                 sleep 600 & echo $! > left\n\
                 env -u PIPEWRIGHT_LAUNCHED flock out/checkpoints/lock -c 'echo > locked; sleep 1; echo > unlocked' &\n\
                 while [ ! -e locked ]; do sleep 0.01; done";
    let folder = with_launcher(begin);
    let start = fs::read_to_string(folder.path().join("start")).expect("the script");
    fs::write(folder.path().join("start"), format!("[ \"$1\" = 1 ] || ls > seen\n{start}")).expect("a file");
    let mut command = launch(folder.path(), &[]);
    with_overrides(&mut command, &["run.steps=2"]);
    succeed(&mut command);
    let left = fs::read_to_string(folder.path().join("left")).expect("a process was left");
    // A process that nothing has waited for has no environment.
    let environment = fs::read(format!("/proc/{}/environ", left.trim())).unwrap_or_default();
    assert!(environment.is_empty(), "it is ended");
    let seen = fs::read_to_string(folder.path().join("seen")).expect("a second start");
    assert!(seen.contains("unlocked"), "{seen}");
}

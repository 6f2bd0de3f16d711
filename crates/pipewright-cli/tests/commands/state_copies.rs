//! Tests of copies of the state in memory (`run.copy_every`): a run continues from the newest complete one,
//! and ends with the bits of an undisturbed run. The folder of the copies is in the scratch folder.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::run::{Figures, Run, finished, tensors};

/// The settings of all runs: two ranks as threads, a copy after each step, and a checkpoint only at the end.
const SETTINGS: [&str; 4] =
    ["pipeline.ranks=2", "run.copy_every=1", "run.copy_folder=memory", "run.deadline_seconds=20"];

/// The last checkpoint of a run.
const LAST: &str = "out/checkpoints/step-00000040";

fn new_run() -> Run {
    let run = Run::new();
    fs::create_dir(run.path("memory")).expect("the scratch folder takes folders");
    run
}

/// Returns the folder of the run's copies; `None` if there is none.
fn copies(run: &Run) -> Option<PathBuf> {
    let folders = fs::read_dir(run.path("memory")).expect("a folder");
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.expect("an entry").path()).collect();
    assert!(folders.len() < 2, "one run has one folder: {folders:?}");
    folders.pop()
}

/// Returns the steps of the copies, complete or not.
fn steps_of_copies(run: &Run) -> Vec<u64> {
    let folders = fs::read_dir(copies(run).expect("copies")).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let step = |name: std::ffi::OsString| name.to_str()?.rsplit('-').next()?.parse().ok();
    let mut steps: Vec<u64> = folders.map(name).filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// Returns the files of the copy of a step that have this ending.
fn files(run: &Run, step: u64, ending: &str) -> Vec<PathBuf> {
    let folder = copies(run).expect("copies").join(format!(".saving-{step:08}"));
    let entries = fs::read_dir(folder).expect("a copy").map(|entry| entry.expect("an entry").path());
    entries.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
}

/// Starts a run, and kills it after it has taken a few steps. The steps after these take a long time, so that the run cannot
/// end before the kill. Returns the steps that it has taken.
fn killed(run: &Run, set: &[&str]) -> u64 {
    // An earlier run has steps too, until it is moved aside.
    let aside = run.out().exists().then(|| run.path("out.1"));
    let mut command = run.binary();
    command.args(["train", "small.toml"]).env("PIPEWRIGHT_FAULT", "slow:1:6:30").stderr(Stdio::null());
    command.args(SETTINGS.iter().chain(set).flat_map(|set| ["--set", *set]));
    let mut child = command.spawn().expect("the binary starts");
    run.wait_until(|| aside.as_ref().is_none_or(|aside| aside.exists()));
    run.wait_for_step(6);
    child.kill().and_then(|()| child.wait()).expect("the run is ours to kill");
    run.figures().len() as u64
}

/// The figures of a run that nothing disturbs, and the tensors of its last checkpoint.
type Undisturbed = (Vec<Figures>, Vec<(String, Vec<u8>)>);

/// Returns the results of a run that nothing disturbs, for all tests.
fn undisturbed() -> &'static Undisturbed {
    static RESULTS: OnceLock<Undisturbed> = OnceLock::new();
    RESULTS.get_or_init(|| {
        let run = Run::new();
        run.train(&SETTINGS[..1]);
        (run.figures(), tensors(&run.path(LAST)))
    })
}

/// Resumes the run, and compares its results with an undisturbed run. Returns the step from which it has
/// resumed, 0 for a run that began again, and what it said.
fn check_resumed(run: &Run, set: &[&str]) -> (u64, String) {
    let (_, words) = run.succeed(&["resume", "out"], set);
    let (figures, last) = undisturbed();
    assert_eq!(&run.figures(), figures, "{words}");
    assert!(&tensors(&run.path(LAST)) == last, "{words}");
    assert_eq!(copies(run), None, "a run that ends well leaves no copies");
    assert!(!run.path("out/copies.json").exists());
    let step = words.split("resuming from step ").nth(1).and_then(|rest| rest.split(',').next());
    (step.map_or(0, |step| step.parse().expect("a step")), words)
}

#[test]
fn a_process_that_is_killed_costs_at_most_one_step() {
    let run = new_run();
    let taken = killed(&run, &["run.checkpoint_every=4"]);
    let kept = steps_of_copies(&run);
    assert!(kept.len() <= 3, "the complete ones and the one that is written: {kept:?}");
    // Another cut than the one that wrote the copy, and checkpoints at other steps.
    let (step, words) = check_resumed(&run, &["pipeline.ranks=1", "run.checkpoint_every=7"]);
    assert!(step + 1 >= taken && step <= taken, "from step {step} after {taken}: {words}");
    assert!(words.contains("memory/pipewright-"), "{words}");
}

#[test]
fn a_copy_that_is_damaged_or_incomplete_is_not_used() {
    let run = new_run();
    killed(&run, &[]);
    let complete: Vec<u64> =
        steps_of_copies(&run).into_iter().filter(|step| files(&run, *step, "part").len() == 1).collect();
    let [.., older, newest] = complete[..] else { panic!("two copies: {complete:?}") };
    let file = &files(&run, newest, "safetensors")[0];
    let mut bytes = fs::read(file).expect("a file");
    *bytes.last_mut().expect("a tensor") ^= 1;
    fs::write(file, bytes).expect("the file");
    // A mistake removes no copies.
    run.refuse(&["resume", "out"], &["run.steps=nothing"], "`steps`");
    let (step, words) = check_resumed(&run, &[]);
    assert_eq!(step, older, "{words}");
    let expected =
        format!("the copy of step {newest} in memory cannot be used, so the run uses an earlier state: ");
    assert!(words.contains(&expected), "{words}");
}

/// Gives what is in a folder to another user; `false`, with a line that says so, if this user may not.
#[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
fn give_away(folder: &Path) -> bool {
    let is_given = std::os::unix::fs::chown(folder, Some(65534), None).is_ok();
    if !is_given {
        eprintln!("only root can give files to another user, so this case is left out");
    }
    is_given
}

/// Resumes a run whose copies are from then on in the folder of another user, or open to others, and checks that the
/// run says so with these words, uses its checkpoints, and changes nothing there.
fn check_planted(words: &str, plant: impl Fn(&Path) -> bool) {
    let run = new_run();
    killed(&run, &["run.checkpoint_every=2"]);
    let planted = copies(&run).expect("copies");
    if !plant(&planted) {
        return;
    }
    let before = names(&planted);
    let (_, said) = run.succeed(&["resume", "out"], &[]);
    assert!(
        said.contains("the copies of the state in memory are not used: ") && said.contains(words),
        "{said}"
    );
    assert!(said.contains("out/checkpoints/step-"), "{said}");
    assert_eq!(run.figures(), undisturbed().0);
    assert_eq!(names(&planted), before, "what another user has made is left alone");
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    names.sort_unstable();
    names
}

/// Another user can make a folder of the same name after the machine was switched off.
#[test]
fn copies_that_another_user_could_have_made_are_not_used() {
    check_planted("belongs to the user with the number 65534", give_away);
    check_planted("other users can enter or change this folder (its mode is 0777)", |folder| {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).is_ok()
    });
    check_planted("this is a symbolic link", |folder| {
        let moved = folder.with_file_name("moved");
        fs::rename(folder, &moved).and_then(|()| std::os::unix::fs::symlink(&moved, folder)).is_ok()
    });
}

#[test]
fn copies_are_not_kept_where_others_can_replace_them() {
    let run = new_run();
    fs::set_permissions(run.path("memory"), fs::Permissions::from_mode(0o777)).expect("an own folder");
    refused(&run, "train", "memory", 2, "other users can replace what is in this folder");
    if give_away(&run.path("memory")) {
        refused(&run, "check", "memory", 2, "belongs to the user with the number 65534");
    }
    assert_eq!(copies(&run), None);
}

#[test]
fn without_a_complete_copy_the_state_comes_from_the_disk() {
    let run = new_run();
    killed(&run, &["run.checkpoint_every=2"]);
    for step in steps_of_copies(&run) {
        files(&run, step, "part").iter().for_each(|part| fs::remove_file(part).expect("the part"));
    }
    let (step, words) = check_resumed(&run, &["run.copy_every=0"]);
    assert!(step % 2 == 0 && words.contains("out/checkpoints/step-"), "{words}");
}

#[test]
fn a_checkpoint_that_is_named_counts_more_than_newer_copies() {
    let run = new_run();
    killed(&run, &["run.checkpoint_every=2"]);
    let name = run.checkpoints().into_iter().find(|name| name.starts_with("step-")).expect("a checkpoint");
    let path = format!("out/checkpoints/{name}");
    run.says(&["resume", &path], &[], &path);
}

#[test]
fn a_run_of_its_own_uses_no_copies_of_an_earlier_one() {
    let run = new_run();
    killed(&run, &[]);
    let earlier = copies(&run).expect("copies");
    killed(&run, &[]);
    assert_ne!(copies(&run).expect("copies"), earlier, "the copies of the earlier run are removed");
    check_resumed(&run, &[]);
}

/// Trains with a fault and restarts. Returns the record of the restart.
fn restarted(run: &Run, fault: &str, set: &[&str]) -> Value {
    let mut command = run.binary();
    command.env("PIPEWRIGHT_FAULT", fault).args(["train", "small.toml"]);
    command.args(SETTINGS.iter().chain(&["run.restarts=2"]).chain(set).flat_map(|set| ["--set", *set]));
    let (code, _, words) = finished(&mut command);
    assert_eq!(code, Some(0), "{words}");
    assert_eq!(&run.figures(), &undisturbed().0);
    let event = run.events().into_iter().find(|line| line["event"] == "restart").expect("an event");
    let sentence = format!("the run continues from step {}, which was read ", event["step"]);
    assert!(words.contains(&sentence), "{words}");
    event
}

#[test]
fn a_restart_says_where_the_state_comes_from_and_what_reading_it_took() {
    let event = restarted(&new_run(), "panic:1:6", &[]);
    assert_eq!(
        (&event["step"], &event["failed_step"], &event["state"]),
        (&5.into(), &6.into(), &"memory".into())
    );
    assert!(event["read_ms"].is_u64(), "{event}");
    let event = restarted(&new_run(), "panic:1:8", &["run.copy_every=100", "run.checkpoint_every=3"]);
    assert_eq!((&event["step"], &event["state"]), (&6.into(), &"disk".into()));
}

fn refused(run: &Run, command: &str, folder: &str, code: i32, expected: &str) {
    let set = format!("run.copy_folder={folder}");
    run.fail(code, &[command, "small.toml"], &["run.copy_every=1", &set], &[expected]);
    assert!(!run.out().exists(), "nothing has run");
}

#[test]
fn copies_that_do_not_fit_are_refused() {
    let run = Run::new();
    for command in ["check", "train"] {
        refused(&run, command, "missing", 2, "copies cannot be kept here");
        if Path::new("/proc/self").exists() {
            refused(&run, command, "/proc", 3, "and 0 B are free; name another folder in memory");
        }
    }
    let check = |set| run.json(&["check", "small.toml"], &[set])["memory"]["copies"].as_u64().expect("bytes");
    assert_eq!(check("run.copy_every=0"), 0);
    assert!(check("run.copy_every=1") > 0);
}

/// Steps begin during the one before, unless a checkpoint, an evaluation or a copy follows it. None of them
/// changes the results.
#[test]
fn what_happens_between_steps_changes_no_bits() {
    let trained = |set: &[&str]| {
        let run = new_run();
        run.train(&[&["pipeline.ranks=2", "run.steps=14", "data.validation_share=0.25"], set].concat());
        run
    };
    let copies = ["run.copy_folder=memory", "run.copy_every=5"];
    let never = trained(&["run.checkpoint_every=0"]);
    let mixed = trained(&[&["run.checkpoint_every=3", "run.eval_every=4"][..], &copies].concat());
    let always = trained(&["run.checkpoint_every=1"]);
    for run in [&mixed, &always] {
        assert_eq!(run.figures(), never.figures());
        let last = |run: &Run| tensors(&run.path("out/checkpoints/step-00000014"));
        assert!(last(run) == last(&never), "the parameters and the optimizer's state");
    }
}

/// A process may be killed after its last checkpoint and before it has removed the copies.
#[test]
fn copies_are_removed_when_the_run_is_found_finished() {
    let run = new_run();
    killed(&run, &[]);
    let [memory, link] = [run.path("memory"), run.path("out/copies.json")];
    let [kept, kept_link] = [run.path("kept"), run.path("kept.json")];
    let copy = |from: &Path, to: &Path| {
        let copied = Command::new("cp").arg("-r").arg(from).arg(to).status();
        assert!(copied.is_ok_and(|status| status.success()), "{} is ours", from.display());
    };
    copy(&memory, &kept);
    copy(&link, &kept_link);
    run.succeed(&["resume", "out"], &SETTINGS);
    assert!(copies(&run).is_none() && !link.exists(), "a run that ends well removes its copies");
    fs::remove_dir(&memory).and_then(|()| fs::rename(&kept, &memory)).expect("they are ours");
    fs::rename(&kept_link, &link).expect("it is ours");
    let output = run.command(&["resume", LAST]);
    assert!(copies(&run).is_some(), "an earlier checkpoint may have been named: {output:?}");
    run.says(&["resume", "out"], &[], "the run is finished");
    assert!(copies(&run).is_none() && !link.exists());
}

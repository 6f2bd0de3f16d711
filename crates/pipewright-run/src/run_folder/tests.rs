//! Tests of the folder of a run's results.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::Path;
use std::time::Duration;

use pipewright::train::{Metrics, RunLog, RunLogError};

use super::aside::move_later_timelines;
use super::*;

fn metrics(step: u64) -> Metrics {
    Metrics {
        step,
        loss: 2.5,
        grad_norm: 1.0,
        learning_rate: 1e-3,
        tokens_per_second: 10.0,
        step_ms: 20.0,
        elapsed_s: 1.5,
        tokens: 64,
        epoch: Some(0.25),
        bubble_fraction: 0.125,
        peak_bytes: vec![3, 4],
        ..Metrics::default()
    }
}

#[test]
fn a_line_a_step_with_the_documented_keys() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a/b");
    let mut folder = RunFolder::create(&path, "[run]\n", &[]).expect("the scratch folder takes files");
    folder.append(&metrics(1)).expect("it takes lines");
    let line = "{\"step\":1,\"loss\":2.5,\"grad_norm\":1.0,\"learning_rate\":0.001,\"tokens_per_second\":10.0,\
                \"step_ms\":20.0,\"elapsed_s\":1.5,\"tokens\":64,\
                \"epoch\":0.25,\"bubble_fraction\":0.125,\"exposed_comm_fraction\":0.0,\"peak_bytes\":[3,4],\
                \"bubble_per_rank\":[]}\n";
    assert_eq!(fs::read_to_string(path.join(METRICS)).ok().as_deref(), Some(line), "readable at once");
    assert_eq!(fs::read_to_string(path.join(CONFIG)).ok().as_deref(), Some("[run]\n"));
}

#[test]
fn earlier_runs_are_moved_aside() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    for run in 0..3 {
        let mut folder = RunFolder::create(&path, "", &[]).expect("the scratch folder takes files");
        folder.append(&metrics(run)).expect("it takes lines");
    }
    let step = |name: &str| {
        let line = fs::read_to_string(scratch.path().join(name).join(METRICS)).expect(name);
        line.chars().nth(8).expect("the step")
    };
    assert_eq!([step("a.1"), step("a.2"), step("a")], ['0', '1', '2']);
}

#[test]
fn timelines_of_later_steps_are_moved_aside() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    let folder = RunFolder::create(&path, "", &[]).expect("the scratch folder takes files");
    for step in [4, 8, 12] {
        folder.keep_timeline(step, "{}").expect("it takes files");
    }
    folder.drop_timeline(4).expect("the file exists");
    folder.drop_timeline(5).expect("a missing file is not an error");
    let sentence = move_later_timelines(&path, 8).expect("the folder can be written");
    assert!(sentence.is_some_and(|text| text.starts_with("moved 1 timeline of steps after 8 to ")));
    let steps: Vec<u64> =
        kept_timelines(&path).expect("a folder").into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [8]);
    assert!(path.join("timelines.1/step-00000012.json").is_file());
    assert!(move_later_timelines(&path, 8).is_ok_and(|sentence| sentence.is_none()));
}

#[test]
fn a_reopened_run_keeps_the_timeline_of_its_last_step() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    let mut folder = RunFolder::create(&path, "", &[]).expect("the scratch folder takes files");
    (1..=3).for_each(|step| folder.append(&metrics(step)).expect("it takes lines"));
    folder.write_timeline("{}").expect("it takes files");
    drop(folder);
    let lock = RunLock::take(&path).expect("no other process has it");
    drop(RunFolder::reopen(&path, "", 3, lock).expect("the folder takes files"));
    let steps = |path: &Path| -> Vec<u64> {
        kept_timelines(path).expect("a folder").into_iter().map(|(step, _)| step).collect()
    };
    assert_eq!((steps(&path), path.join(TIMELINE).exists()), (vec![3], false));
    // From an earlier checkpoint, it is a timeline of a later step.
    fs::rename(path.join("timelines/step-00000003.json"), path.join(TIMELINE)).expect("a file");
    let lock = RunLock::take(&path).expect("no other process has it");
    drop(RunFolder::reopen(&path, "", 2, lock).expect("the folder takes files"));
    assert_eq!((steps(&path), path.join(TIMELINE).exists()), (vec![], false));
    assert!(path.join("timelines.1/step-00000003.json").is_file());
}

#[test]
fn losses_are_those_of_whole_lines_up_to_the_step() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let check = |text: &str, done: u64, expected: &[f64]| {
        fs::write(scratch.path().join(METRICS), text).expect("it takes files");
        assert_eq!(losses(scratch.path(), done), expected, "{text}");
    };
    let whole = "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":2}\n{\"step\":3,\"loss\":1}\n";
    check(whole, 3, &[3.0, 2.0, 1.0]);
    check(whole, 2, &[3.0, 2.0]);
    check(whole, 0, &[]);
    check("{\"step\":1,\"loss\":3}\n{\"st\n{\"step\":2,\"loss\":2}\n", 2, &[3.0]);
}

#[test]
fn a_reopened_run_goes_on_behind_its_checkpoint() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    let mut folder = RunFolder::create(&path, "old", &[]).expect("the scratch folder takes files");
    (1..=3).for_each(|step| folder.append(&metrics(step)).expect("it takes lines"));
    drop(folder);
    let lock = RunLock::take(&path).expect("no other process has it");
    let mut folder = RunFolder::reopen(&path, "new", 1, lock).expect("the folder takes files");
    folder.append(&metrics(2)).expect("it takes lines");
    let text = fs::read_to_string(path.join(METRICS)).expect("metrics");
    let steps = |text: &str| text.lines().map(|line| line[..9].to_owned()).collect::<Vec<_>>();
    assert_eq!(steps(&text), ["{\"step\":1", "{\"step\":2"]);
    let aside = fs::read_to_string(path.join("metrics.1.jsonl")).expect("the lines that were cut off");
    assert_eq!(steps(&aside), ["{\"step\":2", "{\"step\":3"]);
    let expected =
        format!("moved the metrics of steps after 1 to {}", path.join("metrics.1.jsonl").display());
    assert_eq!(folder.moved(), [expected + ": 2 lines of steps 2 to 3"]);
    assert_eq!(fs::read_to_string(path.join(CONFIG)).ok().as_deref(), Some("new"));
}

#[test]
fn checkpoints_without_metrics_are_moved_aside_too() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    fs::create_dir_all(checkpoints_of(&path).join("step-00000009")).expect("a folder");
    let folder = RunFolder::create(&path, "", &[]).expect("the scratch folder takes files");
    assert_eq!(folder.moved().len(), 1);
    assert!(scratch.path().join("a.1/checkpoints/step-00000009").exists());
    assert!(!checkpoints_of(&path).join("step-00000009").exists());
}

/// The paths that a run can have in its folder.
const OWN: [&str; 42] = [
    "metrics.jsonl",
    "metrics.1.jsonl",
    "config.toml",
    ".config.toml",
    "timeline.json",
    "timeline.json.draft",
    "view.html",
    "report.html",
    "report.html.part",
    "failed-step-7.html",
    "plan.csv",
    "plan-2x3.csv",
    "profile-0123456789abcdef.toml",
    "copies.json",
    ".copies.json",
    "failure.json",
    "failure-others.json",
    ".failure-3.json",
    "restart.json",
    "growth.json",
    "slow-rank.json",
    ".pipewright-space",
    ".nfs000000001",
    "events.out.tfevents.1700000000.pipewright.1",
    "checkpoints/lock",
    "checkpoints/step-00000040/manifest.json",
    "checkpoints/step-00000040/rank-0000.safetensors",
    "checkpoints/.saving-00000041/rank-0001.safetensors",
    "checkpoints/.saving-00000041/rank-0001.note",
    "checkpoints/.saving-00000041/rank-0001.note.draft",
    "checkpoints/.removing-step-00000039/manifest.json",
    "checkpoints.1/step-00000050/manifest.json",
    "timelines/step-00000003.json",
    "timelines/step-00000003.json.draft",
    "timelines.2/step-00000009.json",
    "model/config.json",
    "model/tokenizer.json",
    "model/chat_template.jinja",
    "model/merges.txt",
    "model/weight_types.json",
    "model/generation_config.json",
    "model/special_tokens_map.json",
];

/// Makes a file, and the folders on the way.
fn put(path: &Path) {
    fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
    fs::write(path, "").expect("a file");
}

#[test]
fn everything_that_runs_write_is_moved_aside() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    OWN.iter().for_each(|name| put(&path.join(name)));
    #[cfg(unix)]
    std::os::unix::fs::symlink("step-00000040", path.join("checkpoints/best")).expect("a link");
    let folder = RunFolder::create(&path, "", &[]).expect("all of it is of runs");
    assert_eq!(folder.moved().len(), 1);
    // The owner of the checkpoints removes checkpoints that are not complete.
    let is_kept = |name: &&&str| !name.contains("/.saving-") && !name.contains("/.removing-");
    assert!(OWN.iter().filter(is_kept).all(|name| scratch.path().join("a.1").join(name).exists()));
}

/// Checks that a run in whose folder someone has put these paths is neither moved nor written, with these words.
fn check_kept(paths: &[&str], words: &str) {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    drop(RunFolder::create(&path, "", &[]).expect("a new folder"));
    for name in paths {
        put(&path.join(name.trim_end_matches('/')));
        if name.ends_with('/') {
            let folder = path.join(name.trim_end_matches('/'));
            fs::remove_file(&folder).and_then(|()| fs::create_dir(folder)).expect("a folder");
        }
    }
    for result in [RunFolder::create(&path, "", &[]).map(drop), probe(&path, &[])] {
        let message = result.expect_err("the files are not ours").to_string();
        let expected =
            format!("{}: the folder of the earlier run also has {words}, which no run has", path.display());
        assert!(message.starts_with(&expected), "`{expected}` in: {message}");
    }
    assert!(paths.iter().all(|name| path.join(name).exists()) && !scratch.path().join("a.1").exists());
}

#[test]
fn a_run_with_files_of_the_user_is_not_moved_aside() {
    let one = |path: &str| check_kept(&[path], &format!("`{path}`"));
    [
        "notes.txt",
        ".git/",
        ".env",
        "slurm-123.out",
        "model.safetensors",
        "checkpoints/notes.txt",
        "checkpoints/mine/",
        "checkpoints/step-00000040/notes.txt",
        "checkpoints/step-00000040/export/",
        "timelines/mine.json",
        "model/own.py",
        "metrics.jsonl.bak",
        "metrics.old.jsonl",
        "config.toml.1",
        "events.out.tfevents.1.host",
        "checkpoints.old/",
        "model.1/",
        "best",
        "plan-b.csv",
        "profile-mine.toml",
        "failed-step-x.html",
        "timeline.json/",
        "checkpoints/lock/",
        "data/",
    ]
    .into_iter()
    .for_each(one);
    check_kept(&["a", "b"], "`a` and `b`");
    check_kept(&["d", "a", "b", "c"], "`a`, `b`, `c` and 1 other path");
    check_kept(&["d", "a", "b", "c", "checkpoints/x"], "`a`, `b`, `c` and 2 other paths");
}

/// For example, the checkpoints of a run may be on another disk.

#[test]
fn fingerprints_of_later_steps_are_moved_when_a_run_resumes() {
    const LINES: &str = "{\"step\":1,\"root\":[]}\n{\"step\":2}\n{\"step\":3}\n";
    let check = |text: &str, done: u64, kept: &str, what: Option<&str>| {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let path = scratch.path().join("a");
        drop(RunFolder::create(&path, "", &[]).expect("the scratch folder takes files"));
        fs::write(path.join(FINGERPRINTS), text).expect("a file");
        let lock = RunLock::take(&path).expect("no other process has it");
        let folder = RunFolder::reopen(&path, "", done, lock).expect("the folder takes files");
        let aside = path.join("fingerprints.1.jsonl");
        let moved = what.map(|what| format!("moved {what} to {}", aside.display()));
        assert_eq!(folder.moved().first(), moved.as_ref(), "{text}");
        folder.append_fingerprint(&serde_json::json!({ "step": done + 1 })).expect("it takes lines");
        let expected = format!("{kept}{{\"step\":{}}}\n", done + 1);
        assert_eq!(fs::read_to_string(path.join(FINGERPRINTS)).expect("fingerprints"), expected, "{text}");
        let rest = fs::read_to_string(aside).unwrap_or_default();
        assert_eq!(rest, text[kept.len()..], "no line is lost");
        drop(folder);
        RunFolder::create(&path, "", &[]).expect("the files are those of a run");
    };
    let one = &LINES[..LINES.find("{\"step\":2}").expect("the second line")];
    check(LINES, 3, LINES, None);
    check(LINES, 1, one, Some("the fingerprints of steps after 1"));
    check(LINES, 0, "", Some("the fingerprints of steps after 0"));
    let broken = Some("the fingerprints from a broken line on");
    check(&format!("{LINES}{{\"st"), 3, LINES, broken);
    check(&format!("{one}{{\"step\":2}}"), 2, one, broken);
    let foreign = tempfile::tempdir().expect("a scratch folder");
    fs::write(foreign.path().join(FINGERPRINTS), "mine").expect("a file");
    assert!(probe(foreign.path(), &[]).is_err(), "the file would get lines of a run");
}

#[test]
#[cfg(unix)]
fn a_link_of_the_user_is_moved_and_not_followed() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let (path, elsewhere) = (scratch.path().join("a"), scratch.path().join("elsewhere"));
    put(&elsewhere.join("notes.txt"));
    fs::create_dir(&path).expect("a folder");
    for name in ["checkpoints", "model", "view.html"] {
        std::os::unix::fs::symlink(&elsewhere, path.join(name)).expect("a link");
    }
    let folder = RunFolder::create(&path, "", &[]).expect("the links have names of a run");
    assert_eq!(folder.moved().len(), 1);
    assert!(elsewhere.join("notes.txt").exists() && scratch.path().join("a.1/model/notes.txt").exists());
}

#[test]
fn metrics_of_another_program_are_not_moved_aside() {
    let check = |text: &str, is_ours: bool| {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        fs::write(scratch.path().join(METRICS), text).expect("a file");
        let found = probe(scratch.path(), &[]);
        assert_eq!(found.is_ok(), is_ours, "{text}: {found:?}");
    };
    check("", true);
    check("{\"step\":1,\"loss\":2.5}\n", true);
    check("{\"event\":\"restart\"}\n{\"step\":1}\n", true);
    check("{\"st", true);
    check("{\"epoch\":1}\n", false);
    check("notes\n", false);
    check(&format!("{}\n", "a".repeat(1 << 20)), false);
}

#[test]
fn files_of_no_run_are_kept() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    fs::write(scratch.path().join(CONFIG), "mine").expect("a file");
    for result in [RunFolder::create(scratch.path(), "", &[]).map(drop), probe(scratch.path(), &[])] {
        assert!(
            matches!(&result, Err(RunFolderError::Refused { reason, .. }) if reason.contains("overwritten")),
            "{result:?}"
        );
    }
    assert_eq!(fs::read_to_string(scratch.path().join(CONFIG)).ok().as_deref(), Some("mine"));
}

#[test]
fn a_plan_of_the_user_is_kept() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let file = scratch.path().join("plan.csv");
    fs::write(&file, "mine").expect("a file");
    let files = |text: &str| [("plan.csv".to_owned(), text.to_owned())];
    let create = |text: &str| RunFolder::create(scratch.path(), "", &files(text)).map(drop);
    for result in [create("other"), probe(scratch.path(), &files("other"))] {
        assert!(matches!(&result, Err(RunFolderError::Refused { path, .. }) if *path == file), "{result:?}");
    }
    assert_eq!(fs::read_to_string(&file).ok().as_deref(), Some("mine"));
    create("mine").expect("the file would not change");
}

#[test]
fn a_probe_leaves_no_trace() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    probe(&scratch.path().join("a/b"), &[]).expect("it could be made");
    assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 0);
    fs::write(scratch.path().join("c"), "").expect("a file");
    let found = probe(&scratch.path().join("c/d"), &[]);
    assert!(
        matches!(&found, Err(RunFolderError::Refused { reason, .. }) if reason.starts_with("not a folder")),
        "{found:?}"
    );
}

/// The command locks the checkpoints, and a log of another program the metrics; each refuses the folder of
/// the other.
#[test]
fn a_run_and_a_log_do_not_write_to_one_folder() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    let log = RunLog::open(&path, 0).expect("a new folder");
    let metrics = path.join(METRICS);
    let started = RunFolder::create(&path, "", &[]).expect_err("a log writes to it");
    assert!(matches!(&started, RunFolderError::InUse { path } if *path == metrics), "{started}");
    let resumed = RunLock::take(&path).expect_err("a log writes to it");
    assert!(matches!(&resumed, RunFolderError::InUse { path } if *path == metrics), "{resumed}");
    drop(log);
    let folder = RunFolder::create(&path, "", &[]).expect("the folder is free");
    let logged = RunLog::open(&path, 1).map(drop).expect_err("a run writes to it");
    assert!(matches!(logged, RunLogError::InUse { .. }), "{logged}");
    drop(folder);
    let lock = RunLock::take(&path).expect("the folder is free");
    let logged = RunLog::open(&path, 1).map(drop).expect_err("a run resumes in it");
    assert!(matches!(logged, RunLogError::InUse { .. }), "{logged}");
    drop(lock);
    assert!(RunLog::open(&path, 1).is_ok());
}

#[test]
fn the_lock_of_a_run_that_ends_is_waited_for() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    let folder =
        RefCell::new(Some(RunFolder::create(&path, "", &[]).expect("the scratch folder takes files")));
    let in_use = RunLock::wait(&path, Duration::ZERO, || false).expect_err("the run has not ended");
    assert!(in_use.is_in_use(), "{in_use}");
    RunLock::wait(&path, Duration::MAX, || true).expect_err("a signal ends the wait");
    let (looks, long) = (Cell::new(0), Duration::from_secs(60));
    let end = || {
        looks.set(looks.get() + 1);
        if looks.get() == 2 {
            drop(folder.take());
        }
        false
    };
    RunLock::wait(&path, long, end).expect("the run has ended");
    assert_eq!(looks.get(), 2);
    RunLock::take(&path).expect("the wait leaves no lock");
}

#[test]
fn a_reopened_run_names_lost_lines_and_knows_its_time() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("a");
    let mut folder = RunFolder::create(&path, "", &[]).expect("the scratch folder takes files");
    assert_eq!((folder.lost(), folder.earlier().as_secs_f64()), (None, 0.0));
    for step in [1, 4, 5] {
        folder.append(&metrics(step)).expect("it takes lines");
    }
    drop(folder);
    let lock = RunLock::take(&path).expect("no other process has it");
    let mut folder = RunFolder::reopen(&path, "", 5, lock).expect("the folder takes files");
    let lost = format!("warning: {}: the metrics of steps 2 to 3 are lost, ", path.join(METRICS).display());
    assert!(folder.lost().is_some_and(|warning| warning.starts_with(&lost)), "{:?}", folder.lost());
    assert_eq!((folder.moved().len(), folder.earlier().as_secs_f64()), (0, 1.5));
    // The metrics are replaced, and this process has the right to the file that takes their place.
    let evaluated = Metrics { validation_loss: Some(2.5), ..metrics(5) };
    folder.write_evaluation(&evaluated).expect("it takes lines");
    assert!(matches!(RunLog::open(&path, 5), Err(RunLogError::InUse { .. })));
    folder.append(&metrics(6)).expect("it takes lines");
    let text = fs::read_to_string(path.join(METRICS)).expect("metrics");
    let losses: Vec<bool> = text.lines().map(|line| line.contains("\"validation_loss\":2.5")).collect();
    assert_eq!(losses, [false, false, true, false], "{text}");
}

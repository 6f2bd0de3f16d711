//! Tests of what people see of a run from outside: the figures of `report`, the display of `watch`, and a script that
//! sends metrics to another service.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::Signal;
use serde_json::json;

use crate::run::{Run, finished, signal};

#[test]
fn figures_are_reported_with_the_settings_that_differ() {
    let folder = Run::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| folder.path(name).display().to_string());
    for (out, more) in [(&a, &[][..]), (&b, &["optimizer.learning_rate=0.02", "pipeline.schedule=gpipe"])] {
        let out = format!("run.out={out}");
        folder.train(&[&["run.steps=3", "run.timelines=0", &out], more].concat());
    }
    let found = folder.json(&["report", "a", "b"], &[]);
    let keys: Vec<&str> = found["differences"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|found| found["key"].as_str())
        .collect();
    assert_eq!(keys, ["optimizer.learning_rate", "pipeline.schedule"]);
    assert_eq!(found["differences"][1]["values"], json!(["1f1b", "gpipe"]));
    let [one, other] = [&found["runs"][0], &found["runs"][1]];
    assert_eq!(
        (&one["name"], &one["settings"]["run"]["steps"], &one["events"]),
        (&json!("a"), &json!(3), &json!([]))
    );
    assert_eq!(other["figures"]["steps"], json!(3));
    let losses: Vec<f64> = folder.metrics_in("b").iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert_eq!(other["figures"]["last_loss"], json!(losses[2]));
    let best = losses.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(other["figures"]["best_loss"]["loss"], json!(best));

    let csv = folder.print(&["report", "a", "b", "--format", "csv"]);
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows[0][..4], ["run", "optimizer.learning_rate", "pipeline.schedule", "steps"]);
    assert_eq!(rows[2][..4], ["b", "0.02", "gpipe", "3"]);
    let column = rows[0].iter().position(|name| *name == "last_loss").expect("a column");
    assert_eq!((rows.len(), rows[2][column]), (3, losses[2].to_string().as_str()));
    folder.succeed(&["report", "a", "--format", "csv", "-o", "figures.csv"], &[]);
    assert!(folder.read("figures.csv").starts_with("run,steps,"));
    folder.refuse(
        &["report", "a", "--format", "json", "--follow"],
        &[],
        "--follow needs a page; leave out --format",
    );
    folder.refuse(
        &["report", "a", "--format", "csv", "--open"],
        &[],
        "--open needs a page; leave out --format",
    );
    folder.refuse(&["report", &c, "--format", "csv"], &[], "not the folder of a run");
}

#[test]
fn a_run_is_watched_until_it_ends() {
    let folder = Run::new();
    folder.refuse(&["watch", "out"], &[], "not the folder of a run");
    folder.train(&["run.steps=3"]);
    let (code, _, said) = finished(folder.binary().args(["watch", "out"]));
    assert_eq!(code, Some(0), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("llama  4 layers  "), "{said}");
    assert!(lines[1].starts_with("step 3/3  loss ") && !said.contains("NaN"), "{said}");
    assert_eq!(lines[2..], ["the run has taken all its 3 steps"], "{said}");
    // The process of the run was killed.
    let config = folder.read("out/config.toml").replace("steps = 3", "steps = 30");
    folder.write("out/config.toml", config);
    let ended = "the run has ended after step 3 of 30; continue it with `pipewright resume out`";
    folder.says(&["watch", "out"], &[], ended);
    fs::remove_file(folder.path("out/pipewright-run.json")).expect("a file");
    folder.refuse(&["watch", "out"], &[], "the run has no pipewright-run.json");
}

/// Starts to watch a run. Returns the process when it has shown the run, with its first line and what follows.
fn watched(folder: &Run) -> (Child, String, BufReader<ChildStderr>) {
    let mut command = folder.binary();
    let mut watched =
        command.args(["watch", "out"]).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let mut rest = BufReader::new(watched.stderr.take().expect("a pipe"));
    let mut first = String::new();
    rest.read_line(&mut first).expect("text");
    (watched, first, rest)
}

#[test]
fn a_run_may_be_watched_while_it_goes_back_and_continues() {
    let folder = Run::new();
    let set = ["run.steps=600", "run.checkpoint_every=50", "run.restarts=1", "pipeline.ranks=2"];
    let mut command = folder.binary();
    command.args(["train", "small.toml"]).args(set.iter().flat_map(|set| ["--set", *set]));
    let trained = command.env("PIPEWRIGHT_FAULT", "panic:1:580").stderr(Stdio::null()).spawn();
    let mut trained = trained.expect("the binary starts");
    folder.wait_for_step(2);
    // The fault comes while the run is watched.
    signal(&trained, Signal::STOP);
    let (mut watched, mut said, mut rest) = watched(&folder);
    signal(&trained, Signal::CONT);
    rest.read_to_string(&mut said).expect("text");
    assert!(watched.wait().expect("the process is ours").success(), "{said}");
    assert!(said.contains("; the run continues from step 550 (restart 1 of 1)\n"), "{said}");
    assert!(said.contains("\nstep 600/600  loss "), "{said}");
    assert!(said.ends_with("\nthe run has taken all its 600 steps\n"), "{said}");
    assert!(trained.wait().expect("the process is ours").success());
}

#[test]
fn the_display_ends_without_the_run() {
    let folder = Run::new();
    let mut trained = folder.start("train", &["small.toml"], &["run.steps=1000000"]);
    folder.wait_for_step(2);
    let (mut watched, mut said, mut rest) = watched(&folder);
    signal(&watched, Signal::INT);
    rest.read_to_string(&mut said).expect("text");
    let status = watched.wait().expect("the process is ours");
    assert!(status.success() && said.ends_with("the run continues without this display\n"), "{said}");
    assert!(trained.try_wait().expect("the process is ours").is_none(), "the run continues");
    trained.kill().and_then(|()| trained.wait()).expect("the process is ours");
}

/// The script of the page runs with modules that record what a service would get.
#[test]
fn the_script_of_the_page_sends_all_metrics() {
    let page = include_str!("../../../../docs/trackers.md");
    let script =
        page.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a script");
    assert!(script.lines().count() <= 25, "a short script");
    let folder = Run::new();
    folder.train(&["run.steps=6"]);
    folder.write("track.py", script);
    let module = "import json\ndef init(**about):\n    assert about['config']['run']['steps'] == 6\n\
                  def log(figures, step):\n    open('sent', 'a').write(json.dumps([step, figures]) + '\\n')\n";
    folder.write("wandb.py", module);
    let mut python = Command::new("python3");
    match python.current_dir(folder.root()).args(["track.py", "out"]).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
        ended => {
            let ended = ended.expect("python3");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        }
    }
    let sent: Vec<(u64, serde_json::Value)> =
        folder.read("sent").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let metrics = folder.metrics_in("out");
    assert_eq!(sent.len(), 6);
    for ((step, figures), line) in sent.iter().zip(&metrics) {
        assert_eq!((json!(step), &figures["loss"]), (line["step"].clone(), &line["loss"]));
        assert!(figures.get("bubble_per_rank").is_none() && figures.get("step_ms").is_some(), "{figures}");
    }
}

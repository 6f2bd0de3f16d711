//! Checks every case of the reference's data, with one process for each case.

use serde_json::Value;

use crate::{folder, refuse, run, succeed, write};

fn read(text: &str) -> Value {
    serde_json::from_str(text).expect("golden data is JSON")
}

fn schedules() -> Value {
    read(include_str!("../../../pipewright-schedule/tests/golden/schedules.json"))
}

fn partitions() -> Value {
    read(include_str!("../../../pipewright-schedule/tests/golden/partitions.json"))
}

fn peer_cases() -> Value {
    read(include_str!("../../../pipewright-schedule/tests/golden/peer_cases.json"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn string(value: &Value) -> &str {
    value.as_str().expect("a text")
}

/// Returns a list of numbers in the form that flags accept.
fn commas(value: &Value) -> String {
    list(value).iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

/// Returns the arguments that specify the schedule of a case.
fn size(case: &Value) -> Vec<String> {
    let flags =
        [("--ranks", "ranks"), ("--stages-per-rank", "stages_per_rank"), ("--microbatches", "microbatches")];
    let sizes = flags.into_iter().flat_map(|(flag, key)| [flag.to_owned(), case[key].to_string()]);
    [string(&case["schedule"]).to_owned()].into_iter().chain(sizes).collect()
}

/// Runs `command` on each case that has `key`, with further arguments, and compares its output.
fn check_schedules(command: &str, key: &str, further: &[&str], at_least: usize) {
    let folder = folder();
    let mut judged = 0;
    for case in list(&schedules()) {
        let Some(expected) = case[key].as_str() else { continue };
        let size = size(case);
        let mut arguments = vec![command];
        arguments.extend(size.iter().map(String::as_str));
        arguments.extend(further);
        assert_eq!(succeed(&folder, &arguments), expected, "{arguments:?}");
        judged += 1;
    }
    assert!(judged >= at_least, "only {judged} cases have {key}");
}

#[test]
fn levels_agree() {
    for (key, at_least) in [("compute", 21), ("comms", 21), ("full", 21)] {
        check_schedules("schedule", key, &["--level", key], at_least);
    }
}

#[test]
fn dry_runs_agree() {
    check_schedules("simulate", "simulated", &["--logical", "--format", "csv"], 19);
}

#[test]
fn steps_agree_from_files_of_either_level() {
    let folder = folder();
    for case in list(&schedules()) {
        let Some(steps) = case["steps"].as_u64() else { continue };
        for key in ["compute", "comms"] {
            write(&folder, "schedule.csv", string(&case[key]));
            let json = ["simulate", "--csv", "schedule.csv", "--logical", "--format", "json"];
            assert_eq!(read(&succeed(&folder, &json))["steps"], steps, "{key} of {}", case["schedule"]);
        }
    }
}

#[test]
fn impossible_sizes_are_refused() {
    for case in list(&schedules()).iter().filter(|case| case["error"].is_string()) {
        let size = size(case);
        let arguments: Vec<&str> = ["schedule"].into_iter().chain(size.iter().map(String::as_str)).collect();
        // The reference has these two for at least as many microbatches as stages alone, but they are sound.
        if case["schedule"] == "gpipe" || case["schedule"] == "1f1b" {
            assert_eq!(run(&folder(), &arguments).status.code(), Some(0), "{arguments:?}");
            continue;
        }
        refuse(&folder(), &arguments, 2, "error: ");
    }
}

#[test]
fn partitions_agree() {
    let folder = folder();
    for case in list(&partitions()["partitions"]) {
        let (weights, stages) = (commas(&case["weights"]), case["stages"].to_string());
        let check = |key: &str, further: &[&str]| {
            let mut arguments = vec!["partition", "--weights", &weights, "--method", key, "--format", "json"];
            arguments.extend(further);
            assert_eq!(read(&succeed(&folder, &arguments))["stages"], case[key], "{arguments:?}");
        };
        check("even", &["--stages", &stages]);
        check("weighted", &["--stages", &stages]);
        if case["boundaries"].is_array() {
            check("explicit", &["--boundaries", &commas(&case["boundaries"])]);
        }
    }
}

#[test]
fn virtual_pipelines_agree() {
    let folder = folder();
    for case in list(&partitions()["vpp"]) {
        let [ranks, chunks, microbatches, group] =
            ["pp", "chunks", "microbatches", "group"].map(|key| case[key].to_string());
        let mut arguments = vec!["vpp", "--ranks", &ranks, "--chunks", &chunks];
        arguments.extend(["--microbatches", &microbatches, "--format", "json"]);
        if case["group"].is_u64() {
            arguments.extend(["--group", &group]);
        }
        let found = read(&succeed(&folder, &arguments));
        for key in ["stage_ids", "table", "warmup", "warmup_forward_only"] {
            assert_eq!(found[key], case[key], "{key} of {arguments:?}");
        }
    }
}

/// Returns rows as CSV. The cells are separated by spaces, and `.` is a bubble.
fn csv(rows: &[Value]) -> String {
    let row = |row: &Value| {
        let cells: Vec<&str> =
            string(row).split(' ').map(|cell| if cell == "." { "" } else { cell }).collect();
        cells.join(",") + "\n"
    };
    rows.iter().map(row).collect()
}

/// Runs a pass over rows and compares its output.
fn check_pass(pass: &str, further: &[&str], rows: &[Value], expected: &[Value]) {
    let folder = folder();
    write(&folder, "rows.csv", csv(rows));
    let arguments: Vec<&str> = ["lower", "rows.csv", "--pass", pass].iter().chain(further).copied().collect();
    assert_eq!(succeed(&folder, &arguments), csv(expected), "{arguments:?}");
}

#[test]
fn passes_agree() {
    let cases = peer_cases();
    for case in list(&cases["unshard_reshard"]) {
        check_pass("unshard", &["--microbatches", "2"], &list(case)[..1], &list(case)[1..]);
    }
    for case in list(&cases["merge_bw"]) {
        check_pass("merge-bw", &[], &list(case)[..1], &list(case)[1..]);
    }
    for case in list(&cases["send_recv"]) {
        let map = commas(&case["map"]);
        check_pass("send-recv", &["--stage-to-rank", &map], list(&case["compute"]), list(&case["comms"]));
    }
    for case in list(&cases["defer_recv"]) {
        let map = commas(&case["map"]);
        check_pass("defer-recv", &["--stage-to-rank", &map], list(&case["input"]), list(&case["out"]));
    }
}

#[test]
fn reductions_agree_up_to_the_wait() {
    let folder = folder();
    for case in list(&peer_cases()["reduce_grad_pre215_nmb2"]) {
        write(&folder, "rows.csv", csv(&list(case)[..1]));
        let found = succeed(&folder, &["lower", "rows.csv", "--pass", "reduce-grad", "--microbatches", "2"]);
        // That version of the reference does not wait for the reduction.
        let without_wait: Vec<&str> =
            found.trim_end().split(',').filter(|cell| !cell.contains("WAIT_REDUCE")).collect();
        assert_eq!(without_wait.join(" "), string(&list(case)[1]));
    }
}

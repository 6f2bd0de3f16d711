//! The output of `compare`: the figures of several schedules, and their pictures on one scale.

use std::fs;

use serde_json::{Value, json};

use crate::plans::PROFILE;
use crate::{folder, refuse, succeed, write};

const SIZE: [&str; 4] = ["--ranks", "4", "--microbatches", "16"];

fn compared(names: &[&str], further: &[&str]) -> Vec<Value> {
    let arguments = [&["compare"], names, &SIZE[..], further, &["--format", "json"]].concat();
    let found: Value = serde_json::from_str(&succeed(&folder(), &arguments)).expect("JSON");
    found["schedules"].as_array().expect("a list").clone()
}

fn simulated(further: &[&str]) -> Value {
    let arguments = [&["simulate"], further, &SIZE[..], &["--format", "json"]].concat();
    serde_json::from_str(&succeed(&folder(), &arguments)).expect("JSON")
}

#[test]
fn figures_are_those_of_simulate_for_one_model() {
    let found = compared(&["1F1B", "ZB_H1", "zbv"], &["--cost", "F=1,I=1,W=1,hop=0.1"]);
    let names: Vec<&Value> = found.iter().map(|schedule| &schedule["name"]).collect();
    assert_eq!(names, ["1f1b", "zb-h1", "zbvzerobubble"]);
    // A stage of ZBV has half of a rank's layers.
    let costs = ["F=1,hop=0.1", "F=1,hop=0.1", "F=0.5,I=0.5,W=0.5,hop=0.1"];
    for ((schedule, name), cost) in found.iter().zip(["1f1b", "zb-h1", "zbv"]).zip(costs) {
        let alone = simulated(&[name, "--cost", cost]);
        for key in ["makespan", "bubble_fraction", "peak_activations"] {
            assert_eq!(schedule[key], alone[key], "{key} of {name}");
        }
    }
    // Each of 16 microbatches crosses 3 boundaries forward and 3 backward; with two stages on a rank twice as
    // many.
    assert_eq!(
        found.iter().map(|it| &it["messages"]).collect::<Vec<_>>(),
        [&json!(96), &json!(96), &json!(192)]
    );
}

#[test]
fn a_schedule_that_does_not_exist_at_a_size_has_its_reason() {
    let folder = folder();
    let few = ["--ranks", "4", "--microbatches", "6"];
    let table = succeed(&folder, &[&["compare", "1f1b", "dualpipev"], &few[..]].concat());
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("schedule") && lines[1].starts_with("1f1b "), "{table}");
    assert!(
        lines[2].starts_with("dualpipev") && lines[2].contains("as many microbatches as its 8 stages"),
        "{table}"
    );
    let alone = [&["compare", "dualpipev"], &few[..]].concat();
    refuse(&folder, &alone, 2, "error: no schedule of the list has this size");
    refuse(
        &folder,
        &[&["compare", "1f1b", "nosuch"], &few[..]].concat(),
        2,
        "error: unknown schedule `nosuch`",
    );
    refuse(&folder, &["compare", "1f1b"], 2, "error: --ranks is missing");
    let unused = [&["compare", "1f1b", "gpipe", "--slices", "2"], &few[..]].concat();
    refuse(&folder, &unused, 2, "error: no schedule of the list has the setting `slices`");
    // A setting is for the schedules that have it.
    let sliced = [&["compare", "1f1b", "seq1f1b", "--slices", "3"], &few[..]].concat();
    assert!(succeed(&folder, &sliced).contains("\nseq1f1b "));
}

#[test]
fn a_page_has_the_pictures_on_one_scale() {
    let folder = folder();
    let page =
        [&["compare", "gpipe", "zb-h1", "dualpipev"], &SIZE[..], &["--format", "html", "-o", "c.html"]];
    succeed(&folder, &page.concat());
    let page = fs::read_to_string(folder.path().join("c.html")).expect("the page");
    assert_eq!(page.matches("<svg ").count(), 3);
    for name in ["gpipe", "zb-h1", "dualpipev"] {
        assert!(page.contains(&format!(">{name}</title>")), "{name}");
    }
    // GPipe takes the longest and has the whole width.
    assert!(page.contains("width=\"1100\" height=\"32.00\" fill=\"url(#bubble-0)\""));
    assert!(!page.contains("width=\"1100\" height=\"32.00\" fill=\"url(#bubble-1)\""));
    assert!(!page.contains(" s</text>"), "costs have no unit");
}

#[test]
fn a_profile_gives_seconds_and_bytes() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let arguments = ["compare", "1f1b", "zbv", "--ranks", "2", "--microbatches", "8", "--profile", "p.toml"];
    let table = succeed(&folder, &arguments);
    assert!(
        table.lines().skip(1).take(2).all(|line| line.contains(" ms ") && line.contains("MiB")),
        "{table}"
    );
    let found: Value =
        serde_json::from_str(&succeed(&folder, &[&arguments[..], &["--format", "json"]].concat()))
            .expect("JSON");
    let alone =
        ["simulate", "zbv", "--ranks", "2", "--microbatches", "8", "--profile", "p.toml", "--format", "json"];
    let alone: Value = serde_json::from_str(&succeed(&folder, &alone)).expect("JSON");
    assert_eq!(found["schedules"][1]["makespan"], alone["makespan"]);
    assert_eq!(found["schedules"][1]["peak_bytes"], alone["peak_bytes"]);
    refuse(&folder, &[&arguments[..], &["--cost", "F=2"]].concat(), 2, "error: ");
    let missing = ["compare", "1f1b", "--ranks", "2", "--microbatches", "8", "--profile", "none.toml"];
    refuse(&folder, &missing, 2, "error: none.toml: ");
}

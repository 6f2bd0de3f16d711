//! The output of `simulate`: the published figures, the formats, and the times of the engine.

use serde_json::Value;

use crate::{folder, refuse, succeed, write};

fn simulated(arguments: &[&str]) -> Value {
    let arguments = [&["simulate"], arguments, &["--format", "json"]].concat();
    serde_json::from_str(&succeed(&folder(), &arguments)).expect("JSON")
}

/// Simulates a schedule with 8 ranks, 32 microbatches and `F = I = W`. Compares the bubble from barrier to barrier and
/// the largest peak, relative to that of 1F1B, with the published figures, to their precision.
fn check_published(name: &str, chunks: u32, bubble: f64, peak: f64) {
    let stages_per_rank = chunks.to_string();
    let size = ["--ranks", "8", "--microbatches", "32", "--stages-per-rank", &stages_per_rank];
    let found = simulated(&[&[name], &size[..]].concat());
    let found_bubble = found["bubble_fraction"].as_f64().expect("a number");
    let peaks = found["peak_activations"].as_array().expect("a list").iter().filter_map(Value::as_u64);
    let found_peak = peaks.max().expect("a rank") as f64 / f64::from(8 * chunks);
    assert!((found_bubble - bubble).abs() < 0.0006, "{name}: a bubble of {found_bubble}");
    assert!((found_peak - peak).abs() < 0.006, "{name}: a peak of {found_peak}");
}

#[test]
fn published_figures_come_out() {
    check_published("1f1b", 1, 0.179, 1.0);
    check_published("interleaved1f1b", 4, 0.052, 1.22);
    check_published("zb-h1", 1, 0.068, 1.0);
    check_published("zbvzerobubble", 2, 0.035, 1.0);
    check_published("dualpipev", 2, 0.035, 1.06);
    check_published("v-half", 2, 0.081, 0.62);
    check_published("interleaved-zb-h1", 4, 0.018, 1.0);
}

#[test]
fn each_stage_may_cost_its_own() {
    let makespan = |cost: &str| {
        let found = simulated(&["1f1b", "--ranks", "2", "--microbatches", "2", "--cost", cost]);
        found["makespan"].as_f64().expect("a number")
    };
    // The second rank starts after 1 and is then never idle: 1 + 2 x (3 + 4). The last backward of the first rank
    // follows and takes 2.
    assert_eq!(makespan("F=1:3,B=2:4"), 17.0);
    assert_eq!(makespan("F=1:3"), 13.0, "costs that are left out have their defaults on all stages");
    let arguments = ["simulate", "gpipe", "--ranks", "2", "--microbatches", "2", "--cost", "F=1:2:3"];
    refuse(&folder(), &arguments, 2, "error: 3 entries for the costs of 2 stages");
    for format in ["svg", "html", "trace"] {
        let cost = ["--format", format, "--cost", "F=1:2"];
        let arguments = [&["schedule", "1f1b", "--ranks", "4", "--microbatches", "8"], &cost[..]].concat();
        refuse(&folder(), &arguments, 2, "error: 2 entries for the costs of 4 stages");
    }
}

#[test]
fn the_keys_of_the_contract_are_there() {
    let found = simulated(&["1f1b", "--ranks", "2", "--microbatches", "2", "--cost", "F=2,I=2,W=2,hop=1"]);
    // The forward and the backward of one microbatch on both ranks, two hops, and the time that the second one adds.
    assert_eq!(found["makespan"], 20.0);
    assert_eq!(found["steps"], 10);
    assert_eq!(found["peak_activations"], serde_json::json!([2, 1]));
    for key in ["bubble_fraction", "span_bubble_fraction", "exposed_comm_fraction"] {
        assert!(found[key].as_f64().is_some_and(|it| (0.0..=1.0).contains(&it)), "{key}: {found}");
    }
    assert_eq!(found["bubble_per_rank"].as_array().map(Vec::len), Some(2));
    for step in ["generate", "lower", "validate", "simulate"] {
        assert!(found["engine_ms"][step].as_f64().is_some_and(|ms| ms > 0.0), "{step}: {found}");
    }
}

#[test]
fn ticks_are_counted() {
    let size = ["1f1b", "--ranks", "2", "--microbatches", "2"];
    let found = simulated(&[&size[..], &["--logical"]].concat());
    // Each rank computes four actions in ten ticks, and sends or receives four.
    assert_eq!((&found["makespan"], &found["steps"]), (&Value::from(10.0), &Value::from(10)));
    assert_eq!((&found["bubble_fraction"], &found["exposed_comm_fraction"]), (&0.6.into(), &0.4.into()));
    let grid = [&["simulate"], &size[..], &["--logical", "--format", "grid"]].concat();
    let row = "rank 1  .    1RECV_F0  1F0  1RECV_F1  1B0  1SEND_B0  1F1  1B1  1SEND_B1\n";
    assert!(succeed(&folder(), &grid).ends_with(row));
    let refuse_grid = |further: &[&str], advice: &str| {
        let arguments = [&["simulate"], &size[..], &["--format", "grid"], further].concat();
        let message =
            format!("error: --format grid has one column per tick; {advice}, or use --format svg\n");
        refuse(&folder(), &arguments, 2, &message);
    };
    refuse_grid(&[], "add --logical");
    let choices = [["--profile", "p.toml"], ["--cost", "F=2"], ["--recompute", "stage"]];
    for choice in choices {
        let flag = choice[0];
        let advice = format!("--logical has them, without costs: leave {flag} out and add --logical");
        refuse_grid(&choice, &advice);
    }
}

#[test]
fn people_read_the_engines_clock() {
    let found = succeed(&folder(), &["simulate", "1F1B", "--ranks", "2", "--microbatches", "2"]);
    assert!(found.starts_with("1f1b: 2 ranks, 2 stages, 2 microbatches\nmakespan   9 s, 10 logical steps\n"));
    let alias = succeed(&folder(), &["simulate", "Schedule1F1B", "--ranks", "2", "--microbatches", "2"]);
    assert_eq!(alias.lines().next(), found.lines().next(), "the schedule has one name");
    let last = found.lines().last().expect("a line");
    for step in ["engine ", " ms: generate ", ", lower ", ", validate ", ", simulate "] {
        assert!(last.contains(step), "{last}");
    }
}

#[test]
fn costs_make_the_greedy_schedule() {
    let folder = folder();
    let made = |cost: &str| {
        let size = ["zb-greedy", "--ranks", "3", "--microbatches", "6"];
        succeed(&folder, &[&["schedule"], &size[..], &["--cost", cost]].concat())
    };
    assert_eq!(made("F=1,I=1,W=1"), made("F=0.1,I=0.1,W=0.1"));
    assert_ne!(made("F=1,I=1,W=1"), made("F=1,I=3,W=1,hop=2"));
    let limited = ["schedule", "zb-greedy", "--ranks", "3", "--microbatches", "6", "--memory-limit", "1"];
    assert!(succeed(&folder, &limited).starts_with("0F0,0I0,0W0,0F1,"));
}

#[test]
fn every_format_comes_from_names_and_files() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1F0,1B0\n");
    let beginnings = [
        ("text", "s.csv: 2 ranks"),
        ("json", "{\"makespan\":6.0,"),
        ("csv", "rank,action,start,end\n0,0F0,0,1\n0,0SEND_F0,1,1\n"),
        ("trace", "{\"displayTimeUnit\":\"ms\","),
        ("svg", "<svg "),
        ("html", "<!DOCTYPE html>"),
    ];
    for (format, beginning) in beginnings {
        let found = succeed(&folder, &["simulate", "--csv", "s.csv", "--format", format]);
        assert!(found.starts_with(beginning), "{format}: {}", &found[..80.min(found.len())]);
    }
    for (format, beginning) in &beginnings[3..] {
        let drawn = ["schedule", "dualpipev", "--ranks", "2", "--microbatches", "4", "--format", format];
        assert!(succeed(&folder, &drawn).starts_with(beginning), "{format}");
    }
}

#[test]
fn pictures_of_schedules_are_to_scale() {
    let drawn = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--format", "svg"];
    let found = succeed(&folder(), &drawn);
    assert!(found.contains("<title>0B0 on rank 0, 4 s to 6 s</title>"), "a backward takes two units");
    assert!(found.contains("bubble, 33.3 %"));
}

#[test]
fn unsound_files_are_not_simulated() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1B0,1F0\n");
    refuse(
        &folder,
        &["simulate", "--csv", "s.csv"],
        3,
        "error: s.csv: unsound program, 1 violation; the first",
    );
    refuse(&folder, &["simulate", "--csv", "none.csv"], 2, "error: none.csv: cannot read the schedule");
    let beside = ["simulate", "--csv", "s.csv", "--ranks", "2"];
    refuse(&folder, &beside, 2, "error: --ranks follows from the file of --csv; leave it out\n");
}

#[test]
fn a_backward_that_computes_its_forward_again_takes_longer_and_holds_less() {
    let size = ["1f1b", "--ranks", "2", "--microbatches", "3"];
    let found = simulated(&[&size[..], &["--recompute", "stage"]].concat());
    // On rank 1 each backward follows its forward at once, so only rank 0 computes three seconds more. Two of them are in
    // bubbles.
    assert_eq!((simulated(&size)["makespan"].as_f64(), found["makespan"].as_f64()), (Some(12.0), Some(13.0)));
    assert_eq!(found["peak_activations"], serde_json::json!([1, 1]));
    assert_eq!(simulated(&[&size[..], &["--recompute", "1"]].concat())["makespan"], 12.0);
    let print = |format| {
        succeed(&folder(), &[&["simulate"], &size[..], &["--recompute", "0", "--format", format]].concat())
    };
    let csv = print("csv");
    assert!(["\n0,0F0,2,3\n", "\n0,0B0,4,6\n"].iter().all(|line| csv.contains(line)), "{csv}");
    // The second forward is a cell of its own in pictures and a slice of its own in traces.
    assert_eq!(print("svg").matches("<title>0F0 on rank 0, ").count(), 2);
    assert_eq!(print("trace").matches("\"action\":\"0F0\"").count(), 2);
    assert_ne!(
        print("html"),
        succeed(&folder(), &[&["simulate"], &size[..], &["--format", "html"]].concat())
    );
    let refused = |choice: &str, message: &str| {
        refuse(&folder(), &[&["simulate"], &size[..], &["--recompute", choice]].concat(), 2, message);
    };
    refused("2", "error: stage 2 of 2 is to be recomputed; name stages that exist");
}

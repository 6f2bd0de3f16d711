//! The expected goodput of plans for clusters.

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster_plans::{planned, with_model};
use crate::{run, succeed, text};

/// Returns the plans for Llama 3 8B on two nodes as JSON.
fn json(folder: &TempDir, more: &[&str]) -> Value {
    let output = succeed(folder, &planned(&[more, &["--format", "json"]].concat()));
    serde_json::from_str(&output).expect("JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("a number: {value}"))
}

/// Checks that arguments are refused as wrong input.
fn refuse(folder: &TempDir, arguments: &[&str], message: &str) {
    let output = run(folder, arguments);
    let words = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {words}");
    assert!(words.contains(message), "{arguments:?}: {words}");
}

fn check(more: &[&str], message: &str) {
    refuse(&with_model(), &planned(more), message);
}

/// Failures that are frequent, so that each share is noticeable.
const FAULTS: [&str; 8] = [
    "--gpu-mtbf",
    "16h",
    "--checkpoint-size",
    "100GB",
    "--checkpoint-bandwidth",
    "5GB/s",
    "--restart-time",
    "2m",
];

#[test]
fn a_plan_has_the_goodput_of_the_published_rate() {
    let folder = with_model();
    let report = json(&folder, &["--goal", "tokens=15.6T"]);
    let faults = &report["faults"];
    assert!((number(&faults["between_failures_s"]) - 50_676.0 * 3600.0 / 16.0).abs() < 1e-3, "{faults}");
    assert_eq!(number(&faults["write_bytes_per_s"]), 2e9);
    assert_eq!([number(&faults["restart_s"]), number(&faults["seed"])], [300.0, 42.0]);
    // 12 bytes of each of 8.03 billion parameters.
    let bytes = number(&faults["checkpoint_bytes"]);
    assert!((bytes / 12.0 / 8.03e9 - 1.0).abs() < 1e-3, "{bytes}");
    assert_eq!(number(&faults["stall_s"]), bytes / 2e9);
    let text = succeed(&folder, &planned(&["--goal", "tokens=15.6T"]));
    let line = text.lines().find(|line| line.starts_with("      goodput ")).expect("a line");
    assert!(
        line.contains("; checkpoints 0.1% (every ") && line.contains("; a failure every 132 days; "),
        "{line}"
    );
    assert!(line.ends_with(" days with failures"), "{line}");
    assert!(text.contains("\ngoodput: checkpoints of 89.7 GiB written with 1.9 GiB/s, each stops"), "{text}");
}

#[test]
fn shares_sum_to_one_and_agree_with_the_closed_form() {
    let folder = with_model();
    let report = json(&folder, &FAULTS);
    assert_eq!(report["faults"]["between_failures_s"], 3600.0);
    assert_eq!(report["faults"]["stall_s"], 20.0);
    for plan in report["plans"].as_array().expect("plans") {
        let goodput = &plan["goodput"];
        let shares = ["useful", "checkpoints", "repeated", "restarts"].map(|key| number(&goodput[key]));
        assert!(
            (shares.iter().sum::<f64>() - 1.0).abs() < 1e-9 && shares.iter().all(|share| *share > 0.01),
            "{goodput}"
        );
        let (step, steps) = (number(&plan["predicted_step_s"]), number(&goodput["checkpoint_every"]));
        let (mean, cost, restart) = (3600.0, 20.0, 120.0_f64);
        let computed = steps * step;
        let expected = computed / (mean * (restart / mean).exp() * ((computed + cost) / mean).exp_m1());
        assert!((number(&goodput["closed_form"]) - expected).abs() < 1e-12, "{goodput}");
        assert!((shares[0] - expected).abs() < 0.004, "{goodput}, {expected}");
        // Young's interval, which is within a few percent of the chosen one.
        let young = (2.0 * cost * mean).sqrt();
        assert!((computed / young - 1.0).abs() < 0.1, "{computed}, {young}");
    }
    assert_eq!(json(&folder, &FAULTS)["plans"], report["plans"], "the same seed");
    let other = json(&folder, &[&FAULTS[..], &["--failure-seed", "7"]].concat());
    assert_ne!(other["plans"][0]["goodput"]["useful"], report["plans"][0]["goodput"]["useful"]);
}

#[test]
fn inputs_change_the_goodput_as_they_should() {
    let folder = with_model();
    let goodput = |more: &[&str]| json(&folder, &[&FAULTS[..], more].concat())["plans"][0]["goodput"].clone();
    let best = goodput(&[]);
    let seldom = goodput(&["--checkpoint-every", "1000"]);
    assert_eq!(seldom["checkpoint_every"], 1000);
    assert!(
        number(&seldom["useful"]) < number(&best["useful"])
            && number(&seldom["repeated"]) > number(&best["repeated"])
    );
    let behind = goodput(&["--checkpoint-stall", "500ms"]);
    assert!(number(&behind["useful"]) > number(&best["useful"]), "{behind}");
    assert_eq!(behind.get("closed_form"), None);
    // Two nodes of 8 GPUs.
    let mut nodes = FAULTS;
    (nodes[0], nodes[1]) = ("--node-mtbf", "2h");
    assert_eq!(json(&folder, &nodes)["plans"][0]["goodput"], best);
}

#[test]
fn bad_inputs_are_refused() {
    for flag in ["--gpu-mtbf", "--node-mtbf"] {
        for wrong in ["0s", "-3h", "24", "soon", "nan h", "1e300d"] {
            check(&[&format!("{flag}={wrong}")], "write a time such as 50000h, 30d or 90s, of at least 1s");
        }
    }
    for wrong in ["0GB/s", "5GB", "fast", "-1GB/s"] {
        check(&[&format!("--checkpoint-bandwidth={wrong}")], "write a bandwidth such as 2TB/s or 500GB/s");
    }
    check(&["--checkpoint-size=0"], "write a size such as 16GiB");
    check(&["--restart-time=-1s"], "write a time such as 50000h, 30d or 90s");
    check(&["--checkpoint-every=0"], "0 is not in 1..=1000000000");
    check(&["--gpu-mtbf=1h", "--node-mtbf=8h"], "cannot be used with");
    check(
        &[&FAULTS[..], &["--checkpoint-stall", "21s"]].concat(),
        "--checkpoint-stall is 21 s, but a checkpoint of 93.1 GiB is written in 20.000 s; use a shorter time",
    );
    // The rate of the A100 is not known.
    let folder = with_model();
    let a100 =
        ["plan", "config.json", "--cluster", "a100", "--nodes", "2", "--batch", "64", "--seq-len", "8192"];
    refuse(
        &folder,
        &[&a100[..], &["--restart-time", "1m"]].concat(),
        "--restart-time has no effect, because no rate of failures is known for A100 80 GB SXM (Selene); give --gpu-mtbf",
    );
    assert!(!succeed(&folder, &a100).contains("goodput"));
    refuse(&folder, &["plan", "--gpu-mtbf", "1h"], "--cluster");
}

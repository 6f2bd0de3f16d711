//! Verdicts for the communicators of other systems.

use serde_json::{Value, json};

use super::{folder, refuse, run, succeed, text, write};

/// Two ranks that both send before they receive, with the first microbatch's gradient against the second
/// one's activation.
const BOTH_SEND_FIRST: &str = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                               1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";

#[test]
fn every_transport_has_its_verdict() {
    let folder = folder();
    write(&folder, "s.csv", BOTH_SEND_FIRST);
    let faults =
        "error: s.csv: the schedule is not sound on every transport: pair: may hang; rank: may hang\n";
    refuse(&folder, &["validate", "s.csv", "--transport", "all"], 3, faults);
    let shown = text(&run(&folder, &["validate", "s.csv", "--transport", "all"]).stdout);
    for line in ["buffered   sound  ", "edge       sound  ", "pair       may hang  ", "rank       may hang  "]
    {
        assert!(shown.lines().any(|shown| shown.starts_with(line)), "{line}\n{shown}");
    }
    assert!(
        shown.contains("\nrank: may hang\n  rank 0 at position 4 (0RECV_B0) runs after 0SEND_F1"),
        "{shown}"
    );
    for sound in [
        &["--transport", "edge"][..],
        &["--transport", "rank", "--eager", "1024"],
        &["--transport", "rank", "--eager", "1024", "--message-bytes", "1024"],
        &["--transport", "all", "--grouped"],
    ] {
        succeed(&folder, &[&["validate", "s.csv"], sound].concat());
    }
    let none = ["validate", "s.csv", "--transport", "rank", "--eager", "0"];
    refuse(&folder, &none, 3, "error: s.csv: the schedule is not sound on every transport: rank: may hang\n");
    let large = ["validate", "s.csv", "--transport", "pair", "--eager", "1023", "--message-bytes", "1024"];
    refuse(
        &folder,
        &large,
        3,
        "error: s.csv: the schedule is not sound on every transport: pair: may hang\n",
    );
}

#[test]
fn scripts_get_verdicts_and_violations() {
    let folder = folder();
    let object = |arguments: &[&str]| -> Value {
        let output = run(&folder, &[&["validate", "s.csv", "--format", "json"], arguments].concat());
        serde_json::from_slice(&output.stdout).expect("an object")
    };
    write(&folder, "s.csv", "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n");
    let why = "rank 1, position 0: 1RECV_F1 gets the tensor of 0SEND_F0 from rank 0";
    let crossed = json!({ "edge": why, "pair": why, "rank": why });
    let all = json!({ "buffered": "sound", "edge": "crossed", "pair": "crossed", "rank": "crossed", "why": crossed });
    assert_eq!(object(&["--transport", "all"]), all);
    assert_eq!(object(&[])["sound"], false);
    assert_eq!(object(&[])["violations"][0]["rank"], 1);
    write(&folder, "s.csv", "0F0,0B0\n1F0,1B0\n");
    assert_eq!(object(&[])["sound"], true);
    assert_eq!((object(&[])["microbatches"].clone(), object(&[])["slices"].clone()), (json!(1), json!(1)));
    write(&folder, "s.csv", "0F0,0B0\n0F1,0B1\n");
    assert_eq!(object(&[])["sound"], false);
    write(&folder, "s.csv", "0F0,0SEND_F0\n1RECV_F0\n");
    assert_eq!(object(&["--transport", "edge"])["violations"][0]["position"], 1);
}

#[test]
fn arguments_of_transports_are_checked() {
    let folder = folder();
    write(&folder, "s.csv", "0F0,0B0\n1F0,1B0\n");
    let validate = |arguments: &[&'static str]| [&["validate", "s.csv"], arguments].concat();
    let lower = "error: s.csv: the schedule has no messages, which a transport could order; run `pipewright lower s.csv";
    refuse(&folder, &validate(&["--transport", "all"]), 2, lower);
    refuse(&folder, &validate(&["--transport", "nccl"]), 2, "error: invalid value 'nccl' for '--transport");
    refuse(
        &folder,
        &validate(&["--eager", "1"]),
        2,
        "error: the following required arguments were not provided",
    );
    refuse(
        &folder,
        &validate(&["--grouped"]),
        2,
        "error: the following required arguments were not provided",
    );
}

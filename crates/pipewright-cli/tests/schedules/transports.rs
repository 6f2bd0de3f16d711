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
    let grid = "error: --format grid marks violations, and --transport prints verdicts";
    refuse(&folder, &validate(&["--transport", "edge", "--format", "grid"]), 2, grid);
    write(&folder, "s.csv", BOTH_SEND_FIRST);
    let level = "error: --level compute leaves out the messages, which --transport judges; leave --level out";
    refuse(&folder, &validate(&["--transport", "edge", "--level", "compute"]), 2, level);
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

/// Rank 1 receives the second activation in front of the first gradient.
const RECEIVE_IN_FRONT: &str = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                                1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";

#[test]
fn a_simulation_has_the_price_of_a_transport() {
    let folder = folder();
    write(&folder, "s.csv", RECEIVE_IN_FRONT);
    let simulate = |arguments: &[&str]| {
        succeed(&folder, &[&["simulate", "--csv", "s.csv", "--cost", "hop=5"], arguments].concat())
    };
    let pair = simulate(&["--transport", "pair"]);
    assert!(pair.contains("\nmakespan   26 units, 10 logical steps\n"), "{pair}");
    let price = "\ntransport  pair: 36.8% longer than the 19 units with buffered messages\n";
    assert!(pair.contains(price), "{pair}");
    let eager = simulate(&["--transport", "pair", "--eager", "1"]);
    assert!(eager.contains("\ntransport  pair: as fast as buffered messages\n"), "{eager}");
    let json: Value =
        serde_json::from_str(&simulate(&["--transport", "edge", "--format", "json"])).expect("JSON");
    assert_eq!((&json["makespan"], &json["buffered_makespan"]), (&json!(23.0), &json!(19.0)));
    assert_eq!((json["transport"].as_str(), json["price"].as_f64()), (Some("edge"), Some(23.0 / 19.0 - 1.0)));
    let events = simulate(&["--transport", "pair", "--format", "csv"]);
    assert!(events.contains("1,1SEND_B0,12,17\n"), "{events}");
    // The default does not change.
    let without =
        |text: &str| text.lines().filter(|line| !line.starts_with("engine")).collect::<Vec<_>>().join("\n");
    let buffered = simulate(&["--transport", "buffered"]);
    let line = "transport  buffered: as fast as buffered messages\n";
    assert_eq!(without(&buffered.replace(line, "")), without(&simulate(&[])));
}

#[test]
fn all_transports_are_compared_in_a_table() {
    let folder = folder();
    write(&folder, "s.csv", RECEIVE_IN_FRONT);
    write(&folder, "both.csv", BOTH_SEND_FIRST);
    let all = ["--cost", "hop=5", "--transport", "all"];
    let table = succeed(&folder, &[&["simulate", "--csv", "s.csv"], &all[..]].concat());
    let expected = "s.csv: 2 ranks, 2 stages, 2 microbatches\n\
        transport  verdict                  time     price  bubble  exposed\n\
        buffered   sound                      19     +0.0%   68.4%    28.9%\n\
        edge       sound                      23    +21.1%";
    assert!(table.starts_with(expected), "{table}");
    let hangs = succeed(&folder, &[&["simulate", "--csv", "both.csv"], &all[..]].concat());
    assert!(hangs.contains("\npair       may hang\nrank       may hang\n"), "{hangs}");
    assert!(hangs.contains("\npair: may hang\n  rank 0 at position 4 (0RECV_B0) runs after"), "{hangs}");
    let json = succeed(&folder, &[&["simulate", "--csv", "both.csv", "--format", "json"], &all[..]].concat());
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["transports"][0]["price"], 0.0);
    assert_eq!(json["transports"][3]["verdict"], "may hang");
    assert!(json["transports"][3]["why"].as_str().is_some_and(|why| why.starts_with("rank 0 at position 4")));
    let named = ["simulate", "zbvzerobubble", "--ranks", "4", "--microbatches", "8", "--transport", "all"];
    let lines = succeed(&folder, &named).lines().filter(|line| line.contains("  sound  ")).count();
    assert_eq!(lines, 4);
}

#[test]
fn simulations_on_a_transport_refuse_what_is_not_sound() {
    let folder = folder();
    write(&folder, "s.csv", BOTH_SEND_FIRST);
    let simulate = |arguments: &[&'static str]| [&["simulate", "--csv", "s.csv"], arguments].concat();
    let hang = "error: s.csv: on the transport rank, the program may hang: rank 0 at position 4 (0RECV_B0) runs after";
    refuse(&folder, &simulate(&["--transport", "rank"]), 3, hang);
    succeed(&folder, &simulate(&["--transport", "edge"]));
    let logical = "error: --logical has no messages that take time";
    refuse(&folder, &simulate(&["--transport", "rank", "--logical"]), 2, logical);
    let table = "error: --transport all prints a table; use --format text or json";
    refuse(&folder, &simulate(&["--transport", "all", "--format", "svg"]), 2, table);
    let grid = "error: --format grid has one column per tick; --logical has them, without costs and transports: leave \
                --transport out";
    refuse(&folder, &simulate(&["--transport", "edge", "--format", "grid"]), 2, grid);
    write(&folder, "s.csv", "0F0,0SEND_F0\n1RECV_F0\n");
    refuse(&folder, &simulate(&["--transport", "edge"]), 3, "error: s.csv: unsound program, 1 violation");
}

#[test]
fn order_safe_repairs_a_program_for_a_transport() {
    let folder = folder();
    write(&folder, "s.csv", BOTH_SEND_FIRST);
    let lower = |arguments: &[&'static str]| [&["lower", "s.csv", "--pass"], arguments].concat();
    for arguments in [&["order-safe", "--transport", "pair"][..], &["order-safe=pair"], &["order-safe"]] {
        let ordered = succeed(&folder, &lower(arguments));
        assert_eq!(
            ordered.lines().nth(1),
            Some("1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1"),
            "{arguments:?}"
        );
        write(&folder, "ordered.csv", &ordered);
        succeed(&folder, &["validate", "ordered.csv", "--transport", "all"]);
    }
    // It is sound on edges, so nothing changes.
    assert_eq!(succeed(&folder, &lower(&["order-safe", "--transport", "edge"])), BOTH_SEND_FIRST);
    assert_eq!(succeed(&folder, &lower(&["order-safe=rank:grouped"])), BOTH_SEND_FIRST);
    refuse(&folder, &lower(&["order-safe=nccl"]), 2, "error: invalid value 'order-safe=nccl'");
    let all = "error: --transport all compares transports, and a program has one";
    refuse(&folder, &lower(&["order-safe", "--transport", "all"]), 2, all);
    // `rank` is the default of the pass.
    for pass in ["order-safe=edge", "order-safe=rank"] {
        let twice = format!("error: --transport pair and --pass {pass} are given; leave one setting out");
        refuse(&folder, &lower(&[pass, "--transport", "pair"]), 2, &twice);
    }
    let other = "error: --transport pair belongs to the pass order-safe, which --pass does not name";
    refuse(&folder, &lower(&["wait-send", "--transport", "pair"]), 2, other);
    write(&folder, "s.csv", "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n");
    let idle = "error: s.csv: the rows have no messages, so the pass order-safe has no effect";
    refuse(&folder, &lower(&["order-safe"]), 2, idle);
    write(
        &folder,
        "s.csv",
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
    );
    let none = "error: s.csv: no rank can continue: rank 0 at position 3 (0B0) waits for rank 1, rank 1 at position 3 (1F1)";
    refuse(&folder, &lower(&["order-safe"]), 3, none);
}

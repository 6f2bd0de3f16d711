//! `simulate --delay 1`: the steady state of batches that overlap.

use serde_json::{Value, json};

use crate::{folder, refuse, split, succeed};

fn steady(arguments: &str) -> Value {
    let arguments = format!("simulate {arguments} --delay 1 --format json");
    serde_json::from_str(&succeed(&folder(), &split(&arguments))).expect("JSON")
}

#[test]
fn the_steady_state_has_a_period_and_no_bubble() {
    let found = steady("1F1B --ranks 4 --microbatches 4");
    assert_eq!(
        (&found["delay"], &found["period"], &found["bubble_fraction"]),
        (&json!(1), &json!(12.0), &json!(0.0))
    );
    assert_eq!(found["peak_activations"], json!([4, 3, 2, 1]));
    let found = steady("zb-h1 --ranks 4 --microbatches 4 --cost F=2,I=2,W=2");
    assert_eq!((&found["period"], &found["bubble_fraction"]), (&json!(24.0), &json!(0.0)));
}

#[test]
fn a_file_overlaps_as_its_schedule_does() {
    let folder = folder();
    let size = "--ranks 2 --microbatches 4";
    succeed(&folder, &split(&format!("schedule 1f1b {size} -o mine.csv")));
    let of_file = succeed(&folder, &split("simulate --csv mine.csv --delay 1"));
    let of_name = succeed(&folder, &split(&format!("simulate 1f1b {size} --delay 1")));
    let figures = |text: &str| text.lines().skip(1).take(4).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(figures(&of_file), figures(&of_name));
    assert_eq!(of_name.lines().next(), Some("1f1b: 2 ranks, 2 stages, 8 batches of 4 microbatches"));
}

#[test]
fn pictures_and_events_have_three_batches() {
    let folder = folder();
    let command = "simulate 1f1b --ranks 2 --microbatches 4 --delay 1 --format";
    let events = succeed(&folder, &split(&format!("{command} csv")));
    assert!(events.contains(",0F11,") && !events.contains(",0F12,"), "{events}");
    let picture = succeed(&folder, &split(&format!("{command} svg -o -")));
    assert!(picture.contains("3 batches of 4 microbatches"), "{picture}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |arguments: &str, words: &str| {
        refuse(&folder(), &split(&format!("simulate {arguments}")), 2, &format!("error: {words}"));
    };
    let size = "1f1b --ranks 2 --microbatches 4";
    refused(
        &format!("{size} --delay 1 --logical"),
        "--delay 1 does not work with --logical, which has no costs",
    );
    refused(&format!("{size} --delay 1 --transport pair"), "--delay 1 does not work with --transport");
    refused(
        &format!("{size} --delay 1 --format activations"),
        "--delay 1 does not work with --format activations",
    );
    refused(&format!("{size} --delay 2"), "invalid value '2' for '--delay <0|1>'");
    refused("1f1b --ranks 512 --microbatches 512 --delay 1", "515 batches of 524288 computations");
    refused("1f1b --ranks 2048 --microbatches 2048 --delay 1", "2051 batches of 8388608 computations");
}

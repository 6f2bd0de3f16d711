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
fn a_page_has_three_batches() {
    let folder = folder();
    let command = "view 1f1b --ranks 2 --microbatches 4 -o page.html";
    let page = |more: &str| {
        succeed(&folder, &split(&format!("{command}{more}")));
        std::fs::read_to_string(folder.path().join("page.html")).expect("a page")
    };
    let (delayed, alone) = (page(" --delay 1"), page(""));
    assert!(delayed.contains("3 batches of 4 microbatches") && !alone.contains("batches of"), "{delayed}");
    let refused =
        |arguments: &str, words: &str| refuse(&folder, &split(arguments), 2, &format!("error: {words}"));
    refused(&format!("{command} --delay 1 --transport pair"), "--delay 1 does not work with --transport");
    refused("view . --delay 1", "--delay is for schedules");
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

/// With equal layers and few microbatches, the pipeline drains for a large part of a step, which a delay saves. Only a plan
/// that may be delayed says so, with what it assumes.
#[test]
fn a_plan_compares_delayed_weights_if_they_are_allowed() {
    const PROFILE: &str = "[device]\nname = \"by hand\"\n[link]\nlatency_s = 1e-6\nbytes_per_s = 1e12\n[[layers]]\nkind = \"block\"\n\
                           count = 4\nforward_s = 1e-2\ninput_backward_s = 1e-2\nweight_backward_s = 1e-2\noptimizer_s = 1e-4\n\
                           output_bytes = 1024\nparameter_bytes = 1048576\nactivation_bytes = 65536\n";
    let folder = folder();
    std::fs::write(folder.path().join("p.toml"), PROFILE).expect("a file");
    let plan = "plan --profile p.toml --ranks 4 --microbatches 4 --data-parallel 1";
    let json = |more: &str| -> Value {
        let text = succeed(&folder, &split(&format!("{plan} --format json {more}")));
        serde_json::from_str(&text).expect("JSON")
    };
    assert!(json("").get("delayed").is_none());
    let found = json("--allow-delay");
    let (best, delayed) = (&found["plans"][0], &found["delayed"]);
    let [alone, with] = [&best["predicted_step_s"], &delayed["best"]["predicted_step_s"]].map(Value::as_f64);
    assert!(with < alone && delayed["is_faster"] == true, "{delayed} {best}");
    // The work of a rank, and the update.
    assert!(with.is_some_and(|time| (time - 0.1201).abs() < 1e-3), "{delayed}");
    let peak = |plan: &Value| plan["peak_bytes"][0].as_u64().unwrap_or_default();
    let plan_of_best = &found["plans"][delayed["best"]["plan"].as_u64().expect("an index") as usize];
    // A second version of the parameters, and second gradients.
    assert!(peak(&delayed["best"]) >= peak(plan_of_best) + 2 * 1_048_576, "{delayed} {plan_of_best}");
    let text = succeed(&folder, &split(&format!("{plan} --allow-delay")));
    assert!(
        text.contains("faster: set optimizer.delay = 1") && text.contains("assumed: the losses"),
        "{text}"
    );
    let tight = succeed(&folder, &split(&format!("{plan} --allow-delay --memory 5MiB")));
    assert!(tight.contains("with delayed weights: no plan fits"), "{tight}");
}

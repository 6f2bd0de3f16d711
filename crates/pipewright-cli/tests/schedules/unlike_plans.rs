//! Tests of `plan` for unlike ranks: what it says of each of them, and the configuration that it writes.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::plans::PROFILE;
use crate::{folder, refuse, split, succeed, write};

const UNLIKE: &str = "[[rank]]\nspeed = 3\n[[rank]]\n[[rank]]\nspeed = 0.01\n";

fn report(output: &str) -> Value {
    serde_json::from_str(output).expect("JSON")
}

fn config(folder: &TempDir) -> toml::Table {
    let text = std::fs::read_to_string(folder.path().join("planned.toml")).expect("the configuration");
    text.parse().expect("TOML")
}

#[test]
fn a_plan_says_what_each_rank_does() {
    let folder = folder();
    write(&folder, "p.toml", format!("{PROFILE}{UNLIKE}"));
    let plan = "plan --profile p.toml --ranks 3 --microbatches 12 --time-limit 10m -o planned.toml";
    let text = succeed(&folder, &split(plan));
    for expected in [
        "rank 0 of the profile: stage ",
        ", busy ",
        ", idle ",
        "rank 1 of the profile: stage ",
        "rank 2 of the profile is left out: no faster plan with it was found\n        estimated step: ",
        " if it were twice as fast, ",
        " without it",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let json = report(&succeed(&folder, &split(&format!("{plan} --format json"))));
    assert_eq!(json["plans"][0]["machines"], json!([0, 1]), "{json}");
    assert_eq!(json["machines"][2]["rank"], Value::Null);
    let config = config(&folder);
    assert_eq!(config["pipeline"]["ranks"], toml::Value::from(2));
    assert_eq!(config["mesh"].get("batch_shares"), None);
}

#[test]
fn unlike_replicas_share_the_rows_of_a_step() {
    let folder = folder();
    write(&folder, "p.toml", format!("rows = 4\n{PROFILE}{UNLIKE}"));
    let plan = "plan --profile p.toml --ranks 3 --microbatches 12 --data-parallel 2 --time-limit 10m -o planned.toml";
    let text = succeed(&folder, &split(plan));
    for expected in [
        "rank 0 of the profile, rank 0 of replica 0 with 18 rows of each microbatch: stage 0 ",
        "rank 1 of the profile, rank 0 of replica 1 with 6 rows of each microbatch: stage 0 ",
        "rank 2 of the profile is left out: the replicas have equally many ranks\n",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let json = report(&succeed(&folder, &split(&format!("{plan} --format json"))));
    assert_eq!(json["plans"][0]["batch_shares"], json!([3, 1]), "{json}");
    assert_eq!(json["machines"][0]["step_without_s"], Value::Null);
    let config = config(&folder);
    assert_eq!(config["mesh"]["batch_shares"], toml::Value::from(vec![3, 1]));
    assert_eq!(config["mesh"]["data_parallel"], toml::Value::from(2));
    assert_eq!(config["pipeline"]["microbatch_size"], toml::Value::from(12), "the mean");
    refuse(
        &folder,
        &split("plan --profile p.toml --ranks 3 --microbatches 12 --data-parallel 4"),
        2,
        "error: 4 replicas need as many ranks, and there are 3 ranks; use fewer replicas",
    );
}

/// Returns a profile of ranks with so many bytes each, and with layers that need some KiB.
fn with_memory(memory: &[u64]) -> String {
    let figures = "forward_s = 1e-2\ninput_backward_s = 1e-2\nweight_backward_s = 1e-2\noutput_bytes = 512\n\
                   parameter_bytes = 4096\nactivation_bytes = 4096\n";
    let ranks = memory.iter().map(|bytes| format!("[[rank]]\nmemory_bytes = {bytes}\n"));
    let layers = [("embedding", 1), ("block", 4), ("head", 1)];
    let layers =
        layers.map(|(kind, count)| format!("[[layers]]\nkind = \"{kind}\"\ncount = {count}\n{figures}"));
    let link = "tokens = 8\n[link]\nlatency_s = 1e-6\nbytes_per_s = 1e10\n";
    format!("{link}{}{}", ranks.collect::<String>(), layers.concat())
}

#[test]
fn a_machine_too_small_for_a_layer_is_left_out_or_the_plan_is_refused() {
    let folder = folder();
    let plan = |ranks: u32| format!("plan --profile p.toml --ranks {ranks} --microbatches 4 --time-limit 2s");
    write(&folder, "p.toml", with_memory(&[1 << 20, 5000, 1 << 20]));
    let text = succeed(&folder, &split(&plan(3)));
    assert!(text.contains("\n      rank 1 of the profile is left out: "), "{text}");
    write(&folder, "p.toml", with_memory(&[100, 100]));
    let note = "note: the embedding alone needs 8.0 KiB, and a rank has 100 B: ";
    refuse(&folder, &split(&plan(2)), 3, note);
}

#[test]
fn a_pair_that_is_missing_has_the_usual_link_and_without_one_the_profile_is_refused() {
    let folder = folder();
    let plan = "plan --profile p.toml --ranks 3 --microbatches 4 --time-limit 2s";
    let profile = with_memory(&[1 << 20; 3]);
    let pair = "[[pair]]\nfrom = 0\nto = 1\nlatency_s = 1\nbytes_per_s = 1000\n";
    // The messages between the first and the second rank would take seconds.
    write(&folder, "p.toml", format!("{profile}{pair}"));
    let text = succeed(&folder, &split(plan));
    assert!(text.contains(" ms per step") && text.contains("rank 2 of the profile: stage "), "{text}");
    let link = "[link]\nlatency_s = 1e-6\nbytes_per_s = 1e10\n";
    write(&folder, "p.toml", format!("{}{pair}", profile.replace(link, "")));
    refuse(&folder, &split(plan), 2, "error: p.toml:1:1: `link` is missing in the profile");
}

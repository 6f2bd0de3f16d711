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
    let plan = "plan --profile p.toml --ranks 3 --microbatches 12 -o planned.toml";
    let text = succeed(&folder, &split(plan));
    for expected in [
        "rank 0 of the profile: stage ",
        ", busy ",
        ", idle ",
        "rank 1 of the profile: stage ",
        "rank 2 of the profile is left out: it would slow the others\n        estimated step: ",
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
    let plan = "plan --profile p.toml --ranks 3 --microbatches 12 --data-parallel 2 -o planned.toml";
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

//! Runs on unlike ranks: the threads and the memory of each rank, and plans that leave ranks out.

use serde_json::{Value, json};

use crate::run::Run;
use crate::scratch;

/// The profile of three ranks. The second one is so slow that no plan uses it.
fn profile(memory_of_last: &str) -> String {
    let times = "forward_s = 1e-2\ninput_backward_s = 1e-2\nweight_backward_s = 1e-2\n";
    let layers = [("embedding", 1), ("block", 4), ("head", 1)];
    let layers =
        layers.map(|(kind, count)| format!("[[layers]]\nkind = \"{kind}\"\ncount = {count}\n{times}"));
    format!(
        "tokens = 8\n[link]\nlatency_s = 1e-6\nbytes_per_s = 1e10\n[[rank]]\nthreads = 2\n[[rank]]\nspeed = 0.001\nthreads = 1\n\
         [[rank]]\nspeed = 0.9\nthreads = 1\n{memory_of_last}{}",
        layers.concat()
    )
}

const SET: [&str; 2] = ["pipeline.ranks=3", "pipeline.threads_per_rank=[2, 1, 1]"];

/// Returns a folder with a profile and with the configuration of its plan.
fn planned() -> Run {
    planned_with(&[])
}

fn planned_with(more: &[&str]) -> Run {
    let run = Run::of(&scratch::small(4, 4, 3));
    run.write("p.toml", profile(""));
    let plan = ["plan", "small.toml", "--profile", "p.toml", "-o", "planned.toml", "--time-limit", "2s"];
    run.prints(&[&plan[..], more].concat(), &SET, "rank 1 of the profile is left out");
    run
}

#[test]
fn the_configuration_of_a_plan_has_the_threads_and_the_places_of_its_ranks() {
    // The estimates of this profile are for a whole head.
    let run = planned_with(&["--head-parts", "1"]);
    let pipeline = |run: &Run, file: &str| {
        let pipeline = run.read_toml(file)["pipeline"].as_table().expect("a section").clone();
        ["ranks", "threads_per_rank", "profile_ranks"].map(|key| pipeline[key].clone())
    };
    let list = |numbers: &[i64]| toml::Value::from(numbers.to_vec());
    let expected = [2.into(), list(&[2, 1]), list(&[0, 2])];
    assert_eq!(pipeline(&run, "planned.toml"), expected);
    // Another plan for the same profile is for the ranks that the configuration has.
    let again = ["plan", "planned.toml", "--profile", "p.toml", "-o", "again.toml", "--time-limit", "1s"];
    run.succeed(&again, &[]);
    assert_eq!(pipeline(&run, "again.toml"), expected);
    // A profile alone says the same.
    run.write("whole.toml", whole_profile());
    let sizes = ["--ranks", "3", "--microbatches", "4", "--time-limit", "1s"];
    let alone = ["plan", "--profile", "whole.toml", "-o", "alone.toml"];
    run.succeed(&[&alone[..], &sizes].concat(), &[]);
    assert_eq!(pipeline(&run, "alone.toml"), expected);
    assert_eq!(run.read_toml("alone.toml")["run"]["devices"], toml::Value::from(vec!["flex", "flex"]));
}

/// Returns the profile with all figures, and with a device.
fn whole_profile() -> String {
    let sizes = "output_bytes = 512\nparameter_bytes = 4096\nactivation_bytes = 4096\n";
    profile("device = \"flex\"\n").replace("forward_s", &format!("{sizes}forward_s"))
}

#[test]
fn threads_of_a_rank_change_no_bit() {
    let run = Run::of(&scratch::small(2, 2, 3));
    // Products of these sizes are shared by several threads.
    let sizes =
        ["model.hidden_size=128", "model.intermediate_size=512", "data.seq_len=64", "pipeline.ranks=2"];
    let trained = |threads: &str| {
        let threads = format!("pipeline.threads_per_rank={threads}");
        let _ = std::fs::remove_dir_all(run.out());
        run.succeed(&["train", "small.toml"], &[&sizes[..], &[&threads]].concat());
        (run.figures(), run.hashes())
    };
    let expected = trained("1");
    for threads in ["3", "[3, 1]", "[1, 2]", "[2]"] {
        assert!(trained(threads) == expected, "{threads}");
    }
}

#[test]
fn a_profile_has_the_threads_of_the_configuration() {
    let run = planned_with(&["--head-parts", "1"]);
    let refuse = |config: &str, set: &[&str], expected: &str| {
        for command in ["plan", "check"] {
            run.refuse(&[command, config, "--profile", "p.toml"], set, expected);
        }
    };
    let threads =
        "`threads` of the profile is 2, and `pipeline.threads_per_rank` of the configuration is 1 for rank 0";
    refuse("small.toml", &["pipeline.ranks=3"], &format!("p.toml:6:11: {threads}"));
    refuse("planned.toml", &["pipeline.threads_per_rank=[1, 1]"], &format!("p.toml:6:11: {threads}"));
    let unknown =
        "`pipeline.profile_ranks` of the configuration names rank 5, and the profile has 3 [[rank]] sections";
    refuse("planned.toml", &["pipeline.profile_ranks=[0, 5]"], unknown);
    let sections = "`rank` of the profile is 3 sections, where one [[rank]] for each of 2 ranks is expected";
    let whole = ["pipeline.profile_ranks=[]", "pipeline.threads_per_rank=[2, 1, 1]"];
    run.refuse(&["check", "planned.toml", "--profile", "p.toml"], &whole, sections);
}

#[test]
fn check_compares_each_rank_with_its_own_memory() {
    let run = planned();
    let check = ["check", "planned.toml", "--profile", "p.toml"];
    let machines = |run: &Run| run.json(&check, &[])["memory"]["machines"].clone();
    let found = machines(&run);
    let of =
        |key: &str| found.as_array().expect("a list").iter().map(|rank| rank[key].clone()).collect::<Value>();
    let places = ["rank", "profile_rank", "device", "threads", "memory", "fits"].map(of);
    let expected = [
        json!([0, 1]),
        json!([0, 2]),
        json!(["flex", "flex"]),
        json!([2, 1]),
        json!([null, null]),
        json!([true, true]),
    ];
    assert_eq!(places, expected);
    let needed = of("needed")[1].as_u64().expect("bytes");
    run.write("p.toml", profile(&format!("memory_bytes = {needed}\n")));
    assert_eq!(machines(&run)[1]["memory"], json!(needed));
    run.prints(&check, &[], "flex, rank 2 of the profile");
    run.write("p.toml", profile(&format!("memory_bytes = {}\n", needed - 4096)));
    run.fail(
        3,
        &check,
        &[],
        &["the run does not fit into memory: rank 1 needs ", ", which is 4.0 KiB too little; give"],
    );
    let (code, printed, _) = run.call(&[&check[..], &["--format", "json"]].concat(), &[]);
    let printed: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!((code, &printed["memory"]["machines"][1]["fits"]), (Some(3), &json!(false)));
}

#[test]
fn check_counts_the_state_that_layers_hold_while_they_move() {
    let run = planned();
    let set = ["run.replan=when-slow"];
    let json = run.json(&["check", "planned.toml"], &set);
    let moves = &json["memory"]["moves"];
    assert_eq!(moves["fits"], json!(true));
    for (rank, moving) in json["memory"]["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .zip(moves["ranks"].as_array().expect("ranks"))
    {
        let bytes = |key: &str| rank[key].as_u64().expect("bytes");
        // The stages, the copy of their state, and the stages that are made.
        assert_eq!(moving.as_u64(), Some(3 * (bytes("parameters") + bytes("optimizer"))));
    }
    run.prints(&["check", "planned.toml"], &set, "moves     while all its layers move, rank ");
    assert_eq!(run.json(&["check", "planned.toml"], &[])["memory"].get("moves"), None);
}

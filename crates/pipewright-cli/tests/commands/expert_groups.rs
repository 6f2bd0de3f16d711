//! Replicas that hold experts together, through the command line: runs, checkpoints, the memory that `check`
//! counts, plans, and refusals.

use std::fs;

use serde_json::Value;

use super::experts::{folder, parts, stored_experts};
use crate::run::{Run, in_one_line};
use crate::scratch;

/// Returns the parts of the losses of a run, and the weights of its exported model.
fn trained(folder: &Run) -> (Vec<[f64; 4]>, Vec<u8>) {
    // The export of an earlier call.
    let _ = fs::remove_dir_all(folder.path("m"));
    folder.succeed(&["export", "out", "m"], &[]);
    (parts(folder), fs::read(folder.path("m/model.safetensors")).expect("the weights"))
}

#[test]
fn replicas_that_hold_experts_together_train_as_replicas_with_all_and_resume_as_any() {
    let folder = folder();
    let train = |set: &[&str]| {
        let four = ["pipeline.ranks=1", "mesh.data_parallel=4"];
        folder.train(&[&four[..], set].concat());
    };
    train(&["run.steps=4"]);
    let expected = trained(&folder);
    for experts in ["mesh.expert_parallel=2", "mesh.expert_parallel=4"] {
        train(&["run.steps=4", experts]);
        assert!(trained(&folder) == expected, "the same losses and parameters with {experts}");
    }
    for (before, after) in [
        (4, &["mesh.expert_parallel=1"][..]),
        (4, &["mesh.expert_parallel=2", "pipeline.ranks=2"]),
        (2, &["mesh.expert_parallel=4"]),
        (1, &["mesh.expert_parallel=2"]),
        (2, &["mesh.expert_parallel=1", "mesh.data_parallel_mode=sharded"]),
    ] {
        train(&["run.steps=2", &format!("mesh.expert_parallel={before}")]);
        if before == 4 {
            assert_eq!(stored_experts(&folder, 2, [0, 1, 2, 3]), ["0", "1", "2", "3"]);
        }
        folder.resume(&[&["run.steps=4"][..], after].concat());
        assert!(trained(&folder) == expected, "{before} to {after:?}");
    }
    // Another number of replicas adds in another order.
    train(&["run.steps=2", "mesh.expert_parallel=4"]);
    let one = ["run.steps=4", "mesh.expert_parallel=1", "mesh.data_parallel=1", "pipeline.ranks=2"];
    folder.resume(&one);
    for (found, expected) in parts(&folder).iter().flatten().zip(expected.0.iter().flatten()) {
        assert!((found - expected).abs() <= 2e-5 * expected, "{found} {expected}");
    }
}

#[test]
fn overlaps_without_exchanges_are_noted() {
    let folder = folder();
    let is_noted = |set: &[&str]| {
        let size = ["pipeline.schedule=zbvzerobubble", "pipeline.ranks=2", "mesh.data_parallel=2"];
        let (_, said) = folder.succeed(&["check", "small.toml"], &[&size[..], set].concat());
        said.contains("`pipeline.overlap` hides nothing, because no tokens are exchanged")
    };
    let overlap = "pipeline.overlap=true";
    assert!(is_noted(&[overlap]));
    assert!(!is_noted(&[overlap, "mesh.expert_parallel=2"]) && !is_noted(&[]));
}

/// Two of four replicas hold each expert if two hold them together.
#[test]
fn replicas_with_sharded_parameters_may_hold_experts_together() {
    let folder = folder();
    let train = |steps: &str, set: &[&str]| {
        let two = ["pipeline.ranks=2", steps];
        folder.train(&[&two[..], set].concat());
    };
    train("run.steps=4", &["mesh.data_parallel=4"]);
    let expected = trained(&folder);
    let sharded = ["mesh.data_parallel=4", "mesh.data_parallel_mode=sharded"];
    let groups = ["mesh.data_parallel=[2, 2]"];
    for (mode, experts, stored) in [
        (&sharded[..], 2, ["0 1", "2 3", "0 1", "2 3"]),
        (&sharded, 4, ["0", "1", "2", "3"]),
        (&groups, 4, ["0", "1", "2", "3"]),
    ] {
        let experts = format!("mesh.expert_parallel={experts}");
        let others = [&experts, "run.replace_slow=true", "run.verify=on-suspicion"];
        train("run.steps=2", &[mode, &others].concat());
        // The ranks of the stage that has the second block.
        let found = stored_experts(&folder, 2, [0, 2, 4, 6]);
        assert_eq!(found, stored, "{mode:?} {experts}");
        folder.resume(&["run.steps=4"]);
        assert!(trained(&folder) == expected, "{mode:?} {experts}");
        folder
            .succeed(&["resume", "out"], &["run.steps=5", "mesh.expert_parallel=1", "mesh.data_parallel=2"]);
        assert_eq!(parts(&folder).len(), 5);
    }
    let holds = |mode: &[&str], experts: &str| {
        let (printed, _) = folder.succeed(&["check", "small.toml"], &[mode, &[experts]].concat());
        let line = printed.lines().find(|line| line.starts_with("mesh")).expect("a line about the mesh");
        line.split_once("; each holds ").expect("what a replica holds").1.to_owned()
    };
    let all = "1/4 of the parameters and of the optimizer's state";
    assert_eq!(holds(&sharded, "mesh.expert_parallel=2"), all);
    let larger = "1/4 of the experts and 1/2 of the other parameters, with the optimizer's state";
    assert_eq!(holds(&groups, "mesh.expert_parallel=4"), larger);
}

#[test]
fn tensor_ranks_of_replicas_that_hold_experts_together_train_as_replicas_with_all_experts() {
    let folder = folder();
    let split = ["model.num_attention_heads=4", "mesh.tensor_parallel=2", "mesh.data_parallel=2"];
    let train = |set: &[&str]| {
        let set = [&split[..], &["run.steps=4"], set].concat();
        folder.train(&set);
        trained(&folder)
    };
    let expected = train(&["mesh.expert_parallel=1"]);
    assert!(train(&["mesh.expert_parallel=2"]) == expected, "whole parameters");
    assert!(train(&["mesh.expert_parallel=2", "mesh.data_parallel_mode=sharded"]) == expected, "sharded");
    folder.train(&[&split[..], &["run.steps=2", "mesh.expert_parallel=2"]].concat());
    folder.resume(&["run.steps=4", "mesh.expert_parallel=1"]);
    assert!(trained(&folder) == expected, "resumed without groups");
}

/// The experts of a base are frozen, and so are whole stages below the first adapter.
#[test]
fn replicas_hold_the_experts_of_a_base_together() {
    let folder = folder();
    folder.train(&["run.steps=1"]);
    folder.succeed(&["export", "out", "m"], &[]);
    let adapted = [
        "model.from=m",
        "adapter.kind=lora",
        "pipeline.ranks=2",
        "pipeline.schedule=dualpipev",
        "pipeline.microbatches=16",
        "mesh.data_parallel=2",
    ];
    let train = |experts: &str| {
        folder.train(&[&adapted[..], &[experts]].concat());
        parts(&folder)
    };
    let alone = train("mesh.expert_parallel=1");
    assert!(
        alone.len() == 3 && alone.iter().all(|parts| parts[3] > 0.0),
        "the adapters are trained: {alone:?}"
    );
    assert_eq!(train("mesh.expert_parallel=2"), alone);
    let exchanged = |step: &Value| {
        let [total, exposed, waits] = ["expert_exchange_ms", "exposed_expert_exchange_ms", "expert_wait_ms"]
            .map(|key| {
                let ranks = step[key].as_array().expect("a time for each rank").iter();
                ranks.map(|rank| rank.as_f64().expect("a time")).collect::<Vec<_>>()
            });
        assert_eq!([total.len(), exposed.len(), waits.len()], [4; 3]);
        assert!(total.iter().zip(&exposed).all(|(total, exposed)| exposed <= total), "{step}");
        // The first rank has no experts.
        [total, waits].iter().all(|times| times.iter().any(|&time| time > 0.0))
    };
    assert!(folder.steps().iter().all(exchanged), "{:?}", folder.steps());
}

/// Before the key was a number, it was the flag that is now `whole_experts`.
#[test]
fn folders_with_the_former_flag_resume() {
    let folder = folder();
    let two = ["model.num_attention_heads=4", "pipeline.ranks=1", "mesh.tensor_parallel=2", "run.steps=2"];
    for flag in ["true", "false"] {
        let whole = format!("mesh.whole_experts={flag}");
        folder.train(&[&two[..], &[whole.as_str()]].concat());
        let written = folder.read("out/config.toml");
        let key = format!("whole_experts = {flag}");
        assert!(written.contains(&key) && written.contains("expert_parallel = 1"), "{written}");
        let former =
            written.replace("expert_parallel = 1", "").replace(&key, &format!("expert_parallel = {flag}"));
        folder.write("out/config.toml", former);
        folder.resume(&["run.steps=3"]);
        assert_eq!(parts(&folder).len(), 3);
        let stored = stored_experts(&folder, 3, [0, 1]);
        let expected = if flag == "true" { ["0 1", "2 3"] } else { ["0 1 2 3", "0 1 2 3"] };
        assert_eq!(stored, expected, "{flag}");
    }
}

#[test]
fn check_counts_the_experts_that_a_replica_holds() {
    let folder = folder();
    let memory = |set: &[&str]| {
        let set = [&["pipeline.ranks=1", "mesh.data_parallel=4"], set].concat();
        let ranks = folder.estimates("small.toml", &set);
        ["parameters", "gradients", "optimizer", "activations"]
            .map(|key| ranks[0][key].as_u64().expect("bytes"))
    };
    let (whole, quarter) = (memory(&[]), memory(&["mesh.expert_parallel=4"]));
    assert!(quarter[0] < whole[0] && quarter[2] < whole[2], "{quarter:?} {whole:?}");
    assert_eq!(quarter[1], whole[1], "a sum of gradients for each replica whose tokens arrive");
    assert!(quarter[3] > whole[3], "the rows that arrive");
    // With sharded parameters, the optimizer has the state of the same rows, and fewer experts are gathered.
    let sharded = |experts| memory(&["mesh.data_parallel_mode=sharded", experts]);
    let [all, two, four] =
        ["mesh.expert_parallel=1", "mesh.expert_parallel=2", "mesh.expert_parallel=4"].map(sharded);
    assert_eq!([two[2], four[2]], [all[2]; 2]);
    let experts = 4 * (whole[0] - quarter[0]) / 3;
    assert_eq!([all[0] - two[0], all[0] - four[0]], [experts / 2, experts], "{all:?} {two:?} {four:?}");
    // A tensor rank has a half of each expert of its replica, and the inputs of all rows that arrive.
    let heads = "model.num_attention_heads=4";
    let split = |tensor, experts| {
        let [tensor, experts] =
            [("tensor", tensor), ("expert", experts)].map(|(key, n)| format!("mesh.{key}_parallel={n}"));
        memory(&[heads, &tensor, &experts])
    };
    let ([one, one_of_four], [two, two_of_four]) =
        ([1, 4].map(|experts| split(1, experts)), [1, 4].map(|experts| split(2, experts)));
    let saved = |index: usize| (one[index] - one_of_four[index], two[index] - two_of_four[index]);
    assert_eq!(saved(0).0, 2 * saved(0).1, "parameters");
    assert_eq!(saved(2).0, 2 * saved(2).1, "state of the optimizer");
    assert_eq!(one_of_four[3] - one[3], two_of_four[3] - two[3], "rows that arrive");
}

#[test]
fn check_says_the_memory_of_a_replica_with_all_chosen_experts() {
    let folder = folder();
    let check = |set: &[&str], format: &str| {
        // With shorter rows, the update needs more than the rows of experts do.
        let set = [&["pipeline.ranks=2", "mesh.data_parallel=4", "data.seq_len=16"], set].concat();
        folder.succeed(&["check", "small.toml", "--format", format], &set).0
    };
    let needed = |set: &[&str]| {
        let json: Value = serde_json::from_str(&check(set, "json")).expect("it is JSON");
        let ranks = json["memory"]["ranks"].as_array().expect("ranks");
        let most = ranks.iter().filter_map(|rank| rank["total"].as_u64()).max();
        (most.expect("a rank"), json["memory"]["one_replica"].as_u64())
    };
    assert_eq!(needed(&[]).1, None);
    let (two, four) = (needed(&["mesh.expert_parallel=2"]), needed(&["mesh.expert_parallel=4"]));
    let more = |(mean, one): (u64, Option<u64>)| one.expect("experts are shared") - mean;
    // Of each microbatch, the rows of three more replicas arrive instead of the rows of one.
    assert_eq!(more(four), 3 * more(two), "{two:?} {four:?}");
    let text = check(&["mesh.expert_parallel=4"], "text");
    assert!(
        text.contains("experts   if all tokens choose experts of one replica, a rank of it needs at most "),
        "{text}"
    );
}

/// A link, and the layers of [`folder`]. Their figures are estimated.
const PROFILE: &str = "\
tokens = 8
[link]
latency_s = 0.25
bytes_per_s = 1e6
[[layers]]
kind = \"embedding\"
[[layers]]
kind = \"decoder\"
[[layers]]
kind = \"mixture\"
[[layers]]
kind = \"decoder\"
[[layers]]
kind = \"mixture\"
[[layers]]
kind = \"head\"
";

#[test]
fn a_plan_counts_the_exchanges_of_experts() {
    let folder = folder();
    folder.write("p.toml", PROFILE);
    let step = |replicas: u32, experts: u32| {
        let set = [
            // A rank for each layer. The messages between them take longer than the sums over the replicas,
            // so the sum of the first rank ends last.
            "pipeline.ranks=6".to_owned(),
            format!("mesh.data_parallel={replicas}"),
            // One for each replica.
            format!("pipeline.microbatches={replicas}"),
            format!("mesh.expert_parallel={experts}"),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let replicas = replicas.to_string();
        let arguments = ["plan", "small.toml", "--profile", "p.toml", "--format", "json"];
        let arguments = [&arguments[..], &["--data-parallel", &replicas]].concat();
        let (printed, said) = folder.succeed(&arguments, &set);
        assert!(!said.contains("expert_parallel"), "{said}");
        let json: Value = serde_json::from_str(&printed).expect("it is JSON");
        json["plans"][0]["predicted_step_s"].as_f64().expect("seconds")
    };
    for replicas in [2, 4] {
        // A row of 16 numbers for each of two experts, of 8 tokens.
        let bytes = f64::from(2 * 16 * 8 * 4);
        let share = f64::from(replicas - 1) / f64::from(replicas);
        let exchange = 0.25 + bytes * share / 1e6;
        // Two blocks, each with two exchanges in a forward and two in a backward.
        let expected = 2.0 * 4.0 * exchange;
        let exchanges = step(replicas, replicas) - step(replicas, 1);
        assert!((exchanges / expected - 1.0).abs() < 1e-9, "{replicas}: {exchanges} {expected}");
    }
}

#[test]
fn a_plan_says_that_each_replica_holds_all_experts() {
    let folder = folder();
    let node = "[node]\nranks = 4\nlatency_s = 1e-6\nbytes_per_s = 1e9\n";
    folder.write("p.toml", PROFILE.to_owned() + node);
    let planned = |arguments: &[&str]| {
        let set = ["pipeline.ranks=1", "mesh.data_parallel=4", "mesh.expert_parallel=2"];
        let arguments = [&["plan", "small.toml", "-o", "best.toml"], arguments].concat();
        let (_, said) = folder.succeed(&arguments, &set);
        let written = folder.read_toml("best.toml");
        let mesh = ["data_parallel", "tensor_parallel", "expert_parallel"];
        (said, mesh.map(|key| written["mesh"][key].as_integer().expect("a number")))
    };
    let note =
        "note: each replica of the plan holds all experts, and `mesh.expert_parallel` is 1 instead of 2: ";
    for (arguments, reason, mesh) in [
        (&[][..], None, [4, 1, 2]),
        (&["--data-parallel", "4"], None, [4, 1, 2]),
        (&["--tensor-parallel", "1"], None, [4, 1, 2]),
        (
            &["--data-parallel", "2"],
            Some("--data-parallel 2 is not the number of replicas that the configuration has, 4"),
            [2, 1, 1],
        ),
        (
            &["--profile", "p.toml", "--data-parallel", "2", "--tensor-parallel", "2"],
            Some("plans with --tensor-parallel 2 have no exchanges of tokens"),
            [2, 2, 1],
        ),
    ] {
        let (said, written) = planned(arguments);
        assert_eq!(written, mesh, "{arguments:?}");
        assert_eq!(said.contains("expert_parallel"), reason.is_some(), "{arguments:?}: {said}");
        if let Some(reason) = reason {
            let said = in_one_line(&said);
            assert!(said.contains(&format!("{note}{reason}")), "{said}");
        }
    }
}

#[test]
fn experts_that_replicas_cannot_hold_together_are_refused() {
    let folder = folder();
    let refused = |set: &[&str], expected: &str| folder.refuse_settings(set, expected);
    refused(
        &["mesh.data_parallel=4", "mesh.expert_parallel=3"],
        "`expert_parallel` is 3, where 4, the number of replicas (`data_parallel`), or a divisor of it that is a power of two, \
         is expected",
    );
    refused(
        &["mesh.data_parallel=3", "mesh.expert_parallel=3", "pipeline.microbatches=6"],
        "stage 0: the experts of `model.layers.1.mlp` cannot be divided among 3 replicas (`mesh.expert_parallel`): \
         `num_experts = 4` is not a multiple of that; set `mesh.expert_parallel` to a divisor of 4",
    );
    refused(
        &["mesh.data_parallel=2", "mesh.expert_parallel=2", "model.mlp_only_layers=[0, 1, 2, 3]"],
        "the model has no experts that 2 replicas could hold together: set mesh.expert_parallel=1",
    );
    refused(
        &[
            "mesh.data_parallel=2",
            "mesh.expert_parallel=2",
            "mesh.tensor_parallel=2",
            "mesh.whole_experts=true",
        ],
        "`whole_experts` does not work with 2 replicas that hold the experts together (`mesh.expert_parallel`) \
         help: leave `whole_experts` out, or write `expert_parallel = 1` in [mesh]",
    );
    refused(
        &["mesh.data_parallel=[2, 3]", "mesh.expert_parallel=2", "pipeline.microbatches=6"],
        "`expert_parallel` is 2, where 1, for groups of 3 replicas that hold the other parameters together \
         (`data_parallel`), is expected",
    );
    let two = ["mesh.data_parallel=2", "mesh.expert_parallel=2"];
    refused(
        &["mesh.data_parallel=6", "mesh.expert_parallel=3", "pipeline.microbatches=6"],
        "`expert_parallel` is 3, where 6, the number of replicas (`data_parallel`), or a divisor of it that is a power of two, \
         is expected",
    );
    let measured = "know only layers that one rank computes, and `mesh.expert_parallel` is 2";
    folder.refuse(&["train", "small.toml"], &[two[0], two[1], "pipeline.schedule=auto"], measured);
    folder.refuse(&["profile", "small.toml"], &two, measured);
    let keys = "architecture = \"gpt_oss\"\nnum_local_experts = 4\nsliding_window = 4\n[data]\n";
    let with_biases = Run::of(&scratch::small(4, 4, 3).replace("[data]\n", keys));
    let expected = "have biases or a bounded activation, and 2 replicas cannot hold such experts together";
    with_biases.refuse_settings(&two, expected);
    assert!(!folder.path("out").exists());
}

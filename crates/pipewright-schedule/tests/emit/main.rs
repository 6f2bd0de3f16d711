//! Plans for other systems: what is written and read back is predicted as the plan, and files with mistakes are
//! refused with what was read and what was expected.

mod handwritten;

use pipewright_schedule::emit::{Emission, EmitRequest, ReadPlan, SystemFile, emit, limit_of};
use pipewright_schedule::plan::{Plan, PlanChoice, PlanRequest, System, plan, predict};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, NodeProfile, Profile};

/// A model with an embedding, blocks and a heavy head.
fn profile(blocks: u32) -> Profile {
    let block = LayerProfile {
        kind: "block".into(),
        count: blocks,
        forward_s: 1e-3,
        input_backward_s: 1e-3,
        weight_backward_s: 1e-3,
        optimizer_s: 1e-4,
        output_bytes: 1 << 20,
        parameter_bytes: 1 << 24,
        activation_bytes: 1 << 23,
        ..LayerProfile::default()
    };
    let embedding = LayerProfile {
        kind: "embedding".into(),
        count: 1,
        forward_s: 1e-4,
        input_backward_s: 0.0,
        weight_backward_s: 2e-4,
        ..block.clone()
    };
    let head = LayerProfile {
        kind: "head".into(),
        count: 1,
        forward_s: 3e-3,
        input_backward_s: 3e-3,
        weight_backward_s: 3e-3,
        ..block.clone()
    };
    let link = LinkProfile::new(1e-5, 1e10);
    Profile { tokens: Some(64), link, layers: vec![embedding, block, head], ..Profile::default() }
}

fn best(profile: &Profile, request: PlanRequest, system: System) -> Plan {
    let request = PlanRequest { system: Some(system), effort: 300_000, ..request };
    plan(profile, &request, &mut || true).expect("a plan").plans.remove(0)
}

fn read(emission: &Emission, profile: &Profile, ranks: Option<u32>) -> ReadPlan {
    let file = SystemFile::parse(&emission.files[0].text).expect("a file of the system");
    assert_eq!(file.system(), emission.system);
    let table = file.table().map(|path| {
        let name = path.rsplit('/').next().expect("a name");
        let file = emission.files.iter().find(|file| file.name == name).expect("the table is written");
        file.text.as_str()
    });
    file.plan(profile, table, ranks).expect("the plan can be read")
}

/// Checks that the plan that is read from the files of the best plan for a system is predicted as that plan.
fn check(profile: &Profile, request: PlanRequest, system: System) -> Plan {
    let ranks = request.ranks;
    let plan = best(profile, request, system);
    let emission = emit(system, &plan, &EmitRequest { folder: "out", ..EmitRequest::new(profile) });
    let emission = emission.expect("the system runs it");
    let back = read(&emission, profile, Some(ranks));
    let title = format!("{system} {} {:?}", plan.title(), plan.boundaries);
    assert_eq!(back.choice.boundaries, plan.boundaries, "{title}");
    assert_eq!(back.choice.recompute, plan.recompute, "{title}");
    assert_eq!((back.ranks(), back.microbatches()), (ranks, plan.microbatches()), "{title}");
    let prediction = predict(profile, &back.schedule, &back.choice).expect("a prediction");
    assert!((prediction.step_s() / plan.step_s - 1.0).abs() < 1e-12, "{title}");
    assert_eq!(prediction.peak_bytes, plan.peak_bytes, "{title}");
    plan
}

#[test]
fn what_is_read_back_takes_as_long_as_the_plan() {
    for system in System::ALL {
        for (ranks, microbatches) in [(1, 4), (2, 8), (4, 8), (4, 10), (3, 6)] {
            let request = PlanRequest { ranks, microbatches, ..PlanRequest::default() };
            check(&profile(10), request, system);
        }
    }
}

#[test]
fn torchtitan_runs_searched_orders_and_vs() {
    let request = PlanRequest { ranks: 4, microbatches: 8, data_parallel: Some(1), ..PlanRequest::default() };
    let searched = check(&profile(10), request.clone(), System::Torchtitan);
    assert!(searched.step_s < best(&profile(10), request, System::Megatron).step_s);
}

#[test]
fn memory_makes_all_stages_recompute() {
    // One rank's share of the parameters takes most of the memory, so that the activations do not fit.
    let request = PlanRequest {
        ranks: 2,
        microbatches: 8,
        memory: Some(440 << 20),
        data_parallel: Some(1),
        larger_microbatches: false,
        ..PlanRequest::default()
    };
    for system in System::ALL {
        let plan = check(&profile(10), request.clone(), system);
        assert!(plan.recompute.iter().all(Option::is_some), "{system}: {:?}", plan.recompute);
    }
}

#[test]
fn clusters_keep_their_order_of_ranks() {
    let node = NodeProfile { ranks: 4, latency_s: 1e-6, bytes_per_s: 1e11 };
    let cluster = Profile { node: Some(node), ..profile(10) };
    for (system, data_parallel) in [System::Torchtitan, System::Megatron].into_iter().zip([2, 4]) {
        let request = PlanRequest {
            ranks: 16,
            microbatches: 16,
            data_parallel: Some(data_parallel),
            ..PlanRequest::default()
        };
        check(&cluster, request, system);
    }
}

#[test]
fn a_profile_without_embedding_and_head_has_them_in_its_ends() {
    let mut bare = profile(8);
    bare.layers.remove(0);
    bare.layers.pop();
    for system in System::ALL {
        let request = PlanRequest { ranks: 2, microbatches: 4, ..PlanRequest::default() };
        let plan = check(&bare, request, system);
        let emission = emit(system, &plan, &EmitRequest::new(&bare)).expect("files");
        let subjects: Vec<_> = emission.remarks.iter().map(|remark| remark.subject).collect();
        assert!(subjects.contains(&"layers"), "{system}: {subjects:?}");
    }
}

/// Reads a text for ten blocks.
fn predict_text(text: &str, table: Option<&str>) -> Result<ReadPlan, String> {
    read_text(text, table, None)
}

/// Reads a text for ten blocks, on a total of `ranks` ranks.
fn read_text(text: &str, table: Option<&str>, ranks: Option<u32>) -> Result<ReadPlan, String> {
    let file = SystemFile::parse(text).map_err(|error| error.to_string())?;
    file.plan(&profile(10), table, ranks).map_err(|error| error.to_string())
}

fn refuse(text: &str, expected: &str) {
    let error = predict_text(text, None).expect_err(text);
    assert!(error.contains(expected), "{text}\n{error}");
}

const MEGATRON: &str = "--pipeline-model-parallel-size 4\n--micro-batch-size 1\n--global-batch-size 8\n";

#[test]
fn megatron_splits_are_read() {
    let cut = |options: &str| {
        let plan = predict_text(&format!("{MEGATRON}{options}"), None).expect("a plan");
        (plan.schedule.placement().stages(), plan.choice.boundaries)
    };
    assert_eq!(cut("--pipeline-model-parallel-layout \"E|t*4|t*4|ttL\""), (4, vec![1, 5, 9]));
    assert_eq!(
        cut("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"),
        (4, vec![3, 6, 9])
    );
    let ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split";
    assert_eq!(cut(ends), (4, vec![3, 6, 9]));
    let (stages, _) = cut("--pipeline-model-parallel-layout Et*2|(t|)*6ttL");
    assert_eq!(stages, 8);
}

#[test]
fn megatron_files_with_mistakes_are_refused() {
    let with = |options: &str| format!("{MEGATRON}{options}");
    refuse(
        "--pipeline-model-parallel-size 2",
        "`--micro-batch-size` is missing; Megatron needs it for a prediction",
    );
    refuse(&with(""), "Megatron divides 10 layers evenly");
    refuse(
        &with("--pipeline-model-parallel-layout Et*2|t*3|t*3|L"),
        "line 4: the stages have 8 blocks, and the profile has 10",
    );
    refuse(
        &with("--pipeline-model-parallel-layout E|t*4|tL|t*5"),
        "line 4: stage 2: the layout has a head that is not its last layer",
    );
    refuse(&with("--pipeline-model-parallel-layout Et*4|t*4|ttL"), "line 4: there are 3 stages for 4 ranks");
    refuse(&with("--pipeline-model-parallel-layout Et*4||t*4|ttL"), "line 4: stage 1 has no layer");
    refuse(
        &with("--num-layers 12"),
        "line 4: `--num-layers` is `12`, and expected 10, the blocks of the profile",
    );
    refuse(
        &with("--pipeline-model-parallel-layuot x"),
        "line 4: Megatron has no key `--pipeline-model-parallel-layuot`; did you mean \
         `--pipeline-model-parallel-layout`?",
    );
    refuse(&with("--parallelism.pipeline_parallel_degree 2"), "is an option of torchtitan, and");
    let layout = "--pipeline-model-parallel-layout Et|(t|)*6tttL";
    refuse(
        &with(&format!("{layout} --microbatch-group-size-per-virtual-pipeline-stage 3")),
        "is `3`, and expected a number from 4, the ranks, to 8",
    );
    refuse(
        &with(&format!("{layout} --recompute-granularity ful")),
        "is `ful`, and expected full or selective",
    );
    refuse(
        &with(layout).replace("batch-size 8", "batch-size many"),
        "line 3: `--global-batch-size` is `many`",
    );
}

const TORCHTITAN: &str = "\
--parallelism.pipeline_parallel_degree 2
--training.local_batch_size 4
activation-checkpoint:none
";

#[test]
fn torchtitan_files_with_mistakes_are_refused() {
    let with = |options: &str| format!("{TORCHTITAN}{options}");
    assert_eq!(predict_text(&with(""), None).map(|plan| plan.choice.boundaries), Ok(vec![6]));
    refuse(
        &with("--parallelism.pipeline_parallel_schedule 2F2B"),
        "line 4: `--parallelism.pipeline_parallel_schedule` is `2F2B`, and expected one of 1F1B, GPipe",
    );
    refuse(&with("--parallelism.pipeline_parallel_degre 2"), "torchtitan has no key");
    refuse(&with("--parallelism.new_key 2"), "torchtitan has no key `--parallelism.new_key`");
    refuse(
        &with("--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.2,norm,lm_head"),
        "line 4: stage 1: read `layers.2`, and expected `layers.1`",
    );
    refuse(&with("--parallelism.pipeline_parallel_microbatch_size 3"), "expected a multiple of the rows");
    refuse(
        &TORCHTITAN.replace(":none", ":half"),
        "line 3: `activation-checkpoint` is `half`, and expected full",
    );
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let options = format!("{TORCHTITAN}--parallelism.pipeline_parallel_schedule_csv x.csv");
    let check = |table: &str, expected: &str| {
        let error = predict_text(&options, Some(table)).expect_err(table);
        assert!(error.contains(expected), "{table}\n{error}");
    };
    check("a,b\n", "the table of actions cannot be read: line 1, column 1");
    check("0F0,0B0\n1F0,1B0\n", "the table has 1 microbatches, and the options 4");
    check("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "the table has 3 stages on 3 ranks, and the options 2 on 2");
    let other = "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n";
    check(other, "the table has stage 0 on rank 1, and torchtitan makes it on rank 0");
}

const DEEPSPEED: &str =
    "{\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 1, \"pipeline\": PIPELINE}";

#[test]
fn deepspeed_files_are_read_or_refused() {
    let with = |pipeline: &str| DEEPSPEED.replace("PIPELINE", pipeline);
    let cut = |pipeline: &str| predict_text(&with(pipeline), None).map(|plan| plan.choice.boundaries);
    assert_eq!(cut("{\"stages\": 4, \"partition\": \"uniform\"}"), Ok(vec![3, 6, 9]));
    assert_eq!(cut("{\"stages\": 2, \"parts\": [0, 9, 12]}"), Ok(vec![9]));
    assert!(cut("{\"stages\": 4, \"partition\": \"parameters\"}").is_ok());
    refuse(&with("{\"stages\": 2}"), "`pipeline.parts` is missing; DeepSpeed needs it");
    refuse(&with("{\"stages\": 2, \"parts\": [0, 9, 10]}"), "expected 3 ascending numbers from 0 to 12");
    refuse(&with("{\"stage\": 2}"), "DeepSpeed has no key `pipeline.stage`");
    refuse(&with("{\"stages\": 20, \"partition\": \"uniform\"}"), "20 stages cannot share the 12 layers");
    refuse(&with("7"), "`pipeline` is `7`, and expected an object");
    refuse("{\"pipeline\": {\"stages\": 2, \"partition\": \"uniform\"}}", "is missing; DeepSpeed needs it");
    refuse("{\"architectures\": [\"x\"]}", "read JSON with the keys `architectures`, and expected options");
    refuse("{\"pipeline\"", "the JSON cannot be read");
    let odd = with("{\"stages\": 2, \"partition\": \"uniform\"}").replace("_gpu\": 1", "_gpu\": 3");
    refuse(&odd, "train_batch_size is not train_micro_batch_size_per_gpu times");
}

#[test]
fn other_files_are_refused() {
    refuse("", "read an empty text, and expected options of torchtitan");
    refuse("[model]\nvocab_size = 128\n", "read `[model]`, and expected");
    refuse("0F0,0B0\n", "read a table of actions, which does not say the layers of its stages");
    refuse("--hidden-size 4", "read `--hidden-size 4`, and expected");
}

#[test]
fn the_ranks_are_divided_among_replicas() {
    let file = SystemFile::parse(&format!("{MEGATRON}--pipeline-model-parallel-layout Et*2|t*4|t*4|L"));
    let file = file.expect("Megatron's options");
    let replicas = |ranks| file.plan(&profile(10), None, ranks).map(|plan| plan.choice.mesh.data);
    assert_eq!((replicas(None), replicas(Some(4)), replicas(Some(8))), (Ok(1), Ok(1), Ok(2)));
    let error = replicas(Some(6)).expect_err("6 ranks").to_string();
    assert_eq!(
        error,
        "the file places a model on 4 ranks, and 6 ranks were given; give a number of ranks that fits"
    );
}

#[test]
fn the_head_limits_a_cut_that_ignores_it() {
    let limit = |layout: &str| {
        let text = format!("{MEGATRON}--pipeline-model-parallel-layout {layout}");
        let plan = predict_text(&text, None).expect("a plan");
        let choice = PlanChoice { ..plan.choice };
        let prediction = predict(&profile(10), &plan.schedule, &choice).expect("a prediction");
        limit_of(&profile(10), &choice, &prediction)
    };
    let even = limit("Ett|ttt|ttt|ttL");
    assert_eq!((even.stage.get(), even.rank.get(), even.kind.as_str()), (3, 3, "head"));
    assert!(!even.is_balanced() && (even.excess() - 5.0 / (13.1 / 4.0) + 1.0).abs() < 1e-3, "{even:?}");
    let other = limit("E|ttttttt|tt|tL");
    assert_eq!((other.stage.get(), other.kind.as_str()), (1, "block"));
}

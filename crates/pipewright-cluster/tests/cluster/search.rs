//! The search for plans.

use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::implementation::{Implementation, Stack};
use pipewright_cluster::layout::{Precision, Recompute, ShardedState};
use pipewright_cluster::published::{Published, Run};
use pipewright_cluster::search::{
    ClusterPlan, ClusterReport, Fixed, Gain, HardwareChange, Request, SearchErrorKind, lower_bound, search,
    search_from, upgrades,
};
use pipewright_shapes::model::{Dense, Experts, FeedForward};
use pipewright_shapes::reader;

use crate::comparison::{compare_with_plans, request_for};
use crate::data::{WITH_PLANS, cases, predicted, published, run};

/// A request for the model, the machine and the batch of a published run, with few simulations.
fn request(model: &str, machine: &str) -> Request {
    Request { simulations: 40, ..request_for(&run(model, machine)) }
}

fn found(request: &Request) -> ClusterReport {
    search(request).expect("plans")
}

/// Checks that a search fails with a message that contains `message`.
fn check_error(request: &Request, message: &str) {
    let error = search(request).expect_err("an error").to_string();
    assert!(error.contains(message), "{error}");
}

/// Checks that a request with the settings of each case, such as `gpus = 64, tp = 8`, fails with a message.
fn check_errors(request: &Request, table: &str) {
    for (settings, message) in cases(table) {
        let mut request = request.clone();
        for setting in settings.split(", ") {
            let (name, value) = setting.split_once(" = ").expect("a setting");
            let number = || value.parse().expect("a number");
            match name {
                "gpus" => request.gpus = number(),
                "gbs" => request.batch = number(),
                "tp" => request.fixed.tensor = Some(number()),
                "pp" => request.fixed.pipeline = Some(number()),
                "vp" => request.fixed.chunks = Some(number()),
                "dp" => request.fixed.data = Some(number()),
                "ep" => request.fixed.expert = Some(number()),
                "mbs" => request.fixed.microbatch = Some(number()),
                _ => request.fixed.schedule = Some(value.to_owned()),
            }
        }
        check_error(&request, &message);
    }
}

#[test]
fn no_published_run_is_predicted_faster_than_the_plan_that_is_found() {
    for row in &WITH_PLANS.rows {
        let chosen = row.chosen.as_ref().expect("a plan");
        assert!(chosen.gain >= -1e-9, "{} ({}): {chosen:?}", row.model, row.source);
        let ratio = row.predicted_step_s / chosen.predicted_step_s;
        assert!((ratio - 1.0 - chosen.gain).abs() < 1e-12);
    }
}

/// Returns a run of one row whose sequence all GPUs divide.
fn with_divided_sequence(model: &str, machine: &str, gpus: u32) -> Run {
    let mut run = run(model, machine);
    let layout = &mut run.layout;
    (layout.gpus, layout.context, layout.tensor, layout.pipeline, layout.chunks) = (gpus, gpus, 1, 1, 1);
    (layout.microbatch, layout.batch, layout.sequence, layout.schedule) = (1, 1, 4096 * gpus, None);
    (layout.expert_tensor, layout.sequence_parallel) = (1, false);
    run
}

/// The search divides sequences among powers of two.
#[test]
fn a_published_layout_that_the_search_does_not_try_is_a_plan() {
    let run = with_divided_sequence("llama3-8B", "H100 96", 3);
    let request = Request { plans: 1, simulations: 8, ..request_for(&run) };
    let seconds = found(&request).plans[0].prediction.seconds;
    assert!(seconds > predicted(&run).seconds, "{seconds}");
    let from = search_from(&request, &run.layout).expect("a plan");
    assert_eq!((&from.plans[0].layout, from.plans.len()), (&run.layout, 1));
    let rows = compare_with_plans(&Published { runs: vec![run], remarks: Vec::new() }).expect("rows").rows;
    let chosen = rows[0].chosen.as_ref().expect("a plan");
    assert_eq!((chosen.cp, chosen.gain), (3, 0.0));
    assert_eq!((chosen.etp, chosen.sequence_parallel, chosen.cut.as_slice()), (1, false, [32].as_slice()));
}

/// 127 GPUs are more than the 126 blocks.
#[test]
fn a_run_without_a_plan_keeps_its_row() {
    let large = with_divided_sequence("llama3.1-405B", "H100", 127);
    let small = with_divided_sequence("llama3-8B", "H100 96", 3);
    let published = Published { runs: vec![large, small], remarks: Vec::new() };
    let comparison = compare_with_plans(&published).expect("rows");
    let [large, small] = &comparison.rows[..] else { panic!("two rows") };
    let reason = large.no_plan.as_ref().expect("a reason");
    assert!(reason.starts_with("no mesh divides 127 GPUs"), "{reason}");
    assert!(large.chosen.is_none() && small.chosen.is_some() && small.no_plan.is_none());
    assert!(comparison.to_markdown().contains(&format!("| no plan: {reason} | | | | | | |")));
    let json = serde_json::to_value(large).expect("JSON");
    assert_eq!((json.get("chosen"), json["no_plan"].as_str()), (None, Some(reason.as_str())));
}

#[test]
fn plans_fit_differ_and_are_sorted() {
    let request = request("llama3-70B", "H100 80");
    let found = found(&request);
    assert_eq!(found.plans.len(), 5);
    let mut kinds = Vec::new();
    for plan in &found.plans {
        assert!(plan.prediction.peak_memory() <= request.memory_limit());
        let layout = &plan.layout;
        layout.check(&request.model).expect("a layout that fits");
        kinds.push((layout.tensor, layout.pipeline, layout.context, layout.schedule_name()));
    }
    // A plan with more usual parts may be in front.
    assert!(found.plans[1..].is_sorted_by(|one, other| one.prediction.seconds <= other.prediction.seconds));
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds.len(), 5, "{kinds:?}");
    // The last candidate may have two cuts.
    assert!(found.simulated <= request.simulations + 1, "{}", found.simulated);
}

#[test]
fn shares_sum_to_a_step() {
    for plan in found(&request("nemotron-22B", "H100")).plans {
        let sum: f64 = plan.shares.named().iter().map(|(_, share)| share).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{:?}", plan.shares);
        assert!(plan.shares.named().iter().all(|&(_, share)| share >= -1e-9), "{:?}", plan.shares);
    }
}

#[test]
fn the_search_is_the_same_each_time() {
    let request = request("gpt3-5B", "H100");
    assert_eq!(found(&request), found(&request));
}

#[test]
fn no_run_is_faster_than_the_bound() {
    for run in published().runs {
        let (bound, own) = (lower_bound(&request_for(&run)), predicted(&run).seconds);
        assert!(bound < own, "{}: {bound} and {own}", run.model.name);
        assert!(bound > 0.3 * own, "{}: {bound} and {own}", run.model.name);
    }
}

#[test]
fn more_memory_is_never_slower() {
    let mut request = request("llama2-70B", "H100");
    request.memory = Some(30e9);
    let plans = found(&request).plans;
    assert!(plans.iter().all(|plan| plan.prediction.peak_memory() <= 30e9));
    let small = plans[0].prediction.seconds;
    request.memory = Some(80e9);
    assert!(found(&request).plans[0].prediction.peak_memory() > 30e9);
    assert!(found(&request).plans[0].prediction.seconds <= small);
}

#[test]
fn given_parts_are_kept() {
    let fixed = Fixed {
        tensor: Some(2),
        pipeline: Some(4),
        chunks: Some(1),
        microbatch: Some(1),
        schedule: Some("zb-h1".into()),
        recompute: Some(Recompute::Full),
        ..Fixed::default()
    };
    let plans = found(&Request { fixed, ..request("llama3-8B", "H100") }).plans;
    let layout = &plans[0].layout;
    assert_eq!((layout.tensor, layout.pipeline, layout.chunks, layout.microbatch), (2, 4, 1, 1));
    assert_eq!((layout.schedule.as_deref(), layout.recompute), (Some("zb-h1"), Recompute::Full));
}

#[test]
fn upgrades_are_never_slower_on_as_many_gpus() {
    let request = Request { simulations: 8, plans: 1, ..request("llama2-70B", "H100") };
    let best = &found(&request).plans[0];
    let upgrades = upgrades(&request, best);
    let changes: Vec<HardwareChange> = upgrades.iter().map(|upgrade| upgrade.change).collect();
    assert_eq!(changes, HardwareChange::ALL);
    for upgrade in &upgrades {
        let Gain { plan, speedup } = upgrade.gain.as_ref().expect("a plan");
        let ratio = best.prediction.seconds / plan.prediction.seconds;
        assert!((speedup / ratio - 1.0).abs() < 1e-12 && ratio >= 1.0, "{upgrade:?}");
    }
    let nodes = upgrades[0].gain.as_ref().expect("a plan");
    assert_eq!(nodes.plan.layout.gpus, 128);
    assert!((1.5..2.0).contains(&nodes.speedup), "{}", nodes.speedup);
}

/// A mesh of 128 GPUs is not one of 256.
#[test]
fn an_upgrade_without_a_plan_has_its_reason() {
    let fixed =
        Fixed { tensor: Some(1), pipeline: Some(1), context: Some(1), data: Some(128), ..Fixed::default() };
    let request = Request { fixed, simulations: 8, plans: 1, ..request("llama3-8B", "H100 96") };
    let best = &found(&request).plans[0];
    let upgrades = upgrades(&request, best);
    let gains: Vec<bool> = upgrades.iter().map(|upgrade| upgrade.gain.is_ok()).collect();
    assert_eq!(gains, [false, true, true]);
    let error = upgrades[0].gain.as_ref().expect_err("an error").to_string();
    let mesh =
        "the given mesh (tp = 1, pp = 1, dp = 128, cp = 1) has 128 GPUs, not 256; use gpus = 128, or leave";
    assert!(error.starts_with(mesh), "{error}");
}

/// Each of 32 blocks has 128 experts, and a token uses eight of them.
#[test]
fn experts_are_divided_among_ranks() {
    let mut request = request("llama3-8B", "H100 96");
    let expert = Dense { inner: 1536, gated: true };
    let experts =
        Experts { count: 128, per_token: 8, expert, shared_inner: 0, groups: 1, groups_per_token: 1 };
    request.model.blocks.iter_mut().for_each(|block| block.feed_forward = FeedForward::Experts(experts));
    (request.plans, request.simulations) = (1, 8);
    request.implementation.expert_load = 100;
    let plan = &found(&request).plans[0];
    assert!(plan.layout.expert > 1, "{:?}", plan.layout);
    plan.layout.check(&request.model).expect("a layout that fits");
    assert!(plan.shares.experts > 0.0);
}

/// Returns the best plan for DeepSeek-V3 on a stack with a part of the layout that is given.
fn deepseek(stack: Stack, batch: u32, memory: Option<f64>, fixed: Fixed) -> ClusterPlan {
    let model = reader::read(include_str!("deepseek_v3.json")).expect("a model").model;
    let machine = by_name("h800").expect("a machine");
    let request = Request::new(model, machine, 2048, batch, 4096, Precision::Fp8);
    let fixed = Fixed { tensor: Some(1), context: Some(1), microbatch: Some(1), expert: Some(64), ..fixed };
    let implementation = Implementation { expert_load: 110, ..Implementation::usual(stack) };
    found(&Request { fixed, implementation, memory, plans: 1, ..request }).plans.remove(0)
}

/// The exchange of tokens is longer than what else it could save.
#[test]
fn the_exchange_of_experts_is_overlapped_where_the_stack_has_it() {
    // Rounds of 16 microbatches, on 128 replicas.
    const BATCH: u32 = 16_384;
    // Interleaved 1F1B needs more memory than V-Half.
    let memory = Some(160e9);
    for (stack, schedule) in [(Stack::Megatron, "interleaved1f1b"), (Stack::HaiLlm, "dualpipev")] {
        let fixed = Fixed { pipeline: Some(16), schedule: Some(schedule.to_owned()), ..Fixed::default() };
        let plan = deepseek(stack, BATCH, memory, fixed.clone());
        assert!(plan.layout.implementation.overlaps_experts, "{:?}", plan.layout);
        let without = deepseek(stack, BATCH, memory, Fixed { overlaps_experts: Some(false), ..fixed });
        assert!(!without.layout.implementation.overlaps_experts);
        let ratio = without.prediction.seconds / plan.prediction.seconds;
        assert!(ratio > 1.02, "{stack:?}: {ratio}");
    }
    let plan = deepseek(Stack::Torchtitan, BATCH, memory, Fixed { pipeline: Some(16), ..Fixed::default() });
    assert!(!plan.layout.implementation.overlaps_experts);
}

/// The authors' layout: 16 stages, 64 expert ranks, DualPipe with its overlap, no tensor ranks (arXiv 2412.19437).
#[test]
fn the_plan_for_deepseek_v3_is_within_the_error_of_its_authors_layout() {
    let authors = Fixed { pipeline: Some(16), schedule: Some("dualpipev".to_owned()), ..Fixed::default() };
    let ratio = deepseek(Stack::HaiLlm, 15_360, None, Fixed::default()).prediction.seconds
        / deepseek(Stack::HaiLlm, 15_360, None, authors).prediction.seconds;
    assert!((0.8..=1.0).contains(&ratio), "{ratio}");
}

/// Copies of the shards need more memory than shards of all replicas.
#[test]
fn given_shards_divide_the_state_among_a_group_of_replicas() {
    let of = |shards: Option<u32>| {
        let fixed = Fixed {
            tensor: Some(1),
            pipeline: Some(1),
            context: Some(1),
            sharding: Some(ShardedState::Parameters),
            shards,
            ..Fixed::default()
        };
        found(&Request { fixed, memory: Some(1e15), plans: 1, ..request("llama3-8B", "H100 96") })
            .plans
            .remove(0)
    };
    let (all, some) = (of(None), of(Some(8)));
    let parameters = |plan: &ClusterPlan| plan.prediction.memory[0].optimizer;
    assert_eq!((some.layout.shard_groups(), some.layout.mesh().shards), (16, 8));
    assert_eq!(all.layout.mesh().shards, 128);
    assert!((parameters(&some) / parameters(&all) - 16.0).abs() < 1e-6);
    let fixed = Fixed { shards: Some(3), ..Fixed::default() };
    let error = "no mesh with shards = 3 divides 128 GPUs";
    check_error(&Request { fixed, ..request("llama3-8B", "H100 96") }, error);
}

#[test]
fn a_goal_gives_days_hours_and_energy() {
    let request = Request { goal_tokens: Some(1e12), ..request("llama3-8B", "H100") };
    let plan = &found(&request).plans[0];
    let goal = plan.goal.expect("a goal");
    assert_eq!(goal.steps as f64, (1e12 / (256.0 * 8192.0_f64)).ceil());
    assert!((goal.days * 86_400.0 / (goal.steps as f64 * plan.prediction.seconds) - 1.0).abs() < 1e-9);
    assert!((goal.gpu_hours / (goal.days * 24.0 * 128.0) - 1.0).abs() < 1e-9);
    let energy = goal.kilowatt_hours.expect("a board power");
    assert!((energy / (goal.gpu_hours * 0.5) - 1.0).abs() < 1e-9, "{energy}");
}

#[test]
fn a_model_that_fits_nowhere_says_what_is_short() {
    let request = Request { gpus: 8, batch: 8, ..request("llama3.1-405B", "H100") };
    let SearchErrorKind::Memory(least) = search(&request).expect_err("too large").kind else {
        panic!("memory")
    };
    assert_eq!(least.limit, request.memory_limit());
    // 16 bytes per parameter on 8 GPUs.
    assert!(least.needed() > 16.0 * 405e9 / 8.0 * 0.9, "{}", least.needed());
    check_error(&request, "on rank ");
    check_error(&request, "GiB too much (parameters ");
    check_error(&request, "); use more GPUs, fewer rows");
    let fixed = Fixed { recompute: Some(Recompute::None), ..Fixed::default() };
    check_error(&Request { fixed, ..request.clone() }, "; use fewer given parts of the plan, more GPUs");
    check_error(&Request { memory: Some(1024.0), ..request }, "no plan fits into 1.0 KiB per GPU");
}

/// Each error names a part that is given.
#[test]
fn errors_of_given_parts_name_them() {
    let request = request("llama3-70B", "H100 80");
    check_errors(
        &request,
        "
tp = 8, pp = 5 => 64 GPUs cannot be divided into a mesh of 40 (tp = 8, pp = 5); use gpus = 80, or
tp = 0 => `tp` is 0
schedule = 1f2b => 1f2b
gbs = 127, gpus = 1021 => no mesh divides 1021 GPUs
gbs = 0 => `batch` is 0
",
    );
    check_errors(
        &Request { gpus: 40_000, batch: 64, ..request },
        "
dp = 32 => no mesh with dp = 32 divides 40000 GPUs
dp = 0 => `dp` is 0
dp = 3 => 40000 GPUs cannot be divided into a mesh of 3 (dp = 3); use gpus = 40002
dp = 5 => 64 rows of a step cannot be divided into microbatches of 1 row on each of 5 replicas
mbs = 3 => 64 rows of a step cannot be divided into microbatches of 3 rows; use gbs = 66
tp = 5 => 64 heads cannot be divided among the ranks of tp = 5
gpus = 40001, tp = 5 => 64 heads cannot be divided among the ranks of tp = 5
tp = 5, dp = 1 => 64 heads cannot be divided among the ranks of tp = 5
gpus = 64, tp = 5, dp = 3 => 64 heads cannot be divided among the ranks of tp = 5
gpus = 1, gbs = 1, dp = 2 => 1 GPU cannot be divided into a mesh of 2 (dp = 2); use gpus = 2
gpus = 1, gbs = 1, mbs = 2 => 1 row of a step cannot be divided into microbatches of 2 rows; use gbs = 2
gpus = 1, tp = 2 => 1 GPU cannot be divided into a mesh of 2 (tp = 2); use gpus = 2, or
gpus = 1021, gbs = 127, vp = 2 => no mesh with vp = 2 divides 1021 GPUs
gpus = 64, ep = 2 => ep = 2: the model has no experts; leave it out
gpus = 64, schedule = zb-h1, vp = 2 => schedule = zb-h1, whose ranks have 1 stage of at least one block
",
    );
}

/// Returns the fastest plan of a request with a schedule, and the fastest one with its name of a free search.
fn with_schedule_and_free(request: &Request, schedule: &str, name: &str) -> [ClusterPlan; 2] {
    let fixed = |schedule| Fixed { schedule, ..request.fixed.clone() };
    let given = Request { plans: 1, fixed: fixed(Some(schedule.to_owned())), ..request.clone() };
    let free = Request { plans: 100, fixed: fixed(None), ..request.clone() };
    let mut plans = found(&free).plans;
    plans.retain(|plan| plan.layout.schedule_name() == name);
    [found(&given).plans.remove(0), plans.remove(0)]
}

/// The model fits only if replicas divide more than the optimizer's state, or if scores are computed again.
#[test]
fn a_given_schedule_has_the_plan_of_the_free_search() {
    let fixed = Fixed { tensor: Some(8), pipeline: Some(8), microbatch: Some(1), ..Fixed::default() };
    let request = Request { fixed, ..request("gpt3-175B", "A100") };
    for (schedule, name) in [("PipeDream", "1f1b"), ("interleaved", "interleaved1f1b"), ("ZB_H1", "zb-h1")] {
        let [given, free] = with_schedule_and_free(&request, schedule, name);
        assert_eq!(given, free, "{schedule}");
        assert_ne!(given.layout.recompute, Recompute::None, "{schedule}");
    }
}

/// Estimates of schedules with a split backward fit although their simulations do not. They hide no other layout.
#[test]
fn one_plan_is_as_fast_as_the_first_of_several() {
    let machine = by_name("h100").expect("a machine");
    let request = Request {
        machine,
        gpus: 8192,
        batch: 512,
        precision: Precision::Half,
        simulations: 50,
        ..request("llama3.1-405B", "H100")
    };
    let seconds = |plans| found(&Request { plans, ..request.clone() }).plans[0].prediction.seconds;
    assert_eq!(seconds(1), seconds(5));
}

/// Schedules whose activations are not known before they are simulated.
#[test]
fn a_schedule_without_an_estimate_of_its_memory_has_a_plan() {
    let fixed = Fixed { pipeline: Some(8), tensor: Some(8), ..Fixed::default() };
    let request = Request { fixed, plans: 1, ..request("gpt3-175B", "A100") };
    for schedule in ["hanayo", "dualpipev", "gpipe"] {
        let fixed = Fixed { schedule: Some(schedule.into()), ..request.fixed.clone() };
        let request = Request { fixed, ..request.clone() };
        let plan = &found(&request).plans[0];
        assert_eq!(plan.layout.schedule_name(), schedule);
        assert!(plan.prediction.peak_memory() <= request.memory_limit());
    }
    let forward = Fixed { schedule: Some("ForwardOnly".into()), ..request.fixed.clone() };
    check_error(&Request { fixed: forward, ..request }, "the schedule `forwardonly` has no backward");
}

#[test]
fn bytes_that_are_too_many_to_count_do_not_fit() {
    let mut request = Request { gpus: 2, batch: 1 << 20, ..request("llama3.1-405B", "H100") };
    request.model.hidden = 1 << 24;
    let dense = Dense { inner: 1 << 24, gated: true };
    request.model.blocks.iter_mut().for_each(|block| block.feed_forward = FeedForward::Dense(dense));
    request.sequence = 1 << 30;
    let error = search(&request).expect_err("too large");
    assert!(matches!(error.kind, SearchErrorKind::Memory(_)), "{error}");
}

#[test]
fn fp8_is_never_slower() {
    for run in published().runs.iter().filter(|run| run.machine.fp8.is_some()) {
        let seconds = |precision: Precision| {
            let mut run = run.clone();
            run.layout.precision = precision;
            predicted(&run).seconds
        };
        assert!(seconds(Precision::Fp8) <= seconds(Precision::Half), "{}", run.model.name);
    }
}

//! Clusters with several kinds of machines.

use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::emit::emit;
use pipewright_cluster::layout::{Cut, Layout, Precision, ShardedState};
use pipewright_cluster::machine::Machine;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::placed::{Machines, Placed};
use pipewright_cluster::predict::{Prediction, predict_placed};
use pipewright_cluster::search::{
    ClusterPlan, Fixed, MachineRanks, Request, SearchErrorKind, lower_bound, search, search_from, upgrades,
};
use pipewright_schedule::emit::Release;
use pipewright_schedule::plan::System;
use proptest::prelude::*;

use crate::comparison::request_for;
use crate::data::{published, run};

fn machine(name: &str) -> Machine {
    by_name(name).expect("a machine")
}

fn machines<const N: usize>(kinds: [(Machine, u32); N]) -> Vec<Machines> {
    kinds.into_iter().map(|(machine, gpus)| Machines { machine, gpus }).collect()
}

/// A request for a model of 32 blocks on GPUs of two kinds.
fn request(first: (&str, u32), further: (&str, u32)) -> Request {
    let model = run("llama3-8B", "H100").model;
    let gpus = first.1 + further.1;
    Request {
        further: machines([(machine(further.0), further.1)]),
        plans: 3,
        simulations: 8,
        ..Request::new(model, machine(first.0), gpus, 64, 8192, Precision::Half)
    }
}

fn best(request: &Request) -> ClusterPlan {
    search(request).expect("a plan").plans.remove(0)
}

fn predicted(request: &Request, layout: &Layout, machines: &[Machines]) -> Prediction {
    let placed = Placed::new(&request.model, layout, machines).expect("a placement");
    predict_placed(&placed, &mut Programs::default()).expect("a prediction")
}

/// Checks that a layout on two equal kinds is predicted as on one kind.
fn check_equal_kinds(request: &Request, layout: &Layout) {
    let half = layout.gpus / 2;
    let other = Machine { name: "the same".to_owned(), ..request.machine.clone() };
    let one = predicted(request, layout, &machines([(request.machine.clone(), layout.gpus)]));
    let two = machines([(request.machine.clone(), half), (other, layout.gpus - half)]);
    assert_eq!(predicted(request, layout, &two), one, "{layout:?}");
}

#[test]
fn two_equal_kinds_are_as_one() {
    let mut compared = 0;
    for run in published().runs.iter().filter(|run| run.layout.microbatches() <= 64) {
        if run.layout.pipeline.is_multiple_of(2) {
            check_equal_kinds(&request_for(run), &run.layout);
            compared += 1;
        }
    }
    assert!(compared > 4, "{compared}");
    let request = request(("h100", 16), ("a100", 16));
    for schedule in [None, Some("zb-h1"), Some("zbvzerobubble"), Some("interleaved1f1b")] {
        for (cut, sharding) in
            [(Cut::Even, ShardedState::Optimizer), (Cut::Balanced, ShardedState::Parameters)]
        {
            let chunks = if schedule.is_some_and(|name| name != "zb-h1") { 2 } else { 1 };
            let schedule = schedule.map(str::to_owned);
            let layout = Layout {
                gpus: 32,
                tensor: 2,
                pipeline: 4,
                chunks,
                batch: 64,
                schedule,
                cut,
                sharding,
                ..layout()
            };
            check_equal_kinds(&request, &layout);
        }
    }
    let equal = Request { machine: machine("a100"), ..request.clone() };
    let one = Request { further: Vec::new(), ..equal.clone() };
    assert_eq!(lower_bound(&equal), lower_bound(&one));
}

fn layout() -> Layout {
    Layout::on_one_gpu(8192, Precision::Half)
}

/// The blocks of the ranks on a kind of machine, on average.
fn blocks_on(plan: &ClusterPlan, kind: &MachineRanks) -> f64 {
    let (ranks, first) = (plan.layout.pipeline as usize, kind.first_rank);
    let own = |stage: &usize| (first..first + kind.ranks).contains(&(stage % ranks));
    let blocks = &plan.prediction.blocks;
    let sum: usize = (0..blocks.len()).filter(own).map(|stage| blocks[stage]).sum();
    sum as f64 / kind.ranks as f64
}

fn kind<'a>(plan: &'a ClusterPlan, name: &str) -> &'a MachineRanks {
    plan.machines.iter().find(|kind| kind.name.contains(name)).expect("the machine")
}

#[test]
fn a_slow_kind_gets_fewer_blocks() {
    let fixed = Fixed { pipeline: Some(4), schedule: Some("1f1b".to_owned()), ..Fixed::default() };
    let request = Request { fixed, ..request(("h100", 16), ("a100", 16)) };
    let found = search(&request).expect("plans");
    for plan in &found.plans {
        let (fast, slow) = (kind(plan, "H100"), kind(plan, "A100"));
        assert_eq!([fast.ranks, slow.ranks], [2, 2]);
        assert!(blocks_on(plan, fast) > 1.5 * blocks_on(plan, slow), "{:?}", plan.prediction.blocks);
        assert!(plan.gap >= 0.0);
    }
    // With equal numbers of blocks, all ranks wait for the slow ones.
    let plan = &found.plans[0];
    let even = Layout { cut: Cut::Even, ..plan.layout.clone() };
    let kinds = machines([(machine("h100"), 16), (machine("a100"), 16)]);
    assert!(plan.prediction.seconds < 0.8 * predicted(&request, &even, &kinds).seconds);
}

/// Both orders are tried, so the order in which the kinds are given does not matter.
#[test]
fn the_order_of_the_kinds_does_not_matter() {
    let one = best(&request(("h100", 8), ("a100", 16)));
    let other = best(&request(("a100", 16), ("h100", 8)));
    assert_eq!(one.layout, other.layout);
    assert_eq!(one.machines, other.machines);
    assert!((one.prediction.seconds / other.prediction.seconds - 1.0).abs() < 1e-12);
    assert_eq!(one.layout.pipeline % 3, 0);
}

#[test]
fn each_kind_keeps_its_own_memory_limit() {
    let mut small = machine("a100");
    (small.name, small.memory) = ("small".to_owned(), 40e9);
    let request = Request { further: machines([(small.clone(), 16)]), ..request(("h100", 16), ("a100", 16)) };
    assert_eq!(
        request.memory_limit(),
        Request { machine: small, further: Vec::new(), ..request.clone() }.memory_limit()
    );
    for plan in search(&request).expect("plans").plans {
        for kind in &plan.machines {
            assert!(kind.memory <= kind.memory_limit, "{}: {}", kind.name, plan.layout.text(&request.model));
            let own = &plan.prediction.memory[kind.first_rank..kind.first_rank + kind.ranks];
            assert!(own.iter().all(|rank| rank.total() <= kind.memory));
        }
        assert!(plan.machines.iter().any(|kind| kind.memory_limit < 40e9));
    }
    // No rank on the small kind has room, although the others have.
    let mut tiny = machine("a100");
    (tiny.name, tiny.memory) = ("tiny".to_owned(), 2e9);
    let fixed = Fixed {
        tensor: Some(4),
        pipeline: Some(4),
        context: Some(1),
        microbatch: Some(1),
        ..Fixed::default()
    };
    let request = Request { further: machines([(tiny, 16)]), fixed, ..request };
    let error = search(&request).expect_err("no memory");
    assert!(error.to_string().contains(" per GPU of tiny: "), "{error}");
    assert!(matches!(error.kind, SearchErrorKind::Memory(least) if least.limit < 1e9));
}

#[test]
fn the_link_between_two_kinds_is_the_slower_one() {
    let request = request(("h100", 16), ("a100", 16));
    let layout = Layout { gpus: 32, pipeline: 2, batch: 16, ..layout() };
    let on = |first: &Machine, last: &Machine| {
        predicted(&request, &layout, &machines([(first.clone(), 16), (last.clone(), 16)])).seconds
    };
    let (usual, slow) = (machine("h100"), Machine { network_bandwidth: 1e8, ..machine("h100") });
    assert_eq!(on(&usual, &slow), on(&slow, &usual));
    assert!(on(&usual, &slow) > on(&usual, &usual));
}

fn check_error(request: &Request, message: &str) {
    let error = search(request).expect_err("an error").to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn kinds_that_no_pipeline_separates_are_refused() {
    let mixed = request(("h100", 16), ("a100", 8));
    let fixed = |pipeline| Fixed { pipeline: Some(pipeline), ..Fixed::default() };
    check_error(
        &Request { fixed: fixed(1), ..mixed.clone() },
        "pp = 1: a rank of the pipeline has GPUs of several machines (16 GPUs of H100 80 GB SXM and 8 GPUs of A100",
    );
    check_error(&Request { fixed: fixed(4), ..mixed.clone() }, "; use a multiple of 3");
    check_error(&Request { gpus: 8, ..mixed.clone() }, "no GPUs are left for H100");
    let mesh = Fixed { tensor: Some(5), ..fixed(3) };
    check_error(&Request { fixed: mesh, ..mixed.clone() }, "cannot be divided");
    check_error(&request(("h100", 8 * 41), ("a100", 8)), "a multiple of 42, and the model has 32 blocks");
    let layout = Layout { gpus: 24, pipeline: 2, batch: 24, ..layout() };
    let kinds = |first| machines([(machine("h100"), first), (machine("a100"), 8)]);
    let error =
        |first| Placed::new(&mixed.model, &layout, &kinds(first)).expect_err("no placement").to_string();
    assert!(error(16).contains("use a multiple of 3"), "{}", error(16));
    assert_eq!(error(8), "the machines have 16 GPUs, and the layout has 24; use equal numbers");
    assert!(search_from(&Request { plans: 1, ..mixed }, &layout).is_ok());
}

#[test]
fn what_changes_in_a_mixed_cluster_is_not_said() {
    let request = request(("h100", 8), ("a100", 8));
    assert!(upgrades(&request, &best(&request)).is_empty());
}

#[test]
fn megatron_gets_the_uneven_cut() {
    let request = Request { system: Some(System::Megatron), ..request(("h100", 16), ("a100", 16)) };
    let plan = best(&request);
    let emission = emit(System::Megatron, Release::Numbered, &request, &plan, "folder").expect("options");
    let text = &emission.files[0].text;
    let blocks = &plan.prediction.blocks;
    let (least, most) = (*blocks.iter().min().expect("stages"), *blocks.iter().max().expect("stages"));
    assert!(most > least + 1, "{blocks:?}");
    assert!(
        text.contains("--pipeline-model-parallel-layout E") && text.contains(&"t".repeat(most)),
        "{text}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// A layout on two kinds, one of them with another peak, memory bandwidth and number of GPUs.
    #[test]
    fn no_layout_is_faster_than_the_bound(
        peak in 0.1..4.0f64,
        bandwidth in 0.1..4.0f64,
        power in 0..3u32,
        nodes in 1..4u32,
        tensor in 0..3u32,
    ) {
        let mut other = machine("h100");
        other.bf16 = other.bf16.map(|rate| rate * peak);
        other.memory_bandwidth *= bandwidth;
        let request = Request { further: machines([(other, 8 * nodes)]), ..request(("h100", 8), ("a100", 8 * nodes)) };
        let gpus = 8 * (nodes + 1);
        let pipeline = (nodes + 1) << power;
        let tensor = 1 << tensor.min(3 - power);
        let layout = Layout { gpus, tensor, pipeline, batch: 64, cut: Cut::Balanced, ..layout() };
        prop_assume!(layout.batch.is_multiple_of(layout.data()));
        let request = Request { gpus, batch: layout.batch, ..request };
        let kinds = machines([(request.machine.clone(), 8), (request.further[0].machine.clone(), 8 * nodes)]);
        let seconds = predicted(&request, &layout, &kinds).seconds;
        prop_assert!(seconds >= lower_bound(&request), "{seconds} and {}", lower_bound(&request));
    }
}

//! The memory of the plans that the search finds, and of the plans that it refuses.

use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::layout::{Precision, Recompute, ShardedState};
use pipewright_cluster::search::{
    ClusterReport, Fixed, LeastMemory, Request, SearchError, SearchErrorKind, search,
};
use pipewright_document::GIB;
use pipewright_shapes::model::{Dense, Experts, FeedForward};

use crate::data::run;

/// A request for Llama 3 8B on 32 H100, with a pipeline of 4 ranks.
fn request(batch: u32, schedule: &str, chunks: Option<u32>) -> Request {
    let model = run("llama3-8B", "H100 96").model;
    let fixed = Fixed {
        tensor: Some(1),
        context: Some(1),
        pipeline: Some(4),
        microbatch: Some(1),
        chunks,
        schedule: Some(schedule.to_owned()),
        ..Fixed::default()
    };
    let machine = by_name("h100").expect("a machine");
    Request { fixed, simulations: 40, ..Request::new(model, machine, 32, batch, 8192, Precision::Half) }
}

/// The same with experts in all blocks but the first six, so that stages keep different numbers of bytes.
fn with_experts(schedule: &str) -> Request {
    let mut request = request(64, schedule, None);
    let expert = Dense { inner: 1024, gated: true };
    let experts =
        Experts { count: 16, per_token: 2, expert, shared_inner: 0, groups: 1, groups_per_token: 1 };
    request.model.blocks[6..].iter_mut().for_each(|block| block.feed_forward = FeedForward::Experts(experts));
    request.fixed.recompute = Some(Recompute::None);
    request.fixed.sharding = Some(ShardedState::Optimizer);
    request
}

fn with_memory(request: &Request, bytes: f64) -> Result<ClusterReport, SearchError> {
    search(&Request { memory: Some(bytes), ..request.clone() })
}

/// Returns the layout that needs least by the error for `bytes` of memory.
fn least(request: &Request, bytes: f64) -> LeastMemory {
    match with_memory(request, bytes).map_err(|error| error.kind) {
        Err(SearchErrorKind::Memory(least)) => *least,
        other => panic!("{other:?}"),
    }
}

/// Seven microbatches are one round, although there are four ranks.
#[test]
fn interleaved_1f1b_has_a_plan_with_more_memory_than_it_needs() {
    let request = request(56, "interleaved1f1b", Some(4));
    let seconds = |gib: f64| {
        let found = with_memory(&request, gib * GIB).unwrap_or_else(|error| panic!("{gib} GiB: {error}"));
        found.plans[0].prediction.seconds
    };
    let all = [48.0, 50.0, 60.0, 70.0].map(seconds);
    assert!(all.is_sorted_by(|small, large| large <= small), "{all:?}");
}

/// Checks that the least memory of an error is enough for a plan, and is the same for each limit below it.
fn check_least(request: &Request) {
    let name = request.fixed.schedule.as_deref().unwrap_or_default();
    let needed = least(request, 1024.0).needed();
    let found = with_memory(request, needed).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(found.plans[0].prediction.peak_memory(), needed, "{name}");
    for share in [0.5, 0.9, 0.99, 0.9999] {
        assert_eq!(least(request, needed * share).needed(), needed, "{name} with {share}");
    }
}

#[test]
fn a_plan_fits_into_the_least_memory() {
    for schedule in
        ["1f1b", "interleaved1f1b", "zb-h1", "interleaved-zb-h1", "zbvzerobubble", "v-half", "gpipe"]
    {
        check_least(&with_experts(schedule));
        check_least(&request(56, schedule, None));
    }
}

/// Zero bubble schedules have no formula for more computations than the search simulates.
#[test]
fn a_schedule_that_is_too_large_to_simulate_is_refused_with_its_size() {
    let mut request = request(1 << 19, "v-half", None);
    let text = search(&request).expect_err("an error").to_string();
    let expected =
        "no plan can be simulated: a pipeline with the schedule v-half has 1048576 forwards and backwards";
    assert!(text.starts_with(expected), "{text}");
    // Without a schedule, 1F1B has a formula.
    request.fixed.schedule = None;
    assert!(search(&request).is_ok());
}

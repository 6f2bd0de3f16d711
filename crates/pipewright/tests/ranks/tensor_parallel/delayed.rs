//! Batches that overlap on ranks that compute stages together, because parameters are delayed by one update.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pipewright::batch::Batch;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright::message::{Direction, Tag};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::{Action, Recompute};

use super::expert_overlaps::{self, launch_schedule, with_deliveries};
use super::model::{
    Fault, MICROBATCHES, Moment, Sizes, config_of, sizes, take_step, take_steps, try_launch, try_launch_in,
};
use crate::support::count::Count;
use crate::support::{self, Step};

const BATCHES: u64 = 5;
/// The ranks of a stage, at most.
const MOST: usize = 4;

fn delayed(sizes: Sizes) -> PipelineConfig {
    PipelineConfig { delayed: true, deadline: Duration::from_secs(120), ..config_of(sizes) }
}

fn begin(pipeline: &mut Pipeline, number: u64) {
    let part = |seed| support::split(support::batch(seed, MICROBATCHES), MICROBATCHES);
    pipeline.begin(Batch::new(part(number), part(100 + number)), 1e-2).expect("it begins");
}

/// Lets the first stage compute a batch only when the test has begun the next one. The first forward of a stage is run twice, so
/// the second microbatch of each batch counts. The ranks that count together run `forwards` forwards of it.
fn paced(begun: Arc<Count>, forwards: u64) -> Fault {
    let batches: [AtomicU64; MOST] = Default::default();
    Arc::new(move |Moment { stage, microbatch, rank, is_backward }| {
        if (stage, microbatch, is_backward) == (0, 1, false) {
            let batch = batches[rank as usize].fetch_add(1, Ordering::SeqCst) / forwards;
            begun.wait_for(BATCHES.min(batch + 2));
        }
        0.0
    })
}

type Outcome = (Vec<Step>, Vec<(String, Vec<f32>)>);

fn parameters(pipeline: &mut Pipeline) -> Vec<(String, Vec<f32>)> {
    let all = pipeline.parameters().expect("every rank answers").into_iter();
    let mut all: Vec<_> =
        all.map(|one| (one.path.to_string(), one.data.iter().collect::<Vec<f32>>())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Runs batches one after the other, or each during the one before. Returns their results, and which of them overlap with the
/// one before.
fn run(pipeline: &mut Pipeline, ahead: u64, begun: &Count) -> (Outcome, Vec<bool>) {
    let (mut count, mut steps, mut overlaps) = (0, Vec::new(), Vec::new());
    for number in 0..BATCHES {
        while count < BATCHES.min(number + 1 + ahead) {
            begin(pipeline, count);
            count += 1;
            begun.set(count);
        }
        let summary = pipeline.finish().expect("a batch");
        steps.push((summary.losses.clone(), summary.gradient_norm));
        overlaps.push(summary.overlaps);
    }
    ((steps, parameters(pipeline)), overlaps)
}

fn drained(schedule: &str, sizes: Sizes, config: &PipelineConfig) -> Outcome {
    let mut pipeline = try_launch(schedule, sizes, config, None).expect("it starts");
    run(&mut pipeline, 0, &Count::default()).0
}

/// Checks that batches that overlap have the bits of others, and of one rank per tensor rank.
fn check(schedule: &str, sizes: Sizes, config: &PipelineConfig) {
    let expected = drained("1f1b", Sizes { pipeline: 1, ..sizes }, config);
    assert!(drained(schedule, sizes, config) == expected, "{schedule}, {sizes:?}, drained");
    let begun = Arc::new(Count::default());
    // A forward is computed again before the one of the next batch.
    let forwards = if config.recompute == Recompute::None { 1 } else { 2 };
    let fault = paced(begun.clone(), forwards * u64::from(sizes.data));
    let mut pipeline = try_launch(schedule, sizes, config, Some(fault)).expect("it starts");
    let (found, overlaps) = run(&mut pipeline, 2, &begun);
    assert!(found == expected, "{schedule}, {sizes:?}");
    let all: Vec<bool> = (0..BATCHES).map(|number| number > 0).collect();
    assert!(overlaps == all, "{schedule}, {sizes:?}: {overlaps:?}");
}

#[test]
fn overlapping_batches_have_the_bits_of_one_rank_of_the_pipeline() {
    for schedule in ["1f1b", "gpipe", "zb-h1", "zbvzerobubble", "interleaved1f1b", "v-min", "hanayo"] {
        check(schedule, sizes(2, 1, 2), &delayed(sizes(2, 1, 2)));
    }
    for sizes in [sizes(4, 1, 2), sizes(2, 2, 2), sizes(2, 1, 3)] {
        check("1f1b", sizes, &delayed(sizes));
    }
}

#[test]
fn other_settings_keep_their_bits() {
    let sizes = sizes(2, 1, 2);
    check("1f1b", sizes, &PipelineConfig { recompute: Recompute::Stage, ..delayed(sizes) });
    check("zb-h1", sizes, &PipelineConfig { post_validation: true, ..delayed(sizes) });
    check("1f1b", sizes, &PipelineConfig { precision: Precision::Bf16, ..delayed(sizes) });
}

/// An action also waits for the rows of its parameters, on every rank of its group.
#[test]
fn sharded_parameters_keep_their_bits() {
    let sharded = |sizes| PipelineConfig { data_parallel_mode: DataParallelMode::Sharded, ..delayed(sizes) };
    for (schedule, sizes) in
        [("1f1b", sizes(2, 2, 2)), ("zbvzerobubble", sizes(2, 2, 2)), ("1f1b", sizes(4, 2, 1))]
    {
        check(schedule, sizes, &sharded(sizes));
    }
}

/// Replicas that hold the experts together exchange tokens in each action.
#[test]
fn batches_of_expert_groups_overlap() {
    let (whole, sharded) = (DataParallelMode::Replicated, DataParallelMode::Sharded);
    let cases = [sizes(2, 2, 1), sizes(2, 4, 1), sizes(2, 2, 2)].map(|sizes| (sizes, 2, whole));
    for (sizes, experts, data_parallel_mode) in cases.into_iter().chain([(sizes(2, 4, 1), 2, sharded)]) {
        let config =
            |expert_parallel| PipelineConfig { expert_parallel, data_parallel_mode, ..delayed(sizes) };
        let launch = |schedule: &str, experts, pace: Option<Fault>| {
            launch_schedule(schedule, sizes, &config(experts), move |moment| {
                let expert_overlaps::Moment { action, replica } = moment;
                if let (Action::Forward { stage, microbatch }, Some(pace)) = (action, &pace) {
                    let (stage, microbatch) = (stage.get(), microbatch.get());
                    pace(Moment { stage, microbatch, rank: replica, is_backward: false });
                }
            })
        };
        let (expected, _) = run(&mut launch("1f1b", 1, None), 0, &Count::default()).0;
        for schedule in ["1f1b", "zb-h1"] {
            let what = format!("{schedule}, {sizes:?}, {data_parallel_mode:?}");
            let drained = run(&mut launch(schedule, experts, None), 0, &Count::default()).0;
            assert!(drained.0 == expected, "{what}");
            let begun = Arc::new(Count::default());
            // The ranks that count together.
            let together = sizes.data / experts * sizes.tensor;
            let pace = paced(begun.clone(), together.into());
            let (found, overlaps) = run(&mut launch(schedule, experts, Some(pace)), 2, &begun);
            assert!(found == drained, "{what}");
            assert!(overlaps[1..].iter().all(|overlaps| *overlaps), "{what}: {overlaps:?}");
        }
    }
}

/// Returns which messages are due if the second one of this kind comes to rank 3 only after rank 2, which has its own, has passed on
/// the squares of the batch before. The two are the ranks of the second stage.
fn after_squares(
    is_kind: impl Fn(WorldRank, Tag) -> bool + Send,
) -> impl FnMut(WorldRank, WorldRank, Tag) -> bool + Send {
    // The messages that have been delivered to each of the two, and when the second one has been delivered to the first of them.
    let (mut delivered, mut since) = ([0, 0], None::<Instant>);
    let mut has_passed_on = false;
    move |from, to, tag| match (tag, from.get(), to.get()) {
        (tag, _, to @ (2 | 3)) if is_kind(from, tag) => {
            let is_second = delivered[to as usize - 2] == 1;
            let is_due = !is_second || to == 2 || has_passed_on;
            delivered[to as usize - 2] += u32::from(is_due);
            if is_second && to == 2 {
                since = Some(Instant::now());
            }
            is_due
        }
        // By then, rank 2 waits for rank 3.
        (Tag::Squares, 3, 2) => since.is_some_and(|since| since.elapsed() > Duration::from_millis(200)),
        (Tag::Squares, 2, 0) => {
            has_passed_on = true;
            true
        }
        _ => true,
    }
}

/// A rank begins an action only when all ranks of its group have the messages of that action. Until then, it passes on what the
/// norm of the batch before needs: here, the late message comes only after that.
#[test]
fn a_rank_continues_the_batch_before_while_its_group_waits() {
    let (sizes, begun) = (sizes(2, 1, 2), Arc::new(Count::default()));
    let config = PipelineConfig { deadline: Duration::from_secs(30), ..delayed(sizes) };
    let is_second_microbatch = |_: WorldRank, tag: Tag| matches!(tag, Tag::Boundary { direction: Direction::Forward, microbatch, .. } if microbatch.get() == 1);
    let is_due = after_squares(is_second_microbatch);
    let launch = |world: World| {
        let launched = try_launch_in(world, "1f1b", sizes, &config, Some(paced(begun.clone(), 1)));
        run(&mut launched.expect("it starts"), 2, &begun).0
    };
    let found = with_deliveries(sizes.ranks(), is_due, launch);
    assert!(found == drained("1f1b", sizes, &config));
}

/// The same for rows of sharded parameters: the rows of the next batch come to one rank of a group only after the other one, which
/// has its own, has passed on the squares of the batch before.
#[test]
fn a_rank_continues_the_batch_before_while_its_group_gathers() {
    let (sizes, begun) = (sizes(2, 2, 2), Arc::new(Count::default()));
    let config = PipelineConfig {
        deadline: Duration::from_secs(30),
        data_parallel_mode: DataParallelMode::Sharded,
        ..delayed(sizes)
    };
    let is_first_rows = |from: WorldRank, tag: Tag| {
        matches!((tag, from.get()), (Tag::ParameterShard { round: 0, .. }, 6 | 7))
    };
    let is_due = after_squares(is_first_rows);
    let launch = |world: World| {
        let launched = try_launch_in(world, "1f1b", sizes, &config, Some(paced(begun.clone(), 2)));
        run(&mut launched.expect("it starts"), 2, &begun).0
    };
    let found = with_deliveries(sizes.ranks(), is_due, launch);
    assert!(found == drained("1f1b", sizes, &config));
}

/// The second batch fails on a rank of the first stage, while a rank of the second stage waits for the other one of its group
/// in a backward of the first batch. That batch counts, and the pipeline continues as if the second one had not been.
#[test]
fn a_failure_leaves_an_exchange_of_the_batch_before_as_it_is() {
    let sizes = sizes(2, 1, 2);
    let last = MICROBATCHES - 1;
    let [begun, events] = [(); 2].map(|()| Arc::new(Count::default()));
    let (pace, has_waited) = (paced(begun.clone(), 1), AtomicBool::new(false));
    let [is_past_first, has_failed] = [(); 2].map(|()| AtomicBool::new(false));
    let fault: Fault = Arc::new(move |moment| {
        let Moment { stage, microbatch, rank, is_backward } = moment;
        let added = pace(moment);
        if (stage, microbatch, rank, is_backward) == (1, last, 1, true)
            && !has_waited.swap(true, Ordering::SeqCst)
        {
            events.set(1);
            events.wait_for(2);
            // By now, the other rank waits for this one.
            std::thread::sleep(Duration::from_millis(200));
        }
        if (stage, microbatch, rank, is_backward) == (0, 1, 0, false) {
            is_past_first.store(true, Ordering::SeqCst);
        }
        if (stage, microbatch, rank, is_backward) == (0, 0, 0, false)
            && is_past_first.load(Ordering::SeqCst)
            && !has_failed.swap(true, Ordering::SeqCst)
        {
            events.wait_for(1);
            events.set(2);
            panic!("out of cheese");
        }
        added
    });
    let mut pipeline = try_launch("1f1b", sizes, &delayed(sizes), Some(fault)).expect("it starts");
    let mut plain = try_launch("1f1b", sizes, &delayed(sizes), None).expect("it starts");
    for number in 0..2 {
        begin(&mut pipeline, number);
    }
    begun.set(BATCHES);
    let expected = take_step(&mut plain, 0).expect("a step");
    let first = pipeline.finish().expect("the first batch");
    assert_eq!((first.losses, first.gradient_norm), (expected.losses, expected.gradient_norm));
    let error = pipeline.finish().expect_err("its forward panics").to_string();
    let start = "step 2: rank 0, stage 0, microbatch 0, action 0F0: ";
    assert!(error.starts_with(start) && error.ends_with("out of cheese"), "{error}");
    assert_eq!(take_steps(&mut pipeline, 5..8), take_steps(&mut plain, 5..8));
    assert!(parameters(&mut pipeline) == parameters(&mut plain));
}

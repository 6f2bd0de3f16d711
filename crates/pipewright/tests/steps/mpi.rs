//! Steps that begin early between processes: this program starts itself under `mpirun`. Results are compared
//! with the results of threads, to the bit, and the messages that compare batches are counted.

#[path = "ahead/batches.rs"]
mod batches;
#[path = "../mpirun/mod.rs"]
mod mpirun;
#[path = "mpi/overlapping.rs"]
mod overlapping;
#[path = "../support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pipewright::hook::ActionHook;
use pipewright::ids::{StepNumber, WorldRank};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::transport::World;
use pipewright_schedule::Action;

use batches::{MICROBATCHES, RATE, StepResult, begin, numbered, parameters, result_of};
use support::{config, descent, program};

const STEPS: u64 = 6;

const TASKS: [(u32, &str); 19] = [
    (2, "ahead"),
    (2, "early updates"),
    (4, "early updates of replicas"),
    (2, "replicas"),
    (4, "replicas of pipelines"),
    (2, "accumulated"),
    (2, "different"),
    (2, "only one"),
    (2, "fails"),
    (2, "next fails"),
    (2, "fails with the next of one"),
    (2, "update fails"),
    (2, "dropped"),
    (2, "overlapping"),
    (2, "only one overlaps"),
    (2, "overlapping in f16"),
    (2, "overlapping fails"),
    (2, "next of overlapping fails"),
    (2, "overlapping fails with the next of one"),
];

fn main() -> ExitCode {
    mpirun::run(&TASKS, |task| match task {
        "ahead" => ahead(2, 1),
        "early updates" => early_updates(2, 1),
        "early updates of replicas" => early_updates(2, 2),
        "replicas" => ahead(1, 2),
        "replicas of pipelines" => ahead(2, 2),
        "accumulated" => accumulated(),
        "only one" => only_one(),
        "different" => different(),
        "fails" => fails(1),
        "next fails" => fails(2),
        "fails with the next of one" => fails_with_next_of_one(),
        "update fails" => update_fails(),
        "overlapping" => overlapping::all(),
        "overlapping in f16" => overlapping::in_f16(),
        "only one overlaps" => overlapping::only_one(),
        "overlapping fails" => overlapping::fails(Some(1), None),
        "overlapping fails with the next of one" => overlapping::fails_with_next_of_one(),
        "next of overlapping fails" => overlapping::fails(None, Some(2)),
        _ => dropped(),
    })
}

/// Lets a rank begin its part of a step only when its process has begun the next one, so that all processes
/// have begun it before any report is sent. Panics in a step of rank 1.
#[derive(Default)]
struct Watch {
    /// The number of batches that this process has begun.
    begun: AtomicU64,
    /// The last batch.
    last: u64,
    /// The number of batches that the rank has begun.
    runs: AtomicU64,
    /// The batch in which rank 1 panics, from 1; 0 for none.
    panics: u64,
}

impl ActionHook for Watch {
    fn begin_step(&self, rank: WorldRank, _step: StepNumber) {
        let batch = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
        wait_until(|| self.begun.load(Ordering::SeqCst) > batch.min(self.last - 1));
        assert!((rank.get(), batch) != (1, self.panics), "it has to fail");
    }

    fn before(&self, _rank: WorldRank, _action: Action) {}
}

fn wait_until(condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !condition() {
        assert!(Instant::now() < until, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The pipeline of this process, whose batches are counted.
struct Process {
    pipeline: Pipeline,
    config: PipelineConfig,
    watch: Arc<Watch>,
    rank: u32,
}

impl Process {
    fn launch(ranks: u32, replicas: u32, last: u64, panics: u64) -> Self {
        Self::launch_with(PipelineConfig { data_parallel: replicas, ..config() }, ranks, last, panics)
    }

    fn launch_with(config: PipelineConfig, ranks: u32, last: u64, panics: u64) -> Self {
        let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
        let rank = world.own_ranks().next().expect("a process has a rank").get();
        let watch = Arc::new(Watch { last, panics, ..Watch::default() });
        let with_hook = PipelineConfig { hook: Some(watch.clone()), ..config.clone() };
        let pipeline = launch(world, ranks, &with_hook);
        Self { pipeline, config, watch, rank }
    }

    fn begin(&mut self, number: u64) {
        begin(&mut self.pipeline, number, 1, &self.config);
        self.watch.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn finish(&mut self) -> Result<StepResult, PipelineError> {
        self.pipeline.finish().map(|summary| result_of(&summary))
    }

    fn report(&self, done: &str) {
        if self.rank == 0 {
            mpirun::report(done);
        }
    }
}

fn launch(world: World, ranks: u32, config: &PipelineConfig) -> Pipeline {
    support::launch_in(world, program("1f1b", ranks, MICROBATCHES), config)
}

/// The results of threads that take each step alone, and the pipeline.
fn of_threads(ranks: u32, config: &PipelineConfig, steps: u64) -> (Vec<StepResult>, Pipeline) {
    let mut threads = launch(World::local(ranks * config.data_parallel), ranks, config);
    let results = (0..steps).map(|number| {
        let summary = threads.step_batch(numbered(number, config), RATE).expect("a step");
        result_of(&summary)
    });
    (results.collect(), threads)
}

/// The processes have the bits of threads. They compare the first batch only: the gradient norm compares the
/// others. Each rank begins a batch before its process asks for the results of the one before.
fn ahead(ranks: u32, replicas: u32) {
    let mut process = Process::launch(ranks, replicas, STEPS, 0);
    let mut results = Vec::new();
    process.begin(0);
    for number in 1..=STEPS {
        if number < STEPS {
            process.begin(number);
            // Its rank begins the batch without further calls.
            wait_until(|| process.watch.runs.load(Ordering::SeqCst) > number);
        }
        results.push(process.finish().expect("a step"));
    }
    assert_eq!(process.pipeline.comparisons(), 1, "messages before the first step only");
    let (expected, mut threads) = of_threads(ranks, &process.config, STEPS);
    let all = parameters(&mut threads);
    let own = parameters(&mut process.pipeline);
    assert!(!own.is_empty() && own.iter().all(|one| all.contains(one)), "rank {} differs", process.rank);
    assert_eq!(results, expected, "rank {}", process.rank);
    process.report(&format!("steps that begin early, {ranks} ranks, {replicas} replicas"));
}

/// Processes that update before they have the gradient norm have the bits of threads that update after it.
/// The limit is the median of the norms, so some updates are repaired. All processes have the same report on
/// them.
fn early_updates(ranks: u32, replicas: u32) {
    let config = PipelineConfig { data_parallel: replicas, ..config() };
    let (unclipped, _) = of_threads(ranks, &PipelineConfig { clip_norm: None, ..config.clone() }, STEPS);
    let mut norms: Vec<f64> = unclipped.iter().map(|(_, _, norm, ..)| *norm).collect();
    norms.sort_by(f64::total_cmp);
    let limit = norms[norms.len() / 2];
    let config = PipelineConfig { clip_norm: Some(limit), ..config };
    let early = PipelineConfig { post_validation: true, ..config.clone() };
    let mut process = Process::launch_with(early, ranks, STEPS, 0);
    let mut results = Vec::new();
    let (mut repaired, mut early) = (0, 0);
    process.begin(0);
    for number in 1..=STEPS {
        if number < STEPS {
            process.begin(number);
        }
        let summary = process.pipeline.finish().expect("a step");
        let is_early = summary.early_update.iter().any(|time| !time.is_zero());
        let is_clipped = summary.gradient_norm + 1e-6 > limit;
        assert_eq!(summary.early_update.len() as u32, ranks * replicas);
        assert_eq!(summary.repaired, is_early && is_clipped, "{summary:?}");
        early += u32::from(is_early);
        repaired += u32::from(summary.repaired);
        results.push(result_of(&summary));
    }
    let (expected, mut threads) = of_threads(ranks, &config, STEPS);
    let all = parameters(&mut threads);
    let own = parameters(&mut process.pipeline);
    assert!(!own.is_empty() && own.iter().all(|one| all.contains(one)), "rank {} differs", process.rank);
    assert_eq!(results, expected, "rank {}", process.rank);
    assert!(0 < repaired && repaired < early, "{repaired} of {early} early updates are repaired");
    process.report(&format!("early updates, {ranks} ranks, {replicas} replicas"));
}

/// Every second batch updates. The batch after an update begins without further calls, the other ones begin when
/// the reports have compared them. All have the bits of threads.
fn accumulated() {
    let mut process = Process::launch(2, 1, STEPS, 0);
    let mut threads = launch(World::local(2), 2, &process.config);
    let mut take = |process: &mut Process, number| {
        let config = process.config.clone();
        begin(&mut process.pipeline, number, 2, &config);
        process.watch.begun.fetch_add(1, Ordering::SeqCst);
        begin(&mut threads, number, 2, &config);
        result_of(&threads.finish().expect("a batch"))
    };
    let mut expected = vec![take(&mut process, 0)];
    let mut results = Vec::new();
    for number in 1..=STEPS {
        if number < STEPS {
            expected.push(take(&mut process, number));
        }
        if number.is_multiple_of(2) && number < STEPS {
            wait_until(|| process.watch.runs.load(Ordering::SeqCst) > number);
        }
        results.push(process.finish().expect("a batch"));
    }
    assert_eq!(process.pipeline.comparisons(), 1, "messages before the first batch only");
    assert_eq!(results, expected, "rank {}", process.rank);
    let all = parameters(&mut threads);
    assert!(parameters(&mut process.pipeline).iter().all(|one| all.contains(one)), "rank {}", process.rank);
    process.report("batches that are accumulated");
}

/// Only one process begins the next batch during a step. The ranks do not begin it, and the processes compare it
/// when both have begun it.
fn only_one() {
    let mut process = Process::launch(2, 1, 2, 0);
    let (expected, _) = of_threads(2, &process.config, 3);
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    let mut results = Vec::new();
    process.begin(0);
    if process.rank == 0 {
        process.begin(1);
    }
    results.push(process.finish().expect("a step"));
    if process.rank == 1 {
        process.begin(1);
    }
    results.push(process.finish().expect("a step"));
    // The numbers of both processes are the same again.
    process.begin(2);
    results.push(process.finish().expect("a step"));
    assert_eq!(results, expected, "rank {}", process.rank);
    assert_eq!(process.pipeline.comparisons(), 3);
    process.report("a next batch of one process");
}

/// Processes whose next batches differ learn it when the step before has ended, which has its results.
fn different() {
    let mut process = Process::launch(2, 1, 3, 0);
    process.begin(0);
    let rate = if process.rank == 0 { RATE } else { 2.0 * RATE };
    process.pipeline.begin(numbered(1, &process.config), rate).expect("one has begun");
    process.watch.begun.fetch_add(2, Ordering::SeqCst);
    let (expected, _) = of_threads(2, &process.config, 2);
    assert_eq!(process.finish().expect("a step"), expected[0]);
    assert_eq!(process.pipeline.comparisons(), 2, "the digests differ");
    let error = process.finish().expect_err("the rates differ");
    assert!(matches!(error, PipelineError::Disagreement(_)), "{error}");
    // Both can take the step together.
    process.begin(1);
    assert_eq!(process.finish().expect("a step"), expected[1]);
    process.report("next batches that differ");
}

/// Rank 1 fails in a batch, with the next one begun in both processes. The one before has its results, and the
/// processes take the step again.
fn fails(batch: u64) {
    let mut process = Process::launch(2, 1, 4, batch);
    let (expected, _) = of_threads(2, &process.config, 3);
    process.begin(0);
    process.begin(1);
    if batch == 2 {
        assert_eq!(process.finish().expect("it has not failed"), expected[0]);
        process.begin(2);
    }
    let error = process.finish().expect_err("rank 1 panics").to_string();
    assert!(
        error.starts_with(&format!("step {batch}: rank 1")) && error.contains("it has to fail"),
        "{error}"
    );
    assert!(!process.pipeline.has_begun(), "the next one is dropped");
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    for number in batch - 1..3 {
        let summary = process.pipeline.step_batch(numbered(number, &process.config), RATE).expect("a step");
        let (_, losses, norm, ..) = result_of(&summary);
        let (_, expected_losses, expected_norm, ..) = &expected[number as usize];
        assert_eq!(
            (&losses, &norm),
            (expected_losses, expected_norm),
            "rank {}, batch {number}",
            process.rank
        );
    }
    process.report(&format!("a failure of batch {batch} with the next one begun"));
}

/// Rank 1 fails in a batch, and only the other process has begun the next one. The numbers of both processes are
/// the same afterwards, so they can take the step again.
fn fails_with_next_of_one() {
    let mut process = Process::launch(2, 1, 2, 1);
    let (expected, _) = of_threads(2, &process.config, 1);
    process.begin(0);
    if process.rank == 0 {
        process.begin(1);
    }
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    let error = process.finish().expect_err("rank 1 panics").to_string();
    assert!(error.starts_with("step 1: rank 1") && error.contains("it has to fail"), "{error}");
    process.begin(0);
    let (_, losses, norm, ..) = process.finish().expect("a step");
    assert_eq!((&losses, norm), (&expected[0].1, expected[0].2), "rank {}", process.rank);
    process.report("a failure with a next batch of one process");
}

/// Rank 1 fails in its update while rank 0 is in the next batch. Both processes have the error of the step, and
/// take no further one.
fn update_fails() {
    let optimizer = descent(|| {
        if std::thread::current().name() == Some("rank-1") {
            // Rank 0 is in the next batch by then.
            std::thread::sleep(Duration::from_secs(3));
            panic!("out of cheese");
        }
    });
    let mut process =
        Process::launch_with(PipelineConfig { optimizer: Some(optimizer), ..config() }, 2, 2, 0);
    process.begin(0);
    process.begin(1);
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    if process.rank == 0 {
        wait_until(|| process.watch.runs.load(Ordering::SeqCst) > 1);
    }
    let error = process.finish().expect_err("rank 1 panics").to_string();
    assert!(error.starts_with("step 1: rank 1, stage 1, update") && error.contains("cheese"), "{error}");
    let next = process.pipeline.step_batch(numbered(2, &process.config), RATE).expect_err("one has updated");
    let PipelineError::Diverged { step, first } = next else { panic!("{next}") };
    assert_eq!((step.get(), first.to_string()), (1, error), "the first failure is named");
    process.report("an update that fails with the next batch begun");
}

/// A process drops its pipeline in a step, while its rank waits for a message. It does not wait for the deadline,
/// and the other process gets an error.
fn dropped() {
    let mut process = Process::launch(2, 1, 2, 0);
    process.begin(0);
    let watch = process.watch.clone();
    if process.rank == 1 {
        watch.begun.fetch_add(1, Ordering::SeqCst);
        // The rank sleeps by then.
        std::thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        drop(process.pipeline);
        let elapsed = start.elapsed();
        assert!(elapsed < Duration::from_secs(6), "{elapsed:?}");
        return;
    }
    // The rank of this process begins its part of the step later.
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(800));
        watch.begun.fetch_add(1, Ordering::SeqCst);
    });
    let error = process.finish().expect_err("the other process does not continue").to_string();
    assert!(error.contains("its pipeline was dropped"), "{error}");
    release.join().expect("no panic");
    process.report("a pipeline that is dropped in a step");
}

//! Processes that each have a part of the batch: worlds of one rank each, as processes over MPI have.

use std::thread;

use burn::tensor::{Device, Tensor};
use pipewright::batch::{Batch, SplitRule, SplitSpec};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::tensor::Metadata;
use pipewright::transport::World;

use crate::support::{WIDTH, config, launch_in, numbers, program};

const MICROBATCHES: u32 = 4;
const RATE: f64 = 1e-2;

/// The losses and the parameters of the ranks of one process.
#[derive(Clone, Debug, Default, PartialEq)]
struct Found {
    losses: Vec<f64>,
    loss_weights: Vec<f64>,
    gradients: Vec<f32>,
    parameters: Vec<(String, Vec<f32>)>,
}

fn rows(seed: u64, rows: usize) -> Tensor<2> {
    Tensor::from_data(numbers(seed, [rows, WIDTH]), &Device::flex())
}

fn of_replicas(data_parallel: u32, data_parallel_mode: DataParallelMode) -> PipelineConfig {
    // The microbatches differ in their rows.
    let metadata = Metadata::Dynamic { free: vec![0] };
    PipelineConfig { data_parallel, data_parallel_mode, metadata, ..config() }
}

fn launch(world: World, config: &PipelineConfig) -> Pipeline {
    launch_in(world, program("1f1b", 4, MICROBATCHES), config)
}

fn world(config: &PipelineConfig) -> World {
    World::local(4 * config.data_parallel)
}

/// Runs `work` in a process for each rank.
fn in_processes<T: Send + 'static>(
    config: &PipelineConfig,
    work: impl Fn(u32, &mut Pipeline) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let processes = (0..).zip(world(config).apart()).map(|(rank, world)| {
        let (work, config) = (work.clone(), config.clone());
        thread::spawn(move || work(rank, &mut launch(world, &config)))
    });
    let processes: Vec<_> = processes.collect();
    processes.into_iter().map(|process| process.join().expect("no panic")).collect()
}

fn found(pipeline: &mut Pipeline, summary: StepSummary) -> Found {
    let gradient = summary.input_gradient::<2>(0).map(|found| found.into_data().iter().collect());
    let parameters = pipeline.parameters().expect("all ranks answer").into_iter();
    let mut parameters: Vec<_> =
        parameters.map(|found| (found.path.to_string(), found.data.iter().collect())).collect();
    parameters.sort_by(|a: &(String, Vec<f32>), b| a.0.cmp(&b.0));
    Found {
        losses: summary.losses,
        loss_weights: summary.loss_weights,
        gradients: gradient.unwrap_or_default(),
        parameters,
    }
}

/// The part of a batch that a process passes.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    All,
    Inputs,
    Targets,
    None,
}

/// Returns the part of the batch of `count` rows that a process passes.
fn batch(part: Part, count: usize) -> Batch {
    let (x, y) = (rows(1, count), rows(2, count));
    let rule = SplitRule::balanced(MICROBATCHES * if count > 20 { 2 } else { 1 });
    let batch = match part {
        Part::All => Batch::split(x, y, rule),
        Part::Inputs => Batch::split(x, (), rule),
        Part::Targets => Batch::split((), y, rule.targets(SplitSpec::Along(0))),
        Part::None => Ok(Batch::default()),
    };
    batch.expect("it splits").keep_input_gradients()
}

/// As in PyTorch: the first process has the inputs, the last one the targets.
fn part_of(rank: u32) -> Part {
    match rank % 4 {
        0 => Part::Inputs,
        3 => Part::Targets,
        _ => Part::None,
    }
}

fn check(config: &PipelineConfig, count: usize, part_of: fn(u32) -> Part) {
    let mut whole = launch(world(config), config);
    let summary = whole.step_batch(batch(Part::All, count), RATE).expect("a step");
    let expected = found(&mut whole, summary);
    let processes = in_processes(config, move |rank, pipeline| {
        let summary = pipeline.step_batch(batch(part_of(rank), count), RATE).expect("a step");
        found(pipeline, summary)
    });
    let mut joined = Found { loss_weights: expected.loss_weights.clone(), ..Found::default() };
    for process in processes {
        assert_eq!(process.loss_weights, expected.loss_weights);
        joined.losses.extend(process.losses);
        joined.gradients.extend(process.gradients);
        joined.parameters.extend(process.parameters);
    }
    joined.parameters.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(joined, expected);
}

#[test]
fn the_first_process_has_the_inputs_and_the_last_the_targets() {
    check(&of_replicas(1, DataParallelMode::Replicated), 13, part_of);
    check(&of_replicas(1, DataParallelMode::Replicated), 13, |rank| {
        if rank == 2 { Part::All } else { part_of(rank) }
    });
    check(&of_replicas(2, DataParallelMode::Replicated), 27, part_of);
    check(&of_replicas(2, DataParallelMode::Sharded), 27, part_of);
}

/// Takes a step with batches that do not belong together, and then one with batches that do.
fn check_refused(batch_of: fn(u32) -> Batch, expected: &'static str) {
    let config = of_replicas(1, DataParallelMode::Replicated);
    let before = std::time::Instant::now();
    let errors = in_processes(&config, move |rank, pipeline| {
        let error = pipeline.step_batch(batch_of(rank), RATE).map(drop).expect_err("they differ").to_string();
        pipeline.step_batch(batch(part_of(rank), 13), RATE).expect("nothing is left of the refused step");
        error
    });
    assert!(before.elapsed() < config.deadline / 2, "no process waits for its deadline");
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.contains(expected), "rank {rank}: {error}");
    }
}

#[test]
fn batches_that_do_not_belong_together_are_an_error_with_both_sides() {
    check_refused(
        |rank| batch(part_of(rank), if rank == 3 { 12 } else { 13 }),
        "rank 0 has 13 rows of inputs, by microbatch [4, 3, 3, 3], and rank 3 has 12 rows of targets, by microbatch \
         [3, 3, 3, 3]: give every process the same batch",
    );
    check_refused(
        |rank| batch(Part::All, if rank == 2 { 14 } else { 13 }),
        "rank 0 has 13 rows of inputs, by microbatch [4, 3, 3, 3], and rank 2 has 14 rows of inputs",
    );
    let weighted = |rank: u32| {
        let batch = batch(Part::All, 13).weighted([1.0, 1.0, 1.0, f64::from(1 + rank / 3)]);
        batch.expect("four weights")
    };
    check_refused(weighted, "rank 3 has microbatches of the weights [1.0, 1.0, 1.0, 2.0]");
    check_refused(
        |rank| if rank == 0 { Batch::default() } else { batch(Part::All, 13) },
        "0 microbatches of inputs, the program has 4",
    );
    // A process without the first and the last stage does not know the number of microbatches itself.
    let too_few = |rank: u32| match rank {
        1 => Batch::default().weighted([1.0; 3]).expect("no number to compare with"),
        _ => batch(part_of(rank), 13),
    };
    check_refused(too_few, "3 microbatches of weights, the program has 4");
}

#[test]
fn steps_of_different_kinds_are_an_error_in_every_process() {
    let config = of_replicas(1, DataParallelMode::Replicated);
    let errors = in_processes(&config, |rank, pipeline| {
        let batch =
            || Batch::split(rows(1, 13), rows(2, 13), SplitRule::balanced(MICROBATCHES)).expect("it splits");
        let outcomes = match rank {
            1 => [pipeline.accumulate(batch()).map(drop), pipeline.eval_batch(batch()).map(drop)],
            _ => [pipeline.step_batch(batch(), RATE).map(drop), pipeline.step_batch(batch(), RATE).map(drop)],
        };
        outcomes.map(|outcome| outcome.expect_err("they differ").to_string())
    });
    for [accumulated, evaluated] in errors {
        let update = "rank 0 has a step that updates with the learning rate 0.01, and rank 1 has";
        assert!(accumulated.contains(&format!("{update} a batch to accumulate")), "{accumulated}");
        assert!(evaluated.contains(&format!("{update} an evaluation")), "{evaluated}");
    }
}

#[test]
fn whole_batches_may_be_left_out_too() {
    let config = of_replicas(1, DataParallelMode::Replicated);
    let losses = in_processes(&config, |rank, pipeline| {
        let (x, y) = (|| rows(1, 12), || rows(2, 12));
        let step = match part_of(rank) {
            Part::Inputs => pipeline.step(x(), (), RATE),
            Part::Targets => pipeline.step((), y(), RATE),
            _ => pipeline.step((), (), RATE),
        };
        let evaluated = match part_of(rank) {
            Part::Inputs => pipeline.eval(x(), None::<()>),
            Part::Targets => pipeline.eval((), Some(y())),
            _ => pipeline.eval((), None::<()>),
        };
        let uneven = match part_of(rank) {
            Part::Inputs => pipeline.step(rows(1, 13), (), RATE),
            _ => pipeline.step((), (), RATE),
        };
        let error = uneven.map(drop).expect_err("13 rows do not divide").to_string();
        assert!(error.contains("13 rows do not divide into 4 microbatches"), "{error}");
        (step.expect("a step").losses, evaluated.expect("an evaluation").losses)
    });
    let mut whole = launch(world(&config), &config);
    let step = whole.step(rows(1, 12), rows(2, 12), RATE).expect("a step").losses;
    let evaluated = whole.eval(rows(1, 12), Some(rows(2, 12))).expect("an evaluation").losses;
    assert_eq!(losses[3], (step, evaluated));
}

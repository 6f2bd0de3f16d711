//! Data parallelism: replicas share a batch, and train as one pipeline does.

use burn::tensor::{Int, Tensor};
use pipewright::batch::{Batch, SplitRule};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Pipeline, PipelineConfig, SeededPipeline};
use pipewright::tensor::pack;
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;

use crate::support::{self, Step, batch, config, program, seeds, split, stage, take_steps};

fn replicated(replicas: u32) -> PipelineConfig {
    PipelineConfig { data_parallel: replicas, ..config() }
}

fn launch(schedule: &str, ranks: u32, microbatches: u32, replicas: u32) -> Pipeline {
    support::launch(program(schedule, ranks, microbatches / replicas), &replicated(replicas))
}

/// Takes steps on batches of `microbatches` microbatches and returns their results and the parameters.
fn train(pipeline: &mut Pipeline, microbatches: u32) -> (Vec<Step>, Vec<f32>) {
    let steps = take_steps(pipeline, 0..4, microbatches);
    let mut parameters = pipeline.parameters().expect("they are there");
    parameters.sort_by(|a, b| a.path.cmp(&b.path));
    (
        steps,
        parameters.iter().flat_map(|parameter| parameter.data.iter::<f32>().collect::<Vec<_>>()).collect(),
    )
}

fn check_close(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{what}: {found} for {expected}");
}

fn check(schedule: &str, ranks: u32, microbatches: u32, replicas: u32) {
    let (expected, _) = train(&mut launch(schedule, ranks, microbatches, 1), microbatches);
    let (found, parameters) = train(&mut launch(schedule, ranks, microbatches, replicas), microbatches);
    let what = format!("{schedule}, {ranks} ranks, {replicas} replicas");
    for ((losses, norm), (expected_losses, expected_norm)) in found.iter().zip(&expected) {
        assert_eq!(losses.len(), expected_losses.len(), "{what}");
        losses
            .iter()
            .zip(expected_losses)
            .for_each(|(&found, &expected)| check_close(found, expected, &what));
        check_close(*norm, *expected_norm, &what);
    }
    // Sorted by path, copies of a parameter are adjacent; every replica has the same bits.
    let of_one = parameters.len() / replicas as usize;
    assert_eq!(of_one * replicas as usize, parameters.len());
    let (again, _) = train(&mut launch(schedule, ranks, microbatches, replicas), microbatches);
    assert_eq!(again, found, "{what}: a second run has the same bits");
}

#[test]
fn replicas_train_as_one_pipeline_does() {
    check("1f1b", 2, 8, 2);
    check("gpipe", 2, 8, 4);
    check("1f1b", 1, 8, 8);
    check("1f1b", 4, 12, 3);
}

#[test]
fn every_schedule_has_replicas() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        check(generator.name, 2, 8, 2);
    }
}

#[test]
fn replicas_keep_the_same_parameters() {
    let mut pipeline = launch("1f1b", 2, 6, 3);
    train(&mut pipeline, 6);
    let parameters = pipeline.parameters().expect("they are there");
    let first = &parameters[0];
    let copies: Vec<_> = parameters.iter().filter(|other| other.path == first.path).collect();
    assert_eq!(copies.len(), 3);
    for parameter in &parameters {
        let same = parameters.iter().filter(|other| other.path == parameter.path);
        assert!(same.clone().all(|other| other.data == parameter.data), "{}", parameter.path);
    }
}

/// Replicas with unequal shares of the batch train as one pipeline whose microbatches have the same rows.
fn check_shares(schedule: &str, ranks: u32, shares: &[u32], config: &PipelineConfig) {
    let (microbatches, replicas) = (4 * shares.len() as u32, shares.len() as u32);
    let rows = 4 * shares.iter().sum::<u32>();
    let inputs = |step: u64| batch(step, rows);
    let config = PipelineConfig { data_parallel: replicas, batch_shares: shares.to_vec(), ..config.clone() };
    let mut shared = support::launch(program(schedule, ranks, 4), &config);
    let mut one = launch(schedule, ranks, microbatches, 1);
    for step in 0..3 {
        let found = shared.step(inputs(step), inputs(100 + step), 1e-2).expect("a step");
        let rule = SplitRule::shared(microbatches, shares);
        let parts = |step| pipewright::batch::split(&pack(inputs(step)), rule.clone()).expect("it divides");
        let expected = one.step_batch(Batch::new(parts(step), parts(100 + step)), 1e-2).expect("a step");
        let what = format!("{schedule}, shares {shares:?}, step {step}");
        assert_eq!(found.losses.len(), microbatches as usize);
        for (found, expected) in found.losses.iter().zip(&expected.losses) {
            check_close(*found, *expected, &what);
        }
        check_close(found.loss(), expected.loss(), &what);
        check_close(found.gradient_norm, expected.gradient_norm, &what);
        let eval = |pipeline: &mut Pipeline, step| {
            pipeline.eval(inputs(step), Some(inputs(100 + step))).expect("an evaluation").loss()
        };
        check_close(eval(&mut shared, step), eval(&mut one, step), &what);
    }
}

#[test]
fn replicas_have_unequal_shares_of_the_batch() {
    check_shares("1f1b", 2, &[3, 1], &config());
    check_shares("gpipe", 1, &[1, 2, 5], &config());
    check_shares("interleavedzerobubble", 2, &[1, 3], &config());
    let sharded = PipelineConfig { data_parallel_mode: DataParallelMode::Sharded, ..config() };
    check_shares("1f1b", 2, &[3, 1], &sharded);
}

#[test]
fn shares_that_do_not_fit_the_replicas_are_refused() {
    let check = |shares: &[u32], expected: &str| {
        let config = PipelineConfig { batch_shares: shares.to_vec(), ..replicated(2) };
        let launched =
            Pipeline::launch(program("1f1b", 2, 4), World::local(4), &config, |index| stage(index, 2));
        let error = launched.err().expect("it is refused").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(
        &[3],
        "1 share of the batch ([3]) for 2 replicas: set `batch_shares` to a number from 1 for each replica",
    );
    check(&[1, 0], "2 shares of the batch ([1, 0]) for 2 replicas");
}

#[test]
fn every_interleaving_of_replicas_gives_the_same_bits() {
    let run = |seed| {
        let program = program("interleavedzerobubble", 2, 4);
        let stages = program.placement().stages();
        let mut pipeline = SeededPipeline::new(program, &replicated(2), seed, |index| stage(index, stages))
            .expect("it starts");
        [0, 1].map(|step| {
            let batch = Batch::new(split(batch(step, 8), 8), split(batch(100 + step, 8), 8));
            let report = pipeline.step_batch(batch, 1e-2).expect("a step");
            (report.losses, report.gradient_norm)
        })
    };
    let expected = run(0);
    for seed in seeds(200) {
        assert_eq!(run(seed), expected, "seed {seed}");
    }
}

#[test]
fn gradients_of_several_steps_are_reduced_once() {
    let train = |replicas: u32| {
        let mut pipeline = launch("1f1b", 2, 8, replicas);
        for step in 0..3 {
            let parts = |seed| split(batch(seed, 8), 8);
            pipeline.accumulate(Batch::new(parts(step), parts(100 + step))).expect("a step");
        }
        let report = pipeline.step(batch(3, 8), batch(103, 8), 1e-2).expect("a step");
        report.gradient_norm
    };
    check_close(train(2), train(1), "norm over four steps");
}

#[test]
fn evaluations_and_side_inputs_are_shared_out() {
    use burn::module::Module;
    use pipewright::stage::{Stage, StageContext, StageModule};

    /// Adds its index to each row.
    #[derive(Module, Debug)]
    struct Adds {
        inner: support::Mlp,
    }

    impl StageModule for Adds {
        type Input = Tensor<2>;
        type Output = Tensor<2>;

        fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
            let numbers: Tensor<1, Int> = context.side("numbers").expect("the step brings them");
            let output = input + numbers.float().unsqueeze_dim(1);
            self.inner.forward(output, context)
        }
    }

    let losses = |replicas: u32| {
        let program = program("gpipe", 1, 4 / replicas);
        let make = |_| {
            Ok::<_, std::convert::Infallible>(Stage::with_loss(
                Adds { inner: support::Mlp::new(0, 2) },
                support::loss,
            ))
        };
        let world = World::local(replicas);
        let mut pipeline = Pipeline::launch(program, world, &replicated(replicas), make).expect("it starts");
        let numbers = Tensor::<1, Int>::arange(0..12, &burn::tensor::Device::flex());
        let batch = Batch::new(split(batch(0, 4), 4), split(batch(100, 4), 4));
        let batch = batch.with_split("numbers", numbers).expect("a number a row");
        pipeline.eval_batch(batch).expect("an evaluation").losses
    };
    assert_eq!(losses(2), losses(1));
}

#[test]
fn a_world_of_another_size_is_refused() {
    let program = program("1f1b", 2, 4);
    let launched = Pipeline::launch(program, World::local(3), &replicated(2), |index| stage(index, 2));
    let error = launched.err().expect("four ranks are needed");
    let expected = "the transport has 3 ranks, and 2 replicas of a program of 2 ranks need 2 x 2";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_loss_that_is_not_finite_in_one_replica_changes_no_other() {
    let mut pipeline = launch("1f1b", 2, 8, 2);
    train(&mut pipeline, 8);
    let before = pipeline.parameters().expect("they are there");
    // The sixth microbatch is the second one of the second replica.
    let mut targets = batch(100, 8);
    let rows = 5 * support::ROWS..6 * support::ROWS;
    targets = targets.slice_assign(
        [rows, 0..support::WIDTH],
        Tensor::full([support::ROWS, support::WIDTH], f32::NAN, &burn::tensor::Device::flex()),
    );
    let error = pipeline.step(batch(0, 8), targets, 1e-2).expect_err("a loss is not a number");
    assert!(error.to_string().contains("the loss of microbatch 5 is NaN"), "{error}");
    let after = pipeline.parameters().expect("they are there");
    assert!(before.iter().zip(&after).all(|(before, after)| before.data == after.data));
    pipeline.step(batch(0, 8), batch(100, 8), 1e-2).expect("the next step is clean");
}

//! Steps that begin while the one before them ends: their results, and the calls that are refused while a step
//! runs.

pub(crate) mod batches;
mod failures;
pub(crate) mod watch;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use burn::tensor::Tensor;
use pipewright::batch::Batch;
use pipewright::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::loss_scale::LossScaling;
use pipewright::mesh::DataParallelMode;
use pipewright::offload::OffloadTo;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::tensor::Precision;
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright::verification::Verify;
use pipewright_schedule::{Recompute, StageIndex};
use serde_json::Map;

use crate::support::{self, Mlp, batch, config, offloaded, program, split};
use batches::{MICROBATCHES, RATE, StepResult, begin, numbered, parameters, result_of};
use watch::{Watch, actions, wait_until};

fn launch(schedule: &str, ranks: u32, config: &PipelineConfig) -> Pipeline {
    launch_in(World::local(ranks * config.data_parallel), schedule, config)
}

/// Launches the ranks of `world` that are in this process.
fn launch_in(world: World, schedule: &str, config: &PipelineConfig) -> Pipeline {
    let program = program(schedule, world.ranks() / config.data_parallel, MICROBATCHES);
    support::launch_in(world, offloaded(program, config), config)
}

/// Trains on batches one after the other, each alone, and then with each begun during the one before. The
/// results and the parameters are the same. Returns the results.
fn check(schedule: &str, ranks: u32, config: &PipelineConfig, every: u64) -> Vec<StepResult> {
    let batches = 6 * every;
    let mut alone = launch(schedule, ranks, config);
    let expected: Vec<StepResult> = (0..batches)
        .map(|number| {
            begin(&mut alone, number, every, config);
            result_of(&alone.finish().expect("a step"))
        })
        .collect();
    let mut ahead = launch(schedule, ranks, config);
    let mut results = Vec::new();
    begin(&mut ahead, 0, every, config);
    for number in 1..=batches {
        if number < batches {
            begin(&mut ahead, number, every, config);
        }
        results.push(result_of(&ahead.finish().expect("a step")));
    }
    let case = format!("{schedule} on {ranks} ranks, {} replicas", config.data_parallel);
    assert!(!ahead.has_begun());
    assert_eq!(results, expected, "{case}");
    assert_eq!(parameters(&mut ahead), parameters(&mut alone), "{case}");
    results
}

#[test]
fn steps_have_the_same_bits_under_every_schedule() {
    for (schedule, ranks) in [("gpipe", 1), ("1f1b", 4), ("zb-h1", 2), ("zbvzerobubble", 2), ("dualpipev", 2)]
    {
        let unclipped = PipelineConfig { clip_norm: None, ..config() };
        for (config, every) in [(config(), 1), (unclipped, 1), (config(), 3)] {
            check(schedule, ranks, &config, every);
        }
    }
}

#[test]
fn replicas_have_the_same_bits() {
    for data_parallel_mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        let config = PipelineConfig { data_parallel: 2, data_parallel_mode, ..config() };
        for every in [1, 2] {
            check("1f1b", 2, &config, every);
        }
    }
}

#[test]
fn the_loss_scale_follows_from_the_step_before() {
    let loss_scaling = LossScaling { initial: f64::from(1 << 24), interval: 2 };
    let config = PipelineConfig { precision: Precision::F16, loss_scaling, ..config() };
    for every in [1, 2] {
        let results = check("1f1b", 2, &config, every);
        let skipped: Vec<bool> = results.iter().map(|(.., skipped)| *skipped).collect();
        assert!(skipped.contains(&true), "the first scale is too large");
    }
}

#[test]
fn verified_steps_have_the_same_bits() {
    check("1f1b", 2, &PipelineConfig { verify: Verify::OnSuspicion, ..config() }, 2);
}

#[test]
fn steps_whose_inputs_leave_memory_have_the_same_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    let offload = Some(OffloadTo::Folder(folder.path().to_owned()));
    let moving = PipelineConfig { recompute: Recompute::Stage, offload, ..config() };
    for schedule in ["gpipe", "1f1b"] {
        let [expected, found] = [&config(), &moving].map(|config| check(schedule, 2, config, 2));
        assert_eq!(found, expected, "{schedule}");
        assert!(launch(schedule, 2, &moving).program().as_program().offloads());
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn processes_have_the_same_bits() {
    let in_processes = |is_ahead: bool| {
        let in_process = move |world| {
            let config = config();
            let mut pipeline = launch_in(world, "1f1b", &config);
            let mut results = Vec::new();
            for number in 0..4 {
                if !(is_ahead && number > 0) {
                    begin(&mut pipeline, number, 2, &config);
                }
                if is_ahead && number < 3 {
                    begin(&mut pipeline, number + 1, 2, &config);
                }
                results.push(result_of(&pipeline.finish().expect("a step")));
            }
            (results, parameters(&mut pipeline))
        };
        let processes = World::local(2).apart().into_iter();
        let processes: Vec<_> =
            processes.map(|world| std::thread::spawn(move || in_process(world))).collect();
        processes.into_iter().map(|process| process.join().expect("no panic")).collect::<Vec<_>>()
    };
    assert_eq!(in_processes(true), in_processes(false));
}

#[test]
fn ranks_go_on_to_the_next_step_before_the_results_are_read() {
    let (watch, mut pipeline, config) = Watch::default().launch();
    (0..2).for_each(|number| begin(&mut pipeline, number, 1, &config));
    let both = 2 * actions(&pipeline).iter().sum::<u32>();
    wait_until(|| watch.begun.load(Ordering::SeqCst) == both);
    let [first, second] = [(); 2].map(|()| pipeline.finish().expect("a step"));
    let gap = second.gap.expect("a step was before");
    assert!(gap.critical > Duration::ZERO && gap.update > Duration::ZERO, "{gap:?}");
    assert_eq!((first.step.get(), second.step.get()), (1, 2));
}

#[test]
fn a_rank_begins_a_batch_while_another_one_is_in_the_batch_before() {
    // Rank 0 waits in the last action of the first batch until rank 1 has begun the second one.
    let own = actions(&launch("1f1b", 2, &config()));
    let (watch, mut pipeline, config) = Watch { waits: Some((0, own[0] - 1)), ..Watch::default() }.launch();
    (0..2).for_each(|number| begin(&mut pipeline, number, 4, &config));
    watch.wait_for(1, own[1]);
    watch.release();
    (0..2).for_each(|_| drop(pipeline.finish().expect("a step")));
}

/// Saves a checkpoint of a pipeline that has taken no step.
fn saved(pipeline: &mut Pipeline, folder: &Path) -> Arc<Checkpoint> {
    let own = CheckpointFolder::own(folder).expect("no other process owns it");
    let mut writer = CheckpointWriter::start(own, 1, 1, Duration::from_secs(20)).expect("a thread");
    let (cursor, ranks) = (Cursor { epoch: 0, index: 0 }, pipeline.state().expect("no step runs"));
    writer.save(TrainingState { step: 0, cursor, description: Map::new(), ranks }).expect("a checkpoint");
    writer.wait().expect("it is complete");
    Arc::new(CheckpointFolder::newest(folder).expect("a sound checkpoint"))
}

#[test]
fn nothing_that_needs_the_state_runs_during_a_step() {
    let mut pipeline = launch("1f1b", 2, &config());
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let checkpoint = saved(&mut pipeline, scratch.path());
    let refused = |error: PipelineError| assert!(matches!(error, PipelineError::StepBegun), "{error}");
    assert!(matches!(pipeline.finish(), Err(PipelineError::NoStepBegun)));
    (0..2).for_each(|number| begin(&mut pipeline, number, 1, &config()));
    let third = pipeline.begin(numbered(2, &config()), RATE).expect_err("two have begun");
    assert!(matches!(third, PipelineError::StepsBegun), "{third}");
    let batches = || (batch(0, MICROBATCHES), batch(1, MICROBATCHES));
    refused(pipeline.step(batches().0, batches().1, RATE).expect_err("a step runs"));
    refused(pipeline.accumulate(numbered(2, &config())).expect_err("a step runs"));
    refused(pipeline.eval(batches().0, Some(batches().1)).expect_err("a step runs"));
    refused(pipeline.parameters().expect_err("a step runs"));
    refused(pipeline.state().expect_err("a step runs"));
    refused(pipeline.freeze(|_| true).expect_err("a step runs"));
    refused(pipeline.unfreeze(|_| true).expect_err("a step runs"));
    refused(pipeline.shift(BTreeMap::new()).expect_err("a step runs"));
    let stage = StageIndex::new(0);
    refused(pipeline.module(stage, |_: &Mlp| ()).expect_err("a step runs"));
    refused(pipeline.change_module(stage, |module: Mlp| module).expect_err("a step runs"));
    refused(pipeline.restore(&checkpoint).expect_err("a step runs"));
    refused(pipeline.restore_matching(&checkpoint).expect_err("a step runs"));
    (0..2).for_each(|_| drop(pipeline.finish().expect("a step")));
    assert_eq!(pipeline.state().expect("no step runs").len(), 2);
}

#[test]
fn a_batch_that_cannot_be_used_is_an_error_of_its_own_results() {
    let mut pipeline = launch("1f1b", 2, &config());
    let wrong: Tensor<2> = batch(1, 3);
    let refused = |pipeline: &mut Pipeline| {
        let error = pipeline.finish().expect_err("it has three microbatches");
        assert!(error.to_string().starts_with("3 microbatches of inputs"), "{error}");
        assert!(!pipeline.has_begun());
    };
    let begin_wrong = |pipeline: &mut Pipeline| {
        let batch = Batch::new(split(wrong.clone(), 3), split(wrong.clone(), 3));
        pipeline.begin(batch, RATE).expect("at most one has begun");
    };
    begin_wrong(&mut pipeline);
    refused(&mut pipeline);
    begin(&mut pipeline, 0, 1, &config());
    begin_wrong(&mut pipeline);
    assert_eq!(pipeline.finish().expect("a step").step.get(), 1);
    refused(&mut pipeline);
    // A batch after it is dropped.
    begin_wrong(&mut pipeline);
    begin(&mut pipeline, 1, 1, &config());
    refused(&mut pipeline);
    begin(&mut pipeline, 1, 1, &config());
    let step = pipeline.finish().expect("a step");
    assert_eq!((step.step.get(), step.gap), (2, None), "a refused batch was in between");
    // The refused batch is begun after the end of the step before.
    begin_wrong(&mut pipeline);
    refused(&mut pipeline);
    begin(&mut pipeline, 2, 1, &config());
    assert_eq!(pipeline.finish().expect("a step").gap, None, "a refused batch was in between");
}

#[test]
fn a_batch_that_does_not_fit_the_gradients_that_wait_leaves_the_one_that_runs() {
    let mut pipeline = launch("1f1b", 2, &config());
    begin(&mut pipeline, 0, 4, &config());
    pipeline.begin(numbered(1, &config()).summed(), RATE).expect("one has begun");
    assert_eq!(pipeline.finish().expect("a batch").step.get(), 1);
    let error = pipeline.finish().expect_err("its losses are added");
    assert!(error.to_string().contains("reduce their losses in different ways"), "{error}");
}

/// Gradients of inputs may not fit together, so the next batch waits for the results.
#[test]
fn gradients_of_inputs_are_those_of_a_batch_alone() {
    let gradients = |is_ahead: bool| {
        let mut pipeline = launch("1f1b", 2, &config());
        pipeline.begin(numbered(0, &config()).keep_input_gradients(), RATE).expect("none has begun");
        if is_ahead {
            begin(&mut pipeline, 1, 1, &config());
        }
        let summary = pipeline.finish().expect("a step");
        let gradient = summary.input_gradient::<2>(0).expect("it was asked for");
        if !is_ahead {
            begin(&mut pipeline, 1, 1, &config());
        }
        let next = result_of(&pipeline.finish().expect("a step"));
        (gradient.into_data().iter::<f32>().collect::<Vec<_>>(), next, parameters(&mut pipeline))
    };
    assert_eq!(gradients(true), gradients(false));
}

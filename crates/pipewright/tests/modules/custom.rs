//! Hooks around actions, custom overlaps and weight runners, and losses that read the step's inputs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor};
use pipewright::batch::{Merge, merge_by};
use pipewright::hook::{ActionHook, OverlapRun};
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageError, StageModule, WeightWork};
use pipewright::tensor::unpack;
use pipewright::transport::World;
use pipewright_schedule::generate::{Generator, catalogue};
use pipewright_schedule::{Action, Microbatch, Rank, StageIndex};

use crate::support::{
    self, Mlp, ROWS, Step, WIDTH, batch, brought, config, loss, program, stage, take_steps,
};

fn launch(schedule: &str, hook: Option<Arc<dyn ActionHook>>) -> Pipeline {
    support::launch(program(schedule, 2, 4), &PipelineConfig { hook, ..config() })
}

fn steps(pipeline: &mut Pipeline) -> Vec<Step> {
    take_steps(pipeline, 0..3, 4)
}

/// Counts ranks inside an action, and runs the backward of an overlap first.
#[derive(Default)]
struct Scopes {
    inside: [AtomicBool; 2],
    actions: AtomicUsize,
    overlaps: Mutex<Vec<String>>,
}

impl ActionHook for Scopes {
    fn around(&self, rank: WorldRank, _action: Action, run: &mut dyn FnMut()) {
        assert!(!self.inside[rank.index()].swap(true, Ordering::SeqCst), "a scope is left before the next");
        run();
        self.inside[rank.index()].store(false, Ordering::SeqCst);
        self.actions.fetch_add(1, Ordering::SeqCst);
    }

    fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
        run.backward().run_all()?;
        // A part runs once, even if it is called twice.
        run.backward().run_all()?;
        run.forward().run_all()?;
        let (backward, forward) = (run.backward().action(), run.forward().action());
        self.overlaps.lock().expect("no panic").push(format!("{backward} {forward}"));
        Ok(())
    }
}

#[test]
fn hooks_around_actions_change_no_bit() {
    for schedule in ["1f1b", "zbvzerobubble", "dualpipev"] {
        let scopes = Arc::new(Scopes::default());
        let mut with = launch(schedule, Some(scopes.clone()));
        let actions: usize = [0, 1].map(|rank| with.program().row(Rank::new(rank)).len()).iter().sum();
        assert_eq!(steps(&mut with), steps(&mut launch(schedule, None)), "{schedule}");
        assert_eq!(scopes.actions.load(Ordering::SeqCst), 3 * actions, "{schedule}");
        assert_eq!(scopes.overlaps.lock().expect("no panic").is_empty(), schedule != "dualpipev");
    }
}

#[test]
fn an_action_that_its_hook_leaves_out_is_named() {
    struct LeavesOut(&'static str);
    impl ActionHook for LeavesOut {
        fn around(&self, _rank: WorldRank, action: Action, run: &mut dyn FnMut()) {
            if action.to_string() != self.0 {
                run();
            }
        }
        fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
            if run.forward().action().to_string() != self.0 {
                run.forward().run_all()?;
            }
            run.backward().run_all()
        }
    }
    for (schedule, left_out) in [("1f1b", "1F2"), ("dualpipev", "0F3")] {
        let mut pipeline = launch(schedule, Some(Arc::new(LeavesOut(left_out))));
        let error = pipeline.step_batch(brought(0, 4), 1e-2).expect_err("it is missing");
        let PipelineError::Step(error) = error else { panic!("{error}") };
        let expected = match schedule {
            "1f1b" => format!("the hook did not run {left_out}: "),
            _ => format!("the function that runs {left_out} left out block 0 "),
        };
        assert!(error.cause.to_string().starts_with(&expected), "{error}");
    }
}

#[test]
fn weight_gradients_may_be_worked_off_by_hand() {
    for schedule in ["1f1b", "zbvzerobubble"] {
        let program = program(schedule, 2, 4);
        let stages = program.placement().stages();
        let done = Arc::new(AtomicUsize::new(0));
        let counted = done.clone();
        let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
            let counted = counted.clone();
            Ok(stage(index, stages)?.with_weight_runner(move |_: Microbatch, work: &mut WeightWork| {
                // The runtime must compute the remaining gradient.
                while work.len() > 1 && work.run_next() {
                    counted.fetch_add(1, Ordering::SeqCst);
                }
            }))
        };
        let mut pipeline = Pipeline::launch(program, World::local(2), &config(), make).expect("it starts");
        assert_eq!(steps(&mut pipeline), steps(&mut launch(schedule, None)), "{schedule}");
        // Three steps, four microbatches, a product and a bias per layer except one gradient per stage.
        let tasks = 2 * support::LAYERS - stages as usize;
        assert_eq!(done.load(Ordering::SeqCst), 3 * 4 * tasks, "{schedule}");
    }
}

#[test]
fn a_loss_reads_side_inputs() {
    let make = |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let weighted = |output: Tensor<2>, target: Tensor<2>, context: &StageContext| {
            let weights: Tensor<1> = context.side("weights").expect("the step brings it");
            let scale = *context.value::<f32>("scale").expect("the step brings it");
            ((output - target).square() * weights.unsqueeze_dim::<2>(1)).mean() * scale
        };
        let module = Mlp::of_stage(index, 2);
        Ok(if index.get() == 1 { Stage::with_context_loss(module, weighted) } else { Stage::new(module) })
    };
    let mut pipeline =
        Pipeline::launch(program("1f1b", 2, 4), World::local(2), &config(), make).expect("it starts");
    let weights = Tensor::<1>::ones([4 * ROWS], &Device::flex()) * 3.0;
    let batch = brought(0, 4).with_split("weights", weights).expect("it splits").with_value("scale", 0.5f32);
    let evaluated = pipeline.eval_batch(batch.clone()).expect("an evaluation");
    let trained = pipeline.step_batch(batch, 1e-2).expect("a step");
    let plain = launch("1f1b", None).step_batch(brought(0, 4), 1e-2).expect("a step");
    assert_eq!(evaluated.losses, trained.losses);
    for (found, expected) in trained.losses.iter().zip(plain.losses) {
        assert!((found - 1.5 * expected).abs() < 1e-6 * expected, "{found} {expected}");
    }
}

#[test]
fn a_training_step_returns_outputs_when_asked() {
    for schedule in ["1f1b", "zbvzerobubble", "dualpipev", "gpipe"] {
        let (mut pipeline, mut other) = (launch(schedule, None), launch(schedule, None));
        let evaluated = pipeline.eval_batch(brought(0, 4)).expect("an evaluation");
        let asked = pipeline.step_batch(brought(0, 4).keep_outputs(), 1e-2).expect("a step");
        let plain = other.step_batch(brought(0, 4), 1e-2).expect("a step");
        assert!(plain.outputs.is_empty());
        assert_eq!((asked.losses, asked.gradient_norm), (plain.losses, plain.gradient_norm), "{schedule}");
        let merged = |outputs| -> Tensor<2> {
            unpack(merge_by(outputs, Merge::Along(0)).expect("they join").concat()).expect("one tensor")
        };
        let (found, expected) = (merged(asked.outputs), merged(evaluated.outputs));
        assert_eq!(found.dims(), [4 * ROWS, WIDTH]);
        assert_eq!(found.into_data(), expected.into_data(), "{schedule}");
        let next = pipeline.step_batch(brought(1, 4), 1e-2).expect("a step");
        assert!(next.outputs.is_empty(), "a request is for one step");
    }
}

#[test]
fn losses_are_in_microbatch_order_for_every_order_of_execution() {
    let expected: Vec<f64> = (0..4)
        .map(|microbatch| {
            let part = |seed| batch(seed, 4).narrow(0, microbatch * ROWS, ROWS);
            let context = StageContext::new(StageIndex::new(0), 0.into());
            let output = Mlp::new(0, support::LAYERS).forward(part(0).autodiff(), &context);
            f64::from(loss(output, part(100).autodiff()).into_scalar::<f32>())
        })
        .collect();
    let mut sorted = expected.clone();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.dedup();
    assert_eq!(sorted.len(), 4, "microbatches differ");
    let runs = |generator: &&Generator| generator.trains || generator.name == "forwardonly";
    for generator in catalogue().iter().filter(runs) {
        let program = program(generator.name, 2, 4);
        let stages = program.placement().stages();
        let mut pipeline =
            Pipeline::launch(program, World::local(2), &config(), move |index| stage(index, stages))
                .expect("it starts");
        let losses = match generator.name {
            "forwardonly" => pipeline.eval_batch(brought(0, 4)).expect("an evaluation").losses,
            _ => pipeline.step_batch(brought(0, 4), 1e-2).expect("a step").losses,
        };
        assert_eq!(losses, expected, "{}", generator.name);
    }
}

//! Layers that move between the stages of a running pipeline leave every bit as it is.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::module::Module;
use burn::optim::{AdamWConfig, LionConfig, ModuleOptimizer, MuonConfig};
use burn::tensor::Tensor;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::Linear;
use pipewright::pipeline::{MovedLayers, Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::rebalance::{MovedRange, layer_moves};
use pipewright_schedule::{StageIndex, TrainedStages, ValidatedProgram};

use crate::support::{
    LAYERS, Mlp, Parameters, Step, config, descent, ending_in_loss, linear, parameters, program,
    program_of_trained, take_steps,
};

const MICROBATCHES: u32 = 8;

fn cut(starts: &[usize]) -> Partition {
    let (weights, boundaries) = ([1; LAYERS], starts[1..].to_vec());
    partition(&weights, starts.len() as u32, &Method::Explicit { boundaries }).expect("a cut")
}

/// Makes stages of these layers.
fn make(cut: Partition) -> impl Fn(StageIndex) -> Result<Stage, Infallible> + Send + Sync + 'static {
    move |stage| {
        let range = cut.range(stage);
        ending_in_loss(range.end == LAYERS, Mlp::new(range.start, range.len()))
    }
}

fn launch(program: &ValidatedProgram, cut: &Partition, config: &PipelineConfig) -> Pipeline {
    let world = World::local(program.ranks() * config.data_parallel);
    Pipeline::launch(program.clone(), world, config, make(cut.clone())).expect("it starts")
}

/// Returns the layers that move from stage to stage, with the paths of their parameters.
fn moved(before: &Partition, after: &Partition) -> Vec<MovedLayers> {
    let paths = |layer| [format!("layers.{layer}.weight"), format!("layers.{layer}.bias")];
    let moves = layer_moves(before, after).into_iter();
    moves
        .map(|MovedRange { layers, from, to }| MovedLayers {
            from,
            to,
            parameters: layers.flat_map(paths).collect(),
        })
        .collect()
}

fn move_to(pipeline: &mut Pipeline, before: &Partition, after: &Partition) {
    let (program, make) = (pipeline.program().clone(), make(after.clone()));
    let outcome = pipeline.move_layers(program, moved(before, after), move |stage, _| make(stage));
    outcome.expect("the layers move");
}

/// Runs the steps with moves between them. The first cut is even.
fn run(schedule: &str, config: &PipelineConfig, cuts: &[&[usize]]) -> (Vec<Step>, Parameters) {
    let program = program(schedule, 2, MICROBATCHES);
    let stages = program.placement().stages() as usize;
    let even: Vec<usize> = (0..stages).map(|stage| stage * LAYERS / stages).collect();
    let mut present = cut(&even);
    let mut pipeline = launch(&program, &present, config);
    let replicas = config.data_parallel;
    let mut steps = take_steps(&mut pipeline, 0..2, MICROBATCHES * replicas);
    for (number, starts) in (1..).zip(cuts) {
        let next = cut(starts);
        move_to(&mut pipeline, &present, &next);
        present = next;
        steps.extend(take_steps(&mut pipeline, 2 * number..2 * number + 2, MICROBATCHES * replicas));
    }
    let all = parameters(&mut pipeline);
    (steps, all)
}

const TWO: &[&[usize]] = &[&[0, 6], &[0, 1], &[0, 4], &[0, 7]];
const FOUR: &[&[usize]] = &[&[0, 3, 4, 5], &[0, 1, 2, 7], &[0, 2, 4, 6], &[0, 5, 6, 7]];

fn check(schedule: &str, config: &PipelineConfig) {
    let stages = program(schedule, 2, MICROBATCHES).placement().stages();
    let cuts = if stages == 2 { TWO } else { FOUR };
    let even: Vec<usize> = (0..stages as usize).map(|stage| stage * LAYERS / stages as usize).collect();
    // A move to the same cut changes nothing, but counts as two more steps.
    let unmoved = vec![even.as_slice(); cuts.len()];
    assert_eq!(run(schedule, config, cuts), run(schedule, config, &unmoved), "{schedule}");
}

fn with(optimizer: ModuleOptimizer) -> PipelineConfig {
    PipelineConfig { optimizer: Some(optimizer), ..config() }
}

#[test]
fn every_schedule_keeps_its_bits() {
    for schedule in ["1f1b", "gpipe", "interleaved1f1b", "zbvzerobubble", "zb-h1", "dualpipev"] {
        check(schedule, &config());
    }
}

#[test]
fn every_optimizer_keeps_its_state() {
    let of_matrices = burn::module::ParamGroup::from_predicate("weight");
    let muon = AdamWConfig::new().init().with_group(of_matrices, MuonConfig::new().build(), None);
    for optimizer in [LionConfig::new().init(), descent(|| {}), muon] {
        check("1f1b", &with(optimizer));
    }
}

#[test]
fn half_precision_keeps_its_bits() {
    for precision in [Precision::Bf16, Precision::F16] {
        check("1f1b", &PipelineConfig { precision, ..config() });
    }
}

#[test]
fn delayed_parameters_move_with_both_versions() {
    for schedule in ["1f1b", "zbvzerobubble"] {
        check(schedule, &PipelineConfig { delayed: true, ..config() });
    }
}

#[test]
fn replicas_whole_and_sharded_keep_their_bits() {
    for data_parallel_mode in [DataParallelMode::Replicated, DataParallelMode::Sharded] {
        for schedule in ["1f1b", "zbvzerobubble"] {
            check(schedule, &PipelineConfig { data_parallel: 2, data_parallel_mode, ..config() });
        }
    }
}

#[test]
fn early_updates_keep_their_bits() {
    check("1f1b", &PipelineConfig { post_validation: true, ..config() });
}

/// Frozen parameters stay frozen where they go.
#[test]
fn frozen_parameters_stay_frozen() {
    let program = program("1f1b", 2, MICROBATCHES);
    let run = |moves: bool| {
        let [even, other] = [cut(&[0, 4]), cut(&[0, 2])];
        let mut pipeline = launch(&program, &even, &config());
        let mut steps = take_steps(&mut pipeline, 0..2, MICROBATCHES);
        pipeline.freeze(|path| path.starts_with("layers.3.")).expect("it is frozen");
        steps.extend(take_steps(&mut pipeline, 2..4, MICROBATCHES));
        if moves {
            move_to(&mut pipeline, &even, &other);
        }
        steps.extend(take_steps(&mut pipeline, 4..6, MICROBATCHES));
        pipeline.unfreeze(|path| path.starts_with("layers.3.")).expect("it is trained");
        steps.extend(take_steps(&mut pipeline, 6..8, MICROBATCHES));
        (steps, parameters(&mut pipeline))
    };
    assert_eq!(run(true), run(false));
}

/// A layer with a weight that every layer shares, and a bias of its own.
#[derive(Module, Debug)]
struct Tied {
    layers: Vec<Linear>,
    #[module(skip)]
    first: usize,
}

impl Tied {
    fn new(range: std::ops::Range<usize>) -> Self {
        let layer =
            |layer: usize| crate::support::biased(layer as u64, &burn::tensor::Device::flex().autodiff());
        let first = range.start;
        let mut layers: Vec<Linear> = range.map(layer).collect();
        if first == 0 || layers.len() + first == LAYERS {
            let place = if first == 0 { 0 } else { layers.len() - 1 };
            layers[place].weight = linear(77, [crate::support::WIDTH; 2]).weight;
        }
        Self { layers, first }
    }
}

impl StageModule for Tied {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.layers.iter().fold(input, |x, layer| x.clone() + layer.forward(x).tanh())
    }

    fn parameter_path(&self, local: &str) -> String {
        let path = crate::support::path_in_model(local, self.first);
        match path.as_str() {
            "layers.0.weight" | "layers.7.weight" => "tied.weight".to_owned(),
            _ => path,
        }
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec!["tied.weight".to_owned()]
    }
}

/// The first and the last layer are on one rank in a V, and on two ranks otherwise.
#[test]
fn tied_parameters_have_one_state_wherever_their_layers_are() {
    let run = |schedule: &str, cuts: &[&[usize]]| {
        let program = program(schedule, 2, MICROBATCHES);
        let make = |cut: Partition| {
            move |stage: StageIndex| {
                let range = cut.range(stage);
                ending_in_loss(range.end == LAYERS, Tied::new(range))
            }
        };
        let paths = |layer: usize| {
            let weight = if layer.is_multiple_of(7) {
                "tied.weight".to_owned()
            } else {
                format!("layers.{layer}.weight")
            };
            [weight, format!("layers.{layer}.bias")]
        };
        let mut present = cut(cuts[0]);
        let world = World::local(2);
        let mut pipeline =
            Pipeline::launch(program.clone(), world, &config(), make(present.clone())).expect("it starts");
        let mut steps = take_steps(&mut pipeline, 0..2, MICROBATCHES);
        for (number, starts) in (1..).zip(&cuts[1..]) {
            let next = cut(starts);
            let moved = layer_moves(&present, &next).into_iter().map(|MovedRange { layers, from, to }| {
                MovedLayers { from, to, parameters: layers.flat_map(paths).collect() }
            });
            let made = make(next.clone());
            let outcome = pipeline.move_layers(program.clone(), moved.collect(), move |stage, _| made(stage));
            outcome.expect("the layers move");
            present = next;
            steps.extend(take_steps(&mut pipeline, 2 * number..2 * number + 2, MICROBATCHES));
        }
        (steps, parameters(&mut pipeline))
    };
    let check = |schedule: &str, cuts: &[&[usize]]| {
        let unmoved = vec![cuts[0]; cuts.len()];
        assert_eq!(run(schedule, cuts), run(schedule, &unmoved), "{schedule}");
    };
    check("1f1b", &[&[0, 4], &[0, 7], &[0, 1], &[0, 4]]);
    check("zbvzerobubble", &[&[0, 2, 4, 6], &[0, 1, 2, 7], &[0, 5, 6, 7], &[0, 2, 4, 6]]);
    check("interleaved1f1b", &[&[0, 2, 4, 6], &[0, 1, 2, 7], &[0, 5, 6, 7]]);
}

/// The stages that a program trains may change with the cut: the base of adapters in the first layers.
#[test]
fn the_program_may_train_other_stages() {
    let programs =
        [[true, true], [false, true]].map(|trained| program_of_trained("1f1b", MICROBATCHES, &trained));
    let is_base = |path: &str| ["layers.0.", "layers.1."].iter().any(|base| path.starts_with(base));
    let make = move |cut: Partition| {
        move |stage: StageIndex| -> Result<Stage, Infallible> {
            let range = cut.range(stage);
            let made = ending_in_loss(range.end == LAYERS, Mlp::new(range.start, range.len()))?;
            Ok(made.with_base(is_base))
        }
    };
    let run = |moves: bool, config: &PipelineConfig| {
        let [even, other] = [cut(&[0, 4]), cut(&[0, 2])];
        let world = World::local(2);
        let mut pipeline =
            Pipeline::launch(programs[0].clone(), world, config, make(even.clone())).expect("it starts");
        let mut steps = take_steps(&mut pipeline, 0..2, MICROBATCHES);
        if moves {
            let (program, made) = (programs[1].clone(), make(other.clone()));
            let outcome = pipeline.move_layers(program, moved(&even, &other), move |stage, _| made(stage));
            outcome.expect("the layers move");
            assert_ne!(*pipeline.program().as_program().trained(), TrainedStages::ALL);
        }
        steps.extend(take_steps(&mut pipeline, 2..4, MICROBATCHES));
        (steps, parameters(&mut pipeline))
    };
    // Batches of the second program overlap in other rows.
    for config in [config(), PipelineConfig { delayed: true, ..config() }] {
        assert_eq!(run(true, &config), run(false, &config));
    }
}

#[test]
fn another_program_is_refused_and_changes_nothing() {
    let [even, other] = [cut(&[0, 4]), cut(&[0, 2])];
    let mut pipeline = launch(&program("1f1b", 2, MICROBATCHES), &even, &config());
    let mut steps = take_steps(&mut pipeline, 0..1, MICROBATCHES);
    for refused in [program("1f1b", 2, 4), program("zbvzerobubble", 2, MICROBATCHES)] {
        let make = make(other.clone());
        let outcome = pipeline.move_layers(refused, moved(&even, &other), move |stage, _| make(stage));
        let error = outcome.expect_err("it does not fit").to_string();
        assert!(error.starts_with("layers move to a program with other stages"), "{error}");
    }
    steps.extend(take_steps(&mut pipeline, 1..3, MICROBATCHES));
    let mut expected = launch(&program("1f1b", 2, MICROBATCHES), &even, &config());
    assert_eq!(steps, take_steps(&mut expected, 0..3, MICROBATCHES));
}

/// A rank that fails in a move stops the others at once, and no step runs with stages of two cuts.
#[test]
fn a_failure_in_a_move_ends_the_pipeline() {
    let [even, other] = [cut(&[0, 4]), cut(&[0, 2])];
    let check = |fail: fn(), missing: bool, expected: &str| {
        let mut pipeline = launch(&program("1f1b", 2, MICROBATCHES), &even, &config());
        take_steps(&mut pipeline, 0..1, MICROBATCHES);
        let made = make(other.clone());
        let make = move |stage: StageIndex, _: &_| {
            if stage.get() == 1 {
                fail();
            }
            made(stage)
        };
        let mut moved = moved(&even, &other);
        if missing {
            moved[0].parameters.pop();
        }
        let began = std::time::Instant::now();
        let error = pipeline.move_layers(pipeline.program().clone(), moved, make).expect_err("a rank fails");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let batch = || crate::support::batch(0, MICROBATCHES);
        let after = pipeline.step(batch(), batch(), 1e-2).expect_err("it has ended").to_string();
        assert!(after.contains("launch the pipeline again"), "{after}");
    };
    check(|| panic!("out of cheese"), false, "rank 1: the stage panicked: out of cheese");
    check(|| {}, true, "the parameter `layers.3.bias` is missing");
}

/// Processes move layers as threads do, and follow the choice of the first one.
#[test]
fn processes_move_layers_together() {
    let expected = run("1f1b", &config(), &[&[0, 6], &[0, 6], &[0, 6]]).0;
    let moved_back = Arc::new(Mutex::new(Vec::new()));
    let failed = Arc::new(AtomicBool::new(false));
    let process = |number: usize, world: World| {
        let [even, other] = [cut(&[0, 4]), cut(&[0, 6])];
        let program = program("1f1b", 2, MICROBATCHES);
        let mut pipeline =
            Pipeline::launch(program, world, &config(), make(even.clone())).expect("it starts");
        let mut steps = take_steps(&mut pipeline, 0..2, MICROBATCHES);
        for number_of_move in 1..4u64 {
            let shared = pipeline.share(&format!("{number} {number_of_move}")).expect("all call it");
            if shared != format!("0 {number_of_move}") {
                failed.store(true, Ordering::SeqCst);
            }
            let [from, to] = if number_of_move % 2 == 1 { [&even, &other] } else { [&other, &even] };
            move_to(&mut pipeline, from, to);
            let first = 2 * number_of_move;
            steps.extend(take_steps(&mut pipeline, first..first + 2, MICROBATCHES));
        }
        moved_back.lock().expect("no panic").push(steps);
    };
    std::thread::scope(|scope| {
        for (number, world) in World::local(2).apart().into_iter().enumerate() {
            let process = &process;
            scope.spawn(move || process(number, world));
        }
    });
    assert!(!failed.load(Ordering::SeqCst), "a process has its own choice");
    let found = moved_back.lock().expect("no panic");
    assert_eq!(found.len(), 2);
    // The process of the last stage has the losses.
    assert!(found.contains(&expected), "{found:?}");
    let norms = |steps: &[Step]| steps.iter().map(|(_, norm)| *norm).collect::<Vec<_>>();
    assert!(found.iter().all(|steps| norms(steps) == norms(&expected)), "{found:?}");
}

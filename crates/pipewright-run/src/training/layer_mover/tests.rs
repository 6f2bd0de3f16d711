//! Tests of the choice of a cut without a run, and of the time of a run whose ranks change their speed.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::tensor::{Int, Tensor};
use pipewright::nn::{Embedding, Linear, cross_entropy};
use pipewright::pipeline::UndeferredParameter;
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::train::Metrics;
use pipewright_models::training_memory::MemoryPlan;
use pipewright_models::{ParameterKind, ParameterSpec, Place};
use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{Costs, LayerDesc, ModelDesc};

use super::*;
use crate::observer::Observer;
use crate::run::Run;
use crate::run_record::RunEvent;
use crate::training::load::load_settings;
use crate::training::prepare::prepare_settings;

fn settings(more: &[&str]) -> Vec<String> {
    let set = ["pipeline.ranks=2", "pipeline.microbatches=8", "data.seq_len=16", "run.replan=when-slow"];
    set.iter().chain(more).map(|&text| text.to_owned()).collect()
}

fn mover() -> LayerMover {
    let scheduled = load_settings(None, &settings(&[])).expect("sound settings").scheduled();
    let scheduled = scheduled.unwrap_or_else(|_| panic!("a schedule by name"));
    let model = Arc::new(read_model(&scheduled.settings).expect("a model"));
    let prepared = prepare_settings(scheduled, model).expect("it is prepared");
    LayerMover::of(&prepared, false).expect("outlines").expect("it moves layers")
}

/// Lets the mover observe steps in which the ranks take these multiples of their usual time.
fn observe(mover: &mut LayerMover, steps: usize, slowdowns: [f64; 2]) {
    let boundaries: Vec<usize> = mover.cut.ranges().skip(1).map(|range| range.start).collect();
    let program = mover.program_of(&boundaries).expect("the cut of the run").program;
    let stage = |(rank, range): (usize, Range<usize>)| {
        let seconds = 1e-3 * range.len() as f64 * slowdowns[rank];
        StageCosts::new(seconds, seconds, seconds)
    };
    let costs = Costs { stages: mover.cut.ranges().enumerate().map(stage).collect(), ..Costs::default() };
    let run = timed(program.as_program(), &costs).expect("no deadlock");
    (0..steps).for_each(|_| mover.observe(run.timeline()));
}

/// Takes the first steps, and some in which rank 1 is slow.
fn slowed() -> LayerMover {
    let mut mover = mover();
    observe(&mut mover, 11, [1.0, 1.0]);
    observe(&mut mover, 10, [1.0, 3.0]);
    mover
}

#[test]
fn the_choice_names_a_cut_and_the_program_that_all_processes_make() {
    let mut mover = slowed();
    let before = mover.cut.clone();
    let (proposal, choice) = mover.choose(30, &|said: &str| panic!("{said}")).expect("a better cut");
    assert_eq!(proposal.cut.ranges().nth(1).map(|range| range.start), Some(choice.boundaries[0]));
    assert!(choice.boundaries[0] > before.ranges().next().expect("a stage").end, "{choice:?}");
    assert_eq!(choice.program, digest(&mover.program_of(&choice.boundaries).expect("a program")));
    assert!(proposal.bytes > 0 && proposal.moving > 0.0, "{proposal:?}");
}

#[test]
fn a_cut_that_does_not_fit_into_memory_is_refused_once_in_a_sentence() {
    let mut mover = slowed();
    mover.require_fit = Box::new(|run: RunParts<'_>, _: &Partition| {
        let layers = run.partition.ranges().next().map_or(0, |range| range.len());
        Err(RunError::new(ErrorKind::CheckFailed, format!("{layers} layers do not fit into rank 0")))
    });
    let said = RefCell::new(Vec::new());
    for step in [30, 35] {
        assert!(mover.choose(step, &|sentence: &str| said.borrow_mut().push(sentence.to_owned())).is_none());
    }
    let said = said.into_inner();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with("step 30: "), "{said:?}");
    assert!(said[0].contains(" should move to other ranks, and stay where they are: "), "{said:?}");
    assert!(said[0].ends_with(" layers do not fit into rank 0"), "{said:?}");
}

#[test]
fn a_move_that_does_not_fit_into_memory_is_refused_in_a_sentence() {
    let choose = |missing: u64| {
        let mut mover = slowed();
        mover.require_fit = Box::new(move |next: RunParts<'_>, partition: &Partition| {
            let family = read_model(next.settings)?;
            let (before, after) = (RunParts { partition, ..next }.outlines()?, next.outlines()?);
            let memory =
                |plan: MemoryPlan| plan.memory().ranks().iter().map(HeldBytes::total).collect::<Vec<_>>();
            let trains = memory(memory_plan(next, &family, &after)?);
            let moving = move_plan(next, &family, &before, Some(&after));
            let needed = memory(moving.clone());
            assert!(
                needed.iter().zip(&trains).all(|(moving, trains)| moving > trains),
                "{needed:?} {trains:?}"
            );
            let stated = needed.iter().map(|needed| Some(needed - missing)).collect();
            require_move_fits(&moving.with_stated(stated))
        });
        let said = RefCell::new(Vec::new());
        let is_chosen =
            mover.choose(30, &|sentence: &str| said.borrow_mut().push(sentence.to_owned())).is_some();
        (is_chosen, said.into_inner())
    };
    assert_eq!(choose(0), (true, Vec::new()));
    let (is_chosen, said) = choose(1024);
    assert!(!is_chosen, "the old plan goes on");
    let sentence = "stay where they are: a rank holds the stages that change several times while they move: rank 0 needs ";
    assert!(said[0].contains(sentence) && said[0].contains(", which is 1.0 KiB too little; "), "{said:?}");
}

#[test]
fn a_run_on_one_rank_and_one_whose_layers_stay_have_no_mover() {
    for other in ["pipeline.ranks=1", "run.replan=never"] {
        let loaded = load_settings(None, &settings(&[other])).expect("sound settings");
        let scheduled = loaded.scheduled().unwrap_or_else(|_| panic!("a schedule by name"));
        let model = Arc::new(read_model(&scheduled.settings).expect("a model"));
        let prepared = prepare_settings(scheduled, model).expect("it is prepared");
        assert!(LayerMover::of(&prepared, false).expect("outlines").is_none(), "{other}");
    }
}

const BYTES: usize = 256;
const HIDDEN: usize = 8;
const BLOCKS: usize = 8;
/// The time of a block for a microbatch on a fast rank.
const PACE: Duration = Duration::from_millis(5);
/// The steps in which rank 1 takes twice its usual time.
const SLOW: Range<u64> = 50..150;
const STEPS: u64 = 300;

/// A layer whose forward takes a fixed time, by waiting, so that the load of the machine matters little.
#[derive(Module, Debug)]
struct Paced {
    linear: Linear,
    #[module(skip)]
    done: Arc<AtomicU64>,
    #[module(skip)]
    slow: Range<u64>,
}

impl Paced {
    fn forward(&self, hidden: Tensor<3>) -> Tensor<3> {
        let is_second = std::thread::current().name() == Some("rank-1");
        let is_slow = is_second && self.slow.contains(&(self.done.load(Ordering::Relaxed) + 1));
        std::thread::sleep(PACE * if is_slow { 2 } else { 1 });
        hidden.clone() + self.linear.forward(hidden)
    }
}

#[derive(Module, Debug)]
struct First {
    embedding: Embedding,
    blocks: Vec<Paced>,
}

#[derive(Module, Debug)]
struct Last {
    blocks: Vec<Paced>,
    head: Linear,
    #[module(skip)]
    first: usize,
}

fn path_of(local: &str, first: usize) -> String {
    match local.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
        Some((index, rest)) => format!("blocks.{}.{rest}", index.parse::<usize>().expect("an index") + first),
        None => local.to_owned(),
    }
}

impl StageModule for First {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn forward(&self, bytes: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
        self.blocks.iter().fold(self.embedding.forward(bytes), |hidden, block| block.forward(hidden))
    }
}

impl StageModule for Last {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, hidden: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        self.head.forward(self.blocks.iter().fold(hidden, |hidden, block| block.forward(hidden)))
    }

    fn parameter_path(&self, local: &str) -> String {
        path_of(local, self.first)
    }
}

struct PacedModel(Arc<AtomicU64>, Range<u64>);

impl RunModel for PacedModel {
    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "paced" })
    }

    fn describe(&self, _tokens: usize) -> ModelDesc {
        let layer = |path: String, weight| LayerDesc {
            path,
            kind: "layer".to_owned(),
            parameters: 64,
            weight,
            ..LayerDesc::default()
        };
        let blocks = (0..BLOCKS).map(|block| layer(format!("blocks.{block}"), 1000));
        let layers = std::iter::once(layer("embedding".to_owned(), 1)).chain(blocks);
        ModelDesc { layers: layers.chain([layer("head".to_owned(), 1)]).collect() }
    }

    fn outline(&self, layers: Range<usize>, _: &TensorParallel) -> Result<Vec<ParameterSpec>, RunError> {
        let spec = |layer: usize| match layer {
            0 => ParameterSpec::new("embedding.weight".to_owned(), vec![BYTES, HIDDEN], ParameterKind::Table),
            block if block <= BLOCKS => {
                let path = format!("blocks.{}.linear.weight", block - 1);
                ParameterSpec::new(path, vec![HIDDEN, HIDDEN], ParameterKind::Matrix)
            }
            _ => ParameterSpec::new("head.weight".to_owned(), vec![HIDDEN, BYTES], ParameterKind::Matrix),
        };
        Ok(layers.map(spec).collect())
    }

    fn stage(&self, layers: Range<usize>, _: &InitialParameters, place: Place) -> Result<Stage, String> {
        let linear = |[inputs, outputs]: [usize; 2]| -> Linear {
            LinearConfig::new(inputs, outputs).with_bias(false).init(&place.device).into()
        };
        let block =
            |_| Paced { linear: linear([HIDDEN, HIDDEN]), done: self.0.clone(), slow: self.1.clone() };
        let loss =
            |logits: Tensor<3>, next: Tensor<2, Int>| cross_entropy(logits.flatten(0, 1), next.flatten(0, 1));
        if layers.start == 0 {
            let embedding = EmbeddingConfig::new(BYTES, HIDDEN).init(&place.device).into();
            return Ok(Stage::new(First { embedding, blocks: (1..layers.end).map(block).collect() }));
        }
        let blocks = (layers.start..layers.end - 1).map(block).collect();
        let last = Last { blocks, head: linear([HIDDEN, BYTES]), first: layers.start - 1 };
        Ok(Stage::with_loss(last, loss))
    }

    fn vocab_size(&self) -> usize {
        BYTES
    }
}

/// Counts the steps, and keeps the time at the end of each, and the sentences of events.
#[derive(Default)]
struct Clock {
    done: Arc<AtomicU64>,
    elapsed: Mutex<Vec<f64>>,
    events: Mutex<Vec<String>>,
}

impl Observer for Clock {
    fn step(&self, metrics: &Metrics, _undeferred: &[UndeferredParameter]) {
        self.done.store(metrics.step, Ordering::Relaxed);
        self.elapsed.lock().expect("no panic").push(metrics.elapsed_s);
    }

    fn event(&self, event: &RunEvent) {
        self.events.lock().expect("no panic").push(event.sentence());
    }
}

/// Trains for some steps. Returns the times at the ends of all steps, and the sentences of the events.
fn train(steps: u64, slow: Range<u64>, more: &[&str]) -> (Vec<f64>, Vec<String>) {
    let scratch = tempfile::tempdir().expect("a folder");
    let out = format!("run.out={:?}", scratch.path().join("run"));
    let set = settings(&[&[&*format!("run.steps={steps}"), &out], more].concat());
    let clock = Arc::new(Clock::default());
    let model = PacedModel(clock.done.clone(), slow);
    let run = Run::new(load_settings(None, &set).expect("sound settings")).model(model);
    run.observer(clock.clone()).train().expect("it trains");
    let elapsed = clock.elapsed.lock().expect("no panic").clone();
    let events = clock.events.lock().expect("no panic").clone();
    (elapsed, events)
}

/// Returns the mean seconds of a step with the best of the cuts that may be it, which stays.
fn best_step(slow: bool) -> f64 {
    let step = |boundary: u64| {
        let boundaries = format!("pipeline.boundaries=[{boundary}]");
        // The boundaries are compared with the layers of the model in the settings.
        let layers = format!("model.num_hidden_layers={BLOCKS}");
        let set = ["run.replan=never", "pipeline.partition=explicit", &boundaries, &layers];
        let (elapsed, _) = train(30, if slow { 1..31 } else { 0..0 }, &set);
        (elapsed[29] - elapsed[4]) / 25.0
    };
    let boundaries = if slow { [6, 7] } else { [5, 6] };
    boundaries.map(step).into_iter().fold(f64::INFINITY, f64::min)
}

/// Minutes of steps on two ranks. Rank 1 is half as fast in some of them.
#[test]
#[ignore = "it measures times, for minutes"]
#[expect(clippy::print_stderr, reason = "the figures are what it is for")]
fn a_run_takes_at_most_a_tenth_longer_than_with_the_best_cut_of_each_part() {
    let (elapsed, events) = train(STEPS, SLOW, &["pipeline.partition=optimal"]);
    let moves = events.iter().filter(|sentence| sentence.contains(" moved ")).count();
    let at = |step: u64| elapsed[step as usize - 1];
    let best = [false, true].map(best_step);
    // The first steps are cold.
    let parts = [(5, SLOW.start - 1, 0), (SLOW.start - 1, SLOW.end - 1, 1), (SLOW.end - 1, STEPS, 0)];
    let ratios = parts
        .map(|(from, to, slow): (u64, u64, usize)| (at(to) - at(from)) / ((to - from) as f64 * best[slow]));
    eprintln!("seconds of a step with the best cuts: {best:?}");
    eprintln!("times over the times with the best cuts: {ratios:?}\n{}", events.join("\n"));
    assert_eq!(moves, 2, "{events:?}");
    assert!(ratios.iter().all(|ratio| *ratio <= 1.1), "{ratios:?}");
}

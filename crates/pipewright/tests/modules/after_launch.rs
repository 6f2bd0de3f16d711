//! Modules of a running pipeline: read with their type, changed, frozen and trained again. Training continues
//! as in plain Burn does after the same change.

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use pipewright::graph::{Graph, GraphLayer};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::{Recompute, StageIndex};

use crate::support::{
    Block, Parameters, WIDTH, assert_close, batch, config, floats, loss, numbers, optimizer, parameters,
    program, program_of_trained,
};

const LAYERS: usize = 4;
const MICROBATCHES: u32 = 4;
const RATE: f64 = 0.01;

impl GraphLayer for Block {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        Ok(pack(StageModule::forward(self, unpack(inputs)?, context)))
    }
}

/// The whole model on one tape, with plain Burn.
#[derive(Module, Debug)]
struct Plain {
    layers: Vec<Block>,
}

struct PlainRun {
    module: Plain,
    optimizer: burn::optim::ModuleOptimizer,
    step: u64,
}

impl PlainRun {
    fn new() -> Self {
        let module = Plain { layers: (0..LAYERS).map(Block::new).collect() };
        Self { module, optimizer: optimizer(), step: 0 }
    }

    /// Takes a step that updates the parameters for whose path `is_trained` returns true.
    fn step(&mut self, microbatches: u32, is_trained: impl Fn(&str) -> bool) {
        let context = StageContext::new(StageIndex::new(0), 0.into());
        let input = batch(self.step, microbatches).autodiff();
        let output =
            self.module.layers.iter().fold(input, |x, layer| StageModule::forward(layer, x, &context));
        let mut gradients = loss(output, batch(100 + self.step, microbatches).autodiff()).backward();
        let trained: Vec<ParamId> = floats(&self.module, None)
            .into_iter()
            .filter(|(path, _)| is_trained(path))
            .map(|(_, float)| float.id)
            .collect();
        let gradients = GradientsParams::from_params(&mut gradients, &self.module, &trained);
        self.module = self.optimizer.step(RATE, self.module.clone(), gradients);
        self.step += 1;
    }

    fn parameters(&self) -> Parameters {
        floats(&self.module, None).into_iter().map(|(path, float)| (path, float.values)).collect()
    }
}

fn steps(pipeline: &mut Pipeline, steps: std::ops::Range<u64>, microbatches: u32) {
    for step in steps {
        pipeline.step(batch(step, microbatches), batch(100 + step, microbatches), RATE).expect("a step");
    }
}

fn unclipped() -> PipelineConfig {
    PipelineConfig { clip_norm: None, ..config() }
}

fn builder() -> PipelineBuilder {
    Pipeline::builder(Layers::new(LAYERS, Block::new))
        .loss(loss)
        .microbatches(MICROBATCHES)
        .config(unclipped())
}

/// Cuts, schedules, recomputation and replicas that must not make a difference.
fn variants() -> Vec<(&'static str, Pipeline)> {
    let sharded =
        PipelineConfig { data_parallel: 2, data_parallel_mode: DataParallelMode::Sharded, ..unclipped() };
    let replicated = PipelineConfig { data_parallel_mode: DataParallelMode::Replicated, ..sharded.clone() };
    let variants = [
        ("one rank", builder().ranks(1)),
        ("four ranks", builder().ranks(4)),
        ("zero bubble", builder().ranks(2).schedule("zbvzerobubble")),
        ("recomputed", builder().ranks(2).recompute(Recompute::Stage)),
        ("sharded", builder().ranks(2).config(sharded)),
        ("replicated", builder().ranks(2).config(replicated)),
    ];
    variants.into_iter().map(|(what, builder)| (what, builder.launch().expect("it starts"))).collect()
}

#[test]
fn a_module_is_read_with_its_type() {
    for (what, mut pipeline) in variants() {
        steps(&mut pipeline, 0..2, MICROBATCHES);
        let expected = parameters(&mut pipeline);
        for layer in 0..LAYERS {
            let block = pipeline.module(layer, Block::clone).expect("a block").expect("in this process");
            let prefix = format!("layers.{layer}.");
            let found =
                floats(&block, None).into_iter().map(|(path, float)| (prefix.clone() + &path, float.values));
            let found: Parameters = found.collect();
            let own = expected.iter().filter(|(path, _)| path.starts_with(&prefix));
            assert_eq!(found, own.map(|(path, values)| (path.clone(), values.clone())).collect(), "{what}");
        }
        // A copy that is still held does not disturb training.
        let held = pipeline.module(0, Block::clone).expect("a block");
        steps(&mut pipeline, 2..4, MICROBATCHES);
        drop(held);
        let mut plain = PlainRun::new();
        (0..4).for_each(|_| plain.step(MICROBATCHES, |_| true));
        assert_close(&parameters(&mut pipeline), &plain.parameters(), 1e-5, what);
    }
}

#[test]
fn a_stage_and_a_node_are_read_too() {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let block = Block::new(stage.index());
        let stage_of = if stage.get() == 1 { Stage::with_loss(block, loss) } else { Stage::new(block) };
        Ok(stage_of.with_prefix(&format!("blocks.{stage}")))
    };
    let program = program("1f1b", 2, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(2), &unclipped(), make).expect("it starts");
    let weight = |block: &Block| block.linear.weight.val().inner().into_data();
    let found = pipeline.module(StageIndex::new(1), weight).expect("a block").expect("in this process");
    assert_eq!(
        found.iter::<f32>().collect::<Vec<_>>(),
        numbers(1, [WIDTH, WIDTH]).iter().collect::<Vec<f32>>()
    );
    pipeline.change_module(StageIndex::new(1), |_: Block| Block::new(7)).expect("another block");
    steps(&mut pipeline, 0..1, MICROBATCHES);
    assert!(parameters(&mut pipeline).contains_key("blocks.1.linear.weight"), "it keeps its prefix");

    let graph =
        Graph::builder().input("x").node("first", 0, ["x"]).node("second", 1, ["first"]).output("second");
    let layers = Layers::graph(graph.build().expect("a graph"), |_, seed: &usize| Block::new(*seed));
    let mut pipeline =
        Pipeline::builder(layers).ranks(2).loss(loss).config(unclipped()).launch().expect("it starts");
    let found = pipeline.module("second", weight).expect("a block").expect("in this process");
    assert_eq!(
        found.iter::<f32>().collect::<Vec<_>>(),
        numbers(1, [WIDTH, WIDTH]).iter().collect::<Vec<f32>>()
    );
    let error = pipeline.module("third", weight).expect_err("there is none").to_string();
    assert!(error.starts_with("the pipeline has no module at node `third`"), "{error}");
    let error = pipeline.module(StageIndex::new(1), weight).expect_err("it has nodes").to_string();
    assert_eq!(
        error,
        "the pipeline has no module at stage 1: name a stage if you made it with `Stage::new`, a layer of `Layers` by its \
         number, or a node of a graph by its name"
    );
}

#[test]
fn frozen_parameters_stay_until_they_are_trained_again() {
    let early = |path: &str| path.starts_with("layers.0.") || path == "layers.2.linear.weight";
    let mut plain = PlainRun::new();
    plain.step(MICROBATCHES, |_| true);
    let before = plain.parameters();
    (0..2).for_each(|_| plain.step(MICROBATCHES, |path| !early(path)));
    let frozen = plain.parameters();
    plain.step(MICROBATCHES, |path| path != "layers.2.linear.weight");
    assert_eq!(before["layers.0.linear.weight"], frozen["layers.0.linear.weight"]);
    for (what, mut pipeline) in variants() {
        let replicas = if what == "sharded" || what == "replicated" { 2 } else { 1 };
        steps(&mut pipeline, 0..1, MICROBATCHES);
        let before = parameters(&mut pipeline);
        assert_eq!(pipeline.freeze(early).expect("every rank answers"), 3 * replicas, "{what}");
        assert_eq!(pipeline.freeze(early).expect("every rank answers"), 0, "{what}");
        steps(&mut pipeline, 1..3, MICROBATCHES);
        let found = parameters(&mut pipeline);
        assert_close(&found, &frozen, 1e-5, what);
        for path in before.keys() {
            assert_eq!(found[path] == before[path], early(path), "{what}: {path}");
        }
        let trained = pipeline.unfreeze(|path| path.starts_with("layers.0.")).expect("every rank answers");
        assert_eq!(trained, 2 * replicas, "{what}");
        steps(&mut pipeline, 3..4, MICROBATCHES);
        assert_close(&parameters(&mut pipeline), &plain.parameters(), 1e-5, what);
    }
}

#[test]
fn everything_may_be_frozen() {
    let mut pipeline = builder().ranks(2).launch().expect("it starts");
    let before = parameters(&mut pipeline);
    assert_eq!(pipeline.freeze(|_| true).expect("every rank answers"), 2 * LAYERS);
    steps(&mut pipeline, 0..2, MICROBATCHES);
    assert_eq!(parameters(&mut pipeline), before);
}

#[test]
fn a_freeze_that_fails_on_one_rank_ends_the_pipeline() {
    let mut pipeline = builder().ranks(2).launch().expect("it starts");
    let panics = |path: &str| -> bool { panic!("{path} is unknown") };
    let error = pipeline.freeze(move |path| path.starts_with("layers.0.") || panics(path));
    let error = error.expect_err("it panics").to_string();
    assert!(error.contains("is unknown"), "{error}");
    let error = pipeline.step(batch(0, MICROBATCHES), batch(100, MICROBATCHES), RATE);
    let error = error.map(drop).expect_err("parameters may be frozen on one rank").to_string();
    assert!(error.starts_with("a module was changed on some ranks only"), "{error}");
}

fn halved(mut block: Block) -> Block {
    block.linear.weight = block.linear.weight.map(|weight| (weight * 0.5).detach().require_grad());
    block
}

#[test]
fn a_replaced_head_and_changed_values_are_trained_on() {
    let mut plain = PlainRun::new();
    (0..2).for_each(|_| plain.step(MICROBATCHES, |_| true));
    plain.module.layers[LAYERS - 1] = Block::new(77);
    plain.module.layers[1] = halved(plain.module.layers[1].clone());
    (0..2).for_each(|_| plain.step(MICROBATCHES, |_| true));
    for (what, mut pipeline) in variants() {
        steps(&mut pipeline, 0..2, MICROBATCHES);
        // The new head need not be on a tape.
        pipeline.change_module(LAYERS - 1, |_: Block| Block::on(77, &Device::flex())).expect("another head");
        pipeline.change_module(1, halved).expect("other values");
        steps(&mut pipeline, 2..4, MICROBATCHES);
        assert_close(&parameters(&mut pipeline), &plain.parameters(), 1e-5, what);
    }
}

#[test]
fn a_changed_module_may_stay_frozen() {
    for (what, mut pipeline) in variants() {
        let is_first = |path: &str| path.starts_with("layers.0.");
        pipeline.freeze(is_first).expect("every rank answers");
        pipeline.change_module(1, |_: Block| Block::new(77)).expect("another block");
        steps(&mut pipeline, 0..1, MICROBATCHES);
        pipeline.unfreeze(is_first).expect("every rank answers");
        steps(&mut pipeline, 1..3, MICROBATCHES);
        let mut plain = PlainRun::new();
        plain.module.layers[1] = Block::new(77);
        plain.step(MICROBATCHES, |path| !is_first(path));
        (0..2).for_each(|_| plain.step(MICROBATCHES, |_| true));
        assert_close(&parameters(&mut pipeline), &plain.parameters(), 1e-5, what);
    }
}

#[test]
fn a_stage_that_runs_forward_only_stays_frozen() {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let block = Block::new(stage.index());
        let stage_of =
            if stage.get() == 1 { Stage::with_loss(block, loss) } else { Stage::new(block.no_grad()) };
        Ok(stage_of.with_prefix(&format!("blocks.{stage}")))
    };
    let program = program_of_trained("1f1b", MICROBATCHES, &[false, true]);
    let mut pipeline = Pipeline::launch(program, World::local(2), &unclipped(), make).expect("it starts");
    let (first, before) = (StageIndex::new(0), parameters(&mut pipeline));
    assert_eq!(pipeline.unfreeze(|_| true).expect("every rank answers"), 0);
    let refused = pipeline.change_module(first, |_: Block| Block::new(7)).expect_err("it is trained");
    let text = refused.to_string();
    assert!(text.starts_with("the module of stage 0 is not changed: the parameter `blocks.0."), "{text}");
    assert!(text.contains("computes no weight gradients"), "{text}");
    assert_eq!(parameters(&mut pipeline), before);
    pipeline.change_module(first, |block: Block| halved(block).no_grad()).expect("it is frozen too");
    let changed = parameters(&mut pipeline);
    steps(&mut pipeline, 0..2, MICROBATCHES);
    let trained = parameters(&mut pipeline);
    let moved = changed.keys().filter(|path| trained[*path] != changed[*path]).count();
    assert_eq!((changed.len(), moved), (4, 2), "only the second stage is trained");
}

/// A stage with two blocks.
#[derive(Module, Debug)]
struct Pair {
    first: Block,
    second: Block,
}

impl StageModule for Pair {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let hidden = StageModule::forward(&self.first, input, context);
        StageModule::forward(&self.second, hidden, context)
    }
}

#[test]
fn impossible_changes_are_refused_and_change_nothing() {
    let make = |_: StageIndex| -> Result<Stage, std::convert::Infallible> {
        Ok(Stage::with_loss(Pair { first: Block::new(0), second: Block::new(1) }, loss))
    };
    let program = program("gpipe", 1, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(1), &unclipped(), make).expect("it starts");
    let before = parameters(&mut pipeline);
    let first = StageIndex::new(0);
    let twice = |pair: Pair| Pair { second: pair.first.clone(), ..pair };
    let errors = [
        (
            pipeline.change_module(first, twice),
            "the module of stage 0 is not changed: `first.linear.bias` and `second.linear.bias` are one parameter at two \
             places of the stage: ",
        ),
        (
            pipeline.change_module(first, |block: Block| block),
            "the module of stage 0 is a `modules::after_launch::Pair`, not",
        ),
        (pipeline.change_module(4, |block: Block| block), "the pipeline has no module at layer 4"),
        (
            pipeline.change_module(StageIndex::new(9), |pair: Pair| pair),
            "the pipeline has no module at stage 9",
        ),
    ];
    for (outcome, words) in errors {
        let error = outcome.expect_err(words).to_string();
        assert!(error.starts_with(words), "{error}");
    }
    let error = pipeline.module(first, |_: &Block| ()).expect_err("it is a pair").to_string();
    assert!(error.contains("is a `modules::after_launch::Pair`, not a `modules::support::Block`"), "{error}");
    let accumulated =
        pipewright::batch::Batch::split(batch(0, MICROBATCHES), batch(100, MICROBATCHES), MICROBATCHES);
    pipeline.accumulate(accumulated.expect("it splits")).expect("a batch");
    let refused = pipeline.change_module(first, |pair: Pair| pair);
    assert!(matches!(refused, Err(PipelineError::ChangeBeforeUpdate)), "{refused:?}");
    assert_eq!(parameters(&mut pipeline), before);
    steps(&mut pipeline, 0..1, MICROBATCHES);

    let panics = |_: Pair| -> Pair { panic!("no such head") };
    let error = pipeline.change_module(first, panics).expect_err("it panics").to_string();
    assert!(error.contains("no such head"), "{error}");
    let error = pipeline.parameters().expect_err("it takes no command").to_string();
    assert!(error.starts_with("a module was changed on some ranks only"), "{error}");
}

//! Every line of code in `docs/from-pytorch.md` compiles. The functions here contain the lines and are not
//! called.

#![expect(dead_code, reason = "the compiler checks the functions, and no test calls them")]

use std::collections::BTreeMap;
use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, ModuleDisplay, Param};
use burn::tensor::{Device, Tensor};
use pipewright::batch::{Batch, Merge, SplitRule, SplitSpec, merge_by};
use pipewright::checkpoint::Checkpoint;
use pipewright::graph::{Graph, GraphBuilder, GraphLayer, GraphStage, PlacedGraph};
use pipewright::hook::{ActionHook, BackwardRun, ForwardRun, OverlapRun, ReduceRun, ReshardRun, UnshardRun};
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::{Dropout, Linear, SplitBackward, TensorParallel};
use pipewright::optimizer::{AdamW, ClipGroup, OptimizerGroup, ParameterGradient};
use pipewright::pipeline::{
    LayerList, Layers, Pipeline, PipelineBuilder, PipelineConfig, StepSummary, Unmatched,
};
use pipewright::stage::{Stage, StageContext, StageError, StageModule, WeightWork};
use pipewright::tensor::{
    CheckMetadata, EdgePlacement, Metadata, OnMismatch, OptionalTensors, Spread, TensorSpec, Values,
};
use pipewright::train::{BurnSchedule, RunLog};
use pipewright::transport::{Mpi, World};
use pipewright_schedule::csv::{parse_program, parse_schedule, print_program};
use pipewright_schedule::generate::{catalogue, find};
use pipewright_schedule::lower::{
    ReduceWait, UnshardConfig, UnshardLookahead, defer_recv, limit_sends, wait_send,
};
use pipewright_schedule::simulate::logical;
use pipewright_schedule::{
    Action, Level, LowerConfig, Method, Placement, Program, Schedule, StageIndex, ValidatedProgram, lower,
    validate,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Adapter {
    down: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
}

impl Adapter {
    fn forward<L>(&self, layer: L, x: Tensor<2>) -> Tensor<2>
    where
        L: SplitBackward<2, 2, Weights = (Tensor<2>, Tensor<2>)>,
    {
        layer.apply(x, (&self.down, &self.up))
    }
}

fn stages<M: StageModule<Output = Tensor<2>>>(module: M, loss: fn(Tensor<2>, Tensor<2>) -> Tensor<1>) {
    let stage = Stage::new(module.clone());
    stage.with_weight_runner(|_, work| work.run_all());
    Stage::with_loss(module, loss);
}

fn context(context: &StageContext) -> Outcome<Tensor<2>> {
    context.stage();
    Ok(context.side::<Tensor<2>>("mask")?)
}

fn settings(builder: PipelineBuilder, [first, second]: [Device; 2], spec: TensorSpec) -> PipelineBuilder {
    let builder = builder.devices(vec![first, second]);
    let builder = builder.world(World::local(2));
    let builder = builder.metadata(Metadata::Static { stages: vec![vec![spec]] });
    let builder = builder.check_metadata(CheckMetadata::Always, OnMismatch::Warn);
    let builder = builder.data_parallel(2).data_parallel_mode(DataParallelMode::Sharded);
    let builder = builder.keep_gathered();
    let builder = builder.data_parallel(8).data_parallel_mode(DataParallelMode::Hybrid { shards: 4 });
    let builder = builder.loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean());
    let builder = builder.partition(Method::Optimal);
    builder.clip_norm(1.0)
}

fn updates(builder: PipelineBuilder, adamw: AdamW) -> PipelineBuilder {
    let builder = builder.clip_group(ClipGroup::new(|path| path.ends_with("bias"), 0.5));
    let builder = builder
        .gradient_hook(|gradient: &mut ParameterGradient<'_>| gradient.map(|flat| flat.clamp(-0.5, 0.5)));
    let builder = builder.gradient_hook(|gradient: &mut ParameterGradient<'_>| drop(gradient.tensor::<2>()));
    builder.optimizer_group(OptimizerGroup::new(|path| path.ends_with("bias"), adamw).rate(0.1))
}

fn rates(scheduler: burn::lr_scheduler::linear::LinearLrScheduler) -> BurnSchedule {
    BurnSchedule::new(scheduler)
}

fn modules<Middle: StageModule>(pipeline: &mut Pipeline, head: fn() -> Middle) -> Outcome<Option<Middle>> {
    pipeline.change_module(3, move |_: Middle| head())?;
    pipeline.freeze(|path| path.starts_with("layers.0."))?;
    pipeline.unfreeze(|path| path.starts_with("layers.0."))?;
    Ok(pipeline.module(StageIndex::new(1), |module: &Middle| module.clone())?)
}

fn hooks(builder: PipelineBuilder, hook: impl ActionHook + 'static) -> PipelineBuilder {
    builder.hook(Arc::new(hook))
}

struct Functions;

impl ActionHook for Functions {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_all()
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        run.run_all()
    }

    fn weights(&self, _: WorldRank, _: Action, work: &mut WeightWork<'_>) {
        work.run_all();
    }

    fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
        while run.backward().next_block().is_some() {
            run.backward().run_block()?;
            run.forward().run_block()?;
        }
        run.forward().run_all()
    }

    fn unshard(&self, run: &mut UnshardRun<'_>) -> Result<(), StageError> {
        run.run();
        Ok(())
    }

    fn reshard(&self, run: &mut ReshardRun<'_>) -> Result<(), StageError> {
        run.run();
        Ok(())
    }

    fn reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        run.run();
        Ok(())
    }

    fn wait_reduce_grad(&self, run: &mut ReduceRun<'_>) -> Result<(), StageError> {
        run.set_gradients(run.gradients())
    }

    fn message(&self, _: WorldRank, _: Action, _: &mut OptionalTensors) -> Result<(), StageError> {
        Ok(())
    }
}

fn gathering(window: NonZeroU32) -> UnshardConfig {
    UnshardConfig { window, lookahead: UnshardLookahead::Auto, frozen: false }
}

fn reducing(config: LowerConfig) -> LowerConfig {
    LowerConfig { reduce_grad: Some(ReduceWait::Deferred), ..config }
}

fn deferring(program: Program) -> Program {
    let program = wait_send(program);
    defer_recv(program)
}

fn limiting(program: Program) -> Outcome<Program> {
    Ok(limit_sends(program, NonZeroU32::MIN)?)
}

fn part_of_the_processes(builder: PipelineBuilder, deadline: Duration) -> Outcome<PipelineBuilder> {
    let mpi = Mpi::join(deadline)?;
    Ok(builder.world(mpi.world_of(&[0, 1], deadline)?))
}

fn evaluating(builder: PipelineBuilder) -> PipelineBuilder {
    builder.eval_schedule("forwardonly").eval_microbatches(3)
}

fn schedules(builder: PipelineBuilder) -> PipelineBuilder {
    let builder = builder.schedule("gpipe").microbatches(8);
    let builder = builder.schedule("1f1b");
    let builder = builder.schedule("interleaved1f1b").stages_per_rank(2);
    let builder = builder.schedule("loopedbfs").stages_per_rank(2);
    let builder = builder.schedule("interleavedzerobubble").stages_per_rank(2);
    let builder = builder.schedule("zbvzerobubble");
    builder.schedule("dualpipev")
}

fn tables(builder: PipelineBuilder, text: &str) -> Outcome<PipelineBuilder> {
    find("1f1b")?;
    let builder = builder.schedule(parse_schedule(text)?);
    Ok(builder.schedule(validate(parse_program(text)?, Level::Comms)?))
}

fn programs(schedule: Schedule, program: Program) -> Outcome<(Program, ValidatedProgram)> {
    print_program(&program);
    logical(&program)?;
    Ok((lower(&schedule, &LowerConfig::from(Level::Comms))?, validate(program, Level::Comms)?))
}

fn batches(x: Tensor<3>, table: Tensor<2>, y: Tensor<2>, mask: Tensor<2>) -> Outcome<Batch> {
    Batch::split(x.clone(), y.clone(), SplitRule::balanced(4))?;
    let batch = Batch::split(
        (x, table.clone()),
        y,
        SplitRule::equal(4).inputs((SplitSpec::Along(1), SplitSpec::Replicate)),
    )?;
    let batch = batch.with_split("mask", mask.clone())?;
    let batch = batch.with_split_by("mask", mask, SplitSpec::Along(1))?;
    Ok(batch.with_replicated("table", table))
}

fn reductions(batch: Batch, parts: Vec<Tensor<2>>, weights: Tensor<2>) -> Outcome<Batch> {
    let batch = batch.with_parts("mask", parts)?;
    let batch = batch.with_token_weights("weights", weights)?;
    let batch = batch.ignoring(-100)?;
    Ok(batch.summed())
}

fn parts(inputs: Vec<Values>, targets: Vec<Values>, outputs: Vec<Values>) -> Outcome<Batch> {
    let all = outputs.clone();
    merge_by(outputs, (Merge::Along(0), Merge::Mean))?;
    let outputs = all.clone();
    merge_by(outputs, Merge::Sum)?;
    let outputs = all;
    merge_by(outputs, Merge::function(|parts: Vec<Tensor<2>>| Tensor::cat(parts, 0).max()))?;
    Ok(Batch::new(inputs, targets))
}

fn steps(pipeline: &mut Pipeline, batch: Batch, x: Tensor<2>, y: Tensor<2>) -> Outcome<StepSummary> {
    let summary = pipeline.step(x.clone(), y.clone(), 1e-3)?;
    summary.timeline.chrome_trace();
    summary.timeline.messages();
    drop(pipeline.step(x.clone(), y.clone(), 1e-3)?.losses);
    drop(pipeline.step_batch(batch.clone().keep_outputs(), 1e-3)?.outputs);
    pipeline.step(x.clone(), (), 1e-3)?;
    pipeline.accumulate(batch)?;
    pipeline.eval(x, Some(y))?;
    pipeline.parameters()?;
    pipeline.state()?;
    pipeline.step_failure();
    Ok(summary)
}

fn of_stages(pipeline: &mut Pipeline, batch: Batch) -> Outcome<BTreeMap<StageIndex, Vec<Values>>> {
    Ok(pipeline.step_batch(batch.keep_outputs_of([StageIndex::new(0)]), 1e-3)?.stage_outputs)
}

fn of_inputs(pipeline: &mut Pipeline, batch: Batch) -> Outcome<Tensor<2>> {
    Ok(pipeline.step_batch(batch.keep_input_gradients(), 1e-3)?.input_gradient::<2>(0)?)
}

fn of_side_inputs(pipeline: &mut Pipeline, batch: Batch, mask: Tensor<2>) -> Outcome<Tensor<2>> {
    Ok(pipeline
        .step_batch(batch.with_split("mask", mask.autodiff().require_grad())?, 1e-3)?
        .side_gradient::<2>("mask", 0)?)
}

fn kept(pipeline: &mut Pipeline, batch: Batch) -> Outcome<Vec<Values>> {
    Ok(pipeline.step_batch(batch.keep_outputs(), 1e-3)?.outputs)
}

fn restored(pipeline: &mut Pipeline, checkpoint: Arc<Checkpoint>) -> Outcome<Unmatched> {
    Ok(pipeline.restore_matching(&checkpoint)?)
}

fn logged() -> Outcome<RunLog> {
    Ok(RunLog::open("runs/mine", 0)?.with_tensorboard()?)
}

fn dropped(dropout: &Dropout, x: Tensor<2>, context: &StageContext) -> Tensor<2> {
    dropout.forward(x, context.random("layers.3.dropout"))
}

fn different<T, B, H>(tokens: fn() -> T, block: fn(usize) -> B, head: fn() -> H) -> LayerList
where
    T: StageModule + ModuleDisplay,
    B: StageModule + ModuleDisplay,
    H: StageModule + ModuleDisplay,
{
    LayerList::new().layer(tokens).layers(12, block).layer(head)
}

fn layers<L, F>(block: F) -> PipelineBuilder
where
    L: StageModule + ModuleDisplay,
    F: Fn(usize) -> L + Send + Sync + 'static,
{
    Pipeline::builder(Layers::new(12, block)).boundaries([6])
}

fn graphs(config: u32) -> GraphBuilder<u32> {
    let graph = Graph::builder().input("x").node("a", config, ["x"]).node("b", config, ["a", "x"]);
    let graph = graph.split_before("b");
    graph.tie("b.weight", "a.weight")
}

fn placed<'a>(graph: &'a Graph<u32>, placement: Placement) -> Outcome<PlacedGraph<'a, u32>> {
    Ok(graph.place(&placement)?)
}

fn graph_stage<L: GraphLayer + Module>(stage: GraphStage<L>) -> Stage {
    Stage::of_graph(stage)
}

fn split_over_ranks(up: &Linear, down: &Linear, tensor: TensorParallel, x: Tensor<2>) -> Tensor<2> {
    down.forward_split_inputs(up.forward(tensor.enter(x)), &tensor)
}

fn shares_of_tokens(
    up: &Linear,
    down: &Linear,
    tensor: TensorParallel,
    x: Tensor<2>,
    rows: usize,
) -> Tensor<2> {
    down.forward_region(up.forward(tensor.region(rows).enter(x)), &tensor.region(rows))
}

fn shards_of_tokens() -> EdgePlacement {
    EdgePlacement { tensor: Spread::Split { dimension: 1 }, gradient: Spread::Partial }
}

fn experts_of_replicas() -> PipelineConfig {
    PipelineConfig { data_parallel: 4, expert_parallel: 4, ..PipelineConfig::default() }
}

fn whole_experts() -> PipelineConfig {
    PipelineConfig { tensor_parallel: 4, whole_experts: true, ..PipelineConfig::default() }
}

/// Removes everything that formatting adds, and copies of values that several lines use.
fn unformatted(code: &str) -> String {
    let dense: String = code.split_whitespace().collect();
    dense.replace(",)", ")").replace(",]", "]").replace(".clone()", "")
}

/// Returns the second cell of each row of the page's tables, without the quotes of code.
fn lines(page: &str) -> Vec<String> {
    let rows = page.lines().filter(|line| line.starts_with("| `") || line.starts_with("| "));
    let cells = rows.filter_map(|row| {
        let row = row.replace("\\|", "\u{1}");
        let cell = row.split('|').nth(2)?.trim().replace('\u{1}', "|");
        Some(cell.strip_prefix('`')?.strip_suffix('`')?.to_owned())
    });
    cells.collect()
}

#[test]
fn every_line_of_the_page_is_compiled_here() {
    let here = unformatted(include_str!("from_pytorch.rs"));
    let lines = lines(include_str!("../../../../docs/from-pytorch.md"));
    assert!(lines.len() > 40, "{lines:?}");
    let missing: Vec<&String> = lines.iter().filter(|line| !here.contains(&unformatted(line))).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn the_imports_of_the_page_are_those_of_the_lines() {
    let page = include_str!("../../../../docs/from-pytorch.md");
    let (_, imports) = page.split_once("```rust,imports\n").expect("the imports");
    let imports = imports.split("```").next().expect("the end of the block").trim_end();
    assert!(include_str!("from_pytorch.rs").contains(imports), "{imports}");
}

#[test]
fn the_page_counts_the_other_schedules() {
    let page = include_str!("../../../../docs/from-pytorch.md");
    // The page names `forwardonly` too, in the row about evaluations. It is one of the further schedules.
    let named = catalogue().iter().filter(|generator| {
        generator.name != "forwardonly" && page.contains(&format!("(\"{}\")", generator.name))
    });
    assert_eq!(catalogue().len() - named.count(), 11, "schedules that PyTorch does not have");
}

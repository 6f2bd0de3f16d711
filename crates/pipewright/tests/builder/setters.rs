//! Each of the builder's methods changes the setting that it names.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::{DType, Tensor};
use pipewright::batch::Batch;
use pipewright::failure::Cause;
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{BuildError, Layers, Pipeline, PipelineBuilder, PipelineConfig, PipelineError};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{CheckMetadata, Metadata, OnMismatch, TensorSpec};
use pipewright::transport::World;
use pipewright_schedule::csv::{parse_schedule, print_program};
use pipewright_schedule::{
    Action, Level, LowerConfig, Method, Rank, Recompute, ScheduleSpec, ValidatedProgram,
};

use crate::model::{alone, random_block};
use crate::support::{Block, LAYERS, batch, loss, optimizer};
use crate::{MICROBATCHES, Run, train};

fn builder() -> PipelineBuilder {
    let builder = Pipeline::builder(Layers::new(LAYERS, Block::new)).ranks(2).microbatches(MICROBATCHES);
    builder.loss(loss).optimizer(SgdConfig::new().init())
}

fn run(builder: PipelineBuilder) -> Run {
    train(builder.launch().expect("it starts"))
}

fn text(program: &ValidatedProgram) -> String {
    print_program(program.as_program())
}

/// Returns the stage of each layer.
fn stages(builder: PipelineBuilder) -> Vec<u32> {
    let parameters = builder.launch().expect("it starts").parameters().expect("every rank answers");
    let weights = parameters.into_iter().filter(|parameter| parameter.path.ends_with("weight"));
    let mut stages: Vec<_> = weights.map(|weight| (weight.path, weight.stage.get())).collect();
    stages.sort();
    stages.into_iter().map(|(_, stage)| stage).collect()
}

#[test]
fn sizes_and_schedule_make_the_program() {
    let sizes = |builder: PipelineBuilder| {
        let program = builder.program().expect("it exists");
        (program.ranks(), program.placement().stages(), program.microbatches())
    };
    assert_eq!(sizes(Pipeline::builder(Layers::new(LAYERS, Block::new))), (1, 1, 2), "defaults");
    assert_eq!(sizes(builder()), (2, 2, 8));
    assert_eq!(sizes(builder().ranks(4)), (4, 4, 8));
    assert_eq!(sizes(builder().microbatches(12)), (2, 2, 12));
    assert_eq!(sizes(builder().schedule("loopedbfs")), (2, 4, 8));
    assert_eq!(sizes(builder().schedule("loopedbfs").stages_per_rank(3)), (2, 6, 8));
    assert_eq!(sizes(builder().data_parallel(2)), (2, 2, 4), "replicas share the microbatches");
    let spec = ScheduleSpec { ranks: 4, microbatches: 6, ..ScheduleSpec::default() };
    assert_eq!(sizes(builder().spec(spec.clone())), (4, 4, 6));
    assert_eq!(sizes(builder().data_parallel(2).spec(spec.clone())), (4, 4, 6), "each replica's");
    assert_eq!(sizes(builder().spec(spec).ranks(3).microbatches(9)), (3, 3, 9), "later calls count");
}

#[test]
fn a_schedule_has_many_sources() {
    let named = builder().program().expect("it exists");
    assert_ne!(text(&named), text(&builder().schedule("gpipe").program().expect("it exists")));
    let owned = builder().schedule("GPipe".to_owned()).program().expect("it exists");
    let program = builder().schedule(owned.clone()).program().expect("it is there");
    assert_eq!(program, owned);
    let own = parse_schedule("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n").expect("a schedule");
    let layers = || Layers::new(LAYERS, Block::new);
    let own = Pipeline::builder(layers()).schedule(own).program().expect("it is sound");
    assert_eq!((own.ranks(), own.microbatches(), own.level()), (2, 2, Level::Comms));
    let group = ScheduleSpec { ranks: 4, microbatches: 8, group_size: Some(2), ..ScheduleSpec::default() };
    let grouped = builder().schedule("group-interleaved").spec(group.clone());
    let whole = builder().schedule("group-interleaved").spec(ScheduleSpec { group_size: None, ..group });
    assert_ne!(text(&grouped.program().expect("it exists")), text(&whole.program().expect("it exists")));
}

#[test]
fn passes_can_be_chosen() {
    let overlapping = || builder().schedule("dualpipev").microbatches(8);
    let early = text(&overlapping().program().expect("it exists"));
    assert!(!early.contains("OVERLAP"), "sends are early unless something else is said:\n{early}");
    let plain = overlapping().lower(LowerConfig::from(Level::Comms)).program().expect("it exists");
    assert!(text(&plain).contains("OVERLAP"));
    let full = builder().lower(LowerConfig::from(Level::Full)).program().expect("it exists");
    assert_eq!(full.level(), Level::Full);
}

#[test]
fn layers_are_cut_as_asked() {
    assert_eq!(stages(builder()), [0, 0, 0, 0, 1, 1, 1, 1]);
    assert_eq!(stages(builder().boundaries([1])), [0, 1, 1, 1, 1, 1, 1, 1]);
    let boundaries = vec![6];
    assert_eq!(stages(builder().partition(Method::Explicit { boundaries })), [0, 0, 0, 0, 0, 0, 1, 1]);
    let weights = [1, 1, 1, 1, 1, 1, 3, 3];
    let weighted = Layers::new(LAYERS, Block::new).with_weights(weights);
    let weighted = Pipeline::builder(weighted).ranks(2).loss(loss).optimizer(optimizer());
    assert_eq!(stages(weighted.partition(Method::Optimal)), [0, 0, 0, 0, 0, 0, 1, 1]);
}

#[test]
fn the_seed_makes_the_parameters() {
    let _alone = alone();
    let start = |seed: Option<u64>| {
        let layers = Layers::new(LAYERS, random_block);
        let builder = Pipeline::builder(layers).ranks(2).microbatches(MICROBATCHES).seed(seed);
        run(builder.loss(loss).optimizer(optimizer())).0[0].0.clone()
    };
    assert_eq!(start(Some(0)), start(Some(0)));
    assert_ne!(start(Some(0)), start(Some(1)));
    assert_ne!(start(None), start(None), "nothing is seeded");
}

#[test]
fn the_loss_counts() {
    let (plain, doubled) = (run(builder()), run(builder().loss(|o: Tensor<2>, t: Tensor<2>| loss(o, t) * 2)));
    assert_eq!(doubled.0[0].0[0], 2.0 * plain.0[0].0[0]);
    let scaled = |output: Tensor<2>, target: Tensor<2>, context: &StageContext| {
        loss(output, target) * *context.value::<f32>("scale").expect("the step brings it")
    };
    let mut pipeline = builder().context_loss(scaled).launch().expect("it starts");
    let brought = Batch::split(batch(0, MICROBATCHES), batch(100, MICROBATCHES), MICROBATCHES);
    let brought = brought.expect("it divides").with_value("scale", 4.0f32);
    let found = pipeline.step_batch(brought, 1e-2).expect("a step").losses;
    assert_eq!(found[0], 4.0 * plain.0[0].0[0]);
}

#[test]
fn the_optimizer_and_the_clip_norm_update() {
    let (plain, norm) = (run(builder()), 1e-3);
    assert_ne!(run(builder().optimizer(optimizer())).1, plain.1);
    assert_ne!(run(builder().clip_norm(norm)).1, plain.1);
    assert_eq!(run(builder().clip_norm(norm)).0[0], plain.0[0], "the norm is that before clipping");
    let config = PipelineConfig { clip_norm: Some(norm), ..PipelineConfig::default() };
    let configured = builder().config(config).optimizer(SgdConfig::new().init());
    assert_eq!(run(configured).1, run(builder().clip_norm(norm)).1, "a whole configuration says the same");
    let replaced = builder().config(PipelineConfig::default()).launch().map(drop);
    assert!(
        matches!(&replaced, Err(BuildError::Settings(reason)) if reason.contains("no optimizer")),
        "{replaced:?}"
    );
}

/// A layer that waits, and records the number of threads with which it computes.
#[derive(Module, Debug)]
struct Slow {
    block: Block,
    #[module(skip)]
    wait: Duration,
    #[module(skip)]
    threads: Arc<AtomicUsize>,
}

impl StageModule for Slow {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.threads.store(rayon::current_num_threads(), Ordering::SeqCst);
        std::thread::sleep(self.wait);
        self.block.forward(input, context)
    }
}

/// Returns a builder of two such layers, and the numbers that they record.
fn slow(wait: Duration) -> (PipelineBuilder, [Arc<AtomicUsize>; 2]) {
    let threads = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let seen = threads.clone();
    let make = move |layer: usize| Slow { block: Block::new(layer), wait, threads: seen[layer].clone() };
    let builder = Pipeline::builder(Layers::new(2, make)).ranks(2).microbatches(2);
    (builder.loss(loss).optimizer(optimizer()), threads)
}

#[test]
fn a_step_ends_at_its_deadline() {
    let step = |builder: PipelineBuilder| {
        builder.launch().expect("it starts").step(batch(0, 2), batch(1, 2), 1e-2).map(drop)
    };
    let wait = Duration::from_millis(1500);
    let error = step(slow(wait).0.deadline(Duration::from_millis(200))).expect_err("nothing moves");
    let PipelineError::Step(error) = error else { panic!("{error}") };
    assert!(matches!(error.cause, Cause::Deadline { .. }), "{error}");
    for deadline in [Duration::from_secs(30), Duration::MAX] {
        step(slow(Duration::ZERO).0.deadline(deadline)).expect("it moves");
    }
}

#[test]
fn a_rank_computes_with_its_threads() {
    let check = |set: fn(PipelineBuilder) -> PipelineBuilder, expected: [usize; 2]| {
        let (builder, threads) = slow(Duration::ZERO);
        let mut pipeline = set(builder).launch().expect("it starts");
        pipeline.step(batch(0, 2), batch(1, 2), 1e-2).expect("a step");
        assert_eq!(threads.map(|of_rank| of_rank.load(Ordering::SeqCst)), expected);
    };
    check(|builder| builder, [1, 1]);
    check(|builder| builder.threads_per_rank(3), [3, 3]);
    check(|builder| builder.threads_per_rank(vec![3, 2]), [3, 2]);
    check(|builder| builder.threads_per_rank(vec![2]), [2, 2]);
}

#[test]
fn replicas_share_a_step_and_shards_change_no_bit() {
    let (one, two) = (run(builder()), run(builder().data_parallel(2)));
    assert_eq!(two.1.len(), 2 * one.1.len(), "each replica has the parameters");
    for (found, expected) in two.0.iter().zip(&one.0) {
        assert!((found.1 - expected.1).abs() < 1e-6 * expected.1, "{found:?} {expected:?}");
    }
    let sharded = || builder().data_parallel(2).data_parallel_mode(DataParallelMode::Sharded);
    assert_eq!(sharded().program().expect("it exists").level(), Level::Full, "parameters are gathered");
    assert_eq!(run(sharded()).0, two.0);
}

#[test]
fn metadata_and_world_reach_the_ranks() {
    let described = builder().metadata(Metadata::Static { stages: Vec::new() }).launch().map(drop);
    let described = described.expect_err("no boundary is described").to_string();
    assert!(described.contains("metadata is given for 0 boundaries"), "{described}");
    let larger = builder().world(World::local(3)).launch().map(drop);
    let larger = larger.expect_err("a rank too many").to_string();
    assert!(larger.contains("the transport has 3 ranks"), "{larger}");
    assert_eq!(run(builder().world(World::local(2))), run(builder()));
}

#[test]
fn a_mismatch_of_metadata_fails_or_warns() {
    let wrong = || {
        let spec = TensorSpec::of_rows(DType::F64, [1]);
        builder().metadata(Metadata::Static { stages: vec![vec![spec]] })
    };
    let mut pipeline = wrong().launch().expect("it starts");
    let error =
        pipeline.step(batch(0, MICROBATCHES), batch(1, MICROBATCHES), 1e-2).map(drop).expect_err("F64");
    assert!(error.to_string().contains("stage 1 on rank 1 expects F64 [_, 1]"), "{error}");
    assert_eq!(run(wrong().check_metadata(CheckMetadata::Always, OnMismatch::Warn)), run(builder()));
}

#[test]
fn a_hook_sees_every_action() {
    #[derive(Default)]
    struct Seen(Mutex<Vec<(WorldRank, Action)>>);
    impl ActionHook for Seen {
        fn after(&self, rank: WorldRank, action: Action) {
            self.0.lock().expect("no panic").push((rank, action));
        }
    }
    let seen = Arc::new(Seen::default());
    let mut pipeline = builder().hook(seen.clone()).launch().expect("it starts");
    pipeline.step(batch(0, MICROBATCHES), batch(1, MICROBATCHES), 1e-2).expect("a step");
    let rows: usize = [0, 1].map(|rank| pipeline.program().row(Rank::new(rank)).len()).iter().sum();
    assert_eq!(seen.0.lock().expect("no panic").len(), rows);
}

#[test]
fn overlaps_stay_whole_for_a_hook_that_runs_them() {
    struct Overlapping(bool);
    impl ActionHook for Overlapping {
        fn runs_overlaps(&self) -> bool {
            self.0
        }
    }
    let overlaps = |runs| {
        let hook = Arc::new(Overlapping(runs));
        let program =
            builder().schedule("dualpipev").microbatches(4).hook(hook).program().expect("it exists");
        let rows = [0, 1].map(Rank::new).map(|rank| program.row(rank).to_vec()).concat();
        rows.iter().filter(|action| matches!(action, Action::Overlap(_))).count()
    };
    assert_eq!(overlaps(false), 0);
    assert!(overlaps(true) > 0);
}

#[test]
fn recomputation_changes_no_bit() {
    let expected = run(builder());
    for recompute in [Recompute::Stage, Recompute::Block] {
        assert_eq!(run(builder().schedule("gpipe").recompute(recompute)), run(builder().schedule("gpipe")));
    }
    assert_eq!(run(builder().recompute(Recompute::Stage)), expected);
}

//! Functions that run actions in place of the runtime: block by block, with values and gradients of their
//! own.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::optim::SgdConfig;
use burn::tensor::{DType, Device, Tensor};
use pipewright::batch::Batch;
use pipewright::hook::{ActionHook, BackwardRun, ForwardRun, OverlapRun};
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode::Sharded;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig, PipelineError};
use pipewright::stage::{Stage, StageContext, StageError, StageModule, WeightWork};
use pipewright::tensor::{Metadata, OptionalTensors, TensorSpec, Values, pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::{Action, Microbatch, Recompute, StageIndex};
use support::{LAYERS, Mlp, ROWS, Step, WIDTH, batch, brought, loss, optimizer, split};

const MICROBATCHES: u32 = 4;

fn builder(schedule: &str) -> PipelineBuilder {
    Pipeline::builder(Layers::new(LAYERS, |layer| Mlp::new(layer, 1)))
        .ranks(2)
        .schedule(schedule)
        .microbatches(MICROBATCHES)
        .loss(loss)
        .optimizer(optimizer())
}

/// The losses and gradient norms of three steps, and the losses of an evaluation after them.
fn run(builder: PipelineBuilder) -> (Vec<Step>, Vec<f64>) {
    let mut pipeline = builder.launch().expect("it starts");
    let mut step = |step| {
        let report = pipeline.step_batch(brought(step, MICROBATCHES), 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    let steps = vec![step(0), step(1), step(2)];
    (steps, pipeline.eval_batch(brought(3, MICROBATCHES)).expect("an evaluation").losses)
}

/// Returns the error of a first step.
fn failure(builder: PipelineBuilder) -> String {
    let mut pipeline = builder.launch().expect("it starts");
    let error =
        pipeline.step_batch(brought(0, MICROBATCHES), 1e-2).map(drop).expect_err("the function is wrong");
    assert!(matches!(&error, PipelineError::Step(_)), "{error}");
    error.to_string()
}

fn values(tensor: Tensor<2>) -> Values {
    pack(tensor)
}

fn tensor(values: &Values) -> Tensor<2> {
    unpack(values.clone()).expect("one matrix")
}

/// Runs every block by itself, and the blocks of an overlap alternately.
#[derive(Default)]
struct ByBlock {
    /// The blocks in the order in which they ran.
    order: Mutex<Vec<(Action, usize)>>,
}

impl ByBlock {
    fn note(&self, action: Action, block: usize) {
        self.order.lock().expect("no panic").push((action, block));
    }

    /// Returns the number of blocks that ran in forwards, or in backwards.
    fn count(&self, forwards: bool) -> usize {
        let order = self.order.lock().expect("no panic");
        order.iter().filter(|(action, _)| matches!(action, Action::Forward { .. }) == forwards).count()
    }

    fn forward_block(&self, mut run: ForwardRun<'_>) -> Result<(), StageError> {
        let Some(block) = run.next_block() else { return Ok(()) };
        run.run_block()?;
        self.note(run.action(), block);
        Ok(())
    }

    fn backward_block(&self, mut run: BackwardRun<'_>) -> Result<(), StageError> {
        let Some(block) = run.next_block() else { return Ok(()) };
        run.run_block()?;
        if matches!(run.action(), Action::Backward { .. }) {
            run.run_weights()?;
        }
        self.note(run.action(), block);
        Ok(())
    }
}

impl ActionHook for ByBlock {
    fn runs_overlaps(&self) -> bool {
        true
    }

    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        while let Some(block) = run.next_block() {
            run.run_block()?;
            self.note(run.action(), block);
        }
        Ok(())
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        while let Some(block) = run.next_block() {
            run.run_block()?;
            self.note(run.action(), block);
        }
        Ok(())
    }

    fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
        while run.forward().next_block().is_some() || run.backward().next_block().is_some() {
            self.backward_block(run.backward())?;
            self.forward_block(run.forward())?;
        }
        Ok(())
    }
}

#[test]
fn blocks_that_run_one_by_one_change_no_bit() {
    for schedule in ["1f1b", "gpipe", "zbvzerobubble", "dualpipev"] {
        let hook = Arc::new(ByBlock::default());
        assert_eq!(run(builder(schedule).hook(hook.clone())), run(builder(schedule)), "{schedule}");
        // Three steps and the forwards of an evaluation.
        let microbatches = MICROBATCHES as usize;
        assert_eq!(hook.count(true), 4 * LAYERS * microbatches, "{schedule}");
        assert_eq!(hook.count(false), 3 * LAYERS * microbatches, "{schedule}");
    }
}

#[test]
fn the_blocks_of_an_overlap_alternate() {
    /// Records the blocks of each overlap in the order in which they run.
    #[derive(Default)]
    struct Order(ByBlock, Mutex<Vec<String>>);
    impl ActionHook for Order {
        fn runs_overlaps(&self) -> bool {
            true
        }
        fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
            self.0.forward(run)
        }
        fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
            let own = ByBlock::default();
            own.overlap(run)?;
            let parts = own.order.into_inner().expect("no panic").into_iter();
            let kind = |action| if matches!(action, Action::Forward { .. }) { 'F' } else { 'B' };
            let parts = parts.map(|(action, block)| format!("{}{block}", kind(action)));
            self.1.lock().expect("no panic").push(parts.collect::<Vec<_>>().join(" "));
            Ok(())
        }
    }
    let hook = Arc::new(Order::default());
    let mut pipeline = builder("dualpipev").hook(hook.clone()).launch().expect("it starts");
    pipeline.step_batch(brought(0, MICROBATCHES), 1e-2).expect("a step");
    let seen = hook.1.lock().expect("no panic");
    // Four stages of two layers: the backward has the blocks of its forward.
    assert!(!seen.is_empty() && seen.iter().all(|line| line == "B1 F0 B0 F1"), "{seen:?}");
}

#[test]
fn each_rank_begins_its_update_once_in_a_step_that_updates() {
    /// Counts the updates that ranks begin.
    #[derive(Default)]
    struct Begun(AtomicUsize);
    impl ActionHook for Begun {
        fn begin_update(&self, _rank: WorldRank) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let hook = Arc::new(Begun::default());
    // Each rank has two stages.
    let mut pipeline = builder("zbvzerobubble").hook(hook.clone()).launch().expect("it starts");
    pipeline.eval_batch(brought(0, MICROBATCHES)).expect("an evaluation");
    pipeline.accumulate(brought(1, MICROBATCHES)).expect("a batch");
    assert_eq!(hook.0.load(Ordering::SeqCst), 0);
    pipeline.step_batch(brought(2, MICROBATCHES), 1e-2).expect("a step");
    assert_eq!(hook.0.load(Ordering::SeqCst), 2);
}

#[test]
fn recomputed_and_sharded_stages_run_block_by_block() {
    for recompute in [Recompute::Stage, Recompute::Block] {
        let hook = Arc::new(ByBlock::default());
        let found = run(builder("gpipe").hook(hook).recompute(recompute.clone()));
        assert_eq!(found, run(builder("gpipe")), "{recompute:?}");
    }
    let sharded = || builder("zbvzerobubble").data_parallel(2).data_parallel_mode(Sharded);
    assert_eq!(run(sharded().hook(Arc::new(ByBlock::default()))), run(sharded()));
}

/// A layer whose output is twice the output of another layer.
#[derive(burn::module::Module, Debug)]
struct Doubled {
    inner: Mlp,
}

impl StageModule for Doubled {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.inner.forward(input, context) * 2.0
    }

    fn parameter_path(&self, local: &str) -> String {
        self.inner.parameter_path(local.strip_prefix("inner.").unwrap_or(local))
    }
}

#[test]
fn a_function_in_place_of_a_block_is_differentiated() {
    struct Doubles;
    impl ActionHook for Doubles {
        fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
            assert_eq!(run.module::<Vec<Mlp>>().map(Vec::len), Some(run.blocks()));
            assert!(run.module::<Mlp>().is_none());
            while let Some(block) = run.next_block() {
                run.run_block_with(|layers: &Vec<Mlp>, values, context| {
                    let input = unpack(values).map_err(StageError::Input)?;
                    Ok(pack(layers[block].forward(input, context) * 2.0))
                })?;
            }
            Ok(())
        }
    }
    let doubled = |schedule: &str| {
        Pipeline::builder(Layers::new(LAYERS, |layer| Doubled { inner: Mlp::new(layer, 1) }))
            .ranks(2)
            .schedule(schedule)
            .microbatches(MICROBATCHES)
            .loss(loss)
            .optimizer(optimizer())
    };
    for schedule in ["1f1b", "zbvzerobubble"] {
        let expected = run(doubled(schedule));
        assert_eq!(run(builder(schedule).hook(Arc::new(Doubles))), expected, "{schedule}");
        assert_ne!(run(builder(schedule)), expected);
        let recomputed = builder(schedule).recompute(Recompute::Block);
        assert_eq!(run(recomputed.hook(Arc::new(Doubles))), expected, "{schedule}");
    }
}

/// Reverses the rows behind the first block of each stage, and again behind the last one, with their
/// gradients.
struct Reverses;

fn reversed(values: &Values) -> Values {
    pack(tensor(values).flip([0]))
}

impl ActionHook for Reverses {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        run.run_block()?;
        run.set_values(&reversed(run.values()));
        while run.next_block().is_some() {
            run.run_block()?;
        }
        if run.loss().is_none() {
            run.set_values(&reversed(run.values()));
        }
        Ok(())
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        let reverse = |run: &mut BackwardRun<'_>| {
            let gradients: Values = run.gradients().iter().flatten().cloned().collect();
            run.set_gradients(reversed(&gradients).into_iter().map(Some).collect());
        };
        if run.stage().get() == 0 {
            reverse(run);
        }
        while run.next_block().is_some_and(|block| block > 0) {
            run.run_block()?;
        }
        reverse(run);
        run.run_block()
    }
}

#[test]
fn values_and_gradients_between_blocks_may_be_replaced() {
    // The last stage ends in the loss, with its rows in the reverse order: so are its targets.
    let targets = split(batch(100, MICROBATCHES), MICROBATCHES);
    let targets: Vec<Values> = targets.iter().map(reversed).collect();
    let inputs = || split(batch(0, MICROBATCHES), MICROBATCHES);
    let mut with = builder("1f1b").hook(Arc::new(Reverses)).launch().expect("it starts");
    let mut without = builder("1f1b").launch().expect("it starts");
    for _ in 0..3 {
        let found = with.step_batch(Batch::new(inputs(), targets.clone()), 1e-2).expect("a step");
        let plain = Batch::new(inputs(), split(batch(100, MICROBATCHES), MICROBATCHES));
        let expected = without.step_batch(plain, 1e-2).expect("a step");
        let near = |found: f64, expected: f64| (found - expected).abs() < 1e-5 * expected.abs();
        assert!(near(found.loss(), expected.loss()), "{} {}", found.loss(), expected.loss());
        assert!(near(found.gradient_norm, expected.gradient_norm));
    }
}

#[test]
fn a_function_sees_targets_and_losses() {
    #[derive(Default)]
    struct Sees(Mutex<Vec<(Microbatch, f64)>>);
    impl ActionHook for Sees {
        fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
            let is_last = run.context().stage() == StageIndex::new(1);
            let scale: f64 = *run.context().value("scale").map_err(StageError::function)?;
            assert_eq!((run.targets().is_some(), scale), (is_last, 0.5));
            assert!(run.loss().is_none() && *run.device() == Device::flex());
            run.run_all()?;
            let Some(loss) = run.loss().cloned() else { return Ok(()) };
            assert_eq!(run.rank().get(), 1);
            let loss = f64::from(loss.into_scalar::<f32>());
            self.0.lock().expect("no panic").push((run.context().microbatch(), loss));
            Ok(())
        }
    }
    let hook = Arc::new(Sees::default());
    let mut pipeline = builder("gpipe").hook(hook.clone()).launch().expect("it starts");
    let losses = pipeline
        .step_batch(brought(0, MICROBATCHES).with_value("scale", 0.5f64), 1e-2)
        .expect("a step")
        .losses;
    let seen: Vec<f64> = hook.0.lock().expect("no panic").iter().map(|(_, loss)| *loss).collect();
    assert_eq!(seen, losses);
}

#[test]
fn a_function_may_compute_weight_gradients_itself() {
    /// Adds 1 to each element of the gradient of one weight.
    struct AddsOnes;
    impl ActionHook for AddsOnes {
        fn weights(&self, _rank: WorldRank, action: Action, work: &mut WeightWork<'_>) {
            if action.stage().get() != 1 {
                return;
            }
            let ones = Tensor::<2>::ones([WIDTH, WIDTH], &Device::flex());
            // Stages have the same number of layers, so this is the place of the first layer of stage 1.
            let first = work.module::<Vec<Mlp>>().expect("a list of layers").len();
            assert_eq!(work.len(), 2 * first, "each layer has a product and a bias");
            work.add(&format!("layers.{first}.layers.{first}.weight"), ones).expect("it is there");
        }
    }
    for (schedule, changed) in [("1f1b", 4), ("zbvzerobubble", 2)] {
        let parameters = |builder: PipelineBuilder| {
            let mut pipeline = builder.optimizer(SgdConfig::new().init()).launch().expect("it starts");
            pipeline.step_batch(brought(0, MICROBATCHES), 1.0).expect("a step");
            let mut all = pipeline.parameters().expect("every rank answers");
            all.sort_by(|a, b| a.path.cmp(&b.path));
            all.into_iter().map(|parameter| (parameter.path.to_string(), parameter.data)).collect::<Vec<_>>()
        };
        let (found, expected) =
            (parameters(builder(schedule).hook(Arc::new(AddsOnes))), parameters(builder(schedule)));
        for ((path, found), (_, expected)) in found.iter().zip(&expected) {
            let shift = if *path == format!("layers.{changed}.layers.{changed}.weight") { 1.0 } else { 0.0 };
            for (found, expected) in found.iter::<f32>().zip(expected.iter::<f32>()) {
                assert!((expected - found - shift).abs() < 1e-5, "{schedule} {path}: {found} {expected}");
            }
        }
    }
}

#[test]
fn the_tasks_of_w_may_be_skipped() {
    struct Skips;
    impl ActionHook for Skips {
        fn weights(&self, _rank: WorldRank, _action: Action, work: &mut WeightWork<'_>) {
            while work.skip_next() {}
        }
    }
    let weights = |builder: PipelineBuilder| {
        let mut pipeline = builder.optimizer(SgdConfig::new().init()).launch().expect("it starts");
        pipeline.step_batch(brought(0, MICROBATCHES), 1.0).expect("a step");
        let all = pipeline.parameters().expect("every rank answers").into_iter();
        all.filter(|parameter| parameter.path.ends_with(".0.weight")).map(|it| it.data).collect::<Vec<_>>()
    };
    let initial = vec![support::numbers(0, [WIDTH, WIDTH])];
    assert_eq!(weights(builder("zbvzerobubble").hook(Arc::new(Skips))), initial);
    assert_ne!(weights(builder("zbvzerobubble")), initial);
}

#[test]
fn messages_may_be_replaced_on_their_way() {
    /// Sends matrices transposed.
    #[derive(Default)]
    struct Transposes(Mutex<Vec<Action>>);
    impl ActionHook for Transposes {
        fn message(
            &self,
            _rank: WorldRank,
            action: Action,
            tensors: &mut OptionalTensors,
        ) -> Result<(), StageError> {
            for tensor in tensors.iter_mut().flatten() {
                let matrix: Tensor<2> = unpack(vec![tensor.clone()]).map_err(StageError::Input)?;
                *tensor = pack(matrix.transpose()).remove(0);
            }
            self.0.lock().expect("no panic").push(action);
            Ok(())
        }
    }
    for schedule in ["1f1b", "zbvzerobubble"] {
        let hook = Arc::new(Transposes::default());
        assert_eq!(run(builder(schedule).hook(hook.clone())), run(builder(schedule)), "{schedule}");
        let seen = hook.0.lock().expect("no panic");
        let of = |is: fn(&Action) -> bool| seen.iter().filter(|action| is(action)).count();
        let sends = of(|it| matches!(it, Action::SendForward { .. } | Action::SendBackward { .. }));
        assert_eq!((seen.len(), sends > 0), (2 * sends, true), "{schedule}");
    }
}

#[test]
fn named_spans_are_in_the_timeline() {
    struct Spans;
    impl ActionHook for Spans {
        fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
            let start = std::time::Instant::now();
            run.run_all()?;
            let name = format!("inside {}", run.action());
            run.scope(&name, start, std::time::Instant::now());
            Ok(())
        }
    }
    let mut pipeline = builder("1f1b").hook(Arc::new(Spans)).launch().expect("it starts");
    let timeline = pipeline.step_batch(brought(0, MICROBATCHES), 1e-2).expect("a step").timeline;
    assert_eq!(timeline.scopes().len(), 2 * MICROBATCHES as usize);
    for scope in timeline.scopes() {
        let name = scope.kind.to_string();
        let action = name.strip_prefix("inside ").expect("the name");
        let event = timeline.events_of(scope.rank).iter().find(|event| event.action.to_string() == action);
        let event = event.expect("the forward has an event");
        assert!(event.start <= scope.start && scope.end <= event.end, "{scope:?} {event:?}");
    }
}

/// A hook of one function for forwards.
struct Forwards(fn(&mut ForwardRun<'_>) -> Result<(), StageError>);

impl ActionHook for Forwards {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        (self.0)(run)
    }
}

/// A hook of one function for backwards; forwards run block by block.
struct Backwards(fn(&mut BackwardRun<'_>) -> Result<(), StageError>);

impl ActionHook for Backwards {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        while run.next_block().is_some() {
            run.run_block()?;
        }
        Ok(())
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        (self.0)(run)
    }
}

fn forward_failure(function: fn(&mut ForwardRun<'_>) -> Result<(), StageError>) -> String {
    failure(builder("1f1b").hook(Arc::new(Forwards(function))))
}

fn backward_failure(function: fn(&mut BackwardRun<'_>) -> Result<(), StageError>) -> String {
    failure(builder("1f1b").hook(Arc::new(Backwards(function))))
}

#[test]
fn wrong_values_are_named_with_their_block() {
    let text = forward_failure(|run| {
        run.run_block()?;
        run.set_values(&pack(Tensor::<1>::zeros([WIDTH], &Device::flex())));
        run.run_block()
    });
    assert_eq!(
        text,
        "step 1: rank 0, stage 0, microbatch 0, action 0F0: block 1 of 0F0: the layer `layers.1` cannot take its inputs: \
         expected a float tensor of rank 2, found a float tensor of shape [6]"
    );
    let text = forward_failure(|run| {
        run.run_all()?;
        run.set_values(&Values::new());
        Ok(())
    });
    assert!(
        text.ends_with(
            "0F0: the function left 0 outputs, and the stage returned 1: replace outputs one by one"
        ),
        "{text}"
    );
    let text = forward_failure(|run| run.run_block_with(|_: &Mlp, values, _| Ok(values)));
    assert!(
        text.contains("block 0 of 0F0: the stage's module is not a `") && text.contains("Mlp`"),
        "{text}"
    );
    let text = forward_failure(|_| Err(StageError::function("the peer is gone")));
    assert!(text.ends_with("action 0F0: the function failed: the peer is gone"), "{text}");
    let given = Metadata::Static { stages: vec![vec![TensorSpec::of_rows(DType::F32, [WIDTH])]] };
    let narrow = Forwards(|run| {
        run.run_all()?;
        run.set_values(&values(Tensor::zeros([ROWS, 2], &Device::flex())));
        Ok(())
    });
    let text = failure(builder("1f1b").metadata(given).hook(Arc::new(narrow)));
    assert!(
        text.contains(
            "action 0F0: microbatch 0: tensor 0 differs: stage 0 on rank 0 sent F32 [3, 2], stage 1"
        ),
        "{text}"
    );
}

#[test]
fn wrong_gradients_are_named_with_their_block() {
    let text = backward_failure(|run| {
        run.run_block()?;
        run.set_gradients(vec![Some(pack(Tensor::<2>::zeros([ROWS, 5], &Device::flex())).remove(0))]);
        run.run_block()
    });
    assert_eq!(
        text,
        "step 1: rank 1, stage 1, microbatch 0, action 1I0: block 2 of 1I0: the gradient of output 0 has shape [3, 5], the \
         output had [3, 6]"
    );
    let text = backward_failure(|run| {
        run.run_block()?;
        run.set_gradients(Vec::new());
        run.run_block()
    });
    assert!(text.ends_with("block 2 of 1I0: 0 gradients arrived for 1 output"), "{text}");
    let text = backward_failure(|run| {
        run.run_block()?;
        let half = Tensor::<2>::zeros([ROWS, WIDTH], (&Device::flex(), DType::F16));
        run.set_gradients(vec![Some(pack(half).remove(0))]);
        run.run_block()
    });
    assert!(text.ends_with("the gradient of output 0 has the type F16, the output had F32"), "{text}");
}

#[test]
fn wrong_weight_gradients_are_named_with_their_parameter() {
    struct Adds(&'static str, usize);
    impl ActionHook for Adds {
        fn weights(&self, rank: WorldRank, _action: Action, work: &mut WeightWork<'_>) {
            // Rank 0 could fail too before rank 1 has.
            if rank == WorldRank::new(1) {
                let gradient = Tensor::<1>::ones([self.1], &Device::flex());
                assert!(work.add(self.0, gradient).is_err());
            }
        }
    }
    let text = failure(builder("1f1b").hook(Arc::new(Adds("layers.7.layers.7.bias", 5))));
    assert_eq!(
        text,
        "step 1: rank 1, stage 1, microbatch 0, action 1W0: the function added a gradient F32 [5] to the parameter \
         `layers.7.layers.7.bias`, which takes one float tensor of shape [6]"
    );
    let text = failure(builder("1f1b").hook(Arc::new(Adds("layers.9.bias", 6))));
    assert!(
        text.ends_with(
            "the stage has no parameter `layers.9.bias`; its first one is `layers.4.layers.4.weight`"
        ),
        "{text}"
    );
}

#[test]
fn blocks_that_a_function_leaves_out_are_an_error() {
    let error = |hook: Arc<dyn ActionHook>| {
        let mut pipeline = builder("1f1b").hook(hook).launch().expect("it starts");
        let error =
            pipeline.step_batch(brought(0, MICROBATCHES), 1e-2).map(drop).expect_err("a block is missing");
        let PipelineError::Step(error) = error else { panic!("{error}") };
        let left_out = error.cause.to_string();
        let left_out = left_out.strip_prefix("the function that runs ").expect("it names the action");
        let (place, _) = left_out.split_once(" and those behind it: ").expect("it names the block");
        place.replace(" left out block", "")
    };
    assert_eq!(
        error(Arc::new(Forwards(|run| {
            run.run_block()?;
            Ok(())
        }))),
        "0F0 1"
    );
    assert_eq!(
        error(Arc::new(Backwards(|run| {
            run.run_block()?;
            Ok(())
        }))),
        "1I0 2"
    );
}

#[test]
fn gradients_that_a_function_leaves_out_are_an_error_in_every_step() {
    /// Leaves no gradients in one of the steps.
    struct LeavesNone {
        step: usize,
        seen: AtomicUsize,
    }
    impl ActionHook for LeavesNone {
        fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
            run.run_all()?;
            let earlier = MICROBATCHES as usize * self.step;
            if run.stage().get() == 1 && self.seen.fetch_add(1, Ordering::SeqCst) == earlier {
                run.set_gradients(OptionalTensors::new());
            }
            Ok(())
        }
    }
    for step in 0..2 {
        let hook = Arc::new(LeavesNone { step, seen: AtomicUsize::new(0) });
        let mut pipeline = builder("1f1b").hook(hook).launch().expect("it starts");
        for _ in 0..step {
            pipeline.step_batch(brought(0, MICROBATCHES), 1e-2).expect("a step");
        }
        let error =
            pipeline.step_batch(brought(0, MICROBATCHES), 1e-2).map(drop).expect_err("a gradient is missing");
        assert_eq!(
            error.to_string(),
            format!(
                "step {}: rank 1, stage 1, microbatch 0, action 1I0: the function left 0 gradients, and the backward \
                 returned 1: replace gradients one by one",
                step + 1
            )
        );
    }
}

/// Computes the weight gradients of an `I` at once.
struct AtOnce;

impl ActionHook for AtOnce {
    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        run.run_weights()
    }
}

#[test]
fn weight_gradients_of_a_function_go_to_the_runner_of_the_stage() {
    let program = || support::program("zbvzerobubble", 2, MICROBATCHES);
    let train = |hook: Option<Arc<dyn ActionHook>>| {
        let (counted, stages) = (Arc::new(AtomicUsize::new(0)), program().placement().stages());
        let count = counted.clone();
        let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
            let count = count.clone();
            Ok(support::stage(index, stages)?.with_weight_runner(move |_, work| {
                count.fetch_add(work.len(), Ordering::SeqCst);
            }))
        };
        let config = PipelineConfig { hook, ..support::config() };
        let mut pipeline = Pipeline::launch(program(), World::local(2), &config, make).expect("it starts");
        let steps = (0..3).map(|step| {
            let report = pipeline.step_batch(brought(step, MICROBATCHES), 1e-2).expect("a step");
            (report.losses, report.gradient_norm)
        });
        (steps.collect::<Vec<Step>>(), counted.load(Ordering::SeqCst))
    };
    let (steps, counted) = train(Some(Arc::new(AtOnce)));
    assert_eq!(counted, 3 * 2 * LAYERS * MICROBATCHES as usize, "a product and a bias of each layer");
    assert_eq!((steps, counted), train(None));
}

/// A layer that cannot defer its weight gradients.
#[derive(burn::module::Module, Debug)]
struct Undeferred {
    linear: burn::nn::Linear,
}

impl StageModule for Undeferred {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }
}

#[test]
fn only_a_stage_that_cannot_defer_is_in_the_log() {
    support::collect_log();
    let found = || support::logged(|text| text.contains("has no layer that defers its weight gradients"));
    run(builder("zb-h1").hook(Arc::new(AtOnce)));
    let mut frozen = builder("zb-h1").launch().expect("it starts");
    frozen.freeze(|_| true).expect("every rank answers");
    frozen.step_batch(brought(0, MICROBATCHES), 1e-2).expect("a step");
    assert_eq!(found(), Vec::<String>::new());
    let layer =
        |_| Undeferred { linear: burn::nn::LinearConfig::new(WIDTH, WIDTH).init(&Device::flex().autodiff()) };
    let mut plain = Pipeline::builder(Layers::new(2, layer))
        .ranks(2)
        .schedule("zb-h1")
        .microbatches(MICROBATCHES)
        .loss(loss)
        .optimizer(optimizer())
        .launch()
        .expect("it starts");
    for step in 0..2 {
        plain.step_batch(brought(step, MICROBATCHES), 1e-2).expect("a step");
    }
    assert_eq!(found().len(), 2, "each stage once: {:?}", found());
}

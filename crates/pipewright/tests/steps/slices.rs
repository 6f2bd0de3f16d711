//! Microbatches that are cut into slices: a layer whose tokens depend on earlier ones, losses of slices, and
//! refusals.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData, Tolerance, activation};
use pipewright::batch::{Batch, SplitRule};
use pipewright::hook::{ActionHook, BackwardRun, ForwardRun};
use pipewright::nn::{Linear, weighted_cross_entropy, weights_of_valid};
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig, StepSummary};
use pipewright::stage::{StageContext, StageError, StageModule};
use pipewright::tensor::unpack;
use pipewright_schedule::{Recompute, ScheduleSpec, Slices};

use crate::support::count::Count;
use crate::support::{LAYERS, Mlp, WIDTH, numbers, optimizer};

const ROWS: usize = 2;
const TOKENS: usize = 12;
const MICROBATCHES: u32 = 4;
const BATCHES: u64 = 3;
/// The target that does not count.
const IGNORED: i64 = -1;
/// The largest relative difference from whole microbatches.
const CLOSE: f64 = 1e-5;

/// Adds to each token a function of the sum over the tokens up to it.
#[derive(Module, Debug)]
struct Running {
    linear: Linear,
    #[module(skip)]
    layer: usize,
    #[module(skip)]
    runs_slices: bool,
    #[module(skip)]
    pace: Option<Arc<Pace>>,
}

/// Lets the first layer compute a batch only when the test has begun the next one.
#[derive(Debug, Default)]
struct Pace {
    begun: Count,
    computed: Count,
}

impl Running {
    fn new(layer: usize) -> Self {
        let device = Device::flex().autodiff();
        let linear = Linear {
            weight: Param::from_data(numbers(layer as u64, [WIDTH, WIDTH]), &device),
            bias: Some(Param::from_data(numbers(1000 + layer as u64, [WIDTH]), &device)),
        };
        Self { linear, layer, runs_slices: true, pace: None }
    }
}

impl StageModule for Running {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, input: Tensor<3>, context: &StageContext) -> Tensor<3> {
        let (slice, slices) = context.slice();
        if let Some(pace) = self.pace.as_ref().filter(|_| context.microbatch().get() + slice.get() == 0) {
            pace.begun.wait_for(BATCHES.min(pace.computed.add_one() + 1));
        }
        let [_, tokens, _] = input.dims();
        let up_to = Tensor::<2>::ones([tokens, tokens], &input.device()).tril(0).unsqueeze::<3>();
        let mut sums = up_to.matmul(self.linear.forward(input.clone()) / TOKENS as f64);
        let name = format!("layers.{}.sum", self.layer);
        // The last one has the sums of the others.
        if let Some(earlier) = context.earlier_slices::<3>(&name).pop() {
            sums = sums + earlier;
        }
        context.keep_for_later_slices(&name, &sums.clone().narrow(1, tokens - 1, 1));
        assert!(slice.get() < slices.get() && tokens * slices.get() as usize == TOKENS);
        let change = activation::tanh(sums);
        context.auxiliary_loss("change", 0.1, change.clone().square().mean());
        input + change
    }

    fn refuses_slices(&self) -> Option<String> {
        (!self.runs_slices).then(|| "it has forgotten how".to_owned())
    }
}

fn spec(ranks: u32, slices: Option<u32>) -> ScheduleSpec {
    let slices = slices.map(|slices| Slices::new(slices).expect("not 0"));
    ScheduleSpec { ranks, microbatches: MICROBATCHES, slices, ..ScheduleSpec::default() }
}

/// A pipeline that runs slices, or whole microbatches if there is no number of slices.
fn builder(ranks: u32, slices: Option<u32>) -> PipelineBuilder {
    builder_of(Layers::new(LAYERS, Running::new), ranks, slices)
}

fn builder_of(layers: Layers, ranks: u32, slices: Option<u32>) -> PipelineBuilder {
    Pipeline::builder(layers)
        .schedule(if slices.is_some() { "seq1f1b" } else { "1f1b" })
        .spec(spec(ranks, slices))
        .loss(|output: Tensor<3>, target: Tensor<3>| (output - target).square().mean())
        .optimizer(optimizer())
}

fn data(seed: u64) -> Tensor<3> {
    let rows = ROWS * MICROBATCHES as usize;
    Tensor::from_data(numbers(seed, [rows, TOKENS, WIDTH]), &Device::flex())
}

fn batch(seed: u64) -> Batch {
    Batch::split(data(seed), data(100 + seed), MICROBATCHES).expect("it divides")
}

type Figures = (Vec<f64>, Vec<f64>, f64, f64);

/// The losses, loss weights, auxiliary losses and gradient norms of a run, and its parameters at the end.
#[derive(Debug, PartialEq)]
struct Outcome {
    steps: Vec<Figures>,
    parameters: Vec<(String, TensorData)>,
}

fn figures(summary: StepSummary) -> Figures {
    (summary.losses, summary.loss_weights, summary.weighted_auxiliary, summary.gradient_norm)
}

fn run(builder: PipelineBuilder, batch: fn(u64) -> Batch) -> Outcome {
    let mut pipeline = builder.launch().expect("it starts");
    let steps =
        (0..BATCHES).map(|step| figures(pipeline.step_batch(batch(step), 1e-2).expect("a step"))).collect();
    outcome(&mut pipeline, steps)
}

fn outcome(pipeline: &mut Pipeline, steps: Vec<Figures>) -> Outcome {
    let parameters = pipeline.parameters().expect("they are there").into_iter();
    let mut parameters: Vec<_> = parameters.map(|held| (held.path.to_string(), held.data)).collect();
    parameters.sort_by(|a, b| a.0.cmp(&b.0));
    Outcome { steps, parameters }
}

fn assert_close(what: &str, found: f64, expected: f64) {
    assert!((found - expected).abs() <= CLOSE * expected.abs(), "{what}: {found} for {expected}");
}

/// Checks that a run in slices has the losses, norms and parameters of whole microbatches.
fn check(what: &str, found: &Outcome, expected: &Outcome) {
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        assert_eq!((found.0.len(), &found.1), (MICROBATCHES as usize, &expected.1), "{what}");
        found.0.iter().zip(&expected.0).for_each(|(found, expected)| assert_close(what, *found, *expected));
        assert_close(what, found.2, expected.2);
        assert_close(what, found.3, expected.3);
    }
    for ((path, found), (of, expected)) in found.parameters.iter().zip(&expected.parameters) {
        assert_eq!(path, of, "{what}");
        for (found, expected) in found.iter::<f64>().zip(expected.iter::<f64>()) {
            // An update by AdamW is at most 1e-2, and a gradient near 0 may change its sign.
            assert!((found - expected).abs() <= 1e-4, "{what}: {path} {found} for {expected}");
        }
    }
}

/// With delayed parameters, batches of slices overlap, with the bits of batches that do not, on one rank.
#[test]
fn batches_of_slices_overlap() {
    for (ranks, slices) in [(2, 2), (2, 4), (4, 2)] {
        let expected = run(builder(1, Some(slices)).delayed(true), batch);
        assert_eq!(run(builder(ranks, Some(slices)).delayed(true), batch), expected, "drained");
        let pace = Arc::new(Pace::default());
        let of_layers = pace.clone();
        let paced = move |layer| Running { pace: Some(of_layers.clone()), ..Running::new(layer) };
        let paced = move |layer: usize| if layer == 0 { paced(layer) } else { Running::new(layer) };
        let builder = builder_of(Layers::new(LAYERS, paced), ranks, Some(slices));
        let mut pipeline = builder.delayed(true).launch().expect("it starts");
        for number in 0..BATCHES {
            pipeline.begin(batch(number), 1e-2).expect("it begins");
            pace.begun.add_one();
        }
        let summaries = (0..BATCHES).map(|_| pipeline.finish().expect("a batch")).collect::<Vec<_>>();
        let overlaps: Vec<bool> = summaries.iter().map(|summary| summary.overlaps).collect();
        assert_eq!(overlaps, [false, true, true], "{ranks} ranks, {slices} slices");
        let steps = summaries.into_iter().map(figures).collect();
        assert_eq!(outcome(&mut pipeline, steps), expected, "{ranks} ranks, {slices} slices");
    }
}

#[test]
fn a_state_passes_from_slice_to_slice() {
    for ranks in [1, 2, 4] {
        let whole = run(builder(ranks, None), batch);
        assert_eq!(run(builder(ranks, Some(1)), batch), whole, "one slice, {ranks} ranks");
        for slices in [2, 4, 12] {
            check(
                &format!("{slices} slices, {ranks} ranks"),
                &run(builder(ranks, Some(slices)), batch),
                &whole,
            );
        }
    }
}

#[test]
fn sums_and_uneven_microbatches_keep_their_weights() {
    let uneven: fn(u64) -> Batch = |seed| {
        let part = |seed| data(seed).narrow(0, 0, 7);
        Batch::split(part(seed), part(100 + seed), SplitRule::uneven(MICROBATCHES)).expect("it divides")
    };
    let batches: [fn(u64) -> Batch; 2] = [|seed| batch(seed).summed(), uneven];
    for batch in batches {
        check("two slices", &run(builder(2, Some(2)), batch), &run(builder(2, None), batch));
    }
}

/// Targets with few that count: in microbatch 1 only the targets of the last slices, in microbatch 2 no
/// target.
fn few_targets(seed: u64) -> Batch {
    let rows = ROWS * MICROBATCHES as usize;
    let id = |place: usize| {
        let (row, token) = (place / TOKENS, place % TOKENS);
        let counts = match row / ROWS {
            0 => token % 5 != row % ROWS,
            1 => token > 8,
            2 => false,
            _ => true,
        };
        if counts { (place * 7 + seed as usize) as i64 % WIDTH as i64 } else { IGNORED }
    };
    let ids: Vec<i64> = (0..rows * TOKENS).map(id).collect();
    let targets = Tensor::<2, Int>::from_data(TensorData::new(ids, [rows, TOKENS]), &Device::flex());
    Batch::split(data(seed), targets, MICROBATCHES)
        .expect("it divides")
        .ignoring(IGNORED)
        .expect("some count")
}

#[test]
fn slices_count_by_their_targets() {
    let run_tokens = |builder: PipelineBuilder| {
        builder.loss(|logits: Tensor<3>, targets: Tensor<2, Int>| {
            let targets = targets.flatten::<1>(0, 1);
            let weights = weights_of_valid(targets.clone(), IGNORED);
            weighted_cross_entropy(logits.flatten::<2>(0, 1), targets, weights)
        })
    };
    for slices in [2, 4] {
        let [found, whole] =
            [Some(slices), None].map(|slices| run(run_tokens(builder(2, slices)), few_targets));
        check(&format!("{slices} slices"), &found, &whole);
        assert_eq!(found.steps[0].0[2], 0.0, "no target of it counts");
    }
}

#[test]
fn an_evaluation_returns_whole_microbatches() {
    let [found, whole] = [Some(3), None].map(|slices| {
        let mut pipeline = builder(2, slices).launch().expect("it starts");
        let before = pipeline.eval_batch(batch(7)).expect("an evaluation");
        pipeline.step_batch(batch(0), 1e-2).expect("a step");
        let after = pipeline.eval_batch(batch(7)).expect("an evaluation");
        let outputs = [before.outputs, after.outputs].concat().into_iter();
        let outputs: Vec<Tensor<3>> = outputs.map(|output| unpack(output).expect("one tensor")).collect();
        ([before.losses, after.losses].concat(), outputs)
    });
    assert_eq!((found.0.len(), found.1.len()), (2 * MICROBATCHES as usize, 2 * MICROBATCHES as usize));
    found.0.iter().zip(&whole.0).for_each(|(found, expected)| assert_close("a loss", *found, *expected));
    for (found, expected) in found.1.into_iter().zip(whole.1) {
        assert_eq!(found.dims(), [ROWS, TOKENS, WIDTH]);
        let error = (found - expected).abs().max().into_scalar::<f32>();
        assert!(error <= 1e-5, "{error}");
    }
}

/// Runs forwards and backwards block by block.
struct ByBlock;

impl ActionHook for ByBlock {
    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        while run.next_block().is_some() {
            run.run_block()?;
        }
        Ok(())
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        while run.next_block().is_some() {
            run.run_block()?;
        }
        Ok(())
    }
}

#[test]
fn a_hook_runs_slices_block_by_block() {
    // The tape of each block adds the gradients of a tensor for later slices in an order of its own.
    let found = run(builder(2, Some(4)).hook(Arc::new(ByBlock)), batch);
    check("block by block", &found, &run(builder(2, None), batch));
}

#[test]
fn a_failed_step_leaves_nothing_to_the_next() {
    let mut pipeline = builder(2, Some(4)).launch().expect("it starts");
    let bad = Batch::split(data(0) / 0.0, data(100), MICROBATCHES).expect("it divides");
    let error = pipeline.step_batch(bad, 1e-2).expect_err("it is not finite").to_string();
    assert!(error.contains("microbatch 0"), "{error}");
    let found: Vec<_> =
        (0..3).map(|step| figures(pipeline.step_batch(batch(step), 1e-2).expect("a step"))).collect();
    assert_eq!(found, run(builder(2, Some(4)), batch).steps);
}

#[test]
fn timelines_name_slices() {
    let mut pipeline = builder(2, Some(4)).launch().expect("it starts");
    let summary = pipeline.step_batch(batch(0), 1e-2).expect("a step");
    assert_eq!(summary.timeline.slices(), Slices::new(4).expect("not 0"));
}

/// Returns the error of a launch.
fn launch_error(builder: PipelineBuilder) -> String {
    builder.launch().map(drop).expect_err("it cannot run slices").to_string()
}

#[test]
fn stages_that_cannot_run_slices_are_refused() {
    let forgets = |layer| Running { runs_slices: layer != 5, ..Running::new(layer) };
    let run_layers = |layers: Layers, ranks| {
        let builder = Pipeline::builder(layers).schedule("seq1f1b").optimizer(optimizer());
        builder.spec(spec(ranks, Some(2)))
    };
    let loss = |output: Tensor<3>, target: Tensor<3>| (output - target).mean();
    let forgets = run_layers(Layers::new(LAYERS, forgets), 2).loss(loss);
    assert_eq!(
        launch_error(forgets),
        "step 0: rank 1: the stage cannot be made: stage 1: its module cannot run microbatches in 2 slices: of the layer \
         `layers.5`: it has forgotten how; use a schedule of whole microbatches, such as `1f1b`"
    );
    // Either of two ranks may be the first to refuse.
    let plain = run_layers(Layers::new(LAYERS, |layer| Mlp::new(layer, 1)), 1).loss(crate::support::loss);
    let error = launch_error(plain);
    let silent = "of the layer `layers.0`: it does not say that it can (`StageModule::refuses_slices`)";
    assert!(error.contains(silent), "{error}");
}

#[test]
fn settings_that_need_whole_microbatches_are_refused() {
    let beside = |what: &str| {
        format!(
            "the program cuts microbatches into 2 slices, which does not work with {what}: leave that out, or use a \
             schedule of whole microbatches, such as `1f1b`"
        )
    };
    let recomputed = builder(2, Some(2)).recompute(Recompute::Stage);
    assert_eq!(launch_error(recomputed), beside("recomputation (`recompute`)"));
    let config = PipelineConfig { targets_for_all: true, ..PipelineConfig::default() };
    let with_targets = builder(2, Some(2)).config(config).optimizer(optimizer());
    assert_eq!(launch_error(with_targets), beside("targets for all stages (`targets_for_all`)"));
}

#[test]
fn a_module_may_not_change_to_one_that_cannot_run_slices() {
    let mut pipeline = builder(1, Some(2)).launch().expect("it starts");
    let forget = |layer: Running| Running { runs_slices: false, ..layer };
    let error = pipeline.change_module(0, forget).expect_err("it cannot run slices").to_string();
    assert!(
        error.contains(
            "its module cannot run microbatches in 2 slices: of the layer `layers.0`: it has forgotten how"
        ),
        "{error}"
    );
    pipeline.step_batch(batch(0), 1e-2).expect("the module has not changed");
}

#[test]
fn batches_that_cannot_be_cut_are_refused_before_the_step() {
    let mut pipeline = builder(2, Some(4)).launch().expect("it starts");
    let mut refuse = |batch: Batch, expected: &str| {
        let error = pipeline.step_batch(batch, 1e-2).expect_err("it cannot be cut").to_string();
        assert!(error.starts_with(&format!("the slices of the microbatches: {expected}")), "{error}");
    };
    let short = |tokens| data(0).narrow(1, 0, tokens);
    let uneven = Batch::split(short(10), short(10), MICROBATCHES).expect("it divides");
    refuse(
        uneven,
        "the schedule cuts sequences into 4 slices, and tensor 0 has the shape [2, 10, 6]: dimension 1 is the sequence, \
         whose length must be a multiple of 4",
    );
    let flat =
        Batch::split(data(0), Tensor::<1>::ones([8], &Device::flex()), MICROBATCHES).expect("it divides");
    refuse(flat, "the schedule cuts sequences into 4 slices, and tensor 0 has the shape [2]:");
    refuse(
        batch(0).with_split("mask", data(1)).expect("as many rows"),
        "the schedule cuts sequences into slices, and the tensors of side input `mask` are not cut:",
    );
    refuse(
        batch(0).weighted([1.0; 4]).expect("four"),
        "the schedule cuts sequences into slices, and the weights",
    );
    let error =
        pipeline.step_batch(batch(0).keep_outputs(), 1e-2).expect_err("they are not joined").to_string();
    assert!(
        error.starts_with("a training step whose schedule cuts microbatches into slices returns no outputs")
    );
    pipeline.step_batch(batch(0).with_value("temperature", 0.5f32), 1e-2).expect("a value is not cut");
}

#[test]
fn gradients_of_inputs_are_those_of_whole_microbatches() {
    let gradient = |slices| {
        let mut pipeline = builder(2, slices).launch().expect("it starts");
        let summary = pipeline.step_batch(batch(0).keep_input_gradients(), 1e-2).expect("a step");
        summary.input_gradient::<3>(0).expect("one input").into_data()
    };
    let expected = gradient(None);
    for slices in [2, 4, 12] {
        let found = gradient(Some(slices));
        assert_eq!(found.shape(), expected.shape(), "{slices} slices");
        found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-4, 1e-8));
    }
}

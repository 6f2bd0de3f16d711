//! Hooks, groups of parameters and outputs of stages in pipelines of tensor ranks: the results are the
//! results of one rank.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::optim::{MuonConfig, SgdConfig};
use burn::tensor::Tensor;
use pipewright::batch::Batch;
use pipewright::hook::{ActionHook, ForwardRun};
use pipewright::ids::WorldRank;
use pipewright::optimizer::{ClipGroup, OptimizerGroup, ParameterGradient};
use pipewright::pipeline::PipelineConfig;
use pipewright::stage::StageError;
use pipewright::tensor::{OptionalTensors, pack, unpack};
use pipewright_schedule::{Action, StageIndex};

use super::model::{
    MICROBATCHES, Sizes, assert_close, config_of, launch, sizes, take_step, take_steps, try_launch,
};
use crate::support::{ROWS, Step, WIDTH, batch, split};

/// The shapes of gradients, by path.
type Shapes = BTreeMap<String, Vec<Vec<usize>>>;

/// Takes steps under `1f1b` with the configuration that `change` makes of the usual one.
fn steps(sizes: Sizes, change: impl Fn(PipelineConfig) -> PipelineConfig) -> Vec<Step> {
    let config = change(config_of(sizes));
    take_steps(&mut try_launch("1f1b", sizes, &config, None).expect("it starts"), 0..4)
}

#[test]
fn a_group_is_clipped_by_the_norm_of_whole_parameters() {
    // Both norms are so small that every step is clipped. `up` is split, `norm` is not.
    let clip = |config| PipelineConfig {
        clip_norm: Some(1e-3),
        clip_groups: vec![
            ClipGroup::new(|path| path.contains("up"), 1e-2),
            ClipGroup::new(|path| path.contains("norm"), 1e-4),
        ],
        // Without a state, an update is as large as its gradient.
        optimizer: Some(SgdConfig::new().init()),
        ..config
    };
    let expected = steps(sizes(1, 1, 1), clip);
    for sizes in [sizes(1, 1, 3), sizes(2, 1, 2), sizes(2, 2, 2)] {
        assert_close(&steps(sizes, clip), &expected, &format!("{sizes:?}"));
    }
}

#[test]
fn a_group_of_parameters_has_its_own_optimizer() {
    let group = |config| PipelineConfig {
        optimizer_groups: vec![
            OptimizerGroup::new(|path| path.contains("down"), SgdConfig::new().build()).rate(5.0),
        ],
        ..config
    };
    let expected = steps(sizes(1, 1, 1), group);
    assert_ne!(expected, steps(sizes(1, 1, 1), |config| config), "the group makes a difference");
    assert_close(&steps(sizes(2, 1, 3), group), &expected, "a group");
}

#[test]
fn a_group_that_needs_whole_matrices_is_refused() {
    let sizes = sizes(1, 1, 2);
    let group = OptimizerGroup::new(|path| path.ends_with("up.weight"), MuonConfig::new().build());
    let config = PipelineConfig { optimizer_groups: vec![group], ..config_of(sizes) };
    let error = try_launch("1f1b", sizes, &config, None).err().expect("it mixes rows").to_string();
    assert!(error.contains("depends on other elements"), "{error}");
}

#[test]
fn a_gradient_hook_gets_the_shards_of_sums() {
    let shapes: Arc<Mutex<Shapes>> = Arc::default();
    let seen = shapes.clone();
    let hook = move |gradient: &mut ParameterGradient<'_>| {
        let of_path = (gradient.path().to_owned(), gradient.shape());
        seen.lock().expect("no panic").entry(of_path.0).or_default().push(of_path.1);
        gradient.map(|flat: Tensor<1>| flat.clamp(-1e-2, 1e-2));
    };
    let hook = Arc::new(hook);
    let clamp = |config| PipelineConfig { gradient_hook: Some(hook.clone()), ..config };
    let expected = steps(sizes(1, 1, 1), clamp);
    assert_ne!(expected, steps(sizes(1, 1, 1), |config| config), "some elements are greater");
    assert_close(&steps(sizes(2, 2, 2), clamp), &expected, "with replicas");
    shapes.lock().expect("no panic").clear();
    assert_close(&steps(sizes(2, 1, 3), clamp), &expected, "three shards");
    let shapes = shapes.lock().expect("no panic");
    let sorted = |path: &str| {
        let mut found = shapes[path].clone();
        found.sort();
        found
    };
    let four_times = |widths: [usize; 3]| widths.map(|width| vec![vec![WIDTH, width]; 4]).concat();
    assert_eq!(sorted("layers.5.up.weight"), four_times([1, 3, 3]), "each rank, in each of four steps");
    assert_eq!(sorted("layers.5.norm.weight"), vec![vec![WIDTH]; 12]);
}

/// Doubles what leaves a stage and halves what arrives, which changes no bit of a result, and notes the
/// shapes.
#[derive(Default)]
struct Doubles(Mutex<Vec<Vec<usize>>>);

impl ActionHook for Doubles {
    fn message(&self, _: WorldRank, action: Action, tensors: &mut OptionalTensors) -> Result<(), StageError> {
        let is_send = matches!(action, Action::SendForward { .. } | Action::SendBackward { .. });
        let factor = if is_send { 2.0 } else { 0.5 };
        for tensor in tensors.iter_mut().flatten() {
            let whole: Tensor<2> = unpack(vec![tensor.clone()]).map_err(StageError::function)?;
            self.0.lock().expect("no panic").push(whole.dims().to_vec());
            *tensor = pack(whole * factor).remove(0);
        }
        Ok(())
    }

    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        let start = Instant::now();
        run.run_all()?;
        run.scope("forward", start, Instant::now());
        Ok(())
    }
}

#[test]
fn a_hook_sees_whole_messages_and_its_scopes_have_the_row_of_the_group() {
    let sizes = sizes(2, 2, 2);
    let hook = Arc::new(Doubles::default());
    let config = PipelineConfig { hook: Some(hook.clone()), ..config_of(sizes) };
    let mut hooked = try_launch("1f1b", sizes, &config, None).expect("it starts");
    let first = take_step(&mut hooked, 0).expect("a step");
    let expected = take_steps(&mut launch("1f1b", sizes), 0..2);
    let found = [(first.losses, first.gradient_norm)].into_iter().chain(take_steps(&mut hooked, 1..2));
    assert_eq!(found.collect::<Vec<_>>(), expected);
    let shapes = hook.0.lock().expect("no panic");
    // In two steps, each tensor rank sends and receives each microbatch's activation and gradient.
    assert_eq!(shapes.len(), 2 * 2 * 4 * MICROBATCHES as usize);
    assert!(shapes.iter().all(|shape| shape == &[ROWS, WIDTH]), "{shapes:?}");
    let mut rows: Vec<u32> = first.timeline.scopes().iter().map(|scope| scope.rank.get()).collect();
    rows.sort_unstable();
    let of_row = MICROBATCHES as usize / 2;
    assert_eq!(rows, (0..4).flat_map(|row| vec![row; of_row]).collect::<Vec<u32>>());
}

#[test]
fn outputs_of_a_stage_are_returned_once() {
    let ask = |sizes: Sizes, stage: u32| {
        let [inputs, targets] = [3, 103].map(|seed| split(batch(seed, MICROBATCHES), MICROBATCHES));
        let batch = Batch::new(inputs, targets).keep_outputs_of([StageIndex::new(stage)]);
        launch("1f1b", sizes).step_batch(batch, 0.0)
    };
    let outputs = |sizes| {
        let kept =
            ask(sizes, 0).expect("a step").stage_outputs.remove(&StageIndex::new(0)).expect("asked for");
        assert_eq!(kept.len(), MICROBATCHES as usize, "{sizes:?}");
        let whole = kept.into_iter().map(|values| unpack::<Tensor<2>>(values).expect("rows"));
        Tensor::cat(whole.collect(), 0).into_data()
    };
    let expected = outputs(sizes(2, 1, 1));
    outputs(sizes(2, 1, 2)).assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::relative(1e-5));
}

//! Running statistics, and buffers that are not floats, come back.

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use pipewright::batch::Batch;
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::{DEADLINE, MICROBATCHES, adamw, folder, newest, parameters, state, take_steps};
use crate::support::{self, Mlp, batch, config, ending_in_loss, program};

/// Layers with a running statistic, and with buffers that are not floats.
#[derive(Module, Debug)]
struct Buffers {
    norm: BatchNorm,
    layers: Mlp,
    order: Param<Tensor<1, Int>>,
    mask: Param<Tensor<2, Bool>>,
}

impl StageModule for Buffers {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let input = input.select(1, self.order.val());
        let input = input.clone().mask_fill(self.mask.val().expand(input.dims()), 0.0);
        self.layers.forward(self.norm.forward(input), context)
    }

    fn parameter_path(&self, local: &str) -> String {
        match local.strip_prefix("layers.") {
            Some(layer) => self.layers.parameter_path(layer),
            None => format!("{local}.{}", self.layers.parameter_path("layers.0.place")),
        }
    }
}

/// Launches two stages of such layers, with buffers that depend on `seed`.
fn with_buffers(seed: i32, replicas: u32, mode: DataParallelMode) -> Pipeline {
    launch(seed, MICROBATCHES / replicas, replicas, mode)
}

/// Makes a pipeline like [`with_buffers`], with this number of microbatches of each replica.
fn launch(seed: i32, microbatches: u32, replicas: u32, mode: DataParallelMode) -> Pipeline {
    let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let device = Device::flex().autodiff();
        let width = support::WIDTH as i32;
        let order: Vec<i32> = (0..width).map(|place| (place + seed) % width).collect();
        let mask: Vec<bool> = (0..width).map(|place| place == seed).collect();
        let module = Buffers {
            norm: BatchNormConfig::new(support::WIDTH).init(&device),
            layers: Mlp::of_stage(index, 2),
            order: Param::initialized(ParamId::new(), Tensor::from_data(TensorData::from(&*order), &device)),
            mask: Param::initialized(
                ParamId::new(),
                Tensor::<1, Bool>::from_data(TensorData::from(&*mask), &device).unsqueeze(),
            ),
        };
        ending_in_loss(index.get() == 1, module)
    };
    let config = PipelineConfig {
        optimizer: Some(adamw()),
        data_parallel: replicas,
        data_parallel_mode: mode,
        ..config()
    };
    let program = program("1f1b", 2, microbatches);
    Pipeline::launch(program, World::local(2 * replicas), &config, make).expect("it starts")
}

const MESHES: [(u32, DataParallelMode); 4] = [
    (1, DataParallelMode::Replicated),
    (2, DataParallelMode::Replicated),
    (2, DataParallelMode::Sharded),
    (4, DataParallelMode::Hybrid { shards: 2 }),
];

#[test]
fn buffers_of_every_kind_come_back() {
    for (replicas, mode) in MESHES {
        // The replicas that hold all parameters together write them.
        let writers = match mode {
            DataParallelMode::Replicated => 2,
            _ => 4,
        };
        let scratch = folder();
        let mut before = with_buffers(1, replicas, mode);
        take_steps(&mut before, 0..3);
        let folder = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
        let mut writer = CheckpointWriter::start(folder, 1, writers, DEADLINE).expect("a thread");
        writer.save(state(&mut before, 3)).and_then(|_| writer.wait()).expect("it is saved");
        let mut after = with_buffers(4, replicas, mode);
        let evaluate = |pipeline: &mut Pipeline| {
            let evaluated = pipeline.eval(batch(9, MICROBATCHES), Some(batch(10, MICROBATCHES)));
            evaluated.expect("an evaluation").losses
        };
        assert_ne!(evaluate(&mut after), evaluate(&mut before), "the buffers differ");
        after.restore(&newest(scratch.path())).expect("it fits");
        assert_eq!(evaluate(&mut after), evaluate(&mut before), "running statistics and buffers");
        assert_eq!(take_steps(&mut after, 3..5), take_steps(&mut before, 3..5));
    }
}

#[test]
fn a_failed_step_leaves_running_statistics_as_they_were() {
    for (replicas, mode) in [(1, DataParallelMode::Replicated), (2, DataParallelMode::Sharded)] {
        let mut pipeline = with_buffers(1, replicas, mode);
        take_steps(&mut pipeline, 0..2);
        let before = parameters(&mut pipeline);
        let wrong = batch(110, MICROBATCHES).mul_scalar(f32::NAN);
        let refused = pipeline.step(batch(10, MICROBATCHES), wrong, 1e-2).expect_err("the targets are NaN");
        assert!(refused.to_string().contains("the parameters are still those before this step"), "{refused}");
        assert_eq!(parameters(&mut pipeline), before);
        take_steps(&mut pipeline, 2..3);
        assert_ne!(parameters(&mut pipeline), before, "the next step changes them");
    }
}

/// Returns the losses of the same data on each replica.
fn evaluate_on_each(pipeline: &mut Pipeline, replicas: u32) -> Vec<Vec<f64>> {
    let own = MICROBATCHES / replicas;
    let same = |seed| Tensor::cat(vec![batch(seed, own); replicas as usize], 0);
    let losses = pipeline.eval(same(9), Some(same(10))).expect("an evaluation").losses;
    losses.chunks(own as usize).map(<[f64]>::to_vec).collect()
}

/// Returns the running means and variances of a pipeline.
fn statistics(pipeline: &mut Pipeline) -> Vec<Vec<f32>> {
    let means = |norm: &BatchNorm| [norm.running_mean.value_sync(), norm.running_var.value_sync()];
    let buffers_of = |pipeline: &mut Pipeline, stage| {
        pipeline
            .module(StageIndex::new(stage), move |module: &Buffers| means(&module.norm))
            .expect("it exists")
    };
    let all = [buffers_of(pipeline, 0), buffers_of(pipeline, 1)].into_iter().flatten().flatten();
    all.map(|values| values.into_data().iter().collect()).collect()
}

#[test]
fn replicas_have_the_mean_of_their_running_statistics() {
    for (replicas, mode) in MESHES {
        let mut pipeline = with_buffers(1, replicas, mode);
        let fresh = statistics(&mut pipeline);
        take_steps(&mut pipeline, 0..2);
        let losses = evaluate_on_each(&mut pipeline, replicas);
        assert!(losses.iter().all(|of_replica| *of_replica == losses[0]), "{replicas} {mode:?}: {losses:?}");
        let batch = Batch::split(batch(3, MICROBATCHES), batch(4, MICROBATCHES), MICROBATCHES);
        pipeline.accumulate(batch.expect("it divides")).expect("a batch");
        let losses = evaluate_on_each(&mut pipeline, replicas);
        assert!(losses.iter().all(|of_replica| *of_replica == losses[0]), "also before the update");
        assert_ne!(statistics(&mut pipeline), fresh);
    }
}

#[test]
fn the_mean_is_that_of_pipelines_alone() {
    let rows = support::ROWS * MICROBATCHES as usize;
    let of = |replicas, rows: std::ops::Range<usize>| {
        let mut pipeline = launch(1, MICROBATCHES / 2, replicas, DataParallelMode::Replicated);
        let part = |seed| batch(seed, MICROBATCHES).slice_dim(0, rows.clone());
        pipeline.step(part(0), part(1), 1e-2).expect("a step");
        statistics(&mut pipeline)
    };
    let both = of(2, 0..rows);
    let (first, second) = (of(1, 0..rows / 2), of(1, rows / 2..rows));
    for ((mean, first), second) in both.iter().zip(&first).zip(&second) {
        let expected: Vec<f32> = first.iter().zip(second).map(|(a, b)| (a + b) * 0.5).collect();
        assert_eq!(*mean, expected);
    }
}

#[test]
fn a_failed_batch_undoes_the_statistics_of_all_batches_of_its_step() {
    let mut pipeline = with_buffers(1, 1, DataParallelMode::Replicated);
    take_steps(&mut pipeline, 0..2);
    let before = parameters(&mut pipeline);
    for seed in [20, 30] {
        let rows = Batch::split(batch(seed, MICROBATCHES), batch(seed + 1, MICROBATCHES), MICROBATCHES);
        pipeline.accumulate(rows.expect("it splits")).expect("a batch");
    }
    let wrong = batch(110, MICROBATCHES).mul_scalar(f32::NAN);
    pipeline.step(batch(10, MICROBATCHES), wrong, 1e-2).expect_err("the targets are NaN");
    assert_eq!(parameters(&mut pipeline), before);
}

#[test]
fn a_restore_keeps_the_statistics_that_its_checkpoint_does_not_have() {
    let scratch = folder();
    // To read the parameters of a pipeline would end what it remembers of its last step.
    let [mut pipeline, mut twin] = [1; 2].map(|seed| with_buffers(seed, 1, DataParallelMode::Replicated));
    let mut without = super::launch("1f1b", 2, adamw());
    super::save(&mut without, 3, scratch.path(), 1).expect("it is saved");
    assert_eq!(take_steps(&mut pipeline, 0..2), take_steps(&mut twin, 0..2));
    let statistics = |pipeline: &mut Pipeline| {
        let all = parameters(pipeline).into_iter();
        all.filter(|(path, ..)| path.contains("running")).collect::<Vec<_>>()
    };
    let before = statistics(&mut twin);
    pipeline.restore_matching(&newest(scratch.path())).expect("it fits");
    assert!(!before.is_empty());
    assert_eq!(statistics(&mut pipeline), before);
}

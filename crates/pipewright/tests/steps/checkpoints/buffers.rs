//! Running statistics, and buffers that are not floats, come back.

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::{DEADLINE, MICROBATCHES, adamw, folder, newest, parameters, state, take_steps};
use crate::support::{self, Mlp, batch, config, loss, program};

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
        Ok(if index.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) })
    };
    let config = PipelineConfig {
        optimizer: Some(adamw()),
        data_parallel: replicas,
        data_parallel_mode: mode,
        ..config()
    };
    let program = program("1f1b", 2, MICROBATCHES / replicas);
    Pipeline::launch(program, World::local(2 * replicas), &config, make).expect("it starts")
}

#[test]
fn buffers_of_every_kind_come_back() {
    for (replicas, mode) in [(1, DataParallelMode::Replicated), (2, DataParallelMode::Sharded)] {
        let scratch = folder();
        let mut before = with_buffers(1, replicas, mode);
        take_steps(&mut before, 0..3);
        let folder = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
        let mut writer = CheckpointWriter::start(folder, 1, 2 * replicas, DEADLINE).expect("a thread");
        writer.save(state(&mut before, 3)).and_then(|_| writer.wait()).expect("it is saved");
        let mut after = with_buffers(4, replicas, mode);
        let evaluate = |pipeline: &mut Pipeline| {
            let evaluated = pipeline.eval(batch(9, MICROBATCHES), Some(batch(10, MICROBATCHES)));
            // Each replica has running statistics of its own, and the first one's are stored.
            let own = (MICROBATCHES / replicas) as usize;
            evaluated.expect("an evaluation").losses[..own].to_vec()
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

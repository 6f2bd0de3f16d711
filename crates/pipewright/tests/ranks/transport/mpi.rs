//! The conformance suite over MPI: this program starts itself under `mpirun`, with 1 to 8 processes.

mod batches;
mod checks;
mod clocks;
mod linear;
mod other_version;
#[path = "../../mpirun/mod.rs"]
mod mpirun;
mod posted;
mod sends;
mod synchronous;
mod worlds;

use std::process::ExitCode;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{Metadata, TensorSpec};
use pipewright::transport::World;
use pipewright_schedule::{
    Level, LowerConfig, ScheduleSpec, StageIndex, ValidatedProgram, generate, lower, validate,
};

use checks::{CHECKS, STEPS, barrier};

fn main() -> ExitCode {
    let checks = (1..=8).map(|processes| (processes, CONFORMS));
    let others = [(2, EQUAL_PATHS), (2, METADATA), (2, CLOCKS), (4, CLOCKS), (2, UNBOUNDED), (2, BOUNDED)];
    let posted = [(2, PARTS), (2, REUSED), (2, TRAINED), (2, LONGER), (2, LONGER_FRAME), (2, OTHER_FORMAT)];
    let worlds = [(4, HALVES), (2, NO_WORLDS)];
    let synchronous = (2..=8).map(|processes| (processes, SYNCHRONOUS)).chain([(2, SYNCHRONOUS_SEND)]);
    let tasks: Vec<_> = checks.chain(others).chain(posted).chain(worlds).chain(synchronous).collect();
    mpirun::run(&tasks, |task| match task {
        EQUAL_PATHS => refuse_equal_paths(),
        METADATA => vote_on_metadata(),
        CLOCKS => clocks::compare_clocks(),
        UNBOUNDED => sends::count_sends(None),
        BOUNDED => sends::count_sends(Some(2)),
        PARTS => batches::train_on_parts(),
        REUSED => posted::reuse_buffers(),
        TRAINED => posted::train(),
        LONGER => posted::refuse_longer(),
        LONGER_FRAME => other_version::refuse_longer_frame(),
        OTHER_FORMAT => other_version::refuse_other_format(),
        HALVES => worlds::train_in_halves(),
        NO_WORLDS => worlds::refuse_worlds(),
        SYNCHRONOUS => synchronous::train(),
        SYNCHRONOUS_SEND => sends::wait_for_synchronous_send(),
        _ => run_checks(),
    })
}

const CONFORMS: &str = "conforms";
const EQUAL_PATHS: &str = "equal paths";
const METADATA: &str = "metadata";
const CLOCKS: &str = "clocks";
const UNBOUNDED: &str = "sends without waits";
const BOUNDED: &str = "at most two sends";
const PARTS: &str = "parts of a batch";
const REUSED: &str = "posted receives";
const TRAINED: &str = "training with posted receives";
const LONGER: &str = "longer than its receive";
const LONGER_FRAME: &str = "a frame longer than its receive";
const OTHER_FORMAT: &str = "a frame of another format";
const HALVES: &str = "halves";
const SYNCHRONOUS: &str = "synchronous programs";
const SYNCHRONOUS_SEND: &str = "synchronous small send";
const NO_WORLDS: &str = "lists that are not a world";

/// A stage that does not know its place in the model.
#[derive(Module, Debug)]
struct Unnamed {
    linear: Linear,
}

impl StageModule for Unnamed {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }
}

/// Two stages on two ranks.
fn two_ranks() -> ValidatedProgram {
    let spec = ScheduleSpec { ranks: 2, microbatches: 2, ..ScheduleSpec::default() };
    let program = lower(&generate("gpipe", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
    validate(program.expect("it lowers"), Level::Comms).expect("it is sound")
}

/// The second process knows the inputs of stage 1, as no stage has them. The first process, which sends them,
/// learns of it before the start.
fn vote_on_metadata() {
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let is_first = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Unnamed { linear: LinearConfig::new(2, 2).init(&Device::flex().autodiff()) };
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        let made = if stage.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) };
        Ok(made.with_prefix(&format!("stages.{stage}")))
    };
    let metadata = if is_first {
        Metadata::default()
    } else {
        Metadata::Static { stages: vec![vec![TensorSpec::of_rows(DType::F32, [3])]] }
    };
    let optimizer = Some(AdamWConfig::new().init());
    let config = PipelineConfig { optimizer, metadata, ..PipelineConfig::default() };
    let mut pipeline = Pipeline::launch(two_ranks(), world, &config, make).expect("they agree");
    let data = Tensor::<2>::ones([2, 2], &Device::flex());
    let error = pipeline.step(data.clone(), data, 0.1).map(drop).expect_err("the width differs");
    let expected = "rank 0, stage 0, microbatch 0, action 0F0: microbatch 0: tensor 0 differs: stage 0 on rank 0 sent F32 \
                    [1, 2], stage 1 on rank 1 expects F32 [_, 3]";
    assert!(error.to_string().contains(expected), "{error}");
    if is_first {
        mpirun::report("both processes have the metadata of one");
    }
}

/// Two processes with parameters of one path: neither starts, and each returns the reason.
fn refuse_equal_paths() {
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let is_first = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    let program = two_ranks();
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Unnamed { linear: LinearConfig::new(2, 2).init(&Device::flex().autodiff()) };
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        Ok(if stage.get() == 1 { Stage::with_loss(module, loss) } else { Stage::new(module) })
    };
    let config = PipelineConfig { optimizer: Some(AdamWConfig::new().init()), ..PipelineConfig::default() };
    let refused = Pipeline::launch(program, world, &config, make).err().expect("the paths are equal");
    let expected =
        "stages 0 and 1 each have a parameter `linear.bias`, and stage 0 does not declare it as shared";
    assert!(refused.to_string().contains(expected), "{refused}");
    if is_first {
        mpirun::report("equal paths in two processes are refused");
    }
}

fn run_checks() {
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let mut end = world.into_endpoints().pop().expect("a process has a rank");
    for (number, (name, check)) in (0..).zip(CHECKS) {
        let first_step = 1 + number * STEPS;
        check(&mut end, first_step);
        if end.abort().first().is_none() {
            end.begin_step(first_step + STEPS - 1);
            barrier(&mut end, 0);
        }
        if end.rank().get() == 0 {
            mpirun::report(&format!("{name}, {} processes", end.ranks()));
        }
    }
    assert!(World::mpi(Duration::from_secs(1)).is_err(), "a process joins MPI once");
}

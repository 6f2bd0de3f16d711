//! Verified steps of replicas that hold experts together: wrong bits of an expert name the rank that has it,
//! also if they are in the results of another replica's tokens.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode::{self, Hybrid, Replicated, Sharded};
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule, WeightWork};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright::verification::{FIRST_NORMS, Suspicion, Verification, Verify};
use pipewright_schedule::{Action, StageIndex};

use super::experts::{INNER, Layer, Mixtures};
use super::model::{config_of, sizes};
use crate::support::{LAYERS, WIDTH, batch, loss, program};

/// The experts of a layer.
const EXPERTS: usize = 4;
const RANKS: u32 = 2;
/// The microbatches of a replica.
const MICROBATCHES: u32 = 2;
/// The steps before the suspicious one.
const STEPS: u64 = FIRST_NORMS as u64 + 1;

/// The replicas of a pipeline of two ranks.
#[derive(Clone, Copy, Debug)]
struct Mesh {
    replicas: u32,
    mode: DataParallelMode,
    experts: u32,
}

const fn replicated(replicas: u32, experts: u32) -> Mesh {
    Mesh { replicas, mode: Replicated, experts }
}

/// A rank whose experts compute wrong numbers in microbatch 1, in the next computations.
#[derive(Clone, Debug)]
struct Fault {
    rank: u32,
    left: Arc<AtomicU32>,
}

impl Fault {
    fn none() -> Self {
        Self::of(0)
    }

    fn of(rank: u32) -> Self {
        Self { rank, left: Arc::default() }
    }

    fn take(&self) -> bool {
        let take = |left: u32| left.checked_sub(1);
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }
}

/// Mixtures of a rank that may be wrong.
#[derive(Module, Debug)]
struct Faulty {
    mixtures: Mixtures,
    #[module(skip)]
    fault: Option<Fault>,
}

impl StageModule for Faulty {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let is_second = context.microbatch().get() == 1;
        if self.fault.as_ref().filter(|_| is_second).is_some_and(Fault::take) {
            let wrong = |layer: Layer| layer.with_experts_times(64.0);
            let layers = self.mixtures.layers.iter().cloned().map(wrong).collect();
            return Mixtures { layers, ..self.mixtures.clone() }.forward(input, context);
        }
        self.mixtures.forward(input, context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.mixtures.parameter_path(local.strip_prefix("mixtures.").expect("a mixture"))
    }

    fn placement(&self, local: &str) -> Placement {
        self.mixtures.placement(local)
    }
}

/// Adds a wrong gradient of an expert's weights on a rank, in the next computations.
struct WrongGradient {
    fault: Fault,
    path: &'static str,
}

impl ActionHook for WrongGradient {
    fn weights(&self, rank: WorldRank, action: Action, work: &mut WeightWork<'_>) {
        let is_second = action.microbatch().is_some_and(|number| number.get() == 1);
        if rank.get() == self.fault.rank && is_second && self.fault.take() {
            let wrong = Tensor::<2>::full([INNER, WIDTH], 1e4, &burn::tensor::Device::flex());
            work.add(self.path, wrong).expect("the rank has the expert");
        }
    }
}

fn launch(mesh: Mesh, verify: Verify, fault: &Fault, hook: Option<Arc<dyn ActionHook>>) -> Pipeline {
    let Mesh { replicas, mode, experts } = mesh;
    let program = program("1f1b", RANKS, MICROBATCHES);
    let config = PipelineConfig {
        verify,
        hook,
        expert_parallel: experts,
        data_parallel_mode: mode,
        ..config_of(sizes(RANKS, replicas, 1))
    };
    let fault = fault.clone();
    let make = move |stage: StageIndex, tensor: &TensorParallel| {
        let count = LAYERS / RANKS as usize;
        let first = stage.index() * count;
        let layers = (first..first + count).map(|layer| Layer::new(layer, EXPERTS, tensor.experts(EXPERTS)));
        let placement = if experts > 1 { Placement::ON_ONE_REPLICA } else { Placement::REPLICATED };
        let mixtures = Mixtures { layers: layers.collect(), first, tensor: tensor.clone(), placement };
        // Each rank makes its stages on its own thread.
        let is_faulty = thread::current().name() == Some(&format!("rank-{}", fault.rank));
        let module = Faulty { mixtures, fault: is_faulty.then(|| fault.clone()) };
        Ok::<_, Infallible>(if stage.get() + 1 == RANKS {
            Stage::with_loss(module, loss)
        } else {
            Stage::new(module)
        })
    };
    Pipeline::launch_split(program, World::local(RANKS * replicas), &config, make).expect("it starts")
}

/// The losses and the norm of each step, and the parameters, as bits.
type Bits = (Vec<Vec<u64>>, Vec<(String, Vec<u32>)>);

/// Trains some steps. The last but one is the suspicious one: `before` is called before it, and its inputs are
/// multiplied by `factor`.
fn train(mut pipeline: Pipeline, factor: f64, before: impl Fn()) -> (Bits, Vec<Verification>) {
    let (mut bits, mut found) = (Vec::new(), Vec::new());
    for number in 0..STEPS + 2 {
        let is_suspicious = number == STEPS;
        if is_suspicious {
            before();
        }
        let factor = if is_suspicious { factor } else { 1.0 };
        let microbatches = pipeline.microbatches();
        let input = batch(number, microbatches).mul_scalar(factor);
        let summary = pipeline.step(input, batch(100 + number, microbatches), 1e-2).expect("a step");
        let numbers = summary.losses.iter().chain([&summary.gradient_norm]);
        bits.push(numbers.map(|number| number.to_bits()).collect());
        if let Some(verification) = summary.verification {
            assert!(is_suspicious, "step {number}: {verification:?}");
            found.push(verification);
        }
    }
    let parameters = pipeline.parameters().expect("all ranks answer").into_iter();
    let parameters = parameters.map(|parameter| {
        let bits = parameter.data.iter::<f32>().map(f32::to_bits).collect();
        (parameter.path.to_string(), bits)
    });
    ((bits, parameters.collect()), found)
}

/// Checks that a run in which a rank was wrong in one computation has the bits of a run without the fault, and
/// that the rank is named.
fn check_named(mesh: Mesh, fault: &Fault, pipeline: Pipeline, action: &str) {
    let what = format!("{mesh:?}, rank {}", fault.rank);
    let (right, none) = train(launch(mesh, Verify::Off, &Fault::none(), None), 1.0, || ());
    assert!(none.is_empty(), "{what}: {none:?}");
    let (found, verified) = train(pipeline, 1.0, || fault.left.store(1, Ordering::SeqCst));
    let [verification] = &verified[..] else { panic!("{what}: {verified:?}") };
    let difference = verification.difference.as_ref().expect(&what);
    assert_eq!(difference.wrong, [WorldRank::new(fault.rank)], "{what}: {difference}");
    assert_eq!(difference.action().as_deref(), Some(action), "{what}: {difference}");
    assert_eq!((verification.repetitions, verification.is_reproduced), (2, false), "{what}");
    assert!(found == right, "{what}: other bits than without the fault");
}

/// The tokens of all replicas of the group reach the wrong experts. The first replica's result is the first one
/// that differs, but it has been computed from what the wrong rank has sent.
#[test]
fn wrong_experts_name_the_rank_that_holds_them() {
    for (mesh, rank) in [
        (replicated(2, 2), 2),
        (replicated(4, 2), 3),
        (replicated(4, 2), 6),
        (replicated(6, 2), 3),
        (Mesh { mode: Sharded, ..replicated(4, 2) }, 3),
        (Mesh { mode: Hybrid { shards: 2 }, ..replicated(4, 2) }, 2),
        (Mesh { mode: Hybrid { shards: 2 }, ..replicated(4, 4) }, 7),
    ] {
        let fault = Fault::of(rank);
        let pipeline = launch(mesh, Verify::OnSuspicion, &fault, None);
        check_named(mesh, &fault, pipeline, &format!("{}F1", rank % RANKS));
    }
}

#[test]
fn a_wrong_gradient_of_an_expert_names_its_rank() {
    for (mesh, rank, path) in [
        (replicated(2, 2), 3, "layers.4.experts.2.down_proj.weight"),
        (replicated(4, 2), 4, "layers.0.experts.0.down_proj.weight"),
    ] {
        let fault = Fault::of(rank);
        let hook = WrongGradient { fault: fault.clone(), path };
        // No module is wrong.
        let pipeline = launch(mesh, Verify::OnSuspicion, &Fault::none(), Some(Arc::new(hook)));
        check_named(mesh, &fault, pipeline, &format!("{}W", rank % RANKS));
    }
}

#[test]
fn a_genuine_jump_goes_on_with_the_same_bits() {
    for mesh in [
        replicated(2, 2),
        replicated(4, 2),
        replicated(6, 2),
        Mesh { mode: Sharded, ..replicated(4, 2) },
        Mesh { mode: Hybrid { shards: 2 }, ..replicated(4, 4) },
    ] {
        let run = |verify| train(launch(mesh, verify, &Fault::none(), None), 10.0, || ());
        let ((right, _), (found, verified)) = (run(Verify::Off), run(Verify::OnSuspicion));
        let [Verification { suspicion: Suspicion::Jump { .. }, repetitions, difference, is_reproduced }] =
            &verified[..]
        else {
            panic!("{mesh:?}: {verified:?}")
        };
        assert_eq!((*repetitions, difference, *is_reproduced), (1, &None, true), "{mesh:?}");
        assert!(found == right, "{mesh:?}: other bits than without verification");
    }
}

//! Verified steps of replicas that hold experts together: wrong bits of an expert name the rank that has it,
//! also if they are in the results of another replica's tokens.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode::{self, Hybrid, Replicated, Sharded};
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule, WeightWork};
use pipewright::tensor::Placement;
use pipewright::transport::World;
use pipewright::verification::Verify;
use pipewright_schedule::csv::parse_schedule;
use pipewright_schedule::{Action, Microbatch, Recompute, StageIndex, ValidatedProgram};

use super::expert_overlaps::{self, lowered};
use super::experts::{INNER, Layer, Mixtures};
use super::model::{config_of, sizes};
use crate::support::{LAYERS, WIDTH, loss, program};
use crate::verification::{Bits, assert_genuine, assert_named, step, train};

/// The experts of a layer.
const EXPERTS: usize = 4;
/// The matrices of an expert.
const MATRICES: usize = 3;
const RANKS: u32 = 2;
/// The microbatches of a replica.
const MICROBATCHES: u32 = 2;

/// A schedule in which a stage overlaps with itself.
const WITH_ITSELF: &str = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n";

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

/// A fault of a rank in some of its computations of a stage and a microbatch.
#[derive(Clone, Debug)]
struct Fault {
    rank: u32,
    stage: u32,
    microbatch: u32,
    /// The number of wrong computations.
    times: u32,
    /// The number of the last one, counted from the next one as 1; 0 if none follows.
    last: Arc<AtomicU32>,
}

impl Fault {
    /// Returns a fault in microbatch 1 of a rank with one stage.
    fn of(rank: u32) -> Self {
        Self { rank, stage: rank % RANKS, microbatch: 1, times: 1, last: Arc::default() }
    }

    /// Returns whether the fault is in this computation of its microbatch.
    fn take(&self) -> bool {
        let take = |left: u32| left.checked_sub(1);
        let left = self.last.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        left.is_ok_and(|left| left <= self.times)
    }
}

/// Mixtures whose experts are wrong in the computation of a fault.
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
        let own = [context.stage().get(), context.microbatch().get()];
        let fault = self.fault.as_ref().filter(|fault| own == [fault.stage, fault.microbatch]);
        if fault.is_some_and(Fault::take) {
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

/// Computes wrong weight gradients in the computation of a fault.
struct WrongGradient<W> {
    fault: Fault,
    wrong: W,
}

impl<W: Fn(&mut WeightWork<'_>) + Send + Sync> ActionHook for WrongGradient<W> {
    fn weights(&self, rank: WorldRank, action: Action, work: &mut WeightWork<'_>) {
        let microbatch = action.microbatch().map(Microbatch::get);
        if rank.get() == self.fault.rank && microbatch == Some(self.fault.microbatch) && self.fault.take() {
            (self.wrong)(work);
        }
    }
}

/// Runs the halves of overlaps together.
struct Together;

impl ActionHook for Together {
    fn runs_overlaps(&self) -> bool {
        true
    }
}

/// A run whose rank may be wrong.
#[derive(Clone)]
struct Run {
    mesh: Mesh,
    schedule: &'static str,
    recompute: Recompute,
    hook: Option<Arc<dyn ActionHook>>,
    /// The rank whose forwards may be wrong.
    fault: Option<Fault>,
    /// The rank whose experts have other parameters than in other replicas.
    other_parameters: Option<u32>,
}

impl Run {
    fn new(mesh: Mesh) -> Self {
        let (hook, fault, other_parameters) = (None, None, None);
        Self { mesh, schedule: "1f1b", recompute: Recompute::None, hook, fault, other_parameters }
    }

    fn config(&self, verify: Verify) -> PipelineConfig {
        let Mesh { replicas, mode, experts } = self.mesh;
        PipelineConfig {
            verify,
            hook: self.hook.clone(),
            recompute: self.recompute.clone(),
            expert_parallel: experts,
            data_parallel_mode: mode,
            ..config_of(sizes(RANKS, replicas, 1))
        }
    }

    fn program(&self) -> ValidatedProgram {
        let (sizes, config) = (sizes(RANKS, self.mesh.replicas, 1), self.config(Verify::Off));
        match self.schedule {
            "dualpipev" => expert_overlaps::program(sizes, &config),
            WITH_ITSELF => lowered(&parse_schedule(WITH_ITSELF).expect("a schedule"), sizes, &config),
            schedule => program(schedule, RANKS, MICROBATCHES),
        }
    }

    fn launch(&self, verify: Verify) -> Pipeline {
        let (program, experts) = (self.program(), self.mesh.experts);
        let (stages, world) = (program.placement().stages(), World::local(RANKS * self.mesh.replicas));
        let (fault, other_parameters) = (self.fault.clone(), self.other_parameters);
        let make = move |stage: StageIndex, tensor: &TensorParallel| {
            // Each rank makes its stages on its own thread.
            let is_on = |rank: u32| thread::current().name() == Some(&format!("rank-{rank}"));
            let factor = if other_parameters.is_some_and(is_on) { 1.5 } else { 1.0 };
            let count = LAYERS / stages as usize;
            let first = stage.index() * count;
            let layer =
                |index| Layer::new(index, EXPERTS, tensor.experts(EXPERTS)).with_experts_times(factor);
            let layers = (first..first + count).map(layer).collect();
            let placement = if experts > 1 { Placement::ON_ONE_REPLICA } else { Placement::REPLICATED };
            let mixtures = Mixtures { layers, first, tensor: tensor.clone(), placement };
            let module = Faulty { mixtures, fault: fault.clone().filter(|fault| is_on(fault.rank)) };
            Ok::<_, Infallible>(if stage.get() + 1 == stages {
                Stage::with_loss(module, loss)
            } else {
                Stage::new(module)
            })
        };
        Pipeline::launch_split(program, world, &self.config(verify), make).expect("it starts")
    }
}

/// Checks that a run whose rank is wrong until the computation with the number `last` has the bits of a run
/// without the fault, and that the rank is named. The inputs of the step are multiplied by `factor`.
fn check_named(
    run: &Run,
    (fault, last): (&Fault, u32),
    (batches, factor): (u64, f64),
    expected: (&str, u32),
) {
    let what = format!("{:?}, {}, rank {}, {expected:?}", run.mesh, run.schedule, fault.rank);
    let right = Run { fault: None, ..run.clone() }.launch(Verify::Off);
    let (right, none) = train(right, batches, factor, || ());
    assert!(none.is_empty(), "{what}: {none:?}");
    let pipeline = run.launch(Verify::OnSuspicion);
    let found = train(pipeline, batches, factor, || fault.last.store(last, Ordering::SeqCst));
    // With a factor, the step is suspicious without the fault too.
    assert_named(&what, &found, &right, fault.rank, (expected.0, expected.1, factor > 1.0));
}

/// Checks that wrong experts in a computation of a stage and a microbatch name their rank.
fn check_forward(run: Run, fault: Fault, last: u32, batches: u64, expected: (&str, u32)) {
    let run = Run { fault: Some(fault.clone()), ..run };
    check_named(&run, (&fault, last), (batches, 1.0), expected);
}

/// The tokens of all replicas of the group reach the wrong experts. The first replica's result is the first
/// one that differs, but it has been computed from what the wrong rank has sent.
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
        check_forward(Run::new(mesh), Fault::of(rank), 1, 1, (&format!("{}F1", rank % RANKS), 2));
    }
}

/// A rank is wrong in two computations. Another expert group computes the same microbatches between them.
#[test]
fn wrong_experts_that_a_rank_computes_twice_are_found_in_another_group() {
    for mesh in [
        replicated(4, 2),
        Mesh { mode: Sharded, ..replicated(4, 2) },
        Mesh { mode: Hybrid { shards: 2 }, ..replicated(4, 2) },
    ] {
        let fault = Fault { times: 2, ..Fault::of(3) };
        check_forward(Run::new(mesh), fault, 2, 1, ("1F1", 3));
    }
}

/// The second batch is wrong.
#[test]
fn wrong_experts_in_accumulated_batches_name_the_rank_that_holds_them() {
    check_forward(Run::new(replicated(4, 2)), Fault::of(6), 2, 2, ("0F1", 2));
}

/// The backward of the wrong rank computes its forward again, and sends other rows than the first time. The
/// first replica's gradients depend on them, and are the first ones that differ. The last stage computes no
/// forward again whose backward follows at once.
#[test]
fn wrong_experts_in_a_recomputed_forward_name_the_rank_that_holds_them() {
    for (schedule, letter, mesh, rank) in [
        ("1f1b", 'B', replicated(2, 2), 2),
        ("zbh1", 'I', replicated(2, 2), 2),
        ("1f1b", 'B', Mesh { mode: Sharded, ..replicated(4, 2) }, 6),
    ] {
        let run = Run { schedule, recompute: Recompute::Stage, ..Run::new(mesh) };
        check_forward(run, Fault::of(rank), 2, 1, (&format!("0{letter}1"), 2));
    }
}

/// The rank computes the forward of the backward again before it runs the forward of the overlap.
#[test]
fn wrong_experts_in_an_overlap_of_a_stage_with_itself_name_the_backward() {
    let run = Run { schedule: WITH_ITSELF, recompute: Recompute::Stage, ..Run::new(replicated(2, 2)) };
    check_forward(run, Fault { microbatch: 0, ..Fault::of(2) }, 2, 1, ("0B0", 2));
}

/// The exchanges of the backward in an overlap are results of the backward, with a hook and without one.
#[test]
fn wrong_experts_in_an_overlap_name_the_action_that_is_wrong() {
    for hook in [None, Some(Arc::new(Together) as Arc<dyn ActionHook>)] {
        let run =
            Run { schedule: "dualpipev", recompute: Recompute::Stage, hook, ..Run::new(replicated(2, 2)) };
        let program = run.program();
        let last = StageIndex::new(2 * RANKS - 1);
        let rank = program.placement().rank_of(last);
        let overlaps = program.row(rank).iter().filter(|action| matches!(action, Action::Overlap(_)));
        let mut backwards = overlaps.filter_map(|overlap| overlap.parts().nth(1));
        let backward = backwards.find(|backward| backward.stage() == last).expect("an overlap");
        let microbatch = backward.microbatch().expect("a backward has one").get();
        let fault = Fault { stage: last.get(), microbatch, ..Fault::of(RANKS + rank.get()) };
        check_forward(run, fault, 2, 1, (&backward.to_string(), 2));
    }
}

#[test]
fn a_wrong_gradient_of_an_expert_names_its_rank() {
    fn of_expert(work: &mut WeightWork<'_>, path: &str) {
        let wrong = Tensor::<2>::full([INNER, WIDTH], 1e4, &Device::flex());
        work.add(path, wrong).expect("the rank has the expert");
    }
    /// Leaves out the gradients of some products. The inputs make the step suspicious.
    fn without_some(work: &mut WeightWork<'_>) {
        for _ in 0..3 {
            assert!(work.run_next(), "a product");
        }
        for _ in 0..3 {
            assert!(work.skip_next(), "another product");
        }
    }
    let last: fn(&mut WeightWork<'_>) = |work| of_expert(work, "layers.4.experts.2.down_proj.weight");
    let first: fn(&mut WeightWork<'_>) = |work| of_expert(work, "layers.0.experts.0.down_proj.weight");
    for (mesh, rank, wrong, factor) in [
        (replicated(2, 2), 3, last, 1.0),
        (replicated(4, 2), 4, first, 1.0),
        (Mesh { mode: Sharded, ..replicated(4, 2) }, 4, first, 1.0),
        (replicated(2, 2), 2, without_some, 10.0),
    ] {
        let fault = Fault::of(rank);
        let hook: Arc<dyn ActionHook> = Arc::new(WrongGradient { fault: fault.clone(), wrong });
        let run = Run { hook: Some(hook), ..Run::new(mesh) };
        check_named(&run, (&fault, 1), (1, factor), (&format!("{}W", rank % RANKS), 2));
    }
}

/// Returns the action that is named if the products of a group of rows of a rank's last layer are left out. The
/// inputs make the step suspicious.
fn named_without(group: usize, right: &Bits) -> Option<String> {
    let fault = Fault::of(2);
    let wrong = move |work: &mut WeightWork<'_>| {
        for _ in 0..MATRICES * group {
            assert!(work.run_next(), "a product of an earlier group");
        }
        for _ in 0..MATRICES {
            assert!(work.skip_next(), "a product of the group");
        }
    };
    let hook: Arc<dyn ActionHook> = Arc::new(WrongGradient { fault: fault.clone(), wrong });
    let run = Run { hook: Some(hook), ..Run::new(replicated(2, 2)) };
    let pipeline = run.launch(Verify::OnSuspicion);
    let (bits, found) = train(pipeline, 1, 10.0, || fault.last.store(1, Ordering::SeqCst));
    assert!(bits == *right, "group {group}: other bits than without the fault");
    let [verification] = &found[..] else { panic!("group {group}: {found:?}") };
    let difference = verification.difference.as_ref()?;
    assert_eq!(difference.wrong, [WorldRank::new(fault.rank)], "group {group}: {difference}");
    difference.action()
}

/// An expert has a gradient of its own for the tokens of each replica: its products are two groups, and the second
/// one belongs to the other replica.
#[test]
fn a_gradient_that_is_left_out_names_its_rank_whichever_replica_has_the_tokens() {
    let (right, _) = train(Run::new(replicated(2, 2)).launch(Verify::Off), 1, 10.0, || ());
    for group in 0..4 {
        assert_eq!(named_without(group, &right).as_deref(), Some("0W"), "group {group}");
    }
}

/// The experts of a rank have other parameters than in other replicas, as after a bit has flipped in its memory.
#[test]
fn other_parameters_of_an_expert_are_an_error() {
    let message = |replicas: u32, rank: u32| {
        let run = Run { other_parameters: Some(rank), ..Run::new(replicated(replicas, 2)) };
        step(&mut run.launch(Verify::OnSuspicion), 0, 1, 1e30).expect_err("the step fails").to_string()
    };
    let of_two = message(4, 6);
    let expected = "the ranks 2 and 6 have different bits in the parameters of stage 0, and which one is wrong is not known";
    assert!(of_two.contains(expected), "{of_two}");
    let of_three = message(6, 3);
    assert!(of_three.contains("rank 3 has wrong bits in the parameters of stage 1"), "{of_three}");
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
        assert_genuine(&format!("{mesh:?}"), |verify| Run::new(mesh).launch(verify), 1, 10.0);
    }
}

//! The trait that a user implements: a Burn module with a typed forward.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright_schedule::ids::Slice;
use pipewright_schedule::{Microbatch, Slices, StageIndex};
use serde::{Deserialize, Serialize};

use super::carry::{CarryEnds, SequenceCarry, SliceCarry};
use super::error::StageError;
use super::first_value::FirstValue;
use super::side_leaves::SideLeaves;
use super::watch::Watch;
use crate::batch::{SideInputError, SideInputs};
use crate::memory::StreamedMatrix;
use crate::random::{DrawsTogether, LayerDraws, RandomStream, StreamKey};
use crate::tensor::{Boundary, BoundaryError, EdgePlacement, Placement, Value, Values, pack, unpack};

/// A stage: a contiguous part of the model, with ordinary tensors at both edges.
///
/// The first stage's input is the data of a microbatch; every other stage's input is the output of the
/// previous stage. Gradients flow back through float outputs only; integer and boolean outputs have no
/// gradient.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use pipewright::stage::{StageContext, StageModule};
///
/// #[derive(Module, Debug)]
/// struct Middle {
///     linear: Linear,
/// }
///
/// impl StageModule for Middle {
///     type Input = Tensor<2>;
///     type Output = Tensor<2>;
///
///     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
///         self.linear.forward(input)
///     }
///
///     fn parameter_path(&self, local: &str) -> String {
///         format!("middle.{local}")
///     }
/// }
/// ```
///
/// A layer of a [`Layers`](crate::pipeline::Layers) implements this trait too. There, a stage consists of
/// several layers and puts the place of each layer in front of its paths.
pub trait StageModule: Module + 'static {
    /// Tensors that the stage takes.
    type Input: Boundary;
    /// Tensors that the stage returns.
    type Output: Boundary;

    /// Returns the stage's output for one microbatch. It must depend only on `self`, `input` and `context`.
    ///
    /// The layers of a [`Layers`](crate::pipeline::Layers) have the same bits under every cut. In a module that
    /// holds several layers itself, the gradients of a value with three or more uses are added in an order that
    /// depends on all of its layers.
    fn forward(&self, input: Self::Input, context: &StageContext) -> Self::Output;

    /// Returns the number of blocks: parts of the module that run one after another. If stages are recomputed
    /// block by block ([`Recompute::Block`](pipewright_schedule::Recompute::Block)), or a hook's function
    /// runs them ([`ForwardRun::run_block`](crate::hook::ForwardRun::run_block)),
    /// [`StageModule::forward_block`] runs them one by one. No two blocks use the same parameter.
    fn blocks(&self) -> usize {
        1
    }

    /// Runs one block, counted from 0. The first one takes the tensors of the stage's input, each other one
    /// takes the tensors that the block before it returns, and the last one returns the tensors of the
    /// stage's output. Together they compute the result of [`StageModule::forward`]. A module with several
    /// blocks must implement it.
    ///
    /// # Errors
    /// When the block takes other tensors.
    fn forward_block(
        &self,
        block: usize,
        input: Values,
        context: &StageContext,
    ) -> Result<Values, BoundaryError> {
        let _ = block;
        Ok(pack(self.forward(unpack(input)?, context)))
    }

    /// Returns the global path of the parameter that this module knows as `local`.
    ///
    /// Gradient norms, reports and checkpoints use the global path as the key, so a model must give a
    /// parameter the same path however the model is cut. A stage that holds layers 4 to 7 as `layers.0` to
    /// `layers.3` renames them here; see also [`Stage::with_prefix`](super::Stage::with_prefix). A pipeline
    /// does not launch if two parameters have the same path and do not declare it as shared.
    fn parameter_path(&self, local: &str) -> String {
        local.to_owned()
    }

    /// Returns whether the parameter that this module knows as `local` has single precision even if the
    /// pipeline has half precision ([`Precision`](crate::tensor::Precision)). The module casts between its
    /// types itself, in both directions.
    fn stays_in_single_precision(&self, local: &str) -> bool {
        let _ = local;
        false
    }

    /// Returns how the ranks of a tensor group hold the parameter that this module knows as `local`
    /// ([`Pipeline::launch_split`](crate::pipeline::Pipeline::launch_split)). By default every rank holds the
    /// whole parameter and computes its whole gradient.
    fn placement(&self, local: &str) -> Placement {
        let _ = local;
        Placement::REPLICATED
    }

    /// Returns how the ranks of a tensor group take an input, and how they return its gradient. Inputs are counted
    /// from 0. The pipeline converts the tensor from the placement of the stage before, and the gradient to it. By
    /// default every rank takes the whole input and returns the whole gradient.
    fn input_placement(&self, input: usize) -> EdgePlacement {
        let _ = input;
        EdgePlacement::WHOLE
    }

    /// Returns how the ranks of a tensor group have an output, and how they take its gradient. Outputs are counted
    /// from 0. The pipeline converts the tensor to the placement of the next stage, and the gradient from it. The
    /// loss of the last stage gets the output as the rank has it; there, parts need not be equally long. Results have
    /// whole outputs. If a module has parts and does not say so, they have the part of the first rank.
    fn output_placement(&self, output: usize) -> EdgePlacement {
        let _ = output;
        EdgePlacement::WHOLE
    }

    /// Returns why the module cannot run slices of microbatches; `None` if it can. A pipeline whose schedule
    /// cuts microbatches does not start if a module cannot.
    ///
    /// The forward of a slice gets a part of each sequence: its input has fewer tokens along dimension 1. A
    /// module can run slices if its forwards of all slices of a microbatch, in ascending order, compute what
    /// its forward of the whole microbatch computes. A layer that treats each token by itself can without
    /// more. A layer whose tokens depend on earlier ones takes what it needs of them from
    /// [`StageContext::earlier_slices`], and numbers positions from
    /// [`StageContext::slice`]. An auxiliary loss ([`StageContext::auxiliary_loss`]) must be a mean over tokens.
    fn refuses_slices(&self) -> Option<String> {
        Some("it does not say that it can (`StageModule::refuses_slices`)".to_owned())
    }

    /// Returns the global paths of the parameters that other stages, or other places of this stage, hold too.
    ///
    /// Each holder has its own copy and names the path here. The copies must start equal. The pipeline sums
    /// their gradients and gives every copy the same update. The copies on one rank use one storage and one
    /// state of the optimizer.
    fn shared_parameters(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the frozen matrices that are in memory only while the stage computes ([`crate::stream`]). The program
    /// of the pipeline says when.
    fn streamed(&self) -> Vec<Arc<StreamedMatrix>> {
        Vec::new()
    }
}

/// The stage and the microbatch of a forward, the further inputs that it may read, and the auxiliary losses
/// that it adds.
#[derive(Clone, Debug)]
pub struct StageContext {
    stage: StageIndex,
    microbatch: Microbatch,
    slice: Slice,
    slices: Slices,
    /// `None` if microbatches are whole, and outside a pipeline.
    carry: Option<SliceCarry>,
    device: Device,
    side_inputs: Arc<SideInputs>,
    /// `None` in an evaluation.
    random: Option<StreamKey>,
    /// Runs layers that draw from the generator of their device; `None` outside a pipeline.
    draws: Option<Arc<LayerDraws>>,
    auxiliary: Arc<Mutex<Vec<Auxiliary>>>,
    loads: Arc<Mutex<Vec<ExpertLoad>>>,
    not_finite: Arc<Mutex<Option<String>>>,
    /// Present if the values of the layers are checked.
    watch: Option<Watch>,
    side_leaves: SideLeaves,
}

/// An auxiliary loss of a stage.
#[derive(Clone, Debug)]
pub(crate) struct Auxiliary {
    pub name: Arc<str>,
    /// The layer that added it, if it said so.
    pub layer: Option<Arc<str>>,
    pub weight: f64,
    pub loss: Tensor<1>,
}

/// How many choices of a mixture's tokens each expert has got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExpertLoad {
    pub layer: Arc<str>,
    pub choices: Vec<u64>,
}

impl StageContext {
    /// Makes the context of `stage` for `microbatch`. The runtime calls it; tests and code without a pipeline
    /// may too.
    pub fn new(stage: StageIndex, microbatch: Microbatch) -> Self {
        Self {
            stage,
            microbatch,
            slice: Slice::new(0),
            slices: Slices::ONE,
            carry: None,
            device: Device::flex(),
            side_inputs: Arc::default(),
            random: None,
            draws: None,
            auxiliary: Arc::default(),
            loads: Arc::default(),
            not_finite: Arc::default(),
            watch: None,
            side_leaves: SideLeaves::default(),
        }
    }

    /// Makes the context of the slice with this number.
    pub(crate) fn of_number(stage: StageIndex, number: Microbatch, slices: Slices) -> Self {
        let (microbatch, slice) = slices.place(number);
        Self { slice, slices, ..Self::new(stage, microbatch) }
    }

    /// Returns the number of the slice, as actions have it.
    pub(super) fn number(&self) -> Microbatch {
        Microbatch::new(self.microbatch.get() * self.slices.get() + self.slice.get())
    }

    /// Returns the context of a forward whose results are not used.
    pub(super) fn for_probe(&self) -> Self {
        Self {
            carry: None,
            auxiliary: Arc::default(),
            loads: Arc::default(),
            not_finite: Arc::default(),
            watch: None,
            side_leaves: SideLeaves::default(),
            ..self.clone()
        }
    }

    /// Gives the forward access to what the slices of its microbatch have kept. `tape` is the device with the
    /// kind of its tape, if it records one.
    pub(super) fn join(&mut self, carry: &SequenceCarry, tape: Option<Device>) {
        self.carry = Some(carry.part(self.slice, self.slices, tape));
    }

    /// Takes out the places where the tape that was just recorded meets the tapes of other slices.
    pub(super) fn take_carry(&self) -> Option<CarryEnds> {
        self.carry.as_ref().map(SliceCarry::take_ends)
    }

    /// Returns the places where side inputs that require a gradient come onto the tape.
    pub(super) fn side_leaves(&self) -> &SideLeaves {
        &self.side_leaves
    }

    /// Returns whether a side input of the microbatch requires a gradient.
    pub(super) fn has_tracked_sides(&self) -> bool {
        self.side_inputs.is_tracked(self.microbatch)
    }

    /// Sets what runs the layers of the stage.
    pub(super) fn draw_through(&mut self, draws: &Arc<LayerDraws>) {
        self.draws = Some(draws.clone());
    }

    /// Calls `run`, the forward of the layer `name` of this stage, with the random numbers of this layer and
    /// microbatch in the generator of the device.
    pub(crate) fn run_layer<R>(&self, name: &str, run: impl FnOnce() -> R) -> Result<R, StageError> {
        let Some(draws) = &self.draws else { return Ok(run()) };
        let is_training = self.random.is_some();
        let of_evaluation =
            || StreamKey { microbatch: u64::from(self.number().get()), ..StreamKey::default() };
        let key = self.random.unwrap_or_else(of_evaluation);
        let result = draws.run(name, key, is_training, run);
        result.map_err(|DrawsTogether| StageError::DrawsTogether { layer: name.into() })
    }

    /// Lets the forward check the values of the layers, and its backward their gradients if `checks_gradients`.
    pub(crate) fn with_watch(mut self, checks_gradients: bool) -> Self {
        self.watch = Some(Watch::new(checks_gradients));
        self
    }

    /// Returns what checks the values of the layers; `None` if they are not checked.
    pub(super) fn watch(&self) -> Option<&Watch> {
        self.watch.as_ref()
    }

    pub(crate) fn with_side_inputs(mut self, side_inputs: Arc<SideInputs>, device: Device) -> Self {
        self.side_inputs = side_inputs;
        self.device = device;
        self
    }

    /// Sets the key of the random numbers of a training step. The runtime calls it; tests and code without a
    /// pipeline may too.
    pub fn with_random(mut self, key: StreamKey) -> Self {
        self.random = Some(key);
        self
    }

    /// Returns the stage that runs.
    pub fn stage(&self) -> StageIndex {
        self.stage
    }

    /// Returns the microbatch for which the stage runs. Each replica counts its own microbatches from 0;
    /// errors and the lists of a step's summary count the microbatches of all replicas.
    pub fn microbatch(&self) -> Microbatch {
        self.microbatch
    }

    /// Returns the slice of the microbatch for which the stage runs, and the number of its slices. All slices
    /// are equally long, so the first token of slice `s` has the position `s` times the length of this
    /// forward's input. Without slices, the slice is 0 of 1.
    pub fn slice(&self) -> (Slice, Slices) {
        (self.slice, self.slices)
    }

    /// Returns the tensors that the forwards of earlier slices of this microbatch have kept under `name` on
    /// this stage, in order. There are none in the first slice, and without slices. Their gradients flow back
    /// to those slices.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use pipewright::stage::StageContext;
    ///
    /// /// Returns the keys of all tokens up to the last one of this slice, `[batch, tokens, width]`.
    /// fn all_keys(keys: Tensor<3>, context: &StageContext) -> Tensor<3> {
    ///     let mut slices = context.earlier_slices("layers.3.keys");
    ///     context.keep_for_later_slices("layers.3.keys", &keys);
    ///     slices.push(keys);
    ///     Tensor::cat(slices, 1)
    /// }
    /// ```
    ///
    /// # Panics
    /// When a tensor has another number of dimensions.
    pub fn earlier_slices<const D: usize>(&self, name: &str) -> Vec<Tensor<D>> {
        let values = self.carry.as_ref().map(|carry| carry.earlier(name)).unwrap_or_default();
        let typed =
            |value| unpack(vec![value]).unwrap_or_else(|error| panic!("`{name}` of earlier slices: {error}"));
        values.into_iter().map(typed).collect()
    }

    /// Keeps a tensor for the forwards of later slices of this microbatch on this stage
    /// ([`StageContext::earlier_slices`]). Use a name that no other layer uses.
    pub fn keep_for_later_slices<const D: usize>(&self, name: &str, tensor: &Tensor<D>) {
        if let Some(carry) = &self.carry {
            carry.keep(name, Value::of(tensor.clone()));
        }
    }

    /// Returns whether the forward is part of a training step.
    pub fn is_training(&self) -> bool {
        self.random.is_some()
    }

    /// Returns the random numbers of the layer `name` for this microbatch and step.
    ///
    /// Name layers as their parameters are named, by a path that does not depend on the cut
    /// (`layers.3.dropout`): the numbers depend only on the run's seed, the step, the microbatch and this
    /// name. In an evaluation the stream is
    /// [`RandomStream::evaluation`].
    pub fn random(&self, name: &str) -> RandomStream {
        self.random.map_or_else(RandomStream::evaluation, |key| RandomStream::new(key, name))
    }

    /// Returns the side input `name` of this microbatch.
    /// [`Batch::with_split`](crate::batch::Batch::with_split) and
    /// [`with_replicated`](crate::batch::Batch::with_replicated) add side inputs to a step. If a tensor requires
    /// a gradient, the summary of the step has it
    /// ([`StepSummary::side_gradients`](crate::pipeline::StepSummary::side_gradients)).
    ///
    /// # Errors
    /// When the step has no side input of that name, or it has other tensors than `T`.
    pub fn side<T: Boundary>(&self, name: &str) -> Result<T, SideInputError> {
        let enter = |tensor, value| self.side_leaves.enter(name, tensor, value, &self.device);
        self.side_inputs.tensors(name, self.microbatch, enter)
    }

    /// Returns the value `name` that [`Batch::with_value`](crate::batch::Batch::with_value) added to the
    /// step.
    ///
    /// # Errors
    /// When the step has no value of that name, or one of another type.
    pub fn value<T: Any>(&self, name: &str) -> Result<&T, SideInputError> {
        self.side_inputs.value(name)
    }

    /// Adds `weight * loss` to the loss of the step. `loss` is a scalar (shape `[1]`), the mean over the
    /// microbatch.
    ///
    /// Its gradient flows through this stage and those before it, with the scale of the main loss. The report
    /// has the mean of `loss`, without the weight, under `name`. Losses of the same name are added, in the
    /// order of the layers whatever the cut.
    pub fn auxiliary_loss(&self, name: &str, weight: f64, loss: Tensor<1>) {
        self.add_auxiliary(Auxiliary { name: name.into(), layer: None, weight, loss });
    }

    /// Like [`StageContext::auxiliary_loss`], but for a loss of one layer: the report also has the part of
    /// each layer ([`StepSummary::auxiliary_by_layer`](crate::pipeline::StepSummary::auxiliary_by_layer)).
    /// Name the layer as its parameters are named, such as `model.layers.3.mlp`.
    pub fn auxiliary_loss_of(&self, layer: &str, name: &str, weight: f64, loss: Tensor<1>) {
        self.add_auxiliary(Auxiliary { name: name.into(), layer: Some(layer.into()), weight, loss });
    }

    fn add_auxiliary(&self, auxiliary: Auxiliary) {
        self.auxiliary.lock().unwrap_or_else(PoisonError::into_inner).push(auxiliary);
    }

    /// Reports how many tokens of this forward have chosen each expert of `layer`, a mixture. A token counts
    /// once for each expert that it chose. The report of the step has the sums
    /// ([`StepSummary::expert_loads`](crate::pipeline::StepSummary::expert_loads)).
    pub fn expert_load(&self, layer: &str, choices: Vec<u64>) {
        let load = ExpertLoad { layer: layer.into(), choices };
        self.loads.lock().unwrap_or_else(PoisonError::into_inner).push(load);
    }

    /// Reports numbers that `count` counts if the forward is part of an evaluation; in training, nothing happens. The
    /// report of the evaluation has the sums over all forwards
    /// ([`EvalSummary::counts`](crate::pipeline::EvalSummary::counts)).
    pub fn count_in_evaluation(&self, name: &str, count: impl FnOnce() -> Vec<u64>) {
        if !self.is_training() {
            self.expert_load(name, count());
        }
    }

    /// Takes out the loads of experts that the forward reported.
    pub(crate) fn take_loads(&self) -> Vec<ExpertLoad> {
        std::mem::take(&mut self.loads.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Fails the step because a number inside the stage is infinite or not a number. Without this call the
    /// failure would only show in the loss. `what` names the number and its layer. The parameters keep their
    /// values from before the step. An evaluation continues.
    pub fn not_finite(&self, what: &str) {
        if let Some(watch) = &self.watch {
            watch.note(FirstValue::Inside { what: what.to_owned() });
        }
        let mut first = self.not_finite.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| what.to_owned());
    }

    /// Returns `output`, the output of `layer` inside a module that holds several layers. If a step is computed
    /// again to find the first value that is not finite
    /// ([`PipelineConfig::name_not_finite`](crate::pipeline::PipelineConfig::name_not_finite)), the output and
    /// its gradient are checked, and the failure names the layer. Otherwise nothing happens. The output has the
    /// same bits in any case.
    ///
    /// Name the layer as its parameters are named, such as `model.layers.3.mlp`, and call this for the layers
    /// in the order of the data.
    pub fn watched<const D: usize>(&self, layer: &str, output: Tensor<D>) -> Tensor<D> {
        match &self.watch {
            Some(watch) => watch.inside(layer, output),
            None => output,
        }
    }

    /// Takes out the name of the number that the forward reported as not finite.
    pub(crate) fn take_not_finite(&self) -> Option<String> {
        self.not_finite.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Takes out the auxiliary losses that the forward added.
    pub(crate) fn take_auxiliary(&self) -> Vec<Auxiliary> {
        std::mem::take(&mut self.auxiliary.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

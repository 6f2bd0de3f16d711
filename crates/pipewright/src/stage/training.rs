//! A stage in training: its module, the tape of every microbatch in flight, the gradient sums and the optimizer.
//!
//! # What a forward keeps
//!
//! The inputs become leaves of the tape. The outputs are taken off the tape and returned *by value*. The stage keeps
//! the leaves, one gradient root per float output (or the loss), and the tensors that the operations recorded for their
//! own backward. It keeps no output storage unless an operation needs it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor, TensorData};
use pipewright_schedule::Microbatch;

use super::body::{Skips, StageBody};
use super::gradients::GradientSums;
use super::module::{Auxiliary, StageContext};
use super::runner::{ForwardTask, Forwarded, Held, Runner, StageError, device_of};
use super::shards::{Catches, Shards};
use super::state::{NamedTensor, discrete_of, filled, parameters_of, with_discrete};
use super::weights::{WeightRunner, WeightWork};
use crate::autodiff::{GradientSlot, gradient_root};
use crate::checkpoint::{Checkpoint, CheckpointError, HeldParameter, StageState, Target, put_together};
use crate::nn::Deferred;
use crate::optimizer::mixes_rows;
use crate::tensor::shard::RowShard;
use crate::tensor::{Boundary, OptionalTensor, OptionalTensors, Value, ValueKind, Values, pack, unpack};

/// A loss without the type of its target.
pub(crate) type Loss<O> = Box<dyn Fn(O, Values, &StageContext) -> Result<Tensor<1>, StageError> + Send>;

pub(crate) struct TrainingStage<M: StageBody> {
    /// `None` only while the module is changed: by the optimizer, or when parameters are gathered or released.
    module: Option<M>,
    loss: Option<Loss<M::Output>>,
    tapes: HashMap<Microbatch, Tape>,
    /// Weight gradients of microbatches whose input gradients are done.
    deferred: HashMap<Microbatch, Deferred>,
    sums: GradientSums,
    /// The global path of each integer and boolean parameter.
    discrete: Vec<Arc<str>>,
    /// The parameters whose gradients are summed.
    parameters: Arc<HashSet<ParamId>>,
    optimizer: Option<ModuleOptimizer>,
    /// The user's function that computes weight gradients instead of the stage.
    weight_runner: Option<WeightRunner>,
    device: Device,
    /// Present if the parameters are sharded over replicas.
    shards: Option<Shards>,
}

/// The reason why a stage that needs its shards has them.
const SHARDED: &str = "a stage was cut before its parameters are gathered";

/// The start and the end points of one microbatch's backward.
struct Tape {
    /// The inputs as leaves; `None` for inputs that carry no gradient.
    leaves: Vec<Option<Tensor<1>>>,
    /// The loss, from which the backward of the last stage starts.
    loss: Option<Tensor<1>>,
    /// The outputs, from which the backward of every other stage starts.
    outputs: Vec<OutputRoot>,
    /// The weighted auxiliary losses, which the backward of any stage starts from too.
    auxiliary: Option<Tensor<1>>,
    /// The weight gradients that the layers defer.
    deferred: Deferred,
    /// The other gradients, which are caught if parameters are sharded.
    catches: Catches,
}

/// An output that the stage has returned.
struct OutputRoot {
    shape: Vec<usize>,
    /// `None` for outputs off the tape, which need no gradient.
    root: Option<(Tensor<1>, GradientSlot)>,
}

impl<M: StageBody> TrainingStage<M> {
    pub(crate) fn new(module: M, loss: Option<Loss<M::Output>>) -> Self {
        let device = device_of(&module);
        let module = if device.is_autodiff() { module } else { module.train() };
        let sums = GradientSums::new(&module);
        let discrete = discrete_of(&module).iter().map(|found| module.path(&found.local).into()).collect();
        let parameters = Arc::new(sums.ids().collect());
        let device = device.autodiff();
        Self {
            parameters,
            module: Some(module),
            loss,
            tapes: HashMap::new(),
            deferred: HashMap::new(),
            sums,
            discrete,
            optimizer: None,
            weight_runner: None,
            device,
            shards: None,
        }
    }

    fn take_module(&mut self) -> M {
        self.module.take().expect("the module is away only while it is changed")
    }

    fn module(&self) -> &M {
        self.module.as_ref().expect("the module is away only while it is changed")
    }

    /// Returns the module with the running statistics that the last forward left. Burn keeps a thread's last update
    /// separate until the statistics are read, and visiting or mapping the module does not read them.
    fn settled(&self) -> &M {
        drop(self.module().valid());
        self.module()
    }

    fn loss_of(
        &self,
        output: M::Output,
        target: Option<Values>,
        context: &StageContext,
    ) -> Result<Option<Tensor<1>>, StageError> {
        let Some(loss) = &self.loss else { return Ok(None) };
        let target = target.ok_or(StageError::NoTarget)?;
        let loss = loss(output, target, context)?;
        check_scalar(&loss, || "the loss".to_owned())?;
        Ok(Some(loss))
    }
}

impl<M: StageBody> Runner for TrainingStage<M> {
    fn forward(
        &mut self,
        context: &StageContext,
        inputs: Values,
        target: Option<Values>,
        task: ForwardTask,
    ) -> Result<Forwarded, StageError> {
        let ForwardTask { loss_weight, keep_outputs } = task;
        let (inputs, leaves) = inputs.into_iter().map(as_leaf).unzip();
        let mut deferred = Deferred::new(self.parameters.clone());
        let mut catches = Catches::new();
        let output = match &self.shards {
            None => deferred.collect(|| self.module().run(inputs, context))?,
            Some(shards) => {
                let module;
                (module, catches, deferred) = shards.forward(self.module().clone(), deferred);
                deferred.collect(|| module.run(inputs, context))?
            }
        };
        if let Some(what) = context.take_not_finite() {
            return Err(StageError::NotFinite { what });
        }
        if self.loss.is_some() {
            let (output, outputs) = if keep_outputs { kept(output)? } else { (output, Values::new()) };
            let loss = self.loss_of(output, target, context)?;
            let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), loss_weight)?;
            let loss = loss.expect("a stage with a loss computes it");
            let report = loss.clone().inner();
            let loss = Some(scaled(loss, loss_weight));
            let tape = Tape { leaves, loss, outputs: Vec::new(), auxiliary: weighted, deferred, catches };
            self.tapes.insert(context.microbatch(), tape);
            return Ok(Forwarded { outputs, loss: Some(report), auxiliary });
        }
        let (auxiliary, weighted) = split_auxiliary(context.take_auxiliary(), loss_weight)?;
        let (outputs, roots) = pack(output).into_iter().map(off_tape).unzip();
        let tape = Tape { leaves, loss: None, outputs: roots, auxiliary: weighted, deferred, catches };
        self.tapes.insert(context.microbatch(), tape);
        Ok(Forwarded { outputs, loss: None, auxiliary })
    }

    fn infer(
        &self,
        context: &StageContext,
        inputs: Values,
        target: Option<Values>,
    ) -> Result<Forwarded, StageError> {
        let output = self.module().valid().run(inputs, context)?;
        let outputs = pack(output);
        let loss = match target {
            Some(target) => {
                self.loss_of(unpack(outputs.clone()).map_err(StageError::Input)?, Some(target), context)?
            }
            None => None,
        };
        let (auxiliary, _) = split_auxiliary(context.take_auxiliary(), 1.0)?;
        Ok(Forwarded { outputs, loss, auxiliary })
    }

    fn backward_inputs(
        &mut self,
        microbatch: Microbatch,
        gradients: OptionalTensors,
    ) -> Result<OptionalTensors, StageError> {
        let tape =
            self.tapes.remove(&microbatch).expect("a validated program runs a forward before its backward");
        let root = match tape.loss {
            Some(loss) => Some(loss),
            None => plant(tape.outputs, gradients)?,
        };
        let root = join(root, tape.auxiliary);
        let Some(root) = root.filter(Tensor::is_tracked) else {
            return Ok(vec![None; tape.leaves.len()]);
        };
        let mut gradients = root.backward();
        drop(root);
        let module = self.module.as_ref().expect("the module is away only while it is changed");
        match self.shards {
            None => self.sums.add(module, &mut gradients),
            Some(_) => self.sums.add_caught(tape.catches),
        }
        self.deferred.insert(microbatch, tape.deferred);
        let inputs = tape.leaves.into_iter().map(|leaf| {
            let gradient = leaf?.grad_remove(&mut gradients)?;
            Some(Value::of(gradient))
        });
        Ok(inputs.collect())
    }

    fn backward_weights(&mut self, microbatch: Microbatch) -> usize {
        let tasks = self.deferred.remove(&microbatch).map(|deferred| deferred.take()).unwrap_or_default();
        let count = tasks.len();
        let mut work = WeightWork::new(tasks, &mut self.sums);
        if let Some(runner) = &mut self.weight_runner {
            runner(microbatch, &mut work);
        }
        // Weight gradients that a user's function has not computed would be missing in the sums.
        work.run_all();
        count
    }

    fn paths(&self) -> &[Arc<str>] {
        self.sums.paths()
    }

    fn check(&self) -> Result<(), StageError> {
        match self.sums.duplicate() {
            Some((first, second)) => Err(StageError::DuplicateParameter { first, second }),
            None => Ok(()),
        }
    }

    fn add_prefix(&mut self, prefix: &str) {
        let shared = self.module().shared();
        let path = |old: &str| match shared.iter().any(|shared| shared == old) {
            true => old.into(),
            false => format!("{prefix}.{old}").into(),
        };
        self.sums.rename(path);
        self.discrete.iter_mut().for_each(|old| *old = path(old));
    }

    fn held(&self) -> Vec<Held> {
        let declared = self.module().shared();
        let shared = |path: &str, value: Value| {
            declared.iter().any(|declared| declared == path).then(|| value.into_data())
        };
        let paths = self.sums.paths().iter().zip(self.sums.shapes().iter().cloned());
        let floats = parameters_of(self.module()).into_iter().zip(paths).map(|(found, (path, shape))| Held {
            path: path.clone(),
            shape,
            shared: shared(path, found.value),
        });
        let discrete = discrete_of(self.module()).into_iter().zip(&self.discrete).map(|(found, path)| Held {
            path: path.clone(),
            shape: found.value.shape().to_vec(),
            shared: shared(path, found.value),
        });
        floats.chain(discrete).collect()
    }

    fn skips(&self) -> &Skips {
        self.module().skips()
    }

    fn gradient(&self, place: usize) -> OptionalTensor {
        self.sums.get(place)
    }

    fn set_gradient(&mut self, place: usize, gradient: OptionalTensor) {
        self.sums.set(place, gradient);
    }

    fn gradient_squares(&self, parts: u32) -> Vec<f64> {
        self.sums.squares(parts)
    }

    fn move_to(&mut self, device: &Device) {
        if *device != self.device {
            let device = device.clone().autodiff();
            let module = self.take_module().fork(&device);
            (self.module, self.device) = (Some(module), device);
        }
    }

    fn shard(&mut self, part: RowShard) -> Result<(), StageError> {
        if let Some(optimizer) = &self.optimizer
            && let Some(place) = mixes_rows(optimizer, self.module())
        {
            return Err(StageError::MixesRows { parameter: self.sums.paths()[place].clone() });
        }
        let (module, shards) = Shards::cut(self.take_module(), part);
        (self.module, self.shards) = (Some(module), Some(shards));
        Ok(())
    }

    fn rows(&self) -> OptionalTensors {
        let shards = self.shards.as_ref().expect(SHARDED);
        shards.rows(self.module())
    }

    fn gather(&mut self, whole: OptionalTensors) {
        let module = self.take_module();
        let shards = self.shards.as_mut().expect(SHARDED);
        self.module = Some(shards.gather(module, whole));
    }

    fn release(&mut self) {
        let Some(shards) = &mut self.shards else { return };
        self.module = self.module.take().map(|module| shards.release(module));
    }

    fn update(&mut self, factor: f64, learning_rate: f64) {
        let Some(mut optimizer) = self.optimizer.take() else { return self.sums.clear() };
        // The module is moved through the optimizer, so that it owns the storage and may write in place.
        let module = self.take_module();
        let gradients = self.sums.take(&module, factor);
        self.module = Some(optimizer.step(learning_rate, module, gradients));
        self.optimizer = Some(optimizer);
    }

    fn reset(&mut self) {
        self.tapes.clear();
        self.deferred.clear();
        self.sums.clear();
        self.release();
    }

    fn set_weight_runner(&mut self, runner: WeightRunner) {
        self.weight_runner = Some(runner);
    }

    fn set_optimizer(&mut self, optimizer: ModuleOptimizer) {
        self.optimizer = Some(optimizer);
    }

    fn parameters(&self) -> Vec<TensorData> {
        parameters_of(self.settled()).into_iter().map(|found| found.value.into_data()).collect()
    }

    fn state(&self) -> StageState {
        let floats = parameters_of(self.settled()).into_iter().zip(self.sums.paths());
        let found = floats.chain(discrete_of(self.module()).into_iter().zip(&self.discrete)).enumerate();
        let counts = |place| self.shards.as_ref().is_none_or(|shards| shards.counts(place));
        let parameters = found.filter(|(place, _)| counts(*place)).map(|(place, (found, path))| {
            let NamedTensor { id, value, .. } = found;
            HeldParameter { place, path: path.clone(), id, value }
        });
        let part = self.shards.as_ref().map(Shards::part);
        StageState { parameters: parameters.collect(), optimizer: self.optimizer.clone(), part }
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        self.release();
        self.settled();
        let module = self.take_module();
        let (sums, shards) = (&self.sums, &self.shards);
        let part = |place| shards.as_ref().map_or(RowShard::WHOLE, |shards| shards.part_of(place));
        let (module, outcome) = filled(module, |place, held| {
            let (path, shape) = (&sums.paths()[place], &sums.shapes()[place]);
            let data = checkpoint.part_of(path, shape, held.dtype(), part(place))?;
            Ok(Some(Value::from_data(data, &held.device())))
        });
        let discrete = &self.discrete;
        let (module, discrete_outcome) = with_discrete(module, |place, held| {
            let data = checkpoint.parameter(&discrete[place], &held.shape(), held.dtype())?;
            Ok(Value::from_data(data.convert_dtype(held.dtype()), &held.device()))
        });
        self.module = Some(module);
        outcome?;
        discrete_outcome?;
        if let Some(optimizer) = &self.optimizer {
            let found = parameters_of(self.module());
            // The optimizer does not know a parameter of which this replica has no rows.
            let held = found.iter().zip(self.sums.paths()).filter(|(found, _)| found.value.shape()[0] > 0);
            let targets: Vec<Target<'_>> =
                held.map(|(found, path)| Target { id: found.id, path, local: &found.local }).collect();
            // A parameter that is not sharded is not trained either, so it has no optimizer state.
            let part = shards.as_ref().map_or(RowShard::WHOLE, Shards::part);
            self.optimizer = Some(put_together(optimizer.clone(), &targets, part, checkpoint)?);
        }
        Ok(())
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn has_loss(&self) -> bool {
        self.loss.is_some()
    }
}

/// Returns the losses off the tape, as they are reported, and their weighted sum on the tape.
fn split_auxiliary(
    losses: Vec<Auxiliary>,
    loss_weight: f64,
) -> Result<(Vec<Auxiliary>, Option<Tensor<1>>), StageError> {
    let mut weighted = None;
    let mut reported = Vec::with_capacity(losses.len());
    for Auxiliary { name, weight, loss } in losses {
        check_scalar(&loss, || format!("the auxiliary loss `{name}`"))?;
        reported.push(Auxiliary { name, weight, loss: off(loss.clone()) });
        weighted = join(weighted, Some(scaled(loss, weight * loss_weight)));
    }
    Ok((reported, weighted))
}

fn check_scalar(loss: &Tensor<1>, what: impl Fn() -> String) -> Result<(), StageError> {
    match loss.dims() {
        [1] => Ok(()),
        [elements] => Err(StageError::LossShape { what: what(), elements }),
    }
}

fn scaled(loss: Tensor<1>, factor: f64) -> Tensor<1> {
    if factor == 1.0 { loss } else { loss * factor }
}

fn join(a: Option<Tensor<1>>, b: Option<Tensor<1>>) -> Option<Tensor<1>> {
    // A loss that depends on no parameter and no input adds nothing to the backward pass.
    match (a.filter(Tensor::is_tracked), b.filter(Tensor::is_tracked)) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// Returns an input for the module, and the leaf that collects its gradient if an earlier stage needs it.
fn as_leaf(input: Value) -> (Value, Option<Tensor<1>>) {
    if input.kind() != ValueKind::Float {
        return (input, None);
    }
    let requires_grad = input.requires_grad();
    // The number of dimensions does not matter on the tape; 1 is arbitrary.
    let input = Tensor::<1>::from_dispatch(input.into_dispatch()).autodiff();
    if !requires_grad {
        return (Value::of(input), None);
    }
    let leaf = input.require_grad();
    (Value::of(leaf.clone()), Some(leaf))
}

/// Returns an output for the next stage, and the root through which its gradient comes back.
fn off_tape(output: Value) -> (Value, OutputRoot) {
    let shape = output.shape().to_vec();
    if output.kind() != ValueKind::Float {
        return (output, OutputRoot { shape, root: None });
    }
    let tensor = Tensor::<1>::from_dispatch(output.into_dispatch());
    if !tensor.is_tracked() {
        return (Value::of(off(tensor)).constant(), OutputRoot { shape, root: None });
    }
    let slot = GradientSlot::default();
    let root = gradient_root(&Value::of(tensor.clone()), slot.clone());
    (Value::of(tensor.inner()), OutputRoot { shape, root: Some((root, slot)) })
}

/// Returns the output for the loss, and a copy of it off the tape for the report.
fn kept<O: Boundary>(output: O) -> Result<(O, Values), StageError> {
    let values = pack(output);
    let output = unpack(values.clone()).map_err(StageError::Input)?;
    let off_tape = |value: Value| match value.kind() {
        ValueKind::Float => Value::of(off(Tensor::<1>::from_dispatch(value.into_dispatch()))),
        _ => value,
    };
    Ok((output, values.into_iter().map(off_tape).collect()))
}

/// Returns a tensor without the tape that it may be on.
fn off(tensor: Tensor<1>) -> Tensor<1> {
    if tensor.is_autodiff() { tensor.inner() } else { tensor }
}

/// Stores each gradient at its output and joins the roots into one, from which the backward pass starts; `None` if no
/// output on the tape has a gradient.
fn plant(roots: Vec<OutputRoot>, gradients: OptionalTensors) -> Result<Option<Tensor<1>>, StageError> {
    if roots.len() != gradients.len() {
        return Err(StageError::GradientCount { outputs: roots.len(), gradients: gradients.len() });
    }
    let mut joined: Option<Tensor<1>> = None;
    for (index, (output, gradient)) in roots.into_iter().zip(gradients).enumerate() {
        // An output without a gradient adds nothing. Without a pipeline, the tape would not reach it either.
        let (Some((root, slot)), Some(gradient)) = (output.root, gradient) else { continue };
        let shape = gradient.shape().to_vec();
        if shape != output.shape {
            return Err(StageError::GradientShape { index, output: output.shape, gradient: shape });
        }
        slot.fill(gradient);
        joined = Some(match joined {
            Some(joined) => joined + root,
            None => root,
        });
    }
    Ok(joined)
}

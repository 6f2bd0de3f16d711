//! The gradients of a batch's inputs, which a training step returns if the batch asks for them, and of the side
//! inputs that require a gradient.
//!
//! The inputs of a pipeline may come from another model: an encoder, or a prompt that is trained. The
//! backward of the first stage computes their gradients, microbatch by microbatch, and [`InputGradients`]
//! joins these to gradients of the whole inputs. They have the scale of the parameters' gradients: they
//! belong to the loss of the step. Any stage may read a side input, so its gradient is the sum over the stages
//! ([`SideGradients`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use pipewright_schedule::Slices;
use pipewright_schedule::words::counted;

use super::merge::{check_alike, tensors_differ};
use super::slices::SEQUENCE;
use super::split::{SplitError, SplitSpec};
use crate::tensor::{OptionalTensor, OptionalTensors, Value, ValueKind, Values};

/// The inputs whose gradients a batch asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum WantedGradients {
    #[default]
    None,
    All,
    Of(Vec<usize>),
}

/// The inputs of a step whose gradients it returns, and how they are joined.
#[derive(Clone, Debug, Default)]
pub(crate) struct InputGradients {
    /// Whether the gradient of each input is asked for.
    wanted: Arc<[bool]>,
    inputs: Vec<Option<JoinedInput>>,
    factor: f64,
}

/// How the gradient of an input is joined.
#[derive(Clone, Debug)]
struct JoinedInput {
    /// The shape of each microbatch.
    shapes: Vec<Vec<usize>>,
    dtype: DType,
    spec: SplitSpec,
}

/// The sums of the gradients of side inputs for one microbatch, by name and index of the tensor.
pub(crate) type SideSums = BTreeMap<(Arc<str>, usize), Value>;

/// Adds the gradient of a tensor of a side input to its sum.
pub(crate) fn add_side(sums: &mut SideSums, side: (Arc<str>, usize), gradient: Value) {
    let sum = match sums.remove(&side) {
        Some(sum) => {
            let gradient = gradient.to_device(&sum.device());
            added(vec![sum, gradient])
        }
        None => gradient,
    };
    sums.insert(side, sum);
}

/// How the gradients of side inputs are joined, by name. It has the side inputs with a tensor that requires a gradient.
#[derive(Clone, Debug, Default)]
pub(crate) struct SideGradients(BTreeMap<Arc<str>, InputGradients>);

impl SideGradients {
    /// Adds a side input, if a tensor of it requires a gradient. `parts` are its tensors of each microbatch, or
    /// one list for all microbatches.
    pub(super) fn insert(
        &mut self,
        name: &Arc<str>,
        parts: &[Values],
        specs: &[SplitSpec],
    ) -> Result<(), SplitError> {
        let is_tracked = |index| parts.iter().filter_map(|values| values.get(index)).any(Value::is_tracked);
        let wanted: Vec<usize> =
            (0..parts.first().map_or(0, Vec::len)).filter(|&index| is_tracked(index)).collect();
        if !wanted.is_empty() {
            let gradients = InputGradients::new(&WantedGradients::Of(wanted), parts, specs);
            let gradients = gradients.map_err(|error| SplitError(format!("side input `{name}`: {error}")))?;
            self.0.insert(name.clone(), gradients);
        }
        Ok(())
    }

    /// Returns the name of a side input that requires a gradient.
    pub(crate) fn any(&self) -> Option<&str> {
        self.0.keys().next().map(|name| &**name)
    }

    /// Sets the factor of the gradients.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self(self.0.into_iter().map(|(name, gradients)| (name, gradients.times(factor))).collect())
    }

    /// Joins the gradients of the replicas of this process: the sums of each microbatch, by the first microbatch
    /// of the replica.
    pub(crate) fn join(
        &self,
        replicas: &BTreeMap<usize, Vec<SideSums>>,
    ) -> Result<BTreeMap<Arc<str>, OptionalTensors>, SplitError> {
        let join = |(name, gradients): (&Arc<str>, &InputGradients)| {
            let tensors = gradients.inputs.len();
            let part = |sums: &SideSums| -> OptionalTensors {
                (0..tensors).map(|tensor| sums.get(&(name.clone(), tensor)).cloned()).collect()
            };
            let parts = |(&first, sums): (&usize, &Vec<SideSums>)| ReplicaGradients {
                first,
                parts: sums.iter().map(part).collect(),
            };
            let replicas: Vec<_> = replicas.iter().map(parts).collect();
            let joined = gradients.join(&replicas, Slices::ONE);
            let joined = joined.map_err(|error| SplitError(format!("side input `{name}`: {error}")))?;
            Ok((name.clone(), joined))
        };
        self.0.iter().map(join).collect()
    }
}

/// The gradients of the microbatches of one replica.
pub(crate) struct ReplicaGradients {
    /// The first microbatch.
    pub(crate) first: usize,
    /// The gradients of each microbatch, or of each slice of the microbatches.
    pub(crate) parts: Vec<OptionalTensors>,
}

impl WantedGradients {
    /// Returns whether the gradient of each of these inputs of a microbatch is asked for.
    fn of(&self, inputs: &[Value]) -> Result<Vec<bool>, SplitError> {
        let is_float = |value: &Value| value.kind() == ValueKind::Float;
        let asked = match self {
            Self::None => return Ok(vec![false; inputs.len()]),
            Self::All => return Ok(inputs.iter().map(is_float).collect()),
            // A process without the first stage may have no inputs.
            Self::Of(_) if inputs.is_empty() => return Ok(Vec::new()),
            Self::Of(asked) => asked,
        };
        let mut wanted = vec![false; inputs.len()];
        for &input in asked {
            let Some(value) = inputs.get(input) else {
                return Err(SplitError(format!(
                    "the gradient of input {input} is asked for, and the batch has {}, counted from 0: ask for inputs that \
                     exist",
                    counted(inputs.len(), "input")
                )));
            };
            if !is_float(value) {
                return Err(SplitError(format!(
                    "the gradient of input {input} is asked for, and it is {}: only float inputs have gradients",
                    value.kind()
                )));
            }
            wanted[input] = true;
        }
        Ok(wanted)
    }
}

impl InputGradients {
    /// Returns how the gradients of the inputs of a batch are joined; `specs` say how the inputs were split,
    /// by default along dimension 0.
    ///
    /// # Errors
    /// When gradients are asked for that do not exist or cannot be joined, or an input requires a gradient
    /// that is not asked for.
    pub(super) fn new(
        wanted: &WantedGradients,
        inputs: &[Values],
        specs: &[SplitSpec],
    ) -> Result<Self, SplitError> {
        let wanted = wanted.of(inputs.first().map_or(&[], Vec::as_slice))?;
        for (input, &is_wanted) in wanted.iter().enumerate() {
            let mut column = inputs.iter().filter_map(|values| values.get(input));
            if !is_wanted && column.any(Value::is_tracked) {
                return Err(SplitError(format!(
                    "input {input} requires a gradient, and the batch does not ask for it: add \
                     `Batch::keep_input_gradients`, and the summary of the step has the gradient; or pass `tensor.inner()`"
                )));
            }
        }
        let spec_of = |input| specs.get(input).copied().unwrap_or(SplitSpec::Along(0));
        let join = |(input, &is_wanted): (usize, &bool)| {
            is_wanted.then(|| JoinedInput::new(input, column(inputs, input)?, spec_of(input))).transpose()
        };
        let joined = wanted.iter().enumerate().map(join).collect::<Result<_, SplitError>>();
        let inputs = joined.map_err(|reason| {
            SplitError(format!(
                "the gradients of an input cannot be joined: {reason}; split the batch with `Batch::split`, and a \
                 `SplitRule` that says how"
            ))
        })?;
        Ok(Self { wanted: wanted.into(), inputs, factor: 1.0 })
    }

    /// Sets the factor of the gradients.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    pub(crate) fn wanted(&self) -> Arc<[bool]> {
        self.wanted.clone()
    }

    /// Joins the gradients of the replicas of this process, in order. The gradient of an input that the loss
    /// does not depend on is absent.
    pub(crate) fn join(
        &self,
        replicas: &[ReplicaGradients],
        slices: Slices,
    ) -> Result<OptionalTensors, SplitError> {
        let join = |(index, input): (usize, &Option<JoinedInput>)| match input {
            Some(input) => input.join(index, replicas, slices, self.factor),
            None => Ok(None),
        };
        self.inputs.iter().enumerate().map(join).collect()
    }
}

impl JoinedInput {
    fn new(input: usize, column: Values, spec: SplitSpec) -> Result<Self, SplitError> {
        let dimension = match spec {
            SplitSpec::Along(dimension) => Some(dimension),
            SplitSpec::Replicate => None,
        };
        check_alike(input, &column, dimension)?;
        let shapes = column.iter().map(|value| value.shape().to_vec()).collect();
        Ok(Self { shapes, dtype: column[0].dtype(), spec })
    }

    fn join(
        &self,
        index: usize,
        replicas: &[ReplicaGradients],
        slices: Slices,
        factor: f64,
    ) -> Result<OptionalTensor, SplitError> {
        let count = slices.get() as usize;
        let all = replicas.iter().flat_map(|replica| (replica.first * count..).zip(&replica.parts));
        let parts: Vec<(usize, Option<&Value>)> =
            all.map(|(number, gradients)| (number, gradients.get(index).and_then(Option::as_ref))).collect();
        let Some(any) = parts.iter().find_map(|(_, gradient)| *gradient) else { return Ok(None) };
        let (device, dtype) = (any.device(), at_least_single(any.clone()).dtype());
        // A microbatch whose loss does not depend on the input has a gradient of zero.
        let zeros = |number: usize| {
            // A tensor that is the same for all microbatches may have one shape here.
            let mut shape = self.shapes[(number / count).min(self.shapes.len() - 1)].clone();
            if count > 1 {
                shape[SEQUENCE] /= count;
            }
            let elements: usize = shape.iter().product();
            Value::of(Tensor::<1>::zeros([elements], (&device, dtype))).reshaped(&shape)
        };
        let scaled = |value: &Value| at_least_single(value.clone()).scaled(factor);
        let parts =
            parts.into_iter().map(|(number, gradient)| gradient.map_or_else(|| zeros(number), scaled));
        let parts: Values = parts.collect();
        let microbatches: Values = if slices.is_one() {
            parts
        } else {
            parts.chunks(count).map(|parts| Value::joined(parts.to_vec(), SEQUENCE)).collect()
        };
        let joined = match self.spec {
            SplitSpec::Along(dimension) => {
                check_alike(index, &microbatches, Some(dimension))?;
                Value::joined(microbatches, dimension)
            }
            SplitSpec::Replicate => added(microbatches),
        };
        Ok(Some(joined.cast(self.dtype)))
    }
}

/// Returns an input of all microbatches.
fn column(inputs: &[Values], input: usize) -> Result<Values, SplitError> {
    let value = |(microbatch, values): (usize, &Values)| {
        values.get(input).cloned().ok_or_else(|| tensors_differ(microbatch, values.len(), inputs[0].len()))
    };
    inputs.iter().enumerate().map(value).collect()
}

/// Returns a gradient in single precision at least, so that dividing it by the loss scale of f16 rounds
/// nothing to zero.
fn at_least_single(gradient: Value) -> Value {
    match gradient.dtype() {
        DType::F16 | DType::BF16 => gradient.cast(DType::F32),
        _ => gradient,
    }
}

/// Adds tensors of one shape in their order.
fn added(tensors: Values) -> Value {
    let tensors = tensors.into_iter().map(|value| Tensor::<1>::from_dispatch(value.into_dispatch()));
    Value::of(tensors.reduce(|sum, tensor| sum + tensor).expect("a batch has a microbatch"))
}

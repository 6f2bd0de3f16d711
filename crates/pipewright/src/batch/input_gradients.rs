//! The gradients of a batch's inputs, which a training step returns if the batch asks for them.
//!
//! The inputs of a pipeline may come from another model: an encoder, or a prompt that is trained. The backward of the first
//! stage computes their gradients, microbatch by microbatch, and [`InputGradients`] joins these to gradients of the whole
//! inputs. They have the scale of the parameters' gradients: they are those of the loss of the step.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use pipewright_schedule::Slices;

use super::side_inputs::Side;
use super::slices::SEQUENCE;
use super::split_spec::{check_alike, concatenate};
use crate::batch::{Batch, SplitError, SplitSpec};
use crate::tensor::{OptionalTensor, OptionalTensors, Value, ValueKind, Values};

/// The inputs whose gradients a batch asks for.
#[derive(Clone, Debug, Default)]
pub(crate) enum WantedGradients {
    #[default]
    None,
    All,
    Of(Vec<usize>),
}

/// Why a step cannot return gradients of its inputs, or would lose some.
#[derive(Clone, PartialEq, thiserror::Error)]
pub enum InputGradientError {
    /// An input requires a gradient that the batch does not ask for.
    #[error(
        "input {input} requires a gradient, and the batch does not ask for it: add `Batch::keep_input_gradients`, and the \
         summary of the step has the gradient; or pass `tensor.inner()`"
    )]
    NotAskedFor {
        /// The input, counted from 0.
        input: usize,
    },
    /// A tensor of the batch that is not an input requires a gradient.
    #[error(
        "{what} requires a gradient, and a pipeline computes those of its parameters and its inputs: make it an input, or \
         pass `tensor.inner()`"
    )]
    NotAnInput {
        /// The targets, or the side input with its name.
        what: String,
    },
    /// The batch has no input with this number.
    #[error(
        "the gradient of input {input} is asked for, and there are {inputs} input(s), counted from 0: ask for those that exist"
    )]
    NoInput {
        /// The number that was asked for.
        input: usize,
        /// The number of inputs.
        inputs: usize,
    },
    /// The input is not a float tensor.
    #[error("the gradient of input {input} is asked for, and it is {kind}: only float inputs have gradients")]
    NotFloat {
        /// The input.
        input: usize,
        /// Its kind.
        kind: ValueKind,
    },
    /// The batch is evaluated.
    #[error(
        "the batch asks for gradients of its inputs, and an evaluation computes none: take a training step"
    )]
    Evaluation,
    /// The gradients of the microbatches do not make up a whole.
    #[error(
        "the gradients of an input cannot be joined: {0}; split the batch with `Batch::split_by`, which knows how"
    )]
    Join(#[source] SplitError),
}

pipewright_schedule::message_as_debug!(InputGradientError);

impl Batch {
    /// Makes a training step return the gradients of all float inputs
    /// ([`StepSummary::input_gradients`](crate::pipeline::StepSummary::input_gradients)), for example to train a model whose
    /// outputs are these inputs.
    ///
    /// ```
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::batch::Batch;
    /// # use pipewright::pipeline::{Pipeline, PipelineError};
    /// /// Trains on the outputs of an encoder, and returns a scalar whose backward continues into the encoder.
    /// fn step(pipeline: &mut Pipeline, hidden: Tensor<2>, target: Tensor<2>) -> Result<Tensor<1>, Box<dyn std::error::Error>> {
    ///     let batch = Batch::split(hidden.clone(), target, 4)?.keep_input_gradients();
    ///     let summary = pipeline.step_batch(batch, 1e-3)?;
    ///     let gradient = summary.input_gradient::<2>(0)?;
    ///     Ok((hidden * gradient.autodiff()).sum())
    /// }
    /// ```
    pub fn keep_input_gradients(mut self) -> Self {
        self.wanted = WantedGradients::All;
        self
    }

    /// Like [`Batch::keep_input_gradients`], for the inputs with these numbers, in the order in which the first stage takes
    /// them. They must be float tensors.
    pub fn keep_input_gradients_of(mut self, inputs: impl IntoIterator<Item = usize>) -> Self {
        self.wanted = WantedGradients::Of(inputs.into_iter().collect());
        self
    }

    /// Returns the join of the gradients that the batch asks for.
    ///
    /// # Errors
    /// When the batch asks for gradients that do not exist or cannot be joined, or has tensors that require a gradient that
    /// it does not ask for.
    pub(crate) fn input_gradients(&self) -> Result<InputGradients, InputGradientError> {
        let first: &[Value] = self.inputs.first().map_or(&[], Vec::as_slice);
        let wanted = self.wanted(first)?;
        for (input, &is_wanted) in wanted.iter().enumerate() {
            let mut column = self.inputs.iter().filter_map(|values| values.get(input));
            if !is_wanted && column.any(Value::is_tracked) {
                return Err(InputGradientError::NotAskedFor { input });
            }
        }
        self.check_others()?;
        let spec = |input| self.specs.get(input).copied().unwrap_or(SplitSpec::Along(0));
        let join = |(input, &is_wanted): (usize, &bool)| {
            is_wanted.then(|| JoinedInput::new(input, self.column(input)?, spec(input))).transpose()
        };
        let inputs = wanted.iter().enumerate().map(join).collect::<Result<_, _>>();
        Ok(InputGradients {
            wanted: wanted.into(),
            inputs: inputs.map_err(InputGradientError::Join)?,
            factor: 1.0,
        })
    }

    /// Returns an input of all microbatches.
    fn column(&self, input: usize) -> Result<Values, SplitError> {
        let of_microbatch = |(microbatch, values): (usize, &Values)| {
            let (found, expected) = (values.len(), self.inputs[0].len());
            values.get(input).cloned().ok_or(SplitError::TensorsDiffer { microbatch, found, expected })
        };
        self.inputs.iter().enumerate().map(of_microbatch).collect()
    }

    /// Returns whether the batch asks for any gradient.
    pub(crate) fn wants_gradients(&self) -> bool {
        !matches!(self.wanted, WantedGradients::None)
    }

    fn wanted(&self, inputs: &[Value]) -> Result<Vec<bool>, InputGradientError> {
        let is_float = |value: &Value| value.kind() == ValueKind::Float;
        Ok(match &self.wanted {
            WantedGradients::None => vec![false; inputs.len()],
            WantedGradients::All => inputs.iter().map(is_float).collect(),
            // A process without the first stage may have no inputs.
            WantedGradients::Of(_) if inputs.is_empty() => Vec::new(),
            WantedGradients::Of(asked) => {
                let mut wanted = vec![false; inputs.len()];
                for &input in asked {
                    let Some(value) = inputs.get(input) else {
                        return Err(InputGradientError::NoInput { input, inputs: inputs.len() });
                    };
                    if !is_float(value) {
                        return Err(InputGradientError::NotFloat { input, kind: value.kind() });
                    }
                    wanted[input] = true;
                }
                wanted
            }
        })
    }

    /// Returns an error if a target or a side input requires a gradient.
    fn check_others(&self) -> Result<(), InputGradientError> {
        if self.targets.iter().flatten().any(Value::is_tracked) {
            return Err(InputGradientError::NotAnInput { what: "a target".to_owned() });
        }
        for (name, side) in &self.side_inputs.0 {
            let is_tracked = match side {
                Side::Split(parts) => parts.iter().flatten().any(Value::is_tracked),
                Side::Replicated(values) => values.iter().any(Value::is_tracked),
                Side::Value(_) => false,
            };
            if is_tracked {
                return Err(InputGradientError::NotAnInput { what: format!("side input `{name}`") });
            }
        }
        Ok(())
    }
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

/// The gradients of the microbatches of one replica.
pub(crate) struct ReplicaGradients {
    /// The first microbatch.
    pub(crate) first: usize,
    /// The gradients of each microbatch, or of each slice of the microbatches.
    pub(crate) parts: Vec<OptionalTensors>,
}

impl InputGradients {
    /// Sets the factor of the gradients.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    pub(crate) fn wanted(&self) -> Arc<[bool]> {
        self.wanted.clone()
    }

    /// Joins the gradients of the replicas of this process, in order. The gradient of an input that the loss does not depend
    /// on is absent.
    pub(crate) fn join(
        &self,
        replicas: &[ReplicaGradients],
        slices: Slices,
    ) -> Result<OptionalTensors, SplitError> {
        let join = |(place, input): (usize, &Option<JoinedInput>)| match input {
            Some(input) => input.join(place, replicas, slices, self.factor),
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
        place: usize,
        replicas: &[ReplicaGradients],
        slices: Slices,
        factor: f64,
    ) -> Result<OptionalTensor, SplitError> {
        let count = slices.get() as usize;
        let all = replicas.iter().flat_map(|replica| (replica.first * count..).zip(&replica.parts));
        let parts: Vec<(usize, Option<&Value>)> =
            all.map(|(number, gradients)| (number, gradients.get(place).and_then(Option::as_ref))).collect();
        let Some(any) = parts.iter().find_map(|(_, gradient)| *gradient) else { return Ok(None) };
        let (device, dtype) = (any.device(), at_least_single(any.clone()).dtype());
        // A microbatch whose loss does not depend on the input has a gradient of zero.
        let zeros = |number: usize| {
            let mut shape = self.shapes[number / count].clone();
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
            parts.chunks(count).map(|parts| concatenate(parts.to_vec(), SEQUENCE)).collect()
        };
        let joined = match self.spec {
            SplitSpec::Along(dimension) => {
                check_alike(place, &microbatches, Some(dimension))?;
                concatenate(microbatches, dimension)
            }
            SplitSpec::Replicate => added(microbatches),
        };
        Ok(Some(if joined.dtype() == self.dtype { joined } else { joined.cast(self.dtype) }))
    }
}

/// Returns a gradient in single precision at least, so that dividing it by the loss scale of f16 rounds nothing to zero.
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

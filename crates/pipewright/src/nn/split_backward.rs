//! [`SplitBackward`]: a layer of your own whose weight gradients can be deferred.

use std::fmt;
use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::Tensor;

use super::deferred::{KeptWeight, SplitTask, WeightTask};
use super::weight_list::{Gradients, WeightList, gradients_of};
use crate::autodiff::{Rule, inner_of, record};
use crate::tensor::{Boundary, Value, Values, pack, unpack};

/// A differentiable function of one input and some weights, whose backward pass is split in two: `I` computes
/// the gradient of the input, and `W` computes the gradients of the weights.
///
/// A layer calls [`SplitBackward::apply`] in its forward. Inside a stage, the runtime then defers
/// [`backward_weights`](SplitBackward::backward_weights) until the schedule says `W`; zero-bubble schedules
/// do so to fill bubbles. Outside a stage, or if a weight is not a parameter of the stage (it may be computed
/// from parameters), the tape computes all gradients at once. The results are the same.
///
/// All tensors are plain tensors off the tape, on the device of the stage. `I` is the number of dimensions of
/// the input, and `O` the number of dimensions of the output. Values that need no gradient, such as a frozen
/// matrix or a mask, are fields of the type that implements the trait.
///
/// ```
/// use burn::module::{Module, Param};
/// use burn::tensor::{Device, Tensor};
/// use pipewright::nn::SplitBackward;
///
/// /// A layer that multiplies each column by a trained number.
/// #[derive(Module, Debug)]
/// struct Scale {
///     factor: Param<Tensor<1>>,
/// }
///
/// struct Product;
///
/// impl SplitBackward<2, 2> for Product {
///     type Weights = Tensor<1>;
///     type Saved = Tensor<2>;
///     type Waiting = Tensor<2>;
///
///     fn forward(&self, input: Tensor<2>, factor: Tensor<1>) -> (Tensor<2>, Tensor<2>) {
///         (input.clone() * factor.unsqueeze(), input)
///     }
///
///     fn backward_input(
///         &self,
///         input: &Tensor<2>,
///         factor: Tensor<1>,
///         gradient: Tensor<2>,
///         wanted: bool,
///     ) -> (Option<Tensor<2>>, Tensor<2>) {
///         let waiting = input.clone() * gradient.clone();
///         (wanted.then(|| gradient * factor.unsqueeze()), waiting)
///     }
///
///     fn backward_weights(&self, waiting: Tensor<2>) -> Tensor<1> {
///         waiting.sum_dim(0).squeeze_dim(0)
///     }
/// }
///
/// impl Scale {
///     fn forward(&self, input: Tensor<2>) -> Tensor<2> {
///         Product.apply(input, &self.factor)
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let scale = Scale { factor: Param::from_tensor(Tensor::from_data([2.0, 3.0], &device)) };
/// let input = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &device);
/// let gradients = scale.forward(input).sum().backward();
/// let gradient = scale.factor.val().grad(&gradients).expect("a parameter has a gradient");
/// assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), [4.0, 6.0]);
/// ```
pub trait SplitBackward<const I: usize, const O: usize>: Send + Sync + 'static {
    /// The weights: a tensor, or a tuple of tensors.
    type Weights: Boundary;
    /// The tensors that the forward saves for the backward pass.
    type Saved: Send + Sync;
    /// The tensors that `I` leaves for `W`.
    type Waiting: Send + 'static;

    /// Returns the output, and the tensors to save. It need not save the weights, which the backward pass
    /// gets again.
    fn forward(&self, input: Tensor<I>, weights: Self::Weights) -> (Tensor<O>, Self::Saved);

    /// Returns the gradient of the input if it is wanted, and the tensors from which
    /// [`backward_weights`](SplitBackward::backward_weights) computes the gradients of the weights. The first
    /// layer of a model needs no gradient of its input.
    fn backward_input(
        &self,
        saved: &Self::Saved,
        weights: Self::Weights,
        gradient: Tensor<O>,
        wanted: bool,
    ) -> (Option<Tensor<I>>, Self::Waiting);

    /// Returns the gradient of each weight, in its shape.
    fn backward_weights(&self, waiting: Self::Waiting) -> Self::Weights;

    /// Runs the forward with `weights`, and records the backward pass. `weights` is a reference to a
    /// parameter, or a tuple of references: `(&self.weight, &self.bias)`.
    ///
    /// # Panics
    /// When the output requires a gradient although input and weights are off the tape: then a field of
    /// `self` does. In the backward pass, when a wanted gradient is missing or the gradient of the input has
    /// another shape than the input. In a step, a panic is reported with the stage and the action, and so is
    /// a weight's gradient of a wrong shape.
    fn apply<P>(self, input: Tensor<I>, weights: P) -> Tensor<O>
    where
        Self: Sized,
        P: WeightList<Tensors = Self::Weights>,
    {
        apply(self, input, &weights)
    }
}

fn apply<const I: usize, const O: usize, L, P>(layer: L, input: Tensor<I>, weights: &P) -> Tensor<O>
where
    L: SplitBackward<I, O>,
    P: WeightList<Tensors = L::Weights>,
{
    let mut listed = Vec::new();
    weights.list(&mut listed);
    let values = listed.iter().map(super::weight_list::Weight::value).collect();
    let (output, saved) = layer.forward(inner_of(input.clone()), typed(values));
    assert!(
        !output.is_tracked(),
        "the output of `{}` requires a gradient of a tensor that is neither its input nor one of its weights: pass \
         each trained parameter to `apply`",
        name_of::<L>()
    );
    let (gradients, recorded) = gradients_of(&listed);
    let rule = SplitRule {
        saved,
        weights: listed.iter().map(super::weight_list::Weight::kept).collect(),
        wanted: listed.iter().map(super::weight_list::Weight::wanted).collect(),
        shape: input.dims(),
        gradients,
        layer: Arc::new(layer),
    };
    let inputs = [Tensor::from_dispatch(input.into_dispatch()), recorded];
    let output = Tensor::from_dispatch(inner_of(output).into_dispatch());
    Tensor::from_dispatch(record(inputs, output, Arc::new(rule)).into_dispatch())
}

/// Returns weights with their types, which [`WeightList`] has checked.
fn typed<T: Boundary>(values: Values) -> T {
    unpack(values).expect("the list of a layer's weights has the types of its weights")
}

fn name_of<L>() -> &'static str {
    std::any::type_name::<L>()
}

struct SplitRule<L: SplitBackward<I, O>, const I: usize, const O: usize> {
    layer: Arc<L>,
    saved: L::Saved,
    weights: Vec<KeptWeight>,
    /// The parameters that need a gradient, by the weight's index.
    wanted: Arc<[Option<ParamId>]>,
    /// The shape of the input.
    shape: [usize; I],
    gradients: Gradients,
}

impl<L: SplitBackward<I, O>, const I: usize, const O: usize> fmt::Debug for SplitRule<L, I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SplitRule").field("layer", &name_of::<L>()).finish_non_exhaustive()
    }
}

impl<L: SplitBackward<I, O>, const I: usize, const O: usize> Rule for SplitRule<L, I, O> {
    fn backward(&self, gradient: Tensor<2>, [for_input, _]: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let weights = self.weights.iter().map(|weight| Value::of(weight.get())).collect();
        let token = Tensor::zeros([1, 1], &gradient.device());
        let gradient = Tensor::from_dispatch(gradient.into_dispatch());
        let (input, waiting) = self.layer.backward_input(&self.saved, typed(weights), gradient, for_input);
        let input = for_input.then(|| self.checked(input));
        let task = split_task::<I, O, L>(self.layer.clone(), waiting, self.wanted.clone());
        match &self.gradients {
            Gradients::Deferred(deferred) => {
                deferred.push(WeightTask::Split(task));
                [input, None]
            }
            Gradients::OnTape(slots) => {
                slots.fill((task.compute)());
                [input, Some(token)]
            }
            Gradients::Unwanted => [input, None],
        }
    }
}

impl<L: SplitBackward<I, O>, const I: usize, const O: usize> SplitRule<L, I, O> {
    /// Returns the gradient of the input, off the tape.
    fn checked(&self, gradient: Option<Tensor<I>>) -> Tensor<2> {
        let layer = name_of::<L>();
        let Some(gradient) = gradient else {
            panic!("`{layer}` returned no gradient of its input, and one is wanted")
        };
        let (found, shape) = (gradient.dims(), self.shape);
        assert!(found == shape, "`{layer}` returned a gradient of shape {found:?} for an input of {shape:?}");
        Tensor::from_dispatch(inner_of(gradient).into_dispatch())
    }
}

/// Returns the task of computing the gradients of a layer's weights.
fn split_task<const I: usize, const O: usize, L: SplitBackward<I, O>>(
    layer: Arc<L>,
    waiting: L::Waiting,
    wanted: Arc<[Option<ParamId>]>,
) -> SplitTask {
    let compute = move || {
        let off_tape =
            |gradient: Value| Value::of(inner_of(Tensor::<2>::from_dispatch(gradient.into_dispatch())));
        pack(layer.backward_weights(waiting)).into_iter().map(off_tape).collect()
    };
    SplitTask { layer: name_of::<L>(), wanted, compute: Box::new(compute) }
}

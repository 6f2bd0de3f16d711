//! AdamW whose moments take one byte per element of a matrix, on the processor.

use std::sync::Arc;

use burn::backend::Flex;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor, TensorData};
use burn_pack::Scalar;
use pipewright_kernel::adamw8bit::{Moment, blocks_of_row, step};

use super::adamw::{AdamW, AdamWMoments, cpu};
use crate::nn::elements;

/// [`AdamW`] whose moments of matrices have one byte for each element and 4 for each block of up to 256 elements of a
/// row (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022). Vectors, which take little memory, have
/// moments in single precision.
///
/// The moments are in the processor's memory, and steps run there; a parameter on another device is copied there and
/// back.
///
/// ```
/// use pipewright::optimizer::{AdamW, AdamW8bit};
///
/// let optimizer = AdamW8bit(AdamW { betas: (0.9, 0.95), ..AdamW::default() }).init();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bit(pub AdamW);

impl AdamW8bit {
    /// Returns the optimizer of a whole module.
    pub fn init(self) -> ModuleOptimizer {
        ModuleOptimizer::from(self)
    }
}

/// The state of a parameter.
#[derive(Clone)]
pub struct AdamW8bitState<const D: usize>(Form<D>);

#[derive(Clone)]
enum Form<const D: usize> {
    /// Of a vector.
    Single(Box<AdamWMoments<D>>),
    Blocks(Arc<Blocks<D>>),
}

/// The moments of a matrix, or of several.
#[derive(Clone)]
struct Blocks<const D: usize> {
    /// The steps so far.
    time: usize,
    shape: [usize; D],
    moments: [Moment; 2],
}

/// The names of the tensors of both moments in a record.
const NAMES: [[&str; 2]; 2] = [["codes_1", "scales_1"], ["codes_2", "scales_2"]];

impl<const D: usize> Blocks<D> {
    fn new(shape: [usize; D]) -> Self {
        let [rows, width] = rows_of(shape);
        Self { time: 0, shape, moments: [(); 2].map(|()| Moment::zeros(rows, width)) }
    }
}

/// Returns the number of rows, and the elements of each.
fn rows_of<const D: usize>(shape: [usize; D]) -> [usize; 2] {
    [shape[..D - 1].iter().product(), shape[D - 1]]
}

impl<const D: usize> RecordState for AdamW8bitState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let blocks = match &self.0 {
            Form::Single(moments) => return moments.state_flatten(prefix, out),
            Form::Blocks(blocks) => blocks,
        };
        out.push_scalar(prefix, "time", Scalar::UInt(blocks.time as u64));
        let mut scales = blocks.shape;
        scales[D - 1] = blocks_of_row(scales[D - 1]);
        for (moment, [code, scale]) in blocks.moments.iter().zip(NAMES) {
            out.push_tensor(prefix, code, TensorData::new(moment.codes.clone(), blocks.shape));
            out.push_tensor(prefix, scale, TensorData::new(moment.scales.clone(), scales));
        }
    }

    fn state_unflatten(prefix: &str, from: &mut StateSource, device: &Device) -> Option<Self> {
        if D == 1 {
            return AdamWMoments::state_unflatten(prefix, from, device)
                .map(Box::new)
                .map(Form::Single)
                .map(Self);
        }
        let Some(Scalar::UInt(time)) = from.take_scalar(prefix, "time") else { return None };
        let mut shape = None;
        let mut read = |[code, scale]: [&str; 2]| {
            let codes = from.take_tensor(prefix, code)?;
            let own: [usize; D] = codes.shape().iter().copied().collect::<Vec<_>>().try_into().ok()?;
            let scales = from.take_tensor(prefix, scale)?.try_into_vec::<f32>().ok()?;
            let [rows, width] = rows_of(own);
            let fits = scales.len() == rows * blocks_of_row(width) && *shape.get_or_insert(own) == own;
            fits.then_some(Moment { codes: codes.try_into_vec::<u8>().ok()?, scales })
        };
        let moments = [read(NAMES[0])?, read(NAMES[1])?];
        Some(Self(Form::Blocks(Arc::new(Blocks { time: time as usize, shape: shape?, moments }))))
    }
}

impl Optimizer for AdamW8bit {
    type State<const D: usize> = AdamW8bitState<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdamW8bitState<D>>,
    ) -> (Tensor<D>, Option<AdamW8bitState<D>>) {
        let blocks = match state {
            Some(AdamW8bitState(Form::Blocks(blocks))) => blocks,
            None if D > 1 => Arc::new(Blocks::new(parameter.dims())),
            single => {
                let moments = single.and_then(|AdamW8bitState(form)| match form {
                    Form::Single(moments) => Some(*moments),
                    Form::Blocks(_) => None,
                });
                let (parameter, moments) = self.0.step(learning_rate, parameter, gradient, moments);
                return (parameter, moments.map(Box::new).map(Form::Single).map(AdamW8bitState));
            }
        };
        // Others may hold the state: an optimizer that may undo the update.
        let mut blocks = Arc::unwrap_or_clone(blocks);
        blocks.time += 1;
        let by = self.0.at(blocks.time, learning_rate);
        let [_, width] = rows_of(blocks.shape);
        let [first, second] = &mut blocks.moments;
        let tensors = [parameter, gradient];
        let on_cpu = tensors.clone().map(cpu);
        let updated = match on_cpu {
            [Some(mut updated), Some(gradient)] => {
                drop(tensors);
                step(updated.storage_mut(), &elements(&gradient), width, [first, second], by);
                Tensor::from_primitive::<Flex>(updated)
            }
            _ => {
                let [parameter, gradient] = tensors;
                let (device, dtype) = (parameter.device(), parameter.dtype());
                let [mut values, gradient] =
                    [parameter, gradient].map(|tensor| tensor.into_data().iter::<f32>().collect::<Vec<_>>());
                step(&mut values, &gradient, width, [first, second], by);
                Tensor::from_data(TensorData::new(values, blocks.shape), (&device, dtype))
            }
        };
        (updated, Some(AdamW8bitState(Form::Blocks(Arc::new(blocks)))))
    }

    fn to_device<const D: usize>(
        AdamW8bitState(form): AdamW8bitState<D>,
        device: &Device,
    ) -> AdamW8bitState<D> {
        AdamW8bitState(match form {
            Form::Single(moments) => Form::Single(Box::new(AdamW::to_device(*moments, device))),
            blocks @ Form::Blocks(_) => blocks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers<const D: usize>(shape: [usize; D], seed: f32) -> Tensor<D> {
        let values =
            (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.37 + seed).sin()).collect::<Vec<f32>>();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    /// Returns the parameter after three steps, with the state recorded and restored before the last one.
    fn trained<const D: usize>(shape: [usize; D], optimizer: &impl Optimizer, is_held: bool) -> Vec<f32> {
        let (mut parameter, mut state) = (numbers(shape, 0.0), None);
        for t in 1..=3 {
            let held = is_held.then(|| (parameter.clone(), parameter.to_data(), state.clone()));
            (parameter, state) = optimizer.step(1e-2, parameter, numbers(shape, t as f32), state);
            if let Some((held, before, _)) = held {
                assert_eq!(held.to_data(), before, "storage that someone else holds stays as it is");
            }
        }
        parameter.into_data().iter::<f32>().collect()
    }

    fn check<const D: usize>(shape: [usize; D]) {
        let adamw = AdamW { betas: (0.9, 0.95), ..AdamW::default() };
        let found = trained(shape, &AdamW8bit(adamw), false);
        assert_eq!(found, trained(shape, &AdamW8bit(adamw), true));
        let expected = trained(shape, &adamw, false);
        for (found, expected) in found.iter().zip(&expected) {
            // Three updates of at most about the learning rate, whose moments are off by some percent.
            assert!((found - expected).abs() < 4e-3, "{found} and {expected}");
        }
        assert_eq!(found == expected, D == 1, "vectors have moments in single precision");
    }

    #[test]
    fn steps_are_near_those_in_single_precision() {
        check([700]);
        check([3, 8]);
        check([2, 300]);
        check([2, 3, 256]);
    }

    #[test]
    fn a_record_has_the_state() {
        let optimizer = AdamW8bit(AdamW::default());
        let (parameter, state) = optimizer.step(0.1, numbers([2, 300], 0.0), numbers([2, 300], 1.0), None);
        let state = state.expect("a state");
        let mut sink = StateSink::default();
        state.state_flatten("7", &mut sink);
        let restore = |tensors: Vec<(String, TensorData)>| {
            let mut source = StateSource::new(sink.scalars.iter().cloned().collect());
            tensors.into_iter().for_each(|(name, data)| source.insert_tensor(name, data));
            AdamW8bitState::<2>::state_unflatten("7", &mut source, &Device::flex())
        };
        let names: Vec<&str> = sink.tensors.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["7.codes_1", "7.scales_1", "7.codes_2", "7.scales_2"]);
        let restored = restore(sink.tensors.clone()).expect("a state");
        let next =
            |state| optimizer.step(0.1, parameter.clone(), numbers([2, 300], 2.0), Some(state)).0.into_data();
        assert_eq!(next(restored), next(state));
        // A missing tensor, and scales of another shape.
        assert!(restore(sink.tensors[1..].to_vec()).is_none());
        let mut wrong = sink.tensors.clone();
        wrong[1].1 = TensorData::new(vec![0.0f32; 2], [2, 1]);
        assert!(restore(wrong).is_none());
    }
}

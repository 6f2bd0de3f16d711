//! The state of a mixer after the tokens so far, so that generation does not compute them again for each
//! token.

use burn::module::Param;
use burn::tensor::{Tensor, TensorData};
use pipewright_kernel::pointwise::exp;
use pipewright_kernel::{convolution, gated_norm, scan};

use super::mixer::{Mamba2, MambaScan};

/// The state that a mixer keeps of a sequence that grows. It is in the processor's memory, and its size does
/// not depend on the number of tokens.
#[derive(Clone, Debug, Default)]
pub struct MambaCache {
    /// The latest rows of the input projection's result, which the convolution of the next token sees.
    rows: Vec<f32>,
    /// The states of the scan; empty before the first token.
    states: Vec<f32>,
}

impl Mamba2 {
    /// Mixes the next rows of the sequence of `cache`, which are of one document. Gradients are not computed.
    /// Shapes: `[rows, hidden]` in and out. The results differ from [`Mamba2::forward`]'s in rounding only.
    ///
    /// # Panics
    /// When the shapes do not fit the sizes.
    pub fn extend(&self, x: Tensor<2>, cache: &mut MambaCache) -> Tensor<2> {
        self.out_proj.forward(self.scan().extend(self.in_proj.forward(x), cache))
    }
}

impl MambaScan {
    /// Returns the mixed channels of the next rows of the sequence of `cache`, like [`MambaScan::forward`]; see
    /// [`Mamba2::extend`].
    ///
    /// # Panics
    /// When the shapes do not fit the sizes.
    pub fn extend(&self, projected: Tensor<2>, cache: &mut MambaCache) -> Tensor<2> {
        let (device, dtype, sizes) = (projected.device(), projected.dtype(), &self.sizes);
        let [rows, width] = projected.dims();
        assert_eq!(width, sizes.projected(), "the input projection fits {sizes:?}");
        let projected = floats(projected);
        let earlier = cache.rows.len() / width;
        cache.rows.extend(&projected);
        let (weight, bias) = (floats(self.conv1d.weight.val()), self.conv1d.bias.as_ref().map(values));
        let u = convolution::forward(convolution::Inputs {
            dims: sizes.convolution(earlier + rows),
            v: &cache.rows,
            weight: &weight,
            bias: bias.as_deref(),
            documents: None,
        });
        cache.rows.drain(..(earlier + rows).saturating_sub(sizes.taps - 1) * width);
        let inputs = scan::Inputs {
            dims: sizes.scan(rows, rows),
            u: &u[earlier * sizes.convolved()..],
            steps: &scan::steps(sizes.steps(), &projected, &values(&self.dt_bias)),
            rates: &values(&self.A_log).iter().map(|log| -exp(*log)).collect::<Vec<_>>(),
            skip: &values(&self.D),
            documents: None,
        };
        let y = if cache.states.is_empty() {
            // All tokens at once are computed as in training, in chunks.
            let (y, states) = scan::forward_with_state(inputs);
            cache.states = states;
            y
        } else {
            scan::step(inputs, &mut cache.states)
        };
        let (mixed, _) = gated_norm::forward(gated_norm::Inputs {
            y: &y,
            z: &projected,
            stride: width,
            weight: &values(&self.norm.weight),
            runs: sizes.groups,
            epsilon: sizes.epsilon as f32,
        });
        Tensor::<2>::from_data(TensorData::new(mixed, [rows, sizes.width()]), &device).cast(dtype)
    }
}

fn values(parameter: &Param<Tensor<1>>) -> Vec<f32> {
    floats(parameter.val())
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

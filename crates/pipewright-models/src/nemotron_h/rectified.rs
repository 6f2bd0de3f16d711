//! A feed-forward layer with a squared rectifier and without a gate.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{HeldLinear, TensorParallel, relu_squared};
use pipewright_shapes::nemotron_h::NemotronHConfig;

use crate::error::ModelError;
use crate::parameter::{Builder, SplitLinear};
use crate::split::require_parts;

/// `down(max(up(x), 0)²)`.
#[derive(Module, Debug)]
pub(crate) struct RectifiedLayer {
    up_proj: HeldLinear,
    down_proj: HeldLinear,
}

impl RectifiedLayer {
    pub(crate) fn build(
        config: &NemotronHConfig,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let size = ("intermediate_size", config.intermediate_size);
        require_parts(path, "up_proj.weight", size, builder.tensor_ranks())?;
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let outputs = SplitLinear::Outputs { shards: builder.tensor_ranks() };
        let (up, down) = (format!("{path}.up_proj"), format!("{path}.down_proj"));
        Ok(Self {
            up_proj: builder.split_linear(bias, &up, [hidden, inner], outputs)?,
            down_proj: builder.split_linear(bias, &down, [inner, hidden], SplitLinear::Inputs)?,
        })
    }

    pub(crate) fn forward(&self, x: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        let inner = relu_squared(self.up_proj.forward(tensor.enter(x)));
        self.down_proj.forward_split_inputs(inner, tensor)
    }
}

//! An expert that every token goes through, next to the experts that a router chooses.

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;
use pipewright::nn::{Linear, TensorParallel, swiglu};
use pipewright::stage::StageContext;

use crate::error::ModelError;
use crate::parameter::{Builder, SplitLinear};
use crate::projection::{Projection, SharedInput};
use crate::split::require_parts;

/// The three projections of the expert.
#[derive(Module, Debug)]
pub(crate) struct SharedExpert {
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
}

impl SharedExpert {
    /// Builds the expert at `path`. The sizes are the width of the hidden states and the inner width, with the
    /// key that says it.
    pub(crate) fn build(
        path: &str,
        (hidden, (key, inner)): (usize, (&'static str, usize)),
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let shards = builder.tensor_ranks();
        require_parts(path, "gate_proj.weight", (key, inner), shards)?;
        let mut linear =
            |name: &str, sizes, split| builder.projection(false, &format!("{path}.{name}"), sizes, split);
        let outputs = SplitLinear::Outputs { shards };
        Ok(Self {
            gate_proj: linear("gate_proj", [hidden, inner], outputs)?,
            up_proj: linear("up_proj", [hidden, inner], outputs)?,
            down_proj: linear("down_proj", [inner, hidden], SplitLinear::Inputs)?,
        })
    }

    /// Returns the expert's output, times the sigmoid of `gate` if there is one, which has one output for each
    /// token.
    /// Shapes: `[tokens, hidden]` in and out.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        gate: Option<&Linear>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let share = gate.map(|gate| sigmoid(gate.forward(x.clone())));
        let x = SharedInput::of_several(tensor.enter(x));
        let inner = swiglu(self.gate_proj.forward(&x, context), self.up_proj.forward(&x, context));
        drop(x);
        let result = self.down_proj.forward_split_inputs(&SharedInput::new(inner), tensor, context);
        match share {
            Some(share) => share * result,
            None => result,
        }
    }
}

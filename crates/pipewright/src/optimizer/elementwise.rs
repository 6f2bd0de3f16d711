//! Whether an optimizer may be given parts of parameters.
//!
//! Where parameters are sharded, each replica updates its own rows. That is the update of the whole parameter only if
//! what happens to an element depends on that element alone: so it is with SGD, Adam, AdamW, not with those that look at
//! a matrix (Muon, Adafactor) or at a parameter's norm (Lamb, clipping by the norm of each parameter). Burn's optimizers
//! do not say which kind they are, so one is tried on a small parameter, whole and in two parts.

use burn::module::{Module, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};

/// Steps of the trial: state of the first must matter in the second.
const STEPS: usize = 3;
/// Larger than any threshold at which gradients are clipped.
const LARGE: f32 = 1e4;

#[derive(Module, Debug)]
struct Trial {
    weight: Param<Tensor<2>>,
}

/// Whether `optimizer`, in its settings for parameters of no special group, treats each element by itself.
pub(crate) fn acts_element_by_element(optimizer: &ModuleOptimizer) -> bool {
    let device = Device::flex();
    let numbers = |seed: f32, scale: f32| {
        let values: Vec<f32> = (0..24).map(|i| scale * (i as f32 * 0.7 + seed).sin()).collect();
        Tensor::<1>::from_floats(values.as_slice(), &device).reshape([6, 4])
    };
    let trained = |rows: std::ops::Range<usize>| {
        let id = ParamId::new();
        let weight = numbers(0.1, 1.0).slice(rows.clone()).autodiff().require_grad();
        let mut trial = Trial { weight: Param::initialized(id, weight) };
        let mut optimizer = optimizer.clone();
        for step in 0..STEPS {
            let scale = if step == 1 { LARGE } else { 0.01 };
            let mut gradients = GradientsParams::new();
            gradients.register(id, numbers(step as f32, scale).slice(rows.clone()));
            trial = optimizer.step(0.1, trial, gradients);
        }
        trial.weight.val().inner()
    };
    let parts = Tensor::cat(vec![trained(0..3), trained(3..6)], 0);
    trained(0..6).into_data() == parts.into_data()
}

#[cfg(test)]
mod tests {
    use burn::grad_clipping::GradientClipping;
    use burn::optim::{AdamConfig, AdamWConfig, MuonConfig, SgdConfig};

    use super::*;
    use crate::optimizer::AdamW;

    #[test]
    fn optimizers_that_work_on_elements_are_told_from_others() {
        let clipped = |clipping| AdamConfig::new().init().with_grad_clipping(clipping);
        for (name, optimizer, expected) in [
            ("sgd", SgdConfig::new().init(), true),
            ("adam", AdamConfig::new().init(), true),
            ("adamw", AdamWConfig::new().init(), true),
            ("our adamw", AdamW::default().init(), true),
            ("adam clipped by value", clipped(GradientClipping::Value(1.0)), true),
            ("adam clipped by norm", clipped(GradientClipping::Norm(1.0)), false),
            ("muon", MuonConfig::new().init(), false),
        ] {
            assert_eq!(acts_element_by_element(&optimizer), expected, "{name}");
        }
    }
}

//! The numbers of parts into which a plan may cut a model's output head.

use pipewright_models::CutModel;
use pipewright_schedule::profile::Profile;

use crate::config::Settings;
use crate::config::optimizer::OptimizerName;
use crate::failure::Failure;
use crate::training::prepare::read_model;

/// Returns the numbers of parts that a plan for `ranks` tries: for a whole head that can be cut, 1, the number of ranks, and
/// twice that; otherwise none, which leaves the number of the profile. A head that the optimizer updates as a whole is not cut.
pub(crate) fn tried_head_parts(
    settings: &Settings,
    profile: &Profile,
    ranks: u32,
) -> Result<Vec<u32>, Failure> {
    // The ranks of a node may become tensor ranks, which split the vocabulary themselves.
    let is_whole = settings.optimizer.name == OptimizerName::Adafactor;
    if settings.pipeline.head_parts > 1 || profile.node.is_some() || is_whole {
        return Ok(Vec::new());
    }
    let model = read_model(settings)?;
    let can_be = |parts: &u32| CutModel::new(model.model().clone(), *parts).is_ok();
    Ok([1, ranks, ranks.saturating_mul(2)].into_iter().filter(can_be).collect())
}

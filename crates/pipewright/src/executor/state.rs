//! A rank's training state between two steps: reading it for a checkpoint, and restoring it from one.

use std::sync::Arc;

use super::connection::Connection;
use super::context::RankContext;
use super::parameters::KnownParameters;
use super::stages::LocalStages;
use crate::checkpoint::{
    HeldParameter, NotFinite, RankState, StageLeaves, StageState, StoredState, leaves_of,
};
use crate::failure::Cause;
use crate::stage::RestoredPaths;

/// Returns the parameters and optimizer state of all stages, which share storage with the model. If the
/// shared parameters are known, only the lowest stage of a shared parameter returns it. The replicas of a
/// shard group hold the state together, and only the replicas of the first group return their stages.
pub(super) fn state(
    context: &RankContext,
    connection: &Connection,
    stages: &LocalStages,
    known: &KnownParameters,
) -> RankState {
    let stages = stages.iter().filter(|_| context.is_in_first_group()).map(|stage| {
        let StageState { mut parameters, optimizer, row_shard } = stage.runner().state(context.tensor_rank());
        parameters.retain(|parameter| known.counts(context, stage, parameter.index));
        StageState { parameters, optimizer, row_shard }
    });
    let (rank, memory) = (context.world_rank, connection.memory.clone());
    RankState { rank, stages: stages.collect(), loss_scale: None, memory }
}

/// Returns the hashes of the trained parameters of all stages, or of the parts of them that this rank holds, each with
/// its optimizer state. A replica that holds the whole state by itself has all hashes.
pub(super) fn fingerprint(
    context: &RankContext,
    stages: &LocalStages,
    known: &KnownParameters,
) -> Result<StageLeaves, Cause> {
    let mut all = Vec::new();
    for stage in stages.iter() {
        let runner = stage.runner();
        let mut state = runner.state(context.tensor_rank());
        state.parameters.retain(|held| held.is_trained && known.counts(context, stage, held.index));
        let rows_of = |index: usize| runner.table().shapes.get(index)?.first().copied();
        let leaves = context.with_idle_threads(|| leaves_of(state, rows_of));
        let leaves = leaves.map_err(|error| Cause::Mistake(format!("stage {}: {error}", stage.index)))?;
        all.extend(leaves.into_iter().map(|leaf| (stage.index, leaf)));
    }
    Ok(all)
}

/// Returns a trained parameter of this rank that has elements that are not finite, and their number.
pub(super) fn ruined_parameter(context: &RankContext, stages: &LocalStages) -> Option<(Arc<str>, NotFinite)> {
    let states = stages.iter().map(|stage| stage.runner().state(context.tensor_rank()));
    let trained = states.flat_map(|state| state.parameters).filter(|parameter| parameter.is_trained);
    let mut scanned = trained.map(|HeldParameter { path, value, .. }| {
        let data = value.into_data();
        let mut found = NotFinite::default();
        found.scan(data.dtype(), data.as_bytes());
        (path, found)
    });
    scanned.find(|(_, found)| !found.is_empty())
}

/// Restores the state of all stages. If `may_miss`, parameters that the state does not have keep their
/// values. After an error some stages are restored and others are not.
pub(super) fn restore(
    context: &RankContext,
    connection: &Connection,
    stages: &mut LocalStages,
    stored: &dyn StoredState,
    may_miss: bool,
) -> Result<RestoredPaths, Cause> {
    let mut all = RestoredPaths::default();
    for stage in stages.iter_mut() {
        let index = stage.index;
        let paths = stage.runner_mut().restore(stored, context.tensor_rank(), may_miss);
        let paths = paths.map_err(|error| Cause::Restore { stage: index, error: Arc::new(error) })?;
        all.restored.extend(paths.restored);
        all.missing.extend(paths.missing);
        // Reading may take longer than the deadline. This call reports progress.
        connection.moved(0);
    }
    Ok(all)
}

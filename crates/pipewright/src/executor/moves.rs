//! Layers that move from stage to stage between two steps, with their parameters and their optimizer state.
//!
//! Each rank takes the state of its stages that change ([`MovedState`]), and sends the state of layers that go to
//! another rank ([`Tag::Layers`]). It sends before it waits, so no order of ranks can block another. When the state
//! of the layers that it gets has arrived, it makes its stages again, for their new layers, and restores them from
//! what it had and what has arrived. The ranks then compare their parameters as after a launch (`parameters.rs`).
//!
//! The copies of a shared parameter on one rank have one state in the optimizer, which belongs to the first of them
//! (`sharing.rs`). If a rank has such copies, it makes all of its stages again, because another one may be the first
//! after the move.

use std::sync::Arc;

use pipewright_schedule::StageIndex;

use super::connection::Connection;
use super::context::RankContext;
use super::stages::LocalStages;
use crate::checkpoint::{CheckpointError, MovedState};
use crate::collective::{Exchange, Slot};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Payload, Tag};
use crate::stage::StageRunner;

/// Layers that move from one stage to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedLayers {
    /// The stage that has them.
    pub from: StageIndex,
    /// The stage that gets them.
    pub to: StageIndex,
    /// The global paths of their parameters. The frozen base of adapters may be left out.
    pub parameters: Vec<String>,
}

/// A change of the layers of stages, the same on all ranks.
pub(crate) struct StageChange {
    /// The layers that move.
    pub(crate) moved: Vec<MovedLayers>,
    /// The stages that are made again, in order: their layers change, or they compute in another way after the
    /// move.
    pub(crate) stages: Vec<StageIndex>,
    pub(crate) build: Box<BuildStage>,
}

/// Makes a stage again on the thread of its rank.
type BuildStage =
    dyn Fn(&RankContext, &Connection, StageIndex) -> Result<Box<dyn StageRunner>, Cause> + Send + Sync;

/// The state of a rank's stages while layers move.
pub(super) struct Arrivals {
    change: Arc<StageChange>,
    /// The stages of this rank that are made again.
    stages: Vec<StageIndex>,
    /// The state that this rank has had.
    state: MovedState,
    /// The stages that the messages are for.
    receivers: Vec<StageIndex>,
    pub(super) messages: Exchange<Arc<[u8]>>,
}

impl Arrivals {
    /// Sends the state of the layers that go to other ranks.
    pub(super) fn begin(
        context: &RankContext,
        connection: &mut Connection,
        stages: &LocalStages,
        change: Arc<StageChange>,
    ) -> Result<Self, Cause> {
        let has_borrowed = stages.iter().any(|stage| {
            let runner = stage.runner();
            (0..runner.table().paths.len()).any(|index| runner.is_borrowed(index))
        });
        let is_changed = |stage: &StageIndex| has_borrowed || change.stages.contains(stage);
        let own: Vec<StageIndex> = stages.indices().into_iter().filter(is_changed).collect();
        let mut state = MovedState::default();
        for &stage in &own {
            let runner = stages.get(stage).runner();
            let mut held = runner.held_state(context.tensor_rank());
            held.parameters.retain(|parameter| !runner.is_borrowed(parameter.index));
            state.add(held).map_err(refused(stage))?;
        }
        let (mut awaited, mut receivers) = (Vec::new(), Vec::new());
        for MovedLayers { from, to, parameters } in &change.moved {
            let tag = Tag::Layers { from: *from, to: *to };
            match (context.is_local(*from), context.is_local(*to)) {
                (true, false) => {
                    let bytes = state.encoded(parameters).map_err(refused(*from))?;
                    let to = context.world_rank_of_stage(*to);
                    connection.send(to, tag, Payload::Bytes(bytes.into()));
                }
                (false, true) => {
                    let from = context.world_rank_of_stage(*from);
                    receivers.push(*to);
                    awaited.push(Slot::Expected(AwaitedMessage { from, tag }));
                }
                _ => {}
            }
        }
        Ok(Self { stages: own, state, receivers, messages: Exchange::new(awaited), change })
    }

    /// Makes the stages of this rank again, once all messages have arrived.
    pub(super) fn end(
        self,
        context: &RankContext,
        connection: &Connection,
        stages: &mut LocalStages,
    ) -> Result<(), Cause> {
        let Self { change, stages: changed, mut state, receivers, messages } = self;
        for (stage, bytes) in receivers.into_iter().zip(messages.into_contents()) {
            state.add_encoded(&bytes).map_err(refused(stage))?;
        }
        for stage in changed {
            let mut runner = (change.build)(context, connection, stage)?;
            runner.restore(&state, context.tensor_rank(), false).map_err(refused(stage))?;
            stages.replace(stage, runner);
            // Making a stage may take longer than the deadline.
            connection.moved(0);
        }
        Ok(())
    }
}

fn refused(stage: StageIndex) -> impl FnOnce(CheckpointError) -> Cause {
    move |error| Cause::Restore { stage, error: Arc::new(error) }
}

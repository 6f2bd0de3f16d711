//! Sharded parameters: gathered from the replicas of the shard group before their stage computes, dropped
//! after it.
//!
//! # Protocol
//!
//! At `UNSHARD` a replica sends its rows of the stage's parameters to every other replica of its shard group
//! ([`Tag::ParameterShard`]) and continues. If replicas hold experts together, only replicas with the same
//! experts get its rows of experts. The first computation that needs the parameters takes the rows of the
//! others and joins all rows to whole parameters; it waits for missing rows. At `RESHARD` the replica drops
//! all rows except its own. All replicas run the same program: each sends its rows at the same place of the
//! program, and before it waits for the rows of the others. So no replica can block another.
//!
//! After the program a stage has only its own rows, which the optimizer updates.
//!
//! If two batches run at once (`overlap.rs`), each gathers its own version of the parameters. Its messages have the attempt of
//! their batch. A replica that waits for rows waits for an earlier place in the order of computations, which is the same on all
//! replicas, and continues the batch that ends meanwhile. So these waits add no cycle either.
//!
//! With [`PipelineConfig::keep_gathered`](crate::config::PipelineConfig::keep_gathered), the stages keep all rows
//! from their first computation in a step of several batches until the program of its last batch has ended. `RESHARD`
//! then drops nothing, and `UNSHARD` exchanges nothing. The replicas agree on that, because they have the same
//! batches and the same configuration.

use pipewright_schedule::{Action, StageIndex};

use super::connection::Connection;
use super::context::RankContext;
use super::machine::Executor;
use super::recorder::Recorder;
use super::reduction::join_rows;
use super::stages::LocalStage;
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::hook::{Place, ReplicaPlace, ReshardRun, UnshardRun};
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::OptionalTensor;

impl Executor {
    /// Returns whether the stages keep the parameters that they gather: the step has several batches.
    pub(super) fn keeps_gathered(&self) -> bool {
        self.context.config.keep_gathered && (!self.accumulation.is_empty() || self.step.accumulates())
    }

    /// Runs `UNSHARD`, or lets the hook run it. Weight gradients need no
    /// parameters, so all replicas skip a gathering that only weight gradients follow.
    pub(super) fn unshard(&mut self, action: Action) -> Result<(), Cause> {
        self.ask_for_base(action.stage())?;
        let Self { context, connection, stages, step, .. } = self;
        let (stage, rest) = (stages.get_mut(action.stage()), step.rest(context.rank()));
        let is_asked = match context.hook() {
            None => true,
            Some(hook) => {
                let mut run = UnshardRun::new(shard_place(context, action), stage.runner_mut());
                hook.unshard(&mut run)?;
                run.is_asked()
            }
        };
        let is_needed = context.is_sharded() && is_computed(stage.index, rest.iter());
        let has_rows = stage.gathering.is_in_progress() || stage.runner().is_gathered();
        if is_needed && is_asked && !has_rows {
            start_gather(context, connection, stage);
        }
        Ok(())
    }

    /// Runs `RESHARD`, or lets the hook run it.
    pub(super) fn reshard(&mut self, action: Action) -> Result<(), Cause> {
        self.drop_base(action.stage())?;
        let keeps = self.keeps_gathered();
        let Self { context, stages, .. } = self;
        let stage = stages.get_mut(action.stage());
        if let Some(hook) = context.hook() {
            let mut run = ReshardRun::new(shard_place(context, action), stage.runner());
            hook.reshard(&mut run)?;
            if !run.is_asked() {
                return Ok(());
            }
        }
        if !keeps {
            stage.release();
        }
        Ok(())
    }

    /// Gives a stage its whole parameters before an action uses them, or returns a missing message.
    pub(super) fn fetch_parameters(&mut self, index: StageIndex) -> Result<Option<AwaitedMessage>, Cause> {
        self.await_base(index)?;
        let Self { connection, stages, recorder, .. } = self;
        let stage = stages.get_mut(index);
        if !stage.gathering.is_in_progress() {
            // Only a hook's function can leave them out.
            if stage.runner().is_gathered() {
                return Ok(None);
            }
            return Err(Cause::Mistake(format!(
                "the parameters of stage {index} are not gathered: the function that runs its UNSHARD must call `run` or \
                 `set_parameters`"
            )));
        }
        let awaited = receive_rows(connection, stage, recorder)?;
        if awaited.is_none() {
            recorder.note_received(Action::Unshard { stage: index });
        }
        Ok(awaited)
    }
}

/// Returns the place of an action among the replicas that hold the parameters together.
fn shard_place(context: &RankContext, action: Action) -> ReplicaPlace {
    let group = &context.shard_group;
    let place = Place { rank: context.world_rank, action };
    ReplicaPlace { place, replicas: group.members().len() as u32, replica: group.index() as u32 }
}

/// Sends this replica's rows of the stage's parameters to the others.
pub(super) fn start_gather(context: &RankContext, connection: &mut Connection, stage: &mut LocalStage) {
    let replicas = &context.shard_group;
    let rows = stage.runner().rows();
    let tag = Tag::ParameterShard { stage: stage.index, round: stage.gathering.next_round() };
    // The replicas of an expert group have as many experts each, so parameters have the same indices.
    let is_expert = |index| stage.runner().table().is_on_one_replica(index);
    let without_experts = || {
        let of_others = |(index, rows): (usize, &OptionalTensor)| rows.clone().filter(|_| !is_expert(index));
        rows.iter().enumerate().map(of_others).collect()
    };
    for (_, to) in replicas.others() {
        let has_experts = context.expert_shard_group.members().contains(&to);
        connection.send_copies(to, tag, if has_experts { rows.clone() } else { without_experts() });
    }
    stage.gathering.begin(Exchange::among(replicas, tag, rows));
}

/// Takes the rows that have arrived. Gives the stage its whole parameters, or returns a missing message.
pub(super) fn receive_rows(
    connection: &mut Connection,
    stage: &mut LocalStage,
    recorder: &mut Recorder,
) -> Result<Option<AwaitedMessage>, Cause> {
    let device = stage.inner_device();
    let Some(rows) = stage.gathering.rows_mut() else { return Ok(None) };
    if let Some(awaited) = connection.receive_tensors(rows, &device)? {
        return Ok(Some(awaited));
    }
    if let Some(rows) = stage.gathering.end() {
        if let Some(latest) = rows.latest {
            recorder.note_exposed(latest);
        }
        stage.runner_mut().gather(join_rows(rows.into_contents()));
    }
    Ok(None)
}

/// Returns whether `stage` computes a forward or a gradient of its inputs before its parameters are dropped.
fn is_computed<'a>(stage: StageIndex, rest: impl Iterator<Item = &'a Action>) -> bool {
    let held = rest.take_while(|action| **action != Action::Reshard { stage });
    held.flat_map(|action| action.parts()).any(|action| {
        let needs_parameters =
            matches!(action, Action::Forward { .. } | Action::Backward { .. } | Action::InputBackward { .. });
        needs_parameters && action.stage() == stage
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rest: &str, expected: bool) {
        let rest: Vec<Action> =
            rest.split_whitespace().map(|cell| cell.parse().expect("an action")).collect();
        assert_eq!(is_computed(StageIndex::new(1), rest.iter()), expected, "{rest:?}");
    }

    #[test]
    fn parameters_are_not_gathered_for_weight_gradients_only() {
        check("1UNSHARD 1W0 0F1 1W1 1RESHARD 1F2", false);
        check("1UNSHARD 1W0 1F1 1RESHARD", true);
        check("1UNSHARD 0F0 1I1 1RESHARD", true);
        check("1UNSHARD (0F7;1B3)OVERLAP_F_B 1RESHARD", true);
        check("1UNSHARD 0F0 0B0", false);
    }
}

//! Sharded parameters: gathered from the replicas of the shard group before their stage computes, dropped after it.
//!
//! # Protocol
//!
//! At `UNSHARD` a replica sends its rows of the stage's parameters to every other replica of its shard group
//! ([`Tag::ParameterShard`]) and continues. The first computation that needs the parameters takes the rows of the others
//! and joins all rows to whole parameters; it waits for missing rows. At `RESHARD` the replica drops all rows except its
//! own. All replicas run the same program: each sends its rows at the same place of the program, and before it waits for
//! the rows of the others. So no replica can block another.
//!
//! After the program a stage has only its own rows, which the optimizer updates.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::TensorData;
use pipewright_schedule::{Action, StageIndex};

use super::machine::Executor;
use super::reduction::joined;
use super::step::{Outcome, Phase};
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::hook::{Place, ReplicaPlace, ReshardRun, UnshardRun};
use crate::message::{AwaitedMessage, Tag};
use crate::stage::{StageError, Visit};
use crate::tensor::TensorShard;

/// The results of a visit to the modules of a rank.
#[derive(Debug, Default)]
pub(crate) struct Visited {
    /// The number of modules or parameters that were found.
    pub found: usize,
    /// Why a module was not changed.
    pub error: Option<StageError>,
}

impl Visited {
    fn add(&mut self, outcome: Result<usize, StageError>) {
        match outcome {
            Ok(found) => self.found += found,
            Err(error) => self.error = Some(error),
        }
    }
}

/// A parameter of the model, read between two steps.
#[derive(Clone, Debug)]
pub struct NamedParameter {
    /// The stage that holds it.
    pub stage: StageIndex,
    /// Its global path.
    pub path: Arc<str>,
    /// The shard of the parameter that the values are, if several ranks compute the stage together.
    pub shard: TensorShard,
    /// Its values.
    pub data: TensorData,
}

impl Executor {
    /// Runs `UNSHARD`, or lets the hook run it. Weight gradients need no parameters, so all replicas skip a gathering
    /// that only weight gradients follow.
    pub(super) fn unshard(&mut self, action: Action, stage: StageIndex) -> Result<(), Cause> {
        let is_asked = match self.hook.clone() {
            None => true,
            Some(hook) => {
                let at = self.shard_place(action);
                let mut run = UnshardRun::new(at, &mut *self.local_stage(stage).runner);
                hook.unshard(&mut run)?;
                run.is_asked()
            }
        };
        let rest = self.program().row(self.rank).iter().skip(self.step.position);
        let is_needed = self.endpoint.row_shard().is_some() && is_computed(stage, rest);
        if is_needed && is_asked && self.local_stage(stage).gathering.is_none() {
            self.start_gather(stage);
        }
        Ok(())
    }

    /// Runs `RESHARD`, or lets the hook run it.
    pub(super) fn reshard(&mut self, action: Action, stage: StageIndex) -> Result<(), Cause> {
        if let Some(hook) = self.hook.clone() {
            let at = self.shard_place(action);
            let mut run = ReshardRun::new(at, &*self.local_stage(stage).runner);
            hook.reshard(&mut run)?;
            if !run.is_asked() {
                return Ok(());
            }
        }
        self.release(stage);
        Ok(())
    }

    /// Returns the place of an action among the replicas that hold the parameters together.
    fn shard_place(&self, action: Action) -> ReplicaPlace {
        let group = self.endpoint.shard_group();
        let place = Place { rank: self.world_rank, action };
        ReplicaPlace { place, replicas: group.members().len() as u32, replica: group.place() as u32 }
    }

    /// Sends this replica's rows of the stage's parameters to the others.
    fn start_gather(&mut self, index: StageIndex) {
        let replicas = self.endpoint.shard_group().clone();
        let stage = self.local_stage(index);
        let (rows, round) = (stage.runner.rows(), stage.gathers);
        stage.gathers += 1;
        let tag = Tag::ParameterShard { stage: index, round };
        for (_, to) in replicas.others() {
            self.send_copies(to, tag, rows.clone());
        }
        self.local_stage(index).gathering = Some(Exchange::among(&replicas, tag, rows));
    }

    /// Gives a stage its whole parameters if they are being gathered, or returns a missing message.
    pub(super) fn fetch_parameters(&mut self, index: StageIndex) -> Result<Option<AwaitedMessage>, Cause> {
        let Some(mut rows) = self.local_stage(index).gathering.take() else {
            // Only a hook's function can leave them out.
            let is_gathered = self.local_stage(index).runner.is_gathered();
            return if is_gathered { Ok(None) } else { Err(Cause::NotGathered { stage: index }) };
        };
        let device = self.local_stage(index).runner.device().clone().inner();
        let awaited = self.receive_tensors(&mut rows, &device)?;
        if awaited.is_some() {
            self.local_stage(index).gathering = Some(rows);
            return Ok(awaited);
        }
        if let Some(latest) = rows.latest() {
            self.note_exposed(latest);
        }
        self.local_stage(index).runner.gather(joined(rows.into_contents()));
        if matches!(self.step.phase, Phase::Actions) {
            self.note_received(Action::Unshard { stage: index });
        }
        Ok(None)
    }

    /// Drops all rows of a stage's parameters except this replica's.
    pub(super) fn release(&mut self, stage: StageIndex) {
        let stage = self.local_stage(stage);
        stage.gathering = None;
        stage.runner.release();
    }

    /// As [`Executor::release`], for all stages.
    pub(super) fn release_all(&mut self) {
        for stage in &mut self.stages {
            stage.gathering = None;
            stage.runner.release();
        }
    }

    /// Begins to collect the whole parameters of the stage at this place. All replicas do so together.
    pub(super) fn begin_collecting(&mut self, place: usize, collected: Vec<NamedParameter>) -> Phase {
        let is_sharded = self.endpoint.row_shard().is_some();
        match self.stages.get(place).map(|stage| stage.index) {
            Some(stage) if is_sharded => self.start_gather(stage),
            Some(_) => {}
            // As in a step, no process finishes before all ranks have.
            None if is_sharded => {
                let report = self.report(None, Duration::ZERO);
                return self.finish(Outcome { reports: vec![report], collected, ..Outcome::default() });
            }
            None => return Phase::Done(Outcome { collected, ..Outcome::default() }),
        }
        Phase::Collect { place, collected }
    }

    /// Keeps the whole parameters of the stage at this place, or visits its module, and continues with the next stage.
    pub(super) fn collect_stage(&mut self, place: usize, mut collected: Vec<NamedParameter>) -> Phase {
        let is_first = self.endpoint.coord().replica == 0;
        let tensor_rank = self.endpoint.tensor_rank();
        if let Some(stage) = self.stages.get_mut(place) {
            let (index, runner) = (stage.index, &mut stage.runner);
            match &self.visit {
                Some(Visit::Read { .. }) if !is_first => {}
                Some(visit) => self.visited.add(runner.visit(index, &visit.clone().on(tensor_rank))),
                None => {
                    let named = runner.paths().iter().cloned().zip(runner.parameters()).enumerate();
                    collected.extend(named.map(|(place, (path, data))| {
                        let shard = runner.placement(place).shard_of(tensor_rank);
                        NamedParameter { stage: index, path, shard, data }
                    }));
                }
            }
            self.release(index);
        }
        self.begin_collecting(place + 1, collected)
    }
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

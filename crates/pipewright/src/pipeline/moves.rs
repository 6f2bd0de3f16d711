//! Moves of layers between the stages of a running pipeline, between two steps.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;

use pipewright_schedule::{StageIndex, ValidatedProgram};

use super::error::PipelineError;
use super::ranks::End;
use super::running::Pipeline;
use crate::driver::Command;
use crate::executor::{MovedLayers, StageChange};
use crate::nn::TensorParallel;
use crate::stage::Stage;

impl Pipeline {
    /// Returns in every process what the process of the first rank passes. All processes call it between the same
    /// two steps, so they can follow a choice of that process.
    ///
    /// # Errors
    /// When a step has begun, or a rank fails or no longer answers.
    pub fn share(&mut self, own: &str) -> Result<String, PipelineError> {
        self.require_none_begun()?;
        if self.is_whole_world() {
            return Ok(own.to_owned());
        }
        let (attempt, own): (_, Arc<[u8]>) = (self.ranks.begin_exchange(), own.as_bytes().into());
        let replies = self.ranks.command(|reply| Command::Share { attempt, own: own.clone(), reply })?;
        let shared = self.ranks.await_ranks(&replies, |shared| shared);
        let shared = shared.map_err(|error| self.fail(self.ranks.step(), error, false))?;
        let bytes = shared.into_iter().next().unwrap_or(own);
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Moves layers from stage to stage without a new launch. The state of the layers in `moved` goes from rank to
    /// rank, in the form of a checkpoint's file. `make` then makes the stages that change, as for
    /// [`Pipeline::launch_split`], for their new layers; the values of their parameters do not matter, except for
    /// the base of adapters. From the next step on, `program` runs, which has the same stages on the same ranks. It
    /// may differ in the stages that it trains. Losses, parameters and the optimizer's state have the same bits as
    /// without the move.
    ///
    /// All processes call it between the same two steps, with the same layers and programs.
    ///
    /// # Errors
    /// When a step has begun, gradients wait for an update, or the program has other stages, ranks or microbatches;
    /// nothing has changed then. When a rank fails, the pipeline takes no further step.
    pub fn move_layers<F, E>(
        &mut self,
        program: ValidatedProgram,
        moved: Vec<MovedLayers>,
        make: F,
    ) -> Result<(), PipelineError>
    where
        F: Fn(StageIndex, &TensorParallel) -> Result<Stage, E> + Send + Sync + 'static,
        E: Display,
    {
        self.require_none_begun()?;
        if self.accumulation.is_pending() {
            return Err(PipelineError::ChangeBeforeUpdate);
        }
        self.require_alike(&program)?;
        let stages = self.changed_stages(&program, &moved);
        let setup = self.setup.again(Arc::new(program))?;
        let on_ranks = setup.clone();
        let build = Box::new(move |context: &_, connection: &_, stage| {
            on_ranks.stage(context, connection, stage, &make)
        });
        let change = Arc::new(StageChange { moved, stages, build });
        let attempt = self.ranks.begin_exchange();
        let replies = self.ranks.command(|reply| Command::Move { attempt, change: change.clone(), reply })?;
        let outcome = self.ranks.await_ranks(&replies, |outcome| outcome);
        setup.end_launch();
        if let Err(error) = outcome {
            let error = self.fail(self.ranks.step(), error, false);
            self.ranks.end(End::HalfChanged);
            return Err(error);
        }
        setup.board.set_program(&setup.program);
        self.setup = setup;
        self.verifier.forget();
        self.last_end = None;
        self.ranks.begin_exchange();
        self.find_shared().inspect_err(|_| self.ranks.end(End::HalfChanged))
    }

    /// Refuses a program that does not fit the running ranks.
    fn require_alike(&self, program: &ValidatedProgram) -> Result<(), PipelineError> {
        let own = &self.setup.program;
        let is_alike = own.placement() == program.placement()
            && own.microbatches() == program.microbatches()
            && own.slices() == program.slices()
            && own.level() == program.level()
            && own.is_forward_only() == program.is_forward_only();
        if is_alike {
            return Ok(());
        }
        Err(PipelineError::setup(
            "layers move to a program with other stages, ranks, microbatches or slices: keep those of the program that runs",
        ))
    }

    /// Returns the stages that are made again: their layers change, or they compute in another way.
    fn changed_stages(&self, program: &ValidatedProgram, moved: &[MovedLayers]) -> Vec<StageIndex> {
        let ends = moved.iter().flat_map(|layers| [layers.from, layers.to]);
        let trained = |program: &ValidatedProgram, stage| program.as_program().trained().backward_of(stage);
        let all = program.placement().all_stages();
        let others = all.filter(|&stage| trained(program, stage) != trained(&self.setup.program, stage));
        ends.chain(others).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

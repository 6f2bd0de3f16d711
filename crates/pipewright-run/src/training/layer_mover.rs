//! Moves layers to other ranks between two steps when ranks have become slower or faster (`run.replan`).
//!
//! The leader observes the timelines. Every few steps it decides, and passes its choice to all processes; the next step
//! does not begin before. Each process then makes the program of the new cut and proves it, and the layers move
//! ([`Pipeline::move_layers`](pipewright::pipeline::Pipeline::move_layers)). The settings of the run keep the cut with
//! which it began: a run that continues after a fault, or that resumes, begins with that cut and follows its machines
//! again.

use std::sync::Arc;
use std::time::Instant;

use pipewright::nn::TensorParallel;
use pipewright::pipeline::{MovedLayers, PipelineError};
use pipewright::train::Trainer;
use pipewright_models::InitialParameters;
use pipewright_schedule::csv::print_program;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::partition::Partition;
use pipewright_schedule::rebalance::{
    Decision, EVERY, MoveCosts, MovedRange, Proposal, Rebalancer, layer_moves,
};
use pipewright_schedule::{StageIndex, Timeline};
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, RunError};
use crate::recovery::{LayerMove, MoveEvent, MovedRun, kept};
use crate::run_model::RunModel;
use crate::settings::Settings;
use crate::settings::pipeline::PartitionChoice;
use crate::training::launch::stage_maker;
use crate::training::memory::{memory_plan, move_plan, require_fit, require_move_fits};
use crate::training::model::read_model;
use crate::training::optimizer::state_rule;
use crate::training::prepare::{CutProgram, Prepared, RunParts};

/// The bytes per second with which layers are assumed to move before a move has been measured.
const FIRST_RATE: f64 = 2.5e8;

/// The bytes of a number of a parameter.
const ELEMENT: u64 = 4;

/// The cut of a running pipeline, and when it changes.
pub(crate) struct LayerMover {
    settings: Settings,
    model: Arc<dyn RunModel>,
    /// Fails if the ranks do not fit into memory with another cut, or while their layers move to it, as the command
    /// `pipewright check` counts it.
    require_fit: Box<RequireFit>,
    initial: InitialParameters,
    source: ProgramSource,
    cut: Partition,
    /// The paths of the parameters of each layer.
    paths: Vec<Vec<String>>,
    /// The bytes of each layer that a move sends.
    bytes: Vec<u64>,
    seconds_per_byte: f64,
    rebalancer: Rebalancer,
    /// The last cut that was better and did not fit.
    refused: Option<Partition>,
}

/// A check of the next cut. The partition is the present one.
type RequireFit = dyn Fn(RunParts<'_>, &Partition) -> Result<(), RunError>;

/// The choice of the leader.
#[derive(Debug, Serialize, Deserialize)]
struct Choice {
    /// The first layer of each stage but the first.
    boundaries: Vec<usize>,
    /// The hash of the program that all processes must make.
    program: String,
}

/// Why layers did not move.
pub(crate) enum MoveFailure {
    /// A rank failed.
    Rank(PipelineError),
    /// A failure that only this process knows of.
    Other(RunError),
}

impl LayerMover {
    /// Returns the mover of a prepared run, if its settings ask for one and it has several ranks. `is_own` says that
    /// the model is the caller's.
    pub(crate) fn of(prepared: &Prepared, is_own: bool) -> Result<Option<Self>, RunError> {
        let Prepared { settings, model, layers, partition, .. } = prepared;
        let Some(source) = prepared.source.clone().filter(|_| prepared.moves_layers()) else {
            return Ok(None);
        };
        let rule = state_rule(settings).optimizer;
        let (mut paths, mut bytes) = (Vec::new(), Vec::new());
        for layer in 0..partition.layers() {
            let specs = model.outline(layer..layer + 1, &settings.mesh.first_tensor_rank())?;
            let sent = specs.iter().filter(|spec| model.adapter().is_none() || model.is_trained(&spec.path));
            let numbers = |shape: &[usize]| shape.iter().map(|&size| size as u64).product::<u64>();
            bytes.push(sent.map(|spec| ELEMENT * numbers(&spec.shape) + rule.bytes(spec)).sum());
            paths.push(specs.into_iter().map(|spec| spec.path).collect());
        }
        let require_fit: Box<RequireFit> = if is_own {
            Box::new(|_, _| Ok(()))
        } else {
            let family = read_model(settings)?;
            Box::new(move |next, partition| {
                let (before, after) = (RunParts { partition, ..next }.outlines()?, next.outlines()?);
                require_fit(&memory_plan(next, &family, &after)?)?;
                require_move_fits(&move_plan(next, &family, &before, Some(&after)))
            })
        };
        let initial = match model.adapter() {
            Some(_) => prepared.initial.clone(),
            // All values arrive or stay, so the weights of a model directory need not be read.
            None => InitialParameters::Seed(settings.run.seed),
        };
        Ok(Some(Self {
            model: model.clone(),
            require_fit,
            initial,
            source,
            cut: partition.clone(),
            paths,
            bytes,
            seconds_per_byte: FIRST_RATE.recip(),
            rebalancer: Rebalancer::new(layers.weights()),
            refused: None,
            settings: settings.clone(),
        }))
    }

    /// Returns whether the ranks must not begin the next step during this one, because layers may move between them.
    /// It is the same in all processes.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(EVERY)
    }

    /// Adds the timeline of a step, in the leader.
    pub(crate) fn observe(&mut self, timeline: &Timeline) {
        self.rebalancer.observe(timeline, &self.cut);
    }

    /// Moves layers after a step, if the leader chooses so. All processes call it after the same steps. Returns the
    /// record of the move. `note` takes sentences in the leader.
    pub(crate) fn after_step(
        &mut self,
        trainer: &mut Trainer,
        is_leader: bool,
        note: impl Fn(&str),
    ) -> Result<Option<LayerMove>, MoveFailure> {
        let step = trainer.steps_done();
        let proposal = if is_leader { self.choose(step, &note) } else { None };
        let own = proposal.as_ref().map(|(_, choice)| choice);
        let own = serde_json::to_string(&own).expect("plain data has a JSON text");
        let shared = trainer.pipeline().share(&own).map_err(MoveFailure::Rank)?;
        let choice: Option<Choice> = serde_json::from_str(&shared).map_err(|error| bug(error.to_string()))?;
        let Some(choice) = choice else { return Ok(None) };
        let began = Instant::now();
        let found = self.program_of(&choice.boundaries).map_err(MoveFailure::Other)?;
        if digest(&found) != choice.program {
            return Err(bug(
                "this process makes another program for the new cut than the first one".to_owned()
            ));
        }
        let CutProgram { program, partition, .. } = found;
        let moves = layer_moves(&self.cut, &partition);
        let paths = |MovedRange { layers, from, to }: &MovedRange| MovedLayers {
            from: *from,
            to: *to,
            parameters: self.paths[layers.clone()].concat(),
        };
        let moved = moves.iter().map(paths).collect();
        let placement = program.placement().clone();
        let make = stage_maker(
            self.model.clone(),
            self.initial.clone(),
            partition.clone(),
            self.settings.run.precision,
        );
        let outcome = trainer.pipeline().move_layers(
            program,
            moved,
            move |stage: StageIndex, tensor: &TensorParallel| make(stage, tensor),
        );
        outcome.map_err(MoveFailure::Rank)?;
        self.cut = partition;
        self.rebalancer.restart();
        let Some((proposal, _)) = proposal else { return Ok(None) };
        let seconds = began.elapsed().as_secs_f64();
        if proposal.bytes > 0 {
            self.seconds_per_byte = seconds / proposal.bytes as f64;
        }
        let world_rank = |stage| placement.rank_of(stage).get() * self.settings.mesh.tensor_parallel;
        let moves = moves.into_iter().map(|MovedRange { layers, from, to }| MovedRun {
            layers,
            from: world_rank(from),
            to: world_rank(to),
        });
        Ok(Some(LayerMove {
            event: MoveEvent::LayerMove,
            step,
            moves: moves.collect(),
            slowdowns: proposal.slowdowns,
            before_ms: proposal.before * 1e3,
            after_ms: proposal.after * 1e3,
            bytes: proposal.bytes,
            predicted_s: proposal.moving,
            seconds,
        }))
    }

    /// Returns a better cut, if there is one that the ranks can have.
    fn choose(&mut self, step: u64, note: &impl Fn(&str)) -> Option<(Proposal, Choice)> {
        let steps_left = self.settings.run.steps.saturating_sub(step);
        let costs =
            MoveCosts { layer_bytes: &self.bytes, seconds_per_byte: self.seconds_per_byte, steps_left };
        let Decision::Move(proposal) = self.rebalancer.decide(&self.cut, costs) else { return None };
        let boundaries: Vec<usize> = proposal.cut.ranges().skip(1).map(|range| range.start).collect();
        let found = self.program_of(&boundaries).and_then(|found| {
            let CutProgram { program, partition, .. } = &found;
            let (settings, model) = (&self.settings, &*self.model);
            (self.require_fit)(RunParts { settings, model, program, partition }, &self.cut)?;
            Ok(found)
        });
        match found {
            Ok(found) => Some((*proposal, Choice { boundaries, program: digest(&found) })),
            Err(error) => {
                if self.refused.as_ref() != Some(&proposal.cut) {
                    let layers =
                        layer_moves(&self.cut, &proposal.cut).iter().map(|moved| moved.layers.len()).sum();
                    note(&kept(step, layers, &error.text()));
                }
                self.refused = Some(proposal.cut);
                None
            }
        }
    }

    /// Makes the program of a cut, and proves it sound.
    fn program_of(&self, boundaries: &[usize]) -> Result<CutProgram, RunError> {
        let mut settings = self.settings.clone();
        settings.pipeline.layout = None;
        settings.pipeline.partition = PartitionChoice::Explicit;
        settings.pipeline.boundaries = Some(boundaries.iter().map(|&layer| layer as u32).collect());
        CutProgram::new(self.source.clone(), &settings, &*self.model)
    }
}

fn bug(sentence: String) -> MoveFailure {
    MoveFailure::Other(RunError::new(ErrorKind::Bug, sentence))
}

/// Returns a hash of a program with its trained stages.
fn digest(found: &CutProgram) -> String {
    let program = found.program.as_program();
    let text = format!("{}{:?}", print_program(program), program.trained());
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

#[cfg(test)]
mod tests;

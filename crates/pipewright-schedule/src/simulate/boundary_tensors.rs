//! The tensors that cross from stage to stage in the timed simulation, and when each of them arrives.

use crate::action::Action;
use crate::costs::SkipTransfer;
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::schedule::Program;
use crate::simulate::tape::Moment;

/// A tensor that a stage waits for: an input, or the gradient of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BoundaryTensor {
    pub(super) route: Route,
    pub(super) gradient: bool,
    /// The stage that uses it.
    pub(super) stage: StageIndex,
    pub(super) microbatch: Microbatch,
}

/// The role of a tensor from another rank for an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tensor {
    /// The output of the stage before.
    Input,
    /// The gradient of the action's output.
    OutputGradient,
    /// The tensor of a skip connection, or its gradient.
    Skip,
}

impl Tensor {
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Input, Self::OutputGradient, Self::Skip];

    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::OutputGradient => "output gradient",
            Self::Skip => "skip connection",
        }
    }
}

/// How a tensor comes to the stage that uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// From the neighbouring stage.
    Neighbour,
    /// By the skip connection at this index of [`crate::Costs::skips`].
    Skip(usize),
}

/// When a tensor is ready to be sent, and when it arrives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) issued: Moment,
    pub(super) at: Moment,
}

/// The arrivals that are known.
pub(super) struct Arrivals {
    stages: u32,
    microbatches: u32,
    /// The inputs and the output gradients that come from neighbours, by stage and microbatch.
    neighbours: [Vec<Option<Arrival>>; 2],
    /// The same for each skip connection, by microbatch.
    skips: Vec<[Vec<Option<Arrival>>; 2]>,
}

impl BoundaryTensor {
    /// The tensor that `part`, a compute action and not an overlap, takes from a neighbouring stage.
    pub(super) fn needed_by(placement: &Placement, part: Action) -> Option<Self> {
        let (gradient, stage) = (part.kind().carries_gradient()?, part.stage());
        let neighbour = if gradient { placement.next(stage) } else { placement.previous(stage) };
        neighbour.and_then(|_| Self::of_stage(part, stage))
    }

    /// The tensor that `part` makes for a neighbouring stage.
    pub(super) fn made_by(placement: &Placement, part: Action) -> Option<Self> {
        let (gradient, stage) = (part.kind().carries_gradient()?, part.stage());
        let neighbour = if gradient { placement.previous(stage) } else { placement.next(stage) };
        Self::of_stage(part, neighbour?)
    }

    /// The tensor that `receive` brings.
    pub(super) fn received_by(receive: Action) -> Option<Self> {
        Self::of_stage(receive, receive.stage()).filter(|_| receive.kind().is_receive())
    }

    /// The tensor of a neighbour that has the direction and the microbatch of `action`, and that `stage` uses.
    fn of_stage(action: Action, stage: StageIndex) -> Option<Self> {
        let (gradient, microbatch) = (action.kind().carries_gradient()?, action.microbatch()?);
        Some(Self { route: Route::Neighbour, gradient, stage, microbatch })
    }

    /// The tensors that `part` takes from skip connections. Time linear in `skips`.
    pub(super) fn skips_needed_by(skips: &[SkipTransfer], part: Action) -> impl Iterator<Item = Self> {
        by_skip(skips, part, |skip, gradient| {
            let user = if gradient { skip.from } else { skip.to };
            (user, user)
        })
    }

    /// The tensors that `part` makes for skip connections. Time linear in `skips`.
    pub(super) fn skips_made_by(skips: &[SkipTransfer], part: Action) -> impl Iterator<Item = Self> {
        by_skip(
            skips,
            part,
            |skip, gradient| if gradient { (skip.to, skip.from) } else { (skip.from, skip.to) },
        )
    }

    /// Returns what it is for the action that uses it.
    pub(super) fn meaning(self) -> Tensor {
        match (self.route, self.gradient) {
            (Route::Skip(_), _) => Tensor::Skip,
            (Route::Neighbour, true) => Tensor::OutputGradient,
            (Route::Neighbour, false) => Tensor::Input,
        }
    }

    /// Returns the actions that may make the tensor on a stage, and those that send and receive it.
    pub(super) fn actions(self, from: StageIndex) -> ([Action; 2], Action, Action) {
        let Self { stage, microbatch, .. } = self;
        if self.gradient {
            let inputs = Action::InputBackward { stage: from, microbatch };
            let send = Action::SendBackward { stage: from, microbatch };
            let made = [inputs, Action::Backward { stage: from, microbatch }];
            (made, send, Action::RecvBackward { stage, microbatch })
        } else {
            let send = Action::SendForward { stage: from, microbatch };
            let made = [Action::Forward { stage: from, microbatch }; 2];
            (made, send, Action::RecvForward { stage, microbatch })
        }
    }

    /// The stage that makes the tensor.
    pub(super) fn source(self, skips: &[SkipTransfer]) -> Option<StageIndex> {
        match (self.route, self.gradient) {
            (Route::Neighbour, false) => self.stage.before(),
            (Route::Neighbour, true) => self.stage.after(),
            (Route::Skip(index), false) => Some(skips[index].from),
            (Route::Skip(index), true) => Some(skips[index].to),
        }
    }
}

/// The tensors of the skip connections that concern `part`. `ends` gives the stage of the action, and the
/// stage that uses the tensor, of a connection in the direction of `part`.
fn by_skip(
    skips: &[SkipTransfer],
    part: Action,
    ends: impl Fn(&SkipTransfer, bool) -> (StageIndex, StageIndex),
) -> impl Iterator<Item = BoundaryTensor> {
    let direction = part.kind().carries_gradient();
    skips.iter().enumerate().filter_map(move |(index, skip)| {
        let (gradient, microbatch) = (direction?, part.microbatch()?);
        let (acting, stage) = ends(skip, gradient);
        let route = Route::Skip(index);
        (acting == part.stage()).then_some(BoundaryTensor { route, gradient, stage, microbatch })
    })
}

impl Arrivals {
    /// No arrival, for the sizes of `program`.
    pub(super) fn none(program: &Program, skips: &[SkipTransfer]) -> Self {
        let (stages, microbatches) = (program.placement().stages(), program.microbatches());
        let table = |entries: usize| [vec![None; entries], vec![None; entries]];
        Self {
            stages,
            microbatches,
            neighbours: table(stages as usize * microbatches as usize),
            skips: skips.iter().map(|_| table(microbatches as usize)).collect(),
        }
    }

    /// When `tensor` arrives; `None` while that is not known, and for tensors outside the program's sizes.
    pub(super) fn get(&self, tensor: BoundaryTensor) -> Option<Arrival> {
        let slot = self.slot(tensor)?;
        self.table(tensor)[slot]
    }

    /// Sets when `tensor` arrives.
    pub(super) fn set(&mut self, tensor: BoundaryTensor, arrival: Arrival) {
        let Some(slot) = self.slot(tensor) else { return };
        let tables = match tensor.route {
            Route::Neighbour => &mut self.neighbours,
            Route::Skip(index) => &mut self.skips[index],
        };
        tables[usize::from(tensor.gradient)][slot] = Some(arrival);
    }

    fn table(&self, tensor: BoundaryTensor) -> &[Option<Arrival>] {
        let tables = match tensor.route {
            Route::Neighbour => &self.neighbours,
            Route::Skip(index) => &self.skips[index],
        };
        &tables[usize::from(tensor.gradient)]
    }

    fn slot(&self, tensor: BoundaryTensor) -> Option<usize> {
        let fits = tensor.stage.get() < self.stages && tensor.microbatch.get() < self.microbatches;
        let first = match tensor.route {
            Route::Neighbour => tensor.stage.index() * self.microbatches as usize,
            Route::Skip(_) => 0,
        };
        fits.then(|| first + tensor.microbatch.index())
    }
}

//! Sets of actions and tensors: a bit for each kind, stage and microbatch.
//!
//! Validation, lowering and simulation look up in constant time whether an action is present or done. A set
//! takes two bytes for each pair of stage and microbatch. [`crate::schedule`] bounds the number of pairs by
//! the number of actions.

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, StageIndex};
use crate::schedule::Program;

/// A set of actions of one program. It never contains actions outside the sizes of the program.
pub(crate) struct ActionSet {
    stages: u32,
    microbatches: u32,
    by_microbatch: Vec<u16>,
    by_stage: Vec<u16>,
}

impl ActionSet {
    /// Makes the empty set for the sizes of `program`.
    pub(crate) fn for_program(program: &Program) -> Self {
        Self::sized(program.placement().stages(), program.microbatches())
    }

    /// Makes the empty set for these sizes.
    pub(crate) fn sized(stages: u32, microbatches: u32) -> Self {
        Self {
            stages,
            microbatches,
            by_microbatch: vec![0; stages as usize * microbatches as usize],
            by_stage: vec![0; stages as usize],
        }
    }

    /// Returns whether `action` is in the set.
    #[inline]
    pub(crate) fn contains(&self, action: Action) -> bool {
        self.kinds(action.stage(), action.microbatch()) & bit(action.kind()) != 0
    }

    /// Returns the [`bit`]s of the kinds in the set for a stage and microbatch, or for a whole stage; no bits
    /// outside the sizes.
    #[inline]
    pub(crate) fn kinds(&self, stage: StageIndex, microbatch: Option<Microbatch>) -> u16 {
        match (self.slot(stage, microbatch), microbatch) {
            (Some(slot), Some(_)) => self.by_microbatch[slot],
            (Some(slot), None) => self.by_stage[slot],
            (None, _) => 0,
        }
    }

    /// Adds `action`, and returns whether it was not in the set before.
    #[inline]
    pub(crate) fn insert(&mut self, action: Action) -> bool {
        let kinds = match (self.slot(action.stage(), action.microbatch()), action.microbatch()) {
            (Some(slot), Some(_)) => &mut self.by_microbatch[slot],
            (Some(slot), None) => &mut self.by_stage[slot],
            (None, _) => return true,
        };
        let fresh = *kinds & bit(action.kind()) == 0;
        *kinds |= bit(action.kind());
        fresh
    }

    /// Returns the [`bit`]s of the kinds in the set for each microbatch of `stage`; empty for stages that do
    /// not exist.
    pub(crate) fn of_stage(&self, stage: StageIndex) -> &[u16] {
        let width = self.microbatches as usize;
        self.by_microbatch.get(stage.index() * width..(stage.index() + 1) * width).unwrap_or(&[])
    }

    /// Returns whether an action of one of `kinds` is in the set for any stage. The kinds concern a whole
    /// stage.
    pub(crate) fn contains_any(&self, kinds: &[ActionKind]) -> bool {
        let wanted = kinds.iter().fold(0, |bits, &kind| bits | bit(kind));
        self.by_stage.iter().any(|bits| bits & wanted != 0)
    }

    /// Returns the backward that computes the input gradient of a stage and microbatch: `B` if it is in the
    /// set, otherwise `I`.
    #[inline]
    pub(crate) fn input_gradient(&self, stage: StageIndex, microbatch: Microbatch) -> Action {
        let full = Action::Backward { stage, microbatch };
        if self.contains(full) { full } else { Action::InputBackward { stage, microbatch } }
    }

    #[inline]
    fn slot(&self, stage: StageIndex, microbatch: Option<Microbatch>) -> Option<usize> {
        let (in_stage, width) = match microbatch {
            Some(microbatch) => (microbatch.get(), self.microbatches),
            None => (0, 1),
        };
        (stage.get() < self.stages && in_stage < width)
            .then(|| stage.index() * width as usize + in_stage as usize)
    }
}

/// A set of the tensors that cross between stages. A tensor is named by its receive, even if its stages share
/// a rank. The set takes two bits for each pair of stage and microbatch, so that it stays in cache when a
/// thousand ranks advance together.
pub(crate) struct TensorSet {
    stages: u32,
    microbatches: u32,
    bits: Vec<u64>,
}

impl TensorSet {
    /// Makes the empty set for these sizes.
    pub(crate) fn sized(stages: u32, microbatches: u32) -> Self {
        let bits = 2 * stages as usize * microbatches as usize;
        Self { stages, microbatches, bits: vec![0; bits.div_ceil(64)] }
    }

    /// Returns whether the tensor of `receive` is in the set.
    #[inline]
    pub(crate) fn contains(&self, receive: Action) -> bool {
        self.place(receive).is_some_and(|(word, bit)| self.bits[word] & bit != 0)
    }

    /// Adds the tensor of `receive`, unless it is outside the sizes.
    #[inline]
    pub(crate) fn insert(&mut self, receive: Action) {
        if let Some((word, bit)) = self.place(receive) {
            self.bits[word] |= bit;
        }
    }

    #[inline]
    fn place(&self, receive: Action) -> Option<(usize, u64)> {
        let (stage, microbatch) = (receive.stage(), receive.microbatch()?);
        let gradient = usize::from(receive.kind().carries_gradient()?);
        let fits = stage.get() < self.stages && microbatch.get() < self.microbatches;
        let bit = 2 * (stage.index() * self.microbatches as usize + microbatch.index()) + gradient;
        fits.then_some((bit / 64, 1 << (bit % 64)))
    }
}

/// Returns the bit of a kind. A set has one word for the actions on a microbatch and another one for the
/// actions on a whole stage, so a kind of the first may have the bit of a kind of the second.
pub(crate) const fn bit(kind: ActionKind) -> u16 {
    let position = match kind {
        ActionKind::Offload => ActionKind::Unshard as u16,
        ActionKind::Reload => ActionKind::Reshard as u16,
        kind => kind as u16,
    };
    1 << position
}

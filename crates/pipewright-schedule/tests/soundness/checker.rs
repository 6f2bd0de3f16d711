//! The independent checker: runs a program symbolically, with a set of named tensors on each rank.
//!
//! It knows what an action consumes and makes, and nothing about the validator's rules. A duplicate fails
//! because its input has been consumed, a missing receive because its tensor does not arrive, and a crossed
//! order because two ranks wait for each other.

use std::collections::HashSet;

use pipewright_schedule::{Action, Level, Microbatch, Program, Rank, StageBackward, StageIndex};

/// An item on a rank: a tensor of a stage and a microbatch, or a state of a whole stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Thing {
    Input(u32, u32),
    Output(u32, u32),
    Saved(u32, u32),
    /// The tensors that a forward has saved, outside of memory.
    Away(u32, u32),
    OutputGradient(u32, u32),
    InputGradient(u32, u32),
    Stash(u32, u32),
    WeightGradient(u32, u32),
    /// The keys and values of a slice, for the later slices of its microbatch.
    Keys(u32, u32),
    /// The gradients of the keys and values of a slice, complete with the gradients of the later slices.
    KeyGradient(u32, u32),
    Gathered(u32),
    Reducing(u32),
    Reduced(u32),
}

struct World<'a> {
    program: &'a Program,
    level: Level,
    stages: u32,
    slices: u32,
    things: Vec<HashSet<Thing>>,
    next: Vec<usize>,
    trains: bool,
}

/// Runs `program` to its end, or returns its first failure.
pub(crate) fn execute(program: &Program, level: Level) -> Result<(), String> {
    let trains = program.rows().iter().flatten().any(|action| {
        action.parts().any(|part| {
            matches!(
                part,
                Action::Backward { .. } | Action::InputBackward { .. } | Action::WeightBackward { .. }
            )
        })
    });
    let stages = program.placement().stages();
    let things = vec![HashSet::new(); program.rows().len()];
    let (slices, next) = (program.slices().get(), vec![0; program.rows().len()]);
    let mut world = World { program, level, stages, slices, things, next, trains };
    for microbatch in 0..program.microbatches() {
        world.place(0, Thing::Input(0, microbatch));
    }
    while world.round()? {}
    world.judge_end()
}

impl World<'_> {
    /// Lets every rank try its next action once, and returns whether any rank advanced.
    fn round(&mut self) -> Result<bool, String> {
        let mut moved = false;
        for rank in 0..self.next.len() {
            let Some(action) = self.standing_at(rank) else { continue };
            moved |= match action {
                Action::SendForward { .. } | Action::SendBackward { .. } => self.send(rank, action)?,
                // The send completes its receive.
                Action::RecvForward { .. } | Action::RecvBackward { .. } if self.level != Level::Compute => {
                    false
                }
                _ => self.act(rank, action)?,
            };
        }
        Ok(moved)
    }

    fn standing_at(&self, rank: usize) -> Option<Action> {
        self.program.rows()[rank].get(self.next[rank]).copied()
    }

    fn owner(&self, stage: u32) -> Option<usize> {
        self.program.placement().owner(StageIndex::new(stage)).map(Rank::index)
    }

    fn place(&mut self, stage: u32, thing: Thing) {
        if let Some(owner) = self.owner(stage) {
            self.things[owner].insert(thing);
        }
    }

    /// Moves the tensor of a send, if the tensor exists and the receiver has reached the matching receive.
    fn send(&mut self, rank: usize, send: Action) -> Result<bool, String> {
        let (stage, microbatch) = numbers(send);
        let (tensor, receive, arriving, peer_stage) = match send {
            Action::SendForward { microbatch: same, .. } => {
                let to = stage + 1;
                let receive = Action::RecvForward { stage: StageIndex::new(to), microbatch: same };
                (Thing::Output(stage, microbatch), receive, Thing::Input(to, microbatch), to)
            }
            Action::SendBackward { microbatch: same, .. } => {
                let to = stage.checked_sub(1).ok_or("a gradient leaves the first stage")?;
                let receive = Action::RecvBackward { stage: StageIndex::new(to), microbatch: same };
                (Thing::InputGradient(stage, microbatch), receive, Thing::OutputGradient(to, microbatch), to)
            }
            _ => return Err(format!("{send} is not a send")),
        };
        let peer = self.owner(peer_stage).ok_or(format!("{send} has no receiver"))?;
        if self.level == Level::Compute || self.owner(stage) != Some(rank) || peer == rank {
            return Err(format!("{send} does not belong to rank {rank}"));
        }
        if !self.things[rank].contains(&tensor) {
            return Err(format!("{send} sends a tensor that does not exist"));
        }
        if self.standing_at(peer) != Some(receive) {
            return Ok(false);
        }
        self.things[rank].remove(&tensor);
        self.things[peer].insert(arriving);
        self.next[rank] += 1;
        self.next[peer] += 1;
        Ok(true)
    }

    /// Runs an action that is not a message. At the level `compute`, an action waits for tensors from other
    /// ranks.
    fn act(&mut self, rank: usize, action: Action) -> Result<bool, String> {
        let parts: Vec<Action> = action.parts().collect();
        let mut consumed = Vec::new();
        for &part in &parts {
            let (stage, microbatch) = numbers(part);
            if self.owner(stage) != Some(rank) || microbatch >= self.program.microbatches() {
                return Err(format!("{part} does not belong to rank {rank}"));
            }
            if self.level == Level::Full
                && part.is_compute()
                && !self.things[rank].contains(&Thing::Gathered(stage))
            {
                return Err(format!("{part} lacks parameters"));
            }
            for thing in self.needs_of_slices(part) {
                if !self.things[rank].contains(&thing) {
                    return Err(format!("{part} lacks {thing:?}"));
                }
                consumed.extend(matches!(thing, Thing::KeyGradient(..)).then_some(thing));
            }
            for thing in self.needs(part)? {
                if !self.things[rank].contains(&thing) {
                    return if self.may_come(thing, rank) {
                        Ok(false)
                    } else {
                        Err(format!("{part} lacks {thing:?}"))
                    };
                }
                consumed.push(thing);
            }
        }
        for thing in consumed {
            self.things[rank].remove(&thing);
        }
        for part in parts {
            self.make(rank, part)?;
        }
        self.next[rank] += 1;
        Ok(true)
    }

    /// Returns whether a missing tensor may still be made by another rank without a message.
    fn may_come(&self, thing: Thing, rank: usize) -> bool {
        let source = match thing {
            Thing::Input(stage, _) => stage.checked_sub(1),
            Thing::OutputGradient(stage, _) => Some(stage + 1),
            _ => None,
        };
        let source = source.and_then(|stage| self.owner(stage));
        self.level == Level::Compute && source.is_some_and(|owner| owner != rank)
    }

    /// Returns the items of other slices that an action on a slice uses: the keys and values of every earlier
    /// slice, and the gradients that the later slices have added up.
    fn needs_of_slices(&self, part: Action) -> Vec<Thing> {
        let ((s, m), k) = (numbers(part), self.slices);
        let (first, last) = (m / k * k, m / k * k + k - 1);
        match part {
            Action::Forward { .. } => (first..m).map(|earlier| Thing::Keys(s, earlier)).collect(),
            Action::Backward { .. } | Action::InputBackward { .. } => {
                let keys = (first..m).map(|earlier| Thing::Keys(s, earlier));
                keys.chain((m < last).then_some(Thing::KeyGradient(s, m))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Adds and drops the items of slices: a forward makes keys and values. A backward drops the keys and
    /// values of its slice, and completes the gradients of the slice before it.
    fn make_of_slices(&mut self, rank: usize, part: Action) {
        let ((s, m), k) = (numbers(part), self.slices);
        if k == 1 {
            return;
        }
        match part {
            Action::Forward { .. } => drop(self.things[rank].insert(Thing::Keys(s, m))),
            Action::Backward { .. } | Action::InputBackward { .. } => {
                self.things[rank].remove(&Thing::Keys(s, m));
                if m % k > 0 {
                    self.things[rank].insert(Thing::KeyGradient(s, m - 1));
                }
            }
            _ => {}
        }
    }

    /// Returns the items that an action consumes.
    fn needs(&self, part: Action) -> Result<Vec<Thing>, String> {
        let (s, m) = numbers(part);
        Ok(match part {
            Action::Forward { .. } => vec![Thing::Input(s, m)],
            Action::Backward { .. } | Action::InputBackward { .. } => {
                vec![Thing::Saved(s, m), Thing::OutputGradient(s, m)]
            }
            Action::WeightBackward { .. } => vec![Thing::Stash(s, m)],
            Action::Offload { .. } => vec![Thing::Saved(s, m)],
            Action::Reload { .. } => vec![Thing::Away(s, m)],
            Action::Reshard { .. } => vec![Thing::Gathered(s)],
            Action::ReduceGrad { .. } => {
                (0..self.program.microbatches()).map(|m| Thing::WeightGradient(s, m)).collect()
            }
            Action::WaitReduceGrad { .. } => vec![Thing::Reducing(s)],
            Action::Unshard { .. } => vec![],
            other => return Err(format!("{other} cannot run at the level {}", self.level)),
        })
    }

    /// Adds the items that an action makes.
    fn make(&mut self, rank: usize, part: Action) -> Result<(), String> {
        let (s, m) = numbers(part);
        let made = match part {
            Action::Forward { .. } if s + 1 == self.stages => {
                vec![Thing::Saved(s, m), Thing::OutputGradient(s, m)]
            }
            Action::Forward { .. } => vec![Thing::Saved(s, m), Thing::Output(s, m)],
            Action::Backward { .. } => vec![Thing::InputGradient(s, m), Thing::WeightGradient(s, m)],
            // Without weights to train, nothing is left for `W`.
            Action::InputBackward { .. } if !self.is_trained(s) => vec![Thing::InputGradient(s, m)],
            Action::InputBackward { .. } => vec![Thing::InputGradient(s, m), Thing::Stash(s, m)],
            Action::WeightBackward { .. } => vec![Thing::WeightGradient(s, m)],
            Action::Offload { .. } => vec![Thing::Away(s, m)],
            Action::Reload { .. } => vec![Thing::Saved(s, m)],
            Action::Unshard { .. } => vec![Thing::Gathered(s)],
            Action::ReduceGrad { .. } => vec![Thing::Reducing(s)],
            Action::WaitReduceGrad { .. } => vec![Thing::Reduced(s)],
            _ => vec![],
        };
        for thing in made {
            if !self.things[rank].insert(thing) {
                return Err(format!("{part} makes {thing:?} again"));
            }
        }
        self.make_of_slices(rank, part);
        self.hand_over(rank, part);
        Ok(())
    }

    /// Moves an output to its next stage if that needs no message: on the same rank, or at the level
    /// `compute`.
    fn hand_over(&mut self, rank: usize, part: Action) {
        let (s, m) = numbers(part);
        let (made, arriving, to) = match part {
            Action::Forward { .. } => (Thing::Output(s, m), Thing::Input(s + 1, m), Some(s + 1)),
            Action::Backward { .. } | Action::InputBackward { .. } => {
                let to = s.checked_sub(1).filter(|&stage| self.runs_backward(stage));
                (Thing::InputGradient(s, m), Thing::OutputGradient(to.unwrap_or(0), m), to)
            }
            _ => return,
        };
        let peer = to.and_then(|stage| self.owner(stage));
        match peer {
            Some(peer) if peer == rank || self.level == Level::Compute => {
                self.things[rank].remove(&made);
                self.things[peer].insert(arriving);
            }
            Some(_) => {}
            // The gradient of the input is not used by the first stage, nor by one that runs forward only.
            None => {
                self.things[rank].remove(&made);
            }
        }
    }

    fn is_trained(&self, stage: u32) -> bool {
        self.program.trained().backward_of(StageIndex::new(stage)) == StageBackward::Whole
    }

    /// Returns whether the stage or one before it has weights to train.
    fn runs_backward(&self, stage: u32) -> bool {
        self.trains && (0..=stage).any(|before| self.is_trained(before))
    }

    /// Checks that every row has reached its end, and that exactly the results of a step remain.
    fn judge_end(&self) -> Result<(), String> {
        if let Some(rank) = (0..self.next.len()).find(|&rank| self.standing_at(rank).is_some()) {
            return Err(format!("rank {rank} does not come to its end"));
        }
        for stage in 0..self.stages {
            let things = &self.things[self.owner(stage).ok_or("a stage without a rank")?];
            let has_weights = self.trains && self.is_trained(stage);
            if has_weights && self.level == Level::Full {
                if !things.contains(&Thing::Reduced(stage)) {
                    return Err(format!("stage {stage} is not reduced"));
                }
                continue;
            }
            if !has_weights && things.contains(&Thing::Reduced(stage)) {
                return Err(format!("stage {stage} is frozen and reduced"));
            }
            for m in 0..self.program.microbatches() {
                let (backward, gradient) = (self.runs_backward(stage), Thing::WeightGradient(stage, m));
                let result = if has_weights { gradient } else { Thing::Saved(stage, m) };
                if (has_weights || !backward) && !things.contains(&result) {
                    return Err(format!("{result:?} is never made"));
                }
                if !has_weights && things.contains(&gradient) {
                    return Err(format!("{gradient:?} is of a frozen stage"));
                }
            }
        }
        let lost = |thing: &&Thing| match thing {
            Thing::Input(..)
            | Thing::Output(..)
            | Thing::InputGradient(..)
            | Thing::Stash(..)
            | Thing::KeyGradient(..)
            | Thing::Away(..)
            | Thing::Reducing(..) => true,
            Thing::Saved(stage, _) | Thing::OutputGradient(stage, _) | Thing::Keys(stage, _) => {
                self.runs_backward(*stage)
            }
            Thing::WeightGradient(..) | Thing::Gathered(..) | Thing::Reduced(..) => false,
        };
        self.things.iter().flatten().find(lost).map_or(Ok(()), |thing| Err(format!("{thing:?} is left over")))
    }
}

fn numbers(action: Action) -> (u32, u32) {
    (action.stage().get(), action.microbatch().map_or(0, Microbatch::get))
}

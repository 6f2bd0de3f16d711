//! An independent simulation: the duration and the peak memory of a schedule at given costs. It knows what an
//! action needs, and nothing about any generator.

use std::collections::HashMap;

use pipewright_schedule::{Action, Microbatch, Schedule, StageIndex};

/// The times of `F`, `I` and `W` of a stage; a `B` takes as long as `I` and `W`.
pub(crate) type Cost = [u64; 3];

/// The results of running a schedule.
pub(crate) struct Timing {
    /// The end of the last action.
    pub(crate) makespan: u64,
    /// The longest time for which any rank computes.
    pub(crate) work: u64,
    /// The peak number of activations of each rank. An activation is held from its forward to its weight
    /// gradient.
    pub(crate) peaks: Vec<u32>,
}

impl Timing {
    /// Returns the share of the step, from barrier to barrier, in which the busiest rank idles.
    pub(crate) fn bubble(&self) -> f64 {
        (self.makespan - self.work) as f64 / self.makespan as f64
    }
}

/// Runs every action as early as its row and its inputs allow. The parts of an overlap run one after the
/// other, each as soon as it can.
pub(crate) fn run(schedule: &Schedule, cost: impl Fn(StageIndex) -> Cost, hop: u64) -> Timing {
    let rows: Vec<Vec<Action>> = schedule
        .rows()
        .iter()
        .map(|row| row.iter().flatten().flat_map(|action| action.parts()).collect())
        .collect();
    let mut ends: HashMap<(bool, StageIndex, Microbatch), u64> = HashMap::new();
    let mut next = vec![0; rows.len()];
    let mut clock = vec![0; rows.len()];
    loop {
        let before = next.clone();
        for (rank, row) in rows.iter().enumerate() {
            while let Some(&action) = row.get(next[rank]) {
                let Some(arrival) = arrival(schedule, &ends, action, hop) else { break };
                clock[rank] = duration(action, &cost) + arrival.max(clock[rank]);
                if let Some(made) = made(action) {
                    ends.insert(made, clock[rank]);
                }
                next[rank] += 1;
            }
        }
        if next == before {
            break;
        }
    }
    assert!(next.iter().zip(&rows).all(|(&next, row)| next == row.len()), "the schedule comes to its end");
    let work = rows.iter().map(|row| row.iter().map(|&action| duration(action, &cost)).sum()).max();
    Timing {
        makespan: clock.into_iter().max().unwrap_or(0),
        work: work.unwrap_or(0),
        peaks: rows.iter().map(|row| peak(row)).collect(),
    }
}

fn duration(action: Action, cost: impl Fn(StageIndex) -> Cost) -> u64 {
    let [forward, inputs, weights] = cost(action.stage());
    match action {
        Action::Forward { .. } => forward,
        Action::InputBackward { .. } => inputs,
        Action::WeightBackward { .. } => weights,
        _ => inputs + weights,
    }
}

/// Returns the result of an action that others wait for: a forward's output (`true`) or an input gradient.
fn made(action: Action) -> Option<(bool, StageIndex, Microbatch)> {
    match action {
        Action::Forward { stage, microbatch } => Some((true, stage, microbatch)),
        Action::InputBackward { stage, microbatch } | Action::Backward { stage, microbatch } => {
            Some((false, stage, microbatch))
        }
        _ => None,
    }
}

/// Returns the time at which the tensors of an action have arrived; `None` while it is not known.
fn arrival(
    schedule: &Schedule,
    ends: &HashMap<(bool, StageIndex, Microbatch), u64>,
    action: Action,
    hop: u64,
) -> Option<u64> {
    let placement = schedule.placement();
    let from = |is_forward, from: StageIndex, microbatch| {
        let same_rank = placement.rank_of(from) == placement.rank_of(action.stage());
        ends.get(&(is_forward, from, microbatch)).map(|end| end + if same_rank { 0 } else { hop })
    };
    match action {
        Action::Forward { stage, microbatch } => {
            placement.previous(stage).map_or(Some(0), |previous| from(true, previous, microbatch))
        }
        Action::WeightBackward { stage, microbatch } => from(false, stage, microbatch),
        Action::InputBackward { stage, microbatch } | Action::Backward { stage, microbatch } => {
            let own = from(true, stage, microbatch)?;
            let gradient = placement.next(stage).map_or(Some(0), |next| from(false, next, microbatch))?;
            Some(own.max(gradient))
        }
        _ => None,
    }
}

fn peak(row: &[Action]) -> u32 {
    let (mut held, mut peak) = (0u32, 0);
    for action in row {
        match action {
            Action::Forward { .. } => held += 1,
            Action::Backward { .. } | Action::WeightBackward { .. } => held -= 1,
            _ => {}
        }
        peak = peak.max(held);
    }
    peak
}

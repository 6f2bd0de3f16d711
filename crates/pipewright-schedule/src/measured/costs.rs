//! The costs that measured timelines show: the median time of each action of each stage, and of a message.

use std::collections::{BTreeSet, HashMap};

use crate::action::{Action, ActionKind};
use crate::costs::{Costs, Link, SkipTransfer, StageCosts};
use crate::ids::Slice;
use crate::timeline::{Event, Timeline};
use crate::transfer::Transfer;

/// Returns the median costs over several steps of one program. Each timeline contains one replica of one
/// step.
///
/// The time of a message is the median over the messages whose receiver was waiting when they were sent,
/// because only then the end of the receive is the arrival. It is the latency of the link, because the sizes
/// of messages are not measured. The messages of skip connections take as long. An action that did not occur
/// takes no time, but a missing `B` takes as long as `I` and `W`.
///
/// If microbatches are cut into slices, the time of a microbatch is the sum of the medians of its slices. The
/// share of attention is not measured, so all slices take equally long in a simulation.
pub fn costs_of(replicas: &[Timeline]) -> Costs {
    let mut times: HashMap<(u32, ActionKind, Slice), Vec<f64>> = HashMap::new();
    let mut transits = Vec::new();
    let mut stages = 1;
    let mut skips = BTreeSet::new();
    for timeline in replicas {
        let forward = timeline.skips().iter().map(|skip| skip.action.message());
        skips.extend(
            forward.filter(|message| !message.is_gradient()).map(|message| (message.from, message.to)),
        );
        for event in timeline.events() {
            stages = stages.max(event.action.stage().get().saturating_add(1));
            let place = event.action.microbatch().map(|number| timeline.slices().place(number));
            let slice = place.map_or(Slice::new(0), |(_, slice)| slice);
            let key = (event.action.stage().get(), event.action.kind(), slice);
            times.entry(key).or_default().push(event.end - event.start);
        }
        transits.extend(transits_of(timeline));
    }
    let slices = replicas.iter().map(Timeline::slices).max().unwrap_or_default();
    let mut median_of = |stage, kind| -> f64 {
        let time_of = |slice| times.get_mut(&(stage, kind, Slice::new(slice))).map(|times| median(times));
        (0..slices.get()).filter_map(time_of).sum()
    };
    let stage_costs = |stage| {
        let [forward, input, weight, backward, unshard, reduce] = [
            ActionKind::Forward,
            ActionKind::InputBackward,
            ActionKind::WeightBackward,
            ActionKind::Backward,
            ActionKind::Unshard,
            ActionKind::ReduceGrad,
        ]
        .map(|kind| median_of(stage, kind));
        let costs = StageCosts::new(forward, input, weight);
        let backward = if backward > 0.0 { backward } else { costs.backward };
        StageCosts { backward, unshard, reduce_grad: reduce, ..costs }
    };
    Costs {
        stages: (0..stages).map(stage_costs).collect(),
        link: Link { latency: median(&mut transits), bandwidth: f64::INFINITY },
        skips: skips.into_iter().map(|(from, to)| SkipTransfer { from, to, bytes: 0 }).collect(),
        ..Costs::default()
    }
}

/// Returns the times of the messages whose receiver was waiting when they were sent.
fn transits_of(timeline: &Timeline) -> Vec<f64> {
    let is_send =
        |event: &&Event| matches!(event.action, Action::SendForward { .. } | Action::SendBackward { .. });
    let sends: HashMap<Action, &Event> =
        timeline.events().iter().filter(is_send).map(|event| (event.action, event)).collect();
    let is_receive =
        |event: &&Event| matches!(event.action, Action::RecvForward { .. } | Action::RecvBackward { .. });
    let transit = |receive: &Event| {
        let send = sends.get(&Transfer::other_end(receive.action)?)?;
        (receive.start <= send.start).then_some((receive.end - send.start).max(0.0))
    };
    timeline.events().iter().filter(is_receive).filter_map(transit).collect()
}

/// Returns the median, the upper of two; 0 for no values.
fn median(values: &mut [f64]) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() { 0.0 } else { *values.select_nth_unstable_by(middle, f64::total_cmp).1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{ScheduleSpec, generate};
    use crate::lower::{TrainingLowering, for_training};
    use crate::measured::program_of;
    use crate::recompute::Recompute;
    use crate::simulate::timed;
    use crate::slices::Slices;

    #[test]
    fn the_costs_of_a_simulated_run_predict_it() {
        let whole = ["1f1b", "zbvzerobubble", "interleaved1f1b"].map(|name| (name, None));
        let cases = whole.into_iter().flat_map(|case| [(case, Recompute::None), (case, Recompute::Stage)]);
        for ((name, slices), recompute) in cases.chain([(("seq1f1b", Slices::new(4)), Recompute::None)]) {
            let spec = ScheduleSpec { ranks: 3, microbatches: 6, slices, ..ScheduleSpec::default() };
            let schedule = generate(name, &spec).expect("a schedule");
            let program = for_training(&schedule, &TrainingLowering::default()).expect("a sound program");
            let stages = program.placement().stages();
            let stage_costs =
                |stage| StageCosts::new(1.0 + f64::from(stage), 2.0, 0.5 * f64::from(stage + 1));
            let costs = Costs {
                stages: (0..stages).map(stage_costs).collect(),
                link: Link { latency: 0.25, bandwidth: f64::INFINITY },
                recompute,
                ..Costs::default()
            };
            let run = timed(program.as_program(), &costs).expect("no deadlock");
            let found = costs_of(&[run.timeline().clone()]);
            assert_eq!(found.link.latency, 0.25, "{name}");
            for (found, expected) in found.stages.iter().zip(&costs.stages) {
                assert!((found.forward - expected.forward).abs() < 1e-9, "{name}");
                // A stage whose backward is never split shows the sum of both parts only.
                assert!((found.backward - expected.backward).abs() < 1e-9, "{name}");
            }
            let again = program_of(run.timeline()).expect("its program");
            let predicted = timed(&again, &found).expect("no deadlock").timeline().makespan();
            assert!((predicted / run.timeline().makespan() - 1.0).abs() < 1e-9, "{name}: {predicted}");
        }
    }

    #[test]
    fn one_slow_action_does_not_change_the_median() {
        let event = |action: &str, start, end| Event {
            rank: crate::Rank::new(0),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        let events = vec![event("0F0", 0.0, 1.0), event("0F1", 1.0, 9.0), event("0F2", 9.0, 10.0)];
        let costs = costs_of(&[Timeline::new(1, events)]);
        assert_eq!((costs.stages[0].forward, costs.link.latency), (1.0, 0.0));
    }
}

//! The costs that measured timelines show: the median time of each action of each stage, and of a message.

use std::collections::{BTreeSet, HashMap};

use crate::action::ActionKind;
use crate::costs::{Costs, Exchanges, Link, MAX_EXCHANGES, SkipTransfer, StageCosts, StageExchanges};
use crate::ids::Slice;
use crate::measured::ranks::messages;
use crate::timeline::{Event, Timeline};

/// Returns the median costs over several steps of one program. Each timeline contains one replica of one
/// step.
///
/// The time of a message is the median over the messages whose receiver was waiting when they were sent,
/// because only then the end of the receive is the arrival. It is the latency of the link, because the sizes
/// of messages are not measured. The messages of skip connections take as long. An action that did not occur
/// takes no time, but a missing `B` takes as long as `I` and `W`.
///
/// A rank waits for each exchange of tokens in an action that is not in an overlap. So these exchanges count
/// apart from the computation ([`StageCosts::exchanges`]). Overlaps are not read. The exchanges in `I` and in
/// `B` are the same ones. An exchange lasts until the last replica has sent its tokens, so it contains the
/// wait for slower replicas.
///
/// `OFFLOAD` and `RELOAD` have the times of their transfers, which do not depend on the sizes.
///
/// If microbatches are cut into slices, the time of a microbatch is the sum of the medians of its slices. The
/// share of attention is not measured, so all slices take equally long in a simulation.
pub fn costs_of(replicas: &[Timeline]) -> Costs {
    let mut times: HashMap<(u32, ActionKind, Slice), Times> = HashMap::new();
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
            times.entry(key).or_default().push(event, timeline);
        }
        transits.extend(transits_of(timeline));
    }
    let slices = replicas.iter().map(Timeline::slices).max().unwrap_or_default();
    let each_slice = || (0..slices.get()).map(Slice::new);
    let median_of = |stage, kind| -> f64 {
        let times_of = |slice| times.get(&(stage, kind, slice));
        each_slice().filter_map(times_of).map(|times| median(times.computations.clone())).sum()
    };
    let exchanges_of = |stage, kinds: &[ActionKind]| {
        let (mut count, mut seconds) = (0.0_f64, 0.0);
        for slice in each_slice() {
            let own = || kinds.iter().filter_map(|&kind| times.get(&(stage, kind, slice)));
            // Each slice has as many exchanges as a whole microbatch.
            count = count.max(median(own().flat_map(|times| times.counts.iter().copied()).collect()));
            seconds += median(own().flat_map(|times| times.exchanges.iter().copied()).collect());
        }
        Exchanges::new((count as u32).min(MAX_EXCHANGES), seconds)
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
        let exchanges = StageExchanges {
            forward: exchanges_of(stage, &[ActionKind::Forward]),
            backward: exchanges_of(stage, &[ActionKind::InputBackward, ActionKind::Backward]),
            recompute: None,
        };
        let [offload, reload] = [ActionKind::Offload, ActionKind::Reload].map(|kind| {
            let is_known = each_slice().any(|slice| times.contains_key(&(stage, kind, slice)));
            is_known.then(|| median_of(stage, kind))
        });
        StageCosts { backward, unshard, reduce_grad: reduce, offload, reload, exchanges, ..costs }
    };
    Costs {
        stages: (0..stages).map(stage_costs).collect(),
        link: Link { latency: median(transits), bandwidth: f64::INFINITY },
        skips: skips.into_iter().map(|(from, to)| SkipTransfer { from, to, bytes: 0 }).collect(),
        ..Costs::default()
    }
}

/// The times of the events of one kind.
#[derive(Default)]
struct Times {
    /// The times without the exchanges.
    computations: Vec<f64>,
    /// The time of all exchanges of each event.
    exchanges: Vec<f64>,
    /// The number of exchanges of each event.
    counts: Vec<f64>,
}

impl Times {
    /// Adds the times of an event that is not an overlap. While an action runs, its rank exchanges tokens
    /// only for it. A transfer runs in parallel with the actions of its rank, and has no exchanges.
    fn push(&mut self, event: &Event, timeline: &Timeline) {
        let is_transfer = matches!(event.action.kind(), ActionKind::Offload | ActionKind::Reload);
        let scopes = if is_transfer { &[][..] } else { timeline.scopes_of(event.rank) };
        let first = scopes.partition_point(|scope| scope.start < event.start);
        let inside = scopes[first..].iter().take_while(|scope| scope.start < event.end);
        let (mut count, mut exchanged) = (0.0, 0.0);
        for scope in inside.filter(|scope| scope.is_exchange()) {
            count += 1.0;
            exchanged += scope.end.min(event.end) - scope.start;
        }
        self.computations.push((event.end - event.start - exchanged).max(0.0));
        self.exchanges.push(exchanged);
        self.counts.push(count);
    }
}

/// Returns the times of the messages whose receiver was waiting when they were sent.
fn transits_of(timeline: &Timeline) -> Vec<f64> {
    let waited = messages(timeline).filter(|(send, receive)| receive.start <= send.start);
    waited.map(|(send, receive)| (receive.end - send.start).max(0.0)).collect()
}

/// Returns the median, the upper of two; 0 for no values.
fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() { 0.0 } else { *values.select_nth_unstable_by(middle, f64::total_cmp).1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Action;
    use crate::csv::parse_program;
    use crate::generate::{ScheduleSpec, generate};
    use crate::ids::Rank;
    use crate::lower::{TrainingLowering, for_training};
    use crate::measured::program_of;
    use crate::recompute::Recompute;
    use crate::schedule::Program;
    use crate::simulate::timed;
    use crate::slices::Slices;
    use crate::timeline::{Scope, ScopeKind};

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

    /// Returns the timeline of a simulation as the executor records it: an overlap is one event.
    fn recorded(program: &Program, run: &Timeline) -> Timeline {
        let mut events = run.events().to_vec();
        let overlaps = program.rows().iter().zip(0..).flat_map(|(row, rank)| {
            row.iter()
                .filter(|action| matches!(action, Action::Overlap(_)))
                .map(move |&action| (rank, action))
        });
        for (rank, overlap) in overlaps {
            let parts: Vec<Action> = overlap.parts().collect();
            let is_half = |event: &Event| event.rank.get() == rank && parts.contains(&event.action);
            let halves: Vec<Event> = events.iter().copied().filter(is_half).collect();
            events.retain(|event| !is_half(event));
            events.push(Event {
                rank: Rank::new(rank),
                action: overlap,
                start: halves.iter().map(|half| half.start).fold(f64::INFINITY, f64::min),
                end: halves.iter().map(|half| half.end).fold(0.0, f64::max),
            });
        }
        Timeline::new(run.ranks(), events).with_scopes(run.scopes().to_vec())
    }

    #[test]
    fn overlaps_hide_the_exchanges_of_a_recorded_run() {
        for name in ["dualpipev", "1f1b", "zbvzerobubble"] {
            let spec = ScheduleSpec { ranks: 2, microbatches: 8, ..ScheduleSpec::default() };
            let schedule = generate(name, &spec).expect("a schedule");
            let lowering = TrainingLowering { keep_overlaps: true, ..TrainingLowering::default() };
            let program = for_training(&schedule, &lowering).expect("a sound program").into_program();
            let costs: Costs = "F=2,I=3,W=1,hop=0.25,exchange=1.5,exchanges=3".parse().expect("costs");
            let run = timed(&program, &costs).expect("no deadlock");
            let recorded = recorded(&program, run.timeline());
            let again = program_of(&recorded).expect("its program");
            let has_overlaps =
                again.rows().iter().flatten().any(|action| matches!(action, Action::Overlap(_)));
            assert_eq!(has_overlaps, name == "dualpipev", "{name}");
            let found = costs_of(&[recorded]);
            for stage in &found.stages {
                assert!((stage.forward - 2.0).abs() < 1e-9, "{name}: {stage:?}");
                assert!((stage.backward - 4.0).abs() < 1e-9, "{name}: {stage:?}");
                for exchanges in [stage.exchanges.forward, stage.exchanges.backward] {
                    assert_eq!(exchanges.count(), 3, "{name}");
                    assert!((exchanges.seconds() - 1.5).abs() < 1e-9, "{name}: {exchanges:?}");
                }
            }
            let predicted = timed(&again, &found).expect("no deadlock").timeline().makespan();
            assert!((predicted / run.timeline().makespan() - 1.0).abs() < 1e-9, "{name}: {predicted}");
        }
    }

    #[test]
    fn slices_and_repeated_forwards_have_exchanges_of_their_own() {
        let exchange = |start, end| Scope {
            rank: Rank::new(0),
            kind: ScopeKind::Exchange("0B0".parse().expect("an action")),
            start,
            end,
        };
        let event = |action: &str, start, end| Event {
            rank: Rank::new(0),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        // Two slices. The backwards compute the forwards again, whose exchanges have the backwards' names.
        let events = vec![
            event("0F0", 0.0, 4.0),
            event("0F1", 4.0, 9.0),
            event("0F1", 9.0, 14.0),
            event("0B1", 14.0, 24.0),
            event("0F0", 24.0, 28.0),
            event("0B0", 28.0, 38.0),
        ];
        let exchanges = [(1.0, 2.0), (5.0, 7.0), (10.0, 12.0), (15.0, 18.0), (25.0, 26.0), (29.0, 33.0)];
        let scopes = exchanges.map(|(start, end)| exchange(start, end)).to_vec();
        let slices = Slices::new(2).expect("not 0");
        let timeline = Timeline::new(1, events).with_scopes(scopes).with_slices(slices);
        let found = costs_of(&[timeline]).stages[0];
        assert_eq!((found.forward, found.backward), (3.0 + 3.0, 7.0 + 6.0));
        let StageExchanges { forward, backward, recompute } = found.exchanges;
        assert_eq!((forward.count(), forward.seconds()), (1, 1.0 + 2.0));
        assert_eq!((backward.count(), backward.seconds()), (1, 3.0 + 4.0));
        assert_eq!(recompute, None);
    }

    #[test]
    fn transfers_out_of_memory_and_back_have_their_times() {
        let rows = "0F0,0OFFLOAD0,0F1,0RELOAD0,0F2,0B0,0B1,0B2\n";
        let program = parse_program(rows).expect("a program");
        let stage = StageCosts { offload: Some(0.75), reload: Some(2.5), ..StageCosts::new(1.0, 1.0, 1.0) };
        let costs = Costs { stages: vec![stage], recompute: Recompute::Stage, ..Costs::default() };
        let run = timed(&program, &costs).expect("no deadlock");
        let found = costs_of(&[run.timeline().clone()]);
        assert_eq!((found.stages[0].offload, found.stages[0].reload), (Some(0.75), Some(2.5)));
        let again = program_of(run.timeline()).expect("its program");
        // The timeline contains the second forwards.
        let predicted = timed(&again, &found).expect("no deadlock").timeline().makespan();
        assert_eq!(predicted, run.timeline().makespan());
        let without = StageCosts { offload: None, reload: None, ..found.stages[0] };
        let found = Costs { stages: vec![without], ..found };
        let faster = timed(&again, &found).expect("no deadlock").timeline().makespan();
        assert!(faster < predicted, "{faster} and {predicted}");
    }

    #[test]
    fn exchanges_during_a_transfer_are_not_part_of_it() {
        let program = parse_program("0F0,0OFFLOAD0,0F1,0RELOAD0,0F2,0B0,0B1,0B2\n").expect("a program");
        let exchanges = StageExchanges::both(Exchanges::new(2, 0.5));
        let stage = StageCosts {
            offload: Some(0.75),
            reload: Some(2.5),
            exchanges,
            ..StageCosts::new(1.0, 1.0, 1.0)
        };
        let costs = Costs { stages: vec![stage], recompute: Recompute::Stage, ..Costs::default() };
        let run = timed(&program, &costs).expect("no deadlock");
        let found = costs_of(&[run.timeline().clone()]).stages[0];
        assert_eq!((found.offload, found.reload), (Some(0.75), Some(2.5)));
        assert_eq!(found.exchanges.forward, exchanges.forward);
    }

    #[test]
    fn one_slow_action_does_not_change_the_median() {
        let event = |action: &str, start, end| Event {
            rank: Rank::new(0),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        let events = vec![event("0F0", 0.0, 1.0), event("0F1", 1.0, 9.0), event("0F2", 9.0, 10.0)];
        let costs = costs_of(&[Timeline::new(1, events)]);
        assert_eq!((costs.stages[0].forward, costs.link.latency), (1.0, 0.0));
    }
}

//! The results of a step whose gradients are summed over several batches.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::pipeline::StepSummary;

/// Returns the number of batches of the step after `done` steps. It rises from 1 to `batches` in
/// `rampup_steps` steps.
pub(super) fn batches_at(done: u64, batches: NonZeroU32, rampup_steps: u64) -> u32 {
    if done >= rampup_steps {
        return batches.get();
    }
    let risen = u128::from(batches.get() - 1) * u128::from(done) / u128::from(rampup_steps);
    1 + u32::try_from(risen).expect("it is below the number of batches")
}

/// Returns how many steps take at least this many batches. A step takes `accumulate` batches, and fewer of them
/// in the first `rampup_steps` steps.
pub fn steps_of_batches(mut batches: u64, accumulate: NonZeroU32, rampup_steps: u64) -> u64 {
    let mut steps = 0;
    while steps < rampup_steps && batches > 0 {
        // The number of batches stays the same for many steps of a long rise.
        let each = batches_at(steps, accumulate, rampup_steps);
        let next = u128::from(each) * u128::from(rampup_steps);
        let until = next.div_ceil(u128::from(accumulate.get() - 1).max(1)).min(u128::from(rampup_steps));
        let alike = u64::try_from(until).unwrap_or(u64::MAX).saturating_sub(steps).max(1);
        let taken = alike.min(batches.div_ceil(each.into()));
        batches = batches.saturating_sub(taken.saturating_mul(each.into()));
        steps += taken;
    }
    steps + batches.div_ceil(accumulate.get().into())
}

/// Joins the results of the batches of one step. The last one has the update. The result has the losses of
/// all batches, means of the auxiliary losses, the timeline of the last batch, and the gap before the first
/// one, which says whether the step began early. A batch counts by its rows or its tokens.
pub(super) fn joined(earlier: Vec<StepSummary>, last: StepSummary) -> StepSummary {
    if earlier.is_empty() {
        return last;
    }
    let (earlier, last) = counted(earlier, last);
    let batches = (earlier.len() + 1) as f64;
    let total = earlier.iter().map(|part| part.weight).sum::<f64>() + last.weight;
    // The share of a batch, times the number of batches.
    let share = |part: &StepSummary| part.weight * batches / total;
    let gap = earlier.first().and_then(|first| first.gap.clone());
    let began_early = earlier.first().is_some_and(|first| first.began_early);
    let mut whole = StepSummary { gap, began_early, ..weighed(last, share) };
    let (losses, weights) = (std::mem::take(&mut whole.losses), std::mem::take(&mut whole.loss_weights));
    let outputs = std::mem::take(&mut whole.outputs);
    for part in earlier {
        let part = weighed(part, share);
        whole.losses.extend(part.losses);
        whole.loss_weights.extend(part.loss_weights);
        whole.outputs.extend(part.outputs);
        for (name, loss) in part.auxiliary {
            *whole.auxiliary.entry(name).or_default() += loss;
        }
        for (name, layers) in part.auxiliary_by_layer {
            let sums = whole.auxiliary_by_layer.entry(name).or_default();
            layers.into_iter().for_each(|(layer, loss)| *sums.entry(layer).or_default() += loss);
        }
        for (layer, choices) in part.expert_loads {
            let sums = whole.expert_loads.entry(layer).or_default();
            sums.resize(sums.len().max(choices.len()), 0);
            sums.iter_mut().zip(choices).for_each(|(sum, count)| *sum += count);
        }
        whole.weighted_auxiliary += part.weighted_auxiliary;
        whole.wall += part.wall;
        whole.interrupted |= part.interrupted;
        whole.verification = whole.verification.take().or(part.verification);
        let peaks = whole.peak_bytes.iter_mut().zip(part.peak_bytes);
        peaks.for_each(|(most, peak)| *most = (*most).max(peak));
        let sends = whole.sends_in_flight.iter_mut().zip(part.sends_in_flight);
        sends.for_each(|(most, sends)| *most = (*most).max(sends));
        let bytes = whole.boundary_bytes.iter_mut().zip(part.boundary_bytes);
        bytes.for_each(|(sum, bytes)| *sum += bytes);
        let exchanges = whole.expert_exchange.iter_mut().zip(part.expert_exchange);
        exchanges.for_each(|(sum, exchange)| *sum += exchange);
    }
    whole.losses.extend(losses);
    whole.loss_weights.extend(weights);
    whole.outputs.extend(outputs);
    whole.auxiliary.values_mut().for_each(|loss| *loss /= batches);
    let parts = whole.auxiliary_by_layer.values_mut().flat_map(BTreeMap::values_mut);
    parts.for_each(|loss| *loss /= batches);
    whole.weighted_auxiliary /= batches;
    whole.weight = total;
    whole
}

/// Replaces the summaries of batches that a later call has computed again. The time of each call stays.
fn counted(earlier: Vec<StepSummary>, mut last: StepSummary) -> (Vec<StepSummary>, StepSummary) {
    let replaced = |done: Vec<StepSummary>, by: &mut StepSummary| {
        let repeated = std::mem::take(&mut by.repeated);
        if repeated.is_empty() {
            return done;
        }
        let pairs = done.into_iter().zip(repeated);
        pairs.map(|(first, again)| StepSummary { wall: first.wall, ..again }).collect()
    };
    let mut done = Vec::new();
    for mut part in earlier {
        done = replaced(done, &mut part);
        done.push(part);
    }
    (replaced(done, &mut last), last)
}

/// Multiplies the weights of the losses of a batch, and its auxiliary losses, by its share.
fn weighed(mut part: StepSummary, share: impl Fn(&StepSummary) -> f64) -> StepSummary {
    let share = share(&part);
    part.loss_weights.iter_mut().for_each(|weight| *weight *= share);
    part.auxiliary.values_mut().for_each(|loss| *loss *= share);
    part.auxiliary_by_layer.values_mut().flat_map(BTreeMap::values_mut).for_each(|loss| *loss *= share);
    part.weighted_auxiliary *= share;
    part
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ids::StepNumber;

    #[test]
    fn the_steps_of_batches_are_counted_as_they_are_taken() {
        for (accumulate, rampup_steps) in [(1, 0), (1, 7), (2, 5), (3, 3), (4, 30), (7, 2), (9, 11)] {
            let most = NonZeroU32::new(accumulate).expect("not 0");
            for batches in 0..150 {
                let (mut taken, mut steps) = (0, 0);
                while taken < batches {
                    taken += u64::from(batches_at(steps, most, rampup_steps));
                    steps += 1;
                }
                assert_eq!(
                    steps_of_batches(batches, most, rampup_steps),
                    steps,
                    "{accumulate} {rampup_steps} {batches}"
                );
            }
        }
        let long = steps_of_batches(1 << 52, NonZeroU32::new(2).expect("not 0"), 1 << 60);
        assert_eq!(long, 1 << 52);
    }

    fn summary(weight: f64, loss: f64) -> StepSummary {
        StepSummary {
            step: StepNumber::default(),
            losses: vec![loss],
            loss_weights: vec![1.0],
            auxiliary: BTreeMap::from([("balance".into(), 3.0 * loss)]),
            auxiliary_by_layer: BTreeMap::from([(
                "balance".into(),
                BTreeMap::from([("a".into(), loss), ("b".into(), 2.0 * loss)]),
            )]),
            expert_loads: BTreeMap::new(),
            weighted_auxiliary: loss,
            outputs: Vec::new(),
            stage_outputs: BTreeMap::new(),
            input_gradients: Vec::new(),
            side_gradients: BTreeMap::new(),
            weight,
            gradient_norm: 1.0,
            loss_scale: None,
            skipped: false,
            verification: None,
            repeated: Vec::new(),
            timeline: pipewright_schedule::Timeline::new(1, Vec::new()),
            sums: Vec::new(),
            update: Vec::new(),
            early_update: Vec::new(),
            repaired: false,
            gap: None,
            began_early: false,
            overlaps: false,
            exposed_communication: Vec::new(),
            expert_exchange: Vec::new(),
            peak_bytes: Vec::new(),
            sends_in_flight: Vec::new(),
            boundary_bytes: Vec::new(),
            undeferred: Vec::new(),
            interrupted: false,
            announced: 0,
            fingerprint: None,
            unlike_replicas: Vec::new(),
            wall: Duration::ZERO,
        }
    }

    #[test]
    fn the_parts_of_layers_add_up_to_the_auxiliary_loss_of_batches_of_different_weights() {
        let whole = joined(vec![summary(1.0, 2.0)], summary(3.0, 6.0));
        assert_eq!(whole.auxiliary["balance"], 15.0);
        let parts = &whole.auxiliary_by_layer["balance"];
        assert_eq!((parts["a"], parts["b"]), (5.0, 10.0));
    }

    #[test]
    fn a_batch_that_is_computed_again_counts_once_with_its_last_results() {
        let expected = joined(vec![summary(1.0, 2.0), summary(2.0, 5.0)], summary(3.0, 6.0));
        let timed = |summary: StepSummary| StepSummary { wall: Duration::from_secs(1), ..summary };
        let earlier = || vec![timed(summary(1.0, 9e9)), timed(summary(2.0, 8e8))];
        let check = |earlier, repeated, seconds| {
            let whole = joined(earlier, StepSummary { repeated, ..timed(summary(3.0, 6.0)) });
            assert_eq!(whole.losses, expected.losses);
            assert_eq!(whole.auxiliary, expected.auxiliary);
            assert_eq!(whole.weighted_auxiliary, expected.weighted_auxiliary);
            assert_eq!((whole.wall.as_secs(), whole.repeated.len()), (seconds, 0));
        };
        check(earlier(), vec![summary(1.0, 2.0), summary(2.0, 5.0)], 3);
        // The second batch has repeated the first one.
        let second = StepSummary { repeated: vec![summary(1.0, 2.0)], ..timed(summary(2.0, 5.0)) };
        check(vec![timed(summary(1.0, 9e9)), second], Vec::new(), 3);
    }

    #[test]
    fn the_number_of_batches_rises_evenly() {
        let check = |batches, rampup_steps, expected: &[u32]| {
            let batches = NonZeroU32::new(batches).expect("not 0");
            let found = (0..).take(expected.len()).map(|done| batches_at(done, batches, rampup_steps));
            assert_eq!(found.collect::<Vec<_>>(), expected);
        };
        check(4, 0, &[4, 4]);
        check(4, 6, &[1, 1, 2, 2, 3, 3, 4, 4]);
        check(4, 2, &[1, 2, 4]);
        check(1, 3, &[1; 5]);
        let most = NonZeroU32::MAX;
        assert_eq!(batches_at(u64::MAX - 1, most, u64::MAX), most.get() - 1);
    }
}

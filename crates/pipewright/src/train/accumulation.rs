//! The results of a step whose gradients are summed over several batches.

use crate::pipeline::StepSummary;

/// Joins the results of the batches of one step, of which the last one has the update: losses of all batches, means of
/// the auxiliary losses, and the timeline of the last batch.
pub(super) fn joined(earlier: Vec<StepSummary>, last: StepSummary) -> StepSummary {
    if earlier.is_empty() {
        return last;
    }
    let batches = (earlier.len() + 1) as f64;
    let mut whole = StepSummary { losses: Vec::new(), loss_weights: Vec::new(), outputs: Vec::new(), ..last };
    let (losses, weights, outputs) = (last.losses, last.loss_weights, last.outputs);
    for part in earlier {
        whole.losses.extend(part.losses);
        whole.loss_weights.extend(part.loss_weights);
        whole.outputs.extend(part.outputs);
        for (name, loss) in part.auxiliary {
            *whole.auxiliary.entry(name).or_default() += loss;
        }
        whole.weighted_auxiliary += part.weighted_auxiliary;
        whole.wall += part.wall;
        whole.interrupted |= part.interrupted;
        whole.undeferred.extend(part.undeferred);
        let peaks = whole.peak_bytes.iter_mut().zip(part.peak_bytes);
        peaks.for_each(|(most, peak)| *most = (*most).max(peak));
        let sends = whole.sends_in_flight.iter_mut().zip(part.sends_in_flight);
        sends.for_each(|(most, sends)| *most = (*most).max(sends));
        let bytes = whole.boundary_bytes.iter_mut().zip(part.boundary_bytes);
        bytes.for_each(|(sum, bytes)| *sum += bytes);
    }
    whole.losses.extend(losses);
    whole.loss_weights.extend(weights);
    whole.outputs.extend(outputs);
    whole.auxiliary.values_mut().for_each(|loss| *loss /= batches);
    whole.weighted_auxiliary /= batches;
    whole
}

//! The peak memory of each rank for an order: the same bytes as [`crate::simulate::peak_memory`] gives for
//! the program that trains, and what is not in a simulation: what a rank holds all the time, only while an
//! action runs, or between two of its stages. The memory of a rank depends on the order of its row alone, because a rank computes
//! one thing at a time.

use crate::ids::{Rank, StageIndex};
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::second_forwards::is_recomputed;
use crate::plan::stage_load::{StageLoad, beside, held_throughout};
use crate::recompute::KeptForwards;
use crate::sharding::Sharding;
use crate::simulate::WithGradients;

/// Returns the peak bytes of each rank: parameters, optimizer state, gradients and activations, and what is
/// held only while actions run.
pub(super) fn peaks(order: &Order, loads: &[StageLoad], sharding: Sharding) -> Vec<u64> {
    let trains = order.rows.iter().any(|row| trains(row, loads));
    (0..order.rows.len()).map(|rank| peak(order, loads, sharding, rank, trains)).collect()
}

/// Returns the peak bytes of one rank of an order that trains.
pub(super) fn peak_of_rank(order: &Order, loads: &[StageLoad], sharding: Sharding, rank: usize) -> u64 {
    peak(order, loads, sharding, rank, true)
}

/// Returns whether a row has backwards.
fn trains(row: &[Cell], loads: &[StageLoad]) -> bool {
    row.iter().any(|cell| cell.kind != Kind::Forward && !cell.is_dropped(loads))
}

fn peak(order: &Order, loads: &[StageLoad], sharding: Sharding, rank: usize, trains: bool) -> u64 {
    let own = order.placement.stages_of(Rank::new(rank as u32));
    let mut held = held_throughout(own, loads, sharding);
    let mut peak = held;
    let mut with_gradients = WithGradients::default();
    let row = &order.rows[rank];
    let own_loads: Vec<StageLoad> = own.iter().map(|&stage| beside(stage, own, loads)).collect();
    let mut kept = vec![KeptForwards::default(); own.len()];
    let is_dropped = |cell: Cell| cell.is_dropped(loads);
    for (position, cell) in row.iter().enumerate().filter(|&(_, &cell)| !is_dropped(cell)) {
        let chunk = order.placement.chunk_of(StageIndex::new(cell.stage)).index();
        let load = &own_loads[chunk];
        let is_again = is_recomputed(load.recompute, &mut kept[chunk], row, position, is_dropped);
        let (mut more, mut less) = match cell.kind {
            Kind::Forward if trains && is_again => (load.kept, 0),
            Kind::Forward if trains => (load.activation(), 0),
            Kind::Forward => (load.activation(), load.activation()),
            Kind::Input | Kind::Backward if is_again => (load.rebuilt, load.activation()),
            Kind::Input | Kind::Backward => (0, load.activation()),
            Kind::Weight => (0, load.stash),
        };
        if matches!(cell.kind, Kind::Input | Kind::Backward) {
            more = more.saturating_add(load.remade);
            less = less.saturating_add(load.remade);
        }
        held = held.saturating_add(more);
        peak = peak.max(held.saturating_add(load.temporary));
        let mut made = if cell.kind == Kind::Input { load.stash } else { 0 };
        if matches!(cell.kind, Kind::Weight | Kind::Backward) {
            made = with_gradients.allocate(StageIndex::new(cell.stage), load.gradient);
        }
        held = held.saturating_add(made).saturating_sub(less);
        peak = peak.max(held.saturating_add(load.temporary));
    }
    // No microbatch is in flight in the update.
    let undo = own_loads.iter().map(|load| load.undo).fold(0, u64::saturating_add);
    if trains { peak.max(held.saturating_add(undo)) } else { peak }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_schedule;
    use crate::mesh::{Mesh, MeshOrder};
    use crate::plan::balance::even;
    use crate::plan::layers::Layers;
    use crate::plan::network::Network;
    use crate::plan::request::TrainingState;
    use crate::plan::stage_load::stage_loads;
    use crate::profile::{HEAD_PART, LayerProfile, LinkProfile, Profile};

    #[test]
    fn gradients_take_the_place_of_what_they_need() {
        let layer = LayerProfile {
            kind: "layer".into(),
            parameter_bytes: 100,
            activation_bytes: 10,
            weight_activation_bytes: Some(30),
            ..LayerProfile::default()
        };
        // After the first `W`, the rank holds the gradient and what the second `I` has made.
        check_peak(&layer, 1, "0F0,0I0,0W0\n", 100);
        check_peak(&layer, 1, "0F0,0F1,0I0,0I1,0W0,0W1\n", 130);
        check_peak(&layer, 1, "0F0,0F1,0B0,0B1\n", 110);
    }

    #[test]
    fn an_action_needs_what_the_layers_of_its_stage_need() {
        let layer = |temporary_bytes, activation_bytes| LayerProfile {
            kind: "layer".into(),
            activation_bytes,
            weight_activation_bytes: Some(0),
            temporary_bytes,
            ..LayerProfile::default()
        };
        // The first stage needs most, and runs when the second one holds nothing.
        check_peak_of(vec![layer(50, 10), layer(5, 20)], 2, "0F0,1F0,1B0,0B0\n", 10 + 50);
        check_peak_of(vec![layer(50, 10), layer(5, 60)], 2, "0F0,1F0,1B0,0B0\n", 10 + 60 + 5);
        check_peak_of(
            vec![layer(50, 10), layer(5, 20)],
            2,
            "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1\n",
            2 * 10 + 20 + 50,
        );
    }

    #[test]
    fn parts_of_a_head_share_their_hidden_states_in_a_stage() {
        let of = |kind: &str, activation_bytes, stash| LayerProfile {
            kind: kind.into(),
            output_bytes: 7,
            activation_bytes,
            weight_activation_bytes: Some(stash),
            ..LayerProfile::default()
        };
        let layers =
            vec![of("layer", 1, 0), of(HEAD_PART, 24, 17), of(HEAD_PART, 17, 17), of(HEAD_PART, 17, 17)];
        check_peak_of(layers.clone(), 1, "0F0,0F1,0I0,0I1,0W0,0W1\n", 2 * (1 + 24 + 10 + 10));
        // Stages of one rank that follow each other share them too.
        check_peak_of(layers[..3].to_vec(), 3, "0F0,1F0,2F0,2B0,1B0,0B0\n", 1 + 24 + 10 + 7 + 7);
        check_peak_of(layers, 1, "0F0,0I0,0F1,0I1,0W0,0W1\n", 17 + 10 + 10 + 1 + 24 + 10 + 10);
    }

    /// Checks the peak of a rank with all stages of equal layers, besides parameters and optimizer state.
    fn check_peak(layer: &LayerProfile, stages: usize, row: &str, expected: u64) {
        check_peak_of(vec![layer.clone(); stages], stages, row, expected);
    }

    /// Checks the same for layers that lie evenly on the stages.
    fn check_peak_of(layers: Vec<LayerProfile>, stages: usize, row: &str, expected: u64) {
        let count = layers.len();
        let profile = Profile { link: LinkProfile::new(0.0, 1.0), layers, ..Profile::default() };
        let network =
            Network::of(&profile, Mesh { pipeline: 1, order: MeshOrder::Replicas, ..Mesh::default() });
        let layers = Layers::of(&profile, 1, network.expect("a network"), TrainingState::default());
        let whole = Sharding { shards: 1, window: 1 };
        let schedule = parse_schedule(row).expect("a schedule");
        let loads = stage_loads(&layers, schedule.placement(), &even(count, stages), &vec![None; stages]);
        let found = peaks(&Order::of(&schedule), &loads, whole)[0];
        assert_eq!(found - StageLoad::always(loads.iter(), whole), expected, "{row}");
    }

    #[test]
    fn what_passes_between_two_stages_of_a_rank_waits_there() {
        let layer = LayerProfile {
            kind: "layer".into(),
            output_bytes: 7,
            activation_bytes: 10,
            weight_activation_bytes: Some(0),
            ..LayerProfile::default()
        };
        check_peak(&layer, 1, "0F0,0B0\n", 10);
        check_peak(&layer, 2, "0F0,1F0,1B0,0B0\n", 10 + 10 + 7);
        check_peak(&layer, 3, "0F0,1F0,2F0,2B0,1B0,0B0\n", 10 + 10 + 10 + 7 + 7);
        // An action of stage 0 also holds the 7 bytes that it sends or has got.
        check_peak(&layer, 2, "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1\n", 3 * 10 + 7 + 7);
    }
}

//! The bytes that a layout needs at least, which is known before its stages are cut.

use crate::layout::{Cut, Layout};
use crate::search::schedules;
use crate::units::{Unit, Units};

/// Returns bytes that the largest rank needs at least: the state of the mean rank, or what the first rank needs
/// for the embedding and as many of the smallest blocks as it has.
pub(super) fn least_bytes(layout: &Layout, units: &Units, total: &Unit) -> f64 {
    let state = |trained, frozen| units.state(trained, frozen, layout).state();
    let blocks = units.blocks() as u32;
    let own = first_blocks(layout, blocks);
    // Without a formula for each chunk, each counts as the smallest one.
    let is_uneven = layout.chunks > 1 && matches!(layout.cut, Cut::Given { .. });
    let held = if schedules::is_exact(layout) && !is_uneven {
        own
    } else {
        fewest_blocks(layout, blocks) * layout.chunks
    };
    let smallest = units.smallest_block();
    let own_blocks = f64::from(own);
    let first = state(
        units.embedding.parameters + smallest.parameters * own_blocks,
        units.embedding.frozen + smallest.frozen * own_blocks,
    ) + smallest.activation * f64::from(held) * schedules::held(layout, 0);
    mean_state(layout, units, total).max(first)
}

/// Returns the bytes of the mean rank's state.
pub(super) fn mean_state(layout: &Layout, units: &Units, total: &Unit) -> f64 {
    let [trained, frozen] =
        units.without_table(total).map(|parameters| parameters * (1.0 / f64::from(layout.pipeline)));
    units.state(trained, frozen, layout).state()
}

/// Returns the blocks of the first rank with a given cut, or with an even one, or one or two fewer.
fn first_blocks(layout: &Layout, blocks: u32) -> u32 {
    if let Cut::Given { blocks, .. } = &layout.cut {
        let stages = layout.stages_of_rank().swap_remove(0);
        return stages.into_iter().filter_map(|stage| blocks.get(stage)).sum();
    }
    let (stages, chunks) = (layout.stages(), layout.chunks);
    if blocks.is_multiple_of(stages) {
        return blocks / stages * chunks;
    }
    // The embedding counts as a block. With several chunks, the rank may also have the head.
    let others = if chunks > 1 { 2 } else { 1 };
    ((blocks + 2) / stages * chunks).saturating_sub(others)
}

/// Returns the fewest blocks of a stage with a given cut, or with an even one.
fn fewest_blocks(layout: &Layout, blocks: u32) -> u32 {
    if let Cut::Given { blocks, .. } = &layout.cut {
        return blocks.iter().copied().min().unwrap_or(0);
    }
    let stages = layout.stages();
    if blocks.is_multiple_of(stages) {
        return blocks / stages;
    }
    // The embedding or the head counts as a block.
    ((blocks + 2) / stages).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::layout::{Precision, ShardedState};
    use crate::placed::Placed;
    use crate::predict::RunPipeline;
    use crate::search::request::{Fixed, Request};
    use crate::setting::Setting;
    use pipewright_shapes::reader;

    /// 126 blocks, which few pipelines divide. Activations are the largest part of the memory.
    #[test]
    fn no_estimate_needs_less_than_the_least_bytes() {
        let model = reader::read(include_str!("../../tests/cluster/llama_405b.json")).expect("a model").model;
        let machine = by_name("h100").expect("a machine");
        let mut request = Request::new(model, machine, 2048, 512, 8192, Precision::Half);
        request.fixed = Fixed { tensor: Some(1), context: Some(1), microbatch: Some(1), ..Fixed::default() };
        let mut compared = 0;
        for pipeline in [1, 2, 4, 8, 16, 32, 64, 128] {
            for choice in schedules::choices(pipeline, 126, None, None, &[]) {
                let sharding = ShardedState::Parameters;
                let schedules::Choice { schedule, chunks } = choice;
                // The first rank has few blocks, and the last one many.
                let stages = pipeline * chunks;
                let mut blocks = vec![1; stages as usize];
                blocks[stages as usize - 1] = 127_u32.saturating_sub(stages);
                let given = Cut::Given { blocks, predictors: stages - 1 };
                for cut in [Cut::Even, given].into_iter().take(if stages > 126 { 1 } else { 2 }) {
                    let (schedule, sharding) = (schedule.clone(), sharding);
                    let layout =
                        Layout { pipeline, chunks, schedule, sharding, cut, ..request.smallest_layout() };
                    let setting =
                        Setting { model: &request.model, layout: &layout, machine: &request.machine };
                    let units = Units::of(&setting);
                    let placed = Placed::on_one(setting);
                    let run = |costs: &_| Ok(schedules::estimate(&layout, costs));
                    let pipeline =
                        RunPipeline::new(&placed, std::slice::from_ref(&units), units.cut(&layout), run)
                            .expect("a pipeline");
                    let estimate = pipeline.predict(&placed, std::slice::from_ref(&units));
                    let least = least_bytes(&layout, &units, &units.total());
                    assert!(
                        least <= estimate.peak_memory(),
                        "{layout:?}: {least} and {}",
                        estimate.peak_memory()
                    );
                    compared += 1;
                }
            }
        }
        assert!(compared > 100, "{compared}");
    }
}

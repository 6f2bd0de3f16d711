//! The meshes and microbatches that the search tries.

use pipewright_schedule::divisor::{divisors, greatest_common_divisor};

use crate::expert_overlap;
use crate::layout::{Layout, heads};
use crate::placed::least_pipeline;
use crate::search::request::Request;
use crate::search::schedules;

/// The most rows of a microbatch that the search tries.
const MOST_ROWS: u32 = 32;
/// The fewest tokens of a sequence on a rank.
const FEWEST_TOKENS: u32 = 512;

/// Returns the layouts that differ in what the costs of blocks depend on: tensor, context and expert ranks,
/// rows of a microbatch and sequence parallelism. Their pipelines are not chosen yet.
pub(super) fn shapes(request: &Request) -> Vec<Layout> {
    let mut shapes = Vec::new();
    for tensor in tensors(request) {
        for context in contexts(request, tensor) {
            for (expert, expert_tensor) in experts(request, tensor) {
                for microbatch in microbatches(request) {
                    for sequence_parallel in sequence_parallel(request, tensor) {
                        shapes.push(Layout {
                            tensor,
                            context,
                            expert,
                            expert_tensor,
                            microbatch,
                            sequence_parallel,
                            ..request.smallest_layout()
                        });
                    }
                }
            }
        }
    }
    // No pipeline makes the other shapes valid, so their costs are not needed.
    shapes.retain(|shape| shape.check_parts(&request.model).is_ok());
    shapes
}

/// Returns the ranks of pipelines for a layout of [`shapes`].
pub(super) fn pipelines(request: &Request, shape: &Layout) -> Vec<u32> {
    let group = shape.tensor * shape.context;
    let least = least_pipeline(&request.kinds());
    let is_possible = |&pipeline: &u32| {
        let layout = Layout { pipeline, ..shape.clone() };
        let rows = u64::from(layout.data()) * u64::from(layout.microbatch);
        pipeline.is_multiple_of(least)
            && request.fixed.data.is_none_or(|data| layout.data() == data)
            && request.fixed.shards.is_none_or(|shards| layout.data().is_multiple_of(shards))
            && pipeline as usize <= request.model.blocks.len()
            && u64::from(layout.batch).is_multiple_of(rows)
            && layout.expert_ranks().is_multiple_of(layout.expert)
    };
    given_or(request.fixed.pipeline, divisors(request.gpus / group))
        .into_iter()
        .filter(|pipeline| request.gpus.is_multiple_of(group.saturating_mul(*pipeline)))
        .filter(is_possible)
        .collect()
}

/// Returns a layout of [`shapes`] with each pipeline and schedule that it may have.
pub(super) fn with_pipelines(request: &Request, shape: &Layout) -> Vec<Layout> {
    let Request { model, fixed, .. } = request;
    let mut layouts = Vec::new();
    for pipeline in pipelines(request, shape) {
        let blocks = model.blocks.len() as u32;
        let further = if model.has_experts() && shape.expert > 1 && fixed.overlaps_experts != Some(false) {
            expert_overlap::schedules(request.implementation.stack)
        } else {
            &[]
        };
        for choice in schedules::choices(pipeline, blocks, fixed.schedule.as_deref(), fixed.chunks, further) {
            let layout =
                Layout { pipeline, chunks: choice.chunks, schedule: choice.schedule, ..shape.clone() };
            if schedules::has_size(&layout) {
                layouts.push(layout);
            }
        }
    }
    layouts
}

fn tensors(request: &Request) -> Vec<u32> {
    let nodes: Vec<u32> = request.kinds().iter().map(|(machine, _)| machine.gpus_per_node).collect();
    let blocks = request.model.blocks.iter();
    let heads = blocks.filter_map(|block| heads(&block.mixer)).reduce(greatest_common_divisor).unwrap_or(1);
    let is_usual = |tensor: &u32| {
        let suits =
            |&node: &u32| *tensor <= node && (node.is_multiple_of(*tensor) || tensor.is_power_of_two());
        heads.is_multiple_of(u64::from(*tensor)) && nodes.iter().all(suits)
    };
    let usual = divisors(request.gpus).into_iter().filter(is_usual).collect();
    let divides = |tensor: &u32| *tensor > 0 && request.gpus.is_multiple_of(*tensor);
    given_or(request.fixed.tensor, usual).into_iter().filter(divides).collect()
}

fn contexts(request: &Request, tensor: u32) -> Vec<u32> {
    let (gpus, sequence) = (request.gpus / tensor, request.sequence);
    let divides =
        |context: &u32| *context > 0 && gpus.is_multiple_of(*context) && sequence.is_multiple_of(*context);
    let mut usual = vec![1];
    usual.extend((1..16).map(|power| 1 << power).take_while(|context| sequence / context >= FEWEST_TOKENS));
    given_or(request.fixed.context, usual).into_iter().filter(divides).collect()
}

/// Returns the groups of ranks that divide the experts, with the ranks that divide each expert.
fn experts(request: &Request, tensor: u32) -> Vec<(u32, u32)> {
    let blocks = request.model.blocks.iter();
    let counts = blocks.filter_map(|block| block.feed_forward.experts().map(|experts| experts.count));
    let Some(count) = counts.reduce(greatest_common_divisor) else {
        return given_or(request.fixed.expert, vec![1]).into_iter().map(|expert| (expert, tensor)).collect();
    };
    let usual = divisors(request.gpus).into_iter().filter(|&expert| count.is_multiple_of(u64::from(expert)));
    let ranks = given_or(request.fixed.expert, usual.collect());
    let with_tensor = |expert: u32| {
        let mut choices = vec![(expert, tensor)];
        if tensor > 1 {
            choices.push((expert, 1));
        }
        choices.retain(|(_, ranks)| request.fixed.expert_tensor.is_none_or(|given| given == *ranks));
        choices
    };
    ranks.into_iter().filter(|&expert| expert > 0).flat_map(with_tensor).collect()
}

fn microbatches(request: &Request) -> Vec<u32> {
    let usual = divisors(request.batch).into_iter().filter(|&rows| rows <= MOST_ROWS).collect();
    given_or(request.fixed.microbatch, usual)
}

fn sequence_parallel(request: &Request, tensor: u32) -> Vec<bool> {
    match request.fixed.sequence_parallel {
        Some(given) => vec![given && tensor > 1],
        None if tensor > 1 => vec![true, false],
        None => vec![false],
    }
}

fn given_or(given: Option<u32>, usual: Vec<u32>) -> Vec<u32> {
    given.map_or(usual, |given| vec![given])
}

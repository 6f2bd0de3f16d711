//! Whether the ranks of each tensor group hold the parts of their parameters that their modules say.
//!
//! A rank alone cannot see that: a shard of a parameter whose placement is missing looks like a whole
//! parameter. So each rank lists the shapes of its shards at launch, and the root of the replica's tree
//! compares them ([`parameters.rs`](super::parameters)).

use std::collections::BTreeMap;

use pipewright_schedule::words::counted;

use pipewright_schedule::StageIndex;

use super::parameters::{HeldShard, ListedParameter};
use crate::failure::Cause;

/// Returns an error unless the shards of each parameter make up a whole, and ranks with the same shard have
/// equal values.
pub(super) fn check_shards(listed: &[ListedParameter]) -> Result<(), Cause> {
    // Ranks may have different parameters, so the indices of one parameter differ. A stage may have a shared
    // parameter more than once.
    let mut times: BTreeMap<(StageIndex, &str, u32), usize> = BTreeMap::new();
    let mut by_path: BTreeMap<(StageIndex, &str, usize), Vec<_>> = BTreeMap::new();
    for parameter in listed {
        if let Some(shard) = &parameter.shard {
            let (stage, path) = (parameter.owner.stage, parameter.path.as_str());
            let earlier = times.entry((stage, path, shard.tensor.index)).or_default();
            by_path.entry((stage, path, *earlier)).or_default().push((parameter, shard));
            *earlier += 1;
        }
    }
    by_path.into_values().try_for_each(|ranks| check_parameter(&ranks))
}

fn check_parameter(ranks: &[(&ListedParameter, &HeldShard)]) -> Result<(), Cause> {
    let (parameter, first) = ranks[0];
    let holders = if first.placement.on_one_rank { 1 } else { first.tensor.of as usize };
    if ranks.len() != holders {
        return Err(Cause::Mistake(format!(
            "`{}` is on {} of stage {}, and should be on {holders}: give each rank its part, or name \
             `Placement::ON_ONE_RANK` in `StageModule::placement` on the one rank that holds it",
            parameter.path,
            counted(ranks.len(), "tensor rank"),
            parameter.owner.stage
        )));
    }
    let mut whole = first.shape.clone();
    let dimension = first.placement.dimension;
    if let (Some(size), true) = (whole.get_mut(dimension), first.placement.shards > 1) {
        // Each replica of an expert group counts one copy of each shard.
        let counted = ranks.iter().filter(|(_, held)| held.placement.shard_of(held.tensor).counts());
        *size = counted.filter_map(|(_, shard)| shard.shape.get(dimension)).sum();
    }
    // The hash of each shard, from the first rank that has it.
    let mut hashes: BTreeMap<u32, u64> = BTreeMap::new();
    for (parameter, held) in ranks {
        let (stage, path, rank) = (parameter.owner.stage, &parameter.path, held.tensor.index);
        let shard = first.placement.shard_of(held.tensor);
        let expected = shard.shape(&whole);
        if held.placement != first.placement || held.shape != expected {
            return Err(Cause::Mistake(format!(
                "tensor rank {rank} of stage {stage} holds `{path}` with the shape {:?}, and its shard has the shape \
                 {expected:?}: cut the parameter with `TensorParallel::shard`, and name the cut in `StageModule::placement`",
                held.shape
            )));
        }
        if let Some(hash) = held.hash
            && *hashes.entry(shard.index).or_insert(hash) != hash
        {
            return Err(Cause::Mistake(format!(
                "tensor rank {rank} of stage {stage} has other values of `{path}` than the first rank with the same part: \
                 start copies with the same values; if each rank holds a shard of its own, name the cut in \
                 `StageModule::placement`"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::Rank;

    use super::super::parameters::Owner;
    use super::super::square_parts::Squares;
    use super::*;
    use crate::tensor::{Placement, TensorRank};

    /// Lists a parameter that each of the ranks holds with this shape and hash.
    fn check(placement: Placement, ranks: &[(&[usize], u64)]) -> Result<(), String> {
        check_of(placement, ranks, ranks.len() as u32)
    }

    /// Like [`check`], but for the first of `of` ranks.
    fn check_of(placement: Placement, ranks: &[(&[usize], u64)], of: u32) -> Result<(), String> {
        let listed = (0..).zip(ranks).map(|(index, (shape, hash))| {
            let tensor = TensorRank { index, of };
            let shard = placement.shard_of(tensor);
            let hash = (shard.copies > 1).then_some(*hash);
            ListedParameter {
                // The ranks before have other parameters too.
                owner: Owner {
                    stage: StageIndex::new(2),
                    parameter: index as usize,
                    rank: Rank::new(0),
                    tensor: index,
                    replica: 0,
                },
                path: "up.weight".to_owned(),
                counts: shard.counts(),
                has_gradient: true,
                shared: None,
                of_layer: None,
                on_one_replica: false,
                squares: Squares::SUM,
                shard: Some(HeldShard { placement, tensor, shape: shape.to_vec(), hash }),
            }
        });
        check_shards(&listed.collect::<Vec<_>>()).map_err(|cause| cause.to_string())
    }

    #[test]
    fn shards_make_up_a_whole() {
        let columns = Placement::split(1, 3);
        assert_eq!(check(columns, &[(&[4, 3], 1), (&[4, 3], 2), (&[4, 1], 3)]), Ok(()));
        let error = check(columns, &[(&[4, 2], 1), (&[4, 2], 2), (&[4, 3], 3)]).expect_err("another cut");
        assert!(
            error.starts_with("tensor rank 0 of stage 2 holds `up.weight` with the shape [4, 2], and its shard has the shape [4, 3]"),
            "{error}"
        );
        let halves = Placement::split(0, 2);
        assert_eq!(check(halves, &[(&[2], 1), (&[2], 1), (&[1], 2), (&[1], 2)]), Ok(()));
    }

    #[test]
    fn a_shard_without_a_placement_is_found() {
        assert_eq!(check(Placement::REPLICATED, &[(&[4], 1), (&[4], 1)]), Ok(()));
        let error = check(Placement::REPLICATED, &[(&[4], 1), (&[4], 2)]).expect_err("a shard");
        assert!(error.starts_with("tensor rank 1 of stage 2 has other values of `up.weight`"), "{error}");
        let error = check(Placement::REPLICATED, &[(&[4], 1), (&[3], 2)]).expect_err("a shard");
        assert!(error.contains("with the shape [3], and its shard has the shape [4]"), "{error}");
    }

    #[test]
    fn a_parameter_is_on_one_rank_or_on_all() {
        assert_eq!(check_of(Placement::ON_ONE_RANK, &[(&[4], 1)], 3), Ok(()));
        let error = check(Placement::ON_ONE_RANK, &[(&[4], 1), (&[4], 1)]).expect_err("both have it");
        assert!(
            error.starts_with("`up.weight` is on 2 tensor ranks of stage 2, and should be on 1"),
            "{error}"
        );
        let error = check_of(Placement::REPLICATED, &[(&[4], 1)], 2).expect_err("one does not have it");
        assert!(
            error.starts_with("`up.weight` is on 1 tensor rank of stage 2, and should be on 2"),
            "{error}"
        );
    }
}

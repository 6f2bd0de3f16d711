//! Which parameters several stages hold, and the order in which squares are added to the gradient norm.
//!
//! The ranks compare their parameters at launch, before the first step. Each rank lists its parameters, and
//! the lists go up the tree of the replica, or of the expert group if replicas hold experts together. The
//! root returns an error if parameters have the same path but their stages do not declare it as shared. It
//! compares the copies of shared parameters, and sends the list of shared parameters down. Steps exchange
//! only numbers.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use burn::tensor::TensorData;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Rank, StageIndex};
use serde::{Deserialize, Serialize};

use super::context::RankContext;
use super::square_parts::Squares;
use super::stages::{LocalStage, LocalStages};
use crate::failure::Cause;
use crate::optimizer::group_of;
use crate::stage::Held;
use crate::tensor::{Placement, TensorRank};

/// One parameter of a rank, in the form that is sent to the root of the tree of its replica or its expert
/// group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ListedParameter {
    pub(super) owner: Owner,
    /// Its global path.
    pub(super) path: String,
    /// Whether the rank's copy counts, out of the copies in its tensor group and its expert group.
    pub(super) counts: bool,
    /// Whether it may have a gradient; integer and boolean tensors cannot.
    pub(super) has_gradient: bool,
    /// Shape and values, if its stage declares it as shared.
    pub(super) shared: Option<Fingerprint>,
    /// The shard that the rank holds, if several ranks compute the stage together.
    pub(super) shard: Option<HeldShard>,
    /// The shard that the layer has, and the number of shards, if other layers have the others.
    pub(super) of_layer: Option<(u32, u32)>,
    /// Whether one replica of the expert group holds it, and the others do not have it.
    pub(super) on_one_replica: bool,
    /// The squares that the rank sends for it, if it counts and has a gradient.
    pub(super) squares: Squares,
}

/// The shape and the hash of a shared parameter's values, which all its copies have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fingerprint {
    shape: Vec<usize>,
    /// A hash of the values.
    hash: u64,
}

/// The part of a parameter that a rank of a tensor group holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HeldShard {
    pub(super) placement: Placement,
    pub(super) tensor: TensorRank,
    pub(super) shape: Vec<usize>,
    /// A hash of its values, if other ranks hold the same shard.
    pub(super) hash: Option<u64>,
}

/// A copy of a parameter in the pipeline. Owners are ordered by stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) stage: StageIndex,
    /// The index of the parameter in its stage.
    pub(super) parameter: usize,
    /// The rank, numbered within its pipeline.
    pub(super) rank: Rank,
    /// The rank's index in its tensor group. Each of these ranks has its own shards of parameters.
    pub(super) tensor: u32,
    /// The replica's index in its expert group. Each of these replicas has its own copies of all parameters
    /// but experts.
    pub(super) replica: u32,
}

/// The owners, in order, of a parameter with at least two copies.
pub(super) type Owners = Vec<Owner>;

/// The order in which the root adds squares: the path of each parameter that counts, in the order of the
/// paths, and the indices of the squares of its parts among the gathered squares, in the order of the parts.
/// Empty on ranks that add nothing.
pub(super) type NormOrder = Vec<(Arc<str>, Vec<usize>)>;

/// The information about the pipeline's parameters that a rank has; nothing before the ranks have compared
/// theirs.
#[derive(Default)]
pub(super) struct KnownParameters {
    /// Shared parameters with a copy on this rank, with their indices in the list of all.
    pub(super) shared: Vec<(u32, Owners)>,
    /// Copies on this rank that do not count for the norm and checkpoints, because another owner's copy does.
    copies: HashSet<(StageIndex, usize)>,
    order: NormOrder,
    /// The group by whose norm each parameter of `order` is clipped.
    clipped_with: Vec<Option<usize>>,
}

impl KnownParameters {
    /// Keeps the entries of this rank in the list of all shared parameters.
    pub(super) fn new(context: &RankContext, order: NormOrder, shared: Vec<Owners>) -> Self {
        let place = (context.rank(), context.tensor_rank().index, context.expert_rank().index);
        let is_here = |owner: &Owner| (owner.rank, owner.tensor, owner.replica) == place;
        let is_own = |owners: &Owners| owners.iter().any(is_here);
        let shared: Vec<(u32, Owners)> = (0..).zip(shared).filter(|(_, owners)| is_own(owners)).collect();
        let copies = shared.iter().flat_map(|(_, owners)| copies(owners));
        let copies = copies.map(|owner| (owner.stage, owner.parameter)).collect();
        let groups = &context.config.clip_groups;
        let clipped_with = order.iter().map(|(path, _)| group_of(groups, path)).collect();
        Self { shared, copies, order, clipped_with }
    }

    /// Returns the order in which the root adds squares, each with the group by whose norm the parameter is
    /// clipped.
    pub(super) fn order(&self) -> impl Iterator<Item = (&Arc<str>, &[usize], Option<usize>)> + Clone {
        let entries = self.order.iter().zip(&self.clipped_with);
        entries.map(|((path, indices), group)| (path, indices.as_slice(), *group))
    }

    /// Returns whether this rank's copy of a parameter is the one that counts for the norm and in
    /// checkpoints.
    pub(super) fn counts(&self, context: &RankContext, stage: &LocalStage, parameter: usize) -> bool {
        !self.copies.contains(&(stage.index, parameter))
            && stage.shard_of(parameter, context.tensor_rank()).counts()
            && counts_on_replica(context, stage, parameter)
    }
}

/// Returns whether a parameter counts on this replica, of the replicas of its expert group: each has its own
/// experts, and the other parameters count on the first, or on the first that hold different rows of them.
fn counts_on_replica(context: &RankContext, stage: &LocalStage, parameter: usize) -> bool {
    context.expert_rank().index < context.row_holders() || stage.runner().table().is_on_one_replica(parameter)
}

/// Lists this rank's parameters.
pub(super) fn list_parameters(context: &RankContext, stages: &LocalStages) -> Vec<ListedParameter> {
    let lists = stages.iter().flat_map(|stage| {
        let held = stage.runner().held().into_iter().enumerate();
        held.map(|(parameter, held)| listed(context, stage, parameter, held))
    });
    lists.collect()
}

fn listed(context: &RankContext, stage: &LocalStage, parameter: usize, held: Held) -> ListedParameter {
    let (runner, tensor) = (stage.runner(), context.tensor_rank());
    let placement = runner.table().placement(parameter);
    let shard = (tensor.of > 1).then(|| HeldShard {
        placement,
        tensor,
        shape: held.shape.clone(),
        hash: held.copied.as_ref().map(|values| hash_of(values.as_bytes())),
    });
    let fingerprint =
        |values: TensorData| Fingerprint { shape: held.shape.clone(), hash: hash_of(values.as_bytes()) };
    ListedParameter {
        owner: Owner {
            stage: stage.index,
            parameter,
            rank: context.rank(),
            tensor: tensor.index,
            replica: context.expert_rank().index,
        },
        on_one_replica: runner.table().is_on_one_replica(parameter),
        squares: Squares::of(context, runner.table().is_on_one_replica(parameter)),
        of_layer: placement.of_layer.map(|index| (index, placement.shards)),
        path: held.path.to_string(),
        counts: placement.shard_of(tensor).counts() && counts_on_replica(context, stage, parameter),
        has_gradient: parameter < runner.table().paths.len(),
        shard,
        shared: held.shared.map(fingerprint),
    }
}

/// Compares the parameters of all ranks of a pipeline. Returns the shared ones, each with its owners in
/// order, and the order of the norm.
pub(super) fn compare(listed: &[ListedParameter]) -> Result<(Vec<Owners>, NormOrder), Cause> {
    check_layers(listed)?;
    let shared = find_shared(listed)?;
    let order = norm_order(listed, &shared);
    Ok((shared, order))
}

/// Returns all owners except the first, which is the only one that counts.
fn copies(owners: &Owners) -> impl Iterator<Item = &Owner> {
    owners.iter().skip(1)
}

/// Returns the parameters that several stages share, in the order of their paths, of the shards of layers and
/// of the ranks in the tensor groups, each with its owners in order. All owners must declare the path as
/// shared, and their copies must be equal. Different shards of a parameter are not copies.
fn find_shared(listed: &[ListedParameter]) -> Result<Vec<Owners>, Cause> {
    let mut by_key: BTreeMap<_, Vec<&ListedParameter>> = BTreeMap::new();
    for parameter in listed {
        let owner = parameter.owner;
        let key = (parameter.path.as_str(), parameter.of_layer, owner.tensor, owner.replica);
        by_key.entry(key).or_default().push(parameter);
    }
    let several = by_key.into_iter().filter(|(_, copies)| copies.len() > 1);
    several.map(|((path, ..), copies)| equal_copies(path, copies)).collect()
}

/// Returns an error if layers cut a parameter into different numbers of shards. Some shards may be missing,
/// if only some layers of a model are measured.
fn check_layers(listed: &[ListedParameter]) -> Result<(), Cause> {
    let mut by_path: BTreeMap<&str, (StageIndex, u32)> = BTreeMap::new();
    for parameter in listed {
        let found = (parameter.owner.stage, parameter.of_layer.map_or(1, |(_, shards)| shards));
        let first = *by_path.entry(&parameter.path).or_insert(found);
        if first.1 != found.1 {
            return Err(Cause::Mistake(format!(
                "stages {} and {} cut the parameter `{}` into {} and {}: name the same number in `StageModule::placement` of \
                 all layers that have a shard of it",
                first.0,
                found.0,
                parameter.path,
                first.1,
                counted(found.1, "shard")
            )));
        }
    }
    Ok(())
}

/// Returns the owners of one parameter in order, if all declare it as shared and their copies are equal.
fn equal_copies(path: &str, mut copies: Vec<&ListedParameter>) -> Result<Owners, Cause> {
    copies.sort_unstable_by_key(|copy| copy.owner);
    let first = copies[0];
    for (index, copy) in copies.iter().enumerate() {
        let (one, other) = (first.owner.stage, copy.owner.stage);
        let (Some(expected), Some(found)) = (&first.shared, &copy.shared) else {
            let undeclared = if first.shared.is_none() { first } else { copy };
            let (second, undeclared) = (copies[index.max(1)].owner.stage, undeclared.owner.stage);
            return Err(Cause::Mistake(format!(
                "stages {one} and {second} each have a parameter `{path}`, and stage {undeclared} does not declare it as \
                 shared: give different parameters different paths (`StageModule::parameter_path`, or `Stage::with_prefix`); \
                 if it is one parameter, name its path in `StageModule::shared_parameters` of both"
            )));
        };
        if found.shape != expected.shape {
            return Err(Cause::Mistake(format!(
                "stages {one} and {other} share the parameter `{path}`, but hold it with shapes {:?} and {:?}: give different \
                 parameters different paths (`StageModule::parameter_path`)",
                expected.shape, found.shape
            )));
        }
        if found.hash != expected.hash {
            return Err(Cause::Mistake(format!(
                "stages {one} and {other} share the parameter `{path}`, but their copies differ: copies must start with the \
                 same values"
            )));
        }
    }
    Ok(copies.into_iter().map(|copy| copy.owner).collect())
}

/// Returns the order of the norm: by path, and then by the shards of layers and of ranks. Each rank sends the
/// squares of its parameters that count in the order of its list, and they are gathered in the order of the
/// ranks. If `n` replicas send squares of a parameter, each has the parts of every `n`-th run.
fn norm_order(listed: &[ListedParameter], shared: &[Owners]) -> NormOrder {
    let copies: HashSet<Owner> = shared.iter().flat_map(copies).copied().collect();
    let is_copy = |listed: &ListedParameter| copies.contains(&listed.owner);
    let counted = listed.iter().filter(|listed| listed.has_gradient && listed.counts && !is_copy(listed));
    let mut first = 0;
    let mut by_key: BTreeMap<_, Vec<(usize, Squares)>> = BTreeMap::new();
    for ListedParameter { path, of_layer, owner, squares, .. } in counted {
        by_key.entry((path.as_str(), *of_layer, owner.tensor)).or_default().push((first, *squares));
        first += squares.count();
    }
    by_key
        .into_iter()
        .map(|((path, ..), of_replicas)| (path.into(), in_order_of_parts(&of_replicas)))
        .collect()
}

/// Returns the indices of the squares of a parameter in the order of its parts, from the first index and the
/// squares of each replica that sends some.
fn in_order_of_parts(of_replicas: &[(usize, Squares)]) -> Vec<usize> {
    let runs = of_replicas.iter().map(|(_, squares)| squares.runs).max().unwrap_or(0);
    let run_of = |run, &(first, Squares { runs, length }): &(usize, Squares)| {
        let start = first + run * length;
        (run < runs).then_some(start..start + length)
    };
    let runs = (0..runs).flat_map(|run| of_replicas.iter().filter_map(move |squares| run_of(run, squares)));
    runs.flatten().collect()
}

/// Returns a hash that is the same for the same bytes in every process of one build.
pub(super) fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(rank: u32, stage: u32, parameter: usize, path: &str, hash: Option<u64>) -> ListedParameter {
        let owner =
            Owner { stage: StageIndex::new(stage), parameter, rank: Rank::new(rank), tensor: 0, replica: 0 };
        let shared = hash.map(|hash| Fingerprint { shape: vec![2], hash });
        ListedParameter {
            owner,
            path: path.to_owned(),
            counts: true,
            has_gradient: true,
            shared,
            shard: None,
            of_layer: None,
            on_one_replica: false,
            squares: Squares::SUM,
        }
    }

    /// Returns the order of parameters with one sum each.
    fn indices(order: &NormOrder) -> Vec<(&str, usize)> {
        let single = |indices: &[usize]| <[usize; 1]>::try_from(indices).expect("one sum");
        order.iter().map(|(path, indices)| (&**path, single(indices)[0])).collect()
    }

    /// Eight replicas hold the rows of a parameter in two shard groups of four, and two of them hold the
    /// experts together. So the first one has the parts 0, 1, 4 and 5, and the second one the parts 2, 3, 6
    /// and 7.
    #[test]
    fn parts_of_several_replicas_are_in_the_order_of_the_rows() {
        let on = |replica, listed: ListedParameter| ListedParameter {
            owner: Owner { replica, ..listed.owner },
            squares: if listed.path == "norm" { Squares { runs: 2, length: 2 } } else { Squares::SUM },
            ..listed
        };
        let listed = [
            on(0, listed(0, 0, 0, "experts.0", None)),
            on(0, listed(0, 0, 1, "norm", None)),
            on(1, listed(0, 0, 0, "experts.1", None)),
            on(1, listed(0, 0, 1, "norm", None)),
        ];
        let expected: [(Arc<str>, Vec<usize>); 3] = [
            ("experts.0".into(), vec![0]),
            ("experts.1".into(), vec![5]),
            ("norm".into(), vec![1, 2, 6, 7, 3, 4, 8, 9]),
        ];
        assert_eq!(norm_order(&listed, &[]), expected);
    }

    #[test]
    fn the_lowest_stage_counts_and_squares_are_added_by_path() {
        // Rank 0 has the stages 0 and 3, as in a V placement.
        let listed = [
            listed(0, 0, 0, "table", Some(1)),
            listed(0, 3, 0, "norm", None),
            listed(0, 3, 1, "table", Some(1)),
            listed(1, 1, 0, "b", None),
            listed(1, 2, 0, "a", Some(5)),
        ];
        let shared = find_shared(&listed).expect("equal copies");
        let stages = shared.iter().map(|owners| owners.iter().map(|owner| owner.stage.get()).collect());
        assert_eq!(stages.collect::<Vec<Vec<u32>>>(), [[0, 3]]);
        let order = norm_order(&listed, &shared);
        assert_eq!(indices(&order), [("a", 3), ("b", 2), ("norm", 1), ("table", 0)]);
    }

    #[test]
    fn shards_of_one_path_are_not_copies_and_whole_parameters_count_once() {
        let on = |tensor, listed: ListedParameter| ListedParameter {
            owner: Owner { tensor, ..listed.owner },
            counts: tensor == 0 || listed.path == "split",
            ..listed
        };
        let parameters_of = |tensor| {
            ["whole", "split"]
                .iter()
                .enumerate()
                .map(move |(index, path)| on(tensor, listed(0, 0, index, path, None)))
        };
        let listed: Vec<ListedParameter> = (0..2).flat_map(parameters_of).collect();
        let shared = find_shared(&listed).expect("each rank has its own");
        assert!(shared.is_empty());
        let order = norm_order(&listed, &shared);
        assert_eq!(indices(&order), [("split", 1), ("split", 2), ("whole", 0)]);
    }

    #[test]
    fn shards_of_layers_are_one_parameter_and_have_their_order() {
        let parameter_of = |rank, stage, index, shards| ListedParameter {
            of_layer: Some((index, shards)),
            ..listed(rank, stage, 0, "head", None)
        };
        let all = [parameter_of(0, 2, 1, 3), parameter_of(1, 1, 0, 3), parameter_of(1, 3, 2, 3)];
        assert!(find_shared(&all).expect("each is a shard of its own").is_empty());
        check_layers(&all).expect("three shards each");
        assert_eq!(indices(&norm_order(&all, &[])), [("head", 1), ("head", 0), ("head", 2)]);
        let refused = |second: ListedParameter, shards: &str| {
            let error =
                check_layers(&[parameter_of(0, 0, 0, 2), second]).expect_err("another cut").to_string();
            let expected = format!("stages 0 and 1 cut the parameter `head` into 2 and {shards}");
            assert!(error.starts_with(&expected), "{error}");
        };
        refused(parameter_of(0, 1, 1, 3), "3 shards");
        refused(listed(0, 1, 0, "head", None), "1 shard");
        assert!(
            find_shared(&[parameter_of(0, 0, 1, 2), parameter_of(1, 1, 1, 2)]).is_err(),
            "twice the same"
        );
    }

    #[test]
    fn indices_of_a_copy_differ_between_ranks_with_other_parameters() {
        // Stage 1 shares the table of stage 0. Its first rank has an expert before the table, its second one
        // after it.
        let on = |tensor, listed: ListedParameter| ListedParameter {
            owner: Owner { tensor, ..listed.owner },
            ..listed
        };
        let listed = [
            on(0, listed(0, 0, 0, "table", Some(1))),
            on(1, listed(0, 0, 0, "table", Some(2))),
            on(0, listed(1, 1, 0, "experts.0", None)),
            on(0, listed(1, 1, 1, "table", Some(1))),
            on(1, listed(1, 1, 0, "table", Some(2))),
            on(1, listed(1, 1, 1, "experts.1", None)),
        ];
        let order = norm_order(&listed, &find_shared(&listed).expect("equal copies"));
        let paths: Vec<&str> = order.iter().map(|(path, _)| &**path).collect();
        assert_eq!(paths, ["experts.0", "experts.1", "table", "table"]);
    }

    #[test]
    fn one_path_of_two_undeclared_parameters_is_refused() {
        for hashes in [[None, None], [Some(1), None], [None, Some(1)]] {
            let listed = [listed(0, 0, 0, "weight", hashes[0]), listed(1, 1, 0, "weight", hashes[1])];
            let error = find_shared(&listed).expect_err("they are different parameters").to_string();
            assert!(error.starts_with("stages 0 and 1 each have a parameter `weight`"), "{error}");
        }
    }

    #[test]
    fn copies_that_differ_are_refused() {
        let listed = [listed(1, 1, 0, "table", Some(1)), listed(0, 0, 0, "table", Some(2))];
        let error = find_shared(&listed).expect_err("the values differ").to_string();
        assert!(
            error.starts_with("stages 0 and 1 share the parameter `table`, but their copies differ"),
            "{error}"
        );
    }
}

//! The vote on metadata: before the start every process sends its metadata, and all get the union.

use std::collections::BTreeMap;
use std::time::Duration;

use super::agreement::{AgreementError, Difference, Differences, agree_by};
use super::endpoint::Endpoint;
use crate::ids::WorldRank;
use crate::tensor::{Vote, Votes};

/// Returns the union of the metadata of all processes, when all have sent theirs.
pub(super) fn vote(
    endpoint: &mut Endpoint,
    own: &Votes,
    deadline: Duration,
) -> Result<Votes, AgreementError> {
    agree_by(endpoint, own, deadline, union)
}

/// Returns the union of all entries, and the differences between the ranks.
fn union(votes: &[(WorldRank, Votes)]) -> (Differences, Votes) {
    let mut known: BTreeMap<&String, (WorldRank, &Vote)> = BTreeMap::new();
    let mut differences = Vec::new();
    for (rank, votes) in votes {
        for (name, vote) in votes {
            let &mut (first, one) = known.entry(name).or_insert((*rank, vote));
            if one != vote {
                let values = [one.to_string(), vote.to_string()];
                differences.push(Difference::Known { name: name.clone(), ranks: [first, *rank], values });
            }
        }
    }
    let known = known.into_iter().map(|(name, (_, vote))| (name.clone(), vote.clone())).collect();
    (Differences(differences), known)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use pipewright_schedule::StageIndex;

    use super::*;
    use crate::tensor::{Metadata, TensorSpec};

    #[test]
    fn a_boundary_is_static_if_any_rank_knows_it() {
        let spec = |width: usize| TensorSpec::of_rows(DType::F32, [width]);
        let partial = |known: &[(u32, usize)]| {
            let stages = known.iter().map(|&(stage, width)| (StageIndex::new(stage), vec![spec(width)]));
            Metadata::Partial { stages: stages.collect(), free: vec![0] }
        };
        let vote = |all: &[Metadata]| {
            let all: Vec<_> = (0..).map(WorldRank::new).zip(all.iter().map(Metadata::votes)).collect();
            let (differences, votes) = union(&all);
            (differences.to_string(), Metadata::voted(votes))
        };
        let dynamic = Metadata::default();
        assert_eq!(vote(&[dynamic.clone(), dynamic.clone()]), (String::new(), partial(&[])));
        let all = [partial(&[(1, 6)]), dynamic, partial(&[(1, 6), (3, 5)])];
        assert_eq!(vote(&all), (String::new(), partial(&[(1, 6), (3, 5)])));
        let (differences, _) = vote(&[partial(&[(2, 6)]), partial(&[(2, 6)]), partial(&[(2, 5)])]);
        let expected =
            "rank 0 gives the inputs of stage 2 as F32 [_, 6], and rank 2 as F32 [_, 5]: give the same";
        assert!(differences.starts_with(expected), "{differences}");
        let (differences, _) = vote(&[Metadata::default(), Metadata::Dynamic { free: vec![0, 1] }]);
        let expected = "rank 0 gives the dimensions that may differ as [0], and rank 1 as [0, 1]";
        assert!(differences.starts_with(expected), "{differences}");
        // Static metadata of one process suffices.
        let given = Metadata::Static { stages: vec![vec![spec(6)], vec![spec(5)]] };
        let all = [given, Metadata::default()];
        assert_eq!(vote(&all), (String::new(), partial(&[(1, 6), (2, 5)])));
    }
}

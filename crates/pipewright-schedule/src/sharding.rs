//! The bytes of parameters and optimizer state that a rank holds for its stages, alone or together with other
//! replicas.
//!
//! Of replicas that hold a model together, each has an equal part of the parameters and of the optimizer's
//! state. Before a stage computes, its parameters are gathered: they are whole until another stage takes
//! their place. Gradients are not counted here, because they are whole until the last microbatch of their
//! stage.

/// The bytes that training a stage takes besides its gradients, or of several stages of a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateBytes {
    /// The parameters.
    pub parameters: u64,
    /// The rounded copy of the parameters with which a stage computes in half precision.
    pub copy: u64,
    /// The state of the optimizer.
    pub optimizer: u64,
}

impl StateBytes {
    /// Returns the sum.
    pub fn total(self) -> u64 {
        self.parameters.saturating_add(self.copy).saturating_add(self.optimizer)
    }

    /// Returns the sum for two groups of parameters.
    pub fn plus(self, other: Self) -> Self {
        Self {
            parameters: self.parameters.saturating_add(other.parameters),
            copy: self.copy.saturating_add(other.copy),
            optimizer: self.optimizer.saturating_add(other.optimizer),
        }
    }

    /// Returns each number changed by `change`.
    pub fn map(self, change: impl Fn(u64) -> u64) -> Self {
        let [parameters, copy, optimizer] = [self.parameters, self.copy, self.optimizer].map(change);
        Self { parameters, copy, optimizer }
    }
}

/// The distribution of parameters and optimizer state over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharding {
    /// The number of replicas that hold them together; 1 if each replica holds all.
    pub shards: u32,
    /// The number of stages of a rank whose parameters are gathered at the same time.
    pub window: u32,
}

impl Sharding {
    /// Returns the bytes that a rank with these stages holds at most.
    pub fn held(self, stages: impl IntoIterator<Item = StateBytes>) -> StateBytes {
        let stages = stages.into_iter();
        if self.shards <= 1 {
            return stages.fold(StateBytes::default(), StateBytes::plus);
        }
        let mut stages: Vec<StateBytes> = stages.collect();
        let whole = stages.iter().copied().fold(StateBytes::default(), StateBytes::plus);
        stages.sort_unstable_by_key(|stage| u64::MAX - stage.parameters);
        let gathered = stages.into_iter().take(self.window as usize);
        let gathered = gathered.fold(StateBytes::default(), StateBytes::plus);
        let part = |bytes: u64| bytes.div_ceil(u64::from(self.shards));
        StateBytes {
            parameters: part(whole.parameters).saturating_add(gathered.parameters),
            copy: gathered.copy,
            optimizer: part(whole.optimizer),
        }
    }
}

/// The replicas that hold parameters and optimizer state together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ShardGroups {
    /// Each replica holds all.
    #[default]
    Whole,
    /// All replicas hold them together.
    All,
    /// Groups of this many replicas hold them together; all replicas do if the groups do not divide them.
    Of(u32),
}

impl ShardGroups {
    /// Returns the number of replicas, out of `replicas`, that hold parameters and optimizer state together.
    pub fn shards(self, replicas: u32) -> u32 {
        match self {
            Self::Whole => 1,
            Self::Of(shards) if shards > 0 && replicas.is_multiple_of(shards) => shards,
            Self::All | Self::Of(_) => replicas.max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(parameters: u64) -> StateBytes {
        StateBytes { parameters, copy: parameters / 2, optimizer: 2 * parameters }
    }

    #[test]
    fn replicas_that_share_hold_their_part_and_what_is_gathered() {
        let stages = [40, 120, 80].map(stage);
        let held = |shards, window| Sharding { shards, window }.held(stages);
        assert_eq!(held(1, 1), StateBytes { parameters: 240, copy: 120, optimizer: 480 });
        assert_eq!(held(4, 1), StateBytes { parameters: 60 + 120, copy: 60, optimizer: 120 });
        assert_eq!(held(4, 2), StateBytes { parameters: 60 + 200, copy: 100, optimizer: 120 });
        assert_eq!(held(4, 9), StateBytes { parameters: 60 + 240, copy: 120, optimizer: 120 });
        let many = Sharding { shards: 7, window: 1 }.held([stage(10)]);
        assert_eq!(many, StateBytes { parameters: 2 + 10, copy: 5, optimizer: 3 });
    }

    #[test]
    fn groups_that_do_not_divide_the_replicas_become_one() {
        assert_eq!([1, 4, 6].map(|replicas| ShardGroups::Whole.shards(replicas)), [1, 1, 1]);
        assert_eq!([1, 4, 6].map(|replicas| ShardGroups::All.shards(replicas)), [1, 4, 6]);
        assert_eq!([1, 4, 6, 8].map(|replicas| ShardGroups::Of(4).shards(replicas)), [1, 4, 6, 4]);
    }
}

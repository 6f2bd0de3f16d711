//! The bytes of parameters and optimizer state that a rank holds for its stages, alone or together with other
//! replicas.
//!
//! Of replicas that hold a model together, each has an equal part of the parameters and of the optimizer's
//! state. Fewer of them hold an expert if replicas also hold the experts of each mixture together. Before a
//! stage computes, its parameters are gathered: they are whole until another stage takes their place.
//! Gradients are not counted here, because they are whole until the last microbatch of their stage.

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

/// The bytes of the parameters of a stage that a replica computes with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageBytes {
    /// The experts of the replica, if replicas hold the experts of each mixture together.
    pub experts: StateBytes,
    /// All other parameters.
    pub others: StateBytes,
}

impl StageBytes {
    /// Returns the sum.
    pub fn whole(self) -> StateBytes {
        self.experts.plus(self.others)
    }

    /// Returns the sum for two stages.
    fn plus(self, other: Self) -> Self {
        Self { experts: self.experts.plus(other.experts), others: self.others.plus(other.others) }
    }
}

impl Sharding {
    /// Returns the bytes that a rank with these stages holds at most.
    pub fn held(self, stages: impl IntoIterator<Item = StateBytes>) -> StateBytes {
        let stage = |others| StageBytes { others, ..StageBytes::default() };
        self.held_with_experts(stages.into_iter().map(stage), 1)
    }

    /// Returns the bytes that a rank with these stages holds at most if `expert_ranks` replicas hold the
    /// experts of each mixture together, each some of them. Experts that only one of the replicas holds are
    /// not gathered.
    pub fn held_with_experts(
        self,
        stages: impl IntoIterator<Item = StageBytes>,
        expert_ranks: u32,
    ) -> StateBytes {
        let stages = stages.into_iter();
        if self.shards <= 1 {
            return stages.map(StageBytes::whole).fold(StateBytes::default(), StateBytes::plus);
        }
        let sharers = self.expert_sharers(expert_ranks);
        let in_addition = |stage: &StageBytes| {
            let experts = if sharers > 1 { stage.experts.parameters } else { 0 };
            stage.others.parameters.saturating_add(experts)
        };
        let mut stages: Vec<StageBytes> = stages.collect();
        let all = stages.iter().copied().fold(StageBytes::default(), StageBytes::plus);
        let parts = self.part(all, expert_ranks);
        let while_gathered = |stage: &StageBytes| in_addition(stage).saturating_add(stage.whole().copy);
        stages.sort_unstable_by_key(|stage| u64::MAX - while_gathered(stage));
        let gathered = stages.iter().take(self.window as usize);
        let (parameters, copy) = gathered.fold((0_u64, 0_u64), |(parameters, copy), stage| {
            let whole = stage.whole();
            (parameters.saturating_add(in_addition(stage)), copy.saturating_add(whole.copy))
        });
        StateBytes { parameters: parts.parameters.saturating_add(parameters), copy, ..parts }
    }

    /// Returns the bytes of a stage on a replica while its parameters are not gathered. The copy of its
    /// parameters is whole.
    pub fn part(self, StageBytes { experts, others }: StageBytes, expert_ranks: u32) -> StateBytes {
        let of = |state: StateBytes, sharers: u32| {
            let part = |bytes: u64| bytes.div_ceil(u64::from(sharers.max(1)));
            StateBytes { parameters: part(state.parameters), optimizer: part(state.optimizer), ..state }
        };
        of(experts, self.expert_sharers(expert_ranks)).plus(of(others, self.shards))
    }

    /// Returns the number of replicas that hold the same experts, in a group that holds the parameters
    /// together.
    pub fn expert_sharers(self, expert_ranks: u32) -> u32 {
        (self.shards / expert_ranks.max(1)).max(1)
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

    /// Of four replicas, two hold the same experts, or one does.
    #[test]
    fn fewer_replicas_share_an_expert() {
        let stage =
            |[experts, others]: [u64; 2]| StageBytes { experts: stage(experts), others: stage(others) };
        let held = |shards, window, expert_ranks| {
            let stages = [[80, 40], [0, 120], [160, 8]].map(stage);
            Sharding { shards, window }.held_with_experts(stages, expert_ranks)
        };
        assert_eq!(held(1, 1, 2), StateBytes { parameters: 408, copy: 204, optimizer: 816 });
        let (experts, others) = (240, 168);
        let parts = experts / 2 + others / 4;
        let expected = StateBytes { parameters: parts + 168, copy: 84, optimizer: 2 * parts };
        assert_eq!(held(4, 1, 2), expected);
        // The second stage gathers the most, because no experts are gathered.
        let parts = experts + others / 4;
        assert_eq!(held(4, 1, 4), StateBytes { parameters: parts + 120, copy: 60, optimizer: 2 * parts });
        assert_eq!(held(4, 1, 8), held(4, 1, 4));
        // The stage with the most bytes is the one whose experts have a large copy.
        let stages = [[400, 100], [0, 120]].map(stage);
        let sharding = Sharding { shards: 4, window: 1 };
        let parts = 400 + 220 / 4;
        let expected = StateBytes { parameters: parts + 100, copy: 250, optimizer: 2 * parts };
        assert_eq!(sharding.held_with_experts(stages, 4), expected);
        assert_eq!(held(4, 2, 1).parameters, 408 / 4 + 168 + 120);
    }
}

//! The facts about a rank that do not change while it runs: its position in the mesh, the groups and trees of
//! ranks that it exchanges messages with, the placement of the stages, and the configuration.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pipewright_schedule::{Placement, Rank, StageIndex};

use super::idle_threads::IdleThreads;
use super::next_batch::NextBatch;
use crate::collective::{Group, Tree};
use crate::config::PipelineConfig;
use crate::hook::ActionHook;
use crate::ids::WorldRank;
use crate::mesh::{Mesh, MeshCoord, RankGroups, by_share};
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::shard::{RowShard, RowShards};
use crate::tensor::{ExpertRank, TensorRank};

/// The facts about a rank that do not change while it runs.
pub(crate) struct RankContext {
    /// This rank as a rank of the world, which reports and errors name.
    pub(crate) world_rank: WorldRank,
    coord: MeshCoord,
    /// The mesh of all ranks.
    pub(super) mesh: Mesh,
    /// The same in every program of the pipeline.
    pub(super) placement: Placement,
    pub(crate) config: Arc<PipelineConfig>,
    /// Whether other ranks run in other processes.
    pub(super) is_distributed: bool,
    next_batch: NextBatch,
    idle_threads: IdleThreads,
    /// The same rank in all replicas.
    pub(super) data_group: Group,
    /// The same rank in the replicas that hold the parameters together.
    pub(super) shard_group: Group,
    /// The same rank in the replicas that hold the same shard, one of each shard group.
    pub(super) copy_group: Group,
    /// The same rank in the replicas that hold the experts together.
    pub(super) expert_group: Group,
    /// The same rank in the replicas of its shard group that hold the same experts.
    pub(super) expert_shard_group: Group,
    /// The same rank in the replicas that hold the same rows of the same experts.
    pub(super) expert_row_group: Group,
    /// The ranks that compute stages together with this one.
    pub(super) tensor_group: Group,
    /// The ranks that exchange messages with this one in the middle of an action: the ranks of its tensor group and of its
    /// expert group.
    pub(super) action_group: Group,
    /// The tree over all ranks of the replicas that hold all experts together, which is this replica
    /// if it holds all.
    pub(super) model_tree: Tree,
    /// The tree over the same rank in the replicas that hold the same experts, which are all replicas
    /// if each holds all experts.
    pub(super) copies_tree: Tree,
    /// The tree over all ranks of the world.
    pub(super) world_tree: Tree,
}

impl RankContext {
    /// Describes a rank of a world that has the ranks of `mesh`.
    pub(crate) fn new(
        world: &Group,
        is_distributed: bool,
        mesh: Mesh,
        placement: Placement,
        config: Arc<PipelineConfig>,
        next_batch: NextBatch,
        idle_threads: IdleThreads,
    ) -> Self {
        let rank = world.own();
        let expect = |group: Option<Group>| group.expect("the world has the mesh's ranks");
        let data_group = expect(mesh.data_group(rank));
        Self {
            world_rank: rank,
            coord: mesh.coord(rank),
            placement,
            config,
            is_distributed,
            next_batch,
            idle_threads,
            shard_group: expect(mesh.shard_group(rank)),
            copy_group: expect(mesh.copy_group(rank)),
            expert_group: expect(mesh.expert_group(rank)),
            copies_tree: Tree::over(&expect(mesh.expert_copy_group(rank))),
            expert_shard_group: expect(mesh.expert_shard_group(rank)),
            expert_row_group: expect(mesh.expert_row_group(rank)),
            tensor_group: expect(mesh.tensor_group(rank)),
            action_group: expect(mesh.action_group(rank)),
            model_tree: Tree::over(&expect(mesh.model_group(rank))),
            world_tree: Tree::over(world),
            data_group,
            mesh,
        }
    }

    /// Calls `work`, whose loops over long slices use the threads of all ranks of this process if these wait.
    pub(super) fn with_idle_threads<R>(&self, work: impl FnOnce() -> R) -> R {
        self.idle_threads.lend(self.world_rank, work)
    }

    pub(super) fn hook(&self) -> Option<&dyn ActionHook> {
        self.config.hook.as_deref()
    }

    /// Returns this rank in its pipeline: the row of the program that it runs.
    pub(super) fn rank(&self) -> Rank {
        self.coord.rank
    }

    /// Returns the index of this replica.
    pub(super) fn replica(&self) -> u32 {
        self.coord.replica
    }

    /// Returns the number of replicas of this pipeline, including this one.
    pub(super) fn replica_count(&self) -> u32 {
        self.mesh.data
    }

    /// Returns the rank's position among the ranks that compute its stages together.
    pub(crate) fn tensor_rank(&self) -> TensorRank {
        TensorRank { index: self.coord.tensor, of: self.mesh.tensor }
    }

    /// Returns the rank's position among the replicas that hold the experts together.
    pub(crate) fn expert_rank(&self) -> ExpertRank {
        let of = self.mesh.experts;
        ExpertRank { index: self.coord.replica % of, of }
    }

    /// Returns the rows of its stages' parameters that this replica holds; `None` if it holds all.
    pub(crate) fn row_shards(&self) -> Option<RowShards> {
        let Mesh { shards: of, experts, .. } = self.mesh;
        let index = self.coord.replica % of;
        // Only one of so many replicas holds an expert.
        let count = of.min(experts);
        let experts = RowShard { index: index - index % count, count, of };
        (of > 1).then(|| RowShards { experts, others: RowShard::one(index, of) })
    }

    /// Returns the index of this replica in its group of replicas that hold all parameters together. Replicas
    /// with the same index hold the same experts, and the same rows of them.
    pub(super) fn part(&self) -> u32 {
        self.coord.replica % self.mesh.shards.max(self.mesh.experts)
    }

    /// Returns whether each replica holds only some rows of the parameters.
    pub(crate) fn is_sharded(&self) -> bool {
        self.mesh.shards > 1
    }

    /// Returns the number of replicas of an expert group that hold different rows of a parameter that is not
    /// an expert. They are the first ones of the group.
    pub(super) fn row_holders(&self) -> u32 {
        self.mesh.shards.min(self.mesh.experts)
    }

    /// Returns the number of replicas that hold the same experts, in a group that holds all parameters
    /// together.
    pub(super) fn expert_holders(&self) -> usize {
        (self.mesh.shards / self.mesh.experts).max(1) as usize
    }

    /// Returns whether this replica is in the first of the groups of replicas that hold all parameters. For
    /// the norm and in checkpoints, only that group counts.
    pub(super) fn is_in_first_group(&self) -> bool {
        self.coord.replica < self.mesh.shards.max(self.mesh.experts)
    }

    /// Returns whether this replica is in the first expert group.
    pub(super) fn is_in_first_expert_group(&self) -> bool {
        self.coord.replica < self.mesh.experts
    }

    /// Returns the digest of the first batch that this process has begun and the processes do not agree on yet; `None` without
    /// such a batch, or if all ranks are in this process.
    pub(super) fn next_batch(&self) -> Option<u64> {
        self.next_batch.digest().filter(|_| self.is_distributed)
    }

    /// Returns the digests of the batches that [`RankContext::next_batch`] is the first of, as far as this rank has them already
    /// and may begin them. A rank of a process that is asked to end begins no further batch.
    pub(super) fn sent_batches(&self) -> Vec<u64> {
        if self.is_distributed && !self.is_interrupted() { self.next_batch.sent() } else { Vec::new() }
    }

    /// Returns whether the interrupt flag is raised in this process.
    pub(super) fn is_interrupted(&self) -> bool {
        self.config.interrupt.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Returns the row of this rank in a step's timeline, which has a row for each tensor group.
    pub(super) fn timeline_row(&self) -> Rank {
        self.mesh.timeline_row(self.world_rank)
    }

    /// Returns the row of the rank of a stage in a step's timeline.
    pub(super) fn timeline_row_of_stage(&self, stage: StageIndex) -> Rank {
        self.mesh.timeline_row(self.world_rank_of_stage(stage))
    }

    /// Notes that all ranks have the first ones of [`RankContext::sent_batches`].
    pub(super) fn take_next_batches(&self, count: usize) {
        self.next_batch.take_sent(count);
    }

    /// Orders the contents of a group's ranks by the shares of the batch that their replicas have in a
    /// repetition of a step.
    pub(super) fn by_share<T>(
        &self,
        group: &Group,
        contents: impl Iterator<Item = T>,
        repetition: u32,
    ) -> Vec<T> {
        by_share(&self.mesh, group, contents, repetition)
    }

    /// Converts a rank of this pipeline to a rank of the world.
    pub(super) fn world_rank_of(&self, rank: Rank) -> WorldRank {
        self.mesh.world_rank(MeshCoord { rank, ..self.coord })
    }

    /// Returns the rank of a stage in the world.
    pub(super) fn world_rank_of_stage(&self, stage: StageIndex) -> WorldRank {
        self.world_rank_of(self.placement.rank_of(stage))
    }

    /// Describes a message from a rank of this pipeline.
    pub(super) fn awaited(&self, from: Rank, tag: Tag) -> AwaitedMessage {
        AwaitedMessage { from: self.world_rank_of(from), tag }
    }

    /// Returns whether `stage` is on this rank.
    pub(super) fn is_local(&self, stage: StageIndex) -> bool {
        self.placement.rank_of(stage) == self.coord.rank
    }

    pub(super) fn is_last(&self, stage: StageIndex) -> bool {
        stage == self.placement.last_stage()
    }
}

//! A rank's end of the transport, with the rank's place in the mesh: its replica, the same rank in all replicas and in those
//! of its shard group, the ranks that compute stages together with it, and trees over them.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use pipewright_schedule::{ClockSkew, Rank};

use super::patience::wait_for_message;
use super::tensor_group::{SharedEndpoint, TensorGroup};
use crate::collective::{Group, Tree};
use crate::device::Devices;
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::memory::RankMemory;
use crate::mesh::{Mesh, MeshCoord};
use crate::message::{Message, Payload, Tag};
use crate::nn::TensorParallel;
use crate::progress::ProgressBoard;
use crate::tensor::TensorRank;
use crate::tensor::shard::RowShard;
use crate::transport::Endpoint;

/// The settings of a [`MeshEndpoint`].
pub(crate) struct MeshSettings {
    pub(crate) mesh: Mesh,
    /// The devices of all ranks of the world.
    pub(crate) devices: Devices,
    pub(crate) deadline: Duration,
    pub(crate) board: ProgressBoard,
    pub(crate) memory: RankMemory,
}

/// The transport of one rank, with its groups and trees.
pub(crate) struct MeshEndpoint {
    /// The rank's endpoint, locked for each call, because its tensor group uses it too.
    endpoint: SharedEndpoint,
    rank: WorldRank,
    abort: Abort,
    is_distributed: bool,
    mesh: Mesh,
    coord: MeshCoord,
    /// The same rank in all replicas.
    data_group: Group,
    /// The same rank in the replicas that hold the parameters together.
    shard_group: Group,
    /// The same rank in the replicas that hold the same shard, one of each shard group.
    copy_group: Group,
    /// The ranks that compute stages together with this one.
    tensor: Arc<TensorGroup>,
    replica_ranks_tree: Tree,
    replica_tree: Tree,
    world_tree: Tree,
    /// The rows of its stages' parameters that this replica holds, if they are sharded.
    row_shard: Option<RowShard>,
    devices: Devices,
}

impl MeshEndpoint {
    pub(crate) fn new(endpoint: Endpoint, settings: MeshSettings) -> Self {
        let MeshSettings { mesh, devices, deadline, board, memory } = settings;
        let (rank, world) = (endpoint.rank(), Group::of_world(&endpoint));
        let groups = mesh.replica_group(rank).zip(mesh.data_group(rank)).zip(mesh.tensor_group(rank));
        let ((replica, replicas), group) = groups.expect("the world has the mesh's ranks");
        let groups = mesh.shard_group(rank).zip(mesh.copy_group(rank));
        let (shard_group, copy_group) = groups.expect("the world has the mesh's ranks");
        let coord = mesh.coord(rank);
        let (abort, is_distributed) = (endpoint.abort().clone(), endpoint.is_distributed());
        let endpoint = SharedEndpoint::new(endpoint);
        let tensor = Arc::new(TensorGroup {
            endpoint: endpoint.clone(),
            group,
            devices: devices.clone(),
            board,
            memory,
            deadline,
            rounds: AtomicU32::new(0),
            thread: OnceLock::new(),
        });
        let [replica_ranks_tree, replica_tree, world_tree] = [&replica, &replicas, &world].map(Tree::over);
        let row_shard =
            (mesh.shards > 1).then(|| RowShard { index: coord.replica % mesh.shards, of: mesh.shards });
        Self {
            endpoint,
            rank,
            abort,
            is_distributed,
            mesh,
            coord,
            data_group: replicas,
            shard_group,
            copy_group,
            tensor,
            replica_ranks_tree,
            replica_tree,
            world_tree,
            row_shard,
            devices,
        }
    }

    /// Returns the rank's place among the ranks that compute its stages together.
    pub(crate) fn tensor_rank(&self) -> TensorRank {
        TensorRank { index: self.coord.tensor, of: self.mesh.tensor }
    }

    /// Returns the connection to those ranks, for the stages.
    pub(crate) fn tensor_parallel(&self) -> TensorParallel {
        TensorParallel::new(self.tensor_rank(), self.tensor.clone())
    }

    /// Returns the connection to those ranks.
    pub(crate) fn tensor_group(&self) -> &TensorGroup {
        &self.tensor
    }

    /// Returns the row of this rank in a step's timeline, which has a row for each tensor group.
    pub(crate) fn timeline_row(&self) -> Rank {
        self.row_of(self.rank)
    }

    /// As [`MeshEndpoint::timeline_row`], for another rank.
    pub(crate) fn row_of(&self, rank: WorldRank) -> Rank {
        self.mesh.timeline_row(rank)
    }

    /// Returns the device to which tensors for a rank of the world are moved before they are sent. `None` if it is not
    /// known, or if messages are encoded, which takes the tensors off their device.
    pub(crate) fn device_of(&self, rank: WorldRank) -> Option<&Device> {
        self.devices.of(rank).filter(|_| self.moves_storage())
    }

    pub(crate) fn coord(&self) -> MeshCoord {
        self.coord
    }

    /// Returns this rank as a rank of the world.
    pub(crate) fn world_rank(&self) -> WorldRank {
        self.rank
    }

    /// Returns the number of replicas of this pipeline, including this one.
    pub(crate) fn replica_count(&self) -> u32 {
        self.mesh.data
    }

    /// Returns the same rank in all replicas, as ranks of the world.
    pub(crate) fn data_group(&self) -> &Group {
        &self.data_group
    }

    /// Returns the same rank in the replicas that hold the parameters together with this one, as ranks of the world. It is
    /// alone if each replica holds all parameters.
    pub(crate) fn shard_group(&self) -> &Group {
        &self.shard_group
    }

    /// Returns the same rank in the replicas that hold the same rows of the parameters, as ranks of the world.
    pub(crate) fn copy_group(&self) -> &Group {
        &self.copy_group
    }

    /// Returns whether this replica is in the first of the groups of replicas that hold all parameters. For the norm and in
    /// checkpoints, only that group counts.
    pub(crate) fn is_in_first_group(&self) -> bool {
        self.coord.replica < self.mesh.shards
    }

    /// Returns the tree over all ranks of this replica, as ranks of the world.
    pub(crate) fn replica_ranks_tree(&self) -> &Tree {
        &self.replica_ranks_tree
    }

    /// Returns the tree over the same rank in all replicas.
    pub(crate) fn replica_tree(&self) -> &Tree {
        &self.replica_tree
    }

    /// Returns the tree over all ranks of the world.
    pub(crate) fn world_tree(&self) -> &Tree {
        &self.world_tree
    }

    /// Returns the rows of the parameters that this replica holds; `None` if it holds all.
    pub(crate) fn row_shard(&self) -> Option<RowShard> {
        self.row_shard
    }

    pub(crate) fn is_distributed(&self) -> bool {
        self.is_distributed
    }

    /// Returns whether sent tensors keep their storage. If not, the sender frees it as soon as the message is encoded.
    pub(crate) fn moves_storage(&self) -> bool {
        !self.is_distributed()
    }

    pub(crate) fn abort(&self) -> &Abort {
        &self.abort
    }

    pub(crate) fn begin_step(&mut self, attempt: Attempt) {
        self.endpoint.lock().begin_step(attempt);
        self.tensor.begin_step();
    }

    /// Sends a message to a rank of the world.
    pub(crate) fn send_world(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        self.endpoint.lock().send(to, tag, payload);
    }

    /// Takes a message from a rank of the world, if it has arrived.
    pub(crate) fn try_take_world(&mut self, from: WorldRank, tag: Tag) -> Option<Message> {
        self.endpoint.lock().try_take(from, tag)
    }

    /// Returns whether the message with `tag` to a rank of the world has left.
    pub(crate) fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        self.endpoint.lock().is_sent(to, tag)
    }

    /// Returns the largest number of boundary messages that were in flight at once in this attempt.
    pub(crate) fn sends_in_flight(&self) -> u32 {
        self.endpoint.lock().sends_in_flight()
    }

    /// Returns an instant on the clock that all processes share, in seconds; `None` within one process.
    pub(crate) fn common_seconds(&self, at: Instant) -> Option<f64> {
        self.endpoint.lock().common_seconds(at)
    }

    /// Returns the accuracy of [`MeshEndpoint::common_seconds`].
    pub(crate) fn clock_skew(&self, at: Instant) -> Option<ClockSkew> {
        self.endpoint.lock().clock_skew(at)
    }

    /// Sleeps until a message arrives or a rank fails. Returns false if no rank has made progress for the whole deadline.
    pub(crate) fn wait_for_message(&mut self, board: &ProgressBoard, deadline: Duration) -> bool {
        wait_for_message(&mut self.endpoint.lock(), board, deadline)
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.endpoint.lock().fail(error);
    }

    /// Converts a rank of this pipeline to a rank of the world.
    pub(crate) fn world_rank_of(&self, rank: Rank) -> WorldRank {
        self.mesh.world_rank(MeshCoord { rank, ..self.coord })
    }
}

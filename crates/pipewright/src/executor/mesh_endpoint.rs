//! A rank's end of the transport, with the rank's place in the mesh: its pipeline, the same rank in all replicas, and
//! the trees over both.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use pipewright_schedule::{ClockSkew, Rank};

use crate::collective::{Group, Tree};
use crate::device::Devices;
use crate::failure::{Abort, StepError};
use crate::ids::{Attempt, WorldRank};
use crate::mesh::{Mesh, MeshCoord};
use crate::message::{Message, Payload, Tag};
use crate::tensor::shard::RowShard;
use crate::transport::{Endpoint, Waited};

/// The transport of one rank, with its groups and trees.
pub(crate) struct MeshEndpoint {
    endpoint: Endpoint,
    mesh: Mesh,
    coord: MeshCoord,
    /// The same rank in all replicas.
    replicas: Group,
    pipeline_tree: Tree,
    replica_tree: Tree,
    world_tree: Tree,
    /// The part of its stages' parameters that this replica holds, if they are sharded.
    part: Option<RowShard>,
    devices: Devices,
}

impl MeshEndpoint {
    pub(crate) fn new(endpoint: Endpoint, mesh: Mesh, is_sharded: bool) -> Self {
        let groups = mesh.pipeline_group(endpoint.rank()).zip(mesh.data_group(endpoint.rank()));
        let (pipeline, replicas) = groups.expect("the world has the mesh's ranks");
        let coord = mesh.coord(endpoint.rank());
        let part = is_sharded.then_some(RowShard { index: coord.replica, of: mesh.data });
        let [pipeline_tree, replica_tree, world_tree] =
            [&pipeline, &replicas, &Group::of_world(&endpoint)].map(Tree::over);
        let devices = Devices::default();
        Self { endpoint, mesh, coord, replicas, pipeline_tree, replica_tree, world_tree, part, devices }
    }

    /// Sets the devices of all ranks of the world.
    pub(crate) fn with_devices(self, devices: Devices) -> Self {
        Self { devices, ..self }
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
        self.endpoint.rank()
    }

    /// Returns the number of replicas of this pipeline, including this one.
    pub(crate) fn replica_count(&self) -> u32 {
        self.mesh.data
    }

    /// Returns the same rank in all replicas, as ranks of the world.
    pub(crate) fn replicas(&self) -> &Group {
        &self.replicas
    }

    /// Returns the tree over the ranks of this pipeline, as ranks of the world.
    pub(crate) fn pipeline_tree(&self) -> &Tree {
        &self.pipeline_tree
    }

    /// Returns the tree over the same rank in all replicas.
    pub(crate) fn replica_tree(&self) -> &Tree {
        &self.replica_tree
    }

    /// Returns the tree over all ranks of the world.
    pub(crate) fn world_tree(&self) -> &Tree {
        &self.world_tree
    }

    /// Returns the part of the parameters that this replica holds; `None` if it holds all.
    pub(crate) fn part(&self) -> Option<RowShard> {
        self.part
    }

    pub(crate) fn detection_lag(&self, deadline: Duration) -> Duration {
        self.endpoint.detection_lag(deadline)
    }

    pub(crate) fn is_distributed(&self) -> bool {
        self.endpoint.is_distributed()
    }

    /// Returns whether sent tensors keep their storage. If not, the sender frees it as soon as the message is encoded.
    pub(crate) fn moves_storage(&self) -> bool {
        !self.is_distributed()
    }

    pub(crate) fn abort(&self) -> &Abort {
        self.endpoint.abort()
    }

    pub(crate) fn begin_step(&mut self, attempt: Attempt) {
        self.endpoint.begin_step(attempt);
    }

    /// Sends a message to a rank of the world.
    pub(crate) fn send_world(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        self.endpoint.send(to, tag, payload);
    }

    /// Takes a message from a rank of the world, if it has arrived.
    pub(crate) fn try_take_world(&mut self, from: WorldRank, tag: Tag) -> Option<Message> {
        self.endpoint.try_take(from, tag)
    }

    /// Returns whether the message with `tag` to a rank of the world has left.
    pub(crate) fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        self.endpoint.is_sent(to, tag)
    }

    /// Returns the largest number of boundary messages that were in flight at once in this attempt.
    pub(crate) fn sends_in_flight(&self) -> u32 {
        self.endpoint.sends_in_flight()
    }

    /// Returns an instant on the clock that all processes share, in seconds; `None` within one process.
    pub(crate) fn common_seconds(&self, at: Instant) -> Option<f64> {
        self.endpoint.common_seconds(at)
    }

    /// Returns the accuracy of [`MeshEndpoint::common_seconds`].
    pub(crate) fn clock_skew(&self, at: Instant) -> Option<ClockSkew> {
        self.endpoint.clock_skew(at)
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.endpoint.wait(until)
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.endpoint.fail(error);
    }

    /// Converts a rank of this pipeline to a rank of the world.
    pub(crate) fn world_rank_of(&self, rank: Rank) -> WorldRank {
        self.mesh.world_rank(MeshCoord { rank, ..self.coord })
    }
}

//! A rank's end of the transport as seen from its coord in the mesh: ranks are those of its own pipeline, and beside
//! them are the same rank of every other replica.

use std::time::{Duration, Instant};

use pipewright_schedule::Rank;

use crate::collective::Group;
use crate::failure::{Abort, StepError};
use crate::mesh::{Mesh, MeshCoord};
use crate::message::{Message, Payload, Tag};
use crate::tensor::shard::RowShard;
use crate::transport::{Endpoint, Waited};

/// See the module.
pub(crate) struct MeshEndpoint {
    endpoint: Endpoint,
    mesh: Mesh,
    coord: MeshCoord,
    /// This rank of all replicas.
    replicas: Group,
    /// Which part of its stages' parameters this replica holds, where they are sharded.
    part: Option<RowShard>,
}

impl MeshEndpoint {
    pub(crate) fn new(endpoint: Endpoint, mesh: Mesh, is_sharded: bool) -> Self {
        let replicas = mesh.data_group(endpoint.rank()).expect("the world has the mesh's ranks");
        let coord = mesh.coord(endpoint.rank());
        let part = is_sharded.then_some(RowShard { index: coord.replica, of: mesh.data });
        Self { endpoint, mesh, coord, replicas, part }
    }

    pub(crate) fn coord(&self) -> MeshCoord {
        self.coord
    }

    /// The rank of the world that sits here.
    pub(crate) fn world_rank(&self) -> Rank {
        self.endpoint.rank()
    }

    /// Ranks of the world.
    pub(crate) fn world_ranks(&self) -> u32 {
        self.endpoint.ranks()
    }

    /// Ranks of this pipeline.
    pub(crate) fn ranks(&self) -> u32 {
        self.mesh.pipeline
    }

    /// Replicas of this pipeline, this one included.
    pub(crate) fn replica_count(&self) -> u32 {
        self.mesh.data
    }

    /// This rank of all replicas, as ranks of the world.
    pub(crate) fn replicas(&self) -> &Group {
        &self.replicas
    }

    /// Which part of the parameters this replica holds; none where it holds all.
    pub(crate) fn part(&self) -> Option<RowShard> {
        self.part
    }

    pub(crate) fn detection_lag(&self, deadline: Duration) -> Duration {
        self.endpoint.detection_lag(deadline)
    }

    pub(crate) fn is_distributed(&self) -> bool {
        self.endpoint.is_distributed()
    }

    /// Whether what is sent keeps its storage; elsewhere the sender's is freed as soon as it is encoded.
    pub(crate) fn moves_storage(&self) -> bool {
        !self.is_distributed()
    }

    pub(crate) fn abort(&self) -> &Abort {
        self.endpoint.abort()
    }

    pub(crate) fn begin_step(&mut self, step: u64) {
        self.endpoint.begin_step(step);
    }

    /// Sends to a rank of this pipeline.
    pub(crate) fn send(&mut self, to: Rank, tag: Tag, payload: Payload) {
        self.endpoint.send(self.world_rank_of(to), tag, payload);
    }

    /// Takes what a rank of this pipeline sent.
    pub(crate) fn try_take(&mut self, from: Rank, tag: Tag) -> Option<Message> {
        self.endpoint.try_take(self.world_rank_of(from), tag)
    }

    /// Sends to a rank of the world.
    pub(crate) fn send_world(&mut self, to: Rank, tag: Tag, payload: Payload) {
        self.endpoint.send(to, tag, payload);
    }

    /// Takes what a rank of the world sent.
    pub(crate) fn try_take_world(&mut self, from: Rank, tag: Tag) -> Option<Message> {
        self.endpoint.try_take(from, tag)
    }

    pub(crate) fn wait(&mut self, until: Instant) -> Waited {
        self.endpoint.wait(until)
    }

    pub(crate) fn fail(&self, error: StepError) {
        self.endpoint.fail(error);
    }

    /// A rank of this pipeline, as a rank of the world.
    pub(crate) fn world_rank_of(&self, rank: Rank) -> Rank {
        self.mesh.world_rank(MeshCoord { rank, ..self.coord })
    }
}

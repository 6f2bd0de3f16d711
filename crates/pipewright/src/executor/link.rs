//! A rank's end of the transport as seen from its seat in the mesh: ranks are those of its own pipeline, and beside them
//! are the same rank of every other replica.

use std::time::{Duration, Instant};

use pipewright_schedule::Rank;

use crate::failure::{Abort, StepError};
use crate::mesh::{Mesh, Seat};
use crate::transport::{Endpoint, Message, Payload, Tag, Waited};

/// See the module.
pub(crate) struct Link {
    endpoint: Endpoint,
    mesh: Mesh,
    seat: Seat,
}

impl Link {
    pub(crate) fn new(endpoint: Endpoint, mesh: Mesh) -> Self {
        let seat = mesh.seat(endpoint.rank());
        Self { endpoint, mesh, seat }
    }

    pub(crate) fn seat(&self) -> Seat {
        self.seat
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
    pub(crate) fn replicas(&self) -> u32 {
        self.mesh.data
    }

    pub(crate) fn latest_news(&self, deadline: Duration) -> Duration {
        self.endpoint.latest_news(deadline)
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

    /// Sends to this rank of another replica.
    pub(crate) fn send_across(&mut self, replica: u32, tag: Tag, payload: Payload) {
        self.endpoint.send(self.in_replica(replica), tag, payload);
    }

    /// Takes what this rank of another replica sent.
    pub(crate) fn try_take_across(&mut self, replica: u32, tag: Tag) -> Option<Message> {
        self.endpoint.try_take(self.in_replica(replica), tag)
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
        self.mesh.world_rank(Seat { rank, ..self.seat })
    }

    /// This rank of another replica, as a rank of the world.
    pub(crate) fn in_replica(&self, replica: u32) -> Rank {
        self.mesh.world_rank(Seat { replica, ..self.seat })
    }
}

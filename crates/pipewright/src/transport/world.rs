//! The endpoints of a transport, before the ranks start.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::agreement::{self, AgreementError, Differences, Fields};
use super::controlled::{self, InFlight};
use super::endpoint::Endpoint;
use super::link_speed::{self, LinkSpeed};
use super::local;
#[cfg(feature = "mpi")]
use super::mpi::MpiError;
use super::vote;
use crate::byte_channel::ByteChannel;
use crate::device::Devices;
use crate::ids::WorldRank;
use crate::progress::ProgressBoard;
use crate::tensor::Votes;

/// The endpoints of one transport, before they are given to their ranks.
pub struct World {
    endpoints: Vec<Endpoint>,
    /// The progress of all ranks, including the ranks of other processes.
    board: ProgressBoard,
    /// The number of texts that the first rank's process has shared.
    shared: u32,
}

/// Why a transport is not available.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// The transport is not compiled in.
    #[error("this build has no `{transport}` transport: build with `--features {transport}`")]
    NotCompiledIn {
        /// The transport, which is also the name of its feature.
        transport: &'static str,
    },
    /// MPI cannot be joined.
    #[cfg(feature = "mpi")]
    #[error("MPI cannot be joined: {0}")]
    Mpi(#[from] MpiError),
}

pipewright_schedule::message_as_debug!(WorldError);

impl World {
    /// Returns a world whose ranks are threads of this process. Messages are moved, never copied.
    pub fn local(ranks: u32) -> Self {
        let endpoints = local::world(ranks).into_iter().map(Endpoint::Local).collect();
        Self::new(endpoints, ProgressBoard::new(ranks))
    }

    pub(super) fn new(endpoints: Vec<Endpoint>, board: ProgressBoard) -> Self {
        Self { endpoints, board, shared: 0 }
    }

    /// Returns whether ranks run in other processes.
    pub fn is_distributed(&self) -> bool {
        self.endpoints.iter().any(Endpoint::is_distributed)
    }

    /// Returns the endpoint of this process if other ranks run in other processes.
    fn process(&mut self) -> Option<&mut Endpoint> {
        self.endpoints.first_mut().filter(|endpoint| endpoint.is_distributed())
    }

    /// Checks that all processes run the same. Every process calls it with a description of its run, or with
    /// the reason why it cannot run. Within one process there is nothing to compare.
    ///
    /// # Errors
    /// When processes differ, some cannot run, or some do not answer within `deadline`. Every process gets
    /// the same error.
    pub fn agree(&mut self, hello: Result<Fields, String>, deadline: Duration) -> Result<(), AgreementError> {
        self.process().map_or(Ok(()), |endpoint| agreement::agree(endpoint, &hello, deadline))
    }

    /// Returns what any process knows, in every process. Every process calls it.
    ///
    /// # Errors
    /// When two processes know one thing differently, and as [`World::agree`].
    pub(crate) fn vote(&mut self, own: Votes, deadline: Duration) -> Result<Votes, AgreementError> {
        let Some(endpoint) = self.process() else { return Ok(own) };
        vote::vote(endpoint, &own, deadline)
    }

    /// Returns in every process the result of `combine` for the values of all processes, with their ranks. The
    /// first rank's process calls `combine`. Every process calls this function with its own value.
    ///
    /// # Errors
    /// When a process does not answer within `deadline`, or a rank fails.
    pub fn combine<T, R>(
        &mut self,
        own: &T,
        combine: impl Fn(&[(WorldRank, T)]) -> R,
        deadline: Duration,
    ) -> Result<R, AgreementError>
    where
        T: Clone + Serialize + for<'de> Deserialize<'de>,
        R: Serialize + for<'de> Deserialize<'de>,
    {
        let Some(endpoint) = self.process() else {
            return Ok(combine(&[(WorldRank::new(0), own.clone())]));
        };
        agreement::agree_by(endpoint, own, deadline, |values| (Differences(Vec::new()), combine(values)))
    }

    /// Returns the channel for messages between processes that belong to no step; `None` within one process.
    pub fn byte_channel(&self) -> Option<ByteChannel> {
        self.endpoints.first().filter(|endpoint| endpoint.is_distributed())?.byte_channel()
    }

    /// Returns the channel for files that another host does not have, apart from [`World::byte_channel`]; `None`
    /// within one process.
    pub fn file_channel(&self) -> Option<ByteChannel> {
        self.endpoints.first().filter(|endpoint| endpoint.is_distributed())?.file_channel()
    }

    /// Checks that no two processes have the same device. Every process calls it with the name of its rank's
    /// device, with `None` if ranks may share it, or with the reason why it cannot run. Within one process
    /// there is nothing to compare.
    ///
    /// # Errors
    /// As [`World::agree`].
    pub fn claim_device(
        &mut self,
        device: Result<Option<String>, String>,
        deadline: Duration,
    ) -> Result<(), AgreementError> {
        self.process().map_or(Ok(()), |endpoint| agreement::claim(endpoint, &device, deadline))
    }

    /// Returns the text of the first rank's process in every process. All processes call it.
    ///
    /// # Errors
    /// When a rank fails, or the first one does not answer within `deadline`.
    pub fn share(&mut self, own: String, deadline: Duration) -> Result<String, AgreementError> {
        let round = self.shared;
        self.shared += 1;
        let Some(endpoint) = self.process() else { return Ok(own) };
        agreement::share(endpoint, own, round, deadline)
    }

    /// Measures the links between ranks: between each two of at most 16 processes, the first two of more, or two threads of
    /// this process. All processes call it, and get the same links. Takes a fraction of a second for each link, and some
    /// seconds for a slow one. There is no link if the process is alone.
    ///
    /// # Errors
    /// When a rank fails, or does not answer within `deadline`.
    pub fn measure_links(
        &mut self,
        devices: &Devices,
        deadline: Duration,
    ) -> Result<Vec<LinkSpeed>, AgreementError> {
        if !self.is_distributed() {
            return match self.endpoints.as_slice() {
                [] | [Endpoint::Local(_), ..] => {
                    Ok(link_speed::between_threads(devices, deadline)?.into_iter().collect())
                }
                _ => Ok(Vec::new()),
            };
        }
        let mut links = Vec::new();
        for pair in link_speed::pairs(self.ranks()) {
            let Some(endpoint) = self.process() else { break };
            let measured = link_speed::measure(endpoint, pair, devices, deadline)?;
            // One after the other: pairs may share a network. The others wait for the two until then.
            let of_all = |all: &[(WorldRank, Option<LinkSpeed>)]| all.iter().find_map(|(_, link)| *link);
            links.extend(self.combine(&measured, of_all, deadline.saturating_mul(2))?);
        }
        Ok(links)
    }

    /// Returns the number of ranks, including the ranks of other processes.
    pub fn ranks(&self) -> u32 {
        self.endpoints.first().map_or(0, Endpoint::ranks)
    }

    /// Returns the ranks of this process.
    pub fn own_ranks(&self) -> impl Iterator<Item = WorldRank> {
        self.endpoints.iter().map(Endpoint::rank)
    }

    /// Returns a world as [`World::local`] does, in which a message arrives only when a test releases it from
    /// [`InFlight`]. Tests use it to choose the order of arrival or to lose a message.
    pub fn controlled(ranks: u32) -> (Self, InFlight) {
        let (endpoints, in_flight) = controlled::world(ranks);
        let endpoints = endpoints.into_iter().map(Endpoint::Controlled).collect();
        (Self::new(endpoints, ProgressBoard::new(ranks)), in_flight)
    }

    /// Returns a world for each rank, as if each rank were a process. The worlds share no reports: a process
    /// knows only the losses of its own ranks.
    #[cfg(any(test, feature = "testing"))]
    pub fn apart(self) -> Vec<Self> {
        let Self { endpoints, board, .. } = self;
        endpoints.into_iter().map(|endpoint| Self::new(vec![endpoint], board.clone())).collect()
    }

    /// Returns one endpoint per rank of this process, in rank order.
    pub fn into_endpoints(self) -> Vec<Endpoint> {
        self.endpoints
    }

    /// Sets the time after which a process without heartbeats counts as lost.
    pub(crate) fn set_deadline(&self, deadline: Duration) {
        #[cfg(feature = "mpi")]
        for endpoint in &self.endpoints {
            if let Endpoint::Mpi(endpoint) = endpoint {
                endpoint.set_deadline(deadline);
            }
        }
        #[cfg(not(feature = "mpi"))]
        let _ = deadline;
    }

    pub(crate) fn into_parts(self) -> (Vec<Endpoint>, ProgressBoard) {
        (self.endpoints, self.board)
    }
}

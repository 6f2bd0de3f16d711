//! The arguments that choose the communicators of other systems, for `validate`, `simulate`, `view` and
//! `lower`.

use clap::Args;
use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams, UnknownStreams};

use crate::failure::Failure;

/// The arguments that choose communicators.
#[derive(Clone, Debug, Args)]
pub(crate) struct TransportArguments {
    /// The transport that carries messages: buffered (messages are tagged and buffered), edge (one queue per
    /// directed pair of ranks), pair (one queue per pair of ranks), rank (one queue per rank), or all of them
    #[arg(long, value_name = "TRANSPORT", value_parser = transports)]
    transport: Option<Transports>,
    /// Messages of at most this size are sent without waiting for their receive; messages without a size
    /// count as smaller
    #[arg(long, value_name = "BYTES", requires = "transport")]
    eager: Option<u64>,
    /// The size of the messages between stage 0 and 1, between stage 1 and 2, and so on; the last size counts
    /// for the others
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', requires = "eager")]
    message_bytes: Vec<u64>,
    /// Sends and receives that follow each other start together, as PyTorch's batched exchanges do
    #[arg(long, requires = "transport")]
    grouped: bool,
}

/// The kinds of streams of `--transport`.
#[derive(Debug, Clone)]
struct Transports(Vec<Streams>);

fn transports(name: &str) -> Result<Transports, UnknownStreams> {
    Streams::parse_choice(name).map(Transports)
}

impl TransportArguments {
    /// Returns whether a transport is given.
    pub(crate) fn is_given(&self) -> bool {
        self.transport.is_some()
    }

    /// Returns whether a limit for eager sends is given, but no size of the messages.
    pub(crate) fn needs_sizes(&self) -> bool {
        self.eager.is_some() && self.message_bytes.is_empty()
    }

    /// Returns the same arguments with the sizes of messages by boundary.
    pub(crate) fn with_sizes(&self, message_bytes: Vec<u64>) -> Self {
        Self { message_bytes, ..self.clone() }
    }

    /// Returns the chosen communicators; none if no transport is given.
    pub(crate) fn communicators(&self) -> Vec<Communicator> {
        let streams = self.transport.iter().flat_map(|Transports(streams)| streams);
        streams.map(|&streams| self.communicator(streams)).collect()
    }

    /// Returns the chosen communicator; `None` if no transport is given.
    ///
    /// # Errors
    /// When the transport is `all`. `purpose` says what needs a single one.
    pub(crate) fn single(&self, purpose: &str) -> Result<Option<Communicator>, Failure> {
        match self.communicators().as_mut_slice() {
            [] => Ok(None),
            [one] => Ok(Some(std::mem::take(one))),
            _ => Err(Failure::input(format!(
                "--transport all compares transports, and {purpose} has one; use buffered, edge, pair or rank"
            ))),
        }
    }

    fn communicator(&self, streams: Streams) -> Communicator {
        let sends = Sends::eager_up_to(self.eager, self.message_bytes.clone());
        let groups = if self.grouped { Groups::Consecutive } else { Groups::Single };
        Communicator { streams, sends, groups }
    }
}

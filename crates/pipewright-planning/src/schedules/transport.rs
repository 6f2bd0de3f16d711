//! The arguments that choose the communicators of other systems, for `validate`, `simulate`, `view` and
//! `lower`.

use clap::Args;
use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams, UnknownStreams};
use pipewright_schedule::{Costs, Program};

use crate::failure::Failure;

/// The arguments that choose communicators.
#[derive(Clone, Debug, Args)]
pub struct TransportArguments {
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
    pub fn is_given(&self) -> bool {
        self.transport.is_some()
    }

    /// Returns the chosen communicators; none if no transport is given.
    pub fn communicators(&self) -> Vec<Communicator> {
        let streams = self.transport.iter().flat_map(|Transports(streams)| streams);
        streams.map(|&streams| self.communicator(streams)).collect()
    }

    /// Returns the same for `program` at `costs`, whose sizes messages have if no others are given.
    pub fn communicators_at(&self, costs: &Costs, program: &Program) -> Vec<Communicator> {
        if self.eager.is_none() || !self.message_bytes.is_empty() || costs.sizes.is_empty() {
            return self.communicators();
        }
        let message_bytes = program.placement().all_stages().map(|stage| costs.output_bytes(stage));
        Self { message_bytes: message_bytes.collect(), ..self.clone() }.communicators()
    }

    /// Returns the chosen communicator; `None` if no transport is given.
    ///
    /// # Errors
    /// When the transport is `all`. `purpose` says what needs a single one.
    pub fn single(&self, purpose: &str) -> Result<Option<Communicator>, Failure> {
        only_one(self.communicators(), purpose)
    }

    /// Returns the same for `program` at `costs`, whose sizes messages have if no others are given.
    ///
    /// # Errors
    /// As above.
    pub fn single_at(
        &self,
        purpose: &str,
        costs: &Costs,
        program: &Program,
    ) -> Result<Option<Communicator>, Failure> {
        only_one(self.communicators_at(costs, program), purpose)
    }

    fn communicator(&self, streams: Streams) -> Communicator {
        let sends = Sends::eager_up_to(self.eager, self.message_bytes.clone());
        let groups = if self.grouped { Groups::Consecutive } else { Groups::Single };
        Communicator { streams, sends, groups }
    }
}

fn only_one(mut communicators: Vec<Communicator>, purpose: &str) -> Result<Option<Communicator>, Failure> {
    if communicators.len() > 1 {
        return Err(Failure::input(format!(
            "--transport all compares transports, and {purpose} has one; use buffered, edge, pair or rank"
        )));
    }
    Ok(communicators.pop())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use pipewright_schedule::costs::StageSizes;
    use pipewright_schedule::csv::parse_program;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        transport: TransportArguments,
    }

    fn check(arguments: &str, expected: &Sends) {
        let arguments = Arguments::try_parse_from(["it"].into_iter().chain(arguments.split(' ')));
        let transport = arguments.unwrap_or_else(|error| panic!("{error}")).transport;
        let program =
            parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n").expect("a program");
        let sizes = vec![StageSizes { output: 70, ..StageSizes::default() }; 2];
        let costs = Costs { sizes, ..Costs::default() };
        let found = transport.single_at("a page", &costs, &program).expect("one transport");
        assert_eq!(&found.expect("a transport").sends, expected);
    }

    #[test]
    fn messages_have_the_sizes_of_the_costs_unless_others_are_given() {
        check("--transport pair --eager 64", &Sends::eager_up_to(Some(64), vec![70, 70]));
        check("--transport pair --eager 64 --message-bytes 9", &Sends::eager_up_to(Some(64), vec![9]));
        check("--transport pair", &Sends::eager_up_to(None, Vec::new()));
    }
}

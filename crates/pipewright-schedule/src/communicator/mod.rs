//! Judges a program on communicators other than Pipewright's own: does it finish, and does every receive get
//! its tensor?
//!
//! The other rules of [`mod@crate::validate`] prove that a program is complete and ordered. Whether its
//! messages arrive also depends on the communicator. Pipewright's own transports tag and buffer messages. The
//! communicators of other systems often run operations in the order in which they are given, and pair the
//! sends and receives of two ranks by their number alone. So a program may be sound on one communicator, hang
//! on another, and train on the wrong tensors on a third. [`judge`] gives the verdict for a [`Communicator`].
//!
//! **Model.** A rank runs the actions of its row in order. A computation starts when its tensors have been
//! received. A send or a receive is *given* to the communicator when the rank reaches it, and the rank
//! continues. Each operation belongs to a *stream*, a queue that [`Streams`] defines. A stream runs its
//! operations one after another, or one group after another ([`Groups`]). A send and a receive complete
//! together when both run; an eager send ([`Sends`]) completes as soon as it runs. GPU streams, on which an
//! operation waits for the computations before it, and libraries on a processor, whose calls return at once,
//! both behave in this way.
//!
//! **Crossed messages.** Without tags, the k-th send from one rank to another meets the k-th receive there.
//! If these are not the two ends of one message, the receive gets another tensor: without an error if the
//! shapes agree.
//!
//! **Hangs.** If some ranks do not reach their end, or operations are left in streams, each of them waits for
//! exactly one other action, so there is a cycle, which the verdict contains. The run does not depend on the
//! order in which ranks are visited, because no operation makes another one wait that was able to complete.
//! Its time is linear in the number of actions.
//!
//! ```
//! use pipewright_schedule::communicator::{Communicator, Streams, judge};
//! use pipewright_schedule::{Level, csv};
//! // Both ranks send before they receive.
//! let program = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
//!                1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
//! let program = csv::parse_program(program)?;
//! let on = |streams| judge(&program, Level::Comms, &Communicator { streams, ..Communicator::default() });
//! assert!(on(Streams::Edge)?.is_sound());
//! let verdict = on(Streams::Pair)?;
//! assert_eq!(verdict.word(), "may hang");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod model;
mod crossing;
mod run;
mod hang;
mod judge;

pub use crossing::Crossing;
pub use hang::{Hold, Reason};
pub use judge::{Verdict, judge};
pub(crate) use model::QueueKey;
pub use model::{Communicator, Groups, Sends, Streams, UnknownStreams};

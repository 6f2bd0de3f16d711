//! The text of an error with its causes, which is also what `Debug` prints for the errors of these crates.
//!
//! A program whose `main` returns `Result<(), Box<dyn Error>>` prints its error with `Debug`. So the public
//! errors print their message there ([`message_as_debug!`](crate::message_as_debug)) instead of the names of
//! their fields.
//!
//! ```
//! use pipewright_schedule::{ScheduleSpec, generate};
//!
//! let error = generate("1f1b", &ScheduleSpec { ranks: 0, ..ScheduleSpec::default() }).unwrap_err();
//! assert_eq!(format!("{error:?}"), error.to_string());
//! ```

use std::any::Any;
use std::error::Error;

/// Returns the message of a panic from its payload.
pub fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|message| (*message).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}

/// Returns the message of an error, followed by the messages of its causes. A cause that a message already
/// contains is not repeated.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}

/// Implements `Debug` for types of errors as their message with its causes.
#[doc(hidden)]
#[macro_export]
macro_rules! message_as_debug {
    ($($error:ty),+ $(,)?) => {$(
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(&$crate::error_text::with_causes(self))
            }
        }
    )+};
}

pub(crate) use message_as_debug;

#[cfg(test)]
mod tests {
    use thiserror::Error;

    use super::*;

    #[derive(Error)]
    #[error("the disk is full")]
    struct Inner;

    #[derive(Error)]
    enum Outer {
        #[error("the step failed")]
        Silent(#[source] Inner),
        #[error("the step failed: {0}")]
        Repeating(#[source] Inner),
    }

    message_as_debug!(Inner, Outer);

    #[test]
    fn panics_have_messages() {
        let message = |payload: Box<dyn Any + Send>| panic_message(&*payload);
        assert_eq!(message(Box::new("a")), "a");
        assert_eq!(message(Box::new("b".to_owned())), "b");
        assert_eq!(message(Box::new(3)), "(no message)");
    }

    #[test]
    fn debug_prints_each_cause_once() {
        for error in [Outer::Silent(Inner), Outer::Repeating(Inner)] {
            assert_eq!(format!("{error:?}"), "the step failed: the disk is full");
            assert_eq!(format!("{:?}", Box::<dyn Error>::from(error)), "the step failed: the disk is full");
        }
    }
}

//! Proofs of programs, and verdicts on transports.

use std::sync::Arc;

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams, Verdict, judge};
use pipewright_schedule::{Level, Program, Violations, validate};
use pyo3::prelude::*;

use crate::arguments::{bytes, whole_list};
use crate::errors::{Raised, unsound_on, value_error};
use crate::interrupt::interruptible;

/// Proves that a program is sound.
pub(crate) fn prove(py: Python<'_>, program: Arc<Program>, level: Level) -> PyResult<()> {
    let proved = interruptible(py, move |_| validate(program.as_ref().clone(), level).map(drop))?;
    proved.map_err(|violations| violations.raised(py))
}

/// The options of a transport, as they were given.
pub(crate) struct TransportOptions<'a, 'py> {
    pub(crate) eager: Option<&'a Bound<'py, PyAny>>,
    pub(crate) message_bytes: Option<&'a Bound<'py, PyAny>>,
    pub(crate) grouped: bool,
}

impl TransportOptions<'_, '_> {
    /// Refuses options without a transport.
    pub(crate) fn refuse(&self) -> PyResult<()> {
        if self.eager.is_some() || self.message_bytes.is_some() || self.grouped {
            return Err(value_error(
                "eager, message_bytes and grouped are for a transport; add one, such as transport=\"rank\"",
            ));
        }
        Ok(())
    }

    /// Returns the verdict on each of the transports called `transport`, if the program is sound on all.
    pub(crate) fn judge(
        &self,
        py: Python<'_>,
        transport: &str,
        program: Arc<Program>,
        level: Level,
    ) -> PyResult<Vec<(Streams, Verdict)>> {
        let streams = Streams::parse_choice(transport).map_err(|error| error.raised(py))?;
        if level == Level::Compute {
            return Err(value_error(
                "the program has no messages, which a transport could order; lower it first, such as with lower()",
            ));
        }
        let communicators =
            streams.into_iter().map(|streams| self.communicator(streams)).collect::<PyResult<Vec<_>>>()?;
        let verdicts = interruptible(py, move |_| {
            let verdict = |communicator: &Communicator| {
                Ok((communicator.streams, judge(&program, level, communicator)?))
            };
            communicators.iter().map(verdict).collect::<Result<Vec<_>, Violations>>()
        })?;
        let verdicts = verdicts.map_err(|violations| violations.raised(py))?;
        if verdicts.iter().all(|(_, verdict)| verdict.is_sound()) {
            Ok(verdicts)
        } else {
            Err(unsound_on(py, &verdicts))
        }
    }

    /// Returns the communicator of the transport called `transport`; `None` without one.
    pub(crate) fn one(&self, py: Python<'_>, transport: Option<&str>) -> PyResult<Option<Communicator>> {
        let Some(transport) = transport else {
            return self.refuse().map(|()| None);
        };
        let streams = Streams::parse_choice(transport).map_err(|error| error.raised(py))?;
        match streams[..] {
            [streams] => self.communicator(streams).map(Some),
            _ => {
                Err(value_error("a simulation runs on one transport; choose one, such as transport=\"rank\""))
            }
        }
    }

    fn communicator(&self, streams: Streams) -> PyResult<Communicator> {
        let groups = if self.grouped { Groups::Consecutive } else { Groups::Single };
        Ok(Communicator { streams, sends: self.sends()?, groups })
    }

    fn sends(&self) -> PyResult<Sends> {
        let eager = self.eager.map(|eager| bytes("eager", eager)).transpose()?;
        if self.message_bytes.is_some() && eager.is_none() {
            return Err(value_error("message_bytes is for eager sends; add eager, the largest of them"));
        }
        let sizes = self.message_bytes.map(|sizes| whole_list("message_bytes", sizes)).transpose()?;
        Ok(Sends::eager_up_to(eager, sizes.unwrap_or_default()))
    }
}

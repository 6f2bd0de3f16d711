//! Checks before the start that all processes run the same program with the same settings.
//!
//! Each process sends the first rank a description of its run as named fields, or the reason why it cannot
//! run. The first rank compares the descriptions and sends the differences to all ranks, so every process
//! reports the same error, with ranks and fields. The error also names ranks that did not answer in time. The
//! other processes do not wait for those when they leave, even if they still send heartbeats.
//!
//! Devices are checked in the same way: processes may not name the same one if each needs its own.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::endpoint::Endpoint;
use super::wait::{Waited, end_of_wait};
use crate::failure::{Cause, StepError};
use crate::ids::{StepNumber, WorldRank};
use crate::message::{Message, MessageError, Payload, Tag, encoded};

/// The description of a run: versions, hashes and settings that must not differ, by name.
pub type Fields = BTreeMap<String, String>;

/// Why the processes cannot run together.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AgreementError {
    /// The processes differ, or some cannot run.
    #[error("{0}")]
    Differences(Differences),
    /// A rank did not send a message in time.
    #[error(
        "rank {rank} has not {} within {:.1} s: it may still be starting, or it has ended",
        Missing(*.awaited),
        .waited.as_secs_f64()
    )]
    Silent {
        /// The rank.
        rank: WorldRank,
        /// The purpose of the message.
        awaited: Tag,
        /// The deadline.
        waited: Duration,
    },
    /// A rank failed in the meantime.
    #[error(transparent)]
    Failed(StepError),
    /// A rank's description cannot be decoded: it runs another version.
    #[error(transparent)]
    Unreadable(#[from] MessageError),
}

pipewright_schedule::message_as_debug!(AgreementError);

/// The thing that a rank has not done, after "has not".
struct Missing(Tag);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Tag::Hello => f.write_str("described its run"),
            awaited => write!(f, "sent {awaited}"),
        }
    }
}

impl AgreementError {
    /// Returns a rank that did not answer.
    pub fn silent(&self) -> Option<WorldRank> {
        match self {
            Self::Differences(differences) => differences.silent(),
            Self::Silent { rank, .. } => Some(*rank),
            Self::Failed(_) | Self::Unreadable(_) => None,
        }
    }
}

/// The differences between the processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Differences(pub(super) Vec<Difference>);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Difference {
    /// Ranks cannot run, for the same reason.
    Cannot { ranks: Vec<WorldRank>, reason: String },
    /// A rank did not answer in time.
    Silent { rank: WorldRank, waited: Duration },
    /// Ranks have the same device, and each needs its own.
    SharedDevice { ranks: Vec<WorldRank>, device: String },
    /// Two ranks know a thing differently.
    Known { name: String, ranks: [WorldRank; 2], values: [String; 2] },
    /// Ranks have another value of a field than the first rank.
    Field { name: String, ranks: Vec<WorldRank>, value: String, first: String },
}

impl Differences {
    fn silent(&self) -> Option<WorldRank> {
        self.0.iter().find_map(|difference| match difference {
            Difference::Silent { rank, .. } => Some(*rank),
            _ => None,
        })
    }
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, difference) in self.0.iter().enumerate() {
            if number > 0 {
                f.write_str("\n")?;
            }
            match difference {
                Difference::Cannot { ranks, reason } => write!(f, "{}: {reason}", Ranks(ranks))?,
                Difference::Silent { rank, waited } => {
                    AgreementError::Silent { rank: *rank, awaited: Tag::Hello, waited: *waited }.fmt(f)?;
                }
                Difference::SharedDevice { ranks, device } => write!(
                    f,
                    "{} have the same device, {device}, and each needs its own: name more devices, use fewer ranks \
                     there, or let ranks share a device",
                    Ranks(ranks)
                )?,
                Difference::Known { name, ranks: [first, second], values: [one, other] } => write!(
                    f,
                    "rank {first} gives {name} as {one}, and rank {second} as {other}: give the same metadata in all \
                     processes, or each boundary in one of them"
                )?,
                Difference::Field { name, ranks, value, first } => write!(
                    f,
                    "{}: `{name}` is {value}, but {first} on rank 0: start all processes with the same program and \
                     configuration",
                    Ranks(ranks)
                )?,
            }
        }
        Ok(())
    }
}

/// `rank 2`, `ranks 1, 3`.
struct Ranks<'a>(&'a [WorldRank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        for (number, rank) in self.0.iter().enumerate() {
            if number > 0 {
                f.write_str(", ")?;
            }
            rank.fmt(f)?;
        }
        Ok(())
    }
}

/// The description of a process's run, or the reason why it cannot run.
pub(super) type Hello = Result<Fields, String>;

/// The device of a process's rank, or the reason why it cannot run. `None` may be shared.
pub(super) type OwnDevice = Result<Option<String>, String>;

/// Returns when all processes have sent the same description.
pub(super) fn agree(
    endpoint: &mut Endpoint,
    hello: &Hello,
    deadline: Duration,
) -> Result<(), AgreementError> {
    agree_by(endpoint, hello, deadline, |hellos| (compare(hellos), ()))
}

/// Returns when all processes have sent their devices and no device is named twice.
pub(super) fn claim(
    endpoint: &mut Endpoint,
    device: &OwnDevice,
    deadline: Duration,
) -> Result<(), AgreementError> {
    agree_by(endpoint, device, deadline, |devices| (find_shared(devices), ()))
}

/// Sends the value of each process to the first one. Returns in every process the result of `compare` there,
/// unless it finds differences.
pub(super) fn agree_by<T, R>(
    endpoint: &mut Endpoint,
    hello: &T,
    deadline: Duration,
    compare: impl Fn(&[(WorldRank, T)]) -> (Differences, R),
) -> Result<R, AgreementError>
where
    T: Clone + Serialize + for<'de> Deserialize<'de>,
    R: Serialize + for<'de> Deserialize<'de>,
{
    let agreed = exchange(endpoint, hello, deadline, compare);
    if let Err(error) = &agreed
        && error.silent().is_some()
    {
        let cause = Cause::Abandoned { message: error.to_string() };
        endpoint.fail(StepError { rank: endpoint.rank(), step: StepNumber::default(), action: None, cause });
    }
    agreed
}

fn exchange<T, R>(
    endpoint: &mut Endpoint,
    hello: &T,
    deadline: Duration,
    compare: impl Fn(&[(WorldRank, T)]) -> (Differences, R),
) -> Result<R, AgreementError>
where
    T: Clone + Serialize + for<'de> Deserialize<'de>,
    R: Serialize + for<'de> Deserialize<'de>,
{
    let first = WorldRank::new(0);
    let others = (1..endpoint.ranks()).map(WorldRank::new);
    let (differences, agreed) = if endpoint.rank() == first {
        let until = end_of_wait(deadline);
        let mut hellos = vec![(first, hello.clone())];
        let mut silent = Vec::new();
        for rank in others.clone() {
            match take(endpoint, rank, Tag::Hello, until, deadline) {
                // The other ranks learn of it with the differences.
                Err(AgreementError::Silent { rank, waited, .. }) => {
                    silent.push(Difference::Silent { rank, waited });
                }
                hello => hellos.push((rank, hello?)),
            }
        }
        let (mut differences, agreed) = compare(&hellos);
        differences.0.extend(silent);
        let welcome = encoded(&(&differences, &agreed));
        for rank in others {
            endpoint.send(rank, Tag::Welcome, Payload::Bytes(welcome.clone()));
        }
        (differences, agreed)
    } else {
        endpoint.send(first, Tag::Hello, Payload::of(hello));
        // The first rank may arrive last, and then waits for the others itself.
        let waited = deadline.saturating_mul(2);
        take(endpoint, first, Tag::Welcome, end_of_wait(waited), waited)?
    };
    if differences.0.is_empty() { Ok(agreed) } else { Err(AgreementError::Differences(differences)) }
}

/// Returns the text of the first rank's process in every process. `round` is the number of earlier calls: the
/// first rank does not wait for an answer, so texts of several calls can be on their way together.
pub(super) fn share(
    endpoint: &mut Endpoint,
    own: String,
    round: u32,
    deadline: Duration,
) -> Result<String, AgreementError> {
    let (first, tag) = (WorldRank::new(0), Tag::Chosen { round });
    if endpoint.rank() != first {
        return take(endpoint, first, tag, end_of_wait(deadline), deadline);
    }
    let text = encoded(&own);
    for rank in (1..endpoint.ranks()).map(WorldRank::new) {
        endpoint.send(rank, tag, Payload::Bytes(text.clone()));
    }
    Ok(own)
}

fn take<T: for<'de> Deserialize<'de>>(
    endpoint: &mut Endpoint,
    from: WorldRank,
    tag: Tag,
    until: Instant,
    waited: Duration,
) -> Result<T, AgreementError> {
    let message = receive(endpoint, from, tag, until, waited)?;
    Ok(message.read()?)
}

/// Waits for a message.
pub(super) fn receive(
    endpoint: &mut Endpoint,
    from: WorldRank,
    tag: Tag,
    until: Instant,
    waited: Duration,
) -> Result<Message, AgreementError> {
    let mut woken = Waited::Arrived;
    loop {
        // A message that was sent before a failure still counts.
        if let Some(message) = endpoint.try_take(from, tag) {
            return Ok(message);
        }
        match woken {
            Waited::Arrived => woken = endpoint.wait(until),
            Waited::TimedOut => return Err(AgreementError::Silent { rank: from, awaited: tag, waited }),
            Waited::Aborted => {
                let silent = AgreementError::Silent { rank: from, awaited: tag, waited };
                return Err(endpoint.abort().first().map_or(silent, AgreementError::Failed));
            }
        }
    }
}

/// Returns the reasons of the ranks that cannot run. Ranks with the same reason are listed together.
fn cannot_run<T>(hellos: &[(WorldRank, Result<T, String>)]) -> Vec<Difference> {
    let mut reasons: BTreeMap<&str, Vec<WorldRank>> = BTreeMap::new();
    for (rank, hello) in hellos {
        if let Err(reason) = hello {
            reasons.entry(reason).or_default().push(*rank);
        }
    }
    let cannot =
        reasons.into_iter().map(|(reason, ranks)| Difference::Cannot { ranks, reason: reason.to_owned() });
    cannot.collect()
}

/// Returns the devices that several ranks name.
fn find_shared(devices: &[(WorldRank, OwnDevice)]) -> Differences {
    let mut differences = cannot_run(devices);
    let mut owners: BTreeMap<&str, Vec<WorldRank>> = BTreeMap::new();
    for (rank, device) in devices {
        if let Ok(Some(device)) = device {
            owners.entry(device).or_default().push(*rank);
        }
    }
    let shared = owners.into_iter().filter(|(_, ranks)| ranks.len() > 1);
    differences
        .extend(shared.map(|(device, ranks)| Difference::SharedDevice { ranks, device: device.to_owned() }));
    Differences(differences)
}

/// Returns the differences from the first rank. Ranks with the same reason or value are listed together.
fn compare(hellos: &[(WorldRank, Hello)]) -> Differences {
    let mut differences = cannot_run(hellos);
    let Some((_, Ok(first))) = hellos.first() else { return Differences(differences) };
    let mut fields: BTreeMap<(&str, &str, &str), Vec<WorldRank>> = BTreeMap::new();
    for (rank, hello) in hellos {
        let Ok(hello) = hello else { continue };
        for name in first.keys().chain(hello.keys().filter(|name| !first.contains_key(*name))) {
            let value = hello.get(name).map_or("missing", String::as_str);
            let expected = first.get(name).map_or("missing", String::as_str);
            if value != expected {
                fields.entry((name, value, expected)).or_default().push(*rank);
            }
        }
    }
    differences.extend(fields.into_iter().map(|((name, value, first), ranks)| Difference::Field {
        name: name.to_owned(),
        ranks,
        value: value.to_owned(),
        first: first.to_owned(),
    }));
    Differences(differences)
}

#[cfg(test)]
mod tests {
    use super::super::{LocalEndpoint, local};
    use super::*;

    fn fields(schedule: &str) -> Hello {
        Ok([("schedule".to_owned(), schedule.to_owned()), ("version".to_owned(), "1".to_owned())].into())
    }

    fn check(hellos: Vec<Hello>, expected: &[&str]) {
        let hellos: Vec<_> = (0..).map(WorldRank::new).zip(hellos).collect();
        let found = compare(&hellos).to_string();
        let found: Vec<&str> = found.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn ranks_that_differ_are_named_with_the_field() {
        check(vec![fields("a"), fields("a")], &[]);
        check(vec![fields("a"), fields("b"), fields("a")], &["rank 1: `schedule` is b, but a on rank 0"]);
        let expected = ["ranks 1, 3: `schedule` is b, but a on rank 0", "rank 2: `schedule` is c, but a"];
        check(vec![fields("a"), fields("b"), fields("c"), fields("b")], &expected);
    }

    #[test]
    fn ranks_that_cannot_run_say_why() {
        let cannot = || Err("no such file".to_owned());
        check(vec![fields("a"), cannot(), cannot()], &["ranks 1, 2: no such file"]);
        check(vec![cannot(), cannot()], &["ranks 0, 1: no such file"]);
    }

    /// Rank 1 begins to wait before rank 0, and rank 2 never answers.
    #[test]
    fn a_silent_rank_is_named_by_all_and_not_waited_for() {
        const DEADLINE: Duration = Duration::from_secs(1);
        let agree_after = |endpoint: LocalEndpoint, delay: Duration| {
            std::thread::spawn(move || {
                let mut endpoint = Endpoint::Local(endpoint);
                std::thread::sleep(delay);
                let error = agree(&mut endpoint, &fields("a"), DEADLINE).expect_err("rank 2 is missing");
                (error.to_string(), error.silent(), endpoint.abort().is_raised())
            })
        };
        let [first, second, _third] = <[_; 3]>::try_from(local::world(3)).ok().expect("three ranks");
        let ranks = [agree_after(first, DEADLINE / 3), agree_after(second, Duration::ZERO)];
        for rank in ranks {
            let (error, silent, leaves) = rank.join().expect("it does not panic");
            assert!(error.starts_with("rank 2 has not described its run within 1.0 s"), "{error}");
            assert_eq!((silent, leaves), (Some(WorldRank::new(2)), true));
        }
    }

    /// The first rank shares two texts before the second one asks for the first of them.
    #[test]
    fn texts_that_are_on_their_way_together_stay_apart() {
        const DEADLINE: Duration = Duration::from_secs(1);
        let mut ranks = local::world(2).into_iter().map(Endpoint::Local).collect::<Vec<_>>();
        let mut shared =
            |rank: usize, round| share(&mut ranks[rank], format!("{rank}.{round}"), round, DEADLINE);
        for rank in [0, 1] {
            for round in [0, 1] {
                assert_eq!(shared(rank, round).expect("rank 0 has sent it"), format!("0.{round}"));
            }
        }
        let error = shared(1, 2).expect_err("rank 0 has not sent it").to_string();
        assert!(
            error.starts_with("rank 0 has not sent choice 2 of the first process within 1.0 s"),
            "{error}"
        );
    }

    #[test]
    fn ranks_with_the_same_device_are_named() {
        let check = |devices: &[OwnDevice], expected: &str| {
            let devices: Vec<_> = (0..).map(WorldRank::new).zip(devices.iter().cloned()).collect();
            let found = find_shared(&devices).to_string();
            let matches = if expected.is_empty() { found.is_empty() } else { found.starts_with(expected) };
            assert!(matches, "{found}");
        };
        let named = |name: &str| Ok(Some(name.to_owned()));
        check(&[named("`cuda:0` of a"), named("`cuda:1` of a"), named("`cuda:0` of b")], "");
        check(&[Ok(None), Ok(None)], "");
        let expected = "ranks 0, 2 have the same device, `cuda:0` of a, and each needs its own: ";
        check(&[named("`cuda:0` of a"), named("`cuda:1` of a"), named("`cuda:0` of a")], expected);
        check(&[Ok(None), Err("it is missing".to_owned())], "rank 1: it is missing");
    }

    #[test]
    fn a_field_that_is_missing_differs() {
        check(
            vec![fields("a"), Ok(Fields::new())],
            &["rank 1: `schedule` is missing, but a", "rank 1: `version` is missing, but 1"],
        );
    }
}

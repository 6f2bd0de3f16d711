//! Before anything runs: are all processes about to run the same?
//!
//! Each process tells the first rank what it is about to run, as named fields, or why it cannot run at all. The first
//! rank compares and tells all what it found, so that every process ends with the same error, which names ranks and
//! fields. Who says nothing in time is named too, and not waited for when the others leave, though its process may
//! well give signs of life.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use pipewright_schedule::Rank;
use serde::{Deserialize, Serialize};

use super::{Endpoint, Waited};
use crate::failure::{Cause, StepError};
use crate::message::{Payload, Tag, encoded};

/// What a process is about to run, by name: versions, hashes, settings that must not differ.
pub type Fields = BTreeMap<String, String>;

/// Why the processes cannot run together.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AgreementError {
    /// They are not about to run the same, or some cannot run at all.
    #[error("{0}")]
    Differences(Differences),
    /// A rank did not say what it is about to run.
    #[error("rank {rank} did not say within {:.1} s what it is about to run: is it still starting, or gone?", .waited.as_secs_f64())]
    Silent {
        /// The rank.
        rank: Rank,
        /// The deadline.
        waited: Duration,
    },
    /// A rank failed meanwhile.
    #[error(transparent)]
    Failed(StepError),
    /// What a rank said cannot be read: it runs another version.
    #[error("what rank {rank} says cannot be read: it runs another version of the program")]
    Unreadable {
        /// The rank.
        rank: Rank,
    },
}

impl AgreementError {
    /// A rank that said nothing.
    pub fn silent(&self) -> Option<Rank> {
        match self {
            Self::Differences(differences) => differences.silent(),
            Self::Silent { rank, .. } => Some(*rank),
            Self::Failed(_) | Self::Unreadable { .. } => None,
        }
    }
}

/// All that differs between processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Differences(Vec<Difference>);

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Difference {
    /// Ranks cannot run, for one reason.
    Cannot { ranks: Vec<Rank>, reason: String },
    /// A rank said nothing in time.
    Silent { rank: Rank, waited: Duration },
    /// Ranks have one value of a field, the first rank has another.
    Field { name: String, ranks: Vec<Rank>, value: String, first: String },
}

impl Differences {
    fn silent(&self) -> Option<Rank> {
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
                    AgreementError::Silent { rank: *rank, waited: *waited }.fmt(f)?;
                }
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
struct Ranks<'a>(&'a [Rank]);

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

/// What a process says: its fields, or why it cannot run.
pub(super) type Hello = Result<Fields, String>;

/// Returns when all processes have said the same.
pub(super) fn agree(
    endpoint: &mut Endpoint,
    hello: &Hello,
    deadline: Duration,
) -> Result<(), AgreementError> {
    let agreed = exchange(endpoint, hello, deadline);
    if let Err(error) = &agreed
        && error.silent().is_some()
    {
        let cause = Cause::Abandoned { message: error.to_string() };
        endpoint.fail(StepError { rank: endpoint.rank(), step: 0, action: None, cause });
    }
    agreed
}

fn exchange(endpoint: &mut Endpoint, hello: &Hello, deadline: Duration) -> Result<(), AgreementError> {
    let first = Rank::new(0);
    let others = (1..endpoint.ranks()).map(Rank::new);
    let differences = if endpoint.rank() == first {
        let until = Instant::now() + deadline;
        let mut told = vec![(first, hello.clone())];
        let mut silent = Vec::new();
        for rank in others.clone() {
            match take(endpoint, rank, Tag::Hello, until, deadline) {
                // All hear of it.
                Err(AgreementError::Silent { rank, waited }) => {
                    silent.push(Difference::Silent { rank, waited });
                }
                hello => told.push((rank, hello?)),
            }
        }
        let mut differences = compare(&told);
        differences.0.extend(silent);
        let welcome = encoded(&differences);
        for rank in others {
            endpoint.send(rank, Tag::Welcome, Payload::Bytes(welcome.clone()));
        }
        differences
    } else {
        endpoint.send(first, Tag::Hello, Payload::of(hello));
        // The first rank may be the last to come here, and then waits for the others itself.
        let waited = deadline * 2;
        take(endpoint, first, Tag::Welcome, Instant::now() + waited, waited)?
    };
    match differences.0.is_empty() {
        true => Ok(()),
        false => Err(AgreementError::Differences(differences)),
    }
}

fn take<T: for<'de> Deserialize<'de>>(
    endpoint: &mut Endpoint,
    from: Rank,
    tag: Tag,
    until: Instant,
    waited: Duration,
) -> Result<T, AgreementError> {
    let mut woken = Waited::Arrived;
    loop {
        // What was said before a failure counts.
        if let Some(message) = endpoint.try_take(from, tag) {
            return message.read().map_err(|_| AgreementError::Unreadable { rank: from });
        }
        match woken {
            Waited::Arrived => woken = endpoint.wait(until),
            Waited::TimedOut => return Err(AgreementError::Silent { rank: from, waited }),
            Waited::Aborted => {
                let first = endpoint.abort().first();
                return Err(
                    first.map_or(AgreementError::Silent { rank: from, waited }, AgreementError::Failed)
                );
            }
        }
    }
}

/// What differs from the first rank. Ranks with one reason, or one value, are named together.
fn compare(told: &[(Rank, Hello)]) -> Differences {
    let mut reasons: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
    for (rank, hello) in told {
        if let Err(reason) = hello {
            reasons.entry(reason).or_default().push(*rank);
        }
    }
    let cannot =
        reasons.into_iter().map(|(reason, ranks)| Difference::Cannot { ranks, reason: reason.to_owned() });
    let mut differences: Vec<_> = cannot.collect();
    let Some((_, Ok(first))) = told.first() else { return Differences(differences) };
    let mut fields: BTreeMap<(&str, &str, &str), Vec<Rank>> = BTreeMap::new();
    for (rank, hello) in told {
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

    fn check(told: Vec<Hello>, expected: &[&str]) {
        let told: Vec<_> = (0..).map(Rank::new).zip(told).collect();
        let found = compare(&told).to_string();
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

    /// Rank 1 has waited for a while when rank 0 begins to; rank 2 never comes.
    #[test]
    fn who_says_nothing_is_named_by_all_and_not_waited_for() {
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
            let (said, silent, leaves) = rank.join().expect("it does not panic");
            assert!(said.starts_with("rank 2 did not say within 1.0 s"), "{said}");
            assert_eq!((silent, leaves), (Some(Rank::new(2)), true));
        }
    }

    #[test]
    fn a_field_that_is_missing_differs() {
        check(
            vec![fields("a"), Ok(Fields::new())],
            &["rank 1: `schedule` is missing, but a", "rank 1: `version` is missing, but 1"],
        );
    }
}

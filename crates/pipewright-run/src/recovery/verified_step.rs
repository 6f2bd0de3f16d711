//! [`VerifiedStep`]: the record of a suspicious step that was computed again.

use pipewright::failure::Cause;
use pipewright::ids::WorldRank;
use pipewright::pipeline::StepFailure;
use pipewright::verification::{Difference, Suspicion, Verification};
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// A suspicious step, as a line of the metrics has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerifiedStep {
    /// The result of the comparison.
    pub event: VerificationEvent,
    /// The number of the step.
    pub step: u64,
    /// Why the step was computed again; left out if a rank of another process has failed before this one
    /// knew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspicion: Option<String>,
    /// The number of computations after the first one.
    pub repetitions: u32,
    /// The stage of the first result whose bits differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    /// The action of that result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// The ranks that have computed wrong bits; empty if they are not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
    /// If the wrong rank is not known: the ranks that have computed the result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<u32>,
    /// The hosts of these ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// The result of the comparison, in words.
    pub finding: String,
}

/// The name of the event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerificationEvent {
    /// All bits agree, or the step fails again with the same number that is not finite.
    #[default]
    VerifiedStep,
    /// Bits differ.
    WrongBits,
}

impl VerifiedStep {
    /// Returns the record of a step that has succeeded. `counts` says whether the run continues from its
    /// result if bits differ. `hosts` returns the hosts of ranks.
    pub fn of(
        step: u64,
        verification: &Verification,
        counts: bool,
        hosts: impl Fn(&[u32]) -> Vec<String>,
    ) -> Self {
        let Verification { suspicion, repetitions, difference, is_reproduced } = verification;
        let record = match difference {
            Some(difference) => {
                let record = Self::differing(step, difference, hosts);
                let end = if counts { "; the right bits count" } else { "" };
                Self { finding: record.finding + end, ..record }
            }
            None if *is_reproduced => {
                let finding = "all bits agree, so the step is genuine".to_owned();
                Self::new(VerificationEvent::VerifiedStep, step, finding)
            }
            None => {
                let wrong = match suspicion {
                    Suspicion::Jump { .. } | Suspicion::Gradient { .. } => "a sum over ranks or the norm",
                    _ => "a number that is not compared",
                };
                let finding = format!(
                    "the repetition does not show it, and all bits that are compared agree, so {wrong} was wrong; the \
                     repetition counts"
                );
                Self::new(VerificationEvent::WrongBits, step, finding)
            }
        };
        Self { suspicion: Some(suspicion.to_string()), repetitions: *repetitions, ..record }
    }

    /// Returns the record of a step that has failed although it was computed again: its bits are not
    /// confirmed, or the repetition fails too. Returns `None` for a step that was not computed again, and for
    /// another failure.
    pub fn failed(failed: &StepFailure, hosts: impl Fn(&[u32]) -> Vec<String>) -> Option<Self> {
        let StepFailure { error, suspicion, repetitions, difference, .. } = failed;
        if *repetitions == 0 {
            return None;
        }
        let step = error.step.get();
        let record = match error.cause.without_origin() {
            Cause::Unconfirmed { difference } => Self::differing(step, difference, hosts),
            Cause::LossNotFinite { .. }
            | Cause::AuxiliaryNotFinite { .. }
            | Cause::GradientNotFinite { .. }
            | Cause::ParameterNotFinite { .. } => {
                let finding = "the repetition shows a number that is not finite again, so the step fails";
                match difference {
                    Some(difference) => {
                        let record = Self::differing(step, difference, hosts);
                        Self { finding: format!("{}; {finding}", record.finding), ..record }
                    }
                    None => Self::new(VerificationEvent::VerifiedStep, step, finding.to_owned()),
                }
            }
            _ => return None,
        };
        let suspicion = suspicion.as_ref().map(ToString::to_string);
        Some(Self { suspicion, repetitions: *repetitions, ..record })
    }

    fn differing(step: u64, difference: &Difference, hosts: impl Fn(&[u32]) -> Vec<String>) -> Self {
        let numbers = |ranks: &[WorldRank]| ranks.iter().map(|rank| rank.get()).collect::<Vec<_>>();
        let (ranks, undecided) = (numbers(&difference.wrong), numbers(&difference.undecided));
        let hosts = hosts(if ranks.is_empty() { &undecided } else { &ranks });
        Self {
            stage: Some(difference.stage.get()),
            action: difference.action(),
            ranks,
            undecided,
            hosts,
            ..Self::new(VerificationEvent::WrongBits, step, difference.to_string())
        }
    }

    fn new(event: VerificationEvent, step: u64, finding: String) -> Self {
        Self { event, step, finding, ..Self::default() }
    }

    /// Returns the fault of a step in which ranks have computed wrong bits, after which the run can continue
    /// without their hosts. If it is not known which of several ranks is wrong, it names all of them. Returns
    /// `None` if all bits agree. If parameters differ, the state before the step may be wrong too, so the
    /// fault would not be mended by a restart; `None` then too.
    pub fn fault(&self) -> Option<Fault> {
        self.action.as_ref()?;
        let ranks = if self.ranks.is_empty() { &self.undecided } else { &self.ranks };
        let cause = format!("{}{}", self.finding, self.on_hosts());
        Some(Fault {
            step: self.step,
            rank: Some(*ranks.first()?),
            summary: format!("step {}: {cause}", self.step),
            cause,
            wrong_ranks: ranks.clone(),
            ..Fault::default()
        })
    }

    /// Returns the hosts of the ranks in brackets, behind a space.
    fn on_hosts(&self) -> String {
        match &self.hosts[..] {
            [] => String::new(),
            hosts => format!(" (on {})", hosts.join(" and ")),
        }
    }

    /// Returns the sentence for the display.
    pub fn sentence(&self) -> String {
        let Self { step, repetitions, finding, .. } = self;
        let suspicion = self.suspicion.as_deref().unwrap_or("a result was suspicious");
        let again = if *repetitions == 1 {
            "again".to_owned()
        } else {
            format!("{} more", counted(*repetitions, "time"))
        };
        let hosts = self.on_hosts();
        format!("step {step}: {suspicion}, so the step was computed {again}: {finding}{hosts}")
    }
}

#[cfg(test)]
mod tests {
    use pipewright::verification::{Content, Suspicion};
    use pipewright_schedule::{Microbatch, StageIndex};

    use super::*;

    fn record(difference: Option<Difference>, is_reproduced: bool) -> VerifiedStep {
        let suspicion = Suspicion::Jump { norm: 123.4, usual: 1.25 };
        let repetitions = if difference.is_some() { 2 } else { 1 };
        let verification = Verification { suspicion, repetitions, difference, is_reproduced };
        VerifiedStep::of(12, &verification, true, hosts)
    }

    fn hosts(ranks: &[u32]) -> Vec<String> {
        ranks.iter().map(|rank| format!("node{rank}")).collect()
    }

    #[test]
    fn a_record_says_what_was_found() {
        let start = "step 12: the gradient norm is 1.234e2, more than 10 times the usual norm 1.250e0, so the step was computed ";
        let check = |record: VerifiedStep, end: &str, members: &str| {
            assert_eq!(record.sentence(), format!("{start}{end}"));
            let json = serde_json::to_string(&record).expect("JSON");
            assert!(json.contains(members), "{json}");
            assert_eq!(serde_json::from_str::<VerifiedStep>(&json).expect("a record"), record);
        };
        check(
            record(None, true),
            "again: all bits agree, so the step is genuine",
            r#"{"event":"verified_step","step":12,"#,
        );
        check(
            record(None, false),
            "again: the repetition does not show it, and all bits that are compared agree, so a sum over ranks or the norm was \
             wrong; the repetition counts",
            r#"{"event":"wrong_bits","step":12,"#,
        );
        let difference = |wrong: &[u32], undecided: &[u32]| {
            let ranks = |ranks: &[u32]| ranks.iter().copied().map(WorldRank::new).collect();
            let (stage, microbatch) = (StageIndex::new(3), Microbatch::new(2));
            let (wrong, undecided) = (ranks(wrong), ranks(undecided));
            Difference { content: Content::Forward, stage, microbatch, wrong, undecided }
        };
        check(
            record(Some(difference(&[5], &[])), false),
            "2 times more: rank 5 has computed wrong bits in action 3F2; the right bits count (on node5)",
            r#""stage":3,"action":"3F2","ranks":[5],"hosts":["node5"],"#,
        );
        // As in a step that fails.
        let unknown = VerifiedStep {
            suspicion: record(None, true).suspicion,
            repetitions: 3,
            ..VerifiedStep::differing(12, &difference(&[], &[1, 5]), hosts)
        };
        let end = "3 times more: the ranks 1 and 5 have different bits in action 3F2, and which one is wrong is not known \
                   (on node1 and node5)";
        check(unknown, end, r#""undecided":[1,5],"hosts":["node1","node5"],"#);
        let suspicion = Suspicion::Layer { what: "an output".to_owned() };
        let verification = Verification { suspicion, repetitions: 1, difference: None, is_reproduced: false };
        let layer = VerifiedStep::of(12, &verification, true, |_| Vec::new()).sentence();
        assert!(layer.contains("so a number that is not compared was wrong; "), "{layer}");
    }

    #[test]
    fn a_fault_names_the_ranks_without_whose_hosts_the_run_continues() {
        let fault = |content, wrong: &[u32], undecided: &[u32]| {
            let [wrong, undecided] =
                [wrong, undecided].map(|ranks| ranks.iter().copied().map(WorldRank::new));
            let difference = Difference {
                content,
                stage: StageIndex::new(3),
                microbatch: Microbatch::new(2),
                wrong: wrong.collect(),
                undecided: undecided.collect(),
            };
            let suspicion = Suspicion::Jump { norm: 123.4, usual: 1.25 };
            let difference = Some(difference);
            let verification = Verification { suspicion, repetitions: 2, difference, is_reproduced: false };
            VerifiedStep::of(12, &verification, false, hosts).fault()
        };
        let named = fault(Content::Forward, &[5], &[]).expect("a fault");
        assert_eq!(
            (named.step, named.rank, &named.wrong_ranks[..], named.is_final),
            (12, Some(5), &[5][..], false)
        );
        assert_eq!(named.summary, "step 12: rank 5 has computed wrong bits in action 3F2 (on node5)");
        let open = fault(Content::Weights, &[], &[1, 5]).expect("a fault");
        assert_eq!((open.rank, open.wrong_ranks), (Some(1), vec![1, 5]));
        assert_eq!(fault(Content::Parameters, &[5], &[]), None, "the state may be wrong");
        assert_eq!(record(None, true).fault(), None);
        assert_eq!(record(None, false).fault(), None);
    }
}

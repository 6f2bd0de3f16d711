//! The comparison of the batches of all processes at the start of a step, and the agreement of all processes.
//!
//! A process needs inputs only if it has the first stage, and targets only if it has the last one. The
//! weights of the microbatches follow from the whole batch, so the processes compare what each of them knows:
//! the rows of each microbatch, how losses are reduced, and what kind of step they take. A process that does
//! not know something takes it from the others. [`StepForms`] merges what several ranks say. It keeps at most
//! two values of each part, however many ranks there are.

use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use super::reduction::Reduction;
use crate::ids::WorldRank;

/// The most numbers of a list that an error shows.
const SHOWN: usize = 64;

/// The purpose of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    Update { learning_rate: f64 },
    Accumulate,
    Evaluate,
}

/// A description of the step that a process takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepForm {
    purpose: Purpose,
    /// `None` if the process has no inputs.
    inputs: Option<Sizes>,
    /// `None` if the process has no targets.
    targets: Option<Sizes>,
    /// How losses are reduced; `None` if the process does not say it.
    reduction: Option<Reduction>,
    /// Why the process cannot take the step.
    refused: Option<String>,
}

/// The sizes of the microbatches of a process's inputs or targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Sizes {
    by_microbatch: Vec<u64>,
    /// Whether they are parts of one tensor, so that inputs and targets have rows in the same proportions.
    are_parts: bool,
}

/// The properties of a batch on which all processes agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AgreedBatch {
    pub(super) sizes: Option<Vec<u64>>,
    pub(super) reduction: Option<Reduction>,
}

/// Why processes do not take a step together.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum BatchDisagreement {
    /// Two processes have different batches, or take different kinds of steps.
    #[error(
        "the processes take different steps: rank {} has {}, and rank {} has {}: give every process the same batch; a \
         process without the first stage may leave out the inputs, and one without the last stage the targets",
        .first.0, .first.1, .second.0, .second.1
    )]
    Different {
        /// The first process's lowest rank, and what it has.
        first: (WorldRank, String),
        /// The same of the other process.
        second: (WorldRank, String),
    },
    /// The batch of another process cannot be used.
    #[error("rank {rank} cannot take the step: {reason}")]
    Refused {
        /// The lowest rank of the process.
        rank: WorldRank,
        /// The reason.
        reason: String,
    },
}

pipewright_schedule::message_as_debug!(BatchDisagreement);

/// The forms of a step that several ranks have.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StepForms {
    /// The first rank that cannot take the step, and the reason.
    refused: Option<(WorldRank, String)>,
    purpose: Statements<Purpose>,
    inputs: Statements<Sizes>,
    targets: Statements<Sizes>,
    reduction: Statements<Reduction>,
}

/// The values that several ranks have for one part of a step, in the order of the ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Statements<T> {
    /// The first rank that says something.
    first: Option<(WorldRank, T)>,
    /// The first rank that says something else.
    other: Option<(WorldRank, T)>,
}

impl StepForm {
    /// Makes the form of a process that has inputs and targets of these sizes. `are_parts` says whether they
    /// are parts of whole tensors.
    pub(super) fn new(
        purpose: Purpose,
        sizes: [Option<&[usize]>; 2],
        are_parts: bool,
        reduction: &Reduction,
    ) -> Self {
        let [inputs, targets] = sizes.map(|sizes| {
            let by_microbatch = sizes?.iter().map(|&size| size as u64).collect();
            Some(Sizes { by_microbatch, are_parts })
        });
        // A process with a part of the batch does not know how the others reduce its losses, unless the batch
        // says it.
        let is_whole = inputs.is_some() && targets.is_some();
        let says = is_whole || *reduction != Reduction::Rows;
        Self { purpose, inputs, targets, reduction: says.then(|| reduction.clone()), refused: None }
    }

    /// Makes the form of a process whose batch cannot be used.
    pub(crate) fn refused(purpose: Purpose, reason: String) -> Self {
        Self { purpose, inputs: None, targets: None, reduction: None, refused: Some(reason) }
    }
}

impl StepForms {
    /// Makes the forms of one rank.
    pub(crate) fn new(rank: WorldRank, form: StepForm) -> Self {
        let StepForm { purpose, inputs, targets, reduction, refused } = form;
        Self {
            refused: refused.map(|reason| (rank, reason)),
            purpose: Statements::new(rank, Some(purpose)),
            inputs: Statements::new(rank, inputs),
            targets: Statements::new(rank, targets),
            reduction: Statements::new(rank, reduction),
        }
    }

    /// Adds the forms of later ranks.
    pub(crate) fn merge(self, later: Self) -> Self {
        Self {
            refused: self.refused.or(later.refused),
            purpose: self.purpose.merge(later.purpose),
            inputs: self.inputs.merge(later.inputs),
            targets: self.targets.merge(later.targets),
            reduction: self.reduction.merge(later.reduction),
        }
    }

    /// Returns what the ranks agree on.
    pub(crate) fn agree(self) -> Result<AgreedBatch, BatchDisagreement> {
        if let Some((rank, reason)) = self.refused {
            return Err(BatchDisagreement::Refused { rank, reason });
        }
        self.purpose.common(described_purpose)?;
        let inputs = self.inputs.common(|sizes| described_sizes("inputs", sizes))?;
        let targets = self.targets.common(|sizes| described_sizes("targets", sizes))?;
        let reduction = self.reduction.common(described_reduction)?;
        if let (Some((first, inputs)), Some((second, targets))) = (&inputs, &targets)
            && !are_proportional(inputs, targets)
        {
            return Err(BatchDisagreement::Different {
                first: (*first, described_sizes("inputs", inputs)),
                second: (*second, described_sizes("targets", targets)),
            });
        }
        let sizes = inputs.or(targets).map(|(_, sizes)| sizes.by_microbatch);
        Ok(AgreedBatch { sizes, reduction: reduction.map(|(_, reduction)| reduction) })
    }
}

impl<T: PartialEq> Statements<T> {
    fn new(rank: WorldRank, said: Option<T>) -> Self {
        Self { first: said.map(|said| (rank, said)), other: None }
    }

    fn merge(self, later: Self) -> Self {
        let Some(first) = self.first else { return later };
        let differs = |(_, said): &(WorldRank, T)| *said != first.1;
        let other = self.other.or(later.first.filter(differs)).or(later.other.filter(differs));
        Self { first: Some(first), other }
    }

    /// Returns what all ranks that say something say, with the first of these ranks.
    fn common(self, describe: impl Fn(&T) -> String) -> Result<Option<(WorldRank, T)>, BatchDisagreement> {
        match (self.first, self.other) {
            (Some((rank, first)), Some((other_rank, other))) => Err(BatchDisagreement::Different {
                first: (rank, describe(&first)),
                second: (other_rank, describe(&other)),
            }),
            (first, _) => Ok(first),
        }
    }
}

/// Returns whether each microbatch has the same share of the inputs and of the targets. Targets may have
/// several rows for each row of the inputs. Microbatches that the caller has split may have any number of
/// targets.
fn are_proportional(inputs: &Sizes, targets: &Sizes) -> bool {
    if !inputs.are_parts || !targets.are_parts {
        return inputs.by_microbatch.len() == targets.by_microbatch.len();
    }
    let total = |sizes: &Sizes| sizes.by_microbatch.iter().copied().map(u128::from).sum::<u128>();
    let (of_inputs, of_targets) = (total(inputs), total(targets));
    let mut pairs = inputs.by_microbatch.iter().zip(&targets.by_microbatch);
    inputs.by_microbatch.len() == targets.by_microbatch.len()
        && pairs.all(|(&a, &b)| u128::from(a) * of_targets == u128::from(b) * of_inputs)
}

fn described_purpose(purpose: &Purpose) -> String {
    match purpose {
        Purpose::Update { learning_rate } => {
            format!("a step that updates with the learning rate {learning_rate}")
        }
        Purpose::Accumulate => "a batch to accumulate".to_owned(),
        Purpose::Evaluate => "an evaluation".to_owned(),
    }
}

fn described_sizes(what: &str, Sizes { by_microbatch, .. }: &Sizes) -> String {
    let rows: u64 = by_microbatch.iter().sum();
    format!("{} of {what}, by microbatch {}", counted(rows, "row"), shown(by_microbatch))
}

fn described_reduction(reduction: &Reduction) -> String {
    match reduction {
        Reduction::Rows => "microbatches that count by their rows".to_owned(),
        Reduction::Sum => "losses that are added".to_owned(),
        Reduction::Weights { weights, ignored: None } => {
            format!("microbatches of the weights {}", shown(weights))
        }
        Reduction::Weights { weights, ignored: Some(ignored) } => {
            format!("microbatches of the weights {}, which ignore target {ignored}", shown(weights))
        }
    }
}

/// Returns the first numbers of a list.
fn shown<T: std::fmt::Debug>(numbers: &[T]) -> String {
    match numbers.len() {
        0..=SHOWN => format!("{numbers:?}"),
        count => format!("{:?} and {} more", &numbers[..SHOWN], count - SHOWN),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int, Tensor};

    use super::*;
    use crate::batch::{Batch, SplitRule, split};
    use crate::tensor::pack;

    const TRAIN: Purpose = Purpose::Update { learning_rate: 0.5 };

    fn rows(rows: usize) -> Tensor<2> {
        Tensor::zeros([rows, 2], &Device::flex())
    }

    fn inputs(count: usize) -> Batch {
        Batch::split(rows(count), (), SplitRule::balanced(6)).expect("it splits")
    }

    fn targets(count: usize) -> Batch {
        Batch::split((), rows(count), SplitRule::balanced(6)).expect("it splits")
    }

    fn both(count: usize) -> Batch {
        Batch::split(rows(count), rows(count), SplitRule::balanced(6)).expect("it splits")
    }

    fn parts(inputs: usize, targets: usize) -> Batch {
        let parts = |count: usize| match count {
            0 => Vec::new(),
            _ => split(&pack(rows(count)), SplitRule::balanced(6)).expect("it splits"),
        };
        Batch::new(parts(inputs), parts(targets))
    }

    fn agreed(forms: Vec<StepForm>) -> Result<AgreedBatch, String> {
        let forms = (0..).map(WorldRank::new).zip(forms).map(|(rank, form)| StepForms::new(rank, form));
        forms.reduce(StepForms::merge).expect("a rank").agree().map_err(|error| error.to_string())
    }

    fn check(batches: &[Batch], expected: Result<&[usize], &str>) {
        let found = agreed(batches.iter().map(|batch| batch.form(TRAIN)).collect());
        match (found, expected) {
            (Ok(agreed), Ok(expected)) => {
                for batch in batches {
                    let mut batch = batch.clone();
                    batch.adopt(agreed.clone(), 6);
                    let factors = batch.loss_factors(None);
                    let mean = expected.iter().sum::<usize>() as f64 / 6.0;
                    let losses: Vec<f64> = expected.iter().map(|&size| size as f64 / mean).collect();
                    assert_eq!((factors.losses, factors.divisor, batch.microbatches()), (losses, 6.0, 6));
                }
            }
            (Err(error), Err(expected)) => {
                assert!(
                    error.starts_with(&format!("the processes take different steps: {expected}: ")),
                    "{error}"
                );
            }
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
    }

    const THIRTEEN: &[usize] = &[3, 2, 2, 2, 2, 2];

    #[test]
    fn a_process_takes_from_the_others_what_it_does_not_know() {
        let middle = Batch::default;
        check(&[inputs(13), targets(13)], Ok(THIRTEEN));
        check(&[inputs(13), middle(), targets(13)], Ok(THIRTEEN));
        check(&[both(13), middle(), targets(13)], Ok(THIRTEEN));
        check(&[inputs(13), both(13)], Ok(THIRTEEN));
        check(&[parts(13, 0), middle(), parts(0, 13)], Ok(THIRTEEN));
        check(&[middle(), middle()], Ok(&[1; 6]));
        // Several targets belong to each row, and an image has any number of boxes.
        let flat = Batch::split((), rows(24), 6).expect("it splits");
        check(&[inputs(6), flat], Ok(&[1; 6]));
        check(&[parts(13, 0), parts(0, 12)], Ok(THIRTEEN));
    }

    #[test]
    fn both_sides_of_a_difference_are_named() {
        check(
            &[inputs(13), Batch::default(), targets(12)],
            Err(
                "rank 0 has 13 rows of inputs, by microbatch [3, 2, 2, 2, 2, 2], and rank 2 has 12 rows of targets, by \
                 microbatch [2, 2, 2, 2, 2, 2]",
            ),
        );
        check(
            &[both(13), both(12)],
            Err(
                "rank 0 has 13 rows of inputs, by microbatch [3, 2, 2, 2, 2, 2], and rank 1 has 12 rows of inputs, by \
                 microbatch [2, 2, 2, 2, 2, 2]",
            ),
        );
        check(
            &[both(12), targets(18)],
            Err(
                "rank 0 has 12 rows of targets, by microbatch [2, 2, 2, 2, 2, 2], and rank 1 has 18 rows of targets, by \
                 microbatch [3, 3, 3, 3, 3, 3]",
            ),
        );
        check(
            &[both(12), both(12).summed()],
            Err("rank 0 has microbatches that count by their rows, and rank 1 has losses that are added"),
        );
        let weighted =
            |batch: Batch, last| batch.weighted([1.0, 2.0, 1.0, 1.0, 1.0, last]).expect("six weights");
        check(
            &[weighted(both(12), 1.0), weighted(both(12), 3.0)],
            Err(
                "rank 0 has microbatches of the weights [1.0, 2.0, 1.0, 1.0, 1.0, 1.0], and rank 1 has microbatches of the \
                 weights [1.0, 2.0, 1.0, 1.0, 1.0, 3.0]",
            ),
        );
    }

    #[test]
    fn the_kinds_of_steps_are_compared() {
        let form = |purpose| both(12).form(purpose);
        let error = agreed(vec![form(TRAIN), form(Purpose::Accumulate)]).expect_err("they differ");
        assert!(error.contains(
            "a step that updates with the learning rate 0.5, and rank 1 has a batch to accumulate"
        ));
        let other = Purpose::Update { learning_rate: 0.25 };
        assert!(agreed(vec![form(TRAIN), form(other)]).is_err());
        assert!(agreed(vec![form(TRAIN), form(Purpose::Evaluate)]).is_err());
        let refused = StepForm::refused(TRAIN, "no rows".to_owned());
        let error = agreed(vec![form(TRAIN), refused]).expect_err("one refuses");
        assert_eq!(error, "rank 1 cannot take the step: no rows");
    }

    #[test]
    fn weights_of_the_process_with_the_targets_are_those_of_all() {
        let ids = Tensor::<2, Int>::from_data([[1, -1], [1, 1]], &Device::flex());
        let last =
            Batch::split((), ids, 2).and_then(|batch| batch.ignoring(-1)).expect("three targets count");
        let mut first = Batch::split(rows(2), (), 2).expect("it splits");
        let agreed = agreed(vec![first.form(TRAIN), last.form(TRAIN)]).expect("only one says it");
        first.adopt(agreed, 2);
        assert_eq!(first.loss_factors(None), last.loss_factors(None));
    }

    #[test]
    fn forms_may_be_merged_in_any_grouping() {
        let sizes = [13, 13, 12, 11, 13, 12];
        let forms = (0..).map(WorldRank::new).zip(sizes);
        let forms = forms.map(|(rank, count)| StepForms::new(rank, both(count).form(TRAIN)));
        let forms: Vec<StepForms> = forms.collect();
        let merged = |forms: &[StepForms]| forms.iter().cloned().reduce(StepForms::merge).expect("a rank");
        let expected = merged(&forms).agree().expect_err("they differ");
        assert!(expected.to_string().contains(", and rank 2 has 12 rows of inputs"), "{expected}");
        for middle in 1..forms.len() {
            let (earlier, later) = forms.split_at(middle);
            assert_eq!(merged(earlier).merge(merged(later)).agree(), Err(expected.clone()));
        }
    }
}

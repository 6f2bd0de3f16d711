//! The losses of preference training. They are functions of the log-probabilities of whole sequences, which come from
//! the losses of their tokens.
//!
//! A row has the two sequences of a record one after another, as documents of their own
//! ([`PreferenceData`](pipewright::train::data::PreferenceData)). A microbatch has whole records, and its loss is the
//! mean over them. `x` is a prompt, `y` a completion, `p(y)` the sum of the log-probabilities of the completion's
//! tokens, `r(y)` the same of the reference, `n(y)` their number, and `s` the logistic function:
//!
//! - `dpo` (Rafailov et al., 2023, arXiv:2305.18290): with `d = b (p(c) - r(c) - p(l) + r(l))` for the chosen
//!   completion `c` and the rejected `l`, `-(1 - e) ln s(d) - e ln s(-d)`, where `e` is the label smoothing;
//! - `ipo` (Azar et al., 2023, arXiv:2310.12036): `((p(c) - r(c)) / n(c) - (p(l) - r(l)) / n(l) - 1 / 2b)^2`;
//! - `orpo` (Hong et al., 2024, arXiv:2403.07691): `-b ln s(o(c) - o(l))` with `m = p / n` and the log-odds
//!   `o = m - ln(1 - exp m)`, plus the mean cross entropy of all tokens of the chosen sequences;
//! - `simpo` (Meng et al., 2024, arXiv:2405.14734): as `dpo` with `d = b (m(c) - m(l)) - g`;
//! - `kto` (Ethayarajh et al., 2024, arXiv:2402.01306): `w (1 - s(b (p - r - k)))` for a desirable completion, and
//!   `w (1 - s(b (k - p + r)))` for another, where `k` is the mean of `p - r` over the prompts of the microbatch with
//!   completions of other records, at least 0 and without a gradient;
//! - `reward`, of a model with a score in place of logits: see the module `reward`.

use burn::tensor::{Bool, Int, Tensor, TensorData};
use pipewright::nn::{ln, log_sigmoid, row_sums, sigmoid, sum, tanh};
use pipewright::stage::StageContext;
use pipewright::train::data::{DOCUMENTS, ROLES, Role, SEQUENCES};
use pipewright::train::{PREFERENCE, REFERENCE, REFERENCE_PASS, SHARE_CHOSEN};
use serde::{Deserialize, Serialize};

use crate::documents::{host, side};

/// A loss of preference training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreferenceLoss {
    /// The kind of the loss.
    pub kind: PreferenceKind,
    /// The factor of the log-probabilities, or of the odds ratio.
    pub beta: f64,
    /// The share of pairs whose completions are assumed to be in the wrong order.
    pub label_smoothing: f64,
    /// The margin of `simpo`.
    pub margin: f64,
    /// The weights of desirable and of undesirable completions in `kto`.
    pub weights: [f64; 2],
    /// The factor of the squared sums of the rewards of a pair in `reward`.
    pub center: f64,
}

/// The kinds of losses of preference training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the module has a sentence about each")]
pub enum PreferenceKind {
    Dpo,
    Ipo,
    Orpo,
    SimPo,
    Kto,
    Reward,
}

impl PreferenceKind {
    /// Returns whether the loss needs the log-probabilities of a reference.
    pub fn needs_reference(self) -> bool {
        matches!(self, Self::Dpo | Self::Ipo | Self::Kto)
    }
}

/// The two sequences of each record of a microbatch, `[records, 2]`: the chosen one and the rejected one, or of `kto`
/// the completion and the mismatched one.
struct Records {
    log_probs: Tensor<2>,
    reference: Tensor<2>,
    /// The numbers of tokens of the completions.
    lengths: Tensor<2>,
}

/// A sequence of a microbatch.
pub(crate) struct Sequence {
    role: i64,
    /// The number of the sequence, the bits of its log-probability under the reference, or of the margin of its pair.
    pub(crate) number: i64,
    /// The places whose targets are its completion.
    completion: Vec<usize>,
    /// All of its places.
    pub(crate) places: Vec<usize>,
}

impl PreferenceLoss {
    /// Returns the loss of a microbatch from the losses `[rows * sequence]` of its tokens with the targets `[rows,
    /// sequence]`, and reports rewards. In the pass of the reference, it reports the log-probability of each sequence.
    ///
    /// # Panics
    /// When the side inputs of preference training are missing or do not fit.
    pub(crate) fn of(
        &self,
        losses: Tensor<1>,
        targets: &Tensor<2, Int>,
        context: &StageContext,
    ) -> Tensor<1> {
        let (targets, [_, sequence]) = (host(targets), targets.dims());
        let sequences = sequences_of(context, sequence);
        let count = sequences.len();
        assert!(count > 0 && count.is_multiple_of(2), "a record of preference training has two sequences");
        let device = if losses.is_autodiff() { losses.device().inner() } else { losses.device() };
        // A place without a target has the loss of any id, which may be infinite.
        let without: Vec<bool> = targets.iter().map(|target| *target < 0).collect();
        let without = Tensor::<1, Bool>::from_data(TensorData::new(without, [targets.len()]), &device);
        let losses = losses.mask_fill(without, 0.0);
        let kind = losses.dtype();
        let table = |values: Vec<f32>, shape: [usize; 2]| -> Tensor<2> {
            Tensor::<2>::from_data(TensorData::new(values, shape), &device).cast(kind)
        };
        let mut places = vec![0.0; count * targets.len()];
        for (row, sequence) in places.chunks_mut(targets.len()).zip(&sequences) {
            sequence.completion.iter().for_each(|&place| row[place] = -1.0);
        }
        let log_probs =
            row_sums(table(places, [count, targets.len()]) * losses.clone().unsqueeze()).reshape([count]);
        if context.value::<bool>(REFERENCE_PASS).is_ok() {
            for (index, sequence) in sequences.iter().enumerate() {
                let own = log_probs.clone().narrow(0, index, 1);
                context.auxiliary_loss_of(&sequence.number.to_string(), REFERENCE, 0.0, own);
            }
            return sum(log_probs);
        }
        let halves = [count / 2, 2];
        let reference = sequences.iter().map(|sequence| f32::from_bits(sequence.number as u32)).collect();
        let lengths = sequences.iter().map(|sequence| sequence.completion.len() as f32).collect();
        let records = Records {
            log_probs: log_probs.reshape(halves),
            reference: table(reference, halves),
            lengths: table(lengths, halves),
        };
        let losses_of_records = match self.kind {
            PreferenceKind::Kto => self.of_labels(&records, &sequences, &table, context),
            _ => self.of_pairs(&records, context),
        };
        let loss = mean(losses_of_records);
        if self.kind != PreferenceKind::Orpo {
            return loss;
        }
        let chosen = sequences.iter().filter(|sequence| sequence.role == Role::Chosen as i64);
        let counted: Vec<usize> = chosen
            .flat_map(|sequence| &sequence.places)
            .copied()
            .filter(|&place| targets[place] >= 0)
            .collect();
        let mut shares = vec![0.0; targets.len()];
        counted.iter().for_each(|&place| shares[place] = 1.0 / counted.len() as f32);
        let shares = table(shares, [1, targets.len()]);
        let cross_entropy = sum(shares * losses.unsqueeze());
        report(context, "nll_loss", cross_entropy.clone());
        loss + cross_entropy
    }

    /// Returns the losses of pairs, `[pairs, 1]`.
    fn of_pairs(&self, records: &Records, context: &StageContext) -> Tensor<2> {
        let Records { log_probs, reference, lengths } = records;
        let (kind, beta) = (self.kind, self.beta);
        let is_mean = matches!(kind, PreferenceKind::Orpo | PreferenceKind::SimPo);
        let own = if is_mean { log_probs.clone() / lengths.clone() } else { log_probs.clone() };
        let scores = if kind.needs_reference() { own.clone() - reference.clone() } else { own.clone() };
        let columns = |table: &Tensor<2>| [0, 1].map(|column| table.clone().narrow(1, column, 1));
        let [chosen, rejected] = columns(&(scores.clone() * beta));
        let (margins, is_right) =
            (chosen.clone() - rejected.clone(), chosen.clone().greater(rejected.clone()));
        let of_policy = columns(&own);
        for (name, values) in [
            ("rewards/chosen", chosen),
            ("rewards/rejected", rejected),
            ("rewards/margins", margins.clone()),
            ("rewards/accuracies", is_right.float().cast(margins.dtype())),
            ("logps/chosen", of_policy[0].clone()),
            ("logps/rejected", of_policy[1].clone()),
        ] {
            report(context, name, mean(values));
        }
        match kind {
            PreferenceKind::Ipo => {
                let [chosen, rejected] = columns(&(scores / lengths.clone()));
                (chosen - rejected - 1.0 / (2.0 * beta)).powi_scalar(2)
            }
            PreferenceKind::Orpo => {
                let [chosen, rejected] = columns(&(own.clone() - ln_of_complement(own)));
                log_sigmoid(chosen - rejected) * -beta
            }
            _ => {
                let margin = if kind == PreferenceKind::SimPo { self.margin } else { 0.0 };
                let difference = margins - margin;
                let usual = log_sigmoid(difference.clone()) * -(1.0 - self.label_smoothing);
                if self.label_smoothing == 0.0 {
                    usual
                } else {
                    usual - log_sigmoid(difference.neg()) * self.label_smoothing
                }
            }
        }
    }

    /// Returns the losses of completions with labels, `[completions, 1]`.
    fn of_labels(
        &self,
        records: &Records,
        sequences: &[Sequence],
        table: &impl Fn(Vec<f32>, [usize; 2]) -> Tensor<2>,
        context: &StageContext,
    ) -> Tensor<2> {
        let scores = records.log_probs.clone() - records.reference.clone();
        let [own, mismatched] = [0, 1].map(|column| scores.clone().narrow(1, column, 1));
        let divergence = mean(mismatched.detach()).clamp_min(0.0);
        report(context, "kl", divergence.clone());
        let is_chosen: Vec<bool> =
            sequences.iter().step_by(2).map(|sequence| sequence.role == Role::Chosen as i64).collect();
        let count = is_chosen.len();
        let of_label = |[chosen, rejected]: [f64; 2]| {
            let values = is_chosen.iter().map(|is| if *is { chosen as f32 } else { rejected as f32 });
            table(values.collect(), [count, 1])
        };
        let log_probs = records.log_probs.clone().narrow(1, 0, 1);
        // Sums over the completions of a label; the share of the label makes them means.
        for (name, values, label) in [
            ("rewards/chosen", own.clone() * self.beta, [1.0, 0.0]),
            ("rewards/rejected", own.clone() * self.beta, [0.0, 1.0]),
            ("logps/chosen", log_probs.clone(), [1.0, 0.0]),
            ("logps/rejected", log_probs, [0.0, 1.0]),
        ] {
            report(context, name, mean(values * of_label(label)));
        }
        report(context, SHARE_CHOSEN, mean(of_label([1.0, 0.0])));
        let margins = (own - divergence.unsqueeze()) * self.beta * of_label([1.0, -1.0]);
        (sigmoid(margins).neg() + 1.0) * of_label(self.weights)
    }
}

/// Reports a value of preference training of the microbatch.
pub(crate) fn report(context: &StageContext, name: &str, value: Tensor<1>) {
    context.auxiliary_loss(&format!("{PREFERENCE}{name}"), 0.0, value);
}

/// Returns the mean of `[records, 1]`, with the same bits every time.
pub(crate) fn mean(values: Tensor<2>) -> Tensor<1> {
    let [count, _] = values.dims();
    sum(values) / count as f64
}

/// Returns `ln(1 - exp x)` for negative numbers. With `t = tanh(x / 2)`, `1 - exp x` is `-2 t / (1 - t)`, without
/// cancellation near 0.
fn ln_of_complement(x: Tensor<2>) -> Tensor<2> {
    let t = tanh(x / 2.0);
    ln(t.clone() * -2.0) - ln(t.neg() + 1.0)
}

/// Returns the sequences of a microbatch, in order.
pub(crate) fn sequences_of(context: &StageContext, row_len: usize) -> Vec<Sequence> {
    let of = |name: &str| {
        let given = side::<Tensor<2, Int>>(context, name);
        given
            .map(|given| host(&given))
            .unwrap_or_else(|| panic!("preference training has the side input `{name}`"))
    };
    let [roles, documents, numbers] = [ROLES, DOCUMENTS, SEQUENCES].map(of);
    let mut sequences: Vec<Sequence> = Vec::new();
    for (place, &role) in roles.iter().enumerate().filter(|(_, role)| **role != 0) {
        if place % row_len == 0 || documents[place] != documents[place - 1] {
            let (completion, places) = (Vec::new(), Vec::new());
            sequences.push(Sequence { role: role.abs(), number: numbers[place], completion, places });
        }
        if let Some(sequence) = sequences.last_mut() {
            sequence.places.push(place);
            if role > 0 {
                sequence.completion.push(place);
            }
        }
    }
    sequences
}

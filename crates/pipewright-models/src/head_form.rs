//! The last norm and the output head of a model, in the form that can be cut along the vocabulary, and the
//! description of the parts as layers.
//!
//! A head may predict further tokens than the next one (DeepSeek-AI, 2024, arXiv:2412.19437). It then takes
//! the hidden states of the last block and, behind them, the states of each further prediction. All of them
//! are multiplied by the same matrix.

use std::ops::Range;

use burn::tensor::Tensor;
use pipewright::nn::tanh;
use pipewright_schedule::{LayerDesc, ModelDesc};
use pipewright_shapes::operations::LayerCount;

use crate::cost::{self, Cost, LOSS_PASSES};
use crate::error::ModelError;
use crate::lora::{HEAD, SCORE};
use crate::norm::NormForm;
use crate::path_names::PathNames;
use crate::split::ids_of_part;

/// The last norm and the output head of a model, whose loss is the mean cross entropy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadForm {
    /// The path of the norm.
    pub norm: &'static str,
    /// The names of parts of paths in files.
    pub(crate) names: PathNames,
    /// The path of the embedding.
    pub embedding: &'static str,
    /// The form of the norm.
    pub form: NormForm,
    /// The width of the hidden states.
    pub width: usize,
    /// The size of the vocabulary.
    pub vocabulary: usize,
    /// The number of labels, if the head has an output for each label in place of each token id.
    pub labels: Option<usize>,
    /// Whether the head uses the table of the embedding instead of a matrix of its own.
    pub is_tied: bool,
    /// The factor of the logits.
    pub factor: f64,
    /// The bound of the logits: `cap tanh(logit / cap)` takes the place of a logit. `None` for no bound.
    pub cap: Option<f64>,
    /// The further predictions.
    pub further: FurtherPredictions,
}

/// The predictions of the tokens after the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FurtherPredictions {
    /// The number of predictions: the last one is of the token so many positions after the next one.
    pub depth: usize,
    /// The factor of the mean of their losses.
    pub loss_weight: f64,
    /// The id with which documents begin, if no side input names the documents. No prediction is of a token of
    /// another document.
    pub bos_token_id: Option<usize>,
}

impl FurtherPredictions {
    /// Whether the loss finds documents in the token ids, which the head then returns too.
    pub(crate) fn needs_ids(&self) -> bool {
        self.depth > 0 && self.bos_token_id.is_some()
    }
}

/// Returns the path of the parameters of a further prediction, whose depth is counted from 1.
pub(crate) fn prediction_path(depth: usize) -> String {
    if depth == 1 { "mtp".to_owned() } else { format!("mtp_{depth}") }
}

impl HeadForm {
    /// Returns the usual head, with the paths of the norm and of the embedding, and the sizes of the vocabulary and of
    /// the hidden states.
    pub(crate) fn new(
        [norm, embedding]: [&'static str; 2],
        form: NormForm,
        [vocabulary, width]: [usize; 2],
        is_tied: bool,
    ) -> Self {
        let (names, further) = (PathNames::default(), FurtherPredictions::default());
        Self {
            norm,
            names,
            embedding,
            form,
            width,
            vocabulary,
            labels: None,
            is_tied,
            factor: 1.0,
            cap: None,
            further,
        }
    }

    /// Returns the head with an output for each of so many labels, whose matrix is its own. transformers neither multiplies
    /// nor bounds these outputs.
    pub(crate) fn of_labels(self, labels: usize) -> Self {
        Self { labels: Some(labels), is_tied: false, factor: 1.0, cap: None, ..self }
    }

    /// Returns the path of the head's own matrix.
    pub(crate) fn path(&self) -> &'static str {
        if self.labels.is_some() { SCORE } else { HEAD }
    }

    /// Returns the number of outputs for a token.
    pub(crate) fn outputs(&self) -> usize {
        self.labels.unwrap_or(self.vocabulary)
    }

    /// Returns the number of predictions.
    pub(crate) fn predictions(&self) -> usize {
        1 + self.further.depth
    }

    /// Returns the normalised hidden states in the form in which the matrix takes them. They are multiplied
    /// by the factor of the logits, because they are narrower.
    pub(crate) fn scaled<const D: usize>(&self, normalised: Tensor<D>) -> Tensor<D> {
        if self.factor == 1.0 { normalised } else { normalised * self.factor }
    }

    /// Returns the logits from the products of the matrix.
    pub(crate) fn bounded<const D: usize>(&self, products: Tensor<D>) -> Tensor<D> {
        match self.cap {
            Some(cap) => tanh(products / cap) * cap,
            None => products,
        }
    }
}

/// A head that is cut along the vocabulary into parts, each of them a layer. Every part has a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CutHead {
    form: HeadForm,
    parts: u32,
}

/// The statistics of a token, which parts of a head send on: the logarithm of a sum of exponentials, and the logit
/// of the target.
pub(crate) const STATISTICS: usize = 2;

impl CutHead {
    /// Returns the head in this number of parts.
    ///
    /// # Errors
    /// When a part would have no token.
    pub(crate) fn new(form: HeadForm, parts: u32) -> Result<Self, ModelError> {
        if form.labels.is_some() {
            return Err(ModelError::new("a head of labels is one part: set `pipeline.head_parts` to 1"));
        }
        let head = Self { form, parts };
        if parts == 0 || head.ids(parts - 1).is_empty() {
            return Err(ModelError::new(format!(
                "{parts} parts of a vocabulary of {} tokens leave a part without a token; use a smaller `pipeline.head_parts`",
                form.vocabulary
            )));
        }
        Ok(head)
    }

    /// Returns the head before it is cut.
    pub(crate) fn form(&self) -> &HeadForm {
        &self.form
    }

    /// Returns the number of parts.
    pub(crate) fn parts(&self) -> u32 {
        self.parts
    }

    /// Returns the token ids whose logits a part computes.
    pub(crate) fn ids(&self, part: u32) -> Range<usize> {
        ids_of_part(part, self.parts, self.form.vocabulary)
    }

    /// Returns the number of shards in which stages hold the table of the token embeddings. For a tied head it
    /// is the number of parts, so that each part shares one shard.
    pub(crate) fn table_parts(&self) -> u32 {
        if self.form.is_tied { self.parts } else { 1 }
    }

    /// Returns `model` with a layer for each part in the place of the head. `tokens` is the number of tokens
    /// of a row.
    pub(crate) fn describe(&self, mut model: ModelDesc, tokens: u64) -> ModelDesc {
        if let Some(whole) = model.layers.pop() {
            model.layers.extend((0..self.parts).map(|part| self.layer(part, &whole, tokens)));
        }
        model
    }

    fn layer(&self, part: u32, whole: &LayerDesc, tokens: u64) -> LayerDesc {
        let (width, ids) = (self.form.width as u64, self.ids(part).len() as u64);
        let statistics = STATISTICS as u64;
        let predictions = self.form.predictions() as u64;
        // The first part also normalises the hidden states; the others get them normalised.
        let (norm, kept) = if part == 0 {
            (cost::norm(width) + cost::centring(width, self.form.form), 0)
        } else {
            (Cost::default(), width)
        };
        // The rows of a tied head count as parameters of the embedding.
        let (rows, is_own) = (width * ids, u64::from(!self.form.is_tied));
        let norms = whole.parameters.saturating_sub(is_own * width * self.form.vocabulary as u64);
        let count = LayerCount {
            parameters: is_own * rows + if part == 0 { norms } else { 0 },
            products: predictions * rows,
        };
        let logits = Cost {
            elements: LOSS_PASSES * ids,
            // The input of the product, the logits with the tanh of bounded ones, and the statistics before
            // and after the part.
            kept: kept + self.form.cap.map_or(ids, |_| 2 * ids) + 2 * statistics,
            ..Cost::default()
        };
        let outputs = if part + 1 == self.parts { statistics } else { width + statistics };
        let ids = u64::from(self.form.further.needs_ids());
        let path = format!("lm_head {}/{}", part + 1, self.parts);
        let cost = (norm + logits).for_each_of(predictions);
        let layer = cost.layer(count, path, "head part", tokens, predictions * outputs + ids);
        LayerDesc { copied: rows - is_own * rows, ..layer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(vocabulary: usize) -> HeadForm {
        HeadForm::new(["model.norm", "model.embed_tokens"], NormForm::usual(1e-5), [vocabulary, 8], false)
    }

    /// Returns the three parts of a head with so many parameters, for rows of 5 tokens.
    fn parts_of(form: HeadForm, parameters: u64) -> Vec<LayerDesc> {
        let head = LayerDesc {
            path: "lm_head".to_owned(),
            kind: "head".to_owned(),
            parameters,
            weight: 0,
            activation_bytes: 0,
            output_bytes: 0,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        };
        let cut = CutHead::new(form, 3).expect("every part has a token");
        cut.describe(ModelDesc { layers: vec![head] }, 5).layers
    }

    #[test]
    fn the_parts_are_the_whole_head() {
        let layers = parts_of(form(10), 8 + 80);
        let numbers = |number: fn(&LayerDesc) -> u64| layers.iter().map(number).collect::<Vec<_>>();
        assert_eq!(numbers(|layer| layer.parameters), [8 + 32, 32, 16]);
        assert_eq!(numbers(|layer| layer.output_bytes), [200, 200, 40]);
        assert_eq!(layers[1].path, "lm_head 2/3");
        let cut = CutHead::new(form(10), 3).expect("every part has a token");
        assert_eq!((cut.ids(0), cut.ids(2)), (0..4, 8..10));
    }

    #[test]
    fn each_prediction_costs_as_much_as_the_first() {
        let parts = |depth| {
            let further = FurtherPredictions { depth, loss_weight: 1.0, bos_token_id: None };
            parts_of(HeadForm { further, ..form(10) }, (1 + depth as u64) * 8 + 80)
        };
        for (part, (one, three)) in parts(0).iter().zip(&parts(2)).enumerate() {
            let numbers = |layer: &LayerDesc| {
                [layer.weight, layer.activation_bytes, layer.output_bytes, layer.products]
            };
            assert_eq!(numbers(three), numbers(one).map(|number| 3 * number));
            // Each has a norm of its own, and all have one matrix.
            let norms = if part == 0 { 2 * 8 } else { 0 };
            assert_eq!(three.parameters, one.parameters + norms);
        }
    }

    #[test]
    fn the_table_of_a_tied_head_counts_with_the_embedding() {
        let tied = HeadForm { is_tied: true, ..form(10) };
        let numbers = parts_of(tied, 8).into_iter().map(|layer| (layer.parameters, layer.copied));
        assert_eq!(numbers.collect::<Vec<_>>(), [(8, 32), (0, 32), (0, 16)]);
        assert_eq!(CutHead::new(tied, 3).map(|cut| cut.table_parts()).ok(), Some(3));
    }

    #[test]
    fn bounded_logits_are_kept_twice() {
        let kept = |cap| parts_of(HeadForm { cap, ..form(10) }, 8 + 80)[1].activation_bytes;
        // 5 tokens and 4 ids in single precision.
        assert_eq!(kept(Some(30.0)) - kept(None), 5 * 4 * 4);
    }

    #[test]
    fn every_part_has_a_token() {
        assert!(CutHead::new(form(10), 10).is_ok() && CutHead::new(form(10), 5).is_ok());
        for parts in [0, 7, 11] {
            let error = CutHead::new(form(10), parts).expect_err("a part without a token").to_string();
            assert!(error.contains(&format!("{parts} parts of a vocabulary of 10")), "{error}");
        }
    }
}

//! Samples tokens from a model.
//!
//! ```
//! use burn::tensor::Device;
//! use pipewright_models::ModelFamily;
//! use pipewright_models::decoder::DecoderConfig;
//! use pipewright_models::generation::{Request, Sampling, generate};
//! use pipewright_models::llama::LlamaConfig;
//!
//! let config = LlamaConfig::from(DecoderConfig::new(256, 4));
//! let model = config.init_stage(0..4, 42, Device::flex())?;
//! let request = Request { prompt: &[116, 111], tokens: 3, ..Request::default() };
//! let found = generate(&model, &request, &mut |_token| {})?;
//! assert_eq!(found.tokens.len(), 3);
//!
//! let greedy = Request { sampling: Sampling { temperature: 0.0, ..Sampling::default() }, ..request };
//! let uncached = Request { uses_cache: false, ..greedy };
//! let [with, without] = [greedy, uncached].map(|request| generate(&model, &request, &mut |_token| {}));
//! assert_eq!(with?.tokens, without?.tokens);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashSet;

use pipewright::tensor::BoundaryError;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use thiserror::Error;

use crate::error::SplitModel;
use crate::generation_stage::{GenerationStage, StageRow};

/// The tokens to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The tokens that the generated ones follow.
    pub prompt: &'a [u32],
    /// The number of tokens to generate.
    pub tokens: usize,
    /// The tokens that end the generation. They are not part of the result.
    pub ends: &'a [u32],
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The longest sequence that the model knows positions for, prompt included.
    pub longest: Option<usize>,
    /// Whether to use a cache if the family has one. Otherwise each token computes all earlier ones again.
    pub uses_cache: bool,
}

impl Default for Request<'_> {
    /// No prompt, no tokens, and a cache.
    fn default() -> Self {
        let sampling = Sampling::default();
        Self { prompt: &[], tokens: 0, ends: &[], sampling, longest: None, uses_cache: true }
    }
}

/// How tokens are chosen from the model's probabilities. The settings have their effects in this order:
/// penalty, temperature, top-k, top-p, as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The logit of each token of the prompt or the text so far is divided by this if it is positive, and
    /// multiplied otherwise (Keskar et al., 2019). Above 1, tokens are repeated less; 1 has no effect.
    pub repetition_penalty: f64,
    /// Logits are divided by this. 0 always takes the most probable token; of equal ones the first.
    pub temperature: f64,
    /// The number of most probable tokens that count; 0 for all. Of equal tokens the first ones count.
    pub top_k: usize,
    /// Only the most probable tokens count that together have at least this probability (Holtzman et al.,
    /// 2020).
    pub top_p: f64,
    /// The seed of the choice.
    pub seed: u64,
}

impl Default for Sampling {
    /// The model's own probabilities, and seed 0.
    fn default() -> Self {
        Self { repetition_penalty: 1.0, temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// The tokens that were generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The tokens, without the prompt and without a token that ends the generation.
    pub tokens: Vec<u32>,
    /// Whether a token ended the generation.
    pub is_ended: bool,
    /// Whether a cache was used.
    pub is_cached: bool,
}

/// Why no tokens can be generated.
#[derive(Clone, PartialEq, Error)]
pub enum GenerateError {
    /// The prompt has no tokens.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// The sequence would be longer than the model knows positions for.
    #[error(
        "{prompt} tokens of the prompt and {tokens} more are above the {longest} positions of the model \
         (`max_position_embeddings`): ask for fewer tokens or give a shorter prompt"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        tokens: usize,
        /// Positions of the model.
        longest: usize,
    },
    /// A setting of the sampling is out of range.
    #[error("the {what} is {value}: give {range}")]
    Sampling {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: f64,
        /// The values that it may have.
        range: &'static str,
    },
    /// The model has shards of its parameters.
    #[error(transparent)]
    Split(#[from] SplitModel),
    /// The stage does not have the model's head.
    #[error("the stage does not have the head of the model: give a stage with all layers")]
    NoHead,
    /// The stage does not take tokens, or does not make logits of them.
    #[error("the stage does not have all layers of the model")]
    Part(#[from] BoundaryError),
    /// A logit is infinite or not a number.
    #[error(
        "the model's output after {tokens} tokens is not finite, because its parameters are not finite or overflow: \
         take an earlier checkpoint, or another model"
    )]
    NotFinite {
        /// Tokens so far, with the prompt.
        tokens: usize,
    },
}

pipewright_schedule::message_as_debug!(GenerateError);

/// Generates tokens one by one, and passes each to `each` at once.
///
/// # Errors
/// When the request does not fit the model, the stage has shards of its parameters or not all layers, or its
/// output is not finite.
///
/// # Panics
/// When the stage does not have the embedding, or a token of the prompt is outside the vocabulary.
pub fn generate(
    model: &dyn GenerationStage,
    request: &Request<'_>,
    each: &mut dyn FnMut(u32),
) -> Result<Generated, GenerateError> {
    let mut text = GrowingText::new(*request)?;
    model.require_whole()?;
    if !model.has_head() {
        return Err(GenerateError::NoHead);
    }
    let mut row = StageRow::new(model, request.uses_cache);
    while let Some(tokens) = text.unknown_tokens() {
        let logits = row.append(tokens)?.last_logits()?;
        text.choose(logits)?.into_iter().for_each(&mut *each);
    }
    Ok(text.finish(row.has_cache()))
}

/// A text that gets one token after the other.
pub(crate) struct GrowingText<'a> {
    request: Request<'a>,
    random: ChaCha8Rng,
    /// The prompt and the tokens after it.
    tokens: Vec<u32>,
    /// The number of tokens that the model has computed.
    known: usize,
    is_ended: bool,
}

impl<'a> GrowingText<'a> {
    /// Returns a text with the prompt alone.
    ///
    /// # Errors
    /// When the request does not fit the model.
    pub(crate) fn new(request: Request<'a>) -> Result<Self, GenerateError> {
        check(&request)?;
        let random = ChaCha8Rng::seed_from_u64(request.sampling.seed);
        Ok(Self { request, random, tokens: request.prompt.to_vec(), known: 0, is_ended: false })
    }

    /// Returns the tokens that the model computes next; `None` if the text is complete.
    pub(crate) fn unknown_tokens(&self) -> Option<&[u32]> {
        let end = self.request.prompt.len().saturating_add(self.request.tokens);
        (self.tokens.len() < end && !self.is_ended).then(|| &self.tokens[self.known..])
    }

    /// Records that the model has computed the first `known` tokens of the prompt.
    pub(crate) fn skip(&mut self, known: usize) {
        self.known = known;
    }

    /// Returns the tokens that the model has computed.
    pub(crate) fn known_tokens(&self) -> &[u32] {
        &self.tokens[..self.known]
    }

    /// Chooses the next token by the logits after the tokens so far; `None` if it ends the text.
    ///
    /// # Errors
    /// When a logit is not finite.
    pub(crate) fn choose(&mut self, mut logits: Vec<f32>) -> Result<Option<u32>, GenerateError> {
        self.known = self.tokens.len();
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(GenerateError::NotFinite { tokens: self.known });
        }
        let Request { sampling, ends, .. } = self.request;
        sampling.penalize(&mut logits, &self.tokens);
        let token = sampling.choose(&logits, &mut self.random);
        self.is_ended = ends.contains(&token);
        if self.is_ended {
            return Ok(None);
        }
        self.tokens.push(token);
        Ok(Some(token))
    }

    /// Returns the tokens after the prompt. `has_cache` says whether the model has a cache.
    pub(crate) fn finish(mut self, has_cache: bool) -> Generated {
        let tokens = self.tokens.split_off(self.request.prompt.len());
        let is_cached = has_cache && self.request.uses_cache;
        Generated { tokens, is_ended: self.is_ended, is_cached }
    }
}

fn check(request: &Request<'_>) -> Result<(), GenerateError> {
    let Request { tokens, sampling, longest, .. } = *request;
    let Sampling { repetition_penalty, temperature, top_p, .. } = sampling;
    let prompt = request.prompt.len();
    if prompt == 0 {
        return Err(GenerateError::EmptyPrompt);
    }
    if let Some(longest) = longest.filter(|longest| prompt.saturating_add(tokens) > *longest) {
        return Err(GenerateError::TooLong { prompt, tokens, longest });
    }
    let refuse = |what, value, range| Err(GenerateError::Sampling { what, value, range });
    if !(temperature.is_finite() && temperature >= 0.0) {
        return refuse("temperature", temperature, "a finite number, 0 or above");
    }
    // Single precision holds logits that are multiplied by such numbers.
    if !(1e-3..=1e3).contains(&repetition_penalty) {
        return refuse("repetition penalty", repetition_penalty, "a number from 0.001 to 1000");
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return refuse("top-p", top_p, "a number above 0 and at most 1");
    }
    Ok(())
}

impl Sampling {
    /// Lowers the logits of the tokens so far. Each counts once, however often it occurs.
    fn penalize(&self, logits: &mut [f32], tokens: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let seen: HashSet<u32> = tokens.iter().copied().collect();
        for token in seen {
            let logit = &mut logits[token as usize];
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }

    /// Chooses a token by its logit. There is at least one, and all are finite.
    fn choose(&self, logits: &[f32], random: &mut impl Rng) -> u32 {
        let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let best = best.expect("a vocabulary has tokens");
        if self.temperature == 0.0 {
            return best as u32;
        }
        let largest = f64::from(logits[best]);
        let weight = |logit: f32| libm::exp((f64::from(logit) - largest) / self.temperature);
        let mut candidates: Vec<(usize, f64)> =
            logits.iter().map(|&logit| weight(logit)).enumerate().collect();
        let keeps_k = 0 < self.top_k && self.top_k < candidates.len();
        if keeps_k || self.top_p < 1.0 {
            // The sort is stable: of equal candidates the first counts.
            candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
        }
        if keeps_k {
            candidates.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            keep_most_probable(&mut candidates, self.top_p);
        }
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        // 53 bits are all that a number below 1 has.
        let mut left = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for &(token, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return token as u32;
            }
        }
        // Rounding may leave a rest.
        best as u32
    }
}

/// Keeps the smallest number of candidates that together have the share `top_p`. They are sorted, the most
/// probable first.
fn keep_most_probable(candidates: &mut Vec<(usize, f64)>, top_p: f64) {
    let wanted = top_p * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut sum = 0.0;
    let enough = candidates.iter().position(|(_, weight)| {
        sum += weight;
        sum >= wanted
    });
    candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor, TensorData};
    use pipewright::tensor::{Values, pack};

    use super::*;
    use crate::generation_stage::StageCache;

    /// Draws many tokens, and returns the share of each.
    fn shares(logits: &[f32], sampling: Sampling) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut random = ChaCha8Rng::seed_from_u64(sampling.seed);
        let mut counts = vec![0; logits.len()];
        (0..DRAWS).for_each(|_| counts[sampling.choose(logits, &mut random) as usize] += 1);
        counts.into_iter().map(|count: usize| count as f64 / DRAWS as f64).collect()
    }

    fn check(sampling: Sampling, expected: &[f64]) {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln).into();
        let found = shares(&logits, sampling);
        let is_near = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 0.015);
        assert!(is_near, "{sampling:?}: {found:?}, not {expected:?}");
    }

    #[test]
    fn tokens_have_their_probabilities() {
        let plain = Sampling::default();
        check(plain, &[0.5, 0.25, 0.125, 0.125]);
        check(Sampling { temperature: 0.5, ..plain }, &[16.0 / 22.0, 4.0 / 22.0, 1.0 / 22.0, 1.0 / 22.0]);
        check(Sampling { top_p: 0.6, ..plain }, &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
        check(Sampling { top_p: 0.5, seed: 3, ..plain }, &[1.0, 0.0, 0.0, 0.0]);
        check(Sampling { temperature: 0.0, ..plain }, &[1.0, 0.0, 0.0, 0.0]);
        check(Sampling { top_k: 1, ..plain }, &[1.0, 0.0, 0.0, 0.0]);
        // If two tokens are equal, the first one counts.
        check(Sampling { top_k: 3, ..plain }, &[4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, 0.0]);
        check(Sampling { top_k: 9, ..plain }, &[0.5, 0.25, 0.125, 0.125]);
        // The share counts among the three tokens.
        check(Sampling { top_k: 3, top_p: 0.8, ..plain }, &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
        check(Sampling { temperature: 1e-300, ..plain }, &[1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn of_equal_logits_the_first_is_the_best() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let mut random = ChaCha8Rng::seed_from_u64(0);
        assert_eq!(greedy.choose(&[-1.0, 2.0, 2.0, -3.0], &mut random), 1);
    }

    #[test]
    fn tokens_so_far_are_penalized_once() {
        let penalized = |repetition_penalty, tokens: &[u32]| {
            let mut logits = [2.0, -2.0, 0.0, 1.0];
            Sampling { repetition_penalty, ..Sampling::default() }.penalize(&mut logits, tokens);
            logits
        };
        assert_eq!(penalized(2.0, &[0, 1, 0, 2]), [1.0, -4.0, 0.0, 1.0]);
        assert_eq!(penalized(0.5, &[3, 1]), [2.0, -1.0, 0.0, 2.0]);
        assert_eq!(penalized(1.0, &[0, 1]), [2.0, -2.0, 0.0, 1.0]);
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let request = Request { prompt: &[3], tokens: 5, sampling, ..Request::default() };
        // The model repeats the token after three others. The penalty leaves 4.5 of its logit, which is still
        // the largest.
        assert_eq!(found(request, 0.0), Ok((vec![1, 2, 3, 0, 1], false)));
        // Added to all logits, 20 makes 14.5 of it, and 20 of a token that was not seen.
        let strong = Request { tokens: 3, ..request };
        assert_eq!(found(strong, 20.0), Ok((vec![1, 2, 0], false)));
    }

    /// Predicts a fixed token after each token.
    struct Fixed(Vec<f32>);

    impl GenerationStage for Fixed {
        fn parameters(&self) -> usize {
            0
        }

        fn device(&self) -> Device {
            Device::flex()
        }

        fn has_head(&self) -> bool {
            true
        }

        fn require_whole(&self) -> Result<(), SplitModel> {
            Ok(())
        }

        fn compute(&self, input: Values) -> Result<Values, BoundaryError> {
            let mut logits = [0.0; 4];
            logits[input[0].shape()[1] % 4] = 9.0;
            let logits: Vec<f32> = logits.iter().zip(&self.0).map(|(logit, added)| logit + added).collect();
            let data = TensorData::new(logits, [1, 1, 4]);
            Ok(pack(Tensor::<3>::from_data(data, &Device::flex())))
        }

        fn cache(&self) -> Option<Box<dyn StageCache + '_>> {
            None
        }
    }

    fn found(request: Request<'_>, added: f32) -> Result<(Vec<u32>, bool), String> {
        let sampling = Sampling { temperature: 0.0, ..request.sampling };
        let mut seen = Vec::new();
        let model = Fixed(vec![added; 4]);
        let generated = generate(&model, &Request { sampling, ..request }, &mut |token| seen.push(token));
        let generated = generated.map_err(|error| error.to_string())?;
        assert_eq!(generated.tokens, seen, "each token is passed on");
        Ok((generated.tokens, generated.is_ended))
    }

    #[test]
    fn a_token_may_end_the_generation() {
        let request = Request { prompt: &[3], tokens: 5, ..Request::default() };
        assert_eq!(found(request, 0.0), Ok((vec![1, 2, 3, 0, 1], false)));
        assert_eq!(found(Request { ends: &[0, 7], ..request }, 0.0), Ok((vec![1, 2, 3], true)));
        assert_eq!(found(Request { tokens: 0, ..request }, 0.0), Ok((vec![], false)));
        let unlimited = Request { tokens: usize::MAX, ends: &[0], ..request };
        assert_eq!(found(unlimited, 0.0), Ok((vec![1, 2, 3], true)));
    }

    #[test]
    fn bad_requests() {
        let request = Request { prompt: &[3], tokens: 5, ..Request::default() };
        let refused = |request, added, expected: &str| {
            let error = found(request, added).expect_err(expected);
            assert!(error.starts_with(expected), "{error}");
        };
        refused(Request { prompt: &[], ..request }, 0.0, "the prompt is empty");
        let longest = "1 tokens of the prompt and 5 more are above the 5 positions of the model";
        refused(Request { longest: Some(5), ..request }, 0.0, longest);
        assert!(found(Request { longest: Some(6), ..request }, 0.0).is_ok());
        refused(request, f32::NAN, "the model's output after 1 tokens is not finite");
        refused(request, f32::INFINITY, "the model's output after 1 tokens is not finite");
        let sampling = Sampling { top_p: 0.0, ..Sampling::default() };
        refused(Request { sampling, ..request }, 0.0, "the top-p is 0: give");
        for repetition_penalty in [0.0, -1.0, 1e9, f64::NAN] {
            let sampling = Sampling { repetition_penalty, ..Sampling::default() };
            refused(Request { sampling, ..request }, 0.0, "the repetition penalty is ");
        }
        let generate_at = |temperature| {
            let sampling = Sampling { temperature, ..Sampling::default() };
            generate(&Fixed(vec![0.0; 4]), &Request { sampling, ..request }, &mut |_| {}).map(drop)
        };
        for temperature in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(generate_at(temperature), Err(GenerateError::Sampling { .. })));
        }
    }
}

//! Tests of ranks whose stages are functions: ranks compute side by side, and failures have a place.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

use burn::tensor::{Int, Tensor, TensorData};
use pipewright::failure::Cause;
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use super::*;
use crate::ModelFamily;
use crate::decoder::DecoderConfig;
use crate::error::ModelError;
use crate::error::SplitModel;
use crate::generation::{GenerateError, Sampling};
use crate::generation_stage::StageCache;
use crate::llama::LlamaConfig;
use crate::model_config::ModelConfig;

/// Computes a stage from its input `[1, tokens]`.
type Compute = Box<dyn Fn(Tensor<2, Int>) -> Values + Send + Sync>;

struct Stage(Arc<Compute>);

impl GenerationStage for Stage {
    fn parameters(&self) -> usize {
        7
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
        Ok((self.0)(unpack(input)?))
    }

    fn cache(&self) -> Option<Box<dyn StageCache + '_>> {
        None
    }
}

/// A stage whose cache counts tokens.
struct CountingStage {
    is_last: bool,
    can_be_shortened: bool,
}

impl GenerationStage for CountingStage {
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
        CountingCache { stage: self, tokens: 0 }.extend(input, 0)
    }

    fn cache(&self) -> Option<Box<dyn StageCache + '_>> {
        Some(Box::new(CountingCache { stage: self, tokens: 0 }))
    }
}

struct CountingCache<'a> {
    stage: &'a CountingStage,
    tokens: usize,
}

impl StageCache for CountingCache<'_> {
    /// The most likely token is the number of tokens that are computed.
    fn extend(&mut self, input: Values, first: usize) -> Result<Values, BoundaryError> {
        let input: Tensor<2, Int> = unpack(input)?;
        let count = input.dims()[1];
        assert!(first == 0 || first == self.tokens, "{first} after {}", self.tokens);
        self.tokens = first + count;
        if !self.stage.is_last {
            return Ok(pack(input));
        }
        let mut logits = vec![0f32; 16];
        logits[count] = 9.0;
        Ok(pack(Tensor::<3>::from_data(TensorData::new(logits, [1, 1, 16]), &Device::flex())))
    }

    fn can_be_shortened(&self) -> bool {
        self.stage.can_be_shortened
    }

    fn shorten(&mut self, tokens: usize) {
        assert!(self.stage.can_be_shortened && tokens < self.tokens);
        self.tokens = tokens;
    }
}

/// Returns logits for which the token after a row is its length, modulo 5.
fn length(input: &Tensor<2, Int>) -> Values {
    let mut logits = vec![0f32; 5];
    logits[input.dims()[1] % 5] = 9.0;
    pack(Tensor::<3>::from_data(TensorData::new(logits, [1, 1, 5]), &Device::flex()))
}

/// Starts ranks with these functions. A rank without a function cannot be made.
fn start(stages: Vec<Option<Compute>>, deadline: Duration) -> Result<GenerationRanks, RanksError> {
    let places = (0..stages.len()).map(|rank| RankStage { layers: rank..rank + 1, device: Device::flex() });
    let stages: Vec<Option<Arc<Compute>>> = stages.into_iter().map(|stage| stage.map(Arc::new)).collect();
    let config = RanksConfig::new(places.collect(), deadline);
    GenerationRanks::start(&config, move |layers, _place| match &stages[layers.start] {
        Some(compute) => Ok(Box::new(Stage(Arc::clone(compute)))),
        None => Err(ModelConfig::from_json(serde_json::Value::Null).expect_err("no model").into()),
    })
}

const LONG: Duration = Duration::from_secs(60);
const GREEDY: Sampling =
    Sampling { repetition_penalty: 1.0, temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

fn request(prompt: &[u32]) -> Request<'_> {
    Request { prompt, tokens: 3, sampling: GREEDY, ..Request::default() }
}

fn error(ranks: Result<GenerationRanks, RanksError>) -> String {
    let generated = ranks.and_then(|mut ranks| ranks.generate(&[request(&[1])], &mut |_, _| {}));
    with_causes(&generated.expect_err("a rank fails"))
}

#[test]
fn texts_are_in_the_order_of_their_requests() {
    let ranks = start(vec![Some(Box::new(pack)), Some(Box::new(|input| length(&input)))], LONG);
    let mut ranks = ranks.expect("it starts");
    assert_eq!(ranks.parameters().collect::<Vec<_>>(), [7, 7]);
    let requests = [&[1][..], &[1, 2], &[1, 2, 3], &[1, 2, 3, 4], &[0; 9]].map(request);
    for ends in [&[][..], &[4]] {
        let requests = requests.map(|request| Request { ends, ..request });
        let mut seen = vec![Vec::new(); 5];
        let texts = ranks.generate(&requests, &mut |index, token| seen[index].push(token));
        let texts = texts.expect("it generates");
        let tokens: Vec<Vec<u32>> = texts.iter().map(|text| text.tokens.clone()).collect();
        assert_eq!(seen, tokens);
        let expected: [&[u32]; 5] = match ends {
            [] => [&[1, 2, 3], &[2, 3, 4], &[3, 4, 0], &[4, 0, 1], &[4, 0, 1]],
            _ => [&[1, 2, 3], &[2, 3], &[3], &[], &[]],
        };
        assert_eq!(tokens, expected);
    }
    let none = Request { tokens: 0, ..request(&[1]) };
    let nothing = ranks.generate(&[none], &mut |_, _| {}).expect("nothing to do");
    assert!(nothing[0].tokens.is_empty());
}

/// Each answer says how many tokens the ranks have computed for it.
#[test]
fn a_text_continues_with_the_tokens_that_its_prompt_adds() {
    for (ranks, can_be_shortened) in [(1, true), (1, false), (3, true), (3, false)] {
        let stages = (0..ranks).map(|rank| RankStage { layers: rank..rank + 1, device: Device::flex() });
        let config = RanksConfig::new(stages.collect(), LONG);
        let started = GenerationRanks::start(&config, move |layers, _place| {
            // The last rank alone decides what all caches can do.
            let is_last = layers.end == ranks;
            Ok(Box::new(CountingStage { is_last, can_be_shortened: can_be_shortened || !is_last }))
        });
        let mut group = started.expect("it starts");
        let mut answer = |prompt: &[u32], uses_cache: bool| {
            let request = Request { tokens: 2, uses_cache, ..request(prompt) };
            let mut seen = Vec::new();
            let found = group.answer(&request, &mut |token| seen.push(token)).expect("it generates");
            assert_eq!((&found.tokens, found.is_cached), (&seen, uses_cache));
            // Other texts do not disturb the one that is kept.
            group.generate(&[request, request], &mut |_, _| {}).expect("it generates");
            seen
        };
        assert_eq!(answer(&[1, 2, 3], true), [3, 1]);
        // The last token of an answer is not computed yet.
        assert_eq!(answer(&[1, 2, 3, 3, 1, 7], true), [2, 1]);
        // Two tokens of seven remain.
        let of_shorter = if can_be_shortened { [2, 1] } else { [4, 1] };
        assert_eq!(answer(&[1, 2, 9, 9], true), of_shorter);
        // The logits after the last token of the same prompt are computed again.
        let of_same = if can_be_shortened { [1, 1] } else { [4, 1] };
        assert_eq!(answer(&[1, 2, 9, 9], true), of_same);
        assert_eq!(answer(&[1, 2, 9, 9], false), [4, 5]);
        assert_eq!(answer(&[1, 2, 9, 9], true), [4, 1]);
        assert_eq!(answer(&[5, 2, 9, 9], true), [4, 1]);
    }
}

/// The second rank computes the first text while the first rank begins the second one.
#[test]
fn ranks_compute_side_by_side() {
    let (begun, beginnings) = channel();
    let (begun, beginnings) = (Mutex::new(begun), Mutex::new(Some(beginnings)));
    let first = move |input| {
        // The receiver is dropped after two texts, so later sends fail.
        let _ = begun.lock().expect("no panic").send(());
        pack(input)
    };
    let second = move |input: Tensor<2, Int>| {
        if let Some(beginnings) = beginnings.lock().expect("no panic").take() {
            (0..2)
                .for_each(|_| beginnings.recv_timeout(LONG).expect("the first rank begins the second text"));
        }
        length(&input)
    };
    let mut ranks = start(vec![Some(Box::new(first)), Some(Box::new(second))], LONG).expect("it starts");
    let texts = ranks.generate(&[request(&[1]), request(&[2])], &mut |_, _| {}).expect("it generates");
    assert_eq!(texts[0].tokens, texts[1].tokens);
}

#[test]
fn a_failure_names_its_rank() {
    let found = error(start(vec![Some(Box::new(pack)), None], LONG));
    let layers = "rank 1: the layers from 1 up to, but not including, 2 cannot be loaded: ";
    assert!(found.starts_with(layers), "{found}");
    let panics: Compute = Box::new(|_| panic!("out of tokens"));
    assert_eq!(error(start(vec![Some(panics), None], LONG)).split(':').next(), Some("rank 1"));
    let panics: Compute = Box::new(|_| panic!("out of tokens"));
    let found = error(start(vec![Some(panics), Some(Box::new(|input| length(&input)))], LONG));
    assert_eq!(found, "rank 0 panicked: out of tokens");
    // The second stage takes ids, not logits.
    let twice = || -> Option<Compute> { Some(Box::new(|input| length(&input))) };
    let found = error(start(vec![twice(), twice()], LONG));
    assert!(
        found.starts_with("rank 1: the stage does not take the result of the previous rank: "),
        "{found}"
    );
}

#[test]
fn a_failure_is_recorded_with_its_rank_and_cause() {
    let panics: Compute = Box::new(|_| panic!("out of tokens"));
    let mut ranks = start(vec![Some(Box::new(pack)), Some(panics)], LONG).expect("it starts");
    ranks.generate(&[request(&[1])], &mut |_, _| {}).expect_err("rank 1 panics");
    let recorded = ranks.link.failure().expect("a failure");
    assert_eq!(recorded.rank, WorldRank::new(1));
    assert!(matches!(recorded.cause, Cause::Panic { .. }), "{}", recorded.cause);
}

#[test]
fn a_rank_that_does_not_respond_is_not_waited_for() {
    let (end, ended) = channel::<()>();
    let ended = Mutex::new(ended);
    let waits: Compute = Box::new(move |input| {
        // Ends when the test drops the sender.
        let _ = ended.lock().expect("no panic").recv();
        length(&input)
    });
    let mut ranks = start(vec![Some(Box::new(pack)), Some(waits)], LONG).expect("it starts");
    ranks.deadline = Duration::from_millis(200);
    let found = ranks.generate(&[request(&[1])], &mut |_, _| {}).expect_err("rank 1 waits").to_string();
    assert!(found.starts_with("no rank has made progress for 0.2 s, and rank 1 still computes: "), "{found}");
    let again = ranks.generate(&[request(&[1])], &mut |_, _| {}).expect_err("the ranks have ended");
    assert!(matches!(again, RanksError::Ended), "{again}");
    drop(end);
}

#[test]
fn a_request_that_does_not_fit_is_named() {
    let mut ranks = start(vec![Some(Box::new(|input| length(&input)))], LONG).expect("it starts");
    let error = ranks.generate(&[request(&[1]), request(&[])], &mut |_, _| {}).expect_err("an empty prompt");
    assert!(matches!(error, RanksError::Request { index: 1, source: GenerateError::EmptyPrompt }), "{error}");
}

#[test]
fn ranks_without_the_head_of_the_model_are_refused() {
    let config = LlamaConfig::from(DecoderConfig::new(16, 4));
    let stages = [0..2, 2..3].map(|layers| RankStage { layers, device: Device::flex() });
    let make = move |layers, place: &Place| -> Result<Box<dyn GenerationStage>, ModelError> {
        Ok(Box::new(config.init_stage(layers, 1, place.clone())?))
    };
    let ranks = RanksConfig::new(stages.into(), LONG);
    let error = GenerationRanks::start(&ranks, make).expect_err("layer 3 has the head");
    let expected = "rank 1: the last stage does not have the head of the model: give it the last layers";
    assert_eq!((error.rank(), error.to_string().as_str()), (Some(1), expected));
}

#[test]
fn ranks_that_do_not_fit_together_are_refused() {
    let refused = |world: u32, tensor_ranks: u32, expected: &str| {
        let stages = [0..1, 1..2, 2..3].map(|layers| RankStage { layers, device: Device::flex() });
        let config = RanksConfig { tensor_ranks, ..RanksConfig::new(stages.into(), LONG) };
        let make = |_layers, _place: &Place| -> Result<Box<dyn GenerationStage>, ModelError> {
            Ok(Box::new(Stage(Arc::new(Box::new(pack)))))
        };
        let started = GenerationRanks::start_in(World::local(world), &config, make);
        assert_eq!(started.expect_err(expected).to_string(), expected);
    };
    refused(2, 1, "the world has 2 ranks, and the model is distributed over 3: make them equal");
    refused(3, 2, "3 ranks are not a multiple of 2 tensor ranks: give each stage as many");
}

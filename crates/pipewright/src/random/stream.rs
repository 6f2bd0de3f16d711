//! The random numbers of a layer, which depend on its name and the microbatch.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::ids::StepNumber;

/// The values that determine a layer's random numbers, together with the layer's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamKey {
    /// The seed of the run ([`PipelineConfig::seed`](crate::pipeline::PipelineConfig::seed)).
    pub seed: u64,
    /// The step, counted from 1.
    pub step: StepNumber,
    /// The microbatch, counted from 0 over all replicas.
    pub microbatch: u64,
}

impl StreamKey {
    /// Hashes the key with the name of a layer.
    pub(super) fn hash_with(self, name: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for number in [self.seed, self.step.get(), self.microbatch] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(name.as_bytes());
        hasher.finalize()
    }
}

/// The random numbers of one layer for one microbatch of one step.
#[derive(Clone, Debug)]
pub struct RandomStream {
    /// `None` in an evaluation, which uses no random numbers.
    generator: Option<ChaCha8Rng>,
}

impl RandomStream {
    /// Returns the stream of the layer `name`. Layers of different names draw independent numbers.
    pub fn new(key: StreamKey, name: &str) -> Self {
        Self { generator: Some(ChaCha8Rng::from_seed(*key.hash_with(name).as_bytes())) }
    }

    /// Returns the stream of an evaluation. Layers that use random numbers only in training, such as dropout,
    /// are then the identity.
    pub fn evaluation() -> Self {
        Self { generator: None }
    }

    /// Returns whether the forward is part of a training step.
    pub fn is_training(&self) -> bool {
        self.generator.is_some()
    }

    /// Returns the generator itself, for other distributions; `None` in an evaluation.
    pub fn generator(&mut self) -> Option<&mut ChaCha8Rng> {
        self.generator.as_mut()
    }

    /// Draws `count` flags, each `true` with the given probability; all `true` in an evaluation.
    pub(crate) fn flags(&mut self, count: usize, probability: f64) -> Vec<bool> {
        let Some(generator) = &mut self.generator else { return vec![true; count] };
        // A 32-bit draw lies below `threshold` with the probability rounded to a multiple of 2^-32.
        let threshold = (probability.clamp(0.0, 1.0) * 2f64.powi(32)) as u64;
        (0..count).map(|_| u64::from(generator.next_u32()) < threshold).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: StreamKey = StreamKey { seed: 1, step: StepNumber::new(2), microbatch: 3 };

    fn draw(key: StreamKey, name: &str) -> Vec<bool> {
        RandomStream::new(key, name).flags(256, 0.5)
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let first = draw(KEY, "a");
        assert_eq!(first, draw(KEY, "a"));
        let others = [
            draw(StreamKey { seed: 9, ..KEY }, "a"),
            draw(StreamKey { step: StepNumber::new(9), ..KEY }, "a"),
            draw(StreamKey { microbatch: 9, ..KEY }, "a"),
            draw(KEY, "b"),
        ];
        for other in others {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn flags_have_their_probability() {
        for probability in [0.0, 0.1, 0.5, 0.9, 1.0] {
            let flags = RandomStream::new(KEY, "a").flags(100_000, probability);
            let share = flags.iter().filter(|flag| **flag).count() as f64 / 100_000.0;
            assert!((share - probability).abs() < 0.01, "{share} for {probability}");
        }
        assert!(RandomStream::evaluation().flags(100, 0.1).iter().all(|flag| *flag));
    }
}

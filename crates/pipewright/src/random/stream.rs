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

    /// Returns the numbers from `first` on of a sequence that is uniform in `[-1, 1)`, `count` of them; `None` in an
    /// evaluation. The sequence is the same whatever was drawn before, so parts of it may be computed at different
    /// places. The other draws of the stream continue after these numbers.
    pub fn uniform_from(&mut self, first: u64, count: usize) -> Option<Vec<f32>> {
        let generator = self.generator.as_mut()?;
        // Each number is a word of the generator.
        generator.set_word_pos(first.into());
        let number = |word: u32| (word >> 8) as f32 / (1 << 23) as f32 - 1.0;
        Some((0..count).map(|_| number(generator.next_u32())).collect())
    }

    /// Draws `count` flags, each `true` with the given probability; all `true` in an evaluation.
    pub(crate) fn flags(&mut self, count: usize, probability: f64) -> Vec<bool> {
        let Some(generator) = &mut self.generator else { return vec![true; count] };
        // A 32-bit draw lies below `threshold` with the probability rounded to a multiple of 2^-32.
        let threshold = (probability.clamp(0.0, 1.0) * 4_294_967_296.0) as u64;
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
    fn uniform_numbers_are_parts_of_one_sequence() {
        let mut stream = RandomStream::new(KEY, "a");
        let all = stream.uniform_from(0, 10_000).expect("it is training");
        assert_eq!(stream.uniform_from(16, 5).as_deref(), Some(&all[16..21]));
        assert_eq!(RandomStream::new(KEY, "a").uniform_from(9_999, 1).as_deref(), Some(&all[9_999..]));
        assert!(all.iter().all(|number| (-1.0..1.0).contains(number)));
        let moment = |power| all.iter().map(|number| number.powi(power)).sum::<f32>() / 10_000.0;
        assert!(
            moment(1).abs() < 0.02 && (moment(2) - 1.0 / 3.0).abs() < 0.02,
            "{} {}",
            moment(1),
            moment(2)
        );
        assert_eq!(RandomStream::evaluation().uniform_from(0, 1), None);
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

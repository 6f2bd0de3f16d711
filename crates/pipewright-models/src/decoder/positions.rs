//! The rotary positions of sequences of some length.

use pipewright::nn::{RotaryPositions, rotary_frequencies};

use super::config::DecoderConfig;
use super::rope::RopeScaling;

impl DecoderConfig {
    /// Returns the rotary positions of sequences of this length.
    pub(super) fn positions(&self, sequence: usize) -> RotaryPositions {
        let (width, theta) = (self.rotary_width(), self.rope_theta);
        let plain = rotary_frequencies(width, theta);
        let scaled = |scale: &dyn Fn(f64) -> f64| plain.iter().map(|&f| scale(f64::from(f)) as f32).collect();
        let (frequencies, factor): (Vec<f32>, f64) = match &self.rope_scaling {
            None => (plain, 1.0),
            Some(RopeScaling::Linear { factor }) => (scaled(&|frequency| frequency / factor), 1.0),
            Some(RopeScaling::Dynamic { factor }) => {
                let usual = self.max_position_embeddings.unwrap_or(sequence);
                let longer = sequence.max(usual) as f64 / usual as f64;
                let power = width as f64 / (width as f64 - 2.0);
                (rotary_frequencies(width, theta * (factor * longer - (factor - 1.0)).powf(power)), 1.0)
            }
            Some(RopeScaling::Yarn(yarn)) => (yarn.apply(&plain, theta), yarn.attention_factor()),
            Some(RopeScaling::LongRope(long)) => {
                let divided = plain.iter().zip(long.divisors(sequence));
                let frequencies =
                    divided.map(|(&frequency, divisor)| (f64::from(frequency) / divisor) as f32);
                (frequencies.collect(), long.attention_factor(self.max_position_embeddings))
            }
            Some(RopeScaling::Llama3(llama)) => (scaled(&|frequency| llama.apply(frequency)), 1.0),
        };
        RotaryPositions { frequencies: frequencies.into(), factor: factor as f32 }
    }
}

//! The rotary positions of sequences of some length.

use pipewright::nn::{RotaryPositions, rotary_frequencies};
use pipewright_shapes::decoder::{DecoderConfig, RopeScaling};

/// Returns the rotary positions of sequences of this length.
pub(super) fn positions(config: &DecoderConfig, sequence: usize) -> RotaryPositions {
    let (width, theta) = (config.rotary_width(), config.rope_theta);
    let plain = rotary_frequencies(width, theta);
    let scaled = |scale: &dyn Fn(f64) -> f64| plain.iter().map(|&f| scale(f64::from(f)) as f32).collect();
    let (frequencies, factor): (Vec<f32>, f64) = match &config.rope_scaling {
        None => (plain, 1.0),
        Some(RopeScaling::Linear { factor }) => (scaled(&|frequency| frequency / factor), 1.0),
        Some(RopeScaling::Dynamic { factor }) => {
            let usual = config.max_position_embeddings.unwrap_or(sequence);
            let longer = sequence.max(usual) as f64 / usual as f64;
            let power = width as f64 / (width as f64 - 2.0);
            (rotary_frequencies(width, theta * libm::pow(factor * longer - (factor - 1.0), power)), 1.0)
        }
        Some(RopeScaling::Yarn(yarn)) => (yarn.apply(&plain, theta), yarn.attention_factor()),
        Some(RopeScaling::LongRope(long)) => {
            let divided = plain.iter().zip(long.divisors(sequence));
            let frequencies = divided.map(|(&frequency, divisor)| (f64::from(frequency) / divisor) as f32);
            (frequencies.collect(), long.attention_factor(config.max_position_embeddings))
        }
        Some(RopeScaling::Llama3(llama)) => (scaled(&|frequency| llama.apply(frequency)), 1.0),
    };
    RotaryPositions { frequencies: frequencies.into(), factor: factor as f32 }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Checks the frequencies and the factor of heads of 8 elements with these keys in the table of the
    /// positions, at this length of the model and of the sequence.
    fn check(table: Value, [longest, sequence]: [usize; 2], frequencies: [f32; 4], factor: f32) {
        let json = json!({
            "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": longest, "rope_parameters": table.clone()
        });
        let config: DecoderConfig = serde_json::from_value(json).expect("it is valid");
        let positions = positions(&config, sequence);
        let near = |found: f32, expected: f32| (found - expected).abs() <= 2e-6 * expected;
        let found = positions.frequencies.iter().zip(&frequencies);
        assert!(
            found.clone().count() == 4
                && found.clone().all(|(&found, &expected)| near(found, expected))
                && near(positions.factor, factor),
            "{table}: {positions:?}, not {frequencies:?} and {factor}"
        );
        let written = serde_json::to_value(&config).expect("plain data");
        assert_eq!(serde_json::from_value::<DecoderConfig>(written).ok(), Some(config), "{table}");
    }

    /// Returns a table with these keys in addition.
    fn with(mut table: Value, keys: Value) -> Value {
        table.as_object_mut().expect("a table").append(&mut keys.as_object().expect("a table").clone());
        table
    }

    // The numbers are those of `ROPE_INIT_FUNCTIONS` of transformers 5.23, with `rope_theta` 10000 and
    // `head_dim` 8.

    #[test]
    fn linear_dynamic_and_llama3_are_those_of_transformers() {
        let linear = json!({"rope_type": "linear", "factor": 4.0});
        check(linear, [64, 9], [0.25, 0.025, 0.0025, 0.00025], 1.0);
        let dynamic = json!({"rope_type": "dynamic", "factor": 2.0});
        check(dynamic.clone(), [64, 64], [1.0, 0.1, 0.01, 0.001], 1.0);
        check(dynamic, [64, 100], [1.0, 0.077_782_22, 0.006_050_074, 0.000_470_588_25], 1.0);
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128});
        check(llama3, [64, 9], [1.0, 0.042_751_18, 0.001_25, 0.000_125], 1.0);
    }

    #[test]
    fn yarn_is_that_of_transformers() {
        let original = json!({"rope_type": "yarn", "original_max_position_embeddings": 2048});
        let yarn = |keys: Value| with(with(original.clone(), json!({"factor": 4.0})), keys);
        let check_yarn =
            |keys, third, factor| check(yarn(keys), [8192, 9], [1.0, 0.1, third, 0.000_25], factor);
        check_yarn(json!({}), 0.00625, 1.138_629_4);
        check_yarn(json!({"truncate": false}), 0.005_056_971_7, 1.138_629_4);
        check_yarn(
            json!({"truncate": false, "beta_fast": 8.0, "beta_slow": 0.5}),
            0.007_571_214_3,
            1.138_629_4,
        );
        check_yarn(json!({"attention_factor": 0.5}), 0.00625, 0.5);
        check_yarn(json!({"mscale": 0.7, "mscale_all_dim": 1.3}), 0.00625, 0.929_523_5);
        check_yarn(json!({"mscale": 0.7}), 0.00625, 1.138_629_4);
        check_yarn(json!({"mscale": 0.7, "mscale_all_dim": 0.0}), 0.00625, 1.138_629_4);
        check(yarn(json!({"factor": 1.0})), [8192, 9], [1.0, 0.1, 0.01, 0.001], 1.0);
        // Without a factor, it is the ratio of the lengths.
        check(original, [16_384, 9], [1.0, 0.1, 0.005_625, 0.000_125], 1.207_944_2);
    }

    #[test]
    fn longrope_is_that_of_transformers() {
        let long = |keys: Value| {
            let table = json!({"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.5, 3.0, 4.0, 8.0], "original_max_position_embeddings": 16});
            with(table, keys)
        };
        let of_short = [1.0, 0.083_333_336, 0.006_666_667, 0.000_5];
        let of_long = [0.666_666_7, 0.033_333_335, 0.002_5, 0.000_125];
        check(long(json!({})), [64, 16], of_short, 1.224_744_9);
        check(long(json!({})), [64, 17], of_long, 1.224_744_9);
        check(long(json!({"factor": 9.0})), [64, 17], of_long, 1.338_835_8);
        check(long(json!({"attention_factor": 1.25})), [64, 16], of_short, 1.25);
    }
}

//! Random profiles for the tests and the report of the planner, from a seed.

use pipewright_schedule::profile::{
    DeviceProfile, LayerProfile, LinkProfile, NodeProfile, PairProfile, Profile, RankProfile,
};

/// A generator of pseudo-random numbers: SplitMix64.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    /// Returns a number from `low` to `high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        low + (mixed ^ (mixed >> 31)) % (high - low + 1)
    }

    /// Returns a number from 0 to below 1.
    pub(crate) fn share(&mut self) -> f64 {
        self.between(0, 999_999) as f64 / 1e6
    }
}

/// A profile and a size of the pipeline.
pub(crate) struct Instance {
    pub(crate) what: &'static str,
    pub(crate) profile: Profile,
    pub(crate) ranks: u32,
    pub(crate) microbatches: u32,
}

/// Returns the instance of a seed: up to 100 layers on up to 16 ranks, of one of four kinds.
pub(crate) fn random(seed: u64) -> Instance {
    let mut numbers = Numbers(seed);
    let ranks = numbers.between(2, 16) as u32;
    let layers = numbers.between(u64::from(ranks).max(8), 100) as usize;
    let microbatches = ranks * numbers.between(1, 4) as u32 + numbers.between(0, 3) as u32;
    let (what, layers) = match seed % 4 {
        0 => ("random", (0..layers).map(|_| scaled(&mut numbers, 1.0)).collect()),
        1 => ("equal", vec![scaled(&mut Numbers(7), 1.0); layers]),
        2 => ("uneven", (0..layers).map(|_| uneven(&mut numbers)).collect()),
        _ => ("mixed", mixed(&mut numbers, layers)),
    };
    let profile = with_link(layers, &mut numbers);
    Instance { what, profile, ranks, microbatches }
}

/// Returns a heterogeneous model: every fourth layer an expert layer ten times as heavy, a head as heavy as
/// four layers, or half of the layers lighter Mamba layers.
pub(crate) fn heterogeneous(seed: u64) -> Instance {
    let mut numbers = Numbers(seed ^ 0xabcd);
    let ranks = [4, 8, 16][numbers.between(0, 2) as usize];
    let count = numbers.between(u64::from(2 * ranks), 96) as usize;
    let microbatches = ranks * numbers.between(2, 4) as u32;
    let layer = |weight: f64| block("layer", weight);
    let (what, layers): (_, Vec<LayerProfile>) = match seed % 3 {
        0 => ("experts", (0..count).map(|at| layer(if at % 4 == 3 { 10.0 } else { 1.0 })).collect()),
        1 => {
            let heads = (0..count).map(|at| layer(if at + 1 == count { 4.0 } else { 1.0 }));
            ("head", heads.collect())
        }
        _ => ("mamba", (0..count).map(|at| layer(if at % 2 == 0 { 0.45 } else { 1.0 })).collect()),
    };
    let profile = with_link(layers, &mut numbers);
    Instance { what, profile, ranks, microbatches }
}

/// Returns a cluster of 2 to 16 unlike ranks with a model of one of the kinds of [`random`]. Speeds are up to eight
/// times apart. In two of three clusters, memories are up to four times apart, and in one of three also links differ.
pub(crate) fn unlike(seed: u64) -> Instance {
    let mut instance = random(seed);
    let mut numbers = Numbers(seed ^ 0x5eed);
    let Instance { profile, ranks, .. } = &mut instance;
    let fixed: u64 = profile.layers.iter().map(|layer| 4 * layer.parameter_bytes).sum();
    let kept: u64 = profile.layers.iter().map(|layer| layer.activation_bytes).sum();
    let share = fixed / u64::from(*ranks) + kept;
    let rank = |_| RankProfile {
        speed: 0.125 * 8f64.powf(numbers.share()),
        memory_bytes: (!seed.is_multiple_of(3))
            .then(|| (share as f64 * 1.5 * 4f64.powf(numbers.share())) as u64),
        ..RankProfile::default()
    };
    profile.ranks = (0..*ranks).map(rank).collect();
    if seed % 3 == 2 {
        for from in 0..*ranks {
            let to = (from + numbers.between(1, u64::from(*ranks) - 1) as u32) % *ranks;
            let slower = 1.0 + 7.0 * numbers.share();
            let LinkProfile { latency_s, bytes_per_s, .. } = profile.link;
            profile.pairs.push(PairProfile {
                from,
                to,
                latency_s: latency_s * slower,
                bytes_per_s: bytes_per_s / slower,
            });
        }
    }
    instance
}

/// Returns a deep model with memory limits: 126 layers for 64 ranks.
pub(crate) fn deep() -> Instance {
    let mut layers = vec![block("embedding", 0.2)];
    layers.extend(std::iter::repeat_n(block("layer", 1.0), 124));
    layers.push(block("head", 2.0));
    let mut profile = with_link(layers, &mut Numbers(1));
    // Room for two layers with everything, and the activations of about 60 microbatches of two layers.
    let memory = 2 * 4 * 4_000_000 + 60 * 2 * 6_000_000;
    profile.device = Some(DeviceProfile {
        name: "by hand".into(),
        memory_bytes: Some(memory),
        ..DeviceProfile::default()
    });
    Instance { what: "deep", profile, ranks: 64, microbatches: 256 }
}

/// Returns a cluster: a model of 405 billion parameters in 126 layers on 16,384 ranks in nodes of 8. A row
/// has 8,192 tokens of 16,384 channels, and a rank computes 400 TFLOP/s.
pub(crate) fn cluster() -> Instance {
    let layer = LayerProfile {
        forward_s: 0.13,
        input_backward_s: 0.13,
        weight_backward_s: 0.13,
        optimizer_s: 0.03,
        output_bytes: 8192 * 16_384 * 2,
        parameter_bytes: 3_200_000_000 * 4,
        activation_bytes: 17 * 8192 * 16_384 * 2,
        ..block("layer", 1.0)
    };
    let end = |kind: &str, weight: f64| LayerProfile {
        kind: kind.into(),
        forward_s: 0.086 * weight,
        input_backward_s: 0.086 * weight,
        weight_backward_s: 0.086 * weight,
        parameter_bytes: 2_100_000_000 * 4,
        tensor_sums: Some(1),
        ..layer.clone()
    };
    let mut layers = vec![end("embedding", 0.01)];
    layers.extend(std::iter::repeat_n(layer.clone(), 124));
    layers.push(end("head", 1.0));
    let node = Some(NodeProfile { ranks: 8, latency_s: 3e-6, bytes_per_s: 4e11 });
    let device = Some(DeviceProfile { memory_bytes: Some(80 << 30), ..DeviceProfile::default() });
    let profile = Profile { device, node, link: LinkProfile::new(1e-5, 4e10), layers, ..Profile::default() };
    Instance { what: "cluster", profile, ranks: 16_384, microbatches: 2_048 }
}

fn with_link(layers: Vec<LayerProfile>, numbers: &mut Numbers) -> Profile {
    let mean = layers.iter().map(|layer| layer.forward_s).sum::<f64>() / layers.len() as f64;
    let link = LinkProfile::new(mean * 0.02 * numbers.share(), 524_288.0 / (mean * 0.05));
    Profile { link, layers, ..Profile::default() }
}

/// A layer with the costs of an attention block, times `weight`.
pub(crate) fn block(kind: &str, weight: f64) -> LayerProfile {
    LayerProfile {
        kind: kind.to_owned(),
        count: 1,
        forward_s: 1e-3 * weight,
        input_backward_s: 1.1e-3 * weight,
        weight_backward_s: 0.9e-3 * weight,
        backward_s: None,
        recompute_s: None,
        exchange_s: 0.0,
        optimizer_s: 1e-4 * weight,
        output_bytes: 524_288,
        parameter_bytes: (4e6 * weight) as u64,
        activation_bytes: (6e6 * weight) as u64,
        weight_activation_bytes: None,
        norms_bytes: 0,
        norms_s: 0.0,
        feed_forward_bytes: 0,
        feed_forward_s: 0.0,
        temporary_bytes: 0,
        tensor_sums: None,
        optimizer_bytes: None,
        held_bytes: None,
        streamed_bytes: 0,
        read_whole_bytes: [0; 2],
        unstreamed_bytes: 0,
        copy_bytes: None,
        trained_bytes: None,
    }
}

fn scaled(numbers: &mut Numbers, weight: f64) -> LayerProfile {
    block("layer", weight * (0.5 + 1.5 * numbers.share()))
}

fn uneven(numbers: &mut Numbers) -> LayerProfile {
    let mut layer = scaled(numbers, 1.0);
    layer.forward_s *= 0.5 + numbers.share();
    layer.input_backward_s *= 0.5 + numbers.share();
    layer.weight_backward_s *= 0.5 + numbers.share();
    layer.output_bytes = numbers.between(100_000, 1_000_000);
    layer
}

fn mixed(numbers: &mut Numbers, count: usize) -> Vec<LayerProfile> {
    let heavy = 1.0 + 9.0 * numbers.share();
    let every = numbers.between(2, 6) as usize;
    let mut layers: Vec<LayerProfile> =
        (0..count).map(|at| block("layer", if at % every == 0 { heavy } else { 1.0 })).collect();
    layers[0] = block("embedding", 0.3);
    layers[count - 1] = block("head", 1.0 + 5.0 * numbers.share());
    layers
}

//! Writes a profile as a file that people can read and change.

use std::fmt::Write;

use pipewright::profile::{KindFigures, Measured, Quartiles};
use pipewright_schedule::ModelDesc;
use pipewright_schedule::profile::{LayerProfile, PartProfile, Profile};
use pipewright_schedule::recompute::LayerPart;
use pipewright_schedule::words::counted;
use toml::Value;

/// Returns the text of a profile. Measured times have a comment with their spread.
pub(crate) fn profile_text(profile: &Profile, measured: &Measured, layers: &ModelDesc) -> String {
    let mut text = format!(
        "# Measured by `pipewright profile`. Times in seconds, sizes in bytes, for a microbatch of {}.\n\
         # A comment has the number of measurements, and half the distance of their quartiles.\n\n",
        counted(profile.rows, "row")
    );
    let mut line = |key: &str, value: String| {
        writeln!(text, "{key} = {value}").expect("a string takes all text");
    };
    line("rows", profile.rows.to_string());
    if let Some(tokens) = profile.tokens {
        line("tokens", tokens.to_string());
    }
    for (key, bytes) in [("stage_bytes", profile.stage_bytes), ("rank_bytes", profile.rank_bytes)] {
        if bytes > 0 {
            line(key, bytes.to_string());
        }
    }
    if !profile.assumed.is_empty() {
        line("assumed", list(&profile.assumed));
    }
    if let Some(device) = &profile.device {
        line("\n[device]\nname", quoted(&device.name));
        let numbers = [
            ("memory_bytes", device.memory_bytes),
            ("ranks", device.ranks.map(u64::from)),
            ("threads_per_rank", device.threads_per_rank.map(u64::from)),
        ];
        for (key, number) in numbers {
            if let Some(number) = number {
                line(key, number.to_string());
            }
        }
        for (key, text) in [("device", &device.device), ("precision", &device.precision)] {
            if let Some(text) = text {
                line(key, quoted(text));
            }
        }
    }
    line("\n[link]\nlatency_s", seconds(profile.link.latency_s));
    line("bytes_per_s", seconds(profile.link.bytes_per_s));
    if let Some(bandwidth) = profile.link.reduce_bytes_per_s {
        line("reduce_bytes_per_s", seconds(bandwidth));
    }
    if let Some(bandwidth) = profile.link.offload_bytes_per_s {
        line("offload_bytes_per_s", seconds(bandwidth));
    }
    if let Some(bandwidth) = profile.link.read_bytes_per_s {
        line("read_bytes_per_s", seconds(bandwidth));
    }
    if let Some(node) = &profile.node {
        line("\n[node]\nranks", node.ranks.to_string());
        line("latency_s", seconds(node.latency_s));
        line("bytes_per_s", seconds(node.bytes_per_s));
    }
    for rank in &profile.ranks {
        line("\n[[rank]]\nspeed", rank.speed.to_string());
        let numbers = [("memory_bytes", rank.memory_bytes), ("threads", rank.threads.map(u64::from))];
        for (key, number) in numbers {
            if let Some(number) = number {
                line(key, number.to_string());
            }
        }
        if let Some(device) = &rank.device {
            line("device", quoted(device));
        }
        if !rank.speeds.is_empty() {
            let speeds = rank.speeds.iter().map(|(kind, &speed)| (kind.clone(), Value::Float(speed)));
            line("speeds", Value::Table(speeds.collect()).to_string());
        }
    }
    for pair in &profile.pairs {
        line("\n[[pair]]\nfrom", pair.from.to_string());
        line("to", pair.to.to_string());
        line("latency_s", seconds(pair.latency_s));
        line("bytes_per_s", seconds(pair.bytes_per_s));
    }
    let mut first = 0;
    for layer in &profile.layers {
        let described = &layers.layers[first];
        let kind = measured.kinds.iter().find(|kind| layers.layers[kind.layer].is_like(described));
        text.push_str(&layer_text(layer, kind));
        first += layer.count as usize;
    }
    text
}

fn layer_text(layer: &LayerProfile, kind: Option<&KindFigures>) -> String {
    let mut text = format!("\n[[layers]]\nkind = {}\ncount = {}\n", quoted(&layer.kind), layer.count);
    let times = [
        ("forward_s", Some(layer.forward_s), kind.map(|kind| kind.forward)),
        ("input_backward_s", Some(layer.input_backward_s), kind.map(|kind| kind.input_backward)),
        ("weight_backward_s", Some(layer.weight_backward_s), kind.map(|kind| kind.weight_backward)),
        ("backward_s", layer.backward_s, None),
        ("recompute_s", layer.recompute_s, kind.and_then(|kind| kind.recompute)),
        ("exchange_s", Some(layer.exchange_s).filter(|seconds| *seconds > 0.0), None),
        ("optimizer_s", Some(layer.optimizer_s), None),
    ];
    let parts = LayerPart::ALL.map(|part| {
        let PartProfile { bytes, recompute_s } = layer.part(part);
        let [_, key] = part.profile_keys();
        (key, (bytes > 0).then_some(recompute_s), kind.and_then(|kind| kind.part(part)))
    });
    for (key, time, spread) in times.into_iter().chain(parts) {
        let Some(time) = time else { continue };
        let figure = format!("{key} = {}", seconds(time));
        match spread {
            Some(spread) if spread.count > 0 => writeln!(text, "{figure:40} # {}", of_quartiles(&spread)),
            _ => writeln!(text, "{figure}"),
        }
        .expect("a string takes all text");
    }
    let sizes = [
        ("output_bytes", Some(layer.output_bytes)),
        ("parameter_bytes", Some(layer.parameter_bytes)),
        ("trained_bytes", layer.trained_bytes),
        ("activation_bytes", Some(layer.activation_bytes)),
        ("weight_activation_bytes", layer.weight_activation_bytes),
        ("norms_bytes", Some(layer.norms_bytes).filter(|bytes| *bytes > 0)),
        ("feed_forward_bytes", Some(layer.feed_forward_bytes).filter(|bytes| *bytes > 0)),
        ("temporary_bytes", Some(layer.temporary_bytes).filter(|bytes| *bytes > 0)),
        ("tensor_sums", layer.tensor_sums.map(u64::from)),
    ];
    for (key, size) in sizes {
        if let Some(size) = size {
            writeln!(text, "{key} = {size}").expect("a string takes all text");
        }
    }
    text
}

/// Returns the number of measurements and their spread, such as `of 72, 1.3%`.
pub(crate) fn of_quartiles(spread: &Quartiles) -> String {
    format!("of {}, {:.1}%", spread.count, spread.relative() * 100.0)
}

/// Returns a number that is not whole, with six digits.
fn seconds(number: f64) -> String {
    format!("{number:.5e}")
}

fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

fn list(texts: &[String]) -> String {
    Value::Array(texts.iter().cloned().map(Value::String).collect()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_schedule::LayerDesc;
    use pipewright_schedule::profile::{DeviceProfile, LinkProfile, NodeProfile, PairProfile, RankProfile};
    use pipewright_system::profile_file;

    #[test]
    fn what_is_written_is_read_again() {
        let spread = Quartiles { low: 0.00125, median: 0.0015, high: 0.00175, count: 8 };
        let described = LayerDesc {
            path: String::new(),
            kind: "a \"b\"".into(),
            parameters: 5,
            weight: 1,
            activation_bytes: 9,
            output_bytes: 4,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        };
        let kind = KindFigures {
            layer: 0,
            forward: spread,
            input_backward: spread,
            weight_backward: spread,
            recompute: Some(spread),
            norms: Some(spread),
            feed_forward: None,
            optimizer_s: 0.25,
            activation_bytes: Some(9),
            weight_activation_bytes: Some(3),
            temporary_bytes: Some(2),
        };
        let layers = ModelDesc { layers: vec![described; 2] };
        let measured = Measured {
            times_by_rank: Vec::new(),
            rows: 2,
            ranks: 2,
            kinds: vec![kind],
            reduce_bytes_per_s: Some(5e9),
            stage_bytes: Some(4096),
            rank_bytes: Some(1 << 20),
        };
        let layer = LayerProfile {
            kind: "a \"b\"".into(),
            count: 2,
            forward_s: 0.0015,
            input_backward_s: 0.0015,
            weight_backward_s: 0.0015,
            backward_s: None,
            recompute_s: Some(0.0015),
            exchange_s: 0.0005,
            optimizer_s: 0.25,
            output_bytes: 4,
            parameter_bytes: 20,
            trained_bytes: Some(8),
            activation_bytes: 9,
            weight_activation_bytes: Some(3),
            temporary_bytes: 2,
            norms_bytes: 2,
            norms_s: 0.125,
            feed_forward_bytes: 3,
            feed_forward_s: 0.0,
            tensor_sums: Some(3),
            optimizer_bytes: None,
            held_bytes: None,
            streamed_bytes: 0,
            read_whole_bytes: [0; 2],
            unstreamed_bytes: 0,
            copy_bytes: None,
        };
        let device = DeviceProfile {
            name: "x".into(),
            memory_bytes: Some(7),
            device: Some("flex".into()),
            precision: Some("bf16".into()),
            ranks: Some(2),
            threads_per_rank: Some(1),
        };
        let link = LinkProfile {
            reduce_bytes_per_s: Some(5e9),
            offload_bytes_per_s: Some(2e9),
            read_bytes_per_s: Some(3e9),
            ..LinkProfile::new(1e-5, 1e9)
        };
        let profile = Profile {
            rows: 2,
            tokens: Some(64),
            stage_bytes: 4096,
            rank_bytes: 1 << 20,
            device: Some(device),
            link,
            node: Some(NodeProfile { ranks: 8, latency_s: 1e-6, bytes_per_s: 1e11 }),
            ranks: vec![
                RankProfile::default(),
                RankProfile {
                    speed: 0.5,
                    memory_bytes: Some(9),
                    threads: Some(2),
                    device: Some("flex".into()),
                    speeds: [("a \"b\"".to_owned(), 0.25)].into(),
                    ..RankProfile::default()
                },
            ],
            pairs: vec![PairProfile { from: 0, to: 1, latency_s: 5e-3, bytes_per_s: 1.2e7 }],
            layers: vec![layer],
            assumed: vec!["link.latency_s".into()],
        };
        let text = profile_text(&profile, &measured, &layers);
        assert!(text.contains("forward_s = 1.50000e-3                   # of 8, 16.7%"), "{text}");
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), &text).expect("a file");
        assert_eq!(profile_file::read(file.path()).expect("a profile"), profile);
    }
}

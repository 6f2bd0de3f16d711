//! Compares the throughput of Nemotron-H and Qwen3-MoE with PyTorch and transformers on the same model. Both
//! sides use one thread, and Pipewright one rank.
//!
//! The bench writes the model as a Hugging Face directory, which both sides load. They train in turn, a step
//! each, so that changes in the speed of the machine affect both. Their losses must agree: it is the same
//! training.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use burn::tensor::Device;
use pipewright::pipeline::StepSummary;
use pipewright::transport::World;
use pipewright_models::decoder::{DecoderConfig, MixtureConfig};
use pipewright_models::hf::{self, HfError};
use pipewright_models::nemotron_h::{BlockKind, NemotronHConfig};
use pipewright_models::qwen3_moe::Qwen3MoeConfig;
use pipewright_models::{InitialParameters, ModelConfig, ModelFamily};
use serde_json::{Value, json};

use crate::model::{Bench, HEADS, LAYERS, SEED, Setup, VOCABULARY, WIDTH, random_rows};
use crate::statistics::Spread;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The families.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "nemotron-h,qwen3-moe")]
    families: Vec<Family>,
    /// Steps of each side that count; the first two do not.
    #[arg(long, default_value_t = 7)]
    steps: usize,
    /// Microbatches of a step, of one row each.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// Tokens of a row.
    #[arg(long, default_value_t = 256)]
    sequence: usize,
    /// The Python that `bench/peer/setup.sh` installed PyTorch and transformers for.
    #[arg(long, default_value = "bench/.venv/bin/python")]
    python: PathBuf,
}

/// A family that both sides have.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Family {
    NemotronH,
    Qwen3Moe,
}

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peer/families.py");
const WARM_UP: usize = 2;
/// How much the losses of the two sides may differ, relative to the loss.
const TOLERANCE: f64 = 1e-4;
/// The learning rate. Both sides round differently, and the first steps of AdamW turn a gradient near zero
/// into a whole step in either direction. So at higher rates some tokens soon choose other experts on one
/// side.
const RATE: f64 = 3e-5;

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut table = Vec::new();
    for &family in &options.families {
        let folder = std::env::temp_dir().join(format!("pipewright-families-{}", std::process::id()));
        let compared = compare(family, options, &folder);
        // Best effort: the folder of a failed comparison may not exist.
        let _ = fs::remove_dir_all(&folder);
        table.push((family, compared?));
    }
    println!("tokens per second and their ratio, {} tokens per microbatch, one thread:", options.sequence);
    println!(
        "{:<12} {:>8} {:>8}  {:<48} {:<48} ratio",
        "family", "active", "all", "pipewright", "PyTorch with transformers"
    );
    for (family, Compared { parameters, own, peer, ratio }) in table {
        let [active, all] = parameters.map(|count| format!("{:.1} M", count as f64 / 1e6));
        println!(
            "{:<12} {active:>8} {all:>8}  {:<48} {:<48} {ratio}",
            family.name(),
            format!("{own:.0}"),
            format!("{peer:.0}")
        );
    }
    Ok(())
}

/// The figures of a family.
struct Compared {
    /// The numbers of parameters that a token meets, and of all parameters.
    parameters: [usize; 2],
    /// Tokens per second.
    own: Spread,
    peer: Spread,
    ratio: Spread,
}

fn compare(family: Family, options: &Options, folder: &Path) -> Result<Compared, Box<dyn Error>> {
    let &Options { steps, microbatches, sequence, .. } = options;
    let model = family.write(folder)?;
    let parameters = parameters(&model)?;
    let rows = random_rows(microbatches, sequence);
    fs::write(folder.join("tokens.json"), json!(rows).to_string())?;

    let mut peer = Peer::start(options, folder)?;
    if peer.settings["parameters"] != json!(parameters[1]) {
        return Err(format!("PyTorch has another model: {}", peer.settings).into());
    }
    println!("{}: PyTorch's settings {}", family.name(), peer.settings);
    let setup = Setup { sequence, ..Setup::new("gpipe", 1, microbatches) };
    let initial = InitialParameters::Directory(folder.to_owned());
    let mut bench = Bench::of_model(World::local(1), &setup, model, initial)?.on_rows(&rows).with_rate(RATE);
    let (mut own_rates, mut peer_rates, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..WARM_UP + steps {
        let theirs = peer.step()?;
        let ours = bench.step()?;
        let loss = mean(&ours);
        require_same_loss(loss, theirs.loss)?;
        let [own, theirs] =
            [ours.wall.as_secs_f64(), theirs.seconds].map(|seconds| bench.tokens as f64 / seconds);
        println!(
            "step {}: loss {loss:.6}, {own:.0} tokens/s, PyTorch {theirs:.0}: {:.2} x",
            step + 1,
            own / theirs
        );
        if step >= WARM_UP {
            own_rates.push(own);
            peer_rates.push(theirs);
            ratios.push(own / theirs);
        }
    }
    let [own, peer, ratio] = [own_rates, peer_rates, ratios].map(Spread::new);
    Ok(Compared { parameters, own, peer, ratio })
}

/// Returns the loss of a step: the microbatches have equal weights.
fn mean(step: &StepSummary) -> f64 {
    step.losses.iter().sum::<f64>() / step.losses.len() as f64
}

fn require_same_loss(own: f64, peer: f64) -> Result<(), String> {
    // A loss that is not a number is not near.
    if (own - peer).abs() <= TOLERANCE * peer.abs() {
        Ok(())
    } else {
        Err(format!("the losses differ, so the models do: {own}, PyTorch {peer}"))
    }
}

/// The process of the other side.
struct Peer {
    process: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    settings: Value,
}

/// A step of the other side.
#[derive(Debug, PartialEq)]
struct PeerStep {
    loss: f64,
    seconds: f64,
}

impl Peer {
    fn start(options: &Options, folder: &Path) -> Result<Self, Box<dyn Error>> {
        let mut process = Command::new(&options.python)
            .arg(SCRIPT)
            .arg(folder)
            .arg(format!("--rate={RATE}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| {
                format!("{}: {error}; run bench/peer/setup.sh first", options.python.display())
            })?;
        let (Some(requests), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            unreachable!("both are pipes")
        };
        let mut peer = Self { process, requests, answers: BufReader::new(answers), settings: Value::Null };
        peer.settings = serde_json::from_str(&peer.answer()?)?;
        Ok(peer)
    }

    fn step(&mut self) -> Result<PeerStep, Box<dyn Error>> {
        self.requests.write_all(b"step\n")?;
        Ok(parse_step(&self.answer()?)?)
    }

    /// Returns a line of the process's output.
    fn answer(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        match self.answers.read_line(&mut line)? {
            0 => Err("PyTorch's process has ended; its message is above".into()),
            _ => Ok(line),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn parse_step(line: &str) -> Result<PeerStep, String> {
    let figures: Value = serde_json::from_str(line).map_err(|error| format!("{error} in {line}"))?;
    let figure = |name: &str| figures[name].as_f64().ok_or_else(|| format!("no `{name}` in {figures}"));
    Ok(PeerStep { loss: figure("loss")?, seconds: figure("seconds")? })
}

impl Family {
    fn name(self) -> &'static str {
        match self {
            Self::NemotronH => NemotronHConfig::MODEL_TYPE,
            Self::Qwen3Moe => Qwen3MoeConfig::MODEL_TYPE,
        }
    }

    fn config(self) -> ModelConfig {
        match self {
            Self::NemotronH => ModelConfig::NemotronH(nemotron_h()),
            Self::Qwen3Moe => ModelConfig::Qwen3Moe(qwen3_moe()),
        }
    }

    /// Writes the model with random parameters into `folder`.
    fn write(self, folder: &Path) -> Result<ModelConfig, HfError> {
        match self {
            Self::NemotronH => write(&nemotron_h(), folder)?,
            Self::Qwen3Moe => write(&qwen3_moe(), folder)?,
        }
        Ok(self.config())
    }
}

fn write<F: ModelFamily>(config: &F, folder: &Path) -> Result<(), HfError> {
    let model = config.init_stage(0..config.layers(), SEED, Device::flex())?;
    hf::save(folder, config, &[&model])
}

/// A Nemotron-H of 14 blocks: Mamba-2 and feed-forward layers in turn, and two of attention.
fn nemotron_h() -> NemotronHConfig {
    use BlockKind::{Attention, Mamba, Mlp};
    let half = [Mamba, Mlp, Mamba, Mlp, Mamba, Attention, Mlp];
    let sizes = DecoderConfig {
        hidden_size: WIDTH,
        intermediate_size: 4 * WIDTH,
        num_key_value_heads: HEADS / 2,
        ..DecoderConfig::new(VOCABULARY, HEADS)
    };
    let config = NemotronHConfig::of_sizes(sizes);
    NemotronHConfig {
        blocks: [half, half].concat(),
        mamba_num_heads: 16,
        mamba_head_dim: 64,
        n_groups: 2,
        ssm_state_size: 128,
        // transformers limits the steps by `time_step_min`.
        time_step_limit: (config.time_step_range.0, f64::INFINITY),
        ..config
    }
}

/// A Qwen3-MoE of 8 layers, each with 8 experts. A token meets 2 of them.
fn qwen3_moe() -> Qwen3MoeConfig {
    let sizes = DecoderConfig {
        hidden_size: WIDTH,
        num_hidden_layers: LAYERS,
        num_key_value_heads: HEADS / 2,
        ..DecoderConfig::new(VOCABULARY, HEADS)
    };
    let mixture = MixtureConfig::of_width(3 * WIDTH);
    Qwen3MoeConfig { decoder: sizes, attention_bias: false, mixture }
}

/// Returns the numbers of the parameters that a token meets, and of all.
fn parameters(model: &ModelConfig) -> Result<[usize; 2], Box<dyn Error>> {
    let specs = model.parameters()?;
    let sizes = specs.iter().map(|spec| (spec.path.as_str(), spec.shape.iter().product()));
    let (chosen, experts) = match model {
        ModelConfig::Qwen3Moe(config) => (config.mixture.num_experts_per_tok, config.mixture.num_experts),
        _ => (1, 1),
    };
    Ok(count(sizes, chosen, experts))
}

/// Like [`parameters`], but for parameters with these paths and sizes, if a token meets `chosen` of
/// `experts`.
fn count<'a>(sizes: impl Iterator<Item = (&'a str, usize)>, chosen: usize, experts: usize) -> [usize; 2] {
    let (mut routed, mut others) = (0, 0);
    for (path, size) in sizes {
        *if path.contains(".experts.") { &mut routed } else { &mut others } += size;
    }
    [others + routed / experts * chosen, others + routed]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_has_about_25_million_active_parameters() {
        for family in [Family::NemotronH, Family::Qwen3Moe] {
            let [active, all] = parameters(&family.config()).expect("the sizes make a model");
            assert!((24_500_000..26_500_000).contains(&active), "{family:?}: {active}");
            assert_eq!(active < all, matches!(family, Family::Qwen3Moe), "{family:?}: {all}");
        }
    }

    #[test]
    fn of_routed_experts_those_that_a_token_meets_are_active() {
        let sizes = [("mlp.experts.0.up", 10), ("mlp.experts.1.up", 10), ("mlp.gate", 3), ("norm", 2)];
        assert_eq!(count(sizes.into_iter(), 1, 2), [15, 25]);
        assert_eq!(count(sizes.into_iter(), 2, 2), [25, 25]);
    }

    #[test]
    fn a_step_of_the_peer_is_read() {
        let line = r#"{"loss": 5.5, "grad_norm": 1.0, "seconds": 2}"#;
        assert_eq!(parse_step(line), Ok(PeerStep { loss: 5.5, seconds: 2.0 }));
        let lacking = parse_step(r#"{"loss": 5.5}"#).expect_err("a figure is missing");
        assert!(lacking.starts_with("no `seconds` in"), "{lacking}");
        assert!(parse_step("Traceback").is_err());
    }

    #[test]
    fn losses_that_differ_are_refused() {
        assert_eq!(require_same_loss(5.0, 5.0004), Ok(()));
        assert!(require_same_loss(5.0, 5.0006).is_err());
        assert!(require_same_loss(f64::NAN, 5.0).is_err());
    }
}

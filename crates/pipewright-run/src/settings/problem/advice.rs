//! The advice for each kind of mistake in a configuration.

use pipewright_schedule::GenerateError;

use crate::settings::keys::{SECTIONS, keys_of};
use crate::settings::problem::kind::ProblemKind;

impl ProblemKind {
    /// Returns what to do about the mistake, unless the message already says so.
    pub(super) fn advice(&self) -> Option<String> {
        Some(match self {
            Self::InTable { problem, .. } => return problem.advice(),
            Self::Schedule(error) => return set_stages(error),
            Self::Model(_)
            | Self::Memory(_)
            | Self::Lookahead(_)
            | Self::Partition(_)
            | Self::ScheduleFile(_)
            | Self::Device(_)
            | Self::Layout(_) => return None,
            Self::BothDeviceKeys => "remove one of them".into(),
            Self::Syntax { .. } => "write keys as `key = value` below a `[section]`".into(),
            Self::Unrepresentable { message, .. } if message.contains("date") => {
                "write the value that the key has in config.json".into()
            }
            Self::Unrepresentable { .. } => "write a number that fits 64 bits".into(),
            Self::SetForm => "write for example --set pipeline.ranks=4".into(),
            Self::UnknownSection { suggestion: Some(meant), .. }
            | Self::OutsideSections { suggestion: Some(meant), .. }
            | Self::UnknownKey { suggestion: Some(meant), .. }
            | Self::UnknownValue { suggestion: Some(meant), .. } => format!("did you mean {meant}?"),
            Self::UnknownSection { .. } => format!("the sections are {}", sections()),
            Self::OutsideSections { .. } => format!("put it below one of {}", sections()),
            Self::UnknownKey { section, .. } => format!("the keys of [{section}] are {}", keys(section)),
            Self::UnknownValue { .. } => "write one of these".into(),
            Self::Missing { key, .. } => format!("write `{key} = ...`"),
            Self::UnknownKeyOf { suggestion: Some(meant), .. } => format!("did you mean `{meant}`?"),
            Self::UnknownKeyOf { known, .. } => format!("the keys are {}", known.join(", ")),
            Self::Profile(mismatch) => mismatch.advice(),
            Self::WrongType { expected, .. } => format!("write {expected}"),
            Self::OutOfRange { range, .. } => format!("write {range}"),
            Self::NotCompiledIn { key, value, instead } => {
                format!("build with `cargo build --release --features {value}`, or write `{key} = {instead}`")
            }
            Self::NotSupported { supported, .. } => format!("write {supported}"),
            Self::NotOfFile { key, found, .. } => {
                format!("remove `{key}`, which follows from the file, or write `{key} = {found}`")
            }
            Self::LongWarmup { .. } | Self::LongSecondWarmup { .. } => {
                "lower `warmup_steps` in [optimizer], or raise `steps` in [run]".into()
            }
            Self::LongDecay { .. } => "lower `decay_steps` in [optimizer], or raise `steps` in [run]".into(),
            Self::LateRestart { .. } => "lower `restart_at` in [optimizer], or raise `steps` in [run]".into(),
            Self::LowestAboveHighest { .. } => "lower `min_learning_rate`, or raise `learning_rate`".into(),
            Self::Without { advice, .. } => (*advice).into(),
            Self::LayoutStages { stages, .. } => format!("separate {stages} stages with bars"),
            Self::PathAndMix => {
                "remove `path`, or make it a source of `mix`, such as { path = \"...\", weight = 1 }".into()
            }
            Self::Twice { key, other, .. } => format!("remove `{key}` or `{other}`"),
            Self::UnevenShare { shared, replicas, .. } => match shared.as_slice() {
                [] => format!("change `mesh.data_parallel`, which is {replicas}"),
                numbers => {
                    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
                    format!("write {}", numbers.join(" or "))
                }
            },
            Self::OtherMode { written, meant, replicas, .. } => format!(
                "write `data_parallel_mode = \"{meant}\"` or leave it out, or write `data_parallel = {replicas}` for {written} \
                 parameters"
            ),
            Self::Empty { key } => format!("give `{key}` a value, or leave it out"),
            Self::BesideFrom { key } => format!("remove `{key}`, or remove `from`"),
            Self::BesidePath { key } => format!("remove `{key}`, or remove `path`"),
            Self::NoTraining { key, .. } => format!("write for example `{key} = \"1f1b\"`"),
            Self::BesideSlices { key } => {
                format!("leave `{key}` out, or write for example `schedule = \"1f1b\"` in [pipeline]")
            }
            Self::BesideExperts { key, .. } => {
                format!("leave `{key}` out, or write `expert_parallel = 1` in [mesh]")
            }
            Self::NoBoundaries => "name each later stage's first layer, such as `boundaries = [4]`".into(),
            Self::UnusedBoundaries => "write `partition = \"explicit\"`, or remove `boundaries`".into(),
            Self::OtherTokenizer { key, .. } => format!(
                "write a `tokenizer.json` (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers), or \
                 `{key} = \"bytes\"`"
            ),
            Self::NoVariable { variable, .. } => format!("set {variable}, or write the path out"),
        })
    }
}

/// Returns the argument that sets the number of stages on each rank to one that the schedule has, and what
/// else has to change for it, if the number of stages is the problem.
fn set_stages(error: &GenerateError) -> Option<String> {
    let advice = error.advice.first()?;
    let stages = advice.stages_per_rank?;
    let microbatches = advice.microbatches.map(|number| u64::from(number) * u64::from(error.replicas));
    let further = [
        ("ranks", advice.ranks.map(u64::from)),
        ("microbatches", microbatches),
        ("group_size", advice.group_size.map(u64::from)),
    ];
    let mut text = format!("add --set pipeline.stages_per_rank={stages}");
    for (key, number) in further {
        text.extend(number.map(|number| format!(" --set pipeline.{key}={number}")));
    }
    Some(text)
}

fn sections() -> String {
    let names: Vec<String> = SECTIONS.iter().map(|(name, _)| format!("[{name}]")).collect();
    names.join(", ")
}

fn keys(section: &str) -> String {
    let names = keys_of(section).unwrap_or_default();
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

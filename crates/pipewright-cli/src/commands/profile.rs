//! `pipewright profile`: measures the layers and links of a run, and writes them as a profile.

use std::fmt::Write;
use std::time::Duration;

use clap::Args;
use pipewright::profile::{Measured, Quartiles};
use pipewright_models::hf::ReadRate;
use pipewright_planning::argument_values::parse_time;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::numbers::bytes;
use pipewright_planning::output::OutputFile;
use pipewright_planning::screen::say;
use pipewright_run::training::identity::shared_settings;
use pipewright_run::training::model::read_model;
use pipewright_run::training::process_group::ProcessGroup;
use pipewright_schedule::ModelDesc;
use pipewright_schedule::profile::RankProfile;
use pipewright_schedule::words::counted;

use crate::commands::run_arguments::RunArguments;
use crate::planning::measure::{Measurement, measure_run};
use crate::planning::profile_text::{of_quartiles, profile_text};
use crate::terminal::Terminal;

/// The meaning of the columns of the table.
const CAPTION: &str = "\
median times of a microbatch: F forward, I gradients of inputs, W gradients of
weights, again the forward computed again; below them, the number of
measurements and half the distance of their quartiles, in % of the median;
kept: bytes from forward to backward; passing: bytes of temporary tensors";
/// The spread of a time above which it is not reliable, as a share of the median.
const UNSTEADY: f64 = 0.5;

/// The arguments of `pipewright profile`.
#[derive(Debug, Args)]
pub(crate) struct ProfileArguments {
    #[command(flatten)]
    run: RunArguments,
    /// The time after which no further step is measured, such as 8s; a few steps are taken in any case
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "8s")]
    time_limit: Duration,
    #[command(flatten)]
    output: OutputFile,
}

/// Runs the command.
pub(crate) fn run(arguments: &ProfileArguments) -> Result<(), Failure> {
    let mut processes = ProcessGroup::gather(Terminal::shared())?;
    let outcome = run_with(arguments, &mut processes);
    processes.settle(outcome)
}

fn run_with(arguments: &ProfileArguments, processes: &mut ProcessGroup) -> Result<(), Failure> {
    let loaded = arguments.run.load();
    let loaded = processes.agree(loaded, |loaded| shared_settings(&loaded.settings))?;
    let settings = &loaded.settings;
    processes.join_for(settings.pipeline.transport)?;
    let model = processes.all_succeed(read_model(settings), Exit::WrongInput)?;
    let measurement = measure_run(settings, &model, processes, arguments.time_limit)?;
    if !processes.is_leader() {
        return Ok(());
    }
    say(&summary(&measurement));
    if let Some(note) = busy_note(&measurement.measured, &measurement.layers) {
        say(&note);
    }
    let Measurement { profile, measured, layers, .. } = &measurement;
    arguments.output.write(&profile_text(profile, measured, layers))
}

/// Returns a note if the measurements of a time differ so much that something else ran on the machine.
fn busy_note(measured: &Measured, layers: &ModelDesc) -> Option<String> {
    let times = measured.kinds.iter().flat_map(|kind| {
        let times = [
            ("F", Some(kind.forward)),
            ("I", Some(kind.input_backward)),
            ("W", Some(kind.weight_backward)),
            ("again", kind.recompute),
        ];
        times.map(|(name, spread)| (&layers.layers[kind.layer].kind, name, spread))
    });
    let spreads = times.filter_map(|(kind, name, spread)| Some((spread?.relative(), kind, name)));
    let (spread, kind, name) = spreads.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (spread > UNSTEADY).then(|| {
        format!(
            "note: the times {name} of {kind} differ by {:.0}%: the machine was busy with something else; measure again \
             when it is idle",
            spread * 100.0
        )
    })
}

/// Returns a table of the layers, and a line about the links.
fn summary(measurement: &Measurement) -> String {
    let Measurement { profile, measured, layers, read_rate } = measurement;
    let mut text = String::new();
    writeln!(text, "{CAPTION}").expect("a string takes all text");
    let mut line = |cells: [&str; 7]| {
        let [kind, forward, input, weight, again, kept, temporary] = cells;
        let columns = format!(
            "{kind:12} {forward:>11} {input:>11} {weight:>11} {again:>11} {kept:>10} {temporary:>10}"
        );
        writeln!(text, "{}", columns.trim_end()).expect("a string takes all text");
    };
    line(["layer", "F ms", "I ms", "W ms", "again ms", "kept", "passing"]);
    for kind in &measured.kinds {
        let spreads = [kind.forward, kind.input_backward, kind.weight_backward];
        let ms = |seconds: f64| format!("{:.3}", seconds * 1e3);
        // Frozen layers lack some computations.
        let if_run = |spread: Quartiles, text: String| if spread.count > 0 { text } else { "-".to_owned() };
        let [forward, input, weight] = spreads.map(|spread| if_run(spread, ms(spread.median)));
        let again = kind.recompute.map_or_else(String::new, |spread| ms(spread.median));
        let [kept, temporary] =
            [kind.activation_bytes, kind.temporary_bytes].map(|size| size.map_or("?".to_owned(), bytes));
        line([&layers.layers[kind.layer].kind, &forward, &input, &weight, &again, &kept, &temporary]);
        let spreads = spreads.map(|spread| if_run(spread, of_quartiles(&spread)));
        let [forward, input, weight] = spreads.each_ref().map(String::as_str);
        line(["", forward, input, weight, "", "", ""]);
    }
    let link = &profile.link;
    let ranks = profile.device.as_ref().and_then(|device| device.ranks).unwrap_or(measured.ranks);
    // Within a process, tensors are moved and not copied, so the size does not matter.
    let bandwidth = if link.bytes_per_s < 1e15 {
        format!("{:.2} GB/s", link.bytes_per_s * 1e-9)
    } else {
        "no longer for large messages".to_owned()
    };
    write!(
        text,
        "link between ranks: {:.1} us, {bandwidth}; {} at the same time",
        link.latency_s * 1e6,
        counted(ranks, "rank")
    )
    .expect("a string takes all text");
    if let Some(ReadRate { bytes_per_s, is_direct }) = read_rate {
        let cached = if *is_direct {
            ""
        } else {
            "; the file system has no direct reads, so the page cache may have made it faster than the disk"
        };
        write!(text, "\nfiles of the base: {:.2} GB/s{cached}", bytes_per_s * 1e-9)
            .expect("a string takes all text");
    }
    for (number, rank) in profile.ranks.iter().enumerate() {
        write!(text, "\nrank {number}: {}", rank_text(rank)).expect("a string takes all text");
    }
    for pair in &profile.pairs {
        let (microseconds, gigabytes) = (pair.latency_s * 1e6, pair.bytes_per_s * 1e-9);
        write!(
            text,
            "\nlink between rank {} and rank {}: {microseconds:.1} us, {gigabytes:.3} GB/s",
            pair.from, pair.to
        )
        .expect("a string takes all text");
    }
    if !profile.assumed.is_empty() {
        write!(text, "\nassumed, not measured: {}", profile.assumed.join(", "))
            .expect("a string takes all text");
    }
    text
}

/// Returns what a rank has that others may not have, in words.
fn rank_text(rank: &RankProfile) -> String {
    let speeds = rank.speeds.iter().map(|(kind, speed)| format!("{kind} at {speed}"));
    let words = [format!("speed {}", rank.speed)].into_iter().chain(speeds);
    let further = [
        rank.memory_bytes.map(bytes),
        rank.threads.map(|threads| counted(threads, "thread")),
        rank.device.clone(),
    ];
    words.chain(further.into_iter().flatten()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use pipewright::profile::KindFigures;
    use pipewright_schedule::LayerDesc;

    use super::*;

    #[test]
    fn unlike_ranks_are_in_words() {
        let speeds = [("head".to_owned(), 0.25)].into();
        let rank = RankProfile { speed: 0.5, speeds, threads: Some(2), ..RankProfile::default() };
        assert_eq!(rank_text(&rank), "speed 0.5, head at 0.25, 2 threads");
        let rank = RankProfile { memory_bytes: Some(1 << 30), device: Some("flex".into()), ..rank };
        assert_eq!(rank_text(&rank), "speed 0.5, head at 0.25, 1.0 GiB, 2 threads, flex");
    }

    #[test]
    fn unsteady_times_have_a_note() {
        let steady = Quartiles { low: 0.9, median: 1.0, high: 1.1, count: 9 };
        let described = LayerDesc {
            path: String::new(),
            kind: "decoder".into(),
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
        let layers = ModelDesc { layers: vec![described] };
        let note = |input_backward, recompute| {
            let kind = KindFigures {
                layer: 0,
                forward: steady,
                input_backward,
                weight_backward: steady,
                recompute,
                norms: None,
                feed_forward: None,
                optimizer_s: 0.25,
                activation_bytes: None,
                weight_activation_bytes: None,
                temporary_bytes: None,
            };
            let measured = Measured {
                times_by_rank: Vec::new(),
                rows: 1,
                ranks: 1,
                kinds: vec![kind],
                reduce_bytes_per_s: None,
                stage_bytes: None,
                rank_bytes: None,
            };
            busy_note(&measured, &layers)
        };
        let unsteady = Quartiles { high: 2.5, ..steady };
        let expected = |name: &str| {
            format!(
                "note: the times {name} of decoder differ by 80%: the machine was busy with something else; measure \
                 again when it is idle"
            )
        };
        assert_eq!(note(steady, Some(steady)), None);
        assert_eq!(note(unsteady, None), Some(expected("I")));
        assert_eq!(note(steady, Some(unsteady)), Some(expected("again")));
    }
}

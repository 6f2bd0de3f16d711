//! `pipewright profile`: measures the layers and links of a run, and writes them as a profile.

use std::fmt::Write;
use std::time::Duration;

use clap::Args;

use crate::commands::measure::{Measurement, measure_run};
use crate::commands::prepare::shared_settings;
use crate::commands::process_group::ProcessGroup;
use crate::commands::profile_file::{of_spread, profile_text};
use crate::commands::run_arguments::{RunArguments, load_settings, parse_time};
use crate::display::{bytes, say};
use crate::failure::Failure;
use crate::output::OutputFile;

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
    let mut processes = ProcessGroup::gather()?;
    let outcome = run_with(arguments, &mut processes);
    processes.settle(outcome)
}

fn run_with(arguments: &ProfileArguments, processes: &mut ProcessGroup) -> Result<(), Failure> {
    let loaded = load_settings(arguments.run.config.as_deref(), &arguments.run.set);
    let loaded = processes.agree(loaded, |loaded| shared_settings(&loaded.settings))?;
    let measurement = measure_run(&loaded.settings, processes, arguments.time_limit)?;
    if !processes.is_leader() {
        return Ok(());
    }
    say(&summary(&measurement));
    let Measurement { profile, measured, layers } = &measurement;
    arguments.output.write(&profile_text(profile, measured, layers))
}

/// Returns a table of the layers, and a line about the links.
fn summary(measurement: &Measurement) -> String {
    let Measurement { profile, measured, layers } = measurement;
    let mut text = String::new();
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
        let [forward, input, weight] = spreads.map(|spread| ms(spread.median));
        let again = kind.recompute.map_or_else(String::new, |spread| ms(spread.median));
        let [kept, temporary] =
            [kind.activation_bytes, kind.temporary_bytes].map(|size| size.map_or("?".to_owned(), bytes));
        line([&layers.layers[kind.layer].kind, &forward, &input, &weight, &again, &kept, &temporary]);
        let spreads = spreads.map(|spread| of_spread(&spread));
        let [forward, input, weight] = spreads.each_ref().map(String::as_str);
        line(["", forward, input, weight, "", "", ""]);
    }
    let link = &profile.link;
    let ranks = profile.device.as_ref().and_then(|device| device.ranks).unwrap_or(measured.ranks);
    // Within a process, tensors are moved and not copied, so the size does not matter.
    let bandwidth = match link.bytes_per_s < 1e15 {
        true => format!("{:.2} GB/s", link.bytes_per_s * 1e-9),
        false => "no longer for large messages".to_owned(),
    };
    write!(
        text,
        "link between ranks: {:.1} us, {bandwidth}; {ranks} rank(s) at the same time",
        link.latency_s * 1e6
    )
    .expect("a string takes all text");
    if !profile.assumed.is_empty() {
        write!(text, "\nassumed, not measured: {}", profile.assumed.join(", "))
            .expect("a string takes all text");
    }
    text
}

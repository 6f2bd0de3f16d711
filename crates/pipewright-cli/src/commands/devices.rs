//! `pipewright devices`: lists the devices that this build can use on this machine.

use std::fmt::Write;

use clap::{Args, ValueEnum};
use pipewright::device::{BackEnd, FoundDevice, found};
use pipewright_planning::failure::Failure;
use pipewright_planning::numbers::bytes;
use pipewright_planning::output::OutputFile;
use pipewright_system::machine_memory::machine_bytes;
use serde_json::json;

/// The arguments of `pipewright devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArguments {
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    output: OutputFile,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A table
    Text,
    /// A list of objects
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &DevicesArguments) -> Result<(), Failure> {
    let mut devices = found();
    for device in devices.iter_mut().filter(|device| device.choice.back_end == BackEnd::Flex) {
        device.memory = machine_bytes();
    }
    let text = match arguments.format {
        Format::Text => table(&devices),
        Format::Json => json(&devices),
    };
    arguments.output.write(&text)
}

fn table(devices: &[FoundDevice]) -> String {
    let mut text = String::new();
    let mut line = |cells: [&str; 4]| {
        let [device, memory, copies, name] = cells;
        writeln!(text, "{device:18} {memory:>10}  {copies:12} {name}").expect("a string takes all text");
    };
    line(["device", "memory", "copies", "name"]);
    for device in devices {
        let memory = device.memory.map_or_else(|| "not known".to_owned(), bytes);
        line([&device.choice.to_string(), &memory, copies(device), &device.name]);
    }
    let missing: Vec<&str> =
        BackEnd::ALL.into_iter().filter(|back_end| !back_end.is_compiled_in()).map(BackEnd::name).collect();
    if !missing.is_empty() {
        let list = missing.join(", ");
        writeln!(
            text,
            "\nnot in this build: {list}; to add one: cargo build --release --features {}",
            missing[0]
        )
        .expect("a string takes all text");
    }
    text
}

/// Describes how the back end copies a tensor from one of its devices to another.
fn copies(device: &FoundDevice) -> &'static str {
    if device.copies_directly { "directly" } else { "through host" }
}

fn json(devices: &[FoundDevice]) -> String {
    let object = |device: &FoundDevice| {
        json!({
            "device": device.choice.to_string(),
            "back_end": device.choice.back_end.name(),
            "name": device.name,
            "memory_bytes": device.memory,
            "copies_directly": device.copies_directly,
        })
    };
    let list: Vec<_> = devices.iter().map(object).collect();
    format!("{:#}\n", serde_json::Value::from(list))
}

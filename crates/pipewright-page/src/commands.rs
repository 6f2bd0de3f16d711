//! The command line and the Python call that predict the same as the page.

use pipewright_schedule::costs::StageCosts;
use pipewright_schedule::generate::PerStage;
use pipewright_schedule::{Costs, ScheduleSpec};

use crate::setup::Setup;

/// Returns the call of `pipewright simulate`.
pub(crate) fn command(setup: &Setup) -> String {
    let mut command = format!("pipewright simulate {}", setup.generator.name);
    for (name, value) in options(&setup.spec) {
        let flag = name.replace('_', "-");
        match value {
            Value::Flag => command += &format!(" --{flag}"),
            Value::Numbers(numbers) => command += &format!(" --{flag} {}", numbers.join(",")),
        }
    }
    match cost_text(&setup.costs) {
        Some(costs) => format!("{command} --cost {costs}"),
        None => command,
    }
}

/// Returns the lines in Python.
pub(crate) fn python(setup: &Setup) -> String {
    let mut arguments = vec![format!("\"{}\"", setup.generator.name)];
    arguments.extend(options(&setup.spec).into_iter().map(|(name, value)| match value {
        Value::Flag => format!("{name}=True"),
        Value::Numbers(numbers) if numbers.len() == 1 => format!("{name}={}", numbers[0]),
        Value::Numbers(numbers) => format!("{name}=[{}]", numbers.join(", ")),
    }));
    let costs = cost_text(&setup.costs).map(|costs| format!("\"{costs}\"")).unwrap_or_default();
    if setup.spec.costs.is_some() && !costs.is_empty() {
        arguments.push(format!("costs={costs}"));
    }
    format!(
        "import pipewright_pp as pw\ntimeline = pw.schedule({}).simulate({costs})\ntimeline.summary",
        arguments.join(", ")
    )
}

enum Value {
    Flag,
    Numbers(Vec<String>),
}

/// Returns the size and the settings by their names, without those that are left to the schedule.
fn options(spec: &ScheduleSpec) -> Vec<(&'static str, Value)> {
    let number = |number: u32| Value::Numbers(vec![number.to_string()]);
    let limits = |limits: &PerStage<u32>| match limits {
        PerStage::Same(limit) => number(*limit),
        PerStage::Each(limits) => Value::Numbers(limits.iter().map(u32::to_string).collect()),
    };
    let options = [
        ("ranks", Some(number(spec.ranks))),
        ("microbatches", Some(number(spec.microbatches))),
        ("stages_per_rank", spec.stages_per_rank.map(number)),
        ("group_size", spec.group_size.map(number)),
        ("memory_limit", spec.memory_limit.as_ref().map(limits)),
        ("slices", spec.slices.map(|slices| number(slices.get()))),
        ("wide_warmup", spec.wide_warmup.then_some(Value::Flag)),
        ("overlap", spec.overlap.then_some(Value::Flag)),
    ];
    options.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Returns costs in the form of `--cost`, which gives exactly these when it is read; `None` for the usual costs.
fn cost_text(costs: &Costs) -> Option<String> {
    if *costs == (Costs { sizes: costs.sizes.clone(), ..Costs::default() }) {
        return None;
    }
    let list = |name: &str, of: fn(&StageCosts) -> f64| {
        let times: Vec<String> = costs.stages.iter().map(|stage| of(stage).to_string()).collect();
        let is_same = times.iter().all(|time| *time == times[0]);
        format!("{name}={}", if is_same { times[0].clone() } else { times.join(":") })
    };
    let mut parts = vec![list("F", |stage| stage.forward)];
    parts.push(list("I", |stage| stage.input_backward));
    parts.push(list("W", |stage| stage.weight_backward));
    if costs.stages.iter().any(|stage| stage.backward != stage.input_backward + stage.weight_backward) {
        parts.push(list("B", |stage| stage.backward));
    }
    let exchanges = costs.stages.iter().map(|stage| stage.exchanges.forward.count()).max().unwrap_or(0);
    if exchanges > 0 {
        parts.push(list("exchange", |stage| stage.exchanges.forward.seconds()));
        parts.push(format!("exchanges={exchanges}"));
    }
    for (name, value) in [("hop", costs.link.latency), ("attention", costs.attention)] {
        if value != 0.0 {
            parts.push(format!("{name}={value}"));
        }
    }
    Some(parts.join(","))
}

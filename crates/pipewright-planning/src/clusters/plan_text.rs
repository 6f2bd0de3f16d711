//! Prints plans for a cluster as text.

use std::fmt::Write;

use pipewright_cluster::goodput::Goodput;
use pipewright_cluster::machine::Machine;
use pipewright_cluster::search::{ClusterPlan, Gain, Goal, MachineRanks, Request, Upgrade};
use pipewright_schedule::words::counted;
use pipewright_shapes::model::Model;

use crate::clusters::failures::{ExpectedFaults, PlanGoodput};
use crate::clusters::plan::Planned;
use crate::numbers::{bytes, short_count};
use crate::plans::print::{memory_row, significant, span, time, title_word};

/// Returns the plans with what people need to judge them.
pub(crate) fn text(planned: &Planned) -> String {
    let mut text = String::new();
    // The names of models and machines may have line ends.
    let mut line = |words: String| {
        writeln!(text, "{}", words.replace('\n', "\\n")).expect("a string takes all text");
    };
    line(title(&planned.request));
    for (index, plan) in planned.found.plans.iter().enumerate() {
        let layout = plan.layout.text(&planned.request.model);
        line(format!("{}  {layout}", title_word(index)));
        line(format!("      {}", figures(plan)));
        if index == 0 {
            details(plan).into_iter().for_each(&mut line);
            kinds(plan).into_iter().for_each(&mut line);
            line(format!("      accuracy: {}", planned.found.accuracy));
            planned.found.preferred.iter().for_each(|why| line(format!("      preferred: {why}")));
            planned.faults.iter().for_each(|faults| line(goodput(faults, plan)));
        }
    }
    let found = &planned.found;
    line(format!(
        "no plan can take less than {} per step; {} estimated, {} simulated in {:.1} s",
        time(found.lower_bound_s),
        counted(found.estimated as u64, "layout"),
        found.simulated,
        planned.seconds
    ));
    planned.upgrades.iter().for_each(|upgrade| line(upgrade_line(upgrade, &planned.request.model)));
    if !planned.request.further.is_empty() {
        line(
            "no figures for more nodes, memory or bandwidth: the cluster has several kinds of machines"
                .to_owned(),
        );
    }
    planned.faults.iter().for_each(|faults| line(faults.sentence()));
    let notes = [("measured", &planned.measured), ("assumed", &planned.assumed)];
    let notes = notes.into_iter().filter(|(_, items)| !items.is_empty());
    for (what, items) in notes {
        line(format!("{what}: {}", items.join("; ")));
    }
    if let Some(emitted) = &planned.emitted {
        let plan = &emitted.plan;
        let title = plan.layout.text(&planned.request.model);
        text.push_str(&emitted.text(&title, plan.prediction.seconds, &plan.prediction.boundaries()));
    }
    text
}

/// Describes the model, the GPUs and the batch.
pub(super) fn title(request: &Request) -> String {
    let model = &request.model;
    let predictors = model.parameters() - model.own_parameters();
    let count = |parameters: u128| short_count(u64::try_from(parameters).unwrap_or(u64::MAX));
    let (all, active) = (count(model.own_parameters()), count(model.active_parameters()));
    let mut parameters = format!("{all} parameters");
    if all != active {
        parameters.push_str(&format!(", {active} active"));
    }
    if predictors > 0 {
        parameters.push_str(&format!(", {} more that predict further tokens", count(predictors)));
    }
    if model.is_adapted() {
        parameters.push_str(&format!(", {} of adapters trained", count(model.trained_parameters())));
    }
    let machine = |(machine, gpus): (&Machine, u32)| {
        format!("{} of {}, {} per node", counted(gpus, "GPU"), machine.name, machine.gpus_per_node)
    };
    let machines: Vec<String> = request.kinds().into_iter().map(machine).collect();
    format!(
        "{}: {parameters}; {}; {} of {} per step, {}",
        model.name,
        machines.join(", and "),
        counted(request.batch, "row"),
        counted(request.sequence, "token"),
        request.precision.name()
    )
}

/// The figures of a plan, with the memory of the kind of machine that has least left.
pub(super) fn figures(plan: &ClusterPlan) -> String {
    let prediction = &plan.prediction;
    let left = |kind: &&MachineRanks| kind.memory_limit - kind.memory;
    let tightest = plan.machines.iter().min_by(|one, other| left(one).total_cmp(&left(other)));
    let (memory, memory_limit) = tightest.map_or((0.0, 0.0), |kind| (kind.memory, kind.memory_limit));
    format!(
        "{} per step, {:.0} tokens/s per GPU, {:.0} model TFLOP/s, MFU {:.1}%, {} of {} memory, {:.1}% above the bound",
        time(prediction.seconds),
        prediction.tokens_per_gpu,
        prediction.operations_per_gpu / 1e12,
        plan.mfu * 100.0,
        bytes(memory as u64),
        bytes(memory_limit as u64),
        plan.gap * 100.0
    )
}

/// The lines about the best plan.
pub(super) fn details(plan: &ClusterPlan) -> Vec<String> {
    let shares = plan.shares.named().into_iter().filter(|(_, share)| *share >= 0.0005);
    let shares: Vec<String> = shares.map(|(name, share)| format!("{name} {:.1}%", share * 100.0)).collect();
    let prediction = &plan.prediction;
    let peaks: Vec<u64> = prediction.memory.iter().map(|rank| rank.total() as u64).collect();
    let (rank, largest) = prediction.largest_rank();
    let mut lines = vec![
        format!("      {}", shares.join(", ")),
        memory_row(&peaks),
        format!("      memory of rank {rank}: {}", largest.text()),
    ];
    if plan.layout.pipeline > 1 {
        lines.push(format!("      blocks by stage {}", runs(&plan.prediction.blocks)));
    }
    lines.extend(plan.goal.as_ref().map(goal));
    lines
}

/// The lines about the kinds of machines of a plan, if there are several.
fn kinds(plan: &ClusterPlan) -> Vec<String> {
    let kind = |kind: &MachineRanks| {
        let last = kind.first_rank + kind.ranks.max(1) - 1;
        let ranks = match kind.ranks {
            1 => format!("rank {last}"),
            _ => format!("ranks {} to {last}", kind.first_rank),
        };
        format!(
            "      {ranks} on {}: {} of {} memory, idle {:.1}%",
            kind.name,
            bytes(kind.memory as u64),
            bytes(kind.memory_limit as u64),
            kind.idle * 100.0
        )
    };
    if plan.machines.len() > 1 { plan.machines.iter().map(kind).collect() } else { Vec::new() }
}

/// Writes a list of numbers with runs of equal ones as `3x16`.
fn runs(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, other| one == other);
    let words = runs.map(|run| match run.len() {
        1 => run[0].to_string(),
        length => format!("{length}x{}", run[0]),
    });
    words.collect::<Vec<_>>().join(", ")
}

/// Says which share of the time is useful, and where the rest goes.
fn goodput(faults: &ExpectedFaults, plan: &ClusterPlan) -> String {
    let PlanGoodput { simulated, .. } = faults.goodput(plan);
    let Goodput { useful, checkpoints, repeated, restarts, steps } = simulated;
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let days = plan.goal.as_ref().filter(|_| useful > 0.0);
    let days = days.map_or_else(String::new, |goal| format!("; {} with failures", span(goal.days / useful)));
    format!(
        "      goodput {}; checkpoints {} (every {}), repeated steps {}, restarts {}; a failure every {}{days}",
        percent(useful),
        percent(checkpoints),
        if steps == 1 { "step".to_owned() } else { counted(steps, "step") },
        percent(repeated),
        percent(restarts),
        span(faults.between_failures() / 86_400.0),
    )
}

fn goal(goal: &Goal) -> String {
    let energy = match goal.kilowatt_hours {
        None => "energy not known: the machine has no `board_watts`".to_owned(),
        Some(hours) if hours < 1000.0 => {
            format!("{} kWh of the GPUs at full power", significant(hours))
        }
        Some(hours) => format!("{} MWh of the GPUs at full power", significant(hours / 1000.0)),
    };
    let tokens = goal.tokens;
    format!(
        "      {} {}: {}, {}, {} GPU hours, {energy}",
        short_count(tokens),
        if tokens == 1 { "token" } else { "tokens" },
        counted(goal.steps, "step"),
        span(goal.days),
        significant(goal.gpu_hours)
    )
}

/// Says how much faster a step is after a change of the hardware, or why no plan exists.
fn upgrade_line(upgrade: &Upgrade, model: &Model) -> String {
    let name = upgrade.change.name();
    match &upgrade.gain {
        Ok(Gain { plan, speedup }) => format!(
            "{name}: {speedup:.2} times as fast, {} per step with {}",
            time(plan.prediction.seconds),
            plan.layout.text(model)
        ),
        Err(error) => format!("{name}: no plan: {}", error.reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_numbers_are_written_once() {
        assert_eq!(runs(&[15, 16, 16, 15]), "15, 2x16, 15");
    }

    #[test]
    fn numbers_have_three_digits() {
        let check = |number: f64, text: &str| assert_eq!(significant(number), text);
        check(30_812_345.0, "30.8 million");
        check(812_345.0, "812345");
        check(46.234, "46.2");
        check(0.012_34, "0.0123");
    }

    #[test]
    fn spans_have_a_unit_that_suits() {
        assert_eq!([3.5, 0.5, 0.0001].map(span), ["3.50 days", "12.0 hours", "8.64 s"]);
    }
}

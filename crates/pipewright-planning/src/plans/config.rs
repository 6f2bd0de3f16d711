//! Writes the configuration of a plan, for `train`.

use std::path::Path;

use pipewright_schedule::Recompute;
use pipewright_schedule::csv::print_schedule;
use pipewright_schedule::generate::depends_on_costs;
use pipewright_schedule::plan::{Plan, PlanSettings, SEARCHED};
use pipewright_schedule::profile::{PROCESSOR, Profile, RankProfile};
use toml::{Table, Value};

use crate::configurations::Base;
use crate::failure::Failure;
use crate::output;
use crate::plans::print::stages_per_rank;

/// Writes the configuration of `plan` to `file`: the base with the choices of the plan, or without a base the
/// choices alone, for the ranks of `profile` that the plan uses. A schedule without a name, or with settings, is written
/// to a CSV file in the same folder.
pub fn write_plan(file: &Path, plan: &Plan, base: Option<Base>, profile: &Profile) -> Result<(), Failure> {
    let (is_whole, batches) = (base.is_some(), base.as_ref().map_or(1, |base| base.batches));
    let number = |number: u32| Value::Integer(i64::from(number));
    let (mut config, replicas) = match base {
        Some(base) => (base.keys, base.replicas),
        None => (Table::new(), number(plan.mesh.data)),
    };
    let schedule = if is_named(plan) {
        plan.name.to_owned()
    } else {
        let csv = file.with_extension("csv");
        output::write(Some(&csv), &print_schedule(&plan.schedule))?;
        csv.file_name().map_or_else(|| "schedule.csv".to_owned(), |name| name.to_string_lossy().into_owned())
    };
    let mut pipeline = vec![
        ("ranks", number(plan.schedule.ranks())),
        ("stages_per_rank", number(stages_per_rank(plan.schedule.placement()))),
        ("schedule", Value::String(schedule)),
        ("microbatches", number(plan.microbatches())),
        ("microbatch_size", number(plan.microbatch_rows)),
    ];
    if plan.boundaries.is_empty() {
        pipeline.push(("partition", Value::String("even".to_owned())));
    } else {
        let boundaries = plan.boundaries.iter().map(|&layer| Value::Integer(layer as i64)).collect();
        pipeline.push(("partition", Value::String("explicit".to_owned())));
        pipeline.push(("boundaries", Value::Array(boundaries)));
    }
    let says_parts = config.get("pipeline").is_some_and(|pipeline| pipeline.get("head_parts").is_some());
    if plan.head_parts > 1 || says_parts {
        pipeline.push(("head_parts", number(plan.head_parts)));
    }
    let recompute = Value::try_from(Recompute::of_stages(&plan.recompute));
    pipeline.push(("recompute", recompute.expect("words, numbers and tables are values")));
    let mut run: Vec<_> = plan_milliseconds(plan.step_s, batches)
        .map(|planned| ("planned_step_ms", Value::Float(planned)))
        .into_iter()
        .collect();
    if !is_whole && !plan.machines.is_empty() {
        // A base has the keys for these ranks.
        let used = plan.used_ranks_of(profile);
        let device = used.device.clone().unwrap_or_default();
        if used.ranks.iter().any(|rank| rank.threads.is_some()) {
            let threads = |rank: &RankProfile| number(rank.threads.or(device.threads_per_rank).unwrap_or(1));
            pipeline.push(("threads_per_rank", Value::Array(used.ranks.iter().map(threads).collect())));
        }
        if used.ranks.iter().any(|rank| rank.device.is_some()) {
            let usual = device.device.as_deref().unwrap_or(PROCESSOR);
            let name = |rank: &RankProfile| Value::String(rank.device.as_deref().unwrap_or(usual).to_owned());
            run.push(("devices", Value::Array(used.ranks.iter().map(name).collect())));
        }
        let machines = plan.machines.iter().map(|machine| number(machine.get()));
        pipeline.push(("profile_ranks", Value::Array(machines.collect())));
    }
    set(&mut config, "pipeline", pipeline);
    if let Some(stream) = plan.stream {
        let window = number(stream.window.get());
        set(&mut config, "model", vec![("stream", Value::Boolean(true)), ("stream_window", window)]);
    }
    let mut mesh = vec![("data_parallel", replicas)];
    if plan.mesh.tensor > 1 || is_whole {
        mesh.push(("tensor_parallel", number(plan.mesh.tensor)));
    }
    if !plan.batch_shares.is_empty() {
        let shares = plan.batch_shares.iter().map(|&share| number(share)).collect();
        mesh.push(("batch_shares", Value::Array(shares)));
    } else if let Some(Value::Table(section)) = config.get_mut("mesh") {
        section.remove("batch_shares");
    }
    set(&mut config, "mesh", mesh);
    set(&mut config, "run", run);
    let text = toml::to_string(&config).expect("a table of plain values can be written as TOML");
    output::write(Some(file), &text)
}

/// Returns the milliseconds of a step that takes as long as planned. A plan is of one batch, so there are
/// none for steps of several batches.
pub fn plan_milliseconds(step_s: f64, batches: u32) -> Option<f64> {
    (batches == 1).then_some(step_s * 1e3)
}

/// Returns whether the configuration of a plan names its schedule: it has a name, and it depends on its size
/// alone.
pub fn is_named(plan: &Plan) -> bool {
    // The stages of a schedule with a name are on the ranks in order.
    let visits_in_order = plan.machines.is_empty();
    plan.name != SEARCHED
        && !depends_on_costs(plan.name)
        && plan.settings == PlanSettings::default()
        && visits_in_order
}

/// Sets keys of a section.
fn set(config: &mut Table, section: &str, keys: Vec<(&str, Value)>) {
    let section = config.entry(section).or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(table) = section {
        table.extend(keys.into_iter().map(|(key, value)| (key.to_owned(), value)));
    }
}

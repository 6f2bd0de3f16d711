//! Reads DeepSpeed's configuration.

use serde_json::{Map, Value};

use crate::emit::balanced::{balanced, uniform};
use crate::emit::options::{GivenOption, Options, nearest};
use crate::emit::read_error::ReadError;
use crate::emit::read_plan::{
    ReadPlan, checkpoint_remark, generate_within, no_system, replicas_of, usual_order,
};
use crate::generate::ScheduleSpec;
use crate::mesh::Mesh;
use crate::plan::{PlanChoice, System, with_head_parts};
use crate::profile::Profile;
use crate::recompute::StageRecompute;

const BATCH: &str = "train_batch_size";
const ROWS: &str = "train_micro_batch_size_per_gpu";
const MICROBATCHES: &str = "gradient_accumulation_steps";
const PIPELINE: &str = "pipeline";
const INTERVAL: &str = "activation_checkpoint_interval";
/// DeepSpeed's keys of the sizes of a batch.
pub const DEEPSPEED_SIZES: [&str; 3] = [BATCH, ROWS, MICROBATCHES];
/// The keys that are read. A key that is nearly one of them is a mistake.
const KNOWN: [&str; 4] = [BATCH, ROWS, MICROBATCHES, PIPELINE];
/// The keys of `pipeline`: DeepSpeed's, and `parts`.
const PIPELINE_KEYS: [&str; 8] = [
    "stages",
    "parts",
    "partition",
    INTERVAL,
    "seed_layers",
    "pipe_partitioned",
    "grad_partitioned",
    "use_reentrant",
];
/// The largest number that is read.
const MOST: u64 = 1_000_000;

/// Reads a plan for the layers of `profile`, on a total of `ranks` ranks. `options` are the keys of `config` with their lines.
pub(super) fn read(
    config: &Value,
    options: &Options,
    profile: &Profile,
    ranks: Option<u32>,
) -> Result<ReadPlan, ReadError> {
    read_config(config, profile, ranks).map_err(|error| with_line(options, error))
}

/// Returns a mistake with the line of the key that it names first.
fn with_line(options: &Options, error: ReadError) -> ReadError {
    let key = error.reason.split('`').nth(1).map(|name| GivenOption::new(name, Vec::new(), 0).key);
    let is_in = |option: &&GivenOption, key: &str| {
        option.key.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let option = key.and_then(|key| options.list.iter().find(|option| is_in(option, &key)));
    match option.filter(|_| error.line.is_none()) {
        Some(option) => error.at(option.line),
        None => error,
    }
}

fn read_config(value: &Value, profile: &Profile, ranks: Option<u32>) -> Result<ReadPlan, ReadError> {
    let not_an_object = || ReadError::new("the JSON is not an object; write the keys in braces");
    let config = value.as_object().ok_or_else(not_an_object)?;
    check_keys(config)?;
    let none = Map::new();
    let pipeline = match config.get(PIPELINE) {
        None => &none,
        Some(value) => value.as_object().ok_or_else(|| mistake(PIPELINE, value, "an object"))?,
    };
    if let Some(key) = pipeline.keys().find(|key| !PIPELINE_KEYS.contains(&key.as_str())) {
        return Err(unknown(&format!("pipeline.{key}"), nearest(key, &PIPELINE_KEYS)));
    }
    // A configuration without a pipeline has one stage.
    let stages = match config.get(PIPELINE) {
        None => 1,
        Some(_) => number(pipeline, "pipeline.stages")?.ok_or_else(|| missing("pipeline.stages"))?,
    };
    let mesh = Mesh { pipeline: stages, ..Mesh::default() };
    let batch = Batch::read(config, mesh, ranks)?;
    let profile = with_head_parts(profile, Some(1));
    let layers = usize::try_from(profile.layer_count()).unwrap_or(usize::MAX);
    let boundaries = boundaries(pipeline, &profile, layers, stages)?;
    let interval = interval(pipeline)?;
    let remarks = checkpoint_remark(interval, largest(&boundaries, layers) as u64);
    let spec = ScheduleSpec { ranks: stages, microbatches: batch.microbatches, ..ScheduleSpec::default() };
    let schedule = generate_within("1f1b", &spec)?;
    let choice = PlanChoice {
        head_parts: Some(1),
        boundaries,
        recompute: vec![(interval > 0).then_some(StageRecompute::WHOLE); stages as usize],
        mesh: Mesh { data: batch.replicas, order: usual_order(&profile), ..mesh },
        microbatch_rows: batch.rows,
        ..PlanChoice::default()
    };
    let remarks = remarks.into_iter().collect();
    Ok(ReadPlan {
        system: System::Deepspeed,
        schedule,
        schedule_name: "1f1b".to_owned(),
        choice,
        runs: 1,
        remarks,
    })
}

/// Returns the number of layers of a checkpoint; 0 if nothing is recomputed.
fn interval(pipeline: &Map<String, Value>) -> Result<u64, ReadError> {
    let Some(value) = pipeline.get(INTERVAL) else { return Ok(0) };
    let expected = "a whole number of layers, or 0 for no recomputation";
    value.as_u64().ok_or_else(|| mistake(&format!("{PIPELINE}.{INTERVAL}"), value, expected))
}

fn check_keys(config: &Map<String, Value>) -> Result<(), ReadError> {
    if !config.keys().any(|key| KNOWN.contains(&key.as_str())) {
        let keys: Vec<String> = config.keys().take(3).map(|key| format!("`{key}`")).collect();
        let found =
            if keys.is_empty() { "{}".to_owned() } else { format!("JSON with the keys {}", keys.join(", ")) };
        return Err(no_system(&found));
    }
    let typo = config.keys().filter(|key| !KNOWN.contains(&key.as_str()));
    let typo = typo.filter_map(|key| Some((key, nearest(key, &KNOWN)?))).next();
    typo.map_or(Ok(()), |(key, near)| Err(unknown(key, Some(near))))
}

fn unknown(key: &str, nearest: Option<&str>) -> ReadError {
    ReadError::unknown_key(System::Deepspeed, key, nearest)
}

fn missing(key: &str) -> ReadError {
    ReadError::missing_key(System::Deepspeed, key)
}

fn mistake(key: &str, value: &Value, expected: &str) -> ReadError {
    ReadError::value(key, &value.to_string(), expected)
}

/// Returns a number of an object. `path` ends with its key.
fn number(object: &Map<String, Value>, path: &str) -> Result<Option<u32>, ReadError> {
    let key = path.rsplit('.').next().unwrap_or_default();
    let Some(value) = object.get(key) else { return Ok(None) };
    let number = value.as_u64().filter(|number| (1..=MOST).contains(number));
    let number = number.and_then(|number| u32::try_from(number).ok());
    number.map(Some).ok_or_else(|| mistake(path, value, &format!("a whole number from 1 to {MOST}")))
}

/// The division of a batch.
struct Batch {
    rows: u32,
    microbatches: u32,
    replicas: u32,
}

impl Batch {
    /// Reads the three sizes. One may be left out if the number of ranks is known
    /// (`DeepSpeedConfig._set_batch_related_parameters`).
    fn read(config: &Map<String, Value>, mesh: Mesh, ranks: Option<u32>) -> Result<Self, ReadError> {
        let [batch, rows, microbatches] = [BATCH, ROWS, MICROBATCHES].map(|key| number(config, key));
        let (batch, rows, microbatches) = (batch?, rows?, microbatches?);
        let whole = |number: u32, by: u32| {
            let what = format!(
                "{BATCH} is not {ROWS} times {MICROBATCHES} times the replicas; make them equal, or leave one of them out"
            );
            if by > 0 && number.is_multiple_of(by) { Ok(number / by) } else { Err(ReadError::new(what)) }
        };
        let stated = match (batch, rows, microbatches) {
            (Some(batch), Some(rows), Some(microbatches)) => {
                Some(whole(batch, rows.saturating_mul(microbatches))?)
            }
            _ => None,
        };
        let replicas = replicas_of(mesh, ranks, stated)?;
        let (rows, microbatches) = match (batch, rows, microbatches) {
            (_, Some(rows), Some(microbatches)) => (rows, microbatches),
            (Some(batch), Some(rows), None) => (rows, whole(batch, rows.saturating_mul(replicas))?),
            (Some(batch), None, microbatches) => {
                let microbatches = microbatches.unwrap_or(1);
                (whole(batch, microbatches.saturating_mul(replicas))?, microbatches)
            }
            (None, Some(rows), None) => (rows, 1),
            (None, None, _) => {
                return Err(missing(ROWS));
            }
        };
        Ok(Self { rows, microbatches, replicas })
    }
}

fn boundaries(
    pipeline: &Map<String, Value>,
    profile: &Profile,
    layers: usize,
    stages: u32,
) -> Result<Vec<usize>, ReadError> {
    let count = stages as usize;
    if count > layers {
        return Err(ReadError::new(format!(
            "{count} stages cannot share the {layers} layers of the profile; use fewer stages"
        )));
    }
    if let Some(parts) = pipeline.get("parts") {
        return read_parts(parts, layers, count);
    }
    let method = pipeline.get("partition").unwrap_or(&Value::Null);
    match method.as_str() {
        Some("uniform") => Ok(uniform(layers, count)),
        Some("parameters") => {
            let weights: Vec<f64> = profile.each_layer().map(|layer| layer.parameter_bytes as f64).collect();
            balanced(&weights, count).ok_or_else(|| {
                ReadError::new(format!(
                    "DeepSpeed's method takes too long for {layers} layers; give `pipeline.parts`"
                ))
            })
        }
        _ if method.is_null() && stages == 1 => Ok(Vec::new()),
        _ if method.is_null() => Err(missing("pipeline.parts")),
        _ => {
            let expected =
                "uniform or parameters, as `partition_method` of `PipelineModule`; or give `pipeline.parts`";
            Err(mistake("pipeline.partition", method, expected))
        }
    }
}

/// Reads the first layer of each stage, and the number of layers.
fn read_parts(parts: &Value, layers: usize, stages: usize) -> Result<Vec<usize>, ReadError> {
    let expected = format!(
        "{} ascending numbers from 0 to {layers}, the layers of the profile: the first layer of each of the {stages} stages, and \
         the end",
        stages + 1
    );
    let wrong = || mistake("pipeline.parts", parts, &expected);
    let list = parts.as_array().ok_or_else(wrong)?;
    let read: Option<Vec<usize>> =
        list.iter().map(|part| part.as_u64().and_then(|part| usize::try_from(part).ok())).collect();
    let read = read.ok_or_else(wrong)?;
    let is_complete = read.first() == Some(&0) && read.last() == Some(&layers) && read.len() == stages + 1;
    if !is_complete || read.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(wrong());
    }
    Ok(read[1..stages].to_vec())
}

/// Returns the number of layers of the largest stage.
fn largest(boundaries: &[usize], layers: usize) -> usize {
    let starts = [0].into_iter().chain(boundaries.iter().copied());
    let ends = boundaries.iter().copied().chain([layers]);
    starts.zip(ends).map(|(start, end)| end - start).max().unwrap_or(layers)
}

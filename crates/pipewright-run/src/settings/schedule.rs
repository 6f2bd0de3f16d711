//! The source of the program that a configuration asks for: a schedule of the catalogue in a size that it
//! has, or the rows of a file. Nothing is generated here: `training/prepare.rs` makes the program.

use std::path::Path;

use pipewright_document::Place;
use pipewright_models::{CutModel, ModelConfig, require_one_rank};
use pipewright_schedule::csv::parse_program;
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::{self, Limits, shared_microbatches};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::partition::partition;
use pipewright_schedule::{ModelDesc, Program, ScheduleSpec};
use pipewright_system::schedule_file::{ScheduleFileError, read_regular};
use pipewright_system::schedule_memory::{check_named, check_text};

use crate::settings::document::Document;
use crate::settings::generator;
use crate::settings::keys::LARGEST_COUNT;
use crate::settings::mesh::MeshSettings;
use crate::settings::offload::{self, OffloadChoice};
use crate::settings::paths::Surroundings;
use crate::settings::pipeline::{PipelineSettings, ScheduleChoice};
use crate::settings::section::Section;

/// Checks the schedule of `[pipeline]`, and completes the sizes that follow from it. `model` is the model
/// with the tokens of a row, if the configuration contains its sizes. Returns the source of the program
/// unless there is a problem or a plan chooses the schedule.
pub(super) fn read(
    document: &mut Document,
    surroundings: &Surroundings,
    pipeline: &mut PipelineSettings,
    model: Option<(ModelConfig, usize)>,
    mesh: &MeshSettings,
) -> Option<ProgramSource> {
    let mut section = Section::new(document, surroundings, "pipeline");
    let layers = cut_ends(&mut section, pipeline, model, mesh);
    if !section.is_sound() {
        return None;
    }
    if pipeline.is_planned() {
        refuse_beside_plan(&mut section, pipeline);
        return None;
    }
    match pipeline.schedule.clone() {
        ScheduleChoice::Named(name) => {
            let named = NamedSchedule { name, layers: layers.as_ref(), replicas: mesh.data_parallel };
            named.check(&mut section, pipeline)
        }
        ScheduleChoice::Csv(file) => {
            generator::refuse_all(&mut section);
            let rows = read_rows(&file).map_err(|error| section.report_error("schedule", error)).ok()?;
            take_sizes(&mut section, pipeline, &file, &rows, mesh.data_parallel);
            if !section.is_sound() {
                return None;
            }
            check_recompute(&mut section, pipeline, rows.placement().stages());
            offload::check(&mut section, &pipeline.offload, &pipeline.recompute, rows.placement().stages());
            Some(ProgramSource::Rows(rows))
        }
    }
}

/// Returns the layers of the model with its embedding and its head in parts. Refuses parts of ends that cannot
/// be cut so, and parts together with tensor ranks.
fn cut_ends(
    section: &mut Section<'_>,
    pipeline: &PipelineSettings,
    model: Option<(ModelConfig, usize)>,
    mesh: &MeshSettings,
) -> Option<ModelDesc> {
    let (ranks, embedding_parts) = (mesh.tensor_parallel, pipeline.embedding_parts);
    let ends = [("head_parts", pipeline.head_parts, 1), ("embedding_parts", 1, embedding_parts)];
    for (key, head_parts, embedding_parts) in ends {
        if let Err(error) = require_one_rank(head_parts, embedding_parts, ranks) {
            section.report_error(key, error);
            return None;
        }
    }
    let (model, tokens) = model?;
    let model = CutModel::new(model, pipeline.head_parts);
    let model = model.map_err(|error| section.report_error("head_parts", error)).ok()?;
    let model = model.with_embedding_parts(embedding_parts);
    let model = model.map_err(|error| section.report_error("embedding_parts", error)).ok()?;
    Some(model.describe(tokens))
}

/// Refuses settings that a plan does not use.
fn refuse_beside_plan(section: &mut Section<'_>, pipeline: &PipelineSettings) {
    generator::refuse_all(section);
    let offloads = pipeline.offload != OffloadChoice::None;
    for key in [section.is_written("layout").then_some("layout"), offloads.then_some("offload")]
        .into_iter()
        .flatten()
    {
        section.report_without(key, "a schedule by name or from a file", "remove it");
    }
}

/// Refuses a list with a stage that the schedule does not have.
fn check_recompute(section: &mut Section<'_>, pipeline: &PipelineSettings, stages: u32) {
    if let Some(stage) = pipeline.recompute.largest_stage().filter(|stage| stage.get() >= stages) {
        let range = format!("stages from 0 to {}", stages - 1);
        section.out_of_range::<()>("recompute", &stage.to_string(), &range);
    }
}

/// A schedule of the catalogue.
struct NamedSchedule<'a> {
    name: String,
    /// The layers of the model, if they are known.
    layers: Option<&'a ModelDesc>,
    replicas: u32,
}

impl NamedSchedule<'_> {
    /// Checks that the schedule exists in the size of the section, that it trains, and that the model can be
    /// cut into its stages.
    fn check(self, section: &mut Section<'_>, pipeline: &mut PipelineSettings) -> Option<ProgramSource> {
        let spec = self.spec(section, pipeline);
        let stages_per_rank = self.check_size(section, pipeline, &spec)?;
        if generate::find(&self.name).is_ok_and(|generator| !generator.has_backward()) {
            let sentence = format!("`schedule` is \"{}\", which has no backward and cannot train", self.name);
            section.report("schedule", sentence, "write for example `schedule = \"1f1b\"`");
            return None;
        }
        pipeline.stages_per_rank = stages_per_rank;
        let stages = stages_per_rank * pipeline.ranks;
        self.check_cut(section, pipeline, stages)?;
        check_recompute(section, pipeline, stages);
        offload::check(section, &pipeline.offload, &pipeline.recompute, stages);
        Some(ProgramSource::Named(self.name, Box::new(spec)))
    }

    /// Returns the specification for one replica.
    fn spec(&self, section: &Section<'_>, pipeline: &PipelineSettings) -> ScheduleSpec {
        pipeline.generator.spec(ScheduleSpec {
            ranks: pipeline.ranks,
            stages_per_rank: section.is_written("stages_per_rank").then_some(pipeline.stages_per_rank),
            microbatches: pipeline.microbatches / self.replicas,
            ..ScheduleSpec::default()
        })
    }

    /// Returns the number of stages on each rank.
    fn check_size(
        &self,
        section: &mut Section<'_>,
        pipeline: &PipelineSettings,
        spec: &ScheduleSpec,
    ) -> Option<u32> {
        let (microbatches, replicas) = (pipeline.microbatches, self.replicas);
        // A layout has stages of its own, and so do explicit boundaries; a mistake in them is reported as
        // such.
        let layers = self.layers.filter(|_| pipeline.layout.is_none() && pipeline.boundaries.is_none());
        let limits = Limits { layers: layers.map(|layers| layers.layers.len() as u32), replicas };
        if !microbatches.is_multiple_of(replicas) {
            let shared = shared_microbatches(&self.name, spec, limits);
            let shared = shared.into_iter().filter(|number| *number <= LARGEST_COUNT);
            let shared: Vec<String> = shared.map(|number| number.to_string()).collect();
            let help = match shared.as_slice() {
                [] => format!("change `mesh.data_parallel`, which is {replicas}"),
                numbers => format!("write {}", numbers.join(" or ")),
            };
            let sentence = format!(
                "`microbatches` is {microbatches}, which {replicas} replicas (`mesh.data_parallel`) cannot share \
                 evenly"
            );
            section.report("microbatches", sentence, help);
            return None;
        }
        if let Err(error) = check_named(&self.name, spec, Use::Simulate) {
            section.report_error_of(&["microbatches", "ranks", "schedule"], error);
            return None;
        }
        let checked = generate::check(&self.name, spec, limits);
        checked.map_err(|error| generator::report(section, error)).ok()
    }

    /// Checks the cut of the model into this many stages.
    fn check_cut(&self, section: &mut Section<'_>, pipeline: &PipelineSettings, stages: u32) -> Option<()> {
        if let Some(found) = pipeline.layout.as_ref().map(|layout| layout.boundaries.len() + 1)
            && found != stages as usize
        {
            let sentence = format!("the layout has {found} stages, and the schedule {stages}");
            section.report("layout", sentence, format!("separate {stages} stages with bars"));
            return None;
        }
        if let (Some(layers), Some(layout)) = (self.layers, &pipeline.layout)
            && let Err(error) = layout.check(layers)
        {
            section.report_error("layout", error);
            return None;
        }
        if let Some(layers) = self.layers
            && let Err(error) = partition(&pipeline.weights(layers), stages, &pipeline.method(layers))
        {
            section.report_error_of(&["layout", "boundaries", "ranks", "stages_per_rank"], error);
        }
        Some(())
    }
}

/// Reads the rows of a schedule's file, which may include communication.
fn read_rows(file: &Path) -> Result<Program, ScheduleFileError> {
    let text = read_regular(file)?;
    check_text(&text, Use::Simulate)?;
    parse_program(&text).map_err(|source| ScheduleFileError::Csv { path: file.to_owned(), source })
}

/// Sets the sizes to the sizes of the rows of a file, which are for one replica. Refuses written sizes that
/// differ.
///
/// A schedule from `--set` replaces the schedule and the sizes of the configuration file, and a note says so.
fn take_sizes(
    section: &mut Section<'_>,
    pipeline: &mut PipelineSettings,
    file: &Path,
    rows: &Program,
    replicas: u32,
) {
    let placement = rows.placement();
    let stages_per_rank = placement.all_ranks().map(|rank| placement.stages_of(rank).len() as u32).max();
    let stages_per_rank = stages_per_rank.unwrap_or(1);
    let microbatches = u64::from(rows.microbatches()) * u64::from(replicas);
    let sizes = [
        ("ranks", pipeline.ranks, u64::from(rows.ranks())),
        ("stages_per_rank", pipeline.stages_per_rank, u64::from(stages_per_rank)),
        ("microbatches", pipeline.microbatches, microbatches),
    ];
    let replaces_sizes = section.is_argument("schedule");
    for (key, value, found) in sizes.into_iter().filter(|(_, value, found)| u64::from(*value) != *found) {
        match section.place(key) {
            Place::Default => {}
            Place::File { source, .. } if replaces_sizes => {
                let written = section.text("schedule").unwrap_or_default();
                let shared = match replicas {
                    replicas if replicas > 1 && key == "microbatches" => format!(" for {replicas} replicas"),
                    _ => String::new(),
                };
                let name = &source.name;
                section
                    .note(format!("{key} = {value} of {name} is replaced by {found} of {written}{shared}"));
            }
            Place::File { .. } | Place::Set { .. } => {
                let sentence =
                    format!("`{key}` is {value}, and the schedule in {} has {found}", file.display());
                let help = format!("remove `{key}`, which follows from the file, or write `{key} = {found}`");
                section.report(key, sentence, help);
            }
        }
    }
    (pipeline.ranks, pipeline.stages_per_rank) = (rows.ranks(), stages_per_rank);
    match u32::try_from(microbatches) {
        Ok(microbatches) => pipeline.microbatches = microbatches,
        Err(_) => {
            let sentence = format!(
                "`microbatches` is {} in the file, for each of {replicas} replicas, where at most {} altogether is \
                 expected",
                rows.microbatches(),
                u32::MAX
            );
            section.report("schedule", sentence, "write a smaller schedule, or use fewer replicas");
        }
    }
}

//! [`WholeRun`]: the configuration with which a run has begun, and the ones with which it continues on fewer
//! processes.

use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};
use pipewright_models::CutModel;

use crate::failure::{Exit, Failure, sentence};
use crate::launch::layout::Layout;
use crate::planning::decision::Chosen;
use crate::planning::replan::{is_replanned, replan};
use pipewright_run::run_folder::{config_of, replace_config, replanned};
use pipewright_run::settings::{Base, Scheduled, Settings};
use pipewright_run::training::load::load;
use pipewright_run::training::memory::{memory_of_process, memory_plan, require_fit};
use pipewright_run::training::model::read_model;
use pipewright_run::training::prepare::{CutProgram, RunParts};

/// A run in its configured mesh.
pub(super) struct WholeRun {
    /// The file of the configuration, and its text in this mesh.
    file: PathBuf,
    text: String,
    settings: Settings,
    /// The model, or why this machine cannot read it.
    model: Result<CutModel, Failure>,
    /// Whether the planner chooses how the run continues on other ranks.
    is_replanned: bool,
    memory: MemoryRule,
}

/// How the memory of the machine of the launch decides on a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryRule {
    /// The ranks of each layout must fit into it.
    Strict,
    /// If no layout fits, the first one whose schedule exists is used: all processes are on other machines,
    /// whose memory is not known here.
    Preferred,
}

/// Whether a layout is accepted only if its ranks fit into the memory of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryCheck {
    Required,
    Skipped,
}

/// How a run continues on some processes.
pub(super) struct Distribution {
    pub(super) layout: Layout,
    config: String,
    /// Files for the folder of the run, each with its name and text.
    files: Vec<(String, String)>,
    /// Words about the schedule and the cut; `None` in the configured mesh.
    words: Option<String>,
}

impl WholeRun {
    /// Reads the run in a folder. If it has begun in another mesh than the configured one, `set` has the
    /// settings of the configured mesh.
    ///
    /// # Errors
    /// Fails if the configuration cannot be read.
    pub(super) fn read(run: &Path, set: &[String], memory: MemoryRule) -> Result<Self, Failure> {
        let file = config_of(run).map_err(Failure::input)?;
        let text = read_regular_text(&file, SMALL_TEXT)
            .map_err(|error| Failure::input(format!("{}: cannot be read: {error}", file.display())))?;
        // The run may have been moved since it wrote its configuration.
        let out = format!("run.out={}", toml::Value::String(run.display().to_string()));
        let with =
            |set: &[String]| load(Base::Text(&file, &text), &[set, std::slice::from_ref(&out)].concat());
        let loaded = with(set).or_else(|_| with(&[]))?;
        let Scheduled { settings, source } = loaded
            .scheduled()
            .map_err(|_| Failure::input(format!("{}: the run has stored no schedule", file.display())))?;
        let model = read_model(&settings);
        let is_replanned = model.as_ref().is_ok_and(|model| is_replanned(&settings, &source, model));
        Ok(Self { text: settings.to_toml(), file, settings, model, is_replanned, memory })
    }

    /// Returns the layout of the configured mesh.
    pub(super) fn layout(&self) -> Layout {
        Layout::of(&self.settings)
    }

    /// Returns the number of processes of a layout.
    pub(super) fn processes(&self, layout: Layout) -> u32 {
        layout.processes(&self.settings)
    }

    /// Returns whether the run grows again when lost hosts answer.
    pub(super) fn grows(&self) -> bool {
        self.settings.run.grow
    }

    /// Returns how the run continues on at most `slots` processes: the first layout of
    /// [`Layout::candidates`] whose schedule exists and whose ranks fit into the memory, as the run's
    /// [`MemoryRule`] asks for it.
    ///
    /// # Errors
    /// Fails with the reason of the first layout if there is none.
    pub(super) fn for_slots(&self, slots: u32) -> Result<Distribution, Failure> {
        let checks: &[MemoryCheck] = match self.memory {
            MemoryRule::Strict => &[MemoryCheck::Required],
            MemoryRule::Preferred => &[MemoryCheck::Required, MemoryCheck::Skipped],
        };
        let mut first = None;
        for &check in checks {
            for layout in Layout::candidates(&self.settings, slots) {
                match self.distribution(layout, check) {
                    Ok(distribution) => return Ok(distribution),
                    Err(failure) => first = first.or(Some(failure)),
                }
            }
        }
        let first =
            first.unwrap_or_else(|| Failure::new(Exit::RankFailed, "no layout of the run is as small"));
        Err(match &self.model {
            Ok(_) => first,
            Err(unread) => Failure::new(
                first.kind,
                format!(
                    "{}\nthe run is not planned again, because its model cannot be read here: {}",
                    first.text(),
                    unread.text()
                ),
            ),
        })
    }

    fn distribution(&self, layout: Layout, check: MemoryCheck) -> Result<Distribution, Failure> {
        let whole = self.layout();
        if layout == whole {
            let config = self.text.clone();
            return Ok(Distribution { layout, config, files: Vec::new(), words: None });
        }
        if !self.is_replanned {
            return self.configured(layout, check);
        }
        // With fewer replicas, the run may keep its schedule and its cut.
        let keeps_ranks = layout.ranks == whole.ranks;
        let kept = keeps_ranks.then(|| self.configured(layout, check).ok()).flatten();
        kept.map_or_else(|| self.planned(layout, check), Ok)
    }

    /// Returns the run with the configured schedule and way of cutting.
    fn configured(&self, layout: Layout, check: MemoryCheck) -> Result<Distribution, Failure> {
        let loaded = load(Base::Text(&self.file, &self.text), &layout.arguments(&self.settings))?;
        let scheduled = loaded.scheduled().map_err(|_| Failure::new(Exit::Bug, "the run has a schedule"))?;
        let (config, schedule) = (scheduled.settings.to_toml(), scheduled.settings.pipeline.schedule.clone());
        if let Ok(model) = &self.model {
            require(check, scheduled, model)?;
        }
        let words = format!("{schedule} as configured, cut by `pipeline.partition`");
        Ok(Distribution { layout, config, files: Vec::new(), words: Some(words) })
    }

    /// Returns the run with a schedule and a cut from the planner.
    fn planned(&self, layout: Layout, check: MemoryCheck) -> Result<Distribution, Failure> {
        let Ok(model) = &self.model else { return self.configured(layout, check) };
        let mut settings = self.settings.clone();
        settings.pipeline.ranks = layout.ranks;
        settings.mesh = settings.mesh.clone().of_replicas(layout.replicas);
        let file = replanned(layout.replicas, layout.ranks);
        let memory = match check {
            MemoryCheck::Required => memory_of_process(&settings),
            MemoryCheck::Skipped => None,
        };
        let Chosen { scheduled, model, sentences, files } = replan(settings, model, &file, memory)?;
        let config = scheduled.settings.to_toml();
        require(check, scheduled, &model)?;
        let words = sentences.first().map_or("a plan", |sentence| sentence.trim_start_matches("auto: "));
        Ok(Distribution { layout, config, files, words: Some(format!("planned: {words}")) })
    }
}

/// Fails if the program of a run does not exist, or if its ranks do not fit into memory, as the command
/// `pipewright check` counts it, and this is required.
fn require(check: MemoryCheck, scheduled: Scheduled, model: &CutModel) -> Result<(), Failure> {
    let Scheduled { settings, source } = scheduled;
    let CutProgram { program, partition, .. } = CutProgram::new(source, &settings, model)?;
    if check == MemoryCheck::Skipped {
        return Ok(());
    }
    let run = RunParts { settings: &settings, model, program: &program, partition: &partition };
    require_fit(&memory_plan(run, model, &run.outlines()?)?)
}

impl Distribution {
    /// Returns words about the change from another layout, with the reason; `None` if they are equal. `slots`
    /// is the number of processes that can run.
    pub(super) fn change_from(&self, other: Layout, slots: u32) -> Option<String> {
        let change = self.layout.change_from(other)?;
        Some(match &self.words {
            None => change,
            Some(words) => format!("{change} ({slots} processes can run; {words})"),
        })
    }

    /// Replaces the run's configuration with this one.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub(super) fn apply(&self, run: &Path) -> Result<(), Failure> {
        replace_config(run, &self.config, &self.files).map_err(|error| {
            Failure::input(format!("the run cannot continue in this folder: {}", sentence(&error)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::planning::auto::assumed_profile;
    use pipewright_run::training::load::load_settings;

    /// Writes the configuration of a run into its folder, and returns it.
    fn begin(folder: &Path, set: &[&str]) -> Settings {
        let out = format!("run.out={}", folder.display());
        let transport =
            if cfg!(feature = "mpi") { "pipeline.transport=mpi" } else { "pipeline.transport=local" };
        let set = [set, &[transport, &out]].concat();
        let set: Vec<String> = set.into_iter().map(str::to_owned).collect();
        let settings = load_settings(None, &set).expect("settings").settings;
        fs::write(folder.join("config.toml"), settings.to_toml()).expect("a file");
        settings
    }

    /// Checks how a run continues on `slots` processes, and that it has its configuration again on more.
    fn check(set: &[&str], slots: u32, expected: Result<(u32, u32, &str), &str>) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let settings = begin(folder.path(), set);
        let whole = WholeRun::read(folder.path(), &[], MemoryRule::Strict).expect("a run");
        match (whole.for_slots(slots), expected) {
            (Ok(distribution), Ok((ranks, replicas, words))) => {
                distribution.apply(folder.path()).expect("the folder takes files");
                let again = load_settings(Some(&folder.path().join("config.toml")), &[]).expect("settings");
                let layout = Layout::of(&again.settings);
                assert_eq!((layout.ranks, layout.replicas), (ranks, replicas), "{set:?}");
                assert_eq!(layout, distribution.layout);
                let change = distribution.change_from(whole.layout(), slots).unwrap_or_default();
                assert!(change.contains(words), "`{words}` in {change}");
                assert!(again.scheduled().is_ok(), "the schedule is stored");
                let back = whole.for_slots(u32::MAX).expect("the configured mesh");
                back.apply(folder.path()).expect("the folder takes files");
                let again = load_settings(Some(&folder.path().join("config.toml")), &[]).expect("settings");
                assert_eq!(again.settings, settings, "the configured mesh again");
            }
            (Err(failure), Err(expected)) => assert!(failure.text().contains(expected), "{}", failure.text()),
            (found, expected) => {
                panic!("{:?} instead of {expected:?}", found.map(|distribution| distribution.layout))
            }
        }
    }

    #[test]
    fn a_run_without_a_plan_keeps_its_schedule() {
        let set = ["pipeline.ranks=4", "mesh.data_parallel=2"];
        check(&set, 8, Ok((4, 2, "")));
        check(&set, 7, Ok((4, 1, "with 1 replica instead of 2 (7 processes can run; 1f1b as configured")));
        check(
            &set,
            3,
            Ok((3, 1, "with 1 replica instead of 2 and with 3 ranks instead of 4 (3 processes can run")),
        );
    }

    #[test]
    fn a_run_with_a_plan_is_planned_again() {
        let explicit = ["pipeline.ranks=4", "pipeline.partition=explicit", "pipeline.boundaries=[2,3,5]"];
        check(&explicit, 3, Ok((3, 1, "with 3 ranks instead of 4 (3 processes can run; planned: ")));
        check(&explicit, 1, Ok((1, 1, "for assumed times)")));
        let planned = [
            "pipeline.ranks=4",
            "run.planned_step_ms=20.0",
            "pipeline.schedule=interleaved-1f1b",
            "pipeline.stages_per_rank=2",
            "pipeline.group_size=4",
            "model.num_hidden_layers=6",
        ];
        check(&planned, 2, Ok((2, 1, "with 2 ranks instead of 4 (2 processes can run; planned: ")));
    }

    #[test]
    fn a_plan_is_for_the_times_of_the_profile_in_the_folder() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let settings = begin(folder.path(), &["pipeline.ranks=4"]);
        let profile = assumed_profile(&settings, &read_model(&settings).expect("the model of the sample"));
        let text = toml::Table::try_from(profile).expect("a profile is a table").to_string();
        fs::write(folder.path().join("profile-0.toml"), text).expect("a file");
        let whole = WholeRun::read(folder.path(), &[], MemoryRule::Strict).expect("a run");
        let change = whole.for_slots(3).expect("a plan").change_from(whole.layout(), 3).expect("a change");
        assert!(change.starts_with("with 3 ranks instead of 4 (3 processes can run; planned: "), "{change}");
        assert!(change.ends_with("for the times in profile-0.toml)"), "{change}");
    }

    #[test]
    fn a_layout_that_does_not_fit_into_memory_is_refused() {
        // The embedding of one rank would take terabytes.
        let set = ["pipeline.ranks=4", "model.vocab_size=1000000000", "model.hidden_size=8192"];
        check(&set, 3, Err("does not fit into memory"));
        let folder = tempfile::tempdir().expect("a scratch folder");
        begin(folder.path(), &set);
        let whole = WholeRun::read(folder.path(), &[], MemoryRule::Preferred).expect("a run");
        let elsewhere = whole.for_slots(3).expect("the memory of other machines is not known").layout;
        assert_eq!(elsewhere, Layout { ranks: 3, replicas: 1 });
    }
}

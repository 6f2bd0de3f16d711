//! [`Layout`]: how a run is distributed over the processes that can be started, and [`WholeRun`]: how a run that has begun
//! continues on fewer of them.

use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};
use pipewright_models::CutModel;
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::words::counted;

use crate::error::{ErrorKind, RunError};
use crate::run::Chosen;
use crate::run_folder::{config_of, replace_config, replanned};
use crate::settings::{Base, Scheduled, Settings};
use crate::training::load::load;
use crate::training::memory::{memory_of_process, memory_plan, require_fit};
use crate::training::model::read_model;
use crate::training::prepare::{CutProgram, RunParts};

/// The number of ranks of the pipeline and of its replicas. The number of tensor ranks does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The ranks of a pipeline.
    pub ranks: u32,
    /// The replicas of the pipeline.
    pub replicas: u32,
}

impl Layout {
    /// Returns the layout of some settings.
    pub fn of(settings: &Settings) -> Self {
        Self { ranks: settings.pipeline.ranks, replicas: settings.mesh.data_parallel }
    }

    /// Returns the number of processes that the layout needs; the largest number if there are more.
    pub(super) fn processes(self, settings: &Settings) -> u32 {
        self.ranks.saturating_mul(self.replicas).saturating_mul(settings.mesh.tensor_parallel)
    }

    /// Returns the layouts of a run that fit into `slots` processes, the best one first: with all replicas,
    /// then with fewer, then one replica with fewer ranks.
    fn candidates(settings: &Settings, slots: u32) -> impl Iterator<Item = Self> {
        let whole = Self::of(settings);
        let fewer_replicas = (1..=whole.replicas).rev().map(move |replicas| Self { replicas, ..whole });
        let fewer_ranks = (1..whole.ranks).rev().map(|ranks| Self { ranks, replicas: 1 });
        fewer_replicas.chain(fewer_ranks).filter(move |layout| layout.processes(settings) <= slots)
    }

    /// Returns the first candidate that `is_valid`.
    pub(super) fn for_slots(
        settings: &Settings,
        slots: u32,
        is_valid: impl Fn(Self) -> bool,
    ) -> Option<Self> {
        let whole = Self::of(settings);
        Self::candidates(settings, slots).find(|layout| *layout == whole || is_valid(*layout))
    }

    /// Returns the settings that give the run this layout. The cut of the model follows from
    /// `pipeline.partition`.
    pub(super) fn arguments(self, settings: &Settings) -> Vec<String> {
        let mut arguments = vec![
            format!("pipeline.ranks={}", self.ranks),
            format!("mesh.data_parallel={}", settings.mesh.with_replicas(self.replicas)),
        ];
        if !settings.mesh.batch_shares.is_empty() {
            let shares = settings.mesh.clone().of_replicas(self.replicas).batch_shares;
            arguments.push(format!("mesh.batch_shares={shares:?}"));
        }
        if settings.mesh.expert_parallel > 1 {
            let mesh = settings.mesh.clone().of_replicas(self.replicas);
            arguments.push(format!("mesh.expert_parallel={}", mesh.expert_parallel));
        }
        if !settings.pipeline.profile_ranks.is_empty() && self != Self::of(settings) {
            // They are the ranks of the whole run.
            arguments.push("pipeline.profile_ranks=[]".to_owned());
        }
        arguments
    }

    /// Returns words about the change from another layout; `None` if they are equal.
    pub(super) fn change_from(self, other: Self) -> Option<String> {
        let part = |now: u32, before: u32, noun: &str| {
            (now != before).then(|| format!("with {} instead of {before}", counted(now, noun)))
        };
        let parts = [part(self.replicas, other.replicas, "replica"), part(self.ranks, other.ranks, "rank")];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(" and "))
    }
}

/// Plans a run for other ranks while it continues after a fault.
#[derive(Clone, Copy)]
pub struct Replanner {
    /// Returns whether a run is planned again, or keeps its schedule and its way of cutting.
    pub is_replanned: fn(&Settings, &ProgramSource, &CutModel) -> bool,
    /// Returns the run with a schedule and a cut for the ranks and replicas of its settings. A schedule without a name
    /// becomes a file of this name in the folder of the run. Each rank has so many bytes, if the memory is known.
    pub replan: fn(Settings, &CutModel, &str, Option<u64>) -> Result<Chosen, RunError>,
}

/// A run in its configured mesh.
pub struct WholeRun {
    /// The file of the configuration, and its text in this mesh.
    file: PathBuf,
    text: String,
    settings: Settings,
    /// The model, or why this machine cannot read it.
    model: Result<CutModel, RunError>,
    /// The planner, if it chooses how the run continues on other ranks.
    replanner: Option<Replanner>,
    /// The checks of memory, of which the first one that accepts a layout counts.
    checks: &'static [MemoryCheck],
}

/// Whether a layout is accepted only if its ranks fit into the memory of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryCheck {
    Required,
    Skipped,
}

/// How a run continues on some processes.
pub struct Distribution {
    /// The layout.
    pub layout: Layout,
    config: String,
    /// Files for the folder of the run, each with its name and text.
    files: Vec<(String, String)>,
    /// Words about the schedule and the cut; `None` in the configured mesh.
    words: Option<String>,
}

impl WholeRun {
    /// Reads the run in a folder. If it has begun in another mesh than the configured one, `set` has the
    /// settings of the configured mesh. If no process `runs_here`, the memory of the other machines is not known, so a
    /// layout that does not fit into the memory of this one is used if no layout fits.
    ///
    /// # Errors
    /// Fails if the configuration cannot be read.
    pub fn read(
        run: &Path,
        set: &[String],
        runs_here: bool,
        replanner: Option<Replanner>,
    ) -> Result<Self, RunError> {
        let file = config_of(run).map_err(RunError::input)?;
        let text = read_regular_text(&file, SMALL_TEXT)
            .map_err(|error| RunError::input(format!("{}: cannot be read: {error}", file.display())))?;
        // The run may have been moved since it wrote its configuration.
        let out = format!("run.out={}", toml::Value::String(run.display().to_string()));
        let with =
            |set: &[String]| load(Base::Text(&file, &text), &[set, std::slice::from_ref(&out)].concat());
        let loaded = with(set).or_else(|_| with(&[]))?;
        let Scheduled { settings, source } = loaded
            .scheduled()
            .map_err(|_| RunError::input(format!("{}: the run has stored no schedule", file.display())))?;
        let model = read_model(&settings);
        let replanner = replanner.filter(|replanner| {
            model.as_ref().is_ok_and(|model| (replanner.is_replanned)(&settings, &source, model))
        });
        let checks: &[MemoryCheck] =
            if runs_here { &[MemoryCheck::Required] } else { &[MemoryCheck::Required, MemoryCheck::Skipped] };
        Ok(Self { text: settings.to_toml(), file, settings, model, replanner, checks })
    }

    /// Returns the layout of the configured mesh.
    pub fn layout(&self) -> Layout {
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

    /// Returns how the run continues on at most `slots` processes: with all replicas, with fewer, or with one replica and
    /// fewer ranks. The first layout counts whose schedule exists and whose ranks fit into the memory.
    ///
    /// # Errors
    /// Fails with the reason of the first layout if there is none.
    pub fn for_slots(&self, slots: u32) -> Result<Distribution, RunError> {
        let mut first = None;
        for &check in self.checks {
            for layout in Layout::candidates(&self.settings, slots) {
                match self.distribution(layout, check) {
                    Ok(distribution) => return Ok(distribution),
                    Err(failure) => first = first.or(Some(failure)),
                }
            }
        }
        let first =
            first.unwrap_or_else(|| RunError::new(ErrorKind::RankFailed, "no layout of the run is as small"));
        Err(match &self.model {
            Ok(_) => first,
            Err(unread) => RunError::new(
                first.kind,
                format!(
                    "{}\nthe run is not planned again, because its model cannot be read here: {}",
                    first.text(),
                    unread.text()
                ),
            ),
        })
    }

    fn distribution(&self, layout: Layout, check: MemoryCheck) -> Result<Distribution, RunError> {
        let whole = self.layout();
        if layout == whole {
            let config = self.text.clone();
            return Ok(Distribution { layout, config, files: Vec::new(), words: None });
        }
        // With fewer replicas, the run may keep its schedule and its cut.
        let keeps_ranks = layout.ranks == whole.ranks;
        match (self.replanner, &self.model) {
            (Some(replanner), Ok(model)) => {
                let kept = keeps_ranks.then(|| self.configured(layout, check).ok()).flatten();
                kept.map_or_else(|| self.planned(replanner, model, layout, check), Ok)
            }
            _ => self.configured(layout, check),
        }
    }

    /// Returns the run with the configured schedule and way of cutting.
    fn configured(&self, layout: Layout, check: MemoryCheck) -> Result<Distribution, RunError> {
        let loaded = load(Base::Text(&self.file, &self.text), &layout.arguments(&self.settings))?;
        let scheduled =
            loaded.scheduled().map_err(|_| RunError::new(ErrorKind::Bug, "the run has a schedule"))?;
        let (config, schedule) = (scheduled.settings.to_toml(), scheduled.settings.pipeline.schedule.clone());
        if let Ok(model) = &self.model {
            require(check, scheduled, model)?;
        }
        let words = format!("{schedule} as configured, cut by `pipeline.partition`");
        Ok(Distribution { layout, config, files: Vec::new(), words: Some(words) })
    }

    /// Returns the run with a schedule and a cut from the planner.
    fn planned(
        &self,
        replanner: Replanner,
        model: &CutModel,
        layout: Layout,
        check: MemoryCheck,
    ) -> Result<Distribution, RunError> {
        let mut settings = self.settings.clone();
        settings.pipeline.ranks = layout.ranks;
        settings.pipeline.profile_ranks.clear();
        settings.mesh = settings.mesh.clone().of_replicas(layout.replicas);
        let file = replanned(layout.replicas, layout.ranks);
        let memory = match check {
            MemoryCheck::Required => memory_of_process(&settings),
            MemoryCheck::Skipped => None,
        };
        let Chosen { scheduled, model, sentences, files } =
            (replanner.replan)(settings, model, &file, memory)?;
        let config = scheduled.settings.to_toml();
        require(check, scheduled, &model)?;
        let words = sentences.first().map_or("a plan", |sentence| sentence.trim_start_matches("auto: "));
        Ok(Distribution { layout, config, files, words: Some(format!("planned: {words}")) })
    }
}

/// Fails if the program of a run does not exist, or if its ranks do not fit into memory, as the command
/// `pipewright check` counts it, and this is required.
fn require(check: MemoryCheck, scheduled: Scheduled, model: &CutModel) -> Result<(), RunError> {
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
    pub fn change_from(&self, other: Layout, slots: u32) -> Option<String> {
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
    pub fn apply(&self, run: &Path) -> Result<(), RunError> {
        replace_config(run, &self.config, &self.files).map_err(|error| {
            RunError::input(format!("the run cannot continue in this folder: {}", sentence(&error)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::load::load_settings;

    /// Returns the ranks and replicas for a number of slots, of a run with 4 ranks and 2 replicas.
    fn check(slots: u32, is_valid: fn(Layout) -> bool, expected: Option<(u32, u32)>) {
        let set = ["pipeline.ranks=4".to_owned(), "mesh.data_parallel=2".to_owned()];
        let settings = load_settings(None, &set).expect("the sample").settings;
        let layout = Layout::for_slots(&settings, slots, is_valid);
        assert_eq!(layout.map(|layout| (layout.ranks, layout.replicas)), expected, "{slots} slots");
    }

    #[test]
    fn replicas_are_given_up_before_ranks() {
        check(9, |_| true, Some((4, 2)));
        check(7, |_| true, Some((4, 1)));
        check(3, |_| true, Some((3, 1)));
        check(3, |layout| layout.ranks != 3, Some((2, 1)));
        check(0, |_| true, None);
    }

    #[test]
    fn fewer_replicas_have_equal_shares_of_the_batch() {
        let set = ["mesh.data_parallel=2".to_owned(), "mesh.batch_shares=[3, 1]".to_owned()];
        let settings = load_settings(None, &set).expect("the sample").settings;
        let shares = |replicas: u32| Layout { ranks: 1, replicas }.arguments(&settings).pop();
        assert_eq!(shares(2).as_deref(), Some("mesh.batch_shares=[3, 1]"));
        assert_eq!(shares(1).as_deref(), Some("mesh.batch_shares=[]"));
    }

    #[test]
    fn the_ranks_of_a_profile_are_for_the_whole_run() {
        let set = ["pipeline.ranks=3", "pipeline.profile_ranks=[0, 1, 3]"].map(str::to_owned);
        let settings = load_settings(None, &set).expect("the sample").settings;
        let arguments = |ranks| Layout { ranks, replicas: 1 }.arguments(&settings);
        assert_eq!(arguments(3), ["pipeline.ranks=3", "mesh.data_parallel=1"]);
        assert_eq!(arguments(2), ["pipeline.ranks=2", "mesh.data_parallel=1", "pipeline.profile_ranks=[]"]);
    }

    #[test]
    fn fewer_replicas_hold_the_experts_in_groups_that_add_in_the_same_order() {
        let check = |[replicas, experts]: [u32; 2], fewer: u32, expected: u32| {
            let set = [
                "pipeline.microbatches=72".to_owned(),
                format!("mesh.data_parallel={replicas}"),
                format!("mesh.expert_parallel={experts}"),
            ];
            let settings = load_settings(None, &set).expect("the sample").settings;
            let layout = Layout { ranks: 1, replicas: fewer };
            let expected = [
                "pipeline.ranks=1".to_owned(),
                format!("mesh.data_parallel={fewer}"),
                format!("mesh.expert_parallel={expected}"),
            ];
            assert_eq!(layout.arguments(&settings), expected, "{replicas} {experts}");
            let mesh = settings.mesh.of_replicas(fewer).mesh(1);
            assert!(mesh.expert_groups().is_some(), "{replicas} {experts}: {mesh:?}");
        };
        check([8, 4], 8, 4);
        check([8, 4], 4, 4);
        check([8, 4], 6, 2);
        check([8, 4], 2, 2);
        check([8, 4], 3, 1);
        // All replicas form one group, of any size.
        check([6, 6], 6, 6);
        check([6, 6], 3, 3);
        check([6, 6], 4, 2);
        check([12, 12], 9, 1);
    }

    #[test]
    fn a_change_is_stated() {
        let layout = |ranks, replicas| Layout { ranks, replicas };
        assert_eq!(layout(4, 1).change_from(layout(4, 2)).as_deref(), Some("with 1 replica instead of 2"));
        assert_eq!(
            layout(2, 1).change_from(layout(4, 2)).as_deref(),
            Some("with 1 replica instead of 2 and with 2 ranks instead of 4")
        );
        assert_eq!(layout(4, 1).change_from(layout(4, 1)), None);
    }
}

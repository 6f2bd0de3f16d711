//! A configuration of another system.

use std::path::{Path, PathBuf};

use pipewright_schedule::emit::{GivenOption, Options, ReadError, SystemFile};
use pipewright_schedule::plan::System;
use pipewright_schedule::words::counted;

use crate::emit::profile_of;
use crate::judge::given_run::{GivenRun, RunContext};
use crate::judge::{deepspeed, document, megatron, torchtitan};
use crate::size_names::{BATCH, EXPERT, GivenSizes, Names, Size};

/// A file whose system is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    file: SystemFile,
    /// Whether the file is YAML, whose other keys are in a recipe.
    is_recipe: bool,
}

impl Configuration {
    /// Reads a text by the ending of its name: `.yaml` and `.yml` are recipes of Megatron-Bridge or NeMo, `.toml` is of
    /// torchtitan, `.json` of DeepSpeed, and anything else a script or options of Megatron or torchtitan.
    ///
    /// # Errors
    /// When the text cannot be read, or is of no system, or of two.
    pub fn parse(name: &str, text: &str) -> Result<Self, ReadError> {
        let text = text.trim_start_matches('\u{feff}');
        let ending = name.rsplit('.').next().unwrap_or_default().to_lowercase();
        let is_recipe = ["yaml", "yml"].contains(&ending.as_str());
        let file = match ending.as_str() {
            _ if is_recipe => SystemFile::of_megatron(megatron::from_yaml(document::yaml(text)?)),
            "toml" => SystemFile::of_torchtitan(document::toml(text)?),
            _ => SystemFile::parse(text)?,
        };
        Ok(Self { file, is_recipe })
    }

    /// Returns the path of the table of computations that the file names, as it is written there.
    pub fn table(&self) -> Option<&str> {
        self.file.table()
    }

    /// Returns where the table of computations is: the path as it is written, or next to `file`, the path of this
    /// configuration.
    pub fn table_path(&self, file: &Path) -> Option<PathBuf> {
        let written = PathBuf::from(self.table()?);
        if written.exists() {
            return Some(written);
        }
        let folder = file.parent().unwrap_or(Path::new(""));
        let beside = written.file_name().map(|name| folder.join(name));
        Some(beside.filter(|path| path.exists()).unwrap_or_else(|| folder.join(written)))
    }

    /// Returns the file, which can be predicted against a profile.
    pub fn file(&self) -> &SystemFile {
        &self.file
    }

    /// Returns the run on a place. `table` is the content of the file that [`Configuration::table`] names.
    ///
    /// # Errors
    /// When an option that changes the layout is not known, a value is wrong or not known, or the layout is not of
    /// this model or not for so many GPUs.
    pub fn run(&self, place: &RunContext<'_>, table: Option<&str>) -> Result<GivenRun, ReadError> {
        let options = self.file.options();
        let system = self.file.system();
        let profile = profile_of(place.model, place.sequence.unwrap_or(1));
        let run = match system {
            System::Megatron => megatron::read(options, place, self.is_recipe)?,
            System::Torchtitan => {
                let options = torchtitan::with_length(options, place);
                let plan = SystemFile::of_torchtitan(options).plan(&profile, table, Some(place.gpus))?;
                torchtitan::read(self.file.options(), &plan, place)?
            }
            System::Deepspeed => {
                let plan = self.file.plan(&profile, table, Some(place.gpus))?;
                deepspeed::read(options, &plan, place)?
            }
        };
        check(&run, options, place)?;
        Ok(run)
    }
}

/// Checks that a run fits its model and the batch that is given elsewhere.
fn check(run: &GivenRun, options: &Options, place: &RunContext<'_>) -> Result<(), ReadError> {
    let names = Names::Of(run.system);
    let at = |size: Option<Size>, reason: String| {
        let key = size.map(|size| GivenOption::new(names.name(size), Vec::new(), 0).key);
        ReadError { line: key.and_then(|key| options.find(&key)).map(|option| option.line), reason }
    };
    let layout = &run.layout;
    if layout.expert > 1 && !run.model.has_experts() {
        let reason = format!("{}: the model has no experts; use 1", names.with_value(EXPERT, layout.expert));
        return Err(at(Some(EXPERT), reason));
    }
    if let Some(batch) = place.batch.filter(|&batch| batch != layout.batch) {
        let own = counted(layout.batch, "row");
        let reason = format!("the file has {own} per step, and {batch} are given; leave --global-batch out");
        return Err(at(Some(BATCH), reason));
    }
    if let Some(given) = place.precision.filter(|&given| given != layout.precision) {
        let (given, own) = (given.name(), layout.precision.name());
        let reason =
            format!("the products are in {own}, and --precision says {given}; leave --precision out");
        return Err(ReadError { line: None, reason });
    }
    layout.find_fault(&run.model).map_err(|fault| {
        let size = fault.size();
        let given = GivenSizes { names, sizes: layout.sizes().to_vec(), gpus_per_node: 1, is_mixed: false };
        at(size, fault.error(&given).to_string())
    })
}

//! The arguments that specify a run, and the settings that they load. The commands that prepare a run share
//! them.

use std::path::PathBuf;

use clap::Args;
use pipewright_planning::failure::Failure;
use pipewright_run::settings::{Base, Loaded};
use pipewright_run::training::load::{load, load_settings};

use crate::keys::keys;

/// The configuration of a run.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunArguments {
    /// The configuration file; by default, the built-in sample
    #[arg(value_name = "CONFIG.toml")]
    config: Option<PathBuf>,
    /// Fine-tune the model in this Hugging Face directory (`model.from`), without a configuration file
    #[arg(long, value_name = "DIR", requires = "data", conflicts_with = "config")]
    from: Option<String>,
    /// The data for --from (`data.path`): text, chats, completions or token ids; may be repeated
    #[arg(long, value_name = "PATH", requires = "from", conflicts_with = "config")]
    data: Vec<String>,
    /// Train adapters in place of the parameters of the model of --from, as `adapter.kind = "lora"` does
    #[arg(long, requires = "from")]
    lora: bool,
    /// Override a key with a TOML value; a value that is not TOML is taken as text
    #[arg(long, value_name = "section.key=value", value_parser = keys(), hide_possible_values = true)]
    set: Vec<String>,
}

impl RunArguments {
    /// Loads the settings: of the file, of the built-in sample, or for the model and the data that the
    /// arguments name. `--set` arguments override them.
    pub(crate) fn load(&self) -> Result<Loaded, Failure> {
        let Some(model) = &self.from else { return load_settings(self.config.as_deref(), &self.set) };
        let quoted = |text: &String| toml::Value::String(text.clone());
        let data = toml::Value::Array(self.data.iter().map(quoted).collect());
        let mut named = vec![format!("model.from={}", quoted(model)), format!("data.path={data}")];
        named.extend(self.lora.then(|| "adapter.kind=lora".to_owned()));
        load(Base::FineTuning, &[&named, &self.set[..]].concat())
    }
}

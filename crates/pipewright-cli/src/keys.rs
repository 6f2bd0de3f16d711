//! The keys of a configuration, which a shell completes after `--set`.

use pipewright_planning::argument_values::Hinted;
use pipewright_run::settings::set_arguments;

/// Returns the parser of a key and its value, as after `--set`.
pub(crate) fn keys() -> Hinted {
    Hinted::of(set_arguments().iter().map(String::as_str).collect())
}

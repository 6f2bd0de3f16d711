//! The forms of the cases of several families: trainings in the pipeline, and configurations with changes.

use std::error::Error;

use serde_json::Value;

/// Makes a test of each line: its name, and the schedule, the ranks and the microbatches that the model is
/// checked with.
macro_rules! cases {
    ($model:ident: $($name:ident: $schedule:literal, $ranks:literal, $microbatches:literal;)*) => {$(
        #[test]
        fn $name() {
            $model.check($schedule, $ranks, $microbatches);
        }
    )*};
}

pub(crate) use cases;

/// Returns the configuration that `read` makes of `json` with changes, or the error with its cause.
pub(crate) fn changed_json<C, E: Error>(
    mut json: Value,
    changes: Value,
    read: impl FnOnce(Value) -> Result<C, E>,
) -> Result<C, String> {
    for (key, value) in changes.as_object().expect("it is one") {
        json[key] = value.clone();
    }
    read(json).map_err(|error| match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    })
}

//! Clusters for the commands: a machine by its name or file, the list of the known ones, and plans for them.

pub(crate) mod machine;
pub(crate) mod list;
pub(crate) mod arguments;
mod model;
pub(crate) mod plan;
mod words;
pub(crate) mod plan_text;
pub(crate) mod plan_json;

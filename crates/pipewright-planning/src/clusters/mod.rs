//! Clusters for the commands: a machine by its name or file, the list of the known ones, and plans for them.

pub(crate) mod machine;
pub(crate) mod list;
mod failures;
pub(crate) mod arguments;
pub mod model;
pub(crate) mod request;
pub(crate) mod plan;
pub(crate) mod plan_text;
pub(crate) mod plan_json;
pub(crate) mod judged;

//! Clusters for the commands: a machine by its name or file, and the list of the known ones.

pub(crate) mod machine;
pub(crate) mod list;

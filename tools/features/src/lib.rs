//! Gives dependencies the same features in all builds of the workspace, so that a build with other features of
//! this project's crates compiles only what those features concern. The list is in `Cargo.toml`.

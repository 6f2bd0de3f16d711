//! Models and functions of the user's: graphs, layers that defer their weight gradients, hooks, changes after
//! the launch.

mod every_layer;
mod graph;
mod shapes;
mod split_backward;
mod custom;
mod after_launch;
#[path = "../support/mod.rs"]
mod support;

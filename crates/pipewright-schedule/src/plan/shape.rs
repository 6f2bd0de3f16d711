//! The division of ranks and rows: the mesh, and the microbatches of each replica.

use std::borrow::Cow;

use crate::divisor::divisors;
use crate::mesh::{Mesh, MeshOrder};
use crate::plan::class::Class;
use crate::plan::head_parts::{parts_of, with_head_parts};
use crate::plan::layers::{Layer, Layers};
use crate::plan::network::Network;
use crate::plan::rank_times::Step;
use crate::plan::report::PlanMesh;
use crate::plan::request::PlanRequest;
use crate::plan::system::System;
use crate::plan::tuning;
use crate::profile::Profile;
use crate::sharding::Sharding;

/// One division.
pub(super) struct Shape {
    pub(super) mesh: Mesh,
    /// The number of parts of the head.
    pub(super) head_parts: u32,
    /// The ranks of a pipeline.
    pub(super) ranks: u32,
    /// The microbatches of a replica.
    pub(super) microbatches: u32,
    pub(super) microbatch_rows: u32,
    pub(super) layers: Layers,
    pub(super) classes: Vec<Class>,
}

impl Shape {
    /// Returns all divisions of a request that are small enough.
    pub(super) fn all(profile: &Profile, request: &PlanRequest) -> Vec<Self> {
        // No other system cuts the head into parts.
        let parts = if request.system.is_some() { &[1][..] } else { &request.head_parts };
        let asked = parts.iter().map(|&parts| with_head_parts(profile, Some(parts)));
        let mut profiles: Vec<Cow<'_, Profile>> = asked.collect();
        if profiles.is_empty() {
            profiles.push(Cow::Borrowed(profile));
        }
        profiles.iter().flat_map(|profile| Self::of_profile(profile, request)).collect()
    }

    /// Returns all divisions for the head of the profile.
    fn of_profile(profile: &Profile, request: &PlanRequest) -> Vec<Self> {
        let mut shapes = Vec::new();
        let networks = networks(profile, request);
        let may_group = |&rows: &u32| rows == 1 || request.larger_microbatches;
        for rows in divisors(request.microbatches).into_iter().filter(may_group) {
            let microbatch_rows = request.microbatch_rows.saturating_mul(rows);
            let microbatches = request.microbatches / rows;
            for &network in &networks {
                let mesh = network.mesh;
                let (ranks, count) = (mesh.pipeline, profile.layer_count() as usize);
                let computations = 3 * u128::from(ranks) * u128::from(microbatches / mesh.data);
                let fits = ranks as usize <= count && computations <= tuning::search::MOST_COMPUTATIONS;
                if !fits || !microbatches.is_multiple_of(mesh.data) {
                    continue;
                }
                shapes.push(Self {
                    mesh,
                    head_parts: parts_of(profile),
                    ranks,
                    microbatches: microbatches / mesh.data,
                    microbatch_rows,
                    layers: Layers::of(profile, microbatch_rows, network, request.state),
                    classes: Class::all(ranks, count),
                });
            }
        }
        shapes
    }

    /// Returns the division as plans have it.
    pub(super) fn plan_mesh(&self) -> PlanMesh {
        PlanMesh {
            mesh: Mesh { order: MeshOrder::default(), ..self.mesh },
            microbatches: self.microbatches * self.mesh.data,
            microbatch_rows: self.microbatch_rows,
            head_parts: self.head_parts,
        }
    }

    /// Returns whether two divisions differ in nothing but the number of parts of the head.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (self.mesh, self.microbatch_rows) == (other.mesh, other.microbatch_rows)
    }

    /// Returns the bytes of all parameters, gradients and optimizer state of a replica, as the share of one
    /// tensor-parallel rank. Of parameters that replicas hold together, these are the replica's part.
    pub(super) fn fixed_bytes(&self) -> u128 {
        let parts = Sharding { window: 0, ..self.layers.sharding };
        let bytes = |layer: &Layer| {
            let held = parts.held([layer.state]);
            u128::from(layer.gradient) + u128::from(held.total())
        };
        self.layers.list.iter().map(bytes).sum()
    }

    /// Returns the step for the bounds.
    pub(super) fn step(&self) -> Step<'_> {
        Step::of(&self.layers, self.ranks, self.microbatches)
    }
}

/// Returns the networks of all meshes of a request. Without nodes, there are no tensor-parallel ranks.
fn networks(profile: &Profile, request: &PlanRequest) -> Vec<Network> {
    let mut networks: Vec<Network> = Vec::new();
    let tensors = profile.node.map_or_else(|| vec![1], |node| divisors(node.ranks));
    let has_both = request.system.is_none_or(System::has_pipeline_order) || profile.node.is_none();
    let orders: &[MeshOrder] =
        if has_both { &[MeshOrder::Pipeline, MeshOrder::Replicas] } else { &[MeshOrder::Replicas] };
    let is_wanted = |wanted: Option<u32>, found: u32| wanted.is_none_or(|wanted| wanted == found);
    for tensor in tensors.into_iter().filter(|&tensor| is_wanted(request.tensor_parallel, tensor)) {
        if !request.ranks.is_multiple_of(tensor) {
            continue;
        }
        let pipelines = request.ranks / tensor;
        for replicas in divisors(pipelines).into_iter().filter(|&it| is_wanted(request.data_parallel, it)) {
            for order in orders.iter().copied() {
                let mesh =
                    Mesh { tensor, data: replicas, pipeline: pipelines / replicas, order, ..Mesh::default() };
                let found = Network::of(profile, mesh);
                networks.extend(found.filter(|found| !networks.iter().any(|known| known.is_like(found))));
            }
        }
    }
    networks
}

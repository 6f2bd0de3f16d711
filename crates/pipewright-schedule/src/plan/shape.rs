//! The division of ranks and rows: the mesh, and the microbatches of each replica.

use std::borrow::Cow;

use crate::divisor::divisors;
use crate::ids::Rank;
use crate::mesh::{Mesh, MeshOrder};
use crate::plan::class::Class;
use crate::plan::head_parts::{parts_of, with_head_parts};
use crate::plan::layers::{Layer, Layers};
use crate::plan::network::Network;
use crate::plan::placed_cut::Swaps;
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::Step;
use crate::plan::report::PlanMesh;
use crate::plan::request::PlanRequest;
use crate::plan::system::System;
use crate::plan::tuning;
use crate::profile::Profile;
use crate::sharding::Sharding;

/// One division.
pub(super) struct Shape {
    /// The ranks of the profile that are used, if ranks are unlike; empty if they are equal.
    pub(super) machines: Vec<Rank>,
    pub(super) mesh: Mesh,
    /// The number of parts of the head.
    pub(super) head_parts: u32,
    /// The ranks of a pipeline.
    pub(super) ranks: u32,
    /// The microbatches of a replica.
    pub(super) microbatches: u32,
    pub(super) microbatch_rows: u32,
    pub(super) layers: Layers,
    /// The memory of the ranks; `None` for any amount.
    pub(super) memory: Option<RankMemory>,
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
        let replicas = request.data_parallel.unwrap_or(1).max(1);
        let of_profile = |profile: &Cow<'_, Profile>| {
            if !profile.has_unlike_ranks() {
                return Self::of_profile(profile, request, &[]);
            }
            let used =
                |machines: Vec<Rank>| Self::of_profile(&profile.of_ranks(&machines), request, &machines);
            subsets(profile, request.ranks / replicas).into_iter().flat_map(used).collect()
        };
        profiles.iter().flat_map(of_profile).collect()
    }

    /// Returns all divisions for the head of the profile. Its ranks are `machines`, if these are unlike, in each replica.
    pub(super) fn of_profile(profile: &Profile, request: &PlanRequest, machines: &[Rank]) -> Vec<Self> {
        let mut shapes = Vec::new();
        let replicas = request.data_parallel.unwrap_or(1);
        let all_ranks = if machines.is_empty() { request.ranks } else { machines.len() as u32 * replicas };
        let networks = networks(profile, request, all_ranks);
        let may_group = |&rows: &u32| rows == 1 || request.larger_microbatches;
        for rows in divisors(request.microbatches).into_iter().filter(may_group) {
            let microbatch_rows = request.microbatch_rows.saturating_mul(rows);
            let microbatches = request.microbatches / rows;
            for network in &networks {
                let mesh = network.mesh;
                let (ranks, count) = (mesh.pipeline, profile.layer_count() as usize);
                let computations = 3 * u128::from(ranks) * u128::from(microbatches / mesh.data);
                // The bound holds for all unlike ranks, even if some of them have no layer.
                let may_have_none = all_ranks == request.ranks && !machines.is_empty();
                let fits = (ranks as usize <= count || may_have_none)
                    && computations <= tuning::search::MOST_COMPUTATIONS;
                if !fits || !microbatches.is_multiple_of(mesh.data) {
                    continue;
                }
                shapes.push(Self {
                    machines: machines.to_vec(),
                    mesh,
                    head_parts: parts_of(profile),
                    ranks,
                    microbatches: microbatches / mesh.data,
                    microbatch_rows,
                    layers: Layers::of(profile, microbatch_rows, network.clone(), request.state).with_speeds(
                        profile,
                        microbatch_rows,
                        request.state,
                    ),
                    memory: RankMemory::of(profile, request),
                    classes: Class::all(ranks, count),
                });
            }
        }
        shapes
    }

    /// Returns the rank of the profile that a rank of the pipeline is.
    pub(super) fn machine_of(&self, rank: Rank) -> Rank {
        self.machines.get(rank.index()).copied().unwrap_or(rank)
    }

    /// Returns whether all of `ranks` unlike ranks are used.
    pub(super) fn has_machines(&self, ranks: usize) -> bool {
        self.machines.len() * self.mesh.data as usize == ranks
    }

    /// Returns the stages that may exchange their ranks.
    pub(super) fn swaps(&self) -> Swaps {
        if self.layers.is_unlike() { Swaps::Any } else { Swaps::Rounds }
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

    /// Returns whether two divisions of unlike ranks differ in nothing but the ranks.
    pub(super) fn has_all_of(&self, other: &Self) -> bool {
        (self.microbatch_rows, self.head_parts) == (other.microbatch_rows, other.head_parts)
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
fn networks(profile: &Profile, request: &PlanRequest, ranks: u32) -> Vec<Network> {
    let mut networks: Vec<Network> = Vec::new();
    let tensors = profile.node.map_or_else(|| vec![1], |node| divisors(node.ranks));
    let has_both = request.system.is_none_or(System::has_pipeline_order) || profile.node.is_none();
    let orders: &[MeshOrder] =
        if has_both { &[MeshOrder::Pipeline, MeshOrder::Replicas] } else { &[MeshOrder::Replicas] };
    let is_wanted = |wanted: Option<u32>, found: u32| wanted.is_none_or(|wanted| wanted == found);
    for tensor in tensors.into_iter().filter(|&tensor| is_wanted(request.tensor_parallel, tensor)) {
        if !ranks.is_multiple_of(tensor) {
            continue;
        }
        let pipelines = ranks / tensor;
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

/// Returns the unlike ranks that a plan may use: all of them, and all but the slowest ones; if links differ, also
/// all but the ones with the slowest links.
fn subsets(profile: &Profile, ranks: u32) -> Vec<Vec<Rank>> {
    let all: Vec<Rank> = (0..ranks).map(Rank::new).collect();
    let work = |profile: &Profile| -> f64 {
        profile.each_layer().map(|layer| layer.forward_s + layer.whole_backward_s()).sum()
    };
    let time =
        |rank: &Rank| profile.ranks.get(rank.index()).map_or(1.0, |own| work(&profile.at_speed_of(own)));
    let times: Vec<f64> = all.iter().map(time).collect();
    let bytes = profile.each_layer().map(|layer| layer.output_bytes).max().unwrap_or(0) as f64;
    let links = profile.links_between(&all);
    let message = |from: usize, to: usize| {
        let link = links[from * all.len() + to];
        link.latency_s + bytes / link.bytes_per_s
    };
    let both = |one: usize, other: usize| message(one, other) + message(other, one);
    let nearest = |rank: &Rank| {
        let others = (0..all.len()).filter(|&other| other != rank.index());
        others.map(|other| both(rank.index(), other)).fold(f64::INFINITY, f64::min)
    };
    let mut subsets = vec![all.clone()];
    if ranks <= tuning::unlike::ALL_SUBSETS {
        let of_bits = |bits: u32| all.iter().copied().filter(|rank| bits >> rank.get() & 1 == 1).collect();
        subsets.extend((1..(1 << ranks) - 1).map(of_bits));
        return subsets;
    }
    let mut drop_by = |slowness: &dyn Fn(&Rank) -> f64| {
        let mut order = all.clone();
        order.sort_by(|one, other| slowness(one).total_cmp(&slowness(other)));
        let step = order.len().div_ceil(tuning::unlike::SUBSETS);
        for count in (1..order.len()).rev().step_by(step) {
            let mut kept = order[..count].to_vec();
            kept.sort_unstable();
            if !subsets.contains(&kept) {
                subsets.push(kept);
            }
        }
    };
    drop_by(&|rank| times[rank.index()]);
    if !profile.pairs.is_empty() {
        let nearest: Vec<f64> = all.iter().map(nearest).collect();
        drop_by(&|rank| nearest[rank.index()]);
    }
    subsets
}

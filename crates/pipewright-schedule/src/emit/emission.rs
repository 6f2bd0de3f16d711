//! The files that a plan becomes for another system, and what they do not say.

use crate::emit::block_modules::Modules;
use crate::emit::mapping::{Mapping, Remark};
use crate::emit::model_parts::ModelParts;
use crate::mesh::ShardedState;
use crate::plan::{Plan, System};
use crate::profile::Profile;

/// The settings of a run that files need and a plan does not have.
#[derive(Debug, Clone, Copy)]
pub struct EmitRequest<'a> {
    /// The profile of the plan.
    pub profile: &'a Profile,
    /// The precision of the computation: `f32`, `bf16` or `f16`.
    pub precision: &'a str,
    /// The target of the plan.
    pub scope: PlanScope,
    /// The folder of the files, which options name; empty for the current one.
    pub folder: &'a str,
    /// The release of the system.
    pub release: Release,
}

/// The release of a system whose options are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Release {
    /// The last one with a number.
    #[default]
    Numbered,
    /// The main branch. Only torchtitan has other options there, since August 2026.
    Main,
}

/// The target of a plan, with what only such plans have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanScope {
    /// The ranks of a profile.
    Profile {
        /// The number of replicas that hold parameters and optimizer state together; 1 if each holds all.
        shards: u32,
    },
    /// A cluster. The options say what blocks recompute, and the [`Plan`] does not.
    Cluster(MeshOptions),
}

/// The parts of a plan for a cluster that a [`Plan`](crate::plan::Plan) does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshOptions {
    /// The ranks that divide each expert; `None` if the model has no experts.
    pub expert_tensor: Option<u32>,
    /// Whether the ranks of a tensor group divide the sequence between their products.
    pub sequence_parallel: bool,
    /// The library that sends tokens to experts; `None` if the model has no experts that ranks divide.
    pub dispatch: Option<Dispatch>,
    /// Whether tokens travel to experts and back while another microbatch is computed.
    pub overlaps_experts: bool,
    /// The tensors that replicas shard.
    pub sharded: ShardedState,
    /// The groups of replicas that each hold all shards; 1 if all replicas are one group.
    pub shard_groups: u32,
    /// Whether gradients are summed in bf16 instead of f32.
    pub bf16_gradients: bool,
    /// The part of each block that its backward computes again.
    pub recompute: RecomputedPart,
    /// The first blocks of each stage that are computed again; `None` for all.
    pub recomputed_blocks: Option<u32>,
    /// The first blocks of a rank whose activations are in the memory of the host until their backward.
    pub offloaded_blocks: u32,
    /// The blocks that predict further tokens, in the last stage.
    pub predictors: u32,
    /// The format of products with parameters; `None` if it is the format of everything else.
    pub narrow: Option<NarrowProducts>,
}

/// A format of products that is narrower than the format of everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NarrowProducts {
    /// FP8 with scales of tensors.
    Fp8,
    /// FP8 with scales of 32 numbers.
    Mxfp8,
    /// 4 bits with scales of 16 numbers.
    Nvfp4,
}

/// The library that sends tokens to the ranks of their experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// One exchange of all ranks with all ranks.
    AllToAll,
    /// DeepEP.
    DeepEp,
    /// HybridEP.
    HybridEp,
}

/// The part of a block that its backward computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputedPart {
    /// Nothing.
    Nothing,
    /// The scores of attention.
    Scores,
    /// These parts.
    Modules(Modules),
    /// Elementwise operations and every second product.
    Elementwise,
    /// All of it, from the input of the block.
    Block,
}

/// The files for a system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emission {
    /// The system.
    pub system: System,
    /// The files. The first one has the options, and is the one that [`SystemFile`](super::SystemFile) reads.
    pub files: Vec<EmittedFile>,
    /// The parts of the plan that the files express differently or leave out.
    pub remarks: Vec<Remark>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmittedFile {
    /// The name, without a folder.
    pub name: &'static str,
    /// The content.
    pub text: String,
}

impl NarrowProducts {
    /// Returns its name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8",
            Self::Mxfp8 => "MXFP8",
            Self::Nvfp4 => "NVFP4",
        }
    }
}

impl<'a> EmitRequest<'a> {
    /// Returns a request for files in the current folder, in the precision of the profile, without shards,
    /// for a plan for a profile.
    pub fn new(profile: &'a Profile) -> Self {
        let precision = profile.device.as_ref().and_then(|device| device.precision.as_deref());
        Self {
            profile,
            precision: precision.unwrap_or("f32"),
            scope: PlanScope::Profile { shards: 1 },
            folder: "",
            release: Release::default(),
        }
    }

    /// Returns the options of a plan for a cluster.
    pub(super) fn mesh(&self) -> Option<&MeshOptions> {
        match &self.scope {
            PlanScope::Profile { .. } => None,
            PlanScope::Cluster(mesh) => Some(mesh),
        }
    }

    /// Returns how many of `replicas` replicas hold one copy of the parameters of a stage together.
    pub(super) fn shards(&self, replicas: u32) -> u32 {
        match &self.scope {
            PlanScope::Profile { shards } => (*shards).min(replicas).max(1),
            PlanScope::Cluster(mesh) => mesh.sharded.shards(replicas / mesh.shard_groups.max(1)),
        }
    }
}

impl Emission {
    /// Returns an emission with the file of options, before the file of the mapping is added.
    pub(super) fn new(system: System, files: Vec<EmittedFile>) -> Self {
        Self { system, files, remarks: Vec::new() }
    }

    /// Adds a remark.
    pub(super) fn remark(&mut self, subject: &'static str, text: impl Into<String>) {
        self.remarks.push(Remark { subject, text: text.into() });
    }

    /// Adds the remarks that all systems share, and the file that shows the mapping of layers.
    pub(super) fn finish(mut self, plan: &Plan, request: &EmitRequest<'_>, mapping: &Mapping) -> Self {
        let parts = ModelParts::of(request.profile);
        let missing = [(parts.has_embedding(), "embedding", "first"), (parts.has_head(), "head", "last")];
        for (has, name, place) in missing {
            if !has {
                let text = format!(
                    "the profile has no layer of the kind `{name}`; it is in the {place} stage, and the {place} block is taken to have its costs"
                );
                self.remark("layers", text);
            }
        }
        let shards = request.shards(plan.mesh.data);
        if request.mesh().is_none() && shards > 1 && self.system != System::Torchtitan {
            let text = format!(
                "{shards} replicas share parameters and optimizer state in the plan; this is not in the file"
            );
            self.remark("replicas", text);
        }
        let text = mapping.text(plan, &parts, &self.remarks);
        self.files.push(EmittedFile { name: "mapping.md", text });
        self
    }
}

/// The options of a mesh without any of these parts.
#[cfg(test)]
pub(super) const NO_OPTIONS: MeshOptions = MeshOptions {
    expert_tensor: None,
    sequence_parallel: false,
    dispatch: None,
    overlaps_experts: false,
    sharded: ShardedState::Nothing,
    shard_groups: 1,
    bf16_gradients: false,
    recompute: RecomputedPart::Nothing,
    recomputed_blocks: None,
    offloaded_blocks: 0,
    predictors: 0,
    narrow: None,
};

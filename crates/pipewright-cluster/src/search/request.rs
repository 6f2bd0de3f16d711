//! A request to the search.

use pipewright_document::GIB;
use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::generate::find;
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_schedule::plan::System;
use pipewright_schedule::words::counted;

use crate::expert_overlap;
use crate::implementation::{Implementation, Stack};
use crate::layout::{Cut, Layout, LayoutError, Precision, Recompute, Scores, ShardedState};
use crate::layout_error::Fault;
use crate::machine::Machine;
use crate::placed::{Machines, Placed, check_pipeline, kinds_of_ranks, kinds_text, least_pipeline};
use crate::predict::Prediction;
use crate::search::error::{LeastMemory, SearchError, SearchErrorKind, TightestRank};
use crate::setting::Setting;
use crate::size_names::{
    CHUNKS, CONTEXT, DATA, EXPERT, GPUS, GivenSizes, MEMORY, MESH, MICROBATCH, Names, PIPELINE, SHARDS,
    TENSOR,
};
use crate::systems;
use pipewright_shapes::model::Model;

/// Bytes of a GPU's memory that the driver's context, libraries and the buffers of collectives take: about
/// 0.5 GiB for the context of CUDA 12, and as much for NCCL's channels.
const RESERVED: f64 = GIB;

/// A model, a machine and a batch for which the fastest layout is sought.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The model.
    pub model: Model,
    /// The machine.
    pub machine: Machine,
    /// All GPUs. With `n` nodes, these are `n` times [`Machine::gpus_per_node`].
    pub gpus: u32,
    /// The GPUs of other kinds, which are the last of `gpus`; empty for one kind of machine. The search tries this
    /// order of the kinds along the pipeline, and the opposite one.
    pub further: Vec<Machines>,
    /// The rows of a step, over all replicas.
    pub batch: u32,
    /// The tokens of a row.
    pub sequence: u32,
    /// The precision of the products with parameters.
    pub precision: Precision,
    /// How scores are computed.
    pub scores: Scores,
    /// How the stack trains.
    pub implementation: Implementation,
    /// The parts of the layout that are given. The search chooses the others.
    pub fixed: Fixed,
    /// The system that is to run the plans; `None` for layouts of any kind.
    pub system: Option<System>,
    /// The most bytes that a rank may need; `None` for the machine's memory without the reserve of
    /// [`Request::memory_limit`].
    pub memory: Option<f64>,
    /// The tokens of the training; each plan then has a [`Goal`](crate::search::Goal).
    pub goal_tokens: Option<f64>,
    /// The most plans that are returned. They differ in the mesh or the schedule.
    pub plans: usize,
    /// The number of simulations after which the search ends once it has a plan. Each candidate takes one or
    /// two, for its cuts. More simulations find a faster plan where estimates are close to each other, and
    /// take longer.
    pub simulations: usize,
    /// How errors name the given parts of the layout.
    pub names: Names,
}

/// The parts of a layout that are given; `None` for parts that the search chooses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fixed {
    /// The ranks of a tensor group.
    pub tensor: Option<u32>,
    /// The ranks of a pipeline.
    pub pipeline: Option<u32>,
    /// The ranks that divide each sequence.
    pub context: Option<u32>,
    /// The replicas.
    pub data: Option<u32>,
    /// The groups of ranks that divide the experts among them.
    pub expert: Option<u32>,
    /// The chunks of a rank of a pipeline.
    pub chunks: Option<u32>,
    /// The rows of a microbatch.
    pub microbatch: Option<u32>,
    /// The name of the schedule, as in [`pipewright_schedule::generate()`].
    pub schedule: Option<String>,
    /// The part of the forward that the backward computes again.
    pub recompute: Option<Recompute>,
    /// The tensors that replicas divide among themselves.
    pub sharding: Option<ShardedState>,
    /// Whether the ranks of a tensor group divide the sequence between their products.
    pub sequence_parallel: Option<bool>,
    /// The ranks that divide each expert: 1, or a tensor group.
    pub expert_tensor: Option<u32>,
    /// The blocks of each stage. The pipeline and the chunks are given too.
    pub cut: Option<Cut>,
    /// The replicas that divide what is sharded; further replicas have copies. `None` for all replicas.
    pub shards: Option<u32>,
    /// Whether tokens travel to experts and back while another microbatch is computed. The search chooses it where the
    /// stack has it.
    pub overlaps_experts: Option<bool>,
}

impl Request {
    /// Makes a request that fixes nothing, for the machine's memory, five plans and 200 simulations, with
    /// fused attention and kernels.
    pub fn new(
        model: Model,
        machine: Machine,
        gpus: u32,
        batch: u32,
        sequence: u32,
        precision: Precision,
    ) -> Self {
        Self {
            model,
            machine,
            gpus,
            further: Vec::new(),
            batch,
            sequence,
            precision,
            scores: Scores::Fused,
            implementation: Implementation::usual(Stack::default()),
            fixed: Fixed::default(),
            system: None,
            memory: None,
            goal_tokens: None,
            plans: 5,
            simulations: 200,
            names: Names::Keys,
        }
    }

    /// Returns the machines with their GPUs, in the order of the GPUs.
    pub fn kinds(&self) -> Vec<(&Machine, u32)> {
        let further = self.further.iter().map(|kind| (&kind.machine, kind.gpus));
        let of_further = self.further.iter().fold(0, |sum: u32, kind| sum.saturating_add(kind.gpus));
        std::iter::once((&self.machine, self.gpus.saturating_sub(of_further))).chain(further).collect()
    }

    /// Returns the request with the machines in the opposite order.
    pub(crate) fn reversed(&self) -> Self {
        let mut kinds: Vec<Machines> = self
            .kinds()
            .into_iter()
            .map(|(machine, gpus)| Machines { machine: machine.clone(), gpus })
            .rev()
            .collect();
        let first = kinds.remove(0);
        Self { machine: first.machine, further: kinds, ..self.clone() }
    }

    /// Returns the mean of a figure over all GPUs.
    pub(crate) fn mean(&self, figure: impl Fn(&Machine) -> f64) -> f64 {
        let first = figure(&self.machine);
        let more =
            |kind: &Machines| (figure(&kind.machine) - first) * f64::from(kind.gpus) / f64::from(self.gpus);
        first + self.further.iter().map(more).sum::<f64>()
    }

    /// Returns a layout on the machines. Each rank of its pipeline has GPUs of one kind.
    pub(crate) fn placed<'a>(&'a self, layout: &'a Layout) -> Placed<'a> {
        Placed::on(&self.model, layout, &self.kinds())
    }

    /// Returns the setting of a layout on the first kind of machine.
    pub fn setting<'a>(&'a self, layout: &'a Layout) -> Setting<'a> {
        Setting { model: &self.model, layout, machine: &self.machine }
    }

    /// Returns the most bytes that a rank may need on the kind of machine with the least memory. Unless the request
    /// gives it, it is the machine's memory without 1 GiB for the context of the driver, libraries and buffers of
    /// collectives, and without the fragments of the stack's tensors.
    pub fn memory_limit(&self) -> f64 {
        self.kinds().into_iter().map(|(machine, _)| self.limit_on(machine)).fold(f64::INFINITY, f64::min)
    }

    /// Returns the most bytes that a rank on a machine may need.
    pub(crate) fn limit_on(&self, machine: &Machine) -> f64 {
        let fragments = machine.stacks.of(self.implementation.stack).fragments;
        let usable = (machine.memory - RESERVED) / (1.0 + fragments);
        self.memory.unwrap_or(usable.max(0.0))
    }

    /// Returns the rank of a pipeline that lacks most bytes, or has the fewest left. If several ranks lack equally
    /// much, the first one wins.
    pub(crate) fn tightest_rank(&self, layout: &Layout, prediction: &Prediction) -> TightestRank {
        let kinds = self.kinds();
        let limits: Vec<f64> = kinds.iter().map(|(machine, _)| self.limit_on(machine)).collect();
        let ranks = kinds_of_ranks(&kinds, layout).into_iter().map(|kind| limits[kind]);
        let ranks = prediction.memory.iter().zip(ranks).enumerate();
        let tightest = ranks.reduce(|one, other| {
            let order = |(_, (memory, limit)): (usize, (&HeldBytes<f64>, f64))| {
                (memory.total() - limit, memory.total())
            };
            if order(other) > order(one) { other } else { one }
        });
        let (rank, memory, limit) = tightest
            .map_or((0, HeldBytes::default(), limits[0]), |(rank, (memory, limit))| (rank, *memory, limit));
        TightestRank { rank, memory, limit }
    }

    /// Returns whether the exchange of experts is hidden behind another microbatch in a layout: if the request allows
    /// it and the stack has it. `None` if the request asks for it and the stack does not have it.
    pub(crate) fn overlaps_experts(&self, layout: &Layout) -> Option<bool> {
        let is_possible =
            || expert_overlap::fault(layout, layout.implementation.stack, &self.model).is_none();
        match self.fixed.overlaps_experts {
            Some(false) => Some(false),
            Some(true) => is_possible().then_some(true),
            None => {
                let is_allowed = self.implementation.overlaps_experts
                    || self.system.is_none_or(|system| system == System::Megatron);
                Some(is_allowed && is_possible())
            }
        }
    }

    /// Returns whether the system of the request, if it has one, runs a layout.
    pub(crate) fn runs(&self, layout: &Layout) -> bool {
        self.system.is_none_or(|system| systems::refusal(system, layout, &self.model).is_none())
    }

    /// Returns the recomputations that the request allows, from the fastest and largest to the slowest and
    /// smallest.
    pub(crate) fn recomputes(&self) -> Vec<Recompute> {
        match self.fixed.recompute {
            Some(given) => vec![given],
            None => vec![Recompute::None, Recompute::Selective, Recompute::Full],
        }
    }

    /// Returns the shardings of a layout that the request allows, from the fastest and largest to the slowest
    /// and smallest. Replicas that shard nothing are slower than replicas that shard the optimizer's state, which
    /// only some systems do not. No stack shards the gradients without the parameters in a pipeline, so only a request
    /// that gives this sharding has it there.
    pub(crate) fn shardings(&self, layout: &Layout) -> Vec<ShardedState> {
        match self.fixed.sharding {
            Some(given) => vec![given],
            None if layout.replicas() == 1 => vec![ShardedState::Nothing],
            None if self.system.is_none() && layout.pipeline > 1 => {
                vec![ShardedState::Optimizer, ShardedState::Parameters]
            }
            None if self.system.is_none() => {
                vec![ShardedState::Optimizer, ShardedState::Gradients, ShardedState::Parameters]
            }
            None => {
                vec![
                    ShardedState::Nothing,
                    ShardedState::Optimizer,
                    ShardedState::Gradients,
                    ShardedState::Parameters,
                ]
            }
        }
    }

    /// Checks that all numbers are above 0, that the given parts of the layout divide the model, that a model
    /// whose experts are to be divided has some, that the replicas divide the GPUs, and that a given mesh has
    /// all GPUs.
    pub(crate) fn check(&self) -> Result<(), SearchError> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let numbers = [
            ("gpus", Some(f64::from(self.gpus))),
            ("batch", Some(f64::from(self.batch))),
            ("sequence", Some(f64::from(self.sequence))),
            ("plans", Some(self.plans as f64)),
            ("memory", self.memory),
            ("goal_tokens", self.goal_tokens),
        ];
        for (name, value) in numbers {
            if let Some(value) = value.filter(|&value| !positive(value)) {
                return Err(SearchError::new(format!("`{name}` is {value}"), "use a number above 0"));
            }
        }
        if let Some(expert) = self.fixed.expert.filter(|&expert| expert > 1)
            && !self.model.has_experts()
        {
            let expert = self.names.with_value(EXPERT, expert);
            return Err(SearchError::new(format!("{expert}: the model has no experts"), "leave it out"));
        }
        self.check_machines()?;
        // Before any number of GPUs is advised.
        let given = &self.given_sizes();
        self.smallest_layout().check_parts(&self.model).map_err(|fault| fault.error(given))?;
        if let Some(data) = self.fixed.data {
            let of_replica = self.smallest_layout().gpus_of_replica();
            if data == 0 {
                return Err(Fault::Zero(DATA).error(given).into());
            }
            if !self.gpus.is_multiple_of(data.saturating_mul(of_replica)) {
                let of = u64::from(data) * u64::from(of_replica);
                return Err(Fault::Mesh { gpus: self.gpus, of }.error(given).into());
            }
            let Fixed { tensor, pipeline, context, .. } = self.fixed;
            let is_mesh_given = tensor.is_some() && pipeline.is_some() && context.is_some();
            let mesh = data.saturating_mul(of_replica);
            if is_mesh_given && mesh != self.gpus {
                return Err(self.other_mesh_size(mesh));
            }
        }
        Ok(())
    }

    /// Checks that all kinds of machines have GPUs, and that a pipeline can have ranks on all of them.
    fn check_machines(&self) -> Result<(), SearchError> {
        let kinds = self.kinds();
        if let Some((machine, _)) = kinds.iter().find(|(_, gpus)| *gpus == 0) {
            let reason = format!("no GPUs are left for {}", machine.name);
            return Err(SearchError::new(reason, "leave it out, or use more GPUs"));
        }
        let (least, blocks) = (least_pipeline(&kinds), self.model.blocks.len());
        if let Some(pipeline) = self.fixed.pipeline.filter(|&pipeline| pipeline > 0) {
            check_pipeline(&kinds, pipeline, self.names)?;
        } else if least as usize > blocks.max(1) {
            return Err(SearchError::new(
                format!(
                    "{} need a pipeline whose number of ranks is a multiple of {least}, and the model has {}",
                    kinds_text(&kinds),
                    counted(blocks, "block")
                ),
                "use numbers of nodes with a larger common divisor",
            ));
        }
        Ok(())
    }

    /// Says that the given mesh has another number of GPUs.
    fn other_mesh_size(&self, mesh: u32) -> SearchError {
        let given = self.given_sizes();
        let advice = match given.unit() {
            None => String::new(),
            Some((size, unit)) if mesh.is_multiple_of(unit) => {
                format!("use {}, or ", self.names.with_value(size, mesh / unit))
            }
            Some((size, _)) => {
                format!("use {} instead of {}, or ", self.names.with_value(GPUS, mesh), self.names.name(size))
            }
        };
        SearchError::new(
            format!("the given mesh ({}) has {}, not {}", given.list(&MESH), counted(mesh, "GPU"), self.gpus),
            format!("{advice}leave a part of the mesh out"),
        )
    }

    /// Says that no plan fits into memory, and what is short.
    pub(crate) fn lacks_memory(&self, least: LeastMemory) -> SearchError {
        let given = if self.fixed == Fixed::default() { "" } else { "fewer given parts of the plan, " };
        let memory = match self.memory {
            Some(_) => format!("a larger {}", self.names.name(MEMORY)),
            None => "GPUs with more memory".to_owned(),
        };
        let kinds = self.kinds();
        let machine = match kinds_of_ranks(&kinds, &least.layout).get(least.rank) {
            Some(&kind) if kinds.len() > 1 => format!(" of {}", kinds[kind].0.name),
            _ => String::new(),
        };
        let reason = format!(
            "no plan fits into {} per GPU{}: the smallest ({}) needs {} on rank {} of its pipeline, {} too much ({})",
            bytes_text(least.limit as u64),
            machine,
            least.layout.text(&self.model),
            bytes_text(least.needed() as u64),
            least.rank,
            bytes_text((least.needed() - least.limit) as u64),
            least.memory.text(),
        );
        let advice = format!("use {given}more GPUs, fewer rows per step, or {memory}");
        SearchError { kind: SearchErrorKind::Memory(Box::new(least)), reason, advice }
    }

    /// Returns the request with the generator's name of a given schedule.
    pub(crate) fn with_generator_name(&self) -> Result<Self, SearchError> {
        let mut named = self.clone();
        if let Some(name) = &self.fixed.schedule {
            let generator = find(name)?;
            if !generator.has_backward() {
                return Err(SearchError::new(
                    format!("the schedule `{}` has no backward", generator.name),
                    "use one that trains, or leave the schedule out",
                ));
            }
            named.fixed.schedule = Some(generator.name.to_owned());
        }
        Ok(named)
    }

    /// Checks the parts of the layout that are given, whatever the other parts are.
    pub(crate) fn check_given(&self) -> Result<(), LayoutError> {
        self.find_given_fault().map_err(|fault| fault.error(&self.given_sizes()))
    }

    fn find_given_fault(&self) -> Result<(), Fault> {
        let Fixed { tensor, pipeline, context, data, .. } = self.fixed;
        let smallest = self.smallest_layout();
        let of_replica = smallest.gpus_of_replica();
        let is_mesh_given = tensor.is_some() && pipeline.is_some() && context.is_some();
        if is_mesh_given || !self.gpus.is_multiple_of(of_replica) {
            // Ranks of tensor groups may also divide experts.
            return Layout { expert_tensor: 1, ..smallest }.find_fault(&self.model);
        }
        // As few GPUs as the given parts need, and as many rows as they have at once, unless they are too many.
        let of = |data: u32, expert: u32, batch: u32| Layout {
            gpus: of_replica.saturating_mul(data),
            expert,
            expert_tensor: 1,
            batch,
            shards: None,
            ..smallest.clone()
        };
        let expert = smallest.expert;
        of(data.unwrap_or(1), 1, self.batch).find_fault(&self.model)?;
        of(expert, expert, smallest.microbatch.saturating_mul(expert)).find_fault(&self.model)
    }

    /// Returns the given sizes of the layout.
    pub(crate) fn given_sizes(&self) -> GivenSizes {
        let Fixed { tensor, pipeline, context, data, expert, chunks, microbatch, shards, .. } = self.fixed;
        let sizes = [
            (TENSOR, tensor),
            (PIPELINE, pipeline),
            (DATA, data),
            (CONTEXT, context),
            (EXPERT, expert),
            (CHUNKS, chunks),
            (MICROBATCH, microbatch),
            (SHARDS, shards),
        ];
        GivenSizes {
            names: self.names,
            sizes: sizes.into_iter().filter_map(|(name, size)| Some((name, size?))).collect(),
            gpus_per_node: self.machine.gpus_per_node,
            is_mixed: !self.further.is_empty(),
        }
    }

    /// Returns the layout with the parts that are given, and 1 for other sizes.
    pub(crate) fn smallest_layout(&self) -> Layout {
        let Fixed { tensor, pipeline, context, expert, chunks, microbatch, .. } = self.fixed;
        let tensor = tensor.unwrap_or(1);
        Layout {
            gpus: self.gpus,
            tensor,
            pipeline: pipeline.unwrap_or(1),
            chunks: chunks.unwrap_or(1),
            context: context.unwrap_or(1),
            expert: expert.unwrap_or(1),
            expert_tensor: self.fixed.expert_tensor.unwrap_or(tensor),
            cut: self.fixed.cut.clone().unwrap_or(Cut::Even),
            microbatch: microbatch.unwrap_or(1),
            batch: self.batch,
            schedule: self.fixed.schedule.clone(),
            recompute: self.fixed.recompute.unwrap_or(Recompute::None),
            sequence_parallel: self.fixed.sequence_parallel.unwrap_or(tensor > 1),
            scores: self.scores,
            sharding: self.fixed.sharding.unwrap_or(ShardedState::Optimizer),
            shards: self.fixed.shards,
            implementation: self.implementation,
            ..Layout::on_one_gpu(self.sequence, self.precision)
        }
    }
}

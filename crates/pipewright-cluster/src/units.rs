//! The costs of the parts of a model for one microbatch on one rank: blocks, the embedding and the head.
//!
//! They depend neither on the pipeline nor on the replicas, so layouts that differ only in these share them.

use std::ops::{AddAssign, Range};

use crate::cut::{balanced, even};
use crate::layout::{Cut, Layout, Recompute};
use crate::memory::{
    Parameters, adapted_state, adapter_parameters, block_activations, block_gradients, block_parameters,
    block_stash, predictor_parameters, state, table_parameters, whole_block_activations,
};
use crate::setting::Setting;
use crate::stage_time::StageTime;
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_shapes::model::{Block, Model};
use pipewright_shapes::operations::AttentionCount;
use pipewright_shapes::training::Training;

/// The costs of a part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Unit {
    pub(crate) time: StageTime,
    /// The parameters that are trained.
    pub(crate) parameters: Parameters,
    /// The parameters that are frozen.
    pub(crate) frozen: Parameters,
    /// Bytes that a forward keeps for its backward.
    pub(crate) activation: f64,
    /// Bytes of activations that go to the memory of the host.
    pub(crate) offloaded: f64,
    /// Bytes that a backward keeps if gradients of weights are computed later.
    pub(crate) stash: f64,
}

impl Unit {
    /// The parameters that tables belong to: the trained ones, or the frozen ones if adapters are trained.
    fn tables_of(&mut self, is_adapted: bool) -> &mut Parameters {
        if is_adapted { &mut self.frozen } else { &mut self.parameters }
    }
}

impl AddAssign for Unit {
    fn add_assign(&mut self, other: Self) {
        self.time += other.time;
        self.parameters = self.parameters + other.parameters;
        self.frozen = self.frozen + other.frozen;
        self.activation += other.activation;
        self.offloaded += other.offloaded;
        self.stash += other.stash;
    }
}

/// The costs of all parts of a model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Units {
    /// Blocks that differ from each other.
    kinds: Vec<Unit>,
    /// The same blocks with nothing computed again; empty if all blocks of a stage are alike in this.
    kept_kinds: Vec<Unit>,
    /// The index in `kinds` of each block of the model.
    kind_of: Vec<usize>,
    pub(crate) embedding: Unit,
    /// The head, with a pass for each predictor of a further token.
    head: Unit,
    /// All blocks that predict further tokens.
    predictors: Unit,
    has_predictors: bool,
    /// Whether adapters are trained.
    is_adapted: bool,
    tied: bool,
    /// The parameters of the embedding's table.
    pub(crate) table: f64,
    /// The parameters of the largest block.
    pub(crate) largest_block: Parameters,
    /// The most bytes that a block's backward has for a moment: what it computes again, and gradients.
    pub(crate) backward: f64,
    /// The operations of the model in a step, per token, with the pairs of attention that are used.
    pub(crate) operations: f64,
}

impl Units {
    /// Computes the costs of the parts of a setting's model.
    pub(crate) fn of(setting: &Setting<'_>) -> Self {
        let sequence = u64::from(setting.layout.attention_tokens());
        Self::with_operations(setting, setting.model.operations_per_token(sequence, AttentionCount::Causal))
    }

    /// Like [`Self::of`], with the operations of the model per token, which all layouts share.
    pub(crate) fn with_operations(setting: &Setting<'_>, operations: f64) -> Self {
        let (model, layout) = (setting.model, setting.layout);
        let table = table_parameters(model, layout);
        let is_adapted = model.is_adapted();
        let outer = |time, parameters| {
            let (own, none) = (Parameters::of_tables(parameters), Parameters::default());
            let [parameters, frozen] = if is_adapted { [none, own] } else { [own, none] };
            Unit { time, parameters, frozen, ..Unit::default() }
        };
        let head = setting.head();
        let mut units = Self {
            kinds: Vec::new(),
            kept_kinds: Vec::new(),
            kind_of: Vec::with_capacity(model.blocks.len()),
            embedding: outer(setting.embedding(), table + model.further_embedding as f64),
            head: outer(head, model.head_matrix_parameters() as f64 / f64::from(layout.tensor)),
            predictors: Unit::default(),
            has_predictors: model.predictors > 0,
            is_adapted,
            tied: model.tied,
            table,
            largest_block: Parameters::default(),
            backward: 0.0,
            operations,
        };
        let kept = layout.recomputed_blocks().map(|_| Layout {
            recompute: Recompute::None,
            recompute_layers: None,
            ..layout.clone()
        });
        let mut blocks = Vec::new();
        for block in &model.blocks {
            let kind = blocks.iter().position(|known| known == block).unwrap_or_else(|| {
                let all = block_parameters(block, model, layout);
                let [parameters, frozen] = match &block.training {
                    Training::Whole => [all, Parameters::default()],
                    Training::Adapters(adapters) => [adapter_parameters(adapters, layout), all],
                    Training::ForwardOnly => [Parameters::default(), all],
                };
                let of = |setting: &Setting<'_>| Unit {
                    time: setting.block(block),
                    parameters,
                    frozen,
                    activation: block_activations(block, model, setting.layout),
                    offloaded: 0.0,
                    stash: block_stash(block, model, setting.layout),
                };
                let unit = of(setting);
                if let Some(kept) = &kept {
                    units.kept_kinds.push(of(&Setting { layout: kept, ..*setting }));
                }
                let again = whole_block_activations(block, model, layout) - unit.activation;
                units.backward = units.backward.max(again + block_gradients(block, model, layout));
                if all.total() > units.largest_block.total() {
                    units.largest_block = all;
                }
                blocks.push(*block);
                units.kinds.push(unit);
                blocks.len() - 1
            });
            units.kind_of.push(kind);
        }
        let kept = |bytes: fn(&Block, &Model, &Layout) -> f64| {
            model.predictor_blocks().iter().map(|block| bytes(block, model, layout)).sum()
        };
        let predictor = Unit {
            time: setting.predictor(),
            parameters: predictor_parameters(model, layout),
            activation: kept(block_activations),
            stash: kept(block_stash),
            ..Unit::default()
        };
        let own = model.own_predictors();
        (0..model.predictors).for_each(|index| {
            let parameters = if index < own { predictor.parameters } else { Parameters::default() };
            units.predictors += Unit { parameters, ..predictor };
            units.head.time += head;
        });
        units
    }

    /// Returns the bytes of a rank's trained and frozen parameters, with gradients and optimizer of the
    /// trained ones.
    pub(crate) fn state(&self, trained: Parameters, frozen: Parameters, layout: &Layout) -> HeldBytes<f64> {
        if self.is_adapted {
            adapted_state(trained, frozen, self.largest_block, layout)
        } else {
            state(trained, self.largest_block, layout)
        }
    }

    /// Returns the trained and the frozen parameters of the model without one table: a tied head has no table
    /// of its own.
    pub(crate) fn without_table(&self, total: &Unit) -> [Parameters; 2] {
        let mut parameters = [total.parameters, total.frozen];
        parameters[usize::from(self.is_adapted)].tables -= self.table;
        parameters
    }

    /// Returns the number of blocks of the model.
    pub(crate) fn blocks(&self) -> usize {
        self.kind_of.len()
    }

    /// Returns the fewest parameters and bytes of activations that a block has, without its other costs.
    pub(crate) fn smallest_block(&self) -> Unit {
        let fewer = |one: Parameters, other: Parameters| Parameters {
            matrices: one.matrices.min(other.matrices),
            tables: one.tables.min(other.tables),
            experts: one.experts.min(other.experts),
        };
        let smaller = |one: Unit, other: &Unit| Unit {
            parameters: fewer(one.parameters, other.parameters),
            frozen: fewer(one.frozen, other.frozen),
            activation: one.activation.min(other.activation),
            ..Unit::default()
        };
        self.kinds.split_first().map_or_else(Unit::default, |(first, others)| {
            others.iter().fold(Unit { time: StageTime::default(), stash: 0.0, ..*first }, smaller)
        })
    }

    /// Returns the seconds of the embedding, of each block and of the head with all predictors.
    pub(crate) fn seconds(&self) -> Vec<f64> {
        let seconds = |unit: &Unit| unit.time.total();
        let blocks = self.kind_of.iter().map(|&kind| seconds(&self.kinds[kind]));
        let head = seconds(&self.head) + seconds(&self.predictors);
        std::iter::once(seconds(&self.embedding)).chain(blocks).chain([head]).collect()
    }

    /// Returns the blocks of each stage of a cluster with one kind of machine.
    pub(crate) fn cut(&self, layout: &Layout) -> Vec<Range<usize>> {
        let stages = layout.stages() as usize;
        match &layout.cut {
            Cut::Even => even(self.kind_of.len(), stages),
            Cut::Balanced => balanced(&[self.seconds()], &vec![0; stages]),
            Cut::Given { blocks: sizes, .. } => {
                let mut start = 0;
                let range = |&size: &u32| {
                    let range = start..start + size as usize;
                    start = range.end;
                    range
                };
                sizes.iter().map(range).collect()
            }
        }
    }

    /// Returns the costs of each stage, whose ranks and blocks are given.
    pub(crate) fn stages(&self, layout: &Layout, rank_of_stage: &[usize], cut: &[Range<usize>]) -> Vec<Unit> {
        let last = cut.len() - 1;
        let predictors = layout.predictor_stage();
        let mut of_rank = vec![0; layout.pipeline.max(1) as usize];
        let stage = |(stage, range): (usize, &Range<usize>)| {
            let mut sum = Unit::default();
            let shares_rank = |other: usize| rank_of_stage[stage] == rank_of_stage[other];
            let before = &mut of_rank[rank_of_stage[stage]];
            for (index, &kind) in self.kind_of[range.clone()].iter().enumerate() {
                let is_again = layout.recomputed_blocks().is_none_or(|again| index < again as usize);
                let mut unit = if is_again { self.kinds[kind] } else { self.kept_kinds[kind] };
                if *before < layout.offload_layers {
                    unit.offloaded = std::mem::take(&mut unit.activation);
                }
                *before += 1;
                sum += unit;
            }
            if stage == 0 {
                sum += self.embedding;
            }
            if stage == predictors {
                sum += self.predictors;
                // They look up further tokens, in a copy of the embedding's table unless the rank has one.
                let has_table = shares_rank(0) || self.tied && shares_rank(last);
                if self.has_predictors && !has_table {
                    sum.tables_of(self.is_adapted).tables += self.table;
                }
            }
            if stage == last {
                sum += self.head;
                // A tied head on the rank of the embedding has no table of its own.
                if self.tied && shares_rank(0) {
                    sum.tables_of(self.is_adapted).tables -= self.table;
                }
            }
            sum
        };
        cut.iter().enumerate().map(stage).collect()
    }

    /// Returns the costs of all parts of the model.
    pub(crate) fn total(&self) -> Unit {
        let mut sum = self.embedding;
        self.kind_of.iter().for_each(|&kind| sum += self.kinds[kind]);
        sum += self.predictors;
        sum += self.head;
        sum
    }
}

//! The machines that the ranks of a pipeline are on, in a cluster with several kinds of machines.
//!
//! The pipeline is the outermost dimension of the GPUs in their order. So each rank of a pipeline, with all of its
//! tensor, context and data ranks, has a block of `gpus / pp` neighbouring GPUs. The GPUs of a block are of one kind,
//! so all collectives stay on one kind, and only messages between neighbouring ranks of a pipeline may cross.

use std::collections::BTreeMap;
use std::ops::Range;

use pipewright_schedule::costs::Link;
use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_schedule::ids::Rank;
use pipewright_schedule::words::counted;

use crate::cut::balanced;
use crate::layout::{Cut, Layout, LayoutError};
use crate::machine::Machine;
use crate::setting::Setting;
use crate::size_names::{Names, PIPELINE};
use crate::units::Units;
use pipewright_shapes::model::Model;

/// Neighbouring GPUs of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Machines {
    /// The machine.
    pub machine: Machine,
    /// The GPUs, at least 1.
    pub gpus: u32,
}

/// A model in a layout on machines of one or several kinds.
#[derive(Debug, Clone)]
pub struct Placed<'a> {
    /// The model and the layout on each kind of machine, in the order of the GPUs; at least one.
    pub(crate) kinds: Vec<Setting<'a>>,
    /// The index of the kind of each rank of a pipeline.
    pub(crate) kind_of_rank: Vec<usize>,
    /// The rank of each stage of a pipeline.
    pub(crate) rank_of_stage: Vec<usize>,
}

impl<'a> Placed<'a> {
    /// Places the ranks of a layout on all `machines`, in their order.
    ///
    /// # Errors
    /// When the layout does not fit the model, the list of machines is empty, the machines have another number of GPUs than the
    /// layout, or a rank of the pipeline has GPUs of several kinds.
    pub fn new(model: &'a Model, layout: &'a Layout, machines: &'a [Machines]) -> Result<Self, LayoutError> {
        layout.check(model)?;
        let kinds: Vec<(&Machine, u32)> = machines.iter().map(|kind| (&kind.machine, kind.gpus)).collect();
        let gpus: u64 = kinds.iter().map(|&(_, gpus)| u64::from(gpus)).sum();
        if kinds.is_empty() || gpus != u64::from(layout.gpus) {
            return Err(LayoutError {
                reason: format!(
                    "the machines have {}, and the layout has {}",
                    counted(gpus, "GPU"),
                    layout.gpus
                ),
                advice: "use equal numbers".to_owned(),
            });
        }
        check_pipeline(&kinds, layout.pipeline, Names::Keys)?;
        Ok(Self::on(model, layout, &kinds))
    }

    /// Places the ranks of a layout that was checked on one kind of machine.
    pub(crate) fn on_one(setting: Setting<'a>) -> Self {
        let kind_of_rank = vec![0; setting.layout.pipeline.max(1) as usize];
        Self { kinds: vec![setting], kind_of_rank, rank_of_stage: setting.layout.rank_of_stage() }
    }

    /// Places the ranks of a layout that was checked, each on the kind of its first GPU.
    pub(crate) fn on(model: &'a Model, layout: &'a Layout, kinds: &[(&'a Machine, u32)]) -> Self {
        let kind_of_rank = kinds_of_ranks(kinds, layout);
        let kinds = kinds.iter().map(|&(machine, _)| Setting { model, layout, machine }).collect();
        Self { kinds, kind_of_rank, rank_of_stage: layout.rank_of_stage() }
    }

    /// Returns the layout.
    pub(crate) fn layout(&self) -> &'a Layout {
        self.kinds[0].layout
    }

    /// Returns the kind of each stage.
    pub(crate) fn kind_of_stage(&self) -> Vec<usize> {
        self.rank_of_stage.iter().map(|&rank| self.kind_of_rank[rank]).collect()
    }

    /// Returns the blocks of each stage, from the costs of the model's parts on each kind.
    pub(crate) fn cut(&self, units: &[Units]) -> Vec<Range<usize>> {
        if self.layout().cut != Cut::Balanced {
            return units[0].cut(self.layout());
        }
        let seconds: Vec<Vec<f64>> = units.iter().map(Units::seconds).collect();
        balanced(&seconds, &self.kind_of_stage())
    }

    /// Returns the slowest link between two ranks of a pipeline, and the links that differ from it.
    pub(crate) fn links(&self) -> (Link, BTreeMap<(Rank, Rank), Link>) {
        let own: Vec<Link> = self.kinds.iter().map(link).collect();
        let slowest = own.iter().copied().reduce(slower).unwrap_or_else(|| link(&self.kinds[0]));
        let mut links = BTreeMap::new();
        let ranks = self.kind_of_rank.len();
        for (from, &kind) in self.kind_of_rank.iter().enumerate() {
            for to in [(from + 1) % ranks, (from + ranks - 1) % ranks] {
                let link = slower(own[kind], own[self.kind_of_rank[to]]);
                if from != to && link != slowest {
                    links.insert((Rank::new(from as u32), Rank::new(to as u32)), link);
                }
            }
        }
        (slowest, links)
    }
}

/// Returns the index of the kind of each rank of a pipeline.
pub(crate) fn kinds_of_ranks(kinds: &[(&Machine, u32)], layout: &Layout) -> Vec<usize> {
    let pipeline = u64::from(layout.pipeline.max(1));
    let kind = |rank: u64| {
        let first = rank * u64::from(layout.gpus) / pipeline;
        let ends = kinds.iter().scan(0, |end, &(_, gpus)| {
            *end += u64::from(gpus);
            Some(*end)
        });
        ends.take_while(|&end| end <= first).count().min(kinds.len() - 1)
    };
    (0..pipeline).map(kind).collect()
}

/// Returns the number of ranks that divides each possible pipeline: 1 with one kind.
pub(crate) fn least_pipeline(kinds: &[(&Machine, u32)]) -> u32 {
    let gpus = || kinds.iter().map(|&(_, gpus)| u64::from(gpus));
    let common = gpus().reduce(greatest_common_divisor).unwrap_or(1).max(1);
    if kinds.len() < 2 {
        return 1;
    }
    u32::try_from(gpus().sum::<u64>() / common).unwrap_or(u32::MAX).max(1)
}

/// Checks that each rank of a pipeline has GPUs of one kind.
pub(crate) fn check_pipeline(
    kinds: &[(&Machine, u32)],
    pipeline: u32,
    names: Names,
) -> Result<(), LayoutError> {
    let least = least_pipeline(kinds);
    if pipeline.is_multiple_of(least) {
        return Ok(());
    }
    Err(LayoutError {
        reason: format!(
            "{}: a rank of the pipeline has GPUs of several machines ({})",
            names.with_value(PIPELINE, pipeline),
            kinds_text(kinds)
        ),
        advice: format!("use a multiple of {least}"),
    })
}

/// Describes machines, such as `32 GPUs of H100 and 16 GPUs of A100`.
pub(crate) fn kinds_text(kinds: &[(&Machine, u32)]) -> String {
    let text = |&(machine, gpus): &(&Machine, u32)| format!("{} of {}", counted(gpus, "GPU"), machine.name);
    kinds.iter().map(text).collect::<Vec<_>>().join(" and ")
}

/// The link between two ranks of a pipeline on one kind of machine.
fn link(setting: &Setting<'_>) -> Link {
    let (layout, machine) = (setting.layout, setting.machine);
    let (bandwidth, latency) = machine.message_rate(layout.gpus <= machine.gpus_per_node);
    Link { latency, bandwidth }
}

fn slower(one: Link, other: Link) -> Link {
    Link { latency: one.latency.max(other.latency), bandwidth: one.bandwidth.min(other.bandwidth) }
}

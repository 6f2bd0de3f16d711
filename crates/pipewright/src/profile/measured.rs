//! The figures of each kind of layer, collected from the steps of the short model.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use pipewright_schedule::profile::HEAD_PART;
use pipewright_schedule::recompute::LayerPart;
use pipewright_schedule::{Action, ActionKind, Event, LayerDesc, ModelDesc, Rank, Timeline};

use super::pace::Pace;
use super::probe::{Holding, Remade};
use super::quartiles::Quartiles;
use super::sample::{PARAMETER_BYTES, Sample};
use crate::pipeline::StepSummary;

/// The measured figures of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The rows of a microbatch.
    pub rows: u32,
    /// The number of ranks that ran at the same time.
    pub ranks: u32,
    /// Each kind of layer, in the order of the first layer of each.
    pub kinds: Vec<KindFigures>,
    /// For each rank, the time of `F`, `I` and `W` of a layer of each kind, in the order of `kinds`.
    pub times_by_rank: Vec<Vec<Quartiles>>,
    /// The bandwidth of sums of gradients over the ranks as replicas; `None` with one rank.
    pub reduce_bytes_per_s: Option<f64>,
    /// The bytes that a stage always holds in addition to parameters and optimizer state; `None` if the
    /// memory is not counted, or no layers of one kind follow each other.
    pub stage_bytes: Option<u64>,
    /// The bytes that a rank always holds in addition to its stages; `None` if the memory is not counted.
    pub rank_bytes: Option<u64>,
}

/// The figures of one layer of a kind, for one microbatch. Times are in seconds. A frozen layer has no
/// measurements of `W`, and a layer before the first trained one none of `I`: their spreads count none.
#[derive(Clone, Debug, PartialEq)]
pub struct KindFigures {
    /// The first layer of the kind in the model.
    pub layer: usize,
    /// `F`.
    pub forward: Quartiles,
    /// `I`.
    pub input_backward: Quartiles,
    /// `W`.
    pub weight_backward: Quartiles,
    /// The time that `I` takes longer if it computes the forward again.
    pub recompute: Option<Quartiles>,
    /// The time in which `I` computes the normalisations again, if it does; `None` if it was not measured.
    pub norms: Option<Quartiles>,
    /// Like `norms`, for the activation of the feed-forward layer.
    pub feed_forward: Option<Quartiles>,
    /// The layer's share of the time after the program: the gradient norm and the optimizer, in proportion to
    /// the parameters.
    pub optimizer_s: f64,
    /// The bytes that the forward keeps until `I`; `None` if the memory is not counted.
    pub activation_bytes: Option<u64>,
    /// The bytes that `I` keeps until `W`.
    pub weight_activation_bytes: Option<u64>,
    /// The most bytes that an action holds only while it runs.
    pub temporary_bytes: Option<u64>,
}

impl KindFigures {
    /// Returns the time in which `I` computes a part again; `None` if it was not measured.
    pub fn part(&self, part: LayerPart) -> Option<Quartiles> {
        match part {
            LayerPart::Norms => self.norms,
            LayerPart::FeedForward => self.feed_forward,
        }
    }
}

/// The times and sizes of all steps, by stage.
pub(super) struct Collection<'a> {
    sample: &'a Sample,
    /// The same layers, each a stage.
    split: &'a Sample,
    model: &'a ModelDesc,
    /// The bytes of the parameters of each layer, of its optimizer's state, and of its copy in half
    /// precision.
    state: Vec<u64>,
    rows: u32,
    /// The mean time of a kind's actions in each step, for one layer. A step takes as long as the sum of its
    /// actions, so the slow ones among them count too.
    times: HashMap<(usize, ActionKind), Vec<f64>>,
    /// The number of layers that a rank's actions of a kind compute in a step, and the fastest time of one.
    layers: HashMap<(Rank, usize, ActionKind), (f64, f64)>,
    /// Whether the steps keep their pace.
    pace: Pace,
    /// The mean time of `F`, `I` and `W` of a layer of a kind on a rank, in each step.
    by_rank: HashMap<(Rank, usize), Vec<f64>>,
    /// The times of `I` with the forward before it.
    recomputing: HashMap<usize, Vec<f64>>,
    /// The times in which `I` computes a part again, for one layer.
    remade: HashMap<(usize, LayerPart), Vec<f64>>,
    /// The times between the end of the program and the end of the step.
    after: Vec<f64>,
    /// The times of the program in which the ranks did not compute.
    idle: Vec<f64>,
    kept: HashMap<usize, Vec<f64>>,
    stashed: HashMap<usize, Vec<f64>>,
    temporary: HashMap<usize, u64>,
    /// The bytes at the beginnings of steps, besides parameters and optimizer state.
    between: Vec<f64>,
    /// The same times for steps in which each layer is a stage.
    between_split: Vec<f64>,
}

/// The bytes by which the tables of Burn's tape grow for a layer and each further microbatch in flight. The
/// measurement has one microbatch in flight. The number was measured with up to 64 microbatches and four
/// stages per rank.
const TAPE_BYTES: u64 = 4 << 10;

impl<'a> Collection<'a> {
    pub(super) fn new(
        sample: &'a Sample,
        split: &'a Sample,
        model: &'a ModelDesc,
        state: Vec<u64>,
        (rows, limit): (u32, Duration),
    ) -> Self {
        Self {
            sample,
            split,
            model,
            state,
            rows,
            times: HashMap::new(),
            layers: HashMap::new(),
            pace: Pace::new(limit),
            by_rank: HashMap::new(),
            recomputing: HashMap::new(),
            remade: HashMap::new(),
            after: Vec::new(),
            idle: Vec::new(),
            kept: HashMap::new(),
            stashed: HashMap::new(),
            temporary: HashMap::new(),
            between: Vec::new(),
            between_split: Vec::new(),
        }
    }

    /// Adds a step without recomputation.
    pub(super) fn add(&mut self, step: &StepSummary, holdings: &[Holding]) {
        let mut in_step: HashMap<(usize, ActionKind), Vec<f64>> = HashMap::new();
        // The seconds of a rank and a kind, and the number of forwards in them.
        let mut of_ranks: HashMap<(Rank, usize), (f64, u32)> = HashMap::new();
        self.layers.values_mut().for_each(|(layers, _)| *layers = 0.0);
        let mut computed = 0.0;
        for event in step.timeline.events().iter().filter(|event| event.action.is_compute()) {
            let stage = &self.sample.stages[event.action.stage().index()];
            let seconds = (event.end - event.start) / stage.layers.len() as f64;
            in_step.entry((stage.kind, event.action.kind())).or_default().push(seconds);
            let key = (event.rank, stage.kind, event.action.kind());
            let (layers, fastest) = self.layers.entry(key).or_insert((0.0, seconds));
            (*layers, *fastest) = (*layers + stage.layers.len() as f64, fastest.min(seconds));
            computed += event.end - event.start;
            let (sum, forwards) = of_ranks.entry((event.rank, stage.kind)).or_default();
            *sum += seconds;
            *forwards += u32::from(event.action.kind() == ActionKind::Forward);
        }
        add_means(&mut self.times, in_step);
        self.pace.add(computed, step.wall.as_secs_f64());
        for (key, (sum, forwards)) in of_ranks {
            self.by_rank.entry(key).or_default().push(sum / f64::from(forwards.max(1)));
        }
        self.after.push((step.wall.as_secs_f64() - step.timeline.makespan()).max(0.0));
        self.idle.push(idle(&step.timeline));
        self.between.extend(self.held_between(holdings));
        for holding in holdings {
            self.add_holding(*holding);
        }
    }

    /// Returns whether the steps that were added are too few to know the times.
    pub(super) fn needs_more(&self) -> bool {
        self.pace.needs_more(self.typical())
    }

    /// Returns the time of all computations of a step by the medians of their kinds.
    fn typical(&self) -> f64 {
        let time = |&(_, kind, action): &(Rank, usize, ActionKind)| {
            let times = self.times.get(&(kind, action)).cloned().unwrap_or_default();
            Quartiles::of(times).unwrap_or_default().median
        };
        self.layers.iter().map(|(key, (layers, _))| layers * time(key)).sum()
    }

    /// If the process is stopped again and again, replaces the times of the steps by the fastest ones, as many times as each
    /// block says. A second forward then takes as long as a forward, because a difference of two times is too inexact.
    fn stretch_times(&mut self) {
        if !self.pace.has_stops(self.typical()) {
            return;
        }
        let ratios = self.pace.ratios(self.layers.values().map(|(layers, fastest)| layers * fastest).sum());
        let over_blocks = |seconds: f64| -> Vec<f64> { ratios.iter().map(|ratio| ratio * seconds).collect() };
        let fastest_of = |is_one: &dyn Fn(&(Rank, usize, ActionKind)) -> bool| {
            let own = self.layers.iter().filter(|(key, _)| is_one(key)).map(|(_, (_, fastest))| *fastest);
            (own.clone().sum::<f64>(), own.count().max(1) as f64)
        };
        for (&(kind, action), times) in &mut self.times {
            let (sum, ranks) = fastest_of(&|key| (key.1, key.2) == (kind, action));
            *times = over_blocks(sum / ranks);
        }
        for (&(rank, kind), times) in &mut self.by_rank {
            *times = over_blocks(fastest_of(&|key| (key.0, key.1) == (rank, kind)).0);
        }
        for (&kind, times) in &mut self.recomputing {
            let of = |action| self.times.get(&(kind, action)).into_iter().flatten();
            let both = of(ActionKind::Forward).zip(of(ActionKind::InputBackward));
            *times = both.map(|(forward, input)| forward + input).collect();
        }
        let Some(ratio) = Quartiles::of(ratios) else { return };
        for time in self.remade.values_mut().flatten().chain(&mut self.after) {
            *time *= ratio.median;
        }
    }

    /// Returns what the rank held before the first action, besides parameters and optimizer state.
    fn held_between(&self, holdings: &[Holding]) -> Option<f64> {
        let layers = self.sample.stages.iter().flat_map(|stage| stage.layers.clone());
        let state: u64 = layers.map(|layer| self.state[layer]).sum();
        holdings.first().map(|first| first.before.saturating_sub(state) as f64)
    }

    /// Adds a step in which every layer is a stage and is recomputed.
    pub(super) fn add_recomputing(&mut self, timeline: &Timeline, holdings: &[Holding]) {
        self.between_split.extend(self.held_between(holdings));
        let mut in_step: HashMap<usize, Vec<f64>> = HashMap::new();
        for rank in (0..timeline.ranks()).map(Rank::new) {
            let mut last: HashMap<(u32, u32), &Event> = HashMap::new();
            for event in timeline.events_of(rank) {
                let Some(microbatch) = event.action.microbatch() else { continue };
                let key = (event.action.stage().get(), microbatch.get());
                match event.action.kind() {
                    // The second forward replaces the first.
                    ActionKind::Forward => drop(last.insert(key, event)),
                    ActionKind::InputBackward => {
                        let stage = &self.split.stages[event.action.stage().index()];
                        let begin = last.get(&key).map_or(event.start, |forward| forward.start);
                        in_step.entry(stage.kind).or_default().push(event.end - begin);
                    }
                    _ => {}
                }
            }
        }
        add_means(&mut self.recomputing, in_step);
    }

    /// Adds a step in which backwards compute the parts of layers again.
    pub(super) fn add_remade(&mut self, remade: &[Remade]) {
        let mut in_step: HashMap<(usize, LayerPart), Vec<f64>> = HashMap::new();
        for (action, times) in remade {
            let stage = &self.sample.stages[action.stage().index()];
            for (part, time) in LayerPart::ALL.into_iter().zip(times) {
                let seconds = time.as_secs_f64() / stage.layers.len() as f64;
                in_step.entry((stage.kind, part)).or_default().push(seconds);
            }
        }
        add_means(&mut self.remade, in_step);
    }

    fn add_holding(&mut self, Holding { action, before, after, peak }: Holding) {
        let index = action.stage().index();
        let stage = &self.sample.stages[index];
        let (kind, layers) = (stage.kind, stage.layers.len() as f64);
        // The first microbatch also makes the gradients, and caches such as tables of positions.
        let is_first = action.microbatch().is_none_or(|microbatch| microbatch.get() == 0);
        let grown = after as f64 - before as f64;
        match action {
            Action::Forward { .. } if !is_first => {
                let input = self.input_bytes(index);
                let output = if index + 1 < self.sample.stages.len() { self.output_bytes(index) } else { 0 };
                let kept = (grown + input as f64 - output as f64).max(0.0);
                self.kept.entry(kind).or_default().push(kept / layers);
            }
            Action::WeightBackward { .. } if !is_first => {
                self.stashed.entry(kind).or_default().push((-grown).max(0.0) / layers);
            }
            _ => {}
        }
        if action.is_compute() && !is_first {
            let most = self.temporary.entry(kind).or_default();
            *most = (*most).max(peak.saturating_sub(before.max(after)));
        }
    }

    fn output_bytes(&self, stage: usize) -> u64 {
        let last = self.sample.stages[stage].layers.end - 1;
        self.model.layers[last].output_bytes.saturating_mul(u64::from(self.rows))
    }

    /// Returns the bytes of the tensors that a stage gets from the one before it.
    fn input_bytes(&self, stage: usize) -> u64 {
        stage.checked_sub(1).map_or(0, |before| self.output_bytes(before))
    }

    /// Returns the bytes of the normalised hidden states that a part of a head received and that it sent, 0
    /// for other layers. All parts keep the same hidden states, and a part that is alone on its rank holds
    /// all of them. In the short model they are counted once: `F` of the last part keeps them, `W` of the
    /// first part frees them.
    fn hidden_states(&self, layer: usize) -> (u64, u64) {
        let layers = &self.model.layers;
        let is_part = |layer: &LayerDesc| layer.kind == HEAD_PART;
        if !is_part(&layers[layer]) {
            return (0, 0);
        }
        let first = layers.iter().position(is_part).unwrap_or(layer);
        let before = first.checked_sub(1).map_or(0, |before| layers[before].output_bytes);
        let hidden = before.saturating_mul(u64::from(self.rows));
        let of = |has: bool| if has { hidden } else { 0 };
        (of(layer > first), of(layer + 1 < layers.len()))
    }

    /// Returns the figures; `None` if a kind has not run.
    pub(super) fn finish(mut self, ranks: u32) -> Option<Measured> {
        let bytes = self.sample.trained_bytes(self.model);
        self.stretch_times();
        let after = Quartiles::of(std::mem::take(&mut self.after))?.median;
        let idle = Quartiles::of(std::mem::take(&mut self.idle))?.median;
        let (rank_bytes, stage_bytes) = self.between_steps();
        let first_layers = self.sample.kinds.clone();
        let kinds = first_layers.into_iter().enumerate().map(|(kind, layer)| {
            let mut of = |action| Quartiles::of(self.times.remove(&(kind, action))?);
            let forward = of(ActionKind::Forward)?;
            let described = &self.model.layers[layer];
            let runs_backward = self.model.layers[..=layer].iter().any(LayerDesc::is_trained);
            let mut if_run = |runs, action| if runs { of(action) } else { Some(Quartiles::default()) };
            let input_backward = if_run(runs_backward, ActionKind::InputBackward)?;
            let weight_backward = if_run(described.is_trained(), ActionKind::WeightBackward)?;
            let share = described.trained_parameters() as f64 * PARAMETER_BYTES as f64 / bytes.max(1) as f64;
            let median = |values: Option<Vec<f64>>| Some(Quartiles::of(values?)?.median.round() as u64);
            let (received, sent_and_kept) = self.hidden_states(layer);
            let recomputing = self.recomputing.remove(&kind).map(|mut times| {
                times.iter_mut().for_each(|time| *time = (*time - input_backward.median).max(0.0));
                times
            });
            let [norms, feed_forward] =
                LayerPart::ALL.map(|part| Quartiles::of(self.remade.remove(&(kind, part))?));
            Some(KindFigures {
                layer,
                forward,
                input_backward,
                weight_backward,
                recompute: recomputing.and_then(Quartiles::of),
                norms,
                feed_forward,
                optimizer_s: after * share,
                activation_bytes: match median(self.kept.remove(&kind)) {
                    Some(_) if !runs_backward => Some(0),
                    bytes => bytes.map(|bytes| bytes + sent_and_kept + TAPE_BYTES),
                },
                weight_activation_bytes: if described.is_trained() {
                    median(self.stashed.remove(&kind)).map(|bytes| bytes + received)
                } else {
                    Some(0)
                },
                temporary_bytes: self.temporary.remove(&kind),
            })
        });
        let kinds = kinds.collect::<Option<Vec<_>>>()?;
        let mut of_kind = |rank, kind| {
            let times = self.by_rank.remove(&(rank, kind)).unwrap_or_default();
            Quartiles::of(times).unwrap_or_default()
        };
        let mut of_rank = |rank| (0..kinds.len()).map(|kind| of_kind(rank, kind)).collect();
        let times_by_rank = (0..ranks).map(Rank::new).map(&mut of_rank).collect();
        Some(Measured {
            rows: self.rows,
            ranks,
            times_by_rank,
            kinds,
            reduce_bytes_per_s: bandwidth(ranks, bytes, idle),
            stage_bytes,
            rank_bytes,
        })
    }

    /// Returns what the rank holds between steps besides its stages, parameters and optimizer state, and what
    /// each stage adds to that. The more stages have the same layers, the more the rank holds.
    fn between_steps(&mut self) -> (Option<u64>, Option<u64>) {
        let median = |values: &mut Vec<f64>| Quartiles::of(std::mem::take(values)).map(|bytes| bytes.median);
        let Some(between) = median(&mut self.between) else { return (None, None) };
        let stages = self.sample.stages.len();
        let more = self.split.stages.len() - stages;
        let stage_bytes = median(&mut self.between_split)
            .filter(|_| more > 0)
            .map(|split| ((split - between) / more as f64).clamp(0.0, between / stages as f64));
        let alone = between - stage_bytes.unwrap_or(0.0) * stages as f64;
        (Some(alone as u64), stage_bytes.map(|bytes| bytes.round() as u64))
    }
}

/// Adds the mean of each key's values in a step to the means of other steps.
fn add_means<K: Eq + Hash>(all: &mut HashMap<K, Vec<f64>>, in_step: HashMap<K, Vec<f64>>) {
    for (key, values) in in_step {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        all.entry(key).or_default().push(mean);
    }
}

/// Returns how long the rank that waited least did not compute between its first and its last action.
fn idle(timeline: &Timeline) -> f64 {
    let idle_of = |rank| {
        let events = timeline.events_of(rank);
        let start = events.first().map_or(0.0, |event| event.start);
        let end = events.iter().map(|event| event.end).fold(start, f64::max);
        end - start - timeline.busy(rank)
    };
    (0..timeline.ranks()).map(Rank::new).map(idle_of).fold(f64::INFINITY, f64::min)
}

/// Returns the bandwidth at which `ranks` replicas sum `bytes` of gradients each in `seconds`, if each rank
/// sends every byte but its own share twice.
fn bandwidth(ranks: u32, bytes: u64, seconds: f64) -> Option<f64> {
    let traffic = f64::from(2 * (ranks.max(1) - 1)) / f64::from(ranks.max(1)) * bytes as f64;
    (ranks > 1 && bytes > 0 && seconds > 0.0).then(|| (traffic / seconds).clamp(1.0, 1e15))
}

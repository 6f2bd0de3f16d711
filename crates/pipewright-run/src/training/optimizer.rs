//! The optimizer of a run: one algorithm for each parameter, with its learning rate and weight decay, and the
//! groups whose gradients are clipped together.

use std::collections::{BTreeMap, HashSet};

use burn::grad_clipping::GradientClipping;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{Adam, AdamConfig, ModuleOptimizer, Optimizer, Sgd, SgdConfig};
use globset::{Glob, GlobSet, GlobSetBuilder};
use pipewright::optimizer::{
    Adafactor, AdamW, AdamW8bit, ClipGroup, ErrorFeedback, Lion, Muon, OptimizerGroup,
};
use pipewright::stage::StageError;
use pipewright::train::ExpertBalance;
use pipewright_models::training_memory::{OptimizerState, StateRule, is_hidden_matrix};
use pipewright_models::{ParameterGroup, ParameterSpec, ROUTER_CORRECTION};

use crate::error::{ErrorKind, RunError};
use crate::run_model::RunModel;
use crate::settings::Settings;
use crate::settings::optimizer::{DelayCorrection, OptimizerName, OptimizerSettings};
use crate::settings::optimizer_groups::{GroupSettings, named_group};

/// The optimizer of a run, and the groups of its parameters.
pub(crate) struct Update {
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) groups: Vec<OptimizerGroup>,
    pub(crate) clip_groups: Vec<ClipGroup>,
}

/// How one parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Own {
    name: OptimizerName,
    /// The factor of the learning rate.
    rate: f64,
    weight_decay: f64,
}

/// An algorithm with its settings.
enum Algorithm {
    AdamW(AdamW),
    AdamW8bit(AdamW8bit),
    Lion(Lion),
    Adam(Adam),
    Sgd(Sgd),
    Muon(Muon),
    Adafactor(Adafactor),
}

/// Returns the optimizer and the groups of a model's parameters.
///
/// # Errors
/// When no trained parameter of the model belongs to a group.
pub(crate) fn update(settings: &OptimizerSettings, model: &dyn RunModel) -> Result<Update, RunError> {
    let specs = model.trained_parameters()?;
    let no_decay = paths_of(model, &settings.no_decay)?;
    let groups =
        settings.groups.iter().map(|group| members(group, model, &specs)).collect::<Result<Vec<_>, _>>()?;
    let rest = Own { name: settings.name, rate: 1.0, weight_decay: settings.weight_decay };
    let mut buckets: Vec<(Own, HashSet<String>)> = Vec::new();
    let paths: BTreeMap<&str, &ParameterSpec> = specs.iter().map(|spec| (spec.path.as_str(), spec)).collect();
    for (path, spec) in paths {
        let weight_decay = if no_decay.contains(path) { 0.0 } else { settings.weight_decay };
        let mut own = Own { name: algorithm_of(settings.name, spec), weight_decay, ..rest };
        for (group, members) in settings.groups.iter().zip(&groups) {
            if members.contains(path) {
                own.rate = group.learning_rate.map_or(own.rate, |rate| rate / settings.learning_rate);
                own.weight_decay = group.weight_decay.unwrap_or(own.weight_decay);
            }
        }
        match buckets.iter_mut().find(|(other, _)| *other == own) {
            _ if own == rest => {}
            Some((_, members)) => drop(members.insert(path.to_owned())),
            None => buckets.push((own, HashSet::from([path.to_owned()]))),
        }
    }
    let correction = settings.delay_correction;
    let clipping = (settings.clip_value > 0.0).then_some(GradientClipping::Value(settings.clip_value as f32));
    let group = |(own, members): (Own, HashSet<String>)| {
        let group =
            algorithm(settings, own).group(correction, move |path| members.contains(path)).rate(own.rate);
        clipping.clone().into_iter().fold(group, OptimizerGroup::clip)
    };
    let groups_of_update = buckets.into_iter().map(group).collect();
    let optimizer = algorithm(settings, rest).whole(correction);
    let clipped = settings.groups.iter().zip(groups);
    let clip_groups = clipped.filter_map(|(group, members)| {
        Some(ClipGroup::new(move |path| members.contains(path), group.clip_norm?))
    });
    Ok(Update {
        optimizer: clipping.into_iter().fold(optimizer, ModuleOptimizer::with_grad_clipping),
        groups: groups_of_update,
        clip_groups: clip_groups.collect(),
    })
}

/// Returns a sentence about a correction of delayed updates that begins or ends where a run resumes after step `done`.
pub(crate) fn correction_note(
    before: &OptimizerSettings,
    after: &OptimizerSettings,
    done: u64,
) -> Option<String> {
    match [before, after].map(|settings| settings.delay_correction) {
        _ if done == 0 => None,
        [DelayCorrection::None, DelayCorrection::ErrorFeedback] => Some(format!(
            "note: updates are corrected for the delay from step {} on, because the update of step {} has no error before it",
            done + 2,
            done + 1
        )),
        [DelayCorrection::ErrorFeedback, DelayCorrection::None] => Some(format!(
            "note: updates are not corrected for the delay from step {} on, and the last update is not kept",
            done + 1
        )),
        _ => None,
    }
}

/// Returns the rule by which the corrections of routers change, if the settings ask for it.
///
/// # Errors
/// When the model's routers have no corrections, or when adapters keep the model as it is.
pub(crate) fn expert_balance(
    settings: &OptimizerSettings,
    model: &dyn RunModel,
) -> Result<Option<ExpertBalance>, RunError> {
    const KEY: &str = "`expert_balance_speed` in [optimizer]";
    let Some(speed) = settings.expert_balance_speed else { return Ok(None) };
    if model.adapter().is_some() {
        return Err(RunError::input(format!(
            "{KEY} changes the model, which adapters keep as it is: remove the key"
        )));
    }
    let parameters = model.parameters()?;
    let ending = format!(".{ROUTER_CORRECTION}");
    if !parameters.iter().any(|spec| spec.path.ends_with(&ending)) {
        return Err(RunError::input(format!(
            "{KEY} is for models whose routers correct their scores, such as deepseek_v3: this model has no \
             `{ROUTER_CORRECTION}`; remove the key"
        )));
    }
    Ok(Some(ExpertBalance { speed, correction: ROUTER_CORRECTION.to_owned() }))
}

/// Returns the rule for the state of the parameters of a run.
pub fn state_rule(settings: &Settings) -> StateRule {
    let optimizer = match settings.optimizer.name {
        OptimizerName::AdamW | OptimizerName::Adam => OptimizerState::TwoMoments,
        OptimizerName::AdamW8bit => OptimizerState::TwoMomentsIn8Bits,
        OptimizerName::Lion => OptimizerState::Momentum,
        OptimizerName::Sgd if settings.optimizer.momentum.unwrap_or(0.0) == 0.0 => OptimizerState::Stateless,
        OptimizerName::Sgd => OptimizerState::Momentum,
        OptimizerName::Muon => OptimizerState::Muon,
        OptimizerName::Adafactor => OptimizerState::Adafactor,
    };
    StateRule {
        optimizer,
        precision: settings.run.precision,
        is_corrected: settings.optimizer.delay_correction == DelayCorrection::ErrorFeedback,
    }
}

/// Refuses an algorithm that updates whole matrices or rows. Several ranks compute each stage together, and the launch
/// would refuse it too. `stages` are the parameters of each stage.
pub(crate) fn require_elementwise(
    settings: &Settings,
    stages: &[Vec<ParameterSpec>],
) -> Result<(), RunError> {
    let uses_matrix = |spec: &&ParameterSpec| {
        let name = algorithm_of(settings.optimizer.name, spec);
        matches!(name, OptimizerName::Muon | OptimizerName::Adafactor)
            || name == OptimizerName::AdamW8bit && spec.shape.len() > 1
    };
    let refused =
        stages.iter().enumerate().find_map(|(stage, specs)| Some((stage, specs.iter().find(uses_matrix)?)));
    match refused {
        None => Ok(()),
        Some((stage, spec)) => {
            let error = StageError::MixesRows { parameter: spec.path.as_str().into() };
            Err(RunError::input(format!("stage {stage}: {error}")))
        }
    }
}

/// Refuses an algorithm that updates whole matrices where each replica has only some rows.
pub(crate) fn require_whole(settings: &Settings) -> Result<(), RunError> {
    let name = match settings.optimizer.name {
        OptimizerName::Muon => "muon",
        OptimizerName::Adafactor => "adafactor",
        OptimizerName::AdamW8bit if settings.pipeline.head_parts > 1 => {
            return Err(RunError::input(format!(
                "`optimizer.name = \"adamw_8bit\"` has a scale for each row of a matrix, and with `pipeline.head_parts = {}` each \
                 layer has only a part of the rows of the head; use adamw, or write `head_parts = 1`",
                settings.pipeline.head_parts
            )));
        }
        _ => return Ok(()),
    };
    let parts = [("head", settings.pipeline.head_parts), ("embedding", settings.pipeline.embedding_parts)];
    let cut = parts.into_iter().find(|(_, parts)| *parts > 1);
    if let Some((what, parts)) = cut.filter(|_| settings.optimizer.name == OptimizerName::Adafactor) {
        return Err(RunError::input(format!(
            "`optimizer.name = \"adafactor\"` updates whole matrices, and with `pipeline.{what}_parts = {parts}` each layer \
             has only some rows of the {what}; use adamw, adam, sgd or muon, or write `{what}_parts = 1`"
        )));
    }
    if !settings.mesh.is_sharded() {
        return Ok(());
    }
    Err(RunError::input(format!(
        "`optimizer.name = \"{name}\"` updates whole matrices, and with `mesh.data_parallel_mode = \"sharded\"` or a \
         list in `mesh.data_parallel` each replica has only some rows; use adamw, adam or sgd, or \
         write `data_parallel = {}` and `data_parallel_mode = \"replicated\"`",
        settings.mesh.data_parallel
    )))
}

/// Returns the algorithm of a parameter. Muon is for the matrices between embedding and head.
fn algorithm_of(name: OptimizerName, spec: &ParameterSpec) -> OptimizerName {
    match name {
        OptimizerName::Muon if !is_hidden_matrix(spec) => OptimizerName::AdamW,
        name => name,
    }
}

/// Returns the paths of the trained parameters of some groups.
fn paths_of(model: &dyn RunModel, groups: &[ParameterGroup]) -> Result<HashSet<String>, RunError> {
    let paths = model.group_paths(groups)?;
    Ok(paths.into_iter().filter(|path| model.is_trained(path)).collect())
}

/// Returns the paths of a group's parameters.
fn members(
    group: &GroupSettings,
    model: &dyn RunModel,
    specs: &[ParameterSpec],
) -> Result<HashSet<String>, RunError> {
    let mut members = HashSet::new();
    for text in &group.parameters {
        let found: HashSet<String> = match named_group(text) {
            Some(named) => paths_of(model, &[named])?,
            None => {
                let pattern = compiled(text)?;
                let paths = specs.iter().map(|spec| &spec.path);
                paths.filter(|path| pattern.is_match(path)).cloned().collect()
            }
        };
        if found.is_empty() {
            let example = specs.first().map_or("", |spec| spec.path.as_str());
            let what = if model.adapter().is_some() { "trained parameter" } else { "parameter" };
            return Err(RunError::input(format!(
                "optimizer.groups: `{text}` matches no {what} of the model; parameters have paths such as `{example}`"
            )));
        }
        members.extend(found);
    }
    Ok(members)
}

fn compiled(pattern: &str) -> Result<GlobSet, RunError> {
    let glob = Glob::new(pattern).and_then(|glob| GlobSetBuilder::new().add(glob).build());
    // The configuration was checked.
    glob.map_err(|error| RunError::new(ErrorKind::Bug, error))
}

fn algorithm(settings: &OptimizerSettings, own: Own) -> Algorithm {
    let OptimizerSettings { betas: [beta_1, beta_2], eps, .. } = *settings;
    let (beta_1, beta_2, epsilon, weight_decay) =
        (beta_1 as f32, beta_2 as f32, eps as f32, own.weight_decay as f32);
    let decay = (weight_decay > 0.0).then(|| WeightDecayConfig::new(weight_decay));
    let momentum = MomentumConfig {
        momentum: settings.momentum.unwrap_or(0.0),
        dampening: 0.0,
        nesterov: settings.nesterov.unwrap_or(false),
    };
    let adamw = AdamW { betas: (beta_1, beta_2), epsilon, weight_decay };
    match own.name {
        OptimizerName::AdamW => Algorithm::AdamW(adamw),
        OptimizerName::AdamW8bit => Algorithm::AdamW8bit(AdamW8bit(adamw)),
        OptimizerName::Lion => Algorithm::Lion(Lion { betas: (beta_1, beta_2), weight_decay }),
        OptimizerName::Adam => Algorithm::Adam(
            AdamConfig::new()
                .with_beta_1(beta_1)
                .with_beta_2(beta_2)
                .with_epsilon(epsilon)
                .with_weight_decay(decay)
                .build(),
        ),
        OptimizerName::Sgd => {
            let momentum = (momentum.momentum > 0.0).then_some(momentum);
            Algorithm::Sgd(SgdConfig::new().with_weight_decay(decay).with_momentum(momentum).build())
        }
        // This rule depends on no layout of the matrix, and takes the learning rates of AdamW.
        OptimizerName::Muon => {
            let MomentumConfig { momentum, nesterov, .. } = momentum;
            Algorithm::Muon(Muon { momentum, nesterov, weight_decay })
        }
        OptimizerName::Adafactor => Algorithm::Adafactor(Adafactor { weight_decay }),
    }
}

impl Algorithm {
    /// Returns the optimizer of all parameters.
    fn whole(self, correction: DelayCorrection) -> ModuleOptimizer {
        fn of(optimizer: impl Optimizer, correction: DelayCorrection) -> ModuleOptimizer {
            match correction {
                DelayCorrection::None => optimizer.into(),
                DelayCorrection::ErrorFeedback => ErrorFeedback(optimizer).into(),
            }
        }
        match self {
            Self::AdamW(optimizer) => of(optimizer, correction),
            Self::AdamW8bit(optimizer) => of(optimizer, correction),
            Self::Lion(optimizer) => of(optimizer, correction),
            Self::Adam(optimizer) => of(optimizer, correction),
            Self::Sgd(optimizer) => of(optimizer, correction),
            Self::Muon(optimizer) => of(optimizer, correction),
            Self::Adafactor(optimizer) => of(optimizer, correction),
        }
    }

    /// Returns the optimizer of some parameters.
    fn group(
        self,
        correction: DelayCorrection,
        contains: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> OptimizerGroup {
        fn of(
            optimizer: impl Optimizer,
            correction: DelayCorrection,
            contains: impl Fn(&str) -> bool + Send + Sync + 'static,
        ) -> OptimizerGroup {
            match correction {
                DelayCorrection::None => OptimizerGroup::new(contains, optimizer),
                DelayCorrection::ErrorFeedback => OptimizerGroup::new(contains, ErrorFeedback(optimizer)),
            }
        }
        match self {
            Self::AdamW(optimizer) => of(optimizer, correction, contains),
            Self::AdamW8bit(optimizer) => of(optimizer, correction, contains),
            Self::Lion(optimizer) => of(optimizer, correction, contains),
            Self::Adam(optimizer) => of(optimizer, correction, contains),
            Self::Sgd(optimizer) => of(optimizer, correction, contains),
            Self::Muon(optimizer) => of(optimizer, correction, contains),
            Self::Adafactor(optimizer) => of(optimizer, correction, contains),
        }
    }
}

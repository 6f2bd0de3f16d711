//! Builds the experts of a mixture: on each of the ranks that compute a stage together, a shard of every
//! expert, or some whole experts.

use pipewright::nn::{self, Expert, ExpertActivation, ExpertAdapter, HeldLinear, Linear};
use pipewright::tensor::Placement;

use crate::error::ModelError;
use crate::file_layout::{FileLayout, StackedMatrix, TensorEntry};
use crate::lora::{DOWN, GATE_UP};
use crate::parameter::{Builder, ParameterKind, SplitLinear};
use crate::split::require_parts;

/// The form of the experts that a router chooses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertForm {
    /// Whether the router and the layers of experts have a bias.
    pub has_bias: bool,
    /// Whether files have the matrices of all experts of a layer in one tensor, with the columns of gate and
    /// up in turn.
    pub are_joined: bool,
    /// The names of the tensors in which files have the matrices gate and up, and down, of all experts of a layer, below the
    /// layer; `None` if each matrix is a tensor.
    pub stacks: Option<[&'static str; 2]>,
    /// The function between the layers of an expert.
    pub activation: ExpertActivation,
}

impl Default for ExpertForm {
    fn default() -> Self {
        Self { has_bias: false, are_joined: false, stacks: None, activation: ExpertActivation::Usual }
    }
}

/// The sizes of a mixture's experts, with their keys in `config.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertSizes {
    /// The number of experts.
    pub(crate) count: (&'static str, usize),
    /// The width of an expert's inputs and outputs.
    pub(crate) width: usize,
    /// The inner width of an expert.
    pub(crate) inner: (&'static str, usize),
    /// Whether an expert has a gate.
    pub(crate) has_gate: bool,
    /// The form of an expert.
    pub(crate) form: ExpertForm,
}

/// Requires that replicas can hold the experts of the mixture `layer` together.
fn check_travel(layer: &str, sizes: ExpertSizes, replicas: u32) -> Result<(), ModelError> {
    let ExpertSizes { count: (key, count), form, .. } = sizes;
    if !count.is_multiple_of(replicas as usize) {
        return Err(ModelError::new(format!(
            "the experts of `{layer}` cannot be divided among {replicas} replicas (`mesh.expert_parallel`): `{key} = {count}` is \
             not a multiple of that; set `mesh.expert_parallel` to a divisor of {count}"
        )));
    }
    if form.has_bias || form.activation != ExpertActivation::Usual {
        return Err(ModelError::new(format!(
            "the experts of `{layer}` have biases or a bounded activation, and {replicas} replicas cannot hold such experts \
             together: set `mesh.expert_parallel` to 1, or divide them among tensor ranks (`mesh.tensor_parallel` with \
             `mesh.whole_experts`)"
        )));
    }
    Ok(())
}

/// Returns the experts without their adapters.
pub(crate) fn without_adapters(experts: &[Option<Expert>]) -> Vec<Option<Expert>> {
    let own = |expert: &Expert| Expert { adapter: None, ..expert.clone() };
    experts.iter().map(|expert| expert.as_ref().map(own)).collect()
}

impl Builder<'_> {
    /// Builds the experts of the mixture `layer`. An expert that this rank does not hold is `None`.
    pub(crate) fn experts(
        &mut self,
        layer: &str,
        sizes: ExpertSizes,
    ) -> Result<Vec<Option<Expert>>, ModelError> {
        let ExpertSizes { count: (key, count), inner, has_gate, .. } = sizes;
        let replicas = self.tensor().expert_parallel().ranks();
        if replicas > 1 {
            check_travel(&self.named(layer), sizes, replicas)?;
        }
        let ranks = self.tensor_ranks();
        let parameter = format!("experts.0.{}.weight", if has_gate { "gate_proj" } else { "up_proj" });
        let is_whole = self.tensor().holds_whole_experts();
        if !is_whole {
            require_parts(&self.named(layer), &self.named(&parameter), inner, ranks)?;
        } else if count < ranks as usize {
            let [layer, parameter] = [layer, &format!("{layer}.{parameter}")].map(|path| self.named(path));
            return Err(ModelError::new(format!(
                "`{layer}` cannot be divided among {ranks} tensor ranks that hold whole experts (`mesh.whole_experts`): \
                 `{parameter}` belongs to one of `{key} = {count}`, so some rank would get nothing; use another \
                 `mesh.tensor_parallel`, or set `mesh.whole_experts` to false"
            )));
        }
        let split = if replicas > 1 {
            [SplitLinear::OutputsOnReplica { shards: ranks }, SplitLinear::InputsOnReplica]
        } else if is_whole {
            [SplitLinear::OneRank; 2]
        } else {
            [SplitLinear::Outputs { shards: ranks }, SplitLinear::InputsOfSum]
        };
        let held = self.tensor().experts(count);
        let bias_share = if is_whole { 1.0 } else { 1.0 / f64::from(ranks) };
        let mut expert = |index| self.routed_expert(layer, index, &sizes, split, bias_share);
        (0..count).map(|index| held.contains(&index).then(|| expert(index)).transpose()).collect()
    }

    /// Builds an expert of a mixture.
    fn routed_expert(
        &mut self,
        layer: &str,
        index: usize,
        sizes: &ExpertSizes,
        [outputs, inputs]: [SplitLinear; 2],
        bias_share: f64,
    ) -> Result<Expert, ModelError> {
        let &ExpertSizes { count: (_, count), width, inner: (_, inner), has_gate, form } = sizes;
        let ExpertForm { has_bias, are_joined, stacks, activation } = form;
        let path = format!("{layer}.experts.{index}");
        let joined = self.named(&format!("{layer}.experts"));
        let stacks = stacks.map(|names| names.map(|name| self.named(&format!("{layer}.{name}"))));
        let mut linear = |name: &str, sizes, split, (tensor, first, step): (&str, usize, usize)| {
            let layout = |parameter: &str| {
                if !are_joined {
                    let (experts, matrix, matrices, is_usual) = (count, first, step, stacks.is_some());
                    let (tensor, other_name) = match &stacks {
                        Some([first, _]) if matrices == 2 => {
                            (first.clone(), Some(format!("{joined}.{tensor}")))
                        }
                        Some([_, down]) => (down.clone(), Some(format!("{joined}.{tensor}"))),
                        // A stack has the name of most families, also where the family has other names.
                        None => (format!("{layer}.experts.{tensor}"), None),
                    };
                    let stack = StackedMatrix { tensor, expert: index, experts, matrix, matrices, is_usual };
                    return FileLayout { stack: Some(stack), other_name, ..FileLayout::default() };
                }
                let ending = if parameter == "bias" { "_bias" } else { "" };
                let tensor = format!("{joined}.{tensor}{ending}");
                let entry = Some(TensorEntry { tensor, index, count, first, step });
                FileLayout { entry, ..FileLayout::default() }
            };
            self.linear_in(has_bias, &format!("{path}.{name}"), sizes, split, layout)
        };
        let gate_proj = has_gate
            .then(|| linear("gate_proj", [width, inner], outputs, ("gate_up_proj", 0, 2)))
            .transpose()?;
        let of_up = if has_gate { ("gate_up_proj", 1, 2) } else { ("up_proj", 0, 1) };
        let up_proj = linear("up_proj", [width, inner], outputs, of_up)?;
        let down_proj = linear("down_proj", [inner, width], inputs, ("down_proj", 0, 1))?;
        let form = nn::ExpertForm { activation, bias_share };
        let adapter = self.expert_adapter(layer, index, sizes, [outputs, inputs])?;
        Ok(Expert { gate_proj, up_proj, down_proj, adapter, form })
    }

    /// Builds the adapters of an expert, if the source has some. PEFT has those of all experts of a block in one matrix, or each
    /// in its own.
    fn expert_adapter(
        &mut self,
        layer: &str,
        index: usize,
        sizes: &ExpertSizes,
        [outputs, inputs]: [SplitLinear; 2],
    ) -> Result<Option<ExpertAdapter>, ModelError> {
        let &ExpertSizes { count: (_, experts), width, inner: (_, inner), form, .. } = sizes;
        let Some(lora) = self.lora() else { return Ok(None) };
        // transformers has the name of most families, unless the files of the family have stacks of their own.
        let path = format!("{layer}.experts");
        let of_all = if form.stacks.is_some() { self.named(&path) } else { path };
        let adapts = |name: &str| lora.adapts(&format!("{of_all}.{name}"));
        let [enters, leaves] = [GATE_UP, DOWN].map(adapts);
        if !enters && !leaves {
            return Ok(None);
        }
        let refused = |advice: &str| {
            let place = format!("the experts of `{}` have adapters (`adapter.targets`)", self.named(layer));
            Err(ModelError::new(format!("{place}, and {advice}")))
        };
        if lora.dora || lora.dropout > 0.0 {
            return refused(
                "adapters of experts have neither magnitudes nor dropout: set `adapter.dora` to false and `adapter.dropout` to 0",
            );
        }
        let own = ["gate_proj", "up_proj", "down_proj"];
        let own = own.map(|name| self.named(&format!("{layer}.experts.{index}.{name}")));
        if own.iter().any(|path| lora.saves_module(path)) {
            return refused(
                "`adapter.modules_to_save` trains matrices of them whole: leave one of the two out",
            );
        }
        let (rank, scale, is_own) = (lora.rank as usize, lora.scale(), lora.own_experts);
        // The matrices that every rank has give a part of the sum, or of their gradients.
        let whole = match outputs {
            SplitLinear::OneRank => Placement::ON_ONE_RANK,
            SplitLinear::OutputsOnReplica { .. } => Placement::REPLICATED_PARTIAL.on_one_replica(),
            _ => Placement::REPLICATED_PARTIAL,
        };
        let (by_outputs, by_inputs) = (self.placements(outputs).0, self.placements(inputs).0);
        let path = format!("{layer}.experts.{index}");
        let mut linear =
            |name: &str, shape: [usize; 2], placement, (of, matrix, matrices): (&str, usize, usize)| {
                let (_, part) = name.split_once('.').unwrap_or_default();
                let (tensor, is_usual) = (format!("{of_all}.{of}.{part}"), !is_own);
                let stack = StackedMatrix { tensor, expert: index, experts, matrix, matrices, is_usual };
                let layout = FileLayout { stack: Some(stack), ..FileLayout::default() };
                let path = format!("{path}.{name}");
                let weight =
                    self.stored(&path, "weight", shape, (ParameterKind::Matrix, layout), placement)?;
                Ok::<_, ModelError>(HeldLinear::from(Linear { weight, bias: None }))
            };
        let (mut enter, mut gate, mut up, mut enter_up, mut down) = (None, None, None, None, None);
        if enters {
            let mut first =
                |name: &str| linear(&format!("{name}.lora_A"), [width, rank], whole, (GATE_UP, 0, 1));
            enter = Some(first(if is_own { "gate_proj" } else { GATE_UP })?);
            enter_up = is_own.then(|| first("up_proj")).transpose()?;
            gate = Some(linear("gate_proj.lora_B", [rank, inner], by_outputs, (GATE_UP, 0, 2))?);
            up = Some(linear("up_proj.lora_B", [rank, inner], by_outputs, (GATE_UP, 1, 2))?);
        }
        if leaves {
            let first = linear("down_proj.lora_A", [inner, rank], by_inputs, (DOWN, 0, 1))?;
            down = Some([first, linear("down_proj.lora_B", [rank, width], whole, (DOWN, 0, 1))?]);
        }
        Ok(Some(ExpertAdapter { enter, gate, up, enter_up, down, scale }))
    }

    /// Builds a feed-forward layer without biases whose inner width is split over all ranks.
    pub(crate) fn split_expert(
        &mut self,
        path: &str,
        sizes: [usize; 2],
        has_gate: bool,
    ) -> Result<Expert, ModelError> {
        let (outputs, inputs) = (SplitLinear::Outputs { shards: self.tensor_ranks() }, SplitLinear::Inputs);
        let [width, inner] = sizes;
        let mut up =
            |name: &str| self.split_linear(false, &format!("{path}.{name}"), [width, inner], outputs);
        let gate_proj = has_gate.then(|| up("gate_proj")).transpose()?;
        let up_proj = up("up_proj")?;
        let down_proj = self.split_linear(false, &format!("{path}.down_proj"), [inner, width], inputs)?;
        Ok(Expert { gate_proj, up_proj, down_proj, adapter: None, form: nn::ExpertForm::default() })
    }
}

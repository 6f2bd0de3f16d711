//! The list of model families, and the configuration of a model of any of them.
//!
//! A further family is one module with a type that says what its blocks are made of ([`ModelFamily`] is written once
//! over it), its `pub mod` line in `lib.rs`, and a `use` line and a line in the list here.

use std::collections::{BTreeSet, HashSet};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use crate::decoder::DecoderConfig;
use crate::deepseek_v2::DeepseekV2Config;
use crate::deepseek_v3::DeepseekV3Config;
use crate::embedding_form::VocabularyCut;
use crate::error::ModelError;
use crate::family::{Composition, ModelFamily};
use crate::gemma2::Gemma2Config;
use crate::gemma3::Gemma3Config;
use crate::generation_stage::GenerationStage;
use crate::glm4_moe::Glm4MoeConfig;
use crate::gpt_oss::GptOssConfig;
use crate::gpt2::Gpt2Config;
use crate::granite::GraniteConfig;
use crate::granite_hybrid::GraniteHybridConfig;
use crate::hf::{
    self, Adaptable, Described, ExportOptions, GgufForm, GgufWritten, PeftLimit, PeftTargets, Stored,
    WeightType,
};
use crate::hybrid::HybridConfig;
use crate::llama::LlamaConfig;
use crate::lora::{HEAD, LoraConfig, is_of_adapter, is_table, layer_of_first, module_of};
use crate::ministral3::Ministral3Config;
use crate::mistral::MistralConfig;
use crate::mixtral::MixtralConfig;
use crate::model_source::{AdaptedCheckpoint, ModelSource, outline};
use crate::nemotron_h::NemotronHConfig;
use crate::olmo2::Olmo2Config;
use crate::olmo3::Olmo3Config;
use crate::outline::Outline;
use crate::parameter::{ParameterKind, ParameterSpec};
use crate::parameter_group::{ParameterGroup, group_paths};
use crate::phi3::Phi3Config;
use crate::quantisation::QuantisedSizes;
use crate::qwen2::Qwen2Config;
use crate::qwen2_moe::Qwen2MoeConfig;
use crate::qwen3::Qwen3Config;
use crate::qwen3_5::Qwen35Config;
use crate::qwen3_5_moe::Qwen35MoeConfig;
use crate::qwen3_moe::Qwen3MoeConfig;
use crate::qwen3_next::Qwen3NextConfig;
use crate::smollm3::SmolLm3Config;
use crate::split::Place;
use crate::starcoder2::Starcoder2Config;
use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;
use pipewright::memory::read_ahead;
use pipewright::nn::TensorParallel;
use pipewright::stage::StageModule;
use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::add_labels;
use pipewright_shapes::family::Family;
use serde_json::{Value, json};

/// A family in the list.
pub(crate) struct Listed {
    /// The facts about it.
    pub(crate) family: &'static Family,
    /// Reads a parsed `config.json`.
    pub(crate) from_json: fn(Value) -> Result<ModelConfig, ShapeError>,
    /// Makes the `config.json` of a model of these sizes.
    pub(crate) of_sizes: fn(DecoderConfig) -> Value,
}

impl Deref for Listed {
    type Target = Family;

    fn deref(&self) -> &Family {
        self.family
    }
}

impl Listed {
    const fn new<F: Composition + Into<ModelConfig>>() -> Self {
        Self {
            family: const { &F::FAMILY },
            from_json: |json| <F as ModelFamily>::from_json(json).map(Into::into),
            of_sizes: |sizes| Composition::to_json(&<F as Composition>::of_sizes(sizes)),
        }
    }
}

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($config:ty),)*) => {
        /// The configuration of a model of any family.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum ModelConfig {
            $($(#[$doc])* $variant($config),)*
        }

        $(impl From<$config> for ModelConfig {
            fn from(config: $config) -> Self {
                Self::$variant(config)
            }
        })*

        /// All families.
        pub(crate) const FAMILIES: &[Listed] = &[$(Listed::new::<$config>()),*];

        impl ModelConfig {
            /// The names by which [`ModelConfig::from_json`] finds a family.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$config as Composition>::FAMILY.name()),*];

            /// Returns the configuration for generation, without the layers that only training needs.
            pub fn for_generation(&self) -> Self {
                match self {
                    $(Self::$variant(config) => Self::$variant(ModelFamily::for_generation(config)),)*
                }
            }

        }

        /// The functions that do not depend on the type of the configuration.
        impl Deref for ModelConfig {
            type Target = dyn ModelFamily;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Self::$variant(config) => config,)*
                }
            }
        }
    };
}

families! {
    /// Llama: rotary positions, grouped-query attention, RMSNorm, SwiGLU.
    Llama(LlamaConfig),
    /// Qwen2: Llama with biases on queries, keys and values.
    Qwen2(Qwen2Config),
    /// Qwen3: Llama with a normalisation of each head's queries and keys.
    Qwen3(Qwen3Config),
    /// Qwen3-MoE: Qwen3 with a mixture of experts in some layers.
    Qwen3Moe(Qwen3MoeConfig),
    /// Qwen2-MoE: Qwen2 with a mixture of experts and an expert for every token.
    Qwen2Moe(Qwen2MoeConfig),
    /// Qwen3-Next: Qwen3-MoE with Gated DeltaNet in most layers, and gates of the other layers' attention.
    Qwen3Next(Qwen3NextConfig),
    /// Qwen3.5 of text: Qwen3-Next without experts.
    Qwen35(Qwen35Config),
    /// Qwen3.5 of text with experts in each layer.
    Qwen35Moe(Qwen35MoeConfig),
    /// Mistral: Llama with windows.
    Mistral(MistralConfig),
    /// Ministral 3: Mistral with queries that grow with their positions.
    Ministral3(Ministral3Config),
    /// Mixtral: Mistral with a mixture of experts in each layer.
    Mixtral(MixtralConfig),
    /// SmolLM 3: Llama with layers without positions.
    SmolLm3(SmolLm3Config),
    /// Granite: Llama with factors of embeddings, residual branches, scores and logits.
    Granite(GraniteConfig),
    /// Granite 4: Granite with Mamba-2 in most layers.
    GraniteHybrid(GraniteHybridConfig),
    /// Phi 3 and 4: Llama with joined projections and positions of a part of each head.
    Phi3(Phi3Config),
    /// OLMo 2: Llama with norms after the parts of a block, and norms of all queries and keys.
    Olmo2(Olmo2Config),
    /// OLMo 3: OLMo 2 with windows in most layers.
    Olmo3(Olmo3Config),
    /// Gemma 2: norms around the parts of a block, bounded scores and logits, windows in some layers.
    Gemma2(Gemma2Config),
    /// Gemma 3 of text: Gemma 2 with head norms, and with positions of their own in layers with windows.
    Gemma3(Gemma3Config),
    /// StarCoder 2: Llama with layer normalisations, biases, windows, and feed-forward layers without a gate.
    Starcoder2(Starcoder2Config),
    /// GPT-2: StarCoder 2 with joined projections, and with vectors of positions instead of rotary ones.
    Gpt2(Gpt2Config),
    /// gpt-oss: Mixtral with attention sinks, biases, and experts with bounded gates.
    GptOss(GptOssConfig),
    /// DeepSeek V2: latent attention, and experts in groups.
    DeepseekV2(DeepseekV2Config),
    /// DeepSeek V3: DeepSeek V2 with a correction of the router's scores.
    DeepseekV3(DeepseekV3Config),
    /// GLM 4.5: the experts of DeepSeek V3 with grouped queries and positions of a part of each head.
    Glm4Moe(Glm4MoeConfig),
    /// Nemotron-H: Mamba-2, attention, feed-forward layers and experts by a pattern.
    NemotronH(NemotronHConfig),
    /// Attention, Mamba-2, experts and feed-forward layers by a pattern, with documents, windows and further
    /// embeddings.
    Hybrid(HybridConfig),
}

impl ModelConfig {
    /// Returns the model with an output for each of these labels in place of each token id.
    ///
    /// # Errors
    /// When the family does not have models with labels, or the list is empty.
    pub fn with_labels(&self, labels: &[String]) -> Result<Self, ModelError> {
        let mut json = self.to_json();
        let Some(class) = self.family().scoring_class() else {
            return Err(ModelError::new(format!(
                "models of the family `{}` have no head of labels, because transformers has none: use a model of another family",
                self.family().name()
            )));
        };
        json["architectures"] = json!([class]);
        add_labels(&mut json, labels);
        Self::from_json(json)
            .map_err(|source| ModelError::new("the model cannot have these labels").because(source))
    }

    /// Checks that the model can compute rows of `tokens` tokens.
    ///
    /// # Errors
    /// When the model has a vector for each position, and the rows have more tokens than it has vectors.
    pub fn check_length(&self, tokens: usize) -> Result<(), ModelError> {
        match self.positions() {
            Some(positions) if tokens > positions => Err(ModelError::new(format!(
                "rows of {tokens} tokens (`data.seq_len`) are longer than the {positions} positions that the model has vectors for \
                 (`n_positions`): set `data.seq_len` to at most {positions}, or use a model with more positions"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the parameters of the whole model.
    ///
    /// # Errors
    /// As [`ModelFamily::outline`].
    pub fn parameters(&self) -> Result<Vec<ParameterSpec>, ModelError> {
        self.outline(0..self.layers(), &TensorParallel::default())
    }

    /// Returns the paths of the linear layers that can have an adapter, of the table of the embedding, and of the matrices of
    /// all experts of a block.
    ///
    /// # Errors
    /// When the family cannot have adapters, or as [`ModelFamily::outline`].
    pub fn adaptable_layers(&self) -> Result<Vec<String>, ModelError> {
        if !self.family().is_decoder() {
            let families = FAMILIES.iter().filter(|family| family.is_decoder());
            let families = families.map(|family| family.name()).collect::<Vec<_>>().join(", ");
            return Err(ModelError::new(format!(
                "`{}` cannot have adapters: its layers are not all linear layers of a decoder; use a model of one of the families \
                 {families}, or remove the section [adapter]",
                self.family().name()
            )));
        }
        let specs = self.adapter_parameters(&LoraConfig { rank: 1, ..LoraConfig::default() })?;
        let layers = specs.iter().filter_map(|spec| layer_of_first(&spec.path));
        // The head and the table of the embedding have one if they are named.
        let form = self.head();
        let has_head = !form.is_tied && form.labels.is_none();
        let (head, table) = (has_head.then_some(HEAD), form.names.of(form.embedding));
        let layers: Vec<String> = layers.chain(head).map(str::to_owned).chain([table]).collect();
        let parameters = self.parameters()?;
        let stacks = parameters.iter().filter_map(|spec| spec.layout.stack_of_experts());
        let experts: BTreeSet<String> = stacks.map(str::to_owned).collect();
        Ok(layers.into_iter().chain(experts).collect())
    }

    /// Returns the parameters of these adapters on the model, and the parameters of the modules that are trained with them.
    ///
    /// # Errors
    /// As [`ModelFamily::outline`].
    pub fn adapter_parameters(&self, lora: &LoraConfig) -> Result<Vec<ParameterSpec>, ModelError> {
        let (whole, tensor) = (0..self.layers(), TensorParallel::default());
        let (cut, quantised) = (VocabularyCut::default(), QuantisedSizes::default());
        let mut specs = outline(&**self, &cut, whole, &tensor, Some(lora), &quantised)?;
        // Copies of a table are listed too.
        let mut paths = HashSet::new();
        specs.retain(|spec| lora.trains(&spec.path) && paths.insert(spec.path.clone()));
        Ok(specs)
    }

    /// Reads the settings of the adapters in a PEFT directory, and checks that they fit the model.
    ///
    /// # Errors
    /// When a file is missing, cut short or not what its name says, when the adapters compute something that
    /// adapters here do not, when they do not fit the model's layers, or as
    /// [`ModelConfig::adaptable_layers`].
    pub fn read_adapter(&self, dir: &Path) -> Result<LoraConfig, ModelError> {
        let (layers, parameters) = (self.adaptable_layers()?, self.parameters()?);
        let form = self.head();
        let table = form.names.of(&format!("{}.weight", form.embedding));
        let tied_table = form.is_tied.then_some(&*table);
        let (lora, weights) =
            hf::read_adapter(dir, Adaptable { layers: &layers, parameters: &parameters, tied_table })?;
        // The parameters do not depend on the dropout, which the settings may replace. A model with these adapters checks it.
        let without_dropout = LoraConfig { dropout: 0.0, ..lora.clone() };
        weights.require(&self.adapter_parameters(&without_dropout)?)?;
        Ok(lora)
    }

    /// Returns the global paths of the parameters of these groups.
    ///
    /// # Errors
    /// As [`ModelFamily::outline`].
    pub fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, ModelError> {
        let (mut outline, place) = (Outline::default(), Device::flex().into());
        let stage = self.build_stage(0..self.layers(), &mut outline, &place)?;
        Ok(group_paths(&stage, groups))
    }

    /// Builds the whole model for generation ([`crate::generation::generate`]), on `device`.
    ///
    /// # Errors
    /// As [`hf::load_stage`] and [`hf::restore_stage`].
    pub fn whole(
        &self,
        source: ModelSource<'_>,
        device: &Device,
    ) -> Result<Box<dyn GenerationStage>, ModelError> {
        self.generation_stage(0..self.for_generation().layers(), source, &device.into())
    }

    /// Builds the stage that holds `layers` of [`ModelConfig::for_generation`], or a rank's shards of it.
    /// Parameters of other layers are not read.
    ///
    /// # Errors
    /// As [`hf::load_stage`] and [`hf::restore_stage`].
    pub fn generation_stage(
        &self,
        layers: Range<usize>,
        source: ModelSource<'_>,
        place: &Place,
    ) -> Result<Box<dyn GenerationStage>, ModelError> {
        let config = self.for_generation();
        let mut source = source.for_generation(&*config, place)?;
        let stage = config.build_stage(layers, &mut *source, place)?;
        read_ahead(&stage.streamed());
        Ok(Box::new(stage))
    }

    /// Writes the adapters of a checkpoint as a PEFT directory into `dir`, which must be empty or not exist.
    /// The directory names `base` as the model that the adapters change. Returns the part of the training that
    /// PEFT does not support for these layers, if there is one; [`ModelConfig::export_merged`] keeps it.
    ///
    /// # Errors
    /// When the checkpoint does not have these adapters of the model, or when the system reports an error.
    pub fn export_adapter(
        &self,
        checkpoint: &Checkpoint,
        lora: &LoraConfig,
        base: Option<&Path>,
        dir: &Path,
    ) -> Result<Option<PeftLimit>, ModelError> {
        let specs = self.adapter_parameters(lora)?;
        let (targets, limit) = self.peft_targets(lora, &specs)?;
        let inputs_first = self.parameters()?.iter().any(|spec| spec.layout.inputs_first);
        let saved = lora.saved_modules(specs.iter().map(|spec| &*spec.path));
        let form = self.head();
        let table = form.names.of(&format!("{}.weight", form.embedding));
        let tied_table = specs.iter().find(|spec| form.is_tied && spec.path == table);
        let described = Described { lora, targets: &targets, saved, tied_table, base, inputs_first };
        hf::write_adapter(dir, described, &specs, &mut Stored(checkpoint))?;
        Ok(limit)
    }

    /// Returns the targets for PEFT of adapters of these parameters, and the part of the training that PEFT does
    /// not support for them. PEFT puts an adapter on every linear layer that a name means, also on those of
    /// experts.
    fn peft_targets(
        &self,
        lora: &LoraConfig,
        adapters: &[ParameterSpec],
    ) -> Result<(PeftTargets, Option<PeftLimit>), ModelError> {
        let is_layer =
            |spec: &ParameterSpec| spec.kind == ParameterKind::Matrix || is_table(module_of(&spec.path));
        let matrices = self.parameters()?.into_iter().filter(is_layer);
        let layers = matrices.filter_map(|spec| spec.path.strip_suffix(".weight").map(str::to_owned));
        let target = |spec: &ParameterSpec| match &spec.layout.stack {
            Some(stack) if stack.is_usual => Some(module_of(&stack.tensor).to_owned()),
            _ => layer_of_first(&spec.path).map(str::to_owned),
        };
        let adapted = adapters.iter().filter(|spec| is_of_adapter(&spec.path)).filter_map(target);
        let has_experts = self.family().keys.computes("num_experts_per_tok");
        // A tied table is a parameter of two layers.
        let layers = layers.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>();
        Ok(PeftTargets::of(lora, adapted.collect(), &layers, has_experts))
    }

    /// Writes a model with the adapters of a checkpoint merged into it as a Hugging Face directory.
    ///
    /// # Errors
    /// When the checkpoint or the base does not belong to the model, or as [`hf::export`].
    pub fn export_merged(
        &self,
        adapted: AdaptedCheckpoint<'_>,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, ModelError> {
        hf::export_from(&mut *ModelSource::Adapted(adapted).of(&**self)?, &**self, options, dir)
    }

    /// Writes a model as a GGUF file: `out`, or `model.gguf` in that folder. `origin` is as in [`ExportOptions`]. Without
    /// a form, matrices have the type of most tensors of the original model.
    ///
    /// # Errors
    /// When the source does not belong to the model, GGUF has no such model, or the system reports an error.
    pub fn export_gguf(
        &self,
        source: ModelSource<'_>,
        origin: Option<&Path>,
        form: Option<GgufForm>,
        out: &Path,
    ) -> Result<GgufWritten, ModelError> {
        let form = form.map_or_else(|| hf::form_of(origin), Ok)?;
        hf::write_gguf(&mut *source.of(&**self)?, &**self, origin, form, out)
    }

    /// Writes the adapters of a checkpoint as a GGUF file, and returns its path.
    ///
    /// # Errors
    /// When the checkpoint does not have these adapters of the model, GGUF has no such adapters, or the system reports an
    /// error.
    pub fn export_gguf_adapter(
        &self,
        checkpoint: &Checkpoint,
        lora: &LoraConfig,
        out: &Path,
    ) -> Result<PathBuf, ModelError> {
        let specs = self.adapter_parameters(lora)?;
        hf::write_gguf_adapter(out, &**self, lora, &specs, &mut Stored(checkpoint))
    }

    /// Writes the model of a checkpoint as a Hugging Face directory; see [`hf::export`].
    ///
    /// # Errors
    /// As [`hf::export`].
    pub fn export(
        &self,
        checkpoint: &Checkpoint,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, ModelError> {
        hf::export(checkpoint, &**self, options, dir)
    }
}

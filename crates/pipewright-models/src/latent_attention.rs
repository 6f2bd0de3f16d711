//! Multi-head latent attention (DeepSeek-AI, 2024, <https://arxiv.org/abs/2405.04434>): keys and values are
//! made of a narrow latent of each token, and queries too in most models. A part of each head's queries and
//! keys is rotated by the positions; this part of the keys is the same for all heads and is not made of the
//! latent.
//!
//! In generation, latents take the place of keys and values: the matrix behind the latents is applied to the
//! queries, and to what the queries attend to.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{HeadMatrices, Region, TensorParallel, head_products};
use pipewright::stage::StageContext;

use crate::attention::{AttentionBias, AttentionSizes};
use crate::error::ModelError;
use crate::norm::{Norm, NormForm};
use crate::parameter::{Builder, SplitLinear};
use crate::projection::{Projection, SharedInput};
use crate::split::head_shards;

/// The number that the normalisations of latents add to the mean square, whatever `rms_norm_eps` is, as in
/// transformers.
const EPSILON: f64 = 1e-6;

/// The form of a latent attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentForm {
    /// The width of the latent of queries; `None` if they are made of the hidden states.
    pub(crate) query_rank: Option<usize>,
    /// The width of the latent of keys and values.
    pub(crate) key_rank: usize,
    /// The elements of a head of queries and keys that are rotated.
    pub(crate) rotated: usize,
    /// The elements of a head of queries and keys that are not rotated.
    pub(crate) unrotated: usize,
    /// The elements of a head of values.
    pub(crate) value: usize,
    /// Whether rotated pairs are neighbours, instead of elements that are half of the rotated elements apart.
    pub(crate) is_interleaved: bool,
}

impl LatentForm {
    /// Returns the number of elements of a head of queries and keys.
    pub(crate) fn head_dim(&self) -> usize {
        self.rotated + self.unrotated
    }

    /// Returns the number of elements of a head of queries that attend to latents, an even number.
    pub(crate) fn latent_dim(&self) -> usize {
        (self.rotated + self.key_rank).next_multiple_of(2)
    }
}

/// The parameters of a latent attention.
#[derive(Module, Debug)]
pub(crate) struct LatentAttention {
    /// The matrix that makes queries of the hidden states.
    q_proj: Option<Projection>,
    /// The matrix that makes the latent of queries, its normalisation, and the matrix behind it.
    q_a_proj: Option<Projection>,
    q_a_layernorm: Option<Norm>,
    q_b_proj: Option<Projection>,
    /// The matrix that makes the latent of keys and values, and the rotated part of the keys.
    kv_a_proj_with_mqa: Projection,
    kv_a_layernorm: Norm,
    kv_b_proj: Projection,
    o_proj: Projection,
    #[module(skip)]
    form: LatentForm,
}

impl LatentAttention {
    /// Builds the attention at `path`. Each tensor rank computes its own heads, and the whole latents. The
    /// inputs of `bias` are the matrices that make latents.
    pub(crate) fn build(
        sizes: AttentionSizes,
        form: LatentForm,
        bias: AttentionBias,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let AttentionSizes { hidden, heads, .. } = sizes;
        let [shards, _] = head_shards(path, heads, heads, builder.tensor_ranks())?;
        let mut projection = |bias, name: &str, sizes, split| {
            builder.projection(bias, &format!("{path}.{name}"), sizes, split)
        };
        let (queries, of_heads) = (heads * form.head_dim(), SplitLinear::Outputs { shards });
        let (mut q_proj, mut q_a_proj, mut q_b_proj) = (None, None, None);
        match form.query_rank {
            None => q_proj = Some(projection(false, "q_proj", [hidden, queries], of_heads)?),
            Some(rank) => {
                q_a_proj = Some(projection(bias.inputs, "q_a_proj", [hidden, rank], SplitLinear::Whole)?);
                q_b_proj = Some(projection(false, "q_b_proj", [rank, queries], of_heads)?);
            }
        }
        let latent = [hidden, form.key_rank + form.rotated];
        let kv_a_proj_with_mqa = projection(bias.inputs, "kv_a_proj_with_mqa", latent, SplitLinear::Whole)?;
        let keys_values = [form.key_rank, heads * (form.unrotated + form.value)];
        let kv_b_proj = projection(false, "kv_b_proj", keys_values, of_heads)?;
        let o_proj = projection(bias.output, "o_proj", [heads * form.value, hidden], SplitLinear::Inputs)?;
        let mut norm =
            |name: &str, width| builder.form_norm(&format!("{path}.{name}"), width, NormForm::usual(EPSILON));
        Ok(Self {
            q_a_layernorm: form.query_rank.map(|rank| norm("q_a_layernorm", rank)).transpose()?,
            kv_a_layernorm: norm("kv_a_layernorm", form.key_rank)?,
            q_proj,
            q_a_proj,
            q_b_proj,
            kv_a_proj_with_mqa,
            kv_b_proj,
            o_proj,
            form,
        })
    }

    /// Maps `[tokens, hidden]` to the same shape. `attend` takes queries, keys and values of this rank's
    /// heads, and returns the values that the queries attend to. The rotated elements of a head of queries
    /// and keys come first, and pair with the element that is half of them away.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        tensor: &TensorParallel,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        context: &StageContext,
    ) -> Tensor<2> {
        self.run(x, tensor, attend, |_| (), context)
    }

    /// Like [`LatentAttention::forward`] on one rank, for the first tokens of a sequence. `keep` takes the
    /// keys and the values that [`LatentAttention::forward_latent`] attends to. For many tokens, it is faster
    /// to compute the keys and values of all heads than to attend to the latents, which are wider.
    pub(crate) fn forward_first(
        &self,
        x: Tensor<2>,
        tensor: &TensorParallel,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        keep: impl FnOnce(Tensor<2>, Tensor<2>),
        context: &StageContext,
    ) -> Tensor<2> {
        let keep = |[latent, turned]: &[Tensor<2>; 2]| {
            keep(self.latent_keys(latent.clone(), turned.clone()), latent.clone());
        };
        self.run(x, tensor, attend, keep, context)
    }

    /// Computes [`LatentAttention::forward`]. `keep` takes the latents and the rotated elements of keys.
    fn run(
        &self,
        x: Tensor<2>,
        tensor: &TensorParallel,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        keep: impl FnOnce(&[Tensor<2>; 2]),
        context: &StageContext,
    ) -> Tensor<2> {
        let shared = SharedInput::new(x.clone());
        let [turned, rest] = self.queries(&shared, x, tensor, context);
        let [tokens, heads, _] = turned.dims();
        let queries = Tensor::cat(vec![turned, rest], 2).reshape([tokens, heads * self.form.head_dim()]);
        let latents = self.latents(&shared, tensor, context);
        drop(shared);
        keep(&latents);
        let [latent, turned] = latents;
        let [keys, values] = self.keys_and_values(latent, turned, context);
        let attended = attend([queries, keys, values]);
        self.o_proj.forward_region(&SharedInput::new(attended), &Region::of_whole(tensor), context)
    }

    /// Returns the keys to which all heads attend: rotated elements, latents, and zeros up to the width.
    fn latent_keys(&self, latent: Tensor<2>, turned: Tensor<2>) -> Tensor<2> {
        let ([tokens, key_rank], device) = (latent.dims(), latent.device());
        let padding = self.form.latent_dim() - self.form.rotated - key_rank;
        let mut key = vec![turned, latent];
        if padding > 0 {
            key.push(Tensor::zeros([tokens, padding], &device));
        }
        Tensor::cat(key, 1)
    }

    /// Like [`LatentAttention::forward`] on one rank, but all heads attend to the latents: `attend` takes
    /// queries `[tokens, heads * latent_dim]`, keys `[tokens, latent_dim]` and values `[tokens, key_rank]`.
    pub(crate) fn forward_latent(
        &self,
        x: Tensor<2>,
        tensor: &TensorParallel,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        context: &StageContext,
    ) -> Tensor<2> {
        let LatentForm { key_rank, rotated, unrotated, value, .. } = self.form;
        let shared = SharedInput::new(x.clone());
        let [turned, rest] = self.queries(&shared, x, tensor, context);
        let [tokens, heads, _] = turned.dims();
        // Matrices in files are read ahead in the order of the model, which has `kv_a_proj` before `kv_b_proj`.
        let [latent, of_key] = self.latents(&shared, tensor, context);
        let all = self.kv_b_proj.matrix();
        let of_heads = |columns: Range<usize>, is_transposed| HeadMatrices {
            all: all.clone(),
            width: unrotated + value,
            columns,
            is_transposed,
        };
        let rest = head_products(rest, of_heads(0..unrotated, true));
        let mut query = vec![turned, rest];
        let width = self.form.latent_dim();
        let padding = width - rotated - key_rank;
        if padding > 0 {
            query.push(Tensor::zeros([tokens, heads, padding], &latent.device()));
        }
        let queries = Tensor::cat(query, 2).reshape([tokens, heads * width]);
        let attended = attend([queries, self.latent_keys(latent.clone(), of_key), latent]);
        let attended = attended.reshape([tokens, heads, key_rank]);
        let attended = head_products(attended, of_heads(unrotated..unrotated + value, false));
        let attended = SharedInput::new(attended.reshape([tokens, heads * value]));
        self.o_proj.forward_region(&attended, &Region::of_whole(tensor), context)
    }

    /// Returns the rotated elements of queries, `[tokens, heads, rotated]`, and the others.
    fn queries(
        &self,
        shared: &SharedInput,
        x: Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> [Tensor<3>; 2] {
        let queries = match (&self.q_a_proj, &self.q_a_layernorm, &self.q_b_proj, &self.q_proj) {
            (Some(first), Some(norm), Some(second), _) => {
                let latent = norm.forward(first.forward(shared, context));
                second.forward(&SharedInput::new(tensor.enter(latent)), context)
            }
            (.., Some(whole)) => whole.forward(&SharedInput::new(tensor.enter(x)), context),
            _ => unreachable!("queries have one matrix or two"),
        };
        let LatentForm { rotated, unrotated, .. } = self.form;
        let [tokens, width] = queries.dims();
        let heads = width / (rotated + unrotated);
        let queries = queries.reshape([tokens, heads, rotated + unrotated]);
        let turned = self.halves(queries.clone().narrow(2, unrotated, rotated));
        [turned, queries.narrow(2, 0, unrotated)]
    }

    /// Returns the latents, `[tokens, key_rank]`, and the rotated elements of keys, `[tokens, rotated]`. Each
    /// rank computes a part of their gradients, because it has some of the heads.
    fn latents(
        &self,
        shared: &SharedInput,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> [Tensor<2>; 2] {
        let LatentForm { key_rank, rotated, .. } = self.form;
        let both = self.kv_a_proj_with_mqa.forward(shared, context);
        let latent = self.kv_a_layernorm.forward(both.clone().narrow(1, 0, key_rank));
        let turned = both.narrow(1, key_rank, rotated);
        let [tokens, _] = turned.dims();
        let turned = self.halves(turned.reshape([tokens, 1, rotated])).reshape([tokens, rotated]);
        [latent, turned].map(|x| tensor.enter(x))
    }

    /// Returns the keys, `[tokens, heads * head_dim]`, and the values, `[tokens, heads * value]`.
    fn keys_and_values(
        &self,
        latent: Tensor<2>,
        turned: Tensor<2>,
        context: &StageContext,
    ) -> [Tensor<2>; 2] {
        let LatentForm { rotated, unrotated, value, .. } = self.form;
        let expanded = self.kv_b_proj.forward(&SharedInput::new(latent), context);
        let [tokens, width] = expanded.dims();
        let heads = width / (unrotated + value);
        let expanded = expanded.reshape([tokens, heads, unrotated + value]);
        let turned = turned.reshape([tokens, 1, rotated]).repeat_dim(1, heads);
        let keys = Tensor::cat(vec![turned, expanded.clone().narrow(2, 0, unrotated)], 2);
        let keys = keys.reshape([tokens, heads * (rotated + unrotated)]);
        [keys, expanded.narrow(2, unrotated, value).reshape([tokens, heads * value])]
    }

    /// Returns rotated elements `[tokens, heads, rotated]` in an order in which the first elements of all
    /// pairs come before the second ones.
    fn halves(&self, x: Tensor<3>) -> Tensor<3> {
        if !self.form.is_interleaved {
            return x;
        }
        let [tokens, heads, rotated] = x.dims();
        x.reshape([tokens, heads, rotated / 2, 2]).swap_dims(2, 3).reshape([tokens, heads, rotated])
    }
}

//! All embeddings of the first stage: tokens, hashed n-grams, the structure of the text and the platform, and
//! the norm after their sum.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData};
use pipewright::nn::{Embedding, RmsNorm, scale_rows, tanh};
use pipewright::stage::StageContext;
use pipewright_shapes::hybrid::{EmbedNorm, HybridConfig};

use super::side_inputs::PLATFORM;
use super::tokens::Tokens;
use crate::documents::{host, side};
use crate::error::ModelError;
use crate::parameter::{Builder, ParameterKind};

/// All embeddings except the embedding of the tokens.
#[derive(Module, Debug)]
pub(crate) struct FurtherEmbeddings {
    /// One table for each of the configuration's orders.
    ngram: Vec<Embedding>,
    /// One table for each structure input that the configuration names, in alphabetical order.
    structure: Vec<Embedding>,
    platform: Option<Embedding>,
    rms: Option<RmsNorm>,
    tanh: Option<DynamicTanh>,
    #[module(skip)]
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    orders: Vec<usize>,
    buckets: usize,
    structures: Vec<String>,
}

/// `weight tanh(alpha x) + bias`.
#[derive(Module, Debug)]
struct DynamicTanh {
    weight: Param<Tensor<1>>,
    alpha: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
}

impl FurtherEmbeddings {
    pub(crate) fn build(config: &HybridConfig, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let width = config.hidden_size;
        let ngram = config
            .ngram_orders
            .iter()
            .map(|order| builder.embedding(&format!("model.ngram.{order}"), config.ngram_buckets, width))
            .collect::<Result<_, _>>()?;
        let structure = config
            .structure_vocab_sizes
            .iter()
            .map(|(name, &rows)| builder.embedding(&format!("model.structure.{name}"), rows, width))
            .collect::<Result<_, _>>()?;
        let platform = match config.platform_vocab_size {
            0 => None,
            rows => Some(builder.embedding("model.platform", rows, width)?),
        };
        let path = "model.embed_norm";
        let (mut rms, mut tanh) = (None, None);
        match config.embed_norm {
            EmbedNorm::None => {}
            EmbedNorm::Rms => rms = Some(builder.norm(path, width, config.rms_norm_eps)?),
            EmbedNorm::Dyt => {
                tanh = Some(DynamicTanh {
                    weight: builder.parameter(path, "weight", [width], ParameterKind::Scale)?,
                    alpha: builder.parameter(path, "alpha", [1], ParameterKind::Scale)?,
                    bias: builder.parameter(path, "bias", [width], ParameterKind::Bias)?,
                });
            }
        }
        let settings = Settings {
            orders: config.ngram_orders.clone(),
            buckets: config.ngram_buckets,
            structures: config.structure_vocab_sizes.keys().cloned().collect(),
        };
        Ok(Self { ngram, structure, platform, rms, tanh, settings })
    }

    /// Adds the embeddings to `x`, the embeddings of the tokens, `[rows, sequence, hidden]`.
    ///
    /// # Panics
    /// When a structure or platform id lies outside its table.
    pub(crate) fn forward(
        &self,
        mut x: Tensor<3>,
        ids: &Tensor<2, Int>,
        tokens: &Tokens,
        context: &StageContext,
    ) -> Tensor<3> {
        let shape @ [rows, sequence, _] = x.dims();
        let on_host = if self.ngram.is_empty() { Vec::new() } else { host(ids) };
        for (table, &order) in self.ngram.iter().zip(&self.settings.orders) {
            let indices = buckets(&on_host, tokens, order, self.settings.buckets);
            let indices = Tensor::from_data(TensorData::new(indices, [rows, sequence]), &ids.device());
            x = x + table.forward(indices);
        }
        for (table, name) in self.structure.iter().zip(&self.settings.structures) {
            x = match side::<Tensor<2, Int>>(context, name) {
                Some(indices) => {
                    assert_eq!(indices.dims(), [rows, sequence], "`{name}` has an id for each token");
                    x + table.forward(indices)
                }
                None => with_zero_gradient(x, table.weight.val()),
            };
        }
        if let Some(table) = &self.platform {
            x = match side::<Tensor<1, Int>>(context, PLATFORM) {
                Some(indices) => {
                    assert_eq!(indices.dims(), [rows], "`{PLATFORM}` has an id for each row");
                    x + table.forward(indices.reshape([rows, 1])).expand(shape)
                }
                None => with_zero_gradient(x, table.weight.val()),
            };
        }
        let [_, _, width] = shape;
        if let Some(norm) = &self.rms {
            x = norm.forward(x.reshape([rows * sequence, width])).reshape(shape);
        }
        if let Some(DynamicTanh { weight, alpha, bias }) = &self.tanh {
            let one_row = x.reshape([1, rows * sequence * width]);
            let bounded = tanh(scale_rows(one_row, alpha.val().unsqueeze())).reshape(shape);
            x = bounded * weight.val().unsqueeze() + bias.val().unsqueeze();
        }
        x
    }
}

/// Returns `x` with a path to `parameter` that makes its gradient zero instead of none: an optimizer changes
/// parameters with a zero gradient, and skips those without one.
pub(crate) fn with_zero_gradient<const D: usize, const P: usize>(
    x: Tensor<D>,
    parameter: Tensor<P>,
) -> Tensor<D> {
    let zero = parameter.sum().mul_scalar(0.0);
    x + zero.unsqueeze()
}

/// The factor of the hash.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// Returns the bucket of the n-gram that ends at each token. An n-gram does not reach beyond its document.
fn buckets(ids: &[i64], tokens: &Tokens, order: usize, buckets: usize) -> Vec<i64> {
    let (sequence, documents) = (tokens.scope.sequence, &tokens.scope.documents);
    let bucket = |token: usize| {
        let (mut hash, mut power) = (0u64, 1u64);
        for back in 0..order.min(token % sequence + 1) {
            if documents[token - back] != documents[token] {
                break;
            }
            let id = ids[token - back] as u64;
            hash = hash.wrapping_add(id.wrapping_add(1).wrapping_mul(power));
            power = power.wrapping_mul(FACTOR);
        }
        (hash % buckets as u64) as i64
    };
    (0..ids.len()).map(bucket).collect()
}

#[cfg(test)]
mod tests {
    use pipewright::nn::TokenScope;

    use super::*;

    #[test]
    fn buckets_are_those_of_the_specification() {
        let tokens = |documents: Vec<u32>| Tokens {
            scope: TokenScope { documents: documents.into(), ..TokenScope::whole(1, 2) },
            valid: vec![true; 2].into(),
            relations: None,
        };
        // The hash of 5, 7 is 13064056694810536070.
        assert_eq!(buckets(&[5, 7], &tokens(vec![0, 0]), 2, 211), [6, 47]);
        assert_eq!(buckets(&[5, 7], &tokens(vec![0, 1]), 2, 211), [6, 8]);
        assert_eq!(buckets(&[5, 7], &tokens(vec![0, 0]), 3, 211), [6, 47]);
    }
}

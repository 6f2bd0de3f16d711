//! Layers for stages with few passes over memory, whose weight gradients can be deferred.
//!
//! [`Linear`] and [`Embedding`] have Burn's parameters, names and initial values. They, [`TiedHead`],
//! [`RmsNorm`], [`Expert`] and mixtures of experts defer the gradients of all their weights, biases included:
//! inside a stage, the backward pass computes only the gradients of the inputs. The gradients of the weights are
//! computed when the schedule says so (`W`) and are added to the sums of the step, products in place. So do
//! [`adapted_product`] and [`add_bias`]. Outside a stage they are ordinary layers.
//!
//! These do not defer everything:
//!
//! - [`Mamba2`]: the gradients of `dt_bias`, `A_log`, `D` and the weight of its norm are by-products of the
//!   backward of the scan and the gate, and are computed with it. So are the weights of the convolution on devices
//!   other than the CPU back end. All others wait.
//! - [`DeltaRule`]: all its gradients are computed in the backward.
//! - [`rms_norm`] and other functions whose weights are tensors. A weight that is computed from parameters, such
//!   as `1 + weight`, never waits.
//!
//! [`StepSummary::undeferred`](crate::pipeline::StepSummary::undeferred) lists the parameters of a model that
//! do not wait.
//!
//! A layer of your own defers its weight gradients as a [`SplitBackward`].
//!
//! [`adapted_product`] is the product with a frozen weight and its low-rank adapter. [`add`] adds two
//! tensors, and [`Branches`] adds the gradients of a tensor with several uses.
//!
//! [`Dropout`] has the same mask for every cut of the model.
//!
//! [`exp`], [`ln`], [`tanh`], [`sigmoid`], [`softmax`], [`sum`], [`matrix_product`] and others take the place of operations of
//! Burn whose bits on the processor depend on its instructions or on the system's C library.
//!
//! If a stage computes parts of its layers again
//! ([`LayerParts`](pipewright_schedule::recompute::LayerParts)), products do not keep the results of
//! [`rms_norm`], [`swiglu`] and [`relu_squared`] that they multiply.
//!
//! The functions ([`rms_norm`], [`swiglu`], [`relu_squared`], [`CausalAttention`], [`ScopedAttention`],
//! [`cross_entropy`], [`vocabulary_statistics`], [`Routing`], [`mix_experts`], [`DeltaRule`], and [`Mamba2`] without its
//! projections) are single operations on the CPU back end, in single and half precision and on a tape without
//! gradient checkpointing. In all other cases they are composed of Burn's operations: [`Routing`] and
//! [`mix_experts`] leave the backward pass to Burn, and the others have one of their own, so that the tape
//! keeps about as many bytes as on the CPU back end. [`weighted_cross_entropy`] is a composition everywhere;
//! it has a backward pass of its own on devices other than the CPU back end, unless its weights are on the
//! tape. [`split_cross_entropy`] and [`split_weighted_cross_entropy`] have the same one over several ranks on
//! every device.

mod adapted_product;
mod addition;
mod attention;
mod attention_blocks;
mod attention_form;
mod attention_passes;
mod bias;
mod branches;
mod bundle;
mod clamped_gate;
mod composed;
mod cross_entropy;
mod deferred;
mod delta;
mod dropout;
mod embedding;
mod expert;
mod expert_exchange;
mod expert_matrices;
mod expert_low_rank;
mod expert_mixture;
mod expert_parallel;
mod experts;
mod head_products;
mod held_matrix;
mod key_value_cache;
mod layout;
mod linear;
mod mamba;
mod matrix;
mod operation;
mod parallel;
mod pointwise;
mod predicted_targets;
mod product;
mod quantised_product;
mod quantised_table;
mod recomputed;
mod region;
mod relations;
mod relu_squared;
mod remade;
mod rms_norm;
mod router_losses;
mod routing;
mod row_sums;
mod scoped_attention;
mod split_backward;
mod statistics_pieces;
mod swiglu;
mod table_rows;
mod targets;
mod tensor_link;
mod tied_head;
mod token_losses;
mod token_scope;
mod vocabulary;
mod vocabulary_loss;
mod vocabulary_part;
mod weight_list;
mod weighted_cross_entropy;
mod weighted_rows;

#[cfg(test)]
mod attention_composition;
#[cfg(test)]
mod bf16_products;
#[cfg(test)]
mod check;
#[cfg(test)]
mod expert_travel;
#[cfg(test)]
mod half_precision;

pub use adapted_product::{LowRank, adapted_product};
pub use addition::add;
pub use attention::CausalAttention;
pub use attention_form::{AttentionForm, RotaryPositions, rotary_frequencies};
pub use bias::add_bias;
pub use branches::Branches;
pub use composed::at_least_single;
pub(crate) use composed::{add_product as add_product_on_device, add_rows as add_rows_on_device};
pub use cross_entropy::{cross_entropy, smoothed_cross_entropy};
pub(crate) use deferred::{ConvolutionTask, Deferred, RowIds, SplitTask, WeightStore, WeightTask};
pub use delta::{DeltaCache, DeltaRule, DeltaSizes};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use expert::{Expert, ExpertActivation, ExpertAdapter, ExpertForm};
pub use expert_parallel::ExpertParallel;
pub use experts::{mix_chosen, mix_experts, mix_held};
pub use head_products::{HeadMatrices, head_products};
pub use held_matrix::{HeldLinear, HeldMatrix, held_linear};
pub use key_value_cache::KeyValueCache;
pub use linear::{Linear, linear};
pub use mamba::{DepthwiseConvolution, GroupNormWeight, Mamba2, MambaCache, MambaScan, MambaSizes};
pub(crate) use matrix::{Operand, add_product, product_in_single};
pub(crate) use operation::{CpuTensor, cpu, cpu_tensor, elements, from_cpu, node_of, owned, rounded_to};
pub use parallel::TensorParallel;
pub(crate) use parallel::sum_of_ranks;
pub use pointwise::{exp, gelu_tanh, inverse_root, ln, log_sigmoid, sigmoid, silu, softplus, tanh};
pub use predicted_targets::{PREDICTED_TARGETS, predicted_targets};
pub use product::{matrix_product, matrix_product_transposed};
pub use quantised_table::QuantisedTable;
pub use region::Region;
pub use relations::Relations;
pub use relu_squared::relu_squared;
pub(crate) use remade::{PartTimes, timed_parts, with_parts};
pub use rms_norm::{RmsNorm, rms_norm};
pub use router_losses::{choice_loss, router_losses};
pub use routing::{Routing, count_choices};
pub use row_sums::{centre_rows, row_sums, scale_rows, softmax, sum, sum_dim};
pub use scoped_attention::ScopedAttention;
pub use split_backward::SplitBackward;
pub use statistics_pieces::{cut_statistics, join_statistics};
pub use swiglu::swiglu;
pub(crate) use table_rows::add_rows;
pub use targets::IGNORED_TARGET;
pub(crate) use tensor_link::TensorLink;
pub use tied_head::TiedHead;
pub use token_losses::{split_token_losses, statistics_token_losses};
pub use token_scope::TokenScope;
pub use vocabulary::{smoothed_split_cross_entropy, split_cross_entropy, split_weighted_cross_entropy};
pub use vocabulary_part::{smoothed_vocabulary_statistics, statistics_loss, vocabulary_statistics};
pub use weight_list::WeightList;
pub use weighted_cross_entropy::{weighted_cross_entropy, weights_of_valid};

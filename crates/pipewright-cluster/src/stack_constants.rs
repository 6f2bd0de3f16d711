//! The shares of the hardware that each stack's programs reach, next to the constants of machines.
//!
//! The constants of a machine ([`crate::machine::Constants`]) say what the best programs reach on it. A stack has
//! kernels, launches and an order of exchanges of its own. Each constant has a meaning and belongs to all runs of the
//! stack. Six of them are fitted, together with the constants of machines (`examples/fit.rs`); only runs of the stack
//! move them. A constant that no run of the stack depends on has the value that was expected. The ring of
//! attention, the bytes of a logit and the fragments of memory are not fitted.

use crate::implementation::Stack;

/// The constants of a stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StackConstants {
    /// The rate of products in 16 bits, divided by the machine's.
    pub product: f64,
    /// The rate of products in 8 and 4 bits, divided by the machine's.
    pub narrow_product: f64,
    /// The rate of fused attention, divided by the machine's.
    pub attention: f64,
    /// The share of a tensor group's exchanges that products hide if the stack overlaps them.
    pub hidden_tensor: f64,
    /// The share of the exchange of tokens between experts that another microbatch hides if the stack overlaps
    /// it.
    pub hidden_experts: f64,
    /// The share of attention's time that each further rank of a sequence adds: kernels on parts of the keys,
    /// whose results are joined.
    pub ring_step: f64,
    /// Seconds in which the host prepares and launches a kernel.
    pub host_kernel: f64,
    /// Bytes of a logit while the loss is computed from arrays of its own.
    pub logit_bytes: f64,
    /// The same if the ranks of a tensor group divide the logits.
    pub divided_logit_bytes: f64,
    /// The memory of fragments, as a share of all tensors.
    pub fragments: f64,
}

/// The constants of all stacks, in the order of [`Stack::NAMES`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stacks([StackConstants; Stack::NAMES.len()]);

impl Stacks {
    /// The fitted constants.
    pub const FITTED: Self = Self([MEGATRON, TORCHTITAN, AUTOMODEL, OLMO_CORE, HAI_LLM]);

    /// Returns the constants of a stack.
    pub fn of(&self, stack: Stack) -> &StackConstants {
        &self.0[stack as usize]
    }

    /// Returns the constants of a stack, to change them.
    pub fn of_mut(&mut self, stack: Stack) -> &mut StackConstants {
        &mut self.0[stack as usize]
    }
}

/// The constants of stacks of PyTorch's own parts. The gradient of divided logits is made of logarithms, zeros with the labels,
/// exponentials and their sum, of four bytes each (`torch/distributed/tensor/parallel/loss.py`).
const PYTORCH: StackConstants = StackConstants {
    hidden_tensor: 0.5,
    hidden_experts: 0.7,
    host_kernel: 8e-6,
    logit_bytes: 14.0,
    divided_logit_bytes: 16.0,
    fragments: 0.1,
    ..MEGATRON
};

// PyTorch's own attention is FlashAttention 2.
const TORCHTITAN: StackConstants =
    StackConstants { product: 0.995, attention: 0.613, hidden_tensor: 0.406, ring_step: 0.08, ..PYTORCH };

const AUTOMODEL: StackConstants = StackConstants { hidden_tensor: 0.463, host_kernel: 3.5e-6, ..PYTORCH };

const OLMO_CORE: StackConstants = StackConstants { product: 0.99, attention: 0.594, ..PYTORCH };

// No published run of the repository has it, so it has the expected values.
const HAI_LLM: StackConstants =
    StackConstants { hidden_tensor: 0.5, hidden_experts: 0.9, host_kernel: 8e-6, ..MEGATRON };

const MEGATRON: StackConstants = StackConstants {
    product: 1.0,
    narrow_product: 1.0,
    attention: 1.0,
    hidden_tensor: 0.613,
    hidden_experts: 0.713,
    ring_step: 0.0,
    host_kernel: 1.08e-5,
    logit_bytes: 10.0,
    divided_logit_bytes: 10.0,
    fragments: 0.03,
};

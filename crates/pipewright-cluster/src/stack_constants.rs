//! The shares of the hardware that each stack's programs reach, next to the constants of machines.
//!
//! The constants of a machine ([`crate::machine::Constants`]) say what the best programs reach on it. A stack has
//! kernels, launches and an order of exchanges of its own. Each constant has a meaning and a range, belongs to
//! all runs of the stack, and is fitted to the published runs of that stack alone (`examples/fit.rs`).

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

// PyTorch's own attention is FlashAttention 2.
const TORCHTITAN: StackConstants = StackConstants {
    narrow_product: 0.975,
    attention: 0.62,
    ring_step: 0.08,
    hidden_tensor: 0.3,
    logit_bytes: 14.0,
    fragments: 0.1,
    ..MEGATRON
};

const AUTOMODEL: StackConstants =
    StackConstants { host_kernel: 3e-6, logit_bytes: 14.0, fragments: 0.1, ..MEGATRON };

const OLMO_CORE: StackConstants =
    StackConstants { product: 0.91, attention: 0.64, logit_bytes: 14.0, fragments: 0.1, ..MEGATRON };

const HAI_LLM: StackConstants = StackConstants { hidden_experts: 0.95, ..MEGATRON };

const MEGATRON: StackConstants = StackConstants {
    product: 1.0,
    narrow_product: 1.0,
    attention: 1.0,
    hidden_tensor: 0.716,
    hidden_experts: 0.7,
    ring_step: 0.0,
    host_kernel: 1.075e-5,
    logit_bytes: 10.0,
    fragments: 0.03,
};

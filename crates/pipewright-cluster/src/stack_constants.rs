//! The shares of the hardware that each stack's programs reach, next to the constants of machines.
//!
//! The constants of a machine ([`crate::machine::Constants`]) say what the best programs reach on it. A stack has
//! kernels, launches and an order of exchanges of its own. Each constant has a meaning and belongs to all runs of the
//! stack. Six of them are fitted, together with the constants of machines (`examples/fit.rs`); only runs of the stack
//! move them. The ring of
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
    /// The values that are expected, from kernels and from what others measured, without the published runs. All stacks
    /// call the same libraries for products. PyTorch's own attention is FlashAttention 2, which reaches 0.6 of the rate
    /// of cuDNN and FlashAttention 3 on Hopper (arXiv 2407.08608, figure 5). A half of a tensor group's exchanges is
    /// hidden, most of the exchange of experts' tokens, and nearly all of it by DualPipe (arXiv 2412.19437). The host
    /// takes 8 microseconds for a kernel of PyTorch.
    pub const EXPECTED: Self =
        Self([EXPECTED, EXPECTED_TORCHTITAN, EXPECTED_OF_PYTORCH, EXPECTED_OLMO_CORE, EXPECTED_HAI_LLM]);

    /// The fitted constants. A constant that no run of a stack depends on has the value that was expected.
    pub const FITTED: Self = Self([
        StackConstants { hidden_tensor: 0.613, hidden_experts: 0.713, host_kernel: 1.08e-5, ..EXPECTED },
        StackConstants { product: 0.995, attention: 0.613, hidden_tensor: 0.406, ..EXPECTED_TORCHTITAN },
        StackConstants { hidden_tensor: 0.463, host_kernel: 3.5e-6, ..EXPECTED_OF_PYTORCH },
        StackConstants { product: 0.99, attention: 0.594, ..EXPECTED_OLMO_CORE },
        EXPECTED_HAI_LLM,
    ]);

    /// Returns the constants of a stack.
    pub fn of(&self, stack: Stack) -> &StackConstants {
        &self.0[stack as usize]
    }

    /// Returns the constants of a stack, to change them.
    pub fn of_mut(&mut self, stack: Stack) -> &mut StackConstants {
        &mut self.0[stack as usize]
    }
}

const EXPECTED: StackConstants = StackConstants {
    product: 1.0,
    narrow_product: 1.0,
    attention: 1.0,
    hidden_tensor: 0.5,
    hidden_experts: 0.7,
    ring_step: 0.0,
    host_kernel: 8e-6,
    logit_bytes: 10.0,
    divided_logit_bytes: 10.0,
    fragments: 0.03,
};

/// Stacks of PyTorch's own parts. The gradient of divided logits is made of logarithms, zeros with the labels,
/// exponentials and their sum, of four bytes each (`torch/distributed/tensor/parallel/loss.py`).
const EXPECTED_OF_PYTORCH: StackConstants =
    StackConstants { logit_bytes: 14.0, divided_logit_bytes: 16.0, fragments: 0.1, ..EXPECTED };

const EXPECTED_TORCHTITAN: StackConstants =
    StackConstants { attention: 0.6, ring_step: 0.08, ..EXPECTED_OF_PYTORCH };

const EXPECTED_OLMO_CORE: StackConstants = StackConstants { attention: 0.6, ..EXPECTED_OF_PYTORCH };

const EXPECTED_HAI_LLM: StackConstants = StackConstants { hidden_experts: 0.9, ..EXPECTED };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_in_the_order_of_their_names() {
        for (index, (_, stack)) in Stack::NAMES.into_iter().enumerate() {
            assert_eq!(index, stack as usize);
        }
    }
}

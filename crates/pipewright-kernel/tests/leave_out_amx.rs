//! A process that leaves out AMX before its first product. It is a program of its own, because the choice is for the whole
//! process.

use half::bf16;
use pipewright_kernel::bf16_product::{Instruction, instruction, leave_out_amx, product_in_single};
use pipewright_kernel::product::Matrix;

#[test]
fn asking_for_the_instruction_does_not_use_it() {
    let _fastest = instruction();
    assert!(leave_out_amx());
    assert_ne!(instruction(), Some(Instruction::Amx));
}

/// The products have the order of AVX512-BF16, in which the odd term of a pair is added first.
#[test]
fn products_with_avx_without_the_instruction_of_amx() {
    assert!(leave_out_amx());
    let [m, n, k] = [33, 35, 150];
    // Their sums are rounded, so that they depend on the order.
    let numbers = |count: usize| -> Vec<bf16> {
        (0..count).map(|i| bf16::from_f32((i * 89 % 241) as f32 / 97.0 - 1.3)).collect()
    };
    let (a, b) = (numbers(m * k), numbers(k * n));
    let found = product_in_single(Matrix::new(&a, m, k), Matrix::new(&b, k, n));
    for (index, found) in found.into_iter().enumerate() {
        let term = |i: usize| a[index / n * k + i].to_f32() * b[i * n + index % n].to_f32();
        let expected = (0..k).step_by(2).fold(0f32, |sum, i| (sum + term(i + 1)) + term(i));
        assert_eq!(found.to_bits(), expected.to_bits(), "{index}");
    }
}

//! Tests of the operation against its composition.

use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{Tensor, Tolerance};

use super::super::check::{check as compare, numbers};
use super::super::mamba::DepthwiseConvolution;
use super::composed::composed;
use super::operation::apply;
use super::*;

const SIZES: DeltaSizes = DeltaSizes { key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 3, taps: 4 };

fn check(sizes: DeltaSizes, [batch, sequence]: [usize; 2], documents: Option<Vec<u32>>) {
    let documents: Option<Arc<[u32]>> = documents.map(Into::into);
    let (rows, channels, heads) = (batch * sequence, sizes.channels(), sizes.value_heads);
    let inputs = [
        numbers([rows * channels], 1.5),
        numbers([channels * sizes.taps], 0.7),
        numbers([rows * heads], 0.4) + 0.5,
        numbers([rows * heads], 0.2) - 0.25,
    ];
    let shaped = |[mixed, weight, strengths, decays]: [Tensor<1>; 4]| {
        let gates = [strengths, decays].map(|gate| gate.reshape([rows, heads]));
        (mixed.reshape([rows, channels]), weight.reshape([channels, 1, sizes.taps]), gates)
    };
    compare(
        inputs,
        |inputs| {
            let (mixed, weight, gates) = shaped(inputs);
            apply(sizes, mixed, weight, gates, sequence, documents.as_ref())
        },
        |inputs| {
            let (mixed, weight, gates) = shaped(inputs);
            composed(&sizes, mixed, weight, gates, sequence, documents.as_deref())
        },
    );
}

#[test]
fn equals_its_composition() {
    check(SIZES, [2, 7], None);
    check(SIZES, [1, 1], None);
    check(SIZES, [2, 64], None);
    // Several chunks; the last one is shorter.
    check(DeltaSizes { key_heads: 4, taps: 2, ..SIZES }, [1, 150], None);
}

#[test]
fn documents_are_apart() {
    let document = |t: usize| u32::from(t >= 5) + u32::from(t >= 64) + u32::from(t >= 70);
    check(SIZES, [2, 100], Some((0..200).map(|row| document(row % 100)).collect()));
}

#[test]
fn a_cache_continues_a_sequence() {
    let heads = SIZES.value_heads;
    let vector = |tensor: Tensor<1>| Param::initialized(ParamId::new(), tensor);
    let weight = numbers([SIZES.channels() * 4], 0.7).reshape([SIZES.channels(), 1, 4]);
    let rule = DeltaRule {
        conv1d: DepthwiseConvolution { weight: Param::initialized(ParamId::new(), weight), bias: None },
        dt_bias: vector(numbers([heads], 0.5)),
        A_log: vector(numbers([heads], 1.0)),
        sizes: SIZES,
    };
    let mixed = numbers([9 * SIZES.channels()], 1.5).reshape([9, SIZES.channels()]);
    let gates = [0.5, 1.5].map(|scale| numbers([9 * heads], scale).reshape([9, heads]));
    let expected = rule.forward(mixed.clone(), gates.clone(), 9, None).into_data();
    for first in [1, 2, 8] {
        let mut cache = DeltaCache::default();
        let mut part = |start: usize, count: usize| {
            let gates = gates.clone().map(|gate: Tensor<2>| gate.narrow(0, start, count));
            rule.extend(mixed.clone().narrow(0, start, count), gates, &mut cache)
        };
        let found = Tensor::cat(vec![part(0, first), part(first, 9 - first)], 0).into_data();
        found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-6, 1e-6));
    }
}

//! Cuts by blocks: a table of cases, and random models that an independent checker judges.

use std::ops::Range;

use pipewright_schedule::partition::{Method, Partition, partition};
use pipewright_schedule::profile::{EMBEDDING, EMBEDDING_PART, HEAD, HEAD_PART, PREDICTION};
use pipewright_schedule::{LayerDesc, ModelDesc};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Returns a model with layers of these kinds. The heavier a layer, the later it comes, so that a cut that
/// looks at weights would differ.
fn model(kinds: &[&str]) -> ModelDesc {
    let layer = |(index, kind): (usize, &&str)| LayerDesc {
        kind: (*kind).to_owned(),
        weight: 1 + index as u64,
        ..LayerDesc::default()
    };
    ModelDesc { layers: kinds.iter().enumerate().map(layer).collect() }
}

fn cut(model: &ModelDesc, stages: u32, boundaries: Vec<usize>) -> Partition {
    let method = Method::Blocks { blocks: model.blocks(), boundaries };
    partition(&model.weights(), stages, &method).expect("every stage has a block")
}

/// `golden/README.md` says how the table was made.
#[test]
fn blocks_are_divided_evenly() {
    let golden: Value =
        serde_json::from_str(include_str!("golden/blocks.json")).expect("golden data is JSON");
    let cases = golden.as_array().expect("a list of cases");
    assert_eq!((cases.len(), &cases[0]["sizes"]), (17, &json!([2, 2, 2, 2])));
    for case in cases {
        let number = |key: &str| case[key].as_u64().expect("a number") as usize;
        let mut kinds = vec![EMBEDDING_PART; number("before")];
        kinds.extend(vec!["decoder"; number("blocks")]);
        kinds.extend(vec![HEAD_PART; number("after")]);
        let stages = case["stages"].as_array().expect("a list").len() as u32;
        let found: Vec<[usize; 2]> = cut(&model(&kinds), stages, Vec::new())
            .ranges()
            .map(|range| [range.start, range.end - 1])
            .collect();
        assert_eq!(json!(found), case["stages"], "{case}");
    }
}

/// Returns the first mistake of a cut, whose stages have `sizes` blocks.
fn mistake(kinds: &[&str], stages: &[Range<usize>], sizes: &[usize]) -> Option<String> {
    let is_block = |kind: &str| kind == "attention" || kind == "mamba";
    let mut next = 0;
    for (stage, (range, &size)) in stages.iter().zip(sizes).enumerate() {
        if range.start != next {
            return Some(format!("stage {stage} begins with layer {} instead of {next}", range.start));
        }
        let mut blocks = 0;
        for layer in range.clone() {
            let kind = kinds[layer];
            let is_allowed = is_block(kind)
                || (stage == 0 && kind.starts_with("embedding"))
                || (stage + 1 == stages.len() && !kind.starts_with("embedding"));
            if !is_allowed {
                return Some(format!("stage {stage} has layer {layer}, {kind}"));
            }
            blocks += usize::from(is_block(kind));
        }
        if blocks != size {
            return Some(format!("stage {stage} has {blocks} blocks instead of {size}"));
        }
        next = range.end;
    }
    (next != kinds.len() || stages.len() != sizes.len()).then(|| "layers or stages are missing".to_owned())
}

/// Returns the kinds of the layers of a model.
fn any_kinds() -> impl Strategy<Value = Vec<&'static str>> {
    let blocks = prop::collection::vec(prop::sample::select(vec!["attention", "mamba"]), 1..80);
    (0..4_usize, blocks, 0..3_usize, 0..4_usize).prop_map(|(embedding, blocks, predictions, head)| {
        let mut kinds = if embedding == 1 { vec![EMBEDDING] } else { vec![EMBEDDING_PART; embedding] };
        kinds.extend(blocks);
        kinds.extend(vec![PREDICTION; predictions]);
        kinds.extend(if head == 1 { vec![HEAD] } else { vec![HEAD_PART; head] });
        kinds
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn random_models_are_cut_by_blocks(kinds in any_kinds(), stages: prop::sample::Index, cuts: u128) {
        let blocks = kinds.iter().filter(|kind| ["attention", "mamba"].contains(kind)).count();
        let stages = 1 + stages.index(blocks);
        let model = model(&kinds);

        // Blocks are dealt out one by one.
        let mut sizes = vec![0; stages];
        for block in 0..blocks {
            sizes[block % stages] += 1;
        }
        let found: Vec<_> = cut(&model, stages as u32, Vec::new()).ranges().collect();
        prop_assert_eq!(mistake(&kinds, &found, &sizes), None);

        // Cuts at some blocks.
        let boundaries: Vec<usize> = (1..blocks).filter(|block| cuts >> block & 1 == 1).collect();
        let mut sizes = vec![0];
        for block in 0..blocks {
            if boundaries.contains(&block) {
                sizes.push(0);
            }
            *sizes.last_mut().expect("a stage") += 1;
        }
        let found: Vec<_> = cut(&model, sizes.len() as u32, boundaries).ranges().collect();
        prop_assert_eq!(mistake(&kinds, &found, &sizes), None);
    }
}

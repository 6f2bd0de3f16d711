//! Tests of `layout.rs`.

use super::*;
use crate::model::LayerDesc;

fn check(text: &str, kinds: &str, boundaries: &[usize]) {
    let found: Layout = text.parse().expect(text);
    assert_eq!((found.kinds.as_str(), found.boundaries.as_slice()), (kinds, boundaries), "{text}");
    let letters: String = found.columns.iter().filter_map(|&column| text.chars().nth(column)).collect();
    assert_eq!((found.text.as_str(), letters.as_str()), (text, kinds));
}

fn check_error(text: &str, column: usize, reason: &str) {
    check_parts_error(text, [1, 1], column, reason);
}

fn check_parts_error(text: &str, [embedding, head]: [u32; 2], column: usize, reason: &str) {
    let error = Layout::with_parts(text, embedding, head).expect_err(text);
    assert_eq!((error.text.as_str(), error.column), (text, column), "{error}");
    assert!(error.reason.starts_with(reason), "{text}: {error}");
}

#[test]
fn letters_bars_and_repetitions() {
    check("E | A*3 | (A M)*2 | A L", "EAAAAMAMAL", &[1, 4, 8]);
    check("EAML", "EAML", &[]);
    check("E(A|)*2 A L", "EAAAL", &[2, 3]);
    check("E ((A*2 M)*2 X)*2 | L", "EAAMAAMXAAMAAMXL", &[15]);
    check("E*1|L * 1", "EL", &[1]);
}

#[test]
fn mistakes_have_a_column() {
    check_error("E | | L", 4, "this stage has no layer;");
    check_error("| E L", 0, "this stage has no layer;");
    check_error("E A L |", 7, "this stage has no layer;");
    check_error("", 0, "this stage has no layer;");
    check_error("E () L", 2, "this group has no layer;");
    check_error("E a L", 2, "`a` is not part of a layout;");
    check_error("*3 E L", 0, "there is nothing to repeat;");
    check_error("E |*2 L", 3, "there is nothing to repeat;");
    check_error("E A*0 L", 4, "`*` needs a number of at least 1");
    check_error("E A* L", 3, "`*` needs a number of at least 1");
    check_error("E A*99999999999999999999 L", 4, "the layout has more than 10000 layers;");
    check_error("E ((A*9999)*9999)*9999 L", 12, "the layout has more than 10000 layers;");
    check_error("E (A L", 2, "this group is not closed;");
    check_error("E A) L", 3, "there is no group to close;");
    check_error("A L", 0, "there is no embedding; write `E` first");
    check_error("E A", 3, "there is no head; write `L` last");
    check_error("E A E L", 4, "a second embedding; write `E` once");
    check_error("E L*2", 2, "a second head; write `L` once");
    check_error("A E L", 2, "the embedding is not the first layer; write `E` first");
    check_error("E L A", 2, "the head is not the last layer; write `L` last");
    let deep = format!("E {}A{} L", "(".repeat(40), ")".repeat(40));
    check_error(&deep, 34, "groups are nested more than 32 deep;");
}

#[test]
fn an_embedding_or_a_head_in_parts_has_a_letter_for_each() {
    let kinds = |text: &str, [embedding, head]: [u32; 2]| {
        Layout::with_parts(text, embedding, head).map(|layout| layout.kinds)
    };
    assert_eq!(kinds("E | A*3 L | L | L*2", [1, 4]), Ok("EAAALLLL".into()));
    assert_eq!(kinds("E | E*2 A | L*2", [3, 2]), Ok("EEEALL".into()));
    assert_eq!(kinds("E L", [1, 1]), kinds("E L", [0, 0]));
    check_parts_error("E A | L L L", [1, 2], 10, "the head has 2 parts, and the layout 3; write `L` 2 times");
    check_parts_error("E A | L L", [1, 3], 9, "the head has 3 parts, and the layout 2;");
    check_parts_error("E L", [1, 9], 3, "the head has 9 parts, and the layout 1;");
    check_parts_error("E A", [1, 2], 3, "there is no head; write `L` last");
    check_parts_error("E L A L", [1, 2], 2, "the head is not the last layer; write `L` last");
    check_parts_error("A L L", [1, 2], 0, "there is no embedding; write `E` first");
    check_parts_error("E E | E A L L", [2, 2], 6, "the embedding has 2 parts, and the layout 3; write `E` 2");
    check_parts_error("E A | L L", [3, 2], 0, "the embedding has 3 parts, and the layout 1;");
    check_parts_error("A L L", [2, 2], 0, "there is no embedding; write `E` first");
    check_parts_error("E A E L L", [2, 2], 4, "the embedding is not the first layer; write `E` first");
    check_parts_error("E E A L L", [1, 2], 2, "a second embedding; write `E` once");
    let message = |parts: [u32; 2]| kinds("E | A L", parts).expect_err("a part is missing").to_string();
    let head = "column 8: the head has 2 parts, and the layout 1; write `L` 2 times, as the last layers\n  \
                E | A L\n         ^";
    assert_eq!(message([1, 2]), head);
    let embedding = "column 1: the embedding has 2 parts, and the layout 1; write `E` 2 times, as the first layers\n  \
         E | A L\n  ^";
    assert_eq!(message([2, 1]), embedding);
}

#[test]
fn a_layout_is_compared_with_a_model() {
    let model = |kinds: &str| {
        let layer = |kind: char| LayerDesc {
            path: String::new(),
            kind: kind.to_string(),
            parameters: 0,
            weight: 1,
            activation_bytes: 0,
            output_bytes: 0,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        };
        ModelDesc { layers: kinds.chars().map(layer).collect() }
    };
    let layout: Layout = "E | (A M)*2 | L".parse().expect("a layout");
    let refused = |kinds: &str| layout.check(&model(kinds)).map_err(|error| error.to_string());
    assert_eq!((refused("eamamh"), refused("exxxxh")), (Ok(()), Ok(())));
    let text = "\n  E | (A M)*2 | L\n  ";
    let count = "write one letter for each";
    let longer = format!("column 15: the layout has 6 layers and the model 5; {count}{text}              ^");
    assert_eq!(refused("eamam"), Err(longer));
    let shorter =
        format!("column 16: the layout has 6 layers and the model 7; {count}{text}               ^");
    assert_eq!(refused("eamamhh"), Err(shorter));
    let other = "column 6: layer 3 of the model is of the kind `m`, and `A` is of the kind `a` before it; write another \
                 letter";
    assert_eq!(refused("eammmh"), Err(format!("{other}{text}     ^")));
}

#[test]
fn a_message_has_a_caret() {
    let error = "E | | L".parse::<Layout>().expect_err("an empty stage").to_string();
    let message = "column 5: this stage has no layer; remove the bar, or write a layer\n  E | | L\n      ^";
    assert_eq!(error, message);
}

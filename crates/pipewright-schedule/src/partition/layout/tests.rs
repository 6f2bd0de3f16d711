//! Tests of `layout.rs`.

use super::*;
use crate::model::LayerDesc;

fn check(text: &str, kinds: &str, boundaries: &[usize]) {
    let found: Layout = text.parse().expect(text);
    assert_eq!((found.kinds.as_str(), found.boundaries.as_slice()), (kinds, boundaries), "{text}");
    let letters: String = found.columns.iter().filter_map(|&column| text.chars().nth(column)).collect();
    assert_eq!((found.text.as_str(), letters.as_str()), (text, kinds));
}

fn check_error(text: &str, column: usize, kind: LayoutErrorKind) {
    let error = LayoutError { text: text.to_owned(), column, kind };
    assert_eq!(text.parse::<Layout>(), Err(error), "{text}");
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
    check_error("E | | L", 4, LayoutErrorKind::EmptyStage);
    check_error("| E L", 0, LayoutErrorKind::EmptyStage);
    check_error("E A L |", 7, LayoutErrorKind::EmptyStage);
    check_error("", 0, LayoutErrorKind::EmptyStage);
    check_error("E () L", 2, LayoutErrorKind::EmptyGroup);
    check_error("E a L", 2, LayoutErrorKind::Unknown('a'));
    check_error("*3 E L", 0, LayoutErrorKind::NothingToRepeat);
    check_error("E |*2 L", 3, LayoutErrorKind::NothingToRepeat);
    check_error("E A*0 L", 4, LayoutErrorKind::NoCount);
    check_error("E A* L", 3, LayoutErrorKind::NoCount);
    check_error("E A*99999999999999999999 L", 4, LayoutErrorKind::TooLong);
    check_error("E ((A*9999)*9999)*9999 L", 12, LayoutErrorKind::TooLong);
    check_error("E (A L", 2, LayoutErrorKind::Unclosed);
    check_error("E A) L", 3, LayoutErrorKind::Unopened);
    check_error("A L", 0, LayoutErrorKind::Missing('E'));
    check_error("E A", 3, LayoutErrorKind::Missing('L'));
    check_error("E A E L", 4, LayoutErrorKind::Twice('E'));
    check_error("E L*2", 2, LayoutErrorKind::Twice('L'));
    check_error("A E L", 2, LayoutErrorKind::OutOfPlace('E'));
    check_error("E L A", 2, LayoutErrorKind::OutOfPlace('L'));
    let deep = format!("E {}A{} L", "(".repeat(40), ")".repeat(40));
    check_error(&deep, 34, LayoutErrorKind::TooDeep);
}

#[test]
fn a_head_in_parts_has_a_letter_for_each() {
    let kinds = |text: &str, parts| Layout::with_parts(text, 1, parts).map(|layout| layout.kinds);
    assert_eq!(kinds("E | A*3 L | L | L*2", 4), Ok("EAAALLLL".into()));
    assert_eq!(kinds("E L", 1), kinds("E L", 0));
    let check = |text: &str, parts, column, kind| {
        let error = LayoutError { text: text.to_owned(), column, kind };
        assert_eq!(kinds(text, parts), Err(error), "{text}");
    };
    let count = |found, parts| LayoutErrorKind::HeadParts { found, parts };
    check("E A | L L L", 2, 10, count(3, 2));
    check("E A | L L", 3, 9, count(2, 3));
    check("E L", 9, 3, count(1, 9));
    check("E A", 2, 3, LayoutErrorKind::Missing('L'));
    check("E L A L", 2, 2, LayoutErrorKind::OutOfPlace('L'));
    check("A L L", 2, 0, LayoutErrorKind::Missing('E'));
    let error = Layout::with_parts("E | A L", 1, 2).expect_err("one part is missing").to_string();
    let message = "column 8: the head has 2 parts, and the layout 1; write `L` 2 times, as the last layers\n  \
                   E | A L\n         ^";
    assert_eq!(error, message);
}

#[test]
fn an_embedding_in_parts_has_a_letter_for_each() {
    let kinds = |text: &str, parts| Layout::with_parts(text, parts, 2).map(|layout| layout.kinds);
    assert_eq!(kinds("E | E*2 A | L*2", 3), Ok("EEEALL".into()));
    let check = |text: &str, parts, column, kind| {
        let error = LayoutError { text: text.to_owned(), column, kind };
        assert_eq!(kinds(text, parts), Err(error), "{text}");
    };
    let count = |found, parts| LayoutErrorKind::EmbeddingParts { found, parts };
    check("E E | E A L L", 2, 6, count(3, 2));
    check("E A | L L", 3, 0, count(1, 3));
    check("A L L", 2, 0, LayoutErrorKind::Missing('E'));
    check("E A E L L", 2, 4, LayoutErrorKind::OutOfPlace('E'));
    check("E E A L L", 1, 2, LayoutErrorKind::Twice('E'));
    let error = Layout::with_parts("E | A L", 2, 1).expect_err("one part is missing").to_string();
    let message = "column 1: the embedding has 2 parts, and the layout 1; write `E` 2 times, as the first layers\n  \
                   E | A L\n  ^";
    assert_eq!(error, message);
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

//! The sources of a mixture.

use super::{check, load};

const TWO: &str = "{ path = \"a.jsonl\", weight = 2 }, { path = [\"b/*.txt\", \"!b/c.txt\"], weight = 0.5 }";

/// Returns the number of patterns of `data.path`, and the patterns and weight of each source of `data.mix`.
fn data(text: &str, arguments: &[&str]) -> (usize, Vec<(Vec<String>, f64)>) {
    let data = load(Some(text), arguments).expect("a sound configuration").data;
    let mix = data.mix.into_iter().map(|source| (source.path, source.weight.into())).collect();
    (data.path.len(), mix)
}

#[test]
fn sources_have_absolute_patterns_and_weights() {
    let (paths, mix) = data(&format!("[data]\nmix = [{TWO}]"), &[]);
    assert_eq!((paths, mix.len()), (0, 2));
    let [(first, _), (second, _)] = mix.as_slice() else { panic!("two sources: {mix:?}") };
    assert!(first[0].starts_with('/') && first[0].ends_with("/a.jsonl"), "{first:?}");
    assert!(second[0].ends_with("/b/*.txt") && second[1].starts_with("!/"), "{second:?}");
    assert_eq!(mix.iter().map(|(_, weight)| *weight).collect::<Vec<_>>(), [2.0, 0.5]);
    let tables = "[[data.mix]]\npath = \"a.jsonl\"\nweight = 2\n";
    let [(path, weight)] = &data(tables, &[]).1[..] else { panic!("one source") };
    assert!(path[0].ends_with("/a.jsonl") && *weight == 2.0, "{path:?}");
}

#[test]
fn an_argument_replaces_the_data_of_the_file() {
    let mix = format!("data.mix=[{TWO}]");
    assert_eq!(data("[data]\npath = \"a.txt\"", &[&mix]).0, 0);
    let (paths, sources) = data(&format!("[data]\nmix = [{TWO}]"), &["data.path=a.txt"]);
    assert_eq!((paths, sources.len()), (1, 0));
}

#[test]
fn mistakes_in_a_list_of_sources() {
    let refused = |list: &str, problem: &str| {
        let found = load(Some(&format!("[data]\nmix = {list}")), &[]).expect_err("a mistake");
        assert!(found.starts_with("a.toml:2:") && found.ends_with(&format!(": {problem}")), "{found}");
    };
    let weight = "`weight` is ";
    let range = ", where a finite number above 0 is expected";
    for number in ["0", "-1.5", "inf", "nan"] {
        let source = format!("[{{ path = \"a\", weight = {number} }}]");
        refused(&source, &format!("table 1: {weight}{number}{range}"));
    }
    refused(
        "[{ path = \"a\", weight = \"much\" }]",
        "table 1: `weight` is a text, where a number is expected",
    );
    refused("[{ path = \"a\" }]", "table 1: `weight` is missing in a source of `data.mix`");
    refused("[{ weight = 1 }]", "table 1: `path` is missing in a source of `data.mix`");
    refused("[{ path = [], weight = 1 }]", "table 1: `path` is empty");
    refused(
        "[{ path = 1, weight = 1 }]",
        "table 1: `path` is a whole number, where a text or a list of texts is expected",
    );
    refused(
        "[{ path = \"a\", wieght = 1, weight = 1 }]",
        "table 1: unknown key `wieght` in a source of `data.mix`",
    );
    refused("[]", "`mix` is empty");
    refused(
        "[\"a.txt\"]",
        "`mix` is a list, where a list of tables, such as [{ path = \"a.jsonl\", weight = 0.7 }, { path = \"b/*.txt\", \
         weight = 0.3 }] is expected",
    );
    refused("[{ path = \"a\", weight = 1 }]\npath = \"b\"", "`path` and `mix` both name the training data");
    check(
        "[data]\nmix = [{ path = \"a\", weight = 1 }]\nside = \"s.safetensors\"",
        &["a.toml:3:8: `side` has no effect without `path`"],
    );
}

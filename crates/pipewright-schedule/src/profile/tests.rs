//! Tests of profiles and of the values that they cannot have.

use super::*;

fn check(change: impl FnOnce(&mut Profile), expected: &[&str]) {
    let layer = LayerProfile { kind: "a".into(), count: 2, ..LayerProfile::default() };
    let link = LinkProfile::new(0.0, 1e9);
    let mut profile = Profile { link, layers: vec![layer], ..Profile::default() };
    change(&mut profile);
    let found: Vec<String> = profile.problems().iter().map(ToString::to_string).collect();
    assert_eq!(found, expected);
}

#[test]
fn values_that_cannot_be_are_found() {
    check(|_| {}, &[]);
    check(
        |profile| profile.layers[0].forward_s = -1.0,
        &["`forward_s` of [[layers]] number 1 is -1, where a number of seconds from 0 to 1e6 is expected"],
    );
    check(
        |profile| profile.layers[0].recompute_s = Some(f64::NAN),
        &["`recompute_s` of [[layers]] number 1 is NaN, where a number of seconds from 0 to 1e6 is expected"],
    );
    for whole in [0.9, 3.1] {
        check(
            |profile| {
                let halves = (Some(whole), 1.0, 2.0);
                let layer = &mut profile.layers[0];
                (layer.backward_s, layer.input_backward_s, layer.weight_backward_s) = halves;
            },
            &[&format!(
                "`backward_s` of [[layers]] number 1 is {whole}, where a number of seconds from 1 (`I`) to 3 (`I` and `W` \
                 together) is expected",
            )],
        );
    }
    check(
        |profile| profile.layers[0].output_bytes = u64::MAX,
        &[
            "`output_bytes` of [[layers]] number 1 is 18446744073709551615, where a number of bytes from 0 to \
           1000000000000000 is expected",
        ],
    );
    check(
        |profile| profile.link.bytes_per_s = 0.0,
        &["`bytes_per_s` of [link] is 0, where a number from 1 to 1e18 is expected"],
    );
    check(
        |profile| profile.node = Some(NodeProfile { ranks: 0, latency_s: 0.0, bytes_per_s: 0.5 }),
        &[
            "`bytes_per_s` of [node] is 0.5, where a number from 1 to 1e18 is expected",
            "`ranks` of [node] is 0, where a number from 1 to 65536 is expected",
        ],
    );
    check(
        |profile| profile.layers[0].tensor_sums = Some(2_000),
        &["`tensor_sums` of [[layers]] number 1 is 2000, where a number from 0 to 1000 is expected"],
    );
    check(
        |profile| profile.layers.clear(),
        &["`layers` of the profile is empty, where at least one [[layers]] section is expected"],
    );
    check(
        |profile| profile.layers[0].count = 20_000,
        &["`count` of [[layers]] number 1 is 20000, where at most 10000 layers in all is expected"],
    );
    check(
        |profile| profile.rows = 0,
        &["`rows` of the profile is 0, where a number from 1 to 1000000 is expected"],
    );
    check(
        |profile| profile.tokens = Some(u32::MAX),
        &["`tokens` of the profile is 4294967295, where a number from 1 to 1000000000 is expected"],
    );
}

/// The keys are those that the command line and Python read.
#[test]
fn parts_of_layers_have_keys_of_their_own() {
    let keys = |layer: &LayerProfile| {
        let json = serde_json::to_value(layer).expect("JSON");
        assert_eq!(serde_json::from_value::<LayerProfile>(json.clone()).ok().as_ref(), Some(layer), "{json}");
        let keys = ["norms_bytes", "norms_s", "feed_forward_bytes", "feed_forward_s"];
        keys.map(|key| json[key].as_f64())
    };
    assert_eq!(keys(&LayerProfile::default()), [None; 4]);
    let norms = LayerProfile { norms_bytes: 3, norms_s: 0.5, ..LayerProfile::default() };
    assert_eq!(keys(&norms), [Some(3.0), Some(0.5), None, None]);
    let feed_forward =
        LayerProfile { feed_forward_bytes: 4, feed_forward_s: 0.25, ..LayerProfile::default() };
    assert_eq!(keys(&feed_forward), [None, None, Some(4.0), Some(0.25)]);
}

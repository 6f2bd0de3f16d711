//! Tests of profiles and of the values that they cannot have.

use super::*;
use crate::ids::Rank;

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

type RankChange = fn(&mut RankProfile);

#[test]
fn unlike_ranks_have_speeds_in_range() {
    let rank = |change: RankChange| {
        move |profile: &mut Profile| {
            let mut rank = RankProfile::default();
            change(&mut rank);
            profile.ranks = vec![RankProfile::default(), rank];
        }
    };
    let range = "where a number from 1e-3 to 1e3 is expected";
    check(rank(|rank| rank.speed = 0.35), &[]);
    check(rank(|rank| rank.speeds = [("a".to_owned(), 0.3)].into()), &[]);
    let speeds: [(RankChange, &str); 4] = [
        (|rank| rank.speed = 0.0, "0"),
        (|rank| rank.speed = -1.0, "-1"),
        (|rank| rank.speed = f64::NAN, "NaN"),
        (|rank| rank.speed = 2e3, "2000"),
    ];
    for (change, value) in speeds {
        check(rank(change), &[&format!("`speed` of [[rank]] number 2 is {value}, {range}")]);
    }
    check(
        rank(|rank| rank.speeds = [("a".to_owned(), f64::INFINITY), ("b".to_owned(), 1.0)].into()),
        &[
            &format!("`speeds` of [[rank]] number 2 is inf for `a`, {range}"),
            "`speeds` of [[rank]] number 2 is for `b`, where a kind of the layers (a) is expected",
        ],
    );
    check(
        rank(|rank| (rank.memory_bytes, rank.threads) = (Some(0), Some(0))),
        &[
            "`memory_bytes` of [[rank]] number 2 is 0, where a number of bytes from 1 to 1000000000000000 is expected",
            "`threads` of [[rank]] number 2 is 0, where a number from 1 to 65536 is expected",
        ],
    );
    check(
        |profile| profile.ranks = vec![RankProfile::default(); 257],
        &["`rank` of the profile is 257 sections, where at most 256 sections is expected"],
    );
}

#[test]
fn pairs_name_two_ranks_once() {
    let pair = |from, to| PairProfile { from, to, latency_s: 0.0, bytes_per_s: 1e9 };
    let pairs = |pairs: Vec<PairProfile>| {
        |profile: &mut Profile| {
            profile.ranks = vec![RankProfile::default(); 3];
            profile.pairs = pairs;
        }
    };
    check(pairs(vec![pair(0, 1), pair(1, 0), pair(0, 2)]), &[]);
    check(pairs(vec![pair(0, 3)]), &["`to` of [[pair]] number 1 is 3, where a rank from 0 to 2 is expected"]);
    check(
        pairs(vec![pair(2, 2)]),
        &["`to` of [[pair]] number 1 is 2, where another rank than `from` is expected"],
    );
    check(
        pairs(vec![pair(0, 1), pair(1, 0), pair(0, 1)]),
        &[
            "`to` of [[pair]] number 3 is 1 for a second time after `from = 0`, where one [[pair]] for each direction is \
             expected",
        ],
    );
    check(
        pairs(vec![PairProfile { bytes_per_s: 0.0, latency_s: -1.0, ..pair(0, 1) }]),
        &[
            "`latency_s` of [[pair]] number 1 is -1, where a number of seconds from 0 to 1e6 is expected",
            "`bytes_per_s` of [[pair]] number 1 is 0, where a number from 1 to 1e18 is expected",
        ],
    );
}

#[test]
fn the_number_of_ranks_is_checked_apart() {
    let check = |ranks: usize, pairs: &[(u32, u32)], expected: &[&str]| {
        let pair = |&(from, to)| PairProfile { from, to, latency_s: 0.0, bytes_per_s: 1e9 };
        let ranks = vec![RankProfile::default(); ranks];
        let profile = Profile { ranks, pairs: pairs.iter().map(pair).collect(), ..Profile::default() };
        let found: Vec<String> = profile.problems_for(2).iter().map(ToString::to_string).collect();
        assert_eq!(found, expected);
    };
    check(0, &[], &[]);
    check(2, &[(0, 1)], &[]);
    check(
        3,
        &[(0, 2)],
        &["`rank` of the profile is 3 sections, where one [[rank]] for each of 2 ranks is expected"],
    );
    check(0, &[(0, 1), (2, 1)], &["`from` of [[pair]] number 2 is 2, where a rank from 0 to 1 is expected"]);
}

#[test]
fn a_direction_without_a_pair_has_the_link_of_the_other_one() {
    let pair = |from, to, latency_s| PairProfile { from, to, latency_s, bytes_per_s: 1e9 };
    let node = Some(NodeProfile { ranks: 2, latency_s: 1.0, bytes_per_s: 1e9 });
    let pairs = vec![pair(0, 2, 3.0), pair(1, 2, 4.0), pair(2, 1, 5.0)];
    let profile = Profile { link: LinkProfile::new(2.0, 1e9), node, pairs, ..Profile::default() };
    let cases = [(0, 1, 1.0), (0, 2, 3.0), (2, 0, 3.0), (1, 2, 4.0), (2, 1, 5.0), (3, 1, 2.0), (2, 3, 1.0)];
    let links = profile.links_between(&[0, 1, 2, 3].map(Rank::new));
    for (from, to, latency_s) in cases {
        assert_eq!(links[4 * from + to], LinkProfile::new(latency_s, 1e9), "{from} to {to}");
    }
    // A subset has the same links.
    let kept = [3, 0, 2].map(Rank::new);
    let subset = profile.of_ranks(&kept);
    let found = subset.links_between(&[0, 1, 2].map(Rank::new));
    for (from, to) in (0..3).flat_map(|from| (0..3).map(move |to| (from, to))).filter(|(from, to)| from != to)
    {
        let expected = links[4 * kept[from].index() + kept[to].index()];
        assert_eq!(found[3 * from + to], expected, "{from} to {to}");
    }
}

#[test]
fn equal_ranks_are_merged() {
    let layer = LayerProfile { kind: "a".into(), forward_s: 1.0, ..LayerProfile::default() };
    let rank = RankProfile { speed: 0.5, memory_bytes: Some(3), ..RankProfile::default() };
    let mut profile = Profile { layers: vec![layer], ranks: vec![rank; 2], ..Profile::default() };
    let (merged, memory) = profile.with_equal_ranks_merged();
    assert_eq!((merged.layers[0].forward_s, memory, merged.has_unlike_ranks()), (2.0, Some(3), false));
    profile.ranks[1].memory_bytes = None;
    assert_eq!(profile.with_equal_ranks_merged(), (std::borrow::Cow::Borrowed(&profile), None));
}

#[test]
fn ranks_and_pairs_are_written_and_read() {
    let check = |profile: &Profile, expected: &str| {
        let json = serde_json::to_value(profile).expect("JSON");
        let keys = ["rank", "pair"].map(|key| json[key].to_string());
        assert_eq!(keys.join(" "), expected);
        assert_eq!(serde_json::from_value::<Profile>(json).ok().as_ref(), Some(profile));
    };
    let mut profile = Profile::default();
    check(&profile, "null null");
    profile.ranks = vec![RankProfile::default()];
    check(&profile, "[{}] null");
    profile.ranks[0] = RankProfile {
        speed: 0.5,
        memory_bytes: Some(7),
        threads: Some(2),
        device: Some("cuda".into()),
        speeds: [("attention".to_owned(), 0.25)].into(),
        ..RankProfile::default()
    };
    profile.pairs = vec![PairProfile { from: 0, to: 1, latency_s: 0.5, bytes_per_s: 2.0 }];
    check(
        &profile,
        r#"[{"device":"cuda","memory_bytes":7,"speed":0.5,"speeds":{"attention":0.25},"threads":2}] [{"bytes_per_s":2.0,"from":0,"latency_s":0.5,"to":1}]"#,
    );
}

/// The command line and Python read these keys.
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

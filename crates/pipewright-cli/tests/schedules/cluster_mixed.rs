//! Plans for clusters with several kinds of machines.

use serde_json::Value;

use crate::cluster_plans::with_model;
use crate::{refuse, succeed};

const SIZES: [&str; 4] = ["--batch", "64", "--seq-len", "8192"];

fn arguments<'a>(cluster: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["plan", "config.json", "--cluster", cluster], &SIZES[..], more].concat()
}

#[test]
fn each_kind_has_its_ranks_memory_and_idle_share() {
    let folder = with_model();
    let text = succeed(&folder, &arguments("h100:2,a100:1", &[]));
    for words in [
        "16 GPUs of H100 80 GB SXM, 8 per node, and 8 GPUs of A100 80 GB SXM (Selene), 8 per node; 64 rows",
        " on H100 80 GB SXM: ",
        " on A100 80 GB SXM (Selene): ",
        " GiB memory, idle ",
        "no figures for more nodes, memory or bandwidth",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let report = succeed(&folder, &arguments("h100:2,a100:1", &["--format", "json"]));
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["cluster"]["gpus"], 24);
    for plan in report["plans"].as_array().expect("plans") {
        let machines = plan["machines"].as_array().expect("machines");
        let ranks: u64 = machines.iter().map(|kind| kind["ranks"].as_u64().expect("ranks")).sum();
        assert_eq!((machines.len(), plan["ranks"].as_u64()), (2, Some(ranks)));
        for kind in machines {
            assert!(kind["memory_bytes"].as_u64() <= kind["memory_limit_bytes"].as_u64(), "{kind}");
            assert!((0.0..1.0).contains(&kind["idle"].as_f64().expect("a share")), "{kind}");
        }
    }
    assert_eq!(report["upgrades"].as_array().map(Vec::len), Some(0));
}

#[test]
fn one_machine_with_its_nodes_is_planned_as_with_nodes() {
    let folder = with_model();
    let report = |arguments: Vec<&str>| {
        let mut report: Value = serde_json::from_str(&succeed(&folder, &arguments)).expect("JSON");
        report["search_s"] = Value::Null;
        report
    };
    let json = ["--format", "json", "--tensor-parallel", "2"];
    let with_nodes = arguments("h100", &[&json[..], &["--nodes", "1"]].concat());
    assert_eq!(report(arguments("h100:1", &json)), report(with_nodes));
}

#[test]
fn machines_that_do_not_suit_are_refused() {
    let folder = with_model();
    let check = |cluster: &str, more: &[&str], message: &str| {
        refuse(&folder, &arguments(cluster, more), 2, &format!("error: {message}"));
    };
    let both = "h100:2,a100:1";
    check(both, &["--nodes", "3"], "--nodes: --cluster h100:2,a100:1 has the nodes; leave it out");
    check(both, &["--ranks", "24"], "--ranks: --cluster h100:2,a100:1 has the nodes; leave it out");
    check(both, &["--measured", "m.toml"], "--measured: --cluster h100:2,a100:1 has several machines; ");
    check(
        "h100:2,a100",
        &[],
        "--cluster h100:2,a100: `a100` has no number of nodes; write one for each machine",
    );
    check(both, &["--check", "plan.sh"], "--check: --cluster h100:2,a100:1 has several machines; give one");
    check("h100,a100", &[], "--cluster h100,a100: `h100` has no number of nodes");
    check("h100:0,a100:1", &[], "--cluster h100:0,a100:1: `h100` has 0 nodes; use at least 1");
    check("h100:1,a10:1", &[], "there is no machine `a10`");
    check("h100:1,none.toml:1", &[], "none.toml: cannot read the cluster file");
    check("h100:1,a100:4000000000", &[], "--cluster h100:1,a100:4000000000: there are too many GPUs");
    check(both, &["--precision", "fp8"], "--precision fp8: A100 80 GB SXM (Selene) has no rate");
    check(
        both,
        &["--pipeline-parallel", "1"],
        "--pipeline-parallel 1: a rank of the pipeline has GPUs of several",
    );
    check(
        both,
        &["--tensor-parallel", "16"],
        "24 GPUs cannot be divided into a mesh of 16 (--tensor-parallel 16); use another mesh",
    );
}

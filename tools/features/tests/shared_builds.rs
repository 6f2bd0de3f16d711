//! Compares the features of all dependencies in the builds with and without the features of this project's
//! crates. A dependency that differs is compiled twice, with everything that depends on it, unless this crate
//! gives it the same features.
//!
//! A dependency is also compiled twice if macros or build scripts alone need it in another way, which the
//! features do not show. So the test finds entries that are missing in `Cargo.toml`, but not all entries that
//! have no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The features of `.ci/run`.
const FEATURES: &str = "mpi,tokenizers,parquet";

/// Returns the sets of features with which each dependency is compiled.
fn dependencies(arguments: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--workspace", "--locked", "--edges", "normal,build", "--prefix", "none"]);
    command.args(["--format", "{p}\t{f}"]).args(arguments);
    let output = command.output().expect("Cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut dependencies: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in String::from_utf8(output.stdout).expect("it is text").lines() {
        let Some((package, features)) = line.split_once('\t') else { continue };
        // Its name and its version, without its folder.
        let package = package.split(' ').take(2).collect::<Vec<_>>().join(" ");
        // The mark of a package whose dependencies are listed above.
        let features = features.trim_end_matches("(*)").trim();
        dependencies.entry(package).or_default().insert(features.to_owned());
    }
    dependencies
}

#[test]
#[ignore = "needs the packages of all features"]
fn builds_with_features_share_the_dependencies_of_the_others() {
    let (without, with) = (dependencies(&[]), dependencies(&["--features", FEATURES]));
    assert!(without.keys().any(|package| package.starts_with("serde ")), "{without:?}");
    let differs =
        |package: &&String| with.get(*package).is_none_or(|with| !without[*package].is_subset(with));
    let is_expected = |package: &&String| package.starts_with("pipewright");
    let twice: Vec<&String> =
        without.keys().filter(differs).filter(|package| !is_expected(package)).collect();
    assert!(
        twice.is_empty(),
        "these have other features with `--features {FEATURES}`: add them to tools/features/Cargo.toml with the features that \
         both builds need: {twice:?}"
    );
}

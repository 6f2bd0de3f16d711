//! The circles among the imports of a crate.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::SourceFile;

/// The modules that each module imports.
pub(crate) type Targets<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// Returns the modules of each folder, which the folder's own file imports.
pub(crate) fn folders(sources: &[SourceFile]) -> Targets<'_> {
    let mut targets = Targets::new();
    for source in sources {
        if let Some((folder, _)) = source.module.rsplit_once("::") {
            targets.entry(folder).or_default().insert(source.module.as_str());
        }
    }
    targets
}

/// Returns the modules that each module imports, directly or through other modules, with the module itself.
pub(crate) fn reached<'a>(targets: &Targets<'a>) -> Targets<'a> {
    targets.keys().map(|&module| (module, reached_from(targets, module))).collect()
}

fn reached_from<'a>(targets: &Targets<'a>, module: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut open) = (BTreeSet::from([module]), vec![module]);
    while let Some(module) = open.pop() {
        let next = targets.get(module).into_iter().flatten();
        open.extend(next.copied().filter(|target| seen.insert(target)));
    }
    seen
}

//! The names of parts of a parameter's path in the files of families that have other names than most.

/// The names in files of some parts of paths. The fields of a stage's modules have the names that most
/// families have, and a path consists of such names with dots between them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PathNames(&'static [(&'static str, &'static str)]);

impl PathNames {
    /// Makes the names from pairs of the usual name and the name in files.
    pub(crate) const fn new(names: &'static [(&'static str, &'static str)]) -> Self {
        Self(names)
    }

    /// Returns the path in files of a path with the usual names.
    pub(crate) fn of(self, path: &str) -> String {
        let name = |part: &str| self.0.iter().find(|(usual, _)| *usual == part).map(|(_, name)| *name);
        path.split('.').map(|part| name(part).unwrap_or(part)).collect::<Vec<_>>().join(".")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_parts_have_other_names() {
        let names = PathNames::new(&[("mlp", "moe"), ("up_proj", "w3")]);
        assert_eq!(
            names.of("model.layers.0.mlp.experts.3.up_proj.weight"),
            "model.layers.0.moe.experts.3.w3.weight"
        );
        assert_eq!(names.of("model.mlp_norm.gate_up_proj"), "model.mlp_norm.gate_up_proj");
        assert_eq!(PathNames::default().of("model.norm"), "model.norm");
    }
}

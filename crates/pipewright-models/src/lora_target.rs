//! [`LoraTarget`]: a name of layers that get an adapter, or a pattern of their paths, which is compiled once.

use globset::{Glob, GlobMatcher};
use serde::{Deserialize, Serialize};

/// A name, a path, or a pattern of paths of linear layers. `q_proj` is the layer of this name in every block; a text with
/// `*`, `?`, `[` or `{` is a pattern of the whole path.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct LoraTarget {
    text: String,
    /// The compiled pattern; `None` for a name, and for a pattern that is wrong. Every layer of every stage is matched, and
    /// compiling a pattern takes many times as long as matching it.
    matcher: Option<GlobMatcher>,
}

impl LoraTarget {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether the target means the layer at a path. A name means the path that ends in it, as in PEFT.
    pub(crate) fn means(&self, layer: &str) -> bool {
        match &self.matcher {
            Some(matcher) => matcher.is_match(layer),
            None => !is_pattern(&self.text) && is_named(&self.text, layer),
        }
    }

    /// Returns whether the target is a pattern of whole paths.
    pub(crate) fn is_pattern(&self) -> bool {
        is_pattern(&self.text)
    }

    /// Checks that a pattern can be read.
    ///
    /// # Errors
    /// When it cannot.
    pub(crate) fn check(&self) -> Result<(), globset::Error> {
        if is_pattern(&self.text) { Glob::new(&self.text).map(drop) } else { Ok(()) }
    }
}

impl From<String> for LoraTarget {
    fn from(text: String) -> Self {
        let glob = is_pattern(&text).then(|| Glob::new(&text).ok()).flatten();
        Self { matcher: glob.map(|glob| glob.compile_matcher()), text }
    }
}

impl From<LoraTarget> for String {
    fn from(target: LoraTarget) -> Self {
        target.text
    }
}

impl PartialEq for LoraTarget {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for LoraTarget {}

/// Returns whether a target is a pattern of whole paths.
fn is_pattern(target: &str) -> bool {
    target.contains(['*', '?', '[', '{'])
}

/// Returns whether the path of a layer is `target` or ends in it, from the beginning of a name on.
pub(crate) fn is_named(target: &str, layer: &str) -> bool {
    layer.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

//! The message of a layer whose input has the wrong shape.

/// Panics unless the last dimension of an input has the number of features that a layer takes. The runtime reports the
/// panic as an error of the stage, with the layer's place in the model.
pub(super) fn takes_features(layer: &str, expected: usize, shape: &[usize]) {
    let found = shape.last().copied().unwrap_or_default();
    assert!(
        found == expected,
        "{layer} takes {expected} features, got {found}: its input has the shape {shape:?}"
    );
}

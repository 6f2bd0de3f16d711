//! The values that Hugging Face assumes for keys that a `config.json` leaves out.

pub(super) const ROPE_THETA: f64 = 10_000.0;

pub(super) fn rms_norm_eps() -> f64 {
    1e-6
}

pub(super) fn initializer_range() -> f64 {
    0.02
}

pub(super) fn hidden_act() -> String {
    "silu".to_owned()
}

//! The parts of a block that Megatron can compute again by themselves.

/// Parts of a block that are computed again, by the names that Megatron has for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Modules(u8);

impl Modules {
    /// All parts: the scores of attention, the products that make queries, keys and values of latent attention,
    /// norms, activations of experts, dense feed-forward parts, experts, and the shared expert.
    pub const NAMES: [(&str, Self); 7] = [
        ("core_attn", Self(1)),
        ("mla_up_proj", Self(2)),
        ("layernorm", Self(4)),
        ("moe_act", Self(8)),
        ("mlp", Self(16)),
        ("moe", Self(32)),
        ("shared_experts", Self(64)),
    ];
    /// The scores of attention.
    pub const SCORES: Self = Self::NAMES[0].1;
    /// The products that make queries, keys and values of latent attention.
    pub const LATENT: Self = Self::NAMES[1].1;
    /// Norms.
    pub const NORMS: Self = Self::NAMES[2].1;
    /// The activations of experts.
    pub const EXPERT_ACTIVATIONS: Self = Self::NAMES[3].1;
    /// Dense feed-forward parts.
    pub const DENSE: Self = Self::NAMES[4].1;
    /// Routed experts.
    pub const EXPERTS: Self = Self::NAMES[5].1;
    /// The shared expert.
    pub const SHARED_EXPERT: Self = Self::NAMES[6].1;

    /// Returns the parts of both.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the names of the parts.
    pub fn names(self) -> Vec<&'static str> {
        Self::NAMES.iter().filter(|(_, part)| self.has(*part)).map(|(name, _)| *name).collect()
    }

    /// Returns whether all parts of `other` are in it.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

//! The exchanges inside of the actions of a stage: the tokens of a microbatch travel to the ranks of their
//! experts and back. Costs count them apart from the computation, because an overlap may hide them.

use crate::action::Action;

/// The exchanges in the actions of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageExchanges {
    /// The exchanges in `F`.
    pub forward: Exchanges,
    /// The exchanges in `I`, and in `B`. `W` has none, because the rank of an expert keeps what it needs.
    pub backward: Exchanges,
    /// The exchanges in a forward, or its part that the stage recomputes, that is computed again; `None` for
    /// the exchanges in `F`.
    pub recompute: Option<Exchanges>,
}

/// The exchanges in an action. They divide its computation into parts of equal length, one more than there are
/// exchanges, and take equally long. A part begins when the exchange before it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Exchanges {
    /// 0 exactly if `seconds` is 0.
    count: u32,
    seconds: f64,
}

/// The largest number of exchanges in an action. A stage of a profile with more of them is simulated with this
/// number, and the same time.
pub const MAX_EXCHANGES: u32 = 500;

/// The largest number of exchanges in all actions of a program. A timeline has a span for each.
pub const MAX_PROGRAM_EXCHANGES: u64 = 4_000_000;

impl StageExchanges {
    /// Returns the exchanges of a stage whose forward and whose backward have these exchanges.
    pub fn both(exchanges: Exchanges) -> Self {
        Self { forward: exchanges, backward: exchanges, recompute: None }
    }

    /// Returns the exchanges of each of `stages` equal stages that together have these.
    #[must_use]
    pub fn shared(self, stages: u32) -> Self {
        let stages = stages.max(1);
        self.map(|Exchanges { count, seconds }| {
            Exchanges::new(count.div_ceil(stages), seconds / f64::from(stages))
        })
    }

    /// Returns the exchanges in a forward that is computed again.
    pub(crate) fn again(&self) -> Exchanges {
        self.recompute.unwrap_or(self.forward)
    }

    /// Returns the exchanges in a computation that is not an overlap.
    pub(crate) fn of(&self, part: Action) -> Exchanges {
        match part {
            Action::Forward { .. } => self.forward,
            Action::Backward { .. } | Action::InputBackward { .. } => self.backward,
            _ => Exchanges::default(),
        }
    }

    /// Returns whether any action has an exchange.
    pub(crate) fn are_any(&self) -> bool {
        self.all().iter().any(|exchanges| exchanges.count > 0)
    }

    pub(super) fn all(&self) -> [Exchanges; 3] {
        [self.forward, self.backward, self.again()]
    }

    pub(crate) fn map(self, change: impl Fn(Exchanges) -> Exchanges) -> Self {
        Self {
            forward: change(self.forward),
            backward: change(self.backward),
            recompute: self.recompute.map(change),
        }
    }
}

impl Exchanges {
    /// Makes exchanges from their number and the time of all of them together, in seconds. If one of the two is
    /// 0, the action has no exchanges. [`Costs`](super::Costs) refuse more than [`MAX_EXCHANGES`].
    pub const fn new(count: u32, seconds: f64) -> Self {
        if count == 0 || seconds == 0.0 { Self { count: 0, seconds: 0.0 } } else { Self { count, seconds } }
    }

    /// Returns the number of exchanges.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the time of all exchanges together, in seconds.
    pub const fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Returns these exchanges and others of the same action, as [`MAX_EXCHANGES`] if there are more.
    #[must_use]
    pub(crate) fn plus(self, other: Self) -> Self {
        let count = self.count.saturating_add(other.count).min(MAX_EXCHANGES);
        Self { count, seconds: self.seconds + other.seconds }
    }

    /// Returns as many exchanges, each with one of `parts` equal shares of the tokens.
    #[must_use]
    pub(crate) fn share(self, parts: u32) -> Self {
        Self::new(self.count, self.seconds / f64::from(parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_have_a_number_and_a_time_or_neither() {
        for (count, seconds) in [(0, 0.0), (0, 2.0), (3, 0.0)] {
            assert_eq!(Exchanges::new(count, seconds), Exchanges::default(), "{count} in {seconds} s");
        }
        let exchanges = Exchanges::new(3, 2.0);
        assert_eq!((exchanges.count(), exchanges.seconds()), (3, 2.0));
    }

    #[test]
    fn more_exchanges_than_an_action_may_have_keep_their_time() {
        let most = Exchanges::new(MAX_EXCHANGES, 2.0);
        assert_eq!(most.plus(Exchanges::new(2, 1.0)), Exchanges::new(MAX_EXCHANGES, 3.0));
        assert_eq!(Exchanges::new(2, 1.0).plus(Exchanges::default()), Exchanges::new(2, 1.0));
    }
}

//! The microbatches in flight that keep their activations on a stage that recomputes others.

use crate::ids::Microbatch;

/// The microbatches of one stage whose forward has run and kept its activations, and whose backward has not
/// run. The actions of the stage must be given in the order of the row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptForwards {
    microbatches: Vec<Microbatch>,
}

impl KeptForwards {
    /// Notes that a forward runs. Returns whether it keeps its activations, if `most` microbatches do.
    pub fn forward(&mut self, most: u32, microbatch: Microbatch) -> bool {
        let keeps = self.microbatches.len() < most as usize;
        if keeps {
            self.microbatches.push(microbatch);
        }
        keeps
    }

    /// Notes that the backward of a microbatch runs. Returns whether its forward has kept its activations.
    pub fn backward(&mut self, microbatch: Microbatch) -> bool {
        let index = self.microbatches.iter().position(|&kept| kept == microbatch);
        index.map(|index| self.microbatches.swap_remove(index)).is_some()
    }

    /// Forgets all microbatches.
    pub fn clear(&mut self) {
        self.microbatches.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks which forwards of a row such as `F0 F1 B0` keep their activations.
    fn check(keep: u32, row: &str, expected: &str) {
        let mut kept = KeptForwards::default();
        let mut found = String::new();
        for action in row.split(' ') {
            let microbatch = Microbatch::new(action[1..].parse().expect("a number"));
            let keeps = if action.starts_with('F') {
                kept.forward(keep, microbatch)
            } else {
                kept.backward(microbatch)
            };
            found.push(if keeps { 'k' } else { 'r' });
        }
        assert_eq!(found, expected, "{keep} of {row}");
    }

    #[test]
    fn the_first_in_flight_keep_their_activations() {
        check(0, "F0 F1 B0 B1", "rrrr");
        check(1, "F0 F1 B0 B1", "krkr");
        check(2, "F0 F1 B0 B1", "kkkk");
    }

    #[test]
    fn a_backward_makes_room_for_the_next_forward() {
        // In the steady state of 1F1B with three in flight, every third one is kept.
        check(1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5", "krrkkrrrrkrr");
        check(2, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "kkrkkkkrkk");
    }
}

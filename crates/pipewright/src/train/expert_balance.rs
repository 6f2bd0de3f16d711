//! Balance of experts without a loss (Wang et al., 2024, <https://arxiv.org/abs/2408.15664>; DeepSeek-AI,
//! 2024, <https://arxiv.org/abs/2412.19437>). A router adds a correction to the scores of its experts when it
//! chooses them. After each step the correction of an expert falls by a fixed amount if more tokens than the
//! mean chose the expert, and rises by it if fewer did.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The rule by which the corrections of routers change after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertBalance {
    /// How much a correction rises or falls in a step.
    pub speed: f64,
    /// The path of the correction below the path of a layer with experts.
    pub correction: String,
}

impl ExpertBalance {
    /// Returns what is added to the corrections after a step, by their paths. `loads` are the numbers of
    /// tokens that chose each expert, by layer
    /// ([`StepSummary::expert_loads`](crate::pipeline::StepSummary::expert_loads)). They are the same in all
    /// processes, and so is the result.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use pipewright::train::ExpertBalance;
    ///
    /// let balance = ExpertBalance { speed: 0.5, correction: "gate.bias".to_owned() };
    /// let shifts = balance.shifts(&BTreeMap::from([("layers.1".into(), vec![6, 3, 0])]));
    /// assert_eq!(shifts["layers.1.gate.bias"], [-0.5, 0.0, 0.5]);
    /// ```
    pub fn shifts(&self, loads: &BTreeMap<Arc<str>, Vec<u64>>) -> BTreeMap<Arc<str>, Vec<f32>> {
        let of_layer = |(layer, choices): (&Arc<str>, &Vec<u64>)| {
            let total: u128 = choices.iter().copied().map(u128::from).sum();
            let shift = |&count: &u64| {
                let speed = self.speed as f32;
                match (u128::from(count) * choices.len() as u128).cmp(&total) {
                    Ordering::Less => speed,
                    Ordering::Equal => 0.0,
                    Ordering::Greater => -speed,
                }
            };
            (format!("{layer}.{}", self.correction).into(), choices.iter().map(shift).collect())
        };
        loads.iter().map(of_layer).collect()
    }
}

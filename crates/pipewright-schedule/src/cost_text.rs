//! The text of costs, as the command line and Python have it: `F=1,I=1,W=1,hop=0.1`.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::costs::{
    Costs, CostsError, Exchanges, MAX_EXCHANGES, StageCosts, StageExchanges, check_entries, check_range,
};

impl FromStr for Costs {
    type Err = CostsError;

    /// Reads `F=1,I=1,W=1,B=2,hop=0.1`, in any order and without regard to case. Defaults: `F`, `I` and `W`
    /// are 1, `B` is `I + W`, and `hop`, the latency of every link, is 0. If `B` is given, `I` and `W` are
    /// half of it each, or one of them is what the other leaves, because a lowered program may have both in
    /// place of `B`. `F=1:1:2` gives each stage a time of its own; the number of entries is compared with the
    /// number of stages when the costs are used. `attention=0.3` is [`Costs::attention`], by default 0.
    /// `exchange=0.5` is the time of the exchanges in `F`, and of those in the backward, by default 0, and
    /// `exchanges=8` is their number in each of the two, by default 2; it needs their time. `offload=0.2` is the
    /// time of each `OFFLOAD` and each `RELOAD`, by default 0. `unshard=0.3` is the time of each `UNSHARD`, by default 0.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut costs = Self::default();
        let [mut forward, mut input, mut weight] = [const { Vec::new() }; 3];
        let mut backward = Vec::new();
        let (mut exchange, mut unshard, mut count) = (Vec::new(), Vec::new(), None);
        let mut given = BTreeSet::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let no_cost = || {
                let part: String = part.chars().take(64).collect();
                CostsError(format!(
                    "`{part}` is not a cost; write `F=1,I=1,W=1,B=2,hop=0.1,exchange=0.5,exchanges=8,offload=0.2,unshard=0.3`, \
                     and leave out what is not needed"
                ))
            };
            let (name, values) = part.split_once('=').ok_or_else(no_cost)?;
            let values = values.split(':').map(|value| value.trim().parse());
            let values = values.collect::<Result<Vec<f64>, _>>().map_err(|_not_a_number| no_cost())?;
            let name = name.trim().to_ascii_lowercase();
            if given.contains(&name) {
                return Err(CostsError(format!("the cost `{name}` is given twice; leave one out")));
            }
            match (name.as_str(), values.as_slice()) {
                ("f", _) => forward = values,
                ("i", _) => input = values,
                ("w", _) => weight = values,
                ("b", _) => backward = values,
                ("exchange", _) => exchange = values,
                ("unshard", _) => unshard = values,
                ("exchanges", &[number]) => count = Some(exchange_count(number)?),
                ("hop", &[latency]) => costs.link.latency = latency,
                ("offload", &[seconds]) => costs.offload.latency = seconds,
                ("attention", &[share]) => costs.attention = share,
                _ => return Err(no_cost()),
            }
            given.insert(name);
        }
        let lists = [&forward, &input, &weight, &backward, &exchange, &unshard];
        let stages = lists.iter().map(|list| list.len()).max().unwrap_or(1).max(1);
        let mut given = lists.iter().filter(|list| !list.is_empty());
        given.try_for_each(|list| check_entries("costs", list.len(), stages as u32))?;
        if count.is_some() && exchange.is_empty() {
            return Err(CostsError(
                "`exchanges` is the number of exchanges in an action, and nothing says how long they take; add their time, such \
                 as `exchange=0.5`, or leave `exchanges` out"
                    .to_owned(),
            ));
        }
        let count = count.unwrap_or(2);
        // Before others follow from them.
        backward.iter().try_for_each(|&value| check_range("B", value))?;
        let value_of =
            |list: &[f64], stage: usize| list.get(stage.min(list.len().saturating_sub(1))).copied();
        costs.stages = (0..stages)
            .map(|stage| {
                let [forward, input, weight, backward] =
                    [&forward, &input, &weight, &backward].map(|list| value_of(list, stage));
                let (input, weight) = halves(input, weight, backward);
                let costs = StageCosts::new(forward.unwrap_or(1.0), input, weight);
                let seconds = value_of(&exchange, stage).unwrap_or(0.0);
                let exchanges = StageExchanges::both(Exchanges::new(count, seconds));
                let unshard = value_of(&unshard, stage).unwrap_or(0.0);
                StageCosts { backward: backward.unwrap_or(costs.backward), exchanges, unshard, ..costs }
            })
            .collect();
        costs.check(stages as u32)?;
        Ok(costs)
    }
}

/// Returns the number of exchanges in an action.
fn exchange_count(number: f64) -> Result<u32, CostsError> {
    if number.fract() == 0.0 && (1.0..=f64::from(MAX_EXCHANGES)).contains(&number) {
        return Ok(number as u32);
    }
    Err(crate::costs::exchange_count(number))
}

/// Returns the times of `I` and `W`, from the given ones.
fn halves(input: Option<f64>, weight: Option<f64>, backward: Option<f64>) -> (f64, f64) {
    let rest = |half: f64| backward.map_or(1.0, |backward| (backward - half).max(0.0));
    match (input, weight) {
        (Some(input), weight) => (input, weight.unwrap_or_else(|| rest(input))),
        (None, Some(weight)) => (rest(weight), weight),
        (None, None) => {
            let half = backward.map_or(1.0, |backward| backward / 2.0);
            (half, half)
        }
    }
}

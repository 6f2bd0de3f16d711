//! Rates of steps in single precision and in bfloat16, and PyTorch's, with their ratios.

use std::fmt;

use crate::harness::Spread;

/// The values of `--precision` of PyTorch's side: the first is compared with single precision, and the faster of the
/// others with bfloat16.
pub(crate) const OF_PEER: [&str; 3] = ["f32", "autocast", "bf16"];

/// The rates of all turns, in tokens per second.
#[derive(Default)]
pub(crate) struct Figures {
    /// Of each pair of steps: in single precision and in bfloat16.
    own: Vec<[f64; 2]>,
    /// The median rates of each turn.
    own_medians: Vec<[f64; 2]>,
    /// PyTorch's rates of each turn.
    pub(crate) peer: Vec<[f64; 3]>,
}

impl Figures {
    /// Adds the steps of a turn.
    pub(crate) fn add(&mut self, rates: &[[f64; 2]]) {
        self.own.extend_from_slice(rates);
        self.own_medians
            .push([0, 1].map(|i| Spread::new(rates.iter().map(|pair| pair[i]).collect()).median()));
    }

    /// Returns a line about the last turn.
    pub(crate) fn latest(&self) -> String {
        let own = self.own_medians.last().map(|[single, half]| format!("f32 {single:.0}, bf16 {half:.0}"));
        let peer = self.peer.last().map(|rates| {
            let rates = OF_PEER.iter().zip(rates).map(|(name, rate)| format!("{name} {rate:.0}"));
            format!("PyTorch {}", rates.collect::<Vec<_>>().join(", "))
        });
        own.into_iter().chain(peer).collect::<Vec<_>>().join("; ")
    }

    /// Returns the time of a step in bfloat16 as a share of the time of the step in single precision before it.
    fn shares(&self) -> Spread {
        Spread::new(self.own.iter().map(|[single, half]| single / half).collect())
    }

    /// Returns the ratios of each turn to PyTorch: in single precision, and of bfloat16 to the faster of PyTorch's two.
    fn ratios(&self) -> [Spread; 2] {
        let turns = || self.own_medians.iter().zip(&self.peer);
        [
            Spread::new(turns().map(|(own, peer)| own[0] / peer[0]).collect()),
            Spread::new(turns().map(|(own, peer)| own[1] / peer[1].max(peer[2])).collect()),
        ]
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, spread: Spread| writeln!(f, "  {name:<44} {spread:.0}");
        for (i, name) in ["f32", "bf16"].into_iter().enumerate() {
            line(name, Spread::new(self.own.iter().map(|pair| pair[i]).collect()))?;
        }
        if !self.peer.is_empty() {
            for (i, name) in OF_PEER.into_iter().enumerate() {
                line(
                    &format!("PyTorch {name}"),
                    Spread::new(self.peer.iter().map(|rates| rates[i]).collect()),
                )?;
            }
        }
        writeln!(f, "  {:<44} {:.2}", "time of a bf16 step over an f32 step", self.shares())?;
        if !self.peer.is_empty() {
            let [single, half] = self.ratios();
            writeln!(f, "  {:<44} {single:.2}", "f32 over PyTorch f32")?;
            writeln!(f, "  {:<44} {half:.2}", "bf16 over the faster of autocast and bf16")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_ratios_of_the_same_turn() {
        let mut figures = Figures::default();
        figures.add(&[[100.0, 200.0], [110.0, 220.0], [90.0, 150.0]]);
        assert_eq!(figures.shares().median(), 0.5);
        assert_eq!(figures.latest(), "f32 100, bf16 200");
        let text = figures.to_string();
        assert!(text.contains("time of a bf16 step over an f32 step") && !text.contains("PyTorch"), "{text}");
        figures.peer.push([80.0, 125.0, 160.0]);
        assert_eq!(figures.latest(), "f32 100, bf16 200; PyTorch f32 80, autocast 125, bf16 160");
        let [single, half] = figures.ratios();
        assert_eq!([single.median(), half.median()], [1.25, 1.25]);
        let text = figures.to_string();
        let line = format!("  {:<44} 125 (min 125, max 125, n 1)", "PyTorch autocast");
        assert!(text.lines().any(|found| found == line), "{text}");
    }
}

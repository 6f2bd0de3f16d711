//! The parts that the benches share: the figures of their turns, times of two sides in turn, and the processes over MPI.
//!
//! A bench is a setup, a step and its figures. The sides of a comparison take their steps in turn, because the speed of a
//! machine changes between runs.

use std::error::Error;
use std::fmt;
use std::process::Command;
use std::time::{Duration, Instant};

use pipewright::transport::World;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The outcome of a bench, or of a part of it.
pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The figures of a bench by name, in the order in which they are first added. A figure has a value for each turn.
#[derive(Default)]
pub(crate) struct Figures(Vec<(String, usize, Vec<f64>)>);

impl Figures {
    /// Adds a value of a figure, which is shown with three digits after the point.
    pub(crate) fn add(&mut self, name: &str, value: f64) {
        self.add_with(3, name, value);
    }

    /// Like [`Figures::add`], with this number of digits.
    pub(crate) fn add_with(&mut self, digits: usize, name: &str, value: f64) {
        match self.0.iter_mut().find(|(known, ..)| known == name) {
            Some((_, _, values)) => values.push(value),
            None => self.0.push((name.to_owned(), digits, vec![value])),
        }
    }
}

/// A line for each figure.
impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.0.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
        for (name, digits, values) in &self.0 {
            writeln!(f, "  {name:<width$}  {:.digits$}", Spread::new(values.clone()))?;
        }
        Ok(())
    }
}

/// Returns the seconds of `work`. Its result is dropped after the clock has been read.
pub(crate) fn seconds<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<f64> {
    let start = Instant::now();
    let made = work()?;
    let seconds = start.elapsed().as_secs_f64();
    drop(made);
    Ok(seconds)
}

/// Takes rounds of two sides in turn, after one that does not count, and prints the milliseconds of each side and the
/// ratio of the first to the second.
pub(crate) fn compare(
    rounds: usize,
    names: [&str; 2],
    sides: [&mut dyn FnMut() -> Outcome<f64>; 2],
) -> Outcome {
    let mut figures = Figures::default();
    for round in 0..=rounds {
        let times = [sides[0]()?, sides[1]()?];
        if round > 0 {
            figures.add(&format!("{}, ms", names[0]), times[0] * 1e3);
            figures.add(&format!("{}, ms", names[1]), times[1] * 1e3);
            figures.add("ratio", times[0] / times[1]);
        }
    }
    print!("{figures}");
    Ok(())
}

/// The time that a process waits for others.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `measure` as one of the processes that [`in_processes`] starts. The first one prints its figures.
pub(crate) fn as_process<T: Serialize>(measure: impl FnOnce(World) -> Outcome<T>) -> Outcome {
    let world = World::mpi(PATIENCE)?;
    let is_first = world.own_ranks().any(|rank| rank.get() == 0);
    let figures = measure(world)?;
    if is_first {
        println!("{}", serde_json::to_string(&figures)?);
    }
    Ok(())
}

/// Runs this program in two processes over MPI, and returns the figures of the first.
pub(crate) fn in_processes<T: DeserializeOwned>(arguments: &[impl AsRef<str>]) -> Outcome<T> {
    let output = mpirun(arguments)?;
    serde_json::from_str(&output).map_err(|error| format!("{error} in {output}").into())
}

/// Runs this program in two processes, and returns what they print.
pub(crate) fn mpirun(arguments: &[impl AsRef<str>]) -> Outcome<String> {
    let output = Command::new("mpirun")
        .args(["-n", "2"])
        .arg(std::env::current_exe()?)
        .args(arguments.iter().map(AsRef::as_ref))
        // In a container the only user is often root.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .output()
        .map_err(|error| format!("mpirun: {error}; install MPI first"))?;
    if !output.status.success() {
        return Err(format!("the processes failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// A few measurements, sorted.
pub(crate) struct Spread(Vec<f64>);

impl Spread {
    pub(crate) fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    pub(crate) fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Returns two of the measurements. With a probability of at least 95%, the true median is between them.
    /// Returns `None` for fewer than six measurements: it may be outside all of them with more than 5%.
    pub(crate) fn interval(&self) -> Option<[f64; 2]> {
        let n = self.0.len();
        let low = index_of_bound(n);
        (n >= 6).then(|| [self.0[low], self.0[n - 1 - low]])
    }
}

/// Returns the greatest index below the middle of `n` sorted measurements whose measurement is above the true
/// median with a probability of at most 2.5%. That is the probability that at most `index` of them are below
/// the median.
fn index_of_bound(n: usize) -> usize {
    // A logarithm, because the first terms of a binomial distribution with many measurements are rounded to
    // 0.
    let mut term = n as f64 * 0.5_f64.ln();
    let (mut sum, mut index) = (term.exp(), 0);
    while 2 * (index + 1) < n {
        term += ((n - index) as f64 / (index + 1) as f64).ln();
        sum += term.exp();
        if sum > 0.025 {
            break;
        }
        index += 1;
    }
    index
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.first().unwrap_or(&f64::NAN), self.0.last().unwrap_or(&f64::NAN));
        let digits = f.precision().unwrap_or(3);
        write!(
            f,
            "{:.digits$} (min {first:.digits$}, max {last:.digits$}, n {})",
            self.median(),
            self.0.len()
        )
    }
}

/// Parses arguments as the options of a bench.
#[cfg(test)]
pub(crate) fn parsed<T: clap::Args>(arguments: &[&str]) -> Result<T, clap::Error> {
    let command = T::augment_args(clap::Command::new("bench").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(arguments)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The indexes of published tables for the confidence interval of a median, from 0.
    #[test]
    fn the_true_median_is_between_two_measurements() {
        let indexes = [(0, 0), (1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (40, 13), (60, 21)];
        // One half to the power of 2000 is rounded to 0.
        for (n, expected) in indexes.into_iter().chain([(2000, 955)]) {
            assert_eq!(index_of_bound(n), expected, "{n} measurements");
        }
        let spread = Spread::new((0..20).rev().map(f64::from).collect());
        assert_eq!(spread.interval(), Some([5.0, 14.0]));
        assert_eq!(Spread::new(vec![1.0; 6]).interval(), Some([1.0; 2]));
        assert_eq!(Spread::new(vec![1.0; 5]).interval(), None);
    }

    #[test]
    fn figures_have_a_line_each_in_the_order_of_their_first_values() {
        let mut figures = Figures::default();
        for turn in [1.0, 2.0, 4.0] {
            figures.add("a ratio", turn);
            figures.add_with(0, "rate", 10.0 * turn);
        }
        let expected = "  a ratio  2.000 (min 1.000, max 4.000, n 3)\n  rate     20 (min 10, max 40, n 3)\n";
        assert_eq!(figures.to_string(), expected);
    }
}

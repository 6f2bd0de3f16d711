//! Joins the steps of a long run to groups, each with the mean and the range of a value.

use serde::Serialize;

/// The most groups of a run: more than a chart has pixels.
pub(super) const MOST_GROUPS: usize = 1500;

/// A value in each group of steps. A group without a finite value has no value.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Series {
    pub(super) mean: Vec<Option<f64>>,
    /// The smallest and the largest value of each group; empty if each group is one step.
    pub(super) least: Vec<Option<f64>>,
    pub(super) most: Vec<Option<f64>>,
}

impl Series {
    /// Returns whether any group has a value.
    pub(super) fn has_values(&self) -> bool {
        self.mean.iter().any(Option::is_some)
    }
}

/// Returns the first and the last index of each group of `steps` steps.
pub(super) fn groups(steps: usize) -> Vec<(usize, usize)> {
    let count = steps.min(MOST_GROUPS);
    (0..count).map(|group| (group * steps / count, (group + 1) * steps / count - 1)).collect()
}

/// Returns a value in each group.
pub(super) fn series(groups: &[(usize, usize)], value: impl Fn(usize) -> Option<f64>) -> Series {
    let is_joined = groups.iter().any(|(first, last)| first != last);
    let mut series = Series::default();
    for &(first, last) in groups {
        let values = || (first..=last).filter_map(&value).filter(|value| value.is_finite());
        let count = values().count();
        series.mean.push((count > 0).then(|| values().sum::<f64>() / count as f64));
        if is_joined {
            series.least.push(values().reduce(f64::min));
            series.most.push(values().reduce(f64::max));
        }
    }
    series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_keep_every_step() {
        let found = series(&groups(3), |step| [Some(1.0), None, Some(f64::NAN)][step]);
        assert_eq!(found.mean, [Some(1.0), None, None]);
        assert!(found.least.is_empty() && found.has_values());
    }

    #[test]
    fn long_runs_have_means_and_ranges() {
        let steps = 2 * MOST_GROUPS;
        let found = series(&groups(steps), |step| Some(step as f64));
        assert_eq!((found.mean[1], found.least[1], found.most[1]), (Some(2.5), Some(2.0), Some(3.0)));
        assert_eq!((found.mean.len(), groups(steps)[MOST_GROUPS - 1].1), (MOST_GROUPS, steps - 1));
        assert!(groups(0).is_empty());
    }
}

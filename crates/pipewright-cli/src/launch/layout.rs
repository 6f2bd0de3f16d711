//! [`Layout`]: how a run is distributed over the processes that can be started.

use pipewright_schedule::words::counted;

use pipewright_run::settings::Settings;

/// The number of ranks of the pipeline and of its replicas. The number of tensor ranks does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: u32,
    pub(crate) replicas: u32,
}

impl Layout {
    /// Returns the layout of some settings.
    pub(crate) fn of(settings: &Settings) -> Self {
        Self { ranks: settings.pipeline.ranks, replicas: settings.mesh.data_parallel }
    }

    /// Returns the number of processes that the layout needs; the largest number if there are more.
    pub(crate) fn processes(self, settings: &Settings) -> u32 {
        self.ranks.saturating_mul(self.replicas).saturating_mul(settings.mesh.tensor_parallel)
    }

    /// Returns the layouts of a run that fit into `slots` processes, the best one first: with all replicas,
    /// then with fewer, then one replica with fewer ranks.
    pub(crate) fn candidates(settings: &Settings, slots: u32) -> impl Iterator<Item = Self> {
        let whole = Self::of(settings);
        let fewer_replicas = (1..=whole.replicas).rev().map(move |replicas| Self { replicas, ..whole });
        let fewer_ranks = (1..whole.ranks).rev().map(|ranks| Self { ranks, replicas: 1 });
        fewer_replicas.chain(fewer_ranks).filter(move |layout| layout.processes(settings) <= slots)
    }

    /// Returns the first candidate that `is_valid`.
    pub(crate) fn for_slots(
        settings: &Settings,
        slots: u32,
        is_valid: impl Fn(Self) -> bool,
    ) -> Option<Self> {
        let whole = Self::of(settings);
        Self::candidates(settings, slots).find(|layout| *layout == whole || is_valid(*layout))
    }

    /// Returns the settings that give the run this layout. The cut of the model follows from
    /// `pipeline.partition`.
    pub(crate) fn arguments(self, settings: &Settings) -> Vec<String> {
        let mut arguments = vec![
            format!("pipeline.ranks={}", self.ranks),
            format!("mesh.data_parallel={}", settings.mesh.with_replicas(self.replicas)),
        ];
        if settings.mesh.expert_parallel > 1 {
            let mesh = settings.mesh.clone().of_replicas(self.replicas);
            arguments.push(format!("mesh.expert_parallel={}", mesh.expert_parallel));
        }
        arguments
    }

    /// Returns words about the change from another layout; `None` if they are equal.
    pub(crate) fn change_from(self, other: Self) -> Option<String> {
        let part = |now: u32, before: u32, noun: &str| {
            (now != before).then(|| format!("with {} instead of {before}", counted(now, noun)))
        };
        let parts = [part(self.replicas, other.replicas, "replica"), part(self.ranks, other.ranks, "rank")];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_run::training::load::load_settings;

    /// Returns the ranks and replicas for a number of slots, of a run with 4 ranks and 2 replicas.
    fn check(slots: u32, is_valid: fn(Layout) -> bool, expected: Option<(u32, u32)>) {
        let set = ["pipeline.ranks=4".to_owned(), "mesh.data_parallel=2".to_owned()];
        let settings = load_settings(None, &set).expect("the sample").settings;
        let layout = Layout::for_slots(&settings, slots, is_valid);
        assert_eq!(layout.map(|layout| (layout.ranks, layout.replicas)), expected, "{slots} slots");
    }

    #[test]
    fn replicas_are_given_up_before_ranks() {
        check(9, |_| true, Some((4, 2)));
        check(7, |_| true, Some((4, 1)));
        check(3, |_| true, Some((3, 1)));
        check(3, |layout| layout.ranks != 3, Some((2, 1)));
        check(0, |_| true, None);
    }

    #[test]
    fn fewer_replicas_hold_the_experts_in_groups_that_add_in_the_same_order() {
        let check = |[replicas, experts]: [u32; 2], fewer: u32, expected: u32| {
            let set = [
                "pipeline.microbatches=72".to_owned(),
                format!("mesh.data_parallel={replicas}"),
                format!("mesh.expert_parallel={experts}"),
            ];
            let settings = load_settings(None, &set).expect("the sample").settings;
            let layout = Layout { ranks: 1, replicas: fewer };
            let expected = [
                "pipeline.ranks=1".to_owned(),
                format!("mesh.data_parallel={fewer}"),
                format!("mesh.expert_parallel={expected}"),
            ];
            assert_eq!(layout.arguments(&settings), expected, "{replicas} {experts}");
            let mesh = settings.mesh.of_replicas(fewer).mesh(1);
            assert!(mesh.expert_groups().is_some(), "{replicas} {experts}: {mesh:?}");
        };
        check([8, 4], 8, 4);
        check([8, 4], 4, 4);
        check([8, 4], 6, 2);
        check([8, 4], 2, 2);
        check([8, 4], 3, 1);
        // All replicas form one group, of any size.
        check([6, 6], 6, 6);
        check([6, 6], 3, 3);
        check([6, 6], 4, 2);
        check([12, 12], 9, 1);
    }

    #[test]
    fn a_change_is_stated() {
        let layout = |ranks, replicas| Layout { ranks, replicas };
        assert_eq!(layout(4, 1).change_from(layout(4, 2)).as_deref(), Some("with 1 replica instead of 2"));
        assert_eq!(
            layout(2, 1).change_from(layout(4, 2)).as_deref(),
            Some("with 1 replica instead of 2 and with 2 ranks instead of 4")
        );
        assert_eq!(layout(4, 1).change_from(layout(4, 1)), None);
    }
}

//! [`LostHosts`]: the hosts that a run has lost, and how long each is left out.
//!
//! A host may come and go. After its first loss, the run uses it again as soon as it answers. After the
//! second one, it is left out for a minute although it answers, and after each further loss for twice as
//! long, at most a day. If an hour has passed since that time, the earlier losses no longer count.

use std::time::{Duration, Instant};

/// The time for which a host is left out after its second loss.
const FIRST: Duration = Duration::from_secs(60);
/// The longest time.
const LONGEST: Duration = Duration::from_secs(86_400);
/// The time between two losses after which the earlier one no longer counts.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// The hosts that were lost.
#[derive(Debug, Default)]
pub(super) struct LostHosts(Vec<LostHost>);

#[derive(Debug)]
struct LostHost {
    name: String,
    losses: u32,
    /// The time until which the host is left out.
    until: Instant,
}

impl LostHosts {
    /// Notes that the run has lost these hosts, which it used.
    pub(super) fn note(&mut self, names: &[String], now: Instant) {
        for name in names {
            let index = self.0.iter().position(|host| host.name == *name).unwrap_or_else(|| {
                self.0.push(LostHost { name: name.clone(), losses: 0, until: now });
                self.0.len() - 1
            });
            let host = &mut self.0[index];
            if now.saturating_duration_since(host.until) >= FORGOTTEN {
                host.losses = 0;
            }
            host.losses += 1;
            let time = match host.losses.checked_sub(2) {
                None => Duration::ZERO,
                Some(doublings) => FIRST.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST),
            };
            host.until = now + time;
        }
    }

    /// Returns the names of the hosts that are left out.
    pub(super) fn left_out(&self, now: Instant) -> Vec<String> {
        self.0.iter().filter(|host| now < host.until).map(|host| host.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks for how many seconds a host is left out after the last of the losses at these seconds.
    fn check(losses: &[u64], expected: u64) {
        let start = Instant::now();
        let (mut lost, name) = (LostHosts::default(), "b".to_owned());
        losses.iter().for_each(|&at| lost.note(std::slice::from_ref(&name), start + Duration::from_secs(at)));
        let last = start + Duration::from_secs(*losses.last().expect("a loss"));
        let is_left_out = |seconds| !lost.left_out(last + Duration::from_secs(seconds)).is_empty();
        assert!(!is_left_out(expected) && (expected == 0 || is_left_out(expected - 1)), "{losses:?}");
    }

    #[test]
    fn a_host_that_is_lost_again_is_left_out_for_longer() {
        check(&[0], 0);
        check(&[0, 10], 60);
        check(&[0, 10, 100], 120);
        check(&[0, 10, 100, 300], 240);
        let many: Vec<u64> = (0..40).map(|loss| loss * 60).collect();
        check(&many, 86_400);
    }

    #[test]
    fn losses_of_an_hour_ago_do_not_count() {
        check(&[0, 3599], 60);
        check(&[0, 3600], 0);
        check(&[0, 10, 10 + 60 + 3600], 0);
    }

    #[test]
    fn hosts_are_counted_one_by_one() {
        let now = Instant::now();
        let mut lost = LostHosts::default();
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        lost.note(&names(&["a", "b"]), now);
        lost.note(&names(&["b"]), now);
        assert_eq!(lost.left_out(now), ["b"]);
    }
}

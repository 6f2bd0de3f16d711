//! Plans with replicas of unlike ranks: the ranks and the share of each replica, judged by the simulation of the tests for
//! each replica by itself.

use pipewright_schedule::Rank;
use pipewright_schedule::mesh::Mesh;
use pipewright_schedule::plan::{PlanChoice, PlanReport, PlanRequest, plan, predict};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};

use crate::instances::{self, Instance};
use crate::unlike::{Stages, planned, rows_of};

/// Checks the best plan: the ranks of its replicas, their times, their memory, and the prediction of its parts. Returns the
/// time of the slowest replica, which does not add gradients, over the time of the step.
fn check_plan(profile: &Profile, request: &PlanRequest, report: &PlanReport) -> f64 {
    let best = &report.plans[0];
    let (replicas, ranks) = (best.mesh.data as usize, best.schedule.ranks() as usize);
    assert_eq!((best.machines.len(), Some(best.mesh.data)), (replicas * ranks, request.data_parallel));
    let mut used: Vec<Rank> = best.machines.clone();
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), best.machines.len(), "each rank once: {:?}", best.machines);
    let rows = best.rows_of_replicas();
    assert_eq!(rows.iter().sum::<u32>(), best.microbatch_rows * best.mesh.data, "{rows:?}");
    assert_eq!(best.microbatches() * best.microbatch_rows, request.microbatches * request.microbatch_rows);
    assert!(report.lower_bound_s <= best.step_s, "{} above {}", report.lower_bound_s, best.step_s);
    let placement = best.schedule.placement();
    let starts: Vec<usize> = [0]
        .into_iter()
        .chain(best.boundaries.iter().copied())
        .chain([profile.layer_count() as usize])
        .collect();
    let layers = profile.each_layer().cloned().collect();
    let single = Profile { layers, ..profile.clone() };
    let time = |replica: usize| {
        let machines = &best.machines[replica * ranks..][..ranks];
        let scale = f64::from(rows[replica]) / f64::from(profile.rows);
        let machines = placement.all_stages().map(|stage| machines[placement.rank_of(stage).index()].index());
        let stages = Stages { profile: &single, starts: starts.clone(), machines: machines.collect(), scale };
        stages.step(&rows_of(&best.schedule))
    };
    let slowest = (0..replicas).map(time).fold(0.0, f64::max);
    if !best.recomputes() {
        assert!(slowest <= best.step_s * (1.0 + 1e-9), "{slowest} above {}", best.step_s);
        assert!(report.lower_bound_s <= slowest * (1.0 + 1e-9), "{} above {slowest}", report.lower_bound_s);
    }
    for (at, machine) in best.machines.iter().enumerate() {
        let limit = profile.ranks.get(machine.index()).and_then(|rank| rank.memory_bytes);
        let peak = best.peak_bytes[at % ranks];
        assert!(limit.is_none_or(|limit| peak <= limit), "rank {machine} holds {peak} of {limit:?}");
    }
    let choice = PlanChoice {
        boundaries: best.boundaries.clone(),
        recompute: best.recompute.clone(),
        mesh: best.mesh,
        microbatch_rows: best.microbatch_rows,
        batch_shares: best.batch_shares.clone(),
        ..PlanChoice::default()
    };
    let prediction = predict(&best.used_ranks_of(profile), &best.schedule, &choice).expect("a plan");
    assert!((prediction.step_s() - best.step_s).abs() <= 1e-9 * best.step_s);
    assert_eq!(report.machines.len(), request.ranks as usize);
    for (machine, used) in report.machines.iter().enumerate() {
        let rank = best.machines.iter().position(|it| it.index() == machine);
        assert_eq!((used.machine.index(), used.rank.map(Rank::index)), (machine, rank));
        assert!(used.step_if_twice_as_fast_s <= best.step_s && used.busy_s <= best.step_s);
    }
    slowest / best.step_s
}

/// Plans ranks of these speeds as replicas. Returns the plan's shares, its ranks, and its gap.
fn check(speeds: &[f64], replicas: u32, rows: u32, expected: &[u32]) -> PlanReport {
    let mut asked = None;
    let report = planned(speeds, 8, |profile, request| {
        (request.data_parallel, request.microbatch_rows) = (Some(replicas), rows);
        (request.microbatches, request.larger_microbatches) = (16 * replicas, rows > 1);
        profile.rows = rows;
        asked = Some((profile.clone(), request.clone()));
    });
    let report = report.expect("a plan");
    let (profile, request) = asked.expect("it is planned");
    let share = check_plan(&profile, &request, &report);
    assert!(share > 0.99, "{speeds:?}: {share}");
    assert_eq!(report.plans[0].batch_shares, expected, "{speeds:?}");
    report
}

#[test]
fn a_slow_replica_gets_fewer_rows() {
    let report = check(&[3.0, 1.0], 2, 4, &[3, 1]);
    assert!(report.gap() < 0.01, "{}", report.gap());
    let report = check(&[1.0, 4.0, 1.0], 3, 8, &[4, 1, 1]);
    assert_eq!(report.plans[0].machines[0], Rank::new(1));
    assert!(report.gap() < 0.01, "{}", report.gap());
    // Twice as fast, it would get more rows.
    assert!(report.machines[1].step_if_twice_as_fast_s < 0.8 * report.plans[0].step_s);
    // A row cannot be divided, and microbatches stay as small as they are.
    check(&[3.0, 1.0], 2, 1, &[]);
}

#[test]
fn replicas_have_ranks_of_all_speeds_or_shares() {
    // One replica has both fast ranks.
    let report = check(&[2.0, 1.0, 2.0, 1.0], 2, 6, &[2, 1]);
    assert!(report.gap() < 0.1, "{}", report.gap());
    // A rank is left over.
    let report = check(&[1.0, 1.0, 0.25, 1.0, 1.0], 2, 2, &[]);
    assert_eq!(
        (report.machines[2].rank, report.machines[2].step_without_s),
        (None, Some(report.plans[0].step_s))
    );
}

#[test]
fn random_clusters_have_sound_plans_with_replicas() {
    let mut unequal = 0;
    for seed in 0..12 {
        let Instance { profile, ranks, microbatches, .. } = instances::unlike(seed);
        for replicas in [2, 3].into_iter().filter(|&replicas| replicas <= ranks) {
            let request = PlanRequest {
                ranks,
                microbatches: microbatches * replicas,
                microbatch_rows: 4,
                data_parallel: Some(replicas),
                effort: PlanRequest::EFFORT / 40,
                ..PlanRequest::default()
            };
            let Ok(report) = plan(&profile, &request, &mut || true) else { continue };
            check_plan(&profile, &request, &report);
            unequal += usize::from(!report.plans[0].batch_shares.is_empty());
        }
    }
    assert!(unequal > 5, "{unequal} plans have unequal shares");
}

#[test]
fn replicas_that_cannot_be_are_refused() {
    let check = |replicas: u32, microbatches: u32, expected: &str| {
        let error = planned(&[1.0, 2.0], 8, |_, request| {
            (request.data_parallel, request.microbatches) = (Some(replicas), microbatches);
        });
        let error = error.expect_err("an error").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(3, 6, "3 replicas need as many ranks, and there are 2 ranks; use fewer replicas");
    check(
        2,
        5,
        "2 replicas cannot share 5 microbatches; use a number of microbatches that is a multiple of the replicas",
    );
}

#[test]
fn shares_that_do_not_fit_the_replicas_are_refused() {
    let link = LinkProfile::new(0.0, 1e9);
    let profile = Profile { link, layers: vec![instances::block("layer", 1.0)], ..Profile::default() };
    let schedule = pipewright_schedule::generate(
        "gpipe",
        &pipewright_schedule::ScheduleSpec {
            ranks: 1,
            microbatches: 2,
            ..pipewright_schedule::ScheduleSpec::default()
        },
    );
    let schedule = schedule.expect("a schedule");
    let check = |shares: &[u32], microbatch_rows: u32, expected: &str| {
        let choice = PlanChoice {
            mesh: Mesh { data: 2, ..Mesh::default() },
            microbatch_rows,
            batch_shares: shares.to_vec(),
            ..PlanChoice::default()
        };
        let error = predict(&profile, &schedule, &choice).expect_err("an error").to_string();
        assert_eq!(error, expected);
    };
    check(&[3], 2, "there is 1 share of the batch, and there are 2 replicas; give one for each replica");
    check(&[1; 3], 2, "there are 3 shares of the batch, and there are 2 replicas; give one for each replica");
    check(&[3, 0], 2, "replica 1 has the share 0 of the batch; give each replica a share from 1");
    let uneven = |rows: &str, shares: &str, step: &str| {
        format!(
            "microbatches of {rows} on average do not have whole numbers of rows in each replica with the shares {shares} of the \
             batch; use a multiple of {step}, or other shares"
        )
    };
    check(&[3, 1], 3, &uneven("3 rows", "[3, 1]", "2 rows"));
    check(&[6, 2], 1, &uneven("1 row", "[6, 2]", "2 rows"));
    check(&[u32::MAX, 1], u32::MAX, &uneven("4294967295 rows", "[4294967295, 1]", "2147483648 rows"));
    let shared = |shares: &[u32]| PlanChoice {
        mesh: Mesh { data: 2, ..Mesh::default() },
        microbatch_rows: 2,
        batch_shares: shares.to_vec(),
        ..PlanChoice::default()
    };
    let step = |shares: &[u32]| predict(&profile, &schedule, &shared(shares)).expect("a prediction").step_s();
    assert_eq!(step(&[6, 2]), step(&[3, 1]));
}

/// The replica with the most rows exchanges the most tokens, whatever its speed.
#[test]
fn exchanges_of_tokens_have_the_rows_of_the_largest_share() {
    let layer = LayerProfile { exchange_s: 2.0, ..instances::block("layer", 1.0) };
    let profile = Profile { layers: vec![layer], ..Profile::default() };
    let merged = profile.of_replicas(&[vec![Rank::new(0)], vec![Rank::new(1)]], &[3, 1]);
    assert_eq!(merged.layers[0].exchange_s, 3.0);
}

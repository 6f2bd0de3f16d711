//! The numbers that the search and the bounds are tuned with, and what each of them trades.
//!
//! None of them changes what is true: a plan has the time of the simulator, and a bound is valid for all
//! plans, whatever the values. They trade work against smaller gaps. The values of limits follow from the
//! work that they allow; the others were chosen by trials on the random models of `examples/plans`, unless a
//! field says otherwise.

/// The share by which sums of times may differ by rounding: much more than `f64` needs, and much less than
/// any gap.
pub(super) const ROUNDING: f64 = 1e-9;

/// All numbers, by the part of the planner that uses them.
#[derive(Debug, Clone, Default)]
pub(super) struct Tuning {
    pub(super) search: SearchTuning,
    pub(super) work: WorkUnits,
    pub(super) pool: PoolTuning,
    pub(super) walk: WalkTuning,
    pub(super) annealing: AnnealingTuning,
    pub(super) polish: PolishTuning,
    pub(super) best_cut: BestCutTuning,
    pub(super) bound: BoundTuning,
}

/// The phases of the search.
#[derive(Debug, Clone)]
pub(super) struct SearchTuning {
    /// The gap below which the search ends. A smaller one takes all work for gains that nobody measures in a
    /// run; it is the accuracy of the bounds.
    pub(super) good_enough: f64,
    /// The share by which times must differ to count as different. It is above the rounding of sums, so that
    /// an order that is faster only by rounding does not replace one that needs less memory.
    pub(super) rounding: f64,
    /// The share by which an order by rules may be slower than the limit and is still justified. A larger one
    /// justifies more orders in vain; justifying shortens most orders by 1% to 4%.
    pub(super) slower: f64,
    /// The most plans of each number of stages that are kept for later changes: more starts for `polish.rs`,
    /// and more memory.
    pub(super) promising: usize,
    /// The most computations of a plan that is kept for later changes. It limits the memory of the kept plans
    /// to about 13 MB for each number of stages.
    pub(super) largest: usize,
    /// The most computations of a step with one stage per rank. Larger divisions take too much memory, and
    /// more time than a search has.
    pub(super) most_computations: u128,
    /// The share by which the bound of a head in more parts must be lower, so that it is preferred: fewer
    /// parts have fewer messages, which the simple bound hardly counts.
    pub(super) same_bound: f64,
    /// The plans of a division get at least one part in this many of the work that is left. More for one
    /// division leaves less for the others.
    pub(super) share: u64,
    /// They get at least the work in which rules make this many plans with the most stages, for each
    /// microbatch per rank. Fewer leave models with many stages with too few plans by rules.
    pub(super) plans: u64,
    /// The largest number of choices of recomputation that are all tried. Six whole stages have that many.
    pub(super) all_choices: u64,
    /// Shares of the microbatches that are in flight in 1F1B, the most promising first. For each share, stages
    /// recompute as few layers as they can to hold so many. More shares leave fewer rules for each.
    pub(super) in_flight: [f64; 4],
}

/// The work that the search is charged for each operation, in choices of the rules. They are ratios of times
/// that were measured.
#[derive(Debug, Clone)]
pub(super) struct WorkUnits {
    /// The computations of a given order that are evaluated in the time of one choice.
    pub(super) evaluated: u64,
    /// A change of a walk, for each stage of a rank.
    pub(super) walked: u64,
    /// The making of a schedule for its costs, for each of its computations.
    pub(super) made: u64,
    /// The justification of an order with the evaluation of the result, for each computation.
    pub(super) justified: u64,
    /// The choice of what an order must recompute, for each computation.
    pub(super) refitted: u64,
}

/// The cuts that the search begins with.
#[derive(Debug, Clone)]
pub(super) struct PoolTuning {
    /// The largest number of cuts of an arrangement that are all tried. More take more time than walks that
    /// find the best.
    pub(super) all_cuts: u64,
    /// The number of walks and of descents that look for balanced cuts of an arrangement.
    pub(super) walks: u64,
    /// The attempts of a descent.
    pub(super) descents: usize,
    /// The halvings that find the bound of a round in a descent: an accuracy of one in 16,000.
    pub(super) halvings: u32,
    /// The steps of a walk with given ranks, for each stage.
    pub(super) walk_steps: usize,
    /// The most steps of such a walk, so that models with hundreds of stages leave work for plans.
    pub(super) most_walk_steps: usize,
    /// Such a walk has at most one step for each this many units of the work that is left, so that a small
    /// search leaves most of it to the plans.
    pub(super) walk_share: u64,
    /// The steps of all walks in which rounds may visit the ranks in any order, as a multiple of the steps of
    /// one walk with given ranks.
    pub(super) free_steps: usize,
    /// If there are more than the fewest of them, each has at least so many steps for each ordered pair of
    /// stages. Many short walks find better cuts than a few long ones, but a walk over many stages must not
    /// end too early.
    pub(super) free_steps_of_pair: usize,
    /// The fewest and the most of these walks.
    pub(super) free_walks: [usize; 2],
}

/// The walk that balances cuts.
#[derive(Debug, Clone)]
pub(super) struct WalkTuning {
    /// The share by which a step may be worse, at first. A larger share lets the walk cross more bad cuts to
    /// reach a better one; a smaller share balances sooner.
    pub(super) tolerance: f64,
    /// The part of a delay by which a rank counts as slower: the time by which its longest stage (`F + I`)
    /// exceeds the mean of all stages, for as many microbatches as there are ranks. That many wait for the
    /// stage while the pipeline fills.
    pub(super) long_stage: f64,
}

impl WalkTuning {
    /// The power of each rank's bound in the sum. A higher one is nearer to the maximum, but rewards lighter
    /// ranks less. It is a constant, because products replace a power that the compiler knows.
    pub(super) const POWER: i32 = 24;
}

/// The annealing of plans by rules.
#[derive(Debug, Clone)]
pub(super) struct AnnealingTuning {
    /// The most episodes. The work usually ends first.
    pub(super) episodes: usize,
    /// The attempts of an episode for each stage. Fewer begin more often from another cut.
    pub(super) tries: usize,
    /// The most random changes of a layout that is then balanced again.
    pub(super) changes: usize,
    /// The steps of the walk that balances it.
    pub(super) balancing: usize,
    /// In one of so many of these walks, stages may change their ranks.
    pub(super) free: usize,
    /// The share by which a plan may become slower at the beginning of an episode.
    pub(super) worse: f64,
}

/// The changes of the best plans.
#[derive(Debug, Clone)]
pub(super) struct PolishTuning {
    /// The share by which a change may make the plan slower at first, times a random number.
    pub(super) worse: f64,
    /// One of so many changes moves boundaries. They change all times, so they help less often than moves.
    pub(super) boundaries: usize,
    /// The most boundaries that one change moves.
    pub(super) most_boundaries: usize,
    /// The farthest that a computation moves within its row.
    pub(super) reach: usize,
    /// The most changes that are tried in a round, for each computation of the order. The work of large
    /// models ends first.
    pub(super) tries: usize,
    /// The most plans that are changed. More begin with more variety, and each gets less work.
    pub(super) starts: usize,
    /// Only plans that take less than this many times the time of the best plan are changed.
    pub(super) near: f64,
}

/// The search of the best cut for a given schedule.
#[derive(Debug, Clone)]
pub(super) struct BestCutTuning {
    /// The largest number of cuts that are all tried.
    pub(super) all_cuts: u64,
    /// The steps of the walk to a first cut, for each stage. There is one walk only, so it is longer than the
    /// walks of a plan.
    pub(super) walk_steps: usize,
}

/// The bounds.
#[derive(Debug, Clone)]
pub(super) struct BoundTuning {
    /// The accuracy of the bisections, as a share. The bound is lower than what can be proved by at most
    /// that.
    pub(super) accuracy: f64,
    /// The largest number of cuts with one stage per rank that are all tried. More take longer than the
    /// bisection.
    pub(super) most_cuts: u64,
    /// The largest number of parts of an item that a unit is. Each part takes another pass over the layers.
    pub(super) parts: u32,
    pub(super) idle: IdleTuning,
    pub(super) pairs: PairsTuning,
}

/// The bound from idle time (`bound/idle.rs`).
#[derive(Debug, Clone)]
pub(super) struct IdleTuning {
    /// The most pieces of cuts for which the bound is computed: about a second on one core.
    pub(super) most_pieces: usize,
    /// The share by which the bound is raised in a step. Larger steps keep more pieces, smaller ones are more
    /// steps.
    pub(super) raise: f64,
    /// A part contains the cuts whose longest forward is at most this many times its smallest one. Smaller
    /// parts prove more, and there are more of them.
    pub(super) part: f64,
    /// The first part reaches at least to this share of `F` of all layers, so that there are few parts of
    /// cuts with short forwards.
    pub(super) shortest: f64,
    /// The most changes of the weights of a part. The search usually ends for lack of progress before.
    pub(super) changes: usize,
    /// The rate at which weights follow the sums, at first.
    pub(super) rate: f64,
    /// The rate is half as large after this many changes.
    pub(super) half_rate: f64,
    /// The smallest weight, so that a weight can grow again.
    pub(super) smallest_weight: f64,
    /// The search for weights ends if the bound does not grow by this share within `patience` changes. It is
    /// a fifth of the accuracy of the bisections.
    pub(super) progress: f64,
    /// The number of these changes.
    pub(super) patience: usize,
    /// The most levels of the longest forward so far. Each level is another copy of the table.
    pub(super) levels: usize,
    /// The most rows of the table, if there is more than one level.
    pub(super) rows: usize,
    /// The last shared time is this share of `I` of all layers after the earliest first backward.
    pub(super) last: f64,
}

/// The bound for two stages per rank (`bound/pairs.rs`).
#[derive(Debug, Clone)]
pub(super) struct PairsTuning {
    /// The most beginnings of cuts that are visited for a time.
    pub(super) visits: usize,
    /// The most of them that are visited for all times together. With 16 ranks, that takes a tenth of a
    /// second.
    pub(super) all_visits: usize,
}

impl Default for SearchTuning {
    fn default() -> Self {
        Self {
            good_enough: 5e-4,
            rounding: 1e-12,
            slower: 0.02,
            promising: 16,
            largest: 1 << 16,
            most_computations: 1 << 21,
            same_bound: 2e-3,
            share: 6,
            plans: 125,
            all_choices: 64,
            in_flight: [1.0, 2.0, 1.5, 0.6],
        }
    }
}

impl Default for WorkUnits {
    fn default() -> Self {
        Self { evaluated: 5, walked: 4, made: 10, justified: 3, refitted: 6 }
    }
}

impl Default for PoolTuning {
    fn default() -> Self {
        Self {
            all_cuts: 300,
            walks: 2,
            descents: 150,
            halvings: 14,
            walk_steps: 750,
            most_walk_steps: 20_000,
            walk_share: 1_000,
            free_steps: 12,
            free_steps_of_pair: 10,
            free_walks: [2, 32],
        }
    }
}

impl Default for WalkTuning {
    fn default() -> Self {
        Self { tolerance: 2.0, long_stage: 0.3 }
    }
}

impl Default for AnnealingTuning {
    fn default() -> Self {
        Self { episodes: 100, tries: 20, changes: 8, balancing: 120, free: 5, worse: 0.01 }
    }
}

impl Default for PolishTuning {
    fn default() -> Self {
        Self {
            worse: 0.002,
            boundaries: 10,
            most_boundaries: 8,
            reach: 12,
            tries: 1200,
            starts: 8,
            near: 1.1,
        }
    }
}

impl Default for BestCutTuning {
    fn default() -> Self {
        Self { all_cuts: 3_000, walk_steps: 1_500 }
    }
}

impl Default for BoundTuning {
    fn default() -> Self {
        Self {
            accuracy: 5e-4,
            most_cuts: 6_000,
            parts: 3,
            idle: IdleTuning::default(),
            pairs: PairsTuning::default(),
        }
    }
}

impl Default for IdleTuning {
    fn default() -> Self {
        Self {
            most_pieces: 100_000,
            raise: 0.02,
            part: 1.12,
            shortest: 1e-3,
            changes: 60,
            rate: 40.0,
            half_rate: 10.0,
            smallest_weight: 1e-9,
            progress: 1e-4,
            patience: 10,
            levels: 6,
            rows: 15_000,
            last: 0.65,
        }
    }
}

impl Default for PairsTuning {
    fn default() -> Self {
        Self { visits: 300_000, all_visits: 1_000_000 }
    }
}

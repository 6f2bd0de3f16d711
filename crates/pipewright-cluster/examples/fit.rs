//! Fits the constants of machines and stacks to files of published runs, and compares the predictions with them:
//! `cargo run --release -p pipewright-cluster --example fit -- RUNS.toml...`.
//!
//! A constant belongs to all runs on a family of machines, or to all runs of a stack. A deviation from what
//! microbenchmarks measure costs as much as an error of 3%, so few runs do not move a constant far. Without a row,
//! the others fit the constants and predict it; without a source, the runs of all other sources do. Every fit starts
//! from the expected values, which no run has changed. The times between kernels, the ring of attention and the bytes of
//! memory are not fitted.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::collections::BTreeSet;
use std::error::Error;

use pipewright_cluster::implementation::Stack;
use pipewright_cluster::machine::Constants;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{PredictError, predict};
use pipewright_cluster::published::{self, Run};
use pipewright_cluster::setting::Setting;
use pipewright_cluster::stack_constants::{StackConstants, Stacks};

/// A family of machines that share constants: the beginnings of their names, the values that are expected, and
/// their tolerances. A tolerance of 0 means that the constant is not fitted.
struct Family {
    name: &'static str,
    machines: &'static [&'static str],
    expected: Constants,
    tolerances: [f64; 8],
}

/// Values that microbenchmarks measure: large products of cuBLAS and Transformer Engine, FlashAttention, STREAM,
/// nccl-tests. Blackwell's chips of the second kind have twice the units for exponentials, so attention is not shared.
fn families() -> [Family; 5] {
    let usual = Constants::EXPECTED;
    let blackwell = Constants { product_fp8: 0.56, attention: 0.56, memory: 0.74, ..usual };
    [
        Family {
            name: "A100",
            machines: &["A100"],
            expected: Constants { product: 0.78, product_fp8: 0.6, attention: 0.55, ..usual },
            tolerances: [0.04, 0.0, 0.0, 0.0, 0.05, 0.06, 0.0, 0.0],
        },
        // Less power and memory of an older kind.
        Family {
            name: "H100 500 W",
            machines: &["H100 96"],
            expected: Constants { product: 0.52, product_fp8: 0.48, attention: 0.5, ..usual },
            tolerances: [0.06, 0.06, 0.0, 0.06, 0.05, 0.06, 0.0, 0.0],
        },
        // NeMo's runs hide a part of the tensor group's communication behind products.
        Family {
            name: "H100",
            machines: &["H100 80", "H200", "H800"],
            expected: Constants { hidden: 0.4, ..usual },
            tolerances: [0.05, 0.05, 0.0, 0.07, 0.05, 0.06, 0.2, 0.0],
        },
        Family {
            name: "Blackwell",
            machines: &["B200", "GB200"],
            expected: blackwell,
            tolerances: [0.05, 0.04, 0.05, 0.06, 0.05, 0.06, 0.0, 0.0],
        },
        Family {
            name: "Blackwell Ultra",
            machines: &["B300", "GB300"],
            expected: Constants { attention: 0.7, ..blackwell },
            tolerances: [0.05, 0.04, 0.05, 0.06, 0.05, 0.06, 0.0, 0.0],
        },
    ]
}

/// A constant of a stack that is fitted, with its tolerance.
struct StackConstant {
    name: &'static str,
    tolerance: f64,
    least: f64,
    most: f64,
    get: fn(&mut StackConstants) -> &mut f64,
}

const STACK_CONSTANTS: [StackConstant; 6] = [
    StackConstant {
        name: "product",
        tolerance: 0.04,
        least: 0.7,
        most: 1.0,
        get: |stack| &mut stack.product,
    },
    StackConstant {
        name: "narrow_product",
        tolerance: 0.04,
        least: 0.7,
        most: 1.0,
        get: |stack| &mut stack.narrow_product,
    },
    StackConstant {
        name: "attention",
        tolerance: 0.05,
        least: 0.4,
        most: 1.0,
        get: |stack| &mut stack.attention,
    },
    StackConstant {
        name: "hidden_tensor",
        tolerance: 0.15,
        least: 0.0,
        most: 0.95,
        get: |stack| &mut stack.hidden_tensor,
    },
    StackConstant {
        name: "hidden_experts",
        tolerance: 0.1,
        least: 0.0,
        most: 0.95,
        get: |stack| &mut stack.hidden_experts,
    },
    StackConstant {
        name: "host_kernel",
        tolerance: 2e-6,
        least: 3e-6,
        most: 2e-5,
        get: |stack| &mut stack.host_kernel,
    },
];

/// The squared error that a deviation of one tolerance costs.
const PENALTY: f64 = 0.03 * 0.03;
/// Rounds of the search. Each tries both directions of every constant, and halves the steps if none helps.
const ROUNDS: u32 = 12;
/// The computations above which a pipeline of 1F1B has a closed form, so that a fit takes seconds.
const SIMULATED: u64 = 1 << 10;

/// The constants of all families and stacks.
#[derive(Clone)]
struct Fit {
    machines: Vec<Constants>,
    stacks: Stacks,
}

/// Where a constant is in a fit.
#[derive(Clone, Copy)]
enum Place {
    Machine(usize, usize),
    Stack(Stack, usize),
}

impl Place {
    /// Returns whether the prediction of a run depends on the constant.
    fn concerns(self, run: &Run) -> bool {
        match self {
            Self::Machine(family, _) => families()[family].has(run),
            Self::Stack(stack, _) => run.layout.implementation.stack == stack,
        }
    }
}

impl Family {
    fn has(&self, run: &Run) -> bool {
        self.machines.iter().any(|start| run.machine.name.starts_with(start))
    }
}

impl Fit {
    /// The constants before a fit.
    fn expected() -> Self {
        let machines = families().iter().map(|family| family.expected).collect();
        Self { machines, stacks: Stacks::EXPECTED }
    }

    /// The constants that are fitted. A machine's constants are the rates of Megatron, so three of Megatron's are 1.
    fn places() -> Vec<Place> {
        let machine = |(index, family): (usize, &Family)| {
            let fitted = family.tolerances.into_iter().enumerate().filter(|(_, tolerance)| *tolerance > 0.0);
            fitted.map(|(constant, _)| Place::Machine(index, constant)).collect::<Vec<_>>()
        };
        let families = families();
        let machines = families.iter().enumerate().flat_map(machine);
        let stacks = Stack::NAMES.into_iter().flat_map(|(_, stack)| {
            let is_free = move |index: &usize| stack != Stack::Megatron || *index >= 3;
            (0..STACK_CONSTANTS.len()).filter(is_free).map(move |index| Place::Stack(stack, index))
        });
        machines.chain(stacks).collect()
    }

    /// Changes a constant by some tolerances.
    fn moved(&self, place: Place, tolerances: f64) -> Self {
        let mut moved = self.clone();
        match place {
            Place::Machine(family, constant) => {
                let range = Constants::RANGES[constant];
                let mut values = moved.machines[family].to_array();
                let step = tolerances * families()[family].tolerances[constant];
                values[constant] = (values[constant] + step).clamp(range.least, range.most);
                moved.machines[family] = Constants::from_array(values);
            }
            Place::Stack(stack, constant) => {
                let constant = &STACK_CONSTANTS[constant];
                let value = (constant.get)(moved.stacks.of_mut(stack));
                *value = (*value + tolerances * constant.tolerance).clamp(constant.least, constant.most);
            }
        }
        moved
    }

    /// The squared deviations from what is expected, in tolerances.
    fn deviation(&self) -> f64 {
        let (mut expected, mut own) = (Self::expected(), self.clone());
        let deviation = |place: Place| match place {
            Place::Machine(family, constant) => {
                let values = [&own, &expected].map(|fit| fit.machines[family].to_array()[constant]);
                (values[0] - values[1]) / families()[family].tolerances[constant]
            }
            Place::Stack(stack, constant) => {
                let StackConstant { get, tolerance, .. } = STACK_CONSTANTS[constant];
                let values = [&mut own, &mut expected].map(|fit| *get(fit.stacks.of_mut(stack)));
                (values[0] - values[1]) / tolerance
            }
        };
        Self::places().into_iter().map(deviation).map(|deviation| deviation * deviation).sum()
    }

    /// Returns the predicted over the measured time of a run, minus 1.
    fn error(&self, run: &Run, programs: &mut Programs) -> Result<f64, PredictError> {
        let mut machine = run.machine.clone();
        if let Some(family) = families().iter().position(|family| family.has(run)) {
            machine.constants = self.machines[family];
        }
        machine.stacks = self.stacks;
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &machine };
        let seconds = predict(&setting, programs)?.seconds;
        Ok(seconds / run.step_seconds - 1.0)
    }

    /// Returns the squared error of a run, beyond the uncertainty that rounding leaves.
    fn loss(&self, run: &Run, programs: &mut Programs) -> Result<f64, PredictError> {
        let error = self.error(run, programs)?;
        let beyond = (error.abs() - run.uncertainty).max(0.0).copysign(error);
        Ok(beyond.ln_1p().powi(2))
    }

    /// Returns the constants that fit `runs` best.
    fn of(runs: &[&Run], programs: &mut Programs) -> Result<Self, PredictError> {
        let mut best = Self::expected();
        let mut losses = runs.iter().map(|run| best.loss(run, programs)).collect::<Result<Vec<_>, _>>()?;
        let total = |fit: &Self, losses: &[f64]| losses.iter().sum::<f64>() + PENALTY * fit.deviation();
        let mut step = 0.5;
        for _ in 0..ROUNDS {
            let before = total(&best, &losses);
            for place in Self::places() {
                for direction in [step, -step] {
                    let tried = best.moved(place, direction);
                    let mut tried_losses = losses.clone();
                    for (run, loss) in runs.iter().zip(&mut tried_losses) {
                        if place.concerns(run) {
                            *loss = tried.loss(run, programs)?;
                        }
                    }
                    if total(&tried, &tried_losses) < total(&best, &losses) {
                        (best, losses) = (tried, tried_losses);
                    }
                }
            }
            if before - total(&best, &losses) < 1e-3 * before {
                step /= 2.0;
            }
            if step < 0.1 {
                break;
            }
        }
        Ok(best)
    }

    fn print(mut self) {
        for (family, constants) in families().iter().zip(&self.machines) {
            println!("{}", family.name);
            for (range, value) in Constants::RANGES.iter().zip(constants.to_array()) {
                println!("  {} = {value:.3e}", range.name);
            }
        }
        for (name, stack) in Stack::NAMES {
            println!("{name}");
            for constant in STACK_CONSTANTS {
                println!("  {} = {:.3e}", constant.name, *(constant.get)(self.stacks.of_mut(stack)));
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut runs: Vec<Run> = Vec::new();
    for path in std::env::args().skip(1) {
        runs.extend(published::read(&std::fs::read_to_string(path)?)?.runs);
    }
    let runs: Vec<&Run> = runs.iter().collect();
    let mut programs = Programs::up_to(SIMULATED);
    let fit = Fit::of(&runs, &mut programs)?;
    fit.clone().print();
    let sources: BTreeSet<&str> = runs.iter().map(|run| run.source.as_str()).collect();
    let mut errors = Vec::new();
    for source in sources {
        let (own, others): (Vec<&Run>, Vec<&Run>) = runs.iter().partition(|run| run.source == source);
        let without = Fit::of(&others, &mut programs)?;
        for run in own {
            let both = [fit.error(run, &mut programs)?, without.error(run, &mut programs)?];
            let [fitted, left_out] = both.map(|error| format!("{:+.1}%", error * 100.0));
            println!("{}, {}: {fitted}; without its source {left_out}", run.model.name, run.source);
            errors.push(both.map(f64::abs));
        }
    }
    for (index, name) in ["fitted", "without the source"].iter().enumerate() {
        let errors: Vec<f64> = errors.iter().map(|both| both[index] * 100.0).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        println!("{name}: mean {mean:.1}%, largest {:.1}%", errors.iter().copied().fold(0.0, f64::max));
    }
    Ok(())
}

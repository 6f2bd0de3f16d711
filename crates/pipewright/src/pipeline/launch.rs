//! Launching the ranks of a pipeline.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use pipewright_schedule::{StageIndex, ValidatedProgram};

use super::error::PipelineError;
use super::ranks::Ranks;
use super::running::Pipeline;
use super::setup::{Setup, check_metadata};
use crate::config::{PipelineConfig, identity};
use crate::driver::{RankStart, RankThread, Reply};
use crate::memory::RankMemory;
use crate::nn::TensorParallel;
use crate::random::runs_layer_alone;
use crate::stage::Stage;
use crate::tensor::Metadata;
use crate::transport::{LONGEST_WAIT, World};

/// The additional time after a rank's deadline in which the rank itself can report it.
const GRACE: Duration = Duration::from_millis(250);

impl Pipeline {
    /// Starts a rank for each endpoint of `world`. `make` is called for each stage on the thread of the
    /// stage's rank.
    ///
    /// # Errors
    /// When program, world and configuration do not fit together, a stage cannot be made, or two stages have
    /// different parameters with the same path.
    pub fn launch<F, E>(
        program: ValidatedProgram,
        world: World,
        config: &PipelineConfig,
        make: F,
    ) -> Result<Self, PipelineError>
    where
        F: Fn(StageIndex) -> Result<Stage, E> + Send + Sync + 'static,
        E: Display,
    {
        Self::launch_split(program, world, config, move |stage, _: &TensorParallel| make(stage))
    }

    /// Like [`Pipeline::launch`], for stages that several ranks compute together
    /// ([`PipelineConfig::tensor_parallel`]). `make` is called on each of these ranks and gets its connection
    /// to the others. It makes the module of that rank: with the rank's shards of the parameters, which
    /// [`StageModule::placement`](crate::stage::StageModule::placement) describes. With
    /// [`PipelineConfig::whole_experts`], it makes the rank's experts
    /// ([`TensorParallel::experts`]), whose parameters are
    /// [`Placement::ON_ONE_RANK`](crate::tensor::Placement::ON_ONE_RANK). Parameters that several ranks hold must
    /// start with the same values, so draw them from a seed. Do not share tensors between the modules of two
    /// ranks, except frozen ones ([`TensorParallel::share_frozen`]).
    ///
    /// # Errors
    /// As [`Pipeline::launch`], and when the shards of the ranks do not make up the parameters, or copies
    /// differ, or replicas hold other experts than their modules say.
    pub fn launch_split<F, E>(
        program: ValidatedProgram,
        mut world: World,
        config: &PipelineConfig,
        make: F,
    ) -> Result<Self, PipelineError>
    where
        F: Fn(StageIndex, &TensorParallel) -> Result<Stage, E> + Send + Sync + 'static,
        E: Display,
    {
        if runs_layer_alone() {
            return Err(PipelineError::InsideLayer);
        }
        let mut config = PipelineConfig { deadline: config.deadline.min(LONGEST_WAIT), ..config.clone() };
        world.set_deadline(config.deadline);
        let hello = check_metadata(&config.metadata, program.placement().stages());
        let hello = hello.map(|()| identity(&program, &config)).map_err(|error| error.to_string());
        world.agree(hello, config.deadline)?;
        if world.is_distributed() {
            config.metadata = Metadata::voted(world.vote(config.metadata.votes(), config.deadline)?);
        }
        let (setup, endpoints) = Setup::new(program, world, &config)?;
        let setup = setup.with_turns();
        let lag = endpoints.iter().map(|endpoint| endpoint.detection_lag(config.deadline)).max();
        let patience = config.deadline + lag.unwrap_or_default() + GRACE;
        let make = Arc::new(make);
        let (sender, ready) = crossbeam_channel::unbounded();
        let mut threads = Vec::new();
        for endpoint in endpoints {
            let rank = endpoint.rank();
            let (rank_setup, make) = (setup.clone(), make.clone());
            let start = RankStart {
                threads: config.threads_per_rank.of(rank),
                board: setup.board.clone(),
                abort: setup.abort.clone(),
                memory: RankMemory::new(),
                build: move |memory| rank_setup.build(endpoint, memory, &*make),
                ready: Reply::new(rank, sender.clone()),
                rank,
            };
            threads.push(RankThread::start(start).map_err(|source| PipelineError::Thread { rank, source })?);
        }
        drop(sender);
        let mut ranks = Ranks::new(threads, &setup, patience);
        ranks.await_ranks(&ready, |ready| ready)?;
        setup.end_launch();
        Self::new(setup, ranks)
    }
}

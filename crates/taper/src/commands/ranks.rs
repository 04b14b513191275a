//! Processes that share a run: on one machine the command is the first of them and starts the others; mpirun and srun start all.
use super::Failure;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use taper_train::run::RunError;
use taper_world::World;
#[cfg(unix)]
use taper_world::{Error, sockets};

/// How the others know which they are, and where they meet.
const RANK: &str = "TAPER_RANK";
const MEET: &str = "TAPER_MEET";
/// The process that started them.
const FIRST: &str = "TAPER_FIRST";

/// The GPUs that a process sees.
const GPUS: &str = "CUDA_VISIBLE_DEVICES";

/// All have so long to start at least: on a busy machine that takes longer than an answer.
const START: Duration = Duration::from_secs(60);

/// How many processes share a run, and for how long one may be silent.
#[derive(clap::Args)]
pub struct Ranks {
    /// Processes that share each run, with the same result; their number must divide train.shards [default: those that mpirun or
    /// srun started, else 1]
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// How long the others wait for one of them before all end
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    rank_limit: u64,
}

impl Ranks {
    /// How many there are, unless a launcher started them.
    pub fn count(&self) -> usize {
        self.ranks.map_or(1, usize::from)
    }

    /// How many a launcher started to share a run, if one did; with `--ranks 1` each of its processes is alone.
    fn launched(&self) -> Option<usize> {
        launched().filter(|n| *n > 1 && self.ranks.is_none() && rank().is_none())
    }

    /// Whether another process of the same run says what there is to say.
    pub fn follow(&self) -> bool {
        let by_launcher =
            || self.launched().and_then(|_| number(&["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]));
        rank().or_else(by_launcher).is_some_and(|rank| rank > 0)
    }

    /// The threads of each, where the user does not say: what Slurm gives each, or an equal part of the cores. `0` is one a core.
    pub fn threads(&self) -> usize {
        let local = number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]);
        if self.launched().is_some() && local.is_none() {
            return number(&["SLURM_CPUS_PER_TASK"]).unwrap_or(1).max(1);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let here = self.launched().and(local).unwrap_or(1).max(self.count());
        if here == 1 { 0 } else { (cores / here).max(1) }
    }

    /// Starts the others, or meets those that were started with this one. A worker of a sweep is nobody's but the sweep's.
    pub fn start(&self, worker: bool) -> Result<Team, Failure> {
        if let Some(launched) = self.launched().filter(|_| !worker) {
            return by_mpi(launched, Duration::from_secs(self.rank_limit));
        }
        if self.count() == 1 {
            return Ok(Team { world: World::alone(), others: Vec::new() });
        }
        if rank().is_none() && launched().is_some_and(|n| n > 1) {
            return Err(Failure::usage(
                "error: --ranks starts processes of its own: leave it out under mpirun or srun",
            ));
        }
        self.meet().map_err(|message| Failure::other(format!("error: {message}")))
    }

    #[cfg(unix)]
    fn meet(&self) -> Result<Team, String> {
        use std::os::unix::process::CommandExt;
        let limit = Duration::from_secs(self.rank_limit);
        if let (Some(rank), Some(folder)) = (rank(), std::env::var_os(MEET)) {
            // Whoever outlives the first process has another parent than it was told.
            let first = number(&[FIRST]);
            let mut alive =
                || match first.is_none_or(|first| std::os::unix::process::parent_id() as usize == first) {
                    true => Ok(()),
                    false => Err(Error::new(0, "ended before all had started")),
                };
            let world = sockets::meet(folder.as_ref(), rank, self.count(), (limit, START), &mut alive);
            return Ok(Team { world: world.map_err(|e| e.to_string())?, others: Vec::new() });
        }
        let folder = taper_files::scratch().map_err(|e| e.to_string())?;
        let program = std::env::current_exe().map_err(|e| format!("this program cannot be found: {e}"))?;
        let mut team = Team { world: World::alone(), others: Vec::new() };
        for rank in 1..self.count() {
            let mut other = Command::new(&program);
            other
                .args(std::env::args_os().skip(1))
                .env(RANK, rank.to_string())
                .env(MEET, folder.path())
                .env(FIRST, std::process::id().to_string());
            if cfg!(feature = "cuda") {
                other.env(GPUS, gpu_of(rank, std::env::var(GPUS).ok().as_deref())?);
            }
            // What the terminal says to the first it decides for all.
            other.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
            let other = other.spawn().map_err(|e| format!("rank {rank} cannot be started: {e}"))?;
            team.others.push(other);
        }
        let others = &mut team.others;
        let mut alive = || {
            for (other, rank) in others.iter_mut().zip(1..) {
                if let Ok(Some(status)) = other.try_wait() {
                    return Err(Error::new(rank, format!("ended before all had started: {status}")));
                }
            }
            Ok(())
        };
        let world = sockets::meet(folder.path(), 0, self.count(), (limit, START), &mut alive);
        team.world = world.map_err(|e| e.to_string())?;
        Ok(team)
    }

    #[cfg(not(unix))]
    fn meet(&self) -> Result<Team, String> {
        Err("--ranks starts processes that talk over Unix sockets, which this system does not have".into())
    }
}

#[cfg(feature = "mpi")]
fn by_mpi(launched: usize, limit: Duration) -> Result<Team, Failure> {
    // What MPI itself says of a launcher that it does not know ends the process, or is that there is one.
    let told =
        ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"].iter().any(|name| std::env::var_os(name).is_some());
    if told {
        let world = taper_world::mpi::start(limit).map_err(|e| Failure::other(format!("error: {e}")))?;
        if world.size() == launched {
            return Ok(Team { world, others: Vec::new() });
        }
    }
    Err(Failure::usage(format!(
        "error: {launched} processes were started together, and MPI does not know them: their launcher is not that of the MPI which \
         taper was built with. Under Slurm: srun --mpi=pmix with Open MPI, --mpi=pmi2 with MPICH (`srun --mpi=list` says what there \
         is). With --ranks 1 each of them trains by itself"
    )))
}

/// Each process would take itself for the only one.
#[cfg(not(feature = "mpi"))]
fn by_mpi(launched: usize, _: Duration) -> Result<Team, Failure> {
    Err(Failure::usage(format!(
        "error: {launched} processes were started together, by mpirun or srun, and taper was built without MPI: build it with \
         {} (needs libopenmpi-dev or libmpich-dev, and libclang-dev), or use --ranks R on one \
         machine. With --ranks 1 each of them trains by itself",
        taper_files::built_with("mpi")
    )))
}

/// The GPU of a rank, of those that the first process sees, which itself takes the first of them.
fn gpu_of(rank: usize, seen: Option<&str>) -> Result<String, String> {
    let Some(seen) = seen else { return Ok(rank.to_string()) };
    let gpus: Vec<&str> = seen.split(',').map(str::trim).filter(|gpu| !gpu.is_empty()).collect();
    // None at all: the CPU is meant.
    match gpus.get(rank) {
        None if gpus.is_empty() => Ok(String::new()),
        None => Err(format!("rank {rank} needs a GPU of its own, and {GPUS}={seen} names {}", gpus.len())),
        Some(gpu) => Ok((*gpu).to_owned()),
    }
}

/// How many processes a launcher started together with this one, if one did.
fn launched() -> Option<usize> {
    number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
}

/// The first of some variables that holds a number.
fn number(variables: &[&str]) -> Option<usize> {
    variables.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// The number of a process that another one started to share its run.
fn rank() -> Option<usize> {
    number(&[RANK])
}

/// The processes that share a run, with those that this one started.
pub struct Team {
    pub world: World,
    others: Vec<Child>,
}

impl Team {
    /// What this process has to say of an error: what all of them know is said once, and where all came to the same end the
    /// first one's exit code says it too: a launcher kills the others at the first code that is not 0.
    pub fn failure(&self, error: RunError) -> Failure {
        let first_is_gone = matches!(&error, RunError::World(error) if error.rank == 0 && !error.told);
        let speaks = self.world.is_first() || self.world.rank() == 1 && first_is_gone;
        let all =
            matches!(error, RunError::Interrupted { .. } | RunError::Diverged { .. } | RunError::Recipe(_));
        let own = !all && !self.world.is_alone() && !matches!(error, RunError::World(_));
        let Failure { message, code } = Failure::from(error);
        match speaks {
            true if own => {
                let what = message.strip_prefix("error: ").unwrap_or(&message);
                Failure { message: format!("error: rank {}: {what}", self.world.rank()), code }
            }
            true => Failure { message, code },
            false => Failure { message: String::new(), code: if all { 0 } else { code } },
        }
    }
}

impl Drop for Team {
    /// Ends with the others: they have heard that the run is over, or hear it now.
    fn drop(&mut self) {
        const MORE: Duration = Duration::from_secs(5);
        self.world = World::alone();
        let deadline = Instant::now() + MORE;
        for other in &mut self.others {
            while matches!(other.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            // One that has ended cannot be killed, and that is all right.
            let _ = other.kill();
            let _ = other.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_gpu_of_its_own() {
        assert_eq!(gpu_of(2, None), Ok("2".into()));
        assert_eq!(gpu_of(1, Some("4, GPU-8e1")), Ok("GPU-8e1".into()));
        assert_eq!(gpu_of(1, Some("")), Ok(String::new()));
        assert_eq!(
            gpu_of(2, Some("4,6")),
            Err("rank 2 needs a GPU of its own, and CUDA_VISIBLE_DEVICES=4,6 names 2".into())
        );
    }
}

//! A sweep as a Slurm array job: one task a run that is missing and not in the queue already.
//!
//! What was submitted stands in `<runs>/slurm.json`; which of it is still in the queue, Slurm is asked each time.
use super::{Run, Sweep};
use crate::Registries;
use crate::recipe::Cluster;
use crate::run::{RunError, write_recipe};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What a job script needs to know.
#[derive(Clone, Debug)]
pub struct Job {
    /// The job's name.
    pub name: String,
    /// The `taper` binary.
    pub program: PathBuf,
    /// Processors a rank.
    pub cpus: usize,
    /// Tasks at a time; all the cluster has room for if `None`.
    pub jobs: Option<usize>,
    /// Arguments for every run.
    pub args: Vec<OsString>,
    /// What is asked of the cluster.
    pub cluster: Cluster,
}

/// Why nothing was submitted.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum SlurmError {
    /// Slurm's commands are not on this machine.
    #[error(
        "`{program}` is not on this machine: submit where Slurm's commands are (a cluster's login node; Debian: apt-get install \
         slurm-client). `--print` shows the script without them"
    )]
    Missing {
        /// The command.
        program: &'static str,
    },
    /// One of Slurm's commands failed.
    #[error("{program} refused, so that nothing was submitted: {said}")]
    Refused {
        /// The command.
        program: &'static str,
        /// Its own words.
        said: String,
    },
    /// A path that cannot stand in a script.
    #[error(
        "{path:?}: expected a folder of runs without line breaks and other control characters in its path"
    )]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// What became of a submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Slurm's number of the job; `None` if nothing was left to submit.
    pub job: Option<String>,
    /// Runs that were submitted.
    pub submitted: usize,
    /// Runs that were in the queue already.
    pub queued: usize,
}

/// A job that was submitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Past {
    job: String,
    /// The id of each task's run; tasks count from 1.
    runs: Vec<String>,
}

/// The script of an array job that does what is missing. It is a function of the sweep and `job`; paths are made
/// absolute, since a job may start elsewhere.
pub fn script(sweep: &Sweep, job: &Job) -> Result<String, SlurmError> {
    script_of(sweep, job, &sweep.missing().collect::<Vec<_>>())
}

fn script_of(sweep: &Sweep, job: &Job, missing: &[&Run]) -> Result<String, SlurmError> {
    let runs = absolute(&sweep.options.runs);
    if runs.to_string_lossy().contains(char::is_control) {
        // It stands in a line of Slurm's options, which has no way to write it.
        return Err(SlurmError::Path { path: runs });
    }
    let names: Vec<String> = missing.iter().map(|run| run.recipe.directory()).collect();
    let limit = job.jobs.map_or(String::new(), |jobs| format!("%{jobs}"));
    let ranks = job.cluster.ranks.unwrap_or(1);
    let mut options = vec![
        format!("--job-name={}", job.name),
        format!("--array=1-{}{limit}", names.len()),
        format!("--ntasks={ranks}"),
        format!("--cpus-per-task={}", job.cpus),
    ];
    let given =
        [("partition", &job.cluster.partition), ("time", &job.cluster.time), ("mem", &job.cluster.memory)];
    options.extend(given.iter().filter_map(|(key, value)| Some(format!("--{key}={}", value.as_ref()?))));
    options.extend(job.cluster.gpus.as_ref().map(|gpus| match ranks {
        1 => format!("--gres=gpu:{gpus}"),
        _ => format!("--gpus-per-task={gpus}"),
    }));
    // A per cent sign has a meaning in names of logs.
    let log = runs.join(&job.name).to_string_lossy().replace('%', "%%");
    options.extend([
        "--requeue".to_owned(),
        "--signal=B:USR1@120".to_owned(),
        format!("--output={log}-%A_%a.log"),
        "--open-mode=append".to_owned(),
    ]);
    options.extend(job.cluster.extra.iter().cloned());
    let options: Vec<String> =
        options.iter().map(|option| format!("#SBATCH {}", directive(option))).collect();
    let launch = match ranks {
        1 => String::new(),
        // What a job asks for a task, its steps do not ask for by themselves.
        ranks => {
            let mpi = job.cluster.mpi.as_ref().map_or(String::new(), |mpi| format!(" --mpi={mpi}"));
            format!("srun{mpi} --ntasks={ranks} --cpus-per-task={} --kill-on-bad-exit=1 ", job.cpus)
        }
    };
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "#!/bin/bash
# One task a run that was missing. Two minutes before the end of its time, and when it is to make room, a task has its run
# write a checkpoint and puts itself back into the queue, where it goes on.
{options}
run=$(sed -n \"${{SLURM_ARRAY_TASK_ID}}p\" <<'RUNS'
{list}
RUNS
)
asked= child=
trap 'asked=USR1; [ -z \"$child\" ] || kill -USR1 \"$child\"' USR1
trap 'asked=TERM; [ -z \"$child\" ] || kill -TERM \"$child\"' TERM
{launch}{program} train {quoted}/\"$run\"/recipe.yaml --resolved --wait --runs {quoted} --threads {cpus}{args} &
child=$!
[ -z \"$asked\" ] || kill -TERM \"$child\"
wait \"$child\"
code=$?
# A signal ends the waiting, not the run.
while [ $code -gt 128 ] && kill -0 \"$child\" 2>/dev/null; do wait \"$child\"; code=$?; done
trap '' USR1 TERM
if [ -n \"$asked\" ] && [ $code -ne 0 ]; then
  task=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}
  # What Slurm is ending itself was cancelled, or is requeued by it.
  case $(squeue --noheader --array --jobs=\"$task\" --format=%T) in
    COMPLETING | CANCELLED) ;;
    *) scontrol requeue \"$task\" ;;
  esac
fi
exit $code
",
        options = options.join("\n"),
        quoted = quoted(&runs.to_string_lossy()),
        list = names.join("\n"),
        program = quoted(&absolute(&job.program).to_string_lossy()),
        cpus = job.cpus,
        args = job.args.iter().map(|arg| format!(" {}", quoted(&arg.to_string_lossy()))).collect::<String>(),
    );
    Ok(out)
}

/// Submits what is missing and not in the queue: writes the script to `<runs>/<name>.sbatch`, and the recipes of its tasks into
/// their folders.
pub fn submit(sweep: &Sweep, job: &Job, registries: &Registries) -> Result<Submission, SlurmError> {
    let runs = &sweep.options.runs;
    fs::create_dir_all(runs).map_err(RunError::io(runs))?;
    // Two submissions at a time would submit the same.
    let guard = runs.join(".submit");
    let guard = File::create(&guard).map_err(RunError::io(&guard))?;
    // Without locks nothing worse happens than a task that finds its run done.
    let _ = guard.lock();
    let memory = runs.join("slurm.json");
    let (mut past, waiting) = queued(remembered(&memory)?)?;
    let missing: Vec<&Run> = sweep.missing().filter(|run| !waiting.contains(run.recipe.id())).collect();
    let queued = sweep.missing().count() - missing.len();
    if missing.is_empty() {
        return Ok(Submission { job: None, submitted: 0, queued });
    }
    for run in &missing {
        write_recipe(&run.recipe, registries, &run.folder)?;
    }
    let path = runs.join(format!("{}.sbatch", job.name));
    taper_files::replace(&path, script_of(sweep, job, &missing)?.as_bytes()).map_err(RunError::from)?;
    let output = call("sbatch", Command::new("sbatch").arg("--parsable").arg(&path))?;
    if !output.status.success() {
        return Err(SlurmError::Refused { program: "sbatch", said: said(&output) });
    }
    // `12`, or `12;cluster`.
    let answer = String::from_utf8_lossy(&output.stdout);
    let number = answer.trim().split(';').next().unwrap_or_default().to_owned();
    let ids = missing.iter().map(|run| run.recipe.id().to_owned()).collect();
    past.push(Past { job: number.clone(), runs: ids });
    let text = serde_json::json!(past).to_string() + "\n";
    taper_files::replace(&memory, text.as_bytes()).map_err(RunError::from)?;
    Ok(Submission { job: Some(number), submitted: missing.len(), queued })
}

/// The jobs that were submitted from a folder.
fn remembered(path: &Path) -> Result<Vec<Past>, SlurmError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(RunError::io(path)(e).into()),
    };
    let number = |past: &Past| !past.job.is_empty() && past.job.bytes().all(|c| c.is_ascii_digit());
    let read = serde_json::from_str::<Vec<Past>>(&text).map_err(|e| e.to_string());
    let read = read.and_then(|all| match all.iter().find(|past| !number(past)) {
        Some(past) => Err(format!("expected a job's number, found `{}`", past.job)),
        None => Ok(all),
    });
    read.map_err(|e| {
        let message =
            format!("expected the jobs of this folder as a submission wrote them: {e}; remove the file if none is in the queue");
        RunError::Damaged { path: path.to_path_buf(), message }.into()
    })
}

/// Which of these jobs Slurm still has, and the runs of their tasks.
fn queued(past: Vec<Past>) -> Result<(Vec<Past>, HashSet<String>), SlurmError> {
    if past.is_empty() {
        return Ok((past, HashSet::new()));
    }
    let jobs = past.iter().map(|past| past.job.as_str()).collect::<Vec<_>>().join(",");
    let mut squeue = Command::new("squeue");
    squeue.args(["--noheader", "--array", "--format=%F_%K", &format!("--jobs={jobs}")]);
    let output = call("squeue", &mut squeue)?;
    let message = said(&output);
    // A single job that has been gone for long is an error to it.
    if !output.status.success() && !message.contains("Invalid job id") {
        return Err(SlurmError::Refused { program: "squeue", said: message });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let tasks: HashSet<&str> = text.lines().map(str::trim).collect();
    let mut waiting = HashSet::new();
    let mut live = Vec::new();
    for past in past {
        let task = |index: usize| tasks.contains(format!("{}_{}", past.job, index + 1).as_str());
        let runs = past.runs.iter().enumerate().filter(|(index, _)| task(*index));
        let runs: Vec<String> = runs.map(|(_, run)| run.clone()).collect();
        if !runs.is_empty() {
            waiting.extend(runs);
            live.push(past);
        }
    }
    Ok((live, waiting))
}

fn call(program: &'static str, command: &mut Command) -> Result<Output, SlurmError> {
    command.output().map_err(|e| match e.kind() {
        ErrorKind::NotFound => SlurmError::Missing { program },
        _ => SlurmError::Refused { program, said: e.to_string() },
    })
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

fn plain(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./=:,+@%".contains(c))
}

/// An option on a line of its own, as `sbatch` reads it: what is not plain stands in double quotes.
fn directive(option: &str) -> String {
    match option.split_once('=') {
        Some((key, value)) if !plain(value) => {
            format!("{key}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""))
        }
        _ => option.to_owned(),
    }
}

/// A word of a shell command.
fn quoted(text: &str) -> String {
    match plain(text) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

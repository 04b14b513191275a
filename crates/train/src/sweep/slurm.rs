//! A sweep as a Slurm array job: one task a run that is missing.
use super::Sweep;
use crate::Registries;
use crate::run::{RunError, write_recipe};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What a job script needs to know.
#[derive(Clone, Debug)]
pub struct Job {
    /// The job's name.
    pub name: String,
    /// The `taper` binary.
    pub program: PathBuf,
    /// Processors a task.
    pub cpus: usize,
    /// Tasks at a time; all the cluster has room for if `None`.
    pub jobs: Option<usize>,
    /// Arguments for every run.
    pub args: Vec<OsString>,
}

/// The script of an array job that does what is missing. It is a function of the sweep and `job`; paths are made
/// absolute, since a job may start elsewhere.
pub fn script(sweep: &Sweep, job: &Job) -> String {
    let runs = absolute(&sweep.options.runs);
    let names: Vec<String> = sweep.missing().map(|run| run.recipe.directory()).collect();
    let limit = job.jobs.map_or(String::new(), |jobs| format!("%{jobs}"));
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "#!/bin/bash
# One task a run that was missing; a task that is killed or runs out of time goes on from its checkpoint when it is
# submitted again. Add what your cluster needs: --partition, --time, --mem, --account.
#SBATCH --job-name={name}
#SBATCH --array=1-{tasks}{limit}
#SBATCH --cpus-per-task={cpus}
#SBATCH --requeue
# An interrupt a minute before the end of the time makes the run write a checkpoint.
#SBATCH --signal=B:INT@60
#SBATCH --output={quoted}/{name}-%a.log
#SBATCH --open-mode=append
set -euo pipefail
run=$(sed -n \"${{SLURM_ARRAY_TASK_ID}}p\" <<'RUNS'
{list}
RUNS
)
exec {program} train {quoted}/\"$run\"/recipe.yaml --resolved --runs {quoted} --threads \"$SLURM_CPUS_PER_TASK\"{args}
",
        name = job.name,
        tasks = names.len(),
        cpus = job.cpus,
        quoted = quoted(&runs.to_string_lossy()),
        list = names.join("\n"),
        program = quoted(&absolute(&job.program).to_string_lossy()),
        args = job.args.iter().map(|arg| format!(" {}", quoted(&arg.to_string_lossy()))).collect::<String>(),
    );
    out
}

/// Writes the script to `<runs>/<name>.sbatch`, and the recipes of its tasks into their folders.
pub fn write(sweep: &Sweep, job: &Job, registries: &Registries) -> Result<PathBuf, RunError> {
    for run in sweep.missing() {
        write_recipe(&run.recipe, registries, &run.folder)?;
    }
    let path = sweep.options.runs.join(format!("{}.sbatch", job.name));
    taper_files::replace(&path, script(sweep, job).as_bytes())?;
    Ok(path)
}

/// The command that submits a script.
pub fn submit_command(script: &Path) -> String {
    format!("sbatch {}", quoted(&script.to_string_lossy()))
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// A word of a shell command.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

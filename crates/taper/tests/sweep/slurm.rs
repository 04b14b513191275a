//! Array jobs, with programs in the place of Slurm's: what is submitted, and what a task does, run by hand as Slurm would.
use super::support::{Place, SWEEP, said};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A place with `sbatch`, `squeue` and `scontrol` that note how they are called, and answer from the files `queue` and `state`.
fn place() -> Place {
    let place = Place::new(SWEEP);
    let bin = place.path("bin");
    std::fs::create_dir(&bin).unwrap();
    let home = place.path("");
    let programs = [
        (
            "sbatch",
            "grep -q partition=nope \"$2\" && { echo 'invalid partition specified: nope' >&2; exit 1; }\necho 7",
        ),
        ("squeue", "case \"$*\" in *%T*) cat state;; *) cat queue;; esac"),
        ("scontrol", ""),
    ];
    for (name, body) in programs {
        let path = bin.join(name);
        let text = format!("#!/bin/sh\ncd '{}'\necho {name} \"$@\" >> calls\n{body}\n", home.display());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    std::fs::write(place.path("queue"), "").unwrap();
    std::fs::write(place.path("state"), "RUNNING\n").unwrap();
    place
}

fn path(place: &Place) -> String {
    format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap())
}

fn slurm(place: &Place, runs: &str, args: &[&str]) -> Output {
    let mut sweep = place.taper("sweep", runs, &["--launcher", "slurm"]);
    sweep.args(args).env("PATH", path(place)).output().unwrap()
}

fn calls(place: &Place) -> String {
    std::fs::read_to_string(place.path("calls")).unwrap_or_default()
}

/// A task of a script.
fn task(place: &Place, script: &PathBuf, index: &str) -> Command {
    let mut bash = Command::new("bash");
    bash.arg(script).env("SLURM_ARRAY_TASK_ID", index).env("SLURM_ARRAY_JOB_ID", "7");
    bash.env("PATH", path(place)).env("TAPER_OFFLINE", "1").stdin(Stdio::null());
    bash.stdout(Stdio::piped()).stderr(Stdio::piped());
    bash
}

#[test]
fn a_script_does_one_run_a_task() {
    let place = place();
    let args = ["--jobs", "4", "--set", "sweep.seeds=[1]"];
    let shown = slurm(&place, "a b", &[&args[..], &["--print"]].concat());
    let script = String::from_utf8(shown.stdout).unwrap();
    assert!(!place.path("a b").exists() && calls(&place).is_empty(), "it is only shown");
    for line in [
        "#!/bin/bash",
        "#SBATCH --job-name=tiny",
        "#SBATCH --array=1-4%4",
        "#SBATCH --ntasks=1",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@120",
    ] {
        assert!(script.lines().any(|found| found == line), "{line} in\n{script}");
    }
    let output = slurm(&place, "a b", &args);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(output.stdout, b"7\n");
    let path = place.path("a b").join("tiny.sbatch");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), script);
    for index in ["3", "1"] {
        let output = task(&place, &path, index).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    let left = place.table("a b", &["--dry-run", "--set", "sweep.seeds=[1]"]);
    let left: BTreeSet<&str> = left.lines().filter_map(|line| line.split("  ").nth(1)).collect();
    assert_eq!(left, BTreeSet::from(["c=1 seed=1", "c=1e-8 seed=1"]));
}

#[test]
fn only_what_is_neither_done_nor_in_the_queue_is_submitted() {
    let place = place();
    let submitted = |args: &[&str]| {
        let output = slurm(&place, "runs", args);
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    place.table("runs", &["--set", "sweep.seeds=[1]"]);
    let message = submitted(&[]);
    assert!(
        message.contains("job 7 has 8 tasks; 4 of 12 runs were done before, 0 are in the queue"),
        "{message}"
    );
    // Of the eight, two are waiting and one is at work.
    std::fs::write(place.path("queue"), "7_2\n7_3\n7_8\n").unwrap();
    let script = slurm(&place, "runs", &["--print"]);
    let message = submitted(&[]);
    assert!(
        message.contains("job 7 has 5 tasks; 4 of 12 runs were done before, 3 are in the queue"),
        "{message}"
    );
    assert!(calls(&place).contains("squeue --noheader --array --format=%F_%K --jobs=7"), "{}", calls(&place));
    assert!(
        String::from_utf8(script.stdout).unwrap().contains("--array=1-8\n"),
        "the script is of all that is missing"
    );
    let all: String = (1..=8).map(|task| format!("7_{task}\n")).collect();
    std::fs::write(place.path("queue"), all).unwrap();
    let before = calls(&place).matches("sbatch").count();
    let message = submitted(&[]);
    assert!(
        message.contains("nothing to submit: 4 of 12 runs were done before, 8 are in the queue"),
        "{message}"
    );
    assert_eq!(calls(&place).matches("sbatch").count(), before);
    // What cannot be read is not taken for an empty queue.
    std::fs::write(place.path("runs").join("slurm.json"), "[{\"job\": \"7; x\", \"runs\": []}]").unwrap();
    let output = slurm(&place, "runs", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("slurm.json: expected the jobs of this folder"), "{}", said(&output));
}

#[test]
fn what_a_recipe_asks_of_the_cluster_is_in_the_script_and_no_shell_reads_it() {
    let place = place();
    let cluster = "cluster={partition: 'gpu,long', time: 2-12:00:00, memory: 16G, gpus: a100:2, cpus: 3, extra: \
                   ['--account=physics', '--comment=a $(touch inside) `touch inside`; touch inside # x']}";
    let print = |set: &[&str]| {
        let mut sweep = place.taper("sweep", "runs", &["--launcher", "slurm", "--print"]);
        for set in set {
            sweep.args(["--set", set]);
        }
        String::from_utf8(sweep.output().unwrap().stdout).unwrap()
    };
    let script = print(&[cluster]);
    for line in [
        "#SBATCH --partition=gpu,long",
        "#SBATCH --time=2-12:00:00",
        "#SBATCH --mem=16G",
        "#SBATCH --gres=gpu:a100:2",
        // `--threads`, which all commands of these tests have, has the last word.
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --account=physics",
        "#SBATCH --comment=\"a $(touch inside) `touch inside`; touch inside # x\"",
    ] {
        assert!(script.lines().any(|found| found == line), "{line} in\n{script}");
    }
    let shared = ["cluster={ranks: 4, gpus: 1, mpi: pmix}", "train.shards=8"];
    let ranks = print(&shared);
    for part in [
        "#SBATCH --ntasks=4\n",
        "#SBATCH --gpus-per-task=1\n",
        "\nsrun --mpi=pmix --ntasks=4 --cpus-per-task=2 --kill-on-bad-exit=1 /",
    ] {
        assert!(ranks.contains(part), "{part} in\n{ranks}");
    }
    // What every task would end with is said before one is submitted.
    for (shards, part) in [
        (shared[1], "talk over MPI, and this taper was built without it"),
        ("train.shards=6", "6 shards cannot be shared in equal parts by 4 processes"),
    ] {
        let output = slurm(&place, "runs", &["--set", shared[0], "--set", shards]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(part), "{}", said(&output));
    }
    let output = slurm(&place, "runs", &["--set", cluster]);
    assert!(output.status.success(), "{}", said(&output));
    let output = task(&place, &place.path("runs").join("tiny.sbatch"), "1").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(!place.path("inside").exists() && !std::path::Path::new("inside").exists());
    // A folder whose path has a line break.
    let output = slurm(&place, "a\ntouch inside\nb", &["--print"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("without line breaks"), "{}", said(&output));
}

#[test]
fn without_slurm_and_with_a_partition_it_refuses_the_message_says_so() {
    let place = place();
    let nowhere =
        place.taper("sweep", "runs", &["--launcher", "slurm"]).env("PATH", "/nowhere").output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    let message = said(&nowhere);
    assert!(
        message.contains("`sbatch` is not on this machine") && message.contains("slurm-client"),
        "{message}"
    );
    let output = slurm(&place, "runs", &["--set", "cluster.partition=nope"]);
    let message = said(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("sbatch refused: invalid partition specified: nope"), "{message}");
    assert!(message.contains("--set") && message.contains("nope"), "{message}");
    assert!(!place.path("runs").join("slurm.json").exists(), "nothing was submitted");
}

#[test]
fn a_task_that_is_asked_to_stop_checkpoints_and_goes_back_into_the_queue() {
    let place = place();
    let long = ["--set", "train.epochs=2000", "--set", "train.checkpoint.every_steps=null"];
    let one = [&long[..], &["--set", "sweep.seeds=[1]", "--set", "sweep.grid={optimizer.c: [1]}"]].concat();
    let whole = place.table("whole", &one);
    let output = slurm(&place, "runs", &one);
    assert!(output.status.success(), "{}", said(&output));
    let script = place.path("runs").join("tiny.sbatch");
    for (signal, state, requeued) in [
        (libc::SIGUSR1, "RUNNING\n", true),
        (libc::SIGTERM, "RUNNING\n", true),
        (libc::SIGTERM, "COMPLETING\n", false),
    ] {
        std::fs::write(place.path("state"), state).unwrap();
        std::fs::write(place.path("calls"), "").unwrap();
        let mut child = task(&place, &script, "1").spawn().unwrap();
        let [run] = &place.runs("runs")[..] else { panic!("one run") };
        let held = || std::fs::read_to_string(run.join(".lock")).is_ok_and(|name| !name.is_empty());
        while !(held() && run.join("events.out.tfevents.0.taper").exists()) {
            assert!(child.try_wait().unwrap().is_none(), "it ended too soon");
            std::thread::yield_now();
        }
        // SAFETY: the child has not been waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + signal), "{}", said(&output));
        let summary = std::fs::read_to_string(run.join("summary.json")).unwrap();
        assert!(summary.contains("interrupted"), "{summary}");
        assert_eq!(calls(&place).contains("scontrol requeue 7_1\n"), requeued, "{}", calls(&place));
    }
    // As Slurm starts it again.
    let output = task(&place, &script, "1").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(place.table("runs", &[&one[..], &["--collect"]].concat()), whole);
}

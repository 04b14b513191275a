//! One run by several processes: the bytes of one, whoever is killed, stopped or different.
use crate::common::{
    Draw, GPT, LSTM, MLP, Net, RESNET, VIT, assert_equal, files, message, scratch, sizes_of_a_disk, within,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The command that trains a net in 12 shards, some of which have a sample more than others, by so many processes.
fn train(net: &Net, runs: &Path, ranks: usize) -> Command {
    let mut command = net.train(runs);
    command.args(["--set", "train.shards=12", "--set", "data.batch_size=13"]);
    command.args(["--ranks", &ranks.to_string(), "--threads", "1"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Long enough that a signal comes in time.
const LONG: &[&str] = &["--set", "train.epochs=25"];

fn trained(net: &Net, runs: &Path, ranks: usize) -> BTreeMap<String, Vec<u8>> {
    trained_for(net, runs, ranks, &[])
}

fn trained_for(net: &Net, runs: &Path, ranks: usize, args: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let output = train(net, runs, ranks).args(args).output().unwrap();
    assert!(output.status.success(), "{}: {}", net.name, message(&output));
    files(&net.folder(runs))
}

/// The processes of a run: the first, and those that it started, by rank.
fn processes(first: &Child) -> Vec<(usize, i32)> {
    let mut found = vec![(0, first.id() as i32)];
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // The name in parentheses may hold anything; the parent is the second word after it.
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if parent != Some(first.id()) {
            continue;
        }
        let variables = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let rank =
            variables.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"TAPER_RANK="));
        let rank = rank.and_then(|rank| std::str::from_utf8(rank).ok()?.parse().ok());
        found.extend(rank.map(|rank| (rank, pid)));
    }
    found
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a signal to a process that this test started and that nobody has waited for.
    unsafe { libc::kill(pid, signal) };
}

/// Waits until there are so many lines of metrics, or the run is over.
fn wait_for(net: &Net, runs: &Path, lines: usize, child: &mut Child) {
    let written = || {
        let metrics =
            net.find(runs).map(|folder| std::fs::read(folder.join("metrics.jsonl")).unwrap_or_default());
        metrics.unwrap_or_default().iter().filter(|byte| **byte == b'\n').count()
    };
    while written() < lines && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
}

/// What divides the optimizer's state among the processes.
const DIVIDED: &[&str] = &["--set", "train.shard_state=true"];

/// Kills ranks at any moment, so many times, each time going on with another number of them.
fn survives(net: &Net, kills: usize, seed: u64, args: &[&str]) {
    let folder = scratch();
    let started = Instant::now();
    let whole = trained_for(net, &folder.path().join("whole"), 1, args);
    let duration = started.elapsed();
    let mut draw = Draw(seed);
    let (mut died, mut copies) = (0, 0);
    while died < kills {
        let runs = folder.path().join(copies.to_string());
        copies += 1;
        let mut here = 0;
        loop {
            let ranks = [1, 2, 3, 4, 6][draw.below(5) as usize];
            let mut child = train(net, &runs, ranks).args(args).spawn().unwrap();
            let mut victim = None;
            if died < kills && here < 7 {
                let delay = Duration::from_nanos(draw.below(2 * duration.as_nanos() as u64));
                let start = Instant::now();
                while start.elapsed() < delay && child.try_wait().unwrap().is_none() {
                    std::thread::yield_now();
                }
                let all = processes(&child);
                let (rank, pid) = all[draw.below(all.len() as u64) as usize];
                if child.try_wait().unwrap().is_none() {
                    signal(pid, libc::SIGKILL);
                    victim = Some(rank);
                }
            }
            // Ends when the last of them has: they all hold the pipe.
            let output = child.wait_with_output().unwrap();
            match victim {
                None => {
                    assert!(output.status.success(), "{}", message(&output));
                    break;
                }
                // It came too late: all was done.
                Some(_) if output.status.success() => break,
                Some(rank) => {
                    (died, here) = (died + 1, here + 1);
                    let said = message(&output);
                    // Who was killed before the others had met it never started for them.
                    assert!(
                        rank == 0 || said.contains(&format!("rank {rank}: ")),
                        "rank {rank} of {ranks}: {said}"
                    );
                }
            }
        }
        assert_equal(&net.folder(&runs), &whole, &format!("{here} kills of {}, seed {seed}", net.name));
    }
    println!("{}: {died} ranks killed in {copies} runs", net.name);
}

#[test]
fn mlp_survives_20_kills_of_ranks() {
    survives(&MLP, 20, 41, &[]);
}

#[test]
fn resnet_survives_15_kills_of_ranks() {
    survives(&RESNET, 15, 42, DIVIDED);
}

#[test]
fn lstm_survives_15_kills_of_ranks() {
    survives(&LSTM, 15, 43, DIVIDED);
}

#[test]
fn transformers_survive_6_kills_of_ranks_each() {
    survives(&GPT, 6, 44, DIVIDED);
    survives(&VIT, 6, 45, &[]);
}

#[test]
fn a_rank_that_hangs_is_named_after_the_limit_and_ended() {
    let folder = scratch();
    let whole = trained_for(&LSTM, &folder.path().join("whole"), 1, LONG);
    let runs = folder.path().join("hung");
    let mut child = train(&LSTM, &runs, 3).args(LONG).args(["--rank-limit", "3"]).spawn().unwrap();
    wait_for(&LSTM, &runs, 2, &mut child);
    let stopped = processes(&child).into_iter().find(|(rank, _)| *rank == 2);
    if let Some((_, pid)) = stopped {
        signal(pid, libc::SIGSTOP);
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", message(&output));
    let said = message(&output);
    assert!(said.starts_with("error: rank 2: said nothing for 3 s"), "{said}");
    assert_eq!(said.lines().count(), 1, "said once: {said}");
    trained_for(&LSTM, &runs, 2, LONG);
    assert_equal(&LSTM.folder(&runs), &whole, "a rank that hung");
}

#[test]
fn a_full_disk_of_the_first_rank_ends_all_and_loses_nothing() {
    for net in [&MLP, &LSTM] {
        let folder = scratch();
        let whole = trained(net, &folder.path().join("whole"), 1);
        let runs = folder.path().join("full");
        for limit in sizes_of_a_disk(&whole) {
            // Ends when the last of them has: they all hold the pipe.
            let mut command = train(net, &runs, 2);
            let output = within(command.args(["--rank-limit", "30"]), limit).output().unwrap();
            let said = message(&output);
            assert_eq!(output.status.code(), Some(1), "{} within {limit} bytes: {said}", net.name);
            let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
            let [error] = errors[..] else { panic!("not said once: {said}") };
            assert!(error.starts_with("error: rank 0: ") && error.contains("File too large"), "{said}");
            assert!(!net.folder(&runs).join("summary.json").exists(), "{limit}");
        }
        trained(net, &runs, 3);
        assert_equal(&net.folder(&runs), &whole, &format!("{} by ranks on a full disk", net.name));
    }
}

#[test]
fn an_interrupt_stops_all_ranks_at_one_step() {
    let folder = scratch();
    let whole = trained_for(&RESNET, &folder.path().join("whole"), 1, LONG);
    let runs = folder.path().join("stopped");
    let mut child = train(&RESNET, &runs, 4).args(LONG).spawn().unwrap();
    wait_for(&RESNET, &runs, 1, &mut child);
    signal(child.id() as i32, libc::SIGTERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{}", message(&output));
    assert!(message(&output).contains("interrupted at step"), "{}", message(&output));
    trained_for(&RESNET, &runs, 3, LONG);
    assert_equal(&RESNET.folder(&runs), &whole, "an interrupt");
}

#[test]
fn ranks_that_do_not_divide_the_shards_are_refused_before_anything_starts() {
    let folder = scratch();
    let output = train(&MLP, folder.path(), 5).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = message(&output);
    assert!(
        said.contains("12 shards cannot be shared in equal parts by 5 processes: it takes 1, 2, 3, 4, 6, 12"),
        "{said}"
    );
    assert!(MLP.find(folder.path()).is_none());
}

/// Ranks that were started one by one, as a launcher on another machine would.
fn by_hand(folder: &Path, second: impl FnOnce(&mut Command)) -> [std::process::Output; 2] {
    let meet = folder.join("meet");
    std::fs::create_dir(&meet).unwrap();
    let rank = |rank: &str| {
        let mut command = train(&MLP, &folder.join("runs"), 2);
        command.env("TAPER_RANK", rank).env("TAPER_MEET", &meet);
        command
    };
    let (mut one, mut two) = (rank("0"), rank("1"));
    second(&mut two);
    let (one, two) = (one.spawn().unwrap(), two.spawn().unwrap());
    [one, two].map(|child| child.wait_with_output().unwrap())
}

#[test]
fn a_rank_with_other_kernels_is_named() {
    if taper_models::instruction_set(taper_models::ops::Operands::Full).unwrap() == "portable" {
        return println!("skipped: this processor has one set of kernels only");
    }
    let folder = scratch();
    let [one, two] = by_hand(folder.path(), |two| {
        two.env("TAPER_ISA", "portable");
    });
    let said = message(&one);
    assert!(said.starts_with("error: rank 1: has another arithmetic: cpu with portable kernels"), "{said}");
    assert_eq!((one.status.code(), two.status.code(), message(&two).as_str()), (Some(1), Some(1), ""));
}

/// Each of them would take itself for the only one.
#[test]
fn processes_of_a_launcher_are_refused_without_mpi_unless_each_is_to_be_alone() {
    let folder = scratch();
    for size in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"] {
        let output = MLP.train(folder.path()).env(size, "2").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{size}");
        let said = message(&output);
        assert!(
            said.contains("2 processes were started together") && said.contains("--features mpi"),
            "{said}"
        );
        assert!(MLP.find(folder.path()).is_none());
        let output = train(&MLP, folder.path(), 2).env(size, "2").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{size}");
        assert!(message(&output).contains("leave it out under mpirun or srun"), "{}", message(&output));
    }
    let output = train(&MLP, folder.path(), 1).env("SLURM_STEP_NUM_TASKS", "2").output().unwrap();
    assert!(output.status.success(), "{}", message(&output));
    // A script of Slurm's with room for several processes is one itself.
    let output = MLP.train(folder.path()).env("SLURM_NTASKS", "2").output().unwrap();
    assert!(output.status.success(), "{}", message(&output));
}

#[test]
fn a_rank_with_another_recipe_is_named() {
    let folder = scratch();
    let [one, two] = by_hand(folder.path(), |two| {
        two.args(["--set", "optimizer.lr=0.5"]);
    });
    assert!(message(&one).starts_with("error: rank 1: has another recipe: "), "{}", message(&one));
    assert_eq!((one.status.code(), two.status.code()), (Some(1), Some(1)));
}

#[test]
fn a_plan_says_how_processes_share_a_run() {
    let folder = scratch();
    // The command before wrote the recipe.
    trained(&MLP, folder.path(), 1);
    let plan = |ranks: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command.current_dir(folder.path()).args([
            "plan",
            "mlp.yaml",
            "--no-probe",
            "--json",
            "--ranks",
            ranks,
        ]);
        command.args(["--set", "train.shards=12", "--set", "data.batch_size=13"]).args(more).output().unwrap()
    };
    let output = plan("3", &[]);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let (shared, parameters) = (&said["shared"][0], said["kinds"][0]["parameters"].as_u64().unwrap());
    assert_eq!((shared["shards"].as_u64(), shared["shards_each"].as_u64()), (Some(12), Some(4)));
    // The second of three processes has three parts of the tree: with the sum, four times its slices to two others.
    assert_eq!(shared["sent_bytes"].as_u64(), Some(4 * (4 * parameters) / 3 * 2));
    let state = shared["state_bytes"].as_u64().unwrap();
    assert!(state >= 4 * parameters && state.is_multiple_of(4 * parameters), "{state}");
    let divided: serde_json::Value = serde_json::from_slice(&plan("3", DIVIDED).stdout).unwrap();
    assert_eq!(divided["shared"][0]["state_bytes"].as_u64(), Some(state.div_ceil(3)));
    let output = plan("5", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(message(&output).contains("it takes 1, 2, 3, 4, 6, 12"), "{}", message(&output));
}

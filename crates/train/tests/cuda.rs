//! The loop on a CUDA device waits where it logs and nowhere else. On the stand-in driver of `cargo xtask gpu-check` this is a
//! dry run, in which kernels do nothing and everything that makes the host wait is counted; on a real device the runs are
//! real and nothing is counted.
#![cfg(feature = "cuda")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex};
use taper_train::run::{self, Options, Show, Status, Tick, Watch};
use taper_train::{Recipe, Registries};

const LOG_EVERY: u64 = 6;

const MLP: &str = "{name: mlp, hidden: [8]}";

fn images(model: &str) -> String {
    format!(
        "data: {{name: synthetic-images, batch_size: 8, train: 160, test: 16}}\nmodel: {model}\noptimizer: {{name: sgd, lr: 0.01}}\n"
    )
}

const TEXT: &str = "
data: {name: synthetic-text, vocab: 50, train: 3000, valid: 300, test: 300, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, emb: 8, hidden: 12, layers: 2}
optimizer: {name: sgd, lr: 0.5}
train: {bptt: {length: 20, half: 0.3, std: 5, min: 5}}
";

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A function of the stand-in; a real driver has none of that name.
fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a null handle asks for the first symbol of that name in the process; the name ends with a nul.
    let at = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

/// Launches, waits for the device, waits for one event, and pinned buffers so far, on the stand-in.
fn counts() -> Option<[u64; 4]> {
    let at = function(c"standin_count")?;
    // SAFETY: the stand-in declares `unsigned long long standin_count(int)`.
    let count: extern "C" fn(c_int) -> u64 = unsafe { std::mem::transmute(at) };
    Some([count(0), count(1), count(2), count(3)])
}

fn dry() {
    if let Some(at) = function(c"standin_dry") {
        // SAFETY: the stand-in declares `void standin_dry(void)`.
        let dry: extern "C" fn() = unsafe { std::mem::transmute(at) };
        dry();
    }
}

/// Whether there is a device; without one a line that says so, or a failure where one is required.
fn has_device() -> bool {
    dry();
    let Err(e) = candle_core::Device::new_cuda(0) else { return true };
    let line = format!("skipped: no CUDA device: {}", e.to_string().lines().next().unwrap_or_default());
    assert!(std::env::var_os("TAPER_REQUIRE_TOOLS").is_none(), "{line}");
    eprintln!("{line}");
    false
}

/// Trains 20 steps and returns the counts after each of them.
fn train(text: &str, set: &[&str]) -> Vec<(u64, [u64; 4])> {
    let log_every = format!("train.log_every={LOG_EVERY}");
    let common = ["device=cuda", "train.steps=20", &log_every];
    let set: Vec<String> = common.iter().chain(set).map(|s| (*s).to_owned()).collect();
    let registries = Registries::default();
    let recipe = Recipe::parse("cuda.yaml", text, &set, &registries).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let seen: Arc<Mutex<Vec<_>>> = Arc::default();
    let ticks = seen.clone();
    let watch = Watch::new(move |Tick { step, .. }| {
        if let Some(counts) = counts() {
            ticks.lock().unwrap().push((step, counts));
        }
    });
    let options = Options { runs: folder.path().into(), show: Show::Quiet, watch, ..Default::default() };
    let outcome = run::run(&recipe, &registries, &options).unwrap_or_else(|e| panic!("{set:?}: {e}"));
    assert_eq!((outcome.summary.status, outcome.summary.steps), (Status::Finished, 20), "{set:?}");
    let counted = seen.lock().unwrap().clone();
    counted
}

/// No step waits but the first, which has a loss to show, and those that log.
fn waits_only_to_log(text: &str, set: &[&str]) {
    let counted = train(text, set);
    for pair in counted.windows(2) {
        let [(_, before), (step, after)] = pair else { continue };
        let [launches, waits, events, _] = std::array::from_fn(|i| after[i] - before[i]);
        assert!(launches > 0, "{set:?}: step {step} launched nothing");
        if !step.is_multiple_of(LOG_EVERY) {
            assert_eq!(waits, 0, "{set:?}: step {step} waited");
            // Bytes are copied from pinned memory: a buffer is used again once its copy of eight batches ago has left it.
            // Pixels and a mask, of three batches at most.
            assert!(events <= 6, "{set:?}: step {step} waited for {events} events");
        } else {
            assert!(waits > 0, "{set:?}: step {step} logged without waiting");
        }
    }
}

#[test]
fn no_optimizer_makes_the_loop_wait() {
    if !has_device() {
        return;
    }
    for entry in taper_optim::Registry::builtin().list("*").unwrap() {
        let name = format!("optimizer.name={}", entry.info.name);
        // They choose rates by norms, on the host, or are made of candle's ops.
        let waits =
            ["adafactor", "adagd", "lamb", "lars", "lbfgs", "lookahead", "muon", "prodigy", "sam", "soap"];
        if waits.contains(&entry.info.name) {
            continue;
        }
        waits_only_to_log(&images(MLP), &[&name]);
        waits_only_to_log(&images(MLP), &[&name, "train.clip_norm=0.25"]);
    }
}

#[test]
fn no_network_makes_the_loop_wait() {
    if !has_device() {
        return;
    }
    for model in [
        "{name: mlp, hidden: [8, 8]}",
        "{name: resnet, num_blocks: [1, 1], widths: [8, 16]}",
        // With a max pooling.
        "{name: resnet, num_blocks: [1, 1], widths: [8, 16], stem: imagenet}",
        "{name: densenet, num_blocks: [2, 2], growth: 4}",
    ] {
        waits_only_to_log(&images(model), &["optimizer.name=decgd"]);
    }
    waits_only_to_log(TEXT, &["optimizer.name=decgd", "train.clip_norm=0.25"]);
}

#[test]
fn neither_augmentation_accumulation_nor_averaging_makes_it_wait() {
    if !has_device() {
        return;
    }
    for set in [
        "data.augment={crop_pad: 2, flip: true, cutout: 4, mixup: 0.8}",
        "train.accumulate=3",
        "train.average={kind: ema, decay: 0.9}",
        "train.loss_for_scale=raw",
    ] {
        // Enough images that 20 steps of three batches are one epoch.
        waits_only_to_log(&images(MLP), &[set, "optimizer.name=decgd", "data.train=640"]);
    }
}

#[test]
fn images_come_from_a_few_pinned_buffers() {
    if !has_device() {
        return;
    }
    let counted = train(&images(MLP), &[]);
    let (Some((_, first)), Some((_, last))) = (counted.first(), counted.last()) else { return };
    let pinned = last[3] - first[3];
    assert!(first[3] > 0 && pinned <= 16, "{pinned} buffers of pinned memory in 20 steps");
}

/// Two ranks with batch statistics and more shards than ranks, of which some are empty. A real device is one rank's alone.
#[cfg(feature = "nccl")]
#[test]
fn ranks_exchange_from_device_to_device() {
    if !has_device() || counts().is_none() {
        return;
    }
    let model = "{name: resnet, num_blocks: [1, 1], widths: [8, 16]}";
    // Batches of 8 and of 4 images.
    let short = |model: &str| images(model).replace("train: 160", "train: 12");
    for (text, shards) in [(short(model), 6), (short(MLP), 2), (TEXT.to_owned(), 4)] {
        let set = ["device=cuda".into(), "train.steps=5".into(), format!("train.shards={shards}")];
        let recipe = Recipe::parse("cuda.yaml", &text, &set, &Registries::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let worlds = taper_world::sockets::within(2, std::time::Duration::from_secs(60)).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                let (recipe, runs) = (&recipe, folder.path());
                let rank = move || {
                    let options = Options {
                        runs: runs.into(),
                        show: Show::Quiet,
                        world: world.clone(),
                        ..Default::default()
                    };
                    let outcome = run::run(recipe, &Registries::default(), &options).unwrap();
                    assert_eq!((outcome.summary.status, outcome.summary.steps), (Status::Finished, 5));
                    assert!(world.has_devices(), "{shards} shards went through the host");
                };
                // candle walks its graph by recursion.
                std::thread::Builder::new().stack_size(64 << 20).spawn_scoped(scope, rank).unwrap();
            }
        });
    }
}

//! What the loop promises, feature by feature, on runs of a few steps.
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use taper_data::Search;
use taper_train::run::{self, Options, Outcome, RunError, Show, Split, Status};
use taper_train::trained::{Choice, Trained};
use taper_train::verify::verify;
use taper_train::{Recipe, Registries};
use tempfile::TempDir;

/// Ten steps an epoch.
const IMAGES: &str = "
data: {name: synthetic-images, batch_size: 32, train: 320, test: 64}
model: {name: mlp, hidden: [8]}
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 2}
";

const TEXT: &str = "
data: {name: synthetic-text, vocab: 50, train: 3000, valid: 300, test: 300, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, emb: 8, hidden: 12, layers: 2}
optimizer: {name: sgd, lr: 0.5}
train: {epochs: 2, bptt: {length: 35, half: 0.3, std: 5, min: 5}}
";

fn attempt(text: &str, set: &[&str], runs: &Path) -> Result<Outcome, RunError> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let registries = Registries::default();
    let recipe = Recipe::parse("training.yaml", text, &set, &registries)?;
    run::run(&recipe, &registries, &Options { runs: runs.into(), show: Show::Quiet, ..Default::default() })
}

/// A run in a folder that lives as long as it.
fn train(text: &str, set: &[&str]) -> (Outcome, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (attempt(text, set, folder.path()).unwrap_or_else(|e| panic!("{set:?}: {e}")), folder)
}

fn refused(text: &str, set: &[&str]) -> String {
    attempt(text, set, tempfile::tempdir().unwrap().path()).unwrap_err().to_string()
}

/// (step, epoch) of all lines of a split.
fn lines(run: &Outcome, split: Split) -> Vec<(u64, u64)> {
    run.records.iter().filter(|r| r.split == split).map(|r| (r.step, r.epoch)).collect()
}

fn values(run: &Outcome, split: Split, name: &str) -> Vec<f64> {
    run.records.iter().filter(|r| r.split == split).filter_map(|r| r.values.get(name).copied()).collect()
}

fn checkpoints(run: &Outcome) -> BTreeSet<u64> {
    let entries = std::fs::read_dir(run.folder.join("checkpoints")).unwrap();
    entries.map(|e| e.unwrap().file_name().to_str().unwrap()["step-".len()..].parse().unwrap()).collect()
}

fn load(run: &Outcome, step: u64) -> HashMap<String, Tensor> {
    let path = run.folder.join(format!("checkpoints/step-{step}/model.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn weights(run: &Outcome, step: u64) -> BTreeMap<String, Vec<f64>> {
    let widen = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
    load(run, step).iter().map(|(name, t)| (name.clone(), widen(t))).collect()
}

/// What the steps between two checkpoints changed, all parameters in one list.
fn change(run: &Outcome, from: u64, to: u64) -> Vec<f64> {
    let (from, to) = (weights(run, from), weights(run, to));
    from.iter()
        .flat_map(|(name, a)| a.iter().zip(&to[name]).map(|(a, b)| b - a).collect::<Vec<_>>())
        .collect()
}

const EVERY_STEP: &str = "train.checkpoint={every_epochs: null, every_steps: 1, keep: 1000}";

#[test]
fn epochs_and_steps_measure_a_run() {
    let (run, _folder) = train(IMAGES, &[]);
    assert_eq!((run.summary.epochs, run.summary.steps), (2, 20));
    assert_eq!(lines(&run, Split::Train), [(10, 1), (20, 2)]);
    assert_eq!(lines(&run, Split::Test), [(10, 1), (20, 2)]);
    let (run, _folder) = train(IMAGES, &["train={steps: 13, log_every: 5}"]);
    assert_eq!((run.summary.epochs, run.summary.steps), (2, 13));
    assert_eq!(lines(&run, Split::Train), [(5, 1), (10, 1), (10, 1), (13, 2)]);
    let (run, _folder) = train(IMAGES, &["train.budget.steps=7"]);
    assert_eq!((run.summary.status, run.summary.steps), (Status::Finished, 7));
}

#[test]
fn evaluations_come_when_they_are_due_and_at_the_end() {
    let (run, _folder) = train(IMAGES, &["train={epochs: 5, eval_every: 2}"]);
    assert_eq!(lines(&run, Split::Test), [(20, 2), (40, 4), (50, 5)]);
    let (run, _folder) = train(IMAGES, &["train={steps: 24, eval_every: 5}"]);
    assert_eq!(lines(&run, Split::Test), [(5, 1), (10, 1), (15, 2), (20, 2), (24, 3)]);
}

#[test]
fn text_epochs_are_counted_each_by_its_own_windows() {
    let (run, _folder) = train(TEXT, &["train.epochs=3"]);
    let ends: Vec<u64> = lines(&run, Split::Train).into_iter().map(|(step, _)| step).collect();
    assert_eq!((ends.len(), run.summary.epochs), (3, 3), "no epoch is cut short: {ends:?}");
    let lengths: BTreeSet<u64> = [ends[0], ends[1] - ends[0], ends[2] - ends[1]].into();
    assert!(lengths.len() > 1, "with this seed epochs differ: {ends:?}");
    assert!(
        run.summary.last.contains_key("val.perplexity") && run.summary.last.contains_key("test.perplexity")
    );
}

/// Windows that stand alone, of a network that would carry a state: 2999 / (4·35) batches an epoch.
const WINDOWS: &str = "
data: {name: synthetic-text, vocab: 50, train: 3000, valid: 300, test: 300, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, emb: 8, hidden: 12, layers: 2}
optimizer: {name: sgd, lr: 0.5}
train: {epochs: 2, windows: {length: 35}, checkpoint: {keep: 9}}
";

#[test]
fn windows_that_stand_alone_read_the_text_once_an_epoch_and_carry_nothing() {
    let (run, _folder) = train(WINDOWS, &[]);
    assert_eq!(lines(&run, Split::Train), [(21, 1), (42, 2)]);
    assert!(!run.folder.join("checkpoints/step-42/carry.safetensors").exists());
    assert!(!run.summary.last.keys().any(|key| key.contains("bits")), "{:?}", run.summary.last);
    let (other, _folder_2) = train(WINDOWS, &["train.windows.order=sequential"]);
    assert_ne!(values(&run, Split::Test, "loss"), values(&other, Split::Test, "loss"));
    // Evaluated so many at a time or so many: the windows are the same, and none knows of those before it.
    let (wide, _folder_3) = train(WINDOWS, &["data.eval_batch_size=7"]);
    let [one, another] = [&run, &wide].map(|run| values(run, Split::Test, "loss"));
    // Sums of 299 terms of about 4 in another order, in f32.
    assert!(one.iter().zip(&another).all(|(a, b)| (a - b).abs() < 1e-5), "{one:?} {another:?}");
}

#[test]
fn accumulated_windows_step_like_one_large_batch_of_them() {
    // In order, so that two batches are one of twice the size; nothing is dropped, which goes by the batch.
    let set = |own: [&'static str; 2]| {
        let none =
            "model={dropout: {embedding: 0, input: 0, hidden: 0, output: 0, weight: 0}, alpha: 0, beta: 0}";
        [
            own[0],
            own[1],
            none,
            "train.windows.order=sequential",
            EVERY_STEP,
            "train.epochs=null",
            "train.steps=3",
        ]
    };
    let (small, _folder) = train(WINDOWS, &set(["train.accumulate=2", "data.batch_size=4"]));
    let (large, _folder_2) = train(WINDOWS, &set(["train.accumulate=1", "data.batch_size=8"]));
    let (small, large) = (weights(&small, 3), weights(&large, 3));
    for (name, large) in &large {
        for (a, b) in small[name].iter().zip(large) {
            // Sums over 280 tokens in another order, in f32, on weights below 1.
            assert!((a - b).abs() < 2e-6, "{name}: {a} instead of {b}");
        }
    }
}

#[test]
fn text_that_is_not_by_words_is_judged_in_bits() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.txt");
    std::fs::write(&file, "the cat sat on the mat, and the dog on the log\n".repeat(60)).unwrap();
    let bits = |set: &[&str]| {
        let path = format!("data.path={:?}", file.display().to_string());
        let by = ["data={name: text, batch_size: 2, eval_batch_size: 3}", path.as_str()];
        train(WINDOWS, &[&by, set].concat())
    };
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-14, "{a} {b}");
    let last = |run: &Outcome, key: &str| run.summary.last[key];
    let (by_char, _runs) = bits(&["data.by=char"]);
    assert_eq!(by_char.summary.metric, "bits_per_char");
    for split in ["val", "test"] {
        let [bits, loss] = ["bits_per_char", "loss"].map(|m| last(&by_char, &format!("{split}.{m}")));
        close(bits, loss / std::f64::consts::LN_2);
    }
    let (by_byte, _runs) = bits(&["data.by=byte", "train.metric=perplexity"]);
    assert_eq!(by_byte.summary.metric, "perplexity");
    close(last(&by_byte, "test.bits_per_byte"), last(&by_byte, "test.loss") / std::f64::consts::LN_2);
    // The whole text is 60 lines of 47 bytes, of which the last tenth is 282; its first piece is read and not predicted.
    let (by_piece, _runs) = bits(&["data.by=bpe", "data.max_vocab=280"]);
    let search = taper_data::Search::default();
    let options = serde_json::json!({"path": file, "by": "bpe", "max_vocab": 280});
    let set = taper_data::DataRegistry::builtin();
    let taper_data::Data::Text(text) = set.get("text").unwrap().load(&options, &search).unwrap().data else {
        panic!("not text")
    };
    let bytes = 282 - text.decode(&text.test[..1]).len();
    let tokens = text.test.len() - 1;
    assert!(bytes > 2 * tokens, "{bytes} {tokens}");
    let expected = last(&by_piece, "test.loss") / std::f64::consts::LN_2 * tokens as f64 / bytes as f64;
    close(last(&by_piece, "test.bits_per_byte"), expected);
    // Streams are judged as they were, unless they are to be judged so.
    let streams = ["data.by=char", "train={epochs: 1, windows: null, bptt: {length: 20}}"];
    let (plain, _runs) = bits(&streams);
    assert!(!plain.summary.last.keys().any(|key| key.contains("bits")));
    let (asked, _runs) = bits(&[&streams[..], &["train.metric=bits_per_char"]].concat());
    assert_eq!(asked.summary.metric, "bits_per_char");
    assert_eq!(last(&asked, "test.loss"), last(&plain, "test.loss"));
}

#[test]
fn accumulated_batches_step_like_one_large_batch() {
    let small = ["train={steps: 3, accumulate: 4}", "data.batch_size=16", EVERY_STEP];
    let (small, _folder) = train(IMAGES, &small);
    let (large, _folder_2) = train(IMAGES, &["train={steps: 3}", "data.batch_size=64", EVERY_STEP]);
    let (small, large) = (weights(&small, 3), weights(&large, 3));
    for (name, large) in &large {
        for (a, b) in small[name].iter().zip(large) {
            // Sums over 64 samples in another order, in f32, on weights below 1.
            assert!((a - b).abs() < 2e-6, "{name}: {a} instead of {b}");
        }
    }
}

#[test]
fn clipping_bounds_a_step() {
    let (run, _folder) = train(IMAGES, &["train={steps: 2, clip_norm: 0.01}", "optimizer.lr=1", EVERY_STEP]);
    let norm = change(&run, 1, 2).iter().map(|d| d * d).sum::<f64>().sqrt();
    // Each of some 25,000 differences of weights below 1 carries an f32 rounding of up to 6e-8.
    assert!((norm - 0.01).abs() < 1e-5, "{norm}");
    let set = ["train={steps: 2, clip_value: 1e-3}", "optimizer.lr=1", EVERY_STEP];
    let (run, _folder) = train(IMAGES, &set);
    let largest = change(&run, 1, 2).iter().fold(0f64, |most, d| most.max(d.abs()));
    assert!((largest - 1e-3).abs() < 2e-7, "{largest}");
}

#[test]
fn schedules_count_steps_or_epochs() {
    let rates = |set: &[&str]| {
        let (run, _folder) = train(IMAGES, &[&["train={epochs: 2, log_every: 4}"], set].concat());
        let train = run.records.iter().filter(|r| r.split == Split::Train);
        train.map(|r| (r.step, r.values["lr"])).collect::<Vec<_>>()
    };
    assert_eq!(
        rates(&["schedule={kind: milestones, per: step, at: [8], factor: 0.5}"]),
        [(4, 0.1), (8, 0.1), (10, 0.05), (12, 0.05), (16, 0.05), (20, 0.05), (20, 0.05)]
    );
    assert_eq!(
        rates(&["schedule={kind: milestones, per: epoch, at: [1], factor: 0.5}"]),
        [(4, 0.1), (8, 0.1), (10, 0.1), (12, 0.05), (16, 0.05), (20, 0.05), (20, 0.05)]
    );
}

#[test]
fn the_rate_of_a_window_follows_its_length() {
    let set = ["seed=2", "train={steps: 1}", "train.bptt={length: 35, std: 5}"];
    let (plain, _folder) = train(TEXT, &set);
    let (scaled, _folder_2) = train(TEXT, &[&set[..], &["train.scale_lr_by_length=true"]].concat());
    // The first step starts from the same weights: its change is the rate's alone.
    let from = weights(&train(TEXT, &[&set[..], &["optimizer.lr=1e-30"]].concat()).0, 1);
    let first = |run: &Outcome| -> f64 {
        let to = weights(run, 1);
        let squares = from.iter().flat_map(|(name, a)| a.iter().zip(&to[name]).map(|(a, b)| (b - a).powi(2)));
        squares.sum::<f64>().sqrt()
    };
    let length = 35.0 * first(&scaled) / first(&plain);
    // A whole number of tokens, up to f32 roundings of the weights.
    assert!((length - length.round()).abs() < 1e-3 && length.round() != 35.0, "{length}");
}

#[test]
fn the_validation_set_chooses_where_it_is_to() {
    let (run, _folder) = train(IMAGES, &["data.val=0.25", "train={epochs: 4, select: val, metric: loss}"]);
    assert_eq!(run.summary.steps, 4 * 8, "a quarter of the images is not trained on");
    let val = values(&run, Split::Val, "loss");
    let best = (0..4).min_by(|a, b| val[*a].total_cmp(&val[*b])).unwrap();
    assert_eq!(run.summary.selected["val.loss"], val[best]);
    assert_eq!(run.summary.selected["test.loss"], values(&run, Split::Test, "loss")[best]);
    assert!(refused(IMAGES, &["train.select=val"]).contains("data.val"));
    assert!(refused(IMAGES, &["schedule={kind: plateau}"]).contains("watches a set"));
}

/// A bowl whose loss falls along one axis for some steps before it rises along the other: least after step 5, and of
/// every third step after the sixth.
const BOWL: &str = "
problem: {name: quadratic, n: 2, condition: 10, start: [1, -0.1]}
optimizer: {name: sgd, lr: 0.21}
train: {steps: 40, eval_every: 3, select: test}
";

#[test]
fn an_early_stop_ends_a_run_that_no_longer_improves() {
    let (run, _folder) = train(BOWL, &["train.early_stop={patience: 3}"]);
    assert_eq!((run.summary.status, run.summary.steps), (Status::Finished, 6 + 9));
    assert_eq!(run.summary.best["test.loss"].step, 6);
    // The loss of a network never falls by more than it was: the first evaluation is the last improvement.
    let stop = "train={epochs: 50, select: test, metric: loss, early_stop: {patience: 2, min_delta: 100}}";
    let (run, folder) = train(IMAGES, &[stop]);
    assert_eq!((run.summary.status, run.summary.epochs), (Status::Finished, 3));
    let least = values(&run, Split::Test, "loss").into_iter().fold(f64::INFINITY, f64::min);
    assert_eq!(run.summary.selected["test.loss"], least, "the best is the best, however little it is better");
    // Killed after its last checkpoint, it does not go on training.
    std::fs::remove_file(run.folder.join("summary.json")).unwrap();
    let again = attempt(IMAGES, &[stop], folder.path()).unwrap();
    assert_eq!(again.summary, run.summary);
}

#[test]
fn a_finished_run_whose_checkpoints_were_removed_has_its_results_and_no_weights() {
    let (run, folder) = train(IMAGES, &[]);
    let all = run.folder.join("checkpoints");
    let kept = folder.path().join("kept");
    std::fs::rename(&all, &kept).unwrap();
    let again = attempt(IMAGES, &[], folder.path()).unwrap();
    assert_eq!((&again.summary, &again.records), (&run.summary, &run.records));
    assert!(!all.exists(), "it was trained again");
    let registries = Registries::default();
    let trained = Trained::open(&run.folder, Choice::default(), &registries, &Search::default());
    let refused = trained.err().unwrap().to_string();
    assert!(refused.contains("no weights") && refused.contains("--fresh"), "{refused}");
    let verified = verify(&run.folder, None, &registries, &Options::default()).unwrap();
    assert!(verified.verified && verified.to_string().contains("were removed"), "{verified}");
    // A longer run has nothing to go on from, and is what it is without it.
    let longer = attempt(IMAGES, &["train.epochs=3"], folder.path()).unwrap();
    assert_eq!(longer.summary, train(IMAGES, &["train.epochs=3"]).0.summary);
    // A part of them missing is damage.
    std::fs::rename(&kept, &all).unwrap();
    std::fs::remove_dir_all(all.join("step-20")).unwrap();
    let damaged = attempt(IMAGES, &[], folder.path()).unwrap_err().to_string();
    assert!(damaged.contains("step-20"), "{damaged}");
}

#[test]
fn the_best_checkpoint_stays_wherever_it_was_evaluated() {
    let every = "train.checkpoint={every_epochs: null, every_steps: 7, keep: 2}";
    for average in ["{kind: none}", "{kind: ema, decay: 0.1}"] {
        let (run, _folder) = train(BOWL, &[every, &format!("train.average={average}")]);
        assert_eq!(run.summary.best["test.loss"].step, 6);
        assert_eq!(checkpoints(&run), BTreeSet::from([6, 35, 40]));
        let file = run.folder.join("checkpoints/step-6/average.safetensors");
        assert_eq!(file.exists(), average.contains("ema"));
    }
}

#[test]
fn frozen_parameters_stay_and_groups_have_optimizers_of_their_own() {
    let (run, _folder) = train(IMAGES, &["train={steps: 3, freeze: [\"*.bias\"]}", EVERY_STEP]);
    let (one, three) = (weights(&run, 1), weights(&run, 3));
    for (name, value) in &one {
        assert_eq!(value == &three[name], name.ends_with("bias"), "{name}");
    }
    assert!(refused(IMAGES, &["train.freeze=[\"*.biass\"]"]).contains("`*.biass` matches no parameter"));

    let groups = "optimizer.groups=[{match: \"*.bias\", name: adam, lr: 0.01}]";
    let (run, _folder) = train(IMAGES, &["train={steps: 3}", groups, EVERY_STEP]);
    let (plain, _folder_2) = train(IMAGES, &["train={steps: 3}", EVERY_STEP]);
    let (mixed, plain) = (weights(&run, 1), weights(&plain, 1));
    for (name, value) in &plain {
        assert_eq!(
            value == &mixed[name],
            name.ends_with("weight"),
            "{name}: the first step of SGD is the same"
        );
    }
    assert!(run.folder.join("checkpoints/step-3/optimizer-1.safetensors").exists());
}

#[test]
fn a_run_starts_from_given_weights() {
    let (first, folder) = train(IMAGES, &["train={steps: 5}"]);
    let file = folder.path().join("start.safetensors");
    candle_core::safetensors::save(&load(&first, 5), &file).unwrap();
    let from = format!("train.init_from={}", file.display());
    let (run, _folder) = train(IMAGES, &["train={steps: 1}", "optimizer.lr=1e-30", &from]);
    assert_eq!(weights(&run, 1), weights(&first, 5));
    assert!(refused(IMAGES, &["model.hidden=[9]", &from]).contains("expected [9, 3072], found [8, 3072]"));
}

#[test]
fn a_diverged_run_fails_or_is_recorded() {
    let wild = ["optimizer.lr=1e30", "train.epochs=3"];
    assert!(refused(IMAGES, &wild).contains("the weights were left as they were"));
    let (run, folder) = train(IMAGES, &[wild[0], wild[1], "train.on_divergence=record"]);
    assert_eq!(run.summary.status, Status::Diverged);
    assert!(run.summary.reason.as_ref().is_some_and(|r| r.contains("the loss is") || r.contains("the norm")));
    let again = attempt(IMAGES, &[wild[0], wild[1], "train.on_divergence=record"], folder.path()).unwrap();
    assert_eq!(again.summary, run.summary, "a recorded divergence is an outcome");
}

#[test]
fn a_time_budget_interrupts_and_the_same_command_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let budget = ["train.budget.seconds=1e-9", "train.checkpoint={every_epochs: 1, keep: 1}"];
    let mut sessions = 0;
    let run = loop {
        let run = attempt(IMAGES, &budget, folder.path()).unwrap();
        sessions += 1;
        if run.summary.status == Status::Finished {
            break run;
        }
        assert_eq!(run.summary.status, Status::Interrupted);
    };
    // One a step; the last of them finishes.
    assert_eq!(sessions, 20);
    let (whole, _folder) = train(IMAGES, &["train.checkpoint={every_epochs: 1, keep: 1}"]);
    assert_eq!(weights(&whole, 20), weights(&run, 20));
}

#[test]
fn every_epoch_has_its_line_of_times() {
    let (run, _folder) = train(IMAGES, &["train.epochs=3"]);
    let text = std::fs::read_to_string(run.folder.join("timing.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let places: Vec<_> = lines.iter().map(|l| (l["epoch"].as_u64(), l["step"].as_u64())).collect();
    assert_eq!(places, [(Some(1), Some(10)), (Some(2), Some(20)), (Some(3), Some(30))]);
    for line in &lines {
        let (seconds, rate) = (line["seconds"].as_f64().unwrap(), line["steps_per_second"].as_f64().unwrap());
        assert!((seconds * rate - 10.0).abs() < 1e-9, "{line}");
    }
}

#[test]
fn numbers_that_are_none_do_not_stop_a_run_from_resuming() {
    // The loss of text can be so large that its exponential is infinite; JSON has no word for that.
    let folder = tempfile::tempdir().unwrap();
    let wild = ["optimizer={name: sgd, lr: 1e6}", "train.on_divergence=record", "train.budget.seconds=1e-9"];
    let mut infinite = false;
    for _ in 0..400 {
        let run = attempt(TEXT, &wild, folder.path()).unwrap();
        infinite |= run.records.iter().any(|r| !r.values.values().all(|v| v.is_finite()));
        if run.summary.status != Status::Interrupted {
            break;
        }
    }
    assert!(infinite, "the rate above is not large enough to test anything");
    let finished = attempt(TEXT, &wild, folder.path()).unwrap();
    assert_ne!(finished.summary.status, Status::Interrupted);
}

#[test]
fn a_scheduled_momentum_is_each_optimizers_own() {
    // A momentum that is scheduled to stay as it is stays as it is: the group's at 0.5, the other's at 0.9.
    let two = "optimizer={name: sgdm, lr: 0.1, momentum: 0.9, groups: [{match: '*.bias', name: sgdm, lr: 0.1, momentum: 0.5}]}";
    let (plain, _a) = train(IMAGES, &[two]);
    let (scheduled, _b) = train(IMAGES, &[two, "schedule.momentum={kind: constant}"]);
    assert_eq!(weights(&plain, 20), weights(&scheduled, 20));
}

#[test]
fn accumulated_windows_have_the_rate_of_their_mean_length() {
    use taper_data::{Lengths, TextStream};
    let lengths = Lengths { base: 35, half: 0.3, deviation: 5.0, least: 5 };
    let stream = TextStream::new(vec![0; 3000].into(), 4).unwrap();
    let scales: Vec<f64> = stream.windows(1, 0, lengths).take(3).map(|window| window.rate_scale).collect();
    let mean = scales.iter().sum::<f64>() / 3.0;
    assert!(scales[2] != mean, "{scales:?}");
    let train_of = |rate: f64, scaled: bool| {
        let lr = format!("optimizer.lr={rate:?}");
        let scale = format!("train.scale_lr_by_length={scaled}");
        train(TEXT, &["train.steps=1", "train.accumulate=3", &lr, &scale])
    };
    let ((scaled, _a), (fixed, _b)) = (train_of(0.5, true), train_of(0.5 * mean, false));
    assert_eq!(weights(&scaled, 1), weights(&fixed, 1));
}

/// The loss of a first step is a line in the share that is spread over the classes, and evaluations know nothing of it.
#[test]
fn labels_are_smoothed_in_training_alone() {
    let train = |smoothing: f64, mixup: f64| {
        let set = [
            format!("train={{steps: 1, log_every: 1, label_smoothing: {smoothing}}}"),
            format!("data.augment.mixup={mixup}"),
            // A step that changes no weight.
            "optimizer.lr=1e-30".to_owned(),
        ];
        let (run, _folder) = train(IMAGES, &set.each_ref().map(String::as_str));
        (values(&run, Split::Train, "loss")[0], values(&run, Split::Test, "loss")[0])
    };
    for mixup in [0.0, 0.4] {
        let [(none, test), (little, _), (more, same)] = [0.0, 0.25, 0.5].map(|share| train(share, mixup));
        assert!((none - little).abs() > 1e-3, "{none} {little}");
        // Sums of f32, each rounded a few times.
        assert!((little - (none + more) / 2.0).abs() < 1e-6 * none, "{none} {little} {more}");
        assert_eq!(test, same);
    }
    assert!(refused(TEXT, &["train.label_smoothing=0.1"]).contains("classes of images"));
    assert!(refused(IMAGES, &["train.label_smoothing=1.0"]).contains("less than 1"));
}

#[test]
fn bf16_trains_nearly_the_same_whatever_the_threads_and_interruptions() {
    let resnet = "
data: {name: synthetic-images, batch_size: 16, train: 32, test: 16}
model: {name: resnet, num_blocks: [1], widths: [16]}
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 1}
";
    for text in [IMAGES, TEXT, resnet] {
        let steps = "train={steps: 2}";
        let (full, _folder) = train(text, &[steps, EVERY_STEP]);
        let (half, _folder_2) = train(text, &[steps, "train.precision=bf16", EVERY_STEP]);
        let (a, b) = (change(&full, 1, 2), change(&half, 1, 2));
        let norm = |v: &[f64]| v.iter().map(|d| d * d).sum::<f64>().sqrt();
        let apart = norm(&a.iter().zip(&b).map(|(a, b)| a - b).collect::<Vec<_>>()) / norm(&a);
        // Each of a few layers rounds its operands by 2⁻⁹ at most.
        assert!((1e-5..5e-2).contains(&apart), "{apart}");

        let threads = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let set = [steps, "train.precision=bf16", EVERY_STEP];
        let (again, _folder_3) = threads.install(|| train(text, &set));
        assert_eq!(weights(&half, 2), weights(&again, 2));
        // One step, then the other in a call of its own.
        let folder = tempfile::tempdir().unwrap();
        let stop = |steps: u64| {
            let budget = format!("train.budget.steps={steps}");
            attempt(text, &["train={steps: 2}", "train.precision=bf16", EVERY_STEP, &budget], folder.path())
                .unwrap()
        };
        stop(1);
        let gone_on = stop(2);
        assert_eq!(weights(&half, 2), weights(&gone_on, 2));
    }
    let id = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        Recipe::parse("training.yaml", IMAGES, &set, &Registries::default()).unwrap().id().to_owned()
    };
    assert_eq!(id(&[]), id(&["train.precision=f32"]), "spelled out it is the same run");
    assert_ne!(id(&[]), id(&["train.precision=bf16"]));
}

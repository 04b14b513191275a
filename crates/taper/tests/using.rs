//! Using a run: `eval`, `predict`, `export`, as a user meets them.
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use taper_data::photo;

/// Classes by a plain network, with a validation set.
const MLP: &str = "
name: mlp
data: {name: synthetic-images, train: 96, test: 32, classes: 4, batch_size: 8, eval_batch_size: 16, val: 0.25}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 4, select: val}
";

/// Running statistics, crops, two batches a step.
const RESNET: &str = "
name: resnet
data: {name: synthetic-images, train: 64, test: 24, classes: 4, batch_size: 8, eval_batch_size: 10, augment: {crop_pad: 2, flip: true}}
model: {name: resnet, num_blocks: [1, 1], widths: [4, 8]}
optimizer: {name: adam, lr: 0.01}
train: {epochs: 3, select: test, accumulate: 2}
";

const LSTM: &str = "
name: lstm
data: {name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, layers: 2, emb: 12, hidden: 16}
optimizer: {name: decgd, lr: 0.05}
train: {epochs: 2, select: val, bptt: {length: 20, half: 0.05, std: 3, min: 5}}
";

/// A context of eight pieces, whatever the length of the text.
const GPT: &str = "
name: gpt
data: {name: text, path: mine.txt, by: bpe, max_vocab: 270, batch_size: 4, eval_batch_size: 3}
model: {name: gpt, layers: 2, heads: 2, emb: 16, block: 8}
optimizer: {name: adamw, lr: 0.01}
train: {epochs: 1, windows: {length: 8}}
";

fn taper(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    command
        .current_dir(folder)
        .args(args)
        .env_remove("TAPER_DATA")
        .env("TAPER_OFFLINE", "1")
        .output()
        .unwrap()
}

/// What it prints; its success is expected.
fn prints(folder: &Path, args: &[&str]) -> String {
    let output = taper(folder, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Exit code 2 and all of `parts` on standard error; what it printed.
fn refused(folder: &Path, args: &[&str], parts: &[&str]) -> String {
    let output = taper(folder, args);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{args:?}: expected `{part}` in:\n{message}");
    }
    assert!(!message.contains("panicked"), "{message}");
    String::from_utf8(output.stdout).unwrap()
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Trains a recipe with these settings; the run's folder.
fn trained(folder: &Path, recipe: &str, set: &[&str]) -> String {
    std::fs::write(folder.join("recipe.yaml"), recipe).unwrap();
    let mut args = vec!["train", "recipe.yaml", "--quiet"];
    set.iter().for_each(|set| args.extend(["--set", set]));
    prints(folder, &args).trim().to_owned()
}

/// The digits after a key in a text of JSON, as they are written.
fn digits<'a>(text: &'a str, key: &str) -> &'a str {
    let after = text.split_once(&format!("\"{key}\":")).unwrap_or_else(|| panic!("no {key} in {text}")).1;
    after.trim_start().split([',', '\n', '}']).next().unwrap()
}

/// The part of summary.json under a key.
fn section(folder: &Path, run: &str, name: &str) -> String {
    let text = std::fs::read_to_string(folder.join(run).join("summary.json")).unwrap();
    let after = text.split_once(&format!("\"{name}\": {{")).unwrap().1;
    after.split_once('}').unwrap().0.to_owned()
}

#[test]
fn an_evaluation_has_the_bytes_of_the_summary() {
    let cases: [(&str, &[&str], &str); 9] = [
        (MLP, &[], "trained"),
        (RESNET, &[], "trained"),
        (LSTM, &[], "trained"),
        (MLP, &["train.average={kind: ema, decay: 0.9}"], "average"),
        (RESNET, &["train.average={kind: swa, start: 1}"], "average"),
        (RESNET, &["optimizer={name: sf_adamw, lr: 0.01}"], "evaluation"),
        (MLP, &["optimizer={name: lookahead, k: 5, inner: {name: adam, lr: 0.01}}"], "evaluation"),
        (LSTM, &["optimizer={name: sf_adamw, lr: 0.01}"], "evaluation"),
        (MLP, &["train.shards=2"], "trained"),
    ];
    for (recipe, set, weights) in cases {
        let folder = scratch();
        let run = trained(folder.path(), recipe, set);
        let metric = if recipe == LSTM { "perplexity" } else { "accuracy" };
        // The newest checkpoint is the end of the run, the best the selected one.
        for (flags, of) in [(&[][..], "last"), (&["--best"], "selected")] {
            let expected = section(folder.path(), &run, of);
            for split in ["test", "val"] {
                if split == "val" && recipe == RESNET {
                    continue;
                }
                for threads in ["1", "2"] {
                    let args =
                        [&["eval", &run, "--json", "--split", split, "--threads", threads], flags].concat();
                    let found = prints(folder.path(), &args);
                    for key in [format!("{split}.loss"), format!("{split}.{metric}")] {
                        assert_eq!(digits(&found, &key), digits(&expected, &key), "{set:?} {key}: {found}");
                    }
                    let value: Value = serde_json::from_str(&found).unwrap();
                    assert_eq!(value["as_recorded"], true, "{found}");
                    assert!(
                        value["weights"] == weights || value["weights"].get(weights).is_some(),
                        "{found}"
                    );
                }
            }
        }
        let text = prints(folder.path(), &["eval", &run]);
        assert!(text.contains("to the bit"), "{text}");
    }
}

#[test]
fn other_weights_and_the_training_set_can_be_asked_for() {
    let folder = scratch();
    let run = trained(folder.path(), MLP, &["train.average={kind: ema, decay: 0.9}"]);
    let of = |args: &[&str]| -> Value {
        serde_json::from_str(&prints(folder.path(), &[&["eval", &run, "--json"], args].concat())).unwrap()
    };
    let (average, trained) = (of(&[]), of(&["--as-trained"]));
    assert_eq!(
        (trained["weights"].as_str(), &trained["as_recorded"]),
        (Some("trained"), &Value::Bool(false))
    );
    assert_ne!(average["values"], trained["values"]);
    let train = of(&["--split", "train"]);
    // A quarter of 96 is put aside.
    assert_eq!((train["samples"].as_u64(), &train["as_recorded"]), (Some(72), &Value::Null));
    let [confusion, classes] = ["confusion", "classes"].map(|key| train["classes"][key].as_array().unwrap());
    let all: u64 =
        confusion.iter().flat_map(|row| row.as_array().unwrap()).map(|n| n.as_u64().unwrap()).sum();
    assert_eq!((all, classes.len()), (72, 4));
    let right: u64 = classes.iter().map(|class| class["right"].as_u64().unwrap()).sum();
    assert_eq!(train["values"]["train.accuracy"].as_f64(), Some(right as f64 / 72.0));

    let picture = folder.path().join("confusion.svg");
    prints(folder.path(), &["eval", &run, "--out", "confusion.svg"]);
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("expected error"), "{drawn}");
    // The same again is no loss; another picture would be one.
    prints(folder.path(), &["eval", &run, "--out", "confusion.svg"]);
    refused(
        folder.path(),
        &["eval", &run, "--split", "train", "--out", "confusion.svg"],
        &["is there already"],
    );
    assert_eq!(std::fs::read_to_string(&picture).unwrap(), drawn);
    refused(folder.path(), &["eval", &run, "--out", "confusion.png"], &[".svg"]);
}

#[test]
fn what_is_no_run_or_of_another_is_refused() {
    let folder = scratch();
    let run = trained(folder.path(), MLP, &[]);
    let other = trained(folder.path(), MLP, &["model.hidden=[5]"]);
    let path = folder.path();
    refused(path, &["eval", "nowhere"], &["nowhere", "there is no such folder"]);
    std::fs::create_dir(path.join("empty")).unwrap();
    refused(path, &["eval", "empty"], &["empty", "recipe.yaml"]);
    refused(path, &["eval", &run, "--split", "probe"], &["probe"]);
    let numeric = "problem: {name: powell}\noptimizer: {name: adam, lr: 0.1}\ntrain: {steps: 3}\n";
    let function = trained(path, numeric, &[]);
    refused(path, &["eval", &function], &["numeric function"]);
    refused(path, &["export", &function, "--format", "onnx"], &["numeric function"]);
    let unsplit = trained(path, RESNET, &[]);
    refused(path, &["eval", &unsplit, "--split", "val"], &["has no val set"]);

    // A checkpoint of the other network in the place of its own, and one outside its run.
    let newest = |run: &str| {
        let mut all: Vec<PathBuf> = std::fs::read_dir(path.join(run).join("checkpoints"))
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        all.sort_by_key(|path| path.file_name().unwrap().to_str().unwrap()[5..].parse::<u64>().unwrap());
        all.pop().unwrap()
    };
    let (own, theirs) = (newest(&run), newest(&other));
    let inside = own.strip_prefix(path).unwrap().to_str().unwrap().to_owned();
    let before = prints(path, &["eval", &run, "--json"]);
    assert_eq!(prints(path, &["eval", &inside, "--json"]), before);
    std::fs::rename(&own, path.join("aside")).unwrap();
    refused(path, &["eval", "aside"], &["aside", "not in its run"]);
    copy(&theirs, &own);
    for command in
        [&["eval", &run][..], &["eval", &inside], &["export", &run, "--format", "onnx", "--out", "x.onnx"]]
    {
        let output = taper(path, command);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("belongs to the recipe"), "{message}");
    }
    assert!(!path.join("x.onnx").exists());
    // A flipped bit of the weights.
    let weights = own.join("model.safetensors");
    std::fs::remove_dir_all(&own).unwrap();
    std::fs::rename(path.join("aside"), &own).unwrap();
    assert_eq!(prints(path, &["eval", &run, "--json"]), before);
    let mut bytes = std::fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let output = taper(path, &["eval", &run]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("model.safetensors: sha256 was"));
}

#[test]
fn other_data_is_judged_if_it_fits() {
    let folder = scratch();
    let path = folder.path();
    let of = |run: &str, args: &[&str]| -> Value {
        serde_json::from_str(&prints(path, &[&["eval", run, "--json"], args].concat())).unwrap()
    };
    // The run's own data by another way has the same numbers, and there is nothing to compare them with.
    let run = trained(path, MLP, &[]);
    let own = "{name: synthetic-images, train: 96, test: 32, classes: 4}";
    let found = of(&run, &["--on", own]);
    assert_eq!((&found["values"], &found["as_recorded"]), (&of(&run, &[])["values"], &Value::Null));
    // All of it: nothing is put aside.
    assert_eq!(of(&run, &["--on", own, "--split", "train"])["samples"], 96);
    let others = of(&run, &["--on", "{name: synthetic-images, seed: 2, train: 96, test: 40, classes: 4}"]);
    assert_eq!(others["samples"], 40);
    assert_ne!(others["values"], found["values"]);
    let refuse = |run: &str, on: &str, parts: &[&str]| {
        refused(path, &["eval", run, "--on", on], parts);
    };
    refuse(&run, "{name: synthetic-images, classes: 5, train: 9, test: 9}", &["expected 4 classes, found 5"]);
    refuse(&run, "mnist", &["expected images of 32×32", "found images of 28×28"]);
    refuse(
        &run,
        "{name: synthetic-text, train: 900, valid: 90, test: 90}",
        &["expected images of", "found text of"],
    );
    refuse(&run, "{name: synthetic-images, colour: red}", &["colour"]);
    refuse(&run, "imagenet", &["unknown data set `imagenet`"]);
    refuse(&run, "{path: photos}", &["--on: expected a data set's name"]);
    refuse(&run, "{name: [", &["--on"]);
    refused(path, &["eval", &run, "--on", own, "--split", "val"], &["has no val set"]);

    let run = trained(path, LSTM, &[]);
    let own = "{name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100}";
    assert_eq!(of(&run, &["--on", own])["values"], of(&run, &[])["values"]);
    assert_eq!(of(&run, &["--on", own, "--split", "val"])["values"], of(&run, &["--split", "val"])["values"]);
    // Words by their text, wherever the other vocabulary has them.
    std::fs::write(path.join("mine.txt"), "w3 w1 w2 w1\n".repeat(40)).unwrap();
    refuse(&run, "{name: text, path: mine.txt}", &["\"<eos>\" is not in the vocabulary"]);
    refuse(&run, "{name: text, path: mine.txt, by: char}", &["expected text by word, found text by char"]);
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn png(path: &Path, height: usize, width: usize, channels: usize) {
    let pixels: Vec<u8> = (0..height * width * channels).map(|i| (i * 37 % 256) as u8).collect();
    std::fs::write(path, photo::png(height, width, channels, &pixels).unwrap()).unwrap();
}

#[test]
fn pictures_are_named_and_bad_ones_do_not_hide_the_others() {
    let folder = scratch();
    let (path, run) = (folder.path(), trained(folder.path(), MLP, &[]));
    let pictures = path.join("pictures");
    std::fs::create_dir(&pictures).unwrap();
    refused(path, &["predict", &run, "pictures"], &["expected pictures (png, jpg, jpeg), found none"]);
    png(&pictures.join("b.png"), 32, 32, 3);
    png(&pictures.join("A.PNG"), 32, 32, 1);
    std::fs::write(pictures.join("notes.txt"), "not a picture").unwrap();
    let found = prints(path, &["predict", &run, "pictures", "--json", "--top-k", "4"]);
    let found: Vec<Value> = found.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        found.iter().map(|v| v["file"].as_str().unwrap()).collect::<Vec<_>>(),
        ["pictures/A.PNG", "pictures/b.png"]
    );
    for answer in &found {
        let top: Vec<(u64, f64)> = answer["top"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| (t["class"].as_u64().unwrap(), t["probability"].as_f64().unwrap()))
            .collect();
        let logits: Vec<f64> =
            answer["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        // Four roundings of f64.
        assert!((top.iter().map(|t| t.1).sum::<f64>() - 1.0).abs() < 4.0 * f64::EPSILON);
        let best = (0..4).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        assert!(top.windows(2).all(|w| w[0].1 >= w[1].1) && top[0].0 == best as u64, "{answer}");
    }
    png(&pictures.join("large.png"), 64, 48, 3);
    std::fs::write(pictures.join("no.png"), "not a picture").unwrap();
    std::fs::write(pictures.join("torn.png"), &std::fs::read(pictures.join("b.png")).unwrap()[..99]).unwrap();
    let text = refused(
        path,
        &["predict", &run, "pictures", "missing.png"],
        &[
            "note: 1 of 3 pictures resized to 32x32",
            "no.png: expected a PNG or JPEG image, found a file that begins with 6e6f74",
            "torn.png: not a readable PNG",
            "missing.png",
            "3 of 6 pictures could not be used",
        ],
    );
    assert_eq!(text.lines().count(), 3, "{text}");
    refused(path, &["predict", &run], &["expected pictures"]);
    refused(
        path,
        &["predict", &run, "pictures", "--top-k", "5"],
        &["--top-k: expected 1 to the 4 classes, found 5"],
    );
    refused(path, &["predict", &run, "--prompt", "hello"], &["network for images"]);
}

#[test]
fn text_goes_on_the_same_way_with_the_same_seed() {
    let folder = scratch();
    let (path, run) = (folder.path(), trained(folder.path(), LSTM, &[]));
    let say = |args: &[&str]| {
        prints(path, &[&["predict", &run, "--prompt", "w1 w2", "--tokens", "30"], args].concat())
    };
    let first = say(&[]);
    assert_eq!(first.split_whitespace().count(), 32, "{first}");
    assert!(first.starts_with("w1 w2 w"), "{first}");
    assert_eq!(first, say(&["--threads", "1", "--seed", "1"]));
    assert_ne!(first, say(&["--seed", "2"]));
    // The most probable word, however it is asked for.
    let greedy = say(&["--temperature", "0"]);
    assert_eq!(greedy, say(&["--top-k", "1", "--seed", "7"]));
    let told: Value = serde_json::from_str(&say(&["--temperature", "0", "--json"])).unwrap();
    assert_eq!(format!("w1 w2 {}\n", told["continuation"].as_str().unwrap()), greedy);
    assert_eq!((&told["temperature"], &told["top_k"]), (&0.0.into(), &Value::Null));
    let told: Value =
        serde_json::from_str(&say(&["--top-k", "3", "--temperature", "0.5", "--json"])).unwrap();
    assert_eq!((&told["temperature"], &told["top_k"]), (&0.5.into(), &3.into()));
    // A long text needs no more memory than a short one.
    assert_eq!(
        prints(path, &["predict", &run, "--prompt", "w1", "--tokens", "5000"]).split_whitespace().count(),
        5001
    );
    refused(path, &["predict", &run, "--prompt", "w1 nonsense"], &["\"nonsense\" is not in the vocabulary"]);
    refused(path, &["predict", &run], &["expected a prompt"]);
    refused(path, &["predict", &run, "--prompt", "w1", "--temperature", "-1"], &["temperature"]);
    refused(path, &["predict", &run, "picture.png"], &["language model"]);
    refused(path, &["eval", &run, "--out", "x.svg"], &["network for images"]);
}

#[test]
fn a_context_goes_on_as_if_it_were_read_anew_for_every_token() {
    let folder = scratch();
    let path = folder.path();
    std::fs::write(path.join("mine.txt"), "die Katze saß auf der Matte\n".repeat(60)).unwrap();
    let by_char = ["data.by=char", "data.max_vocab=null"];
    let llama = [by_char[0], by_char[1], "model={name: llama, kv_heads: 1}"];
    for set in [&[][..], &by_char, &llama] {
        let run = trained(path, GPT, set);
        let say = |prompt: &str, tokens: usize, args: &[&str]| {
            let tokens = tokens.to_string();
            let args = [&["predict", &run, "--prompt", prompt, "--json", "--tokens", &tokens], args].concat();
            let told: Value = serde_json::from_str(&prints(path, &args)).unwrap();
            told["continuation"].as_str().unwrap().to_owned()
        };
        // Beyond the context, with what was read kept from one to the next; then each from all text before it, read at once. Pieces
        // that were drawn need not be those that their text is cut into.
        if !set.is_empty() {
            let whole = say("die K", 12, &["--temperature", "0"]);
            let mut anew = String::new();
            for _ in 0..12 {
                anew += &say(&format!("die K{anew}"), 1, &["--temperature", "0"]);
            }
            assert_eq!(anew, whole, "{set:?}");
        }
        assert_eq!(say("die", 30, &["--seed", "3"]), say("die", 30, &["--seed", "3", "--threads", "1"]));
        assert_ne!(say("die", 30, &["--seed", "3"]), say("die", 30, &["--seed", "4"]));
        assert_eq!(say("die", 9, &["--top-k", "1"]), say("die", 9, &["--temperature", "0"]));
    }
}

#[test]
fn exports_say_what_they_are_and_replace_nothing() {
    let folder = scratch();
    let (path, run) =
        (folder.path(), trained(folder.path(), MLP, &["train.average={kind: ema, decay: 0.9}"]));
    let export = |args: &[&str]| prints(path, &[&["export", &run, "--format"], args].concat());
    assert_eq!(export(&["safetensors", "--out", "a.safetensors"]), "a.safetensors\n");
    let bytes = std::fs::read(path.join("a.safetensors")).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let about =
        |key: &str| header["__metadata__"][key].as_str().unwrap_or_else(|| panic!("no {key}")).to_owned();
    assert_eq!(about("weights"), "the average of the weights (ema)");
    assert_eq!(about("name"), "mlp");
    let summary = section(path, &run, "last");
    assert_eq!(digits(&about("metrics"), "test.loss"), digits(&summary, "test.loss"));
    let recipe: Value = serde_json::from_str(&about("recipe")).unwrap();
    assert_eq!(recipe["model"]["hidden"], serde_json::json!([8]));
    assert!(about("data").contains("sha256") && about("data_licence").contains("not known"));
    // The weights of the average, which is another file of the checkpoint than the model.
    export(&["safetensors", "--as-trained", "--out", "b.safetensors"]);
    let numbers = |name: &str| {
        let bytes = std::fs::read(path.join(name)).unwrap();
        let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        bytes[8 + length..].to_vec()
    };
    assert_ne!(numbers("a.safetensors"), numbers("b.safetensors"));

    assert_eq!(export(&["pytorch", "--out", "net.py"]), "net.py\nnet.safetensors\n");
    assert_eq!(numbers("net.safetensors"), numbers("a.safetensors"));
    let default = export(&["onnx"]);
    assert!(default.starts_with(&run) && default.ends_with(".onnx\n"), "{default}");
    // The same again is there already and no loss; what is something else stays.
    let before = std::fs::read(path.join("net.py")).unwrap();
    export(&["pytorch", "--out", "net.py"]);
    std::fs::write(path.join("net.safetensors"), "mine").unwrap();
    std::fs::remove_file(path.join("net.py")).unwrap();
    refused(
        path,
        &["export", &run, "--format", "pytorch", "--out", "net.py"],
        &["net.safetensors: is there already"],
    );
    assert!(!path.join("net.py").exists(), "all or nothing");
    assert_eq!(std::fs::read(path.join("net.safetensors")).unwrap(), b"mine");
    std::fs::remove_file(path.join("net.safetensors")).unwrap();
    export(&["pytorch", "--out", "net.py"]);
    assert_eq!(std::fs::read(path.join("net.py")).unwrap(), before);

    let refuse = |args: &[&str], parts: &[&str]| {
        refused(path, &[&["export", &run, "--format"], args].concat(), parts);
    };
    refuse(&["onnx", "--opset", "99", "--out", "x.onnx"], &["--opset: expected 13 to 21, found 99"]);
    refuse(&["pytorch", "--opset", "17", "--out", "x.py"], &["only --format onnx"]);
    refuse(&["onnx", "--out", "x.bin"], &["x.bin", ".onnx"]);
    refuse(&["tflite"], &["tflite", "safetensors, pytorch, onnx"]);
    assert!(!path.join("x.onnx").exists() && !path.join("x.py").exists());
    // A run with an export in it is as whole as before.
    prints(path, &["verify", &run, "--quiet"]);
}

//! Training on data of one's own, from files to a trained network.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A place of its own for recipe, data, cache and runs.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    fn taper(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command.current_dir(self.0.path()).args(args).env("TAPER_OFFLINE", "1");
        command.env("TAPER_CACHE", self.path("cache")).env_remove("TAPER_DATA");
        command
    }

    /// Trains the recipe into a folder of runs; the run's folder.
    #[track_caller]
    fn train(&self, runs: &str, args: &[&str]) -> PathBuf {
        let output =
            self.taper(&["train", "recipe.yaml", "--runs", runs, "--quiet"]).args(args).output().unwrap();
        assert!(output.status.success(), "{}", message(&output));
        self.run(runs)
    }

    /// What a command prints; its success is expected.
    #[track_caller]
    fn prints(&self, args: &[&str]) -> String {
        let output = self.taper(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", message(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn run(&self, runs: &str) -> PathBuf {
        let mut found = std::fs::read_dir(self.path(runs)).unwrap().map(|entry| entry.unwrap().path());
        found.find(|path| path.is_dir()).unwrap()
    }

    /// Images of two classes that differ in which half is bright, of different sizes, as PNG files.
    fn images(&self) {
        for (split, count) in [("train", 40usize), ("test", 10)] {
            for (class, top) in [("bottom", false), ("top", true)] {
                for i in 0..count {
                    let (height, width) = (10 + i % 3, 9 + i % 4);
                    let pixel = |at: usize| {
                        let bright = (at / width < height / 2) == top;
                        let noise = (at * 31 + i * 17 + usize::from(split == "test") * 7) % 60;
                        (if bright { 160 } else { 30 } + noise) as u8
                    };
                    let pixels: Vec<u8> = (0..height * width).map(pixel).collect();
                    self.write(&format!("shapes/{split}/{class}/{i}.png"), &grey_png(width, height, &pixels));
                }
            }
        }
    }
}

fn grey_png(width: usize, height: usize, pixels: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    file
}

/// A file of `images` and `labels`: the header is a line of JSON.
fn safetensors(kind: &str, dims: [usize; 3], images: &[u8], labels: &[u8]) -> Vec<u8> {
    let (n, end, count) = (images.len(), images.len() + labels.len(), labels.len());
    let header = format!(
        r#"{{"images":{{"dtype":"{kind}","shape":{dims:?},"data_offsets":[0,{n}]}},"labels":{{"dtype":"U8","shape":[{count}],"data_offsets":[{n},{end}]}}}}"#
    );
    let padded = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    [&(padded.len() as u64).to_le_bytes()[..], padded.as_bytes(), images, labels].concat()
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// What must be equal between equal runs.
fn results(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![run.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(run).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                open.push(path);
            } else if !["manifest.json", "timing.jsonl", ".lock"].contains(&name.as_str()) {
                found.insert(name, std::fs::read(path).unwrap());
            }
        }
    }
    assert!(found.keys().any(|name| name.ends_with("model.safetensors")), "{:?}", found.keys());
    found
}

const FOLDER: &str = "
data: {name: folder, path: shapes, size: 8, channels: 1, batch_size: 16, val: 0.1}
model: {name: mlp, hidden: [16]}
optimizer: {name: decgd, lr: 0.03}
train: {epochs: 6, select: val, checkpoint: {every_epochs: 1, keep: 2}}
";

#[test]
fn a_folder_of_images_is_learned_the_same_every_time() {
    let home = Home::new();
    home.images();
    home.write("recipe.yaml", FOLDER.as_bytes());
    let run = home.train("runs", &["--threads", "1"]);
    let summary = json(&run.join("summary.json"));
    assert_eq!(summary["last"]["test.accuracy"].as_f64(), Some(1.0), "{summary:#}");
    let manifest = json(&run.join("manifest.json"));
    assert_eq!(manifest["data"]["name"], "folder");
    assert_eq!(manifest["data"]["classes"], serde_json::json!(["bottom", "top"]));

    // Classes go by their names.
    let name = run.to_str().unwrap();
    let said = home.prints(&["eval", name]);
    assert!(said.contains("| top    |") && said.contains("to the bit"), "{said}");
    let said = home.prints(&["predict", name, "shapes/test/top/3.png", "--json"]);
    let answer: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&answer["top"][0]["name"], answer["top"][0]["class"].as_u64()), (&"top".into(), Some(1)));
    let said = home.prints(&["predict", name, "shapes/test/bottom"]);
    assert!(said.lines().count() == 10 && said.lines().all(|line| line.contains("png  bottom ")), "{said}");
    // Elsewhere too, under other numbers.
    for i in 0..4u8 {
        let dark_and_bright =
            |top: u8, bottom: u8| grey_png(8, 8, &[[top + i; 32], [bottom + i; 32]].concat());
        home.write(&format!("others/top/{i}.png"), &dark_and_bright(200, 20));
        home.write(&format!("others/a/{i}.png"), &dark_and_bright(20, 200));
    }
    let on = "{name: folder, path: others, size: 8, channels: 1, test: 0.5}";
    let output = home.taper(&["eval", name, "--on", on]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(message(&output).contains("expected the classes bottom, top, found a"), "{}", message(&output));
    let pictures: Vec<u8> = (0..8u8)
        .flat_map(|i| [[200 - 180 * (i % 2) + i; 32], [20 + 180 * (i % 2) + i; 32]].concat())
        .collect();
    let labels: Vec<u8> = (0..8).map(|i| i % 2).collect();
    home.write("others.safetensors", &safetensors("U8", [8, 8, 8], &pictures, &labels));
    let on = "{name: arrays, path: others.safetensors, test: 0.5, classes: [top, bottom]}";
    let found: Value = serde_json::from_str(&home.prints(&["eval", name, "--json", "--on", on])).unwrap();
    assert_eq!(found["values"]["test.accuracy"], 1.0, "{found}");

    // From the cache, with other threads, under other names, killed and gone on with: the same bytes.
    let expected = results(&run);
    assert!(home.path("cache/images").is_dir());
    std::fs::rename(home.path("shapes/train/top/0.png"), home.path("shapes/train/top/zzz.png")).unwrap();
    assert!(results(&home.train("threads", &["--threads", "2"])) == expected, "other threads");
    let mut killed = home.taper(&["train", "recipe.yaml", "--runs", "killed", "--quiet"]);
    let output = killed.env("TAPER_KILL_AT", "checkpoint-before-rename:3").output().unwrap();
    assert!(!output.status.success(), "it was not killed");
    assert!(results(&home.train("killed", &[])) == expected, "killed");
    std::fs::remove_dir_all(home.path("cache")).unwrap();
    assert!(results(&home.train("uncached", &[])) == expected, "without a cache");

    // A changed image is noticed by a finished run, whatever the cache has.
    home.write("shapes/train/top/zzz.png", &grey_png(9, 10, &[255; 90]));
    let output = home.taper(&["train", "recipe.yaml", "--runs", "runs", "--quiet"]).output().unwrap();
    assert!(message(&output).contains("`train` was 80 samples"), "{}", message(&output));
}

#[test]
fn a_mistake_in_a_folder_stops_before_a_run_begins() {
    let home = Home::new();
    home.images();
    home.write("recipe.yaml", FOLDER.as_bytes());
    let refused = |parts: &[&str]| {
        for command in [&["train", "recipe.yaml", "--runs", "runs"][..], &["data", "check", "recipe.yaml"]] {
            let output = home.taper(command).output().unwrap();
            let said = message(&output);
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(parts.iter().all(|part| said.contains(part)) && !said.contains("panicked"), "{said}");
        }
        assert!(!home.path("runs").join("recipe").exists());
    };
    home.write("shapes/train/top/notes.png", b"no image");
    refused(&["shapes/train/top/notes.png: expected a PNG or JPEG image"]);
    std::fs::remove_file(home.path("shapes/train/top/notes.png")).unwrap();
    std::fs::create_dir(home.path("shapes/train/empty")).unwrap();
    refused(&["shapes/train/empty: expected images, found an empty class"]);
    std::fs::remove_dir(home.path("shapes/train/empty")).unwrap();
    let output = home.taper(&["data", "check", "recipe.yaml"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", message(&output));
    for part in ["folder", "train", "80 samples", "classes bottom, top", "shapes"] {
        assert!(said.contains(part), "{said}");
    }
    let output = home.taper(&["plan", "recipe.yaml"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("folder") && said.contains("shapes"), "{said}");
}

#[test]
fn arrays_and_text_are_learned_too() {
    let home = Home::new();
    // Twenty images of two classes, bright and dark.
    let labels: Vec<u8> = (0..20).map(|i| i % 2).collect();
    let images: Vec<u8> = labels.iter().flat_map(|label| [20 + 200 * label; 16]).collect();
    home.write("mine.safetensors", &safetensors("U8", [20, 4, 4], &images, &labels));
    home.write(
        "recipe.yaml",
        b"data: {name: arrays, path: mine.safetensors, test: 0.2, batch_size: 8}\nmodel: {name: mlp, hidden: [4]}\n\
          optimizer: {name: adam, lr: 0.05}\ntrain: {epochs: 20, select: last}\n",
    );
    let summary = json(&home.train("arrays", &[]).join("summary.json"));
    assert_eq!(summary["last"]["test.accuracy"].as_f64(), Some(1.0), "{summary:#}");
    // Floats are no picture's numbers.
    let floats: Vec<u8> = images.iter().flat_map(|x| f32::from(*x).to_le_bytes()).collect();
    home.write("mine.safetensors", &safetensors("F32", [20, 4, 4], &floats, &labels));
    let run = home.train("floats", &[]);
    let run = run.to_str().unwrap();
    assert!(home.prints(&["eval", run]).contains("to the bit"));
    home.write("dot.png", &grey_png(4, 4, &[7; 16]));
    let output = home.taper(&["predict", run, "dot.png"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(message(&output).contains("found one for floats"), "{}", message(&output));
    home.prints(&["export", run, "--format", "pytorch", "--out", "floats.py"]);
    assert!(std::fs::read_to_string(home.path("floats.py")).unwrap().contains("SCALE = 1.0"));

    home.write("mine.txt", "the cat sat on the mat and that was that\n".repeat(60).as_bytes());
    for by in ["word", "char", "byte"] {
        let recipe = format!(
            "data: {{name: text, path: mine.txt, by: {by}, batch_size: 4, eval_batch_size: 1}}\n\
             model: {{name: lstm, layers: 1, emb: 8, hidden: 16, dropout: {{embedding: 0, input: 0, hidden: 0, output: 0, weight: 0}}}}\n\
             optimizer: {{name: adam, lr: 0.05}}\n\
             train: {{epochs: 12, select: val, clip_norm: 1.0, bptt: {{length: 20}}}}\n"
        );
        home.write("recipe.yaml", recipe.as_bytes());
        let run = home.train(by, &[]);
        let summary = json(&run.join("summary.json"));
        let perplexity = summary["last"]["test.perplexity"].as_f64().unwrap_or_else(|| panic!("{summary:#}"));
        assert!(perplexity < 3.0, "{by}: {perplexity}");
        let (run, prompt) = (run.to_str().unwrap(), if by == "word" { "the cat" } else { "the ca" });
        assert!(home.prints(&["eval", run]).contains("to the bit"));
        let said = home.prints(&["predict", run, "--prompt", prompt, "--tokens", "3", "--temperature", "0"]);
        let added = said.strip_prefix(prompt).unwrap().strip_suffix('\n').unwrap();
        match by {
            "word" => assert!(
                added.starts_with([' ', '\n']) && (1..=3).contains(&added.split_whitespace().count()),
                "{said}"
            ),
            _ => assert_eq!(added.chars().count(), 3, "{said}"),
        }
    }
}

//! The registry, options, the made sets, own text, and the commands of `taper data`.
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use taper_data::{
    Content, Data, DataError, DataRegistry, Dataset, Description, Images, Loaded, Normalize, OptionDoc,
    Provenance, Search, Shape, Text, inventory, options,
};

fn load(name: &str, options: Value) -> Result<Loaded, DataError> {
    load_in(name, options, &Search { offline: true, ..Search::default() })
}

fn load_in(name: &str, options: Value, search: &Search) -> Result<Loaded, DataError> {
    DataRegistry::builtin().get(name)?.load(&options, search)
}

fn images(loaded: Loaded) -> (Images, Images) {
    match loaded.data {
        Data::Images { train, test } => (train, test),
        Data::Text(_) => panic!("expected images"),
    }
}

fn text(loaded: Loaded) -> Text {
    match loaded.data {
        Data::Text(text) => text,
        Data::Images { .. } => panic!("expected text"),
    }
}

/// A data set of a user's own: everything it takes.
struct Halves;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct HalvesOptions {
    images: usize,
}

impl Default for HalvesOptions {
    fn default() -> Self {
        Self { images: 100 }
    }
}

impl Dataset for Halves {
    fn name(&self) -> &str {
        "halves"
    }

    fn describe(&self) -> Description {
        let images = OptionDoc { name: "images", default: "100", doc: "images in each split" };
        Description { summary: "dark and bright images of 2x2".into(), options: vec![images] }
    }

    fn load(&self, given: &Value, _: &Search) -> Result<Loaded, DataError> {
        let HalvesOptions { images } = options(self.name(), given)?;
        let shape = Shape { height: 2, width: 2, channels: 1, classes: 2 };
        let labels: Vec<u8> = (0..images).map(|i| (i % 2) as u8).collect();
        let pixels = labels.iter().flat_map(|label| [label * 255; 4]).collect();
        let split = Images::new(shape, pixels, labels, Path::new("halves"))?;
        let provenance = Provenance::generated(self.name(), vec![Content::of_images("train", &split)]);
        let data = Data::Images { train: split.clone(), test: split };
        Ok(Loaded { data, normalize: Some(Normalize::unit(1)), provenance })
    }
}

#[test]
fn a_user_adds_a_data_set_in_one_file() {
    let mut registry = DataRegistry::builtin();
    registry.register(Arc::new(Halves)).unwrap();
    let loaded = registry.get("halves").unwrap().load(&json!({"images": 6}), &Search::default()).unwrap();
    assert_eq!(images(loaded).0.labels(), [0, 1, 0, 1, 0, 1]);
    let error = registry.register(Arc::new(Halves)).unwrap_err();
    assert_eq!(error.to_string(), "a data set named `halves` is already registered");
    let mut out = Vec::new();
    inventory::list(&registry, &Search::default(), false, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("halves            dark and bright images of 2x2"));
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest_known_one() {
    let message = |name: &str| DataRegistry::builtin().get(name).err().unwrap().to_string();
    assert!(message("cifar-10").contains("unknown data set `cifar-10`, did you mean `cifar10`?"));
    assert!(message("minst").contains("did you mean `mnist`?"));
    assert!(
        message("imagenet22k")
            .starts_with("unknown data set `imagenet22k`; known: arrays, cifar10, cifar100, fashion-mnist")
    );
}

#[test]
fn a_wrong_option_is_an_error_that_names_its_key() {
    let cases = [
        ("mnist", json!({"verfy": false}), "data.verfy: unknown field `verfy`"),
        ("mnist", json!({"verify": "no"}), "data.verify: invalid type: string \"no\", expected a boolean"),
        ("mnist", json!({"labels": "coarse"}), "data.labels: expected `fine`"),
        ("cifar100", json!({"labels": "middle"}), "data.labels: unknown variant `middle`"),
        ("ptb", json!({"bptt": 70}), "data.bptt: unknown field `bptt`"),
        ("text", json!({}), "data.train: expected a path or a list of paths, found none"),
        ("text", json!({"train": 3}), "data.train: expected a path or a list of paths"),
        ("synthetic-images", json!({"difficulty": 2}), "data.difficulty: expected 0 to 1, found 2"),
        ("synthetic-images", json!({"classes": 1}), "data.classes: expected 2 to 256, found 1"),
        ("synthetic-images", json!({"train": 0}), "data.train: expected 1 to 1000000 images, found 0"),
        ("synthetic-text", json!({"order": 3}), "data.order: expected 1 or 2, found 3"),
        (
            "synthetic-text",
            json!({"branching": 2000}),
            "data.branching: expected 1 to the 1000 words, found 2000",
        ),
        ("synthetic-text", json!({"vocab": 1e12}), "data.vocab"),
        ("synthetic-text", json!({"skew": -1}), "data.skew: expected 0 to 16, found -1"),
        ("synthetic-text", json!({"test": 2}), "data.test: expected 3 to"),
        ("mnist", json!([1]), "data.*"),
    ];
    for (name, options, expected) in cases {
        let message = load(name, options).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn every_documented_option_is_accepted_with_its_documented_default() {
    for set in DataRegistry::builtin().list() {
        let defaults: serde_json::Map<String, Value> = set
            .describe()
            .options
            .iter()
            .map(|o| (o.name.to_string(), serde_json::from_str(o.default).unwrap_or(json!(o.default))))
            .collect();
        let nowhere = Search { offline: true, ..Search::default() };
        match set.load(&Value::Object(defaults), &nowhere) {
            // Not found, or no files given: the options themselves were read.
            Err(DataError::Missing { .. }) | Ok(_) => {}
            Err(DataError::Option { key, message, .. })
                if set.paths().contains(&key.as_deref().unwrap_or_default())
                    && message.ends_with("found none") => {}
            Err(other) => panic!("{}: {other}", set.name()),
        }
    }
}

#[test]
fn synthetic_images_depend_on_their_options_alone() {
    let make = |options| load("synthetic-images", options).unwrap();
    let first = make(json!({"train": 200, "test": 50}));
    assert!(first.provenance.verified);
    assert_eq!(first.provenance.content, make(json!({"train": 200, "test": 50})).provenance.content);
    assert_ne!(
        first.provenance.content,
        make(json!({"train": 200, "test": 50, "seed": 2})).provenance.content
    );
    let (train, test) = images(first);
    assert_eq!((train.len(), test.len(), train.height, train.width, train.channels), (200, 50, 32, 32, 3));
    // A longer set begins with the shorter one, and the splits differ.
    let (longer, _) = images(make(json!({"train": 300, "test": 50})));
    assert!((0..200).all(|i| longer.image(i) == train.image(i)) && train.image(0) != test.image(0));
}

fn synthetic(difficulty: f64) -> (Images, Images) {
    images(load("synthetic-images", json!({"difficulty": difficulty, "train": 2000, "test": 500})).unwrap())
}

fn accuracy(test: &Images, predict: impl Fn(&[u8]) -> usize) -> f64 {
    let right = (0..test.len()).filter(|i| predict(test.image(*i)) == usize::from(test.label(*i))).count();
    right as f64 / test.len() as f64
}

#[test]
fn synthetic_images_get_harder() {
    // Nearest class mean: a model that knows colours and nothing of directions.
    let [easy, middle, hard] = [0.0, 0.5, 1.0].map(|difficulty| {
        let (train, test) = synthetic(difficulty);
        let mut means = vec![vec![0.0; 3072]; 10];
        for i in 0..train.len() {
            let mean = &mut means[usize::from(train.label(i))];
            mean.iter_mut().zip(train.image(i)).for_each(|(m, p)| *m += f64::from(*p) / 200.0);
        }
        let distance = |mean: &[f64], image: &[u8]| -> f64 {
            mean.iter().zip(image).map(|(m, p)| (m - f64::from(*p)).powi(2)).sum()
        };
        accuracy(&test, |image| {
            (0..10)
                .min_by(|a, b| distance(&means[*a], image).total_cmp(&distance(&means[*b], image)))
                .unwrap()
        })
    });
    // Chance is 0.1; with 500 images its standard deviation is 0.013.
    assert!(easy > 0.9 && (0.25..0.75).contains(&middle) && hard < 0.2, "{easy} {middle} {hard}");
}

#[test]
fn the_hardest_synthetic_images_can_still_be_told_apart() {
    // Looks for stripes: the direction in which the picture has most power at some stripe width.
    let (_, test) = synthetic(1.0);
    let power = |image: &[u8], class: usize| -> f64 {
        let (sin, cos) = (std::f64::consts::PI * class as f64 / 10.0).sin_cos();
        let at_period = |period: f64| {
            let mut sums = [[0.0; 2]; 3];
            for (i, pixel) in image.chunks_exact(3).enumerate() {
                let (x, y) = ((i % 32) as f64, (i / 32) as f64);
                let (a, b) = (std::f64::consts::TAU * (x * cos + y * sin) / period).sin_cos();
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    sum[0] += a * (f64::from(*value) - 127.5);
                    sum[1] += b * (f64::from(*value) - 127.5);
                }
            }
            sums.iter().flatten().map(|s| s * s).sum::<f64>()
        };
        [6.5, 7.5, 8.5, 9.5, 10.5, 11.5].map(at_period).into_iter().fold(0.0, f64::max)
    };
    let found = accuracy(&test, |image| {
        (0..10).max_by(|a, b| power(image, *a).total_cmp(&power(image, *b))).unwrap()
    });
    assert!(found > 0.4, "{found}");
}

#[test]
fn synthetic_text_reports_its_entropy() {
    let loaded =
        load("synthetic-text", json!({"vocab": 64, "branching": 4, "skew": 0, "train": 5000})).unwrap();
    // Four equal successors: ln 4 nats, to the rounding of four equal terms.
    assert!((loaded.provenance.entropy_rate.unwrap() - 4f64.ln()).abs() < 1e-15);
    assert_eq!(
        loaded.provenance.remarks(),
        ["synthetic-text has an entropy of 1.3863 nats a word: no perplexity below 4.00."]
    );
    let text = text(loaded);
    assert_eq!(
        (text.train.len(), text.valid.len(), text.test.len(), text.vocab.len()),
        (5000, 20_000, 20_000, 64)
    );
    assert!(text.train.iter().all(|t| *t < 64));
    assert_ne!(text.train[..100], text.valid[..100]);
}

#[test]
fn any_text_becomes_words_by_a_vocabulary_that_is_given_or_built() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| std::fs::write(dir.path().join(name), content).unwrap();
    write("train.txt", "the cat sat\non the mat the end\n");
    write("more.txt", "a naïve cat\n");
    write("valid.txt", "the dog\n");
    write("test.txt", "mat");
    let options = json!({"train": ["train.txt", "more.txt"], "valid": "valid.txt", "test": "test.txt"});
    let search = Search { dir: Some(dir.path().into()), offline: true, ..Search::default() };
    let first = load_in("text", options.clone(), &search).unwrap();
    assert_eq!(first.provenance.files.len(), 4);
    let first = text(first);
    assert_eq!(*first.vocab, ["<unk>", "<eos>", "the", "cat", "sat", "on", "mat", "end", "a", "naïve"]);
    assert_eq!(*first.train, [2, 3, 4, 1, 5, 2, 6, 2, 7, 1, 8, 9, 3, 1]);
    assert_eq!((&*first.valid, &*first.test), (&[2, 0, 1][..], &[6, 1][..]));

    // A vocabulary that is given rules, also when the text has changed, and is an input of its own.
    let vocab = dir.path().join("vocab.txt");
    let mut given = options.clone();
    given["vocab"] = json!(vocab);
    let refused = load_in("text", given.clone(), &search).unwrap_err().to_string();
    assert!(refused.contains("vocab.txt") && !vocab.exists(), "{refused}");
    write("vocab.txt", &(first.vocab.join("\n") + "\n"));
    write("train.txt", "dog dog dog\n");
    let again = load_in("text", given, &search).unwrap();
    assert_eq!(
        again.provenance.content.last().map(|content| (content.split.as_str(), content.samples)),
        Some(("vocab", 10))
    );
    let again = text(again);
    assert_eq!((again.vocab, &again.train[..4]), (first.vocab, &[0, 0, 0, 1][..]));

    let mut limited = options;
    limited["max_vocab"] = json!(3);
    limited["min_count"] = json!(2);
    assert_eq!(*text(load_in("text", limited, &search).unwrap()).vocab, ["<unk>", "<eos>", "dog"]);

    std::fs::write(&vocab, "a\nb\na\n").unwrap();
    let message = load_in(
        "text",
        json!({"train": "train.txt", "valid": "valid.txt", "test": "test.txt", "vocab": vocab}),
        &search,
    )
    .unwrap_err()
    .to_string();
    assert!(message.contains("vocab.txt") && message.contains("found `a` again at line 3"), "{message}");
}

#[test]
fn without_a_place_for_it_the_vocabulary_is_saved_in_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.txt"), "b a b\n").unwrap();
    let search =
        Search { dir: Some(dir.path().into()), cache: Some(dir.path().join("cache")), ..Search::default() };
    load_in("text", json!({"train": "t.txt", "valid": "t.txt", "test": "t.txt"}), &search).unwrap();
    let saved: Vec<_> = std::fs::read_dir(dir.path().join("cache/vocab")).unwrap().collect();
    assert_eq!(saved.len(), 1);
    let content = std::fs::read_to_string(saved[0].as_ref().unwrap().path()).unwrap();
    assert_eq!(content, "<unk>\n<eos>\nb\na\n");
}

#[test]
fn a_content_digest_is_computed_once_and_never_believed_for_other_bytes() {
    let cache = tempfile::tempdir().unwrap();
    let search = Search { cache: Some(cache.path().into()), offline: true, ..Search::default() };
    load_in("mnist", json!({}), &search).unwrap();
    let entries: Vec<_> = std::fs::read_dir(cache.path().join("digests")).unwrap().collect();
    assert_eq!(entries.len(), 1);
    // The remembered digest is used: a changed memory shows, and a fresh check does not look at it.
    let path = entries[0].as_ref().unwrap().path();
    let changed = std::fs::read_to_string(&path).unwrap().replacen("54e1", "0000", 1);
    std::fs::write(&path, changed).unwrap();
    assert!(matches!(load_in("mnist", json!({}), &search), Err(DataError::Mismatch { .. })));
    assert!(load_in("mnist", json!({}), &Search { fresh: true, ..search.clone() }).is_ok());
    std::fs::write(&path, "not json").unwrap();
    assert!(load_in("mnist", json!({}), &search).is_ok());
}

#[test]
fn the_list_has_every_set_and_json_has_one_object_a_line() {
    let (registry, mut out) = (DataRegistry::builtin(), Vec::new());
    inventory::list(&registry, &Search { offline: true, ..Search::default() }, true, &mut out).unwrap();
    let lines: Vec<Value> =
        String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = lines.iter().map(|l| l["name"].as_str().unwrap()).collect();
    let known = [
        "arrays",
        "cifar10",
        "cifar100",
        "fashion-mnist",
        "folder",
        "mnist",
        "ptb",
        "synthetic-images",
        "synthetic-text",
        "text",
    ];
    assert_eq!(names, known);
    assert_eq!((&lines[5]["place"], &lines[1]["place"]), (&json!("embedded"), &Value::Null));
    assert_eq!(lines[1]["hub"]["repo"], "uoft-cs/cifar10");
    assert_eq!((&lines[4]["place"], &lines[4]["licence"]), (&Value::Null, &Value::Null));
    assert!(lines[5]["licence"].as_str().unwrap().contains("CC BY-SA"));
}

#[test]
fn check_proves_what_is_found_and_reports_damage() {
    let (registry, dir) = (DataRegistry::builtin(), tempfile::tempdir().unwrap());
    let folder = dir.path().join("mnist");
    std::fs::create_dir(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/mnist");
    for name in ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"] {
        let name = format!("{name}-ubyte.gz");
        std::fs::copy(source.join(&name), folder.join(&name)).unwrap();
    }
    let search = Search { offline: true, ..Search::default() };
    let check = |name: Option<&str>, json: bool| {
        let mut out = Vec::new();
        let intact = inventory::check(&registry, name, Some(dir.path().into()), &search, json, &mut out);
        (intact, String::from_utf8(out).unwrap())
    };
    let (intact, report) = check(None, false);
    assert!(intact.unwrap() && report.contains("mnist          intact; from"), "{report}");
    assert!(report.contains("cifar10        not found"), "{report}");
    let (intact, report) = check(Some("mnist"), true);
    let line: Value = serde_json::from_str(&report).unwrap();
    assert!(
        intact.unwrap() && line["intact"] == json!(true) && line["files"][0]["bytes"] == json!(9_912_422)
    );
    assert!(matches!(check(Some("cifar10"), false).0, Err(DataError::Missing { .. })));

    let path = folder.join("t10k-labels-idx1-ubyte.gz");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(1000);
    std::fs::write(&path, bytes).unwrap();
    let (intact, report) = check(None, false);
    assert!(!intact.unwrap() && report.contains("mnist          NOT INTACT"), "{report}");
    assert!(report.contains("t10k-labels-idx1-ubyte.gz"), "{report}");
    assert!(check(Some("mnist"), false).0.is_err());
}

#[test]
fn what_is_made_cannot_be_fetched() {
    let error = inventory::fetch(
        &DataRegistry::builtin(),
        "synthetic-text",
        None,
        &Search::default(),
        false,
        &mut Vec::new(),
    );
    assert!(error.unwrap_err().to_string().contains("there is nothing to fetch"));
    // Offline, a set that is not in the cache is missing, and nothing is asked.
    let offline = Search { offline: true, ..Search::default() };
    let error = inventory::fetch(&DataRegistry::builtin(), "cifar10", None, &offline, false, &mut Vec::new())
        .unwrap_err();
    assert!(matches!(error, DataError::Missing { .. }));
}

/// A build without a downloader asks the program in its place, and only when the set is nowhere else.
#[cfg(all(unix, not(feature = "hub")))]
#[test]
fn a_program_can_fetch_for_a_build_that_cannot() {
    use std::os::unix::fs::PermissionsExt;
    use taper_data::hub;
    let dir = tempfile::tempdir().unwrap();
    let (cache, program) = (dir.path().join("cache"), dir.path().join("fetcher"));
    let script = |body: &str| {
        std::fs::write(
            &program,
            format!("#!/bin/sh\necho \"$@\" >> '{0}/calls'\n{body}\n", dir.path().display()),
        )
        .unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    let hub = hub::Access { program: Some(program.clone()), ..hub::Access::default() };
    let search = Search { cache: Some(cache.clone()), hub, ..Search::default() };
    let error = || load_in("ptb", json!({"verify": false}), &search).unwrap_err().to_string();

    assert!(error().contains("fetcher: No such file"), "{}", error());
    script("exit 3");
    assert!(error().contains("data fetch ptb: exit status: 3"), "{}", error());
    script("");
    assert!(error().contains("fetched, but"), "{}", error());
    let files = ["train", "valid", "test"].map(|split| format!("echo 'a b c' > ptb.{split}.txt")).join("\n");
    script(&format!("mkdir -p '{0}/data/ptb' && cd '{0}/data/ptb'\n{files}", cache.display()));
    let before = std::fs::read_to_string(dir.path().join("calls")).unwrap();
    assert!(before.lines().all(|call| call == "data fetch ptb --revision refs/convert/parquet"), "{before}");
    let loaded = load_in("ptb", json!({"verify": false}), &search).unwrap();
    assert_eq!(loaded.provenance.remarks(), ["ptb was not verified: the recipe says `data.verify: false`."]);
    let calls = || std::fs::read_to_string(dir.path().join("calls")).unwrap().lines().count();
    let after = calls();
    assert_eq!(after, before.lines().count() + 1);
    load_in("ptb", json!({"verify": false}), &search).unwrap();
    let offline = Search { offline: true, cache: Some(dir.path().join("other")), ..search.clone() };
    assert!(matches!(load_in("ptb", json!({}), &offline), Err(DataError::Missing { .. })));
    assert_eq!(calls(), after, "nobody is asked for what is there, or offline");
}

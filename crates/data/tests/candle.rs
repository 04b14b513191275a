//! The sets of candle-datasets through the adapter are ours: MNIST, Fashion-MNIST and CIFAR-10, and TinyStories through its reader.
//!
//!   TAPER_DATA=… cargo test --release --workspace --features taper-data/candle-datasets --test candle
#![cfg(feature = "candle-datasets")]
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_datasets::vision;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use taper_data::candle::{Axes, TinyStories, Vision};
use taper_data::{Content, Data, DataRegistry, Dataset, Depth, Images, Loaded, Search, TextStream};

const GREY: Axes = Axes::Flat { height: 28, width: 28 };

fn ours(name: &str, search: &Search) -> Loaded {
    DataRegistry::builtin().get(name).unwrap().load(&json!({}), search).unwrap()
}

/// Their set, registered and loaded by name like one of ours.
fn theirs(set: &vision::Dataset, axes: Axes) -> Loaded {
    let mut registry = DataRegistry::builtin();
    registry.register(Arc::new(Vision::new("theirs", set, axes).unwrap())).unwrap();
    registry.get("theirs").unwrap().load(&json!({}), &Search::default()).unwrap()
}

#[track_caller]
fn assert_same(theirs: &Loaded, ours: &Loaded) {
    assert_eq!(theirs.provenance.content, ours.provenance.content);
    let (Data::Images { train: a, test: b }, Data::Images { train, test }) = (&theirs.data, &ours.data)
    else {
        panic!("expected images")
    };
    assert!(a == train && b == test);
}

/// The folder of IDX files of a set, unpacked as candle wants them.
fn unpacked(folder: &Path) -> tempfile::TempDir {
    let plain = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|e| e == "gz") {
            let mut bytes = Vec::new();
            flate2::read::GzDecoder::new(std::fs::File::open(&path).unwrap())
                .read_to_end(&mut bytes)
                .unwrap();
            std::fs::write(plain.path().join(path.file_stem().unwrap()), bytes).unwrap();
        }
    }
    plain
}

#[test]
fn mnist_is_what_candle_datasets_reads() {
    let folder = unpacked(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/mnist"));
    let set = vision::mnist::load_dir(folder.path()).unwrap();
    assert_same(&theirs(&set, GREY), &ours("mnist", &Search::default()));
}

/// A set of ours from `TAPER_DATA`, if it is there.
fn found(name: &str) -> Option<(PathBuf, Loaded)> {
    let root = std::env::var_os("TAPER_DATA").map(PathBuf::from).filter(|root| root.join(name).exists());
    let Some(root) = root else {
        println!("skipped: TAPER_DATA has no {name}");
        return None;
    };
    let search = Search { dir: Some(root.clone()), offline: true, ..Search::default() };
    Some((root.join(name), ours(name, &search)))
}

fn split(loaded: &Loaded) -> (&Images, &Images) {
    match &loaded.data {
        Data::Images { train, test } => (train, test),
        Data::Text(_) => panic!("expected images"),
    }
}

#[test]
fn cifar10_from_binary_files_is_what_candle_datasets_reads() {
    let Some((_, ours)) = found("cifar10") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (train, test) = split(&ours);
    let records = |set: &Images, from: usize| -> Vec<u8> {
        let planes = |image: &[u8]| {
            (0..3)
                .flat_map(|c| image.iter().skip(c).step_by(3).copied().collect::<Vec<_>>())
                .collect::<Vec<_>>()
        };
        (from..from + 10_000).flat_map(|i| [vec![set.label(i)], planes(set.image(i))].concat()).collect()
    };
    for batch in 0..5 {
        let name = format!("data_batch_{}.bin", batch + 1);
        std::fs::write(folder.path().join(name), records(train, 10_000 * batch)).unwrap();
    }
    std::fs::write(folder.path().join("test_batch.bin"), records(test, 0)).unwrap();
    assert_same(&theirs(&vision::cifar::load_dir(folder.path()).unwrap(), Axes::Planes), &ours);
}

/// Runs an ignored test with files in the hub's cache: in a process of its own, because candle's readers find it by the environment.
#[track_caller]
fn in_a_cache_of_the_hub(test: &str, repository: &str, files: &[(PathBuf, &str)], data: &Path) {
    let commit = "0123456789012345678901234567890123456789";
    let home = tempfile::tempdir().unwrap();
    let cache = home.path().join("hub").join(repository);
    for (from, to) in files {
        let to = cache.join("snapshots").join(commit).join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    }
    let reference = cache.join("refs/refs/convert/parquet");
    std::fs::create_dir_all(reference.parent().unwrap()).unwrap();
    std::fs::write(reference, commit).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", test])
        .env("HF_HOME", home.path())
        .env("HF_HUB_CACHE", home.path().join("hub"))
        // Nobody answers there: what is not in the cache is an error and no download.
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("TAPER_DATA", data)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn cifar10_from_the_hub_is_mirrored_by_candle_datasets_and_not_here() {
    let Some((folder, _)) = found("cifar10") else { return };
    let files = [("train", "plain_text/train/0000.parquet"), ("test", "plain_text/test/0000.parquet")];
    // In either layout that the hub has it in.
    let place = |part: &str, to: &str| {
        let named = folder.join(format!("plain_text/{part}-00000-of-00001.parquet"));
        if named.exists() { named } else { folder.join(to) }
    };
    let files = files.map(|(part, to)| (place(part, to), to));
    if let Some((missing, _)) = files.iter().find(|(path, _)| !path.exists()) {
        return println!("skipped: {}: no such file", missing.display());
    }
    let test = "reads_cifar10_from_the_cache_of_the_hub";
    in_a_cache_of_the_hub(test, "datasets--cifar10", &files, folder.parent().unwrap());
}

/// As the hub has Fashion-MNIST: PNG files of 28 x 28 in parquet, with images of our own, because the real ones may not be here.
fn fashion_table(count: u8) -> Vec<u8> {
    let image = |i: u8| {
        let pixels: Vec<u8> = (0..784u32).map(|at| (at * u32::from(i + 3) % 256) as u8).collect();
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 28, 28);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        ByteArray::from(file)
    };
    let schema = "message m { optional group image { optional binary bytes; optional binary path (UTF8); } optional int64 label; }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer =
        SerializedFileWriter::new(Vec::new(), schema, Arc::new(WriterProperties::default())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let (images, labels): (Vec<_>, Vec<_>) = (0..count).map(|i| (image(i), i64::from(i % 10))).unzip();
    let n = labels.len();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&images, Some(&vec![2; n]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&[], Some(&vec![1; n]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&labels, Some(&vec![1; n]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn fashion_mnist_from_the_hub_is_what_candle_datasets_reads() {
    let folder = tempfile::tempdir().unwrap();
    let files = [("train", 60), ("test", 20)].map(|(part, count)| {
        let path = folder.path().join(format!("fashion-mnist/fashion_mnist/{part}/0000.parquet"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, fashion_table(count)).unwrap();
        path
    });
    let [train, test] = files;
    let files = [(train, "fashion_mnist/train/0000.parquet"), (test, "fashion_mnist/test/0000.parquet")];
    let name = "reads_fashion_mnist_from_the_cache_of_the_hub";
    in_a_cache_of_the_hub(name, "datasets--zalando-datasets--fashion_mnist", &files, folder.path());
}

#[test]
#[ignore = "run by another with the hub's cache in place"]
fn reads_fashion_mnist_from_the_cache_of_the_hub() {
    let search =
        Search { dir: std::env::var_os("TAPER_DATA").map(PathBuf::from), offline: true, ..Search::default() };
    let set = DataRegistry::builtin();
    let ours = set.get("fashion-mnist").unwrap().load(&json!({"verify": false}), &search).unwrap();
    assert_eq!(split(&ours).0.len(), 60);
    assert_same(&theirs(&vision::fashion_mnist::load().unwrap(), GREY), &ours);
}

#[test]
#[ignore = "run by another with the hub's cache in place"]
fn reads_cifar10_from_the_cache_of_the_hub() {
    let (_, ours) = found("cifar10").unwrap();
    let set = vision::cifar::load().unwrap();
    assert_same(&theirs(&set, Axes::Swapped), &ours);
    // The day that candle's reader is right, this says so.
    let as_it_is = theirs(&set, Axes::Planes);
    let ((train, _), (theirs, _)) = (split(&ours), split(&as_it_is));
    assert!(train.image(0) != theirs.image(0), "cifar::load no longer swaps rows and columns");
}

#[test]
fn any_tensors_are_a_set() {
    let images = Tensor::new(&[[-1.5f32, 0.25, 7.0, 0.5], [0.0, 1.0, 2.0, 3.0]], &Device::Cpu).unwrap();
    let labels = Tensor::new(&[1u32, 0], &Device::Cpu).unwrap();
    let set = vision::Dataset {
        train_images: images.clone(),
        train_labels: labels.clone(),
        test_images: images,
        test_labels: labels,
        labels: 2,
    };
    let loaded = theirs(&set, Axes::Flat { height: 2, width: 2 });
    let (train, _) = split(&loaded);
    assert_eq!((train.depth, train.labels()), (Depth::Float, &[1u8, 0][..]));
    assert_eq!(train.image(0)[..4], (-1.5f32).to_le_bytes());
    assert!(Vision::new("wrong", &set, Axes::Planes).is_err(), "two axes are no planes");
    let few = vision::Dataset { labels: 1, ..set };
    let message = Vision::new("few", &few, Axes::Flat { height: 2, width: 2 }).err().unwrap().to_string();
    assert!(message.contains("expected labels below 1, found 1 at sample 0"), "{message}");
}

#[test]
fn tinystories_is_read_by_candle_and_in_order_here() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = |from: u16, count: u16| (0..count).map(move |i| (from + i * 7) % 500);
    let files = [("data00.bin", 3, 90), ("data01.bin", 11, 200), ("data02.bin", 5, 151)];
    for (name, from, count) in files {
        let bytes: Vec<u8> = numbers(from, count).flat_map(u16::to_le_bytes).collect();
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let stories = |vocab| TinyStories { folder: folder.path().into(), vocab };
    let load = || stories(500).load(&json!({}), &Search::default()).unwrap();
    let loaded = load();
    assert_eq!(loaded.provenance.files.len(), 3);
    let contents: Vec<Content> = loaded.provenance.content.clone();
    assert_eq!(contents, load().provenance.content, "candle's reader shuffles by chance, this does not");
    let Data::Text(text) = loaded.data else { panic!("expected text") };
    let wide = |(_, from, count): (&str, u16, u16)| numbers(from, count).map(u32::from).collect::<Vec<_>>();
    assert_eq!(text.train[..], [wide(files[1]), wide(files[2])].concat());
    assert_eq!(text.valid[..], wide(files[0]));
    assert_eq!((text.test.len(), text.vocab.len()), (90, 500));
    assert!(TextStream::new(text.train, 4).is_ok());

    let refused = |vocab: usize, parts: &[&str]| {
        let message = stories(vocab).load(&json!({}), &Search::default()).err().unwrap().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    refused(100, &["data00.bin", "expected numbers below 100"]);
    std::fs::write(folder.path().join("data01.bin"), [1, 2, 3, 4, 5]).unwrap();
    refused(500, &["data01.bin", "found 5 bytes"]);
    std::fs::write(folder.path().join("data01.bin"), []).unwrap();
    refused(500, &["data01.bin", "found 0 bytes"]);
    std::fs::remove_file(folder.path().join("data01.bin")).unwrap();
    std::fs::remove_file(folder.path().join("data02.bin")).unwrap();
    refused(500, &["expected at least two .bin files, found 1"]);
}

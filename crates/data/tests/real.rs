//! The real data sets: MNIST is compiled in, the others are looked for where `TAPER_DATA` points.
use std::path::PathBuf;

use serde_json::json;
use taper_data::{Data, DataError, DataRegistry, Images, Loaded, Search, Text};

/// A search in `TAPER_DATA` alone; `None`, said aloud, when it is not set or lacks the set.
fn search(set: &str) -> Option<Search> {
    let dir = std::env::var_os("TAPER_DATA").map(PathBuf::from).filter(|dir| dir.join(set).exists());
    if dir.is_none() {
        println!("skipped: TAPER_DATA has no {set}");
    }
    dir.map(|dir| Search { dir: Some(dir), offline: true, ..Search::default() })
}

fn load(set: &str, options: serde_json::Value, search: &Search) -> Loaded {
    DataRegistry::builtin().get(set).unwrap().load(&options, search).unwrap()
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

fn per_class(images: &Images) -> Vec<usize> {
    let mut counts = vec![0; images.classes];
    images.labels().iter().for_each(|label| counts[usize::from(*label)] += 1);
    counts
}

/// Published statistics are rounded to four digits.
#[track_caller]
fn assert_rounds_to(found: &[f64], published: &[f64]) {
    let close = found.iter().zip(published).all(|(f, p)| (f - p).abs() <= 0.00005);
    assert!(found.len() == published.len() && close, "{found:?} is not {published:?}");
}

#[test]
fn embedded_mnist_is_mnist() {
    let loaded = load("mnist", json!({}), &Search { offline: true, ..Search::default() });
    assert!(loaded.provenance.verified && loaded.provenance.subset.is_none());
    assert_eq!(loaded.provenance.source, "embedded");
    let (train, test) = images(loaded);
    assert_eq!((train.len(), test.len()), (60_000, 10_000));
    assert_eq!((train.height, train.width, train.channels, train.classes), (28, 28, 1, 10));
    assert_eq!(per_class(&train), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]);
    assert_eq!(per_class(&test), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]);
    assert_eq!((train.label(0), train.label(59_999), test.label(0), test.label(9_999)), (5, 8, 7, 6));
    let (mean, std) = train.statistics();
    assert_rounds_to(&mean, &[0.1307]);
    assert_rounds_to(&std, &[0.3081]);
    // The first image is a five: its first inked row; and the last image's first ink.
    assert_eq!(train.image(0)[5 * 28 + 12..][..12], [3, 18, 18, 18, 126, 136, 175, 26, 166, 255, 247, 127]);
    let first_ink = |image: &[u8]| image.iter().position(|p| *p > 0).map(|at| (at / 28, at % 28));
    assert_eq!(first_ink(train.image(0)), Some((5, 12)));
    assert_eq!(first_ink(train.image(59_999)), Some((6, 16)));
    assert_eq!(train.image(59_999)[184..][..6], [38, 48, 48, 22, 0, 0]);
}

#[test]
fn mnist_from_a_directory_is_the_embedded_one() {
    let Some(search) = search("mnist") else { return };
    let loaded = load("mnist", json!({}), &search);
    assert!(loaded.provenance.source.ends_with("mnist") && loaded.provenance.files.len() == 4);
    assert!(images(loaded) == images(load("mnist", json!({}), &Search::default())));
}

#[test]
fn cifar10_from_parquet_is_cifar10() {
    let Some(search) = search("cifar10") else { return };
    let loaded = load("cifar10", json!({}), &search);
    assert!(loaded.provenance.verified && loaded.provenance.subset.is_none());
    let (train, test) = images(loaded);
    assert_eq!((train.len(), test.len()), (50_000, 10_000));
    assert_eq!((train.height, train.width, train.channels, train.classes), (32, 32, 3, 10));
    assert_eq!((per_class(&train), per_class(&test)), (vec![5000; 10], vec![1000; 10]));
    let (mean, std) = train.statistics();
    assert_rounds_to(&mean, &[0.4914, 0.4822, 0.4465]);
    assert_rounds_to(&std, &[0.2470, 0.2435, 0.2616]);
    // First and last image of each split: label, top left pixel and its right neighbour, bottom right pixel.
    let corners =
        |set: &Images, i: usize| (set.label(i), set.image(i)[..6].to_vec(), set.image(i)[3069..].to_vec());
    assert_eq!(corners(&train, 0), (6, vec![59, 62, 63, 43, 46, 45], vec![123, 92, 72]));
    assert_eq!(corners(&train, 49_999), (1, vec![229, 229, 239, 236, 237, 247], vec![163, 163, 161]));
    assert_eq!(corners(&test, 0), (3, vec![158, 112, 49, 159, 111, 47], vec![21, 67, 110]));
    assert_eq!(corners(&test, 9_999), (7, vec![73, 78, 75, 98, 103, 113], vec![27, 26, 26]));

    // The same images in the binary format, whose planes and rows are spelled out here, read back to the same content:
    // had the parquet reader swapped rows and columns, the content digest would have refused it above and here.
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cifar10/cifar-10-batches-bin");
    std::fs::create_dir_all(&folder).unwrap();
    let mut archive =
        tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    for batch in 0..6 {
        let (set, range) =
            if batch < 5 { (&train, batch * 10_000..(batch + 1) * 10_000) } else { (&test, 0..10_000) };
        let mut records = Vec::with_capacity(10_000 * 3073);
        for i in range {
            records.push(set.label(i));
            for channel in 0..3 {
                for y in 0..32 {
                    for x in 0..32 {
                        records.push(set.image(i)[(y * 32 + x) * 3 + channel]);
                    }
                }
            }
        }
        let name = if batch < 5 { format!("data_batch_{}.bin", batch + 1) } else { "test_batch.bin".into() };
        std::fs::write(folder.join(&name), &records).unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_size(records.len() as u64);
        archive.append_data(&mut header, format!("cifar-10-batches-bin/{name}"), records.as_slice()).unwrap();
    }
    let binary = Search { dir: Some(dir.path().into()), offline: true, ..Search::default() };
    assert!(images(load("cifar10", json!({}), &binary)) == (train.clone(), test.clone()));

    std::fs::remove_dir_all(&folder).unwrap();
    let packed = archive.into_inner().unwrap().finish().unwrap();
    std::fs::write(dir.path().join("cifar10/cifar-10-binary.tar.gz"), packed).unwrap();
    assert!(images(load("cifar10", json!({}), &binary)) == (train, test));
}

#[test]
fn the_cifar100_subset_is_declared_as_one() {
    let Some(search) = search("cifar100") else { return };
    let loaded = load("cifar100", json!({}), &search);
    assert!(loaded.provenance.verified);
    let subset = loaded.provenance.subset.clone().unwrap();
    assert!(subset.contains("not CIFAR-100"), "{subset}");
    let (train, test) = images(loaded);
    assert_eq!((train.len(), test.len(), train.classes), (2000, 500, 100));
    assert_eq!((per_class(&train), per_class(&test)), (vec![20; 100], vec![5; 100]));
    let (coarse, coarse_test) = images(load("cifar100", json!({"labels": "coarse"}), &search));
    assert_eq!(
        (coarse.classes, per_class(&coarse), per_class(&coarse_test)),
        (20, vec![100; 20], vec![25; 20])
    );
    assert!((0..2000).all(|i| coarse.image(i) == train.image(i)));
    // A coarse class is five fine classes, the same five everywhere.
    let mut parents = [None; 100];
    for i in 0..2000 {
        let parent = parents[usize::from(train.label(i))].get_or_insert(coarse.label(i));
        assert_eq!(*parent, coarse.label(i));
    }
}

#[test]
fn ptb_is_ptb() {
    let Some(search) = search("ptb") else { return };
    let loaded = load("ptb", json!({}), &search);
    assert!(loaded.provenance.verified);
    let text = text(loaded);
    assert_eq!((text.train.len(), text.valid.len(), text.test.len()), (929_589, 73_760, 82_430));
    assert_eq!(text.vocab.len(), 10_000);
    let words = |tokens: &[u32]| {
        tokens.iter().map(|t| text.vocab[*t as usize].as_str()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        words(&text.train[24..40]),
        "<eos> pierre <unk> N years old will join the board as a nonexecutive director nov. N"
    );
    assert_eq!(words(&text.test[82_427..]), "with us <eos>");
    assert_eq!(text.train[..3], [0, 1, 2]);
    let lines = |tokens: &[u32]| tokens.iter().filter(|t| text.vocab[**t as usize] == "<eos>").count();
    assert_eq!((lines(&text.train), lines(&text.valid), lines(&text.test)), (42_068, 3_370, 3_761));
}

#[test]
fn other_content_under_the_same_name_is_refused_unless_told() {
    let Some(search) = search("ptb") else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("ptb")).unwrap();
    let source = search.dir.unwrap().join("ptb");
    for split in ["train", "valid", "test"] {
        let name = format!("ptb.{split}.txt");
        std::fs::write(dir.path().join("ptb").join(&name), std::fs::read(source.join(&name)).unwrap())
            .unwrap();
    }
    let changed = dir.path().join("ptb/ptb.valid.txt");
    let text = std::fs::read_to_string(&changed).unwrap();
    std::fs::write(&changed, text.replacen("consumers", "customers", 1)).unwrap();
    let search = Search { dir: Some(dir.path().into()), offline: true, ..Search::default() };
    let set = DataRegistry::builtin().get("ptb").unwrap().clone();
    let error = set.load(&json!({}), &search).unwrap_err();
    assert!(matches!(&error, DataError::Mismatch(found) if found.split == "valid"), "{error}");
    assert!(error.to_string().contains("data.verify: false"));
    let loaded = set.load(&json!({"verify": false}), &search).unwrap();
    assert!(!loaded.provenance.verified);
}

#[test]
fn a_file_of_another_set_is_recognised() {
    let Some(search) = search("mnist") else { return };
    let search = Search { dir: search.dir.map(|d| d.join("mnist")), ..search };
    // The user named the folder itself; its files are those of Fashion-MNIST by name, but not by content.
    let error = DataRegistry::builtin().get("fashion-mnist").unwrap().load(&json!({}), &search).unwrap_err();
    assert!(error.to_string().contains("(which is mnist, train)"), "{error}");
}

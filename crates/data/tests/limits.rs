//! Files that claim more than a set has, files that never end, and downloads of another revision than was asked for.
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use taper_data::hub::{Record, Repo};
use taper_data::{DataRegistry, Form, Layout, Search, Spec, find};

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::none());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn refused(set: &str, folder: &Path, options: serde_json::Value) -> String {
    let search = Search { dir: Some(folder.into()), offline: true, ..Search::default() };
    DataRegistry::builtin().get(set).unwrap().load(&options, &search).unwrap_err().to_string()
}

#[test]
fn an_idx_file_that_claims_more_than_any_set_is_not_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    // Two million images would come to 1.6 GB, which a file of two megabytes could hold if it were compressed.
    let mut images = vec![0, 0, 8, 3];
    for size in [2_000_000u32, 28, 28] {
        images.extend(size.to_be_bytes());
    }
    images.extend(vec![7; 2_000_000]);
    let empty = [0, 0, 8, 1, 0, 0, 0, 0];
    for (name, bytes) in [("train-images-idx3-ubyte.gz", &images[..]), ("train-labels-idx1-ubyte.gz", &empty)]
    {
        std::fs::write(folder.path().join(name), gz(bytes)).unwrap();
    }
    for name in ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"] {
        std::fs::write(folder.path().join(name), gz(&empty)).unwrap();
    }
    let message = refused("mnist", folder.path(), json!({"verify": false}));
    assert!(message.ends_with("expected at most 1000000 samples, found 2000000"), "{message}");
}

#[test]
fn an_archive_that_claims_more_than_any_set_is_not_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_path("cifar-10-batches-bin/data_batch_1.bin").unwrap();
    header.set_size(3073 * 200_000);
    header.set_mode(0o644);
    header.set_cksum();
    let archive = gz(&[header.as_bytes().as_slice(), &[0; 3073]].concat());
    std::fs::write(folder.path().join("cifar-10-binary.tar.gz"), archive).unwrap();
    let message = refused("cifar10", folder.path(), json!({"verify": false}));
    assert!(message.contains("expected at most 100000 records of 3073 bytes"), "{message}");
}

#[cfg(unix)]
#[test]
fn pipes_are_refused_before_they_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, words) = (folder.path().join("pipe"), folder.path().join("words.txt"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::write(&words, "some words").unwrap();
    for key in ["train", "valid", "test", "vocab"] {
        let mut options = json!({"train": &words, "valid": &words, "test": &words});
        options[key] = json!(&pipe);
        let message = refused("text", folder.path(), options);
        assert!(message.starts_with(&format!("data.{key}: ")), "{message}");
        assert!(message.contains("expected a regular file, found a pipe"), "{message}");
    }
}

static SPEC: Spec = Spec {
    name: "sample",
    layouts: &[Layout { form: Form::Lines, files: &[&["one.txt"]] }],
    hub: Repo { id: "some/sample", revision: "main", files: &["one.txt"] },
    embedded: &[("one.txt", b"compiled in")],
};

#[test]
fn a_revision_is_that_revision_or_none() {
    let cache = tempfile::tempdir().unwrap();
    let search = Search { cache: Some(cache.path().into()), offline: true, ..Search::default() };
    let place = |revision: Option<&str>| find(&SPEC, &search, revision).map(|found| found.place);
    assert_eq!(place(None).unwrap(), "embedded");
    assert_eq!(place(Some("main")).unwrap(), "embedded");
    let message = place(Some("other")).unwrap_err().to_string();
    assert!(message.contains("compiled in: is revision main, not other"), "{message}");

    let folder = cache.path().join("data/sample");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("one.txt"), "downloaded").unwrap();
    let (repo, revision, commit) = ("some/sample".into(), "main".into(), "0123abcd".into());
    Record { repo, revision, commit, files: BTreeMap::new() }.write(&folder).unwrap();
    for held in [None, Some("main"), Some("0123abcd")] {
        assert_eq!(Path::new(&place(held).unwrap()), folder, "{held:?}");
    }
    let message = place(Some("other")).unwrap_err().to_string();
    assert!(message.contains("holds revision main (commit 0123abcd), not other"), "{message}");
    assert!(message.contains("cargo xtask data fetch sample --revision other"), "{message}");
}

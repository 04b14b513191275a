//! A second opinion: MNIST as candle-datasets reads it. Its CIFAR reader swaps rows and columns, so it is not asked.
//!
//!   cargo test --release --workspace --features taper-train/candle-datasets --test data_candle
#![cfg(feature = "candle-datasets")]
use std::io::Read;
use std::path::Path;
use taper_data::{Data, DataRegistry, Search};

#[test]
fn mnist_is_what_candle_datasets_reads() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/mnist")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|e| e == "gz") {
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(std::fs::File::open(&path).unwrap())
                .read_to_end(&mut plain)
                .unwrap();
            std::fs::write(folder.path().join(path.file_stem().unwrap()), plain).unwrap();
        }
    }
    let theirs = candle_datasets::vision::mnist::load_dir(folder.path()).unwrap();
    let ours = DataRegistry::builtin()
        .get("mnist")
        .unwrap()
        .load(&serde_json::json!({}), &Search::default())
        .unwrap();
    let Data::Images { train, test } = ours.data else { panic!("mnist is images") };
    for (images, pixels, labels) in [
        (&train, &theirs.train_images, &theirs.train_labels),
        (&test, &theirs.test_images, &theirs.test_labels),
    ] {
        let (pixels, labels) = (pixels.to_vec2::<f32>().unwrap(), labels.to_vec1::<u8>().unwrap());
        assert_eq!((pixels.len(), labels.len()), (images.len(), images.len()));
        for (i, (row, label)) in pixels.iter().zip(labels).enumerate() {
            assert_eq!(images.label(i), label);
            // candle multiplies by a rounded 1/255, an ulp from the quotient: the byte that was meant is the nearest.
            let bytes: Vec<u8> = row.iter().map(|pixel| (pixel * 255.0).round() as u8).collect();
            assert_eq!(images.image(i), bytes, "image {i}");
        }
    }
}

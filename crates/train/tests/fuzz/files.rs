//! Data sets, weights, optimizer states and recorded trajectories.
use crate::fuzz;
use candle_core::{DType, Device, Tensor};
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use taper_data::{DataRegistry, Search};
use taper_models::{Params, Task};
use taper_optim::StateDict;
use taper_train::Registries;

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn idx(dims: &[u32], data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, dims.len() as u8];
    dims.iter().for_each(|d| bytes.extend(d.to_be_bytes()));
    bytes.extend(data);
    bytes
}

/// Loads a set from a folder in which `name` is the input and `others` are good.
fn load(set: &str, name: &str, bytes: &[u8], others: &[(&str, &[u8])]) {
    let folder = crate::scratch();
    for (name, bytes) in others.iter().chain([&(name, bytes)]) {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let search = Search { dir: Some(folder.path().into()), offline: true, ..Search::default() };
    let loaded = DataRegistry::builtin().get(set).unwrap().load(&json!({"verify": false}), &search);
    if let Err(error) = loaded {
        assert!(error.to_string().len() < 5_000, "{error}");
    }
}

#[test]
fn fuzz_idx() {
    let images = idx(&[3, 28, 28], &[7; 3 * 784]);
    let labels = idx(&[3], &[0, 9, 4]);
    let others: [(&str, &[u8]); 4] = [
        ("train-images-idx3-ubyte", &images),
        ("train-labels-idx1-ubyte", &labels),
        ("t10k-images-idx3-ubyte", &images),
        ("t10k-labels-idx1-ubyte", &labels),
    ];
    let seeds = [images.clone(), labels.clone(), gz(&images), gz(&labels)];
    fuzz("idx", &seeds, |bytes| {
        load("mnist", others[0].0, bytes, &others[1..]);
        load("mnist", others[3].0, bytes, &others[..3]);
        // Damage inside of an archive that is whole.
        load("mnist", others[0].0, &gz(bytes), &others[1..]);
    });
}

fn batches() -> impl Iterator<Item = String> {
    (1..=5).map(|i| format!("data_batch_{i}.bin")).chain(["test_batch.bin".to_owned()])
}

#[test]
fn fuzz_cifar() {
    let record = vec![5; 3073];
    let mut tar = tar::Builder::new(Vec::new());
    for name in batches() {
        let mut header = tar::Header::new_gnu();
        header.set_size(3073);
        tar.append_data(&mut header, format!("cifar-10-batches-bin/{name}"), record.as_slice()).unwrap();
    }
    let tar = tar.into_inner().unwrap();
    let names: Vec<String> = batches().skip(1).collect();
    let others: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), record.as_slice())).collect();
    let seeds = [record.clone(), tar.clone(), gz(&tar)];
    fuzz("cifar", &seeds, |bytes| {
        load("cifar10", "data_batch_1.bin", bytes, &others);
        load("cifar10", "cifar-10-binary.tar.gz", bytes, &[]);
        load("cifar10", "cifar-10-binary.tar.gz", &gz(bytes), &[]);
        load("cifar100", "train.bin", bytes, &[("test.bin", &[0; 3074])]);
    });
}

fn png() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 32, 32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&[100; 3072]).unwrap();
    bytes
}

/// A parquet file as on the hub, with one picture.
fn table(picture: &[u8]) -> Vec<u8> {
    let schema = "message schema { optional group img { optional binary bytes; optional binary path (UTF8); } \
                  optional int64 label; }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&[ByteArray::from(picture)], Some(&[2]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&[], Some(&[1]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[3], Some(&[1]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn fuzz_parquet() {
    let good = table(&png());
    let test = [("plain_text/test/0000.parquet", good.as_slice())];
    fuzz("parquet", std::slice::from_ref(&good), |bytes| {
        load("cifar10", "plain_text/train/0000.parquet", bytes, &test)
    });
}

#[test]
fn fuzz_png() {
    let good = table(&png());
    let test = [("plain_text/test/0000.parquet", good.as_slice())];
    fuzz("png", &[png()], |bytes| load("cifar10", "plain_text/train/0000.parquet", &table(bytes), &test));
}

#[test]
fn fuzz_text() {
    let seeds =
        [b" aer banknote <unk> N years old\n pierre will join the board\n".to_vec(), b"a\n\nb".to_vec()];
    let others: [(&str, &[u8]); 2] = [("ptb.valid.txt", b"a b\n"), ("ptb.test.txt", b"b\n")];
    fuzz("text", &seeds, |bytes| load("ptb", "ptb.train.txt", bytes, &others));
}

/// A network of the registry with its parameters.
fn mlp() -> Params {
    let params = Params::new(1);
    let task = Task::Images { height: 4, width: 4, channels: 1, classes: 3 };
    let entry = Registries::default();
    let entry = entry.models.get("mlp").unwrap();
    entry.build(&json!({"hidden": [5]}), task, params.builder(DType::F32, &Device::Cpu)).unwrap();
    params
}

#[test]
fn fuzz_weights() {
    let params = mlp();
    let folder = crate::scratch();
    let path = folder.path().join("weights.safetensors");
    params.save(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    // The same names in other types.
    let other = HashMap::from([("a", Tensor::zeros((2, 3), DType::BF16, &Device::Cpu).unwrap())]);
    let other = safetensors::serialize(&other, None).unwrap();
    fuzz("weights", &[good, other], |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let _ = params.load(&path);
    });
}

#[test]
fn fuzz_optimizer_state() {
    let registry = taper_optim::Registry::builtin();
    let seeds: Vec<Vec<u8>> = ["decgd", "adam", "adagd"]
        .iter()
        .map(|name| {
            let optimizer = registry.build(name, mlp().trainable(), &Default::default()).unwrap();
            optimizer.state_dict().unwrap().to_bytes().unwrap()
        })
        .collect();
    let mut optimizer = registry.build("decgd", mlp().trainable(), &Default::default()).unwrap();
    fuzz("optimizer-state", &seeds, |bytes| {
        if let Ok(state) = StateDict::from_bytes(bytes) {
            let _ = optimizer.load_state_dict(&state);
        }
    });
}

/// The smallest records of a folder.
fn records(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
    let mut records: Vec<Vec<u8>> = files.map(|path| std::fs::read(path).unwrap()).collect();
    records.sort_by_key(Vec::len);
    records.truncate(4);
    records
}

#[test]
fn fuzz_replays() {
    let registry = taper_optim::Registry::builtin();
    fuzz("replays", &records("crates/optim/tests/golden"), |bytes| {
        let _ = taper_optim::replay::replay(&registry, bytes, &Default::default());
        let _ = taper_models::replay::replay(bytes, &Default::default(), DType::F32);
    });
}

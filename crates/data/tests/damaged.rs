//! Damaged input: a typed error that names the file, no panic, no huge allocation.
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use taper_data::{Data, DataError, DataRegistry, Search};

/// A directory of files, as a set's folder.
struct Dir(tempfile::TempDir);

impl Dir {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let dir = Self(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, bytes)| dir.write(name, bytes));
        dir
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        std::fs::write(self.path(name), bytes).unwrap();
    }

    fn load(&self, set: &str) -> Result<Data, DataError> {
        let search = Search { dir: Some(self.0.path().into()), offline: true, ..Search::default() };
        let loaded = DataRegistry::builtin().get(set).unwrap().load(&json!({"verify": false}), &search)?;
        Ok(loaded.data)
    }

    /// The message of the error that loading must be; it has to name `file`.
    #[track_caller]
    fn error(&self, set: &str, file: &str) -> String {
        let error = self.load(set).expect_err("damaged input was read");
        let path = match &error {
            DataError::Format { path, .. } | DataError::Io { path, .. } => path,
            other => panic!("not an error of a file: {other}"),
        };
        assert!(path.ends_with(file), "{error} does not name {file}");
        error.to_string()
    }
}

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

const TRAIN_IMAGES: &str = "train-images-idx3-ubyte";
const TRAIN_LABELS: &str = "train-labels-idx1-ubyte";
const TEST_IMAGES: &str = "t10k-images-idx3-ubyte";
const TEST_LABELS: &str = "t10k-labels-idx1-ubyte";

/// Three training images and one test image.
fn mnist() -> Dir {
    Dir::new(&[
        (TRAIN_IMAGES, &idx(&[3, 28, 28], &[7; 3 * 784])),
        (TRAIN_LABELS, &idx(&[3], &[0, 9, 4])),
        (TEST_IMAGES, &idx(&[1, 28, 28], &[9; 784])),
        (TEST_LABELS, &idx(&[1], &[1])),
    ])
}

#[test]
fn idx_files() {
    assert!(matches!(mnist().load("mnist").unwrap(), Data::Images { train, .. } if train.len() == 3));
    let images = idx(&[3, 28, 28], &[7; 3 * 784]);
    let packed = gz(&images);
    let ten_gigabytes = idx(&[12_755_102, 28, 28], &[7; 784]);
    let overflowing = idx(&[u32::MAX, 28, 28], &[7; 784]);
    let cases: &[(&str, &[u8], &str)] = &[
        (TRAIN_IMAGES, &packed[..packed.len() / 2], "corrupt|unexpected end|end of file|incomplete"),
        (TRAIN_IMAGES, &packed[..packed.len() - 6], "corrupt|unexpected end|end of file|incomplete"),
        (TRAIN_IMAGES, &[0x1f, 0x8b], "magic number could not be read"),
        (
            TRAIN_IMAGES,
            b"PK\x03\x04 a zip file",
            "expected an IDX file of bytes with magic number 0x00000803, found 0x504b0304",
        ),
        (TRAIN_IMAGES, &idx(&[3], &[0, 9, 4]), "found 0x00000801"),
        (TRAIN_LABELS, &images, "magic number 0x00000801, found 0x00000803"),
        (TRAIN_IMAGES, &idx(&[3, 28, 27], &[7; 3 * 28 * 27]), "expected dimension 2 to be 28, found 27"),
        (TRAIN_IMAGES, &images[..1000], "the header claims 2352 bytes, the file cannot hold them"),
        (TRAIN_IMAGES, &idx(&[2, 28, 28], &[7; 3 * 784]), "expected 1568 bytes after the header, found more"),
        (TRAIN_LABELS, &idx(&[4], &[0, 9, 4, 1]), "expected 3 labels"),
        (TRAIN_LABELS, &idx(&[3], &[0, 10, 4]), "expected labels below 10, found 10 at sample 1"),
        (TRAIN_IMAGES, b"", "magic number could not be read"),
        (TRAIN_IMAGES, &[0, 0, 8, 3, 0], "dimensions could not be read"),
        (TRAIN_IMAGES, &ten_gigabytes, "the header claims 9999999968 bytes, the file cannot hold them"),
        (TRAIN_IMAGES, &overflowing, "cannot hold them"),
        (TRAIN_IMAGES, &gz(&ten_gigabytes), "cannot hold them"),
    ];
    for (file, bytes, expected) in cases {
        let dir = mnist();
        dir.write(file, bytes);
        let message = dir.error("mnist", file);
        assert!(expected.split('|').any(|e| message.contains(e)), "{message} does not say {expected}");
    }
}

#[test]
fn things_that_are_not_files() {
    let dir = mnist();
    std::fs::remove_file(dir.path(TRAIN_IMAGES)).unwrap();
    std::fs::create_dir(dir.path(TRAIN_IMAGES)).unwrap();
    assert!(dir.error("mnist", TRAIN_IMAGES).contains("expected a file, found a directory"));
    std::fs::remove_dir(dir.path(TRAIN_IMAGES)).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(dir.path(TRAIN_IMAGES), dir.path("loop")).unwrap();
        std::os::unix::fs::symlink(dir.path("loop"), dir.path(TRAIN_IMAGES)).unwrap();
        assert!(dir.error("mnist", TRAIN_IMAGES).contains("symbolic links"));
    }
}

/// Binary CIFAR-10 with one record a file.
fn cifar() -> Dir {
    let record = vec![5; 3073];
    let files: Vec<(String, &[u8])> = batches().map(|name| (name, record.as_slice())).collect();
    Dir::new(&files.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>())
}

fn batches() -> impl Iterator<Item = String> {
    (1..=5).map(|i| format!("data_batch_{i}.bin")).chain(["test_batch.bin".to_string()])
}

#[test]
fn cifar_records() {
    assert!(matches!(cifar().load("cifar10").unwrap(), Data::Images { train, .. } if train.len() == 5));
    for (bytes, expected) in [
        (vec![5; 3000], "expected records of 3073 bytes, found a length of 3000"),
        (vec![], "expected records of 3073 bytes, found a length of 0"),
    ] {
        let dir = cifar();
        dir.write("data_batch_2.bin", &bytes);
        assert!(dir.error("cifar10", "data_batch_2.bin").contains(expected));
    }
    let dir = cifar();
    dir.write("test_batch.bin", &[10; 3073]);
    assert!(
        dir.error("cifar10", "test_batch.bin").contains("expected labels below 10, found 10 at sample 0")
    );
    // CIFAR-100's second byte is the fine label, its first the coarse one.
    let mut record = vec![0; 3074];
    record[0] = 20;
    let dir = Dir::new(&[("train.bin", &record), ("test.bin", &record)]);
    assert!(dir.load("cifar100").is_ok());
    let search = Search { dir: Some(dir.0.path().into()), ..Search::default() };
    let coarse = json!({"verify": false, "labels": "coarse"});
    let error = DataRegistry::builtin().get("cifar100").unwrap().load(&coarse, &search).unwrap_err();
    assert!(error.to_string().contains("expected labels below 20, found 20"), "{error}");
}

/// A tar of entries whose names and claimed sizes are written as they are.
fn tar(entries: &[(&str, &[u8], Option<u64>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content, claimed) in entries {
        let mut header = tar::Header::new_old();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(claimed.unwrap_or(content.len() as u64));
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn cifar_archives() {
    const NAME: &str = "cifar-10-binary.tar.gz";
    let record = vec![5; 3073];
    let names: Vec<String> = batches().map(|name| format!("cifar-10-batches-bin/{name}")).collect();
    let good: Vec<(&str, &[u8], Option<u64>)> =
        names.iter().map(|n| (n.as_str(), record.as_slice(), None)).collect();
    let packed = gz(&tar(&good));
    assert!(
        matches!(Dir::new(&[(NAME, &packed)]).load("cifar10").unwrap(), Data::Images { train, .. } if train.len() == 5)
    );

    let with = |extra: &[(&'static str, &'static [u8], Option<u64>)]| {
        let mut entries = good.clone();
        entries.extend(extra);
        gz(&tar(&entries))
    };
    let huge = 10_000_000_000 / 3073 * 3073;
    let cases = [
        (packed[..packed.len() / 2].to_vec(), "could not be read|not a readable .tar.gz|has no"),
        (b"not an archive".to_vec(), "not a readable .tar.gz"),
        (Vec::new(), "has no `data_batch_1.bin`|not a readable"),
        (gz(&tar(&good[..5])), "the archive has no `test_batch.bin`"),
        (with(&[("../../etc/passwd", b"x", None)]), "entry `../../etc/passwd` points outside the archive"),
        (with(&[("/etc/passwd", b"x", None)]), "points outside the archive"),
        (with(&[("again/test_batch.bin", &[5; 3073], None)]), "occurs twice"),
        (gz(&tar(&[("data_batch_1.bin", &[5; 3073], Some(huge))])), "expected at most 100000 records"),
        (
            gz(&tar(&[("data_batch_1.bin", &[5; 100], None)])),
            "expected records of 3073 bytes, found a length of 100",
        ),
    ];
    for (bytes, expected) in cases {
        let error = Dir::new(&[(NAME, &bytes)]).load("cifar10").expect_err(expected);
        let message = error.to_string();
        assert!(matches!(error, DataError::Format { .. }) && message.contains(NAME), "{message}");
        assert!(expected.split('|').any(|e| message.contains(e)), "{message} does not say {expected}");
    }
}

fn png(width: u32, height: u32, colour: png::ColorType) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(colour);
    let samples = if colour == png::ColorType::Rgb { 3 } else { 1 };
    encoder
        .write_header()
        .unwrap()
        .write_image_data(&vec![100; (width * height * samples) as usize])
        .unwrap();
    bytes
}

/// A parquet file as on the hub: rows of PNG and label; `None` is a null.
fn table(image_column: &str, label_column: &str, rows: &[(Option<&[u8]>, i64)]) -> Vec<u8> {
    let schema = format!(
        "message schema {{ optional group {image_column} {{ optional binary bytes; optional binary path (UTF8); }} \
         optional int64 {label_column}; }}"
    );
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let mut writer =
        SerializedFileWriter::new(Vec::new(), schema, Arc::new(WriterProperties::default())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let images: Vec<ByteArray> = rows.iter().filter_map(|(image, _)| image.map(ByteArray::from)).collect();
    let present: Vec<i16> = rows.iter().map(|(image, _)| if image.is_some() { 2 } else { 1 }).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&images, Some(&present), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&[], Some(&vec![1; rows.len()]), None).unwrap();
    column.close().unwrap();
    let labels: Vec<i64> = rows.iter().map(|(_, label)| *label).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&labels, Some(&vec![1; rows.len()]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.into_inner().unwrap()
}

const TRAIN: &str = "plain_text/train/0000.parquet";
const TEST: &str = "plain_text/test/0000.parquet";

#[test]
fn parquet_tables() {
    let good = png(32, 32, png::ColorType::Rgb);
    let test = table("img", "label", &[(Some(&good), 3)]);
    let load = |train: &[u8]| Dir::new(&[(TRAIN, train), (TEST, &test)]);
    let whole = table("img", "label", &[(Some(&good), 0), (Some(&good), 9)]);
    assert!(
        matches!(load(&whole).load("cifar10").unwrap(), Data::Images { train, .. } if train.labels() == [0, 9])
    );

    // A PNG whose header claims 100,000 x 100,000 pixels, with the checksum made right.
    let mut bomb = good.clone();
    bomb[16..24].copy_from_slice(&[0, 1, 0x86, 0xa0, 0, 1, 0x86, 0xa0]);
    let mut checksum = flate2::Crc::new();
    checksum.update(&bomb[12..29]);
    bomb[29..33].copy_from_slice(&checksum.sum().to_be_bytes());

    let one = |image: &[u8]| table("img", "label", &[(Some(&good), 1), (Some(image), 1)]);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (one(b"not a picture"), "row 1: the image is not a readable PNG"),
        (one(b""), "row 1: the image is not a readable PNG"),
        (one(&good[..good.len() / 2]), "row 1: the image is not a readable PNG"),
        (one(&png(31, 32, png::ColorType::Rgb)), "row 1: expected a Rgb image of 32x32, found Rgb of 31x32"),
        (one(&png(32, 32, png::ColorType::Grayscale)), "found Grayscale of 32x32"),
        (one(&bomb), "row 1: "),
        (
            table("picture", "label", &[(Some(&good), 1)]),
            "expected a column `img.bytes`, found picture.bytes, picture.path, label",
        ),
        (table("img", "class", &[(Some(&good), 1)]), "expected a column `label`, found"),
        (
            table("img", "label", &[(Some(&good), 10)]),
            "column `label`: expected labels below 10, found 10 at row 0",
        ),
        (table("img", "label", &[(Some(&good), -1)]), "expected labels below 10, found -1"),
        (table("img", "label", &[(None, 1)]), "column `img.bytes`: no value in one of the rows"),
        (whole[..whole.len() - 1].to_vec(), "not a readable parquet file"),
        (whole[..whole.len() / 2].to_vec(), "not a readable parquet file"),
        (b"text".to_vec(), "not a readable parquet file"),
        (Vec::new(), "not a readable parquet file"),
    ];
    for (bytes, expected) in cases {
        let message = load(&bytes).error("cifar10", TRAIN);
        assert!(message.contains(expected), "{message} does not say {expected}");
    }
}

#[test]
fn sentences() {
    let text = |train: &[u8]| {
        Dir::new(&[("ptb.train.txt", train), ("ptb.valid.txt", b"a b\n"), ("ptb.test.txt", b"b\n")])
    };
    assert!(matches!(text(b"a\nb\n").load("ptb").unwrap(), Data::Text(t) if *t.train == [0, 1, 2, 1]));
    assert!(text(b"").error("ptb", "ptb.train.txt").contains("expected sentences, found none"));
    assert!(text(&[0x61, 0xff]).error("ptb", "ptb.train.txt").contains("expected UTF-8 text"));

    let column = |name: &str, value: &[u8]| {
        let schema =
            Arc::new(parse_message_type(&format!("message schema {{ required binary {name}; }}")).unwrap());
        let mut writer = SerializedFileWriter::new(Vec::new(), schema, Default::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&[ByteArray::from(value)], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.into_inner().unwrap()
    };
    let good = column("sentence", b" mr. <unk> is chairman ");
    let table = |train: &[u8]| {
        let file = |split: &str| format!("penn_treebank/{split}/0000.parquet");
        Dir::new(&[(&file("train"), train), (&file("validation"), &good), (&file("test"), &good)])
    };
    let Data::Text(read) = table(&good).load("ptb").unwrap() else { panic!("expected text") };
    assert_eq!(*read.vocab, ["mr.", "<unk>", "is", "chairman", "<eos>"]);
    let train = Path::new("penn_treebank/train/0000.parquet").to_str().unwrap();
    assert!(table(&column("sentence", &[0xff])).error("ptb", train).contains("row 0 is not UTF-8"));
    assert!(
        table(&column("text", b"a")).error("ptb", train).contains("expected a column `sentence`, found text")
    );
}

/// Every byte of a small file changed in turn, and every length: an error or other samples, never a panic.
#[test]
fn no_flipped_byte_brings_a_reader_down() {
    let image = png(32, 32, png::ColorType::Rgb);
    let parquet = table("img", "label", &[(Some(&image), 0), (Some(&image), 9)]);
    let test = table("img", "label", &[(Some(&image), 3)]);
    let dir = Dir::new(&[(TRAIN, &parquet), (TEST, &test)]);
    let (mut refused, mut tried) = (0, 0);
    let mut attempt = |dir: &Dir, set: &str, file: &str, bytes: &[u8]| {
        dir.write(file, bytes);
        tried += 1;
        refused += usize::from(dir.load(set).is_err());
    };
    // A reader's panic is caught and reported as an error; its own message would drown the output.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for at in 0..parquet.len() {
        for flip in [0xff, 0x01, 0x80] {
            let mut bytes = parquet.clone();
            bytes[at] ^= flip;
            attempt(&dir, "cifar10", TRAIN, &bytes);
        }
        attempt(&dir, "cifar10", TRAIN, &parquet[..at]);
    }
    std::panic::set_hook(hook);
    let record = [5; 3073];
    let names: Vec<String> = batches().collect();
    let archive = gz(&tar(&names.iter().map(|n| (n.as_str(), &record[..], None)).collect::<Vec<_>>()));
    let dir = Dir::new(&[]);
    for at in 0..archive.len() {
        let mut bytes = archive.clone();
        bytes[at] ^= 0xff;
        attempt(&dir, "cifar10", "cifar-10-binary.tar.gz", &bytes);
        attempt(&dir, "cifar10", "cifar-10-binary.tar.gz", &archive[..at]);
    }
    assert!(refused > tried / 2, "{refused} of {tried}");
    println!("{refused} of {tried} damaged files were refused, the others read as other samples");
    if let Some(peak) = peak_megabytes() {
        assert!(peak < 400, "{peak} MB for files of a few kilobytes");
    }
}

/// The most memory this process ever had, where the system tells.
fn peak_megabytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

/// Zeros pack a thousandfold: what a file unpacks to is bounded by what the set has, not by its size on the disk.
#[test]
fn an_archive_is_not_unpacked_beyond_any_set() {
    const NAME: &str = "cifar-10-binary.tar.gz";
    let mut header = tar::Header::new_old();
    header.set_path("notes.txt").unwrap();
    header.set_size(1 << 32);
    header.set_cksum();
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(header.as_bytes()).unwrap();
    (0..520).for_each(|_| packed.write_all(&[0; 1 << 20]).unwrap());
    let packed = packed.finish().unwrap();
    assert!(packed.len() < 8 << 20);
    let error = Dir::new(&[(NAME, &packed)]).error("cifar10", NAME);
    assert!(error.contains("unpacks to more than 512 MiB"), "{error}");
}

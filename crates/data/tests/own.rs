//! Data of the user's own: folders of images, text in every unit, arrays. The files of `own/` were written by numpy, Pillow and
//! safetensors (`own/make.py`), the rest the tests make themselves.
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use taper_data::{
    Augment, Data, DataError, DataRegistry, Depth, Flip, ImagePipeline, Images, Loaded, PipelineConfig,
    Search, Text, inventory, photo,
};

fn own(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/own").join(name)
}

fn load_in(name: &str, options: &Value, search: &Search) -> Result<Loaded, DataError> {
    DataRegistry::builtin().get(name)?.load(options, search)
}

fn load(name: &str, options: &Value) -> Result<Loaded, DataError> {
    load_in(name, options, &Search::default())
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

/// The message of an error, all of whose `parts` it must say.
#[track_caller]
fn refused<T>(found: Result<T, DataError>, parts: &[&str]) {
    let message = found.err().expect("bad input was read").to_string();
    for part in parts {
        assert!(message.contains(part), "{message}\ndoes not say: {part}");
    }
}

fn png(width: usize, height: usize, rgb: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(if rgb.len() == width * height {
        png::ColorType::Grayscale
    } else {
        png::ColorType::Rgb
    });
    encoder.write_header().unwrap().write_image_data(rgb).unwrap();
    file
}

/// A tree of files.
struct Tree(tempfile::TempDir);

impl Tree {
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

    /// Two classes of `count` images of 6 rows and 4 columns in train/, and one image each in test/.
    fn with_classes(count: u8) -> Self {
        let tree = Self::new();
        for (class, base) in [("cat", 0), ("dog", 100)] {
            for i in 0..count {
                tree.write(&format!("train/{class}/{i}.png"), &png(4, 6, &[base + i; 72]));
            }
            tree.write(&format!("test/{class}/x.png"), &png(4, 6, &[base + 99; 72]));
        }
        tree
    }

    fn options(&self) -> Value {
        json!({"path": self.0.path()})
    }

    fn load(&self) -> Result<Loaded, DataError> {
        load("folder", &self.options())
    }
}

fn with(mut options: Value, key: &str, value: Value) -> Value {
    options[key] = value;
    options
}

#[test]
fn pictures_are_decoded_and_resized_as_pillow_does_it() {
    let expected = expected_pictures();
    let mut compared = 0;
    for (name, dims, pixels) in &expected {
        let (file, size) = name.split_once(':').unwrap();
        let sides: Vec<usize> = size.split('x').map(|side| side.parse().unwrap()).collect();
        assert_eq!(sides[..2], dims[..2]);
        let found = photo::read(&own(file), sides[0], sides[1], sides[2]).unwrap();
        assert_eq!(found.len(), pixels.len(), "{name}");
        if file.ends_with(".png") {
            assert_eq!(&found, pixels, "{name}");
        } else {
            // Decoders of JPEG may round as they like, and ours enlarges halved colours another way.
            let apart = found.iter().zip(pixels).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(apart <= if file == "halved.jpg" { 24 } else { 3 }, "{name}: {apart} apart");
        }
        compared += 1;
    }
    assert_eq!(compared, 6 * 2 * 6 + 4);
}

/// Names, axes and bytes of `pictures.npz`, by a reader that knows nothing of ours: members that are stored one after the other.
fn expected_pictures() -> Vec<(String, Vec<usize>, Vec<u8>)> {
    use std::io::Read;
    let bytes = std::fs::read(own("pictures.npz")).unwrap();
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(bytes)).unwrap();
    let mut found = Vec::new();
    for number in 0..archive.len() {
        let member = archive.by_index_raw(number).unwrap();
        let name = member.name().unwrap().strip_suffix(".npy").unwrap().to_owned();
        let mut npy = Vec::new();
        flate2::read::DeflateDecoder::new(member).read_to_end(&mut npy).unwrap();
        let header = 10 + usize::from(u16::from_le_bytes([npy[8], npy[9]]));
        let text = String::from_utf8_lossy(&npy[10..header]).into_owned();
        let dims = text.split(['(', ')']).nth(1).unwrap().split(',').filter_map(|d| d.trim().parse().ok());
        found.push((name, dims.collect(), npy[header..].to_vec()));
    }
    found
}

#[test]
fn a_jpeg_has_the_same_pixels_on_every_cpu() {
    let digest = |name: &str| taper_files::sha256(&photo::read(&own(name), 45, 61, 3).unwrap());
    let found = ["photo.jpg", "halved.jpg", "progressive.jpg", "grey.jpg"].map(digest);
    assert_eq!(found.each_ref().map(|digest| &digest[..16]), JPEGS);
}

/// Recorded on x86-64.
const JPEGS: [&str; 4] = ["fd1ed12e5d248704", "47da6e1c9f1d309d", "fd1ed12e5d248704", "954301c945229fea"];

#[test]
fn a_folder_is_its_content_and_not_its_names() {
    let tree = Tree::with_classes(5);
    let loaded = tree.load().unwrap();
    assert_eq!(loaded.provenance.classes, ["cat", "dog"]);
    let content = loaded.provenance.content.clone();
    let (train, test) = images(loaded);
    assert_eq!((train.len(), test.len(), train.classes), (10, 2, 2));
    assert_eq!((train.height, train.width, train.channels), (6, 4, 3));
    for i in 0..train.len() {
        let value = train.image(i)[0];
        assert!(train.image(i).iter().all(|x| *x == value));
        assert_eq!(train.label(i), u8::from(value >= 100));
    }
    // Renamed, in folders of its own, as a link: the same set in the same order.
    std::fs::rename(tree.path("train/cat/0.png"), tree.path("train/cat/zz.jpeg")).unwrap();
    std::fs::create_dir(tree.path("train/dog/deep")).unwrap();
    std::fs::rename(tree.path("train/dog/1.png"), tree.path("train/dog/deep/1.png")).unwrap();
    tree.write("train/.DS_Store", b"passed over");
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(b"train/cat/caf\xe9.png");
        std::fs::rename(tree.path("train/cat/2.png"), tree.0.path().join(name)).unwrap();
        std::fs::rename(tree.path("train/cat/3.png"), tree.path("elsewhere.png")).unwrap();
        std::os::unix::fs::symlink(tree.path("elsewhere.png"), tree.path("train/cat/3.png")).unwrap();
    }
    assert_eq!(tree.load().unwrap().provenance.content, content);
    // Another image is another set.
    tree.write("train/cat/1.png", &png(4, 6, &[77; 72]));
    assert!(tree.load().unwrap().provenance.content[0] != content[0]);
}

#[test]
fn constants_are_those_of_the_training_images() {
    let loaded = Tree::with_classes(5).load().unwrap();
    let normalize = loaded.normalize.clone().unwrap();
    let (train, _) = images(loaded);
    let (mean, std) = train.statistics();
    for c in 0..3 {
        assert_eq!(normalize.mean[c], mean[c] as f32);
        assert_eq!(normalize.std[c], std[c] as f32);
    }
    // 0 to 4 and 100 to 104: a mean of 52.
    assert!((mean[0] - 52.0 / 255.0).abs() < 1e-15);
}

#[test]
fn one_folder_is_split_by_content_and_seed() {
    let tree = Tree::new();
    for (class, base) in [("a", 0u8), ("b", 100)] {
        for i in 0..10 {
            tree.write(&format!("{class}/{i}.png"), &png(2, 2, &[base + i; 12]));
        }
    }
    let load = |seed: u64, test: Value| {
        images(load("folder", &json!({"path": tree.0.path(), "test": test, "seed": seed})).unwrap())
    };
    let (train, test) = load(1, json!(0.2));
    assert_eq!((train.len(), test.len()), (16, 4));
    assert_eq!(test.labels().iter().filter(|label| **label == 0).count(), 2, "a fifth of every class");
    assert_eq!(load(1, json!(2)), (train.clone(), test.clone()), "two of every class");
    assert!(load(2, json!(0.2)).1 != test);
    std::fs::rename(tree.path("a/0.png"), tree.path("a/renamed.png")).unwrap();
    assert_eq!(load(1, json!(0.2)), (train, test));
    // A copy stays with its original.
    std::fs::copy(tree.path("b/4.png"), tree.path("b/copy.png")).unwrap();
    let (train, test) = load(1, json!(0.2));
    let copies = |set: &Images| (0..set.len()).filter(|i| set.image(*i)[0] == 104).count();
    assert!([(2, 0), (0, 2)].contains(&(copies(&train), copies(&test))));
}

#[test]
fn images_of_any_size_become_one_size() {
    let tree = Tree::with_classes(2);
    tree.write("train/cat/wide.png", &png(9, 3, &[50; 81]));
    refused(tree.load(), &["columns like the others", "choose a `size` for all"]);
    let sized = |size: Value| images(load("folder", &with(tree.options(), "size", size)).unwrap()).0;
    assert_eq!((sized(json!(5)).height, sized(json!(5)).width), (5, 5));
    let set = sized(json!([3, 7]));
    assert_eq!((set.height, set.width), (3, 7));
    assert!((0..set.len()).any(|i| set.image(i) == [50; 63]), "a plain image stays plain");
    let grey = load("folder", &with(with(tree.options(), "size", json!(5)), "channels", json!(1))).unwrap();
    assert_eq!(images(grey).0.channels, 1);
}

#[test]
fn the_cache_is_used_verified_and_never_believed_about_changed_files() {
    let (tree, cache) = (Tree::with_classes(5), tempfile::tempdir().unwrap());
    let search = Search { cache: Some(cache.path().into()), ..Search::default() };
    let load = || load_in("folder", &tree.options(), &search).map(images).unwrap();
    let kept = || -> Vec<PathBuf> {
        let mut files: Vec<_> =
            std::fs::read_dir(cache.path().join("images")).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        files
    };
    let first = load();
    let files = kept();
    assert_eq!(files.len(), 2, "one for each split");
    assert_eq!(load(), first);
    // What is kept is what is used: a file with other pixels under a right digest shows.
    let genuine = std::fs::read(&files[0]).unwrap();
    let forged = vec![9; genuine.len() - 32];
    let sealed: Vec<u8> = (0..32)
        .map(|i| u8::from_str_radix(&taper_files::sha256(&forged)[2 * i..2 * i + 2], 16).unwrap())
        .chain(forged.clone())
        .collect();
    std::fs::write(&files[0], sealed).unwrap();
    assert!(load() != first);
    // One that is damaged, cut off or empty does not.
    for damage in [&genuine[..genuine.len() - 1], &genuine[1..], &[], &[0; 100]] {
        std::fs::write(&files[0], damage).unwrap();
        assert_eq!(load(), first);
        assert_eq!(std::fs::read(&files[0]).unwrap(), genuine, "it is replaced");
    }
    // A changed image is another key.
    tree.write("train/cat/1.png", &png(4, 6, &[77; 72]));
    let changed = load();
    assert!(changed.0 != first.0 && changed.1 == first.1);
    // Nothing is written by a look.
    std::fs::remove_dir_all(cache.path().join("images")).unwrap();
    load_in("folder", &tree.options(), &search.clone().looking_only()).unwrap();
    assert!(!cache.path().join("images").exists());
}

#[test]
fn folders_that_are_not_right_are_refused_by_name() {
    let case = |change: &dyn Fn(&Tree), parts: &[&str]| {
        let tree = Tree::with_classes(3);
        change(&tree);
        refused(tree.load(), parts);
    };
    let image = png(4, 6, &[1; 72]);
    case(
        &|tree| std::fs::create_dir(tree.path("train/bird")).unwrap(),
        &["train/bird", "expected images, found an empty class"],
    );
    case(
        &|tree| std::fs::remove_dir_all(tree.path("train/dog")).unwrap(),
        &["train: expected 2 to 256 folders, a class each, found 1"],
    );
    case(&|tree| tree.write("test/bird/x.png", &image), &["test/bird: expected a class of", "found `bird`"]);
    case(&|tree| tree.write("train/readme.txt", b"hello"), &["train/readme.txt: expected a folder a class"]);
    case(
        &|tree| tree.write("train/cat/notes.txt", b"meow"),
        &["train/cat/notes.txt: expected a PNG or JPEG image", "6d656f77"],
    );
    case(&|tree| tree.write("train/cat/none.png", b""), &["none.png: ", "found an empty file"]);
    case(
        &|tree| tree.write("train/cat/cut.png", &image[..image.len() - 20]),
        &["cut.png: not a readable PNG"],
    );
    case(
        &|tree| std::fs::remove_dir_all(tree.path("test")).unwrap(),
        &["data.path: expected the folders train and test", "found no test", "`test: 0.2`"],
    );
    case(
        &|tree| std::fs::remove_dir_all(tree.0.path()).unwrap(),
        &["data.path: ", ": there is no such folder"],
    );
    let copy = |from: &'static str, to: &'static str| {
        move |tree: &Tree| std::fs::copy(tree.path(from), tree.path(to)).map(drop).unwrap()
    };
    case(
        &copy("train/cat/1.png", "train/dog/c.png"),
        &["in two classes", "1.png", "c.png", "duplicates: keep"],
    );
    case(&copy("train/cat/1.png", "test/cat/c.png"), &["to train on and to report on", "test/cat/c.png"]);
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::fs::symlink;
        case(
            &|tree| symlink(tree.path("train/cat"), tree.path("train/cat/again")).unwrap(),
            &["train/cat/again: expected every folder once", "circles"],
        );
        case(
            &|tree| symlink(tree.path("train/cat/loop"), tree.path("train/cat/loop")).unwrap(),
            &["train/cat/loop: ", "symbolic links"],
        );
        case(
            &|tree| symlink(tree.path("nowhere"), tree.path("train/cat/gone.png")).unwrap(),
            &["train/cat/gone.png: ", "No such file"],
        );
        case(
            &|tree| {
                let name = std::ffi::OsStr::from_bytes(b"train/caf\xe9");
                std::fs::create_dir(tree.0.path().join(name)).unwrap();
            },
            &["train/caf", "expected a class's name in UTF-8"],
        );
        case(
            &|tree| {
                let made = std::process::Command::new("mkfifo").arg(tree.path("train/cat/pipe.png")).status();
                assert!(made.unwrap().success());
            },
            &["pipe.png: expected a regular file, found a pipe"],
        );
    }
    let tree = Tree::with_classes(3);
    std::fs::copy(tree.path("train/cat/1.png"), tree.path("test/cat/c.png")).unwrap();
    assert!(load("folder", &with(tree.options(), "duplicates", json!("keep"))).is_ok());
    refused(
        load("folder", &with(tree.options(), "test", json!(0.5))),
        &["data.test", "found train and test"],
    );
    refused(load("folder", &json!({"path": "no/such/folder"})), &["data.path", "no/such/folder"]);
    refused(load("folder", &json!({})), &["data.path: expected the path of a folder, found none"]);
    for (key, value, part) in [
        ("size", json!(0), "expected 1 to 32768 pixels a side, found 0x0"),
        ("size", json!([1, 2, 3]), "expected a number of pixels, or two"),
        ("size", json!([30000, 30000]), "found 30000x30000"),
        ("channels", json!(2), "expected 1 (grey) or 3 (colour), found 2"),
        ("test", json!(1.5), "expected a fraction between 0 and 1"),
        ("test", json!(0), "found 0"),
        ("duplicates", json!("maybe"), "unknown variant `maybe`"),
    ] {
        refused(load("folder", &with(tree.options(), key, value)), &[&format!("data.{key}: "), part]);
    }
    // More than a class has.
    let tree = Tree::new();
    tree.write("a/1.png", &image);
    tree.write("b/1.png", &png(4, 6, &[2; 72]));
    refused(
        load("folder", &with(tree.options(), "test", json!(0.5))),
        &["a: expected more than 1 different images"],
    );
}

/// Every prefix of an image is refused, and no changed byte is worse than that.
#[test]
fn damaged_images_are_errors() {
    for name in ["colour.png", "palette.png", "photo.jpg", "halved.jpg", "progressive.jpg", "grey.jpg"] {
        let whole = std::fs::read(own(name)).unwrap();
        let tree = Tree::new();
        let read = |bytes: &[u8]| {
            tree.write(name, bytes);
            photo::read(&tree.path(name), 8, 8, 3)
        };
        assert!(read(&whole).is_ok());
        for length in 0..whole.len() {
            // What is after the pixels of a PNG is a mark of its end without content.
            refused(read(&whole[..length]), &[name]);
        }
        for at in 0..whole.len() {
            for flip in [0x01, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= flip;
                if let Ok(pixels) = read(&damaged) {
                    assert_eq!(pixels.len(), 192);
                }
            }
        }
    }
}

#[test]
fn an_image_that_claims_more_than_it_may_is_not_decoded() {
    let tree = Tree::new();
    // A PNG's header of 60000 x 60000, with the sum that it needs.
    let mut file = png(1, 1, &[0; 3]);
    file[16..20].copy_from_slice(&60_000u32.to_be_bytes());
    file[20..24].copy_from_slice(&60_000u32.to_be_bytes());
    let mut crc = flate2::Crc::new();
    crc.update(&file[12..29]);
    file[29..33].copy_from_slice(&crc.sum().to_be_bytes());
    tree.write("bomb.png", &file);
    refused(photo::read(&tree.path("bomb.png"), 8, 8, 3), &["bomb.png", "found 60000x60000"]);
    // A JPEG's frame of 65500 x 65500.
    let mut file = std::fs::read(own("photo.jpg")).unwrap();
    let frame = file.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    file[frame + 5..frame + 9].copy_from_slice(&[0xff, 0xdc, 0xff, 0xdc]);
    tree.write("bomb.jpg", &file);
    refused(photo::read(&tree.path("bomb.jpg"), 8, 8, 3), &["bomb.jpg"]);
    // 8193 x 8193 is a pixel too many in all, though not on a side.
    file[frame + 5..frame + 9].copy_from_slice(&[0x20, 0x01, 0x20, 0x01]);
    tree.write("bomb.jpg", &file);
    refused(photo::read(&tree.path("bomb.jpg"), 8, 8, 3), &["bomb.jpg", "found 8193x8193"]);
}

fn arrays(file: &str, more: Value) -> Result<Loaded, DataError> {
    let mut options = json!({"path": own(file)});
    more.as_object().unwrap().iter().for_each(|(key, value)| options[key] = value.clone());
    load("arrays", &options)
}

/// The images that `make.py` writes, from its formula.
fn made(from: usize, to: usize) -> Vec<u8> {
    (from * 90..to * 90).map(|i| (i * 37 % 256) as u8).collect()
}

fn all_bytes(images: &Images) -> Vec<u8> {
    (0..images.len()).flat_map(|i| images.image(i).to_vec()).collect()
}

#[test]
fn arrays_are_read_as_numpy_writes_them() {
    for file in ["stored.npz", "deflated.npz", "planes.npz"] {
        let (train, test) = images(arrays(file, json!({})).unwrap());
        assert_eq!((train.height, train.width, train.channels, train.classes), (5, 6, 3, 3), "{file}");
        assert_eq!(all_bytes(&train), made(0, 8), "{file}");
        assert_eq!(all_bytes(&test), made(8, 12), "{file}");
        assert_eq!(
            (train.labels(), test.labels()),
            (&[0, 1, 2, 0, 1, 2, 0, 1][..], &[2, 0, 1, 2][..]),
            "{file}"
        );
    }
    // One array in two parts: together they are all of it, in its order on each side.
    for (file, float) in [
        ("fortran.npz", false),
        ("bytes.safetensors", false),
        ("big_endian.npz", true),
        ("double.npz", true),
        ("floats.safetensors", true),
    ] {
        let (train, test) = images(arrays(file, json!({"test": 3})).unwrap());
        assert_eq!((train.len(), test.len()), (9, 3), "{file}");
        let depth = if float { Depth::Float } else { Depth::Byte };
        assert_eq!((train.depth, test.depth), (depth, depth), "{file}");
        let stored = |i: usize| -> Vec<u8> {
            let number = |x: u8| if float { (f32::from(x) / 255.0).to_le_bytes().to_vec() } else { vec![x] };
            made(i, i + 1).into_iter().flat_map(number).collect()
        };
        let mut places: Vec<usize> = Vec::new();
        for set in [&train, &test] {
            for i in 0..set.len() {
                let place = (0..12).find(|place| stored(*place) == set.image(i)).expect(file);
                assert_eq!(usize::from(set.label(i)), place % 3, "{file}");
                places.push(place);
            }
        }
        assert!(places[..9].is_sorted() && places[9..].is_sorted(), "{file}");
        places.sort_unstable();
        assert_eq!(places, (0..12).collect::<Vec<_>>(), "{file}");
    }
    let (train, _) = images(arrays("grey.npz", json!({"test": 1, "classes": ["a", "b", "c", "d"]})).unwrap());
    assert_eq!((train.channels, train.classes), (1, 4));
    let names =
        arrays("grey.npz", json!({"test": 1, "classes": ["a", "b", "c"]})).unwrap().provenance.classes;
    assert_eq!(names, ["a", "b", "c"]);
}

#[test]
fn floats_stand_for_themselves_in_batches() {
    let loaded = arrays("floats.safetensors", json!({"test": 3})).unwrap();
    let normalize = loaded.normalize.clone().unwrap();
    let as_bytes = arrays("bytes.safetensors", json!({"test": 3})).unwrap();
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    let bytes_constants = as_bytes.normalize.clone().unwrap();
    assert!(close(&normalize.mean, &bytes_constants.mean) && close(&normalize.std, &bytes_constants.std));
    // With the same constants, floats that are 255ths and bytes make the same batches, cropped and mirrored too.
    let (floats, bytes) = (images(loaded).0, images(as_bytes).0);
    for augment in [
        Augment::default(),
        Augment { crop_pad: 2, flip: Flip::RANDOM, cutout: 3, mixup: 0.5, ..Default::default() },
    ] {
        let config = PipelineConfig {
            batch_size: 4,
            shuffle: true,
            augment,
            normalize: normalize.clone(),
            drop_last: false,
            indices: None,
        };
        let batches = |set: &Images| -> Vec<_> {
            ImagePipeline::new(set.clone(), config.clone(), 7).unwrap().epoch(1, 0).collect()
        };
        assert_eq!(batches(&floats), batches(&bytes));
    }
}

#[test]
fn arrays_that_are_not_right_are_refused_by_name() {
    let test = || json!({"test": 3});
    for (file, options, parts) in [
        (
            "objects.npz",
            test(),
            &["objects.npz: array `labels`", "Python objects, which are not unpickled"][..],
        ),
        ("floating_labels.npz", test(), &["array `labels`: expected whole numbers, found float32", "astype"]),
        ("negative.npz", test(), &["array `labels`: expected labels from 0 to 255, found -1 at sample 0"]),
        (
            "grey.npz",
            json!({}),
            &["data.test_images", "`test_images` or `x_test`", "images, labels", "test: 0.2"],
        ),
        (
            "grey.npz",
            json!({"images": "pictures"}),
            &["data.images: expected an array `pictures`", "found images, labels"],
        ),
        ("grey.npz", json!({"test": 12}), &["data.test: expected images on both sides, found 0 to train on"]),
        ("grey.npz", json!({"test": 3, "classes": 2}), &["expected labels below 2, found 2 at sample 2"]),
        (
            "grey.npz",
            json!({"test": 3, "classes": 300}),
            &["data.classes: expected 2 to 256 classes, found 300"],
        ),
        (
            "stored.npz",
            json!({"layout": "nchw"}),
            &["array `train_images`: expected images", "found [8, 5, 6, 3]"],
        ),
        (
            "stored.npz",
            json!({"labels": "train_images"}),
            &["expected labels [N] or [N, 1], found [8, 5, 6, 3]"],
        ),
        ("stored.npz", json!({"images": "train_labels"}), &["expected images [N, H, W]", "found [8]"]),
        ("stored.npz", json!({"labels": "test_labels"}), &["found 8 images and 4 labels"]),
        ("empty.npz", test(), &["array `images`: expected images with pixels, found [0, 5, 6]"]),
        ("colour.png", test(), &["colour.png: expected an .npz or a safetensors file, found neither"]),
        ("nothing.npz", test(), &["data.path", "nothing.npz"]),
    ] {
        refused(arrays(file, options), parts);
    }
    refused(load("arrays", &json!({})), &["data.path: expected the path of a .npz or safetensors file"]);
}

/// Every prefix of an archive is refused; a changed byte is refused, or changes no number.
#[test]
fn damaged_arrays_are_errors() {
    let tree = Tree::new();
    for file in ["stored.npz", "deflated.npz", "bytes.safetensors", "fortran.npz"] {
        let whole = std::fs::read(own(file)).unwrap();
        let read = |bytes: &[u8]| {
            tree.write(file, bytes);
            let mut options = json!({"path": tree.path(file)});
            if !["stored.npz", "deflated.npz"].contains(&file) {
                options["test"] = json!(3);
            }
            load("arrays", &options)
        };
        let genuine = images(read(&whole).unwrap());
        for length in 0..whole.len() {
            refused(read(&whole[..length]), &[file]);
        }
        for at in 0..whole.len() {
            for flip in [0x01, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= flip;
                // A safetensors file has no sum: a number of it may be another.
                if let Ok(loaded) = read(&damaged)
                    && file.ends_with(".npz")
                {
                    assert_eq!(images(loaded), genuine, "{file}, byte {at}");
                }
            }
        }
    }
}

/// An `.npz` of one stored member with a header of our own.
fn npz(header: &str, data: &[u8]) -> Vec<u8> {
    let mut npy = b"\x93NUMPY\x01\x00".to_vec();
    npy.extend((header.len() as u16).to_le_bytes());
    npy.extend(header.as_bytes());
    npy.extend(data);
    let mut crc = flate2::Crc::new();
    crc.update(&npy);
    let (name, size) = (b"images.npy", (npy.len() as u32).to_le_bytes());
    let about =
        [&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0], &crc.sum().to_le_bytes()[..], &size, &size, &[10, 0, 0, 0]]
            .concat();
    let local = [b"PK\x03\x04", &about[..], name, &npy].concat();
    let entry = [b"PK\x01\x02\x14\x00", &about[..], &[0; 14], name].concat();
    let end = [
        b"PK\x05\x06\x00\x00\x00\x00\x01\x00\x01\x00",
        &(entry.len() as u32).to_le_bytes()[..],
        &(local.len() as u32).to_le_bytes(),
        &[0, 0],
    ];
    [local, entry, end.concat()].concat()
}

#[test]
fn hostile_headers_are_refused_before_memory_is_taken() {
    let tree = Tree::new();
    let header = |descr: &str, shape: &str| {
        format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")
    };
    for (header, part) in [
        (header("'|u1'", "(4000000000, 1000, 1000)"), "the file cannot hold it"),
        (header("'|u1'", "(18446744073709551615, 18446744073709551615)"), "the file cannot hold it"),
        (header("'|u1'", "(99999999999999999999,)"), "expected a shape"),
        (header("'|u1'", "(-1, 2)"), "expected a shape"),
        (header("'|u1'", "(1,1,1,1,1,1,1,1,1)"), "at most 8 axes"),
        (header("'|u1'", "3"), "expected a shape"),
        (header("'|O'", "(3,)"), "not unpickled"),
        (header("[('a', '<f4')]", "(3,)"), "one of records"),
        (header("'<f2'", "(3,)"), "astype"),
        (header("'<é'", "(3,)"), "found '<é'"),
        (header("''", "(3,)"), "found ''"),
        (header("'!u1'", "(3,)"), "byte order"),
        ("{}".into(), "expected 'descr'"),
        (String::new(), "expected 'descr'"),
        (header("'|u1'", "(1, 2, 1)"), "expected 2 bytes after the header, found more"),
        (header("'|u1'", "(1, 2, 2)"), "expected 4 bytes after the header, found 3"),
    ] {
        tree.write("hostile.npz", &npz(&header, &[1, 2, 3]));
        let options = json!({"path": tree.path("hostile.npz"), "test": 1});
        refused(load("arrays", &options), &["hostile.npz: array `images`", part]);
    }
    tree.write("fine.npz", &npz(&header("'|u1'", "(1, 3, 1)"), &[1, 2, 3]));
    refused(load("arrays", &json!({"path": tree.path("fine.npz"), "test": 1})), &["data.labels"]);
}

fn text_options(tree: &Tree, more: Value) -> Value {
    let mut options = json!({"path": tree.path("mine.txt")});
    more.as_object().unwrap().iter().for_each(|(key, value)| options[key] = value.clone());
    options
}

#[test]
fn one_text_is_cut_and_numbered_by_words_characters_or_bytes() {
    let tree = Tree::new();
    let lines: String = (0..20).map(|i| format!("the é line {i}\n")).collect();
    tree.write("mine.txt", lines.as_bytes());
    let of = |more: Value| text(load("text", &text_options(&tree, more)).unwrap());

    let words = of(json!({}));
    assert_eq!((words.train.len(), words.valid.len(), words.test.len()), (16 * 5, 2 * 5, 2 * 5));
    assert_eq!(words.vocab[..3], ["<unk>", "<eos>", "the"]);
    assert_eq!(words.decode(&words.test), "the é line <unk>\nthe é line <unk>\n");
    assert_eq!(words.encode("the é line 3\nnever").unwrap(), [&words.train[15..20], &[0]].concat());

    let chars = of(json!({"by": "char", "valid": 0.25, "test": 0.25}));
    let all: Vec<char> = lines.chars().collect();
    let (n, quarter) = (all.len(), (all.len() as f64 / 4.0).round() as usize);
    assert_eq!((chars.train.len(), chars.valid.len(), chars.test.len()), (n - 2 * quarter, quarter, quarter));
    assert_eq!(chars.decode(&chars.train), all[..n - 2 * quarter].iter().collect::<String>());
    assert_eq!(chars.vocab[0], "<unk>");
    assert_eq!(chars.decode(&chars.encode("line é\nQ").unwrap()), "line é\n<unk>");

    let bytes = of(json!({"by": "byte"}));
    assert_eq!(bytes.vocab.len(), 256);
    let joined: Vec<u32> = [&bytes.train[..], &bytes.valid, &bytes.test].concat();
    assert_eq!(joined, lines.bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(bytes.decode(&bytes.encode("é\n").unwrap()), "é\n");

    // Bytes need be no text.
    tree.write("mine.txt", &[0xff, 0xfe, 0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(of(json!({"by": "byte"})).train[0], 0xff);
    for by in ["word", "char"] {
        refused(
            load("text", &text_options(&tree, json!({"by": by}))),
            &["data.path", "mine.txt: expected UTF-8"],
        );
    }
}

#[test]
fn vocabularies_are_limited_and_part_of_the_content() {
    let tree = Tree::new();
    tree.write("mine.txt", "a a a b b c\n".repeat(20).as_bytes());
    let of = |more: Value| load("text", &text_options(&tree, more));
    let limited = text(of(json!({"max_vocab": 3})).unwrap());
    assert_eq!(limited.vocab[..], ["<unk>", "<eos>", "a"]);
    assert_eq!(limited.train[..7], [2, 2, 2, 0, 0, 0, 1]);
    let limited = text(of(json!({"by": "char", "min_count": 40})).unwrap());
    assert_eq!(limited.vocab[..], ["<unk>", " ", "a"], "48 of a in 16 lines, 32 of b");
    let contents = |more: Value| of(more).unwrap().provenance.content;
    assert!(contents(json!({})) != contents(json!({"by": "char"})));
    let before = contents(json!({"by": "byte"}));
    tree.write("mine.txt", "a a a b b d\n".repeat(20).as_bytes());
    assert!(contents(json!({"by": "byte"})) != before);

    for (more, part) in [
        (json!({"by": "letter"}), "data.by: unknown variant `letter`"),
        (json!({"by": "byte", "max_vocab": 9}), "data.max_vocab: expected none: there are 256 bytes"),
        (json!({"by": "byte", "min_count": 2}), "data.min_count: expected none"),
        (json!({"by": "char", "vocab": "words.txt"}), "data.vocab: expected no file"),
        (json!({"max_vocab": 1}), "data.max_vocab: expected at least 2"),
        (json!({"train": "a.txt"}), "data.train: expected `path` or `train`, found both"),
        (json!({"test": 1.0}), "data.test: expected a fraction between 0 and 1, found 1"),
        (json!({"valid": 0.5, "test": 0.5}), "data.path: "),
    ] {
        refused(of(more), &[part]);
    }
}

#[test]
fn a_folder_of_texts_is_read_by_name() {
    let tree = Tree::new();
    for name in ["b.txt", "a.txt", "c.md"] {
        tree.write(&format!("texts/{name}"), format!("{}\n", &name[..1]).repeat(10).as_bytes());
    }
    let loaded = load("text", &json!({"path": tree.path("texts"), "by": "char"})).unwrap();
    assert_eq!(loaded.provenance.files.len(), 2);
    let text = text(loaded);
    assert!(text.decode(&text.train).starts_with("a\na\n") && text.decode(&text.test).ends_with("b\n"));
    std::fs::create_dir(tree.path("empty")).unwrap();
    refused(load("text", &json!({"path": tree.path("empty")})), &["data.path", "found none in it"]);
}

#[test]
fn own_sets_are_listed_as_such() {
    let mut out = Vec::new();
    inventory::list(&DataRegistry::builtin(), &Search::default(), false, &mut out).unwrap();
    let listed = String::from_utf8(out).unwrap();
    for name in ["arrays", "folder", "text"] {
        let at = listed.lines().position(|line| line.starts_with(&format!("{name} "))).expect(name);
        assert_eq!(listed.lines().nth(at + 1).unwrap().trim(), "your files", "{name}");
    }
}

//! Every optimizer against the records of PyTorch and of the authors' packages.
use candle_core::DType;
use std::path::PathBuf;
use taper_optim::Registry;
use taper_optim::replay::{Options, replay};

fn records() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    let read = |f: PathBuf| (f.file_stem().unwrap().to_str().unwrap().to_owned(), std::fs::read(f).unwrap());
    files.into_iter().map(read).collect()
}

#[test]
fn f64_follows_every_record_to_1e_12() {
    let registry = Registry::builtin();
    let mut failures = Vec::new();
    let mut seen = 0;
    for (file, bytes) in records() {
        match replay(&registry, &bytes, &Options::default()) {
            // Two sets of formulas written apart differ by up to 5e-15 on these records; AdaGD divides by
            // differences of close numbers and loses two digits more.
            Ok(r) if r.max_abs_error <= 1e-12 => seen += 1,
            Ok(r) => failures.push(format!("{file}: {:.1e} in {}", r.max_abs_error, r.tensor)),
            Err(e) => failures.push(format!("{file}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(seen, 99);
}

#[test]
fn f32_follows_every_record_to_2e_5() {
    let registry = Registry::builtin();
    let options = Options { dtype: Some(DType::F32), ..Default::default() };
    for (file, bytes) in records() {
        // AdaGD's first steps of 1e-10 vanish in f32.
        if file.starts_with("adagd") {
            continue;
        }
        let r = replay(&registry, &bytes, &options).unwrap();
        // A replay of the same formulas in f32 with another package differs by up to 4.2e-6.
        assert!(r.max_abs_error <= 2e-5, "{file}: {:.1e} in {}", r.max_abs_error, r.tensor);
    }
}

//! Every optimizer against the records of PyTorch and of the authors' packages.
use candle_core::DType;
use std::path::PathBuf;
use taper_optim::Registry;
use taper_optim::replay::{Options, Replayed, replay};

fn records(folder: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder);
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
    for (file, bytes) in records("tests/golden") {
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
    for (file, bytes) in records("tests/golden") {
        // AdaGD's first steps of 1e-10 vanish in f32.
        if file.starts_with("adagd") {
            continue;
        }
        let r = replay(&registry, &bytes, &options).unwrap();
        // A replay of the same formulas in f32 with another package differs by up to 4.2e-6.
        assert!(r.max_abs_error <= 2e-5, "{file}: {:.1e} in {}", r.max_abs_error, r.tensor);
    }
}

/// Replays all records of several tensors, and names those beyond the limits that `limit` gives by file.
fn modern(dtype: DType, limit: impl Fn(&str, &Replayed) -> Result<(), String>) {
    let registry = Registry::builtin();
    let options = Options { dtype: Some(dtype), ..Default::default() };
    let all = records("tests/golden/modern");
    assert_eq!(all.len(), 71);
    let failures: Vec<String> = all
        .iter()
        .filter_map(|(file, bytes)| match replay(&registry, bytes, &options) {
            Ok(replayed) => limit(file, &replayed).err(),
            Err(e) => Some(format!("{file}: {e}")),
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn within(file: &str, replayed: &Replayed, limit: f64) -> Result<(), String> {
    match replayed.max_abs_error <= limit {
        true => Ok(()),
        false => Err(format!("{file}: {:.1e} in {}", replayed.max_abs_error, replayed.tensor)),
    }
}

#[test]
fn f64_follows_every_modern_record() {
    modern(DType::F64, |file, replayed| {
        // Formulas written twice differ by up to 3.4e-14; L-BFGS and SOAP amplify rounding most.
        let limit = if ["lbfgs", "soap"].iter().any(|name| file.starts_with(name)) { 1e-11 } else { 1e-12 };
        within(file, replayed, limit)?;
        // The package's d and the formulas' agree to 5e-15 of it.
        let rates = replayed.compared.iter().find(|c| c.tensor == "rates");
        assert_eq!(rates.is_some(), file.starts_with("prodigy"), "{file}");
        match rates {
            Some(rates) if rates.rel > 1e-13 => Err(format!("{file}: rates {:.1e}", rates.rel)),
            _ => Ok(()),
        }
    });
}

#[test]
fn f32_follows_every_modern_record() {
    modern(DType::F32, |file, replayed| match file {
        // With d0 = 1e-6 the first steps are at the rounding of x, which d is estimated from.
        "prodigy_default" => Ok(()),
        _ if file.starts_with("prodigy") => within(file, replayed, 2e-4),
        _ if file.starts_with("lbfgs") => within(file, replayed, 1e-4),
        _ => within(file, replayed, 2e-5),
    });
}

#[test]
fn records_show_all_that_an_optimizer_has_beside_its_parameters() {
    let registry = Registry::builtin();
    let all = records("tests/golden/modern");
    let kinds = |file: &str| -> Vec<String> {
        let (_, bytes) = all.iter().find(|(name, _)| name == file).unwrap();
        let replayed = replay(&registry, bytes, &Options::default()).unwrap();
        replayed.compared.into_iter().map(|c| c.tensor).collect()
    };
    assert_eq!(kinds("muon_default"), ["expected.emb", "expected.w", "expected.wide"].map(str::to_owned));
    assert!(kinds("sf_sgd_wd").contains(&"eval.conv.weight".to_owned()));
    assert!(kinds("lookahead_adam").contains(&"eval.b".to_owned()));
    assert!(kinds("sam_wd").contains(&"perturbed.emb".to_owned()));
    assert!(kinds("prodigy_wd").contains(&"rates".to_owned()));
}

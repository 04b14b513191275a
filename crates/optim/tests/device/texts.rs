//! What can be seen in the texts themselves.
use crate::cases;
use candle_core::DType;
use taper_optim::device::digest;

/// The fields of `typedef struct { REAL a, b; } Scalars;`.
fn fields(update: &str) -> Vec<&str> {
    let (_, rest) = update.split_once("typedef struct {").unwrap();
    let (body, _) = rest.split_once("} Scalars;").unwrap();
    body.split(['\n', ',', ';'])
        .map(|word| word.trim().trim_start_matches("REAL "))
        .filter(|w| !w.is_empty())
        .collect()
}

#[test]
fn scalars_have_the_same_names_in_the_same_order_on_every_device() {
    for case in cases::all() {
        assert_eq!(fields(case.source(DType::F32).update), case.scalar_names(), "{}", case.name());
    }
}

#[test]
fn programs_that_differ_have_digests_that_differ() {
    let cases = cases::all();
    let texts = cases.iter().flat_map(|case| [DType::F32, DType::F16].map(|dtype| case.source(dtype).cuda()));
    let texts: std::collections::BTreeSet<String> = texts.collect();
    let digests: std::collections::BTreeSet<String> = texts.iter().map(|text| digest(text)).collect();
    assert_eq!(digests.len(), texts.len());
}

//! What can be seen in the texts themselves.
use crate::cases;
use candle_core::DType;
use taper_optim::device::digest;

/// The names are said once, in Rust: no header declares them again, where their order could differ.
#[test]
fn scalars_are_declared_by_the_rule_alone() {
    for case in cases::all() {
        let source = case.source(DType::F32);
        assert!(!source.update.contains("struct"), "{}", case.name());
        let declared = format!("REAL {};\n}} Scalars;", source.scalars.join(", "));
        assert!(source.cuda().contains(&declared) && source.metal().contains(&declared), "{}", case.name());
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

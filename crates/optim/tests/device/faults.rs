//! Faults sown into the kernels' texts are caught: the comparison above can fail.
use crate::cases::{self, Host};
use crate::host::{Build, Dialect, Ended};
use candle_core::DType;
use taper_optim::device::Source;

/// Its name, and what is written instead of what.
const FAULTS: &[(&str, &str, &str)] = &[
    ("off-by-one at the end", "i < n;", "i <= n;"),
    ("off-by-one at the start", "Count i = FIRST;", "Count i = FIRST + 1;"),
    ("wrong stride", "i += STRIDE) {\n    REAL", "i += STRIDE + 1) {\n    REAL"),
    (
        "swapped arguments",
        "update(scalars, WIDEN(x[i]), clipped(head, WIDEN(g[i])), state)",
        "update(scalars, WIDEN(g[i]), clipped(head, WIDEN(x[i])), state)",
    ),
    ("swapped buffers", "kept[b * n + i] = state[b]", "kept[(BUFFERS - 1 - b) * n + i] = state[b]"),
    ("buffers laid out for another length", "kept[b * n + i]", "kept[b * (n + 1) + i]"),
    ("forgotten clip", "clipped(head, WIDEN(g[i]))", "WIDEN(g[i])"),
    ("forgotten start", "starts ? row->start[b] : kept[b * n + i]", "kept[b * n + i]"),
    (
        "scalars of another row",
        "const Scalars scalars = row->scalars;",
        "const Scalars scalars = rows[0].scalars;",
    ),
    (
        "a fused multiply-add",
        "s.beta1 * state[0] + s.one_minus_beta1 * g",
        "std::fma(s.beta1, state[0], s.one_minus_beta1 * g)",
    ),
    ("another order of rounding", "s.one_minus_beta2 * (g * g)", "s.one_minus_beta2 * g * g"),
];

#[test]
fn every_sown_fault_is_caught() {
    let cases = cases::all();
    let sown: Vec<_> = FAULTS
        .iter()
        .map(|fault| {
            // A start that is not zero, for the fault that forgets it.
            let rule = if fault.0 == "forgotten start" { "yogi" } else { "adam" };
            let case = cases.iter().find(|case| case.name().starts_with(rule)).unwrap();
            (case, Source { rule: fault.0, ..case.source(DType::F32) }, fault)
        })
        .collect();
    let sources: Vec<Source> = sown.iter().map(|(_, source, _)| *source).collect();
    let sow = |source: &Source, text: String| {
        let (name, from, to) = FAULTS.iter().find(|fault| fault.0 == source.rule).unwrap();
        assert!(text.contains(from), "{name}: the text no longer has `{from}`");
        text.replace(from, to)
    };
    let Some(build) = Build::new("faults", Dialect::Cuda, &sources, sow) else { return };
    for (case, source, (name, ..)) in &sown {
        let (job, expected) = case.run(DType::F32, &[1000, 33], 3, Host::Knows, &|_| [0.0; 2]);
        match build.run(source, &job) {
            Ended::With(found) => assert_ne!(found[..expected.len()], expected, "{name} was not caught"),
            Ended::Aborted(message) => assert!(message.contains("AddressSanitizer"), "{name}: {message}"),
        }
    }
}

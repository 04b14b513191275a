//! The kernels' texts, run on the host, make the bits that the CPU's kernels make.
use crate::cases::{self, Host};
use crate::host::{Build, Dialect, Ended};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeSet;
use taper_optim::device::Source;
use taper_optim::{global_norm, pairs};

/// Around the sizes of a warp and a chunk, and one that is no multiple of anything.
const SIZES: &[usize] = &[0, 1, 31, 32, 33, 1000, 100_003];
/// Steps after which every case has been through every branch.
const MANY: usize = 8;

fn check(dialect: Dialect, dtypes: &[DType]) {
    let cases = cases::all();
    let sources: Vec<Source> =
        cases.iter().flat_map(|case| dtypes.iter().map(|dtype| case.source(*dtype))).collect();
    let Some(build) = Build::new(&format!("{dialect:?}"), dialect, &sources, |_, text| text) else { return };
    let mut seen = BTreeSet::new();
    for (case, dtype) in cases.iter().flat_map(|case| dtypes.iter().map(move |dtype| (case, *dtype))) {
        let source = case.source(dtype);
        let (follows, reduces) = (source.follows_loss, source.reduces);
        // Metal has no f64 for sums and for the root of a loss: there they are compared in other tests.
        if dialect == Dialect::Metal && reduces {
            continue;
        }
        let hosts = match (dialect, follows) {
            // A rule that reduces reads what is deferred.
            _ if reduces => &[Host::Knows][..],
            (Dialect::Cuda, true) => &[Host::Knows, Host::Defers32, Host::Defers64],
            (Dialect::Cuda, false) => &[Host::Knows, Host::Defers64],
            (Dialect::Metal, _) => &[Host::Knows],
        };
        // All sizes once a program, which does not know its numbers; many steps for every case.
        let large = seen.insert(source.prefix()).then_some((Host::Knows, SIZES, 3));
        for (host, sizes, steps) in
            large.into_iter().chain(hosts.iter().map(|host| (*host, &SIZES[4..6], MANY)))
        {
            let (job, expected) = case.run(dtype, sizes, steps, host, &|job| build.sums(&source, job));
            let what = format!("{} {dtype:?} {dialect:?} {host:?} {steps} steps", case.name());
            match build.run(&source, &job) {
                Ended::With(mut found) => {
                    let faults = found.split_off(found.len() - 8);
                    assert_eq!(faults, [0; 8], "{what}");
                    assert_eq!(found.len(), expected.len(), "{what}");
                    let first = found.iter().zip(&expected).position(|(a, b)| a != b);
                    assert_eq!(first, None, "{what}: the first byte that differs");
                }
                Ended::Aborted(message) => panic!("{what}: {message}"),
            }
        }
    }
}

#[test]
fn the_cuda_texts_make_the_bits_of_the_cpu() {
    check(Dialect::Cuda, &[DType::F32, DType::F64, DType::F16, DType::BF16]);
}

#[test]
fn the_metal_texts_make_the_bits_of_the_cpu() {
    check(Dialect::Metal, &[DType::F32, DType::F16, DType::BF16]);
}

/// The element-wise parts of rules for whole tensors.
#[test]
fn the_texts_of_pairs_make_the_bits_of_the_cpu() {
    for (dialect, dtypes) in [(Dialect::Cuda, &[DType::F32, DType::F64][..]), (Dialect::Metal, &[DType::F32])]
    {
        let pairs = pairs::examples();
        let sources: Vec<Source> =
            pairs.iter().flat_map(|pair| dtypes.iter().map(|dtype| (pair.source)(*dtype))).collect();
        let Some(build) = Build::new(&format!("pairs-{dialect:?}"), dialect, &sources, |_, text| text) else {
            return;
        };
        for (pair, dtype) in pairs.iter().flat_map(|pair| dtypes.iter().map(move |dtype| (pair, *dtype))) {
            let source = (pair.source)(dtype);
            // Any rule without buffers makes the job: its parameters and gradients are what counts.
            let (mut job, _) = cases::all()[0].run(dtype, SIZES, 1, Host::Knows, &|_| [0.0; 2]);
            let step = &mut job.steps[0];
            (step.scale, step.limit, step.scalars) =
                (1.0, f64::INFINITY, vec![pair.scalars.clone(); SIZES.len()]);
            let mut expected = Vec::new();
            for ((row, grad), n) in job.rows.iter().zip(&step.grads).zip(SIZES) {
                let of = |bytes: &[u8]| Tensor::from_raw_buffer(bytes, dtype, &[*n], &Device::Cpu).unwrap();
                let made = (pair.of)(&of(&row.x), &of(grad)).unwrap();
                match dtype {
                    DType::F64 => {
                        made.to_vec1::<f64>().unwrap().iter().for_each(|v| expected.extend(v.to_le_bytes()))
                    }
                    _ => made.to_vec1::<f32>().unwrap().iter().for_each(|v| expected.extend(v.to_le_bytes())),
                }
            }
            expected.extend([0; 8]);
            let Ended::With(found) = build.run(&source, &job) else { panic!("{}: aborted", source.rule) };
            assert!(found == expected, "{} {dtype:?} {dialect:?}", source.rule);
        }
    }
}

/// Of a deferred loss or norm that no step can be taken with, nothing reaches parameters or state, then or later.
#[test]
fn a_loss_or_norm_that_is_refused_on_the_device_changes_nothing() {
    let cases = cases::all();
    // One that follows the loss, and one that does not.
    let cases =
        ["decgd", "adam"].map(|name| cases.iter().find(|case| case.name().starts_with(name)).unwrap());
    for (case, dialect) in cases.iter().flat_map(|case| [Dialect::Cuda, Dialect::Metal].map(|d| (case, d))) {
        let source = case.source(DType::F32);
        let Some(build) =
            Build::new(&format!("refuse-{}-{dialect:?}", source.rule), dialect, &[source], |_, text| text)
        else {
            return;
        };
        let nothing = |_: &_| [0.0; 2];
        for (loss, norm, faults) in [
            (f64::NAN, 3.0, [2, 0]),
            (f64::INFINITY, 3.0, [2, 0]),
            (-0.5, 3.0, [2, 0]), // c is 0.5: f + c = 0
            (2.0, f64::NAN, [0, 2]),
            (2.0, f64::INFINITY, [0, 2]),
        ] {
            if source.rule != "decgd" && loss < 0.0 {
                continue;
            }
            let (mut job, _) = case.run(DType::F32, &[33, 5], 3, Host::Defers32, &nothing);
            let mut before = job.steps.clone();
            before.truncate(1);
            (job.steps[1].loss, job.steps[1].norm) = (loss, norm);
            let Ended::With(mut found) = build.run(&source, &job) else { panic!("aborted") };
            job.steps = before;
            let Ended::With(mut expected) = build.run(&source, &job) else { panic!("aborted") };
            let flags = found.split_off(found.len() - 8);
            expected.truncate(found.len());
            assert_eq!(found, expected, "{dialect:?} {loss} {norm}");
            assert_eq!(flags, faults.map(u32::to_le_bytes).concat(), "{dialect:?} {loss} {norm}");
        }
    }
}

#[test]
fn the_norm_of_all_gradients_has_the_bits_of_the_cpu() {
    let norm = Source::norm;
    let dtypes = [DType::F32, DType::F64, DType::F16, DType::BF16];
    let Some(build) = Build::new("norm", Dialect::Cuda, &dtypes.map(norm), |_, text| text) else { return };
    let Some(metal) = Build::new("norm-metal", Dialect::Metal, &[norm(DType::F32)], |_, text| text) else {
        return;
    };
    let cases = cases::all();
    for dtype in dtypes {
        // Any rule without buffers makes the job: its gradients are what counts.
        let (mut job, _) = cases[0].run(dtype, SIZES, 1, Host::Knows, &|_| [0.0; 2]);
        (job.steps[0].scale, job.steps[0].limit, job.steps[0].scalars) =
            (1.0, f64::INFINITY, vec![vec![0.0]; SIZES.len()]);
        let [found, _] = build.sums(&norm(dtype), &job);
        let (mut store, mut vars) = (GradStore::default(), Vec::new());
        for (bytes, n) in job.steps[0].grads.iter().zip(SIZES) {
            let grad = Tensor::from_raw_buffer(bytes, dtype, &[*n], &Device::Cpu).unwrap();
            let var = Var::from_tensor(&grad).unwrap();
            store.insert(&var, grad);
            vars.push(var);
        }
        let expected = global_norm(&store, &vars).unwrap();
        assert_eq!(found.to_bits(), expected.to_bits(), "{dtype:?}: {found} {expected}");
        if dtype == DType::F32 {
            let [found, _] = metal.sums(&norm(dtype), &job);
            // 128 additions in a lane, then 16, 16 and a few: each rounds by 2⁻²⁴ at most.
            assert!((found / expected - 1.0).abs() < 170.0 * 2f64.powi(-24), "{found} {expected}");
        }
    }
}

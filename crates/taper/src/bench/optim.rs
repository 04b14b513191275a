//! One step of every optimizer over 24 million f32 parameters: in one tensor, and in the 110 tensors of a ResNet-34.
//!
//! A step is bound by memory, so that it is measured in bytes it must move, beside a plain copy on all threads. Those of Muon and
//! SOAP are bound by their products and factorisations: they are also measured on matrices, in operations and steps.
use super::{BenchError, Case, Make, Prepared, Work, device};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use taper_optim::{Evaluated, Registry, StepContext};

/// The shapes of parameters.
type Shapes = Vec<Vec<usize>>;

pub const ONE: usize = 24_000_000;
/// A convolution of 512 filters over 512 channels, as a matrix.
const MATRIX: [usize; 2] = [512, 4608];
/// The side of a matrix with SOAP's bases, and what is measured of them.
const BASIS: usize = 512;
const BASES: [&str; 3] = ["eigen", "qr", "step"];

/// The tensors of a CIFAR ResNet-34.
fn resnet34() -> Shapes {
    let norm = |width: usize| [vec![width], vec![width]];
    let mut shapes = vec![vec![64, 3, 3, 3]];
    shapes.extend(norm(64));
    let mut from = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for _ in 0..blocks {
            shapes.push(vec![width, from, 3, 3]);
            shapes.extend(norm(width));
            shapes.push(vec![width, width, 3, 3]);
            shapes.extend(norm(width));
            if from != width {
                shapes.push(vec![width, from, 1, 1]);
                shapes.extend(norm(width));
            }
            from = width;
        }
    }
    shapes.extend([vec![10, 512], vec![10]]);
    shapes
}

fn elements(shapes: &Shapes) -> usize {
    shapes.iter().map(|shape| shape.iter().product::<usize>()).sum()
}

pub fn cases() -> Vec<Case> {
    let registry = Registry::builtin();
    let defaults = Map::new();
    let general_power = json!({"p": 0.3}).as_object().cloned().unwrap_or_default();
    let mut named: Vec<(String, &str, Map<String, Value>)> = Vec::new();
    for entry in registry.list("*").into_iter().flatten() {
        named.push((entry.info.name.to_owned(), entry.info.name, defaults.clone()));
    }
    named.push(("padam-p0.3".to_owned(), "padam", general_power));
    let layouts = [("one", vec![vec![ONE]]), ("resnet34", resnet34())];
    let case =
        |label: &str, optimizer: &str, config: &Map<String, Value>, (layout, shapes): &(&str, Shapes)| {
            let elements = elements(shapes);
            // DecGD moves as many bytes as Adam and is held to PyTorch's fused AdamW.
            let peer = match label {
                "adam" => Some("adam"),
                "adamw" | "decgd" | "decgdw" => Some("adamw"),
                "nadam" | "adamax" | "adafactor" | "lbfgs" => Some(label),
                _ => None,
            };
            let (optimizer, config, shapes) = (optimizer.to_owned(), config.clone(), shapes.clone());
            Case {
                name: format!("optim/{label}/{layout}"),
                unit: "GB/s",
                amount: gigabytes(elements, bytes(&registry, &optimizer, &config)),
                repeat: 1,
                peer: peer.map(|peer| json!({"work": "optim", "optimizer": peer, "shapes": shapes})),
                prepare: Box::new(move || {
                    let ours = step(&optimizer, &config, &shapes)?;
                    let copy: Make = Box::new(move || Ok(copy(elements)));
                    let mut beside = vec![("copy", gigabytes(elements, 8), copy)];
                    // A copy in the CPU's memory says nothing about a GPU's.
                    beside.retain(|_| device().is_cpu());
                    if optimizer == "decgd" {
                        // Adam moves as many bytes: its rates compare as times do.
                        let adam: Make = Box::new(move || step("adam", &Map::new(), &shapes));
                        beside.push(("adam", gigabytes(elements, 28), adam));
                    }
                    Ok(Prepared { ours, beside })
                }),
            }
        };
    let pairs = layouts.iter().flat_map(|layout| named.iter().map(move |named| (layout, named)));
    let mut all: Vec<Case> =
        pairs.map(|(layout, (label, optimizer, config))| case(label, optimizer, config, layout)).collect();
    all.extend([newton_schulz("", "muon"), newton_schulz("-bf16", "muon-bf16")]);
    all.extend(BASES.map(soap));
    all
}

/// A step of Muon on one matrix: five times X Xᵀ, its square, and their product with X. PyTorch does the same in f32 (`muon`), or
/// is its own Muon, which iterates in bf16 (`muon-bf16`).
fn newton_schulz(label: &str, peer: &str) -> Case {
    let [n, m] = MATRIX.map(|n| n as f64);
    Case {
        name: format!("optim/muon{label}/{}x{}", MATRIX[0], MATRIX[1]),
        unit: "GFLOP/s",
        amount: 5.0 * (4.0 * n * n * m + 2.0 * n * n * n) * 1e-9,
        repeat: 1,
        peer: Some(json!({"work": "optim", "optimizer": peer, "shapes": [MATRIX]})),
        prepare: Box::new(|| Ok(Prepared::alone(step("muon", &Map::new(), &vec![MATRIX.to_vec()])?))),
    }
}

/// What SOAP's bases cost on a square matrix: `eigen`, a first step, which is their eigenvectors; `qr`, a step that makes them
/// orthonormal again; `step`, one that leaves them alone. PyTorch takes the same steps with LAPACK in f64.
fn soap(what: &'static str) -> Case {
    let shapes = vec![vec![BASIS, BASIS]];
    Case {
        name: format!("optim/soap-{what}/{BASIS}x{BASIS}"),
        unit: "steps/s",
        amount: 1.0,
        repeat: 1,
        peer: Some(json!({"work": "optim", "optimizer": "soap", "what": what, "shapes": shapes})),
        prepare: Box::new(move || {
            let every = if what == "qr" { 1 } else { 1_000_000 };
            let config = json!({"precondition_frequency": every}).as_object().cloned().unwrap_or_default();
            Ok(Prepared::alone(match what {
                "eigen" => Box::new(move || step("soap", &config, &shapes).map(drop)),
                _ => step("soap", &config, &shapes)?,
            }))
        }),
    }
}

fn gigabytes(elements: usize, bytes: usize) -> f64 {
    (elements * bytes) as f64 * 1e-9
}

/// Bytes a step must move for an element: the parameter and its buffers are read and written, the gradient is read.
fn bytes(registry: &Registry, optimizer: &str, config: &Map<String, Value>) -> usize {
    let buffers =
        registry.get(optimizer).and_then(|entry| entry.buffers(config)).map_or(0, |buffers| buffers.len());
    match optimizer {
        // Its norms need all four numbers before any can change; then two are read again and three are written.
        "adagd" => 4 * (4 + 2 + 3),
        _ => 4 * (3 + 2 * buffers),
    }
}

/// A plain copy on all threads, in the chunks that an optimizer's step is cut into.
fn copy(elements: usize) -> Work {
    let (from, mut to) = (vec![1f32; elements], vec![0f32; elements]);
    Box::new(move || {
        to.par_chunks_mut(32 * 1024)
            .zip(from.par_chunks(32 * 1024))
            .for_each(|(to, from)| to.copy_from_slice(from));
        std::hint::black_box(&mut to);
        Ok(())
    })
}

fn step(optimizer: &str, config: &Map<String, Value>, shapes: &Shapes) -> Result<Work, BenchError> {
    let mut params = Vec::with_capacity(shapes.len());
    let mut gradients = Vec::with_capacity(shapes.len());
    for (i, shape) in shapes.iter().enumerate() {
        let size: usize = shape.iter().product();
        // Numbers of ordinary size and either sign.
        let wave =
            |scale: f32| (0..size).map(move |k| scale * ((k % 251) as f32 - 125.5)).collect::<Vec<f32>>();
        let var = Var::from_tensor(&Tensor::from_vec(wave(0.01), shape.clone(), device())?)?;
        gradients.push((var.clone(), Tensor::from_vec(wave(0.001), shape.clone(), device())?));
        params.push((i.to_string(), var));
    }
    let history = optimizer == "lbfgs";
    let mut optimizer = Registry::builtin().build(optimizer, params, config)?;
    let store = |gradients: &[(Var, Tensor)]| {
        let mut grads = GradStore::default();
        gradients.iter().for_each(|(var, gradient)| drop(grads.insert(var, gradient.clone())));
        grads
    };
    // A gradient that never changes gives L-BFGS no history. With one that alternates with its half, every other step adds a pair;
    // a rate of one half then keeps steps as long as they are.
    let mut grads = vec![store(&gradients)];
    let (lr, warm) = if history { (0.5, 22) } else { (1e-4, 1) };
    if history {
        let halves = gradients.iter().map(|(var, gradient)| Ok((var.clone(), (gradient * 0.5)?)));
        grads.push(store(&halves.collect::<Result<Vec<_>, BenchError>>()?));
    }
    // As the training loop, which knows the norm of the gradients before.
    let context = StepContext::new().loss(1.0).lr(lr).finite();
    let mut turn = 0;
    let mut work = move || {
        turn += 1;
        // Of two gradients the second costs nothing here: a network computes it.
        let mut again = || Ok(Evaluated { grads: store(&gradients), loss: None });
        Ok(optimizer.step_twice(&grads[turn % grads.len()], &context, &mut again)?)
    };
    // The first steps touch the state's memory for the first time.
    (0..warm).try_for_each(|_| work())?;
    Ok(Box::new(work))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resnet34_has_110_tensors() {
        let shapes = resnet34();
        // PyTorch counts 21 282 122 parameters.
        assert_eq!((shapes.len(), elements(&shapes)), (110, 21_282_122));
    }

    #[test]
    fn every_optimizer_is_measured_in_both_layouts() {
        // And Muon and SOAP on matrices.
        assert_eq!(cases().len(), 2 * (Registry::builtin().list("*").unwrap().count() + 1) + 5);
    }
}

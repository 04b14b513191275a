//! Times every convolution of a network by itself, forward and both gradients:
//!
//!     cargo run --release -p taper-kernels --example convolutions -- resnet18/128 --threads 2
//!
//! `resnet18`, `resnet34`, `densenet121`, `airbench` or `airbench32` (with 32, 128 and 128 channels) and a batch; `--threads`,
//! `--rounds`, `--only` a text that a shape contains, `--exact`, and `--direct` for that algorithm everywhere. The best of the rounds counts; sums are over the
//! network's step, with the gradients of the first convolution of `airbench` that nobody computes.
use std::time::Instant;
use taper_kernels::conv::{self, Algorithm, Geometry};
use taper_kernels::{Arithmetic, Isa, Operands};

type Failure = Box<dyn std::error::Error>;

/// The convolutions of a network for one image of 32 by 32, and how often each occurs.
fn network(name: &str, n: usize) -> Result<Vec<(usize, Geometry)>, Failure> {
    let conv = |size: usize, ci: usize, co: usize, kernel: usize, stride: usize| Geometry {
        n,
        h: size,
        w: size,
        ci,
        co,
        kernel: [kernel; 2],
        stride: [stride; 2],
        pad: [kernel / 2; 2],
        groups: 1,
    };
    if let Some([a, b, c]) = match name {
        "airbench" => Some([64, 256, 256]),
        "airbench32" => Some([32, 128, 128]),
        _ => None,
    } {
        let whiten = Geometry { pad: [0; 2], ..conv(32, 3, 24, 2, 1) };
        let groups = [(31, 24, a), (15, a, a), (15, a, b), (7, b, b), (7, b, c), (3, c, c)];
        let convs = groups.map(|(size, ci, co)| (1, conv(size, ci, co, 3, 1)));
        return Ok([(1, whiten)].into_iter().chain(convs).collect());
    }
    let blocks = match name {
        "resnet18" => [2, 2, 2, 2],
        "resnet34" => [3, 4, 6, 3],
        "densenet121" => [6, 12, 24, 16],
        _ => {
            return Err(format!(
                "expected resnet18, resnet34, densenet121, airbench or airbench32, found `{name}`"
            )
            .into());
        }
    };
    let mut convs = vec![(1, conv(32, 3, 64, 3, 1))];
    let mut ci = 64;
    for (stage, count) in blocks.into_iter().enumerate() {
        let size = 32 >> stage;
        if name == "densenet121" {
            for layer in 0..count {
                convs.push((1, conv(size, ci + 32 * layer, 128, 1, 1)));
            }
            convs.push((count, conv(size, 128, 32, 3, 1)));
            ci += 32 * count;
            if stage < 3 {
                convs.push((1, conv(size, ci, ci / 2, 1, 1)));
                ci /= 2;
            }
        } else {
            let co = 64 << stage;
            if stage > 0 {
                convs.push((1, conv(2 * size, ci, co, 3, 2)));
                convs.push((1, conv(2 * size, ci, co, 1, 2)));
            }
            convs.push((2 * count - usize::from(stage > 0), conv(size, co, co, 3, 1)));
            ci = co;
        }
    }
    Ok(convs)
}

fn best(rounds: usize, mut f: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..rounds).map(once).fold(f64::INFINITY, f64::min)
}

fn main() -> Result<(), Failure> {
    let (mut rounds, mut threads, mut only, mut fast, mut direct) = (5, 2, String::new(), true, false);
    let mut operands = Operands::Full;
    let mut which = String::from("resnet18/128");
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rounds" => rounds = args.next().ok_or("--rounds: expected a number")?.parse()?,
            "--threads" => threads = args.next().ok_or("--threads: expected a number")?.parse()?,
            "--only" => only = args.next().ok_or("--only: expected a text")?,
            "--exact" => fast = false,
            "--direct" => direct = true,
            "--bf16" => (direct, operands) = (true, Operands::Bf16),
            _ => which = arg,
        }
    }
    let (name, batch) = which.split_once('/').ok_or("expected network/batch")?;
    let convs = network(name, batch.parse()?)?;
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let by = Arithmetic { isa: Isa::detect()?, operands };
    let mut sums = [0.0; 4];
    println!("{:30} {:>5} {:>10} {:>22} {:>22} {:>22}", "shape", "times", "", "forward", "dx", "dw");
    for (count, g) in convs.into_iter().filter(|(_, g)| g.to_string().contains(&only)) {
        let numbers = |n: usize| (0..n).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect::<Vec<_>>();
        let (x, w, dy) = (numbers(g.x_len()), numbers(g.w_len()), numbers(g.y_len()));
        let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), w.clone());
        let algorithm = if direct { Algorithm::Direct } else { Algorithm::choose::<f32>(&g, fast) };
        let times = [
            best(rounds, || conv::forward(by, algorithm, &g, (&x, &w, None), &mut y)),
            best(rounds, || conv::grad_input(by, algorithm, &g, (&dy, &w), &mut dx, false)),
            best(rounds, || conv::grad_weight(by, algorithm, &g, (&x, &dy), &mut dw)),
        ];
        let cell = |ms: f64| format!("{ms:7.2} ms {:5.0} GF/s", g.flops() as f64 / ms / 1e6);
        let [a, b, c] = times.map(cell);
        println!("{:30} {count:5} {:>10} {a:>22} {b:>22} {c:>22}", g.to_string(), format!("{algorithm:?}"));
        for (sum, time) in sums.iter_mut().zip(times) {
            *sum += count as f64 * time;
        }
        sums[3] += count as f64 * times.iter().sum::<f64>();
    }
    println!(
        "sums over a step: forward {:.1}, dx {:.1}, dw {:.1}, all {:.1} ms",
        sums[0], sums[1], sums[2], sums[3]
    );
    Ok(())
}

//! How fast the LSTM's recurrence is with each instruction set: `cargo run --release -p taper-kernels --example recurrence -- 2`,
//! with the number of threads. The shapes are those of the language models: 70 steps of 20 sequences, weights dropped.
use std::time::{Duration, Instant};
use taper_kernels::Isa;
use taper_kernels::lstm::{Dims, Kept, Layer, Wanted, backward, forward};

fn numbers(n: usize, salt: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|i| (((i * 7919 + salt * 104_729) % 2003) as f32 / 1001.5 - 1.0) * scale).collect()
}

/// The best times of a forward pass, with the product that comes before the steps, and of the steps backwards.
fn times(isa: Isa, dims: Dims) -> [Duration; 2] {
    let Dims { steps, batch, input, hidden } = dims;
    let (rows, spread) = (steps * batch, 1.0 / (hidden as f32).sqrt());
    let (x, dy) = (numbers(rows * input, 1, 1.0), numbers(rows * hidden, 2, 1e-3));
    let (w_ih, w_hh) = (numbers(4 * hidden * input, 3, spread), numbers(4 * hidden * hidden, 4, spread));
    let bias = numbers(4 * hidden, 5, spread);
    let (h0, c0) = (numbers(batch * hidden, 6, 0.5), numbers(batch * hidden, 7, 0.5));
    let keep: Vec<u8> = (0..w_hh.len()).map(|i| u8::from((i * 31 + 7) % 5 < 3)).collect();
    let kept = Some(Kept { keep: &keep, scale: 2.0 });
    let layer = Layer { dims, x: &x, w_ih: &w_ih, w_hh: &w_hh, kept, bias: &bias, h0: &h0, c0: &c0 };
    let mut y = vec![0.0; rows * hidden];
    let mut best = [Duration::MAX; 2];
    for _ in 0..5 {
        let start = Instant::now();
        let saved = forward(isa, &layer, &mut y);
        let between = Instant::now();
        backward(isa, &layer, &y, saved, &dy, Wanted { x: false, w_ih: false, w_hh: false, bias: false });
        best = [best[0].min(between - start), best[1].min(between.elapsed())];
    }
    best
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads: usize = match std::env::args().nth(1) {
        Some(threads) => threads.parse()?,
        None => 0,
    };
    rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global()?;
    for isa in Isa::available() {
        for (input, hidden) in [(400, 1150), (1150, 400), (400, 400)] {
            let dims = Dims { steps: 70, batch: 20, input, hidden };
            let [forward, backward] = times(isa, dims).map(|time| time.as_secs_f64() * 1e3);
            let gflop = 8e-9 * (dims.steps * dims.batch * hidden * hidden) as f64;
            let rate = gflop / backward * 1e3;
            println!(
                "{:8} {input:4}-{hidden:4}: forward {forward:6.1} ms, steps backwards {backward:6.1} ms, {rate:4.0} GFLOP/s",
                isa.name()
            );
        }
    }
    Ok(())
}

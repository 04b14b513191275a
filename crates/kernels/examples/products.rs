//! Matrix products beside PyTorch's, in turns in one call:
//! `TAPER_PEER_PYTHON=python3 cargo run --release -p taper-kernels --example products -- 2 128x100x784:nt 1024x1024x1024`.
//! Arguments: the number of threads, then shapes m×n×k with which of A and B lie transposed (`nt`: B, as in a linear layer,
//! unless said); without shapes those that the networks ask for. `bf16` before the shapes multiplies operands rounded to it, from f32 and
//! to f32, as PyTorch under autocast does. PyTorch takes part where `TAPER_PEER_PYTHON` names a Python.
//! First comes what the cores can do at most: multiply-adds of registers alone, without a load or a store.
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use taper_kernels::gemm::{Mat, product};
use taper_kernels::{Arithmetic, Isa, Operands, par, vectorize};

/// The benchmark's cases, then gradients of the MLP, of LSTM gates and of the decoder, and Muon's.
const SHAPES: &[&str] = &[
    "256x256x256:nt",
    "1024x1024x1024:nt",
    "2048x2048x2048:nt",
    "128x100x784:nt",
    "1400x4600x400:nt",
    "1400x10000x400:nt",
    "128x10x100:nt",
    "100x784x128:tn",
    "128x100x10:nn",
    "1400x400x4600:nn",
    "4600x400x1400:tn",
    "10000x400x1400:tn",
    "1400x400x10000:nn",
    "20x4600x400:nt",
    "512x4608x512:nn",
    "512x512x4608:nt",
];
const ROUNDS: usize = 15;
/// For the other side's idle threads to stop spinning: PyTorch's do so for nine milliseconds after its last op.
const PAUSE: Duration = Duration::from_millis(20);
/// Multiply-adds of a turn.
const WORK: f64 = 4e8;

const PEER: &str = r"
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
torch.set_autocast_enabled('cpu', sys.argv[2] == 'bf16')
for line in sys.stdin:
    m, n, k, ta, tb, repeat = map(int, line.split())
    a = torch.randn(k, m).t() if ta else torch.randn(m, k)
    b = torch.randn(n, k).t() if tb else torch.randn(k, n)
    with torch.inference_mode():
        torch.mm(a, b)
        for turn in range(15):
            sys.stdin.readline()
            start = time.perf_counter()
            for _ in range(repeat):
                torch.mm(a, b)
            print((time.perf_counter() - start) / repeat, flush=True)
";

struct Case {
    sizes: [usize; 3],
    transposed: [bool; 2],
}

fn parse(text: &str) -> Option<Case> {
    let (sizes, how) = text.split_once(':').unwrap_or((text, "nt"));
    let sizes: Vec<usize> = sizes.split('x').map(str::parse).collect::<Result<_, _>>().ok()?;
    let how: [u8; 2] = how.as_bytes().try_into().ok()?;
    Some(Case { sizes: sizes.try_into().ok()?, transposed: how.map(|h| h == b't') })
}

struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn start(threads: &str, operands: Operands) -> Option<Self> {
        let python = std::env::var_os("TAPER_PEER_PYTHON")?;
        let mut command = Command::new(python);
        let precision = if operands == Operands::Bf16 { "bf16" } else { "f32" };
        command.args(["-c", PEER, threads, precision]).stdin(Stdio::piped()).stdout(Stdio::piped());
        if Isa::detect().ok()?.name() == "avx2" {
            command.envs([("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")]);
            command.env("MKL_ENABLE_INSTRUCTIONS", "AVX2");
        }
        let mut child = command.spawn().ok()?;
        let (to, from) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
        Some(Self { child, to, from })
    }

    /// Sends a line.
    fn say(&mut self, line: &str) -> std::io::Result<()> {
        writeln!(self.to, "{line}")
    }

    /// The seconds of a call of its next turn.
    fn turn(&mut self) -> Option<f64> {
        self.say("").ok()?;
        let mut line = String::new();
        self.from.read_line(&mut line).ok()?;
        line.trim().parse().ok()
    }
}

fn measure(by: Arithmetic, case: &Case, peer: &mut Option<Peer>) -> Option<(f64, Vec<f64>, Vec<f64>)> {
    let [m, n, k] = case.sizes;
    let numbers = |count: usize| (0..count).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0).collect();
    let (a, b): (Vec<f32>, Vec<f32>) = (numbers(m * k), numbers(k * n));
    let [ta, tb] = case.transposed;
    let a = if ta { Mat::new(&a, k, m).t() } else { Mat::new(&a, m, k) };
    let b = if tb { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
    let macs = (m * n * k) as f64;
    let repeat = (WORK / macs).clamp(1.0, 2000.0) as usize;
    if let Some(peer) = peer {
        peer.say(&format!("{m} {n} {k} {} {} {repeat}", i32::from(ta), i32::from(tb))).ok()?;
    }
    std::hint::black_box(product(by, a, b));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        std::thread::sleep(PAUSE);
        let start = Instant::now();
        for _ in 0..repeat {
            std::hint::black_box(product(by, a, b));
        }
        ours.push(start.elapsed().as_secs_f64() / repeat as f64);
        std::thread::sleep(PAUSE);
        theirs.extend(peer.as_mut().and_then(Peer::turn));
    }
    Some((2e-9 * macs, ours, theirs))
}

/// The most GFLOP/s of so many threads over some short rounds: multiply-adds that wait for nothing.
fn peak(isa: Isa, threads: usize) -> f64 {
    if isa.lanes() >= 16 { peak_of::<10>(isa, threads) } else { peak_of::<5>(isa, threads) }
}

/// [`peak`] with so many vectors of 16 numbers: enough of them that none waits for its own last sum, and few enough for the registers.
fn peak_of<const VECTORS: usize>(isa: Isa, threads: usize) -> f64 {
    const TURNS: usize = 2_000_000;
    let run = |thread: usize| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                let mut sums = [[thread as f32; 16]; VECTORS];
                let (factor, term) = std::hint::black_box((0.999f32, 0.001f32));
                for _ in 0..TURNS {
                    for sum in &mut sums {
                        for sum in sum.iter_mut() {
                            *sum = sum.mul_add(factor, term);
                        }
                    }
                }
                std::hint::black_box(sums);
            },
        );
    };
    let once = || {
        let start = Instant::now();
        par(threads, run);
        2e-9 * (threads * VECTORS * 16 * TURNS) as f64 / start.elapsed().as_secs_f64()
    };
    (0..3 * ROUNDS).map(|_| once()).fold(0.0, f64::max)
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().unwrap_or_else(|| "1".into());
    let count = threads.parse().map_err(|_| format!("threads: expected a number, found `{threads}`"))?;
    let mut shapes: Vec<String> = arguments.collect();
    let operands = match shapes.first().is_some_and(|shape| shape == "bf16") {
        true => (shapes.remove(0), Operands::Bf16).1,
        false => Operands::Full,
    };
    if shapes.is_empty() {
        shapes = SHAPES.iter().map(ToString::to_string).collect();
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(count).use_current_thread().build();
    let _pool = pool.map_err(|e| e.to_string())?;
    let isa = Isa::detect().map_err(|e| e.to_string())?;
    let mut peer = Peer::start(&threads, operands);
    // In plain Rust a multiply-add is a call of a function.
    if isa.name() != "portable" {
        println!("{:>22} {:>9} {:9.1}", "registers alone", "", peak(isa, count));
    }
    println!("{:>22} {:>9} {:>9} {:>9} {:>6}", isa.name(), "ms", "GFLOP/s", "torch ms", "ratio");
    for shape in shapes {
        let case = parse(&shape).ok_or_else(|| format!("expected m×n×k:nt, found `{shape}`"))?;
        let (gflop, ours, theirs) =
            measure(Arithmetic { isa, operands }, &case, &mut peer).ok_or("PyTorch went away")?;
        let best = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
        let (ms, peer_ms) = (1e3 * best(&ours), 1e3 * best(&theirs));
        let rate = 1e3 * gflop / ms;
        println!("{shape:>22} {ms:9.4} {rate:9.1} {peer_ms:9.4} {:6.2}", peer_ms / ms);
    }
    if let Some(mut peer) = peer {
        drop(peer.to);
        let _ = peer.child.wait();
    }
    Ok(())
}

//! The two sides of a comparison: processes that wait for a word before each run.
//!
//! A line of JSON in, a line of JSON out. A side first says who it is and what it holds ([`Ready`]); then `"run"` runs
//! the work once and is answered with its seconds, and a number runs that yardstick. It ends with its input.
use super::{BenchError, Sides};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use taper_kernels::Isa;
use taper_train::recipe::Device;

/// PyTorch's side; the networks are those that the scripts in `tools/` use too.
const SCRIPT: &str =
    concat!(include_str!("../../../../tools/torch_nets.py"), "\n\n", include_str!("peer.py"));

/// What a side says when its work is prepared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Ready {
    /// What runs there.
    pub who: String,
    /// The most memory it held so far, after two runs.
    pub peak_mb: Option<u64>,
    /// Yardsticks: name and amount.
    #[serde(default)]
    pub beside: Vec<(String, f64)>,
}

/// A running side.
pub(super) struct Side {
    name: &'static str,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub ready: Ready,
}

impl Side {
    /// This program, serving one case.
    pub fn ours(case: &str, threads: usize, sides: &Sides) -> Result<Self, BenchError> {
        let name = "taper";
        let program = std::env::current_exe().map_err(|e| failed(name, e.to_string()))?;
        let mut command = Command::new(program);
        command.args(["bench", "--serve", case, "--threads", &threads.to_string()]);
        command.args(["--device", &sides.device.to_string(), "--isa", sides.isa.name()]);
        if let Some(data) = &sides.data {
            command.arg("--data").arg(data);
        }
        Self::start(name, command, None)
    }

    /// PyTorch on a task, with the Python of `TAPER_PEER_PYTHON`, or that of the environment which `cargo xtask bench
    /// --peer` keeps in the user's cache; with `bf16` under autocast. It gets no better instructions than our side.
    pub fn peer(task: &Value, bf16: bool, repeat: u32, sides: &Sides) -> Result<Self, BenchError> {
        let mut task = task.clone();
        task["repeat"] = repeat.into();
        task["bf16"] = bf16.into();
        // PyTorch's name of Apple's GPU.
        let device = if sides.device == Device::Metal { "mps".into() } else { sides.device.to_string() };
        task["device"] = device.into();
        let python = std::env::var_os("TAPER_PEER_PYTHON").map(PathBuf::from).unwrap_or_else(in_cache);
        let mut command = Command::new(&python);
        command.args(["-W", "ignore", "-c", SCRIPT, &sides.threads.to_string()]);
        if sides.isa < Isa::best() {
            command.envs(limits(sides.isa.name()));
        }
        Self::start("PyTorch", command, Some(&task)).map_err(|e| {
            let hint = "run `cargo xtask bench --peer`, or set TAPER_PEER_PYTHON to a Python with torch";
            failed("PyTorch", format!("{}: {e}; {hint}", python.display()))
        })
    }

    fn start(name: &'static str, mut command: Command, task: Option<&Value>) -> Result<Self, BenchError> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| failed(name, e.to_string()))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let Some(output) = output else { return Err(failed(name, "no output")) };
        let mut side = Self { name, child, input, output: BufReader::new(output), ready: Ready::default() };
        if let Some(task) = task {
            side.say(&task.to_string())?;
        }
        side.ready = side.answer()?;
        Ok(side)
    }

    /// Runs the work and returns the seconds of one call.
    pub fn run(&mut self) -> Result<f64, BenchError> {
        self.say("\"run\"")?;
        self.answer()
    }

    /// Processor time of the side so far, in the system's ticks of 10 ms, where it tells.
    pub fn processor_seconds(&self) -> Option<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).ok()?;
        // Fields 14 and 15, counted from the one after the name in parentheses.
        let fields = stat.rsplit(')').next()?.split_whitespace().skip(11).take(2);
        let ticks = fields.map(|field| field.parse::<f64>().ok()).sum::<Option<f64>>()?;
        Some(ticks / 100.0)
    }

    /// Runs a yardstick.
    pub fn run_beside(&mut self, which: usize) -> Result<f64, BenchError> {
        self.say(&which.to_string())?;
        self.answer()
    }

    fn say(&mut self, line: &str) -> Result<(), BenchError> {
        let Some(input) = &mut self.input else { return Ok(()) };
        writeln!(input, "{line}").and_then(|()| input.flush()).map_err(|e| failed(self.name, e.to_string()))
    }

    fn answer<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, BenchError> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| failed(self.name, e.to_string()))?;
        if line.is_empty() {
            return Err(failed(self.name, "ended before its answer"));
        }
        serde_json::from_str(&line)
            .map_err(|e| failed(self.name, format!("expected an answer, found {line:?}: {e}")))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // Closing its input ends it; there is nobody left to tell if it does not.
        self.input = None;
        let _ = self.child.wait();
    }
}

/// The variables that keep PyTorch and the libraries it calls (oneDNN, MKL) to an instruction set of ours: what they call
/// `default` and SSE is the least that they have.
fn limits(isa: &str) -> [(&'static str, &'static str); 3] {
    let [aten, onednn, mkl] = match isa {
        "avx512" => ["avx512", "AVX512_CORE_BF16", "AVX512"],
        "avx2" => ["avx2", "AVX2", "AVX2"],
        _ => ["default", "SSE41", "SSE4_2"],
    };
    [("ATEN_CPU_CAPABILITY", aten), ("ONEDNN_MAX_CPU_ISA", onednn), ("MKL_ENABLE_INSTRUCTIONS", mkl)]
}

/// Whether this CPU multiplies in bf16 by instructions that the set has: PyTorch does so on ARM too.
pub fn has_bf16(isa: Isa) -> bool {
    #[cfg(target_arch = "aarch64")]
    let elsewhere = isa == Isa::best() && std::arch::is_aarch64_feature_detected!("bf16");
    #[cfg(not(target_arch = "aarch64"))]
    let elsewhere = false;
    elsewhere || taper_kernels::multiplies_bf16(isa)
}

fn failed(side: &'static str, message: impl Into<String>) -> BenchError {
    BenchError::Side { side, message: message.into() }
}

fn in_cache() -> PathBuf {
    let home = std::env::var_os("HOME").unwrap_or_default();
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or(Path::new(&home).join(".cache"), PathBuf::from);
    cache.join("taper/peer-venv/bin/python")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The later of two things of one name would take the place of the earlier in both scripts.
    #[test]
    fn no_name_of_the_script_is_defined_twice() {
        let word = |line: &'static str| {
            let rest = line.strip_prefix("class ").or(line.strip_prefix("def "))?;
            rest.split(['(', ':']).next()
        };
        let mut names: Vec<&str> = SCRIPT.lines().filter_map(word).collect();
        assert!(names.len() > 10, "{names:?}");
        names.sort_unstable();
        let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}

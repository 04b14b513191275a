//! PyTorch on the same work: a Python process that waits for our word before each run.
use super::BenchError;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const SCRIPT: &str = include_str!("peer.py");

/// A running peer. It ends with its standard input.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the peer with the Python of `TAPER_PEER_PYTHON`, or that of the environment which `cargo xtask bench
    /// --peer` keeps in the user's cache.
    pub fn start(threads: usize) -> Result<Self, BenchError> {
        let python = std::env::var_os("TAPER_PEER_PYTHON").map(PathBuf::from).unwrap_or_else(in_cache);
        let mut child = Command::new(&python)
            .args(["-c", SCRIPT, &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| refuse(&python, &e.to_string()))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let Some(output) = output else { return Err(refuse(&python, "no output")) };
        let mut peer = Self { child, input, output: BufReader::new(output) };
        let ready: String = peer.answer()?;
        eprintln!("peer: {ready}, {threads} threads");
        Ok(peer)
    }

    /// Makes the peer ready for a piece of work.
    pub fn prepare(&mut self, task: &Value) -> Result<(), BenchError> {
        self.say(&task.to_string())?;
        self.answer::<String>().map(drop)
    }

    /// Runs the work once and returns the seconds it took.
    pub fn time(&mut self) -> Result<f64, BenchError> {
        self.say("\"run\"")?;
        self.answer()
    }

    fn say(&mut self, line: &str) -> Result<(), BenchError> {
        let Some(input) = &mut self.input else { return Ok(()) };
        writeln!(input, "{line}").and_then(|()| input.flush()).map_err(|e| BenchError::Peer(e.to_string()))
    }

    fn answer<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, BenchError> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| BenchError::Peer(e.to_string()))?;
        let bad = |e: serde_json::Error| BenchError::Peer(format!("expected an answer, found {line:?}: {e}"));
        serde_json::from_str(&line).map_err(bad)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Closing its input ends it; there is nobody left to tell if it does not.
        self.input = None;
        let _ = self.child.wait();
    }
}

fn in_cache() -> PathBuf {
    let home = std::env::var_os("HOME").unwrap_or_default();
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or(Path::new(&home).join(".cache"), PathBuf::from);
    cache.join("taper/peer-venv/bin/python")
}

fn refuse(python: &Path, message: &str) -> BenchError {
    BenchError::Peer(format!(
        "{}: {message}; run `cargo xtask bench --peer`, or set TAPER_PEER_PYTHON to a Python with torch",
        python.display()
    ))
}

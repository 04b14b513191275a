//! Small runs in a folder of their own, and requests as a program would send them.
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

/// A run of a second.
pub const SMALL: &str = "
name: small
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16, eval_batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 3, log_every: 1, probe: true}
";

/// One that goes on until it is stopped.
pub const ENDLESS: &str = "
name: endless
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16, eval_batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 100000000, log_every: 10, eval_every: 1000000, checkpoint: {every_epochs: null}}
";

pub struct Place(TempDir);

impl Place {
    pub fn new(recipes: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in recipes {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn taper(&self, args: &[&str]) -> Command {
        let mut taper = Command::new(env!("CARGO_BIN_EXE_taper"));
        taper.args(args).args(["--threads", "1"]).current_dir(self.0.path());
        taper.env_remove("TAPER_DATA").env("TAPER_OFFLINE", "1").env("TAPER_CACHE", self.path("cache"));
        taper.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        taper
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.taper(args).output().unwrap()
    }

    /// The only run of a name.
    pub fn folder(&self, name: &str) -> PathBuf {
        let entries = std::fs::read_dir(self.path("runs")).unwrap().map(|entry| entry.unwrap().path());
        let of =
            |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&format!("{name}-"));
        entries.into_iter().find(of).unwrap()
    }
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A process that ends with the test.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A page that is served.
pub struct Page {
    _server: Running,
    pub address: String,
    pub token: String,
}

impl Page {
    pub fn open(place: &Place, args: &[&str]) -> Self {
        let mut server = place.taper(&[&["watch", "runs", "--port", "0"], args].concat()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut url).unwrap();
        let (address, token) = url.trim().strip_prefix("http://").unwrap().split_once("/?token=").unwrap();
        Self { address: address.to_owned(), token: token.to_owned(), _server: Running(server) }
    }

    /// Sends these bytes and gives all that comes back.
    pub fn send(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        // A request that is refused half-way is answered before all of it is read.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Asks with a method, as the page does.
    pub fn ask(&self, method: &str, path: &str, headers: &str) -> String {
        self.send(format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n{headers}\r\n", self.address).as_bytes())
    }

    pub fn cookie(&self) -> String {
        let port = self.address.rsplit(':').next().unwrap();
        format!("Cookie: taper-watch-{port}={}\r\n", self.token)
    }

    pub fn json(&self, path: &str) -> serde_json::Value {
        let answer = self.ask("GET", path, &self.cookie());
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1)
            .unwrap_or_else(|e| panic!("{e}: {answer}"))
    }

    /// Asks until the answer is as it should be.
    pub fn until<T>(&self, path: &str, holds: impl Fn(&serde_json::Value) -> Option<T>) -> T {
        loop {
            if let Some(found) = holds(&self.json(path)) {
                return found;
            }
        }
    }
}

/// The status of an answer.
pub fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap_or_else(|| panic!("{answer:?}")).parse().unwrap()
}

/// All bytes of a file.
pub fn bytes(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).unwrap()
}

//! Downloads, against a server on this machine that speaks the hub's protocol. No test reaches out.
#![cfg(feature = "hub")]
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use sha2::{Digest, Sha256};
use taper_data::hub::{self, Access, Record, Repo, Token};
use taper_data::{DataError, DataRegistry, Form, Layout, Search, Spec, find, inventory};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

static SPEC: Spec = Spec {
    name: "sample",
    layouts: &[Layout { form: Form::Lines, files: &[&["a/one.bin"], &["two.bin"]] }],
    hub: Repo { id: "some/sample", revision: "main", files: &["a/one.bin", "two.bin"] },
    embedded: &[],
};

/// What the server does instead of answering a request to storage, or to the API.
#[derive(Clone, Debug)]
enum Fault {
    /// Answers with this status and this message in body and header.
    Status(u16, String),
    /// Sends so many bytes of the body, then closes.
    Cut(usize),
    /// Sends nothing until the client goes away.
    Silence,
    /// Sends the right number of other bytes.
    Garble,
    /// Sends everything, whatever range was asked for.
    IgnoreRange,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    /// For requests whose line contains the text, in order.
    faults: VecDeque<(&'static str, Fault)>,
    log: Vec<String>,
}

/// The hub: looks up revisions, announces files, redirects to storage under another host name.
struct Server {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect();
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = shared.clone();
                // An error here is a client that went away, which some tests want.
                std::thread::spawn(move || answer(stream, port, &state));
            }
        });
        Self { endpoint: format!("http://127.0.0.1:{port}"), state }
    }

    fn sample() -> Self {
        Self::new(&[("a/one.bin", bytes(300_000)), ("two.bin", bytes(77))])
    }

    fn fault(&self, on: &'static str, fault: Fault) {
        self.state.lock().unwrap().faults.push_back((on, fault));
    }

    fn access(&self) -> Access {
        let pause = Duration::from_millis(1);
        Access { endpoint: Some(self.endpoint.clone()), pause, attempts: 3, ..Access::default() }
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    fn fetch(&self, root: &Path) -> Result<Record, DataError> {
        hub::fetch(&SPEC, root, &self.access(), None)
    }

    fn error(&self, root: &Path) -> String {
        self.fetch(root).unwrap_err().to_string()
    }
}

fn bytes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 % 253) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn answer(mut stream: TcpStream, port: u16, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let (mut range, mut token) = (None, "");
    for line in lines.by_ref() {
        let line = line?.to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("range: bytes=") {
            let (from, to) = value.split_once('-').unwrap();
            range = Some((from.parse::<usize>().unwrap(), to.parse::<usize>().unwrap()));
        }
        if line.starts_with("authorization:") {
            token = " with token";
        }
    }
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default().to_string());
    let asked = range.map(|(from, to)| format!(" {from}-{to}")).unwrap_or_default();
    let mut locked = state.lock().unwrap();
    locked.log.push(format!("{method} {path}{asked}{token}"));
    let line = format!("{method} {path}");
    let fault = match locked.faults.front() {
        Some((on, _)) if line.contains(on) => locked.faults.pop_front().map(|(_, fault)| fault),
        _ => None,
    };
    let file = |prefix: &str| {
        path.strip_prefix(prefix).and_then(|name| locked.files.get(name).cloned().map(|f| (name, f)))
    };
    let mut respond = |status: &str, headers: &str, body: &[u8]| {
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        )?;
        if method != "HEAD" { stream.write_all(body) } else { Ok(()) }
    };
    match fault {
        Some(Fault::Status(status, message)) => {
            return respond(
                &format!("{status} -"),
                &format!("X-Error-Message: {message}\r\n"),
                message.as_bytes(),
            );
        }
        Some(Fault::Silence) => {
            drop(locked);
            return stream.read(&mut [0]).map(drop);
        }
        _ => {}
    }
    if path == "/api/datasets/some/sample/revision/main" {
        return respond("200 OK", "", json!({"id": "some/sample", "sha": COMMIT}).to_string().as_bytes());
    }
    let resolve = format!("/datasets/some/sample/resolve/{COMMIT}/");
    let pinned = "/datasets/uoft-cs/cifar10/resolve/0b2714987fa478483af9968de7c934580d0bb9a2/";
    for (prefix, commit) in [(resolve.as_str(), COMMIT), (pinned, &pinned[34..74])] {
        if let Some((name, content)) = file(prefix) {
            let headers = format!(
                "X-Repo-Commit: {commit}\r\nX-Linked-Etag: \"{}\"\r\nX-Linked-Size: {}\r\n\
                 Location: http://localhost:{port}/storage/{name}\r\n",
                sha256(&content),
                content.len()
            );
            return respond("302 Found", &headers, b"");
        }
    }
    let Some((_, content)) = file("/storage/") else {
        return respond("404 Not Found", "", b"{\"error\": \"Entry not found\"}");
    };
    let content =
        if matches!(fault, Some(Fault::Garble)) { content.iter().map(|b| !b).collect() } else { content };
    let range = range.filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
    let (status, body) = match range {
        Some((from, to)) => ("206 Partial Content", &content[from..=to]),
        None => ("200 OK", &content[..]),
    };
    match fault {
        Some(Fault::Cut(after)) => {
            write!(
                stream,
                "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                body.len()
            )?;
            stream.write_all(&body[..after])
        }
        _ => respond(status, "", body),
    }
}

#[test]
fn the_first_fetch_asks_and_the_second_does_not() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    let record = server.fetch(dir.path()).unwrap();
    assert_eq!(record.commit, COMMIT);
    let one = &record.files["a/one.bin"];
    assert_eq!((one.bytes, one.sha256.clone(), one.confirmed), (300_000, sha256(&bytes(300_000)), true));
    assert_eq!(std::fs::read(dir.path().join("sample/a/one.bin")).unwrap(), bytes(300_000));
    let log = server.log();
    assert_eq!(log[0], "GET /api/datasets/some/sample/revision/main");
    assert!(log[1..].iter().all(|l| l.contains(COMMIT) || l.contains("/storage/")), "{log:#?}");
    assert_eq!(server.fetch(dir.path()).unwrap(), record);
    assert_eq!(server.log(), Vec::<String>::new());
}

#[test]
fn a_file_that_was_lost_or_damaged_is_fetched_again_from_the_same_commit() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    let record = server.fetch(dir.path()).unwrap();
    server.log();
    let path = dir.path().join("sample/two.bin");
    std::fs::write(&path, b"damaged").unwrap();
    assert_eq!(server.fetch(dir.path()).unwrap(), record);
    assert_eq!(std::fs::read(&path).unwrap(), bytes(77));
    assert!(server.log().iter().all(|l| l.contains("two.bin") && !l.contains("revision")));
}

#[test]
fn a_partial_file_is_continued() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    std::fs::create_dir_all(dir.path().join("sample/a")).unwrap();
    std::fs::write(dir.path().join("sample/a/one.bin.part"), &bytes(300_000)[..120_000]).unwrap();
    server.fetch(dir.path()).unwrap();
    assert_eq!(std::fs::read(dir.path().join("sample/a/one.bin")).unwrap(), bytes(300_000));
    assert!(server.log().contains(&"GET /storage/a/one.bin 120000-299999".to_string()));
    assert!(!dir.path().join("sample/a/one.bin.part").exists());
}

#[test]
fn a_partial_file_of_something_else_is_started_over() {
    for leftover in [vec![9; 120_000], vec![9; 300_000], vec![9; 400_000]] {
        let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
        std::fs::create_dir_all(dir.path().join("sample/a")).unwrap();
        std::fs::write(dir.path().join("sample/a/one.bin.part"), leftover).unwrap();
        server.fetch(dir.path()).unwrap();
        assert_eq!(std::fs::read(dir.path().join("sample/a/one.bin")).unwrap(), bytes(300_000));
    }
}

#[test]
fn a_server_without_ranges_sends_the_whole_file_once() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    std::fs::create_dir_all(dir.path().join("sample/a")).unwrap();
    std::fs::write(dir.path().join("sample/a/one.bin.part"), &bytes(300_000)[..120_000]).unwrap();
    server.fault("GET /storage/a/one.bin", Fault::IgnoreRange);
    server.fetch(dir.path()).unwrap();
    assert_eq!(std::fs::read(dir.path().join("sample/a/one.bin")).unwrap(), bytes(300_000));
    assert_eq!(server.log().iter().filter(|l| l.starts_with("GET /storage/a")).count(), 1);
}

#[test]
fn a_wrong_hash_is_refused_and_not_kept() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    server.fault("GET /storage/a/one.bin", Fault::Garble);
    let message = server.error(dir.path());
    assert!(message.contains("expected sha256") && message.contains("not kept"), "{message}");
    assert!(message.contains("a/one.bin"), "{message}");
    assert!(
        !dir.path().join("sample/a/one.bin").exists() && !dir.path().join("sample/a/one.bin.part").exists()
    );
    // The next fetch is a clean one.
    server.fetch(dir.path()).unwrap();
}

#[test]
fn a_connection_cut_midway_is_continued_where_it_broke() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    server.fault("GET /storage/a/one.bin", Fault::Cut(100_000));
    server.fault("GET /storage/a/one.bin", Fault::Cut(50_000));
    server.fetch(dir.path()).unwrap();
    assert_eq!(std::fs::read(dir.path().join("sample/a/one.bin")).unwrap(), bytes(300_000));
    let gets: Vec<String> = server.log().into_iter().filter(|l| l.starts_with("GET /storage/a")).collect();
    assert_eq!(gets.len(), 3);
    assert_eq!(gets[2], "GET /storage/a/one.bin 150000-299999");
}

#[test]
fn a_connection_that_always_breaks_is_given_up_and_what_came_is_kept() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    server.fault("GET /storage/a/one.bin", Fault::Cut(100_000));
    for _ in 0..3 {
        server.fault("GET /storage/a/one.bin", Fault::Cut(0));
    }
    let message = server.error(dir.path());
    assert!(message.contains("100000 of 300000 bytes are kept and will be continued"), "{message}");
    server.log();
    server.fetch(dir.path()).unwrap();
    assert!(server.log().contains(&"GET /storage/a/one.bin 100000-299999".to_string()));
}

#[test]
fn a_server_error_is_tried_again_and_a_lasting_one_reported() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    server.fault("GET /api", Fault::Status(500, "oops".into()));
    server.fault("HEAD /datasets", Fault::Status(503, "oops".into()));
    server.fault("GET /storage", Fault::Status(502, "oops".into()));
    server.fetch(dir.path()).unwrap();

    let dir = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        server.fault("GET /api", Fault::Status(500, "oops".into()));
    }
    let message = server.error(dir.path());
    assert!(message.contains("500") && message.contains("revision main"), "{message}");
}

#[test]
fn a_file_that_is_not_there_is_reported_at_once() {
    let (server, dir) = (Server::new(&[("two.bin", bytes(77))]), tempfile::tempdir().unwrap());
    let message = server.error(dir.path());
    assert!(
        message.contains("404") && message.contains("a/one.bin") && message.contains("no such file"),
        "{message}"
    );
    // Once: a missing file does not appear by asking again.
    assert_eq!(server.log().iter().filter(|l| l.contains("one.bin")).count(), 1);
}

#[test]
fn a_silent_server_is_given_up_after_the_time_out() {
    for on in ["GET /api", "HEAD /datasets", "GET /storage"] {
        let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
        let access = Access { stall: Duration::from_millis(300), attempts: 2, ..server.access() };
        server.fault(on, Fault::Silence);
        server.fault(on, Fault::Silence);
        let message = hub::fetch(&SPEC, dir.path(), &access, None).unwrap_err().to_string();
        assert!(message.contains("sent nothing for 300ms"), "{on}: {message}");
        // It answers again: what was missing is fetched.
        hub::fetch(&SPEC, dir.path(), &server.access(), None).unwrap();
    }
}

#[test]
fn no_network_is_said_plainly() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let access =
        Access { endpoint: Some(format!("http://127.0.0.1:{port}")), attempts: 1, ..Access::default() };
    let message =
        hub::fetch(&SPEC, tempfile::tempdir().unwrap().path(), &access, None).unwrap_err().to_string();
    assert!(
        message.contains("no connection to the hub") && message.contains("is there a network?"),
        "{message}"
    );
    let bad = Access { endpoint: Some("not an address".into()), ..Access::default() };
    let message = hub::fetch(&SPEC, tempfile::tempdir().unwrap().path(), &bad, None).unwrap_err().to_string();
    assert!(message.contains("usable hub address"), "{message}");
}

#[test]
fn offline_asks_nobody_and_says_what_is_missing_where_it_looked_and_what_would_help() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    let search = Search {
        dir: Some(dir.path().join("mine")),
        cache: Some(dir.path().join("cache")),
        offline: true,
        hub: server.access(),
        ..Search::default()
    };
    std::fs::create_dir_all(dir.path().join("mine/sample")).unwrap();
    std::fs::write(dir.path().join("mine/sample/two.bin"), b"2").unwrap();
    let message = find(&SPEC, &search, None).unwrap_err().to_string();
    for part in [
        "`sample` was not found",
        "incomplete, lacks a/one.bin",
        "TAPER_DATA: not set",
        "hub some/sample: not asked, because offline",
        "cargo xtask data fetch sample",
        "sample/{a/one.bin,two.bin}",
    ] {
        assert!(message.contains(part), "{part} is not in {message}");
    }
    assert!(message.contains(&dir.path().join("cache").display().to_string()));
    assert_eq!(server.log(), Vec::<String>::new());
}

#[test]
fn a_found_set_is_not_asked_for_and_a_missing_one_is_fetched_into_the_cache() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    let search = Search { cache: Some(dir.path().into()), hub: server.access(), ..Search::default() };
    let found = find(&SPEC, &search, None).unwrap();
    assert_eq!(found.download.as_ref().unwrap().commit, COMMIT);
    assert!(!server.log().is_empty());
    assert_eq!(found.hash("sample").unwrap()[1].sha256, sha256(&bytes(77)));
    // Damage after the download is found at the next use.
    std::fs::write(dir.path().join("data/sample/two.bin"), b"damaged").unwrap();
    let error = find(&SPEC, &search, None).unwrap().hash("sample").unwrap_err();
    assert!(
        matches!(error, DataError::Damaged { .. })
            && error.to_string().contains("cargo xtask data fetch sample"),
        "{error}"
    );
    assert_eq!(server.log(), Vec::<String>::new());
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    let access = Access { token: Some(Token("hf_verysecret".into())), ..server.access() };
    assert!(!format!("{access:?}").contains("verysecret"));
    hub::fetch(&SPEC, dir.path(), &access, None).unwrap();
    for line in server.log() {
        // Storage is another host: the redirect must not carry the token there.
        assert_eq!(line.contains("with token"), !line.contains("/storage/"), "{line}");
    }
    for status in [401, 403, 400] {
        let dir = tempfile::tempdir().unwrap();
        server.fault("GET /api", Fault::Status(status, "token hf_verysecret is bad".into()));
        let error = hub::fetch(&SPEC, dir.path(), &access, None).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("verysecret"), "{error}");
        assert!(error.to_string().contains(&status.to_string()), "{error}");
    }
}

#[test]
fn two_at_once_fetch_each_file_once() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    std::thread::scope(|scope| {
        let both: Vec<_> = (0..2).map(|_| scope.spawn(|| server.fetch(dir.path()).unwrap())).collect();
        let records: Vec<Record> = both.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(records[0], records[1]);
    });
    assert_eq!(server.log().iter().filter(|l| l.starts_with("GET /storage")).count(), 2);
}

#[test]
fn the_recipe_can_name_another_revision() {
    let (server, dir) = (Server::sample(), tempfile::tempdir().unwrap());
    // A commit needs no lookup.
    hub::fetch(&SPEC, dir.path(), &server.access(), Some(COMMIT)).unwrap();
    assert!(server.log().iter().all(|l| !l.contains("/api/")));
    let other = "f".repeat(40);
    let error = hub::fetch(&SPEC, dir.path(), &server.access(), Some(&other)).unwrap_err().to_string();
    assert!(error.contains("404") && error.contains("revision"), "{error}");
}

#[test]
fn cifar10_comes_from_the_hub_proved_and_the_second_run_needs_no_network() {
    let Some(source) = std::env::var_os("TAPER_DATA").map(|d| Path::new(&d).join("cifar10/plain_text"))
    else {
        println!("skipped: TAPER_DATA is not set");
        return;
    };
    let Ok(train) = std::fs::read(source.join("train/0000.parquet")) else {
        println!("skipped: TAPER_DATA has no cifar10");
        return;
    };
    let test = std::fs::read(source.join("test/0000.parquet")).unwrap();
    let server = Server::new(&[
        ("plain_text/train-00000-of-00001.parquet", train),
        ("plain_text/test-00000-of-00001.parquet", test),
    ]);
    let dir = tempfile::tempdir().unwrap();
    let search = Search { cache: Some(dir.path().into()), hub: server.access(), ..Search::default() };
    let registry = DataRegistry::builtin();
    let mut out = Vec::new();
    inventory::fetch(&registry, "cifar10", None, &search, true, &mut out).unwrap();
    let line: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!((&line["verified"], &line["content"][0]["samples"]), (&json!(true), &json!(50_000)));
    assert_eq!(line["revision"], "0b2714987fa478483af9968de7c934580d0bb9a2");
    server.log();
    let loaded = registry.get("cifar10").unwrap().load(&json!({}), &search).unwrap();
    assert!(loaded.provenance.verified && server.log().is_empty());
}

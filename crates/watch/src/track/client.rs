//! Requests to a tracking server over plain HTTP/1.1, with limits on time and size, and a few tries.
use super::TrackError;
use serde_json::Value;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// A server is waited for so long to take a connection, and so long for a whole answer.
const CONNECTING: Duration = Duration::from_secs(5);
/// An answer is not longer than this.
const LONGEST: usize = 64 << 20;
/// How often a request is tried that the server may answer another time.
const TRIES: u32 = 4;

/// A server by its address.
#[derive(Debug)]
pub(super) struct Client {
    /// As it was given, for messages.
    pub server: String,
    host: String,
    port: u16,
    /// What stands before every path.
    prefix: String,
    /// How long an answer may take.
    answering: Duration,
    /// The pause before the second try; it doubles.
    pause: Duration,
}

/// What a server answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// What it says of itself, for messages.
    fn said(&self) -> String {
        let json = self.json();
        let message = json["message"].as_str().map(str::to_owned);
        let text = message.unwrap_or_else(|| String::from_utf8_lossy(&self.body).trim().to_owned());
        let short: String = text.chars().take(300).collect();
        format!("it answered {}{}{short}", self.status, if short.is_empty() { "" } else { ": " })
    }
}

impl Client {
    /// Of an address such as `http://127.0.0.1:5000`. Nothing is asked yet.
    pub fn new(address: &str, answering: Duration) -> Result<Self, TrackError> {
        let wrong = |what: &str| {
            Err(TrackError::Address(format!(
                "{address}: {what}: expected an address like http://127.0.0.1:5000"
            )))
        };
        if address.starts_with("https://") {
            return Err(TrackError::Address(format!(
                "{address}: https is not spoken here: reach the server through a tunnel (ssh -L 5000:localhost:5000 HOST) and name \
                 http://127.0.0.1:5000"
            )));
        }
        let Some(rest) = address.strip_prefix("http://") else { return wrong("not an address of http") };
        let (authority, prefix) = rest.split_once('/').map_or((rest, ""), |(a, p)| (a, p));
        if authority.is_empty() || !rest.bytes().all(|b| b.is_ascii_graphic()) || authority.contains('@') {
            return wrong("no name of a server");
        }
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
            _ => (authority, Some(80)),
        };
        let Some(port) = port else { return wrong("not a port") };
        let prefix = match prefix.trim_matches('/') {
            "" => String::new(),
            prefix => format!("/{prefix}"),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let (server, pause) = (address.to_owned(), Duration::from_millis(500));
        Ok(Self { server, host, port, prefix, answering, pause })
    }

    /// Asks, with a few tries where the server is away, busy or failing; an answer that is none of ours to repair is an error.
    pub fn ask(&self, method: &str, path: &str, body: Option<(&str, &[u8])>) -> Result<Answer, TrackError> {
        let failed = |message: String| TrackError::Server { server: self.server.clone(), message };
        let mut pause = self.pause;
        for attempt in 1.. {
            let message = match self.once(method, path, body) {
                // What was not found is for the caller to judge.
                Ok(answer) if answer.status < 300 || answer.status == 404 => return Ok(answer),
                Ok(answer) if answer.status < 500 && answer.status != 429 => {
                    return Err(failed(answer.said()));
                }
                Ok(answer) => answer.said(),
                Err(e) => e,
            };
            if attempt == TRIES {
                return Err(failed(format!(
                    "{message} ({TRIES} tries): nothing is lost, the same command goes on when the server is back"
                )));
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        Err(failed("it was not asked".into()))
    }

    /// Asks for JSON with JSON.
    pub fn json(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer, TrackError> {
        let text = body.map(Value::to_string);
        self.ask(method, path, text.as_ref().map(|text| ("application/json", text.as_bytes())))
    }

    fn once(&self, method: &str, path: &str, body: Option<(&str, &[u8])>) -> Result<Answer, String> {
        let until = Instant::now() + self.answering;
        let addresses = (self.host.as_str(), self.port).to_socket_addrs();
        let addresses = addresses.map_err(|e| format!("its name is not known: {e}"))?;
        let mut stream = Err("its name has no address".to_owned());
        for address in addresses {
            stream =
                TcpStream::connect_timeout(&address, CONNECTING).map_err(|e| format!("no connection: {e}"));
            if stream.is_ok() {
                break;
            }
        }
        let mut stream = stream?;
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let mut head = format!(
            "{method} {}{path} HTTP/1.1\r\nHost: {host}:{}\r\nConnection: close\r\nAccept: application/json\r\n\
             User-Agent: taper/{}\r\n",
            self.prefix,
            self.port,
            env!("CARGO_PKG_VERSION")
        );
        let (kind, content) = body.unwrap_or(("", &[]));
        if body.is_some() || method != "GET" {
            head += &format!("Content-Length: {}\r\n", content.len());
        }
        if body.is_some() {
            head += &format!("Content-Type: {kind}\r\n");
        }
        head += "\r\n";
        let late = |e: io::Error| match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("no answer within {} s", self.answering.as_secs())
            }
            _ => format!("the connection broke: {e}"),
        };
        stream.set_write_timeout(Some(self.answering)).map_err(late)?;
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(content)).map_err(late)?;
        let mut bytes = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        loop {
            if let Some(answer) = parse(&bytes, false)? {
                return Ok(answer);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late(ErrorKind::TimedOut.into()));
            }
            stream.set_read_timeout(Some(left)).map_err(late)?;
            match stream.read(&mut chunk) {
                Ok(0) => return parse(&bytes, true)?.ok_or_else(|| "the answer broke off".to_owned()),
                Ok(read) => bytes.extend_from_slice(&chunk[..read]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(late(e)),
            }
            if bytes.len() > LONGEST {
                return Err(format!("an answer of more than {LONGEST} bytes"));
            }
        }
    }
}

/// The answer that these bytes are; `None` while they are not all of it.
fn parse(bytes: &[u8], ended: bool) -> Result<Option<Answer>, String> {
    let Some(end) = bytes.windows(4).position(|at| at == b"\r\n\r\n") else { return Ok(None) };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let status =
        first.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)).and_then(|s| s.parse().ok());
    let Some(status) = status else { return Err(format!("it does not speak HTTP: {first:?}")) };
    let header = |name: &str| {
        let found = head.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
        found
            .into_iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim().to_owned())
    };
    let rest = &bytes[end + 4..];
    if header("transfer-encoding").is_some_and(|kind| kind.eq_ignore_ascii_case("chunked")) {
        return Ok(unchunked(rest)?.map(|body| Answer { status, body }));
    }
    match header("content-length").map(|length| length.parse::<usize>()) {
        Some(Err(_)) => Err("its answer has no length that is a number".into()),
        Some(Ok(length)) if rest.len() >= length => {
            Ok(Some(Answer { status, body: rest[..length].to_vec() }))
        }
        None if ended || status == 204 => Ok(Some(Answer { status, body: rest.to_vec() })),
        _ => Ok(None),
    }
}

/// What was sent in pieces; `None` while the last is missing.
fn unchunked(mut rest: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut body = Vec::new();
    loop {
        let Some(end) = rest.windows(2).position(|at| at == b"\r\n") else { return Ok(None) };
        let size = String::from_utf8_lossy(&rest[..end]).into_owned();
        let size = size.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).ok().filter(|size| *size <= LONGEST);
        let Some(size) = size else { return Err("its answer is in pieces without a size".into()) };
        rest = &rest[end + 2..];
        if size == 0 {
            return Ok(Some(body));
        }
        if rest.len() < size + 2 {
            return Ok(None);
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn addresses_that_are_none_are_refused() {
        let new = |address| {
            Client::new(address, CONNECTING).map(|client| (client.host, client.port, client.prefix))
        };
        assert_eq!(new("http://localhost:5000/").unwrap(), ("localhost".into(), 5000, String::new()));
        assert_eq!(new("http://[::1]:81/a/b/").unwrap(), ("::1".into(), 81, "/a/b".into()));
        assert_eq!(new("http://host").unwrap(), ("host".into(), 80, String::new()));
        for wrong in ["", "localhost:5000", "http://", "http://a:b", "http://a b", "http://u@h", "ftp://h"] {
            assert!(new(wrong).unwrap_err().to_string().contains("expected"), "{wrong}");
        }
        assert!(new("https://h").unwrap_err().to_string().contains("https is not spoken here"));
    }

    #[test]
    fn answers_whole_in_pieces_and_broken() {
        let body = |bytes: &[u8], ended| parse(bytes, ended).unwrap().map(|answer| answer.body);
        assert_eq!(body(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", false).unwrap(), b"{}");
        assert_eq!(body(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}", true), None);
        assert_eq!(body(b"HTTP/1.1 200 OK\r\n\r\n{}", true).unwrap(), b"{}");
        let pieces = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x\r\n}\r\n0\r\n\r\n";
        assert_eq!(body(pieces, false).unwrap(), b"{}");
        assert_eq!(body(&pieces[..pieces.len() - 8], false), None);
        assert!(parse(b"SSH-2.0-OpenSSH\r\n\r\n", false).is_err());
        assert!(parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", false).is_err());
    }

    /// A server that gives these answers, one a connection.
    fn server(answers: &'static [&'static str]) -> (String, std::thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let thread = std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        (address, thread)
    }

    #[test]
    fn a_server_that_fails_is_asked_again_and_one_that_refuses_is_not() {
        const FAILS: &str = "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nOops";
        const FINE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
        let (address, thread) = server(&[FAILS, "", FINE]);
        let quick =
            |address: &str| Client { pause: Duration::ZERO, ..Client::new(address, CONNECTING).unwrap() };
        assert_eq!(quick(&address).json("GET", "/", None).unwrap().status, 200);
        thread.join().unwrap();
        let (address, thread) =
            server(&["HTTP/1.1 400 Bad Request\r\nContent-Length: 17\r\n\r\n{\"message\":\"no\"} "]);
        let error = quick(&address).json("GET", "/", None).unwrap_err().to_string();
        assert!(error.ends_with("it answered 400: no"), "{error}");
        thread.join().unwrap();
        // Nobody listens there any more.
        let error = quick(&address).json("GET", "/", None).unwrap_err().to_string();
        assert!(error.contains("no connection") && error.contains("nothing is lost"), "{error}");
    }
}

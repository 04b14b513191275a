//! As much of HTTP/1.1 as a local page takes: one request a connection, with limits on its size and on its time.
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A request's line and headers take no more than this.
const HEAD: usize = 16 << 10;
/// Nor its body.
const BODY: usize = 4 << 10;
/// Who has not asked by then does not mean it.
const ASKING: Duration = Duration::from_secs(5);
/// Who has not read the answer by then does not want it.
const ANSWERING: Duration = Duration::from_secs(20);

/// What is asked.
#[derive(Debug)]
pub struct Request {
    /// The method: `GET`.
    pub method: String,
    /// The path without the query.
    pub path: String,
    query: Vec<(String, String)>,
    headers: Vec<(String, String)>,
}

/// What is wrong with a request: the status it is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal(pub u16);

impl Request {
    /// Reads a request; `None` where the other side went away or took too long, and needs no answer.
    pub fn read(stream: &mut TcpStream) -> io::Result<Result<Self, Refusal>> {
        let until = Instant::now() + ASKING;
        let mut bytes = Vec::new();
        let end = loop {
            if let Some(end) = bytes.windows(4).position(|at| at == b"\r\n\r\n") {
                break end;
            }
            if bytes.len() > HEAD {
                return Ok(Err(Refusal(431)));
            }
            more(stream, &mut bytes, until)?;
        };
        if end > HEAD {
            return Ok(Err(Refusal(431)));
        }
        let request = match Self::parse(&bytes[..end]) {
            Ok(request) => request,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if request.header("transfer-encoding").is_some() {
            return Ok(Err(Refusal(411)));
        }
        let length = request.header("content-length").map_or(Ok(0), str::parse::<usize>);
        match length {
            Err(_) => return Ok(Err(Refusal(400))),
            Ok(length) if length > BODY => return Ok(Err(Refusal(413))),
            // Nothing that is asked here has a body that matters; what was announced is waited for.
            Ok(length) => {
                while bytes.len() < end + 4 + length {
                    more(stream, &mut bytes, until)?;
                }
            }
        }
        Ok(Ok(request))
    }

    fn parse(head: &[u8]) -> Result<Self, Refusal> {
        let head = std::str::from_utf8(head).map_err(|_| Refusal(400))?;
        let mut lines = head.split("\r\n");
        let mut first = lines.next().unwrap_or_default().split(' ');
        let (method, target, version) = (first.next(), first.next(), first.next());
        let (Some(method), Some(target), Some(version), None) = (method, target, version, first.next())
        else {
            return Err(Refusal(400));
        };
        if !version.starts_with("HTTP/1.") || !target.starts_with('/') {
            return Err(Refusal(400));
        }
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            let fine = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic());
            fine.then(|| (name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        let headers = lines.map(|line| header(line).ok_or(Refusal(400))).collect::<Result<Vec<_>, _>>()?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (name.to_owned(), value.to_owned())
        };
        let query = query.split('&').filter(|part| !part.is_empty()).map(pair).collect();
        Ok(Self { method: method.to_owned(), path: path.to_owned(), query, headers })
    }

    /// A header by its name in small letters; of several the first.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    /// A part of the query as it stands: nothing that is asked for here needs escapes.
    pub fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// A cookie.
    pub fn cookie(&self, name: &str) -> Option<&str> {
        let cookies = self.header("cookie")?.split(';').filter_map(|cookie| cookie.trim().split_once('='));
        cookies.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// Reads some more, until `until` at the latest.
fn more(stream: &mut TcpStream, bytes: &mut Vec<u8>, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    stream.set_read_timeout(Some(left))?;
    let mut chunk = [0; 4096];
    match stream.read(&mut chunk) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Ok(read) => {
            bytes.extend_from_slice(&chunk[..read]);
            Ok(())
        }
        Err(e) if e.kind() == ErrorKind::Interrupted => Ok(()),
        Err(e) => Err(e),
    }
}

/// What is answered.
#[derive(Debug)]
pub struct Response {
    status: u16,
    kind: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Response {
    /// A status without content.
    pub fn empty(status: u16) -> Self {
        Self { status, kind: "", headers: Vec::new(), body: Vec::new() }
    }

    /// Content of a kind.
    pub fn of(kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, kind, headers: Vec::new(), body: body.into() }
    }

    /// A value as JSON.
    pub fn json(value: &serde_json::Value) -> Self {
        Self::of("application/json", value.to_string())
    }

    /// With another status.
    pub fn status(self, status: u16) -> Self {
        Self { status, ..self }
    }

    /// With a header.
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Writes it; without its content for `HEAD`.
    pub fn write(&self, stream: &mut TcpStream, head_only: bool) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            303 => "See Other",
            304 => "Not Modified",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            409 => "Conflict",
            411 => "Length Required",
            413 => "Content Too Large",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Error",
        };
        let mut head = format!("HTTP/1.1 {} {reason}\r\nConnection: close\r\n", self.status);
        if self.status != 304 {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        if !self.kind.is_empty() {
            head += &format!("Content-Type: {}; charset=utf-8\r\n", self.kind);
        }
        // Nothing but what this server itself gives is ever loaded, and no other page may hold this one.
        head += "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
                 Cross-Origin-Resource-Policy: same-origin\r\nX-Frame-Options: DENY\r\n\
                 Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                 connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n";
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        let until = Instant::now() + ANSWERING;
        let body = if head_only { &[][..] } else { &self.body };
        for mut rest in [head.as_bytes(), body] {
            while !rest.is_empty() {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(ErrorKind::TimedOut.into());
                }
                stream.set_write_timeout(Some(left))?;
                match stream.write(rest) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(written) => rest = &rest[written..],
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
        }
        stream.flush()
    }
}

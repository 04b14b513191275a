//! The page's server: loopback unless asked otherwise, nothing without the token, a bounded number of connections.
use super::http::{Request, Response};
use super::stop::stop;
use super::token::Token;
use super::view::Watcher;
use serde_json::json;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// More connections at a time than this are turned away.
const MOST: usize = 32;

/// How to serve.
#[derive(Clone, Debug)]
pub struct Options {
    /// Runs and folders of runs.
    pub runs: Vec<PathBuf>,
    /// Where to listen.
    pub address: IpAddr,
    /// On which port; `None` takes the usual one, or any that is free.
    pub port: Option<u16>,
}

impl Default for Options {
    fn default() -> Self {
        Self { runs: vec!["runs".into()], address: Ipv4Addr::LOCALHOST.into(), port: None }
    }
}

/// The port where none was asked for.
pub const PORT: u16 = 7007;

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("{address}: {source}{}", hint(source))]
    Bind {
        /// The address and port.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The system gave no random bytes, or no thread.
    #[error("{0}")]
    System(#[from] io::Error),
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            ": another program, or another watch, listens there: name another port with --port, or none"
        }
        io::ErrorKind::AddrNotAvailable => ": this machine has no such address",
        io::ErrorKind::PermissionDenied => ": ports below 1024 are the system's",
        _ => "",
    }
}

/// A server that listens and has not yet answered.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    watcher: Mutex<Watcher>,
    token: Token,
    /// The cookie's name: cookies of one machine are shared by all its ports.
    cookie: String,
    open: AtomicUsize,
}

impl Server {
    /// Listens.
    pub fn bind(options: &Options) -> Result<Self, ServeError> {
        let listen = |port: u16| {
            let address = SocketAddr::new(options.address, port);
            TcpListener::bind(address).map_err(|source| ServeError::Bind { address, source })
        };
        let listener = match options.port {
            Some(port) => listen(port)?,
            None => listen(PORT).or_else(|_| listen(0))?,
        };
        let address = listener.local_addr()?;
        let shared = Shared {
            watcher: Mutex::new(Watcher::new(&options.runs)),
            token: Token::new()?,
            cookie: format!("taper-watch-{}", address.port()),
            open: AtomicUsize::new(0),
        };
        Ok(Self { listener, address, shared: Arc::new(shared) })
    }

    /// What to open in a browser: whoever has it sees the runs and can stop them.
    pub fn url(&self) -> String {
        let address = match self.address.ip() {
            ip if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), self.address.port()),
            _ => self.address,
        };
        format!("http://{address}/?token={}", self.shared.token.text())
    }

    /// Whether other machines reach it.
    pub fn is_open(&self) -> bool {
        !self.address.ip().is_loopback()
    }

    /// Answers until the process ends.
    pub fn serve(&self) -> ! {
        loop {
            let Ok((stream, _)) = self.listener.accept() else {
                // Out of file descriptors, or a connection that went away: others come.
                std::thread::sleep(std::time::Duration::from_millis(20));
                continue;
            };
            let shared = self.shared.clone();
            let guard = Guard::new(shared);
            let spawned = std::thread::Builder::new().name("page".into()).spawn(move || {
                // Who goes away in the middle needs no answer.
                let _ = guard.shared.answer(stream, guard.full);
            });
            // Without a thread the connection is closed, and the page asks again.
            drop(spawned);
        }
    }
}

/// Counts a connection as long as it is open.
struct Guard {
    shared: Arc<Shared>,
    full: bool,
}

impl Guard {
    fn new(shared: Arc<Shared>) -> Self {
        let full = shared.open.fetch_add(1, Ordering::Relaxed) >= MOST;
        Self { shared, full }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn watcher(&self) -> MutexGuard<'_, Watcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, mut stream: TcpStream, full: bool) -> io::Result<()> {
        if full {
            return Response::empty(503).header("Retry-After", "1").write(&mut stream, false);
        }
        let (response, head_only) = match Request::read(&mut stream)? {
            Ok(request) => (self.respond(&request), request.method == "HEAD"),
            Err(refusal) => (Response::empty(refusal.0), false),
        };
        response.write(&mut stream, head_only)
    }

    fn respond(&self, request: &Request) -> Response {
        let by_query = request.query("token").is_some_and(|token| self.token.is(token));
        let by_cookie = request.cookie(&self.cookie).is_some_and(|token| self.token.is(token));
        if !Self::is_our_name(request.header("host")) || !(by_query || by_cookie) {
            return Response::empty(403);
        }
        match (request.method.as_str(), request.path.as_str()) {
            // The token goes into a cookie and out of the address, which ends up in histories and pictures.
            ("GET" | "HEAD", "/") if by_query => {
                let cookie =
                    format!("{}={}; Path=/; HttpOnly; SameSite=Strict", self.cookie, self.token.text());
                Response::empty(303).header("Location", "/").header("Set-Cookie", cookie)
            }
            ("GET" | "HEAD", "/") => Response::of("text/html", include_str!("page.html")),
            ("GET" | "HEAD", "/style.css") => {
                Response::of("text/css", [&taper_report::STYLE.concat(), include_str!("page.css")].concat())
            }
            ("GET" | "HEAD", "/script.js") => {
                Response::of("text/javascript", [taper_report::SCRIPT, include_str!("page.js")].concat())
            }
            ("GET" | "HEAD", "/list") => {
                let since = request.query("since").and_then(|since| since.parse().ok()).unwrap_or(0);
                Response::json(&self.watcher().list(since))
            }
            ("GET" | "HEAD", "/view") => {
                let keys: Vec<&str> = request.query("runs").unwrap_or_default().split(',').collect();
                let view = self.watcher().view(&keys);
                let tag = format!("\"{}\"", view.tag);
                match request.header("if-none-match") == Some(&tag) {
                    true => Response::empty(304).header("ETag", tag),
                    false => Response::of("application/json", view.text.clone()).header("ETag", tag),
                }
            }
            ("POST", "/stop") => self.stop(request),
            (_, "/" | "/style.css" | "/script.js" | "/list" | "/view" | "/stop") => Response::empty(405),
            _ => Response::empty(404),
        }
    }

    /// Stops a run, for our own page alone: a browser says where a request comes from.
    fn stop(&self, request: &Request) -> Response {
        let (origin, host) = (request.header("origin"), request.header("host").unwrap_or_default());
        if origin.is_some_and(|origin| origin.strip_prefix("http://") != Some(host)) {
            return Response::empty(403);
        }
        let key = request.query("run").unwrap_or_default();
        let folder = self.watcher().folder(key);
        let result = folder.ok_or_else(|| "there is no such run".to_owned()).and_then(|folder| stop(&folder));
        match result {
            Ok(done) => Response::json(&json!({ "done": done })),
            Err(why) => Response::json(&json!({ "refused": why })).status(409),
        }
    }

    /// Whether a request names this machine by number or as itself: any other name may be one that somebody else had point here.
    /// The port may be another, at the near end of a tunnel.
    fn is_our_name(host: Option<&str>) -> bool {
        let Some(host) = host else { return false };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => name,
            _ => host,
        };
        let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
    }
}

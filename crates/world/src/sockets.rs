//! Ranks on one machine: a socket between each two of them.
//!
//! Whoever dies closes its sockets, which the others hear at once; who says nothing for longer than a time limit counts as hung.
//! A rank that ends for a reason tells it to the others first, so that all know which of them was at fault.
#![cfg(unix)]
use crate::{Error, Wire, World};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The sockets of one rank.
#[derive(Debug)]
struct Sockets {
    rank: usize,
    /// By rank; `None` in this one's place.
    peers: Vec<Option<UnixStream>>,
    limit: Duration,
}

/// What a message is for, so that ranks that are out of step notice.
const ALL_TO_ALL: u8 = 1;
const ALL_GATHER: u8 = 2;
const ABORT: u8 = 3;

/// Messages up to this size are written at once: the system holds several of them for a reader who is busy.
const SMALL: usize = 16 << 10;
/// The longest reason that is listened to.
const REASON: usize = 64 << 10;
/// How long a rank that ends tries to say why.
const FAREWELL: Duration = Duration::from_secs(2);

/// The worlds of `size` ranks within this process, each to be used on a thread of its own.
pub fn within(size: usize, limit: Duration) -> std::io::Result<Vec<World>> {
    let mut all: Vec<Vec<Option<UnixStream>>> =
        (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for (a, b) in (0..size).flat_map(|a| (0..a).map(move |b| (a, b))) {
        let (one, other) = UnixStream::pair()?;
        (all[a][b], all[b][a]) = (Some(one), Some(other));
    }
    all.into_iter().enumerate().map(|(rank, peers)| world(rank, peers, limit)).collect()
}

/// Meets the other ranks at a folder that only they can enter: each has a socket there under its number. While one of them is
/// not there yet, `alive` is asked whether it is worth waiting for. `limit` is for what comes after; all have so long to start, and
/// `within` at least.
pub fn meet(
    folder: &Path,
    rank: usize,
    size: usize,
    (limit, within): (Duration, Duration),
    alive: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<World, Error> {
    let failed = |of: usize, what: &str, e: std::io::Error| Error::new(of, format!("{what}: {e}"));
    let place = |rank: usize| -> PathBuf { folder.join(rank.to_string()) };
    let listener = UnixListener::bind(place(rank)).map_err(|e| failed(rank, "has no socket", e))?;
    let within = within.max(limit);
    let deadline = Instant::now() + within;
    let mut wait_for = |rank| {
        alive()?;
        if Instant::now() > deadline {
            return Err(Error::new(rank, format!("did not start within {} s", within.as_secs_f64())));
        }
        std::thread::sleep(Duration::from_millis(5));
        Ok(())
    };
    let mut peers: Vec<Option<UnixStream>> = (0..size).map(|_| None).collect();
    for (other, peer) in peers.iter_mut().enumerate().take(rank) {
        let stream = loop {
            match UnixStream::connect(place(other)) {
                Ok(stream) => break stream,
                // Not there yet, or with too many callers for the moment.
                Err(_) => wait_for(other)?,
            }
        };
        let hello = (rank as u64).to_le_bytes();
        (&stream).write_all(&hello).map_err(|e| failed(other, "does not listen", e))?;
        *peer = Some(stream);
    }
    listener.set_nonblocking(true).map_err(|e| failed(rank, "has no socket", e))?;
    while let Some(missing) = (rank + 1..size).find(|other| peers[*other].is_none()) {
        match listener.accept() {
            Ok((stream, _)) => {
                let mut hello = [0; 8];
                let heard = stream
                    .set_nonblocking(false)
                    .and_then(|()| stream.set_read_timeout(Some(limit)))
                    .and_then(|()| (&stream).read_exact(&mut hello));
                heard.map_err(|e| failed(missing, "does not say who it is", e))?;
                let other = usize::try_from(u64::from_le_bytes(hello)).unwrap_or(usize::MAX);
                match peers.get_mut(other) {
                    Some(peer @ None) if other > rank => *peer = Some(stream),
                    _ => return Err(Error::new(other, "is there twice")),
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => wait_for(missing)?,
            Err(e) => return Err(failed(rank, "cannot be called", e)),
        }
    }
    // Nobody begins before all have met: until then `alive` is asked, later it is the sockets that tell who is gone.
    let mut heard = |other: usize| {
        let Some(mut stream) = peers[other].as_ref() else { return Ok(()) };
        let io = |e| failed(other, "is lost", e);
        stream.set_nonblocking(true).map_err(io)?;
        loop {
            match stream.read(&mut [0]) {
                Ok(0) => return Err(Error::new(other, "ended before all had met")),
                Ok(_) => return stream.set_nonblocking(false).map_err(io),
                Err(e) if e.kind() == ErrorKind::WouldBlock => wait_for(other)?,
                Err(e) => return Err(io(e)),
            }
        }
    };
    let say = |other: usize| peers[other].as_ref().map_or(Ok(()), |mut stream| stream.write_all(&[1]));
    if rank == 0 {
        (1..size).try_for_each(&mut heard)?;
        (1..size).try_for_each(|other| say(other).map_err(|e| failed(other, "is lost", e)))?;
    } else {
        say(0).map_err(|e| failed(0, "is lost", e))?;
        heard(0)?;
    }
    world(rank, peers, limit).map_err(|e| failed(rank, "has no sockets", e))
}

fn world(rank: usize, peers: Vec<Option<UnixStream>>, limit: Duration) -> std::io::Result<World> {
    for peer in peers.iter().flatten() {
        peer.set_read_timeout(Some(limit))?;
        peer.set_write_timeout(Some(limit))?;
    }
    if peers.len() == 1 {
        return Ok(World::alone());
    }
    Ok(World::new(Sockets { rank, peers, limit }))
}

impl Sockets {
    /// The other ranks from the next one on: in round k each rank writes to the k-th after it and reads from the k-th before.
    fn others(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.peers.len());
        (1..size).map(move |k| (rank + k) % size)
    }

    fn peer(&self, rank: usize) -> Result<&UnixStream, Error> {
        self.peers[rank].as_ref().ok_or_else(|| Error::new(rank, "has ended before"))
    }

    fn write(&self, rank: usize, kind: u8, bytes: &[u8]) -> std::io::Result<()> {
        let Some(mut stream) = self.peers[rank].as_ref() else { return Ok(()) };
        let mut header = [kind; 9];
        header[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        if bytes.len() <= SMALL {
            return stream.write_all(&[&header, bytes].concat());
        }
        stream.write_all(&header)?;
        stream.write_all(bytes)
    }

    fn read(&self, rank: usize, kind: u8, into: &mut [u8]) -> Result<(), Error> {
        let lost = |e: std::io::Error| {
            let what = match e.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                    format!(
                        "said nothing for {} s: it hangs, or computes for longer",
                        self.limit.as_secs_f64()
                    )
                }
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                    "ended without a word, as a killed process does".into()
                }
                _ => e.to_string(),
            };
            Error::new(rank, what)
        };
        let mut stream = self.peer(rank)?;
        let mut header = [0; 9];
        stream.read_exact(&mut header).map_err(lost)?;
        let (found, length) = header.split_at(1);
        let length = u64::from_le_bytes(length.try_into().unwrap_or_default());
        if found[0] == ABORT {
            let mut reason = vec![0; usize::try_from(length).unwrap_or(REASON).min(REASON)];
            stream.read_exact(&mut reason).map_err(lost)?;
            let (at_fault, what) = reason.split_at(reason.len().min(8));
            let at_fault = at_fault.try_into().map_or(rank as u64, u64::from_le_bytes);
            let at_fault = usize::try_from(at_fault).unwrap_or(rank);
            return Err(Error {
                told: at_fault == rank,
                ..Error::new(at_fault, String::from_utf8_lossy(what))
            });
        }
        if found[0] != kind || length != into.len() as u64 {
            return Err(Error::new(rank, "is at another place of the run than this one"));
        }
        stream.read_exact(into).map_err(lost)
    }

    /// One message to each and one from each. Large ones are written by another thread meanwhile.
    fn exchange<'a>(
        &self,
        kind: u8,
        out: &(dyn Fn(usize) -> &'a [u8] + Sync),
        into: &mut [&mut [u8]],
    ) -> Result<(), Error> {
        if !into[self.rank].is_empty() {
            into[self.rank].copy_from_slice(out(self.rank));
        }
        // A write that fails says less of the other than a read from it will.
        let write = |this: &Self| this.others().for_each(|rank| drop(this.write(rank, kind, out(rank))));
        let mut read = || self.others().rev().try_for_each(|rank| self.read(rank, kind, into[rank]));
        if self.others().all(|rank| out(rank).len() <= SMALL) {
            write(self);
            return read();
        }
        std::thread::scope(|scope| {
            let writer = std::thread::Builder::new().spawn_scoped(scope, || write(self));
            match writer {
                Ok(_) => read(),
                Err(e) => Err(Error::new(self.rank, format!("has no thread to write with: {e}"))),
            }
        })
    }
}

impl Wire for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn all_to_all(&mut self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<(), Error> {
        self.exchange(ALL_TO_ALL, &|rank| out[rank], into)
    }

    fn all_gather(&mut self, mine: &[u8], into: &mut [&mut [u8]]) -> Result<(), Error> {
        self.exchange(ALL_GATHER, &|_| mine, into)
    }

    fn abort(&mut self, why: &Error) {
        let mut reason = (why.rank as u64).to_le_bytes().to_vec();
        reason.extend(why.what.bytes().take(SMALL));
        for rank in self.others() {
            if let Some(peer) = &self.peers[rank] {
                // Who cannot be told will notice that this rank is gone.
                let _ = peer.set_write_timeout(Some(FAREWELL));
                let _ = self.write(rank, ABORT, &reason);
                let _ = peer.shutdown(Shutdown::Write);
            }
        }
        // No message can follow.
        self.peers.iter_mut().for_each(|peer| *peer = None);
    }
}

//! Ranks with a GPU each: NCCL moves what is large between the devices. Never run on a device yet: see docs/cluster.md.
//!
//! NCCL waits for ever for a rank that is gone, and has no way to meet: both are left to another wire, over which all say that
//! they are there before each exchange and which names who is not.
use crate::{Error, Wire, World};
use cudarc::driver::{CudaContext, CudaSlice, DriverError};
use cudarc::nccl::{Comm, Id, group_end, group_start, result::NcclError};
use std::ffi::c_char;

struct Nccl {
    other: World,
    comm: Comm,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, as `&mut` here makes sure; each use binds the device to its
// thread first.
unsafe impl Send for Nccl {}

/// What is shorter goes over the other wire: a device costs more than it saves.
const SMALL: usize = 64 << 10;

/// The same ranks with `device` of this process between them. Collective: all ranks call it.
pub fn over(other: World, device: usize) -> Result<World, Error> {
    if other.is_alone() {
        return Ok(other);
    }
    let rank = other.rank();
    let id = match other.is_first() {
        true => Id::new().map_err(|e| failed(rank, e))?.internal().map(|byte| byte as u8).to_vec(),
        false => Vec::new(),
    };
    let id: Vec<c_char> = other.broadcast(&id)?.into_iter().map(|byte| byte as c_char).collect();
    let id = id.try_into().map_err(|_| Error::new(0, "tells no communicator of NCCL"))?;
    let stream = CudaContext::new(device).map_err(|e| lost(rank, e))?.default_stream();
    // Whoever has no device has ended by now, and is named.
    other.or(0)?;
    let comm = Comm::from_rank(stream, rank, other.size(), Id::uninit(id)).map_err(|e| failed(rank, e))?;
    Ok(World::new(Nccl { other, comm }))
}

fn failed(rank: usize, e: NcclError) -> Error {
    Error::new(rank, format!("NCCL: {e:?}"))
}

fn lost(rank: usize, e: DriverError) -> Error {
    Error::new(rank, format!("its GPU: {e}"))
}

impl Nccl {
    /// Waits until all are there, and puts this thread to the device.
    fn arrive(&self) -> Result<(), Error> {
        self.other.or(0)?;
        self.comm.context().bind_to_thread().map_err(|e| lost(self.rank(), e))
    }

    /// Memory of the device, one byte at least: it has no empty one.
    fn room(&self, length: usize) -> Result<CudaSlice<u8>, Error> {
        self.comm.stream().alloc_zeros(length.max(1)).map_err(|e| lost(self.rank(), e))
    }

    fn up(&self, bytes: &[u8], room: &mut CudaSlice<u8>) -> Result<(), Error> {
        let mut place = room.slice_mut(..bytes.len());
        self.comm.stream().memcpy_htod(bytes, &mut place).map_err(|e| lost(self.rank(), e))
    }

    /// Done when it returns.
    fn down(&self, room: &CudaSlice<u8>, from: usize, into: &mut [u8]) -> Result<(), Error> {
        let (stream, place) = (self.comm.stream(), room.slice(from..from + into.len()));
        stream.memcpy_dtoh(&place, into).and_then(|()| stream.synchronize()).map_err(|e| lost(self.rank(), e))
    }
}

impl Wire for Nccl {
    fn rank(&self) -> usize {
        self.other.rank()
    }

    fn size(&self) -> usize {
        self.other.size()
    }

    fn all_to_all(&mut self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<(), Error> {
        self.arrive()?;
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (bytes, place) in out.iter().zip(&*into) {
            let mut room = self.room(bytes.len())?;
            self.up(bytes, &mut room)?;
            sent.push(room);
            received.push(self.room(place.len())?);
        }
        let mut exchange = || {
            group_start()?;
            for ((peer, sent), (received, place)) in (0..).zip(&sent).zip(received.iter_mut().zip(&*into)) {
                // The other end knows as well where there is nothing.
                if !out[peer as usize].is_empty() {
                    self.comm.send(sent, peer)?;
                }
                if !place.is_empty() {
                    self.comm.recv(received, peer)?;
                }
            }
            group_end()
        };
        exchange().map_err(|e| failed(self.rank(), e))?;
        into.iter_mut().zip(&received).try_for_each(|(place, room)| self.down(room, 0, place))
    }

    /// All are sent as many bytes as the longest has.
    fn all_gather(&mut self, mine: &[u8], into: &mut [&mut [u8]]) -> Result<(), Error> {
        // This rank's own place may be empty.
        let longest = into.iter().map(|place| place.len()).max().unwrap_or_default().max(mine.len());
        if longest <= SMALL {
            return self.other.line().map_or(Ok(()), |mut line| line.wire.all_gather(mine, into));
        }
        self.arrive()?;
        let (mut sent, mut received) = (self.room(longest)?, self.room(longest * self.size())?);
        self.up(mine, &mut sent)?;
        self.comm.all_gather(&sent, &mut received).map_err(|e| failed(self.rank(), e))?;
        let mut places = into.iter_mut().enumerate();
        places.try_for_each(|(rank, place)| self.down(&received, rank * longest, place))
    }

    fn abort(&mut self, why: &Error) {
        self.other.pass_on(why);
    }
}

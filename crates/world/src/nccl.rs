//! Ranks with a GPU each: NCCL moves numbers between the devices. Never run on a device yet: see docs/cluster.md.
//!
//! NCCL has no way to meet, and waits for ever for a rank that is gone: both are left to the wire that the ranks have. Over it all say
//! that they are there before each exchange, and it names who is not. What one of them does not do after that NCCL waits for.
use crate::{Error, World};
use cudarc::driver::{CudaSlice, CudaStream, CudaView, DriverError};
use cudarc::nccl::{Comm, Id, group_end, group_start, result::NcclError};
use std::ffi::c_char;
use std::sync::Arc;

/// The device of this rank among those of all.
pub(crate) struct Devices(Comm);

// SAFETY: NCCL lets any thread use a communicator, one at a time, as the lock around a world's line makes sure; each use binds the
// device to its thread first.
unsafe impl Send for Devices {}

fn failed(rank: usize, e: NcclError) -> Error {
    Error::new(rank, format!("NCCL: {e:?}"))
}

fn lost(rank: usize, e: DriverError) -> Error {
    Error::new(rank, format!("its GPU: {e}"))
}

impl World {
    /// Gives the ranks, for good, a way from device to device beside the wire that they have; this one's device computes on
    /// `stream`. All ranks call it, each with a device of its own. Nothing where there is one rank, or such a way already.
    pub fn connect_devices(&self, stream: Arc<CudaStream>) -> Result<(), Error> {
        if self.is_alone() || self.has_devices() {
            return Ok(());
        }
        let rank = self.rank();
        let id = match self.is_first() {
            true => Id::new().map_err(|e| failed(rank, e))?.internal().map(|byte| byte as u8).to_vec(),
            false => Vec::new(),
        };
        let id: Vec<c_char> = self.broadcast(&id)?.into_iter().map(|byte| byte as c_char).collect();
        let id = id.try_into().map_err(|_| Error::new(0, "tells no communicator of NCCL"))?;
        stream.context().bind_to_thread().map_err(|e| lost(rank, e))?;
        // Whoever has no device has ended by now, and is named.
        self.or(0)?;
        let comm = Comm::from_rank(stream, rank, self.size(), Id::uninit(id)).map_err(|e| failed(rank, e))?;
        if let Some(mut line) = self.line() {
            line.devices = Some(Devices(comm));
        }
        Ok(())
    }

    /// Whether numbers have a way from device to device.
    pub fn has_devices(&self) -> bool {
        self.line().is_some_and(|line| line.devices.is_some())
    }

    /// `out[r]` goes to rank `r`, and what rank `r` sent here comes into `into[r]`, whose length it has: from device memory into
    /// device memory, in the order of this rank's stream. This rank's own places are not looked at.
    pub fn between_devices(
        &self,
        out: &[Option<CudaView<f32>>],
        into: &mut [Option<CudaSlice<f32>>],
    ) -> Result<(), Error> {
        let rank = self.rank();
        // Whoever is gone is named here.
        self.or(0)?;
        let line = self.line();
        let Some(Devices(comm)) = line.as_ref().and_then(|line| line.devices.as_ref()) else {
            return Err(Error::new(rank, "has no way to the devices of the others"));
        };
        comm.context().bind_to_thread().map_err(|e| lost(rank, e))?;
        let exchange = || {
            group_start()?;
            for (peer, (out, into)) in out.iter().zip(into).enumerate().filter(|(peer, _)| *peer != rank) {
                let peer = i32::try_from(peer).unwrap_or(i32::MAX);
                // The other end knows as well where there is nothing.
                if let Some(out) = out {
                    comm.send(out, peer)?;
                }
                if let Some(into) = into {
                    comm.recv(into, peer)?;
                }
            }
            group_end()
        };
        exchange().map(drop).map_err(|e| failed(rank, e))
    }
}

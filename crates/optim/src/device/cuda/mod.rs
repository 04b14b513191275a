//! Steps on NVIDIA GPUs: one table a step, one launch for all parameters of a dtype.
mod launch;

use crate::device::table::{Bytes, Head, Item, chunks};
use crate::device::{LANES, PARTS, Source};
use crate::driver::Buffers;
use crate::rule::{MAX_BUFFERS, SUMS};
use crate::{Deferred, Result};
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, SyncOnDrop};
use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};
use launch::{BLOCK, Pointer, blocks, borrow_all, float, launch, optional, read};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Parameters of a launch. Borrowing them nests calls, so this bounds the stack (about 1 kB each).
const ROWS: usize = 256;
/// The bytes of a table before its rows: `Head` in step.cu.
const HEAD: u64 = 40;

/// What takes the steps of parameters on one GPU.
pub(crate) struct Engine {
    device: CudaDevice,
    /// `Fault` in step.cu: of the loss, of the norm.
    fault: CudaSlice<u32>,
    /// The tables of the step before, by program and place. Kept, because freeing memory may wait for the device.
    tables: BTreeMap<(String, usize), CudaSlice<u8>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({:?})", self.device.location())
    }
}

/// The state of one parameter: buffer after buffer in one piece of memory.
#[derive(Debug)]
pub(crate) struct State {
    memory: Memory,
    buffers: usize,
    elements: usize,
    device: CudaDevice,
}

#[derive(Debug)]
enum Memory {
    F32(CudaSlice<f32>),
    F64(CudaSlice<f64>),
    /// No buffers, or no elements.
    Empty,
}

impl State {
    fn pointer<'a>(&'a mut self, stream: &'a CudaStream) -> Pointer<'a> {
        match &mut self.memory {
            Memory::F32(slice) => slice.device_ptr_mut(stream),
            Memory::F64(slice) => slice.device_ptr_mut(stream),
            Memory::Empty => (0, SyncOnDrop::Record(None)),
        }
    }

    pub fn download(&self) -> Result<Buffers> {
        fn split<T: Clone>(all: Vec<T>, state: &State) -> Vec<Vec<T>> {
            (0..state.buffers).map(|b| all[b * state.elements..(b + 1) * state.elements].to_vec()).collect()
        }
        Ok(match &self.memory {
            Memory::F32(slice) => Buffers::F32(split(self.device.clone_dtoh(slice)?, self)),
            Memory::F64(slice) => Buffers::F64(split(self.device.clone_dtoh(slice)?, self)),
            Memory::Empty => Buffers::F32(vec![Vec::new(); self.buffers]),
        })
    }
}

impl Engine {
    pub fn new(device: &Device) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        let fault = device.alloc_zeros(2)?;
        Ok(Self { device, fault, tables: BTreeMap::new() })
    }

    pub fn zeros(&self, dtype: DType, buffers: usize, elements: usize) -> Result<State> {
        let memory = match (buffers * elements, dtype) {
            (0, _) => Memory::Empty,
            (n, DType::F64) => Memory::F64(self.device.alloc_zeros(n)?),
            (n, _) => Memory::F32(self.device.alloc_zeros(n)?),
        };
        Ok(State { memory, buffers, elements, device: self.device.clone() })
    }

    pub fn upload(&self, host: &Buffers) -> Result<State> {
        let (buffers, elements) = match host {
            Buffers::F32(b) => (b.len(), b.first().map_or(0, Vec::len)),
            Buffers::F64(b) => (b.len(), b.first().map_or(0, Vec::len)),
            Buffers::Device(state) => return self.upload(&state.download()?),
        };
        let memory = match host {
            _ if buffers * elements == 0 => Memory::Empty,
            Buffers::F64(b) => Memory::F64(self.device.clone_htod(&b.concat())?),
            Buffers::F32(b) => Memory::F32(self.device.clone_htod(&b.concat())?),
            Buffers::Device(_) => Memory::Empty,
        };
        Ok(State { memory, buffers, elements, device: self.device.clone() })
    }

    pub fn step(
        &mut self,
        source: &Source,
        items: &mut [Item],
        head: &Head,
        deferred: &Deferred,
    ) -> Result<()> {
        for (place, items) in items.chunks_mut(ROWS).enumerate() {
            match source.dtype {
                DType::F64 => self.step_of::<f64>(source, place, items, head, deferred)?,
                DType::F16 => self.step_of::<f16>(source, place, items, head, deferred)?,
                DType::BF16 => self.step_of::<bf16>(source, place, items, head, deferred)?,
                _ => self.step_of::<f32>(source, place, items, head, deferred)?,
            }
        }
        Ok(())
    }

    fn step_of<E: CudaDType + 'static>(
        &mut self,
        source: &Source,
        place: usize,
        items: &mut [Item],
        head: &Head,
        deferred: &Deferred,
    ) -> Result<()> {
        let stream = self.device.cuda_stream();
        let params: Vec<Tensor> = items.iter().map(|item| item.param.clone()).collect();
        let guards: Vec<_> = items.iter().map(|item| item.grad.storage_and_layout()).collect();
        let grads = guards.iter().map(|(storage, layout)| read::<E>(storage, layout, &stream));
        let grads = grads.collect::<candle_core::Result<Vec<_>>>()?;
        let mut states = Vec::with_capacity(items.len());
        let mut numbers = Vec::with_capacity(items.len());
        for Item { grad, state, scalars, start, offset, .. } in items.iter_mut() {
            states.push(state.pointer(&stream));
            let elements = grad.elem_count();
            numbers.push(Numbers { elements, first_chunk: 0, offset: *offset, start: *start, scalars });
        }
        let max_norm = deferred.clip_norm.as_ref().map_or(0.0, |(_, max)| *max);
        let longest = numbers.iter().map(|n| n.elements).max().unwrap_or(0);

        let (device, fault, tables) = (&self.device, &mut self.fault, &mut self.tables);
        let mut launch_all = |params: Vec<Pointer>| {
            let pointers = params.iter().zip(&grads).zip(&states).map(|((x, g), s)| [x.0, g.0, s.0]);
            let bytes = table(source, head, max_norm, pointers, &numbers);
            let (at, _table) = upload(tables, (source.prefix(), place), &bytes, &stream)?;
            let (fault, _fault) = fault.device_ptr_mut(&stream);
            let (rows, count) = (at + HEAD, params.len() as u32);
            if deferred.loss.is_some() || deferred.clip_norm.is_some() {
                let loss = deferred.loss.as_ref().map(float).transpose()?;
                let loss = loss.as_ref().map(Tensor::storage_and_layout);
                let loss32 = optional::<f32>(&loss, DType::F32, &stream)?;
                let loss64 = optional::<f64>(&loss, DType::F64, &stream)?;
                let norm =
                    deferred.clip_norm.as_ref().map(|(norm, _)| norm.to_dtype(DType::F64)).transpose()?;
                let norm = norm.as_ref().map(Tensor::storage_and_layout);
                let norm = optional::<f64>(&norm, DType::F64, &stream)?;
                let args = [at, rows, loss32.0, loss64.0, norm.0, fault];
                launch(device, source, "begin", (count.div_ceil(BLOCK), 1, BLOCK), &args)?;
            }
            launch(device, source, "step", (blocks(longest), count, BLOCK), &[at, rows, fault])
        };
        Ok(borrow_all::<E>(&params, Vec::new(), &stream, &mut launch_all)?)
    }

    pub fn reduce(&mut self, source: &Source, items: &mut [Item], head: &Head) -> Result<[f64; SUMS]> {
        let totals = match source.dtype {
            DType::F64 => self.reduce_of::<f64>(source, items, head)?,
            DType::F16 => self.reduce_of::<f16>(source, items, head)?,
            DType::BF16 => self.reduce_of::<bf16>(source, items, head)?,
            _ => self.reduce_of::<f32>(source, items, head)?,
        };
        let host = self.device.clone_dtoh(&totals)?;
        let mut sums = [0.0; SUMS];
        sums.copy_from_slice(&host);
        Ok(sums)
    }

    fn reduce_of<E: CudaDType + 'static>(
        &mut self,
        source: &Source,
        items: &mut [Item],
        head: &Head,
    ) -> Result<CudaSlice<f64>> {
        let stream = self.device.cuda_stream();
        let params: Vec<Tensor> = items.iter().map(|item| item.param.clone()).collect();
        let grads: Vec<Tensor> = items.iter().map(|item| item.grad.clone()).collect();
        let scalars = items.first().map_or(1, |item| item.scalars.len());
        let states: Vec<Pointer> = items.iter_mut().map(|item| item.state.pointer(&stream)).collect();
        totals::<E>(&self.device, source, &params, &grads, &states, scalars, head)
    }

    /// The first step whose loss, and the first whose norm, was refused on the device; 0 for none.
    pub fn faults(&self) -> Result<(u32, u32)> {
        let words = self.device.clone_dtoh(&self.fault)?;
        Ok((words[0], words[1]))
    }

    pub fn clear_faults(&mut self) -> Result<()> {
        self.fault = self.device.alloc_zeros(2)?;
        Ok(())
    }
}

/// The norm of gradients of one dtype, which nobody waits for.
pub(crate) fn norm(grads: &[Tensor]) -> Result<Tensor> {
    let Some(first) = grads.first() else { return Ok(Tensor::new(0f64, &Device::Cpu)?) };
    let device = first.device().as_cuda_device()?;
    let source = Source::norm(first.dtype());
    let head = Head { scale: 1.0, limit: f64::INFINITY, step: 0 };
    let states: Vec<Pointer> = grads.iter().map(|_| (0, SyncOnDrop::Record(None))).collect();
    let totals = match source.dtype {
        DType::F64 => totals::<f64>(device, &source, grads, grads, &states, 1, &head)?,
        DType::F16 => totals::<f16>(device, &source, grads, grads, &states, 1, &head)?,
        DType::BF16 => totals::<bf16>(device, &source, grads, grads, &states, 1, &head)?,
        _ => totals::<f32>(device, &source, grads, grads, &states, 1, &head)?,
    };
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(totals, device.clone()));
    Ok(Tensor::from_storage(storage, (), BackpropOp::none(), false))
}

/// The sums of a program that reduces, on the device.
fn totals<E: CudaDType + 'static>(
    device: &CudaDevice,
    source: &Source,
    params: &[Tensor],
    grads: &[Tensor],
    states: &[Pointer],
    scalars: usize,
    head: &Head,
) -> Result<CudaSlice<f64>> {
    let stream = device.cuda_stream();
    let guards: Vec<_> = params.iter().chain(grads).map(Tensor::storage_and_layout).collect();
    let pointers = guards.iter().map(|(storage, layout)| read::<E>(storage, layout, &stream));
    let pointers = pointers.collect::<candle_core::Result<Vec<_>>>()?;
    let (xs, gs) = pointers.split_at(params.len());
    // A reduction comes before there are scalars; a row has room for them.
    let scalars = vec![0.0; scalars];
    let mut first_chunk = 0;
    let mut numbers = Vec::with_capacity(grads.len());
    for grad in grads {
        let elements = grad.elem_count();
        numbers.push(Numbers { elements, first_chunk, offset: 0.0, start: None, scalars: &scalars });
        first_chunk += chunks(elements);
    }
    let longest = numbers.iter().map(|n| n.elements).max().unwrap_or(0);
    let rows = xs.iter().zip(gs).zip(states).map(|((x, g), s)| [x.0, g.0, s.0]);
    let mut table = device.clone_htod(&table(source, head, 0.0, rows, &numbers))?;

    let scratch = first_chunk.max(1) * SUMS;
    let mut lanes = device.alloc_zeros::<f64>(scratch * PARTS * LANES)?;
    let mut sums = device.alloc_zeros::<f64>(scratch)?;
    let mut totals = device.alloc_zeros::<f64>(SUMS)?;
    {
        let (at, _table) = table.device_ptr_mut(&stream);
        let (lanes, _lanes) = lanes.device_ptr_mut(&stream);
        let (sums, _sums) = sums.device_ptr_mut(&stream);
        let (totals, _totals) = totals.device_ptr_mut(&stream);
        let (rows, count) = (at + HEAD, grads.len() as u32);
        let of_lanes = (blocks(chunks(longest) * PARTS * LANES), count, BLOCK);
        launch(device, source, "lanes", of_lanes, &[at, rows, lanes])?;
        let of_chunks = (blocks(chunks(longest)), count, BLOCK);
        launch(device, source, "chunks", of_chunks, &[rows, lanes, sums])?;
        launch(device, source, "total", (1, 1, 1), &[at, rows, sums, totals])?;
    }
    Ok(totals)
}

/// What a row has beside its pointers.
struct Numbers<'a> {
    elements: usize,
    first_chunk: usize,
    offset: f64,
    start: Option<[f64; MAX_BUFFERS]>,
    scalars: &'a [f64],
}

/// `Head` and `Row`s as step.cu declares them.
fn table(
    source: &Source,
    head: &Head,
    max_norm: f64,
    pointers: impl Iterator<Item = [u64; 3]>,
    numbers: &[Numbers],
) -> Vec<u8> {
    let double = source.dtype == DType::F64;
    let mut bytes = Bytes::default();
    for number in [head.scale, head.limit, max_norm] {
        bytes.f64(number);
    }
    bytes.u64(numbers.len() as u64);
    bytes.u64(u64::from(head.step));
    for (pointers, numbers) in pointers.zip(numbers) {
        pointers.into_iter().for_each(|at| bytes.u64(at));
        bytes.u64(numbers.elements as u64);
        bytes.u64(numbers.first_chunk as u64);
        bytes.f64(numbers.offset);
        let start = numbers.start.unwrap_or_default();
        start[..source.buffers.max(1)].iter().for_each(|value| bytes.real(double, *value));
        numbers.scalars.iter().for_each(|value| bytes.real(double, *value));
        bytes.u32(u32::from(numbers.start.is_some()));
        bytes.pad();
    }
    bytes.0
}

/// Copies a table into the memory of the one before it.
fn upload<'a>(
    tables: &'a mut BTreeMap<(String, usize), CudaSlice<u8>>,
    key: (String, usize),
    bytes: &[u8],
    stream: &'a Arc<CudaStream>,
) -> candle_core::Result<Pointer<'a>> {
    let table = match tables.entry(key) {
        Entry::Occupied(entry) if entry.get().len() == bytes.len() => {
            let table = entry.into_mut();
            stream.memcpy_htod(bytes, table).w()?;
            table
        }
        Entry::Occupied(entry) => {
            let table = entry.into_mut();
            *table = stream.clone_htod(bytes).w()?;
            table
        }
        Entry::Vacant(entry) => entry.insert(stream.clone_htod(bytes).w()?),
    };
    Ok(table.device_ptr_mut(stream))
}

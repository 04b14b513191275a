//! Steps on Apple GPUs: a dispatch for every parameter, all in one command buffer.
//!
//! candle's encoder keeps kernels apart that touch the same buffer, if it is told which they read and which they write.
use crate::device::table::{Bytes, Head, Item, chunks};
use crate::device::{LANES, PARTS, Source};
use crate::driver::Buffers;
use crate::rule::{MAX_BUFFERS, SUMS};
use crate::{Deferred, Error, Result};
use candle_core::{DType, Device, Layout, MetalDevice, MetalStorage, Storage, Tensor};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder, ComputePipeline};
use objc2_metal::{MTLCompileOptions, MTLSize};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads of a group.
const GROUP: usize = 256;
/// Groups that share the elements of one parameter.
const GROUPS: usize = 1024;
/// The bytes of a table before its rows: `Head` in step.metal.
const HEAD: usize = 20;

/// What takes the steps of parameters on one GPU.
#[derive(Debug)]
pub(crate) struct Engine {
    device: MetalDevice,
    /// `Fault` in step.metal: of the loss, of the norm.
    fault: Tensor,
}

/// The state of one parameter, buffer after buffer; `None` for no buffers or no elements.
#[derive(Debug)]
pub(crate) struct State {
    all: Option<Tensor>,
    buffers: usize,
}

impl State {
    pub fn download(&self) -> Result<Buffers> {
        Ok(Buffers::F32(match &self.all {
            Some(all) => all.to_device(&Device::Cpu)?.to_vec2()?,
            None => vec![Vec::new(); self.buffers],
        }))
    }
}

impl Engine {
    pub fn new(device: &Device) -> Result<Self> {
        let fault = Tensor::zeros(2, DType::U32, device)?;
        Ok(Self { device: device.as_metal_device()?.clone(), fault })
    }

    fn place(&self) -> Device {
        Device::Metal(self.device.clone())
    }

    pub fn zeros(&self, dtype: DType, buffers: usize, elements: usize) -> Result<State> {
        if dtype == DType::F64 {
            return Err(Error::NoKernels("f64 parameters on Metal, which has no f64".into()));
        }
        // Kernels count in 32 bits.
        if u32::try_from(buffers.max(1) * elements).is_err() {
            return Err(Error::NoKernels(format!("a parameter of {elements} elements on Metal")));
        }
        let all = match buffers * elements {
            0 => None,
            _ => Some(Tensor::zeros((buffers, elements), DType::F32, &self.place())?),
        };
        Ok(State { all, buffers })
    }

    pub fn upload(&self, host: &Buffers) -> Result<State> {
        let host = match host {
            Buffers::F32(host) => host,
            Buffers::F64(_) => return self.zeros(DType::F64, 0, 0),
            Buffers::Device(state) => return self.upload(&state.download()?),
        };
        let (buffers, elements) = (host.len(), host.first().map_or(0, Vec::len));
        let all = match buffers * elements {
            0 => None,
            _ => Some(Tensor::from_vec(host.concat(), (buffers, elements), &self.place())?),
        };
        Ok(State { all, buffers })
    }

    pub fn step(
        &mut self,
        source: &Source,
        items: &mut [Item],
        head: &Head,
        deferred: &Deferred,
    ) -> Result<()> {
        let max_norm = deferred.clip_norm.as_ref().map_or(0.0, |(_, max)| *max);
        let numbers: Vec<Numbers> = items
            .iter()
            .map(|Item { grad, scalars, start, offset, .. }| Numbers {
                elements: grad.elem_count(),
                first_chunk: 0,
                offset: *offset,
                start: *start,
                scalars,
            })
            .collect();
        let (bytes, row) = table(source, head, max_norm, &numbers);
        let table = self.device.new_buffer_with_data(&bytes)?;
        let scalar = |t: &Tensor| t.to_dtype(DType::F32);
        let loss = deferred.loss.as_ref().map(scalar).transpose()?;
        let norm = deferred.clip_norm.as_ref().map(|(norm, _)| scalar(norm)).transpose()?;
        let step = pipeline(&self.device, source, "step")?;
        let begin = pipeline(&self.device, source, "begin")?;

        let fault = At::of(&self.fault);
        let guard = self.device.command_encoder()?;
        let encoder: &ComputeCommandEncoder = guard.as_ref();
        if loss.is_some() || norm.is_some() {
            let given = u32::from(loss.is_some()) | (u32::from(norm.is_some()) << 1);
            encoder.set_compute_pipeline_state(&begin);
            changed(encoder, 0, &table, 0);
            changed(encoder, 1, &table, HEAD);
            // One that is not given is not looked at; something must be bound all the same.
            let [loss, norm] = [&loss, &norm].map(|t| At::of(t.as_ref().unwrap_or(&self.fault)));
            loss.read(encoder, 2)?;
            norm.read(encoder, 3)?;
            fault.change(encoder, 4)?;
            encoder.set_bytes(5, &given);
            dispatch(encoder, items.len());
        }
        encoder.set_compute_pipeline_state(&step);
        for (i, (item, numbers)) in items.iter().zip(&numbers).enumerate() {
            if numbers.elements == 0 {
                continue;
            }
            encoder.set_input_buffer(0, Some(&table), 0);
            encoder.set_input_buffer(1, Some(&table), HEAD + i * row);
            fault.read(encoder, 2)?;
            At::of(&item.param).change(encoder, 3)?;
            At::of(item.grad).read(encoder, 4)?;
            // A program without buffers does not look at them.
            let state = item.state.all.as_ref();
            state.map_or(At::of(&self.fault).read(encoder, 5), |state| At::of(state).change(encoder, 5))?;
            dispatch(encoder, numbers.elements);
        }
        Ok(())
    }

    pub fn reduce(&mut self, source: &Source, items: &mut [Item], head: &Head) -> Result<[f64; SUMS]> {
        let rows = items.iter().map(|item| (&item.param, item.grad, item.state.all.as_ref()));
        let scalars = items.first().map_or(1, |item| item.scalars.len());
        let sums = totals(&self.device, source, &rows.collect::<Vec<_>>(), scalars, head)?;
        let mut wide = [0.0; SUMS];
        wide.iter_mut().zip(sums.to_vec1::<f32>()?).for_each(|(wide, sum)| *wide = f64::from(sum));
        Ok(wide)
    }

    /// The first step whose loss, and the first whose norm, was refused on the device; 0 for none.
    pub fn faults(&self) -> Result<(u32, u32)> {
        let words = self.fault.to_vec1::<u32>()?;
        Ok((words[0], words[1]))
    }

    pub fn clear_faults(&mut self) -> Result<()> {
        self.fault = Tensor::zeros(2, DType::U32, &self.place())?;
        Ok(())
    }
}

/// The norm of gradients of one dtype, which nobody waits for.
pub(crate) fn norm(grads: &[Tensor]) -> Result<Tensor> {
    let Some(first) = grads.first() else { return Ok(Tensor::new(0f32, &Device::Cpu)?) };
    let device = first.device().as_metal_device()?;
    let source = Source::norm(first.dtype());
    let rows: Vec<_> = grads.iter().map(|grad| (grad, grad, None)).collect();
    let sums = totals(device, &source, &rows, 1, &Head { scale: 1.0, limit: f64::INFINITY, step: 0 })?;
    Ok(sums.get(0)?)
}

/// The sums of a program that reduces over (parameter, gradient, state), on the device.
fn totals(
    device: &MetalDevice,
    source: &Source,
    rows: &[(&Tensor, &Tensor, Option<&Tensor>)],
    scalars: usize,
    head: &Head,
) -> Result<Tensor> {
    // A reduction comes before there are scalars; a row has room for them.
    let scalars = vec![0.0; scalars];
    let mut first_chunk = 0;
    let mut numbers = Vec::with_capacity(rows.len());
    for (_, grad, _) in rows {
        let elements = grad.elem_count();
        numbers.push(Numbers { elements, first_chunk, offset: 0.0, start: None, scalars: &scalars });
        first_chunk += chunks(elements);
    }
    let (bytes, row) = table(source, head, 0.0, &numbers);
    let table = device.new_buffer_with_data(&bytes)?;
    let scratch = first_chunk.max(1) * SUMS;
    let lanes = device.new_buffer(scratch * PARTS * LANES, DType::F32, "lanes")?;
    let sums = device.new_buffer(scratch, DType::F32, "sums")?;
    let totals = Tensor::zeros(SUMS, DType::F32, &Device::Metal(device.clone()))?;
    let [by_lanes, by_chunks, by_total] =
        ["lanes", "chunks", "total"].map(|kernel| pipeline(device, source, kernel));
    let (by_lanes, by_chunks, by_total) = (by_lanes?, by_chunks?, by_total?);

    let guard = device.command_encoder()?;
    let encoder: &ComputeCommandEncoder = guard.as_ref();
    encoder.set_compute_pipeline_state(&by_lanes);
    let filled = || numbers.iter().enumerate().filter(|(_, numbers)| numbers.elements > 0);
    for (i, numbers) in filled() {
        let (param, grad, state) = rows[i];
        encoder.set_input_buffer(0, Some(&table), 0);
        encoder.set_input_buffer(1, Some(&table), HEAD + i * row);
        encoder.set_output_buffer(2, Some(&lanes), 0);
        At::of(param).read(encoder, 3)?;
        At::of(grad).read(encoder, 4)?;
        At::of(state.unwrap_or(grad)).read(encoder, 5)?;
        dispatch(encoder, chunks(numbers.elements) * PARTS * LANES);
    }
    encoder.set_compute_pipeline_state(&by_chunks);
    for (i, numbers) in filled() {
        encoder.set_input_buffer(0, Some(&table), HEAD + i * row);
        encoder.set_input_buffer(1, Some(&lanes), 0);
        encoder.set_output_buffer(2, Some(&sums), 0);
        dispatch(encoder, chunks(numbers.elements));
    }
    encoder.set_compute_pipeline_state(&by_total);
    encoder.set_input_buffer(0, Some(&table), 0);
    encoder.set_input_buffer(1, Some(&table), HEAD);
    encoder.set_input_buffer(2, Some(&sums), 0);
    At::of(&totals).change(encoder, 3)?;
    dispatch(encoder, 1);
    drop(guard);
    Ok(totals)
}

/// What a row has.
struct Numbers<'a> {
    elements: usize,
    first_chunk: usize,
    offset: f64,
    start: Option<[f64; MAX_BUFFERS]>,
    scalars: &'a [f64],
}

/// `Head` and `Row`s as step.metal declares them, and the bytes of a row.
fn table(source: &Source, head: &Head, max_norm: f64, numbers: &[Numbers]) -> (Vec<u8>, usize) {
    let mut bytes = Bytes::default();
    for number in [head.scale, head.limit, max_norm] {
        bytes.f32(number);
    }
    bytes.u32(numbers.len() as u32);
    bytes.u32(head.step);
    let mut row = 0;
    for numbers in numbers {
        let start_of_row = bytes.0.len();
        bytes.u32(numbers.elements as u32);
        bytes.u32(numbers.first_chunk as u32);
        bytes.u32(u32::from(numbers.start.is_some()));
        bytes.f32(numbers.offset);
        let start = numbers.start.unwrap_or_default();
        start[..source.buffers.max(1)].iter().for_each(|value| bytes.f32(*value));
        numbers.scalars.iter().for_each(|value| bytes.f32(*value));
        row = bytes.0.len() - start_of_row;
    }
    (bytes.0, row)
}

/// The elements of a contiguous tensor.
struct At<G>(G, usize);

impl<'a> At<(Box<dyn Deref<Target = Storage> + 'a>, &'a Layout)> {
    fn of(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        let bytes = layout.start_offset() * tensor.dtype().size_in_bytes();
        Self((Box::new(storage), layout), bytes)
    }

    fn storage(&self) -> Result<&MetalStorage> {
        match &**self.0.0 {
            Storage::Metal(storage) => Ok(storage),
            _ => Err(Error::NoKernels("a tensor that is not on Metal".into())),
        }
    }

    fn read(&self, encoder: &ComputeCommandEncoder, index: usize) -> Result<()> {
        encoder.set_input_buffer(index, Some(self.storage()?.buffer()), self.1);
        Ok(())
    }

    fn change(&self, encoder: &ComputeCommandEncoder, index: usize) -> Result<()> {
        changed(encoder, index, self.storage()?.buffer(), self.1);
        Ok(())
    }
}

/// Binds a buffer that is read and written.
fn changed(encoder: &ComputeCommandEncoder, index: usize, buffer: &Buffer, offset: usize) {
    encoder.set_input_buffer(index, Some(buffer), offset);
    encoder.set_output_buffer(index, Some(buffer), offset);
}

fn dispatch(encoder: &ComputeCommandEncoder, threads: usize) {
    let size = |width| MTLSize { width, height: 1, depth: 1 };
    encoder.dispatch_thread_groups(size(threads.div_ceil(GROUP).clamp(1, GROUPS)), size(GROUP));
}

/// A compiled kernel.
struct Compiled {
    device: u64,
    source: Source,
    kernel: &'static str,
    pipeline: ComputePipeline,
}

/// A kernel of the program of `source`, compiled once a process.
fn pipeline(device: &MetalDevice, source: &Source, kernel: &'static str) -> Result<ComputePipeline> {
    static PIPELINES: Mutex<Vec<Arc<Compiled>>> = Mutex::new(Vec::new());
    let (metal, id) = (device.metal_device(), device.metal_device().registry_id());
    let mut pipelines = PIPELINES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |c: &&Arc<Compiled>| c.device == id && c.source == *source && c.kernel == kernel;
    if let Some(known) = pipelines.iter().find(known) {
        return Ok(known.pipeline.clone());
    }
    let options = MTLCompileOptions::new();
    // Correctly rounded, with NaN and infinity. The newer name of this option is missing before macOS 15.
    #[allow(deprecated)]
    options.setFastMathEnabled(false);
    let library = metal.new_library_with_source(&source.metal(), Some(&options)).map_err(failed)?;
    let function = library.get_function(&format!("{}_{kernel}", source.prefix()), None).map_err(failed)?;
    let pipeline = metal.new_compute_pipeline_state_with_function(&function).map_err(failed)?;
    pipelines.push(Arc::new(Compiled { device: id, source: *source, kernel, pipeline: pipeline.clone() }));
    Ok(pipeline)
}

fn failed(e: candle_metal_kernels::MetalKernelError) -> Error {
    Error::Candle(candle_core::Error::wrap(e))
}

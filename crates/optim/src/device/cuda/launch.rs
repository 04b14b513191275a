//! From a program and its arguments to a launch: compiled modules, addresses of tensors, locks.
use crate::device::{CUDA_OPTIONS, Source, digest};
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg, SyncOnDrop,
};
use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Storage, Tensor};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads of a block.
pub(super) const BLOCK: u32 = 256;
/// Blocks that share the elements of one parameter: enough to fill a GPU with a single large one.
const BLOCKS: usize = 1024;

/// A device address, and what orders other streams after our use of it.
pub(super) type Pointer<'a> = (u64, SyncOnDrop<'a>);

pub(super) fn blocks(threads: usize) -> u32 {
    threads.div_ceil(BLOCK as usize).clamp(1, BLOCKS) as u32
}

/// Launches a kernel whose arguments are all pointers.
pub(super) fn launch(
    device: &CudaDevice,
    source: &Source,
    kernel: &str,
    (blocks, rows, threads): (u32, u32, u32),
    args: &[u64],
) -> candle_core::Result<()> {
    let module = module(device, source)?;
    let name = format!("{}_{kernel}", source.prefix());
    let function = device.get_or_load_custom_func(&name, &module.name, &module.ptx)?;
    let mut builder = function.builder();
    for arg in args {
        builder.arg(arg);
    }
    let grid = LaunchConfig { grid_dim: (blocks, rows, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernels take pointers only, as many as given, to memory that the caller holds; their tables are made by
    // `table`, and no kernel goes beyond the lengths in it.
    unsafe { builder.launch(grid) }.w()?;
    Ok(())
}

/// A compiled program.
struct Module {
    source: Source,
    /// What it was compiled for.
    generation: (i32, i32),
    name: String,
    ptx: String,
}

/// The program of `source` for the device's generation, compiled once a process.
fn module(device: &CudaDevice, source: &Source) -> candle_core::Result<Arc<Module>> {
    static MODULES: Mutex<Vec<Arc<Module>>> = Mutex::new(Vec::new());
    let generation = device.cuda_stream().context().compute_capability().w()?;
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = modules.iter().find(|m| m.source == *source && m.generation == generation) {
        return Ok(known.clone());
    }
    let text = source.cuda();
    let compile = |arch: Option<String>| {
        let options = CUDA_OPTIONS.iter().map(ToString::to_string).chain(arch).collect();
        compile_ptx_with_opts(&text, CompileOptions { options, ..Default::default() })
    };
    let (major, minor) = generation;
    // A toolkit older than the GPU does not know its name; the driver translates what it makes by default.
    let ptx = compile(Some(format!("--gpu-architecture=compute_{major}{minor}")));
    let ptx = ptx.or_else(|e| compile(None).map_err(|_| e)).w()?.to_src();
    let name = format!("taper-{}-{major}{minor}-{}", source.prefix(), digest(&text));
    let module = Arc::new(Module { source: *source, generation, name, ptx });
    modules.push(module.clone());
    Ok(module)
}

/// The address of a contiguous tensor's elements, to read.
pub(super) fn read<'a, E: CudaDType + 'static>(
    storage: &'a Storage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> candle_core::Result<Pointer<'a>> {
    let Storage::Cuda(storage) = storage else { candle_core::bail!("expected a tensor on a CUDA device") };
    let (at, order) = storage.as_cuda_slice::<E>()?.device_ptr(stream);
    Ok((at + (layout.start_offset() * size_of::<E>()) as u64, order))
}

/// The address of a scalar if it is there and of that dtype, else 0.
pub(super) fn optional<'a, E: CudaDType + 'static>(
    scalar: &'a Option<(impl Deref<Target = Storage>, &Layout)>,
    dtype: DType,
    stream: &'a CudaStream,
) -> candle_core::Result<Pointer<'a>> {
    match scalar {
        Some((storage, layout)) if storage.dtype() == dtype => read::<E>(storage, layout, stream),
        _ => Ok((0, SyncOnDrop::Record(None))),
    }
}

/// In a precision that `begin` reads.
pub(super) fn float(loss: &Tensor) -> candle_core::Result<Tensor> {
    if loss.dtype() == DType::F64 { Ok(loss.clone()) } else { loss.to_dtype(DType::F32) }
}

/// Holds the write locks of all `vars` at once and calls `f` with their addresses; see the CPU's `borrow_all`.
pub(super) fn borrow_all<E: CudaDType + 'static>(
    vars: &[Tensor],
    held: Vec<Pointer<'_>>,
    stream: &CudaStream,
    f: &mut dyn FnMut(Vec<Pointer>) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let Some((var, rest)) = vars.split_first() else { return f(held) };
    let next = move |pointer: Pointer<'_>| {
        let mut held: Vec<Pointer<'_>> = held;
        held.push(pointer);
        borrow_all::<E>(rest, held, stream, f)
    };
    var.inplace_op1(&Borrow { next: Cell::new(Some(Box::new(next))), stream, element: PhantomData::<E> })
}

type Borrower<'f> = Box<dyn FnOnce(Pointer<'_>) -> candle_core::Result<()> + 'f>;

struct Borrow<'f, E> {
    next: Cell<Option<Borrower<'f>>>,
    stream: &'f CudaStream,
    element: PhantomData<E>,
}

impl<E: CudaDType + 'static> InplaceOp1 for Borrow<'_, E> {
    fn name(&self) -> &'static str {
        "borrow-parameter"
    }
    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("expected a parameter on a CUDA device")
    }
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let (Some((start, _)), Some(next)) = (layout.contiguous_offsets(), self.next.take()) else {
            candle_core::bail!("expected a contiguous parameter, found strides {:?}", layout.stride())
        };
        let (at, order) = storage.as_cuda_slice_mut::<E>()?.device_ptr_mut(self.stream);
        next((at + (start * size_of::<E>()) as u64, order))
    }
}

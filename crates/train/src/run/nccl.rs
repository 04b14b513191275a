//! Sums over the GPUs of all processes, in the order of the tree: NCCL moves the numbers, candle adds them up.
use super::RunError;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Storage, Tensor};
use std::ops::Range;
use taper_world::{Tree, World};

/// The sum of `length` numbers over the leaves of a tree, as [`World::sum`] takes it: each process adds up a slice and sends it to
/// all.
pub(super) fn sum(
    world: &World,
    tree: &Tree,
    mine: &[Tensor],
    length: usize,
    device: &CudaDevice,
) -> Result<Tensor, RunError> {
    let (me, ranks) = (world.rank(), 0..world.size());
    let spans: Vec<Vec<Range<usize>>> =
        ranks.clone().map(|rank| tree.spans(world.share_of(rank, tree.leaves()))).collect();
    let slices: Vec<Range<usize>> = ranks.clone().map(|rank| world.share_of(rank, length)).collect();
    let own = &slices[me];

    let of = |slice: &Range<usize>| {
        let parts = mine.iter().map(|part| part.narrow(0, slice.start, slice.len()));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        if parts.is_empty() || slice.is_empty() { Ok(None) } else { Tensor::cat(&parts, 0).map(Some) }
    };
    let out = slices.iter().map(of).collect::<candle_core::Result<Vec<_>>>()?;
    let lengths: Vec<usize> = spans.iter().map(|spans| spans.len() * own.len()).collect();
    let heard = exchange(world, &out, &lengths, device)?;

    let mut find = |node: &Range<usize>| {
        let held = |(rank, spans): (usize, &Vec<Range<usize>>)| {
            Some((rank, spans.iter().position(|span| span == node)?))
        };
        let found = spans.iter().enumerate().find_map(held);
        let from = |(rank, part): (usize, usize)| match &heard[rank] {
            Some(heard) => heard.narrow(0, part * own.len(), own.len()),
            None => mine[part].narrow(0, own.start, own.len()),
        };
        Ok::<_, RunError>(found.map(from))
    };
    let mut add = |a: candle_core::Result<Tensor>, b: candle_core::Result<Tensor>| a? + b?;
    let sum = match own.is_empty() {
        true => None,
        false => match tree.fold(0..tree.leaves(), &mut find, &mut add)? {
            Some(sum) => Some(sum?),
            None => Some(Tensor::zeros(own.len(), DType::F32, &Device::Cuda(device.clone()))?),
        },
    };

    let lengths: Vec<usize> = slices.iter().map(Range::len).collect();
    let mut all = exchange(world, &vec![sum.clone(); world.size()], &lengths, device)?;
    all[me] = sum;
    Ok(Tensor::cat(&all.into_iter().flatten().collect::<Vec<_>>(), 0)?)
}

/// What each other process sent here of a length that is known; nothing from this one, and where nothing is sent.
fn exchange(
    world: &World,
    out: &[Option<Tensor>],
    lengths: &[usize],
    device: &CudaDevice,
) -> Result<Vec<Option<Tensor>>, RunError> {
    let held: Vec<_> = out.iter().map(|tensor| tensor.as_ref().map(Tensor::storage_and_layout)).collect();
    let mut views = Vec::new();
    for (held, tensor) in held.iter().zip(out) {
        views.push(match (held, tensor) {
            (Some((storage, layout)), Some(tensor)) => match &**storage {
                Storage::Cuda(storage) => {
                    let start = layout.start_offset();
                    Some(storage.as_cuda_slice::<f32>()?.slice(start..start + tensor.elem_count()))
                }
                _ => return Err(candle_core::Error::msg("numbers of a GPU's sum are not there").into()),
            },
            _ => None,
        });
    }
    let mut into = Vec::new();
    for (rank, length) in lengths.iter().enumerate() {
        let wanted = rank != world.rank() && *length > 0;
        into.push(if wanted { Some(device.alloc_zeros::<f32>(*length)?) } else { None });
    }
    world.between_devices(&views, &mut into)?;
    let tensor = |(slice, length): (Option<_>, &usize)| {
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice?, device.clone()));
        Some(Tensor::from_storage(storage, *length, BackpropOp::none(), false))
    };
    Ok(into.into_iter().zip(lengths).map(tensor).collect())
}

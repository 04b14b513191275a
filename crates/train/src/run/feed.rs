//! Images on their way to a GPU: bytes are copied, and the device makes normalised numbers of them.
//!
//! A quarter of the copying, and on CUDA from pinned memory, so that nobody waits for it. The worker thread of
//! the [pipeline](taper_data::ImagePipeline) has cropped and mirrored the bytes ahead of the step.
use candle_core::{DType, Device, Result, Tensor};
use std::sync::{Mutex, PoisonError};
use taper_data::{ByteBatch, ImagePipeline, Mix};

/// The way of images of one size and normalisation to one device.
pub(crate) struct Feed {
    device: Device,
    /// Rows, columns, channels.
    dims: (usize, usize, usize),
    /// The normalised value of every byte of every channel: looked up, a byte has the bits that it has on the CPU.
    table: Tensor,
    /// Where in the table each channel begins.
    channels: Tensor,
    stage: Mutex<Stage>,
}

impl Feed {
    pub fn new(images: &ImagePipeline, device: &Device) -> Result<Self> {
        let dims = images.shape();
        Ok(Self {
            device: device.clone(),
            dims,
            table: Tensor::new(images.table(), device)?,
            channels: Tensor::from_iter((0..dims.2 as u32).map(|channel| 256 * channel), device)?,
            stage: Mutex::default(),
        })
    }

    /// The images of a batch, `[n, rows, columns, channels]`, in f32.
    pub fn images(&self, batch: &ByteBatch) -> Result<Tensor> {
        let (n, (h, w, c)) = (batch.n, self.dims);
        let bytes = self.upload(&batch.pixels)?.reshape((n * h * w, c))?;
        let places = bytes.to_dtype(DType::U32)?.broadcast_add(&self.channels)?;
        let mut images = self.table.index_select(&places.flatten_all()?, 0)?.reshape((n, h, w, c))?;
        if !batch.kept.is_empty() {
            // The mean, to which pixels are blanked, is 0.
            let kept = self.upload(&batch.kept)?.reshape((n, h, w, 1))?.to_dtype(DType::F32)?;
            images = images.broadcast_mul(&kept)?;
        }
        if let Some((Mix { part, .. }, partners)) = &batch.mix {
            let others = images.index_select(&Tensor::new(partners.as_slice(), &self.device)?, 0)?;
            let own = images.affine(f64::from(*part), 0.0)?;
            images = (own + others.affine(f64::from(1.0 - part), 0.0)?)?;
        }
        Ok(images)
    }

    fn upload(&self, bytes: &[u8]) -> Result<Tensor> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner).upload(bytes, &self.device)
    }
}

/// Where bytes lie while they are copied.
#[cfg(not(feature = "cuda"))]
#[derive(Default)]
struct Stage;

#[cfg(not(feature = "cuda"))]
impl Stage {
    fn upload(&mut self, bytes: &[u8], device: &Device) -> Result<Tensor> {
        Tensor::from_slice(bytes, bytes.len(), device)
    }
}

#[cfg(feature = "cuda")]
use pinned::Stage;

#[cfg(feature = "cuda")]
mod pinned {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::PinnedHostSlice;
    use candle_core::op::BackpropOp;
    use candle_core::{CudaDevice, CudaStorage, Device, Result, Storage, Tensor};
    use std::collections::{BTreeMap, VecDeque};

    /// Copies that may be under way: the host is at most so many batches ahead of the device.
    const COPIES: usize = 8;

    /// Pinned memory by its length, the longest unused first.
    #[derive(Default)]
    pub struct Stage(BTreeMap<usize, VecDeque<PinnedHostSlice<u8>>>);

    impl Stage {
        pub fn upload(&mut self, bytes: &[u8], device: &Device) -> Result<Tensor> {
            match device {
                Device::Cuda(device) if !bytes.is_empty() => self.copy(bytes, device),
                _ => Tensor::from_slice(bytes, bytes.len(), device),
            }
        }

        fn copy(&mut self, bytes: &[u8], device: &CudaDevice) -> Result<Tensor> {
            let stream = device.cuda_stream();
            let ring = self.0.entry(bytes.len()).or_default();
            let reused = if ring.len() < COPIES { None } else { ring.pop_front() };
            let mut pinned = match reused {
                Some(pinned) => pinned,
                // SAFETY: it is written as a whole before it is read.
                None => unsafe { stream.context().alloc_pinned::<u8>(bytes.len()) }.w()?,
            };
            // Waits until the copy of eight batches ago has left it.
            let at = pinned.as_mut_ptr().w()?;
            // SAFETY: `at` begins as many bytes as `bytes` has, which are nobody else's.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
            let copied = stream.clone_htod(&pinned).w()?;
            ring.push_back(pinned);
            let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(copied, device.clone()));
            Ok(Tensor::from_storage(storage, bytes.len(), BackpropOp::none(), false))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use taper_data::{Augment, Data, DataRegistry, Fill, Flip, Normalize, PipelineConfig, Search};

    #[test]
    fn bytes_become_the_numbers_that_the_cpu_makes() {
        let registry = DataRegistry::builtin();
        let set = registry.get("synthetic-images").unwrap();
        let loaded = set.load(&json!({"train": 50, "test": 10}), &Search::from_env(None, true)).unwrap();
        let Data::Images { train, .. } = loaded.data else { panic!("no images") };
        let channels = train.channels;
        let plain = Augment::default();
        for augment in [
            plain,
            Augment { crop_pad: 4, flip: Flip::RANDOM, ..plain },
            Augment { crop_pad: 3, crop_fill: Fill::Reflect, flip: Flip::ALTERNATE, ..plain },
            Augment { cutout: 7, ..plain },
            Augment { mixup: 0.8, ..plain },
            Augment { crop_pad: 2, flip: Flip::RANDOM, cutout: 5, mixup: 1.0, ..plain },
        ] {
            let means = (0..channels).map(|c| 0.4 + 0.03 * c as f32).collect();
            let deviations = (0..channels).map(|c| 0.2 + 0.01 * c as f32).collect();
            let config = PipelineConfig {
                batch_size: 16,
                shuffle: true,
                augment,
                normalize: Normalize { mean: means, std: deviations },
                drop_last: false,
                indices: None,
            };
            let pipeline = ImagePipeline::new(train.clone(), config, 3).unwrap();
            let feed = Feed::new(&pipeline, &Device::Cpu).unwrap();
            let pairs: Vec<_> = pipeline.epoch(1, 1).zip(pipeline.byte_epoch(1, 1)).collect();
            assert_eq!(pairs.len(), 3);
            for (expected, bytes) in pairs {
                let found = feed.images(&bytes).unwrap();
                let (h, w, c) = pipeline.shape();
                assert_eq!(found.dims(), [expected.n, h, w, c]);
                assert_eq!(found.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected.pixels);
                assert_eq!((bytes.labels, bytes.n), (expected.labels, expected.n));
                assert_eq!(bytes.mix.map(|(mix, _)| mix), expected.mix);
            }
        }
    }
}

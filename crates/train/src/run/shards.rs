//! A batch in shards: parts that are computed alone, and added up in one order whoever computes them.
//!
//! A shard's weight is its share of the batch's samples. What shards contribute (gradients, running statistics, losses) is summed
//! pairwise in a tree that the number of shards fixes, so that the processes of a [`World`], each of which computes a block of the
//! shards, all come to the bits that one process comes to.
use super::RunError;
use super::bulk::Bulk;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use std::ops::Range;
use taper_models::Params;
use taper_models::init::is_buffer;
use taper_world::{Tree, World};

/// How batches are cut, and who computes what.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    count: usize,
    world: World,
    device: Device,
}

/// What a shard, or several together, contribute.
#[derive(Clone, Debug)]
pub(crate) struct Contribution {
    /// Weighted: gradients and statistics.
    pub numbers: Bulk,
    /// Weighted or counted: losses, right answers.
    pub figures: [f64; FIGURES],
    /// What is the same for all shards that contribute, and so taken from the first.
    pub common: Vec<u8>,
}

/// Fewer streams are not worth a part of their own: the weights of a network are read for each part anew.
const STREAMS: usize = 4;

/// Total loss, likelihood, right answers.
const FIGURES: usize = 3;

impl Contribution {
    fn plus(self, other: Self) -> Result<Self, RunError> {
        let figures = std::array::from_fn(|i| self.figures[i] + other.figures[i]);
        Ok(Self { numbers: self.numbers.plus(other.numbers)?, figures, common: self.common })
    }
}

/// Where one of `count` parts of `n` things lies.
fn place(n: usize, count: usize, part: usize) -> Range<usize> {
    let start = |part: usize| n / count * part + (n % count).min(part);
    start(part)..start(part + 1)
}

impl Shards {
    pub fn new(count: usize, world: &World, device: &Device) -> Self {
        Self { count, world: world.clone(), device: device.clone() }
    }

    /// Whether batches stay whole.
    pub fn is_one(&self) -> bool {
        self.count == 1
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Who computes them.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The shards that this process computes.
    pub fn own(&self) -> Range<usize> {
        self.world.share(self.count)
    }

    /// Where shard number `shard` of a batch of `n` samples lies: shards differ by at most one sample.
    fn place(&self, n: usize, shard: usize) -> Range<usize> {
        place(n, self.count, shard)
    }

    /// The parts in which `n` streams of text are evaluated: as many as there are shards, but none too narrow.
    pub fn parts(&self, n: usize) -> Vec<Range<usize>> {
        let count = (n / STREAMS).clamp(1, self.count);
        (0..count).map(|part| place(n, count, part)).collect()
    }

    /// The sum of what `compute` says of each shard of a batch of `n` samples, given its number, its place and its weight. Each
    /// contributes `length` numbers.
    pub fn sum(
        &self,
        n: usize,
        length: usize,
        mut compute: impl FnMut(usize, Range<usize>, f64) -> Result<Contribution, RunError>,
    ) -> Result<Contribution, RunError> {
        let tree = Tree::new((0..self.count).map(|shard| !self.place(n, shard).is_empty()).collect());
        let mut leaf = |node: &Range<usize>| {
            if node.len() > 1 {
                return Ok(None);
            }
            let place = self.place(n, node.start);
            let weight = place.len() as f64 / n as f64;
            compute(node.start, place, weight).map(|contribution| Some(Ok(contribution)))
        };
        let mut add = |a: Result<Contribution, RunError>, b: Result<Contribution, RunError>| a?.plus(b?);
        let mut mine = Vec::new();
        for span in tree.spans(self.own()) {
            mine.extend(tree.fold(span, &mut leaf, &mut add)?.transpose()?);
        }
        if self.world.is_alone()
            && let Some(whole) = mine.pop()
        {
            return Ok(whole);
        }
        self.together(&tree, mine, length)
    }

    /// Adds up what all processes have.
    fn together(
        &self,
        tree: &Tree,
        mine: Vec<Contribution>,
        length: usize,
    ) -> Result<Contribution, RunError> {
        const BYTES: usize = FIGURES * size_of::<f64>();
        let mut words: Vec<u8> =
            mine.iter().flat_map(|part| part.figures).flat_map(f64::to_le_bytes).collect();
        words.extend(mine.first().map(|part| part.common.as_slice()).unwrap_or_default());
        let numbers = mine.into_iter().map(|part| part.numbers).collect();

        let words = self.world.gather(&words)?;
        let (mut figures, mut common) = (Vec::new(), Vec::new());
        for (rank, words) in words.iter().enumerate() {
            let spans = tree.spans(self.world.share_of(rank, self.count));
            let short = || taper_world::Error::new(rank, "says too little of a step");
            let (own, rest) = words.split_at_checked(spans.len() * BYTES).ok_or_else(short)?;
            let read = |bytes: &[u8]| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
            for (span, own) in spans.into_iter().zip(own.chunks_exact(BYTES)) {
                let mut of_span = [0.0; FIGURES];
                of_span.iter_mut().zip(own.chunks_exact(8)).for_each(|(figure, bytes)| *figure = read(bytes));
                figures.push((span, of_span));
            }
            if common.is_empty() {
                common = rest.to_vec();
            }
        }
        let mut known = |node: &Range<usize>| {
            Ok::<_, RunError>(figures.iter().find(|(span, _)| span == node).map(|(_, figures)| *figures))
        };
        let mut add = |a: [f64; FIGURES], b: [f64; FIGURES]| std::array::from_fn(|i| a[i] + b[i]);
        let figures = tree.fold(0..self.count, &mut known, &mut add)?.unwrap_or_default();
        let numbers = Bulk::sum(&self.world, tree, numbers, length, &self.device)?;
        Ok(Contribution { numbers, figures, common })
    }
}

/// The numbers of a model that a step moves, in the order of their names: gradients, then running statistics.
pub(crate) struct Numbers {
    weights: Vec<Var>,
    statistics: Statistics,
    device: Device,
}

/// The running statistics of a model.
pub(crate) struct Statistics {
    /// Means of the shards'.
    means: Vec<Var>,
    /// Batches that were counted: one more for each batch, whatever number of shards it has.
    counts: Vec<Var>,
    device: Device,
}

impl Numbers {
    pub fn new(params: &Params, device: &Device) -> Self {
        let buffers = params.vars().into_iter().filter(|(name, _)| is_buffer(name)).map(|(_, var)| var);
        let (means, counts) = buffers.partition(|var| var.dtype().is_float());
        let weights = params.trainable().into_iter().map(|(_, var)| var).collect();
        let statistics = Statistics { means, counts, device: device.clone() };
        Self { weights, statistics, device: device.clone() }
    }

    /// The running statistics alone.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.weights.iter().map(|var| var.elem_count()).sum::<usize>() + self.statistics.len()
    }

    /// What a shard contributes, and which parameters have a gradient.
    pub fn contribution(
        &self,
        grads: &GradStore,
        figures: [f64; FIGURES],
        weight: f64,
    ) -> Result<Contribution, RunError> {
        let mut common: Vec<u8> = self.weights.iter().map(|var| u8::from(grads.get(var).is_some())).collect();
        common.extend(self.statistics.count()?);
        let rows = self.weights.iter().map(|var| (grads.get(var), var)).chain(self.statistics.rows());
        Ok(Contribution { numbers: Bulk::of(&self.device, rows, self.len(), weight)?, figures, common })
    }

    /// The gradients of the batch; the running statistics are set to what the batch makes of them.
    pub fn take(&self, sum: &Contribution) -> Result<GradStore, RunError> {
        let mut grads = GradStore::default();
        let (present, counts) = sum.common.split_at_checked(self.weights.len()).ok_or_else(short)?;
        let mut start = 0;
        for (var, present) in self.weights.iter().zip(present) {
            if *present != 0 {
                grads.insert(var, sum.numbers.part(start, var)?);
            }
            start += var.elem_count();
        }
        self.statistics.set_from(&sum.numbers, start, counts)?;
        Ok(grads)
    }
}

impl Statistics {
    /// How many they are.
    pub fn len(&self) -> usize {
        self.means.iter().map(|var| var.elem_count()).sum()
    }

    fn vars(&self) -> impl Iterator<Item = &Var> {
        self.means.iter().chain(&self.counts)
    }

    /// A copy: each shard starts from the same.
    pub fn copy(&self) -> Result<Vec<Tensor>, RunError> {
        Ok(self.vars().map(|var| var.as_tensor().copy()).collect::<candle_core::Result<_>>()?)
    }

    /// Sets what [`Statistics::copy`] returned.
    pub fn set(&self, copy: &[Tensor]) -> Result<(), RunError> {
        Ok(self.vars().zip(copy).try_for_each(|(var, value)| var.set(value))?)
    }

    /// What a shard made of them.
    pub fn contribution(&self, weight: f64) -> Result<Contribution, RunError> {
        let numbers = Bulk::of(&self.device, self.rows(), self.len(), weight)?;
        Ok(Contribution { numbers, figures: [0.0; FIGURES], common: self.count()? })
    }

    /// Sets them to what all shards together made of them.
    pub fn take(&self, sum: &Contribution) -> Result<(), RunError> {
        self.set_from(&sum.numbers, 0, &sum.common)
    }

    fn rows(&self) -> impl Iterator<Item = (Option<&Tensor>, &Var)> {
        self.means.iter().map(|var| (Some(var.as_tensor()), var))
    }

    /// The batches that were counted, as bytes.
    fn count(&self) -> Result<Vec<u8>, RunError> {
        let mut bytes = Vec::new();
        for var in &self.counts {
            let counts = var.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
            bytes.extend(counts.into_iter().flat_map(i64::to_le_bytes));
        }
        Ok(bytes)
    }

    fn set_from(&self, numbers: &Bulk, mut start: usize, mut counts: &[u8]) -> Result<(), RunError> {
        for var in &self.means {
            var.set(&numbers.part(start, var)?)?;
            start += var.elem_count();
        }
        for var in &self.counts {
            let Some((own, rest)) = counts.split_at_checked(8 * var.elem_count()) else {
                return Err(short());
            };
            counts = rest;
            let own = own.chunks_exact(8).map(|bytes| bytes.try_into().map_or(0, i64::from_le_bytes));
            let own = Tensor::from_vec(own.collect::<Vec<_>>(), var.shape(), &Device::Cpu)?;
            var.set(&own.to_dtype(var.dtype())?.to_device(var.device())?)?;
        }
        Ok(())
    }
}

fn short() -> RunError {
    candle_core::Error::msg("a shard says too little of its step").into()
}

/// Numbers in the place of a variable.
pub(super) fn tensor(numbers: &[f32], var: &Var) -> Result<Tensor, RunError> {
    let tensor = Tensor::from_slice(numbers, var.shape(), &Device::Cpu)?;
    Ok(tensor.to_dtype(var.dtype())?.to_device(var.device())?)
}

/// The numbers of processes that can share so many shards.
pub(crate) fn divisors(shards: usize) -> Vec<usize> {
    (1..=shards).filter(|n| shards.is_multiple_of(*n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_a_batch_and_differ_by_at_most_one_sample() {
        for n in 1..40 {
            let shards = Shards::new(12, &World::alone(), &Device::Cpu);
            let places: Vec<Range<usize>> = (0..12).map(|shard| shards.place(n, shard)).collect();
            assert_eq!(places.iter().cloned().flatten().collect::<Vec<_>>(), (0..n).collect::<Vec<_>>());
            let sizes: Vec<usize> = places.iter().map(ExactSizeIterator::len).collect();
            assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
        }
    }

    #[test]
    fn streams_are_evaluated_in_as_many_parts_as_there_are_shards_unless_they_were_narrow() {
        let sizes = |shards, streams| {
            let parts = Shards::new(shards, &World::alone(), &Device::Cpu).parts(streams);
            assert_eq!(parts.iter().cloned().flatten().collect::<Vec<_>>(), (0..streams).collect::<Vec<_>>());
            parts.iter().map(ExactSizeIterator::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(12, 1), [1]);
        assert_eq!(sizes(12, 7), [7]);
        assert_eq!(sizes(12, 10), [5, 5]);
        assert_eq!(sizes(2, 17), [9, 8]);
        assert_eq!(sizes(1, 80), [80]);
    }

    #[test]
    fn empty_shards_are_not_computed_and_weights_add_up() {
        let mut seen = Vec::new();
        let sum = Shards::new(4, &World::alone(), &Device::Cpu).sum(2, 1, |shard, place, weight| {
            seen.push((shard, place));
            Ok(Contribution {
                numbers: Bulk::Host(vec![weight as f32]),
                figures: [weight; 3],
                common: vec![7],
            })
        });
        let sum = sum.unwrap();
        assert_eq!(seen, [(0, 0..1), (1, 1..2)]);
        assert!(matches!(sum.numbers, Bulk::Host(numbers) if numbers == [1.0]));
        assert_eq!((sum.figures, sum.common), ([1.0; 3], vec![7]));
    }
}

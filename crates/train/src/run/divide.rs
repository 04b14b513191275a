//! Optimizer state divided among the processes of a run: each steps its part of the parameters, and all get the new weights.
//!
//! Every process has an optimizer over all parameters by name, so that groups and patterns mean what they mean to one process; of
//! those that others step it has nothing: no rows, no gradient, no state. Parameters are divided in their order, in blocks: by rows
//! where the arithmetic looks at single elements, as wholes where it looks at more. A checkpoint has no trace of this.
use super::RunError;
use super::shards::tensor;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use taper_optim::rule::Reach;
use taper_optim::{Header, Others, StateDict};
use taper_world::World;

/// Who steps which part of the parameters of an optimizer.
pub(super) struct Division {
    world: World,
    params: Vec<Param>,
    /// Why the others could not be heard in the middle of a step.
    lost: Lost,
}

type Lost = Arc<Mutex<Option<taper_world::Error>>>;

struct Param {
    name: String,
    /// The model's.
    whole: Var,
    /// What this process steps: the model's own where that is all of it, else a copy of its rows.
    own: Var,
    /// Where the rows of each process begin, and where those of the last one end.
    cuts: Vec<usize>,
}

impl Param {
    fn rows(&self, rank: usize) -> Range<usize> {
        self.cuts[rank]..self.cuts[rank + 1]
    }

    /// The first of those that step it; what has no rows is the first process's.
    fn owner(&self) -> usize {
        (1..self.cuts.len()).find(|rank| self.cuts[*rank] > 0).map_or(0, |rank| rank - 1)
    }

    fn is_of(&self, rank: usize) -> bool {
        !self.rows(rank).is_empty() || self.owner() == rank
    }

    /// How many numbers a process steps of it.
    fn len(&self, rank: usize) -> usize {
        let rows = self.cuts.last().copied().unwrap_or(0).max(1);
        self.whole.elem_count() / rows * self.rows(rank).len()
    }

    /// The rows of a process, of the parameter or of something of its shape.
    fn part(&self, of: &Tensor, rank: usize) -> candle_core::Result<Tensor> {
        let rows = self.rows(rank);
        if of.rank() == 0 || rows.len() == of.dim(0)? {
            return Ok(of.clone());
        }
        of.narrow(0, rows.start, rows.len())?.contiguous()
    }

    /// Whether a process steps some rows only.
    fn is_cut(&self, rank: usize) -> bool {
        !self.rows(rank).is_empty() && self.rows(rank).len() < rows(&self.whole)
    }
}

/// The rows of a parameter; what has no rows is one.
fn rows(var: &Var) -> usize {
    var.dims().first().copied().unwrap_or(1)
}

/// Where each of `ranks` processes begins in each parameter, given rows and size of each: blocks as equal as rows, or `whole`
/// parameters, allow.
fn cuts(sizes: &[(usize, usize)], ranks: usize, whole: bool) -> Vec<Vec<usize>> {
    let total: u128 = sizes.iter().map(|(_, elements)| *elements as u128).sum();
    let mut before = 0u128;
    let mut cut = |(rows, elements): &(usize, usize)| {
        let (start, rows_wide, size) = (before, *rows as u128, *elements as u128);
        before += size;
        let at = |rank: usize| {
            // Twice all, so that halves are whole numbers.
            let bound = (2 * total * rank as u128 / ranks as u128).saturating_sub(2 * start);
            let row = match whole {
                // By its middle.
                true if rank == ranks || bound > size => rows_wide,
                true => 0,
                false if rank == ranks || size == 0 => rows_wide,
                false => ((bound * rows_wide + size) / (2 * size)).min(rows_wide),
            };
            row as usize
        };
        (0..=ranks).map(|rank| if rank == 0 { 0 } else { at(rank) }).collect()
    };
    sizes.iter().map(&mut cut).collect()
}

impl Division {
    /// Divides parameters that an optimizer of such a reach steps; `whole` keeps each in one piece in any case.
    pub fn new(
        params: Vec<(String, Var)>,
        reach: Reach,
        whole: bool,
        world: &World,
    ) -> Result<Self, RunError> {
        let sizes: Vec<_> = params.iter().map(|(_, var)| (rows(var), var.elem_count())).collect();
        let cuts = cuts(&sizes, world.size(), whole || reach > Reach::Element);
        let mut divided = Vec::with_capacity(params.len());
        for ((name, whole), cuts) in params.into_iter().zip(cuts) {
            let mut param = Param { name, own: whole.clone(), whole, cuts };
            if param.rows(world.rank()).len() != rows(&param.whole) && param.whole.rank() > 0 {
                param.own = Var::from_tensor(&param.part(&param.whole, world.rank())?)?;
            } else if !param.is_of(world.rank()) {
                param.own = Var::from_tensor(&param.whole.copy()?)?;
            }
            divided.push(param);
        }
        Ok(Self { world: world.clone(), params: divided, lost: Lost::default() })
    }

    /// The processes.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The parameters as this process's optimizer gets them.
    pub fn own(&self) -> Vec<(String, Var)> {
        self.params.iter().map(|param| (param.name.clone(), param.own.clone())).collect()
    }

    fn mine(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().filter(|param| param.is_of(self.world.rank()))
    }

    /// How an optimizer with sums over all parameters hears of the others'.
    pub fn others(&self) -> Others {
        let (world, lost) = (self.world.clone(), self.lost.clone());
        Others::new(move |mine| {
            world.gather(mine).map_err(|e| {
                let error = candle_core::Error::msg(&e);
                *lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
                error.into()
            })
        })
    }

    /// The error of a step: that of the processes, if it is the reason.
    pub fn reason(&self, error: taper_optim::Error) -> RunError {
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner).take();
        lost.map_or_else(|| error.into(), RunError::from)
    }

    /// Gets this process's rows as they are in the model.
    pub fn refresh(&self) -> Result<(), RunError> {
        let rank = self.world.rank();
        let cut = self.params.iter().filter(|param| param.is_cut(rank));
        cut.into_iter().try_for_each(|param| Ok(param.own.set(&param.part(&param.whole, rank)?)?))
    }

    /// The gradients of what this process steps.
    pub fn gradients(&self, grads: &GradStore) -> Result<GradStore, RunError> {
        let mut own = GradStore::default();
        for param in self.mine() {
            if let Some(grad) = grads.get(&param.whole) {
                own.insert(&param.own, param.part(grad, self.world.rank())?);
            }
        }
        Ok(own)
    }

    /// Brings what every process has made of its part to all models.
    pub fn spread(&self) -> Result<(), RunError> {
        let (ranks, mut from) = (self.world.size(), 0);
        while from < self.params.len() {
            let (mut to, mut size) = (from, 0);
            while to < self.params.len() && (to == from || size < taper_world::BUCKET) {
                size += self.params[to].whole.elem_count();
                to += 1;
            }
            let bucket = &self.params[from..to];
            from = to;
            let lengths: Vec<usize> =
                (0..ranks).map(|rank| bucket.iter().map(|param| param.len(rank)).sum()).collect();
            let mut mine = Vec::with_capacity(lengths[self.world.rank()]);
            for param in bucket.iter().filter(|param| param.len(self.world.rank()) > 0) {
                let own = param.own.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?;
                mine.extend(own.to_vec1::<f32>()?);
            }
            let all = self.world.join(&mine, &lengths)?;
            drop(mine);
            let mut places: Vec<usize> =
                lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length))).collect();
            for param in bucket {
                let mut whole = Vec::with_capacity(param.whole.elem_count());
                for (rank, place) in places.iter_mut().enumerate() {
                    whole.extend_from_slice(&all[*place..][..param.len(rank)]);
                    *place += param.len(rank);
                }
                param.whole.set(&tensor(&whole, &param.whole)?)?;
            }
        }
        Ok(())
    }

    /// The parameter that a tensor of saved state belongs to. Optimizers inside others have their names before it.
    fn param_of(&self, key: &str) -> Option<&Param> {
        let (mut name, _) = key.rsplit_once('.')?;
        loop {
            if let Some(param) = self.params.iter().find(|param| param.name == name) {
                return Some(param);
            }
            (_, name) = name.split_once('/')?;
        }
    }

    /// The state that one process would have, from what each has; nothing on others than the first.
    pub fn join(&self, mut state: StateDict) -> Result<Option<StateDict>, RunError> {
        let rank = self.world.rank();
        state.tensors.retain(|key, _| self.param_of(key).map_or(rank == 0, |param| param.is_of(rank)));
        let said = self.world.to_first(&state.to_bytes()?)?;
        if !self.world.is_first() {
            return Ok(None);
        }
        let (mut headers, mut tensors) = (Vec::new(), BTreeMap::<String, Vec<Tensor>>::new());
        for said in &said {
            let StateDict { header, tensors: own } = StateDict::from_bytes(said)?;
            headers.push(header);
            own.into_iter().for_each(|(key, tensor)| tensors.entry(key).or_default().push(tensor));
        }
        let owners: BTreeMap<&str, usize> =
            self.params.iter().map(|param| (param.name.as_str(), param.owner())).collect();
        let header = joined(&headers.iter().collect::<Vec<_>>(), &owners);
        let whole = |(key, parts): (String, Vec<Tensor>)| match &parts[..] {
            [one] => Ok((key, one.clone())),
            parts => Ok((key, Tensor::cat(parts, 0)?)),
        };
        let tensors = tensors.into_iter().map(whole).collect::<Result<_, RunError>>()?;
        Ok(Some(StateDict { header, tensors }))
    }

    /// This process's part of a whole state, given what its optimizer has now: of what others step that stays.
    pub fn cut(&self, whole: &StateDict, now: StateDict) -> Result<StateDict, RunError> {
        let rank = self.world.rank();
        let mut tensors = BTreeMap::new();
        for (key, tensor) in &whole.tensors {
            match self.param_of(key) {
                Some(param) if !param.is_of(rank) => {}
                // What is as large as the parameter is cut as it is.
                Some(param) if param.is_cut(rank) && tensor.dims() == param.whole.dims() => {
                    tensors.insert(key.clone(), param.part(tensor, rank)?);
                }
                _ => drop(tensors.insert(key.clone(), tensor.clone())),
            }
        }
        let others = |key: &String| self.param_of(key).is_some_and(|param| !param.is_of(rank));
        tensors.extend(now.tensors.into_iter().filter(|(key, _)| others(key)));
        let others: Vec<&str> =
            self.params.iter().filter(|p| !p.is_of(rank)).map(|p| p.name.as_str()).collect();
        Ok(StateDict { header: kept(&whole.header, &now.header, &others), tensors })
    }
}

/// The header of the first process, each parameter as its owner has it.
fn joined(headers: &[&Header], owners: &BTreeMap<&str, usize>) -> Header {
    let mut header = headers[0].clone();
    for (name, scalars) in &mut header.params {
        let owner = owners.get(name.as_str()).and_then(|rank| headers[*rank].params.get(name));
        owner.into_iter().for_each(|own| *scalars = own.clone());
    }
    for (name, part) in &mut header.parts {
        let parts: Vec<&Header> = headers.iter().filter_map(|header| header.parts.get(name)).collect();
        if parts.len() == headers.len() {
            *part = joined(&parts, owners);
        }
    }
    header
}

/// A header with some parameters as they are now.
fn kept(header: &Header, now: &Header, names: &[&str]) -> Header {
    let mut header = header.clone();
    for (name, scalars) in header.params.iter_mut().filter(|(name, _)| names.contains(&name.as_str())) {
        now.params.get(name).into_iter().for_each(|own| *scalars = own.clone());
    }
    for (name, part) in &mut header.parts {
        if let Some(now) = now.parts.get(name) {
            *part = kept(part, now, names);
        }
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many elements each process has.
    fn loads(sizes: &[(usize, usize)], ranks: usize, whole: bool) -> Vec<usize> {
        let cuts = cuts(sizes, ranks, whole);
        let of = |rank: usize| {
            let own = sizes.iter().zip(&cuts).map(|((rows, elements), cuts)| {
                assert!(cuts[rank] <= cuts[rank + 1] && cuts[0] == 0 && cuts[ranks] == *rows, "{cuts:?}");
                assert!(!whole || cuts.iter().all(|cut| [0, *rows].contains(cut)), "{cuts:?}");
                elements / rows.max(&1) * (cuts[rank + 1] - cuts[rank])
            });
            own.sum()
        };
        (0..ranks).map(of).collect()
    }

    #[test]
    fn blocks_cover_all_and_are_as_equal_as_rows_or_parameters_allow() {
        let nets: [&[(usize, usize)]; 4] = [
            &[(1000, 784_000), (1000, 1000), (1000, 1_000_000), (1000, 1000), (10, 10_000), (10, 10)],
            &[(64, 576), (1, 1), (0, 0), (64, 64), (128, 73_728), (7, 7)],
            &[(3, 3)],
            &[],
        ];
        for sizes in nets {
            let total: usize = sizes.iter().map(|(_, elements)| elements).sum();
            let largest = sizes.iter().map(|(_, elements)| *elements).max().unwrap_or(0);
            let row = sizes.iter().map(|(rows, elements)| elements / rows.max(&1)).max().unwrap_or(0);
            for ranks in 1..9 {
                for (whole, slack) in [(false, row), (true, largest)] {
                    let loads = loads(sizes, ranks, whole);
                    assert_eq!(loads.iter().sum::<usize>(), total);
                    let most = *loads.iter().max().unwrap();
                    assert!(most <= total.div_ceil(ranks) + slack, "{ranks} of {sizes:?}: {loads:?}");
                }
            }
        }
    }
}

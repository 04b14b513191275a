//! Where sequences begin and end: token and position embeddings, a class token, a mean over tokens.
use super::feature_map::{Element, FeatureMap, Host, check_param};
use super::graph::record;
use super::{Mask, dtype_error, embedding, index_dtype, indices, masked, shape_error, with_slice};
use crate::backward::{deliver, reclaim};
use crate::kernels::{Buf, Real, Shared, par};
use crate::{Error, Result, op_span};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

const OP: &str = "embedding";

/// Sequences `[batch, 1, time, features]` of `tokens` `[batch, time]` (u32 or i64): the rows of `weight` `[vocabulary, features]`,
/// plus rows `first`, `first` + 1, … of `positions` `[places, features]` if there are any, times a mask of all elements if there is
/// one.
///
/// Gradients are added up row by row in the order of the tokens; those of `weight` to what a tied head has left. On devices other
/// than the CPU it is composed of candle's ops.
pub fn embed(
    weight: &Tensor,
    positions: Option<&Tensor>,
    tokens: &Tensor,
    first: usize,
    mask: Option<&Mask>,
) -> Result<FeatureMap> {
    let (&[batch, time], &[vocabulary, features]) = (tokens.dims(), weight.dims()) else {
        let found = format!("weight {:?}, tokens {:?}", weight.dims(), tokens.dims());
        return Err(shape_error(OP, "weight [vocabulary, features] and tokens [batch, time]", found));
    };
    let places = match positions {
        Some(p) if p.rank() == 2 && p.dims()[1] == features => p.dims()[0],
        Some(p) => {
            let expected = format!("positions [places, {features}]");
            return Err(shape_error(OP, expected, format!("{:?}", p.dims())));
        }
        None => usize::MAX,
    };
    let elements = batch * time * features;
    if elements == 0 || vocabulary == 0 || first.checked_add(time).is_none_or(|end| end > places) {
        let expected = format!("sequences that are not empty and end within {places} positions");
        return Err(shape_error(
            OP,
            expected,
            format!("tokens {:?} from position {first} on", tokens.dims()),
        ));
    }
    if mask.is_some_and(|mask| mask.keep().len() != elements) {
        let found = mask.map_or(String::new(), |mask| format!("{:?}", mask.shape()));
        return Err(shape_error(OP, format!("a mask for {:?}", [batch, time, features]), found));
    }
    if !weight.device().is_cpu() {
        index_dtype(OP, tokens)?;
        return composed(weight, positions, tokens, first, mask);
    }
    let ids: Vec<usize> = indices(OP, tokens, vocabulary, None)?.into_iter().flatten().collect();
    let job = Embed { ids, time, features, first, mask: mask.cloned() };
    match weight.dtype() {
        DType::F32 => job.forward::<f32>(weight, positions),
        DType::F64 => job.forward::<f64>(weight, positions),
        found => Err(dtype_error(OP, "f32 or f64 for weight", found)),
    }
}

/// The same of candle's ops, for devices without ours; all sizes fit.
fn composed(
    weight: &Tensor,
    positions: Option<&Tensor>,
    tokens: &Tensor,
    first: usize,
    mask: Option<&Mask>,
) -> Result<FeatureMap> {
    let ((batch, time), features) = (tokens.dims2()?, weight.dim(1)?);
    let mut x = embedding(weight, tokens, None)?;
    if let Some(positions) = positions {
        x = x.broadcast_add(&positions.narrow(0, first, time)?)?;
    }
    if let Some(mask) = mask {
        x = masked(&x.flatten_all()?, &mask.reshaped(batch * time * features))?;
    }
    Ok(FeatureMap::Composed(x.reshape((batch, 1, time, features))?))
}

struct Embed {
    ids: Vec<usize>,
    time: usize,
    features: usize,
    first: usize,
    mask: Option<Mask>,
}

impl Embed {
    fn forward<T: Element>(self, weight: &Tensor, positions: Option<&Tensor>) -> Result<FeatureMap> {
        let (n, rows) = (self.features, self.ids.len());
        if let Some(positions) = positions {
            check_param(OP, "positions", positions, T::DTYPE, positions.dims())?;
        }
        let span = op_span!(OP, "forward", 0);
        let mut y = Buf::dirty(rows * n);
        let fill = |weight: &[T], places: Option<&[T]>, y: &mut [T]| {
            for (i, (id, y)) in self.ids.iter().zip(y.chunks_exact_mut(n)).enumerate() {
                y.copy_from_slice(&weight[id * n..(id + 1) * n]);
                if let Some(places) = places {
                    let at = (self.first + i % self.time) * n;
                    y.iter_mut().zip(&places[at..at + n]).for_each(|(y, p)| *y += *p);
                }
            }
        };
        with_slice(weight, |weight| match positions {
            Some(positions) => with_slice(positions, |places| fill(weight, Some(places), &mut y)),
            None => {
                fill(weight, None, &mut y);
                Ok(())
            }
        })??;
        self.drop(&mut y);
        drop(span);
        let dims = [rows / self.time, 1, self.time, n];
        let params: Vec<Tensor> = [weight].into_iter().chain(positions).cloned().collect();
        let slot = super::graph::Slot::<T>::new();
        let (gathered, owned) = (slot.clone(), params.clone());
        let start = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let kept = self.mask.as_ref().map_or(0, |mask| mask.keep().len()) + size_of::<usize>() * rows;
        let handle = record(OP, &start, &params.iter().collect::<Vec<_>>(), move |node| {
            let mut dy = gathered.take().ok_or(Error::BackwardTwice { op: OP })?;
            let _span = op_span!(OP, "backward", 0);
            self.drop(&mut dy);
            let mut told = [None, None];
            if owned[0].track_op() {
                told[0] = self.rows(node, &owned[0], &dy)?;
            }
            if let Some(positions) = owned.get(1).filter(|positions| positions.track_op()) {
                told[1] = deliver(node, positions, self.places(positions.dim(0)?, &dy))?;
            }
            Ok(told)
        })?;
        if handle.track_op() {
            crate::trace::keep(std::mem::size_of_val(&y[..]) + kept);
        }
        Ok(T::wrap(Host { dims, data: Arc::new(y), grad: slot, handle }))
    }

    fn drop<T: Element>(&self, y: &mut [T]) {
        let Some(mask) = &self.mask else { return };
        let scale = <T as Real>::from_f64(mask.scale());
        for (y, keep) in y.iter_mut().zip(mask.keep()) {
            *y = if *keep != 0 { *y * scale } else { T::ZERO };
        }
    }

    /// The gradient of the vocabulary's rows.
    fn rows<T: Element>(&self, node: &Tensor, weight: &Tensor, dy: &[T]) -> Result<Option<Tensor>> {
        let (vocabulary, n) = weight.dims2()?;
        let mut dw = reclaim::<T>(node, weight)?.unwrap_or_else(|| vec![T::ZERO; vocabulary * n]);
        // A task owns a range of the features, of which it adds up all tokens in order.
        let width = n.div_ceil(16).next_multiple_of(16);
        let to = Shared::new(&mut dw);
        par(n.div_ceil(width), |task| {
            let (first, count) = (task * width, width.min(n - task * width));
            for (id, dy) in self.ids.iter().zip(dy.chunks_exact(n)) {
                // SAFETY: within the row of an index that was checked, columns of this task alone.
                let dw = unsafe { to.slice(id * n + first, count) };
                dw.iter_mut().zip(&dy[first..]).for_each(|(dw, dy)| *dw += *dy);
            }
        });
        Ok(deliver(node, weight, dw)?)
    }

    /// The gradient of the positions: the sum over all sequences.
    fn places<T: Element>(&self, places: usize, dy: &[T]) -> Vec<T> {
        let row = self.time * self.features;
        let mut sums = vec![T::ZERO; places * self.features];
        let to = &mut sums[self.first * self.features..][..row];
        for dy in dy.chunks_exact(row) {
            to.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += *dy);
        }
        sums
    }
}

/// Sequences `[n, 1, tokens, features]` of patches `[n, rows, columns, features]`, row by row: the class token first, if there is
/// one, then `positions` `[1, tokens, features]` added and a mask of all elements multiplied.
///
/// On devices other than the CPU it is composed of candle's ops.
pub fn assemble(
    patches: &FeatureMap,
    class: Option<&Tensor>,
    positions: &Tensor,
    mask: Option<&Mask>,
) -> Result<FeatureMap> {
    let [n, rows, columns, features] = patches.dims()?;
    let tokens = rows * columns + usize::from(class.is_some());
    let elements = n * tokens * features;
    if positions.dims() != [1, tokens, features]
        || class.is_some_and(|class| class.dims() != [1, 1, features])
        || mask.is_some_and(|mask| mask.keep().len() != elements)
    {
        let expected = format!("positions [1, {tokens}, {features}] and a class token [1, 1, {features}]");
        let class = class.map_or("none".into(), |class| format!("{:?}", class.dims()));
        return Err(shape_error("assemble", expected, format!("{:?} and {class}", positions.dims())));
    }
    match patches {
        FeatureMap::F32(x) => assembled(x, class, positions, mask),
        FeatureMap::F64(x) => assembled(x, class, positions, mask),
        FeatureMap::Composed(x) => {
            let mut x = x.reshape((n, rows * columns, features))?;
            if let Some(class) = class {
                x = Tensor::cat(&[&class.broadcast_as((n, 1, features))?.contiguous()?, &x], 1)?;
            }
            x = x.broadcast_add(positions)?;
            if let Some(mask) = mask {
                x = masked(&x.flatten_all()?, &mask.reshaped(elements))?;
            }
            Ok(FeatureMap::Composed(x.reshape((n, 1, tokens, features))?))
        }
    }
}

fn assembled<T: Element>(
    x: &Host<T>,
    class: Option<&Tensor>,
    positions: &Tensor,
    mask: Option<&Mask>,
) -> Result<FeatureMap> {
    const OP: &str = "assemble";
    let [n, rows, columns, features] = x.dims;
    let (patches, own) = (rows * columns * features, if class.is_some() { features } else { 0 });
    let row = own + patches;
    for param in [Some(positions), class].into_iter().flatten() {
        check_param(OP, "positions and class token", param, T::DTYPE, param.dims())?;
    }
    let span = op_span!(OP, "forward", 0);
    let mut y = Buf::dirty(n * row);
    let class_values = class.map(|class| with_slice(class, <[T]>::to_vec)).transpose()?.unwrap_or_default();
    with_slice(positions, |places: &[T]| {
        let to = Shared::new(&mut y);
        par(n, |i| {
            // SAFETY: each task has an image of its own.
            let y = unsafe { to.slice(i * row, row) };
            y[..own].copy_from_slice(&class_values);
            y[own..].copy_from_slice(&x.data[i * patches..(i + 1) * patches]);
            y.iter_mut().zip(places).for_each(|(y, place)| *y += *place);
        });
    })?;
    let drop_elements = |y: &mut [T], mask: &Mask| {
        let scale = <T as Real>::from_f64(mask.scale());
        for (y, keep) in y.iter_mut().zip(mask.keep()) {
            *y = if *keep != 0 { *y * scale } else { T::ZERO };
        }
    };
    if let Some(mask) = mask {
        drop_elements(&mut y, mask);
    }
    drop(span);
    let (mask, slot) = (mask.cloned(), x.tracked().then(|| x.grad.clone()));
    let (want_positions, want_class) = (positions.track_op(), class.is_some_and(Tensor::track_op));
    let params: Vec<&Tensor> = [positions].into_iter().chain(class).collect();
    let dims = [n, 1, row / features, features];
    let y = Host::record(OP, (dims, Arc::new(y)), &x.handle, &params, move |mut dy| {
        let _span = op_span!(OP, "backward", 0);
        if let Some(mask) = &mask {
            drop_elements(&mut dy, mask);
        }
        let mut sums = vec![T::ZERO; row];
        for dy in dy.chunks_exact(row) {
            sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += *dy);
        }
        if let Some(slot) = slot {
            let mut dx = Buf::dirty(n * patches);
            for (dx, dy) in dx.chunks_exact_mut(patches).zip(dy.chunks_exact(row)) {
                dx.copy_from_slice(&dy[own..]);
            }
            slot.add(dx);
        }
        let class = want_class.then(|| sums[..own].to_vec());
        Ok([want_positions.then_some(sums), class])
    })?;
    Ok(T::wrap(y))
}

/// The mean over some tokens of sequences `[n, 1, tokens, features]`: `[n, 1, 1, features]`.
///
/// On devices other than the CPU it is composed of candle's ops.
pub fn mean_of_tokens(x: &FeatureMap, tokens: Range<usize>) -> Result<FeatureMap> {
    let [_, rows, count, _] = x.dims()?;
    if rows != 1 || tokens.is_empty() || tokens.end > count {
        let expected = format!("sequences [n, 1, tokens, features] with tokens {tokens:?}");
        return Err(shape_error("mean_of_tokens", expected, format!("{:?}", x.dims()?)));
    }
    match x {
        FeatureMap::F32(x) => mean(x, tokens),
        FeatureMap::F64(x) => mean(x, tokens),
        FeatureMap::Composed(x) => {
            Ok(FeatureMap::Composed(x.narrow(2, tokens.start, tokens.len())?.mean_keepdim(2)?))
        }
    }
}

fn mean<T: Element>(x: &Host<T>, tokens: Range<usize>) -> Result<FeatureMap> {
    const OP: &str = "mean_of_tokens";
    let [n, _, count, features] = x.dims;
    let share = <T as Real>::from_f64(1.0 / tokens.len() as f64);
    let range = tokens.start * features..tokens.end * features;
    let span = op_span!(OP, "forward", 0);
    let mut y = Buf::zeros(n * features);
    for (y, x) in y.chunks_exact_mut(features).zip(x.data.chunks_exact(count * features)) {
        for token in x[range.clone()].chunks_exact(features) {
            y.iter_mut().zip(token).for_each(|(y, x)| *y += *x);
        }
        y.iter_mut().for_each(|y| *y *= share);
    }
    drop(span);
    let (slot, length) = (x.grad.clone(), x.data.len());
    let y = Host::record(OP, ([n, 1, 1, features], Arc::new(y)), &x.handle, &[], move |dy| {
        let _span = op_span!(OP, "backward", 0);
        slot.add_with(length, |dx, add| {
            if !add {
                dx.fill(T::ZERO);
            }
            for (dx, dy) in dx.chunks_exact_mut(count * features).zip(dy.chunks_exact(features)) {
                for token in dx[range.clone()].chunks_exact_mut(features) {
                    token.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += *dy * share);
                }
            }
        });
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use candle_core::Var;

    fn var(name: &str, shape: (usize, usize)) -> Var {
        let mut rng = Rng::new(7, "test", name, 0);
        let values: Vec<f64> = (0..shape.0 * shape.1).map(|_| rng.uniform() - 0.5).collect();
        Var::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    #[test]
    fn composition_of_candle_ops_agrees() -> Result<()> {
        let (weight, positions) = (var("weight", (5, 3)), var("positions", (6, 3)));
        let tokens = Tensor::new(&[[1i64, 4, 1], [0, 0, 2]], &Device::Cpu)?;
        let mask = Mask::draw(Rng::new(1, "test", "mask", 0), (2, 3, 3), 0.4)?;
        let loss = |x: FeatureMap| -> Result<Tensor> { Ok(x.leave()?.sqr()?.sum_all()?) };
        for mask in [None, Some(&mask)] {
            for (places, first) in
                [(None, 0), (Some(positions.as_tensor()), 0), (Some(positions.as_tensor()), 3)]
            {
                let ours = embed(&weight, places, &tokens, first, mask)?;
                let theirs = composed(&weight, places, &tokens, first, mask)?;
                let values =
                    |x: &FeatureMap| -> Result<Vec<f64>> { Ok(x.leave()?.flatten_all()?.to_vec1()?) };
                assert_eq!(values(&ours)?, values(&theirs)?);
                let (ours, theirs) = (crate::backward(&loss(ours)?)?, loss(theirs)?.backward()?);
                for var in [Some(&weight), places.map(|_| &positions)].into_iter().flatten() {
                    let [a, b] =
                        [ours.get(var), theirs.get(var)].map(|g| g.unwrap().to_vec2::<f64>().unwrap());
                    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
                        // Sums of a few terms, maybe in another order.
                        assert!((a - b).abs() <= 1e-15, "{a} {b}");
                    }
                }
            }
        }
        Ok(())
    }
}

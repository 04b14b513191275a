//! Softmax attention.
use super::feature_map::{Element, FeatureMap, Host};
use super::{Mask, isa, shape_error};
use crate::kernels::attention::{
    Dropout, Rows, Shape, backward as kernel_backward, forward as kernel_forward,
};
use crate::kernels::{Buf, Isa, Shared};
use crate::rng::Rng;
use crate::{Error, Result, op_span};
use candle_core::{D, Tensor};
use std::sync::Arc;

const OP: &str = "attention";

/// Where queries, keys and values are: sequences `[batch, 1, time, features]`.
#[derive(Clone, Copy, Debug)]
pub enum Qkv<'a> {
    /// Side by side: all heads of queries, then those of keys, then those of values.
    Together(&'a FeatureMap),
    /// Each on its own. There may be more keys and values than queries: with [`Attention::causal`] the last query is at the place
    /// of the last key.
    Apart([&'a FeatureMap; 3]),
}

/// Options of [`attention`].
#[derive(Clone, Debug)]
pub struct Attention {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`: neighbouring heads of queries share one.
    pub kv_heads: usize,
    /// Whether a token sees itself and what comes before it; else it sees all.
    pub causal: bool,
    /// Which shares are dropped.
    pub dropout: Option<ShareDropout>,
}

/// Dropout of the shares that a query gives to keys.
#[derive(Clone, Debug)]
pub struct ShareDropout {
    /// The probability of each.
    pub p: f64,
    /// The key of the draws: share (b, h, i, j) is number ((b · heads + h) · queries + i) · keys + j of its mask.
    pub rng: Rng,
    /// The number of the first sequence in the batch of its step.
    pub first: usize,
}

impl ShareDropout {
    fn mask(&self, first: usize, shape: impl Into<candle_core::Shape>) -> Result<Mask> {
        Mask::draw_from(self.rng.clone(), first, shape, self.p)
    }
}

/// softmax(q kᵀ/√size) v of every head, heads side by side: `[batch, 1, time, heads · size]`.
///
/// On the CPU no matrix of scores is in memory: they are computed in blocks, with the softmax as they come, and once more in
/// the backward pass, for which the result and one number for each head of each query are kept. Memory grows with the length of a
/// sequence. It computes in full precision also where products multiply bf16. On other devices it is composed of
/// candle's products and `candle_nn::ops::softmax`, which has a gradient where `softmax_last_dim` has none; there the scores
/// are in memory.
///
/// ```
/// # fn main() -> taper_models::Result<()> {
/// use candle_core::{Device, Tensor};
/// use taper_models::ops::{Attention, FeatureMap, Qkv, attention};
/// // One head of one feature: the first token sees itself alone, the second both, alike.
/// let [q, k, v] = [[0f32, 0.0], [1.0, 1.0], [2.0, 4.0]]
///     .map(|x| FeatureMap::enter(&Tensor::new(&x, &Device::Cpu).and_then(|x| x.reshape((1, 1, 2, 1))).unwrap()).unwrap());
/// let options = Attention { heads: 1, kv_heads: 1, causal: true, dropout: None };
/// let y = attention(Qkv::Apart([&q, &k, &v]), &options)?.leave()?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [2.0, 3.0]);
/// # Ok(()) }
/// ```
pub fn attention(qkv: Qkv, options: &Attention) -> Result<FeatureMap> {
    let shape = shape_of(&qkv, options)?;
    if let Some(ShareDropout { p, .. }) = options.dropout
        && !(0.0..1.0).contains(&p)
    {
        return Err(Error::Argument { op: OP, expected: "a probability in 0..1", found: p.to_string() });
    }
    match qkv {
        Qkv::Together(FeatureMap::F32(x)) => forward(&[x], shape, options),
        Qkv::Together(FeatureMap::F64(x)) => forward(&[x], shape, options),
        Qkv::Apart([FeatureMap::F32(q), FeatureMap::F32(k), FeatureMap::F32(v)]) => {
            forward(&[q, k, v], shape, options)
        }
        Qkv::Apart([FeatureMap::F64(q), FeatureMap::F64(k), FeatureMap::F64(v)]) => {
            forward(&[q, k, v], shape, options)
        }
        Qkv::Together(x) => {
            let (x, size) = (x.leave()?, shape.size);
            let (q, kv) = (shape.heads * size, shape.kv_heads * size);
            let part = |first: usize, width: usize| x.narrow(3, first, width);
            composed([part(0, q)?, part(q, kv)?, part(q + kv, kv)?], &shape, options)
        }
        Qkv::Apart([q, k, v]) => composed([q.leave()?, k.leave()?, v.leave()?], &shape, options),
    }
}

/// The extents, or what does not fit.
fn shape_of(qkv: &Qkv, options: &Attention) -> Result<Shape> {
    let Attention { heads, kv_heads, causal, .. } = *options;
    let refuse = |found: String| {
        let expected = format!(
            "sequences [batch, 1, time, features] of {heads} heads of queries and {kv_heads} of keys and values, heads in \
             equal groups and no more queries than keys"
        );
        Err(shape_error(OP, expected, found))
    };
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return refuse(format!("{heads} and {kv_heads} heads"));
    }
    match qkv {
        Qkv::Together(x) => {
            let [batch, rows, queries, width] = x.dims()?;
            let size = width / (heads + 2 * kv_heads);
            if rows != 1 || width != size * (heads + 2 * kv_heads) {
                return refuse(format!("{:?}", x.dims()?));
            }
            Ok(Shape { batch, queries, keys: queries, heads, kv_heads, size, causal })
        }
        Qkv::Apart([q, k, v]) => {
            let ([batch, _, queries, width], [_, _, keys, _]) = (q.dims()?, k.dims()?);
            let size = width / heads;
            let others = [batch, 1, keys, kv_heads * size];
            if q.dims()? != [batch, 1, queries, heads * size]
                || k.dims()? != others
                || v.dims()? != others
                || causal && keys < queries
            {
                return refuse(format!("{:?}, {:?} and {:?}", q.dims()?, k.dims()?, v.dims()?));
            }
            Ok(Shape { batch, queries, keys, heads, kv_heads, size, causal })
        }
    }
}

/// One operand with all three, or three.
fn rows<'a, T: Element>(parts: &[&'a Arc<Buf<T>>], shape: &Shape) -> [Rows<&'a [T]>; 3] {
    let (q, kv) = (shape.heads * shape.size, shape.kv_heads * shape.size);
    match parts {
        [q, k, v] => {
            let at = |data: &'a Arc<Buf<T>>, stride: usize| Rows { data: &data[..], stride, offset: 0 };
            [at(q, shape.heads * shape.size), at(k, kv), at(v, kv)]
        }
        parts => {
            let all: &'a [T] = parts.first().map_or(&[], |all| &all[..]);
            [0, q, q + kv].map(|offset| Rows { data: all, stride: q + 2 * kv, offset })
        }
    }
}

/// Calls `f` with what is dropped, as kernels ask for it.
fn with_dropout<R>(dropout: Option<&ShareDropout>, shape: &Shape, f: impl FnOnce(Option<Dropout>) -> R) -> R {
    let Some(dropout) = dropout else { return f(None) };
    let before = dropout.first * shape.heads * shape.queries * shape.keys;
    let draw = |first: usize, keep: &mut [u8]| {
        super::dropout::draw_keep(&dropout.rng, dropout.p, before + first, keep);
    };
    f(Some(Dropout { scale: 1.0 / (1.0 - dropout.p), keep: &draw }))
}

/// Operations of both products of a pass.
fn flops(shape: &Shape) -> usize {
    4 * shape.batch * shape.heads * shape.queries * shape.keys * shape.size
}

fn forward<T: Element>(parts: &[&Host<T>], shape: Shape, options: &Attention) -> Result<FeatureMap> {
    let isa = isa()?;
    let span = op_span!(OP, "forward", flops(&shape), "{}x{}", shape.keys, shape.size);
    let mut out = Buf::dirty(shape.batch * shape.queries * shape.heads * shape.size);
    let mut lse = Buf::dirty(shape.batch * shape.heads * shape.queries);
    let data: Vec<&Arc<Buf<T>>> = parts.iter().map(|part| &part.data).collect();
    with_dropout(options.dropout.as_ref(), &shape, |dropout| {
        kernel_forward(isa, &shape, rows(&data, &shape), dropout, &mut out, &mut lse);
    });
    drop(span);
    let mut handle = parts[0].handle.clone();
    for part in &parts[1..] {
        handle = (handle + &part.handle)?;
    }
    let (out, dims) = (Arc::new(out), [shape.batch, 1, shape.queries, shape.heads * shape.size]);
    let kept = std::mem::size_of_val(&lse[..]);
    let back = Back {
        isa,
        shape,
        data: data.into_iter().cloned().collect(),
        slots: parts.iter().map(|part| part.tracked().then(|| part.grad.clone())).collect(),
        out: out.clone(),
        lse,
        dropout: options.dropout.clone(),
    };
    let y = Host::record(OP, (dims, out), &handle, &[], move |dout| {
        back.run(&dout);
        Ok([None, None])
    })?;
    if y.tracked() {
        crate::trace::keep(kept);
    }
    Ok(T::wrap(y))
}

/// What the backward pass needs.
struct Back<T: Element> {
    isa: Isa,
    shape: Shape,
    data: Vec<Arc<Buf<T>>>,
    slots: Vec<Option<Arc<super::graph::Slot<T>>>>,
    out: Arc<Buf<T>>,
    lse: Buf<T>,
    dropout: Option<ShareDropout>,
}

impl<T: Element> Back<T> {
    fn run(self, dout: &[T]) {
        let shape = &self.shape;
        let _span = op_span!(OP, "backward", flops(shape) / 2 * 5, "{}x{}", shape.keys, shape.size);
        let parts: Vec<&Arc<Buf<T>>> = self.data.iter().collect();
        let from = rows(&parts, shape);
        let mut gradients: Vec<Buf<T>> = parts.iter().map(|part| Buf::dirty(part.len())).collect();
        let to: Vec<(Shared<T>, usize)> = gradients.iter_mut().map(|g| (Shared::new(g), g.len())).collect();
        let mut at = 0;
        let to = from.map(|Rows { stride, offset, .. }| {
            let (data, length) = to[if to.len() == 3 { at } else { 0 }];
            at += 1;
            (Rows { data, stride, offset }, length)
        });
        with_dropout(self.dropout.as_ref(), shape, |dropout| {
            let (rows, lengths) = (to.map(|to| to.0), to.map(|to| to.1));
            kernel_backward(self.isa, shape, from, dropout, (&self.out, &self.lse), dout, rows, lengths);
        });
        for (slot, gradient) in self.slots.into_iter().zip(gradients) {
            if let Some(slot) = slot {
                slot.add(gradient);
            }
        }
    }
}

/// The same of candle's ops, with all scores in memory.
fn composed([q, k, v]: [Tensor; 3], shape: &Shape, options: &Attention) -> Result<FeatureMap> {
    let &Shape { batch, queries, keys, heads, kv_heads, size, causal } = shape;
    let split = |x: &Tensor, time: usize, heads: usize| {
        x.contiguous()?.reshape((batch, time, heads, size))?.transpose(1, 2)?.contiguous()
    };
    // Each head of keys once for every head of queries that it serves.
    let repeated = |x: &Tensor| {
        let x = split(x, keys, kv_heads)?.unsqueeze(2)?;
        let all = (batch, kv_heads, heads / kv_heads, keys, size);
        x.broadcast_as(all)?.contiguous()?.reshape((batch, heads, keys, size))
    };
    let (q, k, v) = (split(&q, queries, heads)?, repeated(&k)?, repeated(&v)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
    if causal {
        let hidden = |i: usize, j: usize| if j > i + keys - queries { f32::NEG_INFINITY } else { 0.0 };
        let hidden: Vec<f32> = (0..queries * keys).map(|at| hidden(at / keys, at % keys)).collect();
        let hidden = Tensor::from_vec(hidden, (queries, keys), q.device())?.to_dtype(q.dtype())?;
        scores = scores.broadcast_add(&hidden)?;
    }
    let mut shares = candle_nn::ops::softmax(&scores, D::Minus1)?;
    if let Some(dropout) = &options.dropout {
        let first = dropout.first * heads * queries * keys;
        let mask = dropout.mask(first, (batch, heads, queries, keys))?;
        shares = (shares * mask.to_tensor(q.dtype(), q.device())?)?;
    }
    let y = shares.matmul(&v)?.transpose(1, 2)?.reshape((batch, 1, queries, heads * size))?;
    Ok(FeatureMap::Composed(y))
}

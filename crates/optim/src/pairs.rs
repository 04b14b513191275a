//! The element-wise parts of rules for whole tensors: of two tensors one is made, in one pass on the CPU and by one kernel on a
//! GPU, whose text stands beside the Rust.
use crate::device::Source;
use crate::device::gpu::Engine;
use crate::device::table::{Head, Item};
use crate::driver::cpu::slice;
use crate::passes::{elements, pass};
use crate::rule::{Real, Scalars};
use crate::{Deferred, Error, Result};
use candle_core::{DType, Device, Tensor, WithDType};
use std::sync::{Mutex, PoisonError};

/// What becomes of x and g, element by element.
pub(crate) trait Pair: Scalars {
    /// What its kernels are called by.
    const NAME: &'static str;
    /// The same for GPUs.
    const UPDATE: &'static str;
    /// One element.
    fn of<F: Real>(s: &Self::In<F>, x: F, g: F) -> F;
}

macro_rules! pair {
    ($(#[$doc:meta])* $name:ident { $($field:ident),* } = $text:literal, |$s:ident, $x:ident, $g:ident| $of:expr) => {
        crate::scalars! {
            $(#[$doc])*
            pub(crate) struct $name { $($field),* }
        }
        impl Pair for $name {
            const NAME: &'static str = concat!("pair_", stringify!($name));
            const UPDATE: &'static str = concat!(
                "FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) { return ", $text, "; }\n"
            );
            #[inline(always)]
            fn of<F: Real>($s: &$name<F>, $x: F, $g: F) -> F {
                $of
            }
        }
    };
}

pair! {
    /// A share of both.
    Blend { keep, share } = "s.keep * x + s.share * g", |s, x, g| s.keep * x + s.share * g
}
pair! {
    /// An average of squares.
    Square { keep, share } = "s.keep * x + s.share * (g * g)", |s, x, g| s.keep * x + s.share * (g * g)
}
pair! {
    /// A mean x by the root of a mean g of squares: Adam's direction.
    Direction { first, second, eps } = "s.first * x / (s.second * root(g) + s.eps)",
    |s, x, g| s.first * x / (s.second * g.sqrt() + s.eps)
}
pair! {
    /// A step of `rate` along g from x shrunk by `keep`.
    Descend { keep, rate } = "s.keep * x - s.rate * g", |s, x, g| s.keep * x - s.rate * g
}
pair! {
    /// A share of the way from x to g.
    Toward { share } = "x + (g - x) * s.share", |s, x, g| x + (g - x) * s.share
}

/// The program of a pair.
fn source<P: Pair>(dtype: DType) -> Source {
    let (follows_loss, reduces, buffers) = (false, false, 0);
    Source { rule: P::NAME, update: P::UPDATE, scalars: P::NAMES, follows_loss, reduces, buffers, dtype }
}

/// What `pair` makes of two tensors of one shape, dtype (f32 or f64) and device.
pub(crate) fn paired<P: Pair>(pair: P, x: &Tensor, g: &Tensor) -> Result<Tensor> {
    let (x, g) = (x.contiguous()?, g.contiguous()?);
    if x.shape() != g.shape() || x.dtype() != g.dtype() {
        let describe = |t: &Tensor| format!("{:?} {:?}", t.dims(), t.dtype());
        return Err(Error::Parameter {
            name: P::NAME.to_owned(),
            expected: describe(&x),
            found: describe(&g),
        });
    }
    match (x.device().is_cpu(), x.dtype()) {
        (true, DType::F64) => on_cpu::<P, f64>(pair, &x, &g),
        (true, _) => on_cpu::<P, f32>(pair, &x, &g),
        (false, _) => on_gpu(pair, &x, &g),
    }
}

fn on_cpu<P: Pair, F: Real + WithDType>(pair: P, x: &Tensor, g: &Tensor) -> Result<Tensor> {
    let s = pair.round::<F>();
    let mut out = {
        let (storage, layout) = x.storage_and_layout();
        slice::<F>(&storage, layout)?.to_vec()
    };
    elements::<F, _, 1>([g], |[g]| {
        pass([&mut out[..]], [g], |[x], [g]| {
            *x = P::of(&s, *x, g);
            []
        })
    })?;
    Ok(Tensor::from_vec(out, x.shape(), &Device::Cpu)?)
}

/// Engines by device: what they keep spares a step from waiting for memory.
static ENGINES: Mutex<Vec<(Device, Engine)>> = Mutex::new(Vec::new());

fn on_gpu<P: Pair>(pair: P, x: &Tensor, g: &Tensor) -> Result<Tensor> {
    let out = x.copy()?;
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    let place = match engines.iter().position(|(device, _)| device.same_device(x.device())) {
        Some(place) => place,
        None => {
            engines.push((x.device().clone(), Engine::new(x.device())?));
            engines.len() - 1
        }
    };
    let engine = &mut engines[place].1;
    let mut state = engine.zeros(x.dtype(), 0, x.elem_count())?;
    let (scalars, start, offset) = (pair.values(), None, 0.0);
    let item = Item { param: out.clone(), grad: g, state: &mut state, scalars, start, offset };
    let head = Head { scale: 1.0, limit: f64::INFINITY, step: 1 };
    engine.step(&source::<P>(x.dtype()), &mut [item], &head, &Deferred::default())?;
    Ok(out)
}

/// A pair as tests of the kernels' texts see it.
#[doc(hidden)]
pub struct Example {
    /// The program for a dtype.
    pub source: fn(DType) -> Source,
    /// The numbers of this example.
    pub scalars: Vec<f64>,
    /// What it makes of x and g.
    #[allow(clippy::type_complexity)]
    pub of: Box<dyn Fn(&Tensor, &Tensor) -> Result<Tensor>>,
}

/// One of each.
#[doc(hidden)]
pub fn examples() -> Vec<Example> {
    fn example<P: Pair>(pair: P) -> Example {
        let of = move |x: &Tensor, g: &Tensor| paired(pair, x, g);
        Example { source: source::<P>, scalars: pair.values(), of: Box::new(of) }
    }
    vec![
        example(Blend { keep: 0.9, share: 0.1 }),
        example(Square { keep: 0.999, share: 0.001 }),
        example(Direction { first: 1.7, second: 31.6, eps: 1e-8 }),
        example(Descend { keep: 0.9999, rate: 0.3 }),
        example(Toward { share: 0.5 }),
    ]
}

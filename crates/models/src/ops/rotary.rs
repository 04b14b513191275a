//! Rotary positions.
use super::feature_map::{Element, FeatureMap, Host};
use super::{isa, shape_error};
use crate::kernels::rotary::{Table, turn};
use crate::kernels::{Buf, Isa};
use crate::{Result, op_span};
use candle_core::{Device, Tensor};
use std::sync::Arc;

const OP: &str = "rotary";

/// The angles of positions 0, 1, …: made once for a network.
#[derive(Clone, Debug)]
pub struct Angles {
    size: usize,
    theta: f64,
    single: Arc<Table<f32>>,
    double: Arc<Table<f64>>,
}

impl Angles {
    /// For heads of `size` features, an even number, at no positions yet: pair j of a head, features j and j + size/2, turns by
    /// position · theta^(−2j/size).
    pub fn new(size: usize, theta: f64) -> Self {
        let (single, double) = (Table::new(size, 0, theta), Table::new(size, 0, theta));
        Self { size, theta, single: Arc::new(single), double: Arc::new(double) }
    }

    /// Has angles for at least so many positions from now on.
    pub fn cover(&mut self, positions: usize) {
        if self.single.positions() < positions {
            self.single = Arc::new(Table::new(self.size, positions, self.theta));
            self.double = Arc::new(Table::new(self.size, positions, self.theta));
        }
    }
}

/// Turns the heads of sequences `[batch, 1, time, heads · size]`, whose first row is at position `first`. The gradient is turned
/// back.
///
/// Where nobody else has `x` it is turned where it lies. On devices other than the CPU it is composed of candle's products:
/// candle-nn's own rotary embeddings have no gradient.
pub fn rotary(x: FeatureMap, angles: &Angles, first: usize) -> Result<FeatureMap> {
    let [_, rows, time, width] = x.dims()?;
    let positions = angles.single.positions();
    if rows != 1
        || angles.size == 0
        || !angles.size.is_multiple_of(2)
        || !width.is_multiple_of(angles.size)
        || first.checked_add(time).is_none_or(|end| end > positions)
    {
        let expected =
            format!("[batch, 1, time, heads · {}] at no more than {positions} positions", angles.size);
        return Err(shape_error(OP, expected, format!("{:?} from position {first} on", x.dims()?)));
    }
    match x {
        FeatureMap::F32(x) => forward(isa()?, x, angles.single.clone(), (time, width, first)),
        FeatureMap::F64(x) => forward(isa()?, x, angles.double.clone(), (time, width, first)),
        FeatureMap::Composed(x) => Ok(FeatureMap::Composed(composed(&x, angles, first)?)),
    }
}

fn forward<T: Element>(
    isa: Isa,
    x: Host<T>,
    table: Arc<Table<T>>,
    sizes: (usize, usize, usize),
) -> Result<FeatureMap> {
    let span = op_span!(OP, "forward", 0);
    let mut y = Arc::try_unwrap(x.data).unwrap_or_else(|shared| Buf::copy_of(&shared));
    turn(isa, &table, sizes, &mut y, false);
    drop(span);
    let slot = x.grad;
    let y = Host::record(OP, (x.dims, Arc::new(y)), &x.handle, &[], move |mut dy| {
        let _span = op_span!(OP, "backward", 0);
        turn(isa, &table, sizes, &mut dy, true);
        slot.add(dy);
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

/// The same of candle's ops.
fn composed(x: &Tensor, angles: &Angles, first: usize) -> candle_core::Result<Tensor> {
    let (batch, _, time, width) = x.dims4()?;
    let half = angles.size / 2;
    let heads = x.reshape((batch, time, width / angles.size, angles.size))?;
    // Rounded before it moves: not every device has f64.
    let table = angles.double.rows(first, time).to_vec();
    let table = Tensor::from_vec(table, (1, time, 1, 2 * half), &Device::Cpu)?.to_dtype(x.dtype())?;
    let table = table.to_device(x.device())?;
    let (cos, sin) = (table.narrow(3, 0, half)?, table.narrow(3, half, half)?);
    let (a, b) = (heads.narrow(3, 0, half)?, heads.narrow(3, half, half)?);
    let turned = [
        (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?,
        (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?,
    ];
    Tensor::cat(&turned, 3)?.reshape(x.shape())
}

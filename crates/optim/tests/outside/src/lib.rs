//! A small network with a loop of its own around taper-optim.
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss};

/// Two layers of equal shape, so that nothing but their names tells them apart.
pub struct Net {
    pub vars: VarMap,
    first: Linear,
    second: Linear,
}

impl Net {
    pub fn new(dtype: DType) -> Result<Self> {
        let vars = VarMap::new();
        let builder = VarBuilder::from_varmap(&vars, dtype, &Device::Cpu);
        let (first, second) = (linear(4, 4, builder.pp("first"))?, linear(4, 4, builder.pp("second"))?);
        let net = Self { vars, first, second };
        // candle's own start cannot be seeded.
        for (i, (_, var)) in net.named().into_iter().enumerate() {
            let n = var.elem_count();
            let values: Vec<f64> = (0..n).map(|k| ((i * 31 + k * 7) % 13) as f64 / 13.0 - 0.5).collect();
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?.to_dtype(dtype)?)?;
        }
        Ok(net)
    }

    /// The variables by name, in the order of names.
    pub fn named(&self) -> Vec<(String, candle_core::Var)> {
        let data = self.vars.data().lock().unwrap();
        let mut named: Vec<_> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named
    }

    pub fn copy_from(&self, other: &Self) -> Result<()> {
        self.named().iter().zip(other.named()).try_for_each(|((_, to), (_, from))| to.set(&from))
    }

    /// The loss of batch `t`.
    pub fn loss(&self, t: usize) -> Result<Tensor> {
        let dtype = self.first.weight().dtype();
        let x: Vec<f64> = (0..32).map(|k| ((t * 17 + k * 5) % 11) as f64 / 11.0 - 0.5).collect();
        let x = Tensor::from_vec(x, (8, 4), &Device::Cpu)?.to_dtype(dtype)?;
        let y = Tensor::from_vec((0..8).map(|k| (k + t as u32) % 4).collect::<Vec<u32>>(), 8, &Device::Cpu)?;
        let out = self.second.forward(&self.first.forward(&x)?.relu()?)?.to_dtype(DType::F32)?;
        loss::cross_entropy(&out, &y)
    }

    /// All weights, in the order of their names.
    pub fn bits(&self) -> Result<Vec<u64>> {
        let mut bits = Vec::new();
        for (_, var) in self.named() {
            let wide: Vec<f64> = var.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
            bits.extend(wide.into_iter().map(f64::to_bits));
        }
        Ok(bits)
    }
}

//! Seeded parameters: a `VarBuilder` backend whose values depend on (seed, name) only.
use crate::gpt::{HEAD, tied_table};
use crate::{Error, Result, rng::Rng};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The named parameters and buffers of a model, always in the order of their names.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{DType, Device};
/// let params = taper_models::Params::new(1);
/// let vb = params.builder(DType::F32, &Device::Cpu);
/// let fc = candle_nn::linear(4, 2, vb.pp("fc"))?; // any model written against VarBuilder
/// let names: Vec<String> = params.vars().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["fc.bias", "fc.weight"]);
/// # Ok(()) }
/// ```
///
/// Any such model can be built; to be trained it must also consist of ops that have a backward pass. Some of candle-nn's have
/// none, and gradients end there without a word (docs/tutorial.md has the same table):
///
/// | candle-nn | in its place |
/// | --- | --- |
/// | `LayerNorm` with a bias, on contiguous inputs | `ops::layer_norm_slow`, `layer_norm_no_bias`, or [`norm`](crate::ops::norm) |
/// | `RmsNorm` on contiguous inputs | `RmsNorm::forward_diff`, `ops::rms_norm_slow`, or [`norm`](crate::ops::norm) |
/// | `ops::softmax_last_dim` | `ops::softmax` |
/// | `rotary_emb::{rope, rope_i, rope_thd}` | `rope_slow`, `rope_i_slow`, or [`rotary`](crate::ops::rotary) |
/// | `attention::flash_attn`, `ops::sdpa` | products and `ops::softmax`, or [`attention`](crate::ops::attention) |
///
/// Embeddings, linear layers, convolutions, `ops::{silu, swiglu, dropout, log_softmax}` and GELU have one.
#[derive(Clone, Debug)]
pub struct Params {
    seed: u64,
    vars: Arc<Mutex<BTreeMap<String, Var>>>,
}

impl Params {
    /// No parameters yet; those to come are drawn from `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed, vars: Arc::default() }
    }

    /// A builder that creates what it is asked for here.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// The same, but what `held` says of a name and its number of axes is handed out without a way back: no gradient is computed
    /// for it, nor for anything that only it would need one for. Models set the values they start with through variables, so the
    /// first is built with [`Params::builder`].
    pub fn builder_holding(
        &self,
        dtype: DType,
        device: &Device,
        held: impl Fn(&str, usize) -> bool + Send + Sync + 'static,
    ) -> VarBuilder<'static> {
        let holding = Holding { params: self.clone(), held: Box::new(held) };
        VarBuilder::from_backend(Box::new(holding), dtype, device.clone())
    }

    /// Everything by name: trainable parameters, buffers and what is fixed.
    pub fn vars(&self) -> Vec<(String, Var)> {
        self.lock().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    }

    /// The trainable parameters by name.
    pub fn trainable(&self) -> Vec<(String, Var)> {
        self.vars().into_iter().filter(|(name, _)| is_trained(name)).collect()
    }

    /// The number of trainable numbers.
    pub fn count(&self) -> usize {
        self.trainable().iter().map(|(_, var)| var.elem_count()).sum()
    }

    /// Sets every parameter and buffer from `tensors`. Nothing changes unless names and shapes all fit.
    ///
    /// What other programs save beside them is taken for what it is: the head of a language model once more where it is the
    /// embedding (`lm_head.weight`; refused if it is another), nanoGPT's masks (`*.attn.bias`) and Llama's angles
    /// (`*.rotary_emb.inv_freq`), which are computed here.
    pub fn set(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let vars = self.lock();
        let mut tensors: HashMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        tensors.retain(|name, tensor| vars.contains_key(*name) || !is_computed(name, tensor));
        let mut other_head = None;
        if let Some(table) = tied_table(|name| vars.contains_key(name))
            && let Some(head) = tensors.remove(HEAD)
        {
            // A file may have the one tensor under either name.
            let embedding = *tensors.entry(table).or_insert(head);
            other_head = (!is_same(embedding, head)?).then(|| {
                format!(
                    "{HEAD}: expected the numbers of {table}, which is the head (`tied`), found others: a head of its own \
                     takes `tied: false`"
                )
            });
        }
        let misshapen = |(name, var): (&String, &Var)| {
            let found = tensors.get(name.as_str())?;
            (found.shape() != var.shape())
                .then(|| format!("{name}: expected {:?}, found {:?}", var.dims(), found.dims()))
        };
        let mut extra: Vec<String> =
            tensors.keys().filter(|name| !vars.contains_key(**name)).map(|name| (*name).to_owned()).collect();
        extra.sort_unstable();
        let missing: Vec<_> =
            vars.keys().filter(|name| !tensors.contains_key(name.as_str())).cloned().collect();
        let misshapen: Vec<_> = vars.iter().filter_map(misshapen).chain(other_head).collect();
        if !(missing.is_empty() && extra.is_empty() && misshapen.is_empty()) {
            return Err(Error::Weights { missing, extra, misshapen });
        }
        let values = vars
            .iter()
            .map(|(name, var)| tensors[name.as_str()].to_dtype(var.dtype())?.to_device(var.device()));
        let values = values.collect::<candle_core::Result<Vec<_>>>()?;
        for (var, value) in vars.values().zip(values) {
            var.set(&value)?;
        }
        Ok(())
    }

    /// Loads a safetensors file of PyTorch's names and shapes.
    pub fn load(&self, path: &Path) -> Result<()> {
        self.set(&candle_core::safetensors::load(path, &Device::Cpu)?)
    }

    /// Saves a safetensors file of what there is, under PyTorch's names: `load_state_dict` accepts it, but for a language model whose head
    /// is its embedding. Theirs have that one once more, as `lm_head.weight`, which `taper export` adds.
    pub fn save(&self, path: &Path) -> Result<()> {
        let tensors: HashMap<_, _> =
            self.vars().into_iter().map(|(n, v)| (n, v.as_tensor().clone())).collect();
        Ok(candle_core::safetensors::save(&tensors, path)?)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        // A panic elsewhere cannot leave the map half changed: every insertion is one call.
        self.vars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What nanoGPT and Llama save and nobody trains: a mask of what came before, `[1, 1, tokens, tokens]`, and the rates of angles.
fn is_computed(name: &str, tensor: &Tensor) -> bool {
    match *tensor.dims() {
        [1, 1, rows, columns] => rows == columns && name.ends_with(".attn.bias"),
        [_] => name.ends_with(".rotary_emb.inv_freq"),
        _ => false,
    }
}

/// Whether two tensors have the same shape and the same numbers to the bit.
fn is_same(a: &Tensor, b: &Tensor) -> candle_core::Result<bool> {
    let bits = |t: &Tensor| -> candle_core::Result<Vec<u64>> {
        let numbers = t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        Ok(numbers.into_iter().map(f64::to_bits).collect())
    };
    Ok(a.shape() == b.shape() && a.dtype() == b.dtype() && bits(a)? == bits(b)?)
}

/// Running statistics: saved with the parameters, changed by the forward pass, never by an optimizer.
pub fn is_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var" | "num_batches_tracked")
}

/// Weights that are computed from the data before the first step ([`Model::see_images`](crate::Model::see_images)): saved with
/// the parameters, never changed again.
pub fn is_fixed(name: &str) -> bool {
    name == "whiten.weight" || name.ends_with(".whiten.weight")
}

fn is_trained(name: &str) -> bool {
    !is_buffer(name) && !is_fixed(name)
}

impl SimpleBackend for Params {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut vars = self.lock();
        if let Some(var) = vars.get(name) {
            if var.shape() != &shape {
                candle_core::bail!(
                    "`{name}` exists with shape {:?} and is asked for with {shape:?}",
                    var.shape()
                )
            }
            return Ok(var.as_tensor().clone());
        }
        let rng = Rng::new(self.seed, "init", name, 0);
        // Rounded before it moves: not every device has f64. In f32 at once, where that is asked for: a large matrix in f64
        // would be three times what it is to be.
        let values = match dtype {
            DType::F32 => Tensor::from_vec(draw(&shape, init, rng, |v| v as f32), shape, &Device::Cpu)?,
            _ => Tensor::from_vec(draw(&shape, init, rng, |v| v), shape, &Device::Cpu)?.to_dtype(dtype)?,
        };
        let var = Var::from_tensor(&values.to_device(device)?)?;
        let tensor = var.as_tensor().clone();
        vars.insert(name.to_owned(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        match self.lock().get(name) {
            Some(var) => Ok(var.as_tensor().clone()),
            None => candle_core::bail!("no parameter `{name}` and no shape to make it with"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// Whether a parameter of a name and so many axes is not to be trained.
type Held = dyn Fn(&str, usize) -> bool + Send + Sync;

/// Parameters some of which are not to be trained.
struct Holding {
    params: Params,
    held: Box<Held>,
}

impl Holding {
    fn hand_out(&self, name: &str, tensor: Tensor) -> Tensor {
        let held = is_trained(name) && (self.held)(name, tensor.rank());
        if held { tensor.detach() } else { tensor }
    }
}

impl SimpleBackend for Holding {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        self.params.get(shape, name, init, dtype, device).map(|tensor| self.hand_out(name, tensor))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        self.params.get_unchecked(name, dtype, device).map(|tensor| self.hand_out(name, tensor))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.params.contains_tensor(name)
    }
}

/// Initial values, drawn in f64 and then rounded.
fn draw<T: Clone>(shape: &Shape, init: Init, mut rng: Rng, round: impl Fn(f64) -> T) -> Vec<T> {
    use candle_nn::init::NormalOrUniform::{Normal, Uniform};
    let n = shape.elem_count();
    let mut uniform = |lo: f64, up: f64| (0..n).map(|_| round(lo + (up - lo) * rng.uniform())).collect();
    match init {
        Init::Const(value) => vec![round(value); n],
        Init::Uniform { lo, up } => uniform(lo, up),
        Init::Kaiming { dist: Uniform, fan, non_linearity } => {
            let bound = 3f64.sqrt() * non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            uniform(-bound, bound)
        }
        Init::Randn { mean, stdev } => (0..n).map(|_| round(mean + stdev * rng.normal())).collect(),
        Init::Kaiming { dist: Normal, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            (0..n).map(|_| round(stdev * rng.normal())).collect()
        }
    }
}

/// PyTorch's default for the weights and biases of a linear or convolution layer: U(±1/√fan_in).
pub fn torch_uniform(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in.max(1) as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_follows_its_variable_and_gets_no_gradient() -> candle_core::Result<()> {
        let params = Params::new(3);
        let get = |vb: VarBuilder| vb.get_with_hints((2, 2), "a", torch_uniform(2));
        let own = get(params.builder(DType::F32, &Device::Cpu))?;
        let held =
            get(params.builder_holding(DType::F32, &Device::Cpu, |name, rank| name == "a" && rank == 2))?;
        assert!(own.track_op() && !held.track_op());
        params.vars()[0].1.set(&Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?)?;
        assert_eq!(held.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, 4.0]]);
        Ok(())
    }

    #[test]
    fn values_do_not_depend_on_the_order_of_construction() -> candle_core::Result<()> {
        let make = |names: [&str; 2]| {
            let params = Params::new(3);
            let vb = params.builder(DType::F32, &Device::Cpu);
            for name in names {
                vb.get_with_hints((3, 5), name, torch_uniform(5))?;
            }
            params.vars().into_iter().map(|(_, v)| v.flatten_all()?.to_vec1::<f32>()).collect()
        };
        let (a, b): (candle_core::Result<Vec<_>>, _) = (make(["a", "b"]), make(["b", "a"]));
        let a = a?;
        assert_eq!(a, b?);
        assert_ne!(a[0], a[1]);
        assert!(a.iter().flatten().all(|v| v.abs() <= 0.2f32.sqrt()));
        Ok(())
    }

    #[test]
    fn what_other_programs_save_beside_a_tied_head_is_taken_for_what_it_is() -> Result<()> {
        let table = "transformer.wte.weight";
        let params = Params::new(3);
        let own = "transformer.h.0.attn.c_attn.bias";
        let vb = params.builder(DType::F32, &Device::Cpu);
        vb.get_with_hints((3, 2), table, candle_nn::init::ONE)?;
        vb.get_with_hints(2, own, candle_nn::init::ONE)?;
        let rows = Tensor::new(&[[1f32, -0.0], [f32::MIN_POSITIVE, 4.0], [5.0, 6.0]], &Device::Cpu)?;
        let of = |names: &[(&str, &Tensor)]| {
            let bias = (own.to_owned(), Tensor::new(&[7f32, 8.0], &Device::Cpu).unwrap());
            let named = names.iter().map(|(name, tensor)| ((*name).to_owned(), (*tensor).clone()));
            named.chain([bias]).collect::<HashMap<_, _>>()
        };
        let mask = Tensor::ones((1, 1, 4, 4), DType::F32, &Device::Cpu)?;
        let rates = Tensor::ones(4, DType::F32, &Device::Cpu)?;
        for names in [
            of(&[(table, &rows)]),
            of(&[(table, &rows), (HEAD, &rows)]),
            of(&[(HEAD, &rows)]),
            of(&[(table, &rows), (HEAD, &rows), ("transformer.h.0.attn.bias", &mask)]),
            of(&[(table, &rows), ("model.layers.0.self_attn.rotary_emb.inv_freq", &rates)]),
        ] {
            params.set(&of(&[(table, &Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?)]))?;
            params.set(&names)?;
            assert_eq!(params.vars()[1].1.to_vec2::<f32>()?, rows.to_vec2::<f32>()?);
        }
        // Equal numbers of other bits are others; so is what has the name of a mask and not its shape.
        let others = (&rows + 0.0)?;
        assert_eq!(others.to_vec2::<f32>()?, rows.to_vec2::<f32>()?);
        for (names, part) in [
            (
                of(&[(table, &rows), (HEAD, &others)]),
                "lm_head.weight: expected the numbers of transformer.wte.weight",
            ),
            (
                of(&[(table, &rows), ("transformer.h.0.attn.bias", &rates)]),
                "not in the model: transformer.h.0.attn.bias",
            ),
            (of(&[(HEAD, &mask)]), "transformer.wte.weight: expected [3, 2], found [1, 1, 4, 4]"),
        ] {
            let message = params.set(&names).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
            assert_eq!(params.vars()[1].1.to_vec2::<f32>()?, rows.to_vec2::<f32>()?);
        }
        Ok(())
    }

    #[test]
    fn wrong_weights_are_listed_and_change_nothing() -> Result<()> {
        let params = Params::new(3);
        let vb = params.builder(DType::F32, &Device::Cpu);
        vb.get_with_hints(2, "a", candle_nn::init::ONE)?;
        vb.get_with_hints(2, "b", candle_nn::init::ONE)?;
        let zeros = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu);
        let wrong = HashMap::from([("a".into(), zeros(3)?), ("c".into(), zeros(2)?)]);
        let message = params.set(&wrong).unwrap_err().to_string();
        for part in ["missing: b", "not in the model: c", "a: expected [2], found [3]"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(params.vars()[0].1.to_vec1::<f32>()?, [1.0, 1.0]);
        Ok(())
    }
}

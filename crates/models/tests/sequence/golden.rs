//! Results of PyTorch in f64, rounded to f32; limits as in the files' own documentation: logits 1e-5, loss 5e-6,
//! gradients 5e-5 of a tensor's largest entry.
use crate::support::*;
use candle_core::{DType, Device, Tensor, Var};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use taper_models::lstm::{LanguageModel, LstmConfig, Masks};
use taper_models::ops::{Activation, Mask, cross_entropy, linear};
use taper_models::registry::Config;
use taper_models::replay::largest_difference;
use taper_models::{Mode, Model, Params, Result, Task};

struct Golden {
    file: String,
    config: Value,
    tensors: HashMap<String, Tensor>,
}

impl Golden {
    fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("{}: no {name}", self.file))
    }

    /// What stands under `prefix.`, by the rest of its name.
    fn under(&self, prefix: &str) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().filter_map(move |(name, t)| Some((name.strip_prefix(prefix)?, t)))
    }

    fn close(&self, name: &str, got: &Tensor, limit: f64) {
        let (got, want) = (values(got), values(self.get(name)));
        assert_eq!(got.len(), want.len(), "{} {name}", self.file);
        let worst = largest_difference(&got, &want);
        assert!(worst <= limit, "{} {name}: off by {worst:e}", self.file);
    }

    fn gradients_close(&self, loss: &Tensor, vars: &[(String, Var)]) -> Result<()> {
        let grads = taper_models::backward(loss)?;
        assert_eq!(self.under("grad.").count(), vars.len());
        for (name, var) in vars {
            let (got, want) = (
                grads.get(var).unwrap_or_else(|| panic!("no gradient of {name}")),
                self.get(&format!("grad.{name}")),
            );
            let error = relative_error(got, want);
            assert!(error <= 5e-5, "{} grad.{name}: off by {error:e}", self.file);
        }
        Ok(())
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn goldens(model: &str) -> Vec<Golden> {
    taper_models::poison_uncleared_memory();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|p| {
        let name = p.file_name().unwrap().to_string_lossy();
        name.starts_with(model) && name.ends_with(".safetensors")
    });
    files.sort();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = serde_json::from_str(&header.metadata().as_ref().unwrap()["config"]).unwrap();
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        Golden { file: path.file_name().unwrap().to_string_lossy().into_owned(), config, tensors }
    };
    files.into_iter().map(read).collect()
}

#[test]
fn mlp_files_are_reproduced() -> Result<()> {
    let goldens = goldens("mlp");
    assert_eq!(goldens.len(), 2);
    for golden in goldens {
        let mut vars: Vec<(String, Var)> = Vec::new();
        for (name, t) in golden.under("state.") {
            vars.push((name.to_owned(), Var::from_tensor(t)?));
        }
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        let find = |name: String| vars.iter().find(|(n, _)| *n == name).unwrap().1.as_tensor().clone();
        let mut logits = golden.get("input").clone();
        for l in 0..vars.len() / 2 {
            let act = if l + 1 < vars.len() / 2 { Activation::Relu } else { Activation::None };
            logits = linear(
                &logits,
                &find(format!("{}.weight", 2 * l)),
                Some(&find(format!("{}.bias", 2 * l))),
                act,
            )?;
        }
        let loss = cross_entropy(&logits, golden.get("target"), &Default::default())?;
        golden.close("train.logits", &logits, 1e-5);
        golden.close("train.loss", &loss, 5e-6);
        golden.close("eval.logits", &logits, 1e-5);
        golden.gradients_close(&loss, &vars)?;
    }
    Ok(())
}

#[test]
fn lstm_files_are_reproduced() -> Result<()> {
    let goldens = goldens("lstm");
    assert_eq!(goldens.len(), 10);
    for golden in goldens {
        let mut config = golden.config.clone();
        let fields = config.as_object_mut().unwrap();
        for of_the_data in ["batch", "seq", "carry"] {
            fields.remove(of_the_data).unwrap();
        }
        let vocab = fields.remove("vocab").unwrap().as_u64().unwrap() as usize;
        let config: LstmConfig = serde_json::from_value(config).unwrap();
        let layers = config.layers;
        let params = Params::new(1);
        let mut model = LanguageModel::new(config, vocab, params.builder(DType::F32, &Device::Cpu))?;
        params.set(&golden.under("state.").map(|(n, t)| (n.to_owned(), t.clone())).collect())?;
        let start: Vec<(String, Tensor)> =
            golden.under("initial.").map(|(n, t)| (n.to_owned(), t.clone())).collect();
        let mask = |name: String| golden.tensors.get(&name).map(|t| Mask::from_tensor(t).unwrap());
        let masks = Masks {
            embedding: mask("mask.embedding".into()),
            input: mask("mask.input".into()),
            hidden: (0..layers).map(|l| mask(format!("mask.hidden.{l}"))).collect(),
            output: mask("mask.output".into()),
            weight_hh: (0..layers).map(|l| mask(format!("mask.weight_hh.{l}"))).collect(),
        };

        model.set_carry(&start)?;
        let hidden = model.hidden(golden.get("input"), &masks)?;
        golden.close("train.logits", &model.decode(&hidden.dropped)?, 1e-5);
        let loss = model.loss_of(&hidden, golden.get("target"), true)?;
        golden.close("train.loss", &loss.nll, 5e-6);
        golden.close("train.loss_total", &loss.total, 5e-6);
        for (name, state) in model.carry() {
            golden.close(&format!("hidden.{name}"), &state, 1e-5);
        }
        golden.gradients_close(&loss.total, &params.trainable())?;

        model.set_carry(&start)?;
        golden.close("eval.logits", &model.logits(golden.get("input"), Mode::Eval)?, 1e-5);
        for (name, state) in model.carry() {
            golden.close(&format!("eval.hidden.{name}"), &state, 1e-5);
        }
        model.set_carry(&start)?;
        let loss = model.loss(golden.get("input"), golden.get("target"), Mode::Eval)?;
        golden.close("eval.loss", &loss.nll, 5e-6);
        golden.close("eval.loss", &loss.total, 5e-6);
    }
    Ok(())
}

#[test]
fn parameter_counts_are_those_of_the_full_size_networks() -> Result<()> {
    let counts: Value =
        serde_json::from_str(&std::fs::read_to_string(folder().join("param_counts.json")).unwrap()).unwrap();
    for layers in 1..=3 {
        let config = LstmConfig { layers, ..Default::default() };
        let params = Params::new(1);
        LanguageModel::new(config.clone(), 10_000, params.builder(DType::F32, &Device::Cpu))?;
        assert_eq!(params.count(), counts[format!("lstm{layers}_10000_400_1150")]);
        assert_eq!(config.cost(Task::Tokens { vocab: 10_000 })?.parameters, params.count() as u64);
        let recurrent =
            params.vars().into_iter().filter(|(n, _)| n.contains("weight_hh")).map(|(_, v)| v.elem_count());
        assert_eq!(recurrent.sum::<usize>(), counts[format!("lstm{layers}_recurrent_weights")]);
    }
    Ok(())
}

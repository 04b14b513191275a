//! `manifest.json`: what a run ran with, stretch by stretch.
use super::inputs::Inputs;
use super::task::Task;
use super::{RunError, folder};
use crate::Recipe;
use crate::recipe::Precision;
use candle_core::Device;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;
use taper_data::{FileRecord, Provenance};
use taper_files::{sha256, sha256_file};

/// What a run ran with. The fields outside `stretches` are those of its last session; where sessions differed in what decides
/// the bits of a result, they name all of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Manifest {
    /// The recipe's id.
    pub recipe: String,
    /// The version of Taper.
    pub taper: String,
    /// The features of its build that are off by default.
    pub features: Vec<String>,
    /// Where it computed.
    pub device: String,
    /// The instruction sets of its processor.
    pub cpu_features: Vec<String>,
    /// The kernels that were chosen by them.
    #[serde(default)]
    pub kernels: String,
    /// Threads.
    #[serde(default)]
    pub threads: usize,
    /// Trained and other numbers of the model.
    #[serde(default)]
    pub parameters: usize,
    /// What it learned from.
    pub data: Provenance,
    /// The file of the weights it started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<FileRecord>,
    /// The shorter run that it is a continuation of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extends: Option<String>,
    /// Who did which steps.
    #[serde(default)]
    pub stretches: Vec<Stretch>,
    /// SHA-256 of the files that may differ between equal runs and that no other file vouches for.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// SHA-256 of this file with nothing here.
    #[serde(default)]
    pub sha256: String,
}

/// Steps that were taken in one session.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Stretch {
    /// Steps before it.
    pub from: u64,
    /// Steps after it; `None` while it goes on, or where its process was killed.
    pub to: Option<u64>,
    /// The version of Taper.
    pub taper: String,
    /// The commit it was built from, where the build knew it.
    pub revision: Option<String>,
    /// The features of its build that are off by default.
    pub features: Vec<String>,
    /// Where it computed.
    pub device: String,
    /// The kernels.
    pub kernels: String,
    /// The class of its machine.
    pub host: Host,
    /// Threads: results do not depend on them.
    pub threads: usize,
}

/// A class of machines: what can be told of one without naming it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Host {
    /// The architecture.
    pub arch: String,
    /// The system.
    pub os: String,
    /// The instruction sets that decide which kernels ran.
    pub cpu_features: Vec<String>,
}

const UNKNOWN: &str = "unknown";

impl Stretch {
    /// A session on this machine, with products of this precision.
    pub fn now(device: &Device, precision: Precision) -> Result<Self, RunError> {
        Ok(Self {
            from: 0,
            to: None,
            taper: env!("CARGO_PKG_VERSION").into(),
            revision: REVISION.get().cloned(),
            features: features(),
            device: format!("{:?}", device.location()).to_lowercase(),
            kernels: taper_models::instruction_set(precision.operands())?.into(),
            host: Host {
                arch: std::env::consts::ARCH.into(),
                os: std::env::consts::OS.into(),
                cpu_features: cpu_features().into_iter().map(str::to_owned).collect(),
            },
            threads: rayon::current_num_threads(),
        })
    }

    /// Steps of which the manifest is lost.
    fn unknown(to: u64) -> Self {
        let unknown = || UNKNOWN.to_owned();
        Self {
            from: 0,
            to: Some(to),
            taper: unknown(),
            revision: None,
            features: Vec::new(),
            device: unknown(),
            kernels: unknown(),
            host: Host { arch: unknown(), os: unknown(), cpu_features: Vec::new() },
            threads: 0,
        }
    }

    fn is_known(&self) -> bool {
        self.kernels != UNKNOWN
    }

    /// What decides the bits of a result, besides the version: results are equal where this is.
    pub fn arithmetic(&self) -> String {
        let Host { arch, cpu_features, .. } = &self.host;
        format!("{} with {} kernels on {arch} ({})", self.device, self.kernels, cpu_features.join(" "))
    }
}

/// The stretches before a session that goes on after `step` steps.
pub(super) fn past(before: Option<&Manifest>, step: u64) -> Vec<Stretch> {
    if step == 0 {
        return Vec::new();
    }
    let Some(before) = before.filter(|before| !before.stretches.is_empty()) else {
        return vec![Stretch::unknown(step)];
    };
    // What came after the checkpoint is done again.
    let kept = before.stretches.iter().filter(|stretch| stretch.from < step);
    kept.map(|stretch| Stretch { to: Some(stretch.to.unwrap_or(step).min(step)), ..stretch.clone() })
        .collect()
}

/// The different arithmetics that took part in a run; more than one only where the user allowed it.
pub(super) fn arithmetics(stretches: &[Stretch]) -> Vec<String> {
    let mut all = Vec::new();
    for stretch in stretches.iter().filter(|stretch| stretch.is_known()) {
        let arithmetic = stretch.arithmetic();
        if !all.contains(&arithmetic) {
            all.push(arithmetic);
        }
    }
    all
}

impl Manifest {
    pub(super) fn new(
        recipe: &Recipe,
        task: &dyn Task,
        inputs: &Inputs,
        extends: Option<String>,
        stretches: Vec<Stretch>,
        device: &Device,
    ) -> Result<Self, RunError> {
        let now = Stretch::now(device, recipe.train.precision)?;
        let joined = |of: &dyn Fn(&Stretch) -> String| {
            let mut all: Vec<String> = Vec::new();
            for value in stretches.iter().filter(|stretch| stretch.is_known()).map(of) {
                if !all.contains(&value) {
                    all.push(value);
                }
            }
            all.join(", ")
        };
        Ok(Self {
            recipe: recipe.id().to_owned(),
            taper: now.taper,
            features: now.features,
            device: joined(&|stretch| stretch.device.clone()),
            cpu_features: now.host.cpu_features,
            kernels: joined(&|stretch| stretch.kernels.clone()),
            threads: now.threads,
            parameters: task.params().count(),
            data: task.provenance().clone(),
            init_from: inputs.init_from.clone(),
            extends,
            stretches,
            files: BTreeMap::new(),
            sha256: String::new(),
        })
    }

    /// The file's bytes, its own checksum filled in.
    pub(super) fn seal(&mut self) -> serde_json::Result<Vec<u8>> {
        self.sha256.clear();
        self.sha256 = sha256(&serde_json::to_vec_pretty(self)?);
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Writes it into a run's folder, vouching for the recipe and the times there.
    pub(super) fn write(&mut self, run: &Path) -> Result<(), RunError> {
        for name in ["recipe.yaml", "timing.jsonl"] {
            match sha256_file(&run.join(name)) {
                Ok((_, sum)) => self.files.insert(name.into(), sum),
                // A session that has just begun has no times yet.
                Err(e) if e.source.kind() == std::io::ErrorKind::NotFound && name == "timing.jsonl" => None,
                Err(e) => return Err(e.into()),
            };
        }
        let path = run.join("manifest.json");
        let bytes = self.seal().map_err(|e| folder::damaged(&path, e.to_string()))?;
        Ok(taper_files::replace(&path, &bytes)?)
    }
}

static REVISION: OnceLock<String> = OnceLock::new();

/// Tells manifests the commit that the program was built from. Only the first call counts.
pub fn set_revision(revision: &str) {
    let _ = REVISION.set(revision.to_owned());
}

/// The features of this build that are off by default.
fn features() -> Vec<String> {
    let known = [
        ("hub", cfg!(feature = "hub")),
        ("cuda", cfg!(feature = "cuda")),
        ("cudnn", cfg!(feature = "cudnn")),
        ("metal", cfg!(feature = "metal")),
    ];
    known.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.to_owned()).collect()
}

/// The instruction sets that decide which kernels ran: results are equal bit for bit where these are.
fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let found = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
        ];
        found.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

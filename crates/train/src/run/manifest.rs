//! `manifest.json`: what a run ran with.
use super::task::Task;
use crate::Recipe;
use candle_core::Device;
use serde_json::json;
use tracing::debug;

/// The file's bytes.
pub(crate) fn manifest(recipe: &Recipe, task: &dyn Task, device: &Device) -> Vec<u8> {
    let kernels = taper_models::instruction_set().unwrap_or("none");
    let threads = rayon::current_num_threads();
    debug!("{}: kernels for {kernels}, {threads} threads", recipe.name);
    let manifest = json!({
        "recipe": recipe.id(),
        "taper": env!("CARGO_PKG_VERSION"),
        "features": features(),
        "device": format!("{:?}", device.location()).to_lowercase(),
        "cpu_features": cpu_features(),
        "kernels": kernels,
        "threads": threads,
        "parameters": task.params().count(),
        "data": task.provenance(),
    });
    let mut bytes =
        serde_json::to_vec_pretty(&manifest).unwrap_or_else(|_| manifest.to_string().into_bytes());
    bytes.push(b'\n');
    bytes
}

/// The features of this build that are off by default.
fn features() -> Vec<&'static str> {
    let known = [
        ("hub", cfg!(feature = "hub")),
        ("cuda", cfg!(feature = "cuda")),
        ("cudnn", cfg!(feature = "cudnn")),
        ("metal", cfg!(feature = "metal")),
        ("nccl", cfg!(feature = "nccl")),
    ];
    known.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect()
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

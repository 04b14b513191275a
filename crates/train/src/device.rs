//! Where to compute: opens the device that a recipe or a command names.
use crate::recipe::Device as Wanted;
use candle_core::Device;

/// An open device.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The device.
    pub device: Device,
    /// What `auto` chose and why, where a build has a choice.
    pub choice: Option<String>,
}

/// Opens `wanted`. The error says what is missing and what to do.
pub fn open(wanted: Wanted) -> Result<Opened, String> {
    let opened = |device| Ok(Opened { device, choice: None });
    match wanted {
        Wanted::Cpu => opened(Device::Cpu),
        Wanted::Cuda(number) => {
            cuda(number).map_err(|e| format!("{e}, or set `device: cpu`")).and_then(opened)
        }
        Wanted::Metal => metal().map_err(|e| format!("{e}, or set `device: cpu`")).and_then(opened),
        Wanted::Auto if cfg!(feature = "cuda") => Ok(choose("cuda:0", cuda(0))),
        Wanted::Auto if cfg!(feature = "metal") => Ok(choose("metal", metal())),
        Wanted::Auto => opened(Device::Cpu),
    }
}

fn choose(name: &str, found: Result<Device, String>) -> Opened {
    match found {
        Ok(device) => Opened { device, choice: Some(format!("device: {name}")) },
        Err(e) => Opened { device: Device::Cpu, choice: Some(format!("device: cpu, because {e}")) },
    }
}

fn cuda(number: usize) -> Result<Device, String> {
    if !cfg!(feature = "cuda") {
        return Err("this build of taper has no CUDA: build it with the feature `cuda` (docs/gpu.md)".into());
    }
    Device::new_cuda(number).map_err(|e| {
        let said = first_line(&e);
        format!("CUDA device {number} cannot be used ({said}): check the driver with `nvidia-smi`")
    })
}

fn metal() -> Result<Device, String> {
    if !cfg!(feature = "metal") {
        return Err(
            "this build of taper has no Metal: build it with the feature `metal` (docs/gpu.md)".into()
        );
    }
    Device::new_metal(0).map_err(|e| format!("the Metal device cannot be used ({})", first_line(&e)))
}

fn first_line(e: &candle_core::Error) -> String {
    e.to_string().lines().next().unwrap_or_default().to_owned()
}

#[cfg(all(test, not(any(feature = "cuda", feature = "metal"))))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_gpus_says_so_and_computes_on_the_cpu() {
        assert!(open(Wanted::Auto).unwrap().device.is_cpu());
        assert_eq!(open(Wanted::Auto).unwrap().choice, None);
        let error = open(Wanted::Cuda(0)).unwrap_err();
        assert_eq!(
            error,
            "this build of taper has no CUDA: build it with the feature `cuda` (docs/gpu.md), or set `device: cpu`"
        );
        assert!(open(Wanted::Metal).unwrap_err().contains("feature `metal`"));
    }
}

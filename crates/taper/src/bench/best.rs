//! Best against best: each side in the mode in which it is fastest.
use serde_json::Value;

/// The work of a benchmark's name, whatever the mode: `resnet18-step/128` of `resnet18-step/128/exact`.
fn work(result: &Value) -> Vec<&str> {
    result["name"].as_str().unwrap_or_default().split('/').take(2).collect()
}

/// PyTorch's best time over ours, its f32 and its bf16 and all of our modes of the same work considered. `None` where PyTorch was
/// measured in one mode only. `all` are results of [`Measured::json`](super::measure::Measured::json), `result` is one of them.
pub fn best_ratio(all: &[Value], result: &Value) -> Option<f64> {
    result["peer_bf16_s"].as_f64()?;
    let same = || all.iter().filter(|other| work(other) == work(result));
    let least = |keys: &[&str]| {
        let times = same().flat_map(|one| keys.iter().filter_map(|key| one[*key].as_f64()));
        times.reduce(f64::min)
    };
    Some(least(&["peer_s", "peer_bf16_s"])? / least(&["ours_s"])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_side_is_taken_in_its_fastest_mode() {
        let all = [
            json!({"name": "resnet18-step/32/fast", "ours_s": 2.0, "peer_s": 5.0, "peer_bf16_s": 3.0}),
            json!({"name": "resnet18-step/32/exact", "ours_s": 4.0, "peer_s": 4.5, "peer_bf16_s": 3.5}),
            json!({"name": "resnet18-step/128/fast", "ours_s": 1.0, "peer_s": 2.0, "peer_bf16_s": 9.0}),
            json!({"name": "optim/adam/one", "ours_s": 1.0, "peer_s": 2.0}),
            json!({"name": "gemm/256", "ours_s": null, "peer_s": 2.0, "peer_bf16_s": 1.0}),
        ];
        let found: Vec<_> = all.iter().map(|result| best_ratio(&all, result)).collect();
        assert_eq!(found, [Some(1.5), Some(1.5), Some(2.0), None, None]);
    }
}

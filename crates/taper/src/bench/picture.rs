//! Results as a picture: the time of every workload on a logarithmic axis.
use super::best_ratio;
use serde_json::Value;
use taper_figures::plot::Dots;

/// What is shown: a key of the results and its name.
const SIDES: [(&str, &str); 4] =
    [("ours_s", "Taper"), ("peer_s", "PyTorch"), ("candle_s", "candle"), ("peer_bf16_s", "PyTorch bf16")];

/// Draws the results that have PyTorch's time beside ours, as SVG. `results` are those of [`Measured::json`].
///
/// [`Measured::json`]: super::Measured::json
pub fn picture(results: &[Value]) -> Result<String, String> {
    let rows: Vec<&Value> = results.iter().filter(|r| r["peer_s"].is_f64() && r["ours_s"].is_f64()).collect();
    if rows.is_empty() {
        return Err("no result has PyTorch's time: measure with `--peer --json`".into());
    }
    // The second PyTorch is there only where the CPU multiplies in bf16.
    let second = rows.iter().any(|row| row["peer_bf16_s"].is_f64());
    let sides = &SIDES[..if second { 4 } else { 3 }];
    let row = |row: &&Value| {
        let ratio = match (row["ratio"].as_f64(), best_ratio(results, row)) {
            (Some(ratio), Some(best)) => format!("{ratio:.2}, {best:.2}"),
            (Some(ratio), None) => format!("{ratio:.2} x"),
            _ => String::new(),
        };
        let values = sides.iter().map(|(key, _)| row[*key].as_f64()).collect();
        (row["name"].as_str().unwrap_or_default().to_owned(), ratio, values)
    };
    let best = if second { ", then best against best" } else { "" };
    let dots = Dots {
        title: format!("seconds, less is better; PyTorch's time / ours{best}"),
        sides: sides.iter().map(|(_, name)| (*name).to_owned()).collect(),
        rows: rows.iter().map(row).collect(),
    };
    Ok(dots.svg())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_without_a_peer_are_left_out() {
        let rows = [
            json!({"name": "mlp-step/128", "ours_s": 3e-4, "peer_s": 7e-4, "candle_s": 3e-3, "ratio": 2.33}),
            json!({"name": "input/plain", "ours_s": 0.1, "peer_s": null}),
        ];
        let svg = picture(&rows).unwrap();
        assert!(svg.contains("mlp-step/128") && svg.contains("2.33 x") && !svg.contains("input"));
        assert!(!svg.contains("bf16"), "{svg}");
        assert!(picture(&rows[1..]).unwrap_err().contains("--peer --json"));
    }

    #[test]
    fn the_second_peer_is_drawn_where_it_was_measured() {
        let rows = [
            json!({"name": "mlp-step/128", "ours_s": 4e-4, "peer_s": 8e-4, "peer_bf16_s": 6e-4, "ratio": 2.0}),
            json!({"name": "optim/adam/one", "ours_s": 1e-2, "peer_s": 1.1e-2, "ratio": 1.1}),
        ];
        let svg = picture(&rows).unwrap();
        assert!(svg.contains("PyTorch bf16") && svg.contains("then best against best"), "{svg}");
        assert!(svg.contains("2.00, 1.50") && svg.contains("1.10 x"), "{svg}");
    }
}

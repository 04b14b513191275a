//! Results as a picture: the time of every workload on a logarithmic axis.
use serde_json::Value;
use taper_figures::plot::Dots;

/// What is shown: a key of the results and its name.
const SIDES: [(&str, &str); 3] = [("ours_s", "Taper"), ("peer_s", "PyTorch"), ("candle_s", "candle")];

/// Draws the results that have PyTorch's time beside ours, as SVG. `results` are those of [`Measured::json`].
///
/// [`Measured::json`]: super::Measured::json
pub fn picture(results: &[Value]) -> Result<String, String> {
    let rows: Vec<&Value> = results.iter().filter(|r| r["peer_s"].is_f64() && r["ours_s"].is_f64()).collect();
    if rows.is_empty() {
        return Err("no result has PyTorch's time: measure with `--peer --json`".into());
    }
    let row = |row: &&Value| {
        let ratio = row["ratio"].as_f64().map(|ratio| format!("{ratio:.2} x")).unwrap_or_default();
        let values = SIDES.iter().map(|(key, _)| row[*key].as_f64()).collect();
        (row["name"].as_str().unwrap_or_default().to_owned(), ratio, values)
    };
    let dots = Dots {
        title: "seconds, less is better; PyTorch's time / ours".into(),
        sides: SIDES.iter().map(|(_, name)| (*name).to_owned()).collect(),
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
        assert!(picture(&rows[1..]).unwrap_err().contains("--peer --json"));
    }
}

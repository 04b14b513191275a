//! Results as a picture: the time of every workload on a logarithmic axis.
use plotters::prelude::*;
use serde_json::Value;

/// What is shown: a key of the results, its name and its colour.
const SIDES: [(&str, &str, RGBColor); 3] = [
    ("ours_s", "Taper", RGBColor(0, 114, 178)),
    ("peer_s", "PyTorch", RGBColor(213, 94, 0)),
    ("candle_s", "candle", RGBColor(90, 90, 90)),
];

/// Draws the results that have PyTorch's time beside ours, as SVG. `results` are those of [`Measured::json`].
///
/// [`Measured::json`]: super::Measured::json
pub fn picture(results: &[Value]) -> Result<String, String> {
    let rows: Vec<&Value> = results.iter().filter(|r| r["peer_s"].is_f64() && r["ours_s"].is_f64()).collect();
    if rows.is_empty() {
        return Err("no result has PyTorch's time: measure with `--peer --json`".into());
    }
    let mut svg = String::new();
    draw(&rows, &mut svg).map_err(|e| e.to_string())?;
    Ok(svg)
}

fn draw(rows: &[&Value], svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let times = || rows.iter().flat_map(|row| SIDES.iter().filter_map(|(key, ..)| row[*key].as_f64()));
    let (low, high) = times().fold((f64::INFINITY, 0f64), |(l, h), t| (l.min(t), h.max(t)));
    let area = SVGBackend::with_string(svg, (900, 90 + 24 * rows.len() as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("seconds, less is better", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(230)
        .build_cartesian_2d((low * 0.6..high * 1.6).log_scale(), -0.7..rows.len() as f64 - 0.3)?;
    // The first row on top.
    let height = |i: usize| (rows.len() - 1 - i) as f64;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE.mix(0.0))
        .bold_line_style(BLACK.mix(0.12))
        .y_labels(0)
        .x_label_formatter(&|x| format!("{x:.0e}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (key, name, colour) in SIDES {
        let points = rows.iter().enumerate().filter_map(|(i, row)| Some((row[key].as_f64()?, height(i))));
        chart
            .draw_series(points.map(|at| Circle::new(at, 5, colour.filled())))?
            .label(name)
            .legend(move |(x, y)| Circle::new((x + 9, y), 5, colour.filled()));
    }
    let plotting = chart.plotting_area();
    for (i, row) in rows.iter().enumerate() {
        let (_, y) = plotting.map_coordinate(&(low, height(i)));
        let ratio = row["ratio"].as_f64().map(|r| format!("{r:.2} x")).unwrap_or_default();
        let text = format!("{}   {ratio}", row["name"].as_str().unwrap_or_default());
        let style = ("sans-serif", 13).into_text_style(&area);
        let (width, _) = area.estimate_text_size(&text, &style)?;
        area.draw_text(&text, &style, (236 - width as i32, y - 7))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
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

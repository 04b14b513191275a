//! The picture that a training leaves.
use std::path::Path;
use taper_figures::plot::{Chart, Picture, Scale, Series, Sheet};
use taper_train::run::{Outcome, Record, Split};

/// Whether runs count in steps: none has more than one epoch, or one was judged several times within an epoch.
pub fn by_steps<'a>(mut runs: impl Iterator<Item = &'a Outcome> + Clone) -> bool {
    let twice = |run: &Outcome| {
        let judged = run.records.iter().filter(|record| record.split == Split::Test);
        let epochs: Vec<u64> = judged.map(|record| record.epoch).collect();
        epochs.windows(2).any(|pair| pair[0] == pair[1])
    };
    runs.clone().all(|run| run.summary.epochs <= 1) || runs.any(twice)
}

/// Draws training loss (log scale) and the test metric of several runs side by side, as SVG. Runs that count in steps are drawn
/// by them, on log axes; where the loss is all there is to judge by, it is the only panel.
pub fn curves(runs: &[(String, &Outcome)], path: &Path) -> Result<(), String> {
    let metric = runs.first().map_or("loss", |(_, run)| run.summary.metric.as_str());
    let by_step = by_steps(runs.iter().map(|(_, run)| *run));
    let clock = if by_step { "step" } else { "epoch" };
    let panel = |title: &str, split: Split, metric: &str, factor: f64, y_scale: Scale| {
        let line = |(style, (label, run)): (usize, &(String, &Outcome))| {
            let time = |record: &Record| if by_step { record.step } else { record.epoch } as f64;
            let records = run.records.iter().filter(|record| record.split == split);
            let points =
                records.filter_map(|record| Some((time(record), factor * record.values.get(metric)?)));
            Series::line(label, style, points.collect())
        };
        let series = runs.iter().enumerate().map(line).collect();
        let text = format!("{title} of {} runs by {clock}", runs.len());
        let x_scale = if by_step { Scale::Log } else { Scale::Linear };
        Picture::Chart(Chart { x_scale, y_scale, series, ..Chart::new(title, &text, clock, "") })
    };
    let mut pictures = vec![panel("training loss", Split::Train, "loss", 1.0, Scale::Log)];
    match metric {
        "loss" => {}
        "accuracy" => {
            pictures.push(panel("test accuracy, %", Split::Test, metric, 100.0, Scale::Linear));
        }
        other => pictures.push(panel(&format!("test {other}"), Split::Test, other, 1.0, Scale::Log)),
    }
    let sheet = Sheet { title: "Learning curves".into(), rows: vec![pictures] };
    std::fs::write(path, sheet.svg()).map_err(|e| format!("{}: {e}", path.display()))
}

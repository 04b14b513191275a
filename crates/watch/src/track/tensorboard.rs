//! A folder for TensorBoard with true times: scalars, the settings and results in its HParams plugin, histograms of the optimizer's
//! vector v by the probe, and of the weights by the checkpoints that are there.
//!
//! The event file inside a run has steps in place of times, because its bytes are promised to be equal between equal runs. This one is
//! promised nothing and may say when.
use super::wall::Wall;
use super::{TrackError, Tracked, io, text};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use taper_train::run::tensorboard::{bytes, double, event, header, summary_event};
use taper_train::run::{Record, Split, Status};

/// The buckets of a histogram of weights.
const BUCKETS: usize = 30;

/// Writes a run's file, or what is new of it; gives the count of events that were added.
pub(super) fn write(run: &Tracked, out: &Path) -> Result<u64, TrackError> {
    let folder = out.join(run.name());
    fs::create_dir_all(&folder).map_err(io(&folder))?;
    let wall = Wall::read(&run.folder);
    // What was written stays as it is: a reader may be in the middle of it. So a run that goes on is written up to the last step
    // whose time is known.
    let until = if run.running { wall.known() } else { u64::MAX };
    let mut events = vec![header(wall.began()), start(run, &wall)];
    let weights = weights(run)?;
    let mut weights = weights.into_iter().peekable();
    run.records(0, |record, _| {
        if record.step <= until {
            while let Some((step, summary)) = weights.next_if(|(step, _)| *step < record.step) {
                events.push(summary_event(&summary, step, wall.at(step)));
            }
            let time = wall.at(record.step);
            if record.split == Split::Probe
                && let Some(summary) = distributions(&record)
            {
                events.push(summary_event(&summary, record.step, time));
            }
            events.push(event(&record, time));
        }
        Ok(())
    })?;
    if !run.running {
        events.extend(weights.map(|(step, summary)| summary_event(&summary, step, wall.at(step))));
    }
    events.extend(end(run, &wall));
    let path = folder.join("events.out.tfevents.1.taper");
    let before = fs::read(&path).unwrap_or_default();
    // As many events as the file has already, if it has these.
    let (mut same, mut at) = (0, 0);
    for event in &events {
        if before[at..].starts_with(event) {
            (same, at) = (same + 1, at + event.len());
        } else {
            break;
        }
    }
    let anew = at < before.len();
    let new = if anew { &events[..] } else { &events[same..] };
    if new.is_empty() {
        return Ok(0);
    }
    let mut options = OpenOptions::new();
    let mut file =
        options.create(true).append(!anew).write(true).truncate(anew).open(&path).map_err(io(&path))?;
    file.write_all(&new.concat()).map_err(io(&path))?;
    Ok((events.len() - same) as u64)
}

/// A value of a summary for the HParams plugin.
fn plugin(tag: &str, data: &[u8]) -> Vec<u8> {
    let plugin_data = [bytes(1, b"hparams"), bytes(2, data)].concat();
    // A tensor of no numbers: type float, one dimension of size 0.
    let tensor = [vec![1 << 3, 1], bytes(2, &bytes(2, &[]))].concat();
    bytes(1, &[bytes(1, tag.as_bytes()), bytes(9, &bytes(1, &plugin_data)), bytes(8, &tensor)].concat())
}

/// The settings.
fn start(run: &Tracked, wall: &Wall) -> Vec<u8> {
    let mut info = Vec::new();
    for (key, value) in run.settings() {
        let value = match &value {
            Value::Bool(value) => vec![4 << 3, u8::from(*value)],
            Value::Number(number) => double(2, number.as_f64().unwrap_or(f64::NAN)),
            value => bytes(3, text(value).as_bytes()),
        };
        info.extend(bytes(1, &[bytes(1, key.as_bytes()), bytes(2, &value)].concat()));
    }
    // Runs that differ only in their seed are one group.
    info.extend(bytes(4, run.recipe.configuration().as_bytes()));
    info.extend(double(5, wall.began()));
    summary_event(&plugin("_hparams_/session_start_info", &bytes(3, &info)), 0, wall.began())
}

/// How it ended, if it did.
fn end(run: &Tracked, wall: &Wall) -> Option<Vec<u8>> {
    let status: u8 = match run.status()? {
        Status::Finished => 1,
        Status::Diverged => 2,
        Status::Interrupted => 0,
    };
    let info = [vec![1 << 3, status], double(2, wall.ended())].concat();
    let step = run.summary.as_ref().map_or(0, |summary| summary.steps);
    Some(summary_event(&plugin("_hparams_/session_end_info", &bytes(4, &info)), step, wall.ended()))
}

/// A histogram: the least and the largest, how many, their sum and that of their squares, and buckets by their upper ends.
fn histogram(
    tag: &str,
    ends: (f64, f64),
    (num, sum, squares): (f64, f64, f64),
    buckets: &[(f64, f64)],
) -> Vec<u8> {
    let packed =
        |of: fn(&(f64, f64)) -> f64| buckets.iter().flat_map(|b| of(b).to_le_bytes()).collect::<Vec<u8>>();
    let histogram = [
        double(1, ends.0),
        double(2, ends.1),
        double(3, num),
        double(4, sum),
        double(5, squares),
        bytes(6, &packed(|bucket| bucket.0)),
        bytes(7, &packed(|bucket| bucket.1)),
    ];
    bytes(1, &[bytes(1, tag.as_bytes()), bytes(5, &histogram.concat())].concat())
}

/// The distributions of a probe, one a tensor, of a hundred hundredths each: a probe has quantiles and not the elements.
fn distributions(record: &Record) -> Option<Vec<u8>> {
    let mut summary = Vec::new();
    for (name, least) in &record.values {
        let Some((vector, tensor)) = name.split_once("_min/") else { continue };
        let of = |which: &str| record.values.get(&format!("{vector}_{which}/{tensor}")).copied();
        let quantiles =
            [("p01", 1.0), ("p25", 24.0), ("p50", 25.0), ("p75", 25.0), ("p99", 24.0), ("max", 1.0)];
        let buckets =
            quantiles.into_iter().map(|(which, share)| Some((of(which)?, share))).collect::<Option<Vec<_>>>();
        let (Some(buckets), Some(mean), Some(largest)) = (buckets, of("mean"), of("max")) else { continue };
        let squares: f64 = buckets.iter().map(|(limit, share)| share * limit * limit).sum();
        let tag = format!("{vector}/{tensor}");
        summary.extend(histogram(&tag, (*least, largest), (100.0, 100.0 * mean, squares), &buckets));
    }
    (!summary.is_empty()).then_some(summary)
}

/// The weights of every checkpoint that is there, by step. One that cannot be read is left out: pruning may have taken it.
fn weights(run: &Tracked) -> Result<Vec<(u64, Vec<u8>)>, TrackError> {
    let Ok(entries) = fs::read_dir(run.folder.join("checkpoints")) else { return Ok(Vec::new()) };
    let mut found = BTreeMap::new();
    // A checkpoint of a run under way may go at any time, and its histogram would go with it: they come with the end.
    for entry in entries.filter_map(Result::ok).filter(|_| !run.running) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(step) = name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok()) else {
            continue;
        };
        let Ok(file) = fs::read(entry.path().join("model.safetensors")) else { continue };
        let Ok(tensors) = SafeTensors::deserialize(&file) else { continue };
        let mut tensors = tensors.tensors();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut summary = Vec::new();
        for (name, tensor) in &tensors {
            summary.extend(of_tensor(&format!("weights/{name}"), &numbers(tensor.dtype(), tensor.data())));
        }
        found.insert(step, summary);
    }
    Ok(found.into_iter().collect())
}

/// The elements of a tensor; none of a type that no network of ours has.
fn numbers(dtype: Dtype, data: &[u8]) -> Vec<f64> {
    let four =
        |bytes: &[u8]| <[u8; 4]>::try_from(bytes).map_or(f64::NAN, |b| f64::from(f32::from_le_bytes(b)));
    match dtype {
        Dtype::F32 => data.chunks_exact(4).map(four).collect(),
        Dtype::F64 => {
            data.chunks_exact(8).map(|b| b.try_into().map_or(f64::NAN, f64::from_le_bytes)).collect()
        }
        // The upper half of an f32.
        Dtype::BF16 => data.chunks_exact(2).map(|b| four(&[0, 0, b[0], b[1]])).collect(),
        _ => Vec::new(),
    }
}

/// The histogram of all finite elements, in equal steps from the least to the largest.
fn of_tensor(tag: &str, values: &[f64]) -> Vec<u8> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return Vec::new();
    }
    let width = (high - low) / BUCKETS as f64;
    let mut buckets: Vec<(f64, f64)> = (1..=BUCKETS).map(|i| (low + i as f64 * width, 0.0)).collect();
    if let Some(last) = buckets.last_mut() {
        last.0 = high;
    }
    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0.0);
    for value in finite() {
        let place = if width > 0.0 { ((value - low) / width) as usize } else { 0 };
        buckets[place.min(BUCKETS - 1)].1 += 1.0;
        (sum, squares, count) = (sum + value, squares + value * value, count + 1.0);
    }
    histogram(tag, (low, high), (count, sum, squares), &buckets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_of_one_value_or_of_none_has_a_histogram_or_none() {
        assert!(of_tensor("a", &[]).is_empty());
        assert!(of_tensor("a", &[f64::NAN]).is_empty());
        assert!(!of_tensor("a", &[1.0, 1.0]).is_empty());
    }
}

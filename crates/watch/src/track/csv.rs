//! Comma-separated values: one number a line, in one file a run.
use super::{TrackError, Tracked, io};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes the file of a run anew: it is a function of the run. Gives the number of lines that it did not have before.
pub(super) fn write(run: &Tracked, out: &Path) -> Result<u64, TrackError> {
    fs::create_dir_all(out).map_err(io(out))?;
    let path = out.join(format!("{}.csv", run.name()));
    let before =
        fs::read(&path).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count() as u64);
    let file = File::create(&path).map_err(io(&path))?;
    let (mut file, mut lines) = (BufWriter::new(file), 1);
    writeln!(file, "step,epoch,split,metric,value").map_err(io(&path))?;
    run.records(0, |record, _| {
        for (name, value) in &record.values {
            let name = field(name);
            writeln!(file, "{},{},{},{name},{value}", record.step, record.epoch, record.split.name())
                .map_err(io(&path))?;
            lines += 1;
        }
        Ok(())
    })?;
    file.flush().map_err(io(&path))?;
    Ok(lines.max(before) - before)
}

/// A name in quotes where it has to be.
fn field(name: &str) -> String {
    match name.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", name.replace('"', "\"\"")),
        false => name.to_owned(),
    }
}

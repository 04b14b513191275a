//! A folder as the `wandb` package leaves it for a run without a network, which the user's own `wandb sync` uploads.
//!
//! Its one file is a log in blocks: a header of seven bytes, then records, each with a checksum, a length and whether it is whole, cut
//! where a block of 32 KiB ends. Every record is a protobuf message of `wandb_internal.proto`. The file is a function of the run.
use super::wall::Wall;
use super::{TrackError, Tracked, io};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use taper_train::run::tensorboard::{bytes, crc, varint};
use taper_train::run::{Record, Status};

/// The project that runs belong to.
const PROJECT: &str = "taper";

/// What a message is, by its field in `Record`.
const HISTORY: u64 = 2;
const SUMMARY: u64 = 3;
const RUN: u64 = 17;
const EXIT: u64 = 18;
const FINAL: u64 = 20;
const HEADER: u64 = 21;
const FOOTER: u64 = 22;

/// Writes a run's folder, or leaves it if it is as it should be; gives the count of rows that it did not have.
pub(super) fn write(run: &Tracked, out: &Path) -> Result<u64, TrackError> {
    let wall = Wall::read(&run.folder);
    if run.running && wall.known() == 0 {
        // When it began is known with its first epoch, and stands in the folder's name.
        return Ok(0);
    }
    let id = run.recipe.id();
    let folder = out.join(format!("offline-run-{}-{id}", stamp(wall.began())));
    let path = folder.join(format!("run-{id}.wandb"));
    let (file, rows) = file(run, &wall)?;
    let before = fs::read(&path).unwrap_or_default();
    if before == file {
        return Ok(0);
    }
    // Its user's `sync` puts a mark beside what it has sent, and passes over it from then on; this has more.
    let mark = folder.join(format!("run-{id}.wandb.synced"));
    if let Err(e) = fs::remove_file(&mark)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        return Err(io(&mark)(e));
    }
    // Where the package keeps what else it uploads; `sync` wants to be able to write there.
    let files = folder.join("files");
    fs::create_dir_all(&files).map_err(io(&files))?;
    taper_files::replace(&path, &file)
        .map_err(|e| TrackError::Run { path: path.clone(), message: e.to_string() })?;
    let same = before.iter().zip(&file).take_while(|(a, b)| a == b).count();
    Ok(rows.iter().filter(|end| **end > same).count() as u64)
}

/// The whole file, and where each of its rows ends.
fn file(run: &Tracked, wall: &Wall) -> Result<(Vec<u8>, Vec<usize>), TrackError> {
    let mut log = Log::default();
    log.record(HEADER, &[]);
    log.record(RUN, &about(run, wall));
    // Rows are one a step here, whatever was measured at it; a run that goes on has rows up to where times are known.
    let until = if run.running { wall.known() } else { u64::MAX };
    let mut last: BTreeMap<String, String> = BTreeMap::new();
    let mut rows = Vec::new();
    let mut row: Option<Row> = None;
    run.records(0, |record, _| {
        if record.step <= until {
            if let Some(whole) = row.take_if(|row| row.step != record.step) {
                rows.push(log.row(whole, wall, &mut last));
            }
            row.get_or_insert_with(|| Row { step: record.step, values: BTreeMap::new() }).add(&record);
        }
        Ok(())
    })?;
    if let Some(whole) = row {
        rows.push(log.row(whole, wall, &mut last));
    }
    if let Some(status) = run.status() {
        last.insert("status".into(), Value::from(name(status)).to_string());
    }
    log.record(SUMMARY, &items(&last));
    if let Some(status) = run.status() {
        let code = match status {
            Status::Finished => 0,
            Status::Diverged => 1,
            Status::Interrupted => 130,
        };
        let seconds = (wall.ended() - wall.began()).max(0.0) as u64;
        log.record(EXIT, &[number(1, code), number(2, seconds)].concat());
        log.record(FINAL, &[]);
        log.record(FOOTER, &[]);
    }
    Ok((log.bytes, rows))
}

fn name(status: Status) -> &'static str {
    match status {
        Status::Finished => "finished",
        Status::Diverged => "diverged",
        Status::Interrupted => "interrupted",
    }
}

/// The run itself: its names and its settings. Runs of one name, as those of a sweep, are a group.
fn about(run: &Tracked, wall: &Wall) -> Vec<u8> {
    let settings: BTreeMap<String, String> = match run.recipe.resolved() {
        Value::Object(settings) => {
            settings.iter().map(|(key, value)| (key.clone(), value.to_string())).collect()
        }
        _ => BTreeMap::new(),
    };
    let began = wall.began().max(0.0);
    let start = [number(1, began as u64), number(2, (began.fract() * 1e9) as u64)].concat();
    [
        bytes(1, run.recipe.id().as_bytes()),
        bytes(3, PROJECT.as_bytes()),
        bytes(4, &items(&settings)),
        bytes(6, run.recipe.name.as_bytes()),
        bytes(8, run.name().as_bytes()),
        bytes(17, &start),
    ]
    .concat()
}

/// All that was measured at a step.
struct Row {
    step: u64,
    values: BTreeMap<String, String>,
}

impl Row {
    fn add(&mut self, record: &Record) {
        self.values.insert("epoch".into(), record.epoch.to_string());
        for (name, value) in &record.values {
            self.values.insert(format!("{}/{name}", record.split.name()), float(*value));
        }
    }
}

/// A number as Python's JSON has it, which the package itself writes: it knows what is not finite.
fn float(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => Value::from(value).to_string(),
    }
}

/// Keys and their values, each of them JSON.
fn items(values: &BTreeMap<String, String>) -> Vec<u8> {
    let item = |(key, value): (&String, &String)| {
        bytes(1, &[bytes(1, key.as_bytes()), bytes(16, value.as_bytes())].concat())
    };
    values.iter().flat_map(item).collect()
}

/// A field that is a whole number.
fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// Seconds since 1970 as the package names folders, in universal time: `20261117_162354`.
fn stamp(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let (mut days, time) = (seconds / 86_400, seconds % 86_400);
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // After the year 9999 the clock is wrong, and the name no matter.
    let (mut year, mut month) = (1970, 1);
    while year < 9999 && days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let day = (days + 1).min(31);
    format!("{year}{month:02}{day:02}_{:02}{:02}{:02}", time / 3600, time / 60 % 60, time % 60)
}

/// The log under way.
struct Log {
    bytes: Vec<u8>,
    /// Records so far.
    count: u64,
}

/// Records are cut where a block ends.
const BLOCK: usize = 32 << 10;
/// A checksum, a length and a kind.
const HEAD: usize = 7;
/// CRC-32 as in zlib.
const POLYNOMIAL: u32 = 0xedb8_8320;

impl Default for Log {
    fn default() -> Self {
        // A name, a number by which to know it, and the version 0.
        Self { bytes: b":W&B\xe1\xbe\x00".to_vec(), count: 0 }
    }
}

impl Log {
    /// A message as the next record.
    fn record(&mut self, field: u64, message: &[u8]) {
        self.count += 1;
        self.data(&[number(1, self.count), bytes(field, message)].concat());
    }

    /// A row of values; gives where it ends.
    fn row(&mut self, row: Row, wall: &Wall, last: &mut BTreeMap<String, String>) -> usize {
        let time = wall.at(row.step);
        let mut values = row.values;
        values.insert("_step".into(), row.step.to_string());
        values.insert("_timestamp".into(), float(time));
        values.insert("_runtime".into(), float((time - wall.began()).max(0.0)));
        // The step stands in the row, and once more beside it.
        let step = bytes(2, &number(1, row.step));
        self.record(HISTORY, &[items(&values), step].concat());
        last.extend(values);
        self.bytes.len()
    }

    fn data(&mut self, mut data: &[u8]) {
        let mut is_first = true;
        loop {
            let room = BLOCK - self.bytes.len() % BLOCK;
            if room < HEAD {
                // No head fits: the block ends with zeros.
                self.bytes.resize(self.bytes.len() + room, 0);
                continue;
            }
            let (part, rest) = data.split_at(data.len().min(room - HEAD));
            let kind: u8 = match (is_first, rest.is_empty()) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let length = part.len() as u16;
            let checked = [&[kind], part].concat();
            self.bytes.extend(crc(POLYNOMIAL, &checked).to_le_bytes());
            self.bytes.extend(length.to_le_bytes());
            self.bytes.extend(checked);
            if rest.is_empty() {
                return;
            }
            (data, is_first) = (rest, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(stamp(0.0), "19700101_000000");
        assert_eq!(stamp(1_794_932_634.9), "20261117_162354");
        assert_eq!(stamp(951_782_399.0), "20000228_235959");
        assert_eq!(stamp(951_782_400.0), "20000229_000000");
        assert_eq!(stamp(1_735_689_599.0), "20241231_235959");
        assert_eq!(stamp(f64::NAN), "19700101_000000");
        assert!(stamp(f64::INFINITY).starts_with("9999"));
    }

    #[test]
    fn the_checksum_is_that_of_zlib() {
        assert_eq!(crc(POLYNOMIAL, b"123456789"), 0xcbf4_3926);
    }

    /// The records of a log, by what the format says.
    fn read(log: &[u8]) -> Vec<Vec<u8>> {
        let (mut at, mut out) = (HEAD, Vec::new());
        while at < log.len() {
            let room = BLOCK - at % BLOCK;
            if room < HEAD {
                assert!(log[at..at + room].iter().all(|byte| *byte == 0));
                at += room;
            }
            let length = usize::from(u16::from_le_bytes([log[at + 4], log[at + 5]]));
            assert!(length + HEAD <= BLOCK - at % BLOCK, "it is within its block");
            let checked = &log[at + 6..at + HEAD + length];
            assert_eq!(log[at..at + 4], crc(POLYNOMIAL, checked).to_le_bytes());
            match checked[0] {
                1 | 2 => out.push(checked[1..].to_vec()),
                3 | 4 => out.last_mut().unwrap().extend(&checked[1..]),
                kind => panic!("{kind}"),
            }
            at += HEAD + length;
        }
        out
    }

    #[test]
    fn records_are_cut_where_blocks_end() {
        // Lengths that leave a block every room there is from none to more than a head.
        for left in 0..20 {
            let lengths = [BLOCK - 2 * HEAD - left, 1, 0, 3 * BLOCK, 5];
            let data: Vec<Vec<u8>> = lengths.iter().map(|length| vec![7; *length]).collect();
            let mut log = Log::default();
            data.iter().for_each(|data| log.data(data));
            assert_eq!(read(&log.bytes), data, "{left}");
        }
    }
}

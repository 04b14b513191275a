//! A growing `metrics.jsonl`, read once: only what was added since the last look, and never more in memory than a picture can show.
//!
//! Lines of one kind (steps, epochs, evaluations, probes) are thinned together: when there are more of them than are kept, every
//! second one goes, and from then on only every second one is taken. The last line of each kind is always there. Lines that are
//! not taken are not parsed, so that a file of gigabytes is read about as fast as the disk gives it.
use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Instant;
use taper_train::run::Record;

/// Of each kind of lines, at most so many are kept.
const MOST: usize = 1024;
/// Of probes, which have many numbers each.
const MOST_PROBES: usize = 64;
/// What is read at a time.
const CHUNK: usize = 256 << 10;
/// A line longer than this is none of ours.
const LONGEST: usize = 16 << 20;
/// As many of the last lines are kept as they stand.
const LAST: usize = 12;

/// A followed file.
#[derive(Debug)]
pub struct Follow {
    path: PathBuf,
    /// Which file it was, to know one that was put in its place.
    identity: Option<(u64, u64)>,
    /// Up to where whole lines were read.
    offset: u64,
    /// How long the file is.
    length: u64,
    lines: u64,
    kept: BTreeMap<Kind, Kept>,
    last: VecDeque<String>,
    problem: Option<String>,
    stuck: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Step,
    Epoch,
    Val,
    Test,
    Probe,
    Other,
}

impl Kind {
    /// Told by the first bytes, without parsing: `split` is the third key of a line.
    fn of(line: &[u8]) -> Self {
        let head = &line[..line.len().min(120)];
        let has = |text: &[u8], word: &[u8]| text.windows(word.len()).any(|at| at == word);
        match () {
            () if has(head, b"\"split\":\"train\"") && has(line, b"\"grad_norm\"") => Self::Step,
            () if has(head, b"\"split\":\"train\"") => Self::Epoch,
            () if has(head, b"\"split\":\"val\"") => Self::Val,
            () if has(head, b"\"split\":\"test\"") => Self::Test,
            () if has(head, b"\"split\":\"probe\"") => Self::Probe,
            () => Self::Other,
        }
    }

    fn most(self) -> usize {
        if self == Self::Probe { MOST_PROBES } else { MOST }
    }
}

/// The lines of a kind: every `stride`-th of them, by the number of the line in the file.
#[derive(Debug)]
struct Kept {
    stride: u64,
    seen: u64,
    records: Vec<(u64, Record)>,
    /// The last line, if it was not taken.
    latest: Option<(u64, Vec<u8>)>,
}

impl Follow {
    /// Follows a file from its beginning; it need not be there yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            identity: None,
            offset: 0,
            length: 0,
            lines: 0,
            kept: BTreeMap::new(),
            last: VecDeque::new(),
            problem: None,
            stuck: false,
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How much of the file was read, and its length; the rest is a line under way, or comes with the next looks.
    pub fn read(&self) -> (u64, u64) {
        (self.offset, self.length)
    }

    /// How many lines there are so far, and how many of them are kept.
    pub fn lines(&self) -> (u64, usize) {
        (
            self.lines,
            self.kept.values().map(|kept| kept.records.len() + usize::from(kept.latest.is_some())).sum(),
        )
    }

    /// The last lines as they stand.
    pub fn last(&self) -> impl Iterator<Item = &str> {
        self.last.iter().map(String::as_str)
    }

    /// What could not be read.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// The records that are kept, in order, at most `most` of a kind.
    pub fn records(&self, most: usize) -> Vec<Record> {
        let mut all: Vec<(u64, Record)> = Vec::new();
        for kept in self.kept.values() {
            let stride = kept.records.len().div_ceil(most.max(1)).max(1);
            let last = kept.records.len().saturating_sub(1);
            let thinned = kept.records.iter().enumerate().filter(|(i, _)| (last - i) % stride == 0);
            all.extend(thinned.map(|(_, record)| record.clone()));
            let latest = kept.latest.as_ref();
            all.extend(latest.and_then(|(at, line)| Some((*at, serde_json::from_slice(line).ok()?))));
        }
        all.sort_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, record)| record).collect()
    }

    /// Reads what was added, until `until` at the latest. True if there was something. A file that is not there, or no longer, is
    /// for the caller to notice; one that was cut or replaced is read anew.
    pub fn advance(&mut self, until: Instant) -> bool {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(e) => {
                if e.kind() != ErrorKind::NotFound {
                    self.problem = Some(format!("metrics.jsonl: {e}"));
                }
                return false;
            }
        };
        let Ok(about) = file.metadata() else { return false };
        let identity = identity(&about);
        if self.identity != Some(identity) || about.len() < self.offset {
            // Cut to a checkpoint, or another run's.
            *self = Self { identity: Some(identity), ..Self::new(std::mem::take(&mut self.path)) };
        }
        self.length = about.len();
        if self.stuck || self.length == self.offset || file.seek(SeekFrom::Start(self.offset)).is_err() {
            return false;
        }
        let before = self.offset;
        let (mut buffer, mut filled) = (vec![0; CHUNK], 0);
        while Instant::now() < until {
            if filled == buffer.len() {
                if filled >= LONGEST {
                    self.stuck = true;
                    self.problem = Some(format!(
                        "metrics.jsonl, line {}: longer than {LONGEST} bytes: what follows is left out",
                        self.lines + 1
                    ));
                    break;
                }
                buffer.resize(2 * filled, 0);
            }
            let read = match file.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => {
                    self.problem = Some(format!("metrics.jsonl: {e}"));
                    break;
                }
            };
            filled += read;
            let whole = buffer[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            for line in buffer[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                self.line(line);
            }
            self.offset += whole as u64;
            buffer.copy_within(whole..filled, 0);
            filled -= whole;
        }
        self.offset != before
    }

    /// Takes note of a whole line.
    fn line(&mut self, line: &[u8]) {
        self.lines += 1;
        if self.last.len() == LAST {
            self.last.pop_front();
        }
        // Lines of probes have hundreds of numbers: nobody reads them as they stand.
        let kind = Kind::of(line);
        if kind != Kind::Probe {
            self.last.push_back(String::from_utf8_lossy(&line[..line.len().min(1000)]).into_owned());
        }
        let kept = self.kept.entry(kind).or_insert_with(|| Kept {
            stride: 1,
            seen: 0,
            records: Vec::new(),
            latest: None,
        });
        let taken = kept.seen.is_multiple_of(kept.stride);
        kept.seen += 1;
        if !taken {
            let (at, latest) = kept.latest.get_or_insert_with(|| (0, Vec::new()));
            *at = self.lines;
            latest.clear();
            latest.extend_from_slice(line);
            return;
        }
        kept.latest = None;
        match serde_json::from_slice(line) {
            Ok(record) => kept.records.push((self.lines, record)),
            Err(e) => {
                let what = || format!("metrics.jsonl, line {}: {e}: left out", self.lines);
                self.problem.get_or_insert_with(what);
            }
        }
        if kept.records.len() > kind.most() {
            let mut index = 0;
            kept.records.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            kept.stride *= 2;
        }
    }
}

/// What tells a file from another that has taken its place.
fn identity(about: &Metadata) -> (u64, u64) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        (about.dev(), about.ino())
    }
    #[cfg(not(unix))]
    {
        let _ = about;
        (0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(600)
    }

    fn step(step: u64) -> String {
        format!(
            "{{\"step\":{step},\"epoch\":1,\"split\":\"train\",\"loss\":{step}.5,\"lr\":0.1,\"grad_norm\":1.0}}\n"
        )
    }

    fn append(path: &Path, text: &str) {
        let mut file = File::options().append(true).create(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn steps(follow: &Follow) -> Vec<u64> {
        follow.records(usize::MAX).iter().map(|record| record.step).collect()
    }

    #[test]
    fn a_half_written_line_waits_for_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut follow = Follow::new(&path);
        assert!(!follow.advance(soon()), "no file yet");
        let (whole, half) = (step(1), step(2));
        append(&path, &format!("{whole}{}", &half[..20]));
        assert!(follow.advance(soon()));
        assert_eq!(steps(&follow), [1]);
        assert!(!follow.advance(soon()), "nothing was added");
        append(&path, &half[20..]);
        assert!(follow.advance(soon()));
        assert_eq!(steps(&follow), [1, 2]);
        assert_eq!(follow.problem(), None);
    }

    #[test]
    fn a_file_that_was_cut_or_replaced_is_read_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut follow = Follow::new(&path);
        append(&path, &format!("{}{}", step(1), step(2)));
        follow.advance(soon());
        std::fs::write(&path, step(1)).unwrap();
        follow.advance(soon());
        assert_eq!(steps(&follow), [1]);
        std::fs::write(folder.path().join("other"), format!("{}{}", step(7), step(8))).unwrap();
        std::fs::rename(folder.path().join("other"), &path).unwrap();
        follow.advance(soon());
        assert_eq!(steps(&follow), [7, 8]);
    }

    #[test]
    fn many_lines_are_thinned_and_the_last_is_always_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let text: String = (1..=100_001).map(step).collect();
        append(&path, &text);
        append(&path, "{\"step\":100001,\"epoch\":1,\"split\":\"test\",\"loss\":0.5}\n");
        let mut follow = Follow::new(&path);
        follow.advance(soon());
        let steps = steps(&follow);
        assert!((MOST / 2..MOST + 3).contains(&steps.len()), "{}", steps.len());
        assert_eq!((steps[0], steps[steps.len() - 2], steps[steps.len() - 1]), (1, 100_001, 100_001));
        assert_eq!(follow.lines().0, 100_002);
        assert_eq!(follow.records(10).len(), 12, "ten of the steps and the last, and the evaluation");
    }

    #[test]
    fn lines_that_are_none_are_named_and_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        append(&path, &format!("{}\0\u{1}garbage\n{}", step(1), step(2)));
        let mut follow = Follow::new(&path);
        follow.advance(soon());
        assert_eq!(steps(&follow), [1, 2]);
        assert!(follow.problem().unwrap().starts_with("metrics.jsonl, line 2: "), "{:?}", follow.problem());
        // A line without end is given up, not held.
        let path = folder.path().join("endless");
        File::create(&path).unwrap().set_len(3 * LONGEST as u64).unwrap();
        let mut follow = Follow::new(&path);
        assert!(!follow.advance(soon()));
        assert!(follow.problem().unwrap().contains("longer than"), "{:?}", follow.problem());
    }
}

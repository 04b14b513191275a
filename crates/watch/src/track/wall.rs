//! When a step was taken, by the clock on the wall. The metrics have no times, so that equal runs are equal; `timing.jsonl` has them,
//! a line an epoch: when it ended and how long it took. Between its ends steps are spread evenly.
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// The times of a run's steps, in seconds since 1970.
#[derive(Debug, Default)]
pub(super) struct Wall {
    /// Stretches: the steps before and after each, and when it began and ended.
    stretches: Vec<(f64, f64, f64, f64)>,
    /// When its files last changed: all that is known of a run whose first epoch did not end.
    last: f64,
}

impl Wall {
    pub fn read(folder: &Path) -> Self {
        let path = folder.join("timing.jsonl");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        // Lines of before times were in them: the last was written when the file was.
        let changed = |path: &Path| {
            let time = fs::metadata(path).and_then(|about| about.modified()).ok()?;
            Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
        };
        let others = ["metrics.jsonl", "recipe.yaml"].map(|name| folder.join(name));
        let last = changed(&path).or_else(|| others.iter().find_map(|path| changed(path))).unwrap_or(0.0);
        let mut after: f64 = lines.iter().filter_map(|line| line["seconds"].as_f64()).sum();
        let (mut before, mut until) = (0.0, f64::NEG_INFINITY);
        let mut stretches = Vec::new();
        for line in &lines {
            let (Some(step), Some(seconds)) = (line["step"].as_f64(), line["seconds"].as_f64()) else {
                continue;
            };
            after -= seconds;
            let ended = line["ended"].as_f64().unwrap_or(last - after);
            // A run that went on from a checkpoint takes steps again: its rate tells where it began.
            let taken =
                line["steps_per_second"].as_f64().map_or(step - before, |rate| (rate * seconds).round());
            // How long it took is of another clock than when it ended, and the line is written a little later.
            let began = (ended - seconds).max(until).min(ended);
            stretches.push((step - taken, step, began, ended));
            (before, until) = (step, ended);
        }
        Self { stretches, last }
    }

    /// The last step whose time is known for certain.
    pub fn known(&self) -> u64 {
        self.stretches.iter().map(|(_, step, ..)| *step as u64).max().unwrap_or(0)
    }

    /// When the run began.
    pub fn began(&self) -> f64 {
        self.stretches.first().map_or(self.last, |(.., began, _)| *began)
    }

    /// When it last ended.
    pub fn ended(&self) -> f64 {
        self.stretches.last().map_or(self.last, |(.., ended)| *ended)
    }

    /// When a step was taken: of the last stretch that has it.
    pub fn at(&self, step: u64) -> f64 {
        let step = step as f64;
        let holds = |(from, to, ..): &&(f64, f64, f64, f64)| *from <= step && step <= *to;
        let Some((from, to, began, ended)) =
            self.stretches.iter().rev().find(holds).or(self.stretches.last()).copied()
        else {
            return self.last;
        };
        let share = if to > from { (step - from) / (to - from) } else { 1.0 };
        began + share * (ended - began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_spread_over_their_epoch_and_a_second_try_counts() {
        let folder = tempfile::tempdir().unwrap();
        let line = |step: u64, seconds: f64, steps: f64, ended: f64| {
            format!(
                "{{\"epoch\":1,\"step\":{step},\"seconds\":{seconds},\"steps_per_second\":{},\"ended\":{ended}}}\n",
                steps / seconds
            )
        };
        let text = line(10, 5.0, 10.0, 1005.0) + &line(16, 3.0, 6.0, 1008.0) + &line(20, 2.0, 6.0, 2000.0);
        fs::write(folder.path().join("timing.jsonl"), text).unwrap();
        let wall = Wall::read(folder.path());
        assert_eq!((wall.began(), wall.ended(), wall.known()), (1000.0, 2000.0, 20));
        assert_eq!(wall.at(5), 1002.5);
        assert_eq!(wall.at(10), 1005.0);
        assert_eq!(wall.at(16), 1998.0 + 2.0 * 2.0 / 6.0, "taken again by the third session");
        assert!(wall.at(26) > 2000.0, "on from the last");
        // The second began, by its length, before the first had ended.
        let text = line(10, 5.0, 10.0, 1005.0) + &line(20, 5.0, 10.0, 1009.5);
        fs::write(folder.path().join("timing.jsonl"), text).unwrap();
        let wall = Wall::read(folder.path());
        assert!((0..20).all(|step| wall.at(step) <= wall.at(step + 1)), "no time runs backwards");
        // Nothing is known but when its files changed: twice the same.
        fs::remove_file(folder.path().join("timing.jsonl")).unwrap();
        fs::write(folder.path().join("recipe.yaml"), "").unwrap();
        let (wall, again) = (Wall::read(folder.path()), Wall::read(folder.path()));
        assert!(wall.began() > 1e9 && wall.at(3) == again.at(3) && wall.began() == again.ended());
    }
}

//! What a network makes of a set: the loop's own figures, and more of what is behind them where answers are classes.
use super::{Trained, Weights, probabilities};
use crate::run::network::largest;
use crate::run::task::{Seen, Task};
use crate::run::{RunError, Split};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use taper_figures::plot::{Cell, Chart, Heat, Picture, Series, Sheet};
use taper_figures::stats::Calibration;
use taper_figures::table::Table;

/// Bins of the reliability table, of equal width: as many as in Guo et al., 2017.
const BINS: usize = 15;

/// Up to so many classes the matrix of confusions is printed, and numbers stand in its picture.
const MOST_PRINTED: usize = 20;

/// A network judged on a set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// The recipe's name.
    pub name: String,
    /// The recipe's id.
    pub id: String,
    /// Steps that were taken.
    pub step: u64,
    /// Which weights.
    pub weights: Weights,
    /// The data set.
    pub data: String,
    /// Which part of it.
    pub split: Split,
    /// Samples, or tokens.
    pub samples: u64,
    /// By `<split>.<metric>`, the very numbers that the run measures.
    #[serde(with = "crate::run::number::map")]
    pub values: BTreeMap<String, f64>,
    /// Whether the run measured the same numbers, to the bit, after this step; `None` where it measured none.
    pub as_recorded: Option<bool>,
    /// Where answers are classes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<Classes>,
    /// What to know beside the result.
    pub notes: Vec<String>,
}

/// Answers that are classes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classes {
    /// Each class.
    pub classes: Vec<Class>,
    /// How many samples of a class (row) were taken for which (column).
    pub confusion: Vec<Vec<u64>>,
    /// The expected calibration error; `None` without a sample.
    #[serde(with = "number")]
    pub calibration_error: Option<f64>,
    /// Answers by confidence, in bins of equal width from 0 to 1.
    pub reliability: Vec<Bin>,
}

/// What became of one class. Shares of nothing are `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Class {
    /// Its number.
    pub class: usize,
    /// Its name, where the data has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Samples of it.
    pub samples: u64,
    /// Answers that named it.
    pub answers: u64,
    /// Those that were right.
    pub right: u64,
    /// Right answers among the samples.
    pub recall: Option<f64>,
    /// Right answers among the answers.
    pub precision: Option<f64>,
    /// The harmonic mean of both.
    pub f1: Option<f64>,
}

/// By its name, or else by its number.
impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "{}", self.class),
        }
    }
}

/// Answers whose probability was above `above` and at most `up_to`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bin {
    /// The lower edge.
    pub above: f64,
    /// The upper edge.
    pub up_to: f64,
    /// Answers.
    pub samples: u64,
    /// The mean of their probabilities.
    #[serde(with = "number")]
    pub confidence: Option<f64>,
    /// The share of right ones.
    pub accuracy: Option<f64>,
}

/// A number that may be none, or no number: JSON has no word for NaN.
mod number {
    use serde::Serializer;

    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => crate::run::number::serialize(value, serializer),
            None => serializer.serialize_none(),
        }
    }
}

impl Trained {
    /// Judges the network on a split, with the code and the batches of the loop. The training set is taken as it is: without
    /// augmentation, in evaluation mode.
    pub fn evaluate(&mut self, split: Split) -> Result<Evaluation, RunError> {
        if split == Split::Probe || (split != Split::Train && !self.network.has(split)) {
            let message = format!("has no {} set: `data.val` puts one aside", split.name());
            return Err(RunError::unusable(&self.run, message));
        }
        let classes = self.images().map_or(0, |shape| shape.classes);
        let (mut samples, mut tally) = (0, Tally::new(classes));
        let measured = self.network.evaluate_while(split, &mut |seen| {
            samples += seen.samples;
            tally.add(seen)?;
            Ok(true)
        })?;
        let key = |metric: &str| format!("{}.{metric}", split.name());
        let values: BTreeMap<String, f64> =
            measured.into_iter().map(|(metric, value)| (key(metric), value)).collect();
        let recorded = self.measured();
        let known =
            values.iter().filter_map(|(key, now)| Some(now.to_bits() == recorded.get(key)?.to_bits()));
        let as_recorded = known.reduce(|all, equal| all && equal).filter(|_| !self.elsewhere);
        Ok(Evaluation {
            name: self.recipe.name.clone(),
            id: self.recipe.id().to_owned(),
            step: self.step,
            weights: self.weights.clone(),
            data: self.data().name.clone(),
            split,
            samples,
            values,
            as_recorded,
            classes: (classes > 0).then(|| tally.finish(self.classes())),
            notes: self.notes.iter().cloned().chain(self.data().remarks()).collect(),
        })
    }
}

/// Answers counted.
struct Tally {
    confusion: Vec<Vec<u64>>,
    calibration: Calibration,
}

impl Tally {
    fn new(classes: usize) -> Self {
        Self { confusion: vec![vec![0; classes]; classes], calibration: Calibration::new(BINS) }
    }

    fn add(&mut self, seen: &Seen) -> Result<(), RunError> {
        let Some(logits) = seen.logits.filter(|_| !self.confusion.is_empty()) else { return Ok(()) };
        let (logits, target) = (logits.detach().to_vec2::<f32>()?, seen.target.to_vec1::<u32>()?);
        for (row, target) in logits.iter().zip(target) {
            let (answer, target) = (largest(row), target as usize);
            self.calibration
                .add(probabilities(row, 1.0).get(answer).copied().unwrap_or(f64::NAN), answer == target);
            // A model of somebody else's may have more logits than there are classes.
            if let Some(count) = self.confusion.get_mut(target).and_then(|row| row.get_mut(answer)) {
                *count += 1;
            }
        }
        Ok(())
    }

    fn finish(self, names: &[String]) -> Classes {
        let Self { confusion, calibration } = self;
        let share = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
        let class = |class: usize| {
            let (samples, right) = (confusion[class].iter().sum(), confusion[class][class]);
            let answers = confusion.iter().map(|row| row[class]).sum();
            let (recall, precision) = (share(right, samples), share(right, answers));
            Class {
                class,
                name: names.get(class).cloned(),
                samples,
                answers,
                right,
                recall,
                precision,
                f1: share(2 * right, samples + answers),
            }
        };
        let classes = (0..confusion.len()).map(class).collect();
        let edge = |i: usize| i as f64 / BINS as f64;
        let bin = |(i, bin): (usize, &taper_figures::stats::Reliability)| {
            let (confidence, accuracy) = bin.means().unzip();
            Bin { above: edge(i), up_to: edge(i + 1), samples: bin.samples, confidence, accuracy }
        };
        let reliability = calibration.bins.iter().enumerate().map(bin).collect();
        Classes { classes, confusion, calibration_error: calibration.expected_error(), reliability }
    }
}

fn percent(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{:.2} %", 100.0 * value))
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, id, step, weights, data, split, samples, .. } = self;
        let unit = if self.classes.is_some() { "images" } else { "tokens" };
        writeln!(f, "{name} ({id}) after step {step}: {weights}")?;
        writeln!(f, "{data}, {} set, {samples} {unit}\n", split.name())?;
        let mut table = Table::new(["measure", "value"]);
        for (key, value) in &self.values {
            let value =
                if key.ends_with(".accuracy") { percent(Some(*value)) } else { format!("{value:.6}") };
            table.row([key.clone(), value]);
        }
        f.write_str(&table.markdown())?;
        match self.as_recorded {
            Some(true) => writeln!(f, "The same numbers, to the bit, as the run measured.")?,
            Some(false) => writeln!(f, "Not the numbers that the run measured after this step.")?,
            None => {}
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))?;
        self.classes.as_ref().map_or(Ok(()), |classes| write!(f, "\n{classes}"))
    }
}

impl fmt::Display for Classes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["class", "samples", "answers", "right", "recall", "precision", "F1"]);
        for class in &self.classes {
            let Class { samples, answers, right, recall, precision, f1, .. } = class;
            let counts = [class.to_string(), samples.to_string(), answers.to_string(), right.to_string()];
            table.row(counts.into_iter().chain([*recall, *precision, *f1].map(percent)));
        }
        writeln!(f, "{}", table.markdown())?;
        if self.confusion.len() <= MOST_PRINTED {
            let head = std::iter::once("class, taken for".to_owned());
            let mut table = Table::new(head.chain(self.classes.iter().map(|class| class.to_string())));
            for (class, row) in self.classes.iter().zip(&self.confusion) {
                let cells = row.iter().map(|count| if *count > 0 { count.to_string() } else { "·".into() });
                table.row(std::iter::once(class.to_string()).chain(cells));
            }
            writeln!(f, "{}", table.markdown())?;
        }
        let mut table = Table::new(["probability", "answers", "mean probability", "right"]);
        for bin in self.reliability.iter().filter(|bin| bin.samples > 0) {
            let range = format!("{:.3} to {:.3}", bin.above, bin.up_to);
            table.row([range, bin.samples.to_string(), percent(bin.confidence), percent(bin.accuracy)]);
        }
        f.write_str(&table.markdown())?;
        let error = percent(self.calibration_error);
        writeln!(
            f,
            "Expected calibration error: {error}, over {} bins of equal width.",
            self.reliability.len()
        )
    }
}

impl Classes {
    /// The matrix of confusions and the reliability side by side, as SVG.
    pub fn svg(&self, title: &str) -> String {
        let (count, cells_have_text) = (self.confusion.len(), self.confusion.len() <= MOST_PRINTED);
        let cell = |number: u64, of: u64| Cell {
            value: Some(number as f64 / of.max(1) as f64),
            text: if cells_have_text && number > 0 { number.to_string() } else { String::new() },
        };
        let row = |row: &Vec<u64>| {
            let all = row.iter().sum();
            row.iter().map(|number| cell(*number, all)).collect()
        };
        // Every tenth where there is no room for more.
        let every = if cells_have_text { 1 } else { count.div_ceil(10) };
        let label = |class: usize| match class.is_multiple_of(every) {
            true => self.classes[class].to_string(),
            false => String::new(),
        };
        let confusion = Heat {
            title: "what was taken for what".into(),
            text: format!("confusions of {count} classes; colours are shares of a row"),
            x: ("taken for".into(), (0..count).map(label).collect()),
            // From bottom to top: the first class is the topmost.
            y: ("class".into(), (0..count).rev().map(label).collect()),
            cells: self.confusion.iter().rev().map(row).collect(),
            higher_is_better: true,
        };
        let points =
            self.reliability.iter().filter_map(|bin| Some((bin.confidence?, bin.accuracy?))).collect();
        let series = vec![
            Series::line("right answers", 0, points),
            Series::line("as promised", 1, vec![(0.0, 0.0), (1.0, 1.0)]),
        ];
        let error = percent(self.calibration_error);
        let name = format!("calibration: expected error {error}, {BINS} bins");
        let text = "share of right answers by the probability that was given to them";
        let reliability = Chart { series, ..Chart::new(&name, text, "probability", "right") };
        let rows = vec![vec![Picture::Heat(confusion), Picture::Chart(reliability)]];
        Sheet { title: title.to_owned(), rows }.svg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    #[test]
    fn answers_are_counted_by_class_and_by_confidence() {
        let mut tally = Tally::new(3);
        let logits = [[2.0f32, 1.0, 0.0], [0.0, 0.0, -9.0], [0.0, 1.0, 5.0], [9.0, 0.0, 0.0]];
        let logits = Tensor::new(&logits, &Device::Cpu).unwrap();
        let target = Tensor::new(&[0u32, 1, 2, 1], &Device::Cpu).unwrap();
        tally.add(&Seen { samples: 4, logits: Some(&logits), target: &target }).unwrap();
        let found = tally.finish(&["a".into(), "b".into(), "c".into()]);
        // Of equal logits the first is the answer.
        assert_eq!(found.confusion, [[1, 0, 0], [2, 0, 0], [0, 0, 1]]);
        let [zero, one, _] = &found.classes[..] else { panic!() };
        assert_eq!((zero.recall, zero.precision, zero.f1), (Some(1.0), Some(1.0 / 3.0), Some(0.5)));
        assert_eq!((one.recall, one.precision, one.f1), (Some(0.0), None, Some(0.0)));
        assert_eq!(one.to_string(), "b");
        assert_eq!(found.reliability.iter().map(|bin| bin.samples).sum::<u64>(), 4);
    }
}

//! How the rate and the momentum move over a run: what `plan` draws.
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use taper_figures::plot::{Chart, Picture, Series, Sheet, braille, short};
use taper_optim::{Per, Schedule};
use taper_train::{Recipe, Schedules};

/// A curve of the rate, and one of the momentum where there is one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// The optimizer.
    pub optimizer: String,
    /// The kind of schedule.
    pub kind: String,
    /// What its time counts: `epoch` or `step`.
    pub per: Per,
    /// How many of them a run has.
    pub total: u64,
    /// Times with the rate then; none of an optimizer without a rate. Of a plateau, as it is before the metric stalls.
    pub rate: Vec<(u64, f64)>,
    /// The same of the momentum.
    pub momentum: Vec<(u64, f64)>,
}

/// So many points are enough for a picture.
const POINTS: u64 = 240;

impl Curve {
    /// Of a run of so many epochs and steps.
    pub fn new(recipe: &Recipe, epochs: u64, steps: u64) -> Option<Self> {
        let (section, optimizer) = (&recipe.schedule, &recipe.optimizer);
        // A recipe has been checked; there is no curve of what cannot be read.
        let Schedules { per, rate, momentum } = Schedules::new(&section.kind, &section.config).ok()?;
        let total = match per {
            Per::Epoch => epochs,
            Per::Step => steps,
        };
        let points = total.min(POINTS);
        let times =
            || (0..points).map(move |i| (u128::from(i) * u128::from(total) / u128::from(points)) as u64);
        let of = |base: f64, schedule: &Schedule| {
            times().map(|t| (t, base * schedule.factor(t, total))).collect::<Vec<_>>()
        };
        let own = ["momentum", "beta1"].iter().find_map(|key| optimizer.hyper.get(*key)?.as_f64());
        let still = Schedule::Constant;
        Some(Self {
            optimizer: optimizer.name.clone(),
            kind: section.kind.clone(),
            per,
            total,
            rate: if optimizer.lr > 0.0 { of(optimizer.lr, rate.schedule()) } else { Vec::new() },
            momentum: own.map_or(Vec::new(), |own| of(own, momentum.as_ref().unwrap_or(&still))),
        })
    }

    fn unit(&self) -> &'static str {
        match self.per {
            Per::Epoch => "epoch",
            Per::Step => "step",
        }
    }
}

/// The runs that move alike, each once, by the first of them.
pub fn curves<'a>(runs: impl Iterator<Item = (&'a Recipe, u64, u64)>) -> Vec<Curve> {
    let mut seen: Vec<Value> = Vec::new();
    let mut out = Vec::new();
    for (recipe, epochs, steps) in runs {
        let key = serde_json::json!([recipe.optimizer.name, recipe.schedule, epochs, steps]);
        if !seen.contains(&key) {
            seen.push(key);
            out.extend(Curve::new(recipe, epochs, steps));
        }
    }
    out
}

/// Rate and momentum side by side, a row a curve, as SVG.
pub fn picture(curves: &[Curve]) -> String {
    let panel = |curve: &Curve, what: &str, points: &[(u64, f64)], style: usize| {
        let title = format!("{what}: {}, {}", curve.optimizer, curve.kind);
        let text = format!("{title} over {} {}s", curve.total, curve.unit());
        let points = points.iter().map(|(t, value)| (*t as f64, *value)).collect();
        let series = vec![Series::line(what, style, points)];
        // From 0, so that a small change does not look like a large one.
        let top = series[0].points.iter().map(|(_, y)| *y).fold(0.0, f64::max);
        let y_range = (top > 0.0).then_some((0.0, top));
        Picture::Chart(Chart { series, y_range, ..Chart::new(&title, &text, curve.unit(), "") })
    };
    let row = |curve: &Curve| {
        let both = [("learning rate", &curve.rate, 0), ("momentum", &curve.momentum, 1)];
        let drawn = both.into_iter().filter(|(_, points, _)| !points.is_empty());
        drawn.map(|(what, points, style)| panel(curve, what, points, style)).collect::<Vec<_>>()
    };
    let rows = curves.iter().map(row).filter(|row| !row.is_empty()).collect();
    Sheet { title: "Schedules".into(), rows }.svg()
}

/// Characters of a drawing: width and height.
const SIZE: (usize, usize) = (60, 5);

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  schedule: {} per {}, {} of them", self.kind, self.unit(), self.total)?;
        for (what, points) in [("rate", &self.rate), ("momentum", &self.momentum)] {
            let values: Vec<f64> = points.iter().map(|(_, value)| *value).collect();
            let Some(first) = values.first() else { continue };
            if values.iter().all(|value| value == first) {
                let until =
                    if self.kind == "plateau" && what == "rate" { " until the metric stalls" } else { "" };
                writeln!(f, "    {what} {}{until}", short(*first))?;
                continue;
            }
            let top = values.iter().copied().fold(0.0, f64::max);
            let rows = braille(&values, (0.0, top), SIZE.0, SIZE.1);
            for (index, row) in rows.iter().enumerate() {
                let label = match index {
                    0 => format!("{what} {}", short(top)),
                    last if last + 1 == SIZE.1 => "0".to_owned(),
                    _ => String::new(),
                };
                writeln!(f, "    {label:>18} │{}", row.trim_end())?;
            }
            writeln!(f, "    {:>18} └{}", "", "─".repeat(SIZE.0))?;
        }
        Ok(())
    }
}

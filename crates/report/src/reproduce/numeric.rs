//! The numeric experiments: values of Powell's and Rosenbrock's functions by iteration, and the paper's two claims on them.
//!
//! Iteration 0 is the starting point. A training line of step t has the value before that step, iteration t − 1; the last
//! value is the evaluation after the last step.
use super::claim::Checked;
use super::outcome::read;
use super::published::{Published, Shown};
use super::verdict::Verdict;
use super::{Plan, Target};
use crate::{Block, Run};
use serde_json::Value;
use std::path::Path;
use taper_figures::plot::short;
use taper_figures::table::Table;
use taper_train::recipe::{Recipe, RecipeError};
use taper_train::run::{Split, Status};
use taper_train::sweep::Sweep;

/// The functions: the paper's two, and Rosenbrock's in its usual form.
const FILES: [&str; 3] =
    ["numeric/powell.yaml", "numeric/rosenbrock.yaml", "numeric/rosenbrock-standard.yaml"];

/// What the paper leaves out.
const CONTROLS: &str = "sweeps/numeric-controls.yaml";

/// The iterations that the tables show.
const ITERATIONS: [u64; 6] = [0, 100, 1_000, 10_000, 20_000, 100_000];

/// The values whose first undershooting the tables show.
const THRESHOLDS: [f64; 4] = [1.0, 1e-4, 1e-6, 1e-8];

/// The claim "faster" is about the iterations up to here; the paper does not say how far its figure goes.
const CLAIMED: usize = 10_000;

impl Plan<'_> {
    /// The runs of the numeric experiments, and those of their controls.
    pub fn numeric(&self) -> Result<Vec<Recipe>, RecipeError> {
        let layer = self.published.layer(self.scale.name(), Target::Numeric, "", self.recipes);
        let load = |file: &str| {
            let layers = [Some(self.recipes.join(file)), layer.clone()].into_iter().flatten();
            let layers: Vec<String> = layers.map(|path| path.display().to_string()).collect();
            let stem = Path::new(file).file_stem().and_then(|stem| stem.to_str()).unwrap_or(file);
            let text = serde_json::json!({ "extends": layers, "name": stem }).to_string();
            Recipe::parse(file, &text, &[], self.sections)
        };
        let controls = (!self.bare).then_some(CONTROLS);
        let out = FILES.into_iter().chain(controls).map(load).collect::<Result<Vec<_>, _>>()?;
        Ok(out.iter().flat_map(|recipe| recipe.runs().to_vec()).collect())
    }
}

/// What the numeric experiments came to.
#[derive(Clone, Debug, Default)]
pub struct Numeric {
    /// The tables.
    pub blocks: Vec<Block>,
    /// The two claims, on each function.
    pub checked: Vec<Checked>,
    /// The runs.
    pub runs: Vec<Run>,
}

/// One run of the experiment: its values from iteration 0 on.
struct Curve {
    problem: String,
    label: String,
    values: Vec<f64>,
    diverged: bool,
}

impl Curve {
    fn of(run: &Run) -> Self {
        let mut values: Vec<f64> = run.values(Split::Train, "loss").map(|(_, value)| value).collect();
        let last = run.values(Split::Test, "loss").next_back();
        // The evaluation after the last step is one iteration further than its training line.
        values.extend(last.filter(|(record, _)| record.step == values.len() as u64).map(|(_, value)| value));
        let problem = run.recipe.problem.as_ref().map_or(String::new(), |problem| {
            match (problem.name.as_str(), problem.config.get("variant").and_then(Value::as_str)) {
                (name, Some(variant)) => format!("{name}, {variant}"),
                (name, None) => name.to_owned(),
            }
        });
        Self { problem, label: label(&run.recipe), values, diverged: run.status == Status::Diverged }
    }

    fn at(&self, iteration: u64) -> Option<f64> {
        self.values.get(usize::try_from(iteration).ok()?).copied()
    }

    fn first_below(&self, threshold: f64) -> Option<usize> {
        self.values.iter().position(|value| *value < threshold)
    }

    /// How many of the first iterations raised the value to more than the rounding of the start.
    fn rises(&self, iterations: usize) -> usize {
        let pairs = self.values.windows(2).take(iterations);
        pairs.filter(|pair| pair[1] > pair[0] && pair[1] > self.rounding()).count()
    }

    /// What the starting value is rounded to: below it, values of the function say little.
    fn rounding(&self) -> f64 {
        (self.values.first().copied().unwrap_or(0.0) * f64::EPSILON).max(f64::MIN_POSITIVE)
    }

    /// The largest factor by which the value came back up from its least so far, and the iteration. What lies below the
    /// rounding of the start counts as that.
    fn rebound(&self) -> (f64, usize) {
        let floor = self.rounding();
        let (mut least, mut worst) = (f64::INFINITY, (1.0, 0));
        for (iteration, value) in self.values.iter().enumerate() {
            least = least.min(*value).max(floor);
            if value / least > worst.0 {
                worst = (value / least, iteration);
            }
        }
        worst
    }
}

/// `adam 0.001`, `decgd 1e-5 (x₀ = 0)`: the settings that the experiment varies.
fn label(recipe: &Recipe) -> String {
    let optimizer = &recipe.optimizer;
    let text = format!("{} {}", optimizer.name, short(optimizer.lr));
    let setting = |key: &str| optimizer.hyper.get(key);
    match (optimizer.name.as_str(), setting("x0").and_then(Value::as_str), setting("freeze_v")) {
        ("decgd", _, Some(Value::Bool(true))) => format!("{text}, v frozen"),
        ("decgd", Some("first_iterate"), _) => format!("{text}, x0 = x1"),
        ("decgd", ..) => format!("{text}, x0 = 0"),
        _ => text,
    }
}

/// The labels that the claims are about.
const ADAM: &str = "adam 0.001";
const DECGD: [&str; 2] = ["decgd 1e-5, x0 = 0", "decgd 1e-5, x0 = x1"];

/// Reads the runs, and makes tables and verdicts of them.
pub fn numeric(
    published: &Published,
    recipes: &[Recipe],
    sweep: &Sweep,
    problems: &mut Vec<String>,
) -> Numeric {
    let mut out = Numeric::default();
    let (runs, mut failures) = read(recipes, sweep, problems);
    out.runs = runs;
    let curves: Vec<Curve> =
        out.runs.iter().map(Curve::of).filter(|curve| !curve.values.is_empty()).collect();
    if curves.is_empty() {
        failures.push("no run of it".into());
    }
    failures.into_iter().for_each(|failure| out.blocks.push(Block::Text(format!("Not run: {failure}."))));
    out.blocks.extend([values(&curves), thresholds(&curves), oscillation(&curves)].map(Block::Table));
    for claim in published.claims_of(Target::Numeric).filter(|claim| claim.shown_by == Shown::Faster {}) {
        // A claim names its function by its recipe.
        let stem =
            claim.recipes.first().and_then(|file| Path::new(file).file_stem()?.to_str()).unwrap_or_default();
        let here: Vec<&Curve> = curves.iter().filter(|c| c.problem.split(',').next() == Some(stem)).collect();
        let here: Vec<&Curve> = here.into_iter().filter(|c| !c.problem.contains("standard")).collect();
        let id = |part: &str| format!("{}-{part}", claim.id);
        let (verdict, reason) = faster(&here);
        let says = format!("{stem}: DecGD at 1e-5 converges faster than Adam at 1e-3");
        out.checked.push(Checked { target: Target::Numeric, claim: id("faster"), says, verdict, reason });
        let (verdict, reason) = oscillates(&here);
        let says = format!("{stem}: DecGD oscillates more than Adam");
        out.checked.push(Checked {
            target: Target::Numeric,
            claim: id("oscillation"),
            says,
            verdict,
            reason,
        });
    }
    out
}

/// The functions and optimizers in order, each once.
fn names(curves: &[Curve], of: fn(&Curve) -> &str) -> Vec<&str> {
    let mut out: Vec<&str> = Vec::new();
    for curve in curves {
        if !out.contains(&of(curve)) {
            out.push(of(curve));
        }
    }
    out
}

/// A table with a column an optimizer and some rows a function.
fn by_optimizer<K: Copy>(
    curves: &[Curve],
    caption: &str,
    key: &str,
    keys: &[K],
    text: impl Fn(K) -> String,
    cell: impl Fn(&Curve, K) -> String,
) -> Table {
    let labels = names(curves, |curve| &curve.label);
    let mut table = Table::new(["function", key].into_iter().chain(labels.iter().copied())).caption(caption);
    for problem in names(curves, |curve| &curve.problem) {
        for k in keys {
            let find = |label: &&str| curves.iter().find(|c| c.problem == problem && c.label == **label);
            let cells: Vec<String> =
                labels.iter().map(|label| find(label).map_or("–".into(), |curve| cell(curve, *k))).collect();
            if cells.iter().any(|cell| cell != "–") {
                table.row([problem.to_owned(), text(*k)].into_iter().chain(cells));
            }
        }
    }
    table
}

fn values(curves: &[Curve]) -> Table {
    let cell = |curve: &Curve, k: u64| match curve.at(k) {
        Some(value) => format!("{value:.2e}"),
        None if curve.diverged => "diverged".into(),
        None => "–".into(),
    };
    let mut table = by_optimizer(
        curves,
        "Value of the function after so many iterations",
        "iteration",
        &ITERATIONS,
        |k| k.to_string(),
        cell,
    );
    table.note("In float64; iteration 0 is the starting point. A column is an optimizer with its rate.");
    table.note(
        "x0 = 0 and x0 = x1 are the two readings of the paper's x₀ (zero and first_iterate in recipes and figures); v frozen is \
         DecGD with v held at its start, which is SGD with momentum at a rate that grows as f falls.",
    );
    table.note(
        "Rates of different optimizers do not compare. DecGD's steps are those of SGD with momentum at the rate lr · v / √(f + c). \
         v starts at √(f + c), 73 on Powell and 98 and 110 on Rosenbrock, so that this rate grows from 1e-5 to about 1e-3 as f \
         falls.",
    );
    table
        .note("rosenbrock, paper: as the paper prints it, with minima at (±1, 1); standard: the usual form.");
    table
}

fn thresholds(curves: &[Curve]) -> Table {
    let cell = |curve: &Curve, threshold: f64| match curve.first_below(threshold) {
        Some(iteration) => iteration.to_string(),
        None if curve.values.is_empty() => "–".into(),
        None => format!("not by {}", curve.values.len() - 1),
    };
    by_optimizer(
        curves,
        "First iteration with a value below",
        "below",
        &THRESHOLDS,
        |t| format!("{t:e}"),
        cell,
    )
}

fn oscillation(curves: &[Curve]) -> Table {
    let mut table = Table::new([
        "function",
        "optimizer",
        "iterations",
        "rises",
        "largest rebound",
        "at iteration",
        "least value",
    ])
    .text(&["optimizer"])
    .caption("Oscillation: how often the value rose, and how far from its least so far");
    for curve in curves {
        let (factor, at) = curve.rebound();
        let least = curve.values.iter().copied().fold(f64::INFINITY, f64::min);
        table.row([
            curve.problem.clone(),
            curve.label.clone(),
            curve.values.len().saturating_sub(1).to_string(),
            curve.rises(usize::MAX).to_string(),
            if factor > 1.0 { format!("{}×", short(factor)) } else { "none".into() },
            if factor > 1.0 { at.to_string() } else { "–".into() },
            format!("{least:.2e}"),
        ]);
    }
    table.note(
        "The rounding of the starting value (its 2⁻⁵²) is the floor of this table: rises below it are not counted, and a rebound \
         from below it is counted from there.",
    );
    table
}

fn pair<'a>(curves: &[&'a Curve]) -> Option<(&'a Curve, Vec<&'a Curve>)> {
    let find = |label: &str| curves.iter().find(|curve| curve.label == label).copied();
    let decgd: Vec<&Curve> = DECGD.iter().filter_map(|label| find(label)).collect();
    (decgd.len() == DECGD.len()).then_some((find(ADAM)?, decgd))
}

/// What is so under both readings of x₀ is reproduced, what is so under neither differs. There are no seeds: the runs have
/// no noise.
fn under_both(holds: &[bool]) -> Verdict {
    match (holds.iter().all(|holds| *holds), holds.iter().any(|holds| *holds)) {
        (true, _) => Verdict::Reproduced,
        (false, true) => Verdict::Undecided,
        (false, false) => Verdict::Differs,
    }
}

/// Faster: below Adam at 99 of 100 of the first ten thousand iterations after the start, and at the last of them, under
/// both readings of x₀.
fn faster(curves: &[&Curve]) -> (Verdict, String) {
    let Some((adam, decgd)) = pair(curves) else { return (Verdict::NotRun, "not all of its runs".into()) };
    let (mut holds, mut whole) = (Vec::new(), true);
    let mut parts = Vec::new();
    for curve in decgd {
        let both: Vec<(f64, f64)> =
            curve.values.iter().copied().zip(adam.values.iter().copied()).skip(1).collect();
        let first = &both[..both.len().min(CLAIMED)];
        let below = first.iter().filter(|(ours, theirs)| ours < theirs).count();
        let ends_below = first.last().is_some_and(|(ours, theirs)| ours < theirs);
        whole &= first.len() == CLAIMED;
        holds.push(ends_below && below * 100 >= first.len() * 99);
        let overtaken = both.iter().position(|(ours, theirs)| theirs < ours);
        let later = match overtaken {
            None => format!("and Adam is never below it in {}", both.len()),
            Some(at) if both[at].0 <= curve.rounding() => {
                format!(
                    "and Adam first below it at {}, where both are below the rounding of the start",
                    at + 1
                )
            }
            Some(at) => format!("and Adam first below it at {}", at + 1),
        };
        parts.push(format!("{} is below Adam at {below} of the first {}, {later}", curve.label, first.len()));
    }
    // The claim's other side: a rate that suits the function does as much for Adam, and DecGD needs no moving v.
    let controls = [DECGD[1], "decgd 1e-5, v frozen", "adam 0.1", "sgdm 0.001"];
    let after: Vec<String> = controls
        .iter()
        .filter_map(|label| {
            let value = curves.iter().find(|curve| curve.label == *label)?.at(1_000)?;
            Some(format!("{label} {value:.2e}"))
        })
        .collect();
    if after.len() > 1 {
        parts.push(format!("after 1000: {}", after.join("; ")));
    }
    let verdict = if whole { under_both(&holds) } else { Verdict::Undecided };
    (verdict, parts.join("; "))
}

/// More oscillation: the value rises more often within the first ten thousand iterations, under both readings of x₀.
fn oscillates(curves: &[&Curve]) -> (Verdict, String) {
    let Some((adam, decgd)) = pair(curves) else { return (Verdict::NotRun, "not all of its runs".into()) };
    let rises = |curve: &Curve| curve.rises(CLAIMED);
    let more: Vec<bool> = decgd.iter().map(|curve| rises(curve) > rises(adam)).collect();
    let text: Vec<String> = decgd
        .iter()
        .copied()
        .chain([adam])
        .map(|c| format!("{} rises {} times", c.label, rises(c)))
        .collect();
    let far: Vec<String> = decgd
        .iter()
        .map(|c| c.rebound())
        .filter(|r| r.0 > 1.0)
        .map(|(f, at)| format!("{}× at {at}", short(f)))
        .collect();
    let far = if far.is_empty() {
        String::new()
    } else {
        format!("; DecGD's largest rebounds: {}", far.join(", "))
    };
    let verdict = under_both(&more);
    let all = adam.rises(usize::MAX);
    let later = if all > rises(adam) {
        format!("; in all {} iterations {} rises {all} times", adam.values.len() - 1, adam.label)
    } else {
        String::new()
    };
    (verdict, format!("in {CLAIMED} iterations {}{far}{later}", text.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(label: &str, values: Vec<f64>) -> Curve {
        Curve { problem: "powell".into(), label: label.into(), values, diverged: false }
    }

    #[test]
    fn a_curve_is_read_by_iteration() {
        let found = curve("a", vec![8.0, 2.0, 4.0, 1.0, 0.5, 0.75]);
        assert_eq!((found.at(0), found.at(5), found.at(6)), (Some(8.0), Some(0.75), None));
        assert_eq!((found.first_below(1.0), found.first_below(0.1)), (Some(4), None));
        assert_eq!((found.rises(usize::MAX), found.rises(2), found.rises(1)), (2, 1, 0));
        assert_eq!(found.rebound(), (2.0, 2));
        // Below the rounding of the start nothing is counted, and what comes up from there is counted from it.
        let low = curve("b", vec![1.0, 0.0, 1e-20]);
        assert_eq!((low.rebound(), low.rises(2)), ((1.0, 0), 0));
        assert_eq!(curve("b", vec![1.0, 0.0, 4.0 * f64::EPSILON]).rebound(), (4.0, 2));
    }

    #[test]
    fn faster_needs_every_reading_and_the_whole_stretch() {
        let falling = |rate: f64, n: usize| (0..=n).map(|i| (-rate * i as f64).exp()).collect::<Vec<_>>();
        let adam = curve(ADAM, falling(1e-4, CLAIMED));
        let fast = |label: &str| curve(label, falling(2e-4, CLAIMED));
        let both = [fast(DECGD[0]), fast(DECGD[1])];
        let judge = |curves: &[&Curve]| faster(curves).0;
        assert_eq!(judge(&[&adam, &both[0], &both[1]]), Verdict::Reproduced);
        assert_eq!(judge(&[&adam, &both[0]]), Verdict::NotRun);
        let short = curve(DECGD[1], falling(2e-4, 100));
        assert_eq!(judge(&[&adam, &both[0], &short]), Verdict::Undecided, "too short to tell");
        let slow = curve(DECGD[1], falling(5e-5, CLAIMED));
        assert_eq!(judge(&[&adam, &both[0], &slow]), Verdict::Undecided, "it depends on the reading");
        let slower = curve(DECGD[0], falling(5e-5, CLAIMED));
        assert_eq!(judge(&[&adam, &slower, &slow]), Verdict::Differs);
        assert!(faster(&[&adam, &both[0], &slow]).1.contains("Adam first below it at 1"));
    }

    #[test]
    fn oscillation_counts_rises() {
        let smooth = curve(ADAM, vec![3.0, 2.0, 1.0]);
        let rough = |label: &str| curve(label, vec![3.0, 1.0, 2.0]);
        let found = oscillates(&[&smooth, &rough(DECGD[0]), &rough(DECGD[1])]);
        assert_eq!(found.0, Verdict::Reproduced);
        assert!(found.1.contains("2× at 2"), "{}", found.1);
        let found = oscillates(&[&smooth, &rough(DECGD[0]), &curve(DECGD[1], vec![3.0, 1.0])]);
        assert_eq!(found.0, Verdict::Undecided, "it depends on the reading");
        let still = |label: &str| curve(label, vec![3.0, 1.0]);
        assert_eq!(oscillates(&[&smooth, &still(DECGD[0]), &still(DECGD[1])]).0, Verdict::Differs);
    }
}

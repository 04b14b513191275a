//! The paper's theorems beside what was measured: regret and its bounds, growth exponents, gradients of a function that is not convex.
//!
//! What is said on the page is said by rules. A *bound* is the theorem's right-hand side with the constants of the run itself: D is the
//! diameter of the domain, G and L are the largest ‖∇√(f + c)‖ and √(f + c) that the run came by, v, γ and η are as they were. It *held* at
//! every T if no regret between two points is above the bound at the first of them (with AMS the bound never falls), or if that
//! cannot be told, at all points looked at. An *exponent* is the slope, by least squares, of log M(T) over log T in the last two factors
//! of ten of T, where M is the largest regret so far, one for every seed or start; its interval is Student's over these, at 95 %.
//! Nothing is shown by runs that are not there: where one failed, has a number that is none or has no exponent, a statement about all of
//! them is left open. A regret above a bound stays what it is.
use super::verdict::Verdict;
use crate::{Block, Document, Figure, Panel, Section, View};
use serde::Serialize;
use serde_json::Value;
use taper_figures::plot::{Chart, Marks, Picture, STYLES, Scale, Series, short};
use taper_figures::stats::{Interval, student};
use taper_figures::table::Table;
use taper_train::Recipe;
use taper_train::run::RunError;
use taper_train::theory::{Point, Trace, most};

/// The recipes, in the order of the page.
pub const RECIPES: [&str; 8] = [
    "theory/fixed.yaml",
    "theory/even.yaml",
    "theory/ball.yaml",
    "theory/skewed.yaml",
    "theory/reddi.yaml",
    "theory/reddi-random.yaml",
    "theory/wells.yaml",
    "theory/wells-sampled.yaml",
];

/// A recipe's runs, each followed or not.
pub struct Experiment {
    /// The recipe, with its sweep.
    pub recipe: Recipe,
    /// What became of each of its runs.
    pub traces: Vec<Result<Trace, RunError>>,
}

/// A statement and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// The recipe's name.
    pub experiment: String,
    /// The optimizer with its settings.
    pub setting: String,
    /// The statement.
    pub says: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
}

/// The runs of one optimizer with one way of its momentum.
struct Setting<'a> {
    label: String,
    recipe: &'a Recipe,
    traces: Vec<&'a Trace>,
    failures: Vec<String>,
}

impl Setting<'_> {
    fn runs(&self) -> usize {
        self.traces.len() + self.failures.len()
    }

    /// That runs failed, if some did.
    fn failed(&self) -> Option<String> {
        let first = self.failures.first()?;
        Some(format!("{} of {} runs failed, the first with: {first}", self.failures.len(), self.runs()))
    }
}

/// How the momentum moves.
#[derive(Clone, Copy, PartialEq)]
enum Momentum {
    Constant,
    /// γλ^(t-1), with λ.
    Geometric(f64),
    /// γ/√t.
    InverseSqrt,
}

fn momentum(recipe: &Recipe) -> Momentum {
    let schedule = recipe.schedule.config.get("momentum");
    let kind = schedule.and_then(|schedule| schedule.get("kind")).and_then(Value::as_str);
    match kind {
        Some("geometric") => {
            let ratio = schedule.and_then(|schedule| schedule.get("ratio")).and_then(Value::as_f64);
            Momentum::Geometric(ratio.unwrap_or(1.0))
        }
        Some("inverse_sqrt") => Momentum::InverseSqrt,
        _ => Momentum::Constant,
    }
}

fn is_decgd(recipe: &Recipe) -> bool {
    recipe.optimizer.name == "decgd"
}

fn has_ams(recipe: &Recipe) -> bool {
    recipe.optimizer.hyper.get("ams") == Some(&Value::Bool(true))
}

fn label(recipe: &Recipe) -> String {
    if !is_decgd(recipe) {
        return recipe.optimizer.name.clone();
    }
    let ams = if has_ams(recipe) { "AMS" } else { "no AMS" };
    let gamma = match momentum(recipe) {
        Momentum::Constant => "γ",
        Momentum::Geometric(_) => "γλ^(t−1)",
        Momentum::InverseSqrt => "γ/√t",
    };
    format!("decgd, {ams}, {gamma}")
}

fn settings(experiment: &Experiment) -> Vec<Setting<'_>> {
    let mut settings: Vec<Setting> = Vec::new();
    for (recipe, trace) in experiment.recipe.runs().iter().zip(&experiment.traces) {
        let label = label(recipe);
        let place = match settings.iter().position(|setting| setting.label == label) {
            Some(place) => place,
            None => {
                settings.push(Setting { label, recipe, traces: Vec::new(), failures: Vec::new() });
                settings.len() - 1
            }
        };
        match trace {
            Ok(trace) => settings[place].traces.push(trace),
            Err(e) => settings[place].failures.push(e.to_string()),
        }
    }
    settings
}

/// The right-hand side of Theorem 1 or Corollary 1 at a point, with the constants measured up to it; `None` where the theorem has
/// none.
fn bound(recipe: &Recipe, trace: &Trace, point: &Point) -> Option<f64> {
    let (d, eta) = (trace.diameter?, recipe.optimizer.lr);
    let (l, g, inverse_v) = (point.root?, point.slope?, point.inverse_v?);
    let gamma = recipe.optimizer.hyper.get("momentum").and_then(Value::as_f64)?;
    let root_t = (point.t as f64).sqrt();
    let first = l * d * d * root_t / (4.0 * eta) * inverse_v;
    let second = match momentum(recipe) {
        // Corollary 1, as it is printed.
        Momentum::Geometric(lambda) => l * d * d * gamma * gamma / (eta * (1.0 - lambda * lambda).powi(2)),
        // Theorem 1, with γ as it was.
        Momentum::Constant | Momentum::InverseSqrt => l * d * d * point.momenta,
    };
    let third = eta * g * g * l * (1.0 + l) / (1.0 - gamma) * (2.0 * root_t - 1.0);
    Some(first + second + third)
}

/// The largest regret so far at every point.
fn envelope(trace: &Trace) -> Vec<(f64, f64)> {
    let mut largest = f64::NEG_INFINITY;
    let mut out = Vec::new();
    for point in &trace.points {
        let Some(worst) = point.worst else { return Vec::new() };
        largest = most(largest, worst);
        out.push((point.t as f64, largest));
    }
    out
}

/// The least squares slope of log y over log x in the last two factors of ten of x; 0 where y does not move or is never above 0.
/// `None` where there are too few points, or one is not finite.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let last = points.last()?.0;
    let late: Vec<&(f64, f64)> = points.iter().filter(|(x, _)| *x >= last / 100.0).collect();
    if late.len() < 3 || late.iter().any(|(_, y)| !y.is_finite()) {
        return None;
    }
    let logs: Vec<(f64, f64)> =
        late.iter().filter(|(_, y)| *y > 0.0).map(|(x, y)| (x.ln(), y.ln())).collect();
    if logs.is_empty() {
        return Some(0.0);
    }
    if logs.len() < 3 {
        return None;
    }
    let n = logs.len() as f64;
    let (mx, my) = logs.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x / n, b + y / n));
    let (sxy, sxx) =
        logs.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + (x - mx) * (y - my), b + (x - mx) * (x - mx)));
    (sxx > 0.0).then(|| sxy / sxx)
}

/// What became of a bound over all runs of a setting.
enum Held {
    /// At every T.
    Everywhere,
    /// At all points; between them it cannot be told.
    AtPoints,
    /// At this T, the first of all runs, one was above it: its regret and the bound there.
    Not(u64, f64, f64),
    /// At this T, the first of all runs, a v was not positive, from where on the bound says nothing.
    NoV(u64),
    /// At this T, the first of all runs, a regret or its bound was no number or not known.
    Unknown(u64),
    /// There is no bound.
    None,
}

/// What became of the bound, and in how many runs.
fn held(setting: &Setting) -> (Held, usize) {
    let (mut everywhere, mut any) = (true, false);
    let mut first: Option<(u64, Held)> = None;
    let mut above = 0;
    for trace in &setting.traces {
        let mut before: Option<f64> = None;
        for point in &trace.points {
            let bound = bound(setting.recipe, trace, point);
            any |= bound.is_some();
            let found = match (bound, point.regret, point.worst) {
                // Not `v <= 0.0`, which is false of what is no number.
                _ if point.least_v.is_some_and(|v| v.is_nan() || v <= 0.0) => Some(Held::NoV(point.t)),
                (Some(bound), Some(regret), _) if regret > bound => Some(Held::Not(point.t, regret, bound)),
                (Some(bound), Some(regret), Some(worst))
                    if ![bound, regret, worst].iter().any(|v| v.is_nan()) =>
                {
                    None
                }
                _ => Some(Held::Unknown(point.t)),
            };
            if let Some(found) = found {
                above += 1;
                if first.as_ref().is_none_or(|(t, _)| point.t < *t) {
                    first = Some((point.t, found));
                }
                break;
            }
            // Between two points the bound is at least what it was at the first, if it never falls.
            let below = before.is_none_or(|before| point.worst.is_some_and(|worst| worst <= before));
            everywhere &= below && has_ams(setting.recipe);
            before = bound;
        }
    }
    let held = match first {
        _ if !any => Held::None,
        Some((_, found)) => found,
        None if everywhere => Held::Everywhere,
        None => Held::AtPoints,
    };
    (held, above)
}

/// Exponents over the runs of a setting.
struct Exponents {
    /// The interval over the runs that have one.
    interval: Option<Interval>,
    /// Why it says nothing of all of them, if it does not.
    open: Option<String>,
}

impl Exponents {
    fn of(setting: &Setting, line: &dyn Fn(&Trace) -> Vec<(f64, f64)>) -> Self {
        let slopes: Vec<f64> = setting.traces.iter().filter_map(|trace| slope(&line(trace))).collect();
        let without = setting.traces.len() - slopes.len();
        let open = setting.failed().or_else(|| {
            let runs = setting.runs();
            (without > 0).then(|| {
                format!("{without} of {runs} runs have no exponent: too few numbers, or some are none")
            })
        });
        Self { interval: student(&slopes, 0.95), open }
    }

    /// What became of the statement that it is at most this.
    fn at_most(&self, limit: f64) -> Verdict {
        match (&self.interval, &self.open) {
            (Some(interval), None) => at_most(interval, limit),
            _ => Verdict::Undecided,
        }
    }

    fn text(&self) -> String {
        self.interval.as_ref().map_or("–".to_owned(), interval_text)
    }

    /// The answer in a table.
    fn answer(&self, limit: f64) -> String {
        let answer = match self.at_most(limit) {
            Verdict::Reproduced => "yes",
            Verdict::Differs => "no",
            _ => "cannot be told",
        };
        answer.to_owned()
    }

    /// What they are of, with why nothing follows from them if nothing does.
    fn reason(&self, what: &str) -> String {
        match (&self.interval, &self.open) {
            (_, Some(open)) => open.clone(),
            (Some(interval), None) => format!("{what} {}", interval_text(interval)),
            (None, None) => "there is no run".to_owned(),
        }
    }
}

fn interval_text(interval: &Interval) -> String {
    // No −0.00.
    let mean = format!("{:.2}", (interval.mean * 100.0).round() / 100.0 + 0.0);
    match interval.half_width() {
        Some(half) => format!("{mean} ± {half:.2}"),
        None => mean,
    }
}

/// An interval against the most that is claimed: shown below it, refuted above it.
fn at_most(interval: &Interval, most: f64) -> Verdict {
    match () {
        () if interval.high <= most => Verdict::Reproduced,
        () if interval.low > most => Verdict::Differs,
        () => Verdict::Undecided,
    }
}

const BOUND: &str = "R(T) is at most the theorem's bound";
const EXPONENT: &str = "R(T) grows at most as √T";
const GRADIENT: &str = "min ‖∇f‖² falls at least as log T/√T";

fn judge_bound(experiment: &str, setting: &Setting) -> Option<Judged> {
    let (held, above) = held(setting);
    let of = format!("in {above} of {} runs", setting.runs());
    let (verdict, reason) = match (held, setting.failed()) {
        // Of runs that all failed nothing is known, not even that there is a bound.
        (Held::None, Some(failed)) if is_decgd(setting.recipe) && setting.traces.is_empty() => {
            (Verdict::Undecided, failed)
        }
        (Held::None, _) => return None,
        (Held::Everywhere | Held::AtPoints, Some(failed)) => {
            (Verdict::Undecided, format!("it is in the others, and {failed}"))
        }
        (held, _) => became(held, &of),
    };
    Some(judged(experiment, setting, BOUND, verdict, reason))
}

/// The verdict on a bound and why; `of` says in which runs it did not hold.
fn became(held: Held, of: &str) -> (Verdict, String) {
    match held {
        Held::None => (Verdict::Undecided, "there is no bound".to_owned()),
        Held::Everywhere => (Verdict::Reproduced, "at every T of every run".to_owned()),
        Held::AtPoints => (Verdict::Reproduced, "at every T that was looked at, of every run".to_owned()),
        Held::Not(t, regret, bound) => (
            Verdict::Differs,
            format!("{of} it is not; first at T = {t}: regret {}, bound {}", short(regret), short(bound)),
        ),
        Held::NoV(t) => (
            Verdict::Undecided,
            format!(
                "{of} a v is not above 0, as the proof asks, and the bound says nothing; first at T = {t}"
            ),
        ),
        Held::Unknown(t) => (
            Verdict::Undecided,
            format!("{of} the regret or the bound is no number, or not known; first at T = {t}"),
        ),
    }
}

fn judged(
    experiment: &str,
    setting: &Setting,
    says: &'static str,
    verdict: Verdict,
    reason: String,
) -> Judged {
    let (experiment, setting) = (experiment.to_owned(), setting.label.clone());
    Judged { experiment, setting, says, verdict, reason }
}

fn judge_exponent(experiment: &str, setting: &Setting) -> Option<Judged> {
    let found = Exponents::of(setting, &envelope);
    Some(judged(experiment, setting, EXPONENT, found.at_most(0.5), found.reason("exponent")))
}

/// The least squared gradients, over the rate of Theorem 2: if these grow, it does not hold.
fn over_rate(trace: &Trace) -> Vec<(f64, f64)> {
    let points = trace.points.iter().filter(|point| point.t > 1);
    points
        .map(|point| {
            let t = point.t as f64;
            (t, point.gradient * t.sqrt() / t.ln())
        })
        .collect()
}

fn judge_gradient(experiment: &str, setting: &Setting) -> Option<Judged> {
    let found = Exponents::of(setting, &over_rate);
    let reason = found.reason("min ‖∇f‖² · √T/log T grows with exponent");
    Some(judged(experiment, setting, GRADIENT, found.at_most(0.0), reason))
}

/// The mean over runs at every point that all have.
fn mean(traces: &[&Trace], of: &dyn Fn(&Trace) -> Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let lines: Vec<Vec<(f64, f64)>> = traces.iter().map(|trace| of(trace)).collect();
    let count = lines.iter().map(Vec::len).min().unwrap_or(0);
    let n = lines.len() as f64;
    (0..count).map(|i| (lines[0][i].0, lines.iter().map(|line| line[i].1).sum::<f64>() / n)).collect()
}

fn above_zero(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.retain(|(_, y)| *y > 0.0);
    points
}

fn regret_table(settings: &[Setting]) -> Table {
    let head = [
        "optimizer",
        "runs",
        "R(T)",
        "R(T)/T",
        "bound",
        "bound / R(T)",
        "held",
        "exponent",
        "at most ½",
        "least v",
        "D",
        "G",
        "L",
    ];
    let mut table = Table::new(head).text(&["optimizer", "held", "at most ½"]);
    for setting in settings {
        let n = setting.traces.len() as f64;
        let last = |of: &dyn Fn(&Trace, &Point) -> Option<f64>| -> Option<f64> {
            let values: Option<Vec<f64>> =
                setting.traces.iter().map(|trace| of(trace, trace.points.last()?)).collect();
            values.filter(|values| !values.is_empty()).map(|values| values.iter().sum::<f64>() / n)
        };
        let text = |value: Option<f64>| value.map_or("–".to_owned(), short);
        let regret = last(&|_, point| point.regret);
        let steps = last(&|_, point| Some(point.t as f64));
        let least_v = last(&|_, point| point.least_v);
        // One v that was not above 0 leaves its run without a bound, and the runs without a mean.
        let above_zero =
            |trace: &&Trace| trace.points.iter().all(|point| point.least_v.is_some_and(|v| v > 0.0));
        let sound = setting.traces.iter().all(above_zero);
        let bound = last(&|trace, point| bound(setting.recipe, trace, point)).filter(|_| sound);
        let held = match held(setting).0 {
            Held::None => "–".to_owned(),
            Held::Everywhere => "at every T".to_owned(),
            Held::AtPoints => "at every point".to_owned(),
            Held::Not(t, ..) => format!("not at T = {t}"),
            Held::NoV(t) => format!("v ≤ 0 at T = {t}"),
            Held::Unknown(t) => format!("not known at T = {t}"),
        };
        let exponents = Exponents::of(setting, &envelope);
        table.row([
            setting.label.clone(),
            format!("{}/{}", setting.traces.len(), setting.traces.len() + setting.failures.len()),
            text(regret),
            text(regret.zip(steps).map(|(regret, steps)| regret / steps)),
            text(bound),
            text(bound.zip(regret).map(|(bound, regret)| bound / regret)),
            held,
            exponents.text(),
            exponents.answer(0.5),
            text(least_v),
            text(last(&|trace, _| trace.diameter)),
            text(last(&|_, point| point.slope)),
            text(last(&|_, point| point.root)),
        ]);
        if let Some(failure) = setting.failures.first() {
            table.note(format!("{}: {failure}", setting.label));
        }
    }
    table.note(
        "R(T), bound, least v, D, G and L are means over the runs at the last T. Where a v was not above 0 in some run, there is no bound.",
    );
    table
}

fn gradient_table(settings: &[Setting]) -> Table {
    let head = [
        "optimizer",
        "runs",
        "T",
        "min ‖∇f‖²",
        "exponent",
        "over the rate",
        "at least as fast",
        "least v",
        "end of x₁",
    ];
    let mut table = Table::new(head).text(&["optimizer", "at least as fast"]);
    for setting in settings {
        let line = mean(&setting.traces, &|trace| {
            trace.points.iter().map(|point| (point.t as f64, point.gradient)).collect()
        });
        let own = |trace: &Trace| trace.points.iter().map(|p| (p.t as f64, p.gradient)).collect();
        let (own, over) = (Exponents::of(setting, &own), Exponents::of(setting, &over_rate));
        let last = |of: fn(&(f64, f64)) -> f64| line.last().map_or("–".to_owned(), |last| short(of(last)));
        let least_v: Option<Vec<f64>> =
            setting.traces.iter().map(|trace| trace.points.last().and_then(|point| point.least_v)).collect();
        let mean_of = |all: &[f64]| (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64);
        let least_v = least_v.and_then(|all| mean_of(&all));
        let end: Vec<f64> = setting.traces.iter().filter_map(|trace| trace.x.first().copied()).collect();
        table.row([
            setting.label.clone(),
            format!("{}/{}", setting.traces.len(), setting.traces.len() + setting.failures.len()),
            last(|(t, _)| *t),
            last(|(_, least)| *least),
            own.text(),
            over.text(),
            over.answer(0.0),
            least_v.map_or("–".to_owned(), short),
            mean_of(&end).map_or("–".to_owned(), short),
        ]);
        if let Some(failure) = setting.failures.first() {
            table.note(format!("{}: {failure}", setting.label));
        }
    }
    table.note(
        "min ‖∇f‖² is over all steps so far, of the gradient of what is expected of a step; means over the runs. The exponents are of it, and \
         of it over log T/√T, which must not grow.",
    );
    table
}

fn chart(name: &str, settings: &[Setting], convex: bool) -> Figure {
    let mut series = Vec::new();
    let mut numbers = Table::new(["optimizer", "line", "T", "value"]);
    for (i, setting) in settings.iter().enumerate() {
        let style = i % STYLES;
        let mut add = |line: &str, points: Vec<(f64, f64)>, marks: Marks| {
            for (t, value) in &points {
                numbers.row([setting.label.clone(), line.to_owned(), short(*t), short(*value)]);
            }
            series.push(Series { marks, ..Series::line(&setting.label, style, points) });
        };
        if convex {
            add("regret", above_zero(mean(&setting.traces, &envelope)), Marks::Line);
            // With a constant γ the bound is out of all proportion; the table has it.
            if is_decgd(setting.recipe) && momentum(setting.recipe) != Momentum::Constant {
                let bounds = |trace: &Trace| -> Vec<(f64, f64)> {
                    let sound =
                        trace.points.iter().take_while(|point| point.least_v.is_some_and(|v| v > 0.0));
                    sound.filter_map(|p| Some((p.t as f64, bound(setting.recipe, trace, p)?))).collect()
                };
                add("bound", above_zero(mean(&setting.traces, &bounds)), Marks::Thin);
            }
        } else {
            let line = |trace: &Trace| trace.points.iter().map(|p| (p.t as f64, p.gradient)).collect();
            add("gradient", above_zero(mean(&setting.traces, &line)), Marks::Line);
        }
    }
    series.retain(|line| !line.points.is_empty());
    let (what, text) = match convex {
        true => ("regret", "Largest regret so far by T, with the theorem's bounds, on logarithmic axes."),
        false => ("min ‖∇f‖²", "Least squared gradient so far by T, on logarithmic axes."),
    };
    let chart =
        Chart { x_scale: Scale::Log, y_scale: Scale::Log, series, ..Chart::new(name, text, "T", what) };
    let caption = match convex {
        true => format!(
            "{name}: the largest regret so far, means over the runs; dotted: the bound on the line of the same colour, where γ decays."
        ),
        false => format!("{name}: the least squared gradient so far, means over the runs."),
    };
    let view = View { log: false, smooth: false, picture: Picture::Chart(chart) };
    Figure { caption, panels: vec![Panel { views: vec![view] }], data: numbers }
}

/// The problem in a recipe's words.
fn problem(recipe: &Recipe) -> String {
    let Some(problem) =
        recipe.problem.as_ref().or(recipe.runs().first().and_then(|run| run.problem.as_ref()))
    else {
        return String::new();
    };
    let mut text = format!("Problem {}", problem.name);
    for (key, value) in problem.config.iter().filter(|(key, value)| *key != "start" && !value.is_null()) {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        text += &format!(", {key} {value}");
    }
    if let Some(domain) = problem.domain {
        text += &match (domain.bounds, domain.ball) {
            (Some([low, high]), _) => format!(", in the box [{low}, {high}]"),
            (_, Some(radius)) => format!(", in the ball of radius {radius}"),
            _ => String::new(),
        };
    }
    text
}

/// The numbers of every optimizer, once each.
fn rates(settings: &[Setting]) -> String {
    let mut parts: Vec<String> = Vec::new();
    for Setting { recipe, .. } in settings {
        let mut text = format!("{}: η {}", recipe.optimizer.name, short(recipe.optimizer.lr));
        for (key, name) in [("c", "c"), ("momentum", "γ"), ("beta1", "β₁"), ("beta2", "β₂")] {
            if let Some(value) = recipe.optimizer.hyper.get(key).and_then(Value::as_f64)
                && (key != "momentum" || is_decgd(recipe))
            {
                text += &format!(", {name} {}", short(value));
            }
        }
        if let Momentum::Geometric(lambda) = momentum(recipe) {
            text += &format!(", λ {}", short(lambda));
        }
        let known = |part: &String| part.starts_with(&format!("{}:", recipe.optimizer.name));
        if !parts.iter().any(known) {
            parts.push(text);
        }
    }
    parts.join("; ")
}

/// The page, and every verdict on it.
pub fn theory(experiments: &[Experiment]) -> (Document, Vec<Judged>) {
    let (mut sections, mut all) = (Vec::new(), Vec::new());
    let mut data = Table::new(["experiment", "optimizer", "says", "verdict", "because"]);
    for experiment in experiments {
        let name = experiment.recipe.name.trim_start_matches("theory-").to_owned();
        let settings = settings(experiment);
        // Regret is of problems with a domain; where all runs failed that is all there is to go by.
        let convex = match experiment.traces.iter().flatten().next() {
            Some(_) => experiment
                .traces
                .iter()
                .flatten()
                .any(|trace| trace.points.iter().any(|p| p.regret.is_some())),
            None => experiment
                .recipe
                .runs()
                .iter()
                .any(|run| run.problem.as_ref().is_some_and(|p| p.domain.is_some())),
        };
        let table = if convex { regret_table(&settings) } else { gradient_table(&settings) };
        let mut blocks = vec![Block::Text(format!("{}. {}.", problem(&experiment.recipe), rates(&settings)))];
        blocks.extend(about(&name).map(|text| Block::Text(text.to_owned())));
        blocks.push(Block::Table(table));
        blocks.push(Block::Figure(chart(&name, &settings, convex)));
        for setting in &settings {
            let judges: &[fn(&str, &Setting) -> Option<Judged>] =
                if convex { &[judge_bound, judge_exponent] } else { &[judge_gradient] };
            all.extend(judges.iter().filter_map(|judge| judge(&name, setting)));
        }
        sections.push(Section::new(name, blocks));
    }
    let mut verdicts = Table::new(["problem", "optimizer", "statement", "verdict", "because"])
        .text(&["optimizer", "statement", "verdict", "because"])
        .caption("Verdicts");
    for judged in &all {
        let cells = [
            judged.experiment.clone(),
            judged.setting.clone(),
            judged.says.to_owned(),
            judged.verdict.to_string(),
            judged.reason.clone(),
        ];
        verdicts.row(cells.clone());
        data.row(cells);
    }
    verdicts.note(
        "An exponent is that of the T that were run, not of T → ∞: 0.51 may be ½ in the end, and 0 is a regret that has stopped to grow.",
    );
    verdicts.note(
        "The statements on regret are the paper's for DecGD with AMS and a decaying γ alone; for all others the exponent is there to compare.",
    );
    let mut blocks: Vec<Block> = LEAD.iter().map(|text| Block::Text((*text).to_owned())).collect();
    blocks.push(Block::Table(verdicts));
    sections.insert(0, Section::new("What the theorems say, and what came out", blocks));
    let title = "DecGD's theorems, measured".to_owned();
    let lead = vec![METHOD.to_owned()];
    (Document { title, lead, sections, data }, all)
}

const METHOD: &str = "Made by cargo xtask reproduce theory. Rates are η/√t. D is the diameter of the domain; G and L are the largest ‖∇√(f + c)‖ and \
    √(f + c) of the run up to T; v, γ and η are as they were. A bound held at every T if no regret between two points is above the bound at the first of \
    them (with AMS it never falls). Before the first step DecGD takes nothing to have moved (x0: first_iterate): the printed x_0 = 0 would make v depend on \
    where the origin is. An exponent is the least squares slope of log M(T) over log T in the last two factors of ten of T, M the largest regret \
    so far; ± is Student's 95 % interval over seeds or, where nothing is random, over starting points. At most ½: the whole interval is; no: it is all above.";

/// What is known of the statements before anything is measured.
const LEAD: [&str; 4] = [
    "Theorem 1: R(T) ≤ (L D² √T/(4η)) Σ 1/v_T + L D² Σ γ²/η_t + (η G² L (1 + L)/(1 − γ)) (2√T − 1). Corollary 1, γ_t = γλ^(t−1): the second term is \
     L D² γ²/(η (1 − λ²)²). With a constant γ the second term of Theorem 1 grows as T^1.5 and bounds nothing of interest; O(√T) needs a γ that decays, and v > 0 \
     that does not rise (AMS), which the published defaults do not have.",
    "The bound is not right as it is printed. Convexity gives R(T) ≤ Σ ⟨∇f_t, x_t − x*⟩ = Σ 2 l_t ⟨∇l_t, x_t − x*⟩ with l_t = √(f_t + c). To go on with the \
     largest l in the place of each l_t is sound only where every ⟨∇l_t, x_t − x*⟩ is at least 0, and it is not: x* is best for the sum, not for each f_t. What the steps \
     do drive to 0 is the mean of ∇l_t, so that where v hardly moves DecGD minimises Σ √(f_t + c) and not Σ f_t. The two have one minimum if all f_t are the same \
     or scatter evenly; else not, and then the regret grows in proportion to T. The problem skewed shows it within all assumptions of the theorem.",
    "Nothing keeps v above 0 either: v_t = v_{t−1} + m_t (x_t − x_{t−1}) can cross 0, from where on Σ 1/v says nothing (the column of the least v). And the bound's \
     constants are loose in the other direction: the factor 2 of ∇f = 2 l ∇l is not carried into it, and ‖m_t‖² is bounded by G²/(1 − γ) although m has no (1 − γ) in it.",
    "Theorem 2 is about noise in the gradient of √(f + c) whose mean is 0 (problem wells). Samples of data are not so: the mean of ∇√(f_S + c) is not the gradient of \
     √(E f_S + c) (problem wells-sampled).",
];

/// What a problem is there for.
fn about(name: &str) -> Option<&'static str> {
    Some(match name {
        "fixed" => "The same function at every step: what is minimised is Σ f_t and Σ √(f_t + c) alike.",
        "even" => "Targets scatter evenly around 0: both sums have their minimum there.",
        "ball" => {
            "Linear losses in a ball: negative as often as not, with c above what they can fall to. Weights of a projection in the norm of 1/v, which the proof takes, and in the Euclidean one differ in a ball; ours is Euclidean."
        }
        "skewed" => {
            "Three quarters of the targets are at 1, the others at −1. Σ f_t is least at their mean, 0.5, Σ √(f_t + c) with a small c near their median, 1."
        }
        "reddi" => {
            "Reddi, Kale & Kumar: 3x at every third step and −x otherwise, on [−1, 1]. The best point is −1; Adam with β₁ = 0 and β₂ = 1/(1 + C²) goes to +1."
        }
        "reddi-random" => {
            "The same idea at random: the steep loss comes with a probability at which −1 is still the best point."
        }
        "wells" => {
            "Smooth and not convex, the value exact and noise in the gradient alone, as Theorem 2 has it."
        }
        "wells-sampled" => {
            "The same function with noise as data makes it: another sample of the function at every step."
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(power: f64) -> Vec<(f64, f64)> {
        (0..=48).map(|k| 10f64.powf(f64::from(k) / 12.0)).map(|t| (t, 3.0 * t.powf(power))).collect()
    }

    #[test]
    fn a_slope_is_that_of_the_last_two_factors_of_ten() {
        for power in [0.0, 0.5, 1.0] {
            // Logarithms of numbers up to 1e4, least squares of 25 of them.
            assert!((slope(&line(power)).unwrap() - power).abs() < 1e-13);
        }
        // What was before does not count.
        let mut bent = line(0.5);
        bent.iter_mut().filter(|(t, _)| *t < 99.0).for_each(|(_, y)| *y = 1e9);
        assert!((slope(&bent).unwrap() - 0.5).abs() < 1e-13);
        assert_eq!(slope(&line(0.5)[..2]), None);
    }

    fn recipe(optimizer: &str) -> Recipe {
        let text = format!(
            "problem: {{name: targets, domain: {{box: [-1, 1]}}}}\noptimizer: {optimizer}\ntrain: {{steps: 1000}}\n"
        );
        Recipe::parse("made-up.yaml", &text, &[], &taper_train::recipe::Unchecked).unwrap()
    }

    const DECGD: &str = "{name: decgd, lr: 0.5, momentum: 0.5, ams: true}";

    /// A trace whose regret is `share` of √T, far below any bound.
    fn trace(share: f64) -> Trace {
        let point = |k: u32| {
            let t = 10f64.powf(f64::from(k) / 12.0).round();
            let regret = Some(share * t.sqrt());
            let (one, momenta) = (Some(1.0), 0.5 * t);
            Point {
                t: t as u64,
                regret,
                worst: regret,
                inverse_v: one,
                least_v: one,
                slope: one,
                root: one,
                momenta,
                gradient: t.powi(-2),
            }
        };
        Trace { points: (0..=36).map(point).collect(), diameter: Some(2.0), x: vec![0.0] }
    }

    fn setting<'a>(recipe: &'a Recipe, traces: &'a [Trace], failures: &[&str]) -> Setting<'a> {
        let failures = failures.iter().map(|failure| (*failure).to_owned()).collect();
        Setting { label: "decgd".into(), recipe, traces: traces.iter().collect(), failures }
    }

    #[test]
    fn a_run_that_failed_leaves_every_statement_about_all_runs_open() {
        let recipe = recipe(DECGD);
        let runs = [trace(0.1), trace(0.1), trace(0.1)];
        let judges: [fn(&str, &Setting) -> Option<Judged>; 3] = [judge_bound, judge_exponent, judge_gradient];
        for judge in judges {
            let whole = judge("x", &setting(&recipe, &runs, &[])).unwrap();
            assert_eq!(whole.verdict, Verdict::Reproduced, "{whole:?}");
            let part = judge("x", &setting(&recipe, &runs, &["the loss is NaN"])).unwrap();
            assert_eq!(part.verdict, Verdict::Undecided, "{part:?}");
            assert!(part.reason.contains("1 of 4 runs failed, the first with: the loss is NaN"), "{part:?}");
            let none = judge("x", &setting(&recipe, &[], &["one", "two"])).unwrap();
            assert_eq!(
                (none.verdict, none.reason.contains("2 of 2 runs")),
                (Verdict::Undecided, true),
                "{none:?}"
            );
        }
        // A regret above the bound is a counterexample, whatever became of the others.
        let above = [trace(0.1), trace(1e6)];
        let found = judge_bound("x", &setting(&recipe, &above, &["the loss is NaN"])).unwrap();
        assert_eq!(
            (found.verdict, found.reason.contains("in 1 of 3 runs")),
            (Verdict::Differs, true),
            "{found:?}"
        );
    }

    #[test]
    fn a_number_that_is_none_counts_as_nothing_held() {
        let recipe = recipe(DECGD);
        let changes: [fn(&mut Point); 6] = [
            |point| point.regret = Some(f64::NAN),
            |point| point.worst = Some(f64::NAN),
            |point| point.slope = Some(f64::NAN),
            |point| point.inverse_v = Some(f64::NAN),
            |point| point.least_v = Some(f64::NAN),
            |point| point.root = None,
        ];
        for (which, change) in changes.into_iter().enumerate() {
            let mut runs = [trace(0.1), trace(0.1)];
            change(&mut runs[1].points[20]);
            let found = judge_bound("x", &setting(&recipe, &runs, &[])).unwrap();
            assert_eq!(found.verdict, Verdict::Undecided, "{which}: {found:?}");
            assert!(
                found.reason.contains("in 1 of 2 runs") && found.reason.contains("T = 46"),
                "{which}: {found:?}"
            );
        }
        // A regret that was none has no exponent from there on, and is not left out of the others'.
        let mut runs = [trace(0.1), trace(0.1)];
        runs[1].points[20].worst = Some(f64::NAN);
        let found = judge_exponent("x", &setting(&recipe, &runs, &[])).unwrap();
        assert_eq!(found.verdict, Verdict::Undecided, "{found:?}");
        assert!(found.reason.contains("1 of 2 runs have no exponent"), "{found:?}");
        let mut runs = [trace(0.1), trace(0.1)];
        runs[1].points[30].gradient = f64::NAN;
        assert_eq!(judge_gradient("x", &setting(&recipe, &runs, &[])).unwrap().verdict, Verdict::Undecided);
    }

    #[test]
    fn a_table_has_the_constants_of_the_bound_and_no_bound_where_one_run_has_none() {
        let recipe = recipe(DECGD);
        let rows = |traces: &[Trace]| regret_table(&[setting(&recipe, traces, &[])]).json_lines();
        let mut runs = [trace(0.1), trace(0.1)];
        for (trace, (g, l)) in runs.iter_mut().zip([(3.0, 5.0), (4.0, 7.0)]) {
            trace.points.iter_mut().for_each(|point| (point.slope, point.root) = (Some(g), Some(l)));
        }
        let found: Value = serde_json::from_str(rows(&runs).lines().next().unwrap()).unwrap();
        assert_eq!(
            serde_json::json!([found["D"], found["G"], found["L"]]),
            serde_json::json!([2, 3.5, 6]),
            "{found}"
        );
        assert_ne!(found["bound"], "–", "{found}");
        // In the end all v are above 0 again, and their mean always was.
        runs[1].points[20].least_v = Some(-0.5);
        let found: Value = serde_json::from_str(rows(&runs).lines().next().unwrap()).unwrap();
        assert_eq!([&found["bound"], &found["bound / R(T)"]], ["–", "–"], "{found}");
        assert_eq!(found["least v"], 1, "{found}");
    }

    #[test]
    fn a_regret_that_is_never_above_zero_does_not_grow() {
        let recipe = recipe("{name: sgd, lr: 0.5}");
        let found = judge_exponent("x", &setting(&recipe, &[trace(-1.0), trace(-2.0)], &[])).unwrap();
        assert_eq!((found.verdict, found.reason.as_str()), (Verdict::Reproduced, "exponent 0.00 ± 0.00"));
        // A run that is too short for an exponent is told, not left out.
        let mut short = trace(0.1);
        short.points.truncate(2);
        let found = judge_exponent("x", &setting(&recipe, &[trace(0.1), short], &[])).unwrap();
        assert_eq!(found.verdict, Verdict::Undecided, "{found:?}");
    }

    #[test]
    fn an_interval_shows_refutes_or_leaves_open() {
        let interval = |values: &[f64]| student(values, 0.95).unwrap();
        assert_eq!(at_most(&interval(&[0.4, 0.41, 0.42]), 0.5), Verdict::Reproduced);
        assert_eq!(at_most(&interval(&[0.9, 0.91, 0.92]), 0.5), Verdict::Differs);
        assert_eq!(at_most(&interval(&[0.45, 0.5, 0.55]), 0.5), Verdict::Undecided);
        // One run has no interval.
        assert_eq!(at_most(&interval(&[0.1]), 0.5), Verdict::Undecided);
    }
}

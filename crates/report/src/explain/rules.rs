//! The sentences of a page, each chosen by a rule with its numbers. docs/microscope.md states the rules.
use super::trace::{Explained, Nearest, Stage, median};
use serde_json::Value;
use taper_figures::plot::short;
use taper_train::run::{Sight, Status};

/// From this R² on, steps are close to those of an optimizer.
pub const CLOSE: f64 = 0.95;
/// From this R² on, they resemble them.
pub const LOOSE: f64 = 0.7;
/// A rate that changes by less than this factor stays as it is.
pub const DRIFT: f64 = 1.1;
/// A vector whose middle and whose band (1 % to 99 %) move by no more than this part of it stands still.
pub const STILL: f64 = 0.05;
/// Below this α steps are short, above its opposite long.
pub const HALFWAY: f64 = 0.5;
/// Below this stability ratio a step is far from unstable.
pub const CALM: f64 = 0.5;
/// Between these ratios a run is at the edge of stability.
pub const EDGE: (f64, f64) = (0.8, 1.2);
/// A loss that is above the median of the looks before by more than this part of the first loss has jumped.
pub const JUMP: f64 = 0.25;
/// A function's loss that is so many times the median of the looks before has jumped, if it has also given back half of what was
/// gained, in orders of magnitude.
pub const LEAP: f64 = 10.0;
/// The looks before one, by which it is judged.
pub const WINDOW: usize = 5;
/// A quantity that is so many times the median of the looks before has moved.
pub const MOVED: f64 = 3.0;
/// How many looks before a jump are searched for what moved first.
pub const LOOKBACK: usize = 10;
/// Layers whose update-to-weight ratios are further apart than this learn at different speeds.
pub const SPEEDS: f64 = 10.0;
/// A batch so many times away from the noise scale is too small or larger than it need be.
pub const NOISY: f64 = 10.0;
/// Two runs whose medians differ by this factor differ in a quantity.
pub const DIFFERS: f64 = 1.5;
/// No rate is advised that is further away than this factor.
pub const MOST: f64 = 5.0;

/// A sentence with the name of the rule that chose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence {
    /// The rule.
    pub rule: &'static str,
    /// What it says.
    pub text: String,
}

impl Sentence {
    fn new(rule: &'static str, text: String) -> Self {
        Self { rule, text }
    }

    /// With the rule behind it.
    pub fn shown(&self) -> String {
        format!("{} (rule: {})", self.text, self.rule)
    }
}

/// R² with as many digits as tell it from 1.
pub fn digits(r2: f64) -> String {
    if r2 > 0.9995 && r2 < 1.0 { format!("{r2:.6}") } else { format!("{r2:.3}") }
}

/// A reference for people.
pub fn title(reference: &str) -> &'static str {
    match reference {
        "gd" => "gradient descent",
        "sgdm" => "momentum descent (SGDM)",
        "sign" => "descent by the signs of momentum",
        "adam" => "Adam",
        "root" => "momentum descent on √(f + c)",
        "orthogonal" => "orthogonalised momentum (Muon)",
        _ => "another optimizer",
    }
}

/// All sentences about a run.
pub fn sentences(run: &Explained) -> Vec<Sentence> {
    let mut all = Vec::new();
    all.extend(nearest(run));
    all.extend(rate(run));
    all.extend(vector(run));
    all.extend(layers(run));
    all.extend(alpha(run));
    all.extend(stability(run));
    all.extend(noise(run));
    all.push(unstable(run));
    all.push(next(run));
    all
}

/// Which simple optimizer it was close to, stage by stage.
fn nearest(run: &Explained) -> Vec<Sentence> {
    let stages: Vec<(Stage, Nearest)> =
        run.stages().into_iter().filter_map(|stage| Some((stage, stage.nearest()?))).collect();
    let how = |near: &Nearest| match near.r2 {
        r2 if r2 >= CLOSE => "close to",
        r2 if r2 >= LOOSE => "loosely like",
        _ => "like no simple optimizer; the nearest is",
    };
    let same =
        stages.windows(2).all(|pair| pair[0].1.name == pair[1].1.name && how(&pair[0].1) == how(&pair[1].1));
    if let ([(first, near), .., (last, end)], true) = (&stages[..], same) {
        let r2: Vec<String> = stages.iter().map(|(_, near)| digits(near.r2)).collect();
        let text = format!(
            "From step {} to step {} the steps were {} {}: R² {} in the stages, at a rate of {} at first and {} at last.",
            first.steps().0,
            last.steps().1,
            how(near),
            title(near.name),
            r2.join(", "),
            short(near.rate),
            short(end.rate),
        );
        return vec![Sentence::new("nearest", text)];
    }
    let each = stages.iter().map(|(stage, near)| {
        let (from, to) = stage.steps();
        let text = format!(
            "Steps {from} to {to} were {} {}: R² {}, rate {}, nearest in {:.0} % of the looks.",
            how(near),
            title(near.name),
            digits(near.r2),
            short(near.rate),
            100.0 * near.share,
        );
        Sentence::new("nearest", text)
    });
    each.collect()
}

/// The fitted rate of momentum descent at a look near the beginning and in the last stage, by itself and as so many times the
/// learning rate, and what it changed by for one learning rate.
struct Drift<'a> {
    first: Stage<'a>,
    last: Stage<'a>,
    rates: (f64, f64),
    times: (f64, f64),
    factor: f64,
}

impl Drift<'_> {
    /// Whether steps are those of momentum descent at both ends: else a rate of it says nothing of them.
    fn is_momentums(&self) -> bool {
        not_momentum(&self.first).is_none() && not_momentum(&self.last).is_none()
    }

    /// The look at the beginning, for people.
    fn when(&self, run: &Explained) -> String {
        match self.first.steps().0 {
            step if run.sights.first().is_some_and(|sight| sight.step == step) => "the first look".to_owned(),
            step => format!("step {step}"),
        }
    }
}

/// The look that later rates are held against: the first that has one. An optimizer that divides its mean by 1 - β₁ᵗ steps by a
/// gradient at first and by a tenth of a sum in the end, so that its rate falls by itself: of such a one the first look at which
/// that has passed.
fn reference(run: &Explained) -> Option<Stage<'_>> {
    let mut hyper = &run.run.recipe.optimizer.hyper;
    while let Some(inner) = hyper.get("inner").and_then(Value::as_object) {
        hyper = inner;
    }
    let corrects = hyper.contains_key("beta1");
    let above_zero = |sight: &Sight, name: &str| sight.all.get(name).is_some_and(|value| *value > 0.0);
    let settled = |sight: &Sight| {
        let beta = sight.all.get("momentum").copied().filter(|_| corrects).unwrap_or(0.0);
        beta.powf(sight.step as f64) <= 1.0 - 1.0 / DRIFT
    };
    let place = run
        .sights
        .iter()
        .position(|sight| settled(sight) && above_zero(sight, "rate/sgdm") && above_zero(sight, "lr"))?;
    (place + 1 < run.sights.len()).then(|| Stage(&run.sights[place..=place]))
}

fn drift(run: &Explained) -> Option<Drift<'_>> {
    let (first, last) = (reference(run)?, late(run)?);
    let rate = |stage: &Stage| stage.median("rate/sgdm").filter(|rate| *rate > 0.0);
    let lr = |stage: &Stage| stage.median("lr").filter(|lr| *lr > 0.0);
    let rates = (rate(&first)?, rate(&last)?);
    let times = (rates.0 / lr(&first)?, rates.1 / lr(&last)?);
    Some(Drift { first, last, rates, times, factor: times.1 / times.0 })
}

/// Whether the rate that steps amount to rose or fell.
fn rate(run: &Explained) -> Option<Sentence> {
    let drift = drift(run)?;
    let Drift { first, last, rates: (at_first, at_last), factor, .. } = drift;
    let (when, r2) =
        (drift.when(run), |stage: &Stage| stage.median("r2/sgdm").map_or("not looked at".to_owned(), digits));
    if !drift.is_momentums() {
        let text = format!(
            "Whether its effective rate rose or fell is not told: it would be a rate of momentum descent, and the steps are not (R² {} \
             at {when}, {} in the last stage, where {LOOSE} is asked for).",
            r2(&first),
            r2(&last),
        );
        return Some(Sentence::new("rate", text));
    }
    let of = |stage: &Stage, name: &str| stage.median(name).map_or("?".to_owned(), short);
    let how = match factor {
        factor if factor > DRIFT => format!("rose by a factor of {}", short(factor)),
        factor if factor < 1.0 / DRIFT => format!("fell by a factor of {}", short(1.0 / factor)),
        _ => format!("stayed as it was (a factor of {})", short(factor)),
    };
    let text = format!(
        "As a rate of momentum descent its steps amount to {} at {when} and to {} in the last stage (R² {} and {}, learning rate {} \
         and {}): for one learning rate the effective rate {how}, while the loss went from {} to {}.",
        short(at_first),
        short(at_last),
        r2(&first),
        r2(&last),
        of(&first, "lr"),
        of(&last, "lr"),
        of(&first, "loss"),
        of(&last, "loss"),
    );
    Some(Sentence::new("rate", text))
}

/// How far the vector of an optimizer that follows the loss moved, and what follows.
fn vector(run: &Explained) -> Vec<Sentence> {
    let whole = run.whole();
    let Some((_, start)) = whole.values("v_p50").next() else { return Vec::new() };
    // A median that is no number has moved, and nothing after it makes up for that.
    let further = |most: f64, by: f64| if by.is_nan() || by > most { by } else { most };
    let moved = whole.values("v_p50").map(|(_, v)| (v / start - 1.0).abs()).fold(0.0, further);
    let band = |sight: &Sight| {
        let of = |name: &str| sight.all.get(name).copied();
        Some(((of("v_p99")? - of("v_p01")?) / of("v_p50")?).abs())
    };
    let Some(width) = median(run.sights.iter().filter_map(band)) else { return Vec::new() };
    let (Some((_, first_root)), Some((_, last_root))) =
        (whole.values("root").next(), whole.values("root").last())
    else {
        return Vec::new();
    };
    let error = whole.values("v_error_rms").last().map_or(f64::NAN, |(_, error)| error);
    let still = moved <= STILL && width <= STILL;
    let how = if still { "hardly moved" } else { "moved" };
    let percent = |part: f64| format!("{} %", short(100.0 * part));
    let mut all = vec![Sentence::new(
        "vector",
        format!(
            "Its vector {how}: the median of all elements went at most {} away from {}, and 98 % of them lie within {} of each \
             other, while √(f + c) went from {} to {}. As an estimate of √(f + c) the vector is off by {} in the end \
             (root mean square).",
            percent(moved),
            short(start),
            percent(width),
            short(first_root),
            short(last_root),
            short(error),
        ),
    )];
    if let Some((step, share)) = whole.largest("v_negative").filter(|(_, share)| *share > 0.0) {
        let text = format!("{} of its elements were below 0 at step {step}: those ascend.", percent(share));
        all.push(Sentence::new("vector", text));
    }
    let r2: Option<Vec<f64>> = run.stages().iter().map(|stage| stage.median("r2/sgdm")).collect();
    let r2 = r2.unwrap_or_default();
    let close = !r2.is_empty() && r2.iter().all(|r2| *r2 >= CLOSE);
    if let Some(drift) = drift(run).filter(|drift| still && close && drift.is_momentums()) {
        let Drift { times: (first, last), factor, .. } = drift;
        let how = match factor {
            factor if factor > DRIFT => "a rising rate",
            factor if factor < 1.0 / DRIFT => "a falling rate",
            _ => "one rate",
        };
        let r2: Vec<String> = r2.iter().map(|r2| digits(*r2)).collect();
        let name = &run.run.recipe.optimizer.name;
        let text = format!(
            "The vector hardly moves, so {name} amounts to momentum descent (SGDM) with {how}: {} times its learning rate at \
             {}, {} times in the last stage, with R² {} in the stages.",
            short(first),
            drift.when(run),
            short(last),
            r2.join(", "),
        );
        all.push(Sentence::new("vector", text));
    }
    all
}

/// How differently layers change.
fn layers(run: &Explained) -> Option<Sentence> {
    let stages = run.stages();
    let last = stages.last()?;
    let ratio = |layer: &&str| last.of_layer(layer, "update_ratio").filter(|ratio| *ratio > 0.0);
    let mut ratios: Vec<(&str, f64)> =
        run.layers().into_iter().filter_map(|layer| Some((layer, ratio(&layer)?))).collect();
    ratios.sort_by(|a, b| a.1.total_cmp(&b.1));
    let ((slow, least), (fast, largest)) = (*ratios.first()?, *ratios.last()?);
    let text = match largest / least {
        _ if ratios.len() < 2 => return None,
        apart if apart > SPEEDS => format!(
            "Layers learn at different speeds: in the last stage a step changes {fast} by {} of its norm and {slow} by {}, a \
             factor of {}.",
            short(largest),
            short(least),
            short(apart),
        ),
        apart => format!(
            "Layers learn at similar speeds: in the last stage a step changes them by {} ({slow}) to {} ({fast}) of their \
             norms, a factor of {}.",
            short(least),
            short(largest),
            short(apart),
        ),
    };
    Some(Sentence::new("layers", text))
}

/// The stage that advice goes by.
fn late(run: &Explained) -> Option<Stage<'_>> {
    run.stages().pop()
}

/// Where steps land in the local parabola.
fn alpha(run: &Explained) -> Option<Sentence> {
    let stage = late(run)?;
    let none = stage.no_minimum()?;
    let aside = format!("{:.0} % of the looks had no minimum ahead", 100.0 * none);
    let Some(alpha) = stage.median("alpha") else {
        return Some(Sentence::new("alpha", format!("In the last stage {aside}: α says nothing.")));
    };
    let how = match alpha {
        alpha if alpha < -HALFWAY => "steps end well before the minimum of the parabola along them",
        alpha if alpha > HALFWAY => "steps go well beyond the minimum of the parabola along them",
        _ => "steps end near the minimum of the parabola along them",
    };
    let text = format!("In the last stage {how}: α is {} in the median ({aside}).", short(alpha));
    Some(Sentence::new("alpha", text))
}

/// The R² of momentum descent where it is too poor for its rate and its threshold of stability to be those of the steps, in words.
pub fn not_momentum(stage: &Stage) -> Option<String> {
    let r2 = stage.median("r2/sgdm");
    let said = r2.map_or("not looked at".to_owned(), digits);
    r2.is_none_or(|r2| r2 < LOOSE).then_some(said)
}

/// The stability ratio of a stage whose steps are momentum's.
fn ratio_of(stage: &Stage) -> Option<f64> {
    if not_momentum(stage).is_some() { None } else { stage.median("stability") }
}

/// How near steps are to the threshold of stability.
fn stability(run: &Explained) -> Option<Sentence> {
    let stage = late(run)?;
    let (ratio, sharpness) = (stage.median("stability")?, stage.median("sharpness")?);
    if let Some(r2) = not_momentum(&stage) {
        let text = format!(
            "In the last stage the sharpness is {} (median). The stability ratio is not used: it is that of momentum descent, and \
             the steps are not (R² {r2}, where {LOOSE} is asked for).",
            short(sharpness),
        );
        return Some(Sentence::new("stability", text));
    }
    let how = match ratio {
        ratio if ratio < CALM => "far from unstable",
        ratio if ratio < EDGE.0 => "stable",
        ratio if ratio <= EDGE.1 => "at the edge of stability",
        _ => "above the threshold of stability",
    };
    let text = format!(
        "In the last stage steps are {how}: rate times sharpness is {} of the threshold of momentum descent, with a sharpness \
         of {} (medians).",
        short(ratio),
        short(sharpness),
    );
    Some(Sentence::new("stability", text))
}

/// Noise against the batch, and the criterion for an early stop.
fn noise(run: &Explained) -> Vec<Sentence> {
    let (Some(stage), Some(samples)) = (late(run), run.samples()) else { return Vec::new() };
    let mut all = Vec::new();
    if let Some(scale) = stage.noise().and_then(|noise| noise.scale()) {
        let how = match scale / samples {
            over if over > NOISY => "noise outweighs the gradient: a larger batch would be worth its cost",
            over if over < 1.0 / NOISY => "the gradient outweighs noise: a smaller batch would do",
            _ => "the batch is of the order that it can use",
        };
        let text = format!(
            "In the last stage the noise scale is {} samples, the batch has {}: {how}.",
            short(scale),
            short(samples)
        );
        all.push(Sentence::new("noise", text));
    }
    if let Some(criterion) = stage.median("early_stop") {
        let how = match criterion > 0.0 {
            true => "gradients are no larger than noise makes them, and nothing more is learnt",
            false => "gradients are larger than noise makes them, and there is more to learn",
        };
        let text =
            format!("The criterion for an early stop is {} in the last stage: {how}.", short(criterion));
        all.push(Sentence::new("early-stop", text));
    }
    all
}

/// Where a run became unstable.
#[derive(Clone, Debug, PartialEq)]
pub struct Instability {
    /// The step of the look at which the loss had jumped, or the last before it diverged.
    pub step: u64,
    /// The median loss before, and the loss then.
    pub loss: (f64, f64),
    /// What was above its threshold already.
    pub already: Vec<Already>,
    /// What moved first: the quantity, the layer if it is one's, the step, and the values before and then.
    pub first: Option<First>,
}

/// A quantity that had gone above its threshold earlier than is searched for what moved first.
#[derive(Clone, Debug, PartialEq)]
pub struct Already {
    /// The quantity.
    pub quantity: &'static str,
    /// The threshold.
    pub threshold: f64,
    /// When it went above it.
    pub step: u64,
    /// Whether it was above it at every look since.
    pub always: bool,
}

/// A quantity that moved before the loss did.
#[derive(Clone, Debug, PartialEq)]
pub struct First {
    /// The quantity.
    pub quantity: &'static str,
    /// The parameter, where it is one's.
    pub layer: Option<String>,
    /// When.
    pub step: u64,
    /// The median before, or the threshold.
    pub before: f64,
    /// The value then.
    pub then: f64,
}

/// Functions that are another at every step: their loss jumps by itself.
const RESTLESS: [&str; 4] = ["targets", "linear", "reddi", "wells"];

fn loss(sights: &[Sight], place: usize) -> Option<f64> {
    sights.get(place)?.all.get("loss").copied()
}

/// The median loss of the looks before one.
fn loss_before(sights: &[Sight], place: usize) -> Option<f64> {
    median((place.saturating_sub(WINDOW)..place).filter_map(|i| loss(sights, i)))
}

/// The most by which the loss was above the median of the looks before, and its step.
fn largest_rise(sights: &[Sight]) -> Option<(u64, f64)> {
    let rise = |i: usize| Some((sights[i].step, loss(sights, i)? - loss_before(sights, i)?));
    (1..sights.len()).filter_map(rise).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// The first look at which the loss has jumped; of a run that diverged, at the latest the last one.
pub fn instability(run: &Explained) -> Option<Instability> {
    let sights = &run.sights;
    let (loss, before) = (|i: usize| loss(sights, i), |i: usize| loss_before(sights, i));
    let scale = (0..sights.len()).find_map(loss)?.abs();
    // A function falls by orders of magnitude, and what is nothing beside its first value may be all that was gained.
    let still =
        run.run.recipe.problem.as_ref().is_some_and(|problem| !RESTLESS.contains(&problem.name.as_str()));
    let jumped = |i: &usize| {
        let (Some(before), Some(now)) = (before(*i), loss(*i)) else { return false };
        let rise = now - before;
        let leapt = still && before > 0.0 && now > LEAP * before && now > (scale * before).sqrt();
        rise > JUMP * scale || rise.is_nan() || leapt
    };
    let place = (1..sights.len()).find(jumped).or(match run.run.status {
        Status::Diverged => sights.len().checked_sub(1),
        _ => None,
    })?;
    let loss = (before(place).unwrap_or(f64::NAN), loss(place).unwrap_or(f64::NAN));
    let (already, first) = (already(sights, place), first_moved(sights, place));
    Some(Instability { step: sights[place].step, loss, already, first })
}

/// What is a sign by itself where it is above its threshold.
const THRESHOLDS: [(&str, f64); 3] = [("stability", 1.0), ("alpha", 1.0), ("v_negative", 0.0)];

/// A figure that is held against its threshold; the stability ratio only where the step is momentum's.
fn held(sight: &Sight, quantity: &str) -> Option<f64> {
    let value = *sight.all.get(quantity)?;
    let momentum = || sight.all.get("r2/sgdm").is_some_and(|r2| *r2 >= LOOSE);
    (quantity != "stability" || momentum()).then_some(value)
}

/// The first of the looks before a jump that are searched.
fn searched_from(place: usize) -> usize {
    place.saturating_sub(LOOKBACK).max(1)
}

/// What went above its threshold before the looks that are searched, and did not stay below it since.
fn already(sights: &[Sight], place: usize) -> Vec<Already> {
    let of = |(quantity, threshold): (&'static str, f64)| {
        let above = |i: &usize| held(&sights[*i], quantity).is_some_and(|v| v > threshold);
        let mut start = (searched_from(place).min(place)..=place).find(above)?;
        // Back to where none of the looks before was above it.
        while let Some(earlier) = (start.saturating_sub(WINDOW)..start).find(above) {
            start = earlier;
        }
        let measured = |i: &usize| held(&sights[*i], quantity).is_some();
        let always = (start..=place).filter(measured).all(|i| above(&i));
        (start < searched_from(place)).then_some(Already {
            quantity,
            threshold,
            step: sights[start].step,
            always,
        })
    };
    THRESHOLDS.into_iter().filter_map(of).collect()
}

fn first_moved(sights: &[Sight], place: usize) -> Option<First> {
    for i in searched_from(place)..=place {
        let mut found: Vec<(f64, First)> = Vec::new();
        let step = sights[i].step;
        let past = i.saturating_sub(WINDOW)..i;
        for (quantity, threshold) in THRESHOLDS {
            let crossed =
                sights[past.clone()].iter().all(|s| held(s, quantity).is_none_or(|v| v <= threshold));
            if let Some(then) = held(&sights[i], quantity).filter(|now| *now > threshold && crossed) {
                // A threshold that is crossed says more than a quantity that grows.
                found.push((f64::INFINITY, First { quantity, layer: None, step, before: threshold, then }));
            }
        }
        for (layer, figures) in &sights[i].params {
            for quantity in ["update_ratio", "grad_norm"] {
                let Some(then) = figures.get(quantity).copied() else { continue };
                let of = |sight: &Sight| sight.params.get(layer)?.get(quantity).copied();
                let Some(before) = median(sights[past.clone()].iter().filter_map(of)).filter(|b| *b > 0.0)
                else {
                    continue;
                };
                let factor = then / before;
                if factor > MOVED || factor.is_nan() {
                    found.push((factor, First { quantity, layer: Some(layer.clone()), step, before, then }));
                }
            }
        }
        if let Some((_, first)) = found.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)) {
            return Some(first);
        }
    }
    None
}

/// A quantity for people.
fn words(quantity: &str) -> &'static str {
    match quantity {
        "update_ratio" => "the update-to-weight ratio",
        "grad_norm" => "the gradient's norm",
        "stability" => "the stability ratio",
        "v_negative" => "the share of v below 0",
        _ => "α",
    }
}

/// Whether, when and where it became unstable.
fn unstable(run: &Explained) -> Sentence {
    let Some(Instability { step, loss: (before, then), already, first }) = instability(run) else {
        let looks = run.sights.len();
        let first = (0..looks).find_map(|i| loss(&run.sights, i)).map_or(f64::NAN, f64::abs);
        let most = match largest_rise(&run.sights) {
            Some((step, rise)) if rise > 0.0 => {
                format!(" The most was {} at step {step}, {} %.", short(rise), short(100.0 * rise / first))
            }
            Some(_) => " It was never above that median.".to_owned(),
            None => String::new(),
        };
        let text = format!(
            "It never became unstable: in {looks} looks the loss did not jump, as it does when it is above the median of the \
             {WINDOW} before by more than {:.0} % of the first loss.{most}",
            100.0 * JUMP,
        );
        return Sentence::new("unstable", text);
    };
    let diverged = match (run.run.status, &run.run.reason) {
        (Status::Diverged, Some(reason)) => format!(" It diverged after step {}: {reason}.", run.run.steps()),
        (Status::Diverged, None) => " It diverged.".to_owned(),
        _ => String::new(),
    };
    let since = already.iter().map(|Already { quantity, threshold, step, always }| {
        let (name, threshold) = (words(quantity), short(*threshold));
        match always {
            true => format!(" By then {name} had been above {threshold} since step {step}."),
            false => format!(" By then {name} had gone above {threshold} at step {step}, and again since."),
        }
    });
    let since: String = since.collect();
    let first = match first {
        Some(First { quantity, layer, step, before, then }) => {
            let whose = layer.map_or(String::new(), |layer| format!(" of {layer}"));
            let name = words(quantity);
            format!(
                " First to move was {name}{whose}, at step {step}: from {} to {}.",
                short(before),
                short(then)
            )
        }
        None => " Nothing else that was looked at moved before.".to_owned(),
    };
    let text = format!(
        "It became unstable at step {step}: the loss went from {} to {}.{since}{first}{diverged}",
        short(before),
        short(then)
    );
    Sentence::new("unstable", text)
}

/// What of a step is left by noise: the best rate is 1 + scale / n times smaller than without it, where momentum averages over
/// (1 + β) / (1 - β) batches.
fn noise_leaves(run: &Explained, stage: &Stage) -> f64 {
    let beta = stage.median("momentum").filter(|beta| (0.0..1.0).contains(beta)).unwrap_or(0.0);
    let samples = run.samples().map(|samples| samples * (1.0 + beta) / (1.0 - beta));
    match (stage.noise(), samples) {
        // Halves that show no signal leave nothing.
        (Some(noise), _) if noise.square <= 0.0 => 0.0,
        (Some(noise), Some(samples)) => 1.0 / (1.0 + noise.trace / noise.square / samples),
        _ => 1.0,
    }
}

/// The stage whose learning rate is the largest; of those that are near it the last.
fn fastest(run: &Explained) -> Option<Stage<'_>> {
    let stages = run.stages();
    let lr = |stage: &Stage| stage.median("lr").unwrap_or(0.0);
    let largest = stages.iter().map(lr).fold(0.0, f64::max);
    stages.into_iter().rfind(|stage| lr(stage) * DRIFT >= largest)
}

/// The learning rate that a schedule scales: the recipe's, or that of the optimizer inside.
fn base(run: &Explained) -> Option<f64> {
    let optimizer = &run.run.recipe.optimizer;
    let inside = || optimizer.hyper.get("inner")?.get("lr")?.as_f64();
    Some(optimizer.lr).filter(|lr| *lr > 0.0).or_else(inside)
}

/// What to try next, by α, the stability ratio and noise in the stage with the largest learning rate: as so many times the recipe's
/// own, which a schedule scales as a whole.
fn next(run: &Explained) -> Sentence {
    let Some(stage) = fastest(run) else { return Sentence::new("next", "Nothing was looked at.".to_owned()) };
    let (alpha, ratio) = (stage.median("alpha"), ratio_of(&stage).filter(|ratio| *ratio > 0.0));
    let unused = stage.median("stability").and(not_momentum(&stage));
    let left = noise_leaves(run, &stage);
    let says = |name: &str, value: Option<f64>| value.map(|value| format!("{name} {}", short(value)));
    let noise = (left < 1.0).then_some(left);
    let aside = unused.as_ref().map(|_| "the stability ratio is not used".to_owned());
    let because = [says("α", alpha), says("stability ratio", ratio), aside, says("noise leaves", noise)];
    let because = because.into_iter().flatten().collect::<Vec<String>>().join(", ");
    let (from, to) = stage.steps();
    let because = format!("{because}, at steps {from} to {to}");
    let unstable = instability(run).is_some();
    let why = if unstable { ", and the run became unstable" } else { "" };
    let the_rate = base(run).map_or("the recipe's".to_owned(), |lr| format!("the recipe's {}", short(lr)));
    let times = |factor: f64| {
        let (factor, how) = (factor.clamp(1.0 / MOST, MOST), if factor > 1.0 { "larger" } else { "smaller" });
        let so_much = base(run).map_or(String::new(), |lr| format!(", {}", short(factor * lr)));
        format!("Try a learning rate {how} than {the_rate}: about {} times it{so_much}", short(factor))
    };
    let try_factor = |factor: f64| format!("{} ({because}{why}).", times(factor));
    let text = match (alpha, ratio) {
        (None, None) if unstable => format!("{}: the run became unstable.", times(1.0 / 3.0)),
        (None, None) => match unused {
            Some(r2) => format!(
                "Whether the rate is too small or too large cannot be told: α was not looked at, and the stability ratio is not used, \
                 for the steps are not those of momentum descent (R² {r2})."
            ),
            None => "Whether the rate is too small or too large was not looked at: `train.probe: {every: 10, what: [all]}` does."
                .to_owned(),
        },
        _ if unstable
            || ratio.is_some_and(|ratio| ratio > EDGE.1)
            || alpha.is_some_and(|alpha| alpha > HALFWAY) =>
        {
            let by_alpha = alpha.filter(|alpha| *alpha > 0.0).map_or(1.0, |alpha| 1.0 / (1.0 + alpha));
            let by_ratio = ratio.map_or(1.0, |ratio| (1.0 / ratio).min(1.0));
            let least = by_alpha.min(by_ratio);
            try_factor(if unstable { least.min(1.0 / 3.0) } else { least })
        }
        _ => {
            let short_steps = alpha.is_none_or(|alpha| alpha < -HALFWAY) && ratio.is_none_or(|ratio| ratio < CALM);
            let by_alpha = alpha.map_or(MOST, |alpha| 1.0 / (1.0 + alpha));
            let by_ratio = ratio.map_or(MOST, |ratio| 1.0 / ratio);
            let factor = by_alpha.min(by_ratio) * left;
            match short_steps && factor > DIFFERS {
                true => try_factor(factor),
                false => format!(
                    "The learning rate, {the_rate}, is about right: the signs ask for no other ({because})."
                ),
            }
        }
    };
    Sentence::new("next", text)
}

/// What differed between two runs, quantity by quantity.
pub fn differences(a: &Explained, b: &Explained) -> Vec<Sentence> {
    let mut all = Vec::new();
    let (name_a, name_b) = (a.label.clone(), b.label.clone());
    if let (Some(near_a), Some(near_b)) = (a.whole().nearest(), b.whole().nearest()) {
        let text = match near_a.name == near_b.name {
            true => format!(
                "Both were nearest to {}: R² {} for {name_a}, {} for {name_b}, at rates of {} and {}.",
                title(near_a.name),
                digits(near_a.r2),
                digits(near_b.r2),
                short(near_a.rate),
                short(near_b.rate),
            ),
            false => format!(
                "{name_a} was nearest to {} (R² {}, rate {}), {name_b} to {} (R² {}, rate {}).",
                title(near_a.name),
                digits(near_a.r2),
                short(near_a.rate),
                title(near_b.name),
                digits(near_b.r2),
                short(near_b.rate),
            ),
        };
        all.push(Sentence::new("differs", text));
    }
    let (Some(last_a), Some(last_b)) = (late(a), late(b)) else { return all };
    let quantities = [
        ("loss", "the loss"),
        ("rate/sgdm", "the rate of momentum descent"),
        ("update_ratio", "the update-to-weight ratio"),
        ("grad_norm", "the gradient's norm"),
        ("rate_p99", "the rate that 1 % of the elements exceed"),
        ("sharpness", "the sharpness"),
        ("stability", "the stability ratio"),
    ];
    for (name, words) in quantities {
        // Its rate and the stability ratio are those of momentum descent: where steps are not, there is nothing to compare.
        let momentums = ["rate/sgdm", "stability"].contains(&name);
        let of = |stage: &Stage| stage.median(name).filter(|_| !momentums || not_momentum(stage).is_none());
        let (Some(x), Some(y)) = (of(&last_a), of(&last_b)) else { continue };
        if x > 0.0 && y > 0.0 && (x / y > DIFFERS || y / x > DIFFERS) {
            let text = format!(
                "In the last stage {words} is {} for {name_a} and {} for {name_b}, a factor of {}.",
                short(x),
                short(y),
                short((x / y).max(y / x)),
            );
            all.push(Sentence::new("differs", text));
        }
    }
    if let (Some(x), Some(y)) = (last_a.median("alpha"), last_b.median("alpha"))
        && (x - y).abs() > HALFWAY
    {
        let text = format!("In the last stage α is {} for {name_a} and {} for {name_b}.", short(x), short(y));
        all.push(Sentence::new("differs", text));
    }
    let steps = |run: &Explained| instability(run).map(|found| found.step);
    let text = match (steps(a), steps(b)) {
        (Some(step), None) => format!("{name_a} became unstable, at step {step}; {name_b} did not."),
        (None, Some(step)) => format!("{name_b} became unstable, at step {step}; {name_a} did not."),
        (Some(x), Some(y)) => format!("Both became unstable: {name_a} at step {x}, {name_b} at step {y}."),
        (None, None) => "Neither became unstable.".to_owned(),
    };
    all.push(Sentence::new("differs", text));
    all
}

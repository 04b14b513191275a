//! What the runs of a task can show: differences on shared seeds, how soon a level is reached, what a search was worth.
use super::group::{Choice, Group, Task};
use super::subject::SUBJECT;
use taper_figures::plot::short;
use taper_figures::stats::{self, Better, Claim, Comparison};
use taper_figures::table::{Table, amount};
use taper_train::run::Status;
use taper_train::sweep::settings::{obstacles, settings};

/// The level at which differences are claimed.
const ALPHA: f64 = 0.05;

/// The tables of all tasks that have something to compare. A function is compared where seeds move its start, and has tables of its
/// own for the rest.
pub(super) fn tables(tasks: &[Task]) -> Vec<Table> {
    let of = |task: &Task| match task.is_problem() {
        true => [comparisons(task), None, None],
        false => [comparisons(task), levels(task), search(task)],
    };
    tasks.iter().flat_map(of).flatten().collect()
}

/// The value of a run that a comparison may be made on: the test set has not chosen it.
fn fair(task: &Task) -> (Choice, String) {
    let clock = task.clock();
    match task.groups.iter().all(|group| group.estimate(Choice::Validated).is_some()) {
        true => (Choice::Validated, format!("at the {clock} that the validation set chose")),
        false => (Choice::Last, format!("of the last {clock}")),
    }
}

/// One group against all others, seed by seed; `None` where no two groups share two seeds.
fn comparisons(task: &Task) -> Option<Table> {
    let (choice, which) = fair(task);
    let better = Better::of(&task.metric);
    let mean = |group: &Group| group.estimate(choice).map(|estimate| estimate.mean);
    let subjects: Vec<&Group> = task.groups.iter().filter(|group| SUBJECT.is(group)).collect();
    let ahead = |a: &Group, b: &Group| match (mean(a), mean(b)) {
        (Some(a), Some(b)) => better.than(a, b),
        (value, _) => value.is_some(),
    };
    let plain: Vec<&Group> = subjects.iter().copied().filter(|group| SUBJECT.is_plain(group)).collect();
    let (reference, chosen) = match (&subjects[..], &plain[..]) {
        ([only], _) | (_, [only]) => (*only, false),
        _ => (task.groups.iter().reduce(|best, new| if ahead(new, best) { new } else { best })?, true),
    };
    let others: Vec<&Group> = task.groups.iter().filter(|group| group.label != reference.label).collect();
    let own = reference.values(choice);
    let pairs: Vec<Vec<f64>> =
        others.iter().map(|other| stats::paired(&own, &other.values(choice))).collect();
    if pairs.iter().all(|differences| differences.len() < 2) {
        return None;
    }
    // Two optimizers that were not given the same are not compared; settings of one and the same are, for its label says
    // in what they differ.
    let given = |group: &Group| group.recipe().map(settings).unwrap_or_default();
    let refused: Vec<Vec<String>> = others
        .iter()
        .map(|other| match other.optimizer == reference.optimizer {
            true => Vec::new(),
            false => obstacles(&given(reference), &given(other)),
        })
        .collect();
    let allowed = pairs.iter().zip(&refused).filter(|(_, refused)| refused.is_empty());
    let family: Vec<Vec<f64>> = allowed.map(|(pairs, _)| pairs.clone()).collect();
    let mut found = stats::compare(&family, better, ALPHA).into_iter();
    let head = ["difference", "pairs", "mean", "95 % interval", "p", "p after Holm", "shows"];
    let caption = format!("{}: differences in {} on shared seeds", task.title(), task.unit());
    let mut table = Table::new(head).text(&["shows"]).caption(caption);
    for ((other, refused), pairs) in others.iter().zip(&refused).zip(&pairs) {
        let title = format!("{} − {}", reference.label, other.label);
        let comparison = if refused.is_empty() { found.next() } else { None };
        let Some(Comparison { pairs, difference, p, adjusted_p, claim }) = comparison else {
            let [mean, interval, p, adjusted] = ["–"; 4].map(str::to_owned);
            let why = format!("not comparable: {}", refused.join(", "));
            table.row([title, pairs.len().to_string(), mean, interval, p, adjusted, why]);
            continue;
        };
        let text = |value: f64| signed(&task.metric, value);
        let interval = difference.filter(|d| d.half_width().is_some());
        table.row([
            title,
            pairs.to_string(),
            difference.map_or("–".into(), |d| text(d.mean)),
            interval.map_or("–".into(), |d| format!("{} to {}", text(d.low), text(d.high))),
            short(p),
            short(adjusted_p),
            match claim {
                Claim::Better => format!("{} is better", reference.label),
                Claim::Worse => format!("{} is worse", reference.label),
                Claim::None => "no difference shown".into(),
                Claim::TooFew { need } => format!("nothing: needs {need} pairs"),
            },
        ]);
    }
    let (value, same) = match task.is_problem() {
        true => ("value", "starting point and samples"),
        false => ("test value", "initial weights, batches and augmentation"),
    };
    table.note(format!(
        "The {value} {which}; a seed means the same {same}. Interval: BCa bootstrap of \
         the mean difference. p: sign-flip permutation test, two-sided; after Holm: corrected for {} comparison{}.",
        family.len(),
        if family.len() == 1 { "" } else { "s" }
    ));
    for unequal in task.unequal() {
        table.note(format!("Not equal between optimizers: {unequal}."));
    }
    if refused.iter().any(|refused| !refused.is_empty()) {
        table.note(
            "Not comparable: another task or another budget (network, data, length of training), whose effect is not the \
             optimizer's. Schedules, clipping and averages belong to a method and may differ.",
        );
    }
    table.note(
        "A difference is claimed when the interval leaves out 0 and p after Holm is at most 0.05. None shown is not none \
         there.",
    );
    if chosen {
        table.note(format!(
            "{} is compared because it came out best on these runs, which flatters it: confirm on fresh seeds.",
            reference.label
        ));
    }
    Some(table)
}

/// A difference with its sign.
fn signed(metric: &str, value: f64) -> String {
    let sign = if value < 0.0 { "−" } else { "+" };
    format!("{sign}{}", amount(metric, value.abs(), None))
}

/// The first epoch or step at which each group reaches two levels: one that all reach, and one that half of them do.
fn levels(task: &Task) -> Option<Table> {
    let better = Better::of(&task.metric);
    let worse_first = |a: &f64, b: &f64| match better {
        Better::Higher => a.total_cmp(b),
        Better::Lower => b.total_cmp(a),
    };
    let best_of = |group: &Group| -> Vec<f64> {
        group.values(Choice::BestOnTest).into_iter().map(|(_, value)| value).collect()
    };
    // By the run of a group that does worst, so that all of its runs reach its level.
    let mut bests: Vec<f64> =
        task.groups.iter().filter_map(|group| best_of(group).into_iter().min_by(worse_first)).collect();
    bests.sort_by(worse_first);
    let [lowest, _, ..] = bests[..] else { return None };
    let mut targets = vec![lowest, bests[bests.len() / 2]];
    targets.dedup();
    let title = |target: &f64| format!("to {}", amount(&task.metric, *target, None));
    let head = std::iter::once("optimizer".to_owned()).chain(targets.iter().map(title));
    let caption = format!("{}: first {} at a level of {}", task.title(), task.clock(), task.unit());
    let mut table = Table::new(head).caption(caption);
    for group in &task.groups {
        let cells = targets.iter().map(|target| reached(group, *target, better));
        table.row(std::iter::once(group.label.clone()).chain(cells));
    }
    table.note(
        "The lowest and the middle one of the rows' best values on test. Over seeds the middle one, and from the least to the \
         largest; a run that diverged before has not reached it.",
    );
    Some(table)
}

/// When the runs of a group reached a target: `12`, `12 (9–14)`, `never`.
fn reached(group: &Group, target: f64, better: Better) -> String {
    let ended = group.runs.iter().filter(|run| run.status != Status::Interrupted);
    let mut times: Vec<Option<u64>> = ended
        .map(|run| {
            let curve = run.values(run.split(), &run.metric).map(|(record, value)| (run.time(record), value));
            stats::time_to_target(curve, target, better)
        })
        .collect();
    times.sort_by_key(|time| time.unwrap_or(u64::MAX));
    let text = |time: &Option<u64>| time.map_or("never".to_owned(), |time| time.to_string());
    match (times.first(), times.get(times.len() / 2), times.last()) {
        (Some(first), Some(middle), Some(last)) if first != last => {
            format!("{} ({}–{})", text(middle), text(first), text(last))
        }
        (Some(only), ..) => text(only),
        _ => "–".into(),
    }
}

/// Fewer configurations than this are no search.
const LEAST: usize = 3;

/// For every optimizer with several configurations: the best that fewer tries would have found, and how many come close.
fn search(task: &Task) -> Option<Table> {
    let (choice, which) = fair(task);
    let better = Better::of(&task.metric);
    // What is under way has not been tried yet.
    let tried = |group: &&Group| group.runs.iter().any(|run| run.status != Status::Interrupted);
    let groups: Vec<&Group> = task.groups.iter().filter(tried).collect();
    let mut optimizers: Vec<&str> = Vec::new();
    for group in &groups {
        if !optimizers.contains(&group.optimizer.as_str()) {
            optimizers.push(&group.optimizer);
        }
    }
    let tries = |name: &&str| groups.iter().filter(|group| group.optimizer == *name).count();
    optimizers.retain(|name| tries(name) >= LEAST);
    let most = optimizers.iter().map(tries).max()?;
    let budgets: Vec<usize> = [1, 2, 4, 8, 16, 32].into_iter().filter(|k| *k < most).collect();
    // A point of accuracy; of what has no upper end, a hundredth of the best.
    let absolute = task.metric == "accuracy";
    let close = if absolute { "within 1 point" } else { "within 1 %" };
    let head = ["optimizer", "tries"].map(str::to_owned).into_iter();
    let head =
        head.chain(budgets.iter().map(|k| format!("best of {k}"))).chain(["best".into(), close.into()]);
    let mut table = Table::new(head).caption(format!("{}: searches, by {}", task.title(), task.unit()));
    for name in optimizers {
        let own = groups.iter().filter(|group| group.optimizer == name);
        let trials: Vec<Option<f64>> = own
            .map(|group| {
                let diverged = group.runs.iter().any(|run| run.status == Status::Diverged);
                group.estimate(choice).filter(|_| !diverged).map(|estimate| estimate.mean)
            })
            .collect();
        let expected = |k: usize| {
            let best = stats::expected_best(&trials, k, better);
            best.map_or("–".into(), |best| amount(&task.metric, best, None))
        };
        let best = stats::expected_best(&trials, trials.len(), better);
        let reach = 0.01 * if absolute { 1.0 } else { best.unwrap_or(0.0).abs() };
        let share = stats::share_within(&trials, reach, better);
        let cells = budgets.iter().map(|k| expected(*k)).chain([
            expected(trials.len()),
            share.map_or("–".into(), |share| format!("{:.0} %", 100.0 * share)),
        ]);
        table.row([name.to_owned(), trials.len().to_string()].into_iter().chain(cells));
    }
    table.note(format!(
        "A try is a configuration, its value the mean over seeds of the test value {which}. Best of k: expected of k tries \
         drawn from these (–: all k might diverge); within: the share of all tries that come so close to the best."
    ));
    Some(table)
}

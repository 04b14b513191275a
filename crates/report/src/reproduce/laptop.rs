//! The paper's claims on a network that two cores train in minutes.
//!
//! No published number is about that network, so none is held against ours: the paper's columns stand beside the table for their
//! order alone. What the text claims of the optimizers can be tested on any network, and is, by the rule of [`verdict`](super::verdict):
//! every optimizer has had as many tries, the validation set has chosen among them, and what is compared was trained on seeds that
//! had no say in it.
use super::claim::Checked;
use super::outcome::{claims_table, in_unit, read};
use super::published::{Laptop, LaptopClaim, Published, Tested};
use super::verdict::{Measured, Part, Range, Verdict, all};
use super::{Plan, Target};
use crate::subject::SUBJECT;
use crate::{Block, Choice, Document, Extent, Group, Run, Runs, Section};
use taper_figures::stats::{self, Better};
use taper_figures::table::{Table, mean_text};
use taper_train::Recipe;
use taper_train::recipe::RecipeError;
use taper_train::run::Status;
use taper_train::sweep::Sweep;
use taper_train::sweep::settings::{obstacles, settings};

/// What to train.
#[derive(Clone, Debug)]
pub struct LaptopRecipes {
    /// Every optimizer at several rates; the best of each is confirmed on fresh seeds.
    pub optimizers: Recipe,
    /// The optimizer in question at several values of c.
    pub c: Recipe,
    /// The same at its default rate, on the fresh seeds.
    pub default: Recipe,
}

impl Plan<'_> {
    /// What the laptop's scale trains for a target; `None` where it has nothing for it.
    pub fn laptop(&self, target: Target) -> Result<Option<LaptopRecipes>, RecipeError> {
        let Some(laptop) = self.published.laptop.get(target.name()) else { return Ok(None) };
        let recipe = |file: &String| self.paper(&self.recipes.join(file));
        Ok(Some(LaptopRecipes {
            optimizers: recipe(&laptop.optimizers)?,
            c: recipe(&laptop.c)?,
            default: recipe(&laptop.default)?,
        }))
    }
}

/// What was trained.
struct Evidence {
    /// The best of each optimizer, on fresh seeds.
    chosen: Vec<Group>,
    /// By c.
    c: Vec<Group>,
    /// At the default rate, by optimizer.
    default: Vec<Group>,
}

/// The report on what a sweep with fresh seeds, `fresh`, has of the recipes that were chosen and of the others, and what became of
/// the claims.
pub fn laptop(
    published: &Published,
    target: Target,
    recipes: &LaptopRecipes,
    chosen: &[Recipe],
    fresh: &Sweep,
    problems: &mut Vec<String>,
) -> (Document, Vec<Checked>) {
    let (optimizer, c) = (
        |recipe: &Recipe| recipe.optimizer.name.clone(),
        |recipe: &Recipe| recipe.optimizer.hyper.get("c").map_or(String::new(), |c| format!("c={c}")),
    );
    let mut groups = |recipes: &[Recipe], label: &dyn Fn(&Recipe) -> String| {
        let mut groups: Vec<Group> = Vec::new();
        for run in read(recipes, fresh, problems).0 {
            let label = label(&run.recipe);
            match groups.iter_mut().find(|group| group.label == label) {
                Some(group) => group.runs.push(run),
                None => {
                    let optimizer = run.recipe.optimizer.name.clone();
                    groups.push(Group { label, optimizer, style: groups.len(), runs: vec![run] });
                }
            }
        }
        groups
    };
    let evidence = Evidence {
        chosen: groups(chosen, &optimizer),
        c: groups(recipes.c.runs(), &c),
        default: groups(recipes.default.runs(), &optimizer),
    };
    let mut blocks = Vec::new();
    let mut checked = Vec::new();
    if let Some(laptop) = published.laptop.get(target.name()) {
        checked = laptop.claims.iter().map(|claim| evidence.check(target, laptop, claim)).collect();
        blocks.push(Block::Table(evidence.table(published, target, laptop)));
        blocks.push(Block::Table(claims_table(&checked.iter().collect::<Vec<_>>())));
    }
    let title = format!("{}'s claims on a network for a laptop", SUBJECT.title);
    let Evidence { chosen, c, default } = evidence;
    let all: Vec<Run> = [chosen, c, default].into_iter().flatten().flat_map(|group| group.runs).collect();
    let runs = Runs { runs: crate::once(all, problems), problems: problems.clone() };
    let mut document = crate::document(&title, &runs);
    document.sections.insert(0, Section::new("Claims and columns", blocks));
    (document, checked)
}

/// The value of a run that a claim is about.
type Value<'a> = &'a dyn Fn(&Run) -> Option<f64>;

impl Evidence {
    fn check(&self, target: Target, laptop: &Laptop, claim: &LaptopClaim) -> Checked {
        let (verdict, reason) = self.judged(laptop, &claim.shown_by).unwrap_or_else(|reason| reason);
        Checked { target, claim: claim.id.clone(), says: claim.says.clone(), verdict, reason }
    }

    /// The verdict on a claim; the error is one too, on what there is nothing to say of.
    fn judged(&self, laptop: &Laptop, claim: &Tested) -> Result<(Verdict, String), (Verdict, String)> {
        let group = |groups: &'_ [Group], label: &String| -> Result<Group, (Verdict, String)> {
            let found = groups.iter().find(|group| group.label == *label);
            found.cloned().ok_or_else(|| (Verdict::NotRun, format!("no run of {label}")))
        };
        let mut pairs: Vec<(Group, Group, String)> = Vec::new();
        let at_end = |run: &Run| Choice::Validated.of(run).map(|(value, _)| value);
        let last = |run: &Run| Choice::Last.of(run).map(|(value, _)| value);
        let mut claimed = Range::at_least(-laptop.tolerance);
        let epoch = if let Tested::AsFast { epochs, .. } = claim { *epochs } else { 0 };
        let early = |run: &Run| {
            let mut values = run.values(run.split(), &run.metric);
            values.rfind(|(record, _)| record.epoch == epoch).map(|(_, value)| value)
        };
        let value: Value = match claim {
            Tested::AsGood { .. } | Tested::Untuned { .. } => &at_end,
            Tested::AsFast { .. } => &early,
            Tested::Robust { .. } => &last,
        };
        match claim {
            Tested::AsGood { columns, than } | Tested::AsFast { columns, than, .. } => {
                for column in columns {
                    for other in than {
                        let name = format!("{column} − {other}");
                        pairs.push((group(&self.chosen, column)?, group(&self.chosen, other)?, name));
                    }
                }
            }
            Tested::Untuned { columns } => {
                for column in columns {
                    let name = format!("{column} at its default rate − at the chosen one");
                    pairs.push((group(&self.default, column)?, group(&self.chosen, column)?, name));
                }
            }
            Tested::Robust { points } => {
                // Within so much of the best is at most so much behind any.
                claimed = Range::at_most(*points);
                for one in &self.c {
                    for other in self.c.iter().filter(|other| other.label != one.label) {
                        pairs.push((other.clone(), one.clone(), format!("{} − {}", other.label, one.label)));
                    }
                }
            }
        }
        let runs = pairs.iter().flat_map(|(one, other, _)| one.runs.iter().chain(&other.runs));
        if runs.into_iter().any(|run| run.extent != Extent::Whole) {
            return Err((Verdict::NotComparable, "not the whole data set, or not known to be".into()));
        }
        let unlike = pairs.iter().find_map(|(one, other, name)| {
            let (one, other) = (settings(one.recipe()?), settings(other.recipe()?));
            let differ = obstacles(&one, &other);
            (!differ.is_empty()).then(|| format!("{name}: {}", differ.join(", ")))
        });
        if let Some(unlike) = unlike {
            return Err((Verdict::NotComparable, unlike));
        }
        let parts: Vec<Part> = pairs
            .into_iter()
            .map(|(one, other, name)| difference(name, &one, &other, value, claimed))
            .collect();
        Ok(all(&parts))
    }

    fn table(&self, published: &Published, target: Target, laptop: &Laptop) -> Table {
        let paper = published.tables.get(target.name());
        let rows: Vec<&str> =
            paper.iter().flat_map(|table| table.rows.0.iter()).map(|(row, _)| row.as_str()).collect();
        let columns: Vec<String> = rows.iter().map(|row| format!("{row} in the paper")).collect();
        let head = ["optimizer", "chosen rate", "runs", "chosen on validation", "last"];
        let head = head.into_iter().chain(columns.iter().map(String::as_str)).chain(["verdict"]);
        let caption = format!("{}, beside our network's", paper.map_or("", |table| table.title.as_str()));
        let mut table = Table::new(head).text(&["optimizer", "verdict"]).caption(caption);
        for group in &self.chosen {
            let metric = group.runs.first().map_or("accuracy", |run| run.metric.as_str());
            let estimate = |choice| group.estimate(choice).map_or("–".into(), |e| mean_text(metric, &e));
            let rate = group.recipe().map_or("–".into(), |recipe| recipe.optimizer.lr.to_string());
            let mut cells = vec![
                group.label.clone(),
                rate,
                format!("{}/{}", group.finished().count(), group.runs.len()),
                estimate(Choice::Validated),
                estimate(Choice::Last),
            ];
            let column = laptop.columns.get(&group.label).unwrap_or(&group.label);
            let number = |row: &&str| paper?.rows.get(row)?.get(column).copied();
            cells.extend(rows.iter().map(|row| number(row).map_or("–".into(), |n| format!("{n:.2}"))));
            cells.push(Verdict::NotComparable.to_string());
            table.row(cells);
        }
        table.note(
            "Our numbers are of another network, trained for a few epochs, and not comparable with the paper's: its columns are \
             there for their order alone.",
        );
        table.note(
            "Every optimizer was tried at as many rates; the validation set chose, on other seeds than those reported. Means over the \
             seeds that finished, ± half the width of Student's 95 % confidence interval.",
        );
        crate::extents(&mut table, self.chosen.iter().flat_map(|group| &group.runs));
        table
    }
}

/// By how much one group is ahead of another, on the seeds that both have.
fn difference(name: String, one: &Group, other: &Group, value: Value, claimed: Range) -> Part {
    let metric = one.runs.first().map_or("accuracy", |run| run.metric.as_str());
    let sign = if Better::of(metric) == Better::Higher { 1.0 } else { -1.0 };
    let values = |group: &Group| -> Vec<(u64, f64)> {
        let of = |run: &Run| Some((run.recipe.seed, value(run)?));
        group.finished().filter_map(of).filter(|(_, value)| value.is_finite()).collect()
    };
    let differences: Vec<f64> =
        stats::paired(&values(one), &values(other)).iter().map(|difference| sign * difference).collect();
    let diverged = [one, other].into_iter().find_map(|group| {
        let count = group.runs.iter().filter(|run| run.status == Status::Diverged).count();
        (count > 0).then(|| format!("{count} of {} of {} diverged", group.runs.len(), group.label))
    });
    let found = match (diverged, stats::student(&differences, 0.95)) {
        // Whatever diverged, the difference of those that did not is not the whole of it.
        (Some(why), _) => Measured::Open(why),
        (None, Some(mean)) => Measured::Mean(in_unit(mean, metric)),
        (None, None) => Measured::Open("no seed that both have".into()),
    };
    Part { name, found, claimed }
}

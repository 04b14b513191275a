//! The cells of a target: a recipe of the paper, what the scale makes of it, and what it is held against.
use super::Target;
use super::published::{Published, Shown};
use super::verdict::Expected;
use serde::Serialize;
use std::path::Path;
use taper_figures::plot::exact;
use taper_train::recipe::{Data, Recipe, RecipeError, Sections};
use taper_train::sweep::settings::{settings, shown};

/// How much of an experiment to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// All of it.
    Paper,
    /// What two cores do in half a minute a run.
    Cpu,
}

impl Scale {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paper => "paper",
            Self::Cpu => "cpu",
        }
    }
}

/// One number of the paper, or one curve.
#[derive(Clone, Debug)]
pub struct Cell {
    /// What it belongs to.
    pub target: Target,
    /// The network.
    pub row: String,
    /// The optimizer, or what else the columns are.
    pub column: String,
    /// What it is held against.
    pub expected: Expected,
    /// Its runs, one a seed.
    pub runs: Vec<Recipe>,
    /// The same with a validation set, where the recipe has none.
    pub validated: Vec<Recipe>,
    /// What the scale changed.
    pub reductions: Vec<Reduction>,
}

/// A setting that is not the paper's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reduction {
    /// Its path.
    pub setting: String,
    /// The paper's value.
    pub paper: String,
    /// Ours.
    pub ours: String,
}

/// What to run, and how.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    /// What is published.
    pub published: &'a Published,
    /// How much of it to do.
    pub scale: Scale,
    /// The folder of recipes.
    pub recipes: &'a Path,
    /// The seeds in place of the scale's own.
    pub seeds: Option<&'a [u64]>,
    /// The paper's own runs only: no controls, and no second set of runs to choose by a validation set.
    pub bare: bool,
    /// What recipes may name.
    pub sections: &'a dyn Sections,
}

impl Plan<'_> {
    /// The cells of a target.
    pub fn cells(&self, target: Target) -> Result<Vec<Cell>, RecipeError> {
        let mut out = Vec::new();
        if let Some(table) = self.published.tables.get(target.name()) {
            for (row, columns) in &table.rows.0 {
                for (column, number) in &columns.0 {
                    let file = format!("{}/{row}-{column}.yaml", target.name());
                    let expected = Expected::Value { published: *number, tolerance: table.tolerance };
                    out.extend(self.cells_of(target, &file, row, Some(column), expected)?);
                }
            }
            return Ok(out);
        }
        // A target without a table is its first claim.
        for claim in self.published.claims_of(target).take(1) {
            let expected = match claim.shown_by {
                Shown::AtLeast { value } => Expected::AtLeast(value),
                Shown::Within { points } => Expected::Near { within: points },
                Shown::Ahead { .. } | Shown::Faster {} => continue,
            };
            for file in &claim.recipes {
                let stem = Path::new(file).file_stem().and_then(|s| s.to_str()).unwrap_or(file);
                let (row, column) = stem.split_once('-').unwrap_or((stem, stem));
                let column = (target != Target::CRobustness).then_some(column);
                out.extend(self.cells_of(target, file, row, column, expected)?);
            }
        }
        Ok(out)
    }

    /// The runs that stand beside DecGD in a target's figures.
    pub fn controls(&self, target: Target) -> Result<Vec<Recipe>, RecipeError> {
        match self.published.controls.get(target.name()).filter(|_| !self.bare) {
            Some(control) => {
                let path = self.recipes.join(&control.recipe);
                let paper = self.paper(&path)?;
                let layer = self.published.layer(self.scale.name(), target, &control.row, self.recipes);
                Ok(self.scaled(&path, &paper, layer.as_deref(), &[])?.runs().to_vec())
            }
            None => Ok(Vec::new()),
        }
    }

    /// The cells of one recipe file: one, or as many as its sweep has configurations, which then name the columns.
    fn cells_of(
        &self,
        target: Target,
        file: &str,
        row: &str,
        column: Option<&str>,
        expected: Expected,
    ) -> Result<Vec<Cell>, RecipeError> {
        let path = self.recipes.join(file);
        let paper = self.paper(&path)?;
        let layer = self.published.layer(self.scale.name(), target, row, self.recipes);
        let scaled = self.scaled(&path, &paper, layer.as_deref(), &[])?;
        let needs = matches!(&paper.data, Some(Data { val: None, .. })) && !is_text(&paper);
        let has = scaled.data.as_ref().is_some_and(|data| data.val.is_some());
        let validated = match !self.bare && needs && !has {
            true => self
                .scaled(&path, &paper, layer.as_deref(), &["data.val=0.1", "train.select=val"])?
                .runs()
                .to_vec(),
            false => Vec::new(),
        };
        let mut cells: Vec<Cell> = Vec::new();
        for run in scaled.runs() {
            let name = column.map_or_else(|| varied(run), str::to_owned);
            match cells.iter_mut().find(|cell| cell.column == name) {
                Some(cell) => cell.runs.push(run.clone()),
                None => cells.push(Cell {
                    target,
                    row: row_name(row, run),
                    column: name,
                    expected,
                    reductions: reductions(&paper, run),
                    runs: vec![run.clone()],
                    validated: Vec::new(),
                }),
            }
        }
        for run in validated {
            let name = column.map_or_else(|| varied(&run), str::to_owned);
            if let Some(cell) = cells.iter_mut().find(|cell| cell.column == name) {
                cell.validated.push(run);
            }
        }
        Ok(cells)
    }

    /// A recipe by its file below the folder of recipes. The environment has no say.
    pub fn recipe(&self, file: &str) -> Result<Recipe, RecipeError> {
        self.paper(&self.recipes.join(file))
    }

    /// A recipe of the paper as it is. The environment has no say.
    pub(super) fn paper(&self, path: &Path) -> Result<Recipe, RecipeError> {
        let label = path.display().to_string();
        let text = serde_json::json!({ "extends": label }).to_string();
        Recipe::parse(&label, &text, &[], self.sections)
    }

    /// A recipe under the scale's layer. The environment has no say: a table must not depend on it.
    fn scaled(
        &self,
        path: &Path,
        paper: &Recipe,
        layer: Option<&Path>,
        set: &[&str],
    ) -> Result<Recipe, RecipeError> {
        let layers: Vec<String> =
            std::iter::once(path).chain(layer).map(|p| p.display().to_string()).collect();
        let name = match self.scale {
            Scale::Paper => paper.name.clone(),
            scale => format!("{}-{}", paper.name, scale.name()),
        };
        // JSON is YAML, and its strings are quoted.
        let text = serde_json::json!({ "extends": layers, "name": name }).to_string();
        let mut set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        set.extend(self.seeds.map(|seeds| format!("sweep.seeds={seeds:?}")));
        Recipe::parse(
            &format!("{} at scale {}", path.display(), self.scale.name()),
            &text,
            &set,
            self.sections,
        )
    }
}

/// Whether it learns from text, which brings a validation set of its own.
fn is_text(recipe: &Recipe) -> bool {
    recipe.train.bptt.is_some() || recipe.train.windows.is_some()
}

/// The network, by its name in the recipe where the file is a sweep.
fn row_name(row: &str, run: &Recipe) -> String {
    match (&run.model, run.varied().iter().any(|(key, _)| key != "seed")) {
        (Some(model), true) => model.name.clone(),
        _ => row.to_owned(),
    }
}

/// What a sweep set for a run, but for the seed: `c=0.001`.
fn varied(run: &Recipe) -> String {
    let settings = run.varied().iter().filter(|(key, _)| key != "seed").map(|(key, value)| {
        let number = value.as_f64().map_or_else(|| value.to_string(), exact);
        format!("{}={number}", key.strip_prefix("optimizer.").unwrap_or(key))
    });
    settings.collect::<Vec<_>>().join(" ")
}

/// Where a run differs from the paper's recipe in what can change its result.
fn reductions(paper: &Recipe, run: &Recipe) -> Vec<Reduction> {
    let swept: Vec<&str> = run.varied().iter().map(|(key, _)| key.as_str()).collect();
    let settings = |recipe: &Recipe| {
        let mut settings = settings(recipe);
        swept.iter().for_each(|path| {
            settings.remove(*path);
        });
        settings
    };
    let (before, after) = (settings(paper), settings(run));
    let paths: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let changed = paths.into_iter().filter(|path| before.get(*path) != after.get(*path));
    let reduction = |path: &String| Reduction {
        setting: path.clone(),
        paper: shown(&before, path),
        ours: shown(&after, path),
    };
    changed.map(reduction).collect()
}

//! The second half of a fair comparison: the best configuration of each optimizer, on seeds that chose nothing.
use super::{Run, State, Sweep};
use crate::Recipe;
use crate::run::{Status, Summary};
use taper_figures::stats::Better;

/// What a sweep chose, to be trained on fresh seeds.
#[derive(Clone, Debug)]
pub struct Confirmation {
    /// The runs: of each optimizer's best configuration, in the order of the sweep.
    pub recipes: Vec<Recipe>,
    /// Optimizers that have none, because every configuration of theirs diverged.
    pub without: Vec<String>,
}

impl Sweep {
    /// Chooses by the mean of the validation figure at the chosen epoch (of a problem, its value at the end) over the seeds of the
    /// sweep; a configuration that diverged
    /// on one of them is no choice, and of equals the first is taken. `None` while a run has no result: what is missing might be
    /// the best.
    pub fn confirmation(&self, recipe: &Recipe) -> Option<Confirmation> {
        if self.runs().iter().any(|run| !matches!(run.state, State::Done(_))) {
            return None;
        }
        let mut best: Vec<(&str, Option<(String, f64)>)> = Vec::new();
        for run in self.runs() {
            let name = run.recipe.optimizer.name.as_str();
            if !best.iter().any(|(known, _)| *known == name) {
                best.push((name, None));
            }
        }
        let mut seen: Vec<String> = Vec::new();
        for run in self.runs() {
            let configuration = run.recipe.configuration();
            if seen.contains(&configuration) {
                continue;
            }
            let of_it = |other: &&Run| other.recipe.configuration() == configuration;
            let figures: Option<Vec<f64>> = self.runs().iter().filter(of_it).map(figure).collect();
            let name = run.recipe.optimizer.name.as_str();
            if let Some(figures) = figures
                && let Some((_, best)) = best.iter_mut().find(|(known, _)| *known == name)
            {
                let mean = figures.iter().sum::<f64>() / figures.len() as f64;
                let better = run.summary().map_or(Better::Lower, |summary| Better::of(&summary.metric));
                if best.as_ref().is_none_or(|(_, than)| better.than(mean, *than)) {
                    *best = Some((configuration.clone(), mean));
                }
            }
            seen.push(configuration);
        }
        let is_best = |recipe: &&Recipe| {
            let configuration = recipe.configuration();
            best.iter().any(|(_, best)| best.as_ref().is_some_and(|(best, _)| *best == configuration))
        };
        let recipes = recipe.confirming().iter().filter(is_best).cloned().collect();
        let without = best.iter().filter(|(_, best)| best.is_none()).map(|(name, _)| (*name).to_owned());
        Some(Confirmation { recipes, without: without.collect() })
    }
}

/// What a run is chosen by; `None` where it diverged.
fn figure(run: &Run) -> Option<f64> {
    let Summary { status, metric, selected, .. } = run.summary()?;
    let split = if run.recipe.problem.is_some() { "test" } else { "val" };
    let value = selected.get(&format!("{split}.{metric}")).copied();
    value.filter(|value| *status == Status::Finished && value.is_finite())
}

//! A rule of another crate, registered by a program of its own and named by a recipe.
use serde::{Deserialize, Serialize};
use taper_optim::rule::{Config, Input, Invalid, Real, Refusal, Rule, ranges};
use taper_optim::{Info, scalars};
use taper_train::run::{self, Options, Show, Split, Status};
use taper_train::{Recipe, Registries};

/// Steps of one size against the sign of the gradient.
#[derive(Debug)]
struct SignDescent;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SignConfig {
    lr: f64,
    /// The gradient below which an element rests.
    threshold: f64,
}

impl Default for SignConfig {
    fn default() -> Self {
        Self { lr: 1e-3, threshold: 0.0 }
    }
}

impl Config for SignConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::at_least_zero("threshold", self.threshold)
    }
}

scalars! {
    struct SignScalars { lr, threshold }
}

const INFO: Info = Info {
    name: "sign",
    about: "steps of one size against the sign of the gradient",
    paper: "Riedmiller & Braun, RPROP",
    year: 1993,
    formula: "x ← x - η sign(∇f)",
};

impl Rule for SignDescent {
    type Config = SignConfig;
    type Scalars = SignScalars;
    const BUFFERS: (usize, usize) = (0, 0);

    fn names() -> Vec<(&'static Info, SignConfig)> {
        vec![(&INFO, SignConfig::default())]
    }
    fn info(_: &SignConfig) -> &'static Info {
        &INFO
    }
    fn buffers(_: &SignConfig) -> &'static [&'static str] {
        &[]
    }
    fn prepare(config: &SignConfig, input: &Input, _: &mut [f64]) -> Result<SignScalars, Refusal> {
        Ok(SignScalars { lr: input.lr, threshold: config.threshold })
    }
    fn update<F: Real>(s: &SignScalars<F>, x: F, g: F, _: &mut [F]) -> F {
        let step = if g > s.threshold { s.lr } else { F::from_f64(0.0) };
        x - if g < -s.threshold { -s.lr } else { step }
    }
}

const RECIPE: &str = "
data: {name: synthetic-images, batch_size: 32, train: 512, test: 128}
model: {name: mlp, hidden: [16]}
optimizer: {name: sign, lr: 0.001, threshold: 1e-7}
schedule: {kind: constant}
train: {epochs: 2}
";

#[test]
fn a_recipe_names_a_rule_of_another_crate() {
    let mut registries = Registries::default();
    registries.optimizers.register::<SignDescent>().unwrap();
    let recipe = Recipe::parse("sign.yaml", RECIPE, &[], &registries).unwrap_or_else(|e| panic!("{e}"));
    let folder = tempfile::tempdir().unwrap();
    let options = Options { runs: folder.path().into(), show: Show::Quiet, ..Default::default() };
    let outcome = run::run(&recipe, &registries, &options).unwrap();
    assert_eq!(outcome.summary.status, Status::Finished);
    let train = outcome.records.iter().filter(|record| record.split == Split::Train);
    let losses: Vec<f64> = train.filter_map(|record| record.values.get("loss").copied()).collect();
    assert!(losses[losses.len() - 1] < losses[0], "{losses:?}");
}

#[test]
fn its_hyperparameters_are_checked_as_those_of_our_own() {
    let mut registries = Registries::default();
    registries.optimizers.register::<SignDescent>().unwrap();
    let text = RECIPE.replace("threshold", "treshold");
    let error = Recipe::parse("sign.yaml", &text, &[], &registries).unwrap_err().to_string();
    assert!(error.contains("unknown key `treshold`") && error.contains("threshold"), "{error}");
    // Without the registration the recipe is refused before anything runs.
    let error = Recipe::parse("sign.yaml", RECIPE, &[], &Registries::default()).unwrap_err().to_string();
    assert!(error.contains("unknown optimizer `sign`"), "{error}");
}

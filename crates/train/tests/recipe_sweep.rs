//! A sweep is a set of runs in a fixed order.

use taper_train::recipe::{ErrorKind, Recipe, RecipeError, Unchecked};

const BASE: &str = "data: {name: mnist}
model: {name: mlp, hidden: [100]}
optimizer: {name: decgd, lr: 0.01, c: 1.0}
train: {epochs: 100}
";

fn load(sweep: &str, set: &[&str]) -> Result<Recipe, RecipeError> {
    let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
    Recipe::parse("s.yaml", &format!("{BASE}{sweep}"), &set, &Unchecked)
}

fn runs(sweep: &str, set: &[&str]) -> Vec<String> {
    let recipe = load(sweep, set).unwrap_or_else(|error| panic!("{error}"));
    let text = |(key, value): &(String, serde_json::Value)| format!("{key}={value}");
    recipe.runs().iter().map(|run| run.varied().iter().map(text).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn the_last_axis_turns_fastest() {
    let sweep = "sweep: {grid: {optimizer.lr: [0.1, 0.2], optimizer.c: [1, 2]}, list: [{train.epochs: 1}, {train: {epochs: 2}}], seeds: [5, 6]}";
    let runs = runs(sweep, &[]);
    assert_eq!(runs.len(), 16);
    assert_eq!(runs[0], "train.epochs=1 optimizer.lr=0.1 optimizer.c=1 seed=5");
    assert_eq!(runs[1], "train.epochs=1 optimizer.lr=0.1 optimizer.c=1 seed=6");
    assert_eq!(runs[2], "train.epochs=1 optimizer.lr=0.1 optimizer.c=2 seed=5");
    assert_eq!(runs[15], "train.epochs=2 optimizer.lr=0.2 optimizer.c=2 seed=6");
}

#[test]
fn runs_hold_what_the_sweep_sets_and_have_no_sweep_themselves() {
    let recipe =
        load("sweep: {grid: {optimizer.c: [10, 1e-8], model.hidden: [[100], [100, 100]]}}", &[]).unwrap();
    let [_, second, third, _] = recipe.runs() else { panic!("four runs") };
    assert_eq!(second.optimizer.hyper["c"], 10);
    assert_eq!(second.model.as_ref().unwrap().config["hidden"], serde_json::json!([100, 100]));
    assert_eq!(third.optimizer.hyper["c"], 1e-8);
    assert_eq!((third.runs().len(), third.runs()[0].id()), (1, third.id()));
    assert!(third.resolved().get("sweep").is_none());
}

#[test]
fn an_entry_of_the_list_may_name_another_optimizer() {
    let recipe =
        load("sweep: {list: [{name: a, optimizer: {name: adam, lr: 0.1}}, {name: b}]}", &[]).unwrap();
    assert!(recipe.runs()[0].optimizer.hyper.is_empty());
    assert_eq!(recipe.runs()[1].optimizer.hyper["c"], 1.0);
    assert_eq!(recipe.runs().iter().map(|run| run.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn equal_runs_are_one_run() {
    assert_eq!(runs("sweep: {grid: {optimizer.c: [1, 1.0, 2]}}", &[]), ["optimizer.c=1", "optimizer.c=2"]);
}

#[test]
fn set_reaches_all_runs_and_the_sweep_itself() {
    let sweep = "sweep: {grid: {optimizer.c: [1, 2]}, seeds: [1, 2, 3]}";
    assert_eq!(runs(sweep, &["sweep.seeds=[9]"]), ["optimizer.c=1 seed=9", "optimizer.c=2 seed=9"]);
    assert_eq!(runs(sweep, &["sweep=null"]), [""]);
    let recipe = load(sweep, &["train.epochs=2"]).unwrap();
    assert!(recipe.runs().iter().all(|run| run.train.epochs == Some(2)));
}

#[test]
fn a_setting_that_the_sweep_would_hide_is_refused() {
    let sweep = "sweep: {grid: {optimizer.c: [1, 2]}, seeds: [1, 2]}";
    for set in ["optimizer.c=3", "seed=7", "optimizer=null"] {
        let error = load(sweep, &[set]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Override, "{error}");
        assert!(error.to_string().contains("varied by the sweep"), "{error}");
        assert!(error.to_string().contains("varied at s.yaml:5:"), "{error}");
    }
    let variables = [("TAPER__SEED".to_owned(), "7".to_owned())];
    let text = format!("{BASE}{sweep}");
    let error = Recipe::parse_with_env("s.yaml", &text, &variables, &[], &Unchecked).unwrap_err();
    assert!(error.message().contains("set by the environment"), "{error}");
}

#[test]
fn a_key_is_varied_in_one_place() {
    for sweep in [
        "sweep: {grid: {optimizer.c: [1, 2]}, list: [{optimizer: {c: 3}}]}",
        "sweep: {grid: {seed: [1, 2]}, seeds: [1, 2]}",
        "sweep: {list: [{optimizer.c: 1, optimizer: {c: 2}}]}",
    ] {
        let error = load(sweep, &[]).unwrap_err();
        assert!(error.message().ends_with("is varied twice"), "{error}");
    }
}

#[test]
fn parts_of_a_sweep_can_be_left_out() {
    let sweep = "sweep: {grid: {optimizer.c: [1, 2]}, seeds: [1, 2]}";
    assert_eq!(runs(sweep, &["sweep.grid=null"]), ["seed=1", "seed=2"]);
    assert_eq!(runs(sweep, &["sweep.seeds=null"]), ["optimizer.c=1", "optimizer.c=2"]);
    for empty in ["sweep.seeds=[]", "sweep.list=[]"] {
        assert!(load(sweep, &[empty]).is_err(), "{empty}");
    }
}

#[test]
fn a_grid_that_explodes_is_refused_before_it_is_built() {
    let values: Vec<String> = (0..100).map(|value| value.to_string()).collect();
    let keys: Vec<String> = (0..30).map(|key| format!("optimizer.k{key}: [{}]", values.join(","))).collect();
    let error = load(&format!("sweep: {{grid: {{{}}}}}", keys.join(", ")), &[]).unwrap_err();
    assert_eq!(error.message(), "the sweep has more than 10000 runs");
}

#[test]
fn halton_points_are_the_halton_sequence() {
    let sweep = "sweep: {halton: {count: 3, space: {optimizer.lr: {uniform: [0, 1]}, optimizer.c: {uniform: [0, 3]}, data.batch_size: {choice: [32, 64]}}}}";
    let recipe = load(sweep, &[]).unwrap();
    let lrs: Vec<f64> = recipe.runs().iter().map(|run| run.optimizer.lr).collect();
    assert_eq!(lrs, [0.5, 0.25, 0.75]);
    let cs: Vec<f64> = recipe.runs().iter().filter_map(|run| run.optimizer.hyper["c"].as_f64()).collect();
    // Base 3 gives 1/3, 2/3, 1/9; values have six digits.
    assert_eq!(cs, [1.0, 2.0, 0.333333]);
    load(&sweep.replace("count: 3", "count: 3, seed: 18446744073709551615"), &[]).unwrap();
    // Base 5 gives 0.2, 0.4, 0.6.
    let sizes: Vec<usize> =
        recipe.runs().iter().filter_map(|run| Some(run.data.as_ref()?.batch_size)).collect();
    assert_eq!(sizes, [32, 32, 64]);
}

#[test]
fn random_points_depend_on_seed_key_and_index_alone() {
    let points = |seed: u64, count: usize, more: &str| {
        let sweep = format!(
            "sweep: {{random: {{count: {count}, seed: {seed}, space: {{{more}optimizer.lr: {{log: [1e-4, 1]}}}}}}}}"
        );
        load(&sweep, &[]).unwrap().runs().iter().map(|run| run.optimizer.lr).collect::<Vec<f64>>()
    };
    let some = points(7, 20, "");
    assert!(some.iter().all(|lr| (1e-4..1.0).contains(lr)), "{some:?}");
    assert_eq!(points(7, 40, "")[..20], some);
    assert_eq!(points(7, 20, "optimizer.c: {uniform: [0, 1]}, "), some);
    assert_ne!(points(8, 20, ""), some);
    // Even in the logarithm: the middle of the range splits the points about in half.
    let low = points(7, 400, "").into_iter().filter(|lr| *lr < 1e-2).count();
    assert!((150..250).contains(&low), "{low}");
}

#[test]
fn the_plan_lists_what_is_shared_and_what_differs() {
    let recipe = load("sweep: {grid: {optimizer.c: [10, 1]}, seeds: [1, 2]}", &["train.epochs=3"]).unwrap();
    let plan = recipe.plan();
    assert!(plan.contains("train.epochs"), "{plan}");
    let line =
        |start: &str| plan.lines().find(|line| line.trim_start().starts_with(start)).map(str::to_owned);
    assert!(line("train.epochs ").unwrap().ends_with("3         --set train.epochs"), "{plan}");
    assert!(line("optimizer.lr ").unwrap().ends_with("s.yaml:3:30"), "{plan}");
    assert_eq!(line("optimizer.c "), None);
    assert!(plan.contains("runs: 4\n"), "{plan}");
    assert!(plan.contains(&format!("  {}  optimizer.c=10 seed=1\n", recipe.runs()[0].directory())), "{plan}");
}

#[test]
fn a_run_does_not_carry_the_list_of_all_runs() {
    // Each run would merge the whole list again, and a list of twice the length would take four times as long.
    let recipe = load("sweep: {list: [{seed: 1}, {seed: 2}]}", &["sweep.seeds=null"]).unwrap();
    assert_eq!(recipe.runs().len(), 2);
    for run in recipe.runs() {
        assert_eq!(run.error_at("sweep", "").location(), None);
    }
}

#[test]
fn no_range_makes_a_value_that_is_no_number() {
    let space =
        |range: &str| format!("sweep: {{random: {{count: 20, space: {{optimizer.c: {{{range}}}}}}}}}");
    let error = load(&space("uniform: [-1e308, 1e308]"), &[]).unwrap_err();
    assert!(error.message().contains("difference is a finite number"), "{error}");
    for range in ["uniform: [-8e307, 8e307]", "uniform: [1.7e308, 1.79e308]", "log: [1e-300, 1.79e308]"] {
        for run in load(&space(range), &[]).unwrap().runs() {
            assert!(run.optimizer.hyper["c"].is_f64(), "{range}: {:?}", run.optimizer.hyper);
        }
    }
}

const CHOOSING: &str = "sweep: {grid: {optimizer.lr: [0.1, 0.2]}, seeds: [1, 2], confirm: [7, 8, 9]}";

#[test]
fn seeds_that_confirm_are_no_runs_of_the_sweep() {
    let recipe = load(CHOOSING, &["train.select=val", "data.val=0.1"]).unwrap();
    let seeds = |runs: &[Recipe]| runs.iter().map(|run| run.seed).collect::<Vec<_>>();
    assert_eq!(seeds(recipe.runs()), [1, 2, 1, 2]);
    assert_eq!(seeds(recipe.confirming()), [7, 8, 9, 7, 8, 9]);
    assert_eq!(recipe.confirming()[3].configuration(), recipe.runs()[2].configuration());
    assert!(load("sweep: {seeds: [1, 2]}", &[]).unwrap().confirming().is_empty());
}

#[test]
fn seeds_that_confirm_are_others_than_those_that_chose() {
    let refused = |sweep: &str, set: &[&str]| load(sweep, set).unwrap_err().to_string();
    let val = ["train.select=val", "data.val=0.1"];
    let error = refused("sweep: {seeds: [1, 2], confirm: [3, 2]}", &val);
    assert!(error.contains("s.yaml:5") && error.contains("seed 2 chose, and cannot confirm"), "{error}");
    let error = refused("sweep: {grid: {optimizer.lr: [1, 2]}, confirm: [3]}", &val);
    assert!(error.contains("s.yaml:5") && error.contains("give `sweep.seeds` too"), "{error}");
    let error = refused(CHOOSING, &["train.select=test"]);
    assert!(error.contains("s.yaml:5") && error.contains("give `train.select: val`"), "{error}");
    let error = refused("sweep: {seeds: [1], confirm: []}", &val);
    assert!(error.contains("expected a list of values"), "{error}");
}

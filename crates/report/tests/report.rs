//! Reports on runs that the tests make themselves: tables to the byte, pages that no name can break.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use taper_report::{Document, Form};
use taper_train::run::Summary;
use taper_train::{Recipe, recipe::Unchecked};

/// A recipe of a small run; `extra` goes on top of it.
fn recipe(name: &str, seed: u64, optimizer: &str, extra: &str) -> Recipe {
    let text = format!(
        "name: {}\nseed: {seed}\ndata: {{name: mnist}}\nmodel: {{name: mlp, hidden: [100]}}\n\
         optimizer: {optimizer}\ntrain: {{epochs: 3, select: test}}\n{extra}",
        serde_json::json!(name)
    );
    Recipe::parse("fixture.yaml", &text, &[], &Unchecked).unwrap()
}

/// Leaves a run's folder as training would: three epochs with these test accuracies.
fn leave(runs: &Path, recipe: &Recipe, status: &str, accuracies: &[f64]) -> PathBuf {
    let folder = runs.join(recipe.directory());
    leave_in(&folder, recipe, status, accuracies);
    folder
}

fn leave_in(folder: &Path, recipe: &Recipe, status: &str, accuracies: &[f64]) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("recipe.yaml"), recipe.to_yaml()).unwrap();
    let mut metrics = String::new();
    for (i, accuracy) in accuracies.iter().enumerate() {
        let (epoch, step) = (i + 1, 100 * (i + 1));
        let loss = 1.0 - accuracy;
        metrics += &format!(
            "{{\"step\":{step},\"epoch\":{epoch},\"split\":\"train\",\"loss\":{loss},\"lr\":0.01}}\n"
        );
        metrics += &format!(
            "{{\"step\":{step},\"epoch\":{epoch},\"split\":\"probe\",\"sqrt_f_plus_c\":1.5,\"v_min/w\":1.0,\"v_p01/w\":1.1,\
             \"v_p25/w\":1.2,\"v_p50/w\":1.3,\"v_p75/w\":1.4,\"v_p99/w\":1.5,\"v_max/w\":1.6,\"v_mean/w\":1.3}}\n"
        );
        metrics += &format!(
            "{{\"step\":{step},\"epoch\":{epoch},\"split\":\"test\",\"loss\":{loss},\"accuracy\":{accuracy}}}\n"
        );
    }
    fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
    if status != "killed" {
        seal(folder, recipe, status, "accuracy");
    }
}

/// Leaves the summary of a run that ended.
fn seal(folder: &Path, recipe: &Recipe, status: &str, metric: &str) {
    let summary = serde_json::json!({
        "id": recipe.id(), "name": recipe.name, "status": status, "steps": 300, "epochs": 3, "select": "test",
        "metric": metric, "last": {}, "best": {}, "selected": {}, "sha256": "",
    });
    let mut summary: Summary = serde_json::from_value(summary).unwrap();
    let text = |summary: &Summary| serde_json::to_vec_pretty(summary).unwrap();
    summary.sha256 = taper_files::sha256(&text(&summary));
    fs::write(folder.join("summary.json"), text(&summary)).unwrap();
}

/// Two optimizers with two and three seeds, of which one diverged and one was killed.
fn fixture(runs: &Path) {
    let decgd = |seed| recipe("mine", seed, "{name: decgd, lr: 0.01, c: 1.0}", "");
    leave(runs, &decgd(1), "finished", &[0.90, 0.96, 0.95]);
    leave(runs, &decgd(2), "finished", &[0.91, 0.94, 0.97]);
    let adam = |seed| recipe("mine", seed, "{name: adam, lr: 0.001}", "");
    leave(runs, &adam(1), "finished", &[0.80, 0.85, 0.90]);
    leave(runs, &adam(2), "diverged", &[0.70]);
    leave(runs, &adam(3), "killed", &[0.75, 0.80]);
}

fn render(folders: &[PathBuf], form: Form) -> String {
    text(&taper_report::document("Fixture", &taper_report::load(folders).unwrap()), form)
}

fn text(document: &Document, form: Form) -> String {
    String::from_utf8(document.render(form).unwrap()).unwrap()
}

#[test]
fn tables_are_as_expected_in_every_form() {
    let folder = tempfile::tempdir().unwrap();
    fixture(folder.path());
    let runs = [folder.path().to_path_buf()];
    let markdown = render(&runs, Form::Markdown);
    // 96.5 and 0.5: the half width of Student's interval for two values is 12.706 · |a - b| / 2.
    let expected = "\
**mnist: test accuracy, %**

| network | optimizer | runs | best on test | at epoch |          last | chosen on validation | remarks                          |
| ------- | --------- | ---: | -----------: | -------: | ------------: | -------------------: | -------------------------------- |
| mlp     | adam      |  1/3 |        90.00 |        3 |         90.00 |                    – | 1 of 3 diverged, 1 of 3 interrupted |
| mlp     | decgd     |  2/2 | 96.50 ± 6.35 |      2–3 | 96.00 ± 12.71 |                    – |                                  |
";
    let found = markdown.split("## Results\n\n").nth(1).unwrap();
    let lines = |text: &str| -> Vec<Vec<String>> {
        let lines =
            text.lines().take(6).map(|line| line.split('|').map(|cell| cell.trim().to_owned()).collect());
        lines.filter(|cells: &Vec<String>| !cells.iter().any(|cell| cell.contains("---"))).collect()
    };
    assert_eq!(lines(found), lines(expected), "{markdown}");
    assert!(markdown.contains("chosen by the test set itself"), "{markdown}");

    let latex = render(&runs, Form::Latex);
    assert!(latex.contains("\\begin{tabular}{llrrrrrl}\n\\toprule\nnetwork & optimizer & runs"), "{latex}");
    assert!(
        latex.contains(
            "mlp & decgd & 2/2 & 96.50 $\\pm$ 6.35 & 2--3 & 96.00 $\\pm$ 12.71 & -- &  \\\\\n\\bottomrule"
        ),
        "{latex}"
    );

    let csv = render(&runs, Form::Csv);
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(
        rows[0][..10],
        [
            "data",
            "network",
            "optimizer",
            "metric",
            "choice",
            "runs",
            "finished",
            "diverged",
            "interrupted",
            "mean"
        ]
    );
    assert_eq!(
        rows[1][..10],
        ["mnist", "mlp", "adam", "accuracy", "best_on_test", "3", "1", "1", "1", "0.9"]
    );
    assert_eq!(
        rows[4][..10],
        ["mnist", "mlp", "decgd", "accuracy", "best_on_test", "2", "2", "0", "0", "0.965"]
    );
    assert_eq!(rows.len(), 7, "two groups by three choices");

    let svg = render(&runs, Form::Svg);
    assert!(svg.starts_with("<svg xmlns=") && svg.contains("class=\"thin\""), "the diverged run is drawn");
}

#[test]
fn the_validated_value_is_the_test_value_at_the_best_validation_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe("mine", 1, "{name: sgdm, lr: 0.1}", "");
    let run = leave(folder.path(), &recipe, "finished", &[0.90, 0.96, 0.95]);
    let mut metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    for (step, accuracy) in [(100, 0.5), (200, 0.6), (300, 0.7)] {
        metrics += &format!(
            "{{\"step\":{step},\"epoch\":{},\"split\":\"val\",\"accuracy\":{accuracy}}}\n",
            step / 100
        );
    }
    fs::write(run.join("metrics.jsonl"), metrics).unwrap();
    let markdown = render(&[folder.path().to_path_buf()], Form::Markdown);
    let row = markdown.lines().find(|line| line.contains("sgdm")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    assert_eq!(
        cells[4..8],
        ["96.00", "2", "95.00", "95.00"],
        "best on test at epoch 2, last and validated at 3"
    );
}

/// The cells of the row of a Markdown text that starts with `first`, without that.
fn row<'a>(markdown: &'a str, first: &str) -> Vec<&'a str> {
    let start = format!("| {first} ");
    let line = markdown.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{markdown}"));
    line.trim_matches('|').split('|').map(str::trim).skip(1).collect()
}

#[test]
fn what_the_runs_can_show_is_said_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let runs = |seeds: u32| {
        let place = folder.path().join(seeds.to_string());
        for seed in 1..=seeds {
            let end = 0.9 + 0.001 * f64::from(seed);
            let adam = recipe("a", seed.into(), "{name: adam, lr: 0.001}", "");
            leave(&place, &adam, "finished", &[0.80, 0.85, end]);
            let decgd = recipe("a", seed.into(), "{name: decgd, lr: 0.01, c: 1.0}", "");
            leave(&place, &decgd, "finished", &[0.85, 0.905, end + 0.01]);
        }
        render(&[place], Form::Markdown)
    };
    // Six pairs that agree: 2 of 2⁶ sign patterns are as extreme, and one comparison needs no correction.
    let six = runs(6);
    let expected = ["6", "+1.00", "+1.00 to +1.00", "0.03125", "0.03125", "decgd is better"];
    assert_eq!(row(&six, "decgd − adam"), expected);
    // Adam's lowest run reaches 90.10, DecGD's 91.10.
    assert!(six.contains("| optimizer | to 90.10 | to 91.10 |"), "{six}");
    let times = six.split("first epoch at a level").nth(1).unwrap();
    assert_eq!((row(times, "adam"), row(times, "decgd")), (vec!["3", "never"], vec!["2", "3"]));
    let two = runs(2);
    assert_eq!(row(&two, "decgd − adam").last(), Some(&"nothing: needs 6 pairs"));
    // One seed makes no pair, but still has a time.
    let one = runs(1);
    assert!(!one.contains("shared seeds") && one.contains("first epoch at a level"), "{one}");
}

#[test]
fn a_function_whose_start_the_seeds_move_is_compared_seed_by_seed() {
    let folder = tempfile::tempdir().unwrap();
    let leave = |optimizer: &str, seed: u64, loss: f64| {
        let text = format!(
            "name: f\nseed: {seed}\nproblem: {{name: powell, jitter: 0.1}}\noptimizer: {optimizer}\ntrain: {{steps: 100}}"
        );
        let recipe = Recipe::parse("fixture.yaml", &text, &[], &Unchecked).unwrap();
        let run = folder.path().join(recipe.directory());
        fs::create_dir_all(&run).unwrap();
        fs::write(run.join("recipe.yaml"), recipe.to_yaml()).unwrap();
        let line = |step: u64, loss: f64| {
            format!("{{\"step\":{step},\"epoch\":1,\"split\":\"train\",\"loss\":{loss},\"lr\":0.01}}\n")
        };
        fs::write(run.join("metrics.jsonl"), line(1, 7.0) + &line(100, loss)).unwrap();
        seal(&run, &recipe, "finished", "loss");
    };
    for seed in 1..=8 {
        leave("{name: decgd, lr: 0.01}", seed, 0.25 + 0.01 * seed as f64);
        leave("{name: adam, lr: 0.01}", seed, 0.5 + 0.01 * seed as f64);
    }
    let markdown = render(&[folder.path().to_path_buf()], Form::Markdown);
    assert!(markdown.contains("powell: differences in loss on shared seeds"), "{markdown}");
    assert!(
        markdown.contains("The value of the last iteration; a seed means the same starting point"),
        "{markdown}"
    );
    let row = row(&markdown, "decgd − adam");
    assert_eq!(row[..2], ["8", "−0.2500"], "{markdown}");
    assert_eq!(row[5], "decgd is better", "{markdown}");
}

#[test]
fn the_method_itself_is_compared_also_beside_a_variant_and_a_better_one() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 1..=2 {
        for (name, end) in [("decgd", 0.92), ("decgdw", 0.93), ("adam", 0.94)] {
            let recipe = recipe("a", seed, &format!("{{name: {name}, lr: 0.01}}"), "");
            leave(folder.path(), &recipe, "finished", &[0.8, 0.9, end]);
        }
    }
    let page = render(&[folder.path().to_owned()], Form::Markdown);
    assert_eq!(row(&page, "decgd − adam")[1], "−2.00");
    assert_eq!(row(&page, "decgd − decgdw")[1], "−1.00");
    assert!(!page.contains("came out best"), "{page}");
}

#[test]
fn a_search_is_worth_what_fewer_tries_would_have_found() {
    let folder = tempfile::tempdir().unwrap();
    for (c, end) in [(10.0, 0.90), (1.0, 0.92), (0.1, 0.94), (0.01, 0.96)] {
        let optimizer = format!("{{name: decgd, lr: 0.01, c: {c}}}");
        leave(folder.path(), &recipe("c", 1, &optimizer, ""), "finished", &[0.5, end]);
    }
    let markdown = render(&[folder.path().to_path_buf()], Form::Markdown);
    let search = markdown.split("searches, by").nth(1).unwrap();
    // The mean of all; of the six pairs the better ones are 92, 94, 94, 96, 96, 96; one of four is within a point.
    assert_eq!(row(search, "decgd"), ["4", "93.00", "94.67", "96.00", "25 %"]);
    leave(folder.path(), &recipe("c", 1, "{name: decgd, lr: 0.01, c: 5.0}", ""), "diverged", &[0.5]);
    let markdown = render(&[folder.path().to_path_buf()], Form::Markdown);
    let search = markdown.split("searches, by").nth(1).unwrap();
    assert_eq!(row(search, "decgd")[..2], ["5", "–"], "one try might be the one that diverged");
    // What is under way is no try yet.
    leave(folder.path(), &recipe("c", 1, "{name: decgd, lr: 0.01, c: 6.0}", ""), "killed", &[0.5]);
    let markdown = render(&[folder.path().to_path_buf()], Form::Markdown);
    assert_eq!(row(markdown.split("searches, by").nth(1).unwrap(), "decgd")[0], "5");
}

/// The rows of the table of results: the optimizer's label and the column of runs.
fn results(markdown: &str) -> Vec<(String, String)> {
    let table = markdown.split("## Results\n\n").nth(1).unwrap_or_else(|| panic!("{markdown}"));
    let rows = table.lines().skip_while(|line| !line.starts_with("| ---")).skip(1);
    let cells = rows.take_while(|line| line.starts_with('|')).map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        (cells[2].to_owned(), cells[3].to_owned())
    });
    cells.collect()
}

#[test]
fn settings_that_round_to_the_same_text_are_rows_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let momenta = ["0.9995", "0.9999", "0.99991", "0.99994"];
    for momentum in momenta {
        let optimizer = format!("{{name: sgdm, lr: 0.1, momentum: {momentum}}}");
        leave(folder.path(), &recipe("m", 1, &optimizer, ""), "finished", &[0.5, 0.6]);
    }
    let rates = ["100000", "100001", "100002"];
    for lr in rates {
        let optimizer = format!("{{name: adam, lr: {lr}}}");
        leave(folder.path(), &recipe("l", 1, &optimizer, ""), "finished", &[0.5, 0.6]);
    }
    let found = results(&render(&[folder.path().to_path_buf()], Form::Markdown));
    let mut expected: Vec<String> = rates.iter().map(|lr| format!("adam lr={lr}")).collect();
    expected.extend(momenta.iter().map(|momentum| format!("sgdm momentum={momentum}")));
    let mut labels: Vec<String> = found.iter().map(|(label, _)| label.clone()).collect();
    labels.sort();
    assert_eq!(labels, expected);
    assert!(found.iter().all(|(_, runs)| runs == "1/1"), "{found:?}");
}

#[test]
fn a_run_that_does_not_count_is_named_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let sgdm = "{name: sgdm, lr: 0.1}";
    leave(folder.path(), &recipe("a", 1, sgdm, ""), "killed", &[0.5]);
    leave(folder.path(), &recipe("b", 1, sgdm, ""), "finished", &[0.5, 0.6]);
    leave(folder.path(), &recipe("c", 1, sgdm, ""), "finished", &[0.5, 0.7]);
    let nameless = folder.path().join("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::write(nameless.join("metrics.jsonl"), "").unwrap();
    let runs = taper_report::load(&[folder.path().to_path_buf()]).unwrap();
    let problems = runs.problems.join("\n");
    let kept: Vec<&str> = runs.runs.iter().map(|run| run.recipe.name.as_str()).collect();
    assert_eq!(kept, ["b"], "the first that finished: {problems}");
    let id = recipe("b", 1, sgdm, "").id().to_owned();
    for part in [
        format!("a-{id}: interrupted, and b-{id} has its settings and its seed: left out"),
        format!("c-{id}: other numbers than b-{id}, which has its settings and its seed: left out"),
        "nameless: no recipe.yaml: left out".to_owned(),
    ] {
        assert!(problems.contains(&part), "{part} in\n{problems}");
    }
    assert_eq!(runs.problems.len(), 3, "{problems}");
}

#[test]
fn a_finished_run_without_a_value_is_counted_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let sgdm = |seed| recipe("a", seed, "{name: sgdm, lr: 0.1}", "");
    leave(folder.path(), &sgdm(1), "finished", &[0.5, 0.6]);
    leave(folder.path(), &sgdm(2), "finished", &[]);
    let markdown = render(&[folder.path().to_path_buf()], Form::Markdown);
    assert!(markdown.contains("1 of 2 without a value"), "{markdown}");
}

/// Six seeds of two optimizers, DecGD with one line more than Adam.
fn two_with(place: &Path, extra: &str) -> String {
    for seed in 1..=6 {
        let end = 0.9 + 0.001 * seed as f64;
        leave(place, &recipe("a", seed, "{name: adam, lr: 0.001}", ""), "finished", &[0.80, end]);
        let decgd = recipe("a", seed, "{name: decgd, lr: 0.01, c: 1.0}", extra);
        leave(place, &decgd, "finished", &[0.85, end + 0.05]);
    }
    render(&[place.to_path_buf()], Form::Markdown)
}

#[test]
fn unequal_budgets_are_shown_and_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let mut epochs = String::new();
    for seed in 1..=6 {
        let end = 0.9 + 0.001 * seed as f64;
        leave(folder.path(), &recipe("a", seed, "{name: adam, lr: 0.001}", ""), "finished", &[0.80, end]);
        let five = recipe("a", seed, "{name: decgd, lr: 0.01, c: 1.0}", "").to_yaml();
        let five = five.replace("epochs: 3", "epochs: 5");
        let five = Recipe::parse("fixture.yaml", &five, &[], &Unchecked).unwrap();
        leave(folder.path(), &five, "finished", &[0.85, end + 0.05]);
        epochs = render(&[folder.path().to_path_buf()], Form::Markdown);
    }
    let note = "- Not equal between optimizers: train.epochs is 3 for adam, 5 for decgd.";
    assert_eq!(epochs.matches(note).count(), 2, "below the results and below the differences: {epochs}");
    let cells = row(&epochs, "decgd − adam");
    assert_eq!(cells, ["6", "–", "–", "–", "–", "not comparable: train.epochs is 5 against 3"], "{epochs}");
    // Equal settings need no word.
    let folder = tempfile::tempdir().unwrap();
    let equal = two_with(folder.path(), "");
    assert!(!equal.contains("Not equal"), "{equal}");
    assert_eq!(row(&equal, "decgd − adam").last(), Some(&"decgd is better"));
    // A schedule is a part of the method: it is shown, and compared.
    let folder = tempfile::tempdir().unwrap();
    let other = two_with(folder.path(), "schedule: {kind: cosine}\n");
    assert!(other.contains("- Not equal between optimizers: schedule.kind is "), "{other}");
    assert_eq!(row(&other, "decgd − adam").last(), Some(&"decgd is better"));
}

#[test]
fn what_is_not_known_of_the_data_is_said_to_be_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let sgdm = recipe("a", 1, "{name: sgdm, lr: 0.1}", "");
    let run = leave(folder.path(), &sgdm, "finished", &[0.5, 0.6]);
    let manifest = |text: &str| {
        fs::write(run.join("manifest.json"), text).unwrap();
        render(&[folder.path().to_path_buf()], Form::Markdown)
    };
    let part = manifest("{\"data\": {\"subset\": \"the first 10 of 100 of train\"}}");
    assert!(part.contains("- Not the whole data set: the first 10 of 100 of train."), "{part}");
    let unknown = "- Whether these are the whole data sets is not known: ";
    let whole = manifest("{\"data\": {\"subset\": null}}");
    assert!(!whole.contains("whole data set"), "{whole}");
    for (damaged, why) in [("{", "EOF"), ("{}", "no data.subset"), ("{\"data\": {}}", "no data.subset")] {
        let text = manifest(damaged);
        assert!(text.contains(unknown) && text.contains(why), "{damaged}: {text}");
    }
    fs::remove_file(run.join("manifest.json")).unwrap();
    let text = render(&[folder.path().to_path_buf()], Form::Markdown);
    assert!(text.contains(unknown) && text.contains("manifest.json"), "{text}");
}

#[test]
fn names_that_are_markup_stay_names() {
    let folder = tempfile::tempdir().unwrap();
    let evil = "</script><script>alert(1)<!-- \" onload='x' ${\\input{x}}|`a`\u{202e}";
    let text = format!(
        "data: {{name: {evil}}}\nmodel: {{name: {evil}}}\noptimizer: {{name: {evil}, lr: 0.1}}\ntrain: {{epochs: 3}}\n",
        evil = serde_json::json!(evil)
    );
    let recipe = Recipe::parse("fixture.yaml", &text, &[], &Unchecked).unwrap();
    let run = folder.path().join("<img src=x onerror=alert(2)>");
    leave_in(&run, &recipe, "finished", &[0.5, 0.6, 0.7]);
    let resolved = fs::read_to_string(run.join("recipe.yaml")).unwrap();
    fs::write(run.join("recipe.yaml"), format!("{resolved}# </pre><script>alert(3)</script>\n")).unwrap();
    let runs = [folder.path().to_path_buf()];
    let page = render(&runs, Form::Html);
    assert!(!page.contains("<script>alert") && !page.contains("<img"), "markup from a name is on the page");
    assert!(!page.contains("<!--") && !page.contains('\u{202e}'));
    // The page's own script, and the data of its charts.
    assert_eq!(page.matches("<script").count(), page.matches("</script>").count());
    assert_eq!(page.matches("<script>").count(), 1);
    for form in [Form::Markdown, Form::Latex, Form::Svg] {
        let text = render(&runs, form);
        assert!(!text.contains("<script"), "{text}");
        assert!(form != Form::Latex || !text.contains("\\input{"), "{text}");
    }
}

#[test]
fn damaged_runs_are_read_as_far_as_they_go_and_named() {
    let folder = tempfile::tempdir().unwrap();
    fixture(folder.path());
    let damaged =
        leave(folder.path(), &recipe("d", 7, "{name: sgdm, lr: 0.1}", ""), "finished", &[0.5, 0.6, 0.7]);
    let metrics = fs::read_to_string(damaged.join("metrics.jsonl")).unwrap();
    let lines: Vec<&str> = metrics.lines().collect();
    fs::write(
        damaged.join("metrics.jsonl"),
        format!("{}\n{{\"step\": oops}}\n{}\n", lines[..6].join("\n"), lines[6]),
    )
    .unwrap();
    fs::write(damaged.join("summary.json"), "{").unwrap();
    let lost = folder.path().join("lost");
    fs::create_dir(&lost).unwrap();
    fs::write(lost.join("recipe.yaml"), "train: [").unwrap();
    // A run under way: the last line is not there yet as a whole.
    let young = leave(folder.path(), &recipe("y", 8, "{name: sgdm, lr: 0.1}", ""), "killed", &[0.5]);
    let metrics = fs::read_to_string(young.join("metrics.jsonl")).unwrap();
    fs::write(young.join("metrics.jsonl"), format!("{metrics}{{\"step\":200,\"ep")).unwrap();

    let runs = taper_report::load(&[folder.path().to_path_buf()]).unwrap();
    assert_eq!(runs.runs.len(), 7);
    let problems = runs.problems.join("\n");
    for part in ["lost: recipe.yaml cannot be read", "metrics.jsonl, line 7", "summary.json"] {
        assert!(problems.contains(part), "{problems}");
    }
    assert_eq!(runs.problems.len(), 3, "{problems}");
    let page = text(&taper_report::document("d", &runs), Form::Html);
    assert!(page.contains("What was left out or could not be read"));
}

#[test]
fn equal_runs_give_equal_bytes_wherever_they_lie() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fixture(here.path());
    let mut folders: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(here.path()).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), there.path().join(entry.unwrap().file_name()));
        fs::create_dir(&to).unwrap();
        for file in fs::read_dir(&from).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
        folders.push(to);
    }
    folders.sort();
    folders.reverse();
    for form in [Form::Html, Form::Markdown, Form::Latex, Form::Csv, Form::Svg] {
        let expected = render(&[here.path().to_path_buf()], form);
        assert_eq!(render(&[there.path().to_path_buf()], form), expected);
        assert_eq!(render(&folders, form), expected, "one by one and in another order");
        folders.push(there.path().to_path_buf());
        assert_eq!(render(&folders, form), expected, "named twice");
        folders.pop();
    }
}

/// Opens a page in Chromium where there is one; says so where there is none.
#[test]
fn the_page_works_in_a_browser() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("runs");
    // Sixteen epochs, so that smoothing is offered; four values of c, and a grid of two settings.
    let rising: Vec<f64> = (1..=16).map(|i| 1.0 - 0.5 / f64::from(i)).collect();
    for (c, seed) in [(10.0, 1), (1.0, 1), (1.0, 2), (0.1, 1), (0.001, 1)] {
        let optimizer = format!("{{name: decgd, lr: 0.01, c: {c}}}");
        leave(&runs, &recipe("c", seed, &optimizer, ""), "finished", &rising);
    }
    for (lr, wd) in [(0.1, 0.0), (0.1, 0.5), (0.2, 0.0), (0.2, 0.5)] {
        let optimizer = format!("{{name: sgdm, lr: {lr}, weight_decay: {wd}}}");
        leave(&runs, &recipe("g", 1, &optimizer, ""), "finished", &rising[..8]);
    }
    leave(&runs, &recipe("b", 9, "{name: adam, lr: 0.1}", ""), "diverged", &rising[..3]);
    let page = folder.path().join("page.html");
    fs::write(&page, render(&[runs], Form::Html)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check_report.py");
    let output = match Command::new("python3").arg(script).arg(&page).output() {
        Ok(output) => output,
        Err(e) => {
            eprintln!("no python3 ({e}): the page was not opened");
            return;
        }
    };
    let message = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        // The script says that there is no browser.
        Some(3) => eprintln!("{message}"),
        code => assert_eq!(code, Some(0), "{message}"),
    }
}

#[test]
fn a_figure_says_when_it_has_not_all_configurations() {
    let folder = tempfile::tempdir().unwrap();
    let caption = |most: u64| {
        for i in 0..most {
            let of = recipe("mine", 1, &format!("{{name: adam, lr: {}}}", 0.001 * (i + 1) as f64), "");
            leave(folder.path(), &of, "finished", &[0.80, 0.85, 0.90 + 0.001 * i as f64]);
        }
        render(&[folder.path().to_path_buf()], Form::Html).contains("the best twelve are drawn")
    };
    assert!(!caption(12));
    assert!(caption(13));
}

#[test]
fn the_losses_of_single_steps_stay_out_of_the_band_over_seeds() {
    let folder = tempfile::tempdir().unwrap();
    fixture(folder.path());
    let first = |runs: &Path| {
        let document = taper_report::document("Fixture", &taper_report::load(&[runs.to_path_buf()]).unwrap());
        let figures: Vec<String> = document
            .sections
            .iter()
            .flat_map(|section| &section.blocks)
            .filter_map(|block| match block {
                taper_report::Block::Figure(figure) => Some(format!("{figure:?}")),
                _ => None,
            })
            .collect();
        figures[0].clone()
    };
    let before = first(folder.path());
    for run in fs::read_dir(folder.path()).unwrap() {
        let path = run.unwrap().path().join("metrics.jsonl");
        let metrics = fs::read_to_string(&path).unwrap();
        let step =
            "{\"step\":40,\"epoch\":1,\"split\":\"train\",\"loss\":7.0,\"lr\":0.01,\"grad_norm\":1.0}\n";
        fs::write(&path, format!("{step}{metrics}")).unwrap();
    }
    assert_eq!(first(folder.path()), before);
}

#[test]
fn a_summary_that_nobody_vouches_for_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        leave(folder.path(), &recipe("mine", 1, "{name: adam, lr: 0.001}", ""), "finished", &[0.8, 0.9, 0.9]);
    let runs = [folder.path().to_path_buf()];
    assert!(!render(&runs, Form::Markdown).contains("no checksum"));
    let path = run.join("summary.json");
    let mut summary: Summary = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    summary.sha256.clear();
    fs::write(&path, serde_json::to_vec_pretty(&summary).unwrap()).unwrap();
    let said = render(&runs, Form::Markdown);
    assert!(said.contains("carries no checksum"), "{said}");
}

/// A recipe that is evaluated every 100 of 300 steps, all within one epoch.
fn by_steps(seed: u64, optimizer: &str) -> Recipe {
    let text = format!(
        "name: mine\nseed: {seed}\ndata: {{name: mnist}}\nmodel: {{name: mlp, hidden: [100]}}\n\
         optimizer: {optimizer}\ntrain: {{steps: 300, eval_every: 100, log_every: 50, select: test}}\n"
    );
    Recipe::parse("fixture.yaml", &text, &[], &Unchecked).unwrap()
}

/// Leaves such a run: six lines of training with a rate that falls, three evaluations with probes, and the mean over the epoch.
fn leave_by_steps(runs: &Path, recipe: &Recipe, accuracies: [f64; 3]) {
    let folder = leave(runs, recipe, "finished", &accuracies);
    let lines = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let mut metrics = String::new();
    for (i, line) in lines.lines().enumerate() {
        let step = 100 * (i / 3 + 1);
        if line.contains("\"train\"") {
            for step in [step - 50, step] {
                let (loss, lr) = (1.0 / step as f64, 3.0 - 0.01 * step as f64);
                metrics += &format!(
                    "{{\"step\":{step},\"epoch\":1,\"split\":\"train\",\"loss\":{loss},\"lr\":{lr},\"grad_norm\":1.0}}\n"
                );
            }
        } else {
            metrics += &line.replace(&format!("\"epoch\":{}", i / 3 + 1), "\"epoch\":1");
            metrics.push('\n');
        }
    }
    metrics += "{\"step\":300,\"epoch\":1,\"split\":\"train\",\"loss\":0.5,\"lr\":0.0}\n";
    fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
}

/// The chart of a figure's panel, as its first view has it.
fn chart(figure: &taper_report::Figure, panel: usize) -> &taper_figures::plot::Chart {
    match &figure.panels[panel].views[0].picture {
        taper_figures::plot::Picture::Chart(chart) => chart,
        other => panic!("{other:?}"),
    }
}

fn xs(chart: &taper_figures::plot::Chart) -> Vec<f64> {
    chart.series[0].points.iter().map(|(x, _)| *x).collect()
}

#[test]
fn evaluations_within_an_epoch_are_told_apart_by_their_steps() {
    let folder = tempfile::tempdir().unwrap();
    leave_by_steps(folder.path(), &by_steps(1, "{name: adam, lr: 0.001}"), [0.80, 0.85, 0.90]);
    leave_by_steps(folder.path(), &by_steps(1, "{name: decgd, lr: 0.01, c: 1.0}"), [0.85, 0.93, 0.92]);
    let runs = [folder.path().to_path_buf()];
    let markdown = render(&runs, Form::Markdown);
    assert!(markdown.contains("| at step |") && !markdown.contains("at epoch"), "{markdown}");
    let cells = row(&markdown, "mlp");
    assert_eq!((cells[0], cells[3]), ("adam", "300"), "{markdown}");
    let line = markdown.lines().find(|line| line.starts_with("| mlp     | decgd")).unwrap();
    assert_eq!(line.split('|').nth(5).map(str::trim), Some("200"), "{line}");
    let times = markdown.split("first step at a level").nth(1).unwrap();
    assert_eq!((row(times, "adam"), row(times, "decgd")), (vec!["300", "never"], vec!["200", "200"]));

    let document = taper_report::document("Fixture", &taper_report::load(&runs).unwrap());
    let figures: Vec<&taper_report::Figure> = document.figures().collect();
    assert!(figures[0].caption.contains("training loss by step"), "{}", figures[0].caption);
    let (test, loss) = (chart(figures[0], 0), chart(figures[0], 1));
    assert_eq!((xs(test), test.x_label.as_str()), (vec![100.0, 200.0, 300.0], "step"));
    assert_eq!((xs(loss), loss.x_label.as_str()), (vec![50.0, 100.0, 150.0, 200.0, 250.0, 300.0], "step"));
    // lr · v / √(f + c) with the rate of the probe's own step: 1.3 / 1.5 of 2, 1 and 0.
    let inside = figures.iter().find(|figure| figure.caption.contains("its vector v")).unwrap();
    let rates = inside.panels.iter().map(|panel| match &panel.views[0].picture {
        taper_figures::plot::Picture::Chart(chart) => chart,
        other => panic!("{other:?}"),
    });
    let rates = rates.into_iter().find(|chart| chart.title == "effective learning rate").unwrap();
    let of = rates.series.iter().find(|line| line.label == "decgd").unwrap();
    let expected: Vec<(f64, f64)> = vec![(100.0, 2.0 * 1.3 / 1.5), (200.0, 1.3 / 1.5), (300.0, 0.0)];
    for ((x, y), (a, b)) in of.points.iter().zip(&expected) {
        assert!(x == a && (y - b).abs() < 1e-12, "{:?}", of.points);
    }
    assert_eq!(of.points.len(), 3);
}

#[test]
fn the_rate_of_a_probe_is_the_last_that_was_logged_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        leave(folder.path(), &recipe("mine", 1, "{name: decgd, lr: 0.01, c: 1.0}", ""), "finished", &[0.8]);
    let path = run.join("metrics.jsonl");
    let probe = fs::read_to_string(&path).unwrap().lines().nth(1).unwrap().to_owned();
    let lr = |step: u64, lr: f64| {
        format!(
            "{{\"step\":{step},\"epoch\":1,\"split\":\"train\",\"loss\":1.0,\"lr\":{lr},\"grad_norm\":1.0}}\n"
        )
    };
    fs::write(&path, format!("{}{}{probe}\n{}", lr(10, 8.0), lr(90, 3.0), lr(110, 5.0))).unwrap();
    let document = taper_report::document("Fixture", &taper_report::load(&[folder.path().into()]).unwrap());
    let charts = document.figures().flat_map(|figure| &figure.panels).map(|panel| &panel.views[0].picture);
    let rate = charts.filter_map(|picture| match picture {
        taper_figures::plot::Picture::Chart(chart) if chart.title == "effective learning rate" => Some(chart),
        _ => None,
    });
    assert_eq!(rate.into_iter().next().unwrap().series[0].points, [(1.0, 3.0 * 1.3 / 1.5)]);
}

#[test]
fn a_task_with_one_run_by_steps_counts_in_steps_throughout() {
    let folder = tempfile::tempdir().unwrap();
    leave_by_steps(folder.path(), &by_steps(1, "{name: adam, lr: 0.001}"), [0.80, 0.85, 0.90]);
    let by_epochs = recipe("mine", 1, "{name: sgd, lr: 0.1}", "");
    leave(folder.path(), &by_epochs, "finished", &[0.70, 0.85, 0.80]);
    let runs = taper_report::load(&[folder.path().to_path_buf()]).unwrap();
    let tasks = taper_report::tasks(&runs.runs);
    let [task] = &tasks[..] else { panic!("{}", tasks.len()) };
    assert_eq!(task.clock(), "step");
    let all = task.groups.iter().flat_map(|group| &group.runs);
    let best: Vec<u64> =
        all.filter_map(|run| taper_report::Choice::BestOnTest.of(run)).map(|(_, at)| at).collect();
    assert_eq!(best.iter().collect::<std::collections::BTreeSet<_>>(), [200, 300].iter().collect());
    // Alone it counts in epochs, as ever.
    let alone: Vec<_> = runs.runs.iter().filter(|run| run.recipe.optimizer.name == "sgd").cloned().collect();
    assert_eq!(taper_report::tasks(&alone)[0].clock(), "epoch");
}

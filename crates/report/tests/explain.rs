//! The rules of `explain` on made-up runs: each has one thing to say, and says it with its numbers.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use taper_report::explain::{self, Explained, Sentence};
use taper_report::{Form, Run};
use taper_train::run::{Figures, PROBE, Sight, Status};
use taper_train::{Recipe, recipe::Unchecked};

fn recipe(optimizer: &str) -> Recipe {
    let text = format!(
        "name: made-up\ndata: {{name: mnist, batch_size: 100}}\nmodel: {{name: mlp, hidden: [100]}}\n\
         optimizer: {optimizer}\ntrain: {{epochs: 3}}\n"
    );
    Recipe::parse("fixture.yaml", &text, &[], &Unchecked).unwrap()
}

/// A run of 30 looks whose figures `of` makes of the place of a look, from 0 to 1.
struct MadeUp {
    /// A function in the place of MNIST.
    problem: Option<&'static str>,
    optimizer: &'static str,
    status: Status,
    all: fn(f64) -> Vec<(&'static str, f64)>,
    layers: fn(&str, f64) -> Vec<(&'static str, f64)>,
}

impl Default for MadeUp {
    fn default() -> Self {
        Self {
            problem: None,
            optimizer: "{name: sgdm, lr: 0.1}",
            status: Status::Finished,
            all: |_| Vec::new(),
            layers: |_, _| Vec::new(),
        }
    }
}

const LOOKS: u64 = 30;

fn figures(values: Vec<(&'static str, f64)>) -> Figures {
    Figures(values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

impl MadeUp {
    fn sights(&self) -> Vec<Sight> {
        let look = |i: u64| {
            let place = i as f64 / (LOOKS - 1) as f64;
            let mut all = BTreeMap::from([("lr".to_owned(), 0.1), ("loss".to_owned(), 2.0 - 1.5 * place)]);
            all.extend(figures((self.all)(place)).0);
            let layer = |name: &str| (name.to_owned(), figures((self.layers)(name, place)));
            let params = ["body.weight", "head.bias"].map(layer).into_iter().filter(|(_, f)| !f.is_empty());
            Sight { step: 10 * (i + 1), epoch: 1, all: Figures(all), params: params.collect() }
        };
        (0..LOOKS).map(look).collect()
    }

    fn run(&self) -> Explained {
        let recipe = match self.problem {
            None => recipe(self.optimizer),
            Some(problem) => {
                let text =
                    format!("problem: {problem}\noptimizer: {}\ntrain: {{steps: 300}}\n", self.optimizer);
                Recipe::parse("fixture.yaml", &text, &[], &Unchecked).unwrap()
            }
        };
        let run = Run {
            folder: "made-up-1".into(),
            recipe_text: recipe.to_yaml(),
            recipe,
            status: self.status,
            reason: (self.status == Status::Diverged).then(|| "the loss is NaN".to_owned()),
            metric: "accuracy".into(),
            records: Vec::new(),
            extent: taper_report::Extent::Whole,
            clock: taper_report::Clock::Epoch,
        };
        Explained::new(run, self.sights())
    }

    /// The sentences of a rule.
    fn says(&self, rule: &str) -> Vec<String> {
        let of = |sentence: Sentence| (sentence.rule == rule).then_some(sentence.text);
        explain::sentences(&self.run()).into_iter().filter_map(of).collect()
    }
}

#[track_caller]
fn assert_says(found: &[String], parts: &[&str]) {
    let [text] = found else { panic!("expected one sentence, found {found:?}") };
    assert!(parts.iter().all(|part| text.contains(part)), "{text}: expected {parts:?}");
}

#[test]
fn the_nearest_optimizer_is_named_with_its_r2_and_its_rate_stage_by_stage() {
    let steady = MadeUp {
        all: |_| vec![("r2/sgdm", 0.99), ("rate/sgdm", 0.1), ("r2/adam", 0.5), ("rate/adam", 0.01)],
        ..MadeUp::default()
    };
    assert_says(
        &steady.says("nearest"),
        &[
            "From step 10 to step 300",
            "close to momentum descent (SGDM)",
            "0.990, 0.990, 0.990",
            "rate of 0.1",
        ],
    );
    let turning = MadeUp {
        all: |at| {
            let adam = if at < 0.5 { 0.8 } else { 0.3 };
            vec![("r2/adam", adam), ("rate/adam", 0.001), ("r2/gd", 0.4), ("rate/gd", 0.2)]
        },
        ..MadeUp::default()
    };
    let said = turning.says("nearest");
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(
        said[0].contains("loosely like Adam: R² 0.800, rate 0.001, nearest in 100 % of the looks"),
        "{said:?}"
    );
    assert!(
        said[2].contains("like no simple optimizer; the nearest is gradient descent: R² 0.400"),
        "{said:?}"
    );
    // A fit that goes uphill is nobody's.
    let uphill = MadeUp {
        all: |_| vec![("r2/gd", 0.9), ("rate/gd", -0.2), ("r2/sign", 0.6), ("rate/sign", 0.1)],
        ..MadeUp::default()
    };
    assert_says(&uphill.says("nearest"), &["descent by the signs of momentum"]);
    assert_eq!(MadeUp::default().says("nearest"), [""; 0]);
}

#[test]
fn decgd_whose_vector_stands_still_is_momentum_with_a_rising_rate() {
    fn still(at: f64) -> Vec<(&'static str, f64)> {
        vec![
            ("r2/sgdm", 0.998),
            ("rate/sgdm", 0.1 * (1.0 + 0.7 * at)),
            ("v_p01", 1.81),
            ("v_p50", 1.82),
            ("v_p99", 1.83),
            ("v_negative", 0.0),
            ("v_error_rms", 0.7 * at),
            ("root", 1.82 - 0.75 * at),
        ]
    }
    let run = MadeUp { optimizer: "{name: decgd, lr: 0.1}", all: still, ..MadeUp::default() };
    let said = run.says("vector");
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].contains("Its vector hardly moved") && said[0].contains("from 1.82 to 1.07"),
        "{}",
        said[0]
    );
    let claim = "The vector hardly moves, so decgd amounts to momentum descent (SGDM) with a rising rate";
    assert!(said[1].contains(claim) && said[1].contains("R² 0.998, 0.998, 0.998"), "{}", said[1]);
    // Whatever a schedule does to the rate itself.
    assert!(said[1].contains("1 times its learning rate at the first look"), "{}", said[1]);
    assert_says(&run.says("rate"), &["rose by a factor of", "while the loss went from 2 to"]);
    // A vector that moves, a fit that is poor, a rate that stays: each takes the claim away or changes it.
    let moving = MadeUp {
        all: |at| [still(at), vec![("v_p50", 1.82 * (1.0 - 0.2 * at)), ("v_negative", 0.01)]].concat(),
        ..run
    };
    let said = moving.says("vector");
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].contains("Its vector moved") && said[1].contains("1 % of its elements were below 0"),
        "{said:?}"
    );
    let lost = MadeUp {
        all: |at| {
            [still(at), vec![("v_p50", if (0.4..0.6).contains(&at) { f64::NAN } else { 1.82 })]].concat()
        },
        ..moving
    };
    assert!(lost.says("vector")[0].contains("Its vector moved"), "{:?}", lost.says("vector"));
    let poor = MadeUp { all: |at| [still(at), vec![("r2/sgdm", 0.9)]].concat(), ..lost };
    assert_eq!(poor.says("vector").len(), 1);
    let one = MadeUp { all: |at| [still(at), vec![("rate/sgdm", 0.1)]].concat(), ..poor };
    assert!(one.says("vector")[1].contains("with one rate"));
    let falling = MadeUp { all: |at| [still(at), vec![("rate/sgdm", 0.1 / (1.0 + at))]].concat(), ..one };
    assert!(falling.says("vector")[1].contains("with a falling rate"));
}

#[test]
fn a_schedule_is_no_change_of_the_effective_rate() {
    let run = MadeUp {
        all: |at| {
            let lr = 0.1 * (1.0 - 0.9 * at);
            vec![("lr", lr), ("rate/sgdm", lr), ("r2/sgdm", 1.0)]
        },
        ..MadeUp::default()
    };
    assert_says(&run.says("rate"), &["stayed as it was (a factor of 1)", "R² 1.000 and 1.000"]);
}

#[test]
fn a_rate_of_momentum_is_told_of_steps_that_are_momentums_alone() {
    // The rate falls to a fifth.
    fn with(r2: f64, at: f64) -> Vec<(&'static str, f64)> {
        vec![("r2/sgdm", r2), ("rate/sgdm", 0.1 - 0.08 * at)]
    }
    let momentum = MadeUp { all: |at| with(0.7, at), ..MadeUp::default() };
    assert_says(&momentum.says("rate"), &["fell by a factor of", "R² 0.700 and 0.700"]);
    // Too poor in the end, at first, or not looked at.
    let refused = |run: &MadeUp, r2: &str| {
        let said = run.says("rate");
        assert_says(&said, &["is not told", "the steps are not", r2, "where 0.7 is asked for"]);
        assert!(!said[0].contains("factor"), "{said:?}");
    };
    let adam = MadeUp { all: |at| with(if at > 0.5 { 0.36 } else { 0.9 }, at), ..MadeUp::default() };
    refused(&adam, "R² 0.900 at the first look, 0.360 in the last stage");
    let late = MadeUp { all: |at| with(if at > 0.01 { 0.9 } else { 0.5 }, at), ..MadeUp::default() };
    refused(&late, "R² 0.500 at the first look, 0.900 in the last stage");
    refused(&MadeUp { all: |_| vec![("rate/sgdm", 0.1)], ..MadeUp::default() }, "R² not looked at");
}

#[test]
fn the_rate_of_momentum_is_compared_where_the_steps_of_both_are_momentums() {
    let said = |r2: fn(f64) -> Vec<(&'static str, f64)>| {
        let a = MadeUp { all: r2, ..MadeUp::default() };
        let b = MadeUp { all: |_| vec![("r2/sgdm", 0.9), ("rate/sgdm", 10.0)], ..MadeUp::default() };
        [(&a, &b), (&b, &a)].map(|(a, b)| {
            let said = explain::differences(&a.run(), &b.run()).into_iter().map(|s| s.text);
            said.collect::<Vec<_>>().join("\n").contains("the rate of momentum descent is")
        })
    };
    assert_eq!(said(|_| vec![("r2/sgdm", 0.7), ("rate/sgdm", 0.1)]), [true; 2]);
    assert_eq!(said(|_| vec![("r2/sgdm", 0.69), ("rate/sgdm", 0.1)]), [false; 2]);
    assert_eq!(said(|_| vec![("rate/sgdm", 0.1)]), [false; 2]);
}

#[test]
fn a_rate_is_held_against_a_look_at_which_the_moments_have_settled() {
    // A mean that is divided by 1 - 0.9ᵗ: a first step of ten times what it comes to, and nothing else that moves.
    fn corrected(at: f64) -> Vec<(&'static str, f64)> {
        let step = if at == 0.0 { 1.0 } else { 10.0 * (29.0 * at + 1.0) };
        vec![("r2/sgdm", 0.9), ("momentum", 0.9), ("rate/sgdm", 0.1 / (1.0 - 0.9f64.powf(step)))]
    }
    let adam = MadeUp { optimizer: "{name: adam, lr: 0.1, beta1: 0.9}", all: corrected, ..MadeUp::default() };
    // 0.9²³ is the first below 1 - 1/1.1; looks are at every tenth step.
    assert_says(&adam.says("rate"), &["at step 30", "stayed as it was"]);
    let inside = MadeUp { optimizer: "{name: lookahead, inner: {name: adam, lr: 0.1, beta1: 0.9}}", ..adam };
    assert_says(&inside.says("rate"), &["at step 30", "stayed as it was"]);
    // Momentum that is a sum needs no such time: what changes at once is told.
    let sum = MadeUp { optimizer: "{name: decgd, lr: 0.1, momentum: 0.9}", ..inside };
    assert_says(&sum.says("rate"), &["at the first look", "fell by a factor of 10"]);
    // A schedule that begins at 0 has no rate there.
    let warm =
        MadeUp { all: |at| [corrected(at), vec![("lr", at), ("rate/sgdm", 2.0 * at)]].concat(), ..sum };
    assert_says(&warm.says("rate"), &["at step 20", "stayed as it was (a factor of 1)"]);
}

#[test]
fn layers_that_learn_at_different_speeds_are_named() {
    let run = MadeUp {
        layers: |name, _| vec![("update_ratio", if name == "head.bias" { 0.05 } else { 0.001 })],
        ..MadeUp::default()
    };
    assert_says(
        &run.says("layers"),
        &["different speeds", "changes head.bias by 0.05", "body.weight by 0.001", "of 50"],
    );
    let alike = MadeUp {
        layers: |name, _| vec![("update_ratio", if name == "head.bias" { 0.002 } else { 0.001 })],
        ..run
    };
    assert_says(&alike.says("layers"), &["similar speeds", "0.001 (body.weight) to 0.002 (head.bias)"]);
}

#[test]
fn what_to_try_next_follows_from_alpha_and_the_stability_ratio() {
    fn with(alpha: f64, stability: f64) -> Vec<(&'static str, f64)> {
        let momentum = [("r2/sgdm", 0.99), ("stability", stability), ("sharpness", 4.0)];
        [vec![("alpha", alpha), ("curvature", 1.0)], momentum.to_vec()].concat()
    }
    let small = MadeUp { all: |_| with(-0.8, 0.1), ..MadeUp::default() };
    assert_says(&small.says("alpha"), &["end well before the minimum", "α is -0.8", "0 % of the looks"]);
    assert_says(&small.says("stability"), &["far from unstable", "0.1 of the threshold", "sharpness of 4"]);
    // The parabola asks for five times the rate, stability allows for ten.
    assert_says(
        &small.says("next"),
        &[
            "larger than the recipe's 0.1: about 5 times it, 0.5",
            "α -0.8, stability ratio 0.1, at steps 210 to 300",
        ],
    );
    let large = MadeUp { all: |_| with(1.0, 1.6), ..MadeUp::default() };
    assert_says(&large.says("alpha"), &["go well beyond the minimum"]);
    assert_says(&large.says("stability"), &["above the threshold of stability"]);
    assert_says(&large.says("next"), &["smaller than the recipe's 0.1: about 0.5 times it, 0.05"]);
    let right = MadeUp { all: |_| with(0.1, 0.9), ..MadeUp::default() };
    assert_says(&right.says("alpha"), &["end near the minimum"]);
    assert_says(&right.says("stability"), &["at the edge of stability"]);
    assert_says(&right.says("next"), &["The learning rate, the recipe's 0.1, is about right"]);
    // Short steps that are not far from unstable are no reason for a larger rate.
    let torn = MadeUp { all: |_| with(-0.8, 0.7), ..MadeUp::default() };
    assert_says(&torn.says("next"), &["about right"]);
    let unseen = MadeUp::default();
    assert_says(&unseen.says("next"), &["was not looked at", "what: [all]"]);
    let flat = MadeUp { all: |_| vec![("curvature", -1.0)], ..MadeUp::default() };
    assert_says(&flat.says("alpha"), &["100 % of the looks had no minimum ahead"]);
}

#[test]
fn advice_under_a_schedule_is_on_the_recipes_rate_and_goes_by_where_it_was_largest() {
    // A rate that falls to nothing: at its end every step is short, whatever the recipe's rate.
    fn falling(at: f64) -> Vec<(&'static str, f64)> {
        let lr = 0.1 * (1.0 - 0.99 * at);
        let ratio = [("r2/sgdm", 1.0), ("stability", 9.0 * lr), ("sharpness", 4.0)];
        [vec![("lr", lr), ("alpha", if at < 0.34 { 0.1 } else { -0.95 }), ("curvature", 1.0)], ratio.to_vec()]
            .concat()
    }
    let run = MadeUp { all: falling, ..MadeUp::default() };
    assert_says(&run.says("next"), &["the recipe's 0.1, is about right", "α 0.1", "at steps 10 to 100"]);
    let small = MadeUp {
        all: |at| [falling(at), vec![("alpha", -0.6), ("stability", 0.1)]].concat(),
        ..MadeUp::default()
    };
    assert_says(&small.says("next"), &["larger than the recipe's 0.1: about 2.5 times it, 0.25"]);
    // An optimizer around another has its rate inside.
    let around = MadeUp { optimizer: "{name: lookahead, inner: {name: sgdm, lr: 0.2}}", ..small };
    assert_says(&around.says("next"), &["larger than the recipe's 0.2: about 2.5 times it, 0.5"]);
}

#[test]
fn a_stability_ratio_of_steps_that_are_not_momentums_is_not_used() {
    fn with(r2: f64) -> Vec<(&'static str, f64)> {
        vec![("r2/sgdm", r2), ("stability", 3.0), ("sharpness", 4.0)]
    }
    let momentum = MadeUp { all: |_| with(0.7), ..MadeUp::default() };
    assert_says(&momentum.says("stability"), &["above the threshold of stability"]);
    assert_says(&momentum.says("next"), &["smaller than", "0.333 times it"]);
    let adam = MadeUp { all: |_| with(0.36), ..MadeUp::default() };
    assert_says(
        &adam.says("stability"),
        &["sharpness is 4", "is not used", "R² 0.360, where 0.7 is asked for"],
    );
    assert_says(
        &adam.says("next"),
        &["cannot be told", "the steps are not those of momentum descent (R² 0.360)"],
    );
    // α is left to go by.
    let landed = MadeUp {
        all: |_| [with(0.36), vec![("alpha", -0.8), ("curvature", 1.0)]].concat(),
        ..MadeUp::default()
    };
    assert_says(&landed.says("next"), &["about 5 times it", "α -0.8, the stability ratio is not used"]);
    let unknown = MadeUp { all: |_| vec![("stability", 3.0), ("sharpness", 4.0)], ..MadeUp::default() };
    assert_says(&unknown.says("stability"), &["is not used", "R² not looked at"]);
    let page = explain::document(&[adam.run()]);
    let text = String::from_utf8(page.render(Form::Markdown).unwrap()).unwrap();
    assert!(text.contains("it fits poorly (R² 0.360)"), "{text}");
    // Of a pair it is compared where both are momentum's, and it is no sign of instability elsewhere.
    let other = MadeUp { all: |_| [with(0.9), vec![("stability", 0.3)]].concat(), ..MadeUp::default() };
    let said = |a: &MadeUp, b: &MadeUp| {
        let said = explain::differences(&a.run(), &b.run()).into_iter().map(|s| s.text);
        said.collect::<Vec<_>>().join("\n")
    };
    assert!(said(&momentum, &other).contains("the stability ratio is 3"), "{}", said(&momentum, &other));
    assert!(!said(&adam, &other).contains("the stability ratio"), "{}", said(&adam, &other));
    let jumps = MadeUp {
        all: |at| [with(0.36), vec![("loss", if at > 0.68 { 9.0 } else { 2.0 })]].concat(),
        ..MadeUp::default()
    };
    assert_says(&jumps.says("unstable"), &["Nothing else that was looked at moved before"]);
}

#[test]
fn noise_is_the_quotient_of_means_wherever_it_stands() {
    // One look in two sees a gradient of 8 and noise of 100, the other no gradient and noise of 300: means of 200 and 4.
    fn turns(at: f64) -> Vec<(&'static str, f64)> {
        let even = ((at * 29.0).round() as u64).is_multiple_of(2);
        let (trace, square) = if even { (100.0, 8.0) } else { (300.0, 0.0) };
        let snr = [("snr", 100.0 * square / trace), ("noise_scale", trace / square)];
        [vec![("noise_trace", trace), ("grad_square", square)], snr.to_vec()].concat()
    }
    let run = MadeUp { all: turns, layers: |_, at| turns(at), ..MadeUp::default() };
    assert_says(&run.says("noise"), &["the noise scale is 50 samples"]);
    let page = explain::document(&[run.run()]);
    let text = String::from_utf8(page.render(Form::Markdown).unwrap()).unwrap();
    let row = |of: &str| text.lines().find(|line| line.starts_with(of)).unwrap().to_owned();
    // Of the layer 50 too, of the stage a signal of twice the noise: 4 · 100 / 200.
    assert!(row("| body.weight").trim_end().ends_with("50 |"), "{text}");
    let landing =
        text.lines().filter(|line| line.starts_with("| 210–300")).find(|line| line.contains(" 50 |"));
    assert!(landing.is_some_and(|line| line.trim_end().ends_with(" 2 |")), "{text}");
    let csv = String::from_utf8(page.render(Form::Csv).unwrap()).unwrap();
    assert!(csv.contains("noise_scale,50\n") && csv.contains("snr,2\n"), "{csv}");
    // Halves that show no signal are no reason for a larger rate.
    let blind = MadeUp {
        all: |_| vec![("noise_trace", 9.0), ("grad_square", -1.0), ("alpha", -0.9), ("curvature", 1.0)],
        ..MadeUp::default()
    };
    assert_says(&blind.says("next"), &["about right", "noise leaves 0"]);
}

#[test]
fn noise_is_held_against_the_batch() {
    fn with(trace: f64, stop: f64) -> Vec<(&'static str, f64)> {
        vec![("noise_trace", trace), ("grad_square", 2.0), ("early_stop", stop)]
    }
    let noisy = MadeUp { all: |_| with(4000.0, 0.2), ..MadeUp::default() };
    assert_says(&noisy.says("noise"), &["2000 samples, the batch has 100", "a larger batch"]);
    assert_says(&noisy.says("early-stop"), &["is 0.2", "nothing more is learnt"]);
    let clear = MadeUp { all: |_| with(10.0, -3.0), ..MadeUp::default() };
    assert_says(&clear.says("noise"), &["is 5 samples", "a smaller batch would do"]);
    assert_says(&clear.says("early-stop"), &["is -3", "there is more to learn"]);
    let even = MadeUp { all: |_| with(300.0, -3.0), ..MadeUp::default() };
    assert_says(&even.says("noise"), &["of the order that it can use"]);
}

#[test]
fn the_first_sign_of_instability_is_found_with_its_step_and_its_layer() {
    let calm = MadeUp::default();
    assert_says(&calm.says("unstable"), &["never became unstable", "30 looks", "never above that median"]);
    // A rise of a fifth of the first loss over the median of five is none, and is told.
    let restless =
        MadeUp { all: |at| vec![("loss", if at > 0.99 { 2.4 } else { 2.0 })], ..MadeUp::default() };
    assert_says(
        &restless.says("unstable"),
        &["never became unstable", "The most was 0.4 at step 300, 20 %."],
    );
    // The loss jumps at the look at 0.69 (step 210), the head's updates grow two looks before.
    fn head(name: &str, at: f64) -> Vec<(&'static str, f64)> {
        let grows = if name == "head.bias" && at > 0.6 { 8.0 } else { 1.0 };
        vec![("update_ratio", 0.01 * grows), ("grad_norm", 1.0)]
    }
    fn jumps(at: f64) -> Vec<(&'static str, f64)> {
        if at > 0.68 { vec![("loss", 4.0)] } else { Vec::new() }
    }
    let run = MadeUp { all: jumps, layers: head, ..MadeUp::default() };
    assert_says(
        &run.says("unstable"),
        &[
            "became unstable at step 210",
            "to 4.",
            "the update-to-weight ratio of head.bias, at step 190: from 0.01 to 0.08",
        ],
    );
    assert_says(&run.says("next"), &["smaller than the recipe's 0.1", "the run became unstable"]);
    let found = explain::instability(&run.run()).unwrap();
    assert_eq!((found.step, found.first.unwrap().step), (210, 190));
    // A threshold that is crossed before is the first sign.
    let crossed = MadeUp {
        all: |at| {
            let ratio = if at > 0.55 { 1.5 } else { 0.5 };
            [jumps(at), vec![("r2/sgdm", 0.99), ("stability", ratio)]].concat()
        },
        ..run
    };
    assert_says(&crossed.says("unstable"), &["the stability ratio, at step 170: from 1 to 1.5"]);
    let alone = MadeUp { layers: |_, _| Vec::new(), all: jumps, ..crossed };
    assert_says(&alone.says("unstable"), &["Nothing else that was looked at moved before"]);
    let diverged = MadeUp { all: |_| Vec::new(), status: Status::Diverged, ..alone };
    assert_says(&diverged.says("unstable"), &["at step 300", "It diverged", "the loss is NaN"]);
    // A loss that is no number has jumped.
    let none = MadeUp {
        all: |at| if at > 0.9 { vec![("loss", f64::NAN)] } else { Vec::new() },
        status: Status::Finished,
        ..diverged
    };
    assert!(none.says("unstable")[0].contains("became unstable at step 280"));
}

#[test]
fn a_threshold_that_was_passed_long_before_is_told_with_its_step() {
    fn jumps(at: f64) -> Vec<(&'static str, f64)> {
        let mut all = vec![("r2/sgdm", 0.99)];
        all.extend((at > 0.68).then_some(("loss", 4.0)));
        all
    }
    // Above it from the first look on; from the sixth on, fifteen before the jump.
    let always = MadeUp { all: |at| [jumps(at), vec![("stability", 1.4)]].concat(), ..MadeUp::default() };
    assert_says(
        &always.says("unstable"),
        &[
            "at step 210",
            "By then the stability ratio had been above 1 since step 10.",
            "Nothing else that was looked at moved",
        ],
    );
    let long = MadeUp {
        all: |at| [jumps(at), vec![("stability", if at > 0.16 { 1.4 } else { 0.9 })]].concat(),
        ..MadeUp::default()
    };
    assert_says(&long.says("unstable"), &["By then the stability ratio had been above 1 since step 60."]);
    let found = explain::instability(&long.run()).unwrap();
    assert_eq!((found.already[0].step, found.already[0].always, found.first), (60, true, None));
    // What moves in the last looks is told beside it.
    let both = MadeUp { layers: |_, at| vec![("update_ratio", if at > 0.6 { 0.08 } else { 0.01 })], ..long };
    assert_says(&both.says("unstable"), &["above 1 since step 60. First to move was", "at step 190"]);
    // On and off.
    let flickers = MadeUp {
        all: |at| {
            let even = ((at * 29.0).round() as u64).is_multiple_of(2);
            [jumps(at), vec![("alpha", if even { 1.5 } else { 0.5 }), ("curvature", 1.0)]].concat()
        },
        ..MadeUp::default()
    };
    assert_says(&flickers.says("unstable"), &["By then α had gone above 1 at step 10, and again since."]);
    // Below it for a while, and above it within the last looks: that is the first sign, and the old one is none.
    let again = MadeUp {
        all: |at| {
            let ratio = if (0.2..=0.55).contains(&at) { 0.5 } else { 1.5 };
            [jumps(at), vec![("stability", ratio)]].concat()
        },
        ..MadeUp::default()
    };
    assert_says(&again.says("unstable"), &["First to move was the stability ratio, at step 170"]);
    assert_eq!(explain::instability(&again.run()).unwrap().already, []);
}

#[test]
fn a_function_that_gives_back_half_of_what_was_gained_has_become_unstable() {
    // 5375 to 1e-5 in twenty looks, then 1000: less than a quarter of the first value.
    fn back(at: f64) -> Vec<(&'static str, f64)> {
        let fallen = 5375.0 * 10f64.powf(-8.73 * (at / 0.66).min(1.0));
        vec![("loss", if at > 0.68 { 1000.0 } else { fallen })]
    }
    let run = MadeUp { problem: Some("{name: powell}"), all: back, ..MadeUp::default() };
    assert_says(&run.says("unstable"), &["became unstable at step 210", "to 1000."]);
    // A zigzag near the minimum is none, nor a slow way down.
    let zigzag = MadeUp {
        all: |at| {
            let fallen = 5375.0 * 10f64.powf(-20.0 * at);
            let even = ((at * 29.0).round() as u64).is_multiple_of(5);
            vec![("loss", if even && at > 0.5 { 300.0 * fallen } else { fallen })]
        },
        ..run
    };
    assert_says(&zigzag.says("unstable"), &["never became unstable"]);
    // A function that is another at every step, and a network, jump by themselves: 0.01 to 0.2 is a batch.
    let restless = MadeUp { problem: Some("{name: targets}"), all: back, ..MadeUp::default() };
    assert_says(&restless.says("unstable"), &["never became unstable"]);
    let network = MadeUp {
        all: |at| {
            let even = ((at * 29.0).round() as u64).is_multiple_of(5);
            vec![(
                "loss",
                if at < 0.2 {
                    2.3
                } else if even {
                    0.2
                } else {
                    0.01
                },
            )]
        },
        ..MadeUp::default()
    };
    assert_says(&network.says("unstable"), &["never became unstable"]);
}

#[test]
fn a_pair_is_told_apart_by_what_differs() {
    let a = MadeUp {
        all: |_| vec![("r2/sgdm", 0.99), ("rate/sgdm", 0.1), ("update_ratio", 0.001)],
        ..MadeUp::default()
    };
    let b = MadeUp {
        optimizer: "{name: adam, lr: 0.001}",
        all: |_| vec![("r2/adam", 1.0), ("rate/adam", 0.001), ("rate/sgdm", 0.11), ("update_ratio", 0.004)],
        ..MadeUp::default()
    };
    let said: Vec<String> = explain::differences(&a.run(), &b.run()).into_iter().map(|s| s.text).collect();
    let said = said.join("\n");
    for part in [
        "sgdm 0.1 was nearest to momentum descent (SGDM) (R² 0.990, rate 0.1), adam 0.001 to Adam (R² 1.000, rate 0.001)",
        "the update-to-weight ratio is 0.001 for sgdm 0.1 and 0.004 for adam 0.001, a factor of 4",
        "Neither became unstable",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert!(!said.contains("the rate of momentum descent is"), "{said}");
    let page = explain::document(&[a.run(), b.run()]);
    assert_eq!(page.title, "sgdm 0.1 and adam 0.001, explained");
    let text = String::from_utf8(page.render(Form::Markdown).unwrap()).unwrap();
    assert!(text.contains("optimizer.name") && text.contains("What differed"), "{text}");
}

/// Leaves a run's folder as training would.
fn leave(runs: &Path, made_up: &MadeUp) -> PathBuf {
    let recipe = recipe(made_up.optimizer);
    let folder = runs.join(recipe.directory());
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("recipe.yaml"), recipe.to_yaml()).unwrap();
    fs::write(folder.join("metrics.jsonl"), "").unwrap();
    let lines = made_up.sights().into_iter().map(|sight| serde_json::to_string(&sight).unwrap() + "\n");
    fs::write(folder.join(PROBE), lines.collect::<String>()).unwrap();
    folder
}

#[test]
fn a_page_has_every_form_and_the_numbers_of_its_sentences() {
    let runs = tempfile::tempdir().unwrap();
    let made_up = MadeUp {
        all: |at| vec![("r2/sgdm", 0.99), ("rate/sgdm", 0.1 + at), ("alpha", 0.2), ("curvature", 1.0)],
        layers: |_, at| vec![("update_ratio", 0.01 + at), ("r2/gd", 0.7), ("rate/gd", 0.3)],
        ..MadeUp::default()
    };
    let folder = leave(runs.path(), &made_up);
    let mut problems = Vec::new();
    let page = explain::document(&explain::load(&[folder], &mut problems).unwrap());
    let render = |form| String::from_utf8(page.render(form).unwrap()).unwrap();
    let (html, text) = (render(Form::Html), render(Form::Markdown));
    assert!(html.contains("<svg") && html.contains("Layer by layer"), "{html}");
    for number in ["0.990", "body.weight", "| 10–100", "(rule: nearest)", "(rule: next)"] {
        assert!(text.contains(number), "{number}: {text}");
    }
    assert!(render(Form::Csv).contains("alpha,0.2"));
    assert!(render(Form::Svg).starts_with("<svg"));
    let terminal = page.terminal();
    assert!(terminal.contains('⠉') || terminal.contains('⠤') || terminal.contains('⡠'), "{terminal}");
    assert_eq!(render(Form::Html), html, "equal runs are equal pages");
}

#[test]
fn a_run_that_nobody_looked_at_says_how_to_look() {
    let runs = tempfile::tempdir().unwrap();
    let folder = leave(runs.path(), &MadeUp::default());
    fs::remove_file(folder.join(PROBE)).unwrap();
    let load = |folder: &Path| explain::load(&[folder.to_path_buf()], &mut Vec::new());
    let error = load(&folder).unwrap_err().to_string();
    assert!(
        error.contains("--set train.probe='{every: 10, what: [all]}'") && error.contains("--fresh"),
        "{error}"
    );
    let error = load(&runs.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("no run in"), "{error}");
    // Lines that cannot be read are left out, and told.
    let folder = leave(runs.path(), &MadeUp::default());
    let mut text = fs::read_to_string(folder.join(PROBE)).unwrap();
    text.push_str("{\"step\": true}\n");
    fs::write(folder.join(PROBE), text).unwrap();
    let mut problems = Vec::new();
    let runs = explain::load(&[folder], &mut problems).unwrap();
    assert_eq!(runs[0].sights.len() as u64, LOOKS);
    assert!(problems.iter().any(|problem| problem.contains("probe.jsonl, line 31")), "{problems:?}");
}

#[test]
fn runs_of_few_looks_and_of_hostile_names_are_pages_too() {
    let mut run = MadeUp::default().run();
    for looks in [1, 2] {
        run.sights = MadeUp::default().sights().into_iter().take(looks).collect();
        let hostile = Figures(BTreeMap::from([("update_ratio".to_owned(), 0.1)]));
        run.sights[0].params.insert("<script>alert(1)</script>|".to_owned(), hostile);
        let page = explain::document(std::slice::from_ref(&run));
        let html = String::from_utf8(page.render(Form::Html).unwrap()).unwrap();
        assert!(!html.contains("<script>alert"), "{looks}");
        page.terminal();
    }
}

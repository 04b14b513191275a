//! The optimizers of a run: one, or several that share the parameters between them.
use super::divide::Division;
use super::{RunError, metrics, ranks};
use crate::recipe::{Average, Freeze, Map, NoDecay, Recipe};
use crate::{Registries, Schedules};
use candle_core::Var;
use candle_core::backprop::GradStore;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use taper_optim::rule::Reach;
use taper_optim::{
    Deferred, Domain, Evaluated, Group, Named, Optimizer, Per, PlateauState, StateDict, StepContext,
};
use taper_world::World;

/// Which parameters have no decay by the recipe's `no_decay`, from shapes and not from what a model calls its layers: a bias
/// is a vector whose name says so, a layer whose `weight` is a vector is a norm.
fn undecayed<'a>(kinds: &[NoDecay], params: &'a [(String, Var)]) -> impl Fn(&str) -> bool + use<'a> {
    let (bias, norm) = (kinds.contains(&NoDecay::Bias), kinds.contains(&NoDecay::Norm));
    let vectors: BTreeSet<&str> =
        params.iter().filter(|(_, var)| var.rank() <= 1).map(|(name, _)| name.as_str()).collect();
    move |name| {
        let (layer, last) = name.rsplit_once('.').unwrap_or(("", name));
        let weight = if layer.is_empty() { "weight".to_owned() } else { format!("{layer}.weight") };
        let is_bias = last.starts_with("bias");
        let is_norm = !is_bias || vectors.contains(weight.as_str());
        vectors.contains(name) && (bias && is_bias || norm && is_norm)
    }
}

/// The loss and gradient of the step's batch once more, with the parameters as they are.
pub(crate) type Again<'a> = &'a mut dyn FnMut() -> taper_optim::Result<Evaluated>;

/// The optimizers with their schedules.
pub(crate) struct Optimizers {
    /// The first is the recipe's; others belong to groups that name one of their own.
    all: Vec<Member>,
    /// The variables they train.
    pub vars: Vec<Var>,
    /// Those of them that are trained at first only.
    pub held: Held,
    /// What takes the place of the first when the run switches to averaged SGD.
    averaged: Option<Member>,
    schedules: Schedules,
    /// What they are projected onto after a step.
    domain: Option<Domain>,
    /// What is subtracted from the loss that they see.
    shift: f64,
}

/// One of them.
struct Member {
    optimizer: Box<dyn Optimizer>,
    /// Who steps which part of its parameters, where that is not each process all of them.
    division: Option<Division>,
    /// Whether weights for evaluation are in place.
    away: bool,
}

impl Member {
    /// An optimizer over parameters, or over this process's part of them where the recipe divides its state.
    fn build(
        recipe: &Recipe,
        world: &World,
        named: Named<'_>,
        params: Vec<(String, Var)>,
        (hyper, groups): (&Map, &[Group]),
        refuse: impl Fn(taper_optim::Error) -> RunError,
    ) -> Result<Self, RunError> {
        let reach = named.reach(hyper).map_err(&refuse)?;
        if recipe.train.shard_state && reach == Reach::All {
            let message = format!(
                "{} looks at all parameters at once: its state cannot be divided, leave `train.shard_state` out",
                named.info.name
            );
            return Err(recipe.error_at("train.shard_state", message).into());
        }
        if !recipe.train.shard_state || world.is_alone() {
            return Ok(Self {
                optimizer: named.build(params, hyper, groups).map_err(refuse)?,
                division: None,
                away: false,
            });
        }
        // A probe looks at whole parameters.
        let division = Division::new(params, reach, recipe.train.probe.statistics(), world)?;
        let mut optimizer = named.build(division.own(), hyper, groups).map_err(&refuse)?;
        if reach == Reach::Sums {
            optimizer.share_sums(division.others()).map_err(refuse)?;
        }
        Ok(Self { optimizer, division: Some(division), away: false })
    }

    fn step(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        deferred: &Deferred,
    ) -> Result<(), RunError> {
        let Some(division) = &self.division else {
            return Ok(self.optimizer.step_deferred(grads, context, deferred)?);
        };
        division.refresh()?;
        let stepped = self.optimizer.step_deferred(&division.gradients(grads)?, context, deferred);
        stepped.map_err(|e| division.reason(e))?;
        division.spread()
    }

    /// Puts weights for evaluation into the parameters, if it has others than it trains. True if so.
    fn eval_weights(&mut self) -> Result<bool, RunError> {
        if let Some(division) = &self.division {
            division.refresh()?;
        }
        self.away = self.optimizer.eval_weights()?;
        self.division.iter().filter(|_| self.away).try_for_each(Division::spread)?;
        Ok(self.away)
    }

    /// Puts the weights that are trained back.
    fn train_weights(&mut self) -> Result<(), RunError> {
        self.optimizer.train_weights()?;
        let was_away = std::mem::take(&mut self.away);
        self.division.iter().filter(|_| was_away).try_for_each(Division::spread)
    }
}

/// Variables with the steps after which they are no longer trained.
#[derive(Clone, Default)]
pub(crate) struct Held(Vec<(u64, Var)>);

impl Held {
    /// Forgets the gradients of what is no longer trained after `taken` steps: an optimizer leaves alone what has none, its state
    /// too.
    pub fn remove_from(&self, grads: &mut GradStore, taken: u64) {
        for (_, var) in self.0.iter().filter(|(after, _)| taken >= *after) {
            grads.remove(var);
        }
    }
}

impl Optimizers {
    pub fn new(
        recipe: &Recipe,
        registries: &Registries,
        params: Vec<(String, Var)>,
        world: &World,
    ) -> Result<Self, RunError> {
        let section = &recipe.optimizer;
        // The recipe's check has compiled them all.
        let pattern = |text: &str| Group::new(text).pattern().map_err(RunError::from);
        let mut params = params;
        let mut held = Held::default();
        for (i, freeze) in recipe.train.freeze.iter().enumerate() {
            let (text, key) = (freeze.pattern(), format!("train.freeze[{i}]"));
            let pattern = pattern(text)?;
            let (matched, rest): (Vec<_>, Vec<_>) =
                params.into_iter().partition(|(name, var)| pattern.is_match(name, var.rank()));
            params = rest;
            if matched.is_empty() {
                let message = format!("`{text}` matches no parameter that is still trained");
                return Err(recipe.error_at(&key, message).into());
            }
            if let Freeze::Later(later) = freeze {
                held.0.extend(matched.iter().map(|(_, var)| (later.after_steps, var.clone())));
                params.extend(matched);
                params.sort_by(|(a, _), (b, _)| a.cmp(b));
            }
        }
        let vars = params.iter().map(|(_, var)| var.clone()).collect();

        let mut all: Vec<Member> = Vec::new();
        let mut groups = Vec::new();
        for (i, group) in section.groups.iter().enumerate() {
            let key = format!("optimizer.groups[{i}].match");
            let Some(name) = &group.name else {
                let mut overrides = group.hyper.clone();
                overrides.extend(group.lr_scale.map(|scale| ("lr".into(), (section.lr * scale).into())));
                groups.push(Group { pattern: group.pattern.clone(), overrides });
                continue;
            };
            let pattern = pattern(&group.pattern)?;
            let (own, rest): (Vec<_>, Vec<_>) =
                params.into_iter().partition(|(n, var)| pattern.is_match(n, var.rank()));
            params = rest;
            if own.is_empty() {
                let message = format!("`{}` matches no parameter", group.pattern);
                return Err(recipe.error_at(&key, message).into());
            }
            let refuse = |e: taper_optim::Error| recipe.error_at(&key, e.to_string()).into();
            let named = registries.optimizers.get(name).map_err(refuse)?;
            all.push(Member::build(recipe, world, named, own, (&group.hyper, &[]), refuse)?);
        }
        if !section.no_decay.is_empty() {
            // Only what no other group claims, and only if it is there: an MLP has no norm layers.
            let taken = groups.iter().map(Group::pattern).collect::<Result<Vec<_>, _>>()?;
            let wanted = undecayed(&section.no_decay, &params);
            let free = |(name, var): &&(String, Var)| {
                wanted(name) && !taken.iter().any(|t| t.is_match(name, var.rank()))
            };
            let names: Vec<String> = params.iter().filter(free).map(|(n, _)| regex::escape(n)).collect();
            if !names.is_empty() {
                let pattern = format!("/^({})$/", names.join("|"));
                groups.push(Group {
                    pattern,
                    overrides: Map::from_iter([("weight_decay".into(), 0.0.into())]),
                });
            }
        }
        let mut hyper = section.hyper.clone();
        if registries.optimizers.get(&section.name)?.defaults.contains_key("lr") {
            hyper.insert("lr".into(), section.lr.into());
        }
        let entry = registries.optimizers.get(&section.name)?;
        let build = |params: Vec<(String, Var)>, hyper: &Map, groups: &[Group]| {
            Member::build(recipe, world, entry, params, (hyper, groups), |e| locate(recipe, e))
        };
        let averaged = match &recipe.train.average {
            Average::Asgd { lambd, .. } => {
                if section.name != "sgd" || !all.is_empty() {
                    let message = "averaged SGD goes on from plain SGD: give `optimizer: {name: sgd}` for all parameters";
                    return Err(recipe.error_at("train.average.kind", message).into());
                }
                // x - e(g + wx) - λex: λ is one more weight decay.
                let more = |overrides: &Map, otherwise: f64| {
                    let decay =
                        overrides.get("weight_decay").and_then(Value::as_f64).unwrap_or(otherwise) + lambd;
                    let mut overrides = overrides.clone();
                    overrides.insert("weight_decay".into(), decay.into());
                    overrides
                };
                let decay = hyper.get("weight_decay").and_then(Value::as_f64).unwrap_or(0.0);
                let groups: Vec<Group> = groups
                    .iter()
                    .map(|g| Group { pattern: g.pattern.clone(), overrides: more(&g.overrides, decay) })
                    .collect();
                Some(build(params.clone(), &more(&hyper, 0.0), &groups)?)
            }
            _ => None,
        };
        all.insert(0, build(params, &hyper, &groups)?);

        let schedule = &recipe.schedule;
        let schedules =
            Schedules::new(&schedule.kind, &schedule.config).map_err(|e| recipe.refused("schedule", e))?;
        if schedules.momentum.is_some() && momentum(&*all[0].optimizer).is_none_or(|momentum| momentum == 0.0)
        {
            let message = format!("{} has no momentum to schedule", section.name);
            return Err(recipe.error_at("schedule.momentum", message).into());
        }
        if recipe.train.average != Average::None {
            let mut own = false;
            for Member { optimizer, .. } in &mut all {
                own |= optimizer.eval_weights()?;
                optimizer.train_weights()?;
            }
            if own {
                let message = format!(
                    "{} has weights of its own for evaluation, which another average would not see: leave `train.average` out",
                    section.name
                );
                return Err(recipe.error_at("train.average.kind", message).into());
            }
        }
        let domain = match recipe.problem.as_ref().and_then(|problem| problem.domain) {
            Some(domain) => Some(domain.set().map_err(|message| recipe.error_at("problem.domain", message))?),
            None => None,
        };
        Ok(Self { all, vars, held, averaged, schedules, domain, shift: recipe.train.loss_shift })
    }

    /// How many gradients a step takes.
    pub fn gradients(&self) -> usize {
        self.all.iter().map(|member| member.optimizer.gradients()).max().unwrap_or(1)
    }

    /// Puts weights for evaluation into the parameters of optimizers that have such. True if there is one.
    pub fn eval_weights(&mut self) -> Result<bool, RunError> {
        let mut any = false;
        for member in &mut self.all {
            any |= member.eval_weights()?;
        }
        Ok(any)
    }

    /// Puts the weights that are trained back.
    pub fn train_weights(&mut self) -> Result<(), RunError> {
        self.all.iter_mut().try_for_each(Member::train_weights)
    }

    /// Forgets the gradients of what is no longer trained after `taken` steps.
    pub fn hold(&self, grads: &mut GradStore, taken: u64) {
        self.held.remove_from(grads, taken);
    }

    /// The base learning rate of the recipe's optimizer.
    pub fn lr(&self) -> f64 {
        self.main().lr()
    }

    /// The schedule's factor of all rates at a time of the run.
    pub fn factor(&self, time: &Time) -> f64 {
        let (t, total) = time.at(self.schedules.per);
        self.schedules.rate.factor(t, total)
    }

    /// A step's context with the loss that optimizers get: less what the recipe takes off it.
    pub fn shifted(&self, context: StepContext) -> StepContext {
        StepContext { loss: context.loss.map(|loss| loss - self.shift), ..context }
    }

    /// One step of all optimizers at `factor` times their base rates. When the first refuses, nothing has changed.
    ///
    /// Those that look at a second point by `again` come first, while the parameters of the others are where their gradients
    /// were taken. They clip both gradients by the norms of their own.
    pub fn step(
        &mut self,
        grads: &GradStore,
        (context, deferred): (StepContext, &Deferred),
        time: &Time,
        factor: f64,
        again: (Option<f64>, Again<'_>),
    ) -> Result<(), RunError> {
        let context = match &self.schedules.momentum {
            Some(schedule) => {
                let (t, total) = time.at(self.schedules.per);
                context.momentum_factor(schedule.factor(t, total))
            }
            _ => context,
        };
        let context = self.shifted(context.factor(factor));
        let shift = self.shift;
        let shifted = match &deferred.loss {
            Some(loss) if shift != 0.0 => Some(deferred.clone().loss(&(loss - shift)?)),
            _ => None,
        };
        let deferred = shifted.as_ref().unwrap_or(deferred);
        let (clip_norm, again) = again;
        let mut again = || {
            let second = again()?;
            Ok(Evaluated { loss: second.loss.map(|loss| loss - shift), ..second })
        };
        let (twice, once): (Vec<_>, Vec<_>) =
            self.all.iter_mut().partition(|member| member.optimizer.gradients() > 1);
        for member in twice {
            let loss = Deferred { clip_norm: None, ..deferred.clone() };
            let context = StepContext { grad_scale: 1.0, max_norm: clip_norm, ..loss.read_into(context)? };
            member.optimizer.step_twice(grads, &context, &mut again)?;
        }
        once.into_iter().try_for_each(|member| member.step(grads, &context, deferred))?;
        match &self.domain {
            Some(domain) => Ok(domain.project(&self.vars)?),
            None => Ok(()),
        }
    }

    /// Waits for a GPU and asks whether it refused a step.
    pub fn settle(&mut self) -> Result<(), RunError> {
        self.all.iter_mut().try_for_each(|member| Ok(member.optimizer.settle()?))
    }

    /// Puts averaged SGD in the place of SGD, if the recipe speaks of it.
    pub fn switch_to_averaged(&mut self) {
        if let Some(averaged) = self.averaged.take() {
            self.all[0] = averaged;
        }
    }

    /// The plateau's look at an evaluation; lower is better.
    pub fn observe(&mut self, metric: f64) {
        self.schedules.rate.observe(metric);
    }

    pub fn plateau(&self) -> PlateauState {
        self.schedules.rate.state
    }

    pub fn set_plateau(&mut self, state: PlateauState) {
        self.schedules.rate.state = state;
    }

    /// All of them, the recipe's first.
    pub fn each(&self) -> impl Iterator<Item = &dyn Optimizer> {
        self.all.iter().map(|member| &*member.optimizer)
    }

    /// The recipe's optimizer.
    pub fn main(&self) -> &dyn Optimizer {
        &*self.all[0].optimizer
    }

    /// The statistics of the last step of the recipe's optimizer by name, if they were asked for and could be had.
    pub fn probed(&self) -> Result<Option<BTreeMap<String, f64>>, RunError> {
        let values = self.main().probe().map(metrics::of_probe);
        match &self.all[0].division {
            Some(division) => ranks::united(division.world(), values),
            None => Ok(values),
        }
    }

    /// The saved states as files: `optimizer.safetensors`, then `optimizer-1.safetensors`, … All processes take part, and the
    /// first one has them.
    pub fn save(&self, world: &World) -> Result<Option<BTreeMap<String, Vec<u8>>>, RunError> {
        let mut files = BTreeMap::new();
        for (i, Member { optimizer, division, .. }) in self.all.iter().enumerate() {
            let state = match division {
                Some(division) => division.join(optimizer.state_dict()?)?,
                None if world.is_first() => Some(optimizer.state_dict()?),
                None => None,
            };
            if let Some(state) = state {
                files.insert(file_name(i), state.to_bytes()?);
            }
        }
        Ok(world.is_first().then_some(files))
    }

    /// Loads what [`Optimizers::save`] made.
    pub fn load(&mut self, files: &BTreeMap<String, Vec<u8>>) -> Result<(), RunError> {
        for (i, Member { optimizer, division, .. }) in self.all.iter_mut().enumerate() {
            let missing = || taper_optim::Error::State(vec![format!("no file {}", file_name(i))]);
            let bytes = files.get(&file_name(i)).ok_or_else(missing)?;
            let state = StateDict::from_bytes(bytes)?;
            optimizer.load_state_dict(&match division {
                Some(division) => division.cut(&state, optimizer.state_dict()?)?,
                None => state,
            })?;
        }
        Ok(())
    }
}

/// An optimizer's momentum, by whichever name; `None` where it has none.
fn momentum(optimizer: &dyn Optimizer) -> Option<f64> {
    let config = optimizer.config();
    ["momentum", "beta1"].iter().find_map(|key| config.get(*key)?.as_f64())
}

/// Points at the group of the recipe that the optimizer refuses.
fn locate(recipe: &Recipe, error: taper_optim::Error) -> RunError {
    let taper_optim::Error::Group { pattern, .. } = &error else { return error.into() };
    match recipe.optimizer.groups.iter().position(|group| group.pattern == *pattern) {
        Some(i) => recipe.error_at(&format!("optimizer.groups[{i}].match"), error.to_string()).into(),
        None => error.into(),
    }
}

fn file_name(i: usize) -> String {
    if i == 0 { "optimizer.safetensors".into() } else { format!("optimizer-{i}.safetensors") }
}

/// Where in a run a step is, for schedules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    pub step: u64,
    pub steps: u64,
    pub epoch: u64,
    pub epochs: u64,
}

impl Time {
    fn at(&self, per: Per) -> (u64, u64) {
        match per {
            Per::Step => (self.step, self.steps),
            Per::Epoch => (self.epoch, self.epochs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn what_does_not_decay_is_known_by_shape_whatever_a_model_calls_it() {
        let matrices =
            ["h.0.attn.c_attn.weight", "lstm.weight_ih_l0", "layer2.0.downsample.0.weight", "weight"];
        let norms = [
            "h.0.ln_1.weight",
            "h.0.ln_1.bias",
            "layers.0.input_layernorm.weight",
            "encoder.LayerNorm.weight",
            "encoder.LayerNorm.bias",
            "q_norm.gamma",
            "layer2.0.downsample.1.weight",
            "layer2.0.downsample.1.bias",
        ];
        let biases = ["h.0.attn.c_attn.bias", "lstm.bias_ih_l0", "bias"];
        let var = |name: &&str| {
            let dims = if matrices.contains(name) { vec![2, 3] } else { vec![3] };
            ((*name).to_owned(), Var::zeros(dims, DType::F32, &Device::Cpu).unwrap())
        };
        let params: Vec<_> = matrices.iter().chain(&norms).chain(&biases).map(var).collect();
        let found = |kinds: &[NoDecay]| -> BTreeSet<&str> {
            let wanted = undecayed(kinds, &params);
            params.iter().map(|(name, _)| name.as_str()).filter(|name| wanted(name)).collect()
        };
        let vectors: BTreeSet<&str> = norms.iter().chain(&biases).copied().collect();
        assert_eq!(found(&[NoDecay::Bias, NoDecay::Norm]), vectors);
        assert_eq!(found(&[NoDecay::Norm]), norms.into_iter().collect());
        assert_eq!(found(&[NoDecay::Bias]), vectors.iter().copied().filter(|n| n.contains("bias")).collect());
        assert_eq!(found(&[]), BTreeSet::new());
    }
}

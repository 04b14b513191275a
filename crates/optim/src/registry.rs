//! Optimizers by name.
use crate::driver::{Group, compile, configure, fields};
use crate::rule::{Config, Info, Reach, Reduce, Rule};
use crate::wrapper::Wrap;
use crate::{Error, Optim, Optimizer, Result, TensorOptim, TensorRule};
use candle_core::Var;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Deref;

/// What an optimizer is built of.
pub struct Setup<'a, C> {
    /// Where wrappers find the optimizers they wrap.
    pub registry: &'a Registry,
    /// The parameters by name.
    pub params: Vec<(String, Var)>,
    /// The hyperparameters, complete and checked.
    pub config: C,
    /// The groups, not yet looked at.
    pub groups: &'a [Group],
}

/// How an optimizer of any kind is made: for [`Registry::register_factory`].
pub trait Factory: Send + Sync + 'static {
    /// The hyperparameters.
    type Config: Config;
    /// The defaults.
    fn defaults(&self) -> Self::Config {
        Self::Config::default()
    }
    /// Refuses what [`Config::check`] cannot see: hyperparameters of an inner optimizer, for example.
    fn check(&self, _registry: &Registry, _config: &Self::Config) -> Result<()> {
        Ok(())
    }
    /// The hyperparameters as they are shown and kept: those of an inner optimizer completed, for example.
    fn resolve(&self, registry: &Registry, config: Self::Config) -> Result<Self::Config> {
        self.check(registry, &config)?;
        Ok(config)
    }
    /// Whether a step needs the loss of the batch.
    fn needs_loss(&self, _registry: &Registry, _config: &Self::Config) -> Result<bool> {
        Ok(false)
    }
    /// How many gradients a step takes.
    fn gradients(&self, _registry: &Registry, _config: &Self::Config) -> Result<usize> {
        Ok(1)
    }
    /// What is kept for every parameter between steps: names of buffers of its size.
    fn buffers(&self, _registry: &Registry, _config: &Self::Config) -> Result<Vec<&'static str>> {
        Ok(Vec::new())
    }
    /// How far it looks when it steps a parameter; nothing is divided of an optimizer that does not say.
    fn reach(&self, _registry: &Registry, _config: &Self::Config) -> Result<Reach> {
        Ok(Reach::All)
    }
    /// The optimizer.
    fn build(&self, setup: Setup<'_, Self::Config>) -> Result<Box<dyn Optimizer>>;
}

/// A [`Factory`] whatever its configuration.
trait AnyFactory: Send + Sync {
    fn defaults(&self) -> Map<String, Value>;
    fn check(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<Map<String, Value>>;
    fn needs_loss(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<bool>;
    fn gradients(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<usize>;
    fn buffers(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<Vec<&'static str>>;
    fn reach(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<Reach>;
    fn build(
        &self,
        of: &Named<'_>,
        params: Vec<(String, Var)>,
        config: &Map<String, Value>,
        groups: &[Group],
    ) -> Result<Box<dyn Optimizer>>;
}

fn checked<F: Factory>(factory: &F, of: &Named<'_>, config: &Map<String, Value>) -> Result<F::Config> {
    factory.resolve(of.registry, configure(of.info.name, &factory.defaults(), config)?)
}

impl<F: Factory> AnyFactory for F {
    fn defaults(&self) -> Map<String, Value> {
        fields(&Factory::defaults(self))
    }
    fn check(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<Map<String, Value>> {
        Ok(fields(&checked(self, of, config)?))
    }
    fn needs_loss(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<bool> {
        Factory::needs_loss(self, of.registry, &checked(self, of, config)?)
    }
    fn gradients(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<usize> {
        Factory::gradients(self, of.registry, &checked(self, of, config)?)
    }
    fn buffers(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<Vec<&'static str>> {
        Factory::buffers(self, of.registry, &checked(self, of, config)?)
    }
    fn reach(&self, of: &Named<'_>, config: &Map<String, Value>) -> Result<Reach> {
        Factory::reach(self, of.registry, &checked(self, of, config)?)
    }
    fn build(
        &self,
        of: &Named<'_>,
        params: Vec<(String, Var)>,
        config: &Map<String, Value>,
        groups: &[Group],
    ) -> Result<Box<dyn Optimizer>> {
        let config = checked(self, of, config)?;
        Factory::build(self, Setup { registry: of.registry, params, config, groups })
    }
}

/// Optimizers of a rule, with the defaults of one of its names.
struct OfRule<R: Rule>(R::Config);

impl<R: Rule> Factory for OfRule<R> {
    type Config = R::Config;
    fn defaults(&self) -> R::Config {
        self.0.clone()
    }
    fn needs_loss(&self, _: &Registry, _: &R::Config) -> Result<bool> {
        Ok(R::LOSS.is_some())
    }
    fn buffers(&self, _: &Registry, config: &R::Config) -> Result<Vec<&'static str>> {
        Ok(R::buffers(config).to_vec())
    }
    fn reach(&self, _: &Registry, _: &R::Config) -> Result<Reach> {
        Ok(Reduce::reach(R::REDUCE))
    }
    fn build(&self, setup: Setup<'_, R::Config>) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Optim::<R>::with_groups(setup.params, setup.config, setup.groups)?))
    }
}

/// Optimizers of a rule for whole tensors.
struct OfTensorRule<R: TensorRule>(R::Config);

impl<R: TensorRule> Factory for OfTensorRule<R> {
    type Config = R::Config;
    fn defaults(&self) -> R::Config {
        self.0.clone()
    }
    fn needs_loss(&self, _: &Registry, _: &R::Config) -> Result<bool> {
        Ok(R::NEEDS_LOSS)
    }
    fn buffers(&self, _: &Registry, config: &R::Config) -> Result<Vec<&'static str>> {
        Ok(R::sized(config).to_vec())
    }
    fn gradients(&self, _: &Registry, _: &R::Config) -> Result<usize> {
        Ok(if R::SECOND.is_some() { 2 } else { 1 })
    }
    fn reach(&self, _: &Registry, _: &R::Config) -> Result<Reach> {
        Ok(R::REACH)
    }
    fn build(&self, setup: Setup<'_, R::Config>) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(TensorOptim::<R>::with_groups(setup.params, setup.config, setup.groups)?))
    }
}

/// A closure as a factory.
struct ByClosure<C, B>(B, PhantomData<fn() -> C>);

impl<C, B> Factory for ByClosure<C, B>
where
    C: Config,
    B: Fn(Setup<'_, C>) -> Result<Box<dyn Optimizer>> + Send + Sync + 'static,
{
    type Config = C;
    fn build(&self, setup: Setup<'_, C>) -> Result<Box<dyn Optimizer>> {
        (self.0)(setup)
    }
}

/// What optimizers of this crate are listed under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// DecGD and what its paper compares it to.
    Paper,
    /// Rates from second moments of gradients.
    SecondMoments,
    /// The sign of a momentum.
    Sign,
    /// Matrices and curvature.
    Matrix,
    /// A rate for each layer.
    LayerWise,
    /// No schedule, or no rate, to choose.
    TuningFree,
    /// Around another optimizer.
    Wrapper,
    /// Registered by somebody else.
    Other,
}

/// One registered optimizer.
pub struct Entry {
    /// Its record.
    pub info: &'static Info,
    /// What it is listed under.
    pub family: Family,
    /// Whether a step needs the loss of the batch, by default.
    pub needs_loss: bool,
    /// All hyperparameters with their defaults.
    pub defaults: Map<String, Value>,
    /// Other names.
    pub aliases: Vec<String>,
    /// What documents its hyperparameters, if anything does: see [`Registry::describe`].
    pub schema: Option<fn(&mut SchemaGenerator) -> Schema>,
    factory: Box<dyn AnyFactory>,
}

/// An [`Entry`] in its registry.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    registry: &'a Registry,
    entry: &'a Entry,
}

impl Deref for Named<'_> {
    type Target = Entry;
    fn deref(&self) -> &Entry {
        self.entry
    }
}

impl Named<'_> {
    /// The complete hyperparameters; unknown keys, wrong types and bad values are errors.
    pub fn check(&self, config: &Map<String, Value>) -> Result<Map<String, Value>> {
        self.entry.factory.check(self, config)
    }

    /// Whether a step needs the loss under a configuration: a wrapper does if the optimizer inside does.
    pub fn needs_loss_with(&self, config: &Map<String, Value>) -> Result<bool> {
        self.entry.factory.needs_loss(self, config)
    }

    /// How many gradients a step takes under a configuration.
    pub fn gradients(&self, config: &Map<String, Value>) -> Result<usize> {
        self.entry.factory.gradients(self, config)
    }

    /// The names of the state buffers under a configuration.
    pub fn buffers(&self, config: &Map<String, Value>) -> Result<Vec<&'static str>> {
        self.entry.factory.buffers(self, config)
    }

    /// How far a step looks under a configuration.
    pub fn reach(&self, config: &Map<String, Value>) -> Result<Reach> {
        self.entry.factory.reach(self, config)
    }

    /// Bytes of state an f32 parameter costs by default.
    pub fn state_bytes(&self) -> usize {
        4 * self.buffers(&Map::new()).map_or(0, |buffers| buffers.len())
    }

    /// An optimizer over `params`.
    pub fn build(
        &self,
        params: Vec<(String, Var)>,
        config: &Map<String, Value>,
        groups: &[Group],
    ) -> Result<Box<dyn Optimizer>> {
        self.entry.factory.build(self, params, config, groups)
    }
}

/// The optimizers a recipe can name.
///
/// ```
/// use taper_optim::Registry;
/// let registry = Registry::builtin();
/// assert!(registry.get("decgd")?.needs_loss);
/// let names: Vec<_> = registry.list("sgd*")?.map(|entry| entry.info.name).collect();
/// assert_eq!(names, ["sgd", "sgdm"]);
/// let error = registry.get("decdg").err().map(|e| e.to_string()).unwrap_or_default();
/// assert!(error.contains("did you mean `decgd`?"));
/// # Ok::<(), taper_optim::Error>(())
/// ```
#[derive(Default)]
pub struct Registry {
    entries: BTreeMap<&'static str, Entry>,
    aliases: BTreeMap<String, &'static str>,
    /// The family of what is registered next.
    family: Option<Family>,
}

impl Registry {
    /// No optimizers.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Adds a rule under each of its names. A taken name is an error, and then none is added.
    pub fn register<R: Rule>(&mut self) -> Result<()> {
        self.add_all(R::names().into_iter().map(|(info, base)| (info, OfRule::<R>(base))).collect())
    }

    /// As [`Registry::register`] for a rule that works on whole tensors.
    pub fn register_tensor<R: TensorRule>(&mut self) -> Result<()> {
        self.add_all(R::names().into_iter().map(|(info, base)| (info, OfTensorRule::<R>(base))).collect())
    }

    /// Adds any optimizer by a closure that builds it, with the hyperparameters of `C`.
    ///
    /// ```
    /// use taper_optim::{Info, Registry, Setup, Sgd, SgdConfig};
    ///
    /// static CAREFUL: Info = Info { name: "careful", about: "SGD at a tenth of the rate", paper: "", year: 2024, formula: "" };
    /// let mut registry = Registry::builtin();
    /// registry.register_with(&CAREFUL, |setup: Setup<SgdConfig>| {
    ///     let config = SgdConfig { lr: setup.config.lr / 10.0, ..setup.config };
    ///     Ok(Box::new(Sgd::with_groups(setup.params, config, setup.groups)?))
    /// })?;
    /// assert!(registry.get("careful")?.defaults.contains_key("weight_decay"));
    /// # Ok::<(), taper_optim::Error>(())
    /// ```
    pub fn register_with<C, B>(&mut self, info: &'static Info, build: B) -> Result<()>
    where
        C: Config,
        B: Fn(Setup<'_, C>) -> Result<Box<dyn Optimizer>> + Send + Sync + 'static,
    {
        self.register_factory(info, ByClosure(build, PhantomData))
    }

    /// Adds any optimizer by a factory that knows more about it than how it is built.
    pub fn register_factory<F: Factory>(&mut self, info: &'static Info, factory: F) -> Result<()> {
        self.add_all(vec![(info, factory)])
    }

    fn add_all<F: Factory>(&mut self, named: Vec<(&'static Info, F)>) -> Result<()> {
        if let Some((info, _)) = named.iter().find(|(info, _)| self.is_taken(info.name)) {
            return Err(Error::Duplicate(info.name.to_owned()));
        }
        for (info, factory) in named {
            let defaults = AnyFactory::defaults(&factory);
            // A wrapper without a default to wrap has no answer.
            let needs_loss =
                Factory::needs_loss(&factory, self, &Factory::defaults(&factory)).unwrap_or(false);
            let (aliases, factory) = (Vec::new(), Box::new(factory));
            let family = self.family.unwrap_or(Family::Other);
            let schema = None;
            let entry = Entry { info, family, needs_loss, defaults, aliases, schema, factory };
            self.entries.insert(info.name, entry);
        }
        Ok(())
    }

    /// Says what the hyperparameters of `name` are, by the doc comments of their type: for editors and `taper keys`. An optimizer
    /// without this is used as any other; its keys are then known by their defaults alone.
    pub fn describe<C: JsonSchema>(&mut self, name: &str) -> Result<()> {
        let name = self.get(name)?.info.name;
        if let Some(entry) = self.entries.get_mut(name) {
            entry.schema = Some(C::json_schema);
        }
        Ok(())
    }

    fn add<R: Rule<Config: JsonSchema>>(&mut self) -> Result<()> {
        self.register::<R>()?;
        R::names().iter().try_for_each(|(info, _)| self.describe::<R::Config>(info.name))
    }

    fn add_tensor<R: TensorRule<Config: JsonSchema>>(&mut self) -> Result<()> {
        self.register_tensor::<R>()?;
        R::names().iter().try_for_each(|(info, _)| self.describe::<R::Config>(info.name))
    }

    /// Lets `alias` stand for `name`.
    pub fn alias(&mut self, alias: &str, name: &str) -> Result<()> {
        if self.is_taken(alias) {
            return Err(Error::Duplicate(alias.to_owned()));
        }
        let name = self.get(name)?.info.name;
        if let Some(entry) = self.entries.get_mut(name) {
            entry.aliases.push(alias.to_owned());
        }
        self.aliases.insert(alias.to_owned(), name);
        Ok(())
    }

    fn is_taken(&self, name: &str) -> bool {
        self.entries.contains_key(name) || self.aliases.contains_key(name)
    }

    /// The optimizer of that name or alias, or an error with the nearest known name.
    pub fn get(&self, name: &str) -> Result<Named<'_>> {
        let name = self.aliases.get(name).copied().unwrap_or(name);
        let entry = self.entries.get(name).ok_or_else(|| {
            let known = self.entries.keys().map(ToString::to_string).collect();
            Error::UnknownOptimizer { name: name.to_owned(), known }
        })?;
        Ok(Named { registry: self, entry })
    }

    /// The optimizers whose names match a glob, by name.
    pub fn list(&self, glob: &str) -> Result<impl Iterator<Item = Named<'_>>> {
        let pattern =
            compile(glob).map_err(|e| Error::Group { pattern: glob.to_owned(), message: e.to_string() })?;
        let matching = self.entries.values().filter(move |entry| pattern.is_match(entry.info.name));
        Ok(matching.map(|entry| Named { registry: self, entry }))
    }

    /// Builds an optimizer by name.
    pub fn build(
        &self,
        name: &str,
        params: Vec<(String, Var)>,
        config: &Map<String, Value>,
    ) -> Result<Box<dyn Optimizer>> {
        self.get(name)?.build(params, config, &[])
    }

    /// All optimizers of this crate.
    pub fn builtin() -> Self {
        let mut registry = Self::empty();
        let mut add = || -> Result<()> {
            use crate::rules::*;
            registry.family = Some(Family::Paper);
            registry.add::<adabelief::AdaBeliefRule>()?;
            registry.add::<adabound::AdaBoundRule>()?;
            registry.add::<adadelta::AdaDeltaRule>()?;
            registry.add::<adagd::AdaGdRule>()?;
            registry.add::<adagrad::AdaGradRule>()?;
            registry.add::<adam::AdamRule>()?;
            registry.add::<aegd::AegdRule>()?;
            registry.add::<decadam::DecAdamRule>()?;
            registry.add::<decgd::DecGdRule>()?;
            registry.add::<padam::PAdamRule>()?;
            registry.add::<radam::RAdamRule>()?;
            registry.add::<rmsprop::RmsPropRule>()?;
            registry.add::<sgd::SgdRule>()?;
            registry.add::<yogi::YogiRule>()?;
            registry.alias("momentum", "sgdm")?;
            registry.alias("nesterov", "nag")?;
            registry.family = Some(Family::SecondMoments);
            registry.add_tensor::<adafactor::AdafactorRule>()?;
            registry.add::<adamax::AdamaxRule>()?;
            registry.add::<adan::AdanRule>()?;
            registry.add::<ademamix::AdEmaMixRule>()?;
            registry.add::<adopt::AdoptRule>()?;
            registry.add::<nadam::NAdamRule>()?;
            registry.add::<nadamw::NAdamWRule>()?;
            registry.family = Some(Family::Sign);
            registry.add::<lion::LionRule>()?;
            registry.family = Some(Family::Matrix);
            registry.add_tensor::<lbfgs::LbfgsRule>()?;
            registry.register_factory(&muon::MUON, muon::MuonFactory)?;
            registry.describe::<muon::MuonConfig>("muon")?;
            registry.add_tensor::<soap::SoapRule>()?;
            registry.family = Some(Family::LayerWise);
            registry.add_tensor::<lamb::LambRule>()?;
            registry.add::<lars::LarsRule>()?;
            registry.family = Some(Family::TuningFree);
            registry.add_tensor::<prodigy::ProdigyRule>()?;
            registry.add::<sf_adamw::SfAdamWRule>()?;
            registry.add::<sf_sgd::SfSgdRule>()?;
            registry.family = Some(Family::Wrapper);
            registry.register_factory(&lookahead::LOOKAHEAD, Wrap::<lookahead::Lookahead>::default())?;
            registry.describe::<lookahead::LookaheadConfig>("lookahead")?;
            registry.register_factory(&sam::SAM, Wrap::<sam::Sam>::default())?;
            registry.describe::<sam::SamConfig>("sam")?;
            registry.family = None;
            Ok(())
        };
        add().expect("the names above are distinct, which `builtin_names_are_distinct` tests");
        registry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_names_are_distinct() {
        assert!(Registry::builtin().get("decgd").is_ok());
    }

    #[test]
    fn a_taken_name_is_refused() {
        let mut registry = Registry::builtin();
        let error = registry.register::<crate::rules::sgd::SgdRule>().unwrap_err();
        assert_eq!(error.to_string(), "optimizer `sgd` is already registered");
        assert!(registry.alias("sgdm", "adam").is_err());
    }
}

//! Processes that share a run: what the first one knows and the others are told, and that all of them do the same.
//!
//! Every process goes through the whole loop and comes to the same numbers; the first one alone has the lock, reads and writes
//! files, looks at the clock and says anything.
use super::checkpoint::Loaded;
use super::inputs::Inputs;
use super::manifest::Stretch;
use super::{Claim, Outcome, RunError, shards};
use crate::recipe::{Recipe, RecipeError, Task};
use candle_core::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use taper_world::{Error, World};

/// Refuses a number of processes that cannot share the recipe's shards in equal parts.
pub fn check_ranks(recipe: &Recipe, ranks: usize) -> Result<(), RecipeError> {
    let shards = recipe.train.shards;
    if ranks > 0 && shards.is_multiple_of(ranks) {
        return Ok(());
    }
    if matches!(recipe.task(), Task::Problem(_)) {
        let message =
            format!("a problem has no batches that {ranks} processes could share: leave --ranks out");
        return Err(recipe.error_at("problem", message));
    }
    let possible = shards::divisors(shards).iter().map(usize::to_string).collect::<Vec<_>>();
    let more = if shards == 1 { "; a larger `train.shards` can be shared by more" } else { "" };
    let message = format!(
        "{shards} shard{} cannot be shared in equal parts by {ranks} processes: it takes {}{more}",
        if shards == 1 { "" } else { "s" },
        possible.join(", ")
    );
    Err(recipe.error_at("train.shards", message))
}

/// Tells the others why this process ends, unless all of them came to the same end.
pub(super) fn part(world: &World, error: &RunError) {
    match error {
        RunError::Interrupted { .. } | RunError::Diverged { .. } => {}
        RunError::World(error) => world.pass_on(error),
        error => world.abort(error.to_string()),
    }
}

/// What the first process found in the run's folder, for all of them.
pub(super) fn claimed(world: &World, folder: &Path, claim: Claim) -> Result<Claim, RunError> {
    if world.is_alone() {
        return Ok(claim);
    }
    let finished = match &claim {
        Claim::Finished(outcome) => Some((&outcome.summary, &outcome.data)),
        Claim::Open(_) => None,
    };
    let told = world.broadcast(&to_json(world, &finished)?)?;
    if world.is_first() {
        return Ok(claim);
    }
    Ok(match from_json(&told)? {
        Some((summary, data)) => Claim::Finished(Box::new(Outcome {
            folder: folder.to_path_buf(),
            summary,
            records: Vec::new(),
            data,
            seconds: 0.0,
        })),
        None => Claim::Open(None),
    })
}

/// Refuses processes that would not compute the same: each says what it has, and all see who differs.
pub(super) fn agree(world: &World, recipe: &Recipe, inputs: &Inputs, now: &Stretch) -> Result<(), RunError> {
    if world.is_alone() {
        return Ok(());
    }
    let digests = inputs.data.iter().map(|content| format!("{content:?}"));
    let weights = inputs.init_from.iter().map(|file| file.sha256.clone());
    let Stretch { taper, revision, features, .. } = now;
    let own = [
        ("recipe", recipe.id().to_owned()),
        // What has no say in the id may still have one in what the processes tell each other, and when.
        ("section `train`", recipe.resolved()["train"].to_string()),
        ("build", format!("taper {taper} {} [{}]", revision.as_deref().unwrap_or(""), features.join(" "))),
        ("arithmetic", now.arithmetic()),
        ("data or first weights", digests.chain(weights).collect::<Vec<_>>().join(", ")),
    ]
    .map(|(what, value)| (what.to_owned(), value));
    let mut all = Vec::new();
    for words in world.gather(&to_json(world, &own.to_vec())?)? {
        all.push(from_json::<Vec<(String, String)>>(&words)?);
    }
    for (rank, theirs) in all.iter().enumerate() {
        let differs = theirs.iter().zip(&all[0]).find(|(theirs, first)| theirs != first);
        if let Some(((what, theirs), (_, first))) = differs {
            return Err(Error::new(rank, format!("has another {what}: {theirs}; rank 0 has {first}")).into());
        }
    }
    Ok(())
}

/// Gives the processes a way from GPU to GPU, where the build has one. All call it.
#[cfg_attr(not(feature = "nccl"), allow(unused_variables))]
pub(super) fn connect(world: &World, device: &Device) -> Result<(), RunError> {
    #[cfg(feature = "nccl")]
    if let Device::Cuda(device) = device {
        world.connect_devices(device.cuda_stream())?;
    }
    Ok(())
}

/// Where the run goes on from.
pub(super) struct Start {
    pub loaded: Option<Loaded>,
    /// The lines of metrics up to there; read for the others only.
    pub metrics: String,
}

/// Where the first process found that the run goes on from, for all of them.
pub(super) fn start(world: &World, folder: &Path, loaded: Option<Loaded>) -> Result<Start, RunError> {
    if world.is_alone() {
        return Ok(Start { loaded, metrics: String::new() });
    }
    let mut parts: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    if let Some(Loaded { state, files }) = &loaded {
        let path = folder.join("metrics.jsonl");
        let mut metrics = fs::read(&path).map_err(RunError::io(&path))?;
        metrics.truncate(usize::try_from(state.metrics_bytes).unwrap_or(usize::MAX));
        parts.extend(files.iter().map(|(name, bytes)| (format!("files/{name}"), bytes.clone())));
        parts.extend([("state".into(), to_json(world, state)?), ("metrics".into(), metrics)]);
    }
    let told = world.broadcast(&pack(&parts))?;
    if world.is_first() {
        return Ok(Start { loaded, metrics: String::new() });
    }
    let mut parts = unpack(&told).ok_or_else(|| Error::new(0, "tells no checkpoint that can be read"))?;
    let Some(state) = parts.remove("state") else {
        return Ok(Start { loaded: None, metrics: String::new() });
    };
    let metrics = String::from_utf8_lossy(&parts.remove("metrics").unwrap_or_default()).into_owned();
    let file = |(name, bytes): (String, Vec<u8>)| Some((name.strip_prefix("files/")?.to_owned(), bytes));
    let files = parts.into_iter().filter_map(file).collect();
    Ok(Start { loaded: Some(Loaded { state: from_json(&state)?, files }), metrics })
}

/// What the first process makes, for all of them.
pub(super) fn told<T: Serialize + DeserializeOwned>(
    world: &World,
    make: impl FnOnce() -> Result<T, RunError>,
) -> Result<T, RunError> {
    if !world.is_first() {
        return from_json(&world.broadcast(&[])?);
    }
    let made = make()?;
    if !world.is_alone() {
        world.broadcast(&to_json(world, &made)?)?;
    }
    Ok(made)
}

/// Named numbers of all processes, the later ones' in the place of the earlier ones' of the same name; `None` where one has none.
pub(super) fn united(
    world: &World,
    mine: Option<BTreeMap<String, f64>>,
) -> Result<Option<BTreeMap<String, f64>>, RunError> {
    // Bits: JSON has no word for numbers that are not finite.
    let bits = mine.map(|mine| mine.into_iter().map(|(name, value)| (name, value.to_bits())).collect());
    let mut all = BTreeMap::new();
    let mut whole = true;
    for said in world.gather(&to_json::<Option<BTreeMap<String, u64>>>(world, &bits)?)? {
        let said: Option<BTreeMap<String, u64>> = from_json(&said)?;
        whole &= said.is_some();
        all.extend(said.into_iter().flatten().map(|(name, bits)| (name, f64::from_bits(bits))));
    }
    Ok(whole.then_some(all))
}

fn to_json<T: Serialize>(world: &World, value: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(value).map_err(|e| Error::new(world.rank(), format!("cannot say what it has: {e}")))
}

fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RunError> {
    Ok(serde_json::from_slice(bytes).map_err(|e| Error::new(0, format!("cannot be understood: {e}")))?)
}

/// Named parts as one message: their number, then each with its length before it.
fn pack(parts: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let with_length = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
    let mut message = (parts.len() as u64).to_le_bytes().to_vec();
    for (name, bytes) in parts {
        message.extend(with_length(name.as_bytes()));
        message.extend(with_length(bytes));
    }
    message
}

/// `None` for a message that is not whole.
fn unpack(mut message: &[u8]) -> Option<BTreeMap<String, Vec<u8>>> {
    let mut parts = BTreeMap::new();
    for _ in 0..number(&mut message)? {
        let name = String::from_utf8(sized(&mut message)?).ok()?;
        parts.insert(name, sized(&mut message)?);
    }
    message.is_empty().then_some(parts)
}

fn number(message: &mut &[u8]) -> Option<u64> {
    let (number, rest) = message.split_first_chunk()?;
    *message = rest;
    Some(u64::from_le_bytes(*number))
}

fn sized(message: &mut &[u8]) -> Option<Vec<u8>> {
    let length = usize::try_from(number(message)?).ok()?;
    let (bytes, rest) = message.split_at_checked(length)?;
    *message = rest;
    Some(bytes.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_parts_come_back() {
        let parts = BTreeMap::from([
            ("a".to_owned(), vec![1, 2]),
            ("empty".into(), vec![]),
            ("z".into(), vec![0; 300]),
        ]);
        assert_eq!(unpack(&pack(&parts)), Some(parts.clone()));
        assert_eq!(unpack(&pack(&BTreeMap::new())), Some(BTreeMap::new()));
        let message = pack(&parts);
        assert!((0..message.len()).all(|length| unpack(&message[..length]).is_none()));
        assert_eq!(unpack(&[&message[..], &[0]].concat()), None);
    }
}

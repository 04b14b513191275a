//! The evaluation of a network, shared out among the processes of a run.
//!
//! Who computes what changes no bit: the batches, windows and parts that are evaluated are the same for any number of processes,
//! and so is the order in which they are added up.
use super::{Batch, Network, Reading, Source, read, tokens};
use crate::run::RunError;
use crate::run::checkpoint::Sums;
use crate::run::figure::{Figure, read_all};
use crate::run::metrics::Split;
use crate::run::task::Seen;
use std::ops::Range;
use taper_data::{TextStream, Window};
use taper_models::Mode;
use taper_world::{Tree, World};

/// Whether there is to be another batch, shown the last.
type More<'a> = &'a mut dyn FnMut(&Seen) -> Result<bool, RunError>;

impl Network {
    /// The sums over a split.
    pub(super) fn judge(&mut self, split: Split, more: More) -> Result<Sums, RunError> {
        match (&self.source, split) {
            (Source::Images { val: Some(set), .. }, Split::Val)
            | (Source::Images { seen: set, .. }, Split::Train)
            | (Source::Images { test: set, .. }, _) => {
                // Batches of images know nothing of each other: each process has a block of them.
                let own = self.shards.world().share(set.batches());
                let batches = self.image_batches(set, 0, own.start).take(own.len());
                let mut figures = Figures::default();
                for batch in batches {
                    if !self.measure(&batch?, &mut figures, more)? {
                        break;
                    }
                }
                let all = figures.of_all(self.shards.world())?;
                Ok(all.into_iter().fold(Sums::default(), Sums::plus))
            }
            (Source::Text { reading: Reading::Windows { train, val, test, .. }, .. }, _) => {
                let windows = match split {
                    Split::Train => train.in_batches(test.at_a_time()),
                    Split::Val => val.clone(),
                    _ => test.clone(),
                };
                let mut figures = Figures::default();
                // Windows know nothing of each other either.
                for number in self.shards.world().share(windows.cover()) {
                    self.model.set_carry(&[])?;
                    let batch = read(windows.covering(number), 1.0, &self.device)?;
                    if !self.measure(&batch, &mut figures, more)? {
                        break;
                    }
                }
                let all = figures.of_all(self.shards.world())?;
                Ok(all.into_iter().fold(Sums::default(), Sums::plus))
            }
            (Source::Text { reading: Reading::Streams { train, val, test, lengths }, .. }, _) => {
                let stream = match split {
                    Split::Train => train.in_streams(test.streams())?,
                    Split::Val => val.clone(),
                    _ => test.clone(),
                };
                let windows = stream.fixed_windows(lengths.base).collect::<Vec<_>>();
                self.read_on(&stream, &windows, more)
            }
        }
    }

    /// The sums over windows of text, of which each goes on from the one before.
    ///
    /// The streams are cut into parts, and each is read alone. Each process has a block of all windows of all parts; of its first part
    /// it reads the windows before only as far as the state that they leave.
    fn read_on(&mut self, stream: &TextStream, windows: &[Window], more: More) -> Result<Sums, RunError> {
        let parts = self.shards.parts(stream.streams());
        let own = self.shards.world().share(parts.len() * windows.len());
        let mut figures = Figures::default();
        'parts: for (part, place) in parts.iter().enumerate() {
            let first = part * windows.len();
            let within = |number: usize| number.clamp(first, first + windows.len()) - first;
            let own = within(own.start)..within(own.end);
            if own.is_empty() {
                continue;
            }
            self.model.set_carry(&[])?;
            for (number, window) in windows[..own.end].iter().enumerate() {
                let batch = tokens(stream, *window, &self.device)?.part(1, place)?;
                if number < own.start {
                    self.model.advance(&batch.input, Mode::Eval)?;
                } else if !self.measure(&batch, &mut figures, more)? {
                    break 'parts;
                }
            }
        }
        let all = figures.of_all(self.shards.world())?;
        let tree = Tree::full(parts.len());
        let mut sums = Sums::default();
        for number in 0..windows.len() {
            let mut leaf = |node: &Range<usize>| {
                let place = node.start * windows.len() + number;
                Ok::<_, RunError>(all.get(place).filter(|_| node.len() == 1).cloned())
            };
            let of_window = tree.fold(0..parts.len(), &mut leaf, &mut Sums::plus)?;
            sums = of_window.into_iter().fold(sums, Sums::plus);
        }
        Ok(sums)
    }

    /// Evaluates a batch. One without a target that counts is seen, and counts as nothing.
    fn measure(&mut self, batch: &Batch, figures: &mut Figures, more: More) -> Result<bool, RunError> {
        let counted = self.counted(batch)?;
        if counted == 0 {
            figures.measured.extend([0.0, 0.0].map(Figure::Known));
            figures.samples.push(0);
            // What is carried goes on all the same.
            self.model.advance(&batch.input, Mode::Eval)?;
            return more(&Seen { samples: batch.samples, logits: None, target: &batch.target });
        }
        let loss = match self.is_classification() {
            true => self.judged(&batch.input, &batch.target)?,
            false => self.model.loss(&batch.input, &batch.target, Mode::Eval)?,
        };
        figures.measured.extend([Figure::of(&loss.nll)?, self.correct(&loss, batch)?]);
        figures.samples.push(counted);
        more(&Seen { samples: batch.samples, logits: loss.logits.as_ref(), target: &batch.target })
    }
}

/// What a process has measured, batch by batch; a GPU tells it when all is done.
#[derive(Default)]
struct Figures {
    /// Mean loss and right answers of each batch.
    measured: Vec<Figure>,
    /// What it is the mean of.
    samples: Vec<u64>,
}

impl Figures {
    /// The sums of each batch of all processes, in the order of batches, of which each has a block.
    fn of_all(self, world: &World) -> Result<Vec<Sums>, RunError> {
        let measured = read_all(&self.measured)?;
        let words = measured.chunks_exact(2).zip(self.samples).flat_map(|(of, samples)| {
            [of[0].to_le_bytes(), of[1].to_le_bytes(), samples.to_le_bytes()].concat()
        });
        let all = world.gather(&words.collect::<Vec<u8>>())?.concat();
        let word = |bytes: &[u8]| <[u8; 8]>::try_from(bytes).unwrap_or_default();
        let number = |bytes: &[u8]| f64::from_le_bytes(word(bytes));
        let sums = |of: &[u8]| {
            let mut sums = Sums::default();
            sums.add(number(&of[..8]), number(&of[8..16]), u64::from_le_bytes(word(&of[16..])));
            sums
        };
        Ok(all.chunks_exact(24).map(sums).collect())
    }
}

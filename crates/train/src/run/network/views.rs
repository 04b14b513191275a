//! Several views of the images of an evaluation, whose logits are averaged.
use super::Network;
use crate::recipe::{EvalAugment, Views, When};
use crate::run::RunError;
use candle_core::{Device, Tensor};
use taper_models::{Loss, Mode, ops};

impl Network {
    /// The views that evaluations show now; `None` where each image is shown once and as it is.
    fn views(&self) -> Option<Views> {
        let EvalAugment { kind, when } = self.eval_augment?;
        (when == When::Always || self.last).then_some(kind)
    }

    /// The loss of a batch in an evaluation.
    pub(super) fn judged(&mut self, input: &Tensor, target: &Tensor) -> Result<Loss, RunError> {
        let Some(views) = self.views() else { return Ok(self.model.loss(input, target, Mode::Eval)?) };
        let logits = self.averaged(views, input)?;
        let nll = ops::cross_entropy(&logits, target, &Default::default())?;
        Ok(Loss { total: nll.clone(), nll, logits: Some(logits) })
    }

    /// The mean logits of views of images, `[n, h, w, c]`.
    fn averaged(&mut self, views: Views, images: &Tensor) -> Result<Tensor, RunError> {
        let own = self.both_ways(images)?;
        if views == Views::Flip {
            return Ok(own);
        }
        let (height, width) = (images.dim(1)?, images.dim(2)?);
        let mut shifted = Vec::new();
        for by in [Shift::Down, Shift::Up] {
            let moved = by.along(images, 1, height)?;
            shifted.push(self.both_ways(&by.along(&moved, 2, width)?)?);
        }
        let shifted = ((&shifted[0] + &shifted[1])? * 0.5)?;
        Ok(((own + shifted)? * 0.5)?)
    }

    /// The mean logits of images and of their mirror images.
    fn both_ways(&mut self, images: &Tensor) -> Result<Tensor, RunError> {
        let width = images.dim(2)? as u32;
        let mirrored = images.index_select(&places((0..width).rev(), images.device())?, 2)?;
        let [own, other] = [images, &mirrored].map(|images| self.model.logits(images, Mode::Eval));
        Ok(((own? + other?)? * 0.5)?)
    }
}

fn places(of: impl Iterator<Item = u32>, device: &Device) -> candle_core::Result<Tensor> {
    Tensor::new(of.collect::<Vec<_>>(), device)
}

/// By one pixel along an axis of at least two; the pixel that comes in is the one behind the edge, mirrored.
#[derive(Clone, Copy)]
enum Shift {
    /// Towards larger numbers: the window at the start of the padded image.
    Down,
    /// Towards smaller ones: the window at its end.
    Up,
}

impl Shift {
    fn along(self, images: &Tensor, axis: usize, size: usize) -> candle_core::Result<Tensor> {
        let size = size as u32;
        let from = match self {
            Self::Down => places(std::iter::once(1).chain(0..size - 1), images.device())?,
            Self::Up => places((1..size).chain(std::iter::once(size - 2)), images.device())?,
        };
        images.index_select(&from, axis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Result;

    #[test]
    fn shifts_are_windows_of_the_image_padded_by_its_reflection() -> Result<()> {
        let row = Tensor::new(&[0u8, 1, 2, 3], &Device::Cpu)?.reshape((1, 1, 4, 1))?;
        let moved = |by: Shift| by.along(&row, 2, 4)?.flatten_all()?.to_vec1::<u8>();
        // Padded: 1 0 1 2 3 2.
        assert_eq!(moved(Shift::Down)?, [1, 0, 1, 2]);
        assert_eq!(moved(Shift::Up)?, [1, 2, 3, 2]);
        Ok(())
    }
}
